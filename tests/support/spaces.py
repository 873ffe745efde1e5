"""Samples of search spaces, and of lists of cases, that are too large to go through."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import pytest

from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime.search.winners import tuned_specs

Case = TypeVar("Case")

# A test of a `part` of its cases: of the covering ones, and of the others, which only slow runs take.
quickly = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["covering", "others"]
)


def sample(problem: Problem, first: int = 600, every: int = 97) -> Iterator[Spec]:
    """Feasible specs: of the first ones of the space, then of every so many."""
    numbers = count()

    def taken(_: Tuning) -> bool:
        number = next(numbers)
        return number < first or number % every == 0

    return candidates(problem, taken)


def first_hopper(direction: Direction, head_dim: int, mask: Mask, **changed: Any) -> Spec:
    """The first of Hopper's bf16 kernels that a search would try; `changed` are other fields of its problem."""
    problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, head_dim, mask)
    return next(candidates(replace(problem, **changed)))


def tuned_kinds(
    direction: Direction, tuning: type[Tuning], kind_of: Callable[[Spec], Hashable]
) -> list[Spec]:
    """Of Hopper's bf16 kernels in the tuned tables the first of each kind, without scores, functions and unions."""
    found: dict[Hashable, Spec] = {}
    for spec in tuned_specs():
        p = spec.problem
        hopper = (p.arch, p.direction, p.dtype) == (Arch.SM90A, direction, DType.BFLOAT16)
        if hopper and isinstance(spec.tuning, tuning) and not (p.score or p.mask_mod or p.unions):
            found.setdefault(kind_of(spec), spec)
    return list(found.values())


def covering(cases: Iterable[Case], aspects: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Few of the cases, in their order, that have every aspect of all: whatever adds most of these comes first."""
    left = [(case, {*aspects(case)}) for case in cases]
    missing = set[Hashable]().union(*(has for _, has in left))
    chosen = set[int]()
    while missing:
        best = max(range(len(left)), key=lambda i: (len(left[i][1] & missing), -i))
        chosen.add(best)
        missing -= left[best][1]
    return [left[i][0] for i in sorted(chosen)]


def part(cases: Iterable[Case], quick: bool, aspects: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """The covering cases if `quick`, else the others."""
    every = list(cases)
    chosen = covering(every, aspects)
    return chosen if quick else [case for case in every if case not in chosen]
