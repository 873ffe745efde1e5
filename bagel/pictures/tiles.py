"""Any mask under a kernel's tiles, as SVG or PNG at true aspect."""

from __future__ import annotations

from html import escape

import numpy as np
import torch
from PIL import Image, ImageDraw

from attnforge.bagel.pictures.mask import EMPTY_COLOUR, FAINT, INK, MARGIN, MODE_COLOURS, PAPER, SIDE, font
from attnforge.runtime.mask_svg import dense_shares, span_shares, svg
from attnforge.runtime.masks import Causal, DenseMask, Spans

HEAD = 100  # pixels above the matrix


def shares_of(
    mask: Causal | Spans | DenseMask | None, seq_q: int, seq_k: int, tile_m: int, tile_n: int
) -> torch.Tensor:
    """The visible share of each tile, float (tiles_m, tiles_n)."""
    if isinstance(mask, DenseMask):
        return dense_shares(mask.mask, tile_m, tile_n)
    if isinstance(mask, Spans):
        return span_shares(mask.starts, mask.ends, seq_q, tile_m, tile_n)
    key = torch.arange(seq_k)
    starts = torch.zeros_like(key) if mask is None else key - (seq_k - seq_q)
    return span_shares(starts, torch.full_like(key, seq_q), seq_q, tile_m, tile_n)


def words(
    shares: torch.Tensor, pairs: int, seq_q: int, seq_k: int, tile_m: int, tile_n: int
) -> tuple[str, str]:
    """What is in the picture, in two lines."""
    full, partial = int((shares == 1).sum()), int(((shares > 0) & (shares < 1)).sum())
    visible = f"{pairs:,} visible pairs, {pairs / max(1, seq_q * seq_k):.1%} of all"
    return (
        f"{seq_q:,} queries (down) x {seq_k:,} keys (right); {visible}",
        f"tiles of {tile_m} x {tile_n}: {full:,} full (dark), {partial:,} partial (light), "
        f"{shares.numel() - full - partial:,} skipped",
    )


def draw_svg(title: str, lines: tuple[str, str], picture: str, height: int) -> str:
    """The picture under its title. Text takes the colour of the page, so that it is readable in the dark, too."""
    head = (
        f'<text y="26" font-size="22">{escape(title)}</text>'
        + f'<text y="54" font-size="14">{escape(lines[0])}</text><text y="76" font-size="14">{escape(lines[1])}</text>'
    )
    width = max(SIDE, 700)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + HEAD}" fill="currentColor" '
        f'font-family="sans-serif">{head}<g transform="translate(0 {HEAD})">{picture}</g></svg>\n'
    )


def draw_tiles(
    title: str,
    mask: Causal | Spans | DenseMask | None,
    size: tuple[int, int],
    pairs: int,
    tiles: tuple[int, int],
) -> tuple[str, Image.Image]:
    """The mask of (seq_q, seq_k) tokens under (tile_m, tile_n) tiles, as SVG and as an image."""
    (seq_q, seq_k), (tile_m, tile_n) = size, tiles
    shares = shares_of(mask, seq_q, seq_k, tile_m, tile_n)
    lines = words(shares, pairs, seq_q, seq_k, tile_m, tile_n)
    scale = SIDE / max(seq_q, seq_k)
    picture = svg(shares, seq_q, seq_k, tile_m, tile_n, SIDE)
    return draw_svg(title, lines, picture, round(seq_q * scale)), _image(title, lines, shares, size, tiles)


def _image(
    title: str, lines: tuple[str, str], shares: torch.Tensor, size: tuple[int, int], tiles: tuple[int, int]
) -> Image.Image:
    scale = SIDE / max(size)
    width, height = (max(1, round(length * scale)) for length in (size[1], size[0]))
    row = (np.arange(height) / scale / tiles[0]).astype(int).clip(max=shares.shape[0] - 1)
    column = (np.arange(width) / scale / tiles[1]).astype(int).clip(max=shares.shape[1] - 1)
    share = shares.numpy()[row][:, column][..., None]
    dark, light = (np.array(colour) for colour in MODE_COLOURS["causal"])
    empty = np.array(EMPTY_COLOUR)
    mixed = empty + (light - empty) * (0.25 + 0.75 * share)
    pixels = np.where(share == 1, dark, np.where(share > 0, mixed, empty)).astype(np.uint8)
    image = Image.new("RGB", (max(width, 900) + 2 * MARGIN, height + HEAD + 2 * MARGIN), PAPER)
    image.paste(Image.fromarray(pixels), (MARGIN, MARGIN + HEAD))
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 20), title, INK, font(30))
    for number, line in enumerate(lines):
        draw.text((MARGIN, 66 + 26 * number), line, FAINT, font(18))
    return image
