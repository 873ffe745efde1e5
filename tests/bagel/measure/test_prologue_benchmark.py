"""benchmarks/qk_norm_rope.py: its peers compute the same, and its table is complete; no times are judged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import qk_norm_rope as benchmark
import torch

from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.prologue import Workload

WORKLOAD = Workload(70, 3, 1, 32, DType.FLOAT32, torch.device("cpu"))


@pytest.mark.parametrize("two", [False, True])
def test_ours_and_bagels_modules_agree_with_float64(two: bool) -> None:
    data = benchmark.make(replace(WORKLOAD, tokens=200), torch.float32, two)
    wide = data.double()
    outputs = benchmark.modules(wide)
    exact = [*outputs, *torch.autograd.grad(outputs, wide.leaves, wide.dout)]
    calls = benchmark.operators(("attnforge", "bagel"))
    assert set(calls) == {"attnforge", "bagel"}
    for call in calls.values():
        assert benchmark.error_of_call(call, data, exact, DType.FLOAT32) < 2
    exact[0] = exact[0].clone()
    for wrong_by in (1e-3, math.nan):
        exact[0][3, 1, 2] += wrong_by
        assert benchmark.error_of_call(calls["attnforge"], data, exact, DType.FLOAT32) > 10


def test_one_expert_moves_no_v() -> None:
    """5 heads in and out with v, 4 without; a token's angles are 2 x 16 floats, its row one int."""
    sizes = [benchmark.moved(WORKLOAD, Direction.FORWARD, two) for two in (True, False)]
    assert sizes == [70 * (2 * 5 * 32 * 4 + 2 * 16 * 4 + 4), 70 * (2 * 4 * 32 * 4 + 2 * 16 * 4)]


def test_rows_of_the_table() -> None:
    rows = benchmark.rows_of(WORKLOAD, ("attnforge",), True, 100.0)
    assert {(row[1], row[2]) for row in rows} == {
        (p, o) for p in ("fwd", "bwd") for o in ("attnforge", "copy")
    }
    assert all(len(row) == len(benchmark.HEADER) for row in rows)
