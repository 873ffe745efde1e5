"""Device memory that the backward takes besides the gradients: what `ops.backward` says, to the byte."""

from __future__ import annotations

import pytest
import torch

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.plan import Plan
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Direction, DType, Mask, Problem
from attnforge.runtime import kernels, ops

BATCH, HEADS_Q, HEADS_KV, SEQ_Q, SEQ_K, HEAD_DIM = 2, 4, 2, 1000, 900, 128


def requested(moment: str) -> int:
    """Bytes that torch's allocator was asked for and has not got back: "current", or the "peak" of them."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"])


def workspace(plan: Plan) -> int:
    """Bytes that the docstring of `ops.backward` and docs/attention.md promise for the shapes above."""
    tuning = plan.spec.tuning
    tiles_m, tiles_n = -(-SEQ_Q // tuning.tile_m), -(-SEQ_K // tuning.tile_n)
    rows = BATCH * HEADS_Q * tiles_m * tuning.tile_m
    total = 4 * rows * HEAD_DIM + (32 if isinstance(tuning, Sm90Backward) else 8) * rows
    if plan.dkv_accum:
        total += 4 * BATCH * HEADS_KV * tiles_n * tuning.tile_n * 2 * HEAD_DIM
    if plan.dq_semaphore:
        total += 4 * BATCH * (HEADS_Q * tiles_m + HEADS_KV * tiles_n)
    return total


@pytest.mark.gpu
@pytest.mark.parametrize("split_heads", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_takes_what_is_promised(split_heads: bool, deterministic: bool) -> None:
    device = torch.device("cuda")
    arch = kernels.targets(device)[0]
    problem = Problem(Direction.BACKWARD, arch, DType.BFLOAT16, HEAD_DIM, Mask.FULL)
    specs = [spec for spec in candidates(problem) if isinstance(spec.tuning, Sm80Backward | Sm90Backward)]
    wanted = [
        spec
        for spec in specs
        if (spec.tuning.split_heads, spec.tuning.deterministic) == (split_heads, deterministic)  # type: ignore[attr-defined]
    ]
    if not wanted:
        pytest.skip(f"{arch.value} has no such variant")
    shapes = ((HEADS_Q, SEQ_Q), (HEADS_KV, SEQ_K), (HEADS_KV, SEQ_K), (HEADS_Q, SEQ_Q))
    q, k, v, dout = (
        torch.randn(BATCH, heads, rows, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for heads, rows in shapes
    )
    out, lse = ops.forward(q, k, v, None)
    handle = kernels.load(wanted[0], device)
    ops.backward(dout, q, k, v, out, lse, None, variant=handle)  # the first call may make tables
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    gradients = ops.backward(dout, q, k, v, out, lse, None, variant=handle)
    peak = requested("peak") - before
    kept = sum(x.numel() * x.element_size() for x in gradients)
    assert requested("current") - before == kept
    assert peak == kept + workspace(make_plan(wanted[0]))
