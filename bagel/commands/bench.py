"""The command `bench`: times our kernels and their peers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from attnforge.bagel.commands.console import console, facts_line, make_table, say, write_json
from attnforge.bagel.commands.options import out_option, selecting

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection
    from attnforge.bagel.measure.bench import Row


@click.command(short_help="Time our kernels against their peers.")
@selecting
@click.option(
    "--suite",
    type=click.Choice(["dense", "packs"]),
    default="packs",
    metavar="NAME",
    help="Cases if no --pack is given: packs or dense.  [default: packs]",
)
@click.option("--peers", metavar="A,B", help="Only these peers; empty for none.  [default: all]")
@out_option("--json", "json_out", help="Write the rows to this file.")
@out_option("--markdown", help="Write a Markdown table to this file.")
def bench(
    selection: Selection, suite: str, peers: str | None, json_out: Path | None, markdown: Path | None
) -> None:
    """Time our kernels against SDPA's backends and FlexAttention, in one run."""
    from attnforge.bagel.measure import bench as bench_module
    from attnforge.bagel.measure.report import bench_markdown

    chosen = bench_module.chosen_peers(peers, selection.device)
    facts = bench_module.machine(selection.device)
    rows: list[Row] = []
    with console.status("timing") as status:
        for case in selection.cases(suite):
            for row in bench_module.bench([case], selection.directions, chosen):
                rows.append(row)
                if not console.is_terminal:  # without a terminal there is no status line: log each row
                    say(f"{row.case} {row.direction} {row.name}: {row.note or f'{row.ms:.3g} ms'}")
                status.update(f"timed {row.case} {row.direction} {row.name}")
                # After each row: an interrupted run keeps what it measured.
                write_json(json_out, bench_module.to_json(rows, selection.device))
    console.print(bench_table(rows, facts_line(facts)))
    if markdown is not None:
        markdown.write_text(bench_markdown(rows, facts))
    if problems := bench_module.failed(rows):
        raise click.ClickException("\n".join(("ours failed:", *problems)))


def bench_table(rows: Sequence[Row], title: str) -> Table:
    """One line per attention, grouped by case; the last column is our speed over theirs."""
    from attnforge.bagel.measure.bench import OURS
    from attnforge.bagel.measure.report import case_key, milliseconds, speed

    table = make_table(title, ("case", "pass", "attention"), ("ms", "speed", "ours is"))
    for _, group in groupby(rows, key=case_key):
        lines = list(group)
        ours = next(row for row in lines if row.name == OURS)
        for row in lines:
            ratio = f"{row.ms / ours.ms:.2f}x" if row.ms and ours.ms else ""
            cells = (name_cell(row), milliseconds(row.ms), speed(row.tflops), ratio)
            style = "bold green" if row is ours else None
            table.add_row(f"{row.case} {row.dtype}", row.direction, *cells, style=style)
        table.add_section()
    return table


def name_cell(row: Row) -> str:
    """The name of an attention, with the reason if it was not timed."""
    return f"{row.name} [dim]{escape(row.note)}[/dim]" if row.note else row.name
