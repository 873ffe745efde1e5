"""Which division of heads and rows among ranks is the fastest, by a model of kernels and links.

A collective takes a latency and the bytes that leave a GPU over the bandwidth of the link that they leave by: inside a
node, or through a port of the GPU to other nodes, whichever takes longer. Kernels take their visible pairs over a rate,
and a step lasts as long as its slowest rank. benchmarks/context_parallel_model.py has the same model and compares it
with measured times; the recorded bytes of its simulation are those that `traffic` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnforge.runtime.distributed.deal import Deal, Numbers
from attnforge.runtime.distributed.links import FLOP, RATE, Links
from attnforge.runtime.distributed.shards import divide

NEARLY = 1.02  # times that differ by less are taken for equal

# (all-to-all group of a rank, its all-gather group), which the model asks for again and again.
_groups = lru_cache(maxsize=4096)(divide)


class Way(NamedTuple):
    """U, and whether the ranks that share heads are beside each other: of one node, and keys stay in order."""

    shared: int
    beside: bool

    @staticmethod
    def in_order(shared: int, world: int) -> Way:
        """The way that keeps keys in order: with all ranks or none sharing heads, any does."""
        return Way(shared, 1 < shared < world)


@dataclass(frozen=True)
class Shapes:
    """Of a call: batch, rows of a rank, heads, columns (mean of q and v), bytes of an element, node of each rank."""

    batch: int
    rows: int
    heads_q: int
    heads_kv: int
    dim: float
    bytes: int
    nodes: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.nodes)


def ways(shapes: Shapes, most: int, in_order: bool) -> list[Way]:
    """The divisions that a call may have, U a divisor of `most`, the largest first.

    in_order: only those that keep the keys in order.
    """
    found = list[Way]()
    for shared in (u for u in range(most, 0, -1) if most % u == 0):
        ordered = Way.in_order(shared, shapes.world)
        found += [ordered] if in_order or not ordered.beside else [Way(shared, False), ordered]
    return found


def traffic(
    shapes: Shapes, way: Way, rank: int, backward: bool, dealt: Deal | None = None
) -> tuple[float, float, int]:
    """Bytes that leave a rank inside its node and to others, and collectives, of a pass without lse.

    dealt: what ranks send where heads are not shared; without it keys are gathered.
    """
    s, here = shapes, shapes.nodes[rank]
    blocks, neighbours, _ = _groups(s.world, way.shared, rank, way.beside)
    row = s.batch * s.dim * s.bytes  # of one head
    near = far = 0.0
    collectives = 0
    if way.shared > 1:  # q, k, v and out; dout, dq, dk and dv
        each = 2 * (s.heads_q + s.heads_kv) * s.rows * row / way.shared
        others = sum(s.nodes[peer] == here for peer in blocks) - 1
        near, far, collectives = each * others, each * (way.shared - 1 - others), 4
    elif dealt is not None:
        of_passes, launches = _sent(s, dealt)
        near, far = of_passes[int(backward)][rank] * row
        return near, far, int(launches[rank])
    if way.shared < s.world:
        size, count = 2 * s.heads_kv * s.rows * row, len(neighbours)
        local = sum(s.nodes[peer] == here for peer in neighbours)
        if backward:  # dk and dv of all rows, to those whose rows they are
            near += size * (local - 1)
            far += size * (count - local)
        else:  # k and v, in rings: once through each GPU of a node, between nodes through all ports
            near += size * (count - count / local)
            far += size * (count - local) / local
        collectives += 2
    return near, far, collectives


@lru_cache(maxsize=4)
def _sent(shapes: Shapes, dealt: Deal) -> tuple[list[npt.NDArray[np.float64]], Numbers]:
    """Rows of a head that leave each rank, (ranks, 2): inside its node and to others, of both passes; its launches."""
    queries, keys = dealt.fetched(dealt.queries), dealt.fetched(dealt.keys)
    both = queries + queries.T  # q to those that compute it, and out to those that hold it; dout and dq
    inside = np.equal.outer(shapes.nodes, shapes.nodes)
    found = []
    for of_keys in (keys.T, keys):  # k and v, dk and dv
        rows = shapes.heads_q * both + 2 * shapes.heads_kv * of_keys
        found.append(np.stack([(rows * inside).sum(1), (rows * ~inside).sum(1)], 1).astype(float))
    launches = (both + keys + keys.T).any(1) * 1 + both.any(1)
    return found, launches


def _exchange(shapes: Shapes, way: Way, dealt: Deal) -> float:
    """Seconds of both passes' collectives, of the slowest rank."""
    return sum(
        max(Links().seconds(*traffic(shapes, way, rank, backward, dealt)) for rank in range(shapes.world))
        for backward in (False, True)
    )


def seconds(shapes: Shapes, way: Way, dealt: Deal) -> float:
    """Of both passes."""
    s = shapes
    if way.shared == 1:
        slowest = max(dealt.load)
    else:
        teams = {_groups(s.world, way.shared, rank, way.beside)[0] for rank in range(s.world)}
        slowest = max(sum(dealt.work[block] for block in team) for team in teams) / way.shared
    kernels = FLOP * s.dim * s.batch * s.heads_q * slowest / RATE
    return kernels + _exchange(s, way, dealt)


@lru_cache(maxsize=256)  # layers of a step ask alike
def fastest(shapes: Shapes, most: int, in_order: bool, dealt: Deal) -> Way:
    """The way that takes the least time; of nearly equal ones the first, which shares more heads."""
    times = [(seconds(shapes, way, dealt), way) for way in ways(shapes, most, in_order)]
    least = min(time for time, _ in times)
    return next(way for time, way in times if time <= NEARLY * least)
