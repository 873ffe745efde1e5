"""What the model of context parallelism knows of GPUs and of the links between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

RATE = 600e12  # FLOP a second of a GPU's kernels, forward and backward together
FLOP = 14  # of both passes, for a visible pair and a column of a head: 3.5 times the forward's


@dataclass(frozen=True)
class Links:
    """Bytes a second that leave a GPU, inside a node and to other nodes; seconds that a launch of NCCL takes by itself.

    As fitted to 2 H200s (benchmarks/context_parallel_model.py), and nine tenths of 400 Gbit/s.
    """

    near: float = 214e9
    far: float = 45e9
    latency: float = 85e-6

    def seconds(self, near: float, far: float, collectives: int) -> float:
        return collectives * self.latency + max(near / self.near, far / self.far)


def nodes_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """The node of each rank, where torchrun says that all nodes have equally many ranks; else one node for all."""
    size, nodes, world = (
        int(os.environ.get(f"{name}WORLD_SIZE", 0) or 0) for name in ("LOCAL_", "GROUP_", "")
    )
    known = 0 < size * nodes == world
    return tuple(rank // size if known else 0 for rank in ranks)
