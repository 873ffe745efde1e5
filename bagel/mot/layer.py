"""One layer of BAGEL's Mixture of Transformers on a packed sequence: what its forward_train computes.

A pack is samples laid end to end: T rows without a batch axis and without padding. Each row is one expert's:
`understanding` (text, markers, ViT tokens) or `generation` (VAE latents). All that is done to a row by itself (norms,
projections, MLP) has two sets of weights. Rows meet in attention only, under the pack's mask.

Activations between layers are a pair: the rows of the understanding expert (Tu, hidden) and those of the generation
expert (Tg, hidden), in the order of `Shared`. Only attention needs all rows in the pack's order (`apart`, `together`).

    q, k, v = project(x)                               RMSNorm, linear
    q, k = rope(norm(q)), rope(norm(k))                RMSNorm of each head, rotary embedding
    x = x + output(attention(q, k, v))                 under the pack's mask
    x = x + mlp(x)                                     RMSNorm, SwiGLU

With our operator, the second line and the way from experts' rows to the pack's order are one kernel (`qk_norm_rope`).
SwiGLU's activation (`swiglu`) and each RMSNorm with the additions beside it (norm.py) are one kernel a direction on a
GPU where there is a Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnforge.bagel.mot.attention import Operator
from attnforge.bagel.mot.norm import add_normed, normed
from attnforge.bagel.mot.recomputation import Held
from attnforge.bagel.mot.swiglu import swiglu
from attnforge.runtime.prologue import ExpertRows, qk_norm_rope, rope_tables

Pair = tuple[Tensor, Tensor]  # rows of the understanding expert, rows of the generation expert


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

    Rows of the experts: int64, together every row of the pack once; `experts`: the same by row. `cos`, `sin`:
    (T, head_dim / 2), float32. `mask`: what the layers' attention operator made for this pack.
    """

    understanding: Tensor
    generation: Tensor
    experts: ExpertRows
    cos: Tensor
    sin: Tensor
    mask: Any


def share(
    understanding: Tensor, generation: Tensor, positions: Tensor, config: MotConfig, mask: Any
) -> Shared:
    """`Shared` of a pack whose rows have rotary positions `positions` (T)."""
    experts = ExpertRows(understanding, generation, positions.shape[0])
    cos, sin = rope_tables(positions, config.head_dim, config.rope_base)
    return Shared(understanding, generation, experts, cos, sin, mask)


