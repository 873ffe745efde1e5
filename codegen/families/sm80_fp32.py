"""The float32 kernels of the mma.sync family, both passes: tf32 splits on tensor cores, or fp32 fused multiply-adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.limits import (
    REGISTER_FILE,
    REGISTER_LIMIT,
    RESERVED,
    SHARED_LIMIT,
    kept_tiles,
    require_fp32,
    require_positive,
    require_split,
    up,
)
from attnforge.codegen.families.mma import (
    REGISTERS_BESIDES,
    WarpGrids,
    forward_plan,
    require_grids,
    require_one_order,
    span_bytes,
)
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, has_score_bins
from attnforge.codegen.spec import Arch, Problem, Spec, Tuning, knob

# Arguments of one copy function of fp32_tile.cuh.jinja: its suffix, the names of the tile's rows and columns, copies
# per row, threads that share a row.
Load = tuple[str, str, str, int, int]


@dataclass(frozen=True)
class Fp32Forward(Tuning):
    """Tuning of the float32 forward kernels: mma.sync on tf32 splits, or FP32 cores (o_splits = 0)."""

    tile_m: int = knob("m", "query rows per block")
    tile_n: int = knob("n", "keys per step of the main loop")
    warps: int = knob("w", "warps per block; each owns tile_m / warps query rows")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    o_splits: int = knob(
        "p",
        "groups of columns of O that a step computes one after the other; 0: FP32 cores, no tensor cores",
        was="parts",
    )
    blocks: int = knob("b", "resident blocks per multiprocessor, for which registers are limited")


@dataclass(frozen=True)
class Fp32Backward(WarpGrids):
    """Tuning of the float32 backward kernel (one block owns a key tile and walks the query tiles)."""

    tile_m: int = knob("m", "query rows per step of the main loop")
    tile_n: int = knob("n", "keys per block")
    warps: int = knob("w", "warps per block")
    stages: int = knob("s", "shared-memory buffers for Q and for dO")
    warps_sdp: int = knob("a", "warps along the queries in S and dP; the rest split the keys")
    warps_dkv: int = knob("c", "warps along the keys in dK and dV; the rest split head_dim")
    warps_dq: int = knob("d", "warps along the queries in dQ; the rest split head_dim")
    grad_splits: int = knob(
        "p",
        "groups of a warp's columns of dK, dV and dQ that a step computes one after the other",
        was="parts",
    )
    blocks: int = knob("b", "resident blocks per multiprocessor, for which registers are limited")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in memory), not per kv head")
    deterministic: bool = knob(
        "o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run", was="ordered"
    )


# ---- Plans


def padded(width: int) -> int:
    """Columns of a tile `width` columns wide, in whole groups of 8."""
    return up(width, 8)


def pitch(width: int) -> int:
    """Floats between rows of such a tile: 8 rows start in 8 different groups of 4 banks."""
    return padded(width) + 4


def _load(spec: Spec, suffix: str, rows: str, width: int, warps: int) -> Load:
    """The copy function of a tile with rows of `width` floats.

    The threads are a power of two, so that no thread divides; as few as possible of their copies fall past the row.
    """
    copies = -(-width * 4 // spec.problem.align)
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if size <= warps * 32]
    threads = min(sizes, key=lambda size: -(-copies // size) * size)  # the largest of equals
    return suffix, rows, "kHeadDimV" if suffix in ("v_tile", "do_tile") else "kHeadDim", copies, threads


def _common(spec: Spec, loads: tuple[Load, ...], stages: int) -> dict[str, Any]:
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    return {
        "dim": dim,
        "dim_v": dim_v,
        "padded": padded(dim),
        "padded_v": padded(dim_v),
        "pitch": pitch(dim),
        "pitch_v": pitch(dim_v),
        "pitches": {"q_tile": "Pitch", "k_tile": "Pitch", "v_tile": "PitchV", "do_tile": "PitchV"},
        "loads": loads,
        "even": dim % 2 == 0 and dim_v % 2 == 0,
        "tails": bool(dim % 8 or dim_v % 8),
        "pending": max(0, stages - 2),
        "tensor_cores": True,
    }


def plan_forward(spec: Spec) -> Plan:
    """Plan of a forward spec of this family, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, Fp32Forward)
    require_fp32(spec)
    return _mma(spec, t) if t.o_splits else _ffma(spec, t)


