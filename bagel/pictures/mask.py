"""A PNG of a pack: which tiles are skipped, masked or full for a kernel, and the work of each tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd

import torch
from PIL import Image, ImageDraw, ImageFont

from attnforge.bagel.measure.tiles import FULL, PARTIAL, TileMap, tile_map
from attnforge.bagel.packing import PackedMask, Split
from attnforge.runtime.masks import DenseMask, Spans

PAPER, INK, FAINT, GRID = (255, 255, 255), (32, 36, 44), (120, 126, 138), (226, 229, 234)
EMPTY_COLOUR, HIDDEN_COLOUR = (244, 245, 247), (214, 217, 223)
# Per mode of the keys: colour of a full tile, and of a visible pair in a partial one.
MODE_COLOURS = {
    "causal": ((64, 110, 190), (150, 184, 236)),
    "full": ((42, 140, 106), (130, 205, 176)),
    "noise": ((212, 122, 46), (246, 190, 136)),
}
MODE_TEXTS = {"causal": "text (causal)", "full": "image (full)", "noise": "image being denoised (noise)"}
SIDE = 1152  # pixels of the matrix, about
MARGIN, RULER, BARS = 28, 74, 190

# Whether queries, a column, see keys, a row: bool, a value for each pair.
Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Pixel geometry: a matrix of tiles_m x tiles_n cells, at true aspect, whose corner is at (left, top)."""

    left: int
    top: int
    cell_m: int  # pixels of a tile, down
    cell_n: int  # and to the right
    rows: int
    cols: int

    @property
    def width(self) -> int:
        return self.cols * self.cell_n

    @property
    def height(self) -> int:
        return self.rows * self.cell_m


def draw_mask(mask: PackedMask, title: str, tile_m: int = 128, tile_n: int = 128) -> Image.Image:
    """RGB image of `mask` under tiles of tile_m queries x tile_n keys."""
    seq = mask.starts.numel()
    tiles = tile_map(mask, seq, tile_m, tile_n)
    rows, cols = tiles.kinds.shape
    scale = SIDE / max(rows * tile_m, cols * tile_n)  # pixels a token
    layout = Layout(MARGIN + RULER, 150 + RULER, *_cells(tile_m, tile_n, scale), rows, cols)
    size = (layout.left + layout.width + BARS + MARGIN, layout.top + layout.height + 180)
    image = Image.new("RGB", (max(size[0], 900), size[1]), PAPER)
    image.paste(draw_matrix(mask, tiles, layout.cell_m, layout.cell_n), (layout.left, layout.top))
    draw = ImageDraw.Draw(image)
    _heading(draw, mask, title, tiles)
    _rulers(draw, mask, layout, seq)
    _work(draw, tiles, layout)
    _legend(draw, layout)
    return image


