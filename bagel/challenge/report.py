"""Results of `challenge run --final`, summarised and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attnforge.bagel.challenge.final import NAIVE, OURS, Result


def ratios(results: Sequence[Result]) -> list[str]:
    """Our speedup over torch's best backend and over the naive attention: geometric means over the shapes."""
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
    """The results as plain JSON values."""
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
