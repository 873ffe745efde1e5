"""The command `doctor`: checks the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from attnforge.bagel.commands.console import console, wrap

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
        print_findings(findings)
    if any(finding.status == FAILURE for finding in findings):
        raise click.ClickException("attnforge cannot run here as it is; the remedies are above")


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding as status, name and value, with its remedy below it."""
    statuses, names = (max(map(len, words)) for words in (COLOURS, (finding.name for finding in findings)))
    for finding in findings:
        text = Text(wrap(f" {finding.status:<{statuses}}  {finding.name:<{names}}  ", finding.value))
        text.stylize(COLOURS[finding.status], 1, 1 + len(finding.status))
        console.print(text, soft_wrap=True)
        if finding.remedy:
            console.print(
                Text(wrap(" " * (5 + statuses + names) + "→ ", finding.remedy), "bold"), soft_wrap=True
            )
