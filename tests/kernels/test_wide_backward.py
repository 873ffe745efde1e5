"""The Hopper backward for wide heads: what it takes, that it compiles without spills, and gradients on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from oracle import Shape, draw, make_mask
from spaces import part, quickly
from strict_nvcc import SERIALISED, check_resources

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.limits import SHARED_LIMIT
from attnforge.codegen.families.sm90_backward_wide import (
    BACKWARD,
    Sm90BackwardWide,
    dq_units,
    staged_columns,
)
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.reference import reference

DIMS = [(256, 256), (192, 192), (192, 128), (128, 192), (64, 128), (128, 64), (256, 64)]
PAIR_DIMS = [(256, 256), (192, 192), (192, 128), (256, 128), (192, 256)]  # that pairs of blocks take
# Rows that end inside of a panel of 64 columns: of both, of one, of none of 64; 200 takes no less memory than 256.
PADDED_DIMS = [(136, 136), (160, 160), (200, 200), (224, 224), (192, 96), (160, 128), (40, 72), (16, 256)]
PADDED_PAIR_DIMS = [(136, 136), (160, 160), (200, 200), (224, 224), (192, 96), (160, 128), (184, 248)]
PLAIN = {"stages": 2, "stages_dout": 1}  # knobs of a pair
MASKS = (Mask.FULL, Mask.CAUSAL, Mask.SPANS)
LIMIT = 2e-2  # of the rms error, as a share of the gradients' own: bfloat16 of all that goes in and out
SHAPES = [
    Shape(seq_q=64, seq_k=64, heads_kv=1),
    Shape(seq_q=300, seq_k=190, heads_kv=2, group=3),
    Shape(seq_q=129, seq_k=640, heads_kv=1, group=7),
    Shape(seq_q=700, seq_k=700, heads_kv=4, group=2, batch=3),
]


def problem(dims: tuple[int, int], mask: Mask, dtype: DType = DType.BFLOAT16) -> Problem:
    head_dim, head_dim_v = dims
    dim_v = 0 if head_dim == head_dim_v else head_dim_v
    return Problem(Direction.BACKWARD, Arch.SM90A, dtype, head_dim, mask, dim_v=dim_v)


def first(dims: tuple[int, int], mask: Mask, deterministic: bool = False, pair: bool = False) -> Spec:
    """The first guess."""
    return next(
        spec
        for spec in candidates(problem(dims, mask))
        if isinstance(spec.tuning, Sm90BackwardWide)
        and (spec.tuning.deterministic, spec.tuning.pair) == (deterministic, pair)
    )


@pytest.mark.parametrize("dims", DIMS + PADDED_DIMS)
def test_columns_of_dq_are_shared(dims: tuple[int, int]) -> None:
    """Both consumers' units make head_dim, the last one perhaps more; none has a negative number."""
    shared = dq_units(problem(dims, Mask.FULL))
    assert sum(shared) * 64 - 64 < dims[0] <= sum(shared) * 64
    assert min(shared) >= 0


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    ("dims", "whole"),
    [((136, 136), (192, 192)), ((160, 128), (192, 128)), ((192, 96), (192, 128)), ((224, 224), (256, 256))],
)
def test_rows_are_stored_as_those_of_whole_panels(
    dims: tuple[int, int], whole: tuple[int, int], pair: bool
) -> None:
    """The same blocks, shared memory and sums; TMA sees the true rows, which it copies panel by panel."""
    padded, other = (make_plan(first(each, Mask.CAUSAL, pair=pair)) for each in (dims, whole))
    assert padded.spec.tuning == other.spec.tuning
    assert padded.launches[1].shared_bytes == other.launches[1].shared_bytes
    assert padded.columns == other.columns == whole[0]
    assert {(box.columns, box.panels) for box in padded.tensor_maps} == {(64, 1)}


