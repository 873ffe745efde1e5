"""The prologue of attention in float64 torch, its inputs, and how far results may be off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import attnforge


def norm_rope(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6) -> Tensor:
    """x (T, H, D), weight (D) or (T, D), cos and sin (T, D / 2); in the dtype of x."""
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight[..., None, :]
    left, right = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((left * c - right * s, right * c + left * s), -1)


@dataclass
class Pack:
    """A pack of two experts, with gradients of the results."""

    fused: list[Tensor]  # (rows, heads_q + 2 heads_kv, head_dim) of each expert, leaves
    weights: list[Tensor]  # of q and k, expert by expert, leaves; none without a norm
    cos: Tensor
    sin: Tensor
    rows: list[Tensor]  # tokens of each expert
    heads: tuple[int, int]
    dout: list[Tensor]  # of q, k, v

    @property
    def tokens(self) -> int:
        return self.cos.shape[0]

    def experts(self) -> attnforge.ExpertRows:
        return attnforge.ExpertRows(self.rows[0], self.rows[1], self.tokens)

    def pairs(self) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        if not self.weights:
            return None, None
        q0, k0, q1, k1 = self.weights
        return (q0, q1), (k0, k1)

    def exact(self) -> tuple[list[Tensor], list[Tensor]]:
        """q, k and v in float64, and the gradients of `fused` and `weights`."""
        leaves = [x.detach().double().requires_grad_() for x in (*self.fused, *self.weights)]
        fused, weights = leaves[: len(self.fused)], leaves[len(self.fused) :]
        whole = fused[0].new_zeros(self.tokens, *fused[0].shape[1:])
        for rows, x in zip(self.rows, fused, strict=True):
            whole = whole.index_copy(0, rows, x)
        q, k, v = whole.split((*self.heads, self.heads[1]), 1)
        cos, sin = self.cos.double(), self.sin.double()
        outputs = []
        for kind, x in enumerate((q, k)):
            w = None
            if weights:
                w = x.new_zeros(self.tokens, x.shape[2])
                for expert, rows in enumerate(self.rows):
                    w = w.index_copy(0, rows, weights[2 * expert + kind].expand(len(rows), -1))
            outputs.append(norm_rope(x, w, cos, sin))
        outputs.append(v)
        gradients = torch.autograd.grad(outputs, leaves, [x.double() for x in self.dout], allow_unused=True)
        zeros = (torch.zeros_like(x) for x in leaves)
        return outputs, [z if g is None else g for g, z in zip(gradients, zeros, strict=True)]


def draw(
    lengths: tuple[int, int] = (23, 14),
    nobody: int = 0,
    heads: tuple[int, int] = (5, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    weight: torch.dtype | None = None,
    table: torch.dtype = torch.float32,
    norm: bool = True,
) -> Pack:
    """Random; experts' tokens mixed. weight: dtype of the norms' weights, by default that of the heads."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(lengths) + nobody
    order = torch.randperm(tokens, generator=generator).to(device)
    rows = list(order.split((*lengths, nobody)))[:2]
    total = heads[0] + 2 * heads[1]
    fused = [normal(n, total, head_dim).to(device, dtype).requires_grad_() for n in lengths]
    ones = [1 + 0.2 * normal(head_dim) for _ in range(4 if norm else 0)]
    weights = [x.to(device, weight or dtype).requires_grad_() for x in ones]
    positions = torch.randint(40000, (tokens,), generator=generator)
    cos, sin = (x.to(device, table) for x in attnforge.rope_tables(positions, head_dim, 1e6))
    dout = [normal(tokens, h, head_dim).to(device, dtype) for h in (*heads, heads[1])]
    return Pack(fused, weights, cos, sin, rows, heads, dout)


LIMIT = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}  # half a unit in the last place, and float32


def check(name: str, got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Every element within one rounding to `dtype`, and that of float32 sums of the largest value."""
    assert got.dtype is dtype, name
    assert got.shape == exact.shape, name
    if not exact.numel():
        return
    error = (got.double() - exact).abs()
    allowed = LIMIT[dtype] * exact.abs() + 4e-6 * exact.abs().max()
    worst = (error - allowed).max().item()
    assert worst <= 0, f"{name}: off by {error.max().item():.3g} of {exact.abs().max().item():.3g}"
