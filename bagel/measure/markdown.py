"""Rows of Markdown tables, and the line above them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def facts_line(facts: Mapping[str, str]) -> str:
    """A machine on one line: `device NVIDIA H200, torch 2.11.0`."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def markdown_row(cells: Iterable[str]) -> str:
    """`| a | b |`."""
    return f"| {' | '.join(cells)} |"


def markdown_head(names: Sequence[str]) -> list[str]:
    """The row of names that a table begins with, and the one that separates it from the others."""
    return [markdown_row(names), markdown_row(["---"] * len(names))]
