"""The command `mask`: draws any mask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import echo
from attnforge.bagel.commands.options import number, out_option

if TYPE_CHECKING:
    from attnforge.runtime.masks import Causal, DenseMask, Spans

MOST_TILES = 2**22  # in a picture
MOST_ROWS = 2**20  # of a tile


@click.command(short_help="Draw a mask as a PNG or SVG.")
@click.argument("pack", default="pretrain/0")
@out_option("--out", default=Path("mask.png"), show_default=True, help="A .png or .svg file.")
@click.option("--tile-m", **number(128), help="Queries per tile.")
@click.option("--tile-n", **number(128), help="Keys per tile.")
@click.option("--vit", is_flag=True, help="The vision encoder's mask, not the LLM's.")
def mask(pack: str, out: Path, tile_m: int, tile_n: int, vit: bool) -> None:
    """Draw a mask and the tiles that a kernel computes, to scale.

    PACK is a pack (pretrain/0, the default; packs.jsonl:7), a mask with lengths (causal/2048, window:512/4096,
    causal/512/8192), or a .npy or .npz file as `search --mask` takes it. A PNG of a pack also shows its documents.
    """
    from attnforge.bagel.packing import PackedMask
    from attnforge.bagel.pictures.mask import draw_mask
    from attnforge.bagel.pictures.tiles import draw_tiles

    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"--out: {out} is neither a .png nor a .svg file")
    chosen, size, pairs = _chosen(pack, vit)
    _expect_drawable(size, tile_m, tile_n)
    title = f"{pack}{', vision encoder' if vit else ''}"
    if isinstance(chosen, PackedMask) and out.suffix == ".png":
        draw_mask(chosen, f"BAGEL pack {title}", tile_m, tile_n).save(out)
        echo(f"{out}: {size[0]} tokens, {pairs} visible pairs")
        return
    text, image = draw_tiles(title, chosen, size, pairs, (tile_m, tile_n))
    if out.suffix == ".svg":
        out.write_text(text, encoding="utf-8")
    else:
        image.save(out)
    echo(f"{out}: {size[0]} queries, {size[1]} keys, {pairs} visible pairs")


def _expect_drawable(size: tuple[int, int], tile_m: int, tile_n: int) -> None:
    """Raises ValueError for tiles whose picture would take minutes or more memory than there is."""
    for name, tile in (("--tile-m", tile_m), ("--tile-n", tile_n)):
        if tile > MOST_ROWS:
            raise ValueError(f"{name}: got {tile}, at most {MOST_ROWS} are supported")
    rows, columns = -(-size[0] // tile_m), -(-size[1] // tile_n)
    if rows * columns > MOST_TILES:
        raise ValueError(
            f"--tile-m, --tile-n: {tile_m} x {tile_n} gives {rows} x {columns} tiles, at most {MOST_TILES} are drawn; "
            "choose larger tiles"
        )


def _chosen(pack: str, vit: bool) -> tuple[Causal | Spans | DenseMask | None, tuple[int, int], int]:
    """Mask, (seq_q, seq_k) and visible pairs."""
    import torch

    from attnforge.bagel.measure.cases import make_case, pairs_of
    from attnforge.bagel.measure.mask_files import is_mask_file, read_mask
    from attnforge.codegen.spec import DType
    from attnforge.runtime.masks import FunctionMask

    if is_mask_file(pack):
        read, seq_q = read_mask(Path(pack), "cpu")
        return read, (seq_q, read.seq_k), pairs_of(read, seq_q)
    case = make_case(pack, "vit" if vit else "1/1/64", DType.FLOAT32, torch.device("cpu"))
    assert not isinstance(case.mask, FunctionMask)  # which no name of a pack means
    return case.mask, (case.seq_q, case.seq_k), case.pairs
