"""Search space of the float32 kernels for GPUs, best guess first; infeasible ones included."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product

from attnforge.codegen.spec import Problem
from attnforge.codegen.tuning import Fp32Backward, Fp32Forward, Sm90Fp32Forward

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference. The first ones fill
# multiprocessors of 164 and 228 KB, the others those of 100 KB. Modelled, not measured.
FORWARD_GUESSES = (
    (64, Fp32Forward(128, 32, 4, 2, 2, 2)),
    (64, Fp32Forward(64, 32, 4, 2, 1, 3)),
    (64, Fp32Forward(128, 16, 4, 2, 1, 2)),
    (64, Fp32Forward(64, 64, 4, 1, 2, 2)),
    (64, Fp32Forward(64, 32, 4, 1, 1, 2)),
    (64, Fp32Forward(256, 32, 8, 2, 2, 1)),
    (128, Fp32Forward(64, 32, 4, 2, 2, 2)),
    (128, Fp32Forward(64, 32, 4, 1, 2, 1)),
    (256, Fp32Forward(64, 32, 4, 1, 8, 1)),
    (256, Fp32Forward(64, 16, 4, 1, 4, 1)),
)
BACKWARD_GUESSES = (
    (64, Fp32Backward(64, 64, 4, 1, 2, 2, 2, 1, 2, False, False)),
    (64, Fp32Backward(32, 64, 4, 1, 2, 4, 2, 1, 2, False, False)),
    (64, Fp32Backward(32, 64, 8, 1, 2, 4, 2, 1, 1, False, False)),
    (64, Fp32Backward(64, 128, 8, 1, 2, 4, 2, 1, 1, False, False)),
    (64, Fp32Backward(64, 64, 8, 1, 4, 4, 4, 1, 1, False, False)),
    (64, Fp32Backward(32, 128, 8, 2, 2, 4, 2, 1, 1, False, False)),
    (128, Fp32Backward(64, 64, 8, 1, 4, 4, 4, 1, 1, False, False)),
    (128, Fp32Backward(32, 64, 8, 1, 2, 4, 2, 1, 1, False, False)),
    (128, Fp32Backward(32, 32, 4, 1, 2, 2, 2, 2, 1, False, False)),
    (256, Fp32Backward(32, 32, 4, 1, 2, 2, 2, 4, 1, False, False)),
    (256, Fp32Backward(32, 16, 2, 1, 2, 1, 2, 4, 1, False, False)),
    (256, Fp32Backward(16, 16, 2, 1, 1, 1, 1, 4, 1, False, False)),
)
# Of the Hopper kernel: (largest head_dim, tuning). Of those up to 128 the first was within 8 % of the fastest in all
# shapes of docs/challenge.md, on an H200; beyond 128 nothing was measured.
# tile_m, tile_n, stages, ping_pong, persistent, q_in_regs
HOPPER_GUESSES = (
    (64, Sm90Fp32Forward(128, 64, 2, True, True, True)),
    (64, Sm90Fp32Forward(128, 64, 2, True, False, True)),
    (64, Sm90Fp32Forward(128, 96, 2, True, True, True)),
    (64, Sm90Fp32Forward(192, 64, 2, True, False, False)),
    (128, Sm90Fp32Forward(128, 64, 1, True, True, False)),
    (128, Sm90Fp32Forward(128, 32, 2, True, True, False)),
    (256, Sm90Fp32Forward(128, 32, 1, True, True, False)),
    (256, Sm90Fp32Forward(64, 32, 1, False, True, False)),
)
# (tile_m, tile_n, warps, warps_sdp, warps_dkv, warps_dq) of the backward kernel.
BACKWARD_GRIDS = (
    (64, 64, 4, 2, 2, 2),
    (64, 64, 4, 4, 4, 4),
    (64, 64, 4, 2, 4, 2),
    (64, 128, 8, 2, 4, 2),
    (64, 128, 8, 4, 8, 4),
    (128, 64, 8, 4, 2, 4),
    (64, 64, 8, 4, 4, 4),
    (32, 64, 4, 2, 4, 2),
    (32, 64, 8, 2, 4, 2),
    (32, 64, 4, 2, 2, 2),
    (32, 128, 8, 2, 4, 2),
    (32, 128, 4, 2, 4, 2),
    (32, 32, 4, 2, 2, 2),
)


def forward(problem: Problem) -> Iterator[Fp32Forward]:
    """Forward tunings of `problem`."""
    yield from (tuning for limit, tuning in FORWARD_GUESSES if problem.head_dim <= limit)
    for tile_n, (tile_m, warps), stages, blocks, parts in product(
        (32, 64, 16), ((128, 4), (64, 4), (256, 8), (128, 8), (32, 2)), (2, 1), (2, 3, 1, 4), (1, 2, 4, 8)
    ):
        yield Fp32Forward(tile_m, tile_n, warps, stages, parts, blocks)
    # By float lanes: where tensor cores do tf32 no faster than these do float32, as on GeForce GPUs.
    for (tile_m, warps), tile_n, stages, blocks in product(
        ((128, 8), (128, 4), (64, 4), (64, 2), (256, 8), (32, 2)), (64, 32, 16), (1, 2), (1, 2, 3)
    ):
        yield Fp32Forward(tile_m, tile_n, warps, stages, 0, blocks)


def hopper_forward(problem: Problem) -> Iterator[Sm90Fp32Forward]:
    """Tunings of the Hopper forward for `problem`."""
    yield from (tuning for limit, tuning in HOPPER_GUESSES if problem.largest_dim <= limit)
    for tile_m, tile_n, stages, ping_pong, persistent, q_in_regs in product(
        (128, 192, 64), (64, 96, 80, 128, 48, 32), (2, 1, 3), (True, False), (True, False), (True, False)
    ):
        yield Sm90Fp32Forward(tile_m, tile_n, stages, ping_pong, persistent, q_in_regs)


def backward(problem: Problem) -> Iterator[Fp32Backward]:
    """Backward tunings of `problem`."""
    guesses = [tuning for limit, tuning in BACKWARD_GUESSES if problem.head_dim <= limit]
    yield from guesses
    for split, grid, stages, blocks, parts in product(
        (True, False), BACKWARD_GRIDS, (1, 2), (2, 1, 3), (1, 2, 4)
    ):
        tile_m, tile_n, warps, sdp, dkv, dq = grid
        yield Fp32Backward(tile_m, tile_n, warps, stages, sdp, dkv, dq, parts, blocks, split, False)
    # Ordered ones last: they are for deterministic=True, which takes the first deterministic candidate.
    yield from (dataclasses.replace(tuning, ordered=True) for tuning in guesses)
