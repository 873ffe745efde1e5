"""The mma.sync forward in 16 bits: a block of warps for each query tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.limits import (
    COMBINE_THREADS,
    HEAD_DIM_LIMIT,
    blocks_of_multiprocessor,
    require_positive,
    require_split,
    up,
)
from attnforge.codegen.families.mma import (
    REGISTERS_BESIDES,
    common_constants,
    forward_plan,
    pitch,
    require_fit,
    require_problem,
    write,
)
from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import Mask, Problem, Spec, Tuning, knob

WIDE_HEAD_DIM_LIMIT = 512  # of kernels whose warps share the columns of O


@dataclass(frozen=True)
class Sm80Forward(Tuning):
    """Tuning of the mma.sync forward kernel."""

    tile_m: int = knob("m", "query rows per block")
    tile_n: int = knob("n", "keys per step of the main loop")
    warps: int = knob("w", "warps per block; each owns tile_m / warps query rows")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    q_in_regs: bool = knob("q", "keep the Q fragments in registers instead of shared memory")
    splits: int = knob(
        "k",
        "for few queries: warps of a block that split each key tile; blocks split the keys, too; 0: off",
        default=0,
        quiet=True,
    )
    o_splits: int = knob(
        "o", "with splits 1, warps that split the columns of O and the keys of S", default=1, quiet=True
    )


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, Sm80Forward)
    p = spec.problem
    require_problem(spec, HEAD_DIM_LIMIT if t.o_splits == 1 else WIDE_HEAD_DIM_LIMIT)
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.o_splits)
    splits = max(t.splits, t.o_splits)
    require_split("warps", t.warps, splits, 1, "splits")
    require_split("tile_m", t.tile_m, t.warps // splits, 16, "warps / splits")
    require_split("tile_n", t.tile_n, splits, 16, "k16 steps of splits")
    _require_o_splits(p, t)
    columns, columns_v = up(p.head_dim, 8), up(p.head_dim_v, 8)
    (row, swizzle), (row_v, swizzle_v) = pitch(columns), pitch(columns_v)
    q_bytes, kv_bytes = t.tile_m * row, t.stages * t.tile_n * (row + row_v)
    if t.q_in_regs and q_bytes > kv_bytes:
        raise Infeasible(
            f"q_in_regs: Q passes through the shared memory of K and V, but takes {q_bytes} bytes, "
            f"{q_bytes - kv_bytes} more than they have"
        )
    shared = kv_bytes if t.q_in_regs else q_bytes + kv_bytes
    score_row, score_swizzle = pitch(t.tile_n)
    if t.o_splits > 1:  # P, and row maxima of each warp
        shared += t.tile_m * (score_row + t.o_splits * 4)
    frags = t.tile_m // (t.warps // splits) // 16
    registers = frags * (
        columns_v // t.o_splits // 8 * 4
        + t.tile_n // splits // 8 * 4
        + (up(columns, 16) // 4 if t.q_in_regs else 4)
    )
    require_fit(spec, shared, registers, t.warps * 32)
    own = bool(p.dim_v)
    loads = {"q_tile": ("kTileM", False), "kv_tile": ("kTileN", False)}
    loads |= {"v_tile": ("kTileN", True)} if own else {}
    constants = common_constants(spec, t.warps * 32, t.stages, loads)
    constants |= {
        "shared_bytes": shared,
        "pitch": row,
        "swizzle": swizzle,
        "pitch_v": row_v,
        "swizzle_v": swizzle_v,
        "pairs_d": columns_v // 16,
        "odd_pair": columns_v % 16 != 0,
        "score_pitch": score_row,
        "score_swizzle": score_swizzle,
        "writes": [write("store_pair", p.head_dim_v, own, columns_v)],
    }
    more = _split(spec, t, shared, registers, constants) if t.splits else {}
    return forward_plan(spec, "forward", t.warps * 32, shared, registers, constants, **more)


def _require_o_splits(p: Problem, t: Sm80Forward) -> None:
    """Infeasible unless the warps can share the columns of O, if they are to."""
    if t.o_splits == 1:
        return
    if t.splits != 1 or t.stages != 1 or t.q_in_regs:
        raise Infeasible("o_splits: needs splits 1, stages 1 and q_in_regs 0")
    require_split("head_dim", p.head_dim_v, t.o_splits, 64, "o_splits")
    require_split("head_dim", p.head_dim, 1, 16, "o_splits")


def _split(
    spec: Spec, t: Sm80Forward, shared: int, registers: int, constants: dict[str, Any]
) -> dict[str, Any]:
    """Fields of the plan of a kernel that splits the keys; adds to `constants`. `registers`: of a thread's tiles."""
    p, columns = spec.problem, up(spec.problem.head_dim_v, 8)
    if p.in_planes or p.score:
        raise Infeasible(
            "splits: the q heads of a kv head share tiles, which takes one mask for all of them and no score"
        )
    results = t.splits * t.tile_m * (columns + 1) * 4
    if results > shared:
        raise Infeasible(
            f"splits: the warps' results take {results} bytes, {results - shared} more than its shared memory has"
        )
    overlaps = p.arch.since_hopper
    constants |= {"combine_threads": COMBINE_THREADS, "overlaps": overlaps}
    grid = ("tiles_packed", "kv_splits", "heads_kv", "batch")
    combine = Launch(f"{spec.symbol}_combine", ("combine_blocks",), COMBINE_THREADS, overlaps=overlaps)
    return {
        "launches": (Launch(spec.symbol, grid, t.warps * 32, shared), combine),
        "columns_v": columns,
        "split_blocks": blocks_of_multiprocessor(p.arch, t.warps * 32, shared, registers + REGISTERS_BESIDES),
    }


