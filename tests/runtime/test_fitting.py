"""Fitting the tuning of an entry to a call: which knobs are dropped so that it is feasible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tuned_entries import HOPPER, PROBLEM, WALKING

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, Mask, Spec
from attnforge.runtime import fitting
from attnforge.runtime.call import Call
from attnforge.runtime.tables import Tuned


def test_a_refusal_of_a_plan_is_raised_anew() -> None:
    """Plans are kept; an error that is raised twice would gather tracebacks."""
    spec = Spec(HOPPER, replace(next(candidates(HOPPER)).tuning, tile_n=176))
    raised = []
    for _ in range(2):
        with pytest.raises(Infeasible, match="must be multiples") as caught:
            fitting.planned(spec)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert str(raised[0]) == str(raised[1])


@pytest.mark.parametrize(
    ("mask", "changes", "dropped"),
    [
        (Mask.SPANS, {}, {"launch_order": 0}),
        (Mask.CAUSAL, {"score": ScoreMod("softcap: 50.0 * tanh(score / 50.0)")}, {"persistent": 0}),
        (Mask.DENSE, {}, None),  # needs split_heads
    ],
)
def test_an_order_of_blocks_for_another_mask_is_left_out(
    mask: Mask, changes: dict[str, ScoreMod], dropped: dict[str, int] | None
) -> None:
    """And no more knobs than have to be."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    plain = Sm90Backward(64, 128, 3, 2, False, 1, False, True, False)
    near = Tuned(Spec(problem, replace(plain, launch_order=2, persistent=1)), 7, 1024, 1.0, 100.0)
    other = replace(problem, mask=mask, **changes)  # type: ignore[arg-type]
    if dropped is None:
        with pytest.raises(Infeasible, match="needs split_heads"):
            fitting.replanned(Call(other, 7, 1024), near)
    else:
        assert fitting.replanned(Call(other, 7, 1024), near) == Spec(
            other, replace(near.spec.tuning, **dropped)
        )
    assert fitting.replanned(Call(problem, 7, 1024), near) == near.spec


def test_only_knobs_in_the_way_are_dropped() -> None:
    """A score takes no persistent blocks, but sums in a fixed order. For spans there is no such launch order."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    tuning = replace(WALKING, deterministic=True, launch_order=2)
    curved = Spec(replace(problem, score=ScoreMod("softcap: 30.0 * tanh(score / 30.0)")), tuning)
    assert fitting.planned(Spec(problem, tuning)).tuning == tuning
    assert fitting.planned(curved).tuning == replace(tuning, persistent=0)
    spans = Spec(replace(problem, mask=Mask.SPANS), tuning)
    assert fitting.planned(spans).tuning == replace(tuning, launch_order=0)


@pytest.mark.parametrize("pair", [False, True])
def test_deterministic_sums_of_wide_blocks_are_left_out(pair: bool) -> None:
    """For gradients of a score's tensors, unless the call asks for them; how dQ is staged stays."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=192, mask=Mask.CAUSAL)
    plain = Sm90BackwardWide(64, 128 if pair else 64, 2, 1, False, pair)
    tuning = replace(plain, deterministic=True, staging=2)
    assert fitting.planned(Spec(problem, tuning)).tuning == tuning
    alibi = ScoreMod("alibi(t0: float32[1] grad): score - t0[h] * abs(q_idx - kv_idx)")
    call, entry = (
        Call(replace(problem, score=alibi), 1, 1024),
        Tuned(Spec(problem, tuning), 1, 1024, 1.0, 100.0),
    )
    assert fitting.replanned(call, entry).tuning == replace(plain, staging=2)
    assert fitting.replanned(replace(call, deterministic=True), entry).tuning == tuning


@pytest.mark.parametrize(
    ("mask", "group", "knobs", "stores"),
    [
        (Mask.SPANS, 1, {}, 1),
        (Mask.SPANS, 7, {}, 0),
        (Mask.SPANS, 7, {"stores_dkv": 1}, 0),
        (Mask.DENSE, 1, {}, 1),
        (Mask.CAUSAL, 1, {}, 0),  # has no lists that could be cut
        (Mask.SPANS, 1, {"split_heads": False}, 0),
        (Mask.SPANS, 1, {"deterministic": True}, 0),
    ],
)
def test_heads_without_a_group_need_no_sums(
    mask: Mask, group: int, knobs: dict[str, int], stores: int
) -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=mask)
    tuning = replace(Sm90Backward(64, 128, 3, 2, False, 1, True, False), **knobs)  # type: ignore[arg-type]
    found = fitting.without_sums(Spec(problem, tuning), group)
    assert found.tuning == replace(tuning, stores_dkv=stores)
    assert fitting.planned(found) == found


def test_other_families_have_no_such_choice() -> None:
    wide = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=192, mask=Mask.SPANS)
    before_hopper = replace(wide, arch=Arch.SM80, head_dim=64)
    for problem in (HOPPER, wide, before_hopper):
        spec = next(candidates(problem))
        assert fitting.without_sums(spec, 1) is spec
    whole = next(spec for spec in candidates(before_hopper) if not spec.tuning.adds_in_any_order)
    for spec in (next(candidates(HOPPER)), next(candidates(wide)), whole):
        assert fitting.dividing(spec) is spec


@pytest.mark.parametrize(
    ("mask", "knobs", "divided"),
    [
        (Mask.SPANS, {}, {"split_heads": True}),
        (Mask.SPANS, {"loaders": 2, "persistent": 1}, {"split_heads": True, "loaders": 2, "persistent": 0}),
        (Mask.SPANS, {"loaders": 1, "lag": True}, {"split_heads": True, "loaders": 1}),
        (
            Mask.SPANS,
            {"loaders": 1, "deterministic": True},
            {"split_heads": True, "loaders": 0, "deterministic": False},
        ),
        (Mask.SPANS, {"split_heads": True}, None),
        (Mask.CAUSAL, {}, None),
    ],
)
def test_blocks_of_each_q_head_divide_long_lists(
    mask: Mask, knobs: dict[str, Any], divided: dict[str, Any] | None
) -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=mask)
    tuning = replace(Sm90Backward(64, 128, 3, 2, False, 1, False, False), **knobs)
    found = fitting.dividing(Spec(problem, tuning))
    assert found.tuning == replace(tuning, **(divided or {}))
    assert make_plan(found).cut_lists == (divided is not None or tuning.split_heads)
