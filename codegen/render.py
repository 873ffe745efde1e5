"""Spec -> source text: the one Jinja environment and the checks that keep generated code readable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnforge.codegen import params
from attnforge.codegen.chaos import plant
from attnforge.codegen.families import make_plan
from attnforge.codegen.plan import Plan
from attnforge.codegen.spec import Arch, Spec

TEMPLATES = Path(__file__).parent.parent / "templates"
MAX_COLUMNS = 120
# Operand lists of inline PTX cannot be broken, and names of kernels are as long as their specs.
_MAY_BE_WIDE = ("asm", '"', ":", "attnforge_", 'extern "C" void attnforge_')


class RenderError(RuntimeError):
    """The rendered text breaks a rule of form (see `_check`): a defect of the template, not of the user."""


class Compilable(Protocol):
    """What the toolchains compile and the cache keeps: the text of one module for one architecture."""

    @property
    def text(self) -> str: ...

    @property
    def slug(self) -> str: ...

    @property
    def arch(self) -> Arch: ...

    @property
    def suffix(self) -> str: ...

    @property
    def symbols(self) -> tuple[str, ...]: ...

    def describe(self) -> dict[str, Any]:
        """What meta.json of the cache entry says of it."""


@dataclass(frozen=True)
class Source:
    """Rendered text of one variant with the plan it was made from."""

    spec: Spec
    plan: Plan
    text: str

    @property
    def file_name(self) -> str:
        return self.spec.slug + self.plan.suffix

    @property
    def slug(self) -> str:
        return self.spec.slug

    @property
    def arch(self) -> Arch:
        return self.spec.problem.arch

    @property
    def suffix(self) -> str:
        return self.plan.suffix

    @property
    def symbols(self) -> tuple[str, ...]:
        """Functions of the binary that the runtime calls or launches."""
        return tuple(launch.symbol for launch in (*self.plan.launches, *self.plan.schedule))

    @property
    def params(self) -> tuple[str, ...]:
        """Members of the launcher's Params that the kernels' one argument consists of, in its order."""
        return params.used(self.text)

    def describe(self) -> dict[str, Any]:
        """What meta.json of the cache entry says of it."""
        return self.spec.to_json()


@cache
def environment() -> Environment:
    """Strict: an undefined name raises. Trimmed: block tags leave no blank lines behind."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.globals["params_struct"] = params.PLACEHOLDER
    env.filters["operands"] = operands
    env.filters["row_in_pattern"] = row_in_pattern
    return env


def operands(numbers: Iterable[int]) -> str:
    """PTX operand list `{%0, %1}`; as a filter because its first two characters open a Jinja block."""
    return "{" + ", ".join(f"%{n}" for n in numbers) + "}"


def row_in_pattern(columns: int) -> str:
    """C++: the place of `row` in the pattern of TMA's swizzle for panels of so many elements of 2 bytes.

    The pattern repeats after 8 rows of 128 bytes; narrower panels have several rows in each 128 bytes.
    """
    return f"row{f' / {64 // columns}' if columns < 64 else ''} % {columns // 8}"


def knobs(spec: Spec) -> list[tuple[str, int, str]]:
    """(name, value, meaning) of each knob that names mention, for the provenance header."""
    named = spec.tuning.named_knobs()
    return [(f.name, value, ("1: " if f.type == "bool" else "") + f.metadata["text"]) for f, value in named]


def render(spec: Spec, chaos: int = 0) -> Source:
    """Source of `spec`; raises `Infeasible` if it cannot run. The same spec gives the same bytes for ever.

    `chaos`: above 0, a kernel for race hunting that sleeps at random at its barriers (codegen/chaos.py).
    """
    plan = make_plan(spec)
    text = render_text(plan.template, spec=spec, plan=plan, c=plan.constants, knobs=knobs(spec))
    if chaos:
        text = plant(text, chaos)
        _check(text, plan.template)
    return Source(spec, plan, text)


def render_text(template: str, **names: Any) -> str:
    """Text of a template, checked for form. Raises RenderError for a defect of the template."""
    text = environment().get_template(template).render(**names)
    text = text.replace(params.PLACEHOLDER, params.struct(params.used(text)))
    _check(text, template)
    return text


def _check(text: str, template: str) -> None:
    if "\n\n\n" in text:
        raise RenderError(f"{template}: two blank lines in a row")
    if not text.endswith("\n") or text.endswith("\n\n"):
        raise RenderError(f"{template}: must end with exactly one newline")
    for number, line in enumerate(text.splitlines(), 1):
        if line != line.rstrip() or "\t" in line:
            raise RenderError(f"{template}: line {number} has trailing space or a tab: {line!r}")
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith(_MAY_BE_WIDE):
            raise RenderError(f"{template}: line {number} is {len(line)} columns wide: {line!r}")
