"""The command `mask`: draws a pack's mask."""

from __future__ import annotations

from pathlib import Path

import click

from attnforge.bagel.commands.console import say
from attnforge.bagel.commands.options import number, out_option


@click.command(short_help="Draw a pack's mask as a PNG.")
@click.argument("pack", default="pretrain/0")
@out_option("--out", default=Path("mask.png"), show_default=True)
@click.option("--tile-m", **number(128), help="Queries per tile.")
@click.option("--tile-n", **number(128), help="Keys per tile.")
@click.option("--vit", is_flag=True, help="The vision encoder's mask, not the LLM's.")
def mask(pack: str, out: Path, tile_m: int, tile_n: int, vit: bool) -> None:
    """Draw a pack's mask, and the tiles that a kernel computes, as a PNG."""
    from attnforge.bagel.pictures.mask import draw_mask
    from attnforge.bagel.workloads import workload

    chosen = workload(pack)
    packed = chosen.vit_mask("cpu") if vit else chosen.mask("cpu")
    draw_mask(packed, f"BAGEL pack {pack}{', vision encoder' if vit else ''}", tile_m, tile_n).save(out)
    say(f"{out}: {packed.starts.numel()} tokens, {packed.pairs} visible pairs")
