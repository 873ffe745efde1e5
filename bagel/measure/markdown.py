"""Rows of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_row(cells: Iterable[str]) -> str:
    """`| a | b |`."""
    return f"| {' | '.join(cells)} |"


def markdown_head(names: Sequence[str]) -> list[str]:
    """The row of names that a table begins with, and the one that separates it from the others."""
    return [markdown_row(names), markdown_row(["---"] * len(names))]
