"""Plans of the float32 kernels of the mma.sync family: shared memory, registers, launches, and why one does not fit."""

from __future__ import annotations

from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.plan_sm80 import REGISTER_FILE, REGISTER_LIMIT, SHARED_LIMIT, schedule_launches
from attnforge.codegen.spec import Arch, Fp32Backward, Fp32Forward, Mask, Spec

# A multiprocessor has 1 KiB of shared memory more than one block may use, and keeps 1 KiB for itself per block.
RESERVED = 1024
# Addresses, loop counters, operands in flight: what a kernel of this family uses beyond its tiles.
REGISTERS_BESIDES = 50
MAX_HEAD_DIM = 256


def make_plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    p = spec.problem
    if not 1 <= p.head_dim <= MAX_HEAD_DIM:
        raise Infeasible(
            f"head_dim {p.head_dim}: the {p.arch.value} fp32 kernels take 1 to {MAX_HEAD_DIM}"
        )
    if p.align not in (4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 4, 8 or 16 bytes")
    if isinstance(spec.tuning, Fp32Forward):
        return _forward(spec, spec.tuning)
    assert isinstance(spec.tuning, Fp32Backward)
    return _backward(spec, spec.tuning)


def padded(width: int) -> int:
    """Columns of a tile `width` columns wide, in whole groups of 8."""
    return (width + 7) // 8 * 8


def pitch(width: int) -> int:
    """Floats between rows of such a tile: 8 rows start in 8 different groups of 4 banks."""
    return padded(width) + 4


def _load(spec: Spec, suffix: str, rows: str, width: int, warps: int) -> tuple[str, str, str, int, int]:
    """Arguments of one copy function of fp32_tile.cuh.jinja: .., copies per row, threads that share a row.

    The threads are a power of two, so that no thread divides; as few as possible of their copies fall past the row.
    """
    copies = -(-width * 4 // spec.problem.align)
    sizes = [size for size in (32, 16, 8, 4, 2, 1) if size <= warps * 32]
    threads = min(sizes, key=lambda size: -(-copies // size) * size)  # the largest of equals
    return suffix, rows, "kHeadDimV" if suffix in ("v_tile", "do_tile") else "kHeadDim", copies, threads


def _common(spec: Spec, loads: tuple[tuple[str, str, str, int, int], ...], stages: int) -> dict[str, Any]:
    dim = dim_v = spec.problem.head_dim
    return {
        "dim": dim,
        "dim_v": dim_v,
        "padded": padded(dim),
        "padded_v": padded(dim_v),
        "pitch": pitch(dim),
        "pitch_v": pitch(dim_v),
        "pitches": {"q_tile": "Pitch", "k_tile": "Pitch", "v_tile": "PitchV", "do_tile": "PitchV"},
        "loads": loads,
        "tails": bool(dim % 8 or dim_v % 8),
        "pending": max(0, stages - 2),
    }


def _forward(spec: Spec, t: Fp32Forward) -> Plan:
    dim = dim_v = spec.problem.head_dim
    _require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.apart, t.blocks)
    _require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    _require_split("tile_n", t.tile_n, 1, 16, "two n8 fragments")
    groups = padded(dim_v) // 8
    apart = next(n for n in range(min(t.apart, groups), 0, -1) if groups % n == 0)
    shared = 4 * (t.tile_m * pitch(dim) + t.stages * t.tile_n * (pitch(dim) + pitch(dim_v)))
    frags = t.tile_m // t.warps // 16
    # O, S, the part of O that is summed, and the parts of one left operand.
    registers = frags * 4 * (groups + t.tile_n // 8 + apart + 2)
    _require_fit(spec, shared, registers, t.warps * 32, t.blocks)
    loads = (
        _load(spec, "q_tile", "kTileM", dim, t.warps),
        _load(spec, "k_tile", "kTileN", dim, t.warps),
        _load(spec, "v_tile", "kTileN", dim_v, t.warps),
    )
    constants = _common(spec, loads, t.stages)
    return Plan(
        spec=spec,
        template="sm80/forward_fp32.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, ("tiles_m", "batch", "heads_q"), t.warps * 32, shared),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=registers + REGISTERS_BESIDES,
        deterministic=True,
        constants=constants | {"shared_bytes": shared, "frags_apart": apart},
    )


def _backward(spec: Spec, t: Fp32Backward) -> Plan:
    raise Infeasible("not yet")


def _require_positive(*values: int) -> None:
    if min(values) < 1:
        raise Infeasible(f"tuning values must be at least 1, got {values}")


def _require_split(name: str, size: int, parts: int, unit: int, by: str) -> None:
    if size % (parts * unit):
        raise Infeasible(f"{name} {size} is not a multiple of {by} {parts} x {unit}")


def _require_fit(spec: Spec, shared: int, registers: int, threads: int, blocks: int) -> None:
    arch = spec.problem.arch
    if threads * blocks > (1024 if blocks == 1 else 1536 if arch in (Arch.SM86, Arch.SM89, Arch.SM120) else 2048):
        raise Infeasible(f"{blocks} blocks of {threads} threads: more than a block or multiprocessor has")
    limit = (SHARED_LIMIT[arch] + RESERVED) // blocks - RESERVED
    if shared > limit:
        raise Infeasible(
            f"shared memory: {shared} bytes, {shared - limit} more than a block of {blocks} on {arch.value} has ({limit})"
        )
    fits = min(REGISTER_LIMIT, REGISTER_FILE // (threads * blocks) // 8 * 8) - REGISTERS_BESIDES
    if registers > fits:
        raise Infeasible(
            f"registers: the tiles alone take {registers} of a thread, {registers - fits} more than fit"
        )
