"""The CPU kernels, both passes: register blocks of vectors, scratch of a thread, and why a spec does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attnforge.codegen import cpu_features
from attnforge.codegen.families.family import Family
from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import DType, Mask, Problem, Spec, Tuning, knob

# Vector registers by floats of one: SSE/NEON (the larger of the two), AVX2, AVX-512.
REGISTERS = {4: 32, 8: 16, 16: 32}
TILE_REGISTERS = 8  # of Intel AMX, each of 16 rows x 16 words
SCRATCH_LIMIT = 1 << 20  # bytes on the stack of a thread; beyond it the tiles leave any L2 anyway
HEAD_DIM_LIMIT = 256

# 2^f on [-1/2, 1/2], minimax in relative error with the constant term 1; highest power first.
# Relative errors 2e-9 (below half an ulp of fp32) and 2.8e-6 (weights are then rounded to bf16, 2e-3).
EXP2_FP32 = (
    "1.5353362e-4",
    "1.3398875e-3",
    "9.6184374e-3",
    "5.5503325e-2",
    "2.4022648e-1",
    "6.9314720e-1",
    "1.0",
)
EXP2_BF16 = ("9.5828532e-3", "5.5906426e-2", "2.4024099e-1", "6.9312419e-1", "1.0")


@dataclass(frozen=True)
class CpuForward(Tuning):
    """Tuning of the CPU forward kernel."""

    tile_m: int = knob("m", "query rows per tile, a multiple of lanes * cols")
    tile_n: int = knob("n", "keys per tile")
    heads: int = knob("h", "query heads of one kv head that share each packed K and V tile")
    lanes: int = knob("l", "floats of one vector register")
    rows: int = knob("r", "rows of the register block")
    cols: int = knob("c", "vector registers per row of the register block")
    pairs: bool = knob("p", "multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32")
    amx: bool = knob(
        "x", "multiply in tile registers of 16 x 16 words (tdpbf16ps)", default=False, quiet=True
    )


@dataclass(frozen=True)
class CpuBackward(Tuning):
    """Tuning of the CPU backward kernel."""

    tile_m: int = knob("m", "query rows per tile")
    tile_n: int = knob("n", "keys per tile, a multiple of lanes * cols")
    lanes: int = knob("l", "floats of one vector register")
    rows: int = knob("r", "rows of the register block")
    cols: int = knob("c", "vector registers per row of the register block")
    pairs: bool = knob("p", "multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32")
    amx: bool = knob(
        "x", "multiply in tile registers of 16 x 16 words (tdpbf16ps)", default=False, quiet=True
    )
    deterministic: bool = knob(
        "o", "the same bits of the gradients of a score's tensors on every run", default=False, quiet=True
    )


def needs_amx(spec: Spec) -> bool:
    """Whether a kernel, of any family, uses the tile registers of Intel AMX."""
    return isinstance(spec.tuning, (CpuForward, CpuBackward)) and spec.tuning.amx


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a CPU spec, or `Infeasible`."""
    t = spec.tuning
    assert isinstance(t, (CpuForward, CpuBackward))
    _require_problem(spec.problem, t)
    _require_blocks(spec, t)
    in_bins, wanted = getattr(t, "deterministic", False), bool(spec.problem.score.wanted)
    if in_bins and not wanted:
        raise Infeasible("deterministic: is always so without gradients of a score's tensors; set it to 0")
    forward = isinstance(t, CpuForward)
    scratch = _forward_scratch(spec, t) if isinstance(t, CpuForward) else _backward_scratch(spec, t)
    if scratch > SCRATCH_LIMIT:
        over = scratch - SCRATCH_LIMIT
        raise Infeasible(f"scratch: {scratch} bytes per thread, {over} more than the limit ({SCRATCH_LIMIT})")
    schedule = spec.problem.mask.listed
    return Plan(
        spec=spec,
        template=f"cpu/{'forward' if forward else 'backward'}.cpp.jinja",
        suffix=".cpp",
        launches=(Launch(spec.symbol, (), 0),),
        schedule=(Launch(f"{spec.symbol}_schedule", (), 0),) if schedule else (),
        owner="m" if forward else "n",
        registers=0,
        dq_accum=not forward,
        dq_semaphore=not forward,
        deterministic=in_bins or not wanted,
        bits=("q" if forward else "k") if spec.problem.packed else "",
        constants=_constants(spec, t, scratch),
    )


