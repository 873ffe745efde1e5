"""How fast a kernel of the mma.sync family should be, from data sheets: for GPUs that nothing was measured on.

A step of the main loop keeps four units of a multiprocessor busy: tensor cores, shared memory, the exponential unit and
the FP32 cores. Blocks of one multiprocessor, and less so the warps of a block, hide each other's units: a step takes
the busiest unit's cycles and a share of the others'; loads add what no other block hides. Half-rate fp32 accumulation
of GeForce is in the tensor rates; fp16 accumulation, which would double them there, is no option: its error is far
above that of any peer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from attnforge.codegen.families.limits import RESERVED, up
from attnforge.codegen.families.sm80 import Sm80Forward
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.families.sm80_fp32 import Fp32Backward, Fp32Forward
from attnforge.codegen.plan import Plan
from attnforge.codegen.spec import Arch, Direction, DType

LATENCY = 600  # cycles from an asynchronous copy to its data, out of the L2 cache
BARRIER = 150  # cycles that the warps of a block wait for each other, each time
L2_SHARE = 0.25  # of the traffic with the L2 cache that is felt although other work hides it
TF32_PRODUCTS = 3  # of tf32 splits, for one of float32


@dataclass(frozen=True)
class Gpu:
    """One multiprocessor and how many there are. Rates are per clock of a multiprocessor."""

    name: str
    multiprocessors: int
    ghz: float  # boost clock
    half_fma: int  # of the tensor cores, 16-bit operands, fp32 sums
    tf32_fma: int
    lanes: int  # float operations
    shared_bytes: int  # of a multiprocessor
    threads: int  # resident, at most
    blocks: int
    l2_bytes: int  # from the L2 cache
    exponentials: int = 16
    shared_rate: int = 128  # bytes


# Data sheets and the CUDA programming guide's table of compute capabilities; L2 rates are rounded from public
# microbenchmarks. sm90 is Hopper through mma.sync, which reaches about 60 % of wgmma's rate: there the model was
# compared with the measurements of a search (tests/codegen/test_cost_model.py). sm100 is a B200 through mma.sync, whose
# rate no data sheet states: Hopper's is assumed.
GPUS = {
    Arch.SM80: Gpu("A100 SXM", 108, 1.41, 1024, 512, 64, 164 << 10, 2048, 32, 48),
    Arch.SM86: Gpu("RTX 3090", 82, 1.695, 256, 128, 128, 100 << 10, 1536, 16, 16),
    Arch.SM89: Gpu("RTX 4090", 128, 2.52, 256, 128, 128, 100 << 10, 1536, 24, 16),
    Arch.SM90: Gpu("H200, mma.sync", 132, 1.83, 1280, 640, 128, 228 << 10, 2048, 32, 32),
    Arch.SM100: Gpu("B200, mma.sync", 148, 1.85, 1280, 640, 128, 228 << 10, 2048, 32, 32),
    Arch.SM120: Gpu("RTX 5090", 170, 2.407, 256, 128, 128, 100 << 10, 1536, 24, 16),
}


@dataclass(frozen=True)
class DataSheet:
    """Rates of a GPU from NVIDIA's data sheet."""

    pattern: str  # a regular expression that the GPU's name contains
    tflops: float  # dense, 16 bits
    memory: float  # TB/s
    gpu: Gpu | None = None  # its multiprocessors; None: clock or number are not those of any GPU above


# Hopper through wgmma.
WGMMA = replace(GPUS[Arch.SM90], name="H200, wgmma", half_fma=2048)
# The first whose pattern fits counts.
DATA_SHEETS = (
    DataSheet(r"H100 PCIe", 756.0, 2.0),
    DataSheet(r"H100 NVL", 835.0, 3.9),
    DataSheet(r"H200 NVL", 835.0, 4.8),
    DataSheet(r"GH200 144G", 990.0, 4.9, WGMMA),
    DataSheet(r"GH200", 990.0, 4.0, WGMMA),
    DataSheet(r"H20-3e", 148.0, 4.8),
    DataSheet(r"H20\b", 148.0, 4.0),
    DataSheet(r"H[18]00", 989.4, 3.35, WGMMA),
    DataSheet(r"H200", 989.4, 4.8, WGMMA),
    DataSheet(r"A100-SXM4-80GB", 312.0, 2.039, GPUS[Arch.SM80]),
    DataSheet(r"A100-SXM4-40GB", 312.0, 1.555, GPUS[Arch.SM80]),
    DataSheet(r"RTX 3090", 71.0, 0.936, GPUS[Arch.SM86]),
    DataSheet(r"RTX 4090", 165.2, 1.008, GPUS[Arch.SM89]),
    DataSheet(r"RTX 5090", 209.5, 1.792, GPUS[Arch.SM120]),
)


