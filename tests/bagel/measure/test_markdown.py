"""Rows of Markdown tables, and that benchmarks write theirs with them."""

from __future__ import annotations

import re
from pathlib import Path

from attnforge.bagel.measure import markdown
from attnforge.bagel.measure.markdown import markdown_head, markdown_row

ROOT = Path(markdown.__file__).parents[2]


def test_a_table_renders() -> None:
    table = [*markdown_head(("pack", "ms")), markdown_row(("pretrain/0", "3.36"))]
    assert table == ["| pack | ms |", "| --- | --- |", "| pretrain/0 | 3.36 |"]


def test_rows_are_joined_in_one_place() -> None:
    """The aligned head of search_replay.py is written out."""
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "bagel" / "measure").glob("*.py")]
    joins = re.compile(r"""f"\| \{' \| '\.join|"\| " \+ |"\|" \+|\|---""")
    found = {path.name for path in files if joins.search(path.read_text())}
    assert found == {"markdown.py"}
