"""`Family`: what one file of this folder offers to the rest of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.spec import Problem, Spec, Tuning, plain


def is_feasible(problem: Problem, tuning: Tuning, plan: Callable[[Spec], Plan]) -> bool:
    """Whether `plan` accepts the tuning: for spaces that vary knobs on which this does not depend."""
    try:
        plan(Spec(problem, tuning))
    except Infeasible:
        return False
    return True


@dataclass(frozen=True)
class Family:
    """The kernels of one family and pass.

    `plan` may raise Infeasible; `space` yields tunings in the order in which they should be tried, the best guess
    first, infeasible ones and repetitions included.
    """

    tuning: type[Tuning]
    plan: Callable[[Spec], Plan]
    space: Callable[[Problem], Iterator[Tuning]]
    honours: frozenset[str] = frozenset()  # fields of Problem with a default, of which other values work, too
    # Why other values do not work, by field, where there is more to say.
    reasons: Mapping[str, str] = field(default_factory=dict)
    # Kernels that split the keys, likewise, for this many query rows of a kv head: fewest, most.
    split_space: Callable[[Problem, int, int], Iterator[Tuning]] | None = None

    @cached_property
    def knobs(self) -> tuple[dict[str, type[int]], dict[str, str], set[str]]:
        """The knobs' types by name, their names by the ones that they had before, and those without a default."""
        fields = dataclasses.fields(self.tuning)
        types = {f.name: bool if f.type in (bool, "bool") else int for f in fields}
        renamed = {f.metadata["was"]: f.name for f in fields if f.metadata["was"]}
        return types, renamed, {f.name for f in fields if f.default is dataclasses.MISSING}

    def require_honoured(self, problem: Problem) -> None:
        """Infeasible, naming field and value, unless every field is at its default or honoured."""
        for f, value in problem.named_fields():
            if not f.optional or f.attribute in self.honours or value == plain(f.default):
                continue
            kernels = f"{problem.arch.value} {problem.dtype.value} {problem.direction.value} kernels"
            reason = self.reasons.get(f.attribute, f"the {kernels} take {plain(f.default)} only")
            raise Infeasible(f"{f.name} {value}: {reason}")
