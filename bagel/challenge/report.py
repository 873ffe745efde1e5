"""Tables of `challenge run`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from attnforge.bagel.challenge.final import NAIVE, OURS, Result
from attnforge.bagel.challenge.run import Timed, Training

ERRORS = ("out", "dq", "dk", "dv")


def training_table(training: Training, rows: Sequence[Timed]) -> Table:
    """One line a contestant; ratios are to native."""
    samples = zip(training.pack.kinds, training.pack.rows, strict=True)
    table = Table(title=", ".join(f"{kind} {count}" for kind, count in samples), title_justify="left")
    table.add_column("attention")
    for name in ("step ms", "attention forward ms", "against native"):
        table.add_column(name, justify="right")
    table.add_column("output", overflow="fold")
    native = next((row for row in rows if row.name == "native"), None)
    for row in rows:
        ratio = f"{native.attention_ms / row.attention_ms:.2f}x" if native else ""
        verdict = f"[bold red]{escape(row.error)}[/bold red]" if row.error else "right"
        table.add_row(row.name, f"{row.ms:.3g}", f"{row.attention_ms:.3g}", ratio, verdict)
    return table


def final_table(results: Sequence[Result], dtype: torch.dtype) -> Table:
    """One line a contestant, shapes apart."""
    table = Table(title=f"final round, {str(dtype).removeprefix('torch.')}", title_justify="left")
    table.add_column("B, H, S, D")
    table.add_column("attention", overflow="fold")
    for name in ("forward ms", "forward + backward ms", *(f"error of {name}" for name in ERRORS)):
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    last = None
    for row in results:
        if row.dtype is not dtype:
            continue
        shape = f"{row.shape.batch}, {row.shape.heads}, {row.shape.rows}, {row.shape.head_dim}"
        if last not in (None, shape):
            table.add_section()
        errors = (f"{row.errors[name]:.0e}" if name in row.errors else "" for name in ERRORS)
        note = f"[bold red]{escape(row.note)}[/bold red]" if row.wrong else escape(row.note)
        table.add_row(
            "" if last == shape else shape, row.name, _ms(row.forward_ms), _ms(row.both_ms), *errors, note
        )
        last = shape
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def ratios(results: Sequence[Result]) -> list[str]:
    """By dtype: geometric means over the shapes of the best backend's time over ours, and of the naive way's."""
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in results):
        for measure, words in (("forward_ms", "forward"), ("both_ms", "forward + backward")):
            for peer in ("torch's best backend", NAIVE):
                logs = _logs([row for row in results if row.dtype is dtype], measure, peer)
                if logs:
                    mean = math.exp(sum(logs) / len(logs))
                    name = str(dtype).removeprefix("torch.")
                    lines.append(f"{name} {words}: {mean:.2f}x {peer} (geometric mean of {len(logs)} shapes)")
    return lines


def _logs(results: Sequence[Result], measure: str, peer: str) -> list[float]:
    logs = []
    for shape in dict.fromkeys(row.shape for row in results):
        rows = {row.name: getattr(row, measure) for row in results if row.shape == shape}
        own = rows.pop(OURS, None)
        rows = {name: ms for name, ms in rows.items() if ms and (name == NAIVE) == (peer == NAIVE)}
        if own and rows:
            logs.append(math.log(min(rows.values()) / own))
    return logs


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Plain values of what final_table shows."""
    return [
        {
            "shape": [row.shape.batch, row.shape.heads, row.shape.rows, row.shape.head_dim],
            "dtype": str(row.dtype).removeprefix("torch."),
            "attention": row.name,
            "forward_ms": row.forward_ms,
            "both_ms": row.both_ms,
            "errors": row.errors,
            "note": row.note,
        }
        for row in results
    ]
