"""A search in the terminal: a progress bar, a line for each new best and each failure, a table at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnforge.bagel.measure.bench import peers_of
from attnforge.bagel.measure.report import failures, one_line, search_table, speed
from attnforge.codegen.spec import Arch, Direction
from attnforge.runtime import dispatch, tables
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search import winners
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import Result, environment
from attnforge.runtime.search.search import Budget, Event, Finished, Measured, Started, search


@dataclass(frozen=True)
class Options:
    """How to search: budget of each (case, direction), log, folder for winners, compilers, peers or not."""

    budget: Budget
    log: Path | None = None
    out: Path | None = None  # the first folder of tables
    workers: int | None = None
    peers: bool = True


def run_search(
    case: Case, direction: Direction, target: tuple[Arch, str], options: Options, console: Console
) -> dict[str, Any]:
    """Search, keep the winner where dispatch finds it, time the peers, show. Returns the results as a JSON value.

    Interrupted by Ctrl-C or SIGTERM, it keeps the best so far, says how to go on, and raises KeyboardInterrupt.
    """
    device_name = target[1]
    out = tables.writable(options.out or tables.folders()[0])
    log = options.log or out / "logs" / tables.table_path(device_name, out).with_suffix(".jsonl").name
    with console.status("loading the launcher; the first time on a machine it is built, half a minute"):
        launcher()
    events = search(case, direction, target, options.budget, log, options.workers)
    with closing(events), sigterm_as_interrupt():
        screen = Screen(case, direction, console)
        try:
            finished = screen.watch(events)
        except KeyboardInterrupt:
            finished = screen.so_far()
            if finished.winner is not None:
                console.print("\ninterrupted; the best so far:")
                keep(finished, target, out, console)
            console.print(f"the same command goes on from {_short(log)}", soft_wrap=True)
            raise
    keep(finished, target, out, console)
    rows = []
    if options.peers:
        with console.status("timing torch's attentions on the same case"):
            rows = list(peers_of(case, direction))
    console.print(search_table(finished, rows))
    console.print(f"{finished.seconds:.0f} s of search; failed variants: {failures(finished) or 'none'}")
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


def keep(finished: Finished, target: tuple[Arch, str], out: Path, console: Console) -> None:
    """Write the winner into the tables of `out`, or say which faster entry stays."""
    arch, device_name = target
    kept = winners.keep(finished, device_name, environment(device_name, arch), out)
    if kept.stays is not None:
        stays = f"{kept.stays.spec.slug}, {kept.stays.tflops:.1f} TFLOP/s"
        console.print(
            f"not kept: {_short(kept.table)} has a faster kernel that this search did not time: {stays}",
            soft_wrap=True,
        )
        return
    places = " and ".join(_short(path) for path in (kept.table, kept.source) if path is not None)
    console.print(f"kept in {places}", soft_wrap=True)
    dispatch.forget()


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class Screen:
    """The events of one search on a terminal. Without a terminal, every variant is a line."""

    def __init__(self, case: Case, direction: Direction, console: Console) -> None:
        self._case, self._direction, self._console = case, direction, console
        self._results: list[Result] = []
        self._best_ms = math.inf
        self._started = time.monotonic()

    def so_far(self) -> Finished:
        """What a search that was interrupted has measured."""
        ranked = sorted((r for r in self._results if r.status == "ok"), key=lambda r: r.ms)
        failed = tuple(r for r in self._results if r.status != "ok")
        seconds = time.monotonic() - self._started
        return Finished(self._case, self._direction, tuple(ranked), failed, seconds)

    def watch(self, events: Iterable[Event]) -> Finished:
        """Draw until the end."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("best {task.fields[best]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("preparing", total=None, best="-")
            for event in events:
                if isinstance(event, Started):
                    what = f"{event.case.name} {event.direction.value} {event.case.dtype.value}"
                    self._console.print(f"[bold]{what}[/bold]: {event.planned} of {event.space} variants")
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
        if record or result.status != "ok" or not self._console.is_terminal:
            mark = "[green]*[/green]" if record else " "
            earlier = " [dim](from the log)[/dim]" if event.resumed else ""
            self._console.print(f"{mark} {escape(one_line(result))}{earlier}", soft_wrap=True)

    def _best(self) -> str:
        speeds = [r.tflops for r in self._results if r.status == "ok" and r.ms == self._best_ms]
        return speed(speeds[0]) if speeds else "-"
