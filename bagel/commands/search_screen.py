"""A search in the terminal: a progress bar, a line for each new best and each failure, a table at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
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
from attnforge.runtime import dispatch, tables
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search import winners
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import Journal, Result, environment
from attnforge.runtime.search.search import Budget, Event, Finished, Measured, Started, search

RESOURCES = ("registers", "spilled", "shared")  # per thread, bytes per thread, bytes per block
SHOWN = 12  # variants in the table at the end of a search


@dataclass(frozen=True)
class Options:
    """How to search: the budget of each (case, direction), the log, the directory of the tuned table, ..."""

    budget: Budget
    log: Path | None = None
    out: Path | None = None  # of tables; None: the first folder that is read
    workers: int | None = None  # parallel compilations; None: one per CPU
    peers: bool = True  # also time torch's attention


def run_search(
    case: Case, direction: Direction, target: tuple[Arch, str], options: Options
) -> dict[str, Any]:
    """Run one search, print its progress, save the winner, time the peers. Returns the results as JSON values.

    Interrupted by Ctrl-C or SIGTERM, it saves the best so far, says how to resume, and raises KeyboardInterrupt.
    """
    device_name = target[1]
    out = tables.writable(options.out or tables.folders()[0])
    log = options.log or out / "logs" / tables.table_path(device_name, out).with_suffix(".jsonl").name
    with console.status("loading the launcher (the first run on a machine builds it, half a minute)"):
        launcher()
    events = search(case, direction, target, options.budget, log, options.workers)
    with closing(events), sigterm_as_interrupt():
        screen = Screen(case, direction)
        try:
            finished = screen.watch(events)
        except KeyboardInterrupt:
            finished = screen.so_far()
            if finished.winner is not None:
                echo("interrupted; the best so far:")
                save(finished, target, out)
            echo(f"run the same command to resume from {short_path(log)}")
            raise
    save(finished, target, out)
    rows = []
    if options.peers:
        with console.status("timing torch's attention on the same case"):
            rows = list(peers_of(case, direction))
        journal = Journal(log, case.name, direction.value, environment(device_name, target[0]))
        journal.note("peers", [asdict(row) for row in rows])
    console.print(search_table(finished, rows))
    echo(f"{finished.seconds:.0f} s of search; failed variants: {failures(finished) or 'none'}")
    echo(f"a page of this log: attnforge report {short_path(log)} -o report.html")
    return {
        "case": case.name,
        "direction": direction.value,
        "dtype": case.dtype.value,
        "ranked": [result.to_json() for result in finished.ranked],
        "failed": [result.to_json() for result in finished.failed],
        "peers": [vars(row) for row in rows],
    }


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, as schedulers send it, raises KeyboardInterrupt in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def save(finished: Finished, target: tuple[Arch, str], out: Path) -> None:
    """Write the winner into the tables of `out`, or print which faster entry stays."""
    arch, device_name = target
    saved = winners.keep(finished, device_name, environment(device_name, arch), out)
    if saved.stays is not None:
        stays = f"{saved.stays.spec.slug}, {speed(saved.stays.tflops)}"
        echo(
            f"not saved: {short_path(saved.table)} has a faster kernel that this search did not time: {stays}"
        )
        return
    echo(f"winner saved in {short_path(saved.table)}")
    if saved.source is not None:
        echo(f"its source: {short_path(saved.source)}")
    dispatch.forget()


class Screen:
    """The events of one search. A terminal shows records and failures, a log every variant."""

    def __init__(self, case: Case, direction: Direction) -> None:
        self._case, self._direction = case, direction
        self._results: list[Result] = []
        self._best_ms = math.inf
        self._started = time.monotonic()

    def so_far(self) -> Finished:
        """What an interrupted search has measured."""
        ranked = sorted((r for r in self._results if r.status == "ok"), key=lambda r: r.ms)
        failed = tuple(r for r in self._results if r.status != "ok")
        seconds = time.monotonic() - self._started
        return Finished(self._case, self._direction, tuple(ranked), failed, seconds)

    def watch(self, events: Iterable[Event]) -> Finished:
        """Show all events; returns the last."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("best {task.fields[best]}"),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("preparing", total=None, best="-")
            for event in events:
                if isinstance(event, Started):
                    what = f"{event.case.name} {event.direction.value} {event.case.dtype.value}"
                    console.print(f"[bold]{what}[/bold]: {event.planned} of {event.space} variants")
                    progress.update(task, description=what, total=event.planned)
                elif isinstance(event, Measured):
                    self._show(event)
                    progress.update(task, advance=1, best=self._best())
                else:
                    return event
        raise RuntimeError("the search ended without a result")

    def _show(self, event: Measured) -> None:
        result = event.result
        self._results.append(result)
        record = result.status == "ok" and result.ms < self._best_ms
        if record:
            self._best_ms = result.ms
        if record or result.status != "ok" or not console.is_terminal:
            mark = "[green]*[/green]" if record else " "
            earlier = " [dim](from the log)[/dim]" if event.resumed else ""
            console.print(f"{mark} {escape(one_line(result))}{earlier}", soft_wrap=True)

    def _best(self) -> str:
        speeds = [r.tflops for r in self._results if r.status == "ok" and r.ms == self._best_ms]
        return speed(speeds[0]) if speeds else "-"


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
