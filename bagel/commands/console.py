"""The terminal: one console, one way to build a table, one way to write JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

# As wide as the terminal; a pipe gets $COLUMNS or 80.
console = Console()
if console.width < 1:  # with COLUMNS=0, as containers set it, rich prints nothing
    console.width = shutil.get_terminal_size().columns
UNBOUNDED = 10_000  # columns: more than any table has


def echo(text: str) -> None:
    """Print plain text: no markup, no highlighting, no wrapping of long paths."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def wrap(lead: str, text: str) -> str:
    """`lead` and `text`. In a terminal, lines that do not fit are wrapped and indented, words whole; not in a pipe."""
    width = console.width if console.is_terminal else UNBOUNDED
    wrapped: list[str] = []
    rest = " " * len(lead)
    for line in text.splitlines() or [""]:
        first = rest if wrapped else lead
        wrapped.append(
            textwrap.fill(
                line,
                width,
                initial_indent=first,
                subsequent_indent=rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(wrapped)


def echo_entry(label: str, text: str) -> None:
    """Print `  label text`, wrapped in a terminal."""
    echo(wrap(f"  {label:<4}  ", text))


def warn(text: str) -> None:
    """Print a warning; the console wraps it."""
    console.print(f"[bold yellow]warning:[/bold yellow] {escape(text)}", highlight=False)


def warn_of_short_name(gpu: str | None) -> None:
    """Warn if a GPU without a table has a name that a longer one with a table begins with, as `NVIDIA H100`."""
    from attnforge.runtime.tables import longer_names

    if gpu and (names := longer_names(gpu)):
        warn(
            f"--gpu: no table is for {gpu}, but for {', '.join(names)}; give the name as nvidia-smi -L prints it"
        )


class _Table(Table):
    """In a narrow terminal its columns stand closer, and numbers are not wrapped, as long as all words have room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._width(console).maximum > options.max_width:
            self.padding, self.show_edge = 0, False
            numbers = [column for column in self.columns if column.justify == "right"]
            for column in numbers:
                column.no_wrap = True
                column.header = str(column.header).replace(" ", "\n").replace("\n%", " %")
            if self._width(console).minimum > options.max_width:
                for column in numbers:
                    column.no_wrap = False  # folded, not cropped
        yield from super().__rich_console__(console, options)

    def _width(self, console: Console) -> Measurement:
        return Measurement.get(console, console.options.update(max_width=UNBOUNDED), self)


def make_table(
    title: str, words: Sequence[str], numbers: Sequence[str] = (), notes: Sequence[str] = ()
) -> Table:
    """An empty table with columns of text, then right-aligned columns of numbers, then columns of text."""
    table = _Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    for name in notes:
        table.add_column(name, overflow="fold")
    return table


def short_path(path: Path) -> str:
    """Relative to the working directory if it is inside."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write_json(path: Path | None, data: Any) -> None:
    """Write `data` to `path`; nothing if there is no path."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
