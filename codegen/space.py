"""The search space: every feasible spec of a problem, the one to try first in front."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnforge.codegen.families import family_of, make_plan
from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.spec import Problem, Spec, Tuning


def candidates(
    problem: Problem,
    wanted: Callable[[Tuning], bool] = lambda tuning: True,
) -> Iterator[Spec]:
    """Feasible specs of `problem`, best guesses first, none twice; none if no family computes it.

    Plans are made of `wanted` ones only: the space of a Hopper backward has thousands.
    """
    for spec, _ in _planned(problem, wanted):
        yield spec


def _planned(
    problem: Problem, wanted: Callable[[Tuning], bool], order: Callable[[Tuning], float] | None = None
) -> Iterator[tuple[Spec, Plan]]:
    """`candidates` and their plans."""
    try:
        space = family_of(problem).space(problem)
    except Infeasible:
        return
    tunings = filter(wanted, space)
    seen = set()
    for tuning in sorted(tunings, key=order) if order else tunings:
        if tuning in seen:
            continue
        seen.add(tuning)
        spec = Spec(problem, tuning)
        try:
            plan = make_plan(spec)
        except Infeasible:
            continue
        yield spec, plan


def deterministic_candidates(
    problem: Problem, order: Callable[[Tuning], float] | None = None
) -> Iterator[Spec]:
    """Those of `candidates` that sum in a fixed order. `order`: a small value comes first, then the best guess."""
    maybe = _may_be_deterministic if problem.arch.is_gpu else lambda tuning: True
    for spec, plan in _planned(problem, maybe, order):
        if plan.deterministic:
            yield spec


def _may_be_deterministic(tuning: Tuning) -> bool:
    """Of a GPU: kernels without such a knob always are, or never."""
    return bool(getattr(tuning, "deterministic", True))


def splitting(problem: Problem, fewest: int, most: int | None = None) -> Iterator[Spec]:
    """Feasible specs that split the keys, best guesses first; none if the family has no such kernels for the problem.

    They are for calls in which the q heads of a kv head have `fewest` to `most` query rows together.
    """
    try:
        space = family_of(problem).split_space
    except Infeasible:
        return
    for tuning in space(problem, fewest, fewest if most is None else most) if space else ():
        spec = Spec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        yield spec


def first_refusal(problem: Problem) -> Infeasible:
    """The error of the first guess; for the message when `candidates` yields nothing."""
    try:
        for tuning in family_of(problem).space(problem):
            make_plan(Spec(problem, tuning))
    except Infeasible as refused:
        return refused
    return Infeasible("the search space is empty")


def why_infeasible(problem: Problem) -> str:
    """The message of `first_refusal`."""
    return str(first_refusal(problem))