# ---- Space

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference. The shapes are
# FlashAttention-2's choices for these head dims; large tiles come first, smaller ones serve 99 KB targets.
GUESSES = (
    (64, Sm80Forward(128, 128, 4, 1, False)),
    (128, Sm80Forward(128, 64, 4, 2, False)),
    (128, Sm80Forward(128, 64, 4, 1, False)),
    (256, Sm80Forward(64, 64, 4, 1, False)),
    (256, Sm80Forward(64, 32, 4, 1, False)),
)
# Rows aligned to 2 bytes pass through registers: more warps, which hold fewer of them and wait for each other's. Unions
# of intervals, scores that read tensors beside others, and those with a second function for small scores do, too.
MORE_WARPS = (
    (128, Sm80Forward(128, 64, 8, 1, False)),
    (256, Sm80Forward(128, 32, 8, 1, False)),
)


# For head dims whose O does not fit the registers of the warps that have its rows; the last serves 99 KB targets.
WIDE = (
    Sm80Forward(64, 64, 8, 1, False, 1, 4),
    Sm80Forward(64, 32, 8, 1, False, 1, 2),
    Sm80Forward(32, 32, 4, 1, False, 1, 2),
)


def tunings(problem: Problem) -> Iterator[Sm80Forward]:
    """What a search tries, best guess first."""
    if problem.largest_dim > HEAD_DIM_LIMIT:
        yield from WIDE
        return
    yield from (tuning for limit, tuning in _guesses(problem) if problem.largest_dim <= limit)
    for tile_m, tile_n, warps, stages, q_in_regs in product(
        (128, 64, 256), (64, 128, 32, 96), (4, 8), (2, 1, 3), (False, True)
    ):
        yield Sm80Forward(tile_m, tile_n, warps, stages, q_in_regs)


def _guesses(problem: Problem) -> tuple[tuple[int, Sm80Forward], ...]:
    """(largest head_dim, tuning): smaller tiles where rows end within a chunk and where bits take registers."""
    busy_score = (problem.score.tensors and len(problem.captured) > 1) or problem.score.near is not None
    if problem.align == 2 or problem.unions or busy_score:
        return MORE_WARPS + GUESSES
    busy = problem.head_dim % 8 or problem.head_dim_v % 8 or problem.mask is Mask.DENSE
    return GUESSES[1:] if busy else GUESSES


# Those that split the keys: (largest head_dim, tuning). Three stages keep 64 KiB of a block in flight where two blocks
# fit; the others serve 99 KB targets.
SPLITTING = (
    (128, Sm80Forward(16, 64, 4, 3, False, 4)),
    (128, Sm80Forward(16, 64, 4, 2, False, 4)),
    (128, Sm80Forward(32, 64, 4, 3, False, 2)),
    (128, Sm80Forward(32, 64, 4, 2, False, 2)),
    (128, Sm80Forward(64, 64, 4, 3, False, 1)),
    (128, Sm80Forward(64, 64, 4, 2, False, 1)),
    (128, Sm80Forward(128, 64, 4, 2, False, 1)),
    (256, Sm80Forward(16, 64, 4, 2, False, 4)),
    (256, Sm80Forward(16, 32, 2, 2, False, 2)),
    (256, Sm80Forward(64, 32, 4, 2, False, 1)),
    (256, Sm80Forward(64, 32, 4, 1, False, 1)),
)


MEMORY_BOUND = 64  # query rows of a kv head: with so few, loads of K and V take longer than products


def split_tunings(problem: Problem, fewest: int, most: int) -> Iterator[Sm80Forward]:
    """Kernels that split the keys: the smallest tiles that hold the rows of a kv head first, else the largest.

    While memory is the bound, a tile holds those of the longest call; larger ones, of the shortest.
    """
    if problem.largest_dim > HEAD_DIM_LIMIT:
        yield from WIDE  # they all split the keys
        return
    rows = most if most <= MEMORY_BOUND else fewest
    fitting = (tuning for limit, tuning in SPLITTING if problem.largest_dim <= limit)
    yield from sorted(fitting, key=lambda t: (False, t.tile_m) if t.tile_m >= rows else (True, -t.tile_m))


FORWARD = Family(
    Sm80Forward,
    plan,
    tunings,
    honours=frozenset({"align", "dim_v", "intervals", "planes", "mask_mod", "score"}),
    split_space=split_tunings,
)
