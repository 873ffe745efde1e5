"""The Hopper backward of head_dim 128 at most as a whole, on the CPU: its gradients, and planted mistakes."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path

import pytest
from emulated_backward import EmulatedBackward
from mask_functions import functions as functions_of_masks
from oracle import Shape, unions
from score_oracle import functions, learned, wanted
from spaces import first_hopper, tuned_kinds

from attnforge import masks
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

fibers = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
# Last tiles that are not full, key tiles that no query sees, rows that see nothing, heads that share keys.
SHAPES = Shape(200, 260, 0, 1, 2), Shape(300, 140, 0, 2, 1, 2)
MASKS = Mask.FULL, Mask.CAUSAL, Mask.SPANS
OF_ALL = 64, 128  # head dims of which each kind of kernel runs


def kind_of(spec: Spec) -> tuple[int, Mask, bool, bool, bool]:
    """head_dim, mask; has each q head blocks of its own, are sums in a fixed order, are blocks persistent?"""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Backward)
    if p.head_dim not in OF_ALL:
        return p.head_dim, p.mask, False, False, False
    return p.head_dim, p.mask, t.split_heads, t.deterministic, bool(t.persistent)


VARIANTS = [
    spec
    for spec in tuned_kinds(Direction.BACKWARD, Sm90Backward, kind_of)
    if spec.problem.mask in MASKS and not spec.problem.dim_v
]
first = partial(first_hopper, Direction.BACKWARD)


@fibers
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.slug)
def test_gradients(spec: Spec, tmp_path: Path) -> None:
    """Of a deterministic kernel, also the same bits in another order of the warps."""
    kernel = EmulatedBackward(spec, tmp_path)
    for seed, shape in enumerate(SHAPES):
        assert kernel.failure(shape, seed) == ""


@fibers
@pytest.mark.parametrize("mask", [*MASKS, Mask.DENSE], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", OF_ALL)
def test_first_choices(head_dim: int, mask: Mask, tmp_path: Path) -> None:
    kernel = EmulatedBackward(first(head_dim, mask), tmp_path)
    for seed, shape in enumerate(SHAPES):
        assert kernel.failure(shape, seed) == ""


@fibers
@pytest.mark.parametrize("mask", [*MASKS, Mask.DENSE], ids=lambda mask: mask.value)
@pytest.mark.parametrize(
    ("head_dim", "name"),
    [
        (128, "softcap"),
        (64, "softcap"),
        (128, "alibi"),
        (128, "walled"),
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
        kernel = kernel or EmulatedBackward(first(head_dim, mask, score=ScoreMod(score.text)), tmp_path)
        kernel.score_tensors = score.tensors
        assert kernel.failure(shape, seed, formula=formula) == ""


@fibers
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("slopes", Mask.CAUSAL),
        ("plane", Mask.SPANS),
        ("table", Mask.FULL),
        ("buckets", Mask.CAUSAL),
        ("keys", Mask.SPANS),
    ],
)
def test_gradients_of_tensors(name: str, mask: Mask, deterministic: bool, tmp_path: Path) -> None:
    """Of those that a score reads, whose gradients are wanted."""
    shape = Shape(130, 300, 0, 1, 2, 2)
    score, formula, tensors = learned(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
    found = score(*tensors)
    chosen = deterministic_candidates if deterministic else candidates
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, mask, score=wanted(found.text))
    kernel = EmulatedBackward(next(chosen(problem)), tmp_path)
    kernel.score_tensors = tuple(x.detach() for x in found.tensors)
    assert kernel.failure(shape, 0, formula=formula, learned=tensors) == ""


@fibers
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "heads", "blocks", "window", "nothing"])
def test_mask_functions(name: str, head_dim: int, tmp_path: Path) -> None:
    kernels: dict[str, EmulatedBackward] = {}
    for seed, shape in enumerate(SHAPES):
        mask = masks.mask_mod(functions_of_masks(shape)[name], shape.seq_q, shape.seq_k, "cpu")
        if mask.text not in kernels:
            spec = first(head_dim, Mask.DENSE, mask_mod=MaskMod(mask.text))
            kernels[mask.text] = EmulatedBackward(spec, tmp_path)
        assert kernels[mask.text].failure(shape, seed, mask=mask) == ""


@fibers
def test_long_lists_are_cut(tmp_path: Path) -> None:
    """Those of tiles with global tokens, by a function; the pieces' dK and dV are added."""
    shape = Shape(2600, 300, 0, 1, 1)
    mask = masks.mask_mod(lambda b, h, i, j: ((i - j).abs() < 40) | (j < 7), shape.seq_q, shape.seq_k, "cpu")
    kernel = EmulatedBackward(first(128, Mask.DENSE, mask_mod=MaskMod(mask.text)), tmp_path)
    assert kernel.failure(shape, 0, mask=mask) == ""


