"""The command `render`: shows the source of one variant, or renews generated/."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.syntax import Syntax

from attnforge.bagel.commands.shell import out_option, values
from attnforge.codegen.families import make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

console = Console(width=None if sys.stdout.isatty() else 140)


@click.command()
@click.option("--direction", type=values(Direction), default="fwd", show_default=True)
@click.option("--arch", type=values(Arch), default="sm80", show_default=True)
@click.option("--dtype", type=values(DType), default="bf16", show_default=True)
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--head-dim-v", type=int, default=0, help="Of v, if it has its own.")
@click.option("--mask", type=values(Mask), default="spans", show_default=True)
@click.option("--align", type=int, default=16, show_default=True, help="Bytes that divide all row starts.")
@click.option(
    "--set", "knobs", multiple=True, metavar="NAME=VALUE", help="All knobs. [default: a first guess]"
)
@out_option("--out", help="Write to this file instead of the terminal.")
@click.option("--tuned", is_flag=True, help="Render all tuned variants into generated/.")
@click.option("--check", is_flag=True, help="Exit with 1 and a diff if generated/ is out of date.")
def render(
    direction: str,
    arch: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    mask: str,
    align: int,
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

    kind = Mask(mask)
    problem = Problem(Direction(direction), Arch(arch), DType(dtype), head_dim, kind, align, head_dim_v)
    text = rendered(_pick(problem, knobs)).text
    if out is not None:
        out.write_text(text)
    elif console.is_terminal:
        console.print(Syntax(text, "cpp" if arch == "cpu" else "cuda", background_color="default"))
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
