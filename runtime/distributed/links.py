"""Performance constants of GPUs and links, for the cost model of context parallelism (cost.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

KERNEL_FLOPS = 600e12  # FLOP/s of a GPU, mean over the forward and the backward kernel
# FLOP per visible (query, key) pair and column of head_dim: 4 in the forward and 10 in the backward.
FLOP_PER_PAIR = 14


@dataclass(frozen=True)
class Links:
    """Bandwidth and latency of a GPU's links.

    intra_node: bytes/s from one GPU to the others of its node (NVLink), one direction.
    inter_node: bytes/s from one GPU to other nodes, one direction.
    latency: seconds per collective, independent of its size.

    The defaults of `intra_node` and `latency` are fitted to measurements on 2 H200s
    (benchmarks/context_parallel_model.py); `inter_node` is 90 % of a 400 Gbit/s port.
    """

    intra_node: float = 212e9
    inter_node: float = 45e9
    latency: float = 65e-6

    def seconds(self, intra_node: float, inter_node: float, collectives: int) -> float:
        """Seconds that a GPU takes to send this many bytes over both kinds of links, which work at the same time."""
        return collectives * self.latency + max(intra_node / self.intra_node, inter_node / self.inter_node)


def nodes_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """The index of the node of each of `ranks`.

    Read from the environment of torchrun, if all nodes have the same number of ranks. Otherwise every rank is taken to
    be on node 0: nodes with different numbers of ranks would derive different answers, choose different collectives and
    hang.
    """
    size, nodes, world = (
        int(os.environ.get(f"{name}WORLD_SIZE", 0) or 0) for name in ("LOCAL_", "GROUP_", "")
    )
    known = 0 < size * nodes == world
    return tuple(rank // size if known else 0 for rank in ranks)
