"""Masks as small SVG pictures of their tiles: what notebooks show for a mask, and what `attnforge mask` draws."""

from __future__ import annotations

import math
from html import escape

import torch
from torch import Tensor

SIDE = 320  # pixels of the longer side in a notebook
TILES = 48  # tiles along the longer side there
FULL, PARTIAL, EMPTY = "#406ebe", "#96b8ec", "#8884"  # readable on white and on black


def span_shares(starts: Tensor, ends: Tensor, seq_q: int, tile_m: int, tile_n: int) -> Tensor:
    """float (tiles_m, tiles_n): the share of a tile's pairs that is visible, averaged over planes.

    starts, ends: integers (..., seq_k), on any device; query i sees key j where starts[j] <= i < ends[j], in any of the
    intervals of the second last axis if there is one.
    """
    seq_k = starts.shape[-1]
    rows = math.prod(starts.shape[:-1])
    planes = rows // (starts.shape[-2] if starts.dim() > 1 else 1)
    first, last = (x.detach().cpu().long().reshape(rows, seq_k) for x in (starts, ends))
    counts = []
    for begin in range(0, seq_q, tile_m):  # one row of tiles at a time: nothing seq_q x seq_k is held
        end = min(begin + tile_m, seq_q)
        pairs = (last.clamp(max=end) - first.clamp(min=begin)).clamp(min=0).sum(0)
        counts.append(_by_tile(pairs, tile_n))
    return _per_area(counts, seq_q, seq_k, tile_m, tile_n) / max(1, planes)


def dense_shares(mask: Tensor, tile_m: int, tile_n: int) -> Tensor:
    """The same of a bool mask (..., seq_q, seq_k), averaged over what is in front."""
    seq_q, seq_k = mask.shape[-2:]
    planes = mask.detach().cpu().reshape(math.prod(mask.shape[:-2]), seq_q, seq_k)
    counts = []
    for begin in range(0, seq_q, tile_m):
        counts.append(_by_tile(planes[:, begin : begin + tile_m].sum((0, 1)), tile_n))
    return _per_area(counts, seq_q, seq_k, tile_m, tile_n) / max(1, len(planes))


def _by_tile(values: Tensor, tile: int) -> Tensor:
    """Sums of `tile` neighbours each; the last of what is left."""
    return torch.nn.functional.pad(values, (0, -len(values) % tile)).reshape(-1, tile).sum(1)


def _per_area(counts: list[Tensor], seq_q: int, seq_k: int, tile_m: int, tile_n: int) -> Tensor:
    """Shares from the visible pairs of each row of tiles."""
    area = _area(seq_q, seq_k, tile_m, tile_n)
    return (torch.stack(counts) if counts else area).double() / area.double()


def _area(seq_q: int, seq_k: int, tile_m: int, tile_n: int) -> Tensor:
    """Pairs of each tile; those at the edges have fewer."""
    rows = _by_tile(torch.ones(seq_q, dtype=torch.long), tile_m)
    columns = _by_tile(torch.ones(seq_k, dtype=torch.long), tile_n)
    return rows[:, None] * columns


def svg(shares: Tensor, seq_q: int, seq_k: int, tile_m: int, tile_n: int, side: int = SIDE) -> str:
    """The picture at true aspect, `side` pixels along the longer side; one unit of its coordinates is one token.

    Full tiles are dark, partial ones light, and the lighter the less of them is visible. Equal neighbours of a row are
    one rectangle.
    """
    scale = side / max(seq_q, seq_k, 1)
    width, height = (max(1.0, n * scale) for n in (seq_k, seq_q))  # a row of a million keys is seen, too
    rects = []
    for m, row in enumerate(shares.tolist()):
        start = 0
        for n in range(1, len(row) + 1):
            if n < len(row) and row[n] == row[start]:
                continue
            if row[start]:
                x, w = start * tile_n, min(n * tile_n, seq_k) - start * tile_n
                y, h = m * tile_m, min((m + 1) * tile_m, seq_q) - m * tile_m
                rects.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" {_fill(row[start])}/>')
            start = n
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {seq_k} {seq_q}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        f'<rect width="{seq_k}" height="{seq_q}" fill="{EMPTY}"/>{"".join(rects)}</svg>'
    )


def _fill(share: float) -> str:
    if share == 1:
        return f'fill="{FULL}"'
    return f'fill="{PARTIAL}" fill-opacity="{0.25 + 0.75 * share:.2f}"'


def tile_of(seq_q: int, seq_k: int) -> int:
    """The side of square tiles, so that about TILES of them lie along the longer side: a power of two from 8 on."""
    return max(8, 1 << max(0, -(-max(seq_q, seq_k, 1) // TILES) - 1).bit_length())


def html(title: str, shares: Tensor, seq_q: int, seq_k: int, tile: int) -> str:
    """What a notebook shows: the mask's words, the picture, and what the colours mean."""
    seen = float((shares * _area(seq_q, seq_k, tile, tile)).sum()) / max(1, seq_q * seq_k)
    words = f"{seq_q:,} queries x {seq_k:,} keys, {seen:.1%} of the pairs visible; tiles of {tile} x {tile}"
    picture = svg(shares, seq_q, seq_k, tile, tile)
    legend = "dark: full tiles, light: partial ones, grey: skipped; queries go down, keys to the right"
    return f"<div><code>{escape(title)}</code><br>{words}<br>{picture}<br><small>{legend}</small></div>"