@fibers
@pytest.mark.parametrize("planes", [0, 1])
@pytest.mark.parametrize(("intervals", "head_dim"), [(2, 128), (2, 64), (3, 128), (4, 64), (4, 128)])
def test_several_intervals(intervals: int, head_dim: int, planes: int, tmp_path: Path) -> None:
    """Of each key, the same for all heads and batch entries or not."""
    kernel = EmulatedBackward(first(head_dim, Mask.SPANS, intervals=intervals, planes=planes), tmp_path)
    for seed, shape in enumerate(SHAPES):
        of_planes = (shape.batch, shape.heads_kv) if planes else (1, 1)
        mask = unions(shape.seq_q, shape.seq_k, intervals, "cpu", of_planes, seed)
        assert kernel.failure(shape, seed, mask=mask) == ""


def test_variants() -> None:
    """The kinds of kernels that BAGEL runs are among them."""
    kinds = {kind_of(spec) for spec in VARIANTS}
    for head_dim in OF_ALL:
        assert {(head_dim, Mask.SPANS, split, False, False) for split in (False, True)} <= kinds
        assert any(kind[0] == head_dim and kind[3] for kind in kinds)
    assert any(kind[4] for kind in kinds)


# Statements that the kernel needs; without any of them it hangs, or its results are wrong or have other bits.
BREAKS = {
    "K read before it is there": "barrier_wait(base + kFullK, 0);",
    "V read before it is there": "barrier_wait(base + kFullV, 0);",
    "Q overwritten before it is read": "barrier_wait(base + kEmptyQ + ring.stage * 8, ring.phase);",
    "dO overwritten before it is read": "barrier_wait(base + kEmptyDo + ring.stage * 8, ring.phase);",
    "dP read before it is complete": "wgmma_wait<1>();  // dP is complete",
    "S read before it is complete": "wgmma_wait<1>();  // dV and S are complete",
    "dS of the other warpgroup read before it is there": "barrier_wait(base + kFullDs, step & 1);",
    "dQ added in another order": "semaphore_wait(dq_semaphore(p, plane, tile), order);",
    "dK and dV added in another order": "semaphore_wait(dkv_semaphore(p, work), dkv_order(p, work));",
    "an addition to dQ is not announced": "semaphore_release(dq_semaphore(p, plane, tile));",
    "an addition to dQ is announced too early": "bulk_reduce_wait();",
    "dQ overwritten before it is added": "barrier_wait(base + kEmptyDq + group * 8, step & 1 ^ 1);",
}


@fibers
def test_breaks_are_noticed(tmp_path: Path) -> None:
    spec = next(spec for spec in VARIANTS if kind_of(spec) == (128, Mask.SPANS, True, True, False))
    kernel = EmulatedBackward(spec, tmp_path, BREAKS)
    shape = Shape(300, 300, 0, 1, 3)  # sums of two additions have the same bits in either order
    assert all(kernel.failure(shape, seed) == "" for seed in range(2))
    for number, name in enumerate(BREAKS, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(10)), name
