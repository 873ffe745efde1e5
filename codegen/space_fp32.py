"""Search space of the float32 kernels of the mma.sync family, best guess first; infeasible ones included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attnforge.codegen.spec import Fp32Backward, Fp32Forward, Problem

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference.
FORWARD_GUESSES = (
    (64, Fp32Forward(128, 32, 4, 2, 8, 2)),
    (64, Fp32Forward(128, 32, 4, 2, 8, 1)),
)


def forward(problem: Problem) -> Iterator[Fp32Forward]:
    """Forward tunings of `problem`."""
    yield from (tuning for limit, tuning in FORWARD_GUESSES if problem.head_dim <= limit)
    for tile_n, (tile_m, warps), stages, blocks, apart in product(
        (32, 64, 16), ((128, 4), (128, 8), (64, 4), (256, 8)), (2, 1), (2, 1, 3), (8, 4, 16)
    ):
        yield Fp32Forward(tile_m, tile_n, warps, stages, apart, blocks)


def backward(problem: Problem) -> Iterator[Fp32Backward]:
    """Backward tunings of `problem`."""
    yield from ()
