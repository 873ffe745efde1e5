"""Measured rows as text: units, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attnforge.bagel.measure.bench import OURS, Row, best_peer, lead
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.runtime.search.journal import Result


def speed(tflops: float | None) -> str:
    """`739.1 TFLOP/s`, or `324.0 GFLOP/s` below 2 TFLOP/s; empty without a value."""
    if tflops is None:
        return ""
    return f"{tflops:.1f} TFLOP/s" if tflops >= 2 else f"{tflops * 1e3:.1f} GFLOP/s"


def bench_markdown(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """A Markdown table of TFLOP/s of visible pairs, one line per case and pass; notes below it explain each `-`."""
    names = list(dict.fromkeys(row.name for row in rows))
    head = ["case", "pass", *names, "ours / best peer"]
    text = [facts_line(facts), "TFLOP/s of visible pairs:", ""]
    text += markdown_head(head)
    for (case, direction, dtype), group in groupby(rows, key=case_key):
        by_name = {row.name: row for row in group}
        best, ours = best_peer(by_name.values()), by_name[OURS]
        cells = [_tflops(by_name.get(name)) for name in names]
        leads = lead(best, ours.ms)
        ratio = f"{leads:.2f}" if leads else "-"
        text.append(markdown_row([f"{case} {dtype}", direction, *cells, ratio]))
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(f"{row.name}: {row.note}", []).append(f"{row.case} {row.direction}")
    text += ["", *(f"- {note} ({', '.join(where)})" for note, where in notes.items())] if notes else []
    return "\n".join(text) + "\n"


def case_key(row: Row) -> tuple[str, str, str]:
    """Rows with the same key are compared with each other."""
    return row.case, row.direction, row.dtype


def _tflops(row: Row | None) -> str:
    return "-" if row is None or row.tflops is None else f"{row.tflops:.3g}"


def milliseconds(value: float | None) -> str:
    """Three significant digits, no exponent; empty without a value."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def interval(row: Row | Result) -> str:
    """`12.1-12.4`, milliseconds; `-` for a single sample, which has no interval; empty if it is not known."""
    if row.repeats < 2:
        return "-"
    return f"{milliseconds(row.low_ms)}-{milliseconds(row.high_ms)}" if row.high_ms else ""


def ratio(value: float | None) -> str:
    """`1.25x`; empty without a value."""
    return f"{value:.2f}x" if value else ""
