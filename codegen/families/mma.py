"""What the kernels built on mma.sync share: tiles in shared memory, copies, registers, the grids of a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnforge.codegen.families.limits import (
    HEAD_DIM_LIMIT,
    REGISTER_FILE,
    REGISTER_LIMIT,
    SHARED_LIMIT,
    require_positive,
    require_split,
    require_words,
    up,
)
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import DType, Mask, Spec, Tuning

# Registers of a thread beyond its tiles: addresses, loop counters, operands in flight.
REGISTERS_BESIDES = 40


def require_problem(spec: Spec, largest: int = HEAD_DIM_LIMIT) -> None:
    """Infeasible for a problem that no 16-bit kernel of the mma.sync family computes for head dims up to `largest`."""
    p = spec.problem
    if p.dtype is DType.FLOAT32:
        raise Infeasible(f"dtype fp32: the {p.arch.value} kernels take bf16 or fp16")
    for dim in (p.head_dim, p.head_dim_v):
        if not 1 <= dim <= largest:
            raise Infeasible(f"the {p.arch.value} kernels take 1 to {largest}", f"head_dim {dim}")
    if p.align not in (2, 4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 2, 4, 8 or 16 bytes")
    require_words(spec)


def span_bytes(spec: Spec) -> int:
    """Bytes of shared memory for the spans of a backward's key tile; where planes differ, they stay in memory."""
    p = spec.problem
    return 8 * p.intervals * spec.tuning.tile_n if p.mask is Mask.SPANS and not p.planes else 0


def pitch(width: int, swizzled: bool = True) -> tuple[int, bool]:
    """Bytes between rows of a 16-bit tile `width` columns wide, and whether it is swizzled.

    Rows of a multiple of 128 bytes are swizzled; others get an odd number of 16-byte chunks. Either way the 8 rows
    that ldmatrix reads at once fall into 8 different groups of 4 banks.
    """
    return (width * 2, True) if width % 64 == 0 and swizzled else ((width // 8 | 1) * 16, False)


def common_constants(
    spec: Spec, threads: int, stages: int, loads: dict[str, tuple[str, bool]]
) -> dict[str, Any]:
    """Constants of both passes. `loads`: the rows of each copied tile, and whether its columns are those of v."""
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


def write(name: str, dim: int, own: bool, columns: int) -> dict[str, Any]:
    """A function that writes results: rows of `dim` elements out of `columns` computed ones."""
    return {
        "name": name,
        "columns": "kHeadDimV" if own else "kHeadDim",
        "odd": dim % 2 != 0,
        "cut": dim != columns,
    }


def forward_plan(
    spec: Spec,
    template: str,
    threads: int,
    shared: int,
    registers: int,
    constants: dict[str, Any],
    **more: Any,
) -> Plan:
    """The plan of any forward kernel of this family: one launch, a block of `threads` for each query tile and head.

    `registers`: of a thread, for its tiles. `more`: other fields of the plan.
    """
    one = (Launch(spec.symbol, ("tiles_m", "batch", "heads_q"), threads, shared),)
    return Plan(
        spec=spec,
        template=f"sm80/{template}.cu.jinja",
        suffix=".cu",
        launches=more.pop("launches", one),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=registers + REGISTERS_BESIDES,
        deterministic=True,
        bits="k" if spec.problem.packed else "",
        constants=constants,
        **more,
    )


def require_fit(spec: Spec, shared: int, registers: int, threads: int) -> None:
    """Infeasible unless a block of `threads` has `shared` bytes, and each thread `registers` for its tiles."""
    arch = spec.problem.arch
    if threads > 1024:
        raise Infeasible(f"{threads} threads: a block has at most 1024; lower warps")
    if shared > SHARED_LIMIT[arch]:
        over = shared - SHARED_LIMIT[arch]
        raise Infeasible(
            f"shared memory: {shared} bytes, {over} more than {arch.value} has ({SHARED_LIMIT[arch]})"
        )
    limit = min(REGISTER_LIMIT, REGISTER_FILE // threads) - REGISTERS_BESIDES
    if registers > limit:
        raise Infeasible(
            f"registers: the tiles alone take {registers} per thread, {registers - limit} more than are available"
        )


@dataclass(frozen=True)
class WarpGrids(Tuning):
    """The knobs of a backward that say how its warps share each product."""

    warps: int
    stages: int
    warps_sdp: int
    warps_dkv: int
    warps_dq: int


def require_grids(t: WarpGrids, keys: int) -> None:
    """Infeasible unless the warps of each product share its rows and columns evenly, in S and dP `keys` at least."""
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.warps_sdp, t.warps_dkv, t.warps_dq)
    if t.stages > 2:
        raise Infeasible(f"stages {t.stages}: must be 1 or 2 in a backward kernel")
    for name in ("warps_sdp", "warps_dkv", "warps_dq"):
        if t.warps % getattr(t, name):
            raise Infeasible(f"{name} {getattr(t, name)} does not divide warps {t.warps}")
    require_split("tile_m", t.tile_m, t.warps_sdp, 16, "warps_sdp")
    require_split("tile_n", t.tile_n, t.warps // t.warps_sdp, keys, "warps / warps_sdp")
    require_split("tile_n", t.tile_n, t.warps_dkv, 16, "warps_dkv")
    require_split("tile_m", t.tile_m, t.warps_dq, 16, "warps_dq")


def require_one_order(split_heads: bool, deterministic: bool) -> None:
    """Infeasible for deterministic sums of dK and dV with a block per q head."""
    if split_heads and deterministic:
        raise Infeasible(
            "deterministic: needs split_heads 0; with split_heads the sums of dK and dV have no fixed order"
        )
