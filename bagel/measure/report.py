"""Tables for terminals and for Markdown files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from attnforge.bagel.measure.bench import OURS, Row, best_peer
from attnforge.codegen.spec import Spec
from attnforge.runtime.build.cache import Listing
from attnforge.runtime.doctor.findings import Finding
from attnforge.runtime.search.journal import Result
from attnforge.runtime.search.search import Finished
from attnforge.runtime.search.verify import Error

RESOURCES = ("registers", "spilled", "shared")  # per thread, bytes per thread, bytes per block
SHOWN = 12  # variants in the table at the end of a search


def speed(tflops: float | None) -> str:
    """TFLOP/s of a GPU or GFLOP/s of a CPU, whichever reads better."""
    if tflops is None:
        return ""
    return f"{tflops:.1f} TFLOP/s" if tflops >= 2 else f"{tflops * 1e3:.1f} GFLOP/s"


def knobs(spec: Spec) -> str:
    """The tuning in words, e.g. `tile_m=128 tile_n=64 warps=4`."""
    return " ".join(f"{f.name}={int(getattr(spec.tuning, f.name))}" for f in fields(spec.tuning))


def one_line(result: Result) -> str:
    """A variant in the stream of a running search."""
    if result.status == "ok":
        return f"{speed(result.tflops):>15}  {knobs(result.spec)}"
    reason = result.detail.strip().splitlines() or [""]
    return f"{result.status:>15}  {knobs(result.spec)}: {reason[0][:160]}"


def search_table(finished: Finished, peers: Sequence[Row]) -> Table:
    """The fastest variants of one search, then the peers; ratios are to the fastest peer."""
    best = best_peer(peers)
    table = Table(title=f"{finished.case.name}, {finished.direction.value}, {finished.case.dtype.value}")
    table.add_column("variant", overflow="fold")
    gpu = any(result.registers for result in finished.ranked)
    resources = RESOURCES if gpu else ()
    for name in ("speed", "ms", "vs best peer", "rms error", "of limit", *resources):
        table.add_column(name, justify="right")
    for number, result in enumerate(finished.ranked[:SHOWN]):
        table.add_row(*_variant(result, best, gpu), style="bold green" if number == 0 else None)
    if len(finished.ranked) > SHOWN:
        table.add_row(f"... {len(finished.ranked) - SHOWN} more")
    table.add_section()
    for row in peers:
        ratio = f"{best.ms / row.ms:.2f}x" if best and best.ms and row.ms else ""
        table.add_row(_name(row), speed(row.tflops), _ms(row.ms), ratio)
    return table


def _variant(result: Result, best: Row | None, gpu: bool) -> tuple[str, ...]:
    worst = max((rms for name, (rms, _) in result.errors.items() if name != "lse"), default=0.0)
    return (
        knobs(result.spec),
        speed(result.tflops),
        _ms(result.ms),
        f"{best.ms / result.ms:.2f}x" if best and best.ms else "",
        f"{worst:.1e}",
        f"{result.limit_used:.0%}",
        *((str(result.registers), str(result.spill_bytes), str(result.shared_bytes)) if gpu else ()),
    )


def failures(finished: Finished) -> str:
    """E.g. `2 compile, 1 wrong`; empty if all variants worked."""
    kinds = sorted(result.status for result in finished.failed)
    return ", ".join(f"{len(list(group))} {kind}" for kind, group in groupby(kinds))


def bench_table(rows: Sequence[Row], title: str) -> Table:
    """One line a contestant, cases apart; the ratio is ours to it (above 1: we are faster)."""
    table = Table(title=title)
    table.add_column("case")
    table.add_column("pass")
    table.add_column("attention", overflow="fold")
    for name in ("ms", "speed", "ours is"):
        table.add_column(name, justify="right")
    for _, group in groupby(rows, key=_key):
        lines = list(group)
        ours = next(row for row in lines if row.name == OURS)
        for row in lines:
            ratio = f"{row.ms / ours.ms:.2f}x" if row.ms and ours.ms else ""
            cells = (_name(row), _ms(row.ms), speed(row.tflops), ratio)
            style = "bold green" if row is ours else None
            table.add_row(f"{row.case} {row.dtype}", row.direction, *cells, style=style)
        table.add_section()
    return table


def bench_markdown(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """The same as a Markdown table, one line a case; TFLOP/s of visible pairs, `-` where the notes below say why."""
    names = list(dict.fromkeys(row.name for row in rows))
    head = ["case", "pass", *names, "ours / best peer"]
    text = [", ".join(f"{key} {value}" for key, value in facts.items()), "TFLOP/s of visible pairs:", ""]
    text += [_markdown(head), _markdown(["---"] * len(head))]
    for (case, direction, dtype), group in groupby(rows, key=_key):
        by_name = {row.name: row for row in group}
        best, ours = best_peer(by_name.values()), by_name[OURS]
        cells = [_tflops(by_name.get(name)) for name in names]
        ratio = f"{best.ms / ours.ms:.2f}" if best and best.ms and ours.ms else "-"
        text.append(_markdown([f"{case} {dtype}", direction, *cells, ratio]))
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(f"{row.name}: {row.note}", []).append(f"{row.case} {row.direction}")
    text += ["", *(f"- {note} ({', '.join(where)})" for note, where in notes.items())] if notes else []
    return "\n".join(text) + "\n"


def _name(row: Row) -> str:
    """With the reason where there is no time."""
    return f"{row.name} [dim]{escape(row.note)}[/dim]" if row.note else row.name


def _key(row: Row) -> tuple[str, str, str]:
    return row.case, row.direction, row.dtype


def _markdown(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tflops(row: Row | None) -> str:
    return "-" if row is None or row.tflops is None else f"{row.tflops:.3g}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def verify_table(title: str, peer: dict[str, tuple[float, float]], errors: dict[str, Error]) -> Table:
    """Errors against float64 beside SDPA's and the limits."""
    table = Table(title=title)
    table.add_column("tensor")
    for name in ("rms", "SDPA's rms", "limit", "worst", "SDPA's worst", "limit"):
        table.add_column(name, justify="right")
    for name, error in errors.items():
        theirs = [f"{value:.2e}" for value in peer.get(name, ())] or ["-", "-"]
        mine = (f"{error.rms:.2e}", theirs[0], f"{error.rms_limit:.2e}")
        worst = (f"{error.worst:.2e}", theirs[1], f"{error.worst_limit:.2e}")
        table.add_row(name, *mine, *worst)
    return table


