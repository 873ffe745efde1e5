"""The command `models`: lists the presets of --model."""

from __future__ import annotations

from pathlib import Path

import click

from attnforge.bagel.commands.console import console, make_table, write_json
from attnforge.bagel.commands.options import out_option

NARROW = 70  # columns: below, descriptions follow the table


@click.command(short_help="List the presets of --model.")
@click.option("--sources", is_flag=True, help="Also print the source of each number.")
@out_option("--json", "json_out", help="Write the presets to this file.")
def models(sources: bool, json_out: Path | None) -> None:
    """List the presets of --model: heads, head dims and the mask that a model is trained with.

    Heads are query heads / kv heads. With --model alone, commands run the mask shown here; "bagel" stands for
    BAGEL's packs.
    """
    from attnforge.bagel.models import MODELS

    narrow = console.width < NARROW
    table = make_table("", ("model", "mask"), ("heads", "head_dim", "layers"), () if narrow else ("what",))
    for column in table.columns[:2]:
        column.no_wrap = True
    for model in MODELS.values():
        dims = f"{model.head_dim}/{model.head_dim_v}" if model.head_dim_v else f"{model.head_dim}"
        heads = f"{model.heads_q}/{model.heads_kv}"
        table.add_row(
            model.name, model.mask, heads, dims, str(model.layers), *(() if narrow else (model.text,))
        )
    console.print(table)
    for model in MODELS.values() if narrow else ():
        console.print(f"{model.name}: {model.text}", highlight=False, markup=False)
    for model in MODELS.values() if sources else ():
        console.print(f"{model.name}: [dim]{model.source}[/dim]", highlight=False)
    write_json(json_out, [vars(model) for model in MODELS.values()])
