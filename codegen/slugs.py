"""The inverse of `Spec.slug`: from the name of a kernel, as profilers and files show it, to its spec."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any

from attnforge.codegen.families import family_of, make_tuning
from attnforge.codegen.formula import Formula
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import PROBLEM_FIELDS, Problem, ProblemField, Spec

FUNCTIONS = tuple(f for f in PROBLEM_FIELDS if issubclass(f.type, Formula))  # the last fields of a slug


def parse(name: str, functions: Iterable[Formula] = ()) -> Spec:
    """The spec of a slug, symbol (`attnforge_<slug>`) or file (`<slug>.cu`).

    functions: those of masks and scores that the kernel may have; the name holds a digest of each. Raises ValueError
    for anything else, and for a kernel of another function. The spec may be infeasible.
    """
    slug = name.rpartition("/")[2].removeprefix("attnforge_").removesuffix(".cu").removesuffix(".cpp")
    match = _head().match(slug)
    if match is None:
        raise ValueError(
            f"{name!r} is not the name of a kernel, such as fwd_sm90a_bf16_d128_causal_a16_m192_..."
        )
    data: dict[str, Any] = {}
    for f in PROBLEM_FIELDS:
        if f not in FUNCTIONS and (value := match[f.name]) is not None:
            data[f.name] = value if issubclass(f.type, Enum) else int(value)
    known = {function.label: function for function in functions}
    for label in match["functions"].split("_")[1:]:
        if label not in known:
            raise ValueError(
                f"{name!r}: {label} is a function of a mask or a score, of which a name has a digest only; "
                "`show` finds those of tables and of --score"
            )
        data |= {f.name: str(known[label]) for f in FUNCTIONS if isinstance(known[label], f.type)}
    problem = Problem.from_json(data)
    try:
        cls = family_of(problem).tuning
    except Infeasible as reason:
        raise ValueError(f"{name!r}: {reason}") from None
    fields = dataclasses.fields(cls)
    knobs = re.fullmatch("".join(map(_knob, fields)), slug[match.end() :])
    if knobs is None:
        expected = "_".join(f"{f.metadata['code']}N" for f in fields if not f.metadata["quiet"])
        raise ValueError(f"{name!r}: the knobs are {slug[match.end() + 1 :]!r}, expected {expected}")
    values = {f.name: int(x) for f, x in zip(fields, knobs.groups(), strict=True) if x is not None}
    return Spec(problem, make_tuning(problem, values))


def _knob(f: dataclasses.Field[Any]) -> str:
    part = rf"_{f.metadata['code']}(\d+)"
    return f"(?:{part})?" if f.metadata["quiet"] else part


@cache
def _head() -> re.Pattern[str]:
    """The part of a slug that names the problem."""
    fields = (f for f in PROBLEM_FIELDS if f not in FUNCTIONS)
    return re.compile("".join(map(_field, fields)) + r"(?P<functions>(?:_[a-z][a-z0-9]*[0-9a-f]{8})*)")


def _field(f: ProblemField) -> str:
    first = f is PROBLEM_FIELDS[0]
    if issubclass(f.type, Enum):
        # Longest first: sm90a before sm90.
        names = sorted((str(member.value) for member in f.type), key=len, reverse=True)
        value = "|".join(map(re.escape, names))
    else:
        value = r"\d+"
    part = f"{'' if f.after or first else '_'}{f.code}(?P<{f.name}>{value})"
    return part if f.always else f"(?:{part})?"