def _constants(spec: Spec, t: CpuForward | CpuBackward, scratch: int) -> dict[str, Any]:
    forward = isinstance(t, CpuForward)
    cols_dq, width_dq = (0, 0) if isinstance(t, CpuForward) else _dq_blocks(spec.problem.head_dim, t)
    includes = {"cmath"} if forward else {"algorithm", "cmath", "sched.h"}
    if spec.problem.mask.listed:
        includes |= {"algorithm"} if forward else {"vector"}
    return {
        "pairs": t.pairs,
        "amx": t.amx,
        "dot": t.pairs and t.lanes in (8, 16),  # vdpbf16ps; other widths multiply the halves one by one
        "exp2": EXP2_BF16 if t.pairs else EXP2_FP32,
        "exp2_error": "3e-6" if t.pairs else "2e-7",
        "includes": sorted(includes),
        "scratch_bytes": scratch,
        "value_functions": not forward and bool(spec.problem.dim_v),
        "cols_dq": cols_dq,
        "width_dq": width_dq,
    }


def _require_problem(p: Problem, t: CpuForward | CpuBackward) -> None:
    if p.dtype is DType.FLOAT16:
        raise Infeasible("dtype fp16: the cpu kernels take fp32 or bf16")
    for dim in (p.head_dim, p.head_dim_v):
        if not 1 <= dim <= HEAD_DIM_LIMIT:
            raise Infeasible(f"the cpu kernels take 1 to {HEAD_DIM_LIMIT}", f"head_dim {dim}")
    if p.align < p.dtype.bytes:
        raise Infeasible(
            f"align {p.align}: must be at least {p.dtype.bytes}, the bytes of a {p.dtype.value} element"
        )
    if t.pairs and p.dtype is not DType.BFLOAT16:
        raise Infeasible(f"pairs: needs dtype bf16, not {p.dtype.value}")


def _require_blocks(spec: Spec, t: CpuForward | CpuBackward) -> None:
    if t.lanes not in REGISTERS:
        raise Infeasible(f"lanes {t.lanes}: must be one of {', '.join(map(str, REGISTERS))}")
    if min(t.tile_m, t.tile_n, t.rows, t.cols, getattr(t, "heads", 1)) < 1:
        raise Infeasible("tile_m, tile_n, heads, rows and cols must be at least 1")
    if t.amx:
        _require_whole_tile_registers(t)
        rows = t.rows // 16
        _require_registers("tile", rows * t.cols + t.cols + rows, TILE_REGISTERS)
    else:
        _require_registers("vector", t.rows * t.cols + t.cols + 1, REGISTERS[t.lanes])
    panel = t.lanes * t.cols
    in_lanes, in_rows = ("tile_m", "tile_n") if isinstance(t, CpuForward) else ("tile_n", "tile_m")
    if getattr(t, in_lanes) % panel:
        raise Infeasible(f"{in_lanes} {getattr(t, in_lanes)} is not a multiple of lanes * cols = {panel}")
    if getattr(t, in_rows) % t.rows or getattr(t, in_rows) % 2:
        raise Infeasible(f"{in_rows} {getattr(t, in_rows)} is not an even multiple of rows = {t.rows}")


def _require_registers(kind: str, needed: int, there: int) -> None:
    if needed > there:
        over = needed - there
        raise Infeasible(
            f"registers: rows x cols takes {needed} {kind} registers, {over} more than the CPU has"
        )


