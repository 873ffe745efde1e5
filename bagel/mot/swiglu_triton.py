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

BLOCK = 2048  # columns of a program


@triton.jit
def swiglu_forward(gate_up, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    gate = gate_up + row * 2 * columns + column
    x = tl.load(gate, real).to(tl.float32)
    y = tl.load(gate + columns, real).to(tl.float32)
    tl.store(out + row * columns + column, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), real)


@triton.jit
def swiglu_backward(dout, gate_up, dgate_up, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    gate, dgate = gate_up + row * 2 * columns + column, dgate_up + row * 2 * columns + column
    d = tl.load(dout + row * columns + column, real).to(tl.float32)
    x = tl.load(gate, real).to(tl.float32)
    y = tl.load(gate + columns, real).to(tl.float32)
    s = tl.sigmoid(x)
    tl.store(dgate + columns, (d * x * s).to(dgate_up.dtype.element_ty), real)
    tl.store(dgate, (d * y * s * (1 + x * (1 - s))).to(dgate_up.dtype.element_ty), real)


def forward(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (N, mlp) of contiguous gate_up (N, 2 mlp), in float32 inside."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    with torch.cuda.device(gate_up.device):
        swiglu_forward[(rows, triton.cdiv(columns, BLOCK))](gate_up, out, columns, BLOCK)
    return out


def backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up."""
    dgate_up, (rows, columns) = torch.empty_like(gate_up), dout.shape
    with torch.cuda.device(gate_up.device):
        swiglu_backward[(rows, triton.cdiv(columns, BLOCK))](dout, gate_up, dgate_up, columns, BLOCK)
    return dgate_up
