"""A search in the terminal: a progress bar, a line for each new best and each failure, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnforge.bagel.measure.bench import peers_of
from attnforge.bagel.measure.report import failures, one_line, search_table, speed
from attnforge.codegen.spec import Arch, Direction
from attnforge.runtime import dispatch
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search import winners
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import environment
from attnforge.runtime.search.search import Budget, Event, Finished, Measured, Started, search


@dataclass(frozen=True)
class Options:
    """How to search: budget of each (case, direction), log, folder for winners, compilers, peers or not."""

    budget: Budget
    log: Path | None = None
    out: Path = winners.GENERATED
    workers: int | None = None
    peers: bool = True


def run_search(
    case: Case, direction: Direction, target: tuple[Arch, str], options: Options, console: Console
) -> dict[str, Any]:
    """Search, show, keep the winner where dispatch finds it. Returns the results as a plain JSON value."""
    with console.status("loading the launcher; the first time on a machine it is built, half a minute"):
        launcher()
    events = search(case, direction, target, options.budget, options.log, options.workers)
    with closing(events):
        finished = watch(events, console)
    rows = []
    if options.peers:
        with console.status("timing torch's attentions on the same case"):
            rows = list(peers_of(case, direction))
    console.print(search_table(finished, rows))
    console.print(f"{finished.seconds:.0f} s of search; failed variants: {failures(finished) or 'none'}")
    arch, device_name = target
    written = winners.keep(finished, device_name, environment(device_name, arch), options.out)
    console.print(f"kept in {' and '.join(_short(path) for path in written)}", soft_wrap=True)
    dispatch.forget()
    return {
        "case": case.name,
        "direction": direction.value,
        "dtype": case.dtype.value,
        "ranked": [result.to_json() for result in finished.ranked],
        "failed": [result.to_json() for result in finished.failed],
        "peers": [vars(row) for row in rows],
    }


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def watch(events: Iterable[Event], console: Console) -> Finished:
    """Draw the events of one search until its end. Without a terminal, every variant is a line."""
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
