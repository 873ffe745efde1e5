"""The command `report`: one HTML page about search logs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click

from attnforge.bagel.commands.console import echo, short_path
from attnforge.bagel.commands.options import UserError, out_option

EXTRA = (
    "altair",
    "vl_convert",
    "pygments",
    "jinja2",
)  # what the extra `report` brings, by the names of imports


@click.command(short_help="Make an HTML page of search logs.")
@click.argument("logs", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1, required=True)
@out_option("-o", "--out", default=Path("report.html"), show_default=True, help="The page to write.")
def report(logs: tuple[Path, ...], out: Path) -> None:
    """Make one HTML page of the logs of searches.

    The page needs no network. Searches of the same problem, in one log or in several, are compared. Needs
    `pip install attnforge[report]`.
    """
    if missing := missing_packages():
        raise UserError(
            f"the report page needs {', '.join(missing)}, which the extra `report` installs: "
            "pip install 'attnforge[report]'"
        )
    write_page(logs, out)
    echo(f"{short_path(out)}: {out.stat().st_size / 1e6:.1f} MB")


def missing_packages() -> list[str]:
    """The packages of the extra `report` that are not installed, by the names of imports."""
    return [name for name in EXTRA if find_spec(name) is None]


def write_page(logs: Sequence[Path], out: Path, problems: Collection[tuple[str, str, str]] = ()) -> None:
    """Write the page of the logs, of these problems (case, pass, dtype) if any are given. Needs the extra `report`.

    Raises OSError for files that cannot be read or written, ValueError for logs without a result, RuntimeError if the
    page's JavaScript cannot be made.
    """
    from attnforge.bagel.report.page import make_page
    from attnforge.bagel.report.read import read

    found = read(logs)
    if problems:
        wanted = (s for s in found.subjects if (s.case, s.direction, s.dtype) in problems)
        found = replace(found, subjects=tuple(wanted))
    out.write_text(make_page(found), encoding="utf-8")
