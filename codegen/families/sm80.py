"""The mma.sync forward in 16 bits: a block of warps for each query tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.limits import require_positive, require_split, up
from attnforge.codegen.families.mma import (
    common_constants,
    forward_plan,
    pitch,
    require_fit,
    require_problem,
    write,
)
from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.spec import Mask, Problem, Spec, Tuning, knob


@dataclass(frozen=True)
class Sm80Forward(Tuning):
    """Tuning of the mma.sync forward kernel."""

    tile_m: int = knob("m", "query rows per block")
    tile_n: int = knob("n", "keys per step of the main loop")
    warps: int = knob("w", "warps per block; each owns tile_m / warps query rows")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    q_in_regs: bool = knob("q", "keep the Q fragments in registers instead of shared memory")


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, Sm80Forward)
    p = spec.problem
    require_problem(spec)
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages)
    require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "k16 steps")
    columns, columns_v = up(p.head_dim, 8), up(p.head_dim_v, 8)
    (row, swizzle), (row_v, swizzle_v) = pitch(columns), pitch(columns_v)
    q_bytes, kv_bytes = t.tile_m * row, t.stages * t.tile_n * (row + row_v)
    if t.q_in_regs and q_bytes > kv_bytes:
        raise Infeasible(
            f"q_in_regs: Q passes through the shared memory of K and V, but takes {q_bytes} bytes, "
            f"{q_bytes - kv_bytes} more than they have"
        )
    shared = kv_bytes if t.q_in_regs else q_bytes + kv_bytes
    frags = t.tile_m // t.warps // 16
    registers = frags * (
        columns_v // 8 * 4 + t.tile_n // 8 * 4 + (up(columns, 16) // 4 if t.q_in_regs else 4)
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
        "writes": [write("store_pair", p.head_dim_v, own, columns_v)],
    }
    return forward_plan(spec, "forward", t.warps * 32, shared, registers, constants)


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


def tunings(problem: Problem) -> Iterator[Sm80Forward]:
    """What a search tries, best guess first."""
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


FORWARD = Family(
    Sm80Forward,
    plan,
    tunings,
    honours=frozenset({"align", "dim_v", "intervals", "planes", "mask_mod", "score"}),
)