def test_every_head_dim_has_a_kernel() -> None:
    """Multiples of 8 from 16 to 256, of v too, and deterministic ones."""
    for head_dim in range(16, 257, 8):
        for head_dim_v in {head_dim, 272 - head_dim, 64, 16}:
            for mask in MASKS:
                of = problem((head_dim, head_dim_v), mask)
                if of.family == "sm90a_wide":
                    assert list(islice(candidates(of), 1)), of
                    assert any(make_plan(spec).deterministic for spec in candidates(of)), of


@pytest.mark.parametrize(
    ("dims", "mask", "tuning", "columns"),
    [
        ((256, 256), Mask.FULL, (80, 2, 1), 32),
        ((256, 256), Mask.SPANS, (80, 2, 1), 32),
        ((256, 256), Mask.CAUSAL, (64, 2, 1), 64),
        ((192, 192), Mask.FULL, (96, 2, 2), 40),
        ((192, 192), Mask.FULL, (96, 2, 1), 64),
        ((192, 128), Mask.SPANS, (96, 2, 2), 64),
        ((64, 128), Mask.FULL, (128, 2, 1), 64),
        ((128, 192), Mask.FULL, (96, 4, 2), 32),
    ],
)
def test_as_much_of_dq_is_staged_as_fits(
    dims: tuple[int, int], mask: Mask, tuning: tuple[int, int, int], columns: int
) -> None:
    """Up to 64 columns of a unit, for both consumers, whose rows are floats; deterministic ones stage equal pieces."""
    knobs = Sm90BackwardWide(64, *tuning, False)
    plan = make_plan(Spec(problem(dims, mask), knobs))
    strict = make_plan(Spec(problem(dims, mask), replace(knobs, deterministic=True)))
    shared, in_pieces = plan.launches[1].shared_bytes, strict.launches[1].shared_bytes
    piece = 64 if columns == 64 else 32
    assert (plan.constants["staged_columns"], strict.constants["staged_columns"]) == (columns, piece)
    assert shared - in_pieces == 2 * (columns - piece) * 64 * 4
    assert shared <= SHARED_LIMIT[Arch.SM90]
    assert columns == 64 or shared + 2 * 8 * 64 * 4 > SHARED_LIMIT[Arch.SM90]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.value)
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)])
def test_first_guess(dims: tuple[int, int], mask: Mask) -> None:
    """A pair comes first at 256 where there is a mask, as measured (docs/experiments.md, 99)."""
    guess = next(candidates(problem(dims, mask))).tuning
    assert isinstance(guess, Sm90BackwardWide)
    at_256 = (80, 1, False) if mask is Mask.FULL else (128, 1, True)
    expected = at_256 if dims == (256, 256) else (96, 2, False)
    assert (guess.tile_n, guess.stages_dout, guess.pair) == expected


def in_order(text: str, statements: list[str]) -> bool:
    """Does each of these follow the one before?"""
    places = [text.find(statement) for statement in statements]
    return min(places) >= 0 and places == sorted(places)


@pytest.mark.parametrize("dims", DIMS)
def test_order_of_staging(dims: tuple[int, int]) -> None:
    """What is staged is there before it is added, and has been read before it is overwritten."""
    text = render(first(dims, Mask.CAUSAL)).text
    warp, consumer = (text.split(f"void {name}(")[1] for name in ("add_staged_dq", "stage_dq"))
    full, empty = "base + kFullDq + kGroup * 8", "base + kEmptyDq + kGroup * 8"
    assert in_order(
        warp.split("\n}\n")[0],
        [
            f"barrier_wait({full}, count & 1)",
            "proxy_fence()",
            "load_int(",
            "bulk_reduce(",
            "tma_store_commit()",
            "tma_store_wait()",
            f"barrier_arrive({empty})",
        ],
    )
    assert in_order(
        consumer.split("\n    }\n\n")[0],
        [
            f"barrier_wait({empty}, (count & 1) ^ 1)",
            "store_quad(",
            "store_int(",
            "__syncwarp()",
            f"arrive({full})",
        ],
    )
    assert ("void add_dq(" in text) == ("kStagedColumns = 64;" not in text)
    assert "i = kStagedColumns / 2" in text or "void add_dq(" not in text


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_order_of_deterministic_additions(dims: tuple[int, int], pair: bool) -> None:
    """Only the warps that add wait for other blocks; the semaphore is released when the sums are in memory."""
    text = render(first(dims, Mask.CAUSAL, deterministic=True, pair=pair)).text
    assert "red.global.add.v4" not in text
    warp, rest = text.split("void add_staged_dq(")[1].split("\n}\n", 1)
    assert "semaphore_" not in rest.split("// ---- Preprocess")[0]
    assert in_order(
        warp,
        [
            "griddepcontrol_wait()",
            "semaphore_wait(",
            "barrier_wait(full",
            "tma_store_commit()",
            "tma_store_wait()",
            "barrier_arrive(base + kEmptyDq",
            "bulk_reduce_wait()",
            "semaphore_release(",
        ],
    )


