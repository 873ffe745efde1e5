"""Cost model that chooses how heads and rows are partitioned over ranks.

- Communication: a collective takes a latency plus bytes / bandwidth. Traffic inside a node and traffic to other nodes
  use different links at the same time, so the slower of the two counts.
- Kernels: visible (query, key) pairs / rate.
- A pass lasts as long as its slowest rank; communication and kernels do not overlap.

benchmarks/context_parallel_model.py applies the same model to recorded traffic and compares it with measured times.
tests/runtime/distributed/test_cost.py checks that `traffic` equals the bytes that the exchange code sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnforge.runtime.distributed.links import FLOP_PER_PAIR, KERNEL_FLOPS, Links
from attnforge.runtime.distributed.row_assignment import Numbers, RowAssignment
from attnforge.runtime.distributed.shards import divide

TIE = 1.02  # ratio of two predicted times below which they count as equal

# Cached: the model calls it for every rank, partition and pass.
_groups = lru_cache(maxsize=4096)(divide)


class Partition(NamedTuple):
    """How heads and rows are partitioned over ranks.

    ulysses_degree: number of ranks that split the heads among them (U in context_parallel.py).
    contiguous: whether each of these groups has consecutive ranks. Then it lies inside one node if U divides the node's
        number of ranks, and gathered keys keep their order. Otherwise a group mixes early and late rows, which balances
        causal masks.
    """

    ulysses_degree: int
    contiguous: bool

    @staticmethod
    def with_keys_in_order(ulysses_degree: int, world: int) -> Partition:
        """The partition of this degree that keeps keys in order. With degree 1 or `world`, both layouts do."""
        return Partition(ulysses_degree, 1 < ulysses_degree < world)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a call.

    rows: rows of q, k and v per rank. dim: mean of the head dims of q and v. bytes: bytes per element.
    nodes: the index of each rank's node; its length is the number of ranks.
    """

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


def partitions(shapes: Shapes, most: int, in_order: bool) -> list[Partition]:
    """All partitions that a call may use, by descending Ulysses degree, which divides `most`.

    in_order: leave out partitions that permute the keys.
    """
    found = list[Partition]()
    for ulysses_degree in (u for u in range(most, 0, -1) if most % u == 0):
        ordered = Partition.with_keys_in_order(ulysses_degree, shapes.world)
        found += (
            [ordered] if in_order or not ordered.contiguous else [Partition(ulysses_degree, False), ordered]
        )
    return found


def traffic(
    shapes: Shapes, partition: Partition, rank: int, backward: bool, assignment: RowAssignment | None = None
) -> tuple[float, float, int]:
    """(bytes sent inside the node, bytes sent to other nodes, number of collectives) of one rank in one pass.

    The lse is not counted. assignment: for degree 1, which rows are sent to whom; None: k and v are all-gathered.
    """
    s, here = shapes, shapes.nodes[rank]
    ulysses_ranks, gather_ranks, _ = _groups(s.world, partition.ulysses_degree, rank, partition.contiguous)
    row = s.batch * s.dim * s.bytes  # bytes of one row of one head
    intra_node = inter_node = 0.0
    collectives = 0
    if partition.ulysses_degree > 1:  # all-to-all of q, k, v and out, or of dout, dq, dk and dv
        each = 2 * (s.heads_q + s.heads_kv) * s.rows * row / partition.ulysses_degree
        others = sum(s.nodes[peer] == here for peer in ulysses_ranks) - 1
        intra_node, inter_node, collectives = each * others, each * (partition.ulysses_degree - 1 - others), 4
    elif assignment is not None:
        of_passes, launches = _sent(s, assignment)
        intra_node, inter_node = of_passes[int(backward)][rank] * row
        return intra_node, inter_node, int(launches[rank])
    if partition.ulysses_degree < s.world:
        size, count = 2 * s.heads_kv * s.rows * row, len(gather_ranks)
        local = sum(s.nodes[peer] == here for peer in gather_ranks)
        if backward:  # all-to-all of dk and dv, which each rank has for all rows
            intra_node += size * (local - 1)
            inter_node += size * (count - local)
        else:  # ring all-gather of k and v: each GPU of a node receives everything once, nodes use all their ports
            intra_node += size * (count - count / local)
            inter_node += size * (count - local) / local
        collectives += 2
    return intra_node, inter_node, collectives


@lru_cache(maxsize=4)
def _sent(shapes: Shapes, assignment: RowAssignment) -> tuple[list[npt.NDArray[np.float64]], Numbers]:
    """Traffic of degree 1: ([forward, backward], collectives), cached because it is needed for every rank.

    forward, backward: (ranks, 2), rows of one head that each rank sends inside its node and to other nodes.
    collectives: (ranks,), batched point-to-point launches of each rank per pass.
    """
    queries, keys = assignment.rows_fetched(assignment.queries), assignment.rows_fetched(assignment.keys)
    both = queries + queries.T  # q sent to the computing rank and out sent back; in the backward dout and dq
    inside = np.equal.outer(shapes.nodes, shapes.nodes)
    found = []
    for of_keys in (keys.T, keys):  # k and v go from the holding rank, dk and dv to it
        rows = shapes.heads_q * both + 2 * shapes.heads_kv * of_keys
        found.append(np.stack([(rows * inside).sum(1), (rows * ~inside).sum(1)], 1).astype(float))
    launches = (both + keys + keys.T).any(1) * 1 + both.any(1)
    return found, launches


def _exchange(shapes: Shapes, partition: Partition, assignment: RowAssignment) -> float:
    """Seconds of communication of forward and backward, of the slowest rank."""
    return sum(
        max(
            Links().seconds(*traffic(shapes, partition, rank, backward, assignment))
            for rank in range(shapes.world)
        )
        for backward in (False, True)
    )


def seconds(shapes: Shapes, partition: Partition, assignment: RowAssignment) -> float:
    """Predicted seconds of forward and backward."""
    s = shapes
    if partition.ulysses_degree == 1:
        slowest = max(assignment.pairs_computed)
    else:
        groups = {
            _groups(s.world, partition.ulysses_degree, rank, partition.contiguous)[0]
            for rank in range(s.world)
        }
        # The ranks of a group compute the rows of the whole group, each with 1/U of the heads.
        most_pairs = max(sum(assignment.pairs_held[block] for block in group) for group in groups)
        slowest = most_pairs / partition.ulysses_degree
    kernels = FLOP_PER_PAIR * s.dim * s.batch * s.heads_q * slowest / KERNEL_FLOPS
    return kernels + _exchange(s, partition, assignment)


@lru_cache(maxsize=256)  # the layers of a model repeat the same call
def fastest(shapes: Shapes, most: int, in_order: bool, assignment: RowAssignment) -> Partition:
    """The fastest partition. Of those within a factor of `TIE` of it, the one with the highest Ulysses degree."""
    times = [
        (seconds(shapes, partition, assignment), partition)
        for partition in partitions(shapes, most, in_order)
    ]
    least = min(time for time, _ in times)
    return next(partition for time, partition in times if time <= TIE * least)
