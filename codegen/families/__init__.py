"""The kernel families: one file for each, or for each pass of it, with its knobs, its plan and its search space.

**A family.** Write one file here that ends in a `Family`: the dataclass of its knobs, a function from a spec to its
`Plan`, a function that yields tunings with the best guess first, and the optional fields of `Problem` that its kernels
honour (every other value of those is refused for it). Put its templates into a folder of templates/ that the plan
names, and register it with one line of FAMILIES. A new compilation target also needs a member of `Arch`
(codegen/spec.py) and its compute capability (runtime/kernels.py). Launcher, cache, search and commands read the plan.

**A knob.** One field of the family's dataclass, with a default if tuned tables were written before there was such a
knob; what follows from it in the family's plan; its values in the family's space; the template. Names, JSON, command
line and search derive from the field.

**A value of a knob.** One entry of the family's space, and whatever the plan must refuse of it.

**A field of a problem.** One line of `Problem` (codegen/spec.py), with a default that means "as before". Then the
plan and templates of each family that honours it, named in its `Family`; all others raise Infeasible. Names, JSON,
`cli.py render` and tuned tables derive from the declaration; what calls may request is up to the operators
(runtime/dispatch.py).

Beside the families: limits.py (what GPUs have), mma.py and hopper.py (what kernels of one instruction set share),
schedule.py (the launches that list a mask's tiles).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from attnforge.codegen.families import (
    cpu,
    sm80,
    sm80_backward,
    sm80_fp32,
    sm90,
    sm90_backward,
    sm90_backward_wide,
    sm90_forward_wide,
    sm90_fp32,
)
from attnforge.codegen.families.family import Family
from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.spec import Direction, Problem, Spec, Tuning

# By `Problem.family` and direction.
FAMILIES: dict[tuple[str, Direction], Family] = {
    ("cpu", Direction.FORWARD): cpu.FORWARD,
    ("cpu", Direction.BACKWARD): cpu.BACKWARD,
    ("sm80", Direction.FORWARD): sm80.FORWARD,
    ("sm80", Direction.BACKWARD): sm80_backward.BACKWARD,
    ("sm80_fp32", Direction.FORWARD): sm80_fp32.FORWARD,
    ("sm80_fp32", Direction.BACKWARD): sm80_fp32.BACKWARD,
    ("sm90a", Direction.FORWARD): sm90.FORWARD,
    ("sm90a", Direction.BACKWARD): sm90_backward.BACKWARD,
    ("sm90a_wide", Direction.FORWARD): sm90_forward_wide.FORWARD,
    ("sm90a_wide", Direction.BACKWARD): sm90_backward_wide.BACKWARD,
    ("sm90a_fp32", Direction.FORWARD): sm90_fp32.FORWARD,
}


@lru_cache(maxsize=256)
def family_of(problem: Problem) -> Family:
    """The family that computes `problem`, or `Infeasible` if there is none or it does not honour a field's value."""
    family = FAMILIES.get((problem.family, problem.direction))
    if family is None:
        raise Infeasible(
            f"{problem.arch.value} has no {problem.dtype.value} {problem.direction.value} kernel"
        )
    family.require_honoured(problem)
    return family


def make_plan(spec: Spec) -> Plan:
    """Plan of `spec`, or `Infeasible` with the reason. TypeError for the knobs of another family."""
    problem, family = spec.problem, family_of(spec.problem)
    if type(spec.tuning) is not family.tuning:
        raise TypeError(
            f"tuning: got {type(spec.tuning).__name__}, but {problem.arch.value} {problem.dtype.value} "
            f"{problem.direction.value} takes {family.tuning.__name__}"
        )
    return family.plan(spec)


class RetiredKnob(ValueError):
    """A tuning has a value of a knob that is gone with which there is no kernel any more."""


def make_tuning(problem: Problem, values: Mapping[str, int]) -> Tuning:
    """The tuning of `problem`'s family from whole numbers by knob, also by the name that a knob had before.

    Knobs that are gone may have the value that is left (`Tuning.retired`); RetiredKnob names those with another one.
    ValueError names knobs that are unknown, and missing ones that have no default.
    """
    family = family_of(problem)
    cls, (types, renamed, required) = family.tuning, family.knobs
    # An old name beside the new one is kept: it is unknown.
    names = {name: name if renamed.get(name) in values else renamed.get(name, name) for name in values}
    values = {names[name]: value for name, value in values.items() if cls.retired.get(name) != value}
    unknown, missing = values.keys() - types.keys(), required - values.keys()
    if unknown or missing:
        wrong = [f"{', '.join(sorted(unknown))} unknown"] if unknown else []
        wrong += [f"{', '.join(sorted(missing))} missing"] if missing else []
        what = f"tuning of {problem.arch.value} {problem.dtype.value} {problem.direction.value}"
        error = ValueError if missing or unknown - cls.retired.keys() else RetiredKnob
        raise error(f"{what}: {'; '.join(wrong)}. Its knobs are {', '.join(types)}")
    return cls(**{name: types[name](value) for name, value in values.items()})


def spec_from_json(data: Mapping[str, Any]) -> Spec:
    """Rebuild a spec from `Spec.to_json`; ValueError names a field or knob that is missing, or an unknown knob."""
    problem = Problem.from_json(data)
    return Spec(problem, make_tuning(problem, data.get("tuning", {})))