def test_first_deterministic_guess() -> None:
    """Blocks that stage all columns of a unit, each consumer's place freed apart or with others; a pair at 256."""
    for dims, pair in (((192, 192), False), ((192, 128), False), ((256, 256), True)):
        tunings = (spec.tuning for spec in candidates(problem(dims, Mask.FULL)))
        guess = next(t for t in tunings if isinstance(t, Sm90BackwardWide) and t.deterministic)
        assert guess.pair == pair
        assert guess.staging
        assert pair or staged_columns(problem(dims, Mask.FULL), guess) == 64


def why_not(spec: Spec) -> str:
    """Why there is no plan; empty if there is."""
    try:
        make_plan(spec)
    except Infeasible as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.SPANS])
@pytest.mark.parametrize("dims", [(64, 128), (192, 128), (256, 256)])
def test_the_space_lists_no_staging_that_equals_another(dims: tuple[int, int], mask: Mask) -> None:
    asked = problem(dims, mask)
    refused = [
        tuning for tuning in {*BACKWARD.space(asked)} if why_not(Spec(asked, tuning)).startswith("staging")
    ]
    assert refused == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 204}, "head_dim 204: the sm90a backward kernel takes multiples of 8"),
        ({"dim_v": 8}, "head_dim of v 8: the sm90a backward kernel takes multiples of 8 from 16"),
        ({"mask": Mask.DENSE}, "one mask for all heads"),
        ({"align": 8}, "TMA needs rows"),
    ],
)
def test_refusals(changed: dict[str, object], reason: str) -> None:
    """What the kernels cannot do is refused in words, and the mma.sync family takes it."""
    refused = replace(problem((256, 256), Mask.FULL), **changed)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(refused, first((256, 256), Mask.FULL).tuning))
    assert not list(candidates(refused))
    assert list(candidates(replace(refused, arch=Arch.SM90)))


@pytest.mark.parametrize(
    ("dims", "changed", "reason"),
    [
        ((256, 256), {"tile_n": 64}, "tile_n 64: must be 128"),
        ((256, 256), {"stages": 1}, "stages 1: must be 2 to 4, as S runs a step ahead"),
        ((256, 256), {"stages": 1, "pair": False, "tile_n": 64}, "stages 1: must be 2 to 4, as S runs"),
        ((256, 256), {"stages_dout": 2}, "shared memory"),
        ((128, 192), {}, "pairs of blocks take more than 128"),
        ((256, 64), {}, "and more than 64 of v"),
        ((256, 256), {"loaders": 2}, "knobs of single blocks; leave them out for a pair"),
        ((256, 256), {"dq_of_second": 1}, "knobs of single blocks"),
        ((256, 256), {"dq_behind_dv": True}, "knobs of single blocks"),
    ],
)
def test_refusals_of_pairs(dims: tuple[int, int], changed: dict[str, int], reason: str) -> None:
    tuning = replace(first((256, 256), Mask.FULL, pair=True).tuning, **changed)
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(problem(dims, Mask.FULL), tuning))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dq_of_second": 2}, "dq_of_second 2: is what 0 chooses here"),
        ({"dq_of_second": 5}, "dq_of_second 5: must be 0 to 4"),
        ({"dq_of_second": 4, "dq_behind_dv": True}, "dq_behind_dv: the consumer of dV computes no dQ"),
        ({"s_late": True}, "s_late: needs a pair of blocks"),
        ({"heads_together": 65}, "heads_together 65: must be 0 to 64"),
        ({"loaders": 3}, "loaders 3: must be 1 or 2"),
    ],
    ids=str,
)
def test_refusals_of_orders(changed: dict[str, int], reason: str) -> None:
    """Of values that mean nothing here, or the same as another."""
    tuning = replace(Sm90BackwardWide(64, 80, 2, 1, False), **changed)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(problem((256, 256), Mask.CAUSAL), tuning))


