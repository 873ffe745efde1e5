"""Spans of masks whose pairs are given, or computed, a few columns of keys at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnforge.codegen.spec import MAX_INTERVALS
from attnforge.runtime.masks import Spans, average_visible_keys

CHUNK = 1 << 24  # pairs at a time
_BLOCK = 128  # queries that are counted in 8 bits, several times as fast as in 64

# part(first, end): the pairs of the keys first to end, bool (batch or 1, heads or 1, seq_q, end - first).
Part = Callable[[int, int], Tensor]


class Columns(NamedTuple):
    """For each key, int64 (..., seq_k)."""

    first: Tensor  # the first query that sees it; 0 if none does
    seen: Tensor  # the number of queries that do
    runs: Tensor  # in how many intervals


def columns(visible: Tensor) -> Columns:
    """Who sees the keys of a mask, bool (..., seq_q, seq_k) with seq_q > 0."""
    rows = visible.shape[-2]
    blocks = _blocks(visible)
    per_block = blocks.sum(-2, dtype=torch.uint8)
    # The first block that has a query, and of that the first query; of equals, argmax takes the first.
    block = (per_block > 0).to(torch.uint8).argmax(-2, keepdim=True)
    at = block[..., None, :].expand(*block.shape[:-1], blocks.shape[-2], -1)
    row = blocks.gather(-3, at).squeeze(-3).to(torch.uint8).argmax(-2)
    runs = visible[..., 0, :].long()
    if rows > 1:
        runs = runs + _blocks(visible[..., 1:, :] > visible[..., :-1, :]).sum(-2, dtype=torch.uint8).sum(-2)
    return Columns(block.squeeze(-2) * _BLOCK + row, per_block.sum(-2), runs)


def _blocks(visible: Tensor) -> Tensor:
    """(..., blocks, _BLOCK or fewer, seq_k): hidden queries fill the last block. A short mask is one block."""
    rows = visible.shape[-2]
    size = min(rows, _BLOCK)
    filled = torch.nn.functional.pad(visible, (0, 0, 0, -rows % size)) if rows % size else visible
    blocks: Tensor = filled.unflatten(-2, (-1, size))
    return blocks


def spans_of(part: Part, seq_k: int) -> Spans | None:
    """The mask as Spans; None if some key is visible to more than MAX_INTERVALS intervals of queries.

    One plane for all batch entries where one interval is enough for each key and they agree. At most CHUNK pairs, or
    one column, are in memory at a time. One host sync; where keys have several intervals, `part` is called twice.
    seq_k: above 0, as the number of queries.
    """
    sample = _planes(part(0, 1))
    rows, step = sample.shape[2], max(1, CHUNK // sample.numel())
    slices = [(first, min(first + step, seq_k)) for first in range(0, seq_k, step)]
    found = [columns(_planes(part(*keys))) for keys in slices]
    first, seen, runs = (torch.cat(x, -1) for x in zip(*found, strict=True))
    differ = ((first != first[:1]) | (seen != seen[:1])).any()
    known = torch.stack([runs.max(), differ.long(), seen.sum(), seen.max()])
    intervals, planes_differ, pairs, most = known.tolist()
    if intervals > MAX_INTERVALS:
        return None
    visible_keys = average_visible_keys(pairs, most, seen[..., 0].numel() * rows, seen.numel())
    if intervals > 1:
        bounds = [_bounds(_planes(part(*keys)), intervals) for keys in slices]
        starts, ends = (torch.cat(x, -1) for x in zip(*bounds, strict=True))
    else:
        if not planes_differ:
            first, seen = first[:1], seen[:1]
        starts, ends = (x.to(torch.int32)[:, :, None] for x in (first, first + seen))
    return Spans(starts, ends, visible_keys=visible_keys)


def _planes(visible: Tensor) -> Tensor:
    """`visible` with one plane of each axis that is expanded."""
    for axis in (0, 1):
        if visible.stride(axis) == 0:
            visible = visible.narrow(axis, 0, 1)
    return visible


def _bounds(visible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Starts and ends of the intervals of each key, at most `count`: int32 (batch, heads, count, keys) each."""
    rows = visible.shape[2]
    place = torch.arange(rows + 1, dtype=torch.int32, device=visible.device)[:, None]
    framed = torch.nn.functional.pad(visible, (0, 0, 1, 1))
    before, behind = framed[:, :, :-1], framed[:, :, 1:]
    # Intervals that a key lacks are empty: rows + 1 to rows + 1.
    starts, ends = (
        torch.where(edge, place, rows + 1).topk(count, 2, largest=False).values
        for edge in (behind > before, behind < before)
    )
    return starts, ends
