"""Plans of the mma.sync family: shared-memory layout, registers, launches, and why a spec does not fit."""

from __future__ import annotations

import math
from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import Arch, DType, Fp32Backward, Mask, Sm80Backward, Sm80Forward, Spec

# Shared memory one block may use, bytes (CUDA programming guide, table of compute capabilities).
SHARED_LIMIT = {
    Arch.SM80: 163 * 1024,
    Arch.SM86: 99 * 1024,
    Arch.SM89: 99 * 1024,
    Arch.SM90: 227 * 1024,
    Arch.SM120: 99 * 1024,
}
HEAD_DIM_LIMIT = 256
REGISTER_LIMIT = 255  # of a thread
REGISTER_FILE = 65536  # of a multiprocessor
# Addresses, loop counters, operands in flight: what a kernel of this family uses beyond its tiles.
REGISTERS_BESIDES = 40
SCHEDULE_THREADS = 128  # kScheduleThreads in templates/gpu/schedule.cuh.jinja


def make_plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    p = spec.problem
    if p.dtype is DType.FLOAT32:
        raise Infeasible(f"dtype fp32: the {p.arch.value} kernels take bf16 or fp16")
    for dim in (p.head_dim, p.head_dim_v):
        if not 1 <= dim <= HEAD_DIM_LIMIT:
            raise Infeasible(f"head_dim {dim}: the {p.arch.value} kernels take 1 to {HEAD_DIM_LIMIT}")
    if p.align not in (2, 4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 2, 4, 8 or 16 bytes")
    require_words(spec)
    if isinstance(spec.tuning, Sm80Forward):
        return _forward(spec, spec.tuning)
    assert isinstance(spec.tuning, Sm80Backward)
    return _backward(spec, spec.tuning)


def pitch(width: int, swizzled: bool = True) -> tuple[int, bool]:
    """Bytes between rows of a 16-bit tile `width` columns wide, and whether it is swizzled.

    Rows of a multiple of 128 bytes are swizzled; others get an odd number of 16-byte chunks. Either way the 8 rows
    that ldmatrix reads at once fall into 8 different groups of 4 banks.
    """
    return (width * 2, True) if width % 64 == 0 and swizzled else ((width // 8 | 1) * 16, False)


def up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _common(spec: Spec, threads: int, stages: int, loads: dict[str, tuple[str, bool]]) -> dict[str, Any]:
    """What both directions print; `loads` are the tiles copied: rows, and whether they are of V's kind."""
    p = spec.problem
    chunks = up(p.head_dim, 8) // 8
    return {
        "mma": "bf16" if p.dtype is DType.BFLOAT16 else "f16",
        # Copies say how many elements of a chunk there are, where that is not always all or none.
        "counted": p.head_dim % 8 != 0 or p.head_dim_v % 8 != 0 or p.align == 2,
        "loads": [
            _load(suffix, rows, p.head_dim_v if own else p.head_dim, own, threads)
            for suffix, (rows, own) in loads.items()
        ],
        "pending": max(0, stages - 2),
        "steps_d": chunks // 2,
        "half_step": chunks % 2 != 0,
    }


def _load(suffix: str, rows: str, dim: int, own: bool, threads: int) -> dict[str, Any]:
    v = "V" if own else ""
    return {
        "suffix": suffix,
        "rows": rows,
        "columns": f"kHeadDim{v}",
        "chunks": f"kChunks{v}",
        "layout": "value" if own else "tile",
        "tail": dim % 8 != 0,
        "row_step": threads % (up(dim, 8) // 8) == 0,
    }


def _write(name: str, dim: int, own: bool, columns: int) -> dict[str, Any]:
    """A function that writes results: rows of `dim` elements out of `columns` computed ones."""
    return {
        "name": name,
        "columns": "kHeadDimV" if own else "kHeadDim",
        "odd": dim % 2 != 0,
        "cut": dim != columns,
    }


def _forward(spec: Spec, t: Sm80Forward) -> Plan:
    p = spec.problem
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages)
    require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "k16 steps")
    columns, columns_v = up(p.head_dim, 8), up(p.head_dim_v, 8)
    (row, swizzle), (row_v, swizzle_v) = pitch(columns), pitch(columns_v)
    q_bytes, kv_bytes = t.tile_m * row, t.stages * t.tile_n * (row + row_v)
    if t.q_in_regs and q_bytes > kv_bytes:
        raise Infeasible(
            f"q_in_regs: Q takes {q_bytes} bytes, {q_bytes - kv_bytes} more than the K and V it shares with"
        )
    shared = kv_bytes if t.q_in_regs else q_bytes + kv_bytes
    frags = t.tile_m // t.warps // 16
    registers = frags * (
        columns_v // 8 * 4 + t.tile_n // 8 * 4 + (up(columns, 16) // 4 if t.q_in_regs else 4)
    )
    _require_fit(spec, shared, registers, t.warps * 32)
    own = bool(p.dim_v)
    loads = {"q_tile": ("kTileM", False), "kv_tile": ("kTileN", False)}
    constants = _common(spec, t.warps * 32, t.stages, loads | ({"v_tile": ("kTileN", True)} if own else {}))
    constants |= {
        "shared_bytes": shared,
        "pitch": row,
        "swizzle": swizzle,
        "pitch_v": row_v,
        "swizzle_v": swizzle_v,
        "pairs_d": columns_v // 16,
        "odd_pair": columns_v % 16 != 0,
        "writes": [_write("store_pair", p.head_dim_v, own, columns_v)],
    }
    return Plan(
        spec=spec,
        template="sm80/forward.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, ("tiles_m", "batch", "heads_q"), t.warps * 32, shared),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=registers + REGISTERS_BESIDES,
        deterministic=True,
        bits="k" if p.mask is Mask.DENSE else "",
        constants=constants,
    )


def _backward(spec: Spec, t: Sm80Backward) -> Plan:
    p = spec.problem
    require_grids(t, 16)
    # Columns are padded until the warps can share them; what is computed beyond head_dim is dropped.
    split_dkv, split_dq = t.warps // t.warps_dkv, t.warps // t.warps_dq
    columns = up(p.head_dim, 8 * columns_unit(t))
    columns_v = up(p.head_dim_v, 8 * split_dkv) if p.dim_v else columns
    row, swizzle = pitch(columns, _swizzles(columns, split_dkv, split_dq))
    row_v, swizzle_v = pitch(columns_v, _swizzles(columns_v, split_dkv)) if p.dim_v else (row, swizzle)
    score_row, score_swizzle = pitch(t.tile_n)
    spans = 8 * t.tile_n if p.mask is Mask.SPANS else 0
    parts = (
        (t.tile_n + t.stages * t.tile_m) * (row + row_v),
        2 * t.tile_m * score_row,
        t.stages * t.tile_m * 8,
        spans,
    )
    shared = sum(parts)
    threads = t.warps * 32
    sdp = 2 * (t.tile_m * t.tile_n // threads)
    dkv = t.tile_n * (columns + columns_v) // threads
    registers = dkv + max(sdp, t.tile_m * columns // threads)
    _require_fit(spec, shared, registers, threads)
    own = bool(p.dim_v)
    loads = {"q_tile": ("kTileM", False), "kv_tile": ("kTileN", False)}
    loads_v = {"do_tile": ("kTileM", True), "v_tile": ("kTileN", True)} if own else {}
    dkv_frags, dv_frags = columns // split_dkv // 8, columns_v // split_dkv // 8
    constants = _common(spec, threads, t.stages, loads | loads_v)
    half_v = up(p.head_dim_v, 8) // 8 % 2 != 0
    constants |= {
        "shared_bytes": shared,
        "columns": columns,
        "columns_v": columns_v,
        "pitch": row,
        "swizzle": swizzle,
        "pitch_v": row_v,
        "swizzle_v": swizzle_v,
        "score_pitch": score_row,
        "score_swizzle": score_swizzle,
        "half_qk": constants["half_step"],
        "half_v": half_v,
        "half_step": constants["half_step"] or half_v,
        "odd_pair": bool(dkv_frags % 2 or dv_frags % 2 or columns // split_dq // 8 % 2),
        "odd_dkv": bool(dkv_frags % 2),
        "odd_dv": bool(dv_frags % 2),
        "odd_dq": bool(columns // split_dq // 8 % 2),
        # n8 fragments of a thread's row of S that come from one word of a dense mask
        "word_frags": 4 if t.tile_n * t.warps_sdp // t.warps % 32 == 0 else 2,
        "row_lanes": 1
        << (-(-p.head_dim_v // 8) - 1).bit_length(),  # threads per row in _prepare, one chunk each
        "vector_red": p.arch in (Arch.SM90, Arch.SM120),  # red.global.add.v4.f32 needs sm_90
        "writes": [
            _write("store_pair", p.head_dim, False, columns),
            *([_write("store_pair_v", p.head_dim_v, True, columns_v)] if own else []),
        ],
    }
    queries, heads = ("tiles_m", "batch", "heads_q"), "heads_q" if t.split_heads else "heads_kv"
    launches = [
        Launch(f"{spec.symbol}_prepare", queries, threads),
        Launch(spec.symbol, ("tiles_n", "batch", heads), threads, shared),
        Launch(f"{spec.symbol}_finish", queries, threads),
    ]
    if t.split_heads:
        launches.append(Launch(f"{spec.symbol}_finish_dkv", ("tiles_n", "batch", "heads_kv"), threads))
    return Plan(
        spec=spec,
        template="sm80/backward.cu.jinja",
        suffix=".cu",
        launches=tuple(launches),
        schedule=schedule_launches(spec, "tiles_n", t.ordered),
        owner="n",
        registers=registers + REGISTERS_BESIDES,
        dq_accum=True,
        dkv_accum=t.split_heads,
        ordered=t.ordered,
        columns=columns,
        columns_v=columns_v,
        deterministic=t.ordered,
        bits="k" if p.mask is Mask.DENSE else "",
        constants=constants,
    )


def columns_unit(t: Sm80Backward) -> int:
    """Columns of Q and K come in multiples of this many n8 fragments, which warps share evenly."""
    return math.lcm(t.warps // t.warps_dkv, t.warps // t.warps_dq)


def require_grids(t: Sm80Backward | Fp32Backward, keys: int) -> None:
    """Infeasible unless the warps of each product share its rows and columns evenly, in S and dP `keys` at least."""
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.warps_sdp, t.warps_dkv, t.warps_dq)
    if t.stages > 2:
        raise Infeasible(f"stages {t.stages}: the backward kernel has 1 or 2")
    if t.split_heads and t.ordered:
        raise Infeasible("ordered: with split_heads the sums of dK and dV have no fixed order")
    for name in ("warps_sdp", "warps_dkv", "warps_dq"):
        if t.warps % getattr(t, name):
            raise Infeasible(f"{name} {getattr(t, name)} does not divide warps {t.warps}")
    require_split("tile_m", t.tile_m, t.warps_sdp, 16, "warps_sdp")
    require_split("tile_n", t.tile_n, t.warps // t.warps_sdp, keys, "warps / warps_sdp")
    require_split("tile_n", t.tile_n, t.warps_dkv, 16, "warps_dkv")
    require_split("tile_m", t.tile_m, t.warps_dq, 16, "warps_dq")


def _swizzles(columns: int, *splits: int) -> bool:
    """May rows be swizzled? `tile_chunk` counts chunks from the first one of a warp by XOR, which must not carry."""
    frags = [columns // split // 8 for split in splits]
    return all(n % 8 == 0 or 8 % n == 0 for n in frags)


def schedule_launches(
    spec: Spec, tiles: str, ordered: bool = False, descending: bool = False
) -> tuple[Launch, ...]:
    """Launches of templates/gpu/schedule.cuh.jinja, a block per owned tile; `ordered` adds one per query tile.

    `descending` work needs no ranks.
    """
    if not spec.problem.mask.listed:
        return ()
    dense = spec.problem.mask is Mask.DENSE
    parts: list[tuple[str, tuple[str, ...]]] = [("pack", ("tiles_n", "tiles_m"))] if dense else []
    parts += [("schedule", (tiles,))]
    parts += [] if descending else [("order", (tiles,))]
    parts += [("turns", ("tiles_m",))] if ordered else []
    planes = ("mask_planes",) if dense else ()
    return tuple(Launch(f"{spec.symbol}_{part}", (*grid, *planes), SCHEDULE_THREADS) for part, grid in parts)


def require_words(spec: Spec) -> None:
    """Infeasible unless the tiles of a dense mask are whole words of its bits."""
    t = spec.tuning
    if spec.problem.mask is Mask.DENSE and (t.tile_m % 32 or t.tile_n % 32):
        raise Infeasible(
            f"dense mask: tile_m {t.tile_m} and tile_n {t.tile_n} must be multiples of 32, the pairs of a word"
        )


def require_positive(*values: int) -> None:
    """Infeasible unless all values of a tuning are at least 1."""
    if min(values) < 1:
        raise Infeasible(f"tuning values must be at least 1, got {values}")


def require_split(name: str, size: int, parts: int, unit: int, by: str) -> None:
    """Infeasible unless `size`, called `name`, falls into `parts`, called `by`, of whole `unit`s."""
    if size % (parts * unit):
        raise Infeasible(f"{name} {size} is not a multiple of {by} {parts} x {unit}")


def _require_fit(spec: Spec, shared: int, registers: int, threads: int) -> None:
    arch = spec.problem.arch
    if threads > 1024:
        raise Infeasible(f"{threads} threads: a block has at most 1024")
    if shared > SHARED_LIMIT[arch]:
        over = shared - SHARED_LIMIT[arch]
        raise Infeasible(
            f"shared memory: {shared} bytes, {over} more than {arch.value} has ({SHARED_LIMIT[arch]})"
        )
    limit = min(REGISTER_LIMIT, REGISTER_FILE // threads) - REGISTERS_BESIDES
    if registers > limit:
        raise Infeasible(
            f"registers: the tiles alone take {registers} of a thread, {registers - limit} more than fit"
        )
