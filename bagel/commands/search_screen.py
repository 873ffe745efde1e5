"""A search in the terminal: a progress bar, a line for each new best and each failure, a table at the end."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from attnforge.bagel.commands.bench import say_notes
from attnforge.bagel.commands.console import console, echo, make_table, short_path, warn
from attnforge.bagel.commands.report import missing_packages, write_page
from attnforge.bagel.measure.bench import Row, peers_of
from attnforge.bagel.measure.peers import FLEX, usual
from attnforge.bagel.measure.report import interval, milliseconds, ratio, speed
from attnforge.codegen.spec import Arch, Direction, Spec
from attnforge.runtime import dispatch, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search import winners
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import Journal, Result, environment
from attnforge.runtime.search.search import (
    DRIFT,
    Budget,
    Event,
    Finished,
    Measured,
    Scope,
    Started,
    search,
    varying_knobs,
    watch_events,
)
from attnforge.runtime.search.worker import Worker

SHOWN = 12  # variants in the table at the end of a search


@dataclass(frozen=True)
class Options:
    """How to search: the budget of each (case, direction), the log, the directory of the tuned table, ..."""

    budget: Budget
    log: Path | None = None
    out: Path | None = None  # of tables; None: the first folder that is read
    workers: int | None = None  # parallel compilations; None: one per CPU
    peers: bool = True  # also time torch's attention
    scope: Scope = field(default_factory=Scope)  # values of knobs, strategy


def run_search(
    case: Case, direction: Direction, target: tuple[Arch, str], options: Options, worker: Worker | None = None
) -> dict[str, Any]:
    """Run one search, print its progress, save the winner, time the peers. Returns the results as JSON values.

    worker: see `search`.

    Interrupted by Ctrl-C or SIGTERM, it saves the best so far, says how to resume, and raises KeyboardInterrupt.
    """
    device_name = target[1]
    out = tables.writable(options.out or tables.folders()[0])
    log = options.log or out / "logs" / tables.table_path(device_name, out).with_suffix(".jsonl").name
    with console.status("loading the launcher"):
        launcher()
    events = search(case, direction, target, options.budget, log, options.workers, options.scope, worker)
    resume = f"run the same command to resume from {short_path(log)}"
    with closing(events), sigterm_as_interrupt():
        screen = Screen(case, direction, options.budget)
        finished, interrupted = screen.watch(events)
        if interrupted:
            if finished.winner is not None:
                echo("interrupted; the best so far:")
                save(finished, target, out)
            echo(resume)
            raise KeyboardInterrupt
        save(finished, target, out)
        rows = []
        if options.peers:
            rows = time_peers(finished, resume)
            journal = Journal(log, case.name, direction.value, environment(device_name, target[0]))
            journal.note("peers", [asdict(row) for row in rows])
            if case.deterministic and not rows:
                echo("no peers: of them FlashAttention-3 alone is timed with deterministic gradients")
    report(finished, rows)
    return {**to_json(finished, rows), "log": str(log)}


def time_peers(finished: Finished, resume: str) -> list[Row]:
    """The peers' rows. Interrupted, it reports those that there are, prints `resume`, and raises KeyboardInterrupt."""
    rows: list[Row] = []
    spec = finished.winner.spec if finished.winner else None
    try:
        with console.status("") as status:
            for name in usual(finished.case):
                compiles = (
                    ", which torch compiles first (--no-peers leaves peers out)" if name in FLEX else ""
                )
                status.update(f"timing {name} on the same case{compiles}")
                rows += peers_of(finished.case, finished.direction, (name,), spec)
    except KeyboardInterrupt:
        report(finished, rows)
        echo(f"interrupted while peers were timed; the winner is saved; {resume}")
        raise
    return rows


def say_page(found: Sequence[Mapping[str, Any]]) -> None:
    """Write the HTML page of searches (`run_search`) beside their log, or print how to make one."""
    log = Path(found[0]["log"])
    page = log.with_suffix(".html")
    if missing := missing_packages():
        echo(f"for an HTML page of the log install {', '.join(missing)}: pip install 'attnforge[report]'")
        echo(f"then: attnforge report {short_path(log)} -o report.html")
        return
    problems = {(search["case"], search["direction"], search["dtype"]) for search in found}
    try:
        with console.status("making the HTML page"):
            write_page([log], page, problems)
    except (OSError, RuntimeError, ValueError) as error:
        echo(f"no HTML page: {error}")
        return
    echo(f"page with charts and sources: {short_path(page)}")