def _mma(spec: Spec, t: Fp32Forward) -> Plan:
    """The kernel that multiplies tf32 splits of floats on tensor cores."""
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.o_splits, t.blocks)
    require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "two n8 fragments")
    groups = padded(dim_v) // 8
    per_split = _split("o_splits", "O", groups, t.o_splits)
    shared = 4 * (t.tile_m * pitch(dim) + t.stages * t.tile_n * (pitch(dim) + pitch(dim_v)))
    frags = t.tile_m // t.warps // 16
    # O and S, beside them the other sums of S or both of a split of O, and the tf32 splits of a left operand.
    registers = frags * 4 * (groups + t.tile_n // 8 + max(t.tile_n // 8, 2 * per_split) + 2)
    _require_fit(spec, shared, registers, t.warps * 32, t.blocks)
    constants = _common(spec, _qkv_loads(spec, t), t.stages) | {
        "shared_bytes": shared,
        "frags_split": per_split,
    }
    return forward_plan(spec, "forward_fp32", t.warps * 32, shared, registers, constants)


def _ffma(spec: Spec, t: Fp32Forward) -> Plan:
    """The kernel that multiplies on FP32 cores: a thread owns rows x (keys and columns of O)."""
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    if spec.problem.score:
        raise Infeasible(
            "score: the forward kernel on FP32 cores (o_splits 0) supports no score function; set o_splits to 1 or more"
        )
    if spec.problem.mask_mod:
        raise Infeasible(
            "mask_mod: the forward kernel on FP32 cores (o_splits 0) supports no mask function; "
            "set o_splits to 1 or more"
        )
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.blocks)
    require_split("tile_m", t.tile_m, t.warps, 4, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "two keys of 8 threads")
    chunk = 32 if t.tile_n % 32 == 0 else 16
    shared = 4 * (t.stages * t.tile_n * (pitch(dim) + pitch(dim_v)) + t.tile_m * (pitch(dim) + chunk + 8))
    rows, keys, columns = t.tile_m // t.warps // 4, t.tile_n // 8, padded(dim_v) // 8
    # S, O, row_max and row_sum; operands: four floats of each row and key, or of each row and a row of V.
    registers = rows * (keys + columns + 2) + max(4 * (rows + keys), 4 * rows + columns)
    _require_fit(spec, shared, registers, t.warps * 32, t.blocks)
    constants = _common(spec, _qkv_loads(spec, t), t.stages)
    constants |= {"shared_bytes": shared, "chunk": chunk, "tensor_cores": False}
    return forward_plan(spec, "forward_ffma", t.warps * 32, shared, registers, constants)


def _qkv_loads(spec: Spec, t: Fp32Forward) -> tuple[Load, ...]:
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    return (
        _load(spec, "q_tile", "kTileM", dim, t.warps),
        _load(spec, "k_tile", "kTileN", dim, t.warps),
        _load(spec, "v_tile", "kTileN", dim_v, t.warps),
    )