def cache_table(listings: Sequence[Listing]) -> Table:
    """What `cache ls` shows: newest first."""
    total = sum(listing.bytes for listing in listings)
    table = Table(title=f"{len(listings)} compiled kernels, {total / 2**20:.1f} MiB")
    table.add_column("variant", overflow="fold")
    for name in ("compiler", "seconds", "registers", "spills B", "KiB"):
        table.add_column(name, justify="right")
    for listing in listings:
        meta = listing.meta
        used = list(meta["resources"].values())
        registers = max((one.get("registers", 0) for one in used), default=0)
        spills = max((one.get("spill_bytes", 0) for one in used), default=0)
        cells = (str(registers or ""), str(spills) if registers else "", f"{listing.bytes / 1024:.0f}")
        table.add_row(meta["slug"], meta["compiler"], f"{meta.get('seconds', 0):.1f}", *cells)
    return table


def doctor_table(findings: Sequence[Finding]) -> Table:
    """What `doctor` shows, remedies below what they are for."""
    colours = {"ok": "green", "info": "blue", "warning": "yellow", "failure": "bold red"}
    table = Table(box=None, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.name, escape(finding.value))
        if finding.remedy:
            table.add_row("", "", f"[bold]→ {escape(finding.remedy)}[/bold]")
    return table
