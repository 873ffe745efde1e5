"""Which rows each rank computes and which keys it reads, for Ulysses degree 1 (heads are not split).

All ranks hold equally many rows, but under most masks these rows have different numbers of visible pairs. A rank with
more pairs than the mean sends rows to ranks with fewer: from the end of its block where fewer rows have the surplus.
Rows are sent to any rank, only inside a node, or not at all, whichever is fastest by the link model (links.py).

Each rank fetches only the keys that its rows see. Under document masks most of them are in its own block.

Pairs are counted in whole tiles of `TILE` query rows, because kernels compute whole tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnforge.runtime.distributed import links
from attnforge.runtime.distributed.shards import renumbered_spans
from attnforge.runtime.masks import Spans

RowRange = tuple[int, int]  # rows [first, last) of the whole sequence
RowRanges = tuple[RowRange, ...]  # ascending
Numbers = npt.NDArray[np.int64]

TILE = 128  # query rows of a tile
KEY_BLOCK = 64  # keys that are fetched or left out together
MAX_GAP = 512  # unneeded keys between two ranges, up to which one transfer of all is cheaper than two
MAX_IMBALANCE = 1.03  # largest over mean work of the ranks, up to which no rows move
MIN_MOVE = 0.01  # fraction of the mean work, below which rows are not worth a transfer


class RowAssignment(NamedTuple):
    """Row ranges of the whole sequence, one tuple of ranges per rank.

    held: the rank's block, which is its shard of q, k and v.
    queries: rows of q in the rank's kernel call, in this order: its block and the rows that other ranks send to it.
        With `in_order` it is the same as `computed`.
    computed: the subset of `queries` that the kernel computes. Every row of the sequence is computed by exactly one
        rank. Rows that are not computed come before or after all computed rows.
    keys: rows of k and v in the rank's kernel call.
    pairs_held, pairs_computed: pairs of one head in `held` and in `computed`.
    """

    held: tuple[RowRanges, ...]
    queries: tuple[RowRanges, ...]
    computed: tuple[RowRanges, ...]
    keys: tuple[RowRanges, ...]
    pairs_held: tuple[float, ...]
    pairs_computed: tuple[float, ...]

    def of(self, rank: int) -> tuple[RowRanges, RowRanges, RowRanges]:
        """(queries, computed, keys) of a rank, which determine its local mask."""
        return self.queries[rank], self.computed[rank], self.keys[rank]

    def rows_fetched(self, wanted: tuple[RowRanges, ...]) -> Numbers:
        """(ranks, ranks) int64: rows that rank i receives from rank j. `wanted` is `queries` or `keys`."""
        rows = np.array([[count_rows(intersect(ranges, block)) for block in self.held] for ranges in wanted])
        np.fill_diagonal(rows, 0)
        return rows


def assign_rows(mask: Spans, nodes: Sequence[int], rows: int, in_order: bool = False) -> RowAssignment:
    """Assign rows to ranks so that all have about the same work. Copies the mask to the host, which synchronizes.

    mask: the mask of the whole sequence.
    nodes: the index of each rank's node; its length is the number of ranks.
    rows: rows that each rank holds.
    in_order: each rank computes one range of rows and reads all keys in order, as score and mask functions of positions
        need.
    """
    world = len(nodes)
    length, total = world * rows, mask.seq_k
    starts, ends = (x.cpu().numpy().reshape(-1, total).clip(0, total) for x in (mask.starts, mask.ends))
    planes = mask.planes[0] * mask.planes[1]
    held: tuple[RowRanges, ...] = tuple(((rank * rows, (rank + 1) * rows),) for rank in range(world))
    # pairs_before[i]: pairs of rows 0 to i - 1.
    pairs_before = np.concatenate(([0], np.cumsum(_pairs_per_row(starts, ends, length))))
    work = np.diff(pairs_before[::rows])
    computed: tuple[RowRanges, ...]
    queries: tuple[RowRanges, ...]
    keys: tuple[RowRanges, ...]
    if work.max() * world <= MAX_IMBALANCE * pairs_before[-1]:
        computed = held
    elif in_order:
        computed = _equal_work_ranges(pairs_before, world)
    else:
        computed = _fastest_rows(pairs_before, work, rows, nodes)
    if in_order:
        queries, keys = computed, (((0, length),),) * world
    else:
        queries = tuple(_queries_of(ranges, block) for ranges, block in zip(computed, held, strict=True))
        keys = _keys_of(computed, starts, ends, world, rows)
    of_head = (tuple((x / planes).tolist()) for x in (work, _pairs_of(pairs_before, computed)))
    return RowAssignment(held, queries, computed, keys, *of_head)


def _pairs_per_row(starts: Numbers, ends: Numbers, length: int) -> Numbers:
    """(length,) int64: keys that the tile of each row sees, summed over all planes and intervals of the mask."""
    seen = starts < ends
    first = starts[seen] // TILE * TILE
    last = np.minimum(-(-ends[seen] // TILE) * TILE, length)
    change = np.bincount(first, minlength=length + 1) - np.bincount(last, minlength=length + 1)
    return np.cumsum(change)[:length]


def _equal_work_ranges(pairs_before: Numbers, world: int) -> tuple[RowRanges, ...]:
    """One non-empty range of rows per rank, with equal numbers of pairs."""
    length = len(pairs_before) - 1
    goals = pairs_before[-1] * np.arange(1, world) // world
    places = np.searchsorted(pairs_before[1:], goals) + 1
    inner = [min(max(int(place), rank), length - world + rank) for rank, place in enumerate(places, 1)]
    edges = (0, *accumulate(inner, lambda before, place: max(before + 1, place)), length)
    return tuple((row_range,) for row_range in pairwise(edges))


def _pairs_of(pairs_before: Numbers, computed: tuple[RowRanges, ...]) -> Numbers:
    """(ranks,) int64: pairs in the rows that each rank computes."""
    return np.array(
        [sum(int(pairs_before[last] - pairs_before[first]) for first, last in ranges) for ranges in computed]
    )


def _fastest_rows(
    pairs_before: Numbers, work: Numbers, rows: int, nodes: Sequence[int]
) -> tuple[RowRanges, ...]:
    """The fastest of: no rows move; rows move inside nodes; rows move between any ranks."""
    of_node = np.array(nodes)
    groups = [np.flatnonzero(of_node == node) for node in dict.fromkeys(nodes)]
    everyone = [[np.arange(len(nodes))]] if len(groups) > 1 else []
    found = [_move_rows(pairs_before, work, rows, among) for among in ([], groups, *everyone)]
    return min(found, key=lambda computed: _estimated_seconds(pairs_before, computed, rows, of_node))


def _estimated_seconds(
    pairs_before: Numbers, computed: tuple[RowRanges, ...], rows: int, of_node: Numbers
) -> float:
    """Predicted seconds of forward and backward, per column of one head.

    Counts the kernels and the transfers of q, out, dout and dq of moved rows, in 16 bits. `of_node`: (ranks,) node
    indices.
    """
    moved = np.zeros((len(computed), 2))  # rows sent or received: inside the node, to other nodes
    for rank, ranges in enumerate(computed):
        for first, last in ranges:
            owner = first // rows
            if owner != rank:
                moved[[rank, owner], int(of_node[rank] != of_node[owner])] += last - first
    # 8 bytes per row and column: four 16-bit tensors.
    intra_node, inter_node = (moved * 8 / (links.Links.intra_node, links.Links.inter_node)).max(0)
    kernels = links.FLOP_PER_PAIR * np.max(_pairs_of(pairs_before, computed)) / links.KERNEL_FLOPS
    return float(kernels + max(intra_node, inter_node))


def _move_rows(
    pairs_before: Numbers, work: Numbers, rows: int, groups: Sequence[Numbers]
) -> tuple[RowRanges, ...]:
    """The rows that each rank computes after ranks with a surplus sent rows to ranks of their group.

    groups: disjoint arrays of ranks. Ranks outside of all groups keep their blocks.
    """
    received_by: list[list[RowRange]] = [[] for _ in work]
    kept: list[RowRange] = [(rank * rows, (rank + 1) * rows) for rank in range(len(work))]
    for group in groups:
        mean = work[group].mean()
        surpluses = {
            rank: float(work[rank] - mean) for rank in group.tolist() if work[rank] > (1 + MIN_MOVE) * mean
        }
        receivers = [rank for rank in group.tolist() if work[rank] < mean]
        deficit = max(1.0, sum(float(mean - work[rank]) for rank in receivers))
        scale = sum(surpluses.values()) / deficit  # so that all of the surplus is taken
        deficits = {rank: float(mean - work[rank]) * scale for rank in receivers}
        for rank, surplus in surpluses.items():
            kept[rank], (first, last) = _split_block(pairs_before, kept[rank], surplus)
            while first < last:
                while len(receivers) > 1 and deficits[receivers[0]] <= MIN_MOVE * mean:
                    del receivers[0]
                enough = int(np.searchsorted(pairs_before, pairs_before[first] + deficits[receivers[0]]))
                end = last if len(receivers) == 1 else min(max(enough, first + 1), last)
                deficits[receivers[0]] -= pairs_before[end] - pairs_before[first]
                received_by[receivers[0]].append((first, end))
                first = end
    return tuple(tuple(sorted((own, *received))) for own, received in zip(kept, received_by, strict=True))


def _split_block(pairs_before: Numbers, block: RowRange, surplus: float) -> tuple[RowRange, RowRange]:
    """(rows that a rank keeps, rows that it sends): the smallest part at one end of `block` with `surplus` pairs."""
    first, last = block
    early = int(np.searchsorted(pairs_before, pairs_before[first] + surplus))
    late = int(np.searchsorted(pairs_before, pairs_before[last] - surplus, side="right")) - 1
    early, late = min(early, last - 1), max(late, first + 1)
    if early - first < last - late:
        return (early, last), (first, early)
    return (first, late), (late, last)


def _queries_of(ranges: RowRanges, block: RowRanges) -> RowRanges:
    """The union of the rows that a rank computes and its block, as ascending ranges."""
    return tuple(sorted((*block, *(row_range for row_range in ranges if not intersect((row_range,), block)))))


def _keys_of(
    computed: tuple[RowRanges, ...], starts: Numbers, ends: Numbers, world: int, rows: int
) -> tuple[RowRanges, ...]:
    """Keys that each rank reads: its block, and the keys of other blocks that its rows see.

    Keys are tested in groups of `KEY_BLOCK`. Gaps of up to `MAX_GAP` unneeded keys are fetched as well.
    """
    length, seen = world * rows, starts < ends
    # The queries that see key i, over all intervals and planes, are in [low[i], high[i]).
    low, high = np.full(length, length), np.zeros(length, np.int64)
    low[: starts.shape[1]] = np.where(seen, starts, length).min(0)
    high[: ends.shape[1]] = np.where(seen, ends, 0).max(0)
    places = np.arange(0, length, KEY_BLOCK)
    low, high = np.minimum.reduceat(low, places), np.maximum.reduceat(high, places)
    found = []
    for rank, ranges in enumerate(computed):
        needed = np.zeros(len(places), bool)
        for first, last in ranges:
            needed |= (low < last) & (high > first)
        mine: list[RowRange] = [(rank * rows, (rank + 1) * rows)]
        at = np.flatnonzero(needed)
        gaps = np.flatnonzero(np.diff(at) > MAX_GAP // KEY_BLOCK) + 1
        for blocks in np.split(at, gaps) if len(at) else ():
            first, last = int(blocks[0]) * KEY_BLOCK, min(int(blocks[-1] + 1) * KEY_BLOCK, length)
            mine += [(first, min(last, rank * rows)), (max(first, (rank + 1) * rows), last)]
        found.append(tuple(sorted(row_range for row_range in mine if row_range[0] < row_range[1])))
    return tuple(found)


def count_rows(ranges: RowRanges) -> int:
    """Number of rows in `ranges`."""
    return sum(last - first for first, last in ranges)


def intersect(ours: RowRanges, theirs: RowRanges) -> RowRanges:
    """The rows that are in both, as ascending ranges, split at the edges of either argument."""
    both = ((max(a, c), min(b, d)) for a, b in ours for c, d in theirs)
    return tuple(sorted((first, last) for first, last in both if first < last))


def offsets_in(row_range: RowRange, ranges: RowRanges) -> RowRange:
    """First and last offset of `row_range` in a tensor whose rows are the concatenation of `ranges`.

    Raises ValueError if `row_range` is not inside one of them.
    """
    before = 0
    for first, last in ranges:
        if first <= row_range[0] and row_range[1] <= last:
            return before + row_range[0] - first, before + row_range[1] - first
        before += last - first
    raise ValueError(f"rows {row_range} are not in one of {ranges}")


class RowTransfers(NamedTuple):
    """What one rank does with a tensor of rows, so that each rank gets the rows that it wants.

    rows: number of rows that the rank wants, the rows of its result.
    whole: the result as a range of the tensor's rows, if the tensor contains it, else None.
    kept: (rows of the result, rows of the tensor) that the rank already has.
    sent: by receiving rank, rows of the tensor.
    received: by sending rank, rows of the result.
    """

    rows: int
    whole: RowRange | None
    kept: tuple[tuple[RowRange, RowRange], ...]
    sent: tuple[RowRanges, ...]
    received: tuple[RowRanges, ...]


@lru_cache(maxsize=256)  # the layers of a model repeat the same transfers
def row_transfers(
    rows: RowRanges, source: tuple[RowRanges, ...], target: tuple[RowRanges, ...], rank: int
) -> RowTransfers:
    """The transfers of `rank`, whose tensor has `rows` of the sequence.

    source, target: by rank, the rows that it sends to those who want them, and the rows that it wants.
    """
    ranks, wanted = range(len(source)), target[rank]
    whole = offsets_in(wanted[0], rows) if len(wanted) == 1 and intersect(wanted, rows) == wanted else None
    nothing: RowRanges = ()
    return RowTransfers(
        count_rows(wanted),
        whole,
        tuple((offsets_in(x, wanted), offsets_in(x, rows)) for x in intersect(wanted, source[rank])),
        tuple(
            nothing if to == rank else tuple(offsets_in(x, rows) for x in intersect(source[rank], target[to]))
            for to in ranks
        ),
        tuple(
            nothing if by == rank else tuple(offsets_in(x, wanted) for x in intersect(wanted, source[by]))
            for by in ranks
        ),
    )


def assigned_spans(mask: Spans, found: RowAssignment, rank: int) -> Spans:
    """The local mask between a rank's `queries` and `keys`. Rows that the rank does not compute see nothing."""
    device, total = mask.device, mask.seq_k
    ranges = [(first, min(last, total)) for first, last in found.computed[rank]]
    first, last = (torch.tensor(x, device=device) for x in zip(*ranges, strict=True))
    hidden = offsets_in(found.computed[rank][0], found.queries[rank])[0]

    def index(position: torch.Tensor) -> torch.Tensor:
        """Index of the first local query at or after a position of the whole sequence."""
        inside = (position[..., None] - first).clamp(torch.zeros_like(first), (last - first).clamp(min=0))
        return hidden + inside.sum(-1)

    order = torch.cat([torch.arange(*row_range, device=device) for row_range in found.keys[rank]])
    padding = int(found.held[-1][0][1]) - total
    return renumbered_spans(mask, index, order, padding)
