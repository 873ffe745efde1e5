"""The command `prologue`: searches the kernels of `qk_norm_rope`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import console, echo, make_table, short_path
from attnforge.bagel.commands.options import (
    DIRECTORY,
    choices,
    device_option,
    direction_option,
    dtype_option,
    model_option,
    number,
    workers_option,
)
from attnforge.codegen.spec import Direction, DType

if TYPE_CHECKING:
    from attnforge.runtime.search.prologue import Workload


@click.command(short_help="Search the kernels of qk_norm_rope.")
@model_option(default="7B", show_default=True)
@click.option("--tokens", **number(), help="Tokens of the pack.  [default: 36864 on a GPU, 1024 on a CPU]")
@dtype_option(default="bf16", show_default=True, help=f"{choices(DType)}.")
@direction_option()
@click.option("--variants", **number(), help="At most N variants per pass.")
@click.option(
    "--table-out", type=DIRECTORY, metavar="DIR", help="Write the winners to DIR.  [default: as search]"
)
@device_option(help="cpu, cuda or cuda:N.")
@workers_option()
def prologue(
    model: str,
    tokens: int | None,
    dtype: str,
    direction: str,
    variants: int | None,
    table_out: Path | None,
    device: str | None,
    workers: int | None,
) -> None:
    """Search the kernels of qk_norm_rope: RMSNorm of q and k, and rotary embedding.

    Each variant is compared with float64 and timed on a pack of two experts. The winners' entries are in the folder
    `prologue` of your tables; calls use them from then on.
    """
    import torch

    from attnforge.bagel.models import MODELS
    from attnforge.runtime import tables
    from attnforge.runtime.kernels import with_index
    from attnforge.runtime.native.launcher import launcher
    from attnforge.runtime.search.prologue import Workload

    if model not in MODELS:
        raise ValueError(f"--model: there is no {model!r}; models are {', '.join(MODELS)}")
    place = with_index(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    shape = MODELS[model]
    tokens = tokens or (36864 if place.type == "cuda" else 1024)
    heads = (shape.heads_q, shape.heads_kv, shape.head_dim)
    workload = Workload(tokens, *heads, DType(dtype), place)
    launcher()
    folder = table_out or tables.folders()[0]
    for one in Direction if direction == "both" else (Direction(direction),):
        _search(workload, one, variants, workers, folder)


def _search(
    workload: Workload, direction: Direction, variants: int | None, workers: int | None, folder: Path
) -> None:
    from attnforge.runtime.search.prologue import keep, search

    found = search(workload, direction, variants, workers)
    for result in found.failed:
        echo(f"{result.spec.slug}: {result.status}: {result.detail}")
    table = make_table(f"{direction.value}, {workload.name}", ("variant",), ("ms", "GB/s", "spills"))
    for result in found.leaders:
        table.add_row(
            result.spec.slug,
            f"{result.ms:.4f}",
            f"{result.gbps:.3g}" if result.gbps < 100 else f"{result.gbps:.0f}",
            str(result.spill_bytes),
        )
    console.print(table)
    if not found.leaders:
        raise click.ClickException(f"none of {found.tried} variants worked; the reasons are above")
    echo(f"{found.tried} variants; the winner is in {short_path(keep(found.leaders[0], workload, folder))}")
