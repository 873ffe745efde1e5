"""Functions of scores and of masks in the Hopper backward for wide heads: on the CPU, by nvcc, and on a GPU."""

from __future__ import annotations

import platform
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mask_functions
import pytest
import torch
from emulated_backward import EmulatedBackward
from oracle import Shape, draw, make_mask
from score_oracle import compare, functions, learned, learned_oracle, oracle, wanted
from spaces import part, quickly
from strict_nvcc import SERIALISED, check_resources, compile_strictly
from torch import Tensor

import attnforge
from attnforge import masks, scores
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.family import is_feasible
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide, dq_units, plan
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime import dispatch, kernels, ops
from attnforge.runtime.call import Call
from attnforge.runtime.masks import AnyMask, FunctionMask

DIMS = [(256, 256), (192, 192), (192, 128)]
MASKS = (Mask.FULL, Mask.CAUSAL, Mask.SPANS)
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
LIMIT = {DType.BFLOAT16: 2e-2, DType.FLOAT16: 3e-3}  # of the largest error, as a share of the largest value
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and dout
ON_CPU = [Shape(20, 40, 0, 2), Shape(200, 190, 0, 1, 2), Shape(130, 300, 0, 2, 1, 2)]
ON_GPU = [
    Shape(64, 64, 0, 1, 2),
    Shape(300, 190, 0, 2, 3),
    Shape(129, 640, 0, 1, 7),
    Shape(700, 700, 0, 4, 2, 3),
]
# Texts of scores by name: of one element, of one for each head, of one for most tiles, of one for each pair, of many.
TEXTS = {
    "softcap": scores.softcap(50.0).text,
    "approximate": scores.softcap(50.0, approximate=True).text,
    "alibi": "alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)",
    "relative": "relative(t0: float32[2]): score + t0[h, minimum(maximum(kv_idx - q_idx, -128), 128) + 128]",
    "bias": "bias(t0: float32[4]): score + t0[b, h, q_idx, kv_idx]",
    "mixed": functions(2, 2, 64, 64)["mixed"][0].text,
}
WANTED = {
    "slopes": TEXTS["alibi"],
    "table": TEXTS["relative"],
    "bias": TEXTS["bias"],
    "buckets": "buckets(t0: float32[2]): score + t0[h, int(2 * log(1 + float(abs(q_idx - kv_idx))))]",
}
TREE = "tree(t0: int32[2], t1: int32[2]): (t0[b, kv_idx] <= t0[b, q_idx]) & (t0[b, q_idx] < t1[b, kv_idx])"


def problem(dims: tuple[int, int], mask: Mask, score: str = "", mask_mod: str = "") -> Problem:
    head_dim, head_dim_v = dims
    dim_v = 0 if head_dim == head_dim_v else head_dim_v
    plain = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, dim_v=dim_v)
    return replace(plain, score=ScoreMod(score), mask_mod=MaskMod(mask_mod))


def first(of: Problem, deterministic: bool = False, pair: bool = False) -> Spec:
    """The first guess of single blocks, or of pairs."""
    return next(
        candidates(
            of,
            lambda t: isinstance(t, Sm90BackwardWide) and (t.deterministic, t.pair) == (deterministic, pair),
        )
    )


def takes_pairs(dims: tuple[int, int], score: str) -> bool:
    """Do pairs of blocks have room for a score?"""
    of = problem(dims, Mask.SPANS, score)
    return is_feasible(of, Sm90BackwardWide(64, 128, 2, 1, False, True), plan)


# ---- What the plan takes


@pytest.mark.parametrize(
    ("dims", "score", "tile_n", "pair"),
    [
        ((256, 256), TEXTS["softcap"], 80, True),
        ((256, 256), TEXTS["alibi"], 80, True),
        ((256, 256), TEXTS["relative"], 80, True),
        ((256, 256), TEXTS["bias"], 64, False),
        ((256, 256), wanted(WANTED["table"]), 64, False),
        ((192, 192), TEXTS["mixed"], 96, False),
        ((192, 128), wanted(WANTED["buckets"]), 80, False),
    ],
)
def test_first_guess(dims: tuple[int, int], score: str, tile_n: int, pair: bool) -> None:
    """Pairs where plain attention has them and the score fits; of single blocks those with fewer keys where a score
    takes registers. Dispatch finds the mma.sync family, too.
    """
    guess = next(candidates(problem(dims, Mask.CAUSAL, score))).tuning
    single = first(problem(dims, Mask.CAUSAL, score)).tuning
    assert isinstance(guess, Sm90BackwardWide)
    assert isinstance(single, Sm90BackwardWide)
    assert (guess.pair, single.tile_n, single.pair) == (pair, tile_n, False)
    assert list(candidates(replace(problem(dims, Mask.CAUSAL, score), arch=Arch.SM90)))