BLOCK = {"tile_n": 80, "stages_dout": 1}  # at 256
PAIR = {"tile_n": 128, "stages_dout": 1, "pair": True}


@pytest.mark.parametrize(
    ("dims", "mask", "changed", "reason"),
    [
        ((192, 192), Mask.CAUSAL, {"staging": 3}, "staging 3: must be 0 to 2"),
        (
            (256, 256),
            Mask.CAUSAL,
            {**BLOCK, "staging": 1, "deterministic": False},
            "staging 1: is for determ",
        ),
        ((192, 192), Mask.FULL, {"staging": 2}, "shared memory: 234640 bytes"),
        ((64, 128), Mask.FULL, {"staging": 2}, "staging 2: 64 columns of a consumer are all"),
        ((192, 192), Mask.FULL, {**PAIR, "staging": 1}, "staging 1: is what pairs do"),
    ],
    ids=str,
)
def test_refusals_of_staging(dims: tuple[int, int], mask: Mask, changed: dict[str, int], reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(ordered(dims, mask, {"stages_dout": 1, "deterministic": True} | changed))


# (head_dims, mask, knobs) of other orders of products, loads and shares of dQ
ORDERS: list[tuple[tuple[int, int], Mask, dict[str, int]]] = [
    ((192, 192), Mask.FULL, {"dq_behind_dv": True, "dq_of_second": 2, "loaders": 2}),
    ((192, 192), Mask.CAUSAL, {"dq_behind_dv": True, "heads_together": 2}),
    ((192, 192), Mask.SPANS, {"stages_dout": 1, "dq_behind_dv": True, "deterministic": True}),
    ((192, 128), Mask.SPANS, {"dq_behind_dv": True, "dq_of_second": 2}),
    ((192, 128), Mask.CAUSAL, {"dq_of_second": 2, "loaders": 2, "deterministic": True}),
    ((256, 256), Mask.CAUSAL, {**BLOCK, "dq_behind_dv": True, "loaders": 2}),
    ((256, 256), Mask.FULL, {**BLOCK, "tile_n": 64, "dq_behind_dv": True, "dq_of_second": 3}),
    ((256, 256), Mask.CAUSAL, {**PAIR, "s_late": True}),
    ((192, 192), Mask.FULL, {**PAIR, "s_late": True, "stages_dout": 2, "deterministic": True}),
    ((192, 128), Mask.SPANS, {**PAIR, "s_late": True, "stages": 3, "stages_dout": 2}),
    ((192, 192), Mask.CAUSAL, {"stages_dout": 1, "deterministic": True, "staging": 1}),
    ((192, 192), Mask.SPANS, {"tile_n": 80, "stages_dout": 1, "deterministic": True, "staging": 2}),
    ((192, 128), Mask.CAUSAL, {"deterministic": True, "staging": 2, "heads_together": 2}),
    ((192, 192), Mask.FULL, {**PAIR, "stages_dout": 2, "deterministic": True, "staging": 2}),
    ((256, 256), Mask.CAUSAL, {**PAIR, "deterministic": True, "staging": 2}),
    ((256, 256), Mask.FULL, {**PAIR, "deterministic": True, "staging": 2, "s_late": True}),
    ((256, 256), Mask.FULL, {**PAIR, "staging": 2, "s_late": True}),
    ((256, 256), Mask.CAUSAL, {**PAIR, "staging": 2, "s_late": True}),
    ((256, 256), Mask.SPANS, {**PAIR, "staging": 2}),
    ((192, 192), Mask.CAUSAL, {**PAIR, "stages_dout": 2, "staging": 2, "s_late": True}),
    ((192, 192), Mask.SPANS, {"tile_n": 80, "stages_dout": 1, "staging": 2}),
    ((192, 128), Mask.CAUSAL, {"stages_dout": 1, "staging": 2}),
    ((192, 128), Mask.FULL, {"staging": 2, "dq_of_second": 2}),
    ((256, 256), Mask.CAUSAL, {**BLOCK, "deterministic": True, "staging": 1}),
    ((136, 136), Mask.CAUSAL, {"stages_dout": 1, "deterministic": True, "staging": 1}),
    ((160, 128), Mask.CAUSAL, {"deterministic": True, "staging": 2, "dq_of_second": 3}),
    ((176, 96), Mask.FULL, {"stages_dout": 1, "staging": 2, "loaders": 2}),
    ((224, 224), Mask.CAUSAL, {**BLOCK, "dq_behind_dv": True, "dq_of_second": 3}),
    ((200, 200), Mask.SPANS, {**PAIR, "staging": 2}),
    ((136, 136), Mask.FULL, {**PAIR, "stages_dout": 2, "deterministic": True, "staging": 2}),
]


def ordered(dims: tuple[int, int], mask: Mask, changed: dict[str, int]) -> Spec:
    tuning = Sm90BackwardWide(64, 96, 2, 2, False)
    return Spec(problem(dims, mask), replace(tuning, **changed))  # type: ignore[arg-type]


def aspects(spec: Spec) -> Iterator[Hashable]:
    """What has to be compiled in each run: each knob with a mask or dims, and all knobs at 256, not all together."""
    of, tuning = spec.problem, spec.tuning
    assert isinstance(tuning, Sm90BackwardWide)
    yield of.mask, tuning.pair
    for name in (
        "deterministic",
        "dq_behind_dv",
        "dq_of_second",
        "heads_together",
        "loaders",
        "s_late",
        "staging",
    ):
        value = getattr(tuning, name)
        yield name, value, tuning.pair
        yield of.head_dim == 256, name, value > 0, tuning.pair


@pytest.mark.nvcc
@quickly
def test_orders_do_not_spill(quick: bool, nvcc: None, tmp_path: Path) -> None:
    specs = part([ordered(*order) for order in ORDERS], quick, aspects)
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "mask", "changed"), ORDERS, ids=str)
def test_gradients_of_orders(dims: tuple[int, int], mask: Mask, changed: dict[str, int]) -> None:
    check_gradients(ordered(dims, mask, changed))


