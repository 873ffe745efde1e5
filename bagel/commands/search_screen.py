"""A search in the terminal: a progress bar, a line for each new best and each failure, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnforge.bagel.commands.bench import name_cell
from attnforge.bagel.commands.console import console, echo, make_table, short_path
from attnforge.bagel.measure.bench import Row, best_peer, peers_of
from attnforge.bagel.measure.report import milliseconds, speed
from attnforge.codegen.spec import Arch, Direction, Spec
from attnforge.runtime import dispatch
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search import examples, winners
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import Result, environment
from attnforge.runtime.search.search import Budget, Event, Finished, Measured, Started, search

RESOURCES = ("registers", "spilled", "shared")  # per thread, bytes per thread, bytes per block
SHOWN = 12  # variants in the table at the end of a search


@dataclass(frozen=True)
class Options:
    """How to search: the budget of each (case, direction), the log, the directory of the tuned table, ..."""

    budget: Budget
    log: Path | None = None
    out: Path = winners.GENERATED
    workers: int | None = None  # parallel compilations; None: one per CPU
    peers: bool = True  # also time torch's attention


def run_search(
    case: Case, direction: Direction, target: tuple[Arch, str], options: Options
) -> dict[str, Any]:
    """Run one search, print its progress and result, and save the winner. Returns the results as JSON values."""
    with console.status("loading the launcher (the first run on a machine builds it, half a minute)"):
        launcher()
    events = search(case, direction, target, options.budget, options.log, options.workers)
    with closing(events):
        finished = watch(events)
    rows = []
    if options.peers:
        with console.status("timing torch's attention on the same case"):
            rows = list(peers_of(case, direction))
    console.print(search_table(finished, rows))
    echo(f"{finished.seconds:.0f} s of search; failed variants: {failures(finished) or 'none'}")
    arch, device_name = target
    table = winners.keep(finished, device_name, environment(device_name, arch), options.out)
    changed = examples.write() if options.out == winners.GENERATED else []
    echo(f"winner saved in {', '.join(short_path(path) for path in (table, *changed))}")
    if finished.winner is not None:
        echo(f"its source: python cli.py render {finished.winner.spec.to_cli()}")
    dispatch.forget()
    return {
        "case": case.name,
        "direction": direction.value,
        "dtype": case.dtype.value,
        "ranked": [result.to_json() for result in finished.ranked],
        "failed": [result.to_json() for result in finished.failed],
        "peers": [vars(row) for row in rows],
    }


def watch(events: Iterable[Event]) -> Finished:
    """Show the events of one search. A terminal shows records and failures, a log every variant."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("best {task.fields[best]}"),
    )
    every = not console.is_terminal
    best_ms = float("inf")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None, best="-")
        for event in events:
            if isinstance(event, Started):
                what = f"{event.case.name} {event.direction.value} {event.case.dtype.value}"
                console.print(f"[bold]{what}[/bold]: {event.planned} of {event.space} variants")
                progress.update(task, description=what, total=event.planned)
            elif isinstance(event, Measured):
                progress.advance(task)
                result = event.result
                record = result.status == "ok" and result.ms < best_ms
                if record:
                    best_ms = result.ms
                    progress.update(task, best=speed(result.tflops))
                if every or record or result.status != "ok":
                    mark = "[green]*[/green]" if record else " "
                    earlier = " [dim](from the log)[/dim]" if event.resumed else ""
                    console.print(f"{mark} {escape(one_line(result))}{earlier}", soft_wrap=True)
            else:
                return event
    raise RuntimeError("the search ended without a result")


def knobs(spec: Spec) -> str:
    """The tuning as text: `tile_m=128 tile_n=64 warps=4`."""
    return " ".join(f"{f.name}={int(getattr(spec.tuning, f.name))}" for f in fields(spec.tuning))


def one_line(result: Result) -> str:
    """One variant in the log of a running search."""
    if result.status == "ok":
        return f"{speed(result.tflops):>15}  {knobs(result.spec)}"
    reason = result.detail.strip().splitlines() or [""]
    return f"{result.status:>15}  {knobs(result.spec)}: {reason[0][:160]}"


def search_table(finished: Finished, peers: Sequence[Row]) -> Table:
    """The fastest variants of one search, then the peers; ratios are to the fastest peer."""
    best = best_peer(peers)
    title = f"{finished.case.name}, {finished.direction.value}, {finished.case.dtype.value}"
    gpu = any(result.registers for result in finished.ranked)
    resources = RESOURCES if gpu else ()
    numbers = ("speed", "ms", "vs best peer", "rms error", "of limit", *resources)
    table = make_table(title, ("variant",), numbers)
    for number, result in enumerate(finished.ranked[:SHOWN]):
        table.add_row(*_variant(result, best, gpu), style="bold green" if number == 0 else None)
    if len(finished.ranked) > SHOWN:
        table.add_row(f"... {len(finished.ranked) - SHOWN} more")
    table.add_section()
    for row in peers:
        ratio = f"{best.ms / row.ms:.2f}x" if best and best.ms and row.ms else ""
        table.add_row(name_cell(row), speed(row.tflops), milliseconds(row.ms), ratio)
    return table


def _variant(result: Result, best: Row | None, gpu: bool) -> tuple[str, ...]:
    worst = max((rms for name, (rms, _) in result.errors.items() if name != "lse"), default=0.0)
    return (
        knobs(result.spec),
        speed(result.tflops),
        milliseconds(result.ms),
        f"{best.ms / result.ms:.2f}x" if best and best.ms else "",
        f"{worst:.1e}",
        f"{result.limit_used:.0%}",
        *((str(result.registers), str(result.spill_bytes), str(result.shared_bytes)) if gpu else ()),
    )


def failures(finished: Finished) -> str:
    """The failed variants by kind: `2 compile, 1 wrong`; empty if none failed."""
    kinds = sorted(result.status for result in finished.failed)
    return ", ".join(f"{len(list(group))} {kind}" for kind, group in groupby(kinds))
