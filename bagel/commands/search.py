"""The command `search`: finds the fastest kernels for a pack."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import console, write_json
from attnforge.bagel.commands.options import (
    Seconds,
    alone_option,
    deterministic_option,
    file_option,
    knob_option,
    number,
    out_option,
    selecting,
    workers_option,
)
from attnforge.bagel.measure.markdown import facts_line

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection


# Of runtime/search/strategies.py, which is not imported for its names alone.
STRATEGIES = ("additive", "alternate", "exhaustive", "forest", "greedy", "random")


@click.command(short_help="Find the fastest kernels for a problem.")
@selecting
@click.option(
    "--seconds",
    type=Seconds(),
    metavar="S",
    help="Time per pack and pass.  [default: 50 on a CPU, 180 on a GPU]",
)
@click.option("--variants", "--trials", "variants", **number(), help="At most N variants per pack and pass.")
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="greedy",
    metavar="NAME",
    help=f"How to choose variants: {', '.join(STRATEGIES)}. exhaustive tries all.  [default: greedy]",
)
@knob_option()
@file_option("--log", help="Append each result to this JSONL file, and resume from it.")
@click.option(
    "--table-out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the winners to DIR.  [default: the first folder of `tables list`]",
)
@deterministic_option()
@alone_option()
@click.option("--no-peers", is_flag=True, help="Do not time other implementations.")
@click.option("--no-page", is_flag=True, help="Do not write an HTML page beside the log.")
@workers_option()
@out_option("--json", "json_out", help="Write the results to this file.")
def search(
    selection: Selection,
    seconds: float | None,
    variants: int | None,
    strategy: str,
    allowed: dict[str, frozenset[int]],
    log: Path | None,
    table_out: Path | None,
    deterministic: bool,
    alone: bool,
    no_peers: bool,
    no_page: bool,
    workers: int | None,
    json_out: Path | None,
) -> None:
    """Find the fastest kernels for a problem and add them to the tuned table.

    `attnforge.attention` uses the winners from then on. Tables are read from the folders of ATTNFORGE_TABLES
    (default: the user's data folder), then from the package; winners are written to the first one.

    With --deterministic the winners are for calls with deterministic=True, and other calls do not take them.
    """
    from attnforge.bagel.commands.search_screen import Options, run_search, say_page
    from attnforge.bagel.measure.bench import machine
    from attnforge.bagel.measure.tuning_set import search_seconds
    from attnforge.runtime.search.journal import expect_log
    from attnforge.runtime.search.search import Budget, Scope
    from attnforge.runtime.search.worker import Worker

    if log is not None:
        expect_log(log)
    if deterministic:
        selection = selection.with_deterministic()
    if seconds is None and variants is None and strategy != "exhaustive":
        seconds = search_seconds(selection.device)
    scope = Scope(allowed, strategy)
    options = Options(Budget(seconds, variants, alone), log, table_out, workers, not no_peers, scope)
    facts = machine(selection.device)
    console.print(facts_line(facts), style="dim")
    found = []
    with closing(Worker()) as worker:
        worker.start(selection.device)
        for case in selection.cases():
            for direction in selection.directions:
                for target in selection.targets(direction):
                    found.append(run_search(case, direction, target, options, worker))
                    write_json(json_out, {"machine": facts, "searches": found})
    if not no_page:
        say_page(found)
