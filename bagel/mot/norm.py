"""RMSNorm of the residual stream, with the additions beside it: one kernel a direction where there is a Triton.

A layer adds to its residual stream, norms the sum and goes on with both. By themselves, the addition, the norm and the
addition of the two gradients read and write the stream 15 times; in two kernels 8 times.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MOST_COLUMNS = 16384  # of a row, which one block of threads holds


def normed(x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x (N, hidden) for the residual stream, and its norm. x and the first result are one tensor; use the result."""
    return _run(x, None, norm)


def add_normed(x: Tensor, y: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y, both (N, hidden), and the norm of the sum as it is rounded to the dtype of x."""
    return _run(x, y, norm)


def _run(x: Tensor, y: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    given = (x, norm.weight) if y is None else (x, norm.weight, y)
    if torch.compiler.is_compiling() or _kernels() is None or not _fit(*given):
        total = x if y is None else x + y
        return total, norm(total)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    result: tuple[Tensor, Tensor] = _Normed.apply(x, y, norm.weight, eps)  # type: ignore[no-untyped-call]
    return result


@cache
def _kernels() -> ModuleType | None:
    """norm_triton.py, where there is a Triton."""
    found = importlib.util.find_spec("triton") is not None
    return importlib.import_module("attnforge.bagel.mot.norm_triton") if found else None


def _fit(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take them; others take torch's."""
    alike = all(other.dtype == x.dtype and other.is_contiguous() for other in (x, *others))
    rows = x.dim() == 2 and x.numel() > 0 and x.shape[1] <= MOST_COLUMNS
    return x.is_cuda and alike and rows and x.dtype.itemsize < 8


class _Normed(torch.autograd.Function):
    """The sum of x and y, or x itself, and its norm; the backward's kernel adds the gradients of both results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out, rstd = _kernels().forward(x, y, weight, eps)  # type: ignore[union-attr]
        ctx.save_for_backward(total, weight, rstd)
        ctx.adds = y is not None
        return (total if ctx.adds else x.view_as(x)), out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        given = (dtotal.contiguous(), dout.contiguous(), *ctx.saved_tensors)
        dx, dweight = _kernels().backward(*given)  # type: ignore[union-attr]
        return dx, (dx if ctx.adds else None), dweight, None