@pytest.mark.parametrize("mask", [Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_gemma_2_takes_it(device: str, mask: Mask) -> None:
    """Softcap 50 at head_dim 256, causal and with a sliding window: what `register_huggingface` calls."""
    target = dispatch.Target(device, (Arch.SM90A, Arch.SM90))
    choice = dispatch.choose_for(Call(problem(DIMS[0], mask, TEXTS["softcap"]), 2, 8192), target)
    plain = dispatch.choose_for(Call(problem(DIMS[0], mask), 2, 8192), target)
    assert isinstance(choice.spec.tuning, Sm90BackwardWide)
    assert choice.spec.tuning.pair
    assert choice.spec.tuning == plain.spec.tuning


@pytest.mark.parametrize("mask", [Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_searches_try_the_pairs_of_plain_attention(mask: Mask) -> None:
    def pairs_of(of: Problem) -> list[Tuning]:
        return [spec.tuning for spec in candidates(of, lambda t: getattr(t, "pair", False))]

    plain = pairs_of(problem(DIMS[0], mask))
    assert plain
    assert pairs_of(problem(DIMS[0], mask, TEXTS["softcap"])) == plain
    assert not pairs_of(problem(DIMS[0], mask, TEXTS["bias"]))


def test_refusals() -> None:
    """Gradients of tensors need a score that adds."""
    curved = wanted("a(t0: float32[1]): 30.0 * tanh(score * t0[h] / 30.0)")
    assert "only of a score plus what does not depend on it" in why_infeasible(
        problem(DIMS[0], Mask.CAUSAL, curved)
    )
    by_head = problem(DIMS[0], Mask.DENSE, mask_mod="a(t0: int32[1]): kv_idx <= q_idx + t0[h]")
    assert "mask_mod that reads h: the wide sm90a backward takes one mask for all heads" in why_infeasible(
        by_head
    )


@pytest.mark.parametrize(
    ("dims", "score", "reason"),
    [
        ((256, 256), TEXTS["bias"], "registers: the tiles take 216 per consumer thread, 4 more"),
        ((256, 128), wanted(WANTED["slopes"]), "registers: the tiles take 216"),
        ((192, 256), TEXTS["bias"], "registers: the tiles take 216"),
        ((256, 256), wanted(WANTED["table"]), "registers: the tiles take 216"),
        ((192, 256), wanted(WANTED["table"]), ""),
        ((256, 128), TEXTS["bias"], ""),
    ],
)
def test_refusals_of_pairs(dims: tuple[int, int], score: str, reason: str) -> None:
    """The consumer of dV reads what the score reads, that of dK sums gradients: each has registers if its own sum is
    narrower than 256.
    """
    pair = Spec(problem(dims, Mask.CAUSAL, score), Sm90BackwardWide(64, 128, 2, 1, False, True))
    if not reason:
        make_plan(pair)
        return
    with pytest.raises(Infeasible, match=reason):
        make_plan(pair)


# ---- On the CPU


on_cpu = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")


def emulated(of: Problem, knobs: tuple[int, ...], directory: Path, **more: Any) -> EmulatedBackward:
    """`knobs`: keys of a tile, buffers of Q, of dO, whether deterministic, and by pairs. `more`: others by name."""
    tile_n, stages, stages_dout, deterministic, pair = *knobs, *(0,) * (5 - len(knobs))
    flags = bool(deterministic), bool(pair)
    tuning = Sm90BackwardWide(64, tile_n, stages, stages_dout, *flags, **more)
    return EmulatedBackward(Spec(of, tuning), directory)


@on_cpu
@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "name"),
    [
        ((256, 256), Mask.CAUSAL, (80, 2, 1), "softcap"),
        ((192, 128), Mask.SPANS, (96, 2, 2, 1), "softcap"),
        ((256, 256), Mask.FULL, (64, 2, 1), "wide softcap"),
        ((192, 192), Mask.FULL, (96, 2, 2), "alibi"),
        ((192, 128), Mask.SPANS, (96, 2, 2, 1), "relative"),
        ((256, 256), Mask.CAUSAL, (64, 2, 1), "bias"),
        ((256, 256), Mask.SPANS, (64, 2, 1, 1), "mixed"),
        ((64, 128), Mask.CAUSAL, (128, 2, 1), "stepped"),
    ],
    ids=str,
)
def test_scores_on_the_cpu(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    kernel = None
    for seed, shape in enumerate(ON_CPU):
        score, formula = functions(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
        kernel = kernel or emulated(problem(dims, mask, score.text), knobs, tmp_path)
        kernel.score_tensors = score.tensors
        assert kernel.failure(shape, seed, formula=formula) == ""


@on_cpu
@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "name"),
    [
        ((256, 256), Mask.CAUSAL, (128, 2, 1, 0, 1), "softcap"),
        ((192, 128), Mask.SPANS, (128, 2, 2, 1, 1), "softcap"),
        ((192, 192), Mask.FULL, (128, 3, 1, 0, 1), "wide softcap"),
        ((256, 256), Mask.SPANS, (128, 2, 1, 1, 1), "alibi"),
        ((256, 256), Mask.CAUSAL, (128, 2, 1, 0, 1), "relative"),
        ((192, 128), Mask.FULL, (128, 2, 2, 0, 1), "bias"),
        ((192, 192), Mask.SPANS, (128, 2, 1, 0, 1), "mixed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("s_late", [False, True])
def test_scores_of_pairs_on_the_cpu(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], name: str, s_late: bool, tmp_path: Path
) -> None:
    """Rows of S are keys there, and a consumer computes P f' for the other one."""
    kernel = None
    for seed, shape in enumerate(ON_CPU):
        score, formula = functions(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
        kernel = kernel or emulated(problem(dims, mask, score.text), knobs, tmp_path, s_late=s_late)
        kernel.score_tensors = score.tensors
        assert kernel.failure(shape, seed, formula=formula) == ""


@on_cpu
@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "name", "staging"),
    [
        ((256, 256), Mask.CAUSAL, (128, 2, 1, 0, 1), "softcap", 2),
        ((192, 128), Mask.SPANS, (128, 2, 2, 0, 1), "bias", 2),
        ((192, 192), Mask.FULL, (128, 2, 1, 0, 1), "mixed", 2),
        ((192, 128), Mask.CAUSAL, (80, 2, 1), "softcap", 2),
        ((192, 128), Mask.SPANS, (80, 2, 1), "relative", 2),
    ],
    ids=str,
)
def test_scores_with_staged_dq_on_the_cpu(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], name: str, staging: int, tmp_path: Path
) -> None:
    """A visit has no place for dq's tile then, and dS, from which scores' gradients are summed, is overwritten."""
    shape = Shape(200, 190, 0, 1, 2)
    score, formula = functions(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
    kernel = emulated(problem(dims, mask, score.text), knobs, tmp_path, staging=staging)
    kernel.score_tensors = score.tensors
    assert kernel.failure(shape, 0, formula=formula) == ""


ORDER = {"dq_behind_dv": True, "loaders": 2}


@on_cpu
def test_another_order_of_products_on_the_cpu(tmp_path: Path) -> None:
    """P, which a curved score packs, is stored once dV has read that of the step before."""
    shape = Shape(200, 190, 0, 1, 2)
    score, formula = functions(shape.batch, 2, shape.seq_q, shape.seq_k)["softcap"]
    of = problem((192, 128), Mask.SPANS, score.text)
    kernel = emulated(of, (96, 2, 2), tmp_path, dq_of_second=2, **ORDER)
    kernel.score_tensors = score.tensors
    assert kernel.failure(shape, 0, formula=formula) == ""


@on_cpu
@pytest.mark.parametrize(
    ("dims", "mask", "knobs", "name"),
    [
        ((256, 256), Mask.CAUSAL, (64, 2, 1), "slopes"),
        ((192, 128), Mask.SPANS, (64, 2, 1), "plane"),
        ((256, 256), Mask.SPANS, (48, 2, 1), "table"),
        ((192, 192), Mask.FULL, (96, 2, 1), "table"),
        ((64, 128), Mask.CAUSAL, (128, 2, 1), "buckets"),
        ((192, 128), Mask.CAUSAL, (64, 2, 2), "keys"),
        ((192, 192), Mask.CAUSAL, (128, 2, 1, 0, 1), "slopes"),
        ((192, 128), Mask.SPANS, (128, 2, 2, 0, 1), "plane"),
        ((192, 256), Mask.FULL, (128, 2, 1, 0, 1), "table"),
        ((192, 128), Mask.CAUSAL, (128, 2, 2, 0, 1), "buckets"),
        ((192, 192), Mask.SPANS, (128, 2, 1, 0, 1), "keys"),
        ((256, 256), Mask.CAUSAL, (64, 2, 1, 1), "slopes"),
        ((192, 128), Mask.SPANS, (64, 2, 1, 1), "plane"),
        ((192, 192), Mask.FULL, (96, 2, 1, 1), "table"),
        ((192, 128), Mask.CAUSAL, (128, 2, 2, 1, 1), "buckets"),
        ((192, 192), Mask.SPANS, (128, 2, 1, 1, 1), "keys"),
    ],
    ids=str,
)
def test_gradients_of_tensors_on_the_cpu(
    dims: tuple[int, int], mask: Mask, knobs: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    shape = Shape(130, 300, 0, 1, 2, 2)
    score, formula, tensors = learned(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
    found = score(*tensors)
    kernel = emulated(problem(dims, mask, wanted(found.text)), knobs, tmp_path)
    kernel.score_tensors = tuple(x.detach() for x in found.tensors)
    assert kernel.failure(shape, 0, formula=formula, learned=tensors) == ""


@on_cpu
@pytest.mark.parametrize("name", ["slopes", "keys"])
def test_gradients_of_tensors_beside_staged_dq_on_the_cpu(name: str, tmp_path: Path) -> None:
    shape = Shape(130, 300, 0, 1, 2, 2)
    score, formula, tensors = learned(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
    found = score(*tensors)
    of = problem((192, 192), Mask.CAUSAL, wanted(found.text))
    kernel = emulated(of, (128, 2, 1, 0, 1), tmp_path, staging=2)
    kernel.score_tensors = tuple(x.detach() for x in found.tensors)
    assert kernel.failure(shape, 0, formula=formula, learned=tensors) == ""


@on_cpu
@pytest.mark.parametrize(
    ("dims", "name", "knobs", "score"),
    [
        ((256, 256), "documents", (80, 2, 1), ""),
        ((192, 128), "documents", (96, 2, 2, 1), "softcap"),
        ((192, 192), "blocks", (80, 2, 2), "alibi"),
        ((64, 128), "window", (128, 2, 1, 1), "relative"),
        ((256, 256), "documents", (128, 2, 1, 0, 1), ""),
        ((192, 128), "documents", (128, 2, 2, 1, 1), "softcap"),
        ((256, 256), "blocks", (128, 2, 1, 0, 1), "alibi"),
        ((192, 192), "window", (128, 2, 1, 1, 1), "relative"),
    ],
    ids=str,
)
def test_masks_by_functions_on_the_cpu(
    dims: tuple[int, int], name: str, knobs: tuple[int, ...], score: str, tmp_path: Path
) -> None:
    """Also of a function that differs between batch entries."""
    shape = Shape(200, 190, 0, 1, 2, 2)
    known = functions(shape.batch, 2, shape.seq_q, shape.seq_k)
    applied, formula = known[score] if score else (scores.Score(""), lambda s, *at: s)
    mask = function_mask(name, shape, "cpu")
    kernel = emulated(problem(dims, Mask.DENSE, applied.text, mask.text), knobs, tmp_path)
    kernel.score_tensors = applied.tensors
    assert kernel.failure(shape, 0, formula=formula, mask=mask) == ""


@on_cpu
@pytest.mark.parametrize("knobs", [(96, 2, 2), (128, 2, 2, 0, 1)], ids=str)
@pytest.mark.parametrize("name", ["", "softcap", "alibi"])
def test_several_intervals_on_the_cpu(name: str, knobs: tuple[int, ...], tmp_path: Path) -> None:
    """Keys whose queries are three intervals, and keys that nobody sees."""
    shape = Shape(200, 190, 0, 1, 2)
    known = functions(shape.batch, 2, shape.seq_q, shape.seq_k)
    score, formula = known[name] if name else (scores.Score(""), lambda s, *at: s)
    starts, ends = (torch.zeros(3, shape.seq_k, dtype=torch.int32) for _ in range(2))
    for i, (first_query, end) in enumerate(((0, 50), (90, 120), (150, shape.seq_q))):
        starts[i, :150], ends[i, :150] = first_query, end
    of = replace(problem((192, 128), Mask.SPANS, score.text), intervals=3)
    kernel = emulated(of, knobs, tmp_path)
    kernel.score_tensors = score.tensors
    assert kernel.failure(shape, 0, formula=formula, mask=attnforge.Spans(starts, ends)) == ""


@on_cpu
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("intervals", [1, 2])
def test_starts_and_ends_of_any_size_on_the_cpu(intervals: int, pair: bool, tmp_path: Path) -> None:
    """Differences of these and of query numbers do not fit 32 bits."""
    shape, (least, most) = Shape(200, 190, 0, 1, 2), (-(2**31), 2**31 - 1)
    score, formula = functions(shape.batch, 2, shape.seq_q, shape.seq_k)["softcap"]
    starts, ends = (torch.zeros(intervals, shape.seq_k, dtype=torch.int32) for _ in range(2))
    starts[0], ends[0] = least, 100
    starts[0, ::3], ends[0, ::3] = least, least  # keys that nobody sees
    starts[-1, 1::3], ends[-1, 1::3] = 150, most
    of = replace(problem((192, 128), Mask.SPANS, score.text), intervals=intervals)
    kernel = emulated(of, (128 if pair else 96, 2, 2, 0, pair), tmp_path)
    kernel.score_tensors = score.tensors
    mask = attnforge.Spans(*((starts, ends) if intervals > 1 else (starts[0], ends[0])))
    assert kernel.failure(shape, 0, formula=formula, mask=mask) == ""


def function_mask(name: str, shape: Shape, device: str) -> FunctionMask:
    function = mask_functions.functions(shape, device)[name]
    traced = masks.mask_mod(function, shape.seq_q, shape.seq_k, device)
    return FunctionMask(traced.text, traced.tensors, shape.seq_q, shape.seq_k, device, batch=shape.batch)


# ---- nvcc


def first_guesses() -> Iterator[Spec]:
    """Those of all scores and dims, with masks in turn; then of masks by functions."""
    turn = (Mask.CAUSAL, Mask.SPANS, Mask.FULL)
    every = [*TEXTS.values(), *map(wanted, WANTED.values())]
    for number, (dims, score) in enumerate(product(DIMS, every)):
        mask = turn[(number + number // len(every)) % 3]
        yield first(problem(dims, mask, score))
        if score in (TEXTS["softcap"], TEXTS["relative"], wanted(WANTED["table"])):
            yield first(problem(dims, mask, score), deterministic=True)
    for dims, score in product(DIMS, ("", TEXTS["softcap"], TEXTS["alibi"])):
        yield first(problem(dims, Mask.DENSE, score, TREE))


def aspects(spec: Spec) -> Iterator[Hashable]:
    """What has to be compiled in each run: each score, mask and order at each head_dim or once, not all together.

    At 256 each score that leaves fewest registers; their tiles have 64 keys, or they are those of pairs.
    """
    of, tuning = spec.problem, spec.tuning
    assert isinstance(tuning, Sm90BackwardWide)
    dims = of.head_dim, of.head_dim_v
    yield from ((dims, of.mask, bool(of.mask_mod)), (dims, tuning.deterministic), (dims, tuning.s_late))
    yield bool(of.score.wanted), tuning.deterministic
    yield from ((of.score, tuning.pair), (of.score, bool(of.mask_mod)), of.intervals)
    if dims == DIMS[0] and (tuning.tile_n in (64, 128) or not of.score):
        yield dims, of.score, of.mask_mod


def fewer_aspects(spec: Spec) -> Iterator[Hashable]:
    """Likewise where other knobs than those of a first guess are what is compiled: masks and scores at any head_dim."""
    of, tuning = spec.problem, spec.tuning
    assert isinstance(tuning, Sm90BackwardWide)
    yield from (of.mask, of.score, of.intervals)
    yield from ((of.head_dim, of.dim_v, x) for x in (tuning.tile_n, tuning.dq_of_second > 0, tuning.s_late))


def aspects_of_pairs(spec: Spec) -> Iterator[Hashable]:
    """Likewise, with both sums of dQ, and functions of masks at each head_dim, with a score and without.

    `test_what_dispatch_chooses_does_not_spill` compiles the pairs of head_dim 256 that calls get.
    """
    of, tuning = spec.problem, spec.tuning
    assert isinstance(tuning, Sm90BackwardWide)
    yield from fewer_aspects(spec)
    yield from ((bool(of.score.wanted), tuning.deterministic), (bool(of.mask_mod), bool(of.score)))
    yield bool(of.mask_mod), of.head_dim, of.dim_v


def in_another_order(spec: Spec) -> Spec:
    """Also with another share of dQ, where it has registers for it."""
    tuning = replace(spec.tuning, **ORDER)
    more = replace(tuning, dq_of_second=dq_units(spec.problem)[1] + 1)  # type: ignore[call-arg]
    return Spec(spec.problem, more if is_feasible(spec.problem, more, plan) else tuning)


@pytest.mark.nvcc
@quickly
def test_first_guesses_do_not_spill(quick: bool, nvcc: None, tmp_path: Path) -> None:
    log = check_resources([render(spec) for spec in part(first_guesses(), quick, aspects)], tmp_path)
    assert not SERIALISED.search(log), log


def pairs() -> Iterator[Spec]:
    """Likewise of pairs, where these have room for the score; each with one of both orders."""
    turn = (Mask.CAUSAL, Mask.SPANS, Mask.FULL)
    every = [*TEXTS.values(), *map(wanted, WANTED.values())]
    for number, (dims, score) in enumerate(product(DIMS, every)):
        if takes_pairs(dims, score):
            mask = turn[(number + number // len(every)) % 3]
            spec = first(problem(dims, mask, score), pair=True)
            yield Spec(spec.problem, replace(spec.tuning, s_late=bool(number % 2)))  # type: ignore[call-arg]
            if score in (TEXTS["softcap"], wanted(WANTED["table"])):
                yield first(problem(dims, mask, score), True, pair=True)
    for dims, score in product(DIMS, ("", TEXTS["softcap"], TEXTS["alibi"])):
        yield first(problem(dims, Mask.DENSE, score, TREE), pair=True)
    for score in (TEXTS["softcap"], TEXTS["alibi"]):
        yield first(replace(problem(DIMS[0], Mask.SPANS, score), intervals=2), pair=True)


@pytest.mark.nvcc
@quickly
def test_pairs_do_not_spill(quick: bool, nvcc: None, tmp_path: Path) -> None:
    log = check_resources([render(spec) for spec in part(pairs(), quick, aspects_of_pairs)], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.nvcc
@quickly
def test_pairs_with_staged_dq_do_not_spill(quick: bool, nvcc: None, tmp_path: Path) -> None:
    specs = [spec for spec in pairs() if not spec.tuning.deterministic]  # type: ignore[attr-defined]
    staged = [Spec(spec.problem, replace(spec.tuning, staging=2)) for spec in specs[::2]]  # type: ignore[call-arg]
    log = check_resources([render(spec) for spec in part(staged, quick, fewer_aspects)], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.nvcc
@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_what_dispatch_chooses_does_not_spill(device: str, nvcc: None, tmp_path: Path) -> None:
    """Of scores without a table entry at 8/4/256: the pairs of plain attention, without a byte of spills."""
    target = dispatch.Target(device, (Arch.SM90A, Arch.SM90))
    scored = [problem(DIMS[0], Mask.CAUSAL, TEXTS[name]) for name in ("softcap", "alibi", "relative")]
    calls = [*scored, problem(DIMS[0], Mask.DENSE, mask_mod=TREE)]
    specs = [dispatch.choose_for(Call(of, 2, 8192), target).spec for of in calls]
    assert all(isinstance(spec.tuning, Sm90BackwardWide) and spec.tuning.pair for spec in specs)
    log, resources = compile_strictly([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


@pytest.mark.nvcc
@quickly
def test_other_orders_do_not_spill(quick: bool, nvcc: None, tmp_path: Path) -> None:
    specs = part((in_another_order(spec) for spec in list(first_guesses())[::3]), quick, fewer_aspects)
    assert any("_u" in spec.slug for spec in specs)
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


# ---- On a GPU


def gradients(
    spec: Spec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor,
    mask: AnyMask,
    score: scores.Score,
) -> tuple[Tensor, ...]:
    """Those of a call by this kernel. `x`: q, k, v and dout."""
    q, k, v, dout = x
    handle = kernels.load(spec, torch.device("cuda"))
    strict = spec.tuning.deterministic  # type: ignore[attr-defined]
    rounded, given = out.to(q.dtype), score if spec.problem.score else None
    return ops.backward(
        dout, q, k, v, rounded, lse.float(), mask, None, strict, handle, dlse=dlse, score=given
    )


def drawn(spec: Spec, shape: Shape, seed: int) -> Inputs:
    """q, k, v and dout of a call."""
    if kernels.target(torch.device("cuda")) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    of = spec.problem
    sizes = replace(shape, head_dim=of.head_dim, dim_v=of.head_dim_v)
    x = draw(sizes, TORCH[of.dtype], "cuda", seed=seed)
    return x.q.detach(), x.k.detach(), x.v.detach(), x.dout


def check(spec: Spec, name: str, limit: float, mask_name: str = "") -> None:
    """The kernel of a spec against float64, on all shapes; deterministic ones give the same bits again."""
    of = spec.problem
    for seed, shape in enumerate(ON_GPU):
        x = q, k, v, dout = drawn(spec, shape, seed)
        heads = shape.heads_kv * shape.group
        known = functions(shape.batch, heads, shape.seq_q, shape.seq_k, "cuda")
        score, formula = known[name] if name else (scores.Score(""), lambda s, *at: s)
        of = replace(of, score=ScoreMod(score.text))
        mask: AnyMask
        if mask_name:
            mask = function_mask(mask_name, shape, "cuda")
            of = replace(of, mask_mod=MaskMod(mask.text))
        else:
            mask = make_mask(of.mask.value, shape.seq_q, shape.seq_k, "cuda", seed)
        dlse = torch.rand(shape.batch, heads, shape.seq_q, device="cuda")
        out, lse, *exact = oracle(q, k, v, mask, formula, dout, dlse)
        call = Spec(of, spec.tuning), x, out, lse, dlse, mask, score
        grads = gradients(*call)
        compare([out, lse, *grads], [out, lse, *exact], limit)
        if spec.tuning.deterministic:  # type: ignore[attr-defined]
            assert all(map(torch.equal, grads, gradients(*call)))


# Dims, a score and a mask: all masks for one score, and masks in turn for the others.
NAMES = ("softcap", "approximate", "alibi", "aligned", "bias", "relative", "mixed", "stepped")
CASES = [(dims, "wide softcap", mask) for dims in DIMS for mask in MASKS] + [
    (dims, name, MASKS[(i + j) % 3]) for i, dims in enumerate(DIMS) for j, name in enumerate(NAMES)
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "name", "mask", "deterministic"),
    [(*case, False) for case in CASES]
    + [(*case, True) for case in CASES if case[1] in ("softcap", "relative")],
    ids=str,
)
def test_scores_on_a_gpu(dims: tuple[int, int], name: str, mask: Mask, deterministic: bool) -> None:
    text = functions(1, 2, 64, 64)[name][0].text
    check(first(problem(dims, mask, text), deterministic), name, LIMIT[DType.BFLOAT16])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "name", "mask", "deterministic", "s_late"),
    [
        (*case, deterministic, s_late)
        for case, deterministic, s_late in product(CASES, (False, True), (False, True))
        if takes_pairs(case[0], functions(1, 2, 64, 64)[case[1]][0].text)
        and (case[1] in ("softcap", "relative") or not deterministic)
    ],
    ids=str,
)
def test_scores_of_pairs_on_a_gpu(
    dims: tuple[int, int], name: str, mask: Mask, deterministic: bool, s_late: bool
) -> None:
    text = functions(1, 2, 64, 64)[name][0].text
    spec = first(problem(dims, mask, text), deterministic, pair=True)
    check(
        Spec(spec.problem, replace(spec.tuning, s_late=s_late)),  # type: ignore[call-arg]
        name,
        LIMIT[DType.BFLOAT16],
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "name", "staging", "pair"),
    [
        ((256, 256), "softcap", 2, True),
        ((192, 192), "mixed", 2, True),
        ((192, 128), "bias", 2, True),
        ((192, 128), "relative", 2, False),
        ((192, 128), "alibi", 2, False),
    ],
    ids=str,
)
def test_scores_with_staged_dq_on_a_gpu(dims: tuple[int, int], name: str, staging: int, pair: bool) -> None:
    text = functions(1, 2, 64, 64)[name][0].text
    spec = first(problem(dims, Mask.CAUSAL, text), pair=pair)
    tuning = replace(spec.tuning, staging=staging, stages_dout=1)  # type: ignore[call-arg]
    check(Spec(spec.problem, tuning), name, LIMIT[DType.BFLOAT16])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softcap", "relative"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_another_order_of_products_on_a_gpu(dims: tuple[int, int], name: str) -> None:
    text = functions(1, 2, 64, 64)[name][0].text
    check(in_another_order(first(problem(dims, Mask.CAUSAL, text))), name, LIMIT[DType.BFLOAT16])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "name"), list(zip(DIMS, ("softcap", "alibi", "mixed"), strict=True)), ids=str
)
@pytest.mark.parametrize("pair", [False, True])
def test_scores_in_fp16_on_a_gpu(dims: tuple[int, int], name: str, pair: bool) -> None:
    text = functions(1, 2, 64, 64)[name][0].text
    of = replace(problem(dims, Mask.CAUSAL, text), dtype=DType.FLOAT16)
    check(first(of, pair=pair), name, LIMIT[DType.FLOAT16])


@pytest.mark.gpu
@pytest.mark.parametrize("tile_n", [48, 64, 80, 96, 112, 128])
def test_all_tiles_of_a_softcap_on_a_gpu(tile_n: int) -> None:
    of = problem((64, 128), Mask.CAUSAL, TEXTS["softcap"])
    tuning = Sm90BackwardWide(64, tile_n, 2, 1, False)
    check(Spec(of, tuning), "wide softcap", LIMIT[DType.BFLOAT16])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "score", "deterministic"),
    [
        ("documents", "", False),
        ("documents", "wide softcap", True),
        ("blocks", "alibi", False),
        ("window", "wide softcap", False),
        ("everything", "", True),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_masks_by_functions_on_a_gpu(
    dims: tuple[int, int], pair: bool, name: str, score: str, deterministic: bool
) -> None:
    text = functions(1, 2, 64, 64)[score][0].text if score else ""
    spec = first(problem(dims, Mask.DENSE, text, TREE), deterministic, pair)
    check(spec, score, LIMIT[DType.BFLOAT16], name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "name", "mask", "pair"),
    [
        (dims, name, MASKS[(i + j) % 3], pair)
        for i, dims in enumerate(DIMS)
        for j, name in enumerate(("slopes", "plane", "table", "buckets", "keys"))
        for pair in ((False, True) if dims[0] == 192 else (False,))
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_tensors_on_a_gpu(
    dims: tuple[int, int], name: str, mask: Mask, pair: bool, deterministic: bool
) -> None:
    """Against float64 with the rounding of the output that the kernel gets; deterministic ones three times."""
    for seed, shape in enumerate(ON_GPU[1:]):
        heads = shape.heads_kv * shape.group
        score, formula, tensors = learned(shape.batch, heads, shape.seq_q, shape.seq_k, "cuda")[name]
        found = score(*tensors)
        spec = first(problem(dims, mask, wanted(found.text)), deterministic, pair)
        x = q, k, v, dout = drawn(spec, shape, seed)
        seen = make_mask(mask.value, shape.seq_q, shape.seq_k, "cuda", seed)
        values = [t.detach().double() for t in tensors]
        out, lse, *_ = oracle(q, k, v, seen, lambda *at, f=formula, more=values: f(*at, *more), dout)
        exact = learned_oracle(q, k, v, seen, formula, tensors, dout, out.to(q.dtype))
        given = scores.Score(str(spec.problem.score), tuple(t.detach() for t in found.tensors))
        call = spec, x, out, lse, torch.zeros_like(lse).float(), seen, given
        grads = gradients(*call)
        for _ in range(2 * deterministic):
            assert all(map(torch.equal, grads, gradients(*call)))
        for got, answer in zip(grads, exact, strict=True):
            size = answer.pow(2).mean().sqrt().item()
            error = (got.double() - answer.reshape(got.shape)).pow(2).mean().sqrt().item()
            assert error <= 2e-2 * max(size, 1e-3), f"rms error {error:.3g} of {size:.3g}"