def _require_whole_tile_registers(t: CpuForward | CpuBackward) -> None:
    """What blocks of whole tile registers require: operands of 16 words of pairs along every sum."""
    if not t.pairs or t.lanes != 16:
        raise Infeasible("amx: needs pairs, and 16 lanes")
    if t.rows % 16:
        raise Infeasible(f"rows {t.rows}: with amx a multiple of 16, the rows of a tile register")
    forward = isinstance(t, CpuForward)
    summed = {"tile_n": t.tile_n} if forward else {"tile_m": t.tile_m, "lanes * cols": t.lanes * t.cols}
    for name, size in summed.items():
        if size % 32:
            raise Infeasible(f"{name} {size}: with amx a multiple of 32, the pairs of 16 words")


def _columns(head_dim: int, t: CpuForward | CpuBackward) -> int:
    """Columns in whole register blocks: kColumns of templates/cpu/constants.h.jinja."""
    return -(-head_dim // t.rows) * t.rows


def _words(head_dim: int, t: CpuForward | CpuBackward) -> int:
    """Words of one row, kDepth there: see `word` in templates/cpu/vector.h.jinja."""
    if t.amx:
        return -(-head_dim // 32) * 16
    return -(-head_dim // 2) if t.pairs else _columns(head_dim, t)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _forward_scratch(spec: Spec, t: CpuForward) -> int:
    """sizeof(Scratch) of templates/cpu/forward.cpp.jinja."""
    words, width = _words(spec.problem.head_dim, t), t.lanes * t.cols
    columns = _columns(spec.problem.head_dim_v, t)
    panel = _aligned(4 * width * (words + columns + 2) + 12)
    weights = t.tile_n // 2 * width if t.pairs else 0
    values = t.tile_n // (2 if t.pairs else 1) * columns
    tiles = 4 * (t.tile_n * (width + words) + values + weights)
    return t.heads * t.tile_m // width * panel + _aligned(tiles)


def _backward_scratch(spec: Spec, t: CpuBackward) -> int:
    """sizeof(Scratch) of templates/cpu/backward.cpp.jinja."""
    dims = (spec.problem.head_dim, spec.problem.head_dim_v)
    width, pairs = t.lanes * t.cols, int(t.pairs)
    words, columns = (sum(size(dim, t) for dim in dims) for size in (_words, _columns))
    _, width_dq = _dq_blocks(dims[0], t)
    queries = t.tile_m * (words + 2 * width + width_dq + 3)
    queries += pairs * t.tile_m // 2 * (columns + 3 * width)
    spans = 0 if spec.problem.mask is Mask.DENSE else 2 * spec.problem.intervals  # starts and ends
    panel = width * (words + columns + spans) + width * width_dq // (1 + pairs) + 2
    if t.amx:
        queries += t.tile_m // 2 * (t.tile_n - width)  # ds_words of each panel
    if spec.problem.score and not spec.problem.score.slope_is_one:
        queries += t.tile_m * width  # score_slopes
    if spec.problem.score.wanted:
        queries += 2 * t.tile_m * width  # plain_scores, pair_gradients
    return _aligned(4 * queries) + t.tile_n // width * _aligned(4 * panel)


def _dq_blocks(head_dim: int, t: CpuBackward) -> tuple[int, int]:
    """Vectors per row of dq's register block, and head_dim in whole blocks: least padding, then widest."""
    vectors = -(-head_dim // t.lanes)
    if t.amx:  # one shape of block for all products
        return t.cols, -(-vectors // t.cols) * t.cols * t.lanes
    _, cols = min((-(-vectors // cols) * cols, -cols) for cols in range(1, t.cols + 1))
    return -cols, -(-vectors // -cols) * -cols * t.lanes


# ---- Spaces

# (rows, cols) of register blocks by floats of a vector register: as many sums as leave room for one row of operands.
BLOCKS = {
    16: ((8, 3), (8, 2), (4, 6)),  # AVX-512: 32 registers
    8: ((4, 3), (4, 2)),  # AVX2: 16 registers
    4: ((8, 3), (4, 3)),  # NEON: 32 registers, SSE: 16
}


# Forward: (panels per tile, keys per tile, heads). More panels share a packed K and V tile, fewer fit L2.
FORWARD_SHAPES = ((1, 64, 8), (1, 128, 8), (1, 64, 4), (1, 64, 1), (2, 64, 8), (2, 64, 1))
# Backward: (query rows per tile, panels of keys per tile).
BACKWARD_SHAPES = ((48, 2), (64, 2), (96, 2), (48, 1), (64, 3), (128, 1))

# In tile registers a block of 32 x 32 sums takes four, and the operands of either side two. Larger tiles: they share
# what is packed by columns.
AMX_BLOCK = (16, 32, 2)
AMX_FORWARD_SHAPES = (
    (1, 128, 8),
    (2, 128, 8),
    (1, 256, 8),
    (2, 256, 8),
    (1, 64, 8),
    (1, 128, 4),
    (2, 128, 1),
    (4, 128, 1),
)
AMX_BACKWARD_SHAPES = ((64, 8), (128, 8), (64, 4), (128, 4), (64, 6), (32, 8))


def forward_tunings(problem: Problem) -> Iterator[CpuForward]:
    """Forward tunings of `problem`: for tile registers first, if this machine has them."""
    lanes, rows, cols = AMX_BLOCK
    for panels, tile_n, heads in AMX_FORWARD_SHAPES if _takes_amx(problem) else ():
        yield CpuForward(panels * lanes * cols, tile_n, heads, lanes, rows, cols, pairs=True, amx=True)
    for pairs, lanes, rows, cols, shapes in _blocks(problem):
        for panels, tile_n, heads in FORWARD_SHAPES[:shapes]:
            yield CpuForward(panels * lanes * cols, tile_n, heads, lanes, rows, cols, pairs)


def backward_tunings(problem: Problem) -> Iterator[CpuBackward]:
    """Backward tunings of `problem`, likewise; then with deterministic sums, where that is a choice."""
    shapes = list(_backward_shapes(problem))
    yield from shapes
    yield from (replace(t, deterministic=True) for t in shapes if problem.score.wanted)


def _backward_shapes(problem: Problem) -> Iterator[CpuBackward]:
    lanes, rows, cols = AMX_BLOCK
    for tile_m, panels in AMX_BACKWARD_SHAPES if _takes_amx(problem) else ():
        yield CpuBackward(tile_m, panels * lanes * cols, lanes, rows, cols, pairs=True, amx=True)
    for pairs, lanes, rows, cols, shapes in _blocks(problem):
        for tile_m, panels in BACKWARD_SHAPES[:shapes]:
            yield CpuBackward(tile_m, panels * lanes * cols, lanes, rows, cols, pairs)


def _takes_amx(problem: Problem) -> bool:
    return problem.dtype is DType.BFLOAT16 and not cpu_features.amx_refusal()


def _blocks(problem: Problem) -> Iterator[tuple[bool, int, int, int, int]]:
    """(pairs, lanes, rows, cols, tile shapes to try): all shapes for this machine's vectors, else one."""
    width = cpu_features.lanes()
    pairs = problem.dtype is DType.BFLOAT16
    for rows, cols in BLOCKS[width]:
        yield pairs, width, rows, cols, len(FORWARD_SHAPES)
    for lanes, blocks in BLOCKS.items():
        if pairs or lanes < width:
            yield False, lanes, *blocks[0], 1


HONOURED = frozenset({"align", "dim_v", "intervals", "planes", "mask_mod", "score"})
FORWARD = Family(CpuForward, plan, forward_tunings, HONOURED)
BACKWARD = Family(CpuBackward, plan, backward_tunings, HONOURED)
