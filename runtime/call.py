"""`Call`: the values of an attention call that determine which kernel runs it. Imports no torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from attnforge.codegen.spec import Arch, Problem
from attnforge.runtime.rounds import MANY


@dataclass(frozen=True)
class Call:
    """What the choice of a kernel depends on, besides the device.

    group: the GQA ratio, heads_q / heads_kv. size: query rows.

    visible_keys: average number of keys that a query sees under the call's mask: 0 if it is unknown, and then it does
        not matter; negative if a few keys are seen by far more queries than the others.
    deterministic: gradients have to be summed in a fixed order. False for a forward.
    rounds: `rounds_of` the call.
    """

    problem: Problem
    group: int
    size: int
    _: KW_ONLY
    visible_keys: int = 0
    deterministic: bool = False
    rounds: int = MANY

    def on(self, arch: Arch) -> Call:
        """The same call by kernels of an architecture."""
        return replace(self, problem=replace(self.problem, arch=arch))
