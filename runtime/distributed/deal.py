"""Which rows each rank computes, and which keys it reads for them, where ranks do not share heads (U = 1).

Ranks hold equally many rows, but under a mask these are not the same work. A rank with more than the mean gives the
rows at one end of its block, whichever has fewer for this work, to ranks with less: all of them, or those of its node,
or none, whichever is the fastest by a model of links. Under a mask of documents most keys that a rank's rows see are
its own, so that only the others are fetched.

Work is counted in visible pairs of whole tiles of `TILE` rows, as kernels compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnforge.runtime.distributed import links
from attnforge.runtime.distributed.shards import renumbered_spans
from attnforge.runtime.masks import Spans

Run = tuple[int, int]  # rows [first, last) of the whole
Runs = tuple[Run, ...]  # ascending
Numbers = npt.NDArray[np.int64]

TILE = 128  # rows of a forward's tile, or a multiple of a backward's
BLOCK = 64  # keys that are looked at together
GAP = 512  # keys between two runs that are not worth a transfer of their own
SLACK = 1.03  # of the mean work, that the busiest rank may have before rows move
LITTLE = 0.01  # of the mean work, that is not worth a transfer


class Deal(NamedTuple):
    """Runs of rows, one tuple for each rank.

    held: what a rank is given: its block.
    queries: rows of q in its kernel, in this order: its block, and what others give to it.
    computed: those of them that its kernel computes; each row of the whole is computed by one rank. Rows that are only
        held stand before or after all computed ones.
    keys: rows of k and v in its kernel.
    work, load: pairs that a head of each rank's block has, and of what the rank computes.
    """

    held: tuple[Runs, ...]
    queries: tuple[Runs, ...]
    computed: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    work: tuple[float, ...]
    load: tuple[float, ...]

    def of(self, rank: int) -> tuple[Runs, Runs, Runs]:
        """What a rank's mask depends on."""
        return self.queries[rank], self.computed[rank], self.keys[rank]

    def fetched(self, wanted: tuple[Runs, ...]) -> Numbers:
        """Rows that each rank (axis 0) gets from each other (axis 1), of its `queries` or `keys`."""
        rows = np.array([[size_of(common(runs, block)) for block in self.held] for runs in wanted])
        np.fill_diagonal(rows, 0)
        return rows


def deal(mask: Spans, nodes: Sequence[int], rows: int, in_order: bool = False) -> Deal:
    """The deal of a block of `rows` rows for each rank, of which `nodes` has the nodes; reads the mask from its device.

    in_order: each rank computes one run of rows and reads all keys, as functions of positions need it.
    """
    world = len(nodes)
    length, total = world * rows, mask.seq_k
    starts, ends = (x.cpu().numpy().reshape(-1, total).clip(0, total) for x in (mask.starts, mask.ends))
    planes = mask.planes[0] * mask.planes[1]
    held: tuple[Runs, ...] = tuple(((rank * rows, (rank + 1) * rows),) for rank in range(world))
    done = np.concatenate(([0], np.cumsum(_visible(starts, ends, length))))  # pairs of all rows before
    work = np.diff(done[::rows])
    computed: tuple[Runs, ...]
    queries: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    if work.max() * world <= SLACK * done[-1]:
        computed = held
    else:
        computed = _cut(done, world) if in_order else _fastest(done, work, rows, nodes)
    if in_order:
        queries, keys = computed, (((0, length),),) * world
    else:
        queries = tuple(_with_block(runs, block) for runs, block in zip(computed, held, strict=True))
        keys = _keys_of(computed, starts, ends, world, rows)
    of_head = (tuple((x / planes).tolist()) for x in (work, _load(done, computed)))
    return Deal(held, queries, computed, keys, *of_head)


