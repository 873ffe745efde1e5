"""Plans of the mma.sync family: shared-memory layout, registers, launches, and why a spec does not fit."""

from __future__ import annotations

from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Sm80Backward, Sm80Forward, Spec

# Shared memory one block may use, bytes (CUDA programming guide, table of compute capabilities).
SHARED_LIMIT = {
    Arch.SM80: 163 * 1024,
    Arch.SM86: 99 * 1024,
    Arch.SM89: 99 * 1024,
    Arch.SM90: 227 * 1024,
    Arch.SM120: 99 * 1024,
}
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
    limit = 256 if p.direction is Direction.FORWARD else 128
    if p.head_dim % 8 or not 8 <= p.head_dim <= limit:
        raise Infeasible(
            f"head_dim {p.head_dim}: the {p.arch.value} {p.direction.value} kernel takes multiples of 8 up to {limit}"
        )
    if p.align not in (2, 4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 2, 4, 8 or 16 bytes")
    require_words(spec)
    if p.dim_v or p.mask is Mask.DENSE:
        raise Infeasible(f"head_dim {p.dim_v} of v, {p.mask.value} mask: not yet")
    if isinstance(spec.tuning, Sm80Forward):
        return _forward(spec, spec.tuning)
    assert isinstance(spec.tuning, Sm80Backward)
    return _backward(spec, spec.tuning)


def pitch(width: int) -> tuple[int, bool]:
    """Bytes between rows of a 16-bit tile `width` columns wide, and whether it is swizzled.

    Rows of a multiple of 128 bytes are swizzled; others get an odd number of 16-byte chunks. Either way the 8 rows
    that ldmatrix reads at once fall into 8 different groups of 4 banks.
    """
    return (width * 2, True) if width % 64 == 0 else ((width // 8 | 1) * 16, False)


def _common(spec: Spec, warps: int, stages: int) -> dict[str, Any]:
    d = spec.problem.head_dim
    row, swizzle = pitch(d)
    return {
        "mma": "bf16" if spec.problem.dtype is DType.BFLOAT16 else "f16",
        "pitch": row,
        "swizzle": swizzle,
        "loads": (("q_tile", "kTileM"), ("kv_tile", "kTileN")),
        "row_step": warps * 32 % (d // 8) == 0,
        "pending": max(0, stages - 2),
        "steps_d": d // 16,
        "pairs_d": d // 16,
        "half_step": d % 16 != 0,
        "odd_pair": d % 16 != 0,
    }


def _forward(spec: Spec, t: Sm80Forward) -> Plan:
    d = spec.problem.head_dim
    _require_positive(t.tile_m, t.tile_n, t.warps, t.stages)
    _require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    _require_split("tile_n", t.tile_n, 1, 16, "k16 steps")
    row, _ = pitch(d)
    q_bytes, kv_bytes = t.tile_m * row, 2 * t.stages * t.tile_n * row
    if t.q_in_regs and q_bytes > kv_bytes:
        raise Infeasible(
            f"q_in_regs: Q takes {q_bytes} bytes, {q_bytes - kv_bytes} more than the K and V it shares with"
        )
    shared = kv_bytes if t.q_in_regs else q_bytes + kv_bytes
    frags = t.tile_m // t.warps // 16
    registers = frags * (d // 8 * 4 + t.tile_n // 8 * 4 + (((d + 15) // 16) * 4 if t.q_in_regs else 4))
    _require_fit(spec, shared, registers, t.warps * 32)
    constants = _common(spec, t.warps, t.stages)
    return Plan(
        spec=spec,
        template="sm80/forward.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, ("tiles_m", "batch", "heads_q"), t.warps * 32, shared),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=registers + REGISTERS_BESIDES,
        deterministic=True,
        constants=constants | {"shared_bytes": shared},
    )


def _backward(spec: Spec, t: Sm80Backward) -> Plan:
    d = spec.problem.head_dim
    _require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.warps_sdp, t.warps_dkv, t.warps_dq)
    if t.stages > 2:
        raise Infeasible(f"stages {t.stages}: the backward kernel has 1 or 2")
    if t.split_heads and t.ordered:
        raise Infeasible("ordered: with split_heads the sums of dK and dV have no fixed order")
    for name in ("warps_sdp", "warps_dkv", "warps_dq"):
        if t.warps % getattr(t, name):
            raise Infeasible(f"{name} {getattr(t, name)} does not divide warps {t.warps}")
    _require_split("tile_m", t.tile_m, t.warps_sdp, 16, "warps_sdp")
    _require_split("tile_n", t.tile_n, t.warps // t.warps_sdp, 16, "warps / warps_sdp")
    _require_split("tile_n", t.tile_n, t.warps_dkv, 16, "warps_dkv")
    _require_split("head_dim", d, t.warps // t.warps_dkv, 8, "warps / warps_dkv")
    _require_split("tile_m", t.tile_m, t.warps_dq, 16, "warps_dq")
    _require_split("head_dim", d, t.warps // t.warps_dq, 8, "warps / warps_dq")
    row, _ = pitch(d)
    score_row, score_swizzle = pitch(t.tile_n)
    spans = 8 * t.tile_n if spec.problem.mask is Mask.SPANS else 0
    parts = (
        2 * t.tile_n * row,
        2 * t.stages * t.tile_m * row,
        2 * t.tile_m * score_row,
        t.stages * t.tile_m * 8,
        spans,
    )
    shared = sum(parts)
    threads = t.warps * 32
    sdp = 2 * (t.tile_m * t.tile_n // threads)
    dkv = 2 * (t.tile_n * d // threads)
    registers = dkv + max(sdp, t.tile_m * d // threads)
    _require_fit(spec, shared, registers, threads)
    constants = _common(spec, t.warps, t.stages)
    dkv_cols, dq_cols = d // (t.warps // t.warps_dkv) // 8, d // (t.warps // t.warps_dq) // 8
    constants |= {
        "shared_bytes": shared,
        "score_pitch": score_row,
        "score_swizzle": score_swizzle,
        "odd_pair": bool(dkv_cols % 2 or dq_cols % 2),
        "odd_dkv": bool(dkv_cols % 2),
        "odd_dq": bool(dq_cols % 2),
        "row_lanes": 1 << (d // 8 - 1).bit_length(),  # threads per row in _prepare, one chunk each
        "vector_red": spec.problem.arch in (Arch.SM90, Arch.SM120),  # red.global.add.v4.f32 needs sm_90
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
        deterministic=t.ordered,
        constants=constants,
    )


def schedule_launches(spec: Spec, tiles: str, ordered: bool = False) -> tuple[Launch, ...]:
    """Launches of templates/gpu/schedule.cuh.jinja, a block per owned tile; `ordered` adds one per query tile."""
    if not spec.problem.mask.listed:
        return ()
    dense = spec.problem.mask is Mask.DENSE
    parts: list[tuple[str, tuple[str, ...]]] = [("pack", ("tiles_n", "tiles_m"))] if dense else []
    parts += [("schedule", (tiles,)), ("order", (tiles,)), *([("turns", ("tiles_m",))] if ordered else [])]
    planes = ("mask_planes",) if dense else ()
    return tuple(Launch(f"{spec.symbol}_{part}", (*grid, *planes), SCHEDULE_THREADS) for part, grid in parts)


def require_words(spec: Spec) -> None:
    """Infeasible unless the tiles of a dense mask are whole words of its bits."""
    t = spec.tuning
    if spec.problem.mask is Mask.DENSE and (t.tile_m % 32 or t.tile_n % 32):
        raise Infeasible(
            f"dense mask: tile_m {t.tile_m} and tile_n {t.tile_n} must be multiples of 32, the pairs of a word"
        )


def _require_positive(*values: int) -> None:
    if min(values) < 1:
        raise Infeasible(f"tuning values must be at least 1, got {values}")


def _require_split(name: str, size: int, parts: int, unit: int, by: str) -> None:
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
