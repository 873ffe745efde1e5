"""Plans of the float32 kernels of the mma.sync family: shared memory, registers, launches, and why one does not fit."""

from __future__ import annotations

from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.plan_sm80 import (
    REGISTER_FILE,
    REGISTER_LIMIT,
    REGISTERS_BESIDES,
    SHARED_LIMIT,
    forward_plan,
    require_fp32,
    require_positive,
    require_split,
    schedule_launches,
    up,
)
from attnforge.codegen.plan_sm80_backward import require_grids
from attnforge.codegen.spec import Arch, Mask, Spec
from attnforge.codegen.tuning import Fp32Backward, Fp32Forward

# Arguments of one copy function of fp32_tile.cuh.jinja: its suffix, the names of the tile's rows and columns, copies
# per row, threads that share a row.
Load = tuple[str, str, str, int, int]
# A multiprocessor has 1 KiB of shared memory more than one block may use, and keeps 1 KiB for itself per block.
RESERVED = 1024


def make_plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    require_fp32(spec)
    if isinstance(spec.tuning, Fp32Forward):
        return _forward(spec, spec.tuning)
    assert isinstance(spec.tuning, Fp32Backward)
    return _backward(spec, spec.tuning)


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


def _forward(spec: Spec, t: Fp32Forward) -> Plan:
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    if t.parts == 0:
        return _ffma(spec, t)
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.parts, t.blocks)
    require_split("tile_m", t.tile_m, t.warps, 16, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "two n8 fragments")
    groups = padded(dim_v) // 8
    apart = _part("O", groups, t.parts)
    shared = 4 * (t.tile_m * pitch(dim) + t.stages * t.tile_n * (pitch(dim) + pitch(dim_v)))
    frags = t.tile_m // t.warps // 16
    # O and S, beside them the other sums of S or both of a part of O, and the parts of a left operand.
    registers = frags * 4 * (groups + t.tile_n // 8 + max(t.tile_n // 8, 2 * apart) + 2)
    _require_fit(spec, shared, registers, t.warps * 32, t.blocks)
    constants = _common(spec, _qkv_loads(spec, t), t.stages) | {"shared_bytes": shared, "frags_apart": apart}
    return forward_plan(spec, "forward_fp32", t.warps * 32, shared, registers, constants)


def _ffma(spec: Spec, t: Fp32Forward) -> Plan:
    """The kernel whose products are those of the float lanes: threads have rows x (keys and columns of O)."""
    dim, dim_v = spec.problem.head_dim, spec.problem.head_dim_v
    require_positive(t.tile_m, t.tile_n, t.warps, t.stages, t.blocks)
    require_split("tile_m", t.tile_m, t.warps, 4, "warps")
    require_split("tile_n", t.tile_n, 1, 16, "two keys of 8 threads")
    chunk = 32 if t.tile_n % 32 == 0 else 16
    shared = 4 * (t.stages * t.tile_n * (pitch(dim) + pitch(dim_v)) + t.tile_m * (pitch(dim) + chunk + 8))
    rows, keys, columns = t.tile_m // t.warps // 4, t.tile_n // 8, padded(dim_v) // 8
    # S, O, a maximum and a sum of each row; operands: four floats of each row and key, or of each row and a row of V.
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


def _backward(spec: Spec, t: Fp32Backward) -> Plan:
    _check_grids(t)
    frags, threads = _gradient_frags(spec, t), t.warps * 32
    shared, registers = _backward_shared(spec, t), _backward_registers(t, frags)
    _require_fit(spec, shared, registers, threads, t.blocks)
    queries, heads = ("tiles_m", "batch", "heads_q"), "heads_q" if t.split_heads else "heads_kv"
    return Plan(
        spec=spec,
        template="sm80/backward_fp32.cu.jinja",
        suffix=".cu",
        launches=(
            Launch(f"{spec.symbol}_preprocess", queries, threads),
            Launch(spec.symbol, ("tiles_n", "batch", heads), threads, shared),
        ),
        schedule=schedule_launches(spec, "tiles_n", t.ordered),
        owner="n",
        registers=registers + REGISTERS_BESIDES,
        bits="k" if spec.problem.mask is Mask.DENSE else "",
        ordered=t.ordered,
        deterministic=t.ordered,
        constants=_backward_constants(spec, t, frags) | {"shared_bytes": shared},
    )


def _gradient_frags(spec: Spec, t: Fp32Backward) -> dict[str, int]:
    """n8 fragments in a warp's share of the columns of each gradient."""
    groups, groups_v = (padded(width) // 8 for width in (spec.problem.head_dim, spec.problem.head_dim_v))
    warps_dkv, warps_dq = t.warps // t.warps_dkv, t.warps // t.warps_dq
    frags = {"dk": -(-groups // warps_dkv), "dv": -(-groups_v // warps_dkv), "dq": -(-groups // warps_dq)}
    _part("a gradient", max(frags.values()), t.parts)
    return frags


def _apart(frags: dict[str, int], t: Fp32Backward) -> dict[str, int]:
    """Those of them that a step computes in one turn."""
    return {name: -(-number // t.parts) for name, number in frags.items()}


def _backward_shared(spec: Spec, t: Fp32Backward) -> int:
    """Bytes: K, V and buffers of Q and dO; P and dS; buffers of row statistics; the bounds of spans."""
    pitches = pitch(spec.problem.head_dim) + pitch(spec.problem.head_dim_v)
    floats = (t.tile_n + t.stages * t.tile_m) * pitches + 2 * t.tile_m * (t.tile_n + 4)
    spans = 8 * t.tile_n if spec.problem.mask is Mask.SPANS else 0
    return 4 * floats + t.stages * t.tile_m * 8 + spans


def _backward_registers(t: Fp32Backward, frags: dict[str, int]) -> int:
    """Of a thread: dK and dV, and beside them S, dP and its other sums, or both sums of a part of a gradient."""
    frags_n, frags_m, apart = t.tile_n // t.warps_dkv // 16, t.tile_m // t.warps_dq // 16, _apart(frags, t)
    sdp = 3 * t.tile_m * t.tile_n // (t.warps * 32)
    sums = 8 * max(frags_n * max(apart["dk"], apart["dv"]), frags_m * apart["dq"])
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
        **{f"apart_{name}": number for name, number in _apart(frags, t).items()},
        "vector_red": spec.problem.arch in (Arch.SM90, Arch.SM120) and dim % 2 == 0 and dim_v % 2 == 0,
    }


def _check_grids(t: Fp32Backward) -> None:
    require_positive(t.parts, t.blocks)
    require_grids(t, 8)
    if (frags := t.tile_n // (t.warps // t.warps_sdp) // 8) % 4 and frags not in (1, 2):
        raise Infeasible(
            f"tile_n {t.tile_n}: the {8 * frags} keys of a warp neither share nor fill words of 32"
        )


def _part(what: str, groups: int, parts: int) -> int:
    """Groups of 8 columns in each of `parts` parts, the last of which may be smaller but not empty."""
    size = -(-groups // parts)
    if -(-groups // size) != parts:
        raise Infeasible(
            f"parts {parts}: {what} has {groups} groups of columns, which do not fill so many parts"
        )
    return size


def _require_fit(spec: Spec, shared: int, registers: int, threads: int, blocks: int) -> None:
    arch = spec.problem.arch
    if threads * blocks > (
        1024 if blocks == 1 else 1536 if arch in (Arch.SM86, Arch.SM89, Arch.SM120) else 2048
    ):
        raise Infeasible(f"{blocks} blocks of {threads} threads: more than a block or multiprocessor has")
    limit = (SHARED_LIMIT[arch] + RESERVED) // blocks - RESERVED
    if shared > limit:
        raise Infeasible(
            f"shared memory: {shared} bytes, {shared - limit} more than each of {blocks} blocks "
            f"on {arch.value} has ({limit})"
        )
    fits = min(REGISTER_LIMIT, REGISTER_FILE // (threads * blocks) // 8 * 8) - REGISTERS_BESIDES
    if registers > fits:
        raise Infeasible(
            f"registers: the tiles alone take {registers} of a thread, {registers - fits} more than fit"
        )