FIRST = [((256, 256), Mask.CAUSAL), ((192, 128), Mask.SPANS), ((192, 192), Mask.FULL)]
PADDED_FIRST = [((136, 136), Mask.CAUSAL), ((200, 200), Mask.SPANS), ((192, 96), Mask.FULL)]


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("pair", "deterministic", "cases"),
    [  # the widest in each way, each padded one in one way
        (False, False, [FIRST[0], PADDED_FIRST[0]]),
        (False, True, [FIRST[0], FIRST[1], PADDED_FIRST[1]]),
        (True, False, [FIRST[0], FIRST[2], PADDED_FIRST[1]]),
        (True, True, [FIRST[0], PADDED_FIRST[2]]),
        *(
            pytest.param(*each, FIRST + PADDED_FIRST, marks=pytest.mark.slow)
            for each in product((False, True), (False, True))
        ),
    ],
    ids=str,
)
def test_first_guesses_do_not_spill(
    pair: bool, deterministic: bool, cases: list[tuple[tuple[int, int], Mask]], nvcc: None, tmp_path: Path
) -> None:
    specs = [first(dims, mask, deterministic, pair) for dims, mask in cases]
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.value)
@pytest.mark.parametrize(
    ("dims", "deterministic", "pair"),
    [(dims, deterministic, False) for dims in DIMS + PADDED_DIMS for deterministic in (False, True)]
    + [
        (dims, deterministic, True)
        for dims in PAIR_DIMS + PADDED_PAIR_DIMS
        for deterministic in (False, True)
    ],
)
def test_gradients(dims: tuple[int, int], mask: Mask, deterministic: bool, pair: bool) -> None:
    """Against float64; deterministic ones give the same bits again."""
    check_gradients(first(dims, mask, deterministic, pair))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "mask", "changed"),
    [
        ((192, 128), Mask.CAUSAL, {"stages_dout": 2}),
        ((192, 192), Mask.CAUSAL, {"stages_dout": 2}),
        ((192, 128), Mask.SPANS, {"stages": 3, "stages_dout": 2}),
        ((192, 192), Mask.CAUSAL, {"stages_dout": 2, "deterministic": True}),
    ],
    ids=str,
)
def test_knobs_of_pairs(dims: tuple[int, int], mask: Mask, changed: dict[str, int]) -> None:
    spec = first(dims, mask, pair=True)
    check_gradients(Spec(spec.problem, replace(spec.tuning, **(PLAIN | changed))))


