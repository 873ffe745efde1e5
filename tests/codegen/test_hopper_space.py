"""Every kind of Hopper forward that a search may meet: what its text calls, its text defines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from spaces import sample

from attnforge.codegen.families import family_of, make_plan
from attnforge.codegen.families.family import is_feasible
from attnforge.codegen.families.limits import SHARED_LIMIT
from attnforge.codegen.families.sm90 import FORWARD, Sm90Forward
from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime import tables

# (of q and k, of v or 0)
HEAD_DIMS = ((24, 0), (64, 0), (72, 0), (128, 0), (192, 0), (256, 0), (192, 128), (40, 72))
DEFINED = re.compile(r"__device__ __forceinline__ [\w ]*?\b(\w+)\(")
CALLED = re.compile(r"\b([a-z]\w*)\(")


def kind(plan: Plan) -> tuple[object, ...]:
    """What decides which parts of the templates a kernel is made of."""
    tuning = plan.spec.tuning
    assert isinstance(tuning, Sm90Forward)
    knobs = tuning.ping_pong, tuning.persistent, tuning.dynamic, tuning.q_in_regs
    later = tuning.hand_over, tuning.exact_visits > 0, tuning.heads_together
    loads = tuning.stages_v > 0, tuning.k_ahead
    orders = (
        plan.row_groups,
        plan.short_last,
        plan.staggered,
        plan.constants["hidden"] if plan.staggered else 0,
    )
    constants = (plan.constants[name] for name in ("consumers", "q_buffers", "broadcast", "out_panels"))
    columns = bool(plan.constants["tail"]), bool(plan.spec.problem.dim_v), plan.constants["copies"] > 1
    return (plan.spec.problem.mask, *columns, *knobs, *later, *loads, *orders, *constants)


@cache
def kinds(mask: Mask) -> tuple[str, ...]:
    """Rendered kernels with each pair of properties that some kind has."""

    def plans() -> Iterator[Plan]:
        for head_dim, dim_v in HEAD_DIMS:
            problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, 16, dim_v)
            every = 97 if head_dim in (64, 128) else 997
            # The later part of the space are combinations of knobs whose texts hardly touch.
            yield from map(make_plan, sample(problem, 1000 if mask is Mask.FULL else 500, every))

    # Hundreds of kinds; those that have two properties together which no earlier one has. A fault that takes three may
    # go unseen.
    found: list[Spec] = []
    pairs: set[object] = set()
    for plan in plans():
        new = {*combinations(enumerate(kind(plan)), 2)} - pairs
        found += [plan.spec] if new else []
        pairs |= new
    return tuple(render(spec).text for spec in found)


@pytest.mark.parametrize(
    ("head_dim", "dim_v", "tiles"),
    [
        (256, 0, {(128, 64), (128, 80)}),
        (192, 0, {(128, 64), (128, 80), (128, 96), (128, 112), (192, 48)}),
        (192, 128, {(128, n) for n in (64, 80, 96, 112, 128)} | {(192, 48), (192, 64), (192, 80)}),
        (128, 192, {(128, n) for n in (64, 80, 96, 112, 128)} | {(192, 48)}),
        (128, 0, {(128, n) for n in range(96, 192, 16)} | {(192, 64), (192, 80)}),
    ],
)
def test_tiles_with_the_later_knobs(head_dim: int, dim_v: int, tiles: set[tuple[int, int]]) -> None:
    """What fits beside long rows has them, too."""
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.FULL, dim_v=dim_v)
    found = [spec.tuning for spec in candidates(problem)]
    assert {
        (t.tile_m, t.tile_n) for t in found if isinstance(t, Sm90Forward) and t.exact_visits == 1
    } == tiles


@pytest.mark.parametrize(
    ("mask", "least"), [(Mask.FULL, 1000), (Mask.CAUSAL, 1000), (Mask.SPANS, 500)], ids=str
)
@pytest.mark.parametrize(("head_dim", "dim_v"), [(192, 0), (192, 128), (256, 0)])
def test_backwards_of_wide_heads_have_many_variants(
    head_dim: int, dim_v: int, mask: Mask, least: int
) -> None:
    """Without lists the deterministic ones are among them."""
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, dim_v=dim_v)
    found = list(candidates(problem))
    assert least <= len(found) == len(set(found))


@pytest.mark.parametrize(
    ("head_dim", "mask", "knobs"),
    [
        (256, Mask.CAUSAL, {"pair": True, "s_late": True}),
        (256, Mask.FULL, {"pair": False, "dq_behind_dv": False}),
        (192, Mask.CAUSAL, {"pair": False, "dq_behind_dv": True}),
        (192, Mask.FULL, {"pair": False, "dq_behind_dv": True}),
    ],
    ids=str,
)
def test_first_guess_of_wide_heads(head_dim: int, mask: Mask, knobs: dict[str, bool]) -> None:
    """The backward's orders of products that were the fastest."""
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)
    tuning = next(candidates(problem)).tuning
    assert {name: getattr(tuning, name) for name in knobs} == knobs


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tile_n": 64, "stages_v": 3}, ""),
        ({"k_ahead": True}, ""),
        ({"stages_v": 3}, "shared memory"),
        ({"stages_v": 1}, "stages_v 1: must be more than stages, up to 4, or 0 for as many"),
        ({"stages_v": 2}, "stages_v 2"),
        ({"stages_v": 5}, "stages_v 5"),
        ({"stages": 1, "k_ahead": True}, "k_ahead: needs two buffers"),
    ],
    ids=str,
)
def test_buffers_of_v(changed: dict[str, int], reason: str) -> None:
    """There may be more of them than of K."""
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 256, Mask.FULL)
    tuning = replace(Sm90Forward(128, 80, 2, False, True, False, False), **changed)  # type: ignore[arg-type]
    if reason:
        with pytest.raises(Infeasible, match=reason):
            make_plan(Spec(problem, tuning))
    else:
        assert make_plan(Spec(problem, tuning)).constants["q_buffers"] == 1


