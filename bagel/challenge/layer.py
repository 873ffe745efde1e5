"""The challenge's training step: one packed mixture-of-transformers layer that calls attention per sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[
    [Tensor, Tensor, Tensor, Tensor], Tensor
]  # q, k, v (1, H, S, D), mask (S, S) True = blocked


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer, and the (fewest, most) tokens of a sample by type."""

    hidden: int = 2048
    heads: int = 32
    heads_kv: int = 32
    text: tuple[int, int] = (1, 1024)
    image: tuple[int, int] = (1024, 2048)


# Sizes that a CPU finishes in seconds.
SMALL = Sizes(hidden=256, heads=4, heads_kv=4, text=(1, 96), image=(64, 160))


@dataclass(frozen=True)
class Pack:
    """Samples one behind the other; `kinds` are "text" (causal), "image" and "noise" (each sees all of itself)."""

    kinds: tuple[str, ...]
    rows: tuple[int, ...]

    def masks(self, device: torch.device) -> list[Tensor]:
        """One (rows, rows) bool tensor a sample, True = blocked."""
        ones = (torch.ones(n, n, dtype=torch.bool, device=device) for n in self.rows)
        return [x.triu_(1) if kind == "text" else x.zero_() for kind, x in zip(self.kinds, ones, strict=True)]

    def of_noise(self, device: torch.device) -> Tensor:
        """The tokens of the generation experts, bool (tokens)."""
        kinds = [torch.full((n,), kind == "noise") for kind, n in zip(self.kinds, self.rows, strict=True)]
        return torch.cat(kinds).to(device)


def draw_pack(sizes: Sizes, seed: int) -> Pack:
    """One to five samples of random types and lengths; the same for the same seed."""
    rng = random.Random(seed)
    kinds = tuple(rng.choice(("text", "image", "noise")) for _ in range(rng.randint(1, 5)))
    return Pack(kinds, tuple(rng.randint(*(sizes.text if kind == "text" else sizes.image)) for kind in kinds))


class Expert(nn.Module):
    """Projections and norms of one kind of token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.heads * dim)
        self.k = nn.Linear(sizes.hidden, sizes.heads_kv * dim)
        self.v = nn.Linear(sizes.hidden, sizes.heads_kv * dim)
        self.o = nn.Linear(sizes.heads * dim, sizes.hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(dim, eps=1e-6)

    def project(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (tokens, heads, dim), q and k normalised."""
        q, k, v = (layer(x).unflatten(-1, (-1, dim)) for layer in (self.q, self.k, self.v))
        return self.q_norm(q), self.k_norm(k), v


class MoTLayer(nn.Module):
    """BAGEL's attention layer: two experts by token kind, rotary positions, one float32 attention call a sample."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dim = sizes.hidden // sizes.heads
        self.group = sizes.heads // sizes.heads_kv
        self.understanding, self.generation = Expert(sizes), Expert(sizes)

    def forward(self, x: Tensor, pack: Pack, masks: list[Tensor], attention: Attention) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden); `masks` as Pack.masks makes them."""
        noise = pack.of_noise(x.device)[:, None]
        pairs = zip(
            self.understanding.project(x, self.dim), self.generation.project(x, self.dim), strict=True
        )
        q, k, v = (torch.where(noise[..., None], gen, und).float() for und, gen in pairs)
        cos, sin = self._angles(pack, x.device)
        q, k = (
            y * cos + torch.cat((-y[..., self.dim // 2 :], y[..., : self.dim // 2]), -1) * sin for y in (q, k)
        )
        outs, start = [], 0
        for rows, mask in zip(pack.rows, masks, strict=True):
            part = (y[start : start + rows].transpose(0, 1)[None] for y in (q, k, v))
            q_one, k_one, v_one = (y.contiguous() for y in part)
            if self.group > 1:
                k_one, v_one = (y.repeat_interleave(self.group, dim=1) for y in (k_one, v_one))
            with torch.autocast(x.device.type, enabled=False):
                outs.append(attention(q_one, k_one, v_one, mask)[0].transpose(0, 1))
            start += rows
        flat = torch.cat(outs).flatten(1)
        result: Tensor = torch.where(noise, self.generation.o(flat), self.understanding.o(flat))
        return result

    def _angles(self, pack: Pack, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary embedding, (tokens, 1, dim); images count as one position."""
        position = []
        for kind, rows in zip(pack.kinds, pack.rows, strict=True):
            position.append(torch.arange(rows) if kind == "text" else torch.zeros(rows))
        powers = torch.arange(self.dim // 2) / (self.dim // 2)
        angle = (torch.cat(position)[:, None] / 1e6**powers).repeat(1, 2)[:, None].to(device)
        return angle.cos(), angle.sin()


def stepwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The reference: scores, mask, softmax, product, each a tensor, all in float32."""
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1).masked_fill(mask, 0)
    out: Tensor = weights @ v.float()
    return out.to(q.dtype)


def native(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's own: scaled_dot_product_attention with the mask as SDPA takes it."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.logical_not())


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The method of the challenge's own operator: per batch entry and head, three kernels with scores in
    device memory and a wait for the device. Its products are torch's, which are faster than the supplied ones."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = (q[b, h].float() @ k[b, h].float().T) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(mask, -torch.inf).softmax(-1).masked_fill(mask, 0)
            out[b, h] = weights @ v[b, h].float()
            if q.is_cuda:
                torch.cuda.synchronize(q.device)
    return out
