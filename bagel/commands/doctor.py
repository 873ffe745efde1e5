"""The command `doctor`: checks the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from attnforge.bagel.commands.console import console

if TYPE_CHECKING:
    from attnforge.runtime.doctor.findings import Finding

COLOURS = {"ok": "green", "info": "blue", "warning": "yellow", "failure": "bold red"}


@click.command(short_help="Check compilers, GPU, cache and torch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of name, status, value, remedy.")
def doctor(as_json: bool) -> None:
    """Check compilers, GPU, cache and torch, and suggest a remedy for each problem."""
    from attnforge.runtime.doctor.checks import report
    from attnforge.runtime.doctor.findings import FAILURE

    findings = report()
    if as_json:
        click.echo(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        console.print(doctor_table(findings))
    if any(finding.status == FAILURE for finding in findings):
        raise click.ClickException("attnforge cannot run here as it is; the remedies are above")


def doctor_table(findings: Sequence[Finding]) -> Table:
    """One line per finding, with its remedy below it."""
    table = Table(box=None, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.status]
        table.add_row(f"[{colour}]{finding.status}[/{colour}]", finding.name, escape(finding.value))
        if finding.remedy:
            table.add_row("", "", f"[bold]→ {escape(finding.remedy)}[/bold]")
    return table