def plan_backward(spec: Spec) -> Plan:
    """Plan of a backward spec of this family, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, Fp32Backward)
    require_fp32(spec)
    _check_grids(t)
    frags, threads = _gradient_frags(spec, t), t.warps * 32
    shared, registers = _backward_shared(spec, t), _backward_registers(t, frags, kept_tiles(spec.problem))
    _require_fit(spec, shared, registers, threads, t.blocks)
    return Plan(
        spec=spec,
        template="sm80/backward_fp32.cu.jinja",
        suffix=".cu",
        launches=_backward_launches(spec, t, shared),
        schedule=schedule_launches(spec, "tiles_n", t.deterministic),
        owner="n",
        registers=registers + REGISTERS_BESIDES,
        bits="k" if spec.problem.packed else "",
        dq_semaphore=t.deterministic,
        deterministic=t.deterministic,
        constants=_backward_constants(spec, t, frags) | {"shared_bytes": shared},
    )


def _backward_launches(spec: Spec, t: Fp32Backward, shared: int) -> tuple[Launch, ...]:
    queries, heads = ("tiles_m", "batch", "heads_q"), "heads_q" if t.split_heads else "heads_kv"
    threads = t.warps * 32
    launches = [
        Launch(f"{spec.symbol}_preprocess", queries, threads),
        Launch(spec.symbol, ("tiles_n", "batch", heads), threads, shared),
    ]
    if has_score_bins(spec.problem, t.deterministic):
        launches.append(Launch(f"{spec.symbol}_postprocess", queries, threads))
    return tuple(launches)


def _gradient_frags(spec: Spec, t: Fp32Backward) -> dict[str, int]:
    """n8 fragments in a warp's share of the columns of each gradient."""
    groups, groups_v = (padded(width) // 8 for width in (spec.problem.head_dim, spec.problem.head_dim_v))
    warps_dkv, warps_dq = t.warps // t.warps_dkv, t.warps // t.warps_dq
    frags = {"dk": -(-groups // warps_dkv), "dv": -(-groups_v // warps_dkv), "dq": -(-groups // warps_dq)}
    _split("grad_splits", "a gradient", max(frags.values()), t.grad_splits)
    return frags


def _per_split(frags: dict[str, int], t: Fp32Backward) -> dict[str, int]:
    """Those of them in one of the grad_splits."""
    return {name: -(-number // t.grad_splits) for name, number in frags.items()}


def _backward_shared(spec: Spec, t: Fp32Backward) -> int:
    """Bytes: K, V and buffers of Q and dO; P and dS; buffers of row_stats; the bounds of spans."""
    pitches = pitch(spec.problem.head_dim) + pitch(spec.problem.head_dim_v)
    floats = (t.tile_n + t.stages * t.tile_m) * pitches + 2 * t.tile_m * (t.tile_n + 4)
    return 4 * floats + t.stages * t.tile_m * 8 + span_bytes(spec)


def _backward_registers(t: Fp32Backward, frags: dict[str, int], kept: int) -> int:
    """Of a thread: dK and dV, and beside them S, dP and its other sums, or both sums of a split of a gradient."""
    frags_n, frags_m, per_split = (
        t.tile_n // t.warps_dkv // 16,
        t.tile_m // t.warps_dq // 16,
        _per_split(frags, t),
    )
    sdp = (3 + kept) * t.tile_m * t.tile_n // (t.warps * 32)
    sums = 8 * max(frags_n * max(per_split["dk"], per_split["dv"]), frags_m * per_split["dq"])
    return 4 * frags_n * (frags["dk"] + frags["dv"]) + max(sdp, sums)


def _backward_constants(spec: Spec, t: Fp32Backward, frags: dict[str, int]) -> dict[str, Any]:
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    loads = (
        _load(spec, "q_tile", "kTileM", dim, t.warps),
        _load(spec, "do_tile", "kTileM", dim_v, t.warps),
        _load(spec, "k_tile", "kTileN", dim, t.warps),
        _load(spec, "v_tile", "kTileN", dim_v, t.warps),
    )
    return {
        **_common(spec, loads, t.stages),
        **{f"frags_{name}": number for name, number in frags.items()},
        **{f"split_{name}": number for name, number in _per_split(frags, t).items()},
        "vector_red": spec.problem.arch.since_hopper and dim % 2 == 0 and dim_v % 2 == 0,
    }


def _check_grids(t: Fp32Backward) -> None:
    require_positive(t.grad_splits, t.blocks)
    require_grids(t, 8)
    require_one_order(t.split_heads, t.deterministic)
    if (frags := t.tile_n // (t.warps // t.warps_sdp) // 8) % 4 and frags not in (1, 2):
        raise Infeasible(
            f"tile_n {t.tile_n}: a warp has {8 * frags} keys, but must have 8, 16 or a multiple of 32, the keys in a "
            "word of the mask"
        )


def _split(knob_name: str, what: str, groups: int, splits: int) -> int:
    """Groups of 8 columns in each of `splits` splits, the last of which may be smaller but not empty."""
    size = -(-groups // splits)
    if -(-groups // size) != splits:
        raise Infeasible(
            f"{knob_name} {splits}: {what} has {groups} groups of 8 columns, which leave the last split empty"
        )
    return size


def _require_fit(spec: Spec, shared: int, registers: int, threads: int, blocks: int) -> None:
    arch = spec.problem.arch
    most = 1024 if blocks == 1 else 1536 if arch in (Arch.SM86, Arch.SM89, Arch.SM120) else 2048
    if threads * blocks > most:
        raise Infeasible(
            f"blocks {blocks}: {blocks} x {threads} threads are more than {most} on {arch.value}"
        )
    limit = (SHARED_LIMIT[arch] + RESERVED) // blocks - RESERVED
    if shared > limit:
        raise Infeasible(
            f"shared memory: {shared} bytes, {shared - limit} more than each of {blocks} blocks "
            f"on {arch.value} has ({limit})"
        )
    fits = min(REGISTER_LIMIT, REGISTER_FILE // (threads * blocks) // 8 * 8) - REGISTERS_BESIDES
    if registers > fits:
        raise Infeasible(
            f"registers: the tiles alone take {registers} per thread, {registers - fits} more than are available"
        )


# ---- Spaces

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


T = TypeVar("T", Fp32Forward, Fp32Backward)


def _guesses(problem: Problem, table: tuple[tuple[int, T], ...]) -> list[T]:
    """Those for the head_dim. For sm_100 ptxas 13.0 spills registers of the first ones up to 64."""
    found = [tuning for limit, tuning in table if problem.head_dim <= limit]
    return found[1:] if problem.arch is Arch.SM100 and problem.head_dim <= 64 else found


def forward_tunings(problem: Problem) -> Iterator[Fp32Forward]:
    """What a search of the forward tries, best guess first."""
    yield from _guesses(problem, FORWARD_GUESSES)
    for tile_n, (tile_m, warps), stages, blocks, o_splits in product(
        (32, 64, 16), ((128, 4), (64, 4), (256, 8), (128, 8), (32, 2)), (2, 1), (2, 3, 1, 4), (1, 2, 4, 8)
    ):
        yield Fp32Forward(tile_m, tile_n, warps, stages, o_splits, blocks)
    # FP32 cores, for GPUs whose tensor cores are no faster in tf32 than these, such as GeForce.
    for (tile_m, warps), tile_n, stages, blocks in product(
        ((128, 8), (128, 4), (64, 4), (64, 2), (256, 8), (32, 2)), (64, 32, 16), (1, 2), (1, 2, 3)
    ):
        yield Fp32Forward(tile_m, tile_n, warps, stages, 0, blocks)


def backward_tunings(problem: Problem) -> Iterator[Fp32Backward]:
    """What a search of the backward tries, best guess first; deterministic ones last: such calls take the first."""
    guesses = _guesses(problem, BACKWARD_GUESSES)
    yield from guesses
    for split, grid, stages, blocks, grad_splits in product(
        (True, False), BACKWARD_GRIDS, (1, 2), (2, 1, 3), (1, 2, 4)
    ):
        tile_m, tile_n, warps, sdp, dkv, dq = grid
        yield Fp32Backward(tile_m, tile_n, warps, stages, sdp, dkv, dq, grad_splits, blocks, split, False)
    yield from (dataclasses.replace(tuning, deterministic=True) for tuning in guesses)


HONOURED = frozenset({"align", "dim_v", "intervals", "planes", "mask_mod", "score"})
FORWARD = Family(Fp32Forward, plan_forward, forward_tunings, HONOURED)
BACKWARD = Family(Fp32Backward, plan_backward, backward_tunings, HONOURED)
