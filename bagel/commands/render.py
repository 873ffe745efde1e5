"""The command `render`: prints the source of one variant, or updates generated/."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click
from rich.syntax import Syntax

from attnforge.bagel.commands.console import console, echo, short_path
from attnforge.bagel.commands.options import choices, number, out_option, values
from attnforge.codegen.families import make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import PROBLEM_FIELDS, Problem, ProblemField, Spec, plain


def problem_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `Problem`; the command gets them as one `problem`."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        problem = Problem.from_json({f.name: arguments.pop(f.name) for f in PROBLEM_FIELDS})
        command(problem, **arguments)

    for f in reversed(PROBLEM_FIELDS):
        wrapped = click.option(f.option, f.name, **_option(f))(wrapped)
    return wrapped


def _option(f: ProblemField) -> dict[str, Any]:
    """Type, default and help of a field's option."""
    default = plain(f.cli)
    if issubclass(f.type, Enum):
        text = f"{f.text.rstrip('.')}: {choices(f.type)}."
        return {
            "type": values(f.type),
            "metavar": "NAME",
            "default": default,
            "show_default": True,
            "help": text,
        }
    if issubclass(f.type, str):
        return {"metavar": "TEXT", "default": default, "help": f"{f.text}."}
    return number(int(default), least=0 if f.optional else 1, help=f"{f.text.rstrip('.')}.")


@click.command(short_help="Print a kernel's source, or update generated/.")
@problem_options
@click.option(
    "--set",
    "knobs",
    multiple=True,
    metavar="KNOB=N",
    help="A knob's value. Give all knobs or none.  [default: a first guess]",
)
@click.option(
    "--prologue", metavar="NAME", help="A kernel of qk_norm_rope by its name; the other options are ignored."
)
@out_option("--out", help="Write to this file instead of the terminal.")
@click.option("--tuned", is_flag=True, help="Update the example sources in generated/.")
@click.option("--check", is_flag=True, help="Print a diff and exit with 1 if generated/ is outdated.")
def render(
    problem: Problem,
    knobs: tuple[str, ...],
    prologue: str | None,
    out: Path | None,
    tuned: bool,
    check: bool,
) -> None:
    """Print the source of one variant, or update generated/."""
    if tuned or check:
        _update(check)
        return
    from attnforge.codegen import prologue as prologues
    from attnforge.codegen.render import render as rendered

    if prologue is not None:
        text = prologues.render(prologues.spec_from_slug(prologue)).text
    else:
        text = rendered(_pick(problem, knobs)).text
    if out is not None:
        out.write_text(text)
    elif console.is_terminal:
        console.print(Syntax(text, "cuda" if problem.arch.is_gpu else "cpp", background_color="default"))
    else:
        click.echo(text, nl=False)


def _update(check: bool) -> None:
    """Write the example sources, or only compare them."""
    from attnforge.runtime.search import examples

    if not check:
        changed = examples.write()
        echo("\n".join(map(short_path, changed)) or "generated/ is up to date")
        return
    lines = examples.differences()
    sys.stdout.writelines(lines)
    if lines:
        raise click.ClickException("generated/ is out of date: run `python cli.py render --tuned`")
    echo("generated/ is up to date")


def _pick(problem: Problem, knobs: tuple[str, ...]) -> Spec:
    """The spec of the `--set` options, or the first candidate; raises Infeasible if there is none."""
    from attnforge.codegen.space import candidates, why_infeasible

    if knobs:
        pairs = [text.partition("=") for text in knobs]
        for name, _, value in pairs:
            if not value.isdecimal():
                raise ValueError(f"--set {name}: expected KNOB=N with a whole number")
        return Spec(problem, make_tuning(problem, {name: int(value) for name, _, value in pairs}))
    spec = next(candidates(problem), None)
    if spec is None:
        raise Infeasible(why_infeasible(problem))
    return spec
