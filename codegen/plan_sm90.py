"""Plans of the Hopper family: TMA boxes, wgmma shapes, shared memory, and why a spec does not fit."""

from __future__ import annotations

from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.plan_sm80 import SHARED_LIMIT, schedule_launches
from attnforge.codegen.spec import Arch, DType, Mask, Problem, Sm90Forward, Spec

# Registers of a producer and of a consumer thread by number of consumer warpgroups. The kernel starts with
# 65536 / threads (rounded down to 8) each; what the producer gives back, the consumers take.
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
# Addresses, loop counters, row statistics: what a consumer uses beyond S, P and O.
REGISTERS_BESIDES = 28
# Descriptor code of the swizzle by bytes of a panel row (PTX ISA, wgmma matrix descriptor).
SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}
ALIGNMENT = 1024  # of every tile: the period of the widest swizzle


def make_plan(spec: Spec) -> Plan:
    """Plan of a Hopper spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Forward)
    if p.dtype is DType.FLOAT32:
        raise Infeasible("dtype fp32: the sm90a kernels take bf16 or fp16")
    if p.align != 16:
        raise Infeasible(
            f"align {p.align}: TMA needs rows that start at multiples of 16 bytes; sm90 takes this call"
        )
    if p.head_dim % 8 or not 16 <= p.head_dim <= 256:
        raise Infeasible(
            f"head_dim {p.head_dim}: the sm90a forward kernel takes multiples of 8 from 16 to 256"
        )
    require_plain(p)
    consumers = t.tile_m // 64
    if t.tile_m % 64 or consumers not in REGISTERS:
        raise Infeasible(f"tile_m {t.tile_m}: must be 64, 128 or 192")
    if t.tile_n % 16 or not 16 <= t.tile_n <= 256:
        raise Infeasible(f"tile_n {t.tile_n}: must be a multiple of 16 up to 256")
    if t.stages < 1 or t.stages > 4:
        raise Infeasible(f"stages {t.stages}: must be 1 to 4")
    if t.ping_pong and consumers < 2:
        raise Infeasible("ping_pong: takes at least two consumer warpgroups, tile_m 128 or more")
    return _forward(spec, t, consumers)


def require_plain(p: Problem) -> None:
    """Infeasible for what only the mma.sync family does."""
    if p.dim_v:
        raise Infeasible(f"head_dim {p.head_dim}, {p.dim_v} of v: the sm90a kernels take equal ones")
    if p.mask is Mask.DENSE:
        raise Infeasible("dense mask: the sm90a kernels take full, causal and spans")


def panel_columns(head_dim: int) -> int:
    """Columns of a panel: the widest swizzle whose panels tile the row (72 is stored as 80, its tail zero)."""
    padded = -(-head_dim // 16) * 16
    return next(columns for columns in (64, 32, 16) if padded % columns == 0)


def _forward(spec: Spec, t: Sm90Forward, consumers: int) -> Plan:
    d = spec.problem.head_dim
    padded = -(-d // 16) * 16
    columns = panel_columns(d)
    panels = padded // columns
    q_bytes, kv_bytes = t.tile_m * padded * 2, t.tile_n * padded * 2
    if q_bytes // consumers % ALIGNMENT or kv_bytes % ALIGNMENT:
        raise Infeasible(f"tiles of {q_bytes} and {kv_bytes} bytes: must be multiples of {ALIGNMENT} bytes")
    spans = spec.problem.mask is Mask.SPANS
    bounds = t.stages * t.tile_n * 8 if spans else 0
    shared = q_bytes + 2 * t.stages * kv_bytes + bounds + 8 * (2 + 4 * t.stages)
    limit = SHARED_LIMIT[Arch.SM90]
    separate_out = shared + q_bytes <= limit
    shared += q_bytes if separate_out else 0
    if shared > limit:
        raise Infeasible(f"shared memory: {shared} bytes, {shared - limit} more than sm90a has ({limit})")
    if t.q_in_regs and not separate_out:
        raise Infeasible(
            f"q_in_regs: {shared + q_bytes - limit} bytes are missing for a buffer of O beside that of Q"
        )
    producer_registers, consumer_registers = REGISTERS[consumers]
    live = t.tile_n // 2 + t.tile_n // 4 + d // 2 + (padded // 4 if t.q_in_regs else 0)
    if live > consumer_registers - REGISTERS_BESIDES:
        over = live - consumer_registers + REGISTERS_BESIDES
        raise Infeasible(f"registers: S, P, O and Q take {live} of a consumer thread, {over} more than fit")
    whole = 1 if d % 16 else panels  # a row that is padded must be copied panel by panel
    threads = 128 * (consumers + 1)
    grid = ("tiles_m", "batch", "heads_q")
    return Plan(
        spec=spec,
        template="sm90a/forward.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, grid, threads, shared, persistent=t.persistent),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=spans,
        tensor_maps=(
            TensorMap("q", columns, t.tile_m, whole),
            TensorMap("k", columns, t.tile_n, whole),
            TensorMap("v", columns, t.tile_n, whole),
            TensorMap("out", columns, 64, whole),
        ),
        constants={
            "consumers": consumers,
            "type": "bf16" if spec.problem.dtype is DType.BFLOAT16 else "f16",
            "padded": padded,
            "columns": columns,
            "panels": panels,
            "copies": panels // whole,
            "swizzle": SWIZZLE_CODE[columns * 2],
            "shared_bytes": shared,
            "separate_out": separate_out,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )
