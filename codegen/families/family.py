"""`Family`: what one file of this folder offers to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

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

    def require_honoured(self, problem: Problem) -> None:
        """Infeasible, naming field and value, unless every field is at its default or honoured."""
        for f, value in problem.named_fields():
            if not f.optional or f.attribute in self.honours or value == plain(f.default):
                continue
            kernels = f"{problem.arch.value} {problem.dtype.value} {problem.direction.value} kernels"
            reason = self.reasons.get(f.attribute, f"the {kernels} take {plain(f.default)} only")
            raise Infeasible(f"{f.name} {value}: {reason}")