@lru_cache
def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the GPU called `name`; None if it is not listed.

    Any characters but letters and digits may separate the words, so that names of tables work too.
    """
    words = re.sub(r"[^A-Za-z0-9]+", " ", name)
    for sheet in DATA_SHEETS:
        if re.search(r"\b" + sheet.pattern.replace("-", " "), words, re.IGNORECASE):
            return sheet
    return None


def bytes_per_flop(name: str) -> float | None:
    """Bytes of memory traffic for one 16-bit operation of a GPU; None for one without a data sheet."""
    sheet = data_sheet(name)
    return sheet.memory / sheet.tflops if sheet else None


def multiprocessors(name: str) -> int:
    """How many multiprocessors the GPU called `name` has; 0 if that is not known."""
    sheet = data_sheet(name)
    return sheet.gpu.multiprocessors if sheet and sheet.gpu else 0


@dataclass(frozen=True)
class Prediction:
    """`ms` for the whole problem; `blocks` resident on a multiprocessor; `bound`: the unit that limits."""

    ms: float
    blocks: int
    bound: str


@dataclass(frozen=True)
class Work:
    """What there is to do: owned tiles times heads, and the tiles that they visit in all (one head, all rows)."""

    heads: int  # q heads of all batch entries
    group: int  # q heads of one kv head
    rows: int  # queries; as many keys
    visits: int  # (query tile, key tile) pairs of one head


def occupancy(plan: Plan, gpu: Gpu, registers: int) -> int:
    """Blocks that fit a multiprocessor with so many registers a thread; 0 if none does."""
    launch = max(plan.launches, key=lambda launch: launch.shared_bytes)
    warps = launch.threads // 32
    per_warp = -(-registers * 32 // 256) * 256
    return min(
        65536 // (per_warp * warps),
        gpu.shared_bytes // (launch.shared_bytes + RESERVED),
        gpu.threads // launch.threads,
        gpu.blocks,
    )


def predict(plan: Plan, work: Work, registers: int) -> Prediction:
    """Time of one call on the architecture's GPU, if a thread of the main kernel has so many registers."""
    p = plan.spec.problem
    gpu = GPUS[p.arch]
    resident = occupancy(plan, gpu, registers)
    if resident == 0:
        return Prediction(math.inf, 0, "registers")
    t = plan.spec.tuning
    assert isinstance(t, (Sm80Forward, Sm80Backward, Fp32Forward, Fp32Backward))
    forward = p.direction is Direction.FORWARD
    units = _forward_units(plan, gpu) if forward else _backward_units(plan, gpu)
    owned, heads = -(-work.rows // (t.tile_m if forward else t.tile_n)), work.heads
    visits = work.visits
    stored = _tile_bytes(plan) * 4
    if isinstance(t, (Sm80Backward, Fp32Backward)):
        if t.split_heads:  # dK and dV are added up in memory
            stored += t.tile_n * (p.head_dim + p.head_dim_v) * 8
        else:
            heads, visits = heads // work.group, visits * work.group
    blocks = owned * heads
    resident = min(resident, max(1, -(-blocks // gpu.multiprocessors)))
    units = _balanced(units, t.warps * resident)
    step = _step(units, t.warps, resident, t.stages, 2 if forward else 4)
    # A block's first loads and its last stores are hidden by the other blocks alone.
    ends = (LATENCY * 3 + stored / gpu.l2_bytes) * (0.5 + 0.5 / resident)
    per_block = step * visits / owned + ends
    # Long tiles start first, so that the last wave is full but for half a tile.
    cycles = per_block * (blocks / gpu.multiprocessors + 0.5)
    return Prediction(cycles / gpu.ghz / 1e6, resident, max(units, key=lambda name: units[name]))


def _balanced(units: dict[str, float], warps: int) -> dict[str, float]:
    """Each quarter of a multiprocessor works for its own warps: what an uneven share of them leaves idle is lost."""
    lost = -(-warps // 4) * 4 / warps
    return {name: cycles * (1 if name in ("shared memory", "L2") else lost) for name, cycles in units.items()}


def _step(units: dict[str, float], warps: int, resident: int, stages: int, waits: int) -> float:
    """Cycles of one step of one block while `resident` blocks share the multiprocessor."""
    busy = {name: cycles for name, cycles in units.items() if name != "L2"}
    longest = max(busy.values())
    hidden_by = max(1.0, resident * math.sqrt(warps / 4))  # a block's warps wait for each other
    step = (
        longest
        + (sum(busy.values()) + L2_SHARE * units["L2"] - longest) / hidden_by
        + waits * BARRIER / resident
    )
    load = units["L2"]
    if stages == 1:  # a load has half a step, and the other blocks' steps
        exposed = max(0.0, LATENCY + load - step * (resident - 0.5)) / resident
    else:
        exposed = max(0.0, LATENCY + load - step * (stages - 1) * resident) / resident
    return max(step + exposed, load)


def _rate(plan: Plan, gpu: Gpu) -> float:
    """Multiply-adds a clock that a product of the problem's dtype gets."""
    if plan.spec.problem.dtype is DType.FLOAT32:
        return gpu.tf32_fma / TF32_PRODUCTS
    return gpu.half_fma


def _splitting(plan: Plan) -> float:
    """Float operations per operand element that float32 products add: an element is split into two tf32 values."""
    return 3.0 if plan.spec.problem.dtype is DType.FLOAT32 else 0.0


def _tile_bytes(plan: Plan) -> float:
    p, t = plan.spec.problem, plan.spec.tuning
    assert isinstance(t, (Sm80Forward, Sm80Backward, Fp32Forward, Fp32Backward))
    return (t.tile_m if plan.owner == "m" else t.tile_n) * (p.head_dim + p.head_dim_v) * p.dtype.bytes


def step_bytes(plan: Plan) -> float:
    """Bytes that a step of the main loop moves between the L2 cache and a multiprocessor, of any family's kernel."""
    p, t = plan.spec.problem, plan.spec.tuning
    dims = _padded(p.head_dim) + _padded(p.head_dim_v)
    if p.direction is Direction.FORWARD:
        return float(t.tile_n * dims * p.dtype.bytes)
    # Adding to dQ reads and writes a float in the L2 cache.
    return float(t.tile_m * (dims * p.dtype.bytes + _padded(p.head_dim) * 8))


def _padded(dim: int) -> int:
    """Columns that a product with so many works on."""
    return up(dim, 8)


def _forward_units(plan: Plan, gpu: Gpu) -> dict[str, float]:
    """Cycles of each unit in a step of the forward kernel: S = Q K^T, softmax, O += P V."""
    p, t = plan.spec.problem, plan.spec.tuning
    assert isinstance(t, (Sm80Forward, Fp32Forward))
    if isinstance(t, Fp32Forward) and t.o_splits == 0:
        return _lanes_units(plan, t, gpu)
    dims, size = _padded(p.head_dim) + _padded(p.head_dim_v), p.dtype.bytes
    pairs = t.tile_m * t.tile_n
    q_again = 0 if getattr(t, "q_in_regs", False) else t.tile_m * p.head_dim
    read = (t.warps * t.tile_n * dims + q_again) * size
    written = t.tile_n * dims * size
    lanes = 6 * pairs + t.tile_m * p.head_dim_v + _splitting(plan) * (read / size + pairs)
    return {
        "tensor cores": pairs * dims / _rate(plan, gpu),
        "shared memory": (read + written) / gpu.shared_rate,
        "exponentials": pairs / gpu.exponentials,
        "FP32 cores": lanes / gpu.lanes,
        "L2": step_bytes(plan) / gpu.l2_bytes,
    }


def _lanes_units(plan: Plan, t: Fp32Forward, gpu: Gpu) -> dict[str, float]:
    """The same where FP32 cores multiply: a thread reads its operands from shared memory, 16 bytes at a time."""
    p = plan.spec.problem
    dim, dim_v = _padded(p.head_dim), _padded(p.head_dim_v)
    pairs = t.tile_m * t.tile_n
    rows, keys = t.tile_m // t.warps // 4, t.tile_n // 8
    # A warp's read of 16 bytes a thread keeps shared memory busy for two clocks, of 8 or 4 bytes for one.
    scores = (rows + keys) * dim / 4 * 2
    values = t.tile_n / 4 * (rows * 2 + 4 * -(-dim_v // 16))
    written = t.tile_n * (dim + dim_v) * 4
    return {
        "tensor cores": 0.0,
        "shared memory": t.warps * (scores + values + rows * keys) + written / gpu.shared_rate,
        "exponentials": pairs / gpu.exponentials,
        "FP32 cores": (pairs * (dim + dim_v) + 6 * pairs + t.tile_m * dim_v) / gpu.lanes,
        "L2": step_bytes(plan) / gpu.l2_bytes,
    }


def _backward_units(plan: Plan, gpu: Gpu) -> dict[str, float]:
    """Cycles of each unit in a step of the backward kernel: S, dP, dV, dK, dQ; dQ is added in memory."""
    p, t = plan.spec.problem, plan.spec.tuning
    assert isinstance(t, (Sm80Backward, Fp32Backward))
    dim, dim_v, size = _padded(p.head_dim), _padded(p.head_dim_v), p.dtype.bytes
    pairs = t.tile_m * t.tile_n
    # Each warp reads the rows and columns of its share of a product: (grid over m, grid over n) of each.
    sdp = t.tile_m * (t.warps // t.warps_sdp) + t.tile_n * t.warps_sdp
    dkv = t.tile_n * (t.warps // t.warps_dkv) * t.tile_m + t.tile_m * dim * t.warps_dkv
    dq = t.tile_m * (t.warps // t.warps_dq) * t.tile_n + t.tile_n * dim * t.warps_dq
    read = (sdp * (dim + dim_v) + dkv * (1 + dim_v / dim) + dq) * size
    written = (t.tile_m * (dim + dim_v) + 2 * pairs) * size
    lanes = 8 * pairs + _splitting(plan) * read / size
    return {
        "tensor cores": pairs * (3 * dim + 2 * dim_v) / _rate(plan, gpu),
        "shared memory": (read + written) / gpu.shared_rate,
        "exponentials": pairs / gpu.exponentials,
        "FP32 cores": lanes / gpu.lanes,
        "L2": step_bytes(plan) / gpu.l2_bytes,
    }
