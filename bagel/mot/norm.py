"""RMSNorm of the residual stream, with the additions beside it: one kernel a direction where there is a Triton.

A layer adds to its residual stream, norms the sum and goes on with both. By themselves, the addition, the norm and the
addition of the two gradients read and write the stream 13 times (torch's norm reads its inputs twice in the backward);
in two kernels 8 times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnforge.bagel.mot.triton_kernels import fit, triton_kernels

MOST_COLUMNS = 16384  # of a row, which one block of threads holds


def normed(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x (N, hidden) for the residual stream, and its norm. x and the first result are one tensor; use the result."""
    return _run(x, None, norm)


def add_normed(x: Tensor, y: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y, both (N, hidden), and the norm of the sum as it is rounded to the dtype of x."""
    return _run(x, y, norm)


def _run(x: Tensor, y: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    given = (x, norm.weight) if y is None else (x, norm.weight, y)
    rows = x.dim() == 2 and x.shape[1] <= MOST_COLUMNS
    alike = all(tensor.dtype == x.dtype for tensor in given)
    fused = not torch.compiler.is_compiling() and rows and alike and fit(*given)
    kernels = triton_kernels("norm_triton") if fused else None
    if kernels is None:
        total = x if y is None else x + y
        return total, norm(total)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    result: tuple[Tensor, Tensor] = _Normed.apply(kernels, x, y, norm.weight, eps)  # type: ignore[no-untyped-call]
    return result


class _Normed(torch.autograd.Function):
    """The sum of x and y, or x itself, and its norm; the backward's kernel adds the gradients of both results."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, out, rstd = kernels.forward(x, y, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.kernels, ctx.adds = kernels, y is not None
        return (total if ctx.adds else x.view_as(x)), out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        given = (dtotal.contiguous(), dout.contiguous(), *ctx.saved_tensors)
        dx, dweight = ctx.kernels.backward(*given)
        return None, dx, (dx if ctx.adds else None), dweight, None
