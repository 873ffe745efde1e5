"""The Hopper forward for wide heads: its results on the CPU, mistakes of its protocol, its space and its choice."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated_forward import EmulatedForward
from oracle import Shape
from strict_nvcc import check_resources

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80 import WIDE
from attnforge.codegen.families.sm90_forward_wide import GUESSES
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for

fibers = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
H200 = Target("NVIDIA H200", (Arch.SM90A, Arch.SM90))

SHAPES = Shape(20, 40, 0, 1), Shape(150, 200, 0, 1, 2), Shape(70, 270, 0, 2, 1, 2)
# Statements that the kernel needs; without any of them it hangs, or its results are wrong.
BREAKS = {
    "Q read before it is there": "barrier_wait(smem + kFullQ, 0);",
    "K read before it is there": "barrier_wait(smem + kFullK + k_pipe.stage * 8, k_pipe.phase);",
    "V read before it is there": "barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);",
    "K overwritten before it is read": "barrier_wait(smem + kEmptyK + k_pipe.stage * 8, k_pipe.phase ^ 1);",
    "V overwritten before it is read": "barrier_wait(smem + kEmptyV + v_pipe.stage * 8, v_pipe.phase ^ 1);",
    "K not released": "release(smem + kEmptyK + k_pipe.stage * 8);",
    "V not released": "release(smem + kEmptyV + v_pipe.stage * 8);",
    "the first part not announced": "barrier_expect(smem + kFullPart + i * 8, kPartBytes);",
    "other parts not announced": "barrier_expect(smem + kFullPart + warpgroup * 8, kPartBytes);  // of the next",
    "a part not sent": "send_quad(sent + i * 512, sent_full",
    "a part sent over one that is read": "barrier_wait(smem + kEmptyPart + warpgroup * 8, part_phase ^ 1);",
    "a part read before it is there": "barrier_wait(smem + kFullPart + warpgroup * 8, part_phase);",
    "a part released by a lane before others have read it": (
        "__syncwarp();\n        if (threadIdx.x % 32 == 0) {\n            barrier_arrive_at("
    ),
    "a part not released": "barrier_arrive_at(smem + kEmptyPart + warpgroup * 8, peer());",
    "the first S read before it is complete": "wgmma_wait_all();\n        finish_scores();",
    "S read before it is complete": "wgmma_wait_all_but_one();",
    "V released before it is read": "wgmma_wait_all();\n            release_v();",
    "O stored before it is complete": "wgmma_wait_all();\n        accumulator_fence(o);",
    "O stored before all warps have written it": "named_sync(1 + consumer.warpgroup, 128);",
    "O not fenced": "proxy_fence();  // before TMA reads the buffer",
    "O not committed": "tma_store_commit();",
    "a block leaves while TMA reads O": "tma_store_wait();  // before shared memory is given back",
    "barriers used before they are there": "cluster_sync();  // the peer's barriers are ready, too",
    "a block leaves while the other one arrives there": "cluster_sync();  // until now",
}
# Likewise where bounds of keys are released with K.
OF_SPANS = {
    "bounds released by a lane before others have read them": (
        "__syncwarp();\n        if (threadIdx.x % 32 == 0) {\n            barrier_arrive("
    ),
    "K overwritten before it is read": BREAKS["K overwritten before it is read"],
    "a part sent over one that is read": BREAKS["a part sent over one that is read"],
}


def spec(head_dim: int, mask: Mask, changed: dict[str, int] | None = None) -> Spec:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)
    return Spec(problem, replace(GUESSES[0], **changed or {}))


@fibers
@pytest.mark.parametrize(
    ("head_dim", "mask", "changed"),
    [
        (512, Mask.FULL, {}),
        (384, Mask.FULL, {"tile_m": 64, "stages": 1}),
        (512, Mask.FULL, {"tile_n": 48, "exact_visits": 0}),
        (384, Mask.CAUSAL, {}),
        (512, Mask.CAUSAL, {"tile_m": 64}),
        (384, Mask.CAUSAL, {"tile_n": 80, "stages": 1, "stages_v": 2}),
        (512, Mask.SPANS, {}),
        (384, Mask.SPANS, {"tile_m": 64, "stages": 3}),
        (384, Mask.SPANS, {"tile_n": 48, "exact_visits": 1}),
    ],
)
def test_results_on_the_cpu(head_dim: int, mask: Mask, changed: dict[str, int], tmp_path: Path) -> None:
    kernel = EmulatedForward(spec(head_dim, mask, changed), tmp_path)
    for seed, shape in enumerate(SHAPES):
        assert kernel.failure(shape, seed, sharpness=(1, 8)[seed % 2]) == ""


@fibers
@pytest.mark.parametrize("tile_m", [64, 128])
def test_work_tiles_without_visits(tile_m: int, tmp_path: Path) -> None:
    """Work tiles that visit no key tile, beside some that do."""
    causal = EmulatedForward(spec(384, Mask.CAUSAL, {"tile_m": tile_m}), tmp_path)
    assert causal.failure(Shape(300, 70, 0, 1, 2), 0) == ""
    some = torch.zeros(90, dtype=torch.int32), torch.full((90,), 50, dtype=torch.int32)
    none = some[0], some[0]
    spans = EmulatedForward(spec(512, Mask.SPANS, {"tile_m": tile_m}), tmp_path)
    for seed, (starts, ends) in enumerate((some, none)):
        assert spans.failure(Shape(270, 90, 0, 1, 1, 2), seed, mask=attnforge.Spans(starts, ends)) == ""


@fibers
@pytest.mark.parametrize(
    ("mask", "changed", "breaks"),
    [(Mask.FULL, {}, BREAKS), (Mask.SPANS, {"tile_m": 64}, OF_SPANS)],
    ids=["full", "spans"],
)
def test_breaks_are_noticed(
    mask: Mask, changed: dict[str, int], breaks: dict[str, str], tmp_path: Path
) -> None:
    kernel = EmulatedForward(spec(384, mask, changed), tmp_path, breaks)
    shapes = Shape(64, 400, 0, 1), Shape(64, 700, 0, 1)
    assert all(kernel.failure(shape, 0) == "" for shape in shapes)
    for number, name in enumerate(breaks, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(30) for shape in shapes), name


@pytest.mark.parametrize(
    ("problem", "knobs", "reason"),
    [
        ({"head_dim": 320}, {}, "head_dim 320: the sm90a forward kernel for wide heads takes 384 and 512"),
        ({"mask": Mask.DENSE}, {}, "mask dense: the sm90a forward kernel for wide heads takes none"),
        ({"mask": Mask.SPANS, "intervals": 2}, {}, "intervals 2: .* takes one; sm90"),
        ({"dim_v": 128}, {}, "takes that of q and k; sm90"),
        ({}, {"stages": 3}, "shared memory: 295048 bytes"),
        ({}, {"tile_n": 128, "stages": 1}, "registers: S, P and O take 224"),
        ({}, {"stages_v": 2}, "stages_v 2: must be more than stages"),
        ({}, {"exact_visits": 10}, "exact_visits 10: must be 0 to 9"),
    ],
    ids=str,
)
def test_infeasible(problem: dict[str, object], knobs: dict[str, int], reason: str) -> None:
    values = {"head_dim": 512, "mask": Mask.FULL} | problem
    refused = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, **values)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(refused, replace(GUESSES[0], **knobs)))


def test_choice() -> None:
    """Few queries, and what the kernel does not take, go to kernels whose blocks share the keys."""
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 512, Mask.FULL)
    for mask in (Mask.FULL, Mask.CAUSAL, Mask.SPANS):
        tiles = [
            choose_for(Call(replace(problem, mask=mask), 1, size, rounds=rounds), H200).spec.tuning.tile_m
            for size, rounds in ((4096, 0), (16384, 1))
        ]
        assert tiles == [64, 128]  # with tiles of 128 rows, half of an H200 would be idle
    few = choose_for(Call(problem, 8, 1), H200, split_rows=64).spec
    assert (few.problem.arch, few.tuning) == (Arch.SM90, WIDE[0])
    two = replace(problem, mask=Mask.SPANS, intervals=2)
    assert choose_for(Call(two, 1, 4096), H200).spec.problem.arch is Arch.SM90


@pytest.mark.nvcc
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_compiles_cleanly(mask: Mask, nvcc: None, tmp_path: Path) -> None:
    check_resources([render(spec(head_dim, mask)) for head_dim in (384, 512)], tmp_path)
