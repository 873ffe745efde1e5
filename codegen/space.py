"""The search space: every feasible spec of a problem, the one to try first in front."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product

from attnforge.codegen.plan import Infeasible, make_plan
from attnforge.codegen.spec import (
    TUNINGS,
    Direction,
    Problem,
    Sm80Backward,
    Sm80Forward,
    Sm90Backward,
    Sm90Forward,
    Spec,
    Tuning,
)

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference. The shapes are
# FlashAttention-2's choices for these head dims; large tiles come first, smaller ones serve 99 KB targets.
FORWARD_GUESSES = (
    (64, Sm80Forward(128, 128, 4, 1, False)),
    (128, Sm80Forward(128, 64, 4, 2, False)),
    (128, Sm80Forward(128, 64, 4, 1, False)),
    (256, Sm80Forward(64, 64, 4, 1, False)),
    (256, Sm80Forward(64, 32, 4, 1, False)),
)
BACKWARD_GUESSES = (
    (64, Sm80Backward(64, 128, 8, 2, 4, 8, 4, False, False)),
    (64, Sm80Backward(64, 128, 8, 1, 4, 8, 4, False, False)),
    (128, Sm80Backward(64, 128, 8, 2, 2, 2, 2, False, False)),
    (128, Sm80Backward(64, 128, 8, 2, 2, 8, 4, False, False)),
    (128, Sm80Backward(64, 64, 8, 1, 4, 4, 4, False, False)),
    (128, Sm80Backward(64, 64, 4, 1, 4, 4, 4, False, False)),
    (128, Sm80Backward(32, 64, 4, 1, 2, 4, 2, False, False)),
)
# Of the mma.sync backward: (tile_m, tile_n), and (warps, warps_sdp, warps_dkv, warps_dq). Other grids of the same
# tile differ by a few percent at most (docs/performance.md).
BACKWARD_TILES = ((64, 128), (64, 64), (128, 128), (128, 64), (32, 128), (32, 64))
BACKWARD_GRIDS = (
    (8, 2, 2, 2),
    (8, 2, 4, 2),
    (8, 2, 4, 4),
    (8, 4, 8, 4),
    (4, 2, 2, 2),
    (4, 2, 4, 4),
    (4, 4, 4, 4),
)


def candidates(problem: Problem) -> Iterator[Spec]:
    """Feasible specs of `problem`, best guesses first, none twice; none if the family lacks the direction."""
    if (problem.family, problem.direction) not in TUNINGS:
        return
    seen = set()
    for tuning in _tunings(problem):
        if tuning in seen:
            continue
        seen.add(tuning)
        spec = Spec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        yield spec


def why_infeasible(problem: Problem) -> str:
    """The reason given for the first guess; for the message when `candidates` yields nothing."""
    if (problem.family, problem.direction) not in TUNINGS:
        return f"{problem.arch.value} has no {problem.dtype.value} {problem.direction.value} kernel"
    for tuning in _tunings(problem):
        try:
            make_plan(Spec(problem, tuning))
        except Infeasible as reason:
            return str(reason)
    return "the search space is empty"


def _tunings(problem: Problem) -> Iterator[Tuning]:
    if problem.arch.family == "cpu":
        from attnforge.codegen import space_cpu

        forward = problem.direction is Direction.FORWARD
        yield from (space_cpu.forward if forward else space_cpu.backward)(problem)
    elif problem.family == "sm80_fp32":
        from attnforge.codegen import space_fp32

        forward = problem.direction is Direction.FORWARD
        yield from (space_fp32.forward if forward else space_fp32.backward)(problem)
    elif problem.arch.family == "sm90a":
        forward = problem.direction is Direction.FORWARD
        yield from (_hopper_forward if forward else _hopper_backward)(problem.head_dim)
    elif problem.direction is Direction.FORWARD:
        yield from (tuning for limit, tuning in FORWARD_GUESSES if problem.head_dim <= limit)
        for tile_m, tile_n, warps, stages, q_in_regs in product(
            (128, 64, 256), (64, 128, 32, 96), (4, 8), (2, 1, 3), (False, True)
        ):
            yield Sm80Forward(tile_m, tile_n, warps, stages, q_in_regs)
    else:
        yield from (tuning for limit, tuning in BACKWARD_GUESSES if problem.head_dim <= limit)
        for (tile_m, tile_n), stages, split in product(BACKWARD_TILES, (2, 1), (True, False)):
            for warps, sdp, dkv, dq in BACKWARD_GRIDS:
                yield Sm80Backward(tile_m, tile_n, warps, stages, sdp, dkv, dq, split, False)
        # Ordered ones last: they are for deterministic=True, which takes the first deterministic candidate.
        for limit, tuning in BACKWARD_GUESSES:
            if problem.head_dim <= limit:
                yield dataclasses.replace(tuning, ordered=True)


def _hopper_forward(head_dim: int) -> Iterator[Tuning]:
    tiles = (192, 128, 64) if head_dim <= 96 else (128, 192, 64)
    for tile_m, tile_n, stages, persistent, ping_pong, q_in_regs in product(
        tiles, (128, 160, 144, 112, 96, 80, 64), (2, 3), (True, False), (True, False), (True, False)
    ):
        yield Sm90Forward(tile_m, tile_n, stages, ping_pong, persistent, q_in_regs)


def _hopper_backward(head_dim: int) -> Iterator[Tuning]:
    tiles = (128, 64) if head_dim <= 80 else (64, 128)
    # Ordered ones last: they are for deterministic=True, which takes the first deterministic candidate.
    for ordered, tile_m, stages, stages_dout, overlap, split in product(
        (False, True), tiles, (3, 2), (2, 1), (True, False), (False, True)
    ):
        yield Sm90Backward(tile_m, 128, stages, stages_dout, overlap, split, ordered)
