"""The command `bench`: times our kernels and their peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from attnforge.bagel.commands.console import console, echo, make_table, write_json
from attnforge.bagel.commands.options import out_option, selecting
from attnforge.bagel.measure.markdown import facts_line

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection
    from attnforge.bagel.measure.bench import Row


@click.command(short_help="Time our kernels against their peers.")
@selecting(packs="those of --suite")
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
    """Time our kernels against their peers: SDPA's backends, FlexAttention and, if they are installed,
    FlashAttention 3, FlashAttention 4 and cudnn.flex_attention.

    Runs of ours and of each peer are interleaved.
    """
    from attnforge.bagel.measure import bench as bench_module
    from attnforge.bagel.measure.report import bench_markdown

    chosen = bench_module.chosen_peers(peers)
    facts = bench_module.machine(selection.device)
    rows: list[Row] = []
    with console.status("timing") as status:
        for case in selection.cases(suite):
            for row in bench_module.bench([case], selection.directions, chosen):
                rows.append(row)
                if not console.is_terminal:  # without a terminal there is no status line: log each row
                    echo(f"{row.case} {row.direction} {row.name}: {row.note or f'{row.ms:.3g} ms'}")
                status.update(f"timed {row.case} {row.direction} {row.name}")
                # After each row: an interrupted run keeps what it measured.
                write_json(json_out, bench_module.to_json(rows, selection.device))
    console.print(bench_table(rows, facts_line(facts)))
    say_notes(rows)
    if markdown is not None:
        markdown.write_text(bench_markdown(rows, facts))
    if problems := bench_module.failed(rows):
        raise click.ClickException("\n".join(("kernels of attnforge failed:", *problems)))


def bench_table(rows: Sequence[Row], title: str) -> Table:
    """One line per attention, grouped by case and pass; ratios are of timings interleaved with ours."""
    from attnforge.bagel.measure.bench import OURS
    from attnforge.bagel.measure.report import case_key, interval, milliseconds, ratio, speed

    table = make_table(title, ("attention",), ("speed", "ms", "95 % interval", "ours is"))
    for (case, direction, dtype), group in groupby(rows, key=case_key):
        table.add_row(f"[bold]{escape(case)} {dtype} {direction}[/bold]")
        for row in group:
            if row.ms is None:
                continue
            style = "bold green" if row.name == OURS else None
            cells = (speed(row.tflops), milliseconds(row.ms), interval(row))
            table.add_row(f"  {row.name}", *cells, ratio(row.ratio), style=style)
        table.add_section()
    return table


def say_notes(rows: Iterable[Row]) -> None:
    """Print why peers have no time, a line for each reason."""
    notes: dict[tuple[str, str], list[str]] = {}  # reason, where -> names
    for row in rows:
        if row.note:
            notes.setdefault((row.note, f"{row.case} {row.direction}"), []).append(row.name)
    reasons: dict[tuple[str, str], list[str]] = {}  # names, reason -> where
    for (note, where), names in notes.items():
        reasons.setdefault((", ".join(names), note), []).append(where)
    for (names_text, note), places in reasons.items():
        echo(f"not timed: {names_text}: {note} ({', '.join(places)})")
