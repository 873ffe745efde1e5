"""The search space: every feasible spec of a problem, the one to try first in front."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnforge.codegen.families import family_of, make_plan
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Problem, Spec, Tuning


def candidates(problem: Problem, wanted: Callable[[Tuning], bool] = lambda tuning: True) -> Iterator[Spec]:
    """Feasible specs of `problem`, best guesses first, none twice; none if no family computes it.

    Plans are made of `wanted` ones only: the space of a Hopper backward has thousands.
    """
    try:
        space = family_of(problem).space(problem)
    except Infeasible:
        return
    seen = set()
    for tuning in space:
        if tuning in seen or not wanted(tuning):
            continue
        seen.add(tuning)
        spec = Spec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        yield spec


def splitting(problem: Problem, rows: int) -> Iterator[Spec]:
    """Feasible specs that split the keys, for `rows` query rows of a kv head: the smallest tiles that hold them first.

    Where none does, the largest come first. None if the family has no such kernels for the problem.
    """
    try:
        space = family_of(problem).split_space
    except Infeasible:
        return
    found = []
    for tuning in space(problem) if space else ():
        spec = Spec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        found.append(spec)
    yield from sorted(found, key=lambda spec: _fit(spec.tuning.tile_m, rows))


def _fit(tile_m: int, rows: int) -> tuple[bool, int]:
    return (False, tile_m) if tile_m >= rows else (True, -tile_m)


def why_infeasible(problem: Problem) -> str:
    """The reason given for the first guess; for the message when `candidates` yields nothing."""
    try:
        for tuning in family_of(problem).space(problem):
            make_plan(Spec(problem, tuning))
    except Infeasible as reason:
        return str(reason)
    return "the search space is empty"
