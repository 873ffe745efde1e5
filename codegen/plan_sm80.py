"""Plans of the mma.sync family: shared-memory layout, registers, launches, and why a spec does not fit.

The forward, and what it shares with plan_sm80_backward.py.
"""

from __future__ import annotations

from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import Arch, DType, Mask, Spec
from attnforge.codegen.tuning import Sm80Forward

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
SCHEDULE_THREADS = 128  # kScheduleThreads in templates/common/schedule.cuh.jinja


def make_plan(spec: Spec) -> Plan:
    """Plan of a forward spec of this family, or `Infeasible`."""
    assert isinstance(spec.tuning, Sm80Forward)
    require_problem(spec)
    return _forward(spec, spec.tuning)


def require_problem(spec: Spec) -> None:
    """Infeasible for what no kernel of this family does in 16 bits."""
    p = spec.problem
    if p.dtype is DType.FLOAT32:
        raise Infeasible(f"dtype fp32: the {p.arch.value} kernels take bf16 or fp16")
    for dim in (p.head_dim, p.head_dim_v):
        if not 1 <= dim <= HEAD_DIM_LIMIT:
            raise Infeasible(f"head_dim {dim}: the {p.arch.value} kernels take 1 to {HEAD_DIM_LIMIT}")
    if p.align not in (2, 4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 2, 4, 8 or 16 bytes")
    require_words(spec)


def require_fp32(spec: Spec) -> None:
    """Infeasible for what no GPU kernel does in float32, this family's or Hopper's."""
    p = spec.problem
    for name, dim in (("head_dim", p.head_dim), ("head_dim of v", p.head_dim_v)):
        if not 1 <= dim <= HEAD_DIM_LIMIT:
            raise Infeasible(f"{name} {dim}: the {p.arch.value} fp32 kernels take 1 to {HEAD_DIM_LIMIT}")
    if p.align not in (4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 4, 8 or 16 bytes")
    require_words(spec)


def pitch(width: int, swizzled: bool = True) -> tuple[int, bool]:
    """Bytes between rows of a 16-bit tile `width` columns wide, and whether it is swizzled.

    Rows of a multiple of 128 bytes are swizzled; others get an odd number of 16-byte chunks. Either way the 8 rows
    that ldmatrix reads at once fall into 8 different groups of 4 banks.
    """
    return (width * 2, True) if width % 64 == 0 and swizzled else ((width // 8 | 1) * 16, False)


def up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def common(spec: Spec, threads: int, stages: int, loads: dict[str, tuple[str, bool]]) -> dict[str, Any]:
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


def write(name: str, dim: int, own: bool, columns: int) -> dict[str, Any]:
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
    require_fit(spec, shared, registers, t.warps * 32)
    own = bool(p.dim_v)
    loads = {"q_tile": ("kTileM", False), "kv_tile": ("kTileN", False)}
    constants = common(spec, t.warps * 32, t.stages, loads | ({"v_tile": ("kTileN", True)} if own else {}))
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


def forward_plan(
    spec: Spec, template: str, threads: int, shared: int, registers: int, constants: dict[str, Any]
) -> Plan:
    """The plan of any forward kernel of this family: one launch, a block of `threads` for each query tile and head.

    `registers`: of a thread, for its tiles.
    """
    return Plan(
        spec=spec,
        template=f"sm80/{template}.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, ("tiles_m", "batch", "heads_q"), threads, shared),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=registers + REGISTERS_BESIDES,
        deterministic=True,
        bits="k" if spec.problem.mask is Mask.DENSE else "",
        constants=constants,
    )


def schedule_launches(
    spec: Spec, tiles: str, ordered: bool = False, descending: bool = False
) -> tuple[Launch, ...]:
    """Launches of templates/common/schedule.cuh.jinja, a block per owned tile; `ordered` adds one per query tile.

    Lists of query tiles begin with a launch that looks at the keys.

    `descending` work needs no ranks.
    """
    if not spec.problem.mask.listed:
        return ()
    dense = spec.problem.mask is Mask.DENSE
    parts: list[tuple[str, tuple[str, ...]]] = [("pack", ("tiles_n", "tiles_m"))] if dense else []
    parts += [("kinds", ("tiles_n",))] if not dense and tiles == "tiles_m" else []
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


def require_fit(spec: Spec, shared: int, registers: int, threads: int) -> None:
    """Infeasible unless a block of `threads` has `shared` bytes, and each thread `registers` for its tiles."""
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
