"""Reads the Markdown tables that benchmarks write."""

from __future__ import annotations


def body(text: str) -> list[list[str]]:
    """The cells of each row below the head of the only table in `text`."""
    rows = [line for line in text.splitlines() if line[:2] == "| " and "---" not in line]
    return [row.strip("| ").split(" | ") for row in rows[1:]]
