"""The commands `cache ls` and `cache clear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.table import Table

from attnforge.bagel.commands.console import console, echo, make_table

if TYPE_CHECKING:
    from attnforge.runtime.build.cache import Listing


@click.group(short_help="List or remove compiled kernels.")
def cache() -> None:
    """List or remove the compiled kernels on disk."""


@cache.command("ls")
def cache_ls() -> None:
    """List compiled kernels, newest first."""
    from attnforge.runtime.build.cache import entries
    from attnforge.runtime.build.settings import settings

    listings = entries()
    console.print(cache_table(listings), soft_wrap=True)  # names stay whole, to be copied
    total = sum(listing.bytes for listing in listings)
    echo(f"{len(listings)} compiled kernels, {total / 2**20:.1f} MiB in {settings().cache_dir}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove all compiled kernels."""
    from attnforge.runtime.build.cache import clear

    echo(f"{clear()} entries removed; kernels are compiled again when needed")


def cache_table(listings: Sequence[Listing]) -> Table:
    """One line per compiled kernel."""
    table = make_table("", ("compiler",), ("seconds", "registers", "spilled B", "KiB"))
    table.add_column("kernel", no_wrap=True, overflow="ignore")
    for listing in listings:
        meta = listing.meta
        used = list(meta["resources"].values())
        registers = max((one.get("registers", 0) for one in used), default=0)
        spills = max((one.get("spill_bytes", 0) for one in used), default=0)
        cells = (str(registers or ""), str(spills) if registers else "", f"{listing.bytes / 1024:.0f}")
        table.add_row(meta["compiler"], f"{meta.get('seconds', 0):.1f}", *cells, meta["slug"])
    return table