@pytest.mark.parametrize(
    ("changed", "panels", "broadcast"),
    [
        ({}, 2, True),
        ({"tile_n": 80}, 0, False),
        ({"persistent": False}, 0, False),
        ({"mask": Mask.SPANS}, 2, False),
        ({"head_dim": 208, "stages": 3}, 0, False),  # the last panel is narrower
        ({"head_dim": 248}, 0, False),  # the last 8 columns are half of a fragment's 16
        ({"head_dim": 192, "stages": 3, "dim_v": 136}, 0, False),
        ({"head_dim": 192, "stages": 3, "dim_v": 144}, 2, True),
    ],
    ids=str,
)
def test_buffer_of_out(changed: dict[str, object], panels: int, broadcast: bool) -> None:
    """O has a buffer where blocks have several work tiles, one buffer of Q, and room."""
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 256, Mask.FULL)
    tuning = Sm90Forward(128, 64, 2, True, True, False, False)
    knobs = {name: value for name, value in changed.items() if hasattr(tuning, name)}
    others = {name: value for name, value in changed.items() if name not in knobs}
    plan = make_plan(Spec(replace(problem, **others), replace(tuning, **knobs)))  # type: ignore[arg-type]
    assert (plan.constants["q_buffers"], plan.constants["out_panels"]) == (1, panels)
    assert plan.constants["broadcast"] == broadcast
    assert plan.launches[0].shared_bytes <= SHARED_LIMIT[Arch.SM90]


@pytest.mark.parametrize("mask", list(Mask), ids=lambda mask: mask.value)
def test_what_a_kernel_calls_is_there(mask: Mask) -> None:
    ours = {name for each in Mask for text in kinds(each) for name in DEFINED.findall(text)}
    assert {"barrier_arrive_if", "find_range", "skip_visits", "store_empty"} <= ours
    for text in kinds(mask):
        code = re.sub(r'//[^\n]*|"[^"\n]*"', "", text)
        missing = set(CALLED.findall(code)) & ours - set(DEFINED.findall(text))
        assert not missing, (re.search(r"attnforge_fwd\w+", text), missing)


