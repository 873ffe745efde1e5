"""The Hopper forward of 16-bit types as a whole, on the CPU: its results against float64, and planted mistakes."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from emulated_forward import EmulatedForward
from oracle import Shape
from score_oracle import functions

from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.winners import tuned_specs

fibers = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
# More work tiles than blocks, and last tiles that are not full; rows that see nothing.
SHAPES = Shape(300, 420, 0, 1, 2), Shape(450, 170, 0, 2, 1, 2)


def variants() -> list[Spec]:
    """Of the kernels of the tuned tables the first of its kind, without scores, functions and several intervals."""
    found: dict[tuple[object, ...], Spec] = {}
    for spec in tuned_specs():
        p, t = spec.problem, spec.tuning
        kind = p.arch, p.direction, p.dtype
        hopper = kind == (Arch.SM90A, Direction.FORWARD, DType.BFLOAT16) and isinstance(t, Sm90Forward)
        if hopper and not (t.splits or p.score or p.mask_mod or p.unions):
            found.setdefault((p.head_dims, p.mask, t.tile_m, t.ping_pong, t.dynamic), spec)
    return list(found.values())


@fibers
@pytest.mark.parametrize("spec", variants(), ids=lambda spec: spec.slug)
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
        (96, "bias"),
        (128, "mixed"),
    ],
)
def test_scores(head_dim: int, name: str, mask: Mask, tmp_path: Path) -> None:
    kernel = None
    for seed, shape in enumerate(SHAPES):
        heads = shape.heads_kv * shape.group
        score, formula = functions(shape.batch, heads, shape.seq_q, shape.seq_k)[name]
        problem = Problem(
            Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, score=ScoreMod(score.text)
        )
        kernel = kernel or EmulatedForward(next(candidates(problem)), tmp_path)
        kernel.score_tensors = score.tensors
        assert kernel.failure(shape, seed, sharpness=(1, 4)[seed], formula=formula) == ""


def test_variants() -> None:
    """The kinds of kernels that BAGEL runs are among them."""
    kinds = {(s.problem.head_dim, s.problem.mask, s.tuning.ping_pong, s.tuning.dynamic) for s in variants()}
    assert {
        (128, Mask.SPANS, True, True),
        (64, Mask.SPANS, True, True),
        (72, Mask.FULL, True, False),
    } <= kinds


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
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS, 16)
    spec = next(
        spec
        for spec in variants()
        if spec.problem == problem and spec.tuning.ping_pong and spec.tuning.dynamic
    )
    kernel = EmulatedForward(spec, tmp_path, BREAKS)
    shapes = Shape(300, 420, 0, 1, 2), Shape(700, 70, 0, 1, 4)
    assert all(kernel.failure(shape, seed) == "" for shape in shapes for seed in range(2))
    for number, name in enumerate(BREAKS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(10) for shape in shapes), name