def _cells(tile_m: int, tile_n: int, scale: float) -> tuple[int, int]:
    """Whole pixels of a tile: in the ratio of its sides if there are enough pixels, else as near as can be."""
    common = gcd(tile_m, tile_n)
    unit = int(common * scale)
    if unit:
        return unit * tile_m // common, unit * tile_n // common
    return max(1, round(tile_m * scale)), max(1, round(tile_n * scale))


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all pictures."""
    return ImageFont.load_default(size)


def draw_matrix(mask: Spans | DenseMask, tiles: TileMap, cell_m: int, cell_n: int) -> Image.Image:
    """RGB image of `cell_m` x `cell_n` pixels per tile: tile colours, and in partial tiles the mask, sampled at pixels.

    Keys that belong to no split of a pack are coloured as text.
    """
    rows, cols = tiles.kinds.shape
    query = torch.arange(rows * cell_m) * tiles.tile_m // cell_m
    key = (torch.arange(cols * cell_n) * tiles.tile_n // cell_n).clamp(max=mask.seq_k - 1)
    visible = _dense_lookup(mask) if isinstance(mask, DenseMask) else _spans_lookup(mask)
    mode = _modes(mask)[key]
    solid, light = (
        torch.tensor([colours[shade] for colours in MODE_COLOURS.values()], dtype=torch.uint8)[mode][None]
        for shade in (0, 1)
    )
    pixels = torch.empty(rows * cell_m, cols * cell_n, 3, dtype=torch.uint8)
    for m in range(rows):  # one row of tiles at a time
        seen = visible(query[m * cell_m : (m + 1) * cell_m, None], key[None])
        kind = tiles.kinds[m].repeat_interleave(cell_n)[None]
        colour = torch.tensor(EMPTY_COLOUR, dtype=torch.uint8).expand(cell_m, cols * cell_n, 3).clone()
        colour[(kind == PARTIAL) & ~seen] = torch.tensor(HIDDEN_COLOUR, dtype=torch.uint8)
        colour = torch.where(((kind == PARTIAL) & seen)[..., None], light, colour)
        colour = torch.where((kind == FULL).expand(cell_m, -1)[..., None], solid, colour)
        pixels[m * cell_m : (m + 1) * cell_m] = colour
    return Image.fromarray(pixels.numpy())


def _modes(mask: Spans | DenseMask) -> torch.Tensor:
    """Index into MODE_COLOURS of each key."""
    mode = torch.zeros(mask.seq_k, dtype=torch.long)
    for split in mask.splits if isinstance(mask, PackedMask) else ():
        mode[split.start : split.end] = list(MODE_COLOURS).index(split.mode)
    return mode


def _spans_lookup(mask: Spans) -> Lookup:
    starts, ends = mask.starts.cpu(), mask.ends.cpu()
    return lambda query, key: (starts[key] <= query) & (query < ends[key])


def _dense_lookup(mask: DenseMask) -> Lookup:
    """Of a mask with one plane."""
    pairs = mask.mask.cpu()
    return lambda query, key: pairs[query.clamp(max=mask.seq_q - 1), key]


def _heading(draw: ImageDraw.ImageDraw, mask: PackedMask, title: str, tiles: TileMap) -> None:
    seq, full, partial = mask.starts.numel(), tiles.count(FULL), tiles.count(PARTIAL)
    draw.text((MARGIN, 24), title, INK, font(34))
    documents = len({split.sample for split in mask.splits if split.start < min(mask.used, split.end)})
    lines = (
        f"{seq:,} tokens, {mask.used:,} of them real, "
        f"in {documents} documents and {len(mask.splits)} splits; "
        f"{mask.pairs:,} visible pairs, {mask.pairs / seq**2:.1%} of all",
        f"tiles of {tiles.tile_m} queries x {tiles.tile_n} keys: {full:,} full, {partial:,} partial, "
        f"{tiles.kinds.numel() - full - partial:,} skipped; "
        f"{tiles.efficiency(mask.pairs):.1%} of the arithmetic in visited tiles is useful",
    )
    for number, line in enumerate(lines):
        draw.text((MARGIN, 74 + 26 * number), line, FAINT, font(19))


def _rulers(draw: ImageDraw.ImageDraw, mask: PackedMask, layout: Layout, seq: int) -> None:
    """Documents and splits along both edges; thin lines where documents meet."""
    per_token = (layout.width / seq, layout.height / seq)
    for split in mask.splits:
        shade = MODE_COLOURS[split.mode][0] if split.start < mask.used else HIDDEN_COLOUR
        low, high = (round(layout.left + edge * per_token[0]) for edge in (split.start, split.end))
        draw.rectangle((low, layout.top - 16, max(low, high - 1), layout.top - 4), shade)
        low, high = (round(layout.top + edge * per_token[1]) for edge in (split.start, split.end))
        draw.rectangle((layout.left - 16, low, layout.left - 4, max(low, high - 1)), shade)
    for start, end, real in _documents(mask.splits, mask.used):
        across = (layout.left + start * per_token[0], layout.left + end * per_token[0])
        down = (layout.top + start * per_token[1], layout.top + end * per_token[1])
        for x, y in zip(across, down, strict=True):
            draw.line((x, layout.top - 24, x, layout.top - 2), INK)
            draw.line((layout.left - 24, y, layout.left - 2, y), INK)
        label = f"{end - start:,}" if real else "padding"
        if across[1] - across[0] > 12 * len(label):
            draw.text((sum(across) / 2, layout.top - 34), label, INK, font(17), anchor="mm")
        if down[1] - down[0] > 22:
            draw.text((layout.left - 22, sum(down) / 2), label, INK, font(17), anchor="rm")
    draw.text((layout.left, layout.top - 56), "keys", FAINT, font(17), anchor="lm")
    draw.text((MARGIN, layout.top - 20), "queries", FAINT, font(17), anchor="lm")
    draw.rectangle(
        (layout.left - 1, layout.top - 1, layout.left + layout.width, layout.top + layout.height),
        outline=FAINT,
    )


def _documents(splits: Iterable[Split], used: int) -> list[tuple[int, int, bool]]:
    """(first row, end row, is real) of each document that has tokens."""
    bounds: dict[int, tuple[int, int]] = {}
    for split in splits:
        first, _ = bounds.get(split.sample, (split.start, 0))
        bounds[split.sample] = (first, split.sample_end)
    return [(start, end, start < used) for start, end in bounds.values() if end > start]


def _work(draw: ImageDraw.ImageDraw, tiles: TileMap, layout: Layout) -> None:
    """Bars: visited tiles of each query tile (forward, right) and of each key tile (backward, below)."""
    full, partial = (tiles.kinds == FULL).long(), (tiles.kinds == PARTIAL).long()
    left, top = layout.left + layout.width + 18, layout.top + layout.height + 18
    for axis, room in ((1, BARS - 18), (0, 60)):
        most = max(1, int((full + partial).sum(axis).max()))
        for index, (f, p) in enumerate(zip(full.sum(axis).tolist(), partial.sum(axis).tolist(), strict=True)):
            a, b = f * room // most, (f + p) * room // most
            cell = layout.cell_m if axis else layout.cell_n
            low = (layout.top if axis else layout.left) + index * cell
            high = low + cell - (cell > 7) - 1
            for start, end, shade in ((0, a, FAINT), (a, b, (186, 191, 201))):
                if end > start and axis:
                    draw.rectangle((left + start, low, left + end - 1, high), shade)
                elif end > start:
                    draw.rectangle((low, top + start, high, top + end - 1), shade)
        if axis:
            for number, line in enumerate(("forward:", "key tiles per query", f"tile, at most {most}")):
                draw.text((left, layout.top - 58 + 19 * number), line, FAINT, font(16))
        else:
            text = f"backward: query tiles per key tile, at most {most}"
            draw.text((layout.left, top + room + 8), text, FAINT, font(16))


def _legend(draw: ImageDraw.ImageDraw, layout: Layout) -> None:
    x, y = layout.left, layout.top + layout.height + 130
    for mode, (solid, light) in MODE_COLOURS.items():
        draw.rectangle((x, y, x + 15, y + 15), solid)
        draw.rectangle((x + 18, y, x + 33, y + 15), light)
        draw.text((x + 40, y + 8), MODE_TEXTS[mode], INK, font(17), anchor="lm")
        x += 62 + int(draw.textlength(MODE_TEXTS[mode], font(17)))
    for colour, text in ((HIDDEN_COLOUR, "hidden, in a visited tile"), (EMPTY_COLOUR, "skipped tile")):
        draw.rectangle((x, y, x + 15, y + 15), colour, outline=GRID)
        draw.text((x + 22, y + 8), text, INK, font(17), anchor="lm")
        x += 46 + int(draw.textlength(text, font(17)))
    note = "colour: mode of the key; dark: full tile, light: visible pairs of a partial one; bars likewise"
    draw.text((layout.left, y + 32), note, FAINT, font(15), anchor="lm")
