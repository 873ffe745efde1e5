"""The command `render`: shows the source of one variant, or renews generated/."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.syntax import Syntax

from attnforge.bagel.commands.shell import out_option, values
from attnforge.codegen.families import make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import PROBLEM_FIELDS, Problem, Spec, plain

console = Console(width=None if sys.stdout.isatty() else 140)


def problem_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `Problem`; the command gets them as one `problem`."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        problem = Problem.from_json({f.name: arguments.pop(f.name) for f in PROBLEM_FIELDS})
        command(problem, **arguments)

    for f in reversed(PROBLEM_FIELDS):
        kind = values(f.type) if issubclass(f.type, Enum) else f.type
        option = click.option(
            f.option, f.name, type=kind, default=plain(f.cli), show_default=True, help=f.text
        )
        wrapped = option(wrapped)
    return wrapped


@click.command()
@problem_options
@click.option(
    "--set", "knobs", multiple=True, metavar="NAME=VALUE", help="All knobs. [default: a first guess]"
)
@out_option("--out", help="Write to this file instead of the terminal.")
@click.option("--tuned", is_flag=True, help="Render all tuned variants into generated/.")
@click.option("--check", is_flag=True, help="Exit with 1 and a diff if generated/ is out of date.")
def render(
    problem: Problem,
    knobs: tuple[str, ...],
    out: Path | None,
    tuned: bool,
    check: bool,
) -> None:
    """Show the source of one variant, or renew generated/."""
    if tuned or check:
        _renew(check)
        return
    from attnforge.codegen.render import render as rendered

    text = rendered(_pick(problem, knobs)).text
    if out is not None:
        out.write_text(text)
    elif console.is_terminal:
        console.print(Syntax(text, "cuda" if problem.arch.is_gpu else "cpp", background_color="default"))
    else:
        click.echo(text, nl=False)


def _renew(check: bool) -> None:
    from attnforge.runtime.search import winners

    if not check:
        changed = winners.write()
        console.print("\n".join(str(path) for path in changed) or "generated/ is up to date", soft_wrap=True)
        return
    lines = winners.differences()
    sys.stdout.writelines(lines)
    if lines:
        raise click.ClickException("generated/ is out of date: run `python cli.py render --tuned`")
    console.print("generated/ is up to date")


def _pick(problem: Problem, knobs: tuple[str, ...]) -> Spec:
    """The spec of `--set` options, or the default one; Infeasible with the reason."""
    from attnforge.codegen.space import candidates, why_infeasible

    if knobs:
        pairs = [text.partition("=") for text in knobs]
        for name, _, value in pairs:
            if not value.isdecimal():
                raise ValueError(f"--set {name}: expected NAME=VALUE with a whole number")
        return Spec(problem, make_tuning(problem, {name: int(value) for name, _, value in pairs}))
    spec = next(candidates(problem), None)
    if spec is None:
        raise Infeasible(why_infeasible(problem))
    return spec
