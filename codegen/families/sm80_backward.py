"""The mma.sync backward in 16 bits: a block owns a key tile and walks the query tiles that see it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.limits import kept_tiles, up
from attnforge.codegen.families.mma import (
    REGISTERS_BESIDES,
    WarpGrids,
    common_constants,
    pitch,
    require_fit,
    require_grids,
    require_one_order,
    require_problem,
    span_bytes,
    write,
)
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Launch, Plan
from attnforge.codegen.spec import Problem, Spec, knob


@dataclass(frozen=True)
class Sm80Backward(WarpGrids):
    """Tuning of the mma.sync backward kernel (one block owns a key tile and walks the query tiles)."""

    tile_m: int = knob("m", "query rows per step of the main loop")
    tile_n: int = knob("n", "keys per block")
    warps: int = knob("w", "warps per block")
    stages: int = knob("s", "shared-memory buffers for Q and for dO")
    warps_sdp: int = knob("a", "warps along the queries in S and dP; the rest split the keys")
    warps_dkv: int = knob("b", "warps along the keys in dK and dV; the rest split head_dim")
    warps_dq: int = knob("c", "warps along the queries in dQ; the rest split head_dim")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in fp32 memory), not per kv head")
    deterministic: bool = knob(
        "o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run", was="ordered"
    )


# ---- Plan


@dataclass(frozen=True)
class Tiles:
    """Columns that are computed, and bytes between rows in shared memory (and whether these are swizzled).

    Columns are padded until the warps can share them; what is computed beyond head_dim is dropped.
    """

    columns: int
    columns_v: int
    row: tuple[int, bool]  # of Q and K
    row_v: tuple[int, bool]  # of dO and V
    row_score: tuple[int, bool]  # of P and dS

    @staticmethod
    def of(spec: Spec, t: Sm80Backward) -> Tiles:
        p = spec.problem
        split_dkv, split_dq = t.warps // t.warps_dkv, t.warps // t.warps_dq
        columns = up(p.head_dim, 8 * columns_unit(t))
        row = pitch(columns, _swizzles(columns, split_dkv, split_dq))
        if not p.dim_v:
            return Tiles(columns, columns, row, row, pitch(t.tile_n))
        columns_v = up(p.head_dim_v, 8 * split_dkv)
        row_v = pitch(columns_v, _swizzles(columns_v, split_dkv))
        return Tiles(columns, columns_v, row, row_v, pitch(t.tile_n))

    def shared(self, spec: Spec, t: Sm80Backward) -> int:
        """Bytes of shared memory."""
        tiles = (t.tile_n + t.stages * t.tile_m) * (self.row[0] + self.row_v[0])
        scores, stats = 2 * t.tile_m * self.row_score[0], t.stages * t.tile_m * 8
        return tiles + scores + stats + span_bytes(spec)

    def registers(self, t: Sm80Backward, kept: int) -> int:
        """Of a thread, for dK and dV, and beside them S and dP, with the `kept` tiles of a score, or dQ."""
        threads = t.warps * 32
        dkv = t.tile_n * (self.columns + self.columns_v) // threads
        return dkv + max((2 + kept) * (t.tile_m * t.tile_n // threads), t.tile_m * self.columns // threads)


def plan(spec: Spec) -> Plan:
    """Plan of a backward spec of this family, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, Sm80Backward)
    require_problem(spec)
    require_grids(t, 16)
    require_one_order(t.split_heads, t.deterministic)
    tiles, threads = Tiles.of(spec, t), t.warps * 32
    shared, registers = tiles.shared(spec, t), tiles.registers(t, kept_tiles(spec.problem))
    require_fit(spec, shared, registers, threads)
    return Plan(
        spec=spec,
        template="sm80/backward.cu.jinja",
        suffix=".cu",
        launches=_launches(spec, t, shared),
        schedule=schedule_launches(spec, "tiles_n", t.deterministic),
        owner="n",
        registers=registers + REGISTERS_BESIDES,
        dq_accum=True,
        dkv_accum=t.split_heads,
        dq_semaphore=t.deterministic,
        columns=tiles.columns,
        columns_v=tiles.columns_v,
        deterministic=t.deterministic,
        bits="k" if spec.problem.packed else "",
        constants=_constants(spec, t, tiles, shared),
    )


def _launches(spec: Spec, t: Sm80Backward, shared: int) -> tuple[Launch, ...]:
    queries, heads = ("tiles_m", "batch", "heads_q"), "heads_q" if t.split_heads else "heads_kv"
    threads = t.warps * 32
    launches = [
        Launch(f"{spec.symbol}_preprocess", queries, threads),
        Launch(spec.symbol, ("tiles_n", "batch", heads), threads, shared),
        Launch(f"{spec.symbol}_postprocess", queries, threads),
    ]
    if t.split_heads:
        launches.append(Launch(f"{spec.symbol}_postprocess_dkv", ("tiles_n", "batch", "heads_kv"), threads))
    return tuple(launches)


