"""SwiGLU's two kernels in Triton, each at the memory's rate. Imported where there is a Triton (swiglu.py).

torch.compile makes the same kernels, but where the number of rows is not known to it, they took 1.45 and 1.18 times as
long (an H200, 29,000 rows of 18,944 columns).
"""

# mypy: ignore-errors
# Kernels are in Triton's own language, which has no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a program; 1024 to 8192 are as fast


@triton.jit
def swiglu_forward(gate, up, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    x = tl.load(gate + place, real).to(tl.float32)
    y = tl.load(up + place, real).to(tl.float32)
    tl.store(out + place, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), real)


@triton.jit
def swiglu_backward(dout, gate, up, dgate, dup, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    d = tl.load(dout + place, real).to(tl.float32)
    x = tl.load(gate + place, real).to(tl.float32)
    y = tl.load(up + place, real).to(tl.float32)
    s = tl.sigmoid(x)
    tl.store(dup + place, (d * x * s).to(dup.dtype.element_ty), real)
    tl.store(dgate + place, (d * y * s * (1 + x * (1 - s))).to(dgate.dtype.element_ty), real)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of contiguous tensors of one shape, in float32 inside."""
    out = torch.empty_like(gate)
    with torch.cuda.device(gate.device):
        swiglu_forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK)
    return out


def backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device(gate.device):
        swiglu_backward[(triton.cdiv(gate.numel(), BLOCK),)](dout, gate, up, dgate, dup, gate.numel(), BLOCK)
    return dgate, dup
