"""One layer of BAGEL's Mixture of Transformers on a packed sequence: what its forward_train computes.

A pack is samples laid end to end: activations are (T, hidden), without a batch axis and without padding. Each row is
one expert's: `understanding` (text, markers, ViT tokens) or `generation` (VAE latents). All that is done to a row
by itself (norms, projections, MLP) has two sets of weights. Rows meet in attention only, under the pack's mask.

    q, k, v = project(x)                               RMSNorm, linear, RMSNorm of each head of q and k
    x = x + output(attention(rope(q), rope(k), v))     under the pack's mask
    x = x + mlp(x)                                     RMSNorm, SwiGLU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnforge.bagel.mot.attention import Operator


@dataclass(frozen=True)
class MotConfig:
    """Sizes of a decoder; those of BAGEL's are in CONFIGS."""

    hidden: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mlp: int
    layers: int
    vocab: int
    latent_dim: int = 64  # 2 x 2 patches of 16 VAE channels
    vision_dim: int = 1152  # SigLIP's features per token
    places: int = 4096  # positions inside one image
    rope_base: float = 1e6
    eps: float = 1e-6


CONFIGS = {
    "tiny": MotConfig(64, 4, 2, 16, 128, 2, vocab=64, latent_dim=8, vision_dim=12, places=64),
    "small": MotConfig(512, 8, 2, 64, 1408, 4, vocab=1024, latent_dim=64, vision_dim=128, places=4096),
    "0.5B": MotConfig(896, 14, 2, 64, 4864, 24, vocab=151936),
    "1.5B": MotConfig(1536, 12, 2, 128, 8960, 28, vocab=151936),
    "7B": MotConfig(3584, 28, 4, 128, 18944, 28, vocab=152064),
}


@dataclass(frozen=True)
class Shared:
    """Data of one micro-step that all layers share.

    Rows of the experts: int64, together every row of the pack once. `cos`, `sin`: (T, 1, head_dim), float32.
    `mask`: what the layers' attention operator made for this pack.
    """

    understanding: Tensor
    generation: Tensor
    cos: Tensor
    sin: Tensor
    mask: Any


class Experts(nn.Module):
    """Two modules of one kind: one for understanding rows, one for generation rows."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.understanding = make()
        self.generation = make()

    def forward(self, x: Tensor, shared: Shared) -> Any:
        """x (T, ...), each row through its expert; the results are in the order of x's rows."""
        # index_select, not x[rows]: its gradient adds rows without sorting them first.
        first = self.understanding(x.index_select(0, shared.understanding))
        second = self.generation(x.index_select(0, shared.generation))
        if isinstance(first, Tensor):
            return _merge(first, second, shared)
        return tuple(_merge(a, b, shared) for a, b in zip(first, second, strict=True))


def _merge(first: Tensor, second: Tensor, shared: Shared) -> Tensor:
    whole = first.new_empty(first.shape[0] + second.shape[0], *first.shape[1:])
    return whole.index_copy_(0, shared.understanding, first).index_copy_(0, shared.generation, second)


class Project(nn.Module):
    """Rows (N, hidden) to q (N, heads_q, head_dim), k and v (N, heads_kv, head_dim), q and k normed by head."""

    def __init__(self, config: MotConfig) -> None:
        super().__init__()
        self.heads = (config.heads_q, config.heads_kv, config.heads_kv)
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.linear = nn.Linear(config.hidden, sum(self.heads) * config.head_dim)
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.linear(self.norm(x)).unflatten(1, (sum(self.heads), -1)).split(self.heads, 1)
        return self.q_norm(q), self.k_norm(k), v


class Mlp(nn.Module):
    """RMSNorm, then SwiGLU."""

    def __init__(self, config: MotConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.gate = nn.Linear(config.hidden, config.mlp, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class MotAttention(nn.Module):
    """Packed attention of two experts: separate projections, one attention over all rows."""

    def __init__(self, config: MotConfig, operator: Operator) -> None:
        super().__init__()
        self.operator = operator
        self.project = Experts(lambda: Project(config))
        self.output = Experts(lambda: nn.Linear(config.heads_q * config.head_dim, config.hidden, bias=False))

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x (T, hidden) before the norm; returns what is added to it."""
        q, k, v = self.project(x, shared)
        q, k = (rotate(part, shared.cos, shared.sin) for part in (q, k))
        out = self.operator(q, k, v, shared.mask)
        result: Tensor = self.output(out.flatten(1), shared)
        return result


class MotLayer(nn.Module):
    """Attention and MLP, each added to its input. The unit that is checkpointed and sharded."""

    def __init__(self, config: MotConfig, operator: Operator) -> None:
        super().__init__()
        self.attention = MotAttention(config, operator)
        self.mlp = Experts(lambda: Mlp(config))

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x (T, hidden)."""
        x = x + self.attention(x, shared)
        result: Tensor = x + self.mlp(x, shared)
        return result


def angles(positions: Tensor, config: MotConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, head_dim) float32 of rotary embeddings at `positions` (T)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = config.rope_base ** (-exponent / config.head_dim)
    angle = (positions.float()[:, None] * frequency).repeat(1, 2)[:, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, head_dim) rotated by its rows' angles, pairing dimension d with d + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)
