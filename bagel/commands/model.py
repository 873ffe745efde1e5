"""The command `model`: chooses kernels by a cost model, and writes them to tuned tables if asked to."""

from __future__ import annotations

from pathlib import Path

import click

from attnforge.bagel.commands.console import echo
from attnforge.bagel.commands.options import DIRECTORY, number
from attnforge.codegen.spec import Arch


@click.command("model", short_help="Choose kernels by a cost model.")
@click.option(
    "--arch",
    "archs",
    type=click.Choice(["sm80", "sm86", "sm89", "sm100", "sm120"]),
    multiple=True,
    metavar="ARCH",
    help="sm80, sm86, sm89, sm100 or sm120. Repeatable.  [default: all]",
)
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    **number(),
    help="Only this head_dim. Repeatable.  [default: all]",
)
@click.option("--table-out", type=DIRECTORY, metavar="DIR", help="Add them to the tables of DIR/modelled.")
def model(archs: tuple[str, ...], head_dims: tuple[int, ...], table_out: Path | None) -> None:
    """Choose kernels by a cost model, for GPUs without measurements.

    The kernels are compiled: one that spills registers is not chosen. Nothing is written without --table-out; a
    clone's own tables are those of `--table-out generated/tuned`.
    """
    from attnforge.bagel.measure.modelled import ARCHS, entries, targets
    from attnforge.runtime.tables import MODELLED, save

    known = sorted({target.head_dim for target in targets()})
    for dim in head_dims:
        if dim not in known:
            raise ValueError(f"--head-dim: {dim} has no model; accepted are {', '.join(map(str, known))}")
    written: dict[Path, None] = {}
    for arch, entry in entries(tuple(map(Arch, archs)) or ARCHS, echo, head_dims):
        if table_out is not None:
            written[save(arch.value, [entry], table_out / MODELLED)] = None
    for path in written:
        echo(f"{path}: modelled, not measured")
