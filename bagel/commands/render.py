"""The command `render`: prints the source of one variant, or updates generated/."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.syntax import Syntax

from attnforge.bagel.commands.console import console, echo, short_path
from attnforge.bagel.commands.options import arch_option, choices, dtype_option, number, out_option, values
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, make_tuning


@click.command(short_help="Print a kernel's source, or update generated/.")
@click.option(
    "--direction", type=values(Direction), default="fwd", metavar="PASS", help="fwd or bwd.  [default: fwd]"
)
@arch_option(default="sm80", show_default=True, help=f"{choices(Arch)}.")
@dtype_option(default="bf16", show_default=True, help=f"{choices(DType)}.")
@click.option("--head-dim", **number(128), help="Of q and k.")
@click.option("--head-dim-v", **number(0, least=0), help="Of v; 0: the same as --head-dim.")
@click.option(
    "--mask", type=values(Mask), default="spans", show_default=True, metavar="KIND", help=f"{choices(Mask)}."
)
@click.option("--align", **number(16), help="Largest power of 2 that divides all row addresses.")
@click.option("--set", "knobs", multiple=True, metavar="KNOB=N", help="All knobs.  [default: a first guess]")
@out_option("--out", help="Write to this file instead of the terminal.")
@click.option("--tuned", is_flag=True, help="Update the example sources in generated/.")
@click.option("--check", is_flag=True, help="Print a diff and exit with 1 if generated/ is outdated.")
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
    """Print the source of one variant, or update generated/."""
    if tuned or check:
        _update(check)
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
