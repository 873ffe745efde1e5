"""The Hopper backward for wide heads by single blocks, run on the CPU: gradients, and that mistakes are noticed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from emulated_backward import EmulatedBackward
from oracle import Shape

from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide, staged_columns
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

FULL_DQ, EMPTY_DQ = "base + kFullDq + kGroup * 8", "base + kEmptyDq + kGroup * 8"
# Statements that the kernel needs; without any of them it hangs, or its gradients are wrong.
BREAKS = {
    "dQ added before it is there": f"barrier_wait({FULL_DQ}, count & 1);",
    "dQ overwritten before it is read": f"barrier_wait({EMPTY_DQ}, (count & 1) ^ 1);",
    "dQ not waited for": "tma_store_wait();  // it has been read",
    "P and dS before all have stored them": "named_sync(kDsStored, kConsumers * 128);\n        proxy_fence();",
    "dV before P": "named_sync(kPStored, kConsumers * 128);",
}
# Likewise of deterministic ones, which also may give other bits in another order of the warps.
ORDERED = {
    "dQ added before it is there": "barrier_wait(full + group * 8, (round * kSubtilesOf[group] + subtile) & 1);",
    "dQ overwritten before it is read": BREAKS["dQ overwritten before it is read"],
    "dQ not waited for": "tma_store_wait();  // all have been read",
    "dQ added before that of other blocks": "semaphore_wait(dq_semaphore(p, plane, tile), order);",
    "other blocks add before dQ has arrived": "bulk_reduce_wait();\n",
    "dQ not committed": "tma_store_commit();\n                    ",
    "dQ not fenced": "proxy_fence();\n    if (first)",
    "semaphores before they are 0": "griddepcontrol_wait();  // for semaphores",
}
# Likewise with other values of `staging`.
FREED_APART = ORDERED | {
    "dQ not waited for": "tma_store_wait();  // it has been read",
    "dQ not committed": "tma_store_commit();\n                            ",
}
WHOLE = ORDERED | {
    "dQ added before it is there": "barrier_wait(full + number * 8, round & 1);",
    "dQ overwritten before it is read": f"barrier_wait({EMPTY_DQ}, (step & 1) ^ 1);",
    "dQ not committed": "tma_store_commit();\n                ",
}
# Likewise where blocks add in any order.
PLACES_FOR_ALL = {
    "dQ added before it is there": "barrier_wait(full + unit * 8, step & 1);",
    "dQ overwritten before it is read": "barrier_wait(base + kEmptyDq + (kFirstUnit + unit) * 8, (step & 1) ^ 1);",
    "dQ not waited for": "tma_store_wait();  // all have been read",
    "dQ not committed": "tma_store_commit();\n                    ",
    "dQ not fenced": "proxy_fence();\n                    bulk_reduce",
    "dQ of other columns not waited for": "bulk_read_wait_all_but_last();\n",
}
# Likewise of blocks whose dV runs beside dQ, and where a warp of its own loads dO.
IN_FLIGHT = {
    "P overwritten before dV has read it": "named_sync(kPRead, kConsumers * 128);",
    "nobody says that P has been read": "named_arrive(kPRead, kConsumers * 128);",
    "dO released before dV has read it": "wgmma_wait<1>();\n        arrive(base + kEmptyDo",
    "dV before dO": "barrier_wait(base + kFullDo + do_ring.stage * 8, do_ring.phase);",
    "dO over dO": "barrier_wait(base + kEmptyDo + do_ring.stage * 8, do_ring.phase);",
}


def spec(dims: tuple[int, int], mask: Mask, *knobs: int, **more: Any) -> Spec:
    """`knobs`: keys of a tile, buffers of Q, of dO, whether deterministic."""
    dim_v = 0 if dims[0] == dims[1] else dims[1]
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, dims[0], mask, dim_v=dim_v)
    tile_n, stages, stages_dout, deterministic = *knobs, *(0,) * (4 - len(knobs))
    tuning = Sm90BackwardWide(64, tile_n, stages, stages_dout, bool(deterministic), **more)
    return Spec(problem, tuning)


@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "staged"),
    [
        ((256, 256), Mask.FULL, (80, 2, 1, 0), 32),
        ((256, 256), Mask.CAUSAL, (64, 2, 1, 0), 64),
        ((192, 192), Mask.CAUSAL, (96, 2, 2, 0), 40),
        ((192, 128), Mask.SPANS, (96, 2, 2, 0), 64),
        ((128, 192), Mask.FULL, (96, 4, 2, 0), 32),
        ((64, 128), Mask.CAUSAL, (128, 3, 1, 0), 64),
        ((256, 256), Mask.FULL, (80, 2, 1, 1), 32),
        ((192, 192), Mask.CAUSAL, (96, 2, 1, 1), 64),
        ((192, 128), Mask.SPANS, (96, 2, 2, 1), 64),
        ((128, 192), Mask.CAUSAL, (96, 3, 3, 1), 16),
        ((64, 128), Mask.FULL, (128, 2, 1, 1), 64),
        ((136, 136), Mask.CAUSAL, (96, 2, 2, 0), 40),
        ((160, 160), Mask.FULL, (96, 2, 1, 1), 64),
        ((224, 224), Mask.SPANS, (80, 2, 1, 0), 32),
        ((200, 200), Mask.CAUSAL, (80, 2, 1, 1), 32),
        ((192, 96), Mask.FULL, (96, 2, 2, 0), 64),
        ((160, 128), Mask.CAUSAL, (96, 2, 2, 1), 64),
        ((128, 136), Mask.FULL, (96, 3, 3, 1), 16),
        ((40, 72), Mask.CAUSAL, (128, 2, 1, 0), 64),
        ((16, 248), Mask.SPANS, (80, 2, 1, 1), 64),
    ],
    ids=str,
)
def test_gradients_on_the_cpu(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], staged: int, tmp_path: Path
) -> None:
    """With all columns of dQ staged, with some, or in subtiles; and with a consumer that has none."""
    chosen = spec(dims, mask, *knobs)
    assert isinstance(chosen.tuning, Sm90BackwardWide)
    assert staged_columns(chosen.problem, chosen.tuning) == staged
    kernel = EmulatedBackward(chosen, tmp_path)
    for seed, shape in enumerate(
        (Shape(20, 40, 0, 1), Shape(200, 190, 0, 1, 2), Shape(130, 300, 0, 2, 1, 2))
    ):
        assert kernel.failure(shape, seed) == ""


@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "more"),
    [
        ((192, 192), Mask.CAUSAL, (96, 2, 2), {"dq_behind_dv": True}),
        ((192, 128), Mask.SPANS, (96, 2, 2), {"dq_behind_dv": True, "dq_of_second": 2}),
        ((256, 256), Mask.CAUSAL, (80, 2, 1), {"dq_behind_dv": True, "loaders": 2}),
        ((256, 256), Mask.FULL, (64, 2, 1), {"dq_of_second": 3}),
        ((192, 192), Mask.CAUSAL, (96, 2, 2), {"loaders": 2, "dq_of_second": 2}),
        ((64, 128), Mask.CAUSAL, (128, 2, 1), {"loaders": 2}),
        ((192, 192), Mask.CAUSAL, (80, 3, 1, 1), {"loaders": 2, "dq_behind_dv": True, "dq_of_second": 2}),
        ((128, 64), Mask.FULL, (128, 2, 1), {"dq_of_second": 1, "dq_behind_dv": True}),
        ((192, 192), Mask.CAUSAL, (96, 2, 1, 1), {"staging": 1}),
        ((192, 128), Mask.CAUSAL, (96, 2, 2, 1), {"staging": 2, "heads_together": 2}),
        ((256, 256), Mask.FULL, (80, 2, 1, 1), {"staging": 1}),
        ((192, 192), Mask.SPANS, (80, 2, 1, 1), {"staging": 2, "loaders": 2}),
        ((192, 128), Mask.FULL, (96, 2, 1, 1), {"staging": 2, "dq_of_second": 3}),
        ((192, 192), Mask.CAUSAL, (96, 2, 1, 1), {"staging": 1, "dq_behind_dv": True}),
        ((256, 256), Mask.SPANS, (80, 2, 1, 1), {"staging": 1, "loaders": 2}),
        ((192, 128), Mask.CAUSAL, (96, 2, 1), {"staging": 2}),
        ((192, 128), Mask.FULL, (96, 2, 2), {"staging": 2, "dq_of_second": 2, "dq_behind_dv": True}),
        ((192, 192), Mask.SPANS, (80, 2, 1), {"staging": 2, "loaders": 2}),
        ((192, 128), Mask.FULL, (96, 2, 1), {"staging": 2, "dq_of_second": 3}),
        ((136, 136), Mask.CAUSAL, (96, 2, 2), {"dq_behind_dv": True, "dq_of_second": 2}),
        ((136, 104), Mask.SPANS, (80, 2, 1, 1), {"staging": 1, "loaders": 2}),
        ((160, 128), Mask.FULL, (96, 2, 1, 1), {"staging": 2, "dq_of_second": 3}),
        ((176, 96), Mask.CAUSAL, (96, 2, 1), {"staging": 2, "loaders": 2}),
        ((216, 216), Mask.FULL, (80, 2, 1, 1), {"staging": 1}),
    ],
    ids=str,
)
def test_orders_of_products(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], more: dict[str, int], tmp_path: Path
) -> None:
    kernel = EmulatedBackward(spec(dims, mask, *knobs, **more), tmp_path)
    for seed, shape in enumerate(
        (Shape(20, 40, 0, 1), Shape(200, 190, 0, 1, 2), Shape(130, 300, 0, 2, 1, 2), Shape(700, 96, 0, 1))
    ):
        assert kernel.failure(shape, seed) == ""


def test_breaks_of_what_is_in_flight_are_noticed(tmp_path: Path) -> None:
    chosen = spec((192, 128), Mask.FULL, 96, 2, 2, dq_behind_dv=True, loaders=2)
    kernel = EmulatedBackward(chosen, tmp_path, IN_FLIGHT)
    shapes = Shape(128, 96, 0, 1), Shape(900, 96, 0, 1)
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(IN_FLIGHT, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(20) for shape in shapes), name


def test_breaks_are_noticed(tmp_path: Path) -> None:
    kernel = EmulatedBackward(spec((192, 128), Mask.FULL, 96, 2, 2, 0), tmp_path, BREAKS)
    shapes = Shape(128, 96, 0, 1), Shape(900, 96, 0, 1)  # some show in the first steps, others after many
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(BREAKS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(20) for shape in shapes), name


@pytest.mark.parametrize(
    ("dims", "deterministic", "staging", "breaks"),
    [
        ((256, 256), 1, 0, ORDERED),
        ((256, 256), 1, 1, FREED_APART),
        ((192, 128), 1, 2, WHOLE),
        ((192, 128), 0, 2, PLACES_FOR_ALL),
    ],
    ids=["subtiles", "freed apart", "whole", "whole, in any order"],
)
def test_breaks_of_additions_are_noticed(
    dims: tuple[int, int], deterministic: int, staging: int, breaks: dict[str, str], tmp_path: Path
) -> None:
    kernel = EmulatedBackward(
        spec(dims, Mask.CAUSAL, 80, 2, 1, deterministic, staging=staging), tmp_path, breaks
    )
    shapes = Shape(128, 300, 0, 1), Shape(700, 300, 0, 1)
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(breaks, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(20) for shape in shapes), name
