"""The Hopper forward of 16-bit types as a whole, on the CPU: its results against float64, and planted mistakes."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulated_forward import EmulatedForward
from mask_functions import functions as functions_of_masks
from oracle import Shape, unions
from score_oracle import functions
from spaces import first_hopper, tuned_kinds

from attnforge import masks
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

fibers = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
# More work tiles than blocks, and last tiles that are not full; rows that see nothing.
SHAPES = Shape(300, 420, 0, 1, 2), Shape(450, 170, 0, 2, 1, 2)


LONG = Shape(700, 2600, 0, 1, 1)  # the list of the tile with global tokens is cut


def kind_of(spec: Spec) -> tuple[tuple[int, int], Mask, int, bool, bool]:
    """Head dims of q and v, mask, rows of a tile; do warpgroups take turns, are work tiles counted up?"""
    tuning = spec.tuning
    assert isinstance(tuning, Sm90Forward)
    p = spec.problem
    return (p.head_dim, p.head_dim_v), p.mask, tuning.tile_m, tuning.ping_pong, tuning.dynamic


VARIANTS = tuned_kinds(Direction.FORWARD, Sm90Forward, kind_of)
first = partial(first_hopper, Direction.FORWARD)


@fibers
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.slug)
def test_results(spec: Spec, tmp_path: Path) -> None:
    kernel = EmulatedForward(spec, tmp_path)
    for seed, shape in enumerate(SHAPES):
        assert kernel.failure(shape, seed, sharpness=(1, 8)[seed]) == ""


@fibers
@pytest.mark.parametrize(
    "mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS, Mask.DENSE], ids=lambda mask: mask.value
)
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [
        (128, "softcap"),
        (64, "softcap"),
        (128, "alibi"),
        (128, "aligned"),
        (64, "relative"),
        (128, "relative"),
        (128, "walled"),
        (96, "bias"),
        (128, "mixed"),
    ],
)
def test_scores(head_dim: int, name: str, mask: Mask, tmp_path: Path) -> None:
    kernel = None
    for seed, shape in enumerate(SHAPES):
        heads = shape.heads_kv * shape.group
        score, formula = functions(shape.batch, heads, shape.seq_q, shape.seq_k)[name]
        kernel = kernel or EmulatedForward(first(head_dim, mask, score=ScoreMod(score.text)), tmp_path)
        kernel.score_tensors = score.tensors
        assert kernel.failure(shape, seed, sharpness=(1, 4)[seed], formula=formula) == ""


@fibers
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "heads", "blocks", "window", "global tokens", "nothing"])
def test_mask_functions(name: str, head_dim: int, tmp_path: Path) -> None:
    kernels: dict[str, EmulatedForward] = {}
    for seed, shape in enumerate((*SHAPES, LONG)):
        known = {
            **functions_of_masks(shape),
            "global tokens": lambda b, h, i, j: ((i - j).abs() < 40) | (i < 7),
        }
        mask = masks.mask_mod(known[name], shape.seq_q, shape.seq_k, "cpu")
        if mask.text not in kernels:
            spec = first(head_dim, Mask.DENSE, mask_mod=MaskMod(mask.text))
            kernels[mask.text] = EmulatedForward(spec, tmp_path)
        assert kernels[mask.text].failure(shape, seed, mask=mask) == ""


@fibers
@pytest.mark.parametrize("planes", [0, 1])
@pytest.mark.parametrize(("intervals", "head_dim"), [(2, 128), (2, 64), (3, 128), (4, 64), (4, 128)])
def test_several_intervals(intervals: int, head_dim: int, planes: int, tmp_path: Path) -> None:
    """Of each key, the same for all heads and batch entries or not."""
    kernel = EmulatedForward(first(head_dim, Mask.SPANS, intervals=intervals, planes=planes), tmp_path)
    for seed, shape in enumerate(SHAPES):
        of_planes = (shape.batch, shape.heads_kv) if planes else (1, 1)
        mask = unions(shape.seq_q, shape.seq_k, intervals, "cpu", of_planes, seed)
        assert kernel.failure(shape, seed, mask=mask) == ""


# (head_dim, head_dim of V, mask, knobs) of pairs of blocks that load for each other
PAIRS: list[tuple[int, int, Mask, dict[str, Any]]] = [
    (128, 0, Mask.FULL, {"ping_pong": True}),
    (128, 0, Mask.CAUSAL, {"ping_pong": True}),
    (128, 0, Mask.FULL, {}),
    (128, 0, Mask.CAUSAL, {"tile_m": 128, "tile_n": 128, "stages": 2}),
    (64, 0, Mask.FULL, {"tile_n": 128, "stages": 2}),
    (72, 0, Mask.CAUSAL, {"tile_n": 96}),
    (192, 0, Mask.FULL, {"tile_m": 128, "tile_n": 96, "stages": 2, "ping_pong": True, "hand_over": 2}),
    (192, 0, Mask.CAUSAL, {"tile_m": 128, "stages": 2, "stages_v": 3}),
    (192, 128, Mask.CAUSAL, {"tile_n": 64}),
    (256, 0, Mask.FULL, {"tile_m": 128, "tile_n": 64, "stages": 2}),
    (256, 0, Mask.FULL, {"tile_m": 128, "tile_n": 64, "stages": 2, "k_ahead": True}),
    (256, 0, Mask.FULL, {"tile_m": 128, "stages": 2}),
]
# Even and odd groups, odd numbers of tiles and of work tiles, fewer and more than blocks; more queries than keys.
PAIRED = (
    *SHAPES,
    Shape(700, 300, 0, 1, 7),
    Shape(400, 400, 0, 1, 1),
    Shape(100, 600, 0, 1, 3),
    Shape(900, 200, 0, 1, 2),
)


def paired(head_dim: int, dim_v: int, mask: Mask, knobs: dict[str, Any]) -> Spec:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, dim_v=dim_v)
    usual = Sm90Forward(192, 80, 3, False, True, False, False, multicast=True)
    return Spec(problem, replace(usual, **knobs))


@fibers
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs_of_blocks(case: tuple[int, int, Mask, dict[str, Any]], tmp_path: Path) -> None:
    kernel = EmulatedForward(paired(*case), tmp_path)
    for seed, shape in enumerate(PAIRED):
        assert kernel.failure(shape, seed) == ""


@fibers
@pytest.mark.parametrize("name", ["softcap", "alibi", "relative"])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL], ids=lambda mask: mask.value)
def test_scores_of_pairs_of_blocks(mask: Mask, name: str, tmp_path: Path) -> None:
    """Which start from the kernels of plain attention in the tables."""
    shape = SHAPES[0]
    score, formula = functions(shape.batch, shape.heads_kv * shape.group, shape.seq_q, shape.seq_k)[name]
    spec = paired(128, 0, mask, {})
    spec = replace(spec, problem=replace(spec.problem, score=ScoreMod(score.text)))
    kernel = EmulatedForward(spec, tmp_path)
    kernel.score_tensors = score.tensors
    assert kernel.failure(shape, 0, formula=formula) == ""


def test_variants() -> None:
    """The kinds of kernels that BAGEL runs are among them."""
    kinds = {kind_of(spec) for spec in VARIANTS}
    assert {((128, 128), Mask.SPANS, 192, True, True), ((64, 64), Mask.SPANS, 192, True, True)} <= kinds
    assert ((72, 72), Mask.FULL, 192, True, False) in kinds


# Statements that the kernel needs; without any of them it hangs, or its results are wrong.
BREAKS = {
    "barriers used before they are there": "__syncthreads();",
    "Q overwritten before it is read": "barrier_wait(smem + kEmptyQ + q_pipe.stage * 8, q_pipe.phase ^ 1);",
    "K overwritten before it is read": "barrier_wait(smem + kEmptyK + kv_pipe.stage * 8, kv_pipe.phase ^ 1);",
    "V overwritten before it is read": "barrier_wait(smem + kEmptyV + kv_pipe.stage * 8, kv_pipe.phase ^ 1);",
    "K read before it is there": "barrier_wait(smem + kFullK + kv_pipe.stage * 8, kv_pipe.phase);",
    "V read before it is there": "barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);",
    "the first warpgroup does not begin": "named_arrive(kOrderBarrier, 256);  // the first warpgroup begins",
    "S read before it is complete": "wgmma_wait_all_but_one();  // S is complete, P V may still run",
    "O stored before it is complete": "wgmma_wait_all_but_one();  // O is complete, S may still run",
    "O stored before all warps have written it": "named_sync(kWarpgroupBarrier + warpgroup, 128);\n    if",
    "O stored without a fence": "proxy_fence();  // before TMA reads the buffer",
    "Q loaded over O that is being stored": "tma_store_wait();\n        barrier_arrive_if",
    "the list's end is not announced": "broadcast_end();",
    "the scheduler is not reset": "reset_scheduler();\n    }",
}


@fibers
def test_breaks_are_noticed(tmp_path: Path) -> None:
    spec = next(spec for spec in VARIANTS if kind_of(spec) == ((128, 128), Mask.SPANS, 192, True, True))
    kernel = EmulatedForward(spec, tmp_path, BREAKS)
    shapes = Shape(300, 420, 0, 1, 2), Shape(700, 70, 0, 1, 4)
    assert all(kernel.failure(shape, seed) == "" for shape in shapes for seed in range(2))
    for number, name in enumerate(BREAKS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(10) for shape in shapes), name


# The same for pairs of blocks.
BREAKS_OF_PAIRS = {
    "the other block's barriers used before they are there": "cluster_sync();  // the barriers of the other block",
    "a block leaves before the other one": "cluster_sync();  // until now the other block",
    "no release in the other block": "barrier_arrive_there_if(",
    "no release in this block": "barrier_arrive_if(condition, barrier);",
    "a panel is not loaded": "tma_multicast(at, map,",
}


@fibers
@pytest.mark.parametrize("case", PAIRS[:2], ids=str)
def test_breaks_of_pairs_are_noticed(case: tuple[int, int, Mask, dict[str, Any]], tmp_path: Path) -> None:
    kernel = EmulatedForward(paired(*case), tmp_path, BREAKS_OF_PAIRS)
    assert all(kernel.failure(shape, seed) == "" for seed, shape in enumerate(PAIRED))
    for number, name in enumerate(BREAKS_OF_PAIRS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(3) for shape in PAIRED[:2]), name


# The same for a score that adds lines.
BREAKS_OF_LINES = {
    "no numbers of keys": "store_numbers(smem + kOffsetNumbers);",
    "no kink": "bend_scores(s, lines, row,",
    "no slopes": "multiply_slope(s, slope,",
    "maxima without the line": "found[half] += row_line[half];",
    "the line of the visit before": "set_line();\n                    const PipelineState",
}


@fibers
def test_breaks_of_lines_are_noticed(tmp_path: Path) -> None:
    shape = SHAPES[0]
    heads = shape.heads_kv * shape.group
    score, formula = functions(shape.batch, heads, shape.seq_q, shape.seq_k)["alibi"]
    spec = first(128, Mask.SPANS, score=ScoreMod(score.text))
    kernel = EmulatedForward(spec, tmp_path, BREAKS_OF_LINES)
    kernel.score_tensors = score.tensors
    assert kernel.failure(shape, 0, formula=formula) == ""
    for number, name in enumerate(BREAKS_OF_LINES, 1):
        assert any(kernel.failure(shape, seed, number, formula=formula) for seed in range(3)), name
