"""The command `report`: one HTML page about search logs."""

from __future__ import annotations

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
@out_option("-o", "--out", default=Path("report.html"), show_default=True)
def report(logs: tuple[Path, ...], out: Path) -> None:
    """Make one HTML page of the logs of searches.

    The page needs no network. Searches of the same problem, in one log or in several, are compared. Needs
    `pip install attnforge[report]`.
    """
    try:
        from attnforge.bagel.report.page import make_page
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        needs = f"the report page needs {error.name}, which the extra `report` installs"
        raise UserError(f"{needs}: pip install 'attnforge[report]'") from error
    from attnforge.bagel.report.read import read

    text = make_page(read(logs))
    out.write_text(text, encoding="utf-8")
    echo(f"{short_path(out)}: {len(text.encode()) / 1e6:.1f} MB")