def _visible(starts: Numbers, ends: Numbers, length: int) -> Numbers:
    """Keys that each row's tile sees, over all planes and intervals."""
    seen = starts < ends
    first = starts[seen] // TILE * TILE
    last = np.minimum(-(-ends[seen] // TILE) * TILE, length)
    change = np.bincount(first, minlength=length + 1) - np.bincount(last, minlength=length + 1)
    return np.cumsum(change)[:length]


def _cut(done: Numbers, world: int) -> tuple[Runs, ...]:
    """One run a rank, each of at least a row, with equal work."""
    length = len(done) - 1
    goals = done[-1] * np.arange(1, world) // world
    places = np.searchsorted(done[1:], goals) + 1
    inner = [min(max(int(place), rank), length - world + rank) for rank, place in enumerate(places, 1)]
    edges = (0, *accumulate(inner, lambda before, place: max(before + 1, place)), length)
    return tuple((run,) for run in pairwise(edges))


def _load(done: Numbers, computed: tuple[Runs, ...]) -> Numbers:
    """Pairs of what each rank computes."""
    return np.array([sum(int(done[last] - done[first]) for first, last in runs) for runs in computed])


def _fastest(done: Numbers, work: Numbers, rows: int, nodes: Sequence[int]) -> tuple[Runs, ...]:
    """No rows move, or between ranks of a node, or between all: what takes the least time by the model of links."""
    of_node = np.array(nodes)
    groups = [np.flatnonzero(of_node == node) for node in dict.fromkeys(nodes)]
    everyone = [[np.arange(len(nodes))]] if len(groups) > 1 else []
    found = [_give(done, work, rows, among) for among in ([], groups, *everyone)]
    return min(found, key=lambda computed: _seconds(done, computed, rows, of_node))


def _seconds(done: Numbers, computed: tuple[Runs, ...], rows: int, of_node: Numbers) -> float:
    """Of both passes, a column of a head, with the rows of q, out, dout and dq that move, 16 bits each."""
    moved = np.zeros((len(computed), 2))  # rows that leave or enter a rank: inside its node, to others
    for rank, runs in enumerate(computed):
        for first, last in runs:
            owner = first // rows
            if owner != rank:
                moved[[rank, owner], int(of_node[rank] != of_node[owner])] += last - first
    near, far = (moved * 8 / (links.Links.near, links.Links.far)).max(0)
    return float(links.FLOP * np.max(_load(done, computed)) / links.RATE + max(near, far))


def _give(done: Numbers, work: Numbers, rows: int, groups: Sequence[Numbers]) -> tuple[Runs, ...]:
    """Each rank's block without what it gives, and what it is given; ranks give to those of their group."""
    found: list[list[Run]] = [[] for _ in work]
    kept: list[Run] = [(rank * rows, (rank + 1) * rows) for rank in range(len(work))]
    for group in groups:
        mean = work[group].mean()
        over = {rank: float(work[rank] - mean) for rank in group.tolist() if work[rank] > (1 + LITTLE) * mean}
        takers = [rank for rank in group.tolist() if work[rank] < mean]
        lacking = max(1.0, sum(float(mean - work[rank]) for rank in takers))
        share = sum(over.values()) / lacking  # so that as much is taken as is given
        lacks = {rank: float(mean - work[rank]) * share for rank in takers}
        for rank, surplus in over.items():
            kept[rank], (first, last) = _end(done, kept[rank], surplus)
            while first < last:
                while len(takers) > 1 and lacks[takers[0]] <= LITTLE * mean:
                    del takers[0]
                enough = int(np.searchsorted(done, done[first] + lacks[takers[0]]))
                until = last if len(takers) == 1 else min(max(enough, first + 1), last)
                lacks[takers[0]] -= done[until] - done[first]
                found[takers[0]].append((first, until))
                first = until
    return tuple(tuple(sorted((own, *given))) for own, given in zip(kept, found, strict=True))


def _end(done: Numbers, block: Run, surplus: float) -> tuple[Run, Run]:
    """(what a rank keeps of its block, the fewest rows at one end of it with this work)."""
    first, last = block
    early = int(np.searchsorted(done, done[first] + surplus))
    late = int(np.searchsorted(done, done[last] - surplus, side="right")) - 1
    early, late = min(early, last - 1), max(late, first + 1)
    if early - first < last - late:
        return (early, last), (first, early)
    return (first, late), (late, last)


def _with_block(runs: Runs, block: Runs) -> Runs:
    """The rows that a rank computes and those of its block, as ascending runs."""
    return tuple(sorted((*block, *(run for run in runs if not common((run,), block)))))


def _keys_of(
    computed: tuple[Runs, ...], starts: Numbers, ends: Numbers, world: int, rows: int
) -> tuple[Runs, ...]:
    """Keys of each rank: its block, and of the others' what its rows see, with gaps of less than `GAP` filled."""
    length, seen = world * rows, starts < ends
    low, high = np.full(length, length), np.zeros(length, np.int64)  # of all intervals of a key
    low[: starts.shape[1]] = np.where(seen, starts, length).min(0)
    high[: ends.shape[1]] = np.where(seen, ends, 0).max(0)
    places = np.arange(0, length, BLOCK)
    low, high = np.minimum.reduceat(low, places), np.maximum.reduceat(high, places)
    found = []
    for rank, runs in enumerate(computed):
        needed = np.zeros(len(places), bool)
        for first, last in runs:
            needed |= (low < last) & (high > first)
        mine: list[Run] = [(rank * rows, (rank + 1) * rows)]
        at = np.flatnonzero(needed)
        for run in np.split(at, np.flatnonzero(np.diff(at) > GAP // BLOCK) + 1) if len(at) else ():
            first, last = int(run[0]) * BLOCK, min(int(run[-1] + 1) * BLOCK, length)
            mine += [(first, min(last, rank * rows)), (max(first, (rank + 1) * rows), last)]
        found.append(tuple(sorted(run for run in mine if run[0] < run[1])))
    return tuple(found)


def size_of(runs: Runs) -> int:
    """Number of rows."""
    return sum(last - first for first, last in runs)


def common(ours: Runs, theirs: Runs) -> Runs:
    """The rows of both, cut where a run of either ends."""
    both = ((max(a, c), min(b, d)) for a, b in ours for c, d in theirs)
    return tuple(sorted((first, last) for first, last in both if first < last))


def place_of(run: Run, runs: Runs) -> Run:
    """Where a run that lies in one of `runs` is among the rows of all of them."""
    before = 0
    for first, last in runs:
        if first <= run[0] and run[1] <= last:
            return before + run[0] - first, before + run[1] - first
        before += last - first
    raise ValueError(f"rows {run} are not in one of {runs}")


def dealt_spans(mask: Spans, found: Deal, rank: int) -> Spans:
    """The mask between the rows of a rank's `queries` and `keys`; rows that it only holds see nothing."""
    device, total = mask.device, mask.seq_k
    runs = [(first, min(last, total)) for first, last in found.computed[rank]]
    first, last = (torch.tensor(x, device=device) for x in zip(*runs, strict=True))
    hidden = place_of(found.computed[rank][0], found.queries[rank])[0]

    def index(position: torch.Tensor) -> torch.Tensor:
        """Of the first query from a position on."""
        inside = (position[..., None] - first).clamp(torch.zeros_like(first), (last - first).clamp(min=0))
        return hidden + inside.sum(-1)

    order = torch.cat([torch.arange(*run, device=device) for run in found.keys[rank]])
    padding = int(found.held[-1][0][1]) - total
    return renumbered_spans(mask, index, order, padding)