def check_gradients(spec: Spec) -> None:
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    handle = kernels.load(spec, device)
    assert isinstance(spec.tuning, Sm90BackwardWide)
    mask, deterministic = spec.problem.mask, spec.tuning.deterministic
    padded = spec.problem.head_dim % 64 or spec.problem.head_dim_v % 64
    layout = "slice" if padded else "bshd"  # NaN follows each row
    for seed, shape in enumerate(SHAPES):
        sizes = replace(shape, head_dim=spec.problem.head_dim, dim_v=spec.problem.head_dim_v)
        x = draw(sizes, torch.bfloat16, "cuda", layout, seed)
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        visible = make_mask(mask.value, shape.seq_q, shape.seq_k, "cuda", seed)
        exact = reference(q, k, v, visible, None, x.dout)
        out, lse = exact.out.to(q.dtype), exact.lse.float()
        runs = [
            ops.backward(x.dout, q, k, v, out, lse, visible, None, deterministic, handle) for _ in range(3)
        ]
        for name, got, expected in zip(
            ("dq", "dk", "dv"), runs[-1], (exact.dq, exact.dk, exact.dv), strict=True
        ):
            assert expected is not None
            size = expected.pow(2).mean().sqrt().item()
            error = (got - expected).pow(2).mean().sqrt().item()
            assert error <= LIMIT * size, f"{name}: rms error {error:.3g} of {size:.3g}"  # false for NaN
        if deterministic:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [False, True])
def test_unions_and_unseen_keys(pair: bool) -> None:
    """Two intervals a key; keys that nobody sees get zeros."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    length = 500
    starts = torch.zeros(2, length, dtype=torch.int32, device=device)
    ends = torch.zeros_like(starts)
    ends[0, :300], starts[1, :300], ends[1, :300] = 100, 230, length
    mask = attnforge.Spans(starts, ends)
    tuning = first((192, 128), Mask.SPANS, pair=pair).tuning
    spec = Spec(replace(problem((192, 128), Mask.SPANS), intervals=2), tuning)
    handle = kernels.load(spec, device)
    shape = Shape(seq_q=length, seq_k=length, heads_kv=2, group=2, head_dim=192, dim_v=128)
    x = draw(shape, torch.bfloat16, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    exact = reference(q, k, v, mask, None, x.dout)
    grads = ops.backward(x.dout, q, k, v, exact.out.to(q.dtype), exact.lse.float(), mask, None, False, handle)
    for got, expected in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
        assert expected is not None
        size = expected.pow(2).mean().sqrt().item()
        assert (got - expected).pow(2).mean().sqrt().item() <= LIMIT * size
    assert not grads[1][:, :, 300:].any()
    assert not grads[2][:, :, 300:].any()