def _constants(spec: Spec, t: Sm80Backward, tiles: Tiles, shared: int) -> dict[str, Any]:
    p, own = spec.problem, bool(spec.problem.dim_v)
    loads = {"q_tile": ("kTileM", False), "kv_tile": ("kTileN", False)}
    loads_v = {"do_tile": ("kTileM", True), "v_tile": ("kTileN", True)} if own else {}
    common = common_constants(spec, t.warps * 32, t.stages, loads | loads_v)
    chunks_v = up(p.head_dim_v, 8) // 8
    writes = [write("store_pair", p.head_dim, False, tiles.columns)]
    if own:
        writes.append(write("store_pair_v", p.head_dim_v, True, tiles.columns_v))
    return {
        **common,
        "shared_bytes": shared,
        "columns": tiles.columns,
        "columns_v": tiles.columns_v,
        "pitch": tiles.row[0],
        "swizzle": tiles.row[1],
        "pitch_v": tiles.row_v[0],
        "swizzle_v": tiles.row_v[1],
        "score_pitch": tiles.row_score[0],
        "score_swizzle": tiles.row_score[1],
        "half_qk": common["half_step"],
        "half_v": chunks_v % 2 != 0,
        "half_step": common["half_step"] or chunks_v % 2 != 0,
        **_odd(t, tiles),
        "row_lanes": 1 << (chunks_v - 1).bit_length(),  # threads per row in _preprocess, one chunk each
        "vector_red": p.arch.since_hopper,  # red.global.add.v4.f32 needs sm_90
        "writes": writes,
    }


def _odd(t: Sm80Backward, tiles: Tiles) -> dict[str, bool]:
    """Whose columns leave a warp an odd number of n8 fragments: the last one has no neighbour to be read with."""
    odd = {
        "odd_dkv": tiles.columns // (t.warps // t.warps_dkv) // 8 % 2 != 0,
        "odd_dv": tiles.columns_v // (t.warps // t.warps_dkv) // 8 % 2 != 0,
        "odd_dq": tiles.columns // (t.warps // t.warps_dq) // 8 % 2 != 0,
    }
    return {**odd, "odd_pair": any(odd.values())}


def columns_unit(t: Sm80Backward) -> int:
    """Columns of Q and K come in multiples of this many n8 fragments, which warps share evenly."""
    return math.lcm(t.warps // t.warps_dkv, t.warps // t.warps_dq)


def _swizzles(columns: int, *splits: int) -> bool:
    """May rows be swizzled? `tile_chunk` counts chunks from the first one of a warp by XOR, which must not carry."""
    frags = [columns // split // 8 for split in splits]
    return all(n % 8 == 0 or 8 % n == 0 for n in frags)


# ---- Space

# Tried first when nothing was measured: (largest head_dim, tuning), in order of preference. The shapes are
# FlashAttention-2's choices for these head dims; large tiles come first, smaller ones serve 99 KB targets.
GUESSES = (
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
# (tile_m, tile_n), and (warps, warps_sdp, warps_dkv, warps_dq). Other grids of the same
# tile differ by a few percent at most (docs/performance.md).
TILES = ((64, 128), (64, 64), (128, 128), (128, 64), (32, 128), (32, 64))
GRIDS = (
    (8, 2, 2, 2),
    (8, 2, 4, 2),
    (8, 2, 4, 4),
    (8, 4, 8, 4),
    (4, 2, 2, 2),
    (4, 2, 4, 4),
    (4, 4, 4, 4),
)


def tunings(problem: Problem) -> Iterator[Sm80Backward]:
    """What a search tries, best guess first; deterministic ones last: such calls take the first."""
    guesses = _guesses(problem)
    yield from guesses
    for (tile_m, tile_n), stages, split in product(TILES, (2, 1), (True, False)):
        for warps, sdp, dkv, dq in GRIDS:
            yield Sm80Backward(tile_m, tile_n, warps, stages, sdp, dkv, dq, split, False)
    yield from (dataclasses.replace(tuning, deterministic=True) for tuning in guesses)


def _guesses(problem: Problem) -> list[Sm80Backward]:
    """Guesses, those last that would pad head_dim much."""
    guesses = [tuning for limit, tuning in GUESSES if problem.largest_dim <= limit]
    least = up(problem.head_dim, 8)
    return sorted(guesses, key=lambda t: up(problem.head_dim, 8 * columns_unit(t)) > PADDING * least)


BACKWARD = Family(
    Sm80Backward,
    plan,
    tunings,
    honours=frozenset({"align", "dim_v", "intervals", "planes", "mask_mod", "score"}),
)