def report(finished: Finished, peers: Sequence[Row]) -> None:
    """Print the table of a search, remarks and warnings."""
    console.print(search_table(finished, peers))
    for remark in remarks(finished):
        console.print(remark, highlight=False, markup=False)
    say_notes(peers)
    for warning in warnings(finished, peers):
        warn(warning)


def to_json(finished: Finished, peers: Sequence[Row]) -> dict[str, Any]:
    """The results as JSON values."""
    return {
        "case": finished.case.name,
        "direction": finished.direction.value,
        "dtype": finished.case.dtype.value,
        "space": finished.space,
        "finalists": finished.finalists,
        "conditions": finished.conditions.shown,
        "warnings": list(warnings(finished, peers)),
        "ranked": [result.to_json() for result in finished.ranked],
        "failed": [result.to_json() for result in finished.failed],
        "peers": [vars(row) for row in peers],
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
    if saved.table.parent.resolve() not in {place.resolve() for place in tables.folders()}:
        echo(f"calls read it once {TABLES} names {short_path(saved.table.parent)}")
    if saved.source is not None:
        echo(f"its source: {short_path(saved.source)}")
    dispatch.forget()


class Screen:
    """The events of one search. A terminal shows records and failures, a log every variant."""

    def __init__(self, case: Case, direction: Direction, budget: Budget) -> None:
        self._case, self._direction, self._budget = case, direction, budget
        self._results: list[Result] = []
        self._begun: Started | None = None
        self._best_ms = math.inf
        self._started = time.monotonic()

    def watch(self, events: Iterable[Event]) -> tuple[Finished, bool]:
        """Show all events; returns as `watch_events`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("best {task.fields[best]}"),
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("preparing", total=None, best="-", left="")

            def show(event: Event) -> None:
                if isinstance(event, Started):
                    self._begun = event
                    progress.update(task, description=self._announce(event), total=event.planned)
                elif isinstance(event, Measured):
                    self._show(event)
                    progress.update(task, advance=1, best=self._best(), left=f"{clock(self.left())} left")

            return watch_events(events, self._case, self._direction, show)

    def _announce(self, event: Started) -> str:
        """Print what is searched, and for about how long. Returns the case in few words."""
        what = f"{event.case.name} {event.direction.value} {event.case.dtype.value}"
        limit = f", for about {clock(self._budget.seconds)}" if self._budget.seconds is not None else ""
        console.print(f"[bold]{escape(what)}[/bold]: {event.planned} of {event.space} variants{limit}")
        return what

    def left(self) -> float:
        """Seconds until the budget or the space ends, at the pace so far."""
        elapsed = time.monotonic() - self._started
        planned = self._begun.planned if self._begun else 0
        rest = (planned - len(self._results)) * elapsed / max(len(self._results), 1)
        return min(rest, (self._budget.seconds or math.inf) - elapsed)

    def _show(self, event: Measured) -> None:
        result = event.result
        self._results.append(result)
        record = result.status == "ok" and result.ms < self._best_ms
        if record:
            self._best_ms = result.ms
        if record or result.status != "ok" or not console.is_terminal:
            mark = "[green]*[/green]" if record else " "
            earlier = " [dim](from the log)[/dim]" if event.resumed else ""
            names = self._begun.varying if self._begun else None
            console.print(f"{mark} {escape(one_line(result, names))}{earlier}", soft_wrap=True)

    def _best(self) -> str:
        speeds = [r.tflops for r in self._results if r.status == "ok" and r.ms == self._best_ms]
        return speed(speeds[0]) if speeds else "-"


def knobs(spec: Spec, names: Sequence[str] | None = None) -> str:
    """The tuning as text, or these knobs of it: `tile_m=128 tile_n=64 warps=4`."""
    values = spec.tuning.to_json()
    return " ".join(f"{name}={value}" for name, value in values.items() if names is None or name in names)


def one_line(result: Result, names: Sequence[str] | None = None) -> str:
    """One variant in the log of a running search."""
    if result.status == "ok":
        return f"{speed(result.tflops):>15}  {knobs(result.spec, names)}"
    reason = result.detail.strip().splitlines() or [""]
    return f"{result.status:>15}  {knobs(result.spec, names)}: {reason[0][:160]}"


def search_table(finished: Finished, peers: Sequence[Row]) -> Table:
    """The finalists, then other variants with the times of their trials, then the peers, timed beside the winner."""
    shown = finished.ranked[:SHOWN]
    names = varying_knobs([result.spec for result in shown])
    title = f"{finished.case.name}, {finished.direction.value}, {finished.case.dtype.value}"
    table = make_table(title, ("variant",), ("speed", "ms", "95 % interval", "winner is", "error"))
    for number, result in enumerate(shown):
        if number == finished.finalists:
            table.add_section()
        winner = finished.ranked[0] if number < finished.finalists else None
        style = "bold green" if number == 0 else None if winner else "dim"
        table.add_row(*_variant(result, names, winner), style=style)
    table.add_section()
    for row in peers:
        if row.ms is not None:
            cells = (speed(row.tflops), milliseconds(row.ms), interval(row))
            table.add_row(row.name, *cells, ratio(row.ratio))
    return table


def _variant(result: Result, names: Sequence[str], winner: Result | None) -> tuple[str, ...]:
    return (
        knobs(result.spec, names or None),
        speed(result.tflops),
        milliseconds(result.ms),
        interval(result),
        ratio(result.ms / winner.ms) if winner and winner.ms else "",
        f"{result.limit_used:.0%}",
    )


def remarks(finished: Finished) -> Iterator[str]:
    """What the table does not say, a line each: the common knobs, how much was tried, under which conditions."""
    winner = finished.winner
    if winner is not None:
        varying = varying_knobs([result.spec for result in finished.ranked[:SHOWN]])
        common = [knob.name for knob, _ in winner.spec.tuning.named_knobs() if knob.name not in varying]
        if varying and common:
            yield f"in every variant: {knobs(winner.spec, common)}"
        yield resources(winner)
    yield counts(finished)
    facts = (f"{name} {value}" for name, value in finished.conditions.shown.items())
    yield from ([f"conditions: {'; '.join(facts)}"] if finished.conditions.shown else [])
    if finished.finalists < len(finished.ranked[:SHOWN]):
        again = f"the first {finished.finalists} were timed again, {'each alone' if finished.alone else 'interleaved'}"
        yield f"{again}; the others once, interleaved with one variant"
    if finished.tied:
        yield f"the winner and {finished.tied} after it cannot be told apart: their intervals overlap"


def warnings(finished: Finished, peers: Sequence[Row]) -> Iterator[str]:
    """What a reader must know before trusting or using the result."""
    yield from finished.conditions.warnings
    for row in peers:
        if row.ratio and row.ratio < 1:
            yield f"{row.name} is {1 / row.ratio:.2f} times as fast as the winner"
    ours = finished.winner.ms if finished.winner else 0.0
    apart = [row for row in peers if ours and row.ours_ms and _apart(row.ours_ms, ours)]
    if apart:
        beside = ", ".join(f"{milliseconds(row.ours_ms)} ms beside {row.name}" for row in apart)
        yield (
            f"the winner took {milliseconds(ours)} ms in the search and {beside}: "
            "the machine was not quiet, and milliseconds of winner and peers cannot be compared"
        )


def _apart(one: float, other: float) -> bool:
    """Whether two times of the same kernel differ by more than clocks and caches explain."""
    return not 1 / DRIFT <= one / other <= DRIFT


def resources(result: Result) -> str:
    """Error and, on a GPU, registers and memory of a variant."""
    worst = max((rms for name, (rms, _) in result.errors.items() if name != "lse"), default=0.0)
    words = f"winner: rms error {worst:.1e}, {result.limit_used:.0%} of its limit"
    if not result.registers:
        return words
    memory = f"{result.spill_bytes} bytes spilled, {result.shared_bytes / 1024:.0f} KiB of shared memory"
    return f"{words}; {result.registers} registers, {memory}"


def counts(finished: Finished) -> str:
    """`10 of 21 variants measured, 1 failed (1 wrong), 10 not tried; 50 s`"""
    words = [f"{len(finished.ranked)} of {finished.space} variants measured"]
    if finished.failed:
        words.append(f"{len(finished.failed)} failed ({failures(finished)})")
    if finished.space > finished.tried:
        words.append(f"{finished.space - finished.tried} not tried")
    return f"{', '.join(words)}; {finished.seconds:.0f} s"


def failures(finished: Finished) -> str:
    """The failed variants by kind: `2 compile, 1 wrong`; empty if none failed."""
    kinds = sorted(result.status for result in finished.failed)
    return ", ".join(f"{len(list(group))} {kind}" for kind, group in groupby(kinds))


def clock(seconds: float) -> str:
    """`0:50`, `3:00`"""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02}"
