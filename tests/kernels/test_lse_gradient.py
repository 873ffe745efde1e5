"""The gradient of lse in the backward kernels of the CPU and of the mma.sync family, against float64.

That of the Hopper backward enters in its first launch: test_backward_ends.py.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from cpu_kernel import Inputs as CpuInputs
from cpu_kernel import Kernel
from emulator import Emulated
from oracle import Inputs, Shape, draw, spans, visible
from torch import Tensor

from attnforge.codegen.families.cpu import CpuBackward
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.masks import Spans

SHAPE = Shape(70, 100, 32, heads_kv=1, group=2)
TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
LIMIT = {DType.FLOAT32: 2e-6, DType.BFLOAT16: 1e-2}  # of the largest value
CPU = {
    DType.FLOAT32: CpuBackward(48, 96, 16, 8, 3, False),
    DType.BFLOAT16: CpuBackward(96, 48, 16, 8, 3, True),
}


def exact_of(x: Inputs, mask: Spans, dlse: Tensor) -> tuple[Tensor, ...]:
    """out, lse, and dq, dk, dv of a loss with the gradients x.dout and dlse, in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q, x.k, x.v))
    seen = visible(mask, SHAPE.seq_q, SHAPE.seq_k, "cpu")
    blind = ~seen.any(-1)
    scores = (q @ k.mT * SHAPE.head_dim**-0.5).masked_fill(~seen, -1e300)
    out = scores.softmax(-1).masked_fill(~seen, 0) @ v
    lse = scores.logsumexp(-1).masked_fill(blind, 0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (x.dout.double(), dlse.double().masked_fill(blind, 0)))
    return out.detach(), lse.detach().masked_fill(blind, -math.inf), *grads


def check(dtype: DType, run: Callable[..., Sequence[Tensor]]) -> None:
    """`run` is called with inputs, the mask, and what a forward kept; rows without keys have no gradient whatever."""
    x = draw(SHAPE, TORCH[dtype], "cpu")
    mask = spans(SHAPE.seq_q, SHAPE.seq_k, "cpu")
    dlse = torch.randn(1, 2, SHAPE.seq_q)
    out, lse, *answers = exact_of(x, mask, dlse)
    blind = lse == -math.inf
    assert blind.any()
    for nothing in (math.nan, math.inf):
        dlse[blind] = nothing
        grads = run(x, mask, out.to(x.q.dtype), lse.float(), dlse)
        for name, grad, answer in zip(("dq", "dk", "dv"), grads, answers, strict=True):
            error = (grad - answer).abs().max().item()
            assert error <= LIMIT[dtype] * answer.abs().max().item(), f"{name}: {error}"
        assert not grads[0][blind].any()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.value)
def test_cpu(dtype: DType, tmp_path: Path) -> None:
    problem = Problem(Direction.BACKWARD, Arch.CPU, dtype, SHAPE.head_dim, Mask.SPANS, dtype.bytes)
    kernel = Kernel(Spec(problem, CPU[dtype]), tmp_path)

    def run(x: Inputs, mask: Spans, out: Tensor, lse: Tensor, dlse: Tensor) -> Sequence[Tensor]:
        q, k, v = (t.detach() for t in (x.q, x.k, x.v))
        inputs = CpuInputs(q, k, v, SHAPE.head_dim**-0.5, mask.starts, mask.ends)
        return kernel.backward(inputs, x.dout, out, lse, dlse=dlse)

    check(dtype, run)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.value)
def test_mma_sync(dtype: DType, tmp_path: Path) -> None:
    problem = Problem(Direction.BACKWARD, Arch.SM80, dtype, SHAPE.head_dim, Mask.SPANS, 16)
    kernel = Emulated(next(candidates(problem)), tmp_path)

    def run(x: Inputs, mask: Spans, out: Tensor, lse: Tensor, dlse: Tensor) -> Sequence[Tensor]:
        q, k, v = (t.detach() for t in (x.q, x.k, x.v))
        return kernel.backward(x.dout, q, k, v, out, lse, mask, dlse)

    check(dtype, run)
