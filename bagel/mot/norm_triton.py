"""The two kernels of norm.py in Triton, each at the memory's rate. Imported where there is a Triton."""

# mypy: ignore-errors
# Kernels are in Triton's own language, which has no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS, WARPS_BACKWARD = 8, 4  # of a program
PROGRAMS = 8  # of the backward, for each multiprocessor


@triton.jit
def rms_norm_forward(x, y, weight, total, out, rstd, columns, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < columns
    place = row * columns + column
    values = tl.load(x + place, real, 0.0).to(tl.float32)
    if ADDS:
        values += tl.load(y + place, real, 0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, real)
        values = rounded.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(values * values) / columns + eps)
    tl.store(rstd + row, inverse)
    scale = tl.load(weight + column, real, 0.0).to(tl.float32)
    tl.store(out + place, (values * inverse * scale).to(out.dtype.element_ty), real)


@triton.jit
def rms_norm_backward(
    dtotal, dout, total, weight, rstd, dx, dweight_parts, rows, columns, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    real = column < columns
    scale = tl.load(weight + column, real, 0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        place = row * columns + column
        unit = tl.load(total + place, real, 0.0).to(tl.float32)
        d = tl.load(dout + place, real, 0.0).to(tl.float32)
        straight = tl.load(dtotal + place, real, 0.0).to(tl.float32)
        inverse = tl.load(rstd + row)
        unit *= inverse
        dweight += d * unit
        d *= scale
        mean = tl.sum(d * unit) / columns
        tl.store(dx + place, (straight + inverse * (d - unit * mean)).to(dx.dtype.element_ty), real)
        row += tl.num_programs(0)
    tl.store(dweight_parts + tl.program_id(0) * columns + column, dweight, real)


def forward(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + y (x itself without y), its norm, and 1 / RMS of its rows in float32. x, y: (N, hidden), contiguous."""
    rows, columns = x.shape
    total = x if y is None else torch.empty_like(x)
    out, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    given = (x, x if y is None else y, weight, total, out, rstd, columns, eps)
    with torch.cuda.device(x.device):
        rms_norm_forward[(rows,)](*given, y is not None, triton.next_power_of_2(columns), num_warps=WARPS)
    return total, out, rstd


def backward(
    dtotal: Tensor, dout: Tensor, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum, through itself and through its norm, and of the weight, summed in a fixed order."""
    rows, columns = total.shape
    processors = torch.cuda.get_device_properties(total.device).multi_processor_count
    programs = min(rows, PROGRAMS * processors)
    dx, parts = torch.empty_like(total), total.new_empty(programs, columns, dtype=torch.float32)
    given = (dtotal, dout, total, weight, rstd, dx, parts, rows, columns)
    with torch.cuda.device(total.device):
        rms_norm_backward[(programs,)](*given, triton.next_power_of_2(columns), num_warps=WARPS_BACKWARD)
    return dx, parts.sum(0).to(weight.dtype)
