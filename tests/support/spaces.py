"""Samples of search spaces that are too large to go through."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Problem, Spec, Tuning


def sample(problem: Problem, first: int = 600, every: int = 97) -> Iterator[Spec]:
    """Feasible specs: of the first ones of the space, then of every so many."""
    numbers = count()

    def taken(_: Tuning) -> bool:
        number = next(numbers)
        return number < first or number % every == 0

    return candidates(problem, taken)