class _Apart(torch.autograd.Function):
    """`apart`. Autograd's own gradient of index_select would add rows to zeros, one atomic operation an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, understanding: Tensor, generation: Tensor) -> Pair:
        ctx.save_for_backward(understanding, generation)
        return x.index_select(0, understanding), x.index_select(0, generation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _merge(*gradients, *ctx.saved_tensors), None, None


class _Together(torch.autograd.Function):
    """`together`, the inverse of `apart`."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, understanding: Tensor, generation: Tensor) -> Tensor:
        ctx.save_for_backward(understanding, generation)
        return _merge(first, second, understanding, generation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        first, second = (gradients[0].index_select(0, rows) for rows in ctx.saved_tensors)
        return first, second, None, None


def _merge(first: Tensor, second: Tensor, understanding: Tensor, generation: Tensor) -> Tensor:
    whole = first.new_empty(first.shape[0] + second.shape[0], *first.shape[1:])
    if torch.compiler.is_compiling():  # with torch 2.11, writes in a Function.forward make its gradients zero
        return whole.index_copy(0, understanding, first).index_copy(0, generation, second)
    # A thread of index_copy_ moves one element: 8 bytes, where rows can be read so.
    words = torch.int64 if first.shape[-1] * first.element_size() % 8 == 0 else first.dtype
    to, first, second = (x.contiguous().view(words) for x in (whole, first, second))
    to.index_copy_(0, understanding, first).index_copy_(0, generation, second)
    return whole


def apart(x: Tensor, shared: Shared) -> Pair:
    """The rows of each expert of x (T, ...), whose rows are in the order of the pack."""
    parts: Pair = _Apart.apply(x, shared.understanding, shared.generation)  # type: ignore[no-untyped-call]
    return parts


def together(x: Pair, shared: Shared) -> Tensor:
    """The inverse of `apart`: all rows (T, ...) in the order of the pack."""
    whole: Tensor = _Together.apply(*x, shared.understanding, shared.generation)  # type: ignore[no-untyped-call]
    return whole


class Experts(nn.Module):
    """Two modules of one kind: one for understanding rows, one for generation rows."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.understanding = make()
        self.generation = make()

    def forward(self, x: Pair) -> Pair:
        """Each row through its expert."""
        return self.understanding(x[0]), self.generation(x[1])


class Project(nn.Module):
    """Rows (N, hidden) to heads (N, heads_q + 2 heads_kv, head_dim): those of q, of k, of v; not normed yet.

    Also returns the rows, for the residual stream.
    """

    def __init__(self, config: MotConfig) -> None:
        super().__init__()
        self.heads = (config.heads_q, config.heads_kv, config.heads_kv)
        self.eps = config.eps
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.linear = nn.Linear(config.hidden, sum(self.heads) * config.head_dim)
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps)

    def forward(self, x: Tensor) -> Pair:
        """x and its heads."""
        x, rows = normed(x, self.norm)
        return x, self.linear(rows).unflatten(1, (sum(self.heads), -1))

    def norm_weights(self) -> tuple[Tensor, Tensor]:
        """Of the norms of q and k."""
        return self.q_norm.weight, self.k_norm.weight

    def normed(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, q and k normed by head."""
        *parts, v = heads.split(self.heads, 1)
        q, k = (
            F.rms_norm(x, weight.shape, weight, self.eps)
            for x, weight in zip(parts, self.norm_weights(), strict=True)
        )
        return q, k, v


class Mlp(nn.Module):
    """RMSNorm, then SwiGLU."""

    def __init__(self, config: MotConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.hidden, bias=False)

    def hidden(self, x: Tensor, y: Tensor) -> Pair:
        """x + y, and what `down` multiplies (N, mlp)."""
        x, rows = add_normed(x, y, self.norm)
        return x, swiglu(self.gate_up(rows))


class Mlps(nn.Module):
    """The MLP of each expert. A checkpoint's recomputation omits the last product of both."""

    def __init__(self, config: MotConfig) -> None:
        super().__init__()
        self.understanding = Mlp(config)
        self.generation = Mlp(config)

    def forward(self, x: Pair, y: Pair) -> Pair:
        """x + y + mlp(x + y)."""
        experts = self.understanding, self.generation
        (x0, first), (x1, second) = (
            expert.hidden(*rows) for expert, *rows in zip(experts, x, y, strict=True)
        )
        first, second = Held(first, second).results(*(expert.down for expert in experts))
        return x0 + first, x1 + second


class MotAttention(nn.Module):
    """Packed attention of two experts: separate projections, one attention over all rows."""

    def __init__(self, config: MotConfig, operator: Operator) -> None:
        super().__init__()
        self.operator = operator
        self.project = Experts(lambda: Project(config))
        self.output = Experts(lambda: nn.Linear(config.heads_q * config.head_dim, config.hidden, bias=False))

    def forward(self, x: Pair, shared: Shared) -> tuple[Pair, Pair]:
        """x before the norm; returns x and what is added to it."""
        (x0, first), (x1, second) = self.project(x)
        heads = first, second
        prologue = self._fused_prologue if self.operator.fused_prologue else self._prologue
        q, k, v = prologue(heads, shared)
        out = self.operator(q, k, v, shared.mask)
        return (x0, x1), self.output(apart(out.flatten(1), shared))

    def _fused_prologue(self, heads: Pair, shared: Shared) -> tuple[Tensor, ...]:
        """q, k and v (T, heads, head_dim) from both experts' projections, in one kernel."""
        first, second = self._experts()
        q_weight, k_weight = zip(first.norm_weights(), second.norm_weights(), strict=True)
        return qk_norm_rope(
            heads,
            heads=first.heads[:2],
            cos=shared.cos,
            sin=shared.sin,
            q_weight=q_weight,
            k_weight=k_weight,
            experts=shared.experts,
            eps=first.eps,
        )

    def _prologue(self, heads: Pair, shared: Shared) -> tuple[Tensor, ...]:
        """The same step by step, as BAGEL's modules do it."""
        parts = [expert.normed(x) for expert, x in zip(self._experts(), heads, strict=True)]
        q, k, v = (together(pair, shared) for pair in zip(*parts, strict=True))
        return rotate(q, shared.cos, shared.sin), rotate(k, shared.cos, shared.sin), v

    def _experts(self) -> tuple[Project, Project]:
        first, second = self.project.understanding, self.project.generation
        assert isinstance(first, Project)
        assert isinstance(second, Project)
        return first, second


class MotLayer(nn.Module):
    """Attention and MLP, each added to its input. The unit that is checkpointed and sharded."""

    def __init__(self, config: MotConfig, operator: Operator) -> None:
        super().__init__()
        self.attention = MotAttention(config, operator)
        self.mlp = Mlps(config)

    def forward(self, x: Pair, shared: Shared) -> Pair:
        """The rows of both experts, before and after."""
        x, y = self.attention(x, shared)
        result: Pair = self.mlp(x, y)
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, head_dim) rotated by its rows' angles, pairing dimension d with d + head_dim / 2."""
    first, second = x.chunk(2, -1)
    cos, sin = (table.repeat(1, 2)[:, None].to(x.dtype) for table in (cos, sin))
    return x * cos + torch.cat((-second, first), -1) * sin
