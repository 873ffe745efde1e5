"""The mask of a case under a kernel's tiles, as a picture in a data URL."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

from attnforge.bagel.measure.occupancy import spans_of
from attnforge.bagel.measure.tiles import FULL, PARTIAL, TileMap, tile_map
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.pictures.mask import EMPTY_COLOUR, HIDDEN_COLOUR, MODE_COLOURS, MODE_TEXTS, draw_matrix
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.search.case import Case

SIDE = 960  # pixels of the picture's longer side, about


@dataclass(frozen=True)
class MaskPicture:
    """A picture of seq_q x seq_k pairs and what it shows."""

    url: str
    seq_q: int
    seq_k: int
    tile_m: int
    tile_n: int
    full: int
    partial: int
    skipped: int
    use: float  # visible pairs over pairs in visited tiles
    legend: tuple[tuple[str, str, str], ...]  # (text, colour of full tiles, of pairs in partial ones)

    @property
    def label(self) -> str:
        """What the picture shows, in words."""
        return (
            f"The mask of {self.seq_q} queries and {self.seq_k} keys under tiles of {self.tile_m} x {self.tile_n}: "
            f"{self.full} full, {self.partial} partial and {self.skipped} skipped tiles."
        )


def picture_of(case: Case, tile_m: int, tile_n: int) -> MaskPicture | None:
    """The picture; None for a dense mask with several planes."""
    mask = case.mask if isinstance(case.mask, DenseMask) else spans_of(case)
    if isinstance(mask, DenseMask) and mask.shape[:2] != (1, 1):
        return None
    tiles = tile_map(mask, case.seq_q, tile_m, tile_n)
    cell = max(1, SIDE // max(tiles.kinds.shape))
    image = draw_matrix(mask, tiles, cell, cell).crop((0, 0, *_shown(case, tiles, cell)))
    full, partial = tiles.count(FULL), tiles.count(PARTIAL)
    modes = (
        dict.fromkeys(split.mode for split in mask.splits) if isinstance(mask, PackedMask) else ("causal",)
    )
    legend = tuple((MODE_TEXTS[mode], *map(_css, MODE_COLOURS[mode])) for mode in modes)
    if not isinstance(mask, PackedMask):
        legend = (("visible", *legend[0][1:]),)
    skipped = tiles.kinds.numel() - full - partial
    use = tiles.efficiency(case.pairs)
    return MaskPicture(
        _url(image), case.seq_q, case.seq_k, tile_m, tile_n, full, partial, skipped, use, _legend(mask)
    )


def _legend(mask: Spans | DenseMask) -> tuple[tuple[str, str, str], ...]:
    texts = {"causal": "visible"}
    if isinstance(mask, PackedMask):
        texts = {split.mode: MODE_TEXTS[split.mode] for split in mask.splits}
    return tuple((text, *_shades(mode)) for mode, text in texts.items())


def _shades(mode: str) -> tuple[str, str]:
    full, partial = MODE_COLOURS[mode]
    return _css(full), _css(partial)


def hidden_colour() -> str:
    """CSS colour of hidden pairs in visited tiles."""
    return _css(HIDDEN_COLOUR)


def _shown(case: Case, tiles: TileMap, cell: int) -> tuple[int, int]:
    """(width, height) of the picture without the part of the last tiles that is past the end."""
    return max(1, case.seq_k * cell // tiles.tile_n), max(1, case.seq_q * cell // tiles.tile_m)


def _url(image: Image.Image) -> str:
    """A PNG with few colours, in which skipped tiles are transparent."""
    few = image.quantize(16, dither=Image.Dither.NONE)
    palette = few.getpalette() or []
    colours = [tuple(palette[3 * i : 3 * i + 3]) for i in range(len(palette) // 3)]
    clear = {"transparency": colours.index(EMPTY_COLOUR)} if EMPTY_COLOUR in colours else {}
    data = io.BytesIO()
    few.save(data, "PNG", optimize=True, **clear)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _css(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
