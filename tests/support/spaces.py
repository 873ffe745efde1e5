"""Samples of search spaces that are too large to go through."""

from __future__ import annotations

from collections.abc import Iterator

from attnforge.codegen.families import family_of, make_plan
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Problem, Spec


def sample(problem: Problem, first: int = 600, every: int = 97) -> Iterator[Spec]:
    """Feasible specs: of the first ones of the space, then of every so many. Some may be there twice."""
    try:
        space = family_of(problem).space(problem)
    except Infeasible:
        return
    for number, tuning in enumerate(space):
        if number >= first and number % every:
            continue
        spec = Spec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        yield spec