@pytest.mark.parametrize("mask", [Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_spaces_hold_all_deterministic_variants(head_dim: int, mask: Mask) -> None:
    """One may be the fastest of all; searches for deterministic gradients try these only, in the same order."""
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)
    space = list(candidates(problem))
    found = list(deterministic_candidates(problem))
    assert found == [spec for spec in space if make_plan(spec).deterministic]
    assert len(found) == len(set(found)) < len(space)
    if head_dim > 128:
        assert {spec.tuning.to_json()["staging"] for spec in found} == {0, 1, 2}
        return
    knobs = ("stages", "split_heads", "lag", "heads_together", "cache_mb", "loaders", "launch_order")
    values = {name: {getattr(spec.tuning, name) for spec in found} for name in knobs}
    assert values["launch_order"] == ({0, 3, 4} if mask.listed else {0, 1, 2, 3})
    assert values["stages"] >= {2, 3}
    assert values["split_heads"] == {0, 1}
    assert values["lag"] == ({0, 1} if head_dim == 64 else {0})
    assert values["heads_together"] == {0, 2, 4, 7, 8, 14, 16, 32}
    assert values["cache_mb"] == {8, 16, 40}
    assert values["loaders"] == {0, 1}


def test_some_families_have_no_choice() -> None:
    """Kernels without the knob `deterministic` are deterministic always, or never."""
    for arch, dtype in ((Arch.CPU, DType.FLOAT32), (Arch.SM80, DType.BFLOAT16), (Arch.SM80, DType.FLOAT32)):
        assert list(deterministic_candidates(Problem(Direction.BACKWARD, arch, dtype, 64, Mask.FULL, 16)))
    assert not list(
        deterministic_candidates(Problem(Direction.BACKWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.FULL))
    )


@pytest.mark.parametrize("device", ["nvidia-h200", "nvidia-h100-80gb-hbm3"])
def test_searches_find_what_the_tables_have(device: str) -> None:
    """Every entry's knobs are in the space of its problem."""
    missing: dict[Problem, dict[Tuning, object]] = {}
    for entry in tables.load(device, tables.PACKAGED):
        missing.setdefault(entry.spec.problem, {})[entry.spec.tuning] = entry.notes["case"]
    assert missing
    for problem, cases in missing.items():
        for tuning in family_of(problem).space(problem):
            cases.pop(tuning, None)
            if not cases:  # spaces are long, and most of these are near their beginning
                break
        assert not cases, [(case, Spec(problem, tuning).slug) for tuning, case in cases.items()]


@pytest.mark.parametrize(
    ("mask", "dynamic", "head_dim", "tile_n", "fits"),
    [
        (Mask.SPANS, False, 64, 128, False),
        (Mask.SPANS, False, 96, 112, False),
        (Mask.SPANS, False, 128, 80, True),
        (Mask.SPANS, True, 64, 128, True),
        (Mask.CAUSAL, False, 64, 128, True),
        (Mask.DENSE, False, 64, 128, False),
    ],
)
def test_capped_scores_leave_no_registers_for_lists(
    mask: Mask, dynamic: bool, head_dim: int, tile_n: int, fits: bool
) -> None:
    """Three consumers that find their work tiles in lists spill 76 to 110 bytes with the largest tiles."""
    score = ScoreMod("softcap: 50.0 * tanh(score / 50.0)")
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, score=score)
    tuning = Sm90Forward(192, tile_n, 2, True, True, dynamic, False)
    assert is_feasible(problem, tuning, FORWARD.plan) == fits
    assert is_feasible(problem, replace(tuning, exact_visits=0), FORWARD.plan)


def test_capped_scores_leave_two_consumers_their_registers() -> None:
    """Which find their work tiles in lists without spilling."""
    score = ScoreMod("softcap: 50.0 * tanh(score / 50.0)")
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 104, Mask.SPANS, score=score)
    assert is_feasible(problem, Sm90Forward(128, 160, 2, True, True, False, True), FORWARD.plan)
