"""The Hopper backward by pairs of blocks, run on the CPU: gradients, and that mistakes of its protocol are noticed."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
from emulated_backward import EmulatedBackward
from oracle import Shape

from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

TUNING = Sm90BackwardWide(64, 128, 2, 1, False, True)
# Statements that the kernel needs; without any of them it hangs, or its gradients are wrong.
BREAKS = {
    "P read before it is there": "barrier_wait(base + kFullP, step & 1);",
    "dQ before the block's own dS": "barrier_wait(base + kFullDs + ds_stage(step) * 8, phase);",
    "dQ before the peer's dS": "barrier_wait(full_peer, phase);",
    "dS overwritten before it is read": "barrier_wait(base + kEmptyDs + ds_stage(step) * 8, ",
    "dV before dO": "wait_for_dout(step);\n            }\n            accumulator_fence(sums);",
    "dQ added before it is complete": "wgmma_wait<1>();  // dQ and dV are complete",
    "Q and dO released before they are read": "wgmma_wait<1>();  // the sum is complete",
    "P over dQ that has not been added": "barrier_wait(base + kEmptyDq + 8, step & 1);",
    "dQ added before it is there": "barrier_wait(base + kFullDq + kGroup * 8, step & 1);",
    "P overwritten before it has been added": "tma_store_wait();  // it has been read",
    "a block leaves while the other one arrives there": "cluster_sync();  // until now",
}
# Likewise of deterministic pairs, which also may give other bits in another order of the warps.
ORDERED = {
    "P over dQ that has not been added": BREAKS["P over dQ that has not been added"],
    "dQ added before it is there": "barrier_wait(full + group * 8, (before + i) / 2 & 1);",
    "dQ over dQ that has not been added": "barrier_wait(base + kEmptyDq + kGroup * 8, (step & 1) ^ kGroup);",
    "dQ overwritten before it has been added": "tma_store_wait();  // it has been read",
    "dQ added before that of other pairs": "semaphore_wait(dq_semaphore(p, plane, tile), order * kCluster);",
    "other pairs add before dQ has arrived": "bulk_reduce_wait();\n",
    "dQ not committed": "tma_store_commit();\n                    ",
    "dQ not fenced": "proxy_fence();\n    if (first)",
    "semaphores before they are 0": "griddepcontrol_wait();  // for semaphores",
}
# Likewise where dQ of the first consumer takes the place of dS.
OVER_DS = {
    **{name: ORDERED[name] for name in ORDERED if name != "dQ over dQ that has not been added"},
    "dQ over dS that is read": "barrier_wait(base + kReadDs + ds_stage(step) * 8, step / kBuffersDs & 1);",
    "dS over dQ that has not been added": "barrier_wait(base + kEmptyDs + ds_stage(step) * 8,",
    "dS released before the other block's": "barrier_arrive_at(empty_ds, block_rank() ^ 1);",
}


# Likewise where pairs that add in any order do so.
OVER_DS_IN_ANY_ORDER = {
    "P over dQ that has not been added": BREAKS["P over dQ that has not been added"],
    "dQ added before it is there": "barrier_wait(base + kFullDq + (buffer * kConsumers + kGroup) * 8,",
    "dQ overwritten before it has been added": BREAKS["P overwritten before it has been added"],
    "dQ over dS that is read": OVER_DS["dQ over dS that is read"],
    "dS over dQ that has not been added": OVER_DS["dS over dQ that has not been added"],
    "dS released before the other block's": "barrier_arrive_at(base + kEmptyDs + buffer * 8, block_rank() ^ 1);",
    "dQ not committed": "tma_store_commit();\n                ",
    "dQ not fenced": "proxy_fence();\n                bulk_reduce",
}


def spec(dims: tuple[int, int], mask: Mask, tuning: Sm90BackwardWide = TUNING) -> Spec:
    dim_v = 0 if dims[0] == dims[1] else dims[1]
    return Spec(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, dims[0], mask, dim_v=dim_v), tuning)


@pytest.mark.parametrize(
    ("dims", "mask", "changed"),
    [
        ((256, 256), Mask.FULL, {}),
        ((192, 128), Mask.CAUSAL, {"stages_dout": 2}),
        ((192, 192), Mask.SPANS, {"stages": 3}),
        ((256, 128), Mask.CAUSAL, {}),
        ((192, 256), Mask.FULL, {}),
        ((256, 256), Mask.CAUSAL, {"deterministic": True}),
        ((192, 128), Mask.SPANS, {"deterministic": True, "stages_dout": 2}),
        ((192, 256), Mask.FULL, {"deterministic": True}),
        ((256, 256), Mask.CAUSAL, {"s_late": True}),
        ((192, 192), Mask.SPANS, {"s_late": True, "stages_dout": 2}),
        ((192, 128), Mask.FULL, {"s_late": True, "deterministic": True}),
        ((192, 192), Mask.CAUSAL, {"deterministic": True, "staging": 2}),
        ((256, 256), Mask.FULL, {"deterministic": True, "staging": 2}),
        ((192, 128), Mask.SPANS, {"deterministic": True, "staging": 2, "s_late": True, "stages_dout": 2}),
        ((256, 256), Mask.FULL, {"staging": 2, "s_late": True}),
        ((256, 256), Mask.CAUSAL, {"staging": 2}),
        ((192, 192), Mask.CAUSAL, {"staging": 2, "stages_dout": 2}),
        ((192, 128), Mask.SPANS, {"staging": 2, "stages": 3, "s_late": True}),
        ((192, 256), Mask.FULL, {"staging": 2}),
        ((256, 128), Mask.SPANS, {"staging": 2, "stages_dout": 2}),
        ((136, 136), Mask.CAUSAL, {"stages_dout": 2}),
        ((160, 160), Mask.SPANS, {"staging": 2, "s_late": True}),
        ((224, 224), Mask.FULL, {}),
        ((200, 72), Mask.CAUSAL, {"deterministic": True, "staging": 2}),
        ((192, 96), Mask.FULL, {"deterministic": True}),
        ((152, 256), Mask.CAUSAL, {"s_late": True}),
    ],
)
def test_gradients_on_the_cpu(
    dims: tuple[int, int], mask: Mask, changed: dict[str, int], tmp_path: Path
) -> None:
    kernel = EmulatedBackward(spec(dims, mask, replace(TUNING, **changed)), tmp_path)  # type: ignore[arg-type]
    for seed, shape in enumerate(
        (Shape(20, 40, 0, 1), Shape(150, 190, 0, 1, 2), Shape(130, 300, 0, 2, 1, 2))
    ):
        assert kernel.failure(shape, seed) == ""


def test_breaks_are_noticed(tmp_path: Path) -> None:
    kernel = EmulatedBackward(spec((192, 128), Mask.FULL), tmp_path, BREAKS)
    shapes = Shape(128, 256, 0, 1), Shape(900, 256, 0, 1)  # some show in the first steps, others after many
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(BREAKS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(20) for shape in shapes), name


@pytest.mark.parametrize(
    ("deterministic", "staging", "breaks"),
    [(True, 0, ORDERED), (True, 2, OVER_DS), (False, 2, OVER_DS_IN_ANY_ORDER)],
    ids=["over P", "over dS", "over dS, in any order"],
)
def test_breaks_of_additions_are_noticed(
    deterministic: bool, staging: int, breaks: dict[str, str], tmp_path: Path
) -> None:
    tuning = replace(TUNING, deterministic=deterministic, staging=staging)
    kernel = EmulatedBackward(spec((192, 128), Mask.CAUSAL, tuning), tmp_path, breaks)
    shapes = Shape(128, 400, 0, 1), Shape(700, 400, 0, 1)
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(breaks, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(20) for shape in shapes), name
