"""Command line of attnforge, `python cli.py` or `attnforge`. Each command is a module of bagel/commands/."""

from __future__ import annotations

import io
import sys

import click

from attnforge import __version__
from attnforge.bagel.commands.bench import bench
from attnforge.bagel.commands.cache import cache
from attnforge.bagel.commands.challenge import challenge
from attnforge.bagel.commands.doctor import doctor
from attnforge.bagel.commands.explain import explain
from attnforge.bagel.commands.export import export
from attnforge.bagel.commands.mask import mask
from attnforge.bagel.commands.model import model
from attnforge.bagel.commands.models import models
from attnforge.bagel.commands.options import Commands
from attnforge.bagel.commands.prologue import prologue
from attnforge.bagel.commands.render import render
from attnforge.bagel.commands.report import report
from attnforge.bagel.commands.search import search
from attnforge.bagel.commands.show import show
from attnforge.bagel.commands.tables import tables
from attnforge.bagel.commands.tune import tune
from attnforge.bagel.commands.verify import verify
from attnforge.bagel.commands.warm import warm


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="attnforge")
@click.option("--traceback", is_flag=True, help="Print the Python traceback of an error.")
def main(traceback: bool) -> None:
    """Generate, search, check and benchmark attention kernels."""
    # In a terminal whose encoding lacks a letter, `?` is printed; stderr escapes it without our help.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


for command in (
    bench,
    cache,
    challenge,
    doctor,
    explain,
    export,
    mask,
    model,
    models,
    prologue,
    render,
    report,
    search,
    show,
    tables,
    tune,
    verify,
    warm,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
