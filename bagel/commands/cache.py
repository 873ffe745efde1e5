"""The commands `cache list` and `cache clear`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import echo

if TYPE_CHECKING:
    from attnforge.runtime.build.cache import Listing


@click.group(short_help="List or remove compiled kernels.")
def cache() -> None:
    """List or remove the compiled kernels on disk."""


@cache.command("list")
def cache_list() -> None:
    """List compiled kernels, newest first."""
    from attnforge.runtime.build.cache import entries
    from attnforge.runtime.build.settings import settings

    listings = entries()
    for line in cache_lines(listings):
        echo(line)
    total = sum(listing.bytes for listing in listings)
    echo(f"{len(listings)} compiled kernels, {total / 2**20:.1f} MiB in {settings().cache_dir}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove all compiled kernels."""
    from attnforge.runtime.build.cache import clear

    echo(f"{clear()} entries removed; kernels are compiled again when needed")


def cache_lines(listings: Sequence[Listing]) -> Iterator[str]:
    """A header and a line per compiled kernel. Names come last, whole, so that they can be copied."""
    if listings:
        yield "compiler  seconds  registers  spilled B  KiB  kernel"
    for listing in listings:
        meta = listing.meta
        used = list(meta["resources"].values())
        registers = max((one.get("registers", 0) for one in used), default=0) or ""
        spills = max((one.get("spill_bytes", 0) for one in used), default=0) if registers else ""
        numbers = f"{meta.get('seconds', 0):7.1f}  {registers:>9}  {spills:>9}  {listing.bytes / 1024:3.0f}"
        yield f"{meta['compiler']:8}  {numbers}  {meta['slug']}"
