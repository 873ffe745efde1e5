"""The command `model`: fills tuned tables from a cost model."""

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
@click.option("--table-out", type=DIRECTORY, metavar="DIR", help="Write tables to DIR/modelled.")
def model(archs: tuple[str, ...], head_dims: tuple[int, ...], table_out: Path | None) -> None:
    """Choose kernels by a cost model, for GPUs without measurements.

    The kernels are compiled: one that spills registers is not chosen. Without --table-out the tables are
    those of generated/tuned/modelled.
    """
    from attnforge.bagel.measure.modelled import ARCHS, targets, write_tables
    from attnforge.runtime.tables import PACKAGED as TUNED

    known = sorted({target.head_dim for target in targets()})
    for dim in head_dims:
        if dim not in known:
            raise ValueError(f"--head-dim: {dim} has no model; accepted are {', '.join(map(str, known))}")
    for path in write_tables(tuple(map(Arch, archs)) or ARCHS, table_out or TUNED, echo, head_dims):
        echo(f"{path}: modelled, not measured")
