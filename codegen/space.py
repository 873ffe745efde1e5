"""The search space: every feasible spec of a problem, the one to try first in front."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product

from attnforge.codegen.plan import Infeasible, make_plan
from attnforge.codegen.plan_sm80 import up
from attnforge.codegen.plan_sm80_backward import columns_unit
from attnforge.codegen.spec import TUNINGS, Direction, Mask, Problem, Spec
from attnforge.codegen.tuning import Sm80Backward, Sm80Forward, Sm90Backward, Sm90Forward, Tuning

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference. The shapes are
# FlashAttention-2's choices for these head dims; large tiles come first, smaller ones serve 99 KB targets.
FORWARD_GUESSES = (
    (64, Sm80Forward(128, 128, 4, 1, False)),
    (128, Sm80Forward(128, 64, 4, 2, False)),
    (128, Sm80Forward(128, 64, 4, 1, False)),
    (256, Sm80Forward(64, 64, 4, 1, False)),
    (256, Sm80Forward(64, 32, 4, 1, False)),
)
# Rows aligned to 2 bytes pass through registers: more warps, which hold fewer of them and wait for each other's.
UNALIGNED_GUESSES = (
    (128, Sm80Forward(128, 64, 8, 1, False)),
    (256, Sm80Forward(128, 32, 8, 1, False)),
)
BACKWARD_GUESSES = (
    (64, Sm80Backward(64, 128, 8, 2, 4, 8, 4, False, False)),
    (64, Sm80Backward(64, 128, 8, 1, 4, 8, 4, False, False)),
    (128, Sm80Backward(64, 128, 8, 2, 2, 2, 2, False, False)),
    (128, Sm80Backward(64, 128, 8, 2, 2, 8, 4, False, False)),
    (128, Sm80Backward(64, 64, 8, 1, 4, 4, 4, False, False)),
    (128, Sm80Backward(64, 64, 4, 1, 4, 4, 4, False, False)),
    (128, Sm80Backward(32, 64, 4, 1, 2, 4, 2, False, False)),
    (256, Sm80Backward(64, 64, 8, 1, 4, 4, 4, False, False)),
    (256, Sm80Backward(64, 64, 8, 1, 4, 2, 4, False, False)),
    (192, Sm80Backward(32, 64, 8, 1, 2, 4, 2, False, False)),
    (256, Sm80Backward(32, 32, 4, 1, 2, 2, 2, False, False)),
)
# More columns than this, as a multiple of head_dim, are too many to compute only to drop them.
PADDING = 1.2
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

# What won on an H200 (docs/performance.md), up to 96 columns and beyond. Without a table, the first that fits is taken.
# tile_m, tile_n, stages, ping_pong, persistent, counter, q_in_regs, cluster
HOPPER_NARROW = (
    Sm90Forward(192, 96, 3, True, True, True, True),
    Sm90Forward(192, 128, 3, True, True, False, False),
    Sm90Forward(192, 128, 2, True, True, True, False),
    Sm90Forward(192, 96, 3, True, True, False, True),
    Sm90Forward(192, 128, 2, True, True, False, False),
    Sm90Forward(192, 112, 3, True, True, False, True),
)
HOPPER_WIDE = (
    Sm90Forward(192, 80, 3, True, True, True, False),
    Sm90Forward(192, 80, 3, False, True, False, False),
    Sm90Forward(192, 80, 2, True, True, False, False),
    Sm90Forward(128, 128, 2, False, True, True, True),
    Sm90Forward(128, 128, 2, True, True, False, True),
    Sm90Forward(128, 144, 2, False, True, True, True),
    Sm90Forward(128, 160, 2, False, True, False, False),
    Sm90Forward(192, 64, 3, False, True, False, False),
)
# With a third buffer warpgroups may begin later, each at its own diagonal (plan_sm90.py).
HOPPER_CAUSAL_WIDE = Sm90Forward(192, 80, 3, True, True, False, False)
# Without a mask, blocks may share their loads of K and V: behind the guesses, among the eight of a short search.
HOPPER_CLUSTERS = {
    True: (
        Sm90Forward(192, 128, 3, True, True, False, False, 2),
        Sm90Forward(192, 128, 2, True, True, False, False, 2),
    ),
    False: (
        Sm90Forward(192, 64, 3, False, True, False, False, 2),
        Sm90Forward(192, 80, 2, True, True, False, False, 2),
    ),
}
# Dense masks often come in blocks of 64 or 128: tiles that such blocks fill are seen whole or not at all.
# The first two are the winners of blocks of 128 on an H200, half and nine tenths hidden (docs/performance.md).
HOPPER_DENSE = (
    Sm90Forward(128, 128, 2, True, True, False, True),
    Sm90Forward(128, 128, 2, False, True, False, True),
    Sm90Forward(128, 64, 3, False, True, False, False),
    Sm90Forward(128, 128, 2, False, True, False, False),
    Sm90Forward(128, 64, 3, True, True, False, True),
    Sm90Forward(128, 128, 2, True, True, False, False),
    Sm90Forward(64, 64, 3, False, True, False, False),
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
    elif problem.family == "sm90a_fp32":
        from attnforge.codegen import space_fp32

        yield from space_fp32.hopper_forward(problem)
    elif problem.arch.family == "sm90a":
        forward = problem.direction is Direction.FORWARD
        yield from _hopper_forward(problem) if forward else _hopper_backward(problem.head_dim)
    elif problem.direction is Direction.FORWARD:
        yield from (tuning for limit, tuning in _forward_guesses(problem) if problem.largest_dim <= limit)
        for tile_m, tile_n, warps, stages, q_in_regs in product(
            (128, 64, 256), (64, 128, 32, 96), (4, 8), (2, 1, 3), (False, True)
        ):
            yield Sm80Forward(tile_m, tile_n, warps, stages, q_in_regs)
    else:
        backward_guesses = _backward_guesses(problem)
        yield from backward_guesses
        for (tile_m, tile_n), stages, split in product(BACKWARD_TILES, (2, 1), (True, False)):
            for warps, sdp, dkv, dq in BACKWARD_GRIDS:
                yield Sm80Backward(tile_m, tile_n, warps, stages, sdp, dkv, dq, split, False)
        # Ordered ones last: they are for deterministic=True, which takes the first deterministic candidate.
        yield from (dataclasses.replace(tuning, ordered=True) for tuning in backward_guesses)


def _forward_guesses(problem: Problem) -> tuple[tuple[int, Sm80Forward], ...]:
    """(largest head_dim, tuning): smaller tiles where rows end within a chunk and where bits take registers."""
    if problem.align == 2:
        return UNALIGNED_GUESSES + FORWARD_GUESSES
    busy = problem.head_dim % 8 or problem.head_dim_v % 8 or problem.mask is Mask.DENSE
    return FORWARD_GUESSES[1:] if busy else FORWARD_GUESSES


def _backward_guesses(problem: Problem) -> list[Sm80Backward]:
    """Guesses for the mma.sync backward, those last that would pad head_dim much."""
    guesses = [tuning for limit, tuning in BACKWARD_GUESSES if problem.largest_dim <= limit]
    least = up(problem.head_dim, 8)
    return sorted(guesses, key=lambda t: up(problem.head_dim, 8 * columns_unit(t)) > PADDING * least)


def _hopper_forward(problem: Problem) -> Iterator[Tuning]:
    narrow = problem.head_dim <= 96
    if problem.mask is Mask.DENSE:
        yield from HOPPER_DENSE
    if problem.mask is Mask.CAUSAL and not narrow:
        yield HOPPER_CAUSAL_WIDE
    yield from HOPPER_NARROW if narrow else HOPPER_WIDE
    clusters = problem.mask is Mask.FULL  # other masks have none
    if clusters:
        yield from HOPPER_CLUSTERS[narrow]
    tiles = (192, 128, 64) if narrow else (128, 192, 64)
    blocks = ((True, True), (True, False), (False, False))  # persistent, counter
    for cluster, tile_m, tile_n, stages, (persistent, counter), ping_pong, q_in_regs in product(
        (1, 2) if clusters else (1,),
        tiles,
        (128, 160, 144, 112, 96, 80, 64),
        (2, 3),
        blocks,
        (True, False),
        (True, False),
    ):
        yield Sm90Forward(tile_m, tile_n, stages, ping_pong, persistent, counter, q_in_regs, cluster)


def _hopper_backward(head_dim: int) -> Iterator[Tuning]:
    # Narrow heads have registers for lag and for K and V; what does not fit is left out by the plan.
    narrow = head_dim <= 80
    stages = ((4, 4), (4, 3), (3, 3), (2, 2)) if narrow else ((3, 2), (2, 2), (3, 3), (2, 1))
    # Ordered ones last: they are for deterministic=True, which takes the first deterministic candidate.
    for ordered, lag, in_regs, (of_q, of_dout), split in product(
        (False, True),
        (True, False) if narrow else (False,),
        (2, 1, 0) if narrow else (0, 1),
        stages,
        (False, True) if narrow else (True, False),
    ):
        for descending in (False,) if ordered else (False, True):
            yield Sm90Backward(64, 128, of_q, of_dout, lag, in_regs, split, ordered, descending)
