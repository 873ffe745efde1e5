"""Plans of the Hopper float32 forward: three bf16 parts of every float, shared memory, registers, and what fits."""

from __future__ import annotations

from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.plan_sm80 import require_words, schedule_launches, up
from attnforge.codegen.plan_sm90 import ALIGNMENT, REGISTERS_BESIDES, require_registers, require_shared
from attnforge.codegen.spec import Mask, Spec
from attnforge.codegen.tuning import Sm90Fp32Forward

PARTS = 3  # bf16 that a float is the sum of
PREPARE_THREADS = 256  # of a block of _prepare
MAX_HEAD_DIM = 256
# Registers of a producer and of a consumer thread by number of consumer warpgroups; with fewer, producers spill.
REGISTERS = {1: (40, 240), 2: (40, 232), 3: (56, 152)}


def make_plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Fp32Forward)
    for name, dim in (("head_dim", p.head_dim), ("head_dim of v", p.head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise Infeasible(f"{name} {dim}: the sm90a fp32 kernel takes 1 to {MAX_HEAD_DIM}")
    if p.align not in (4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 4, 8 or 16 bytes")
    require_words(spec)
    consumers = t.tile_m // 64
    if t.tile_m % 64 or consumers not in REGISTERS:
        raise Infeasible(f"tile_m {t.tile_m}: must be 64, 128 or 192")
    if t.tile_n % 16 or not 16 <= t.tile_n <= 256:
        raise Infeasible(f"tile_n {t.tile_n}: must be a multiple of 16 up to 256")
    if not 1 <= t.stages <= 4:
        raise Infeasible(f"stages {t.stages}: must be 1 to 4")
    if t.ping_pong and consumers < 2:
        raise Infeasible("ping_pong: takes at least two consumer warpgroups, tile_m 128 or more")
    return _plan(spec, t, consumers)


def span(head_dim: int) -> int:
    """Bytes of a row of a panel: the widest swizzle whose panels tile a row of whole k16 steps."""
    return next(size for size in (128, 64, 32) if up(head_dim, 16) * 2 % size == 0)


def _plan(spec: Spec, t: Sm90Fp32Forward, consumers: int) -> Plan:
    p = spec.problem
    padded, padded_v, columns_out = up(p.head_dim, 16), up(p.head_dim_v, 16), up(p.head_dim_v, 8)
    spans = p.mask is Mask.SPANS
    q_bytes = 0 if t.q_in_regs else PARTS * t.tile_m * padded * 2
    offset_v = up(q_bytes + t.stages * PARTS * t.tile_n * padded * 2, ALIGNMENT)
    shared = offset_v + t.stages * (PARTS * t.tile_n * padded_v * 2 + (8 * t.tile_n if spans else 0) + 8 * 4)
    require_shared(shared)
    producer_registers, consumer_registers = REGISTERS[consumers]
    q_registers = PARTS * padded // 4 if t.q_in_regs else 0
    # O, a tile's share of it and P in parts; S is gone by then. Before, S and O.
    live = max(columns_out + PARTS * t.tile_n // 4, columns_out // 2 + t.tile_n // 2) + q_registers
    require_registers(live, consumer_registers, "O, a tile's share of it, P and Q in parts")
    return Plan(
        spec=spec,
        template="sm90a/forward_fp32.cu.jinja",
        suffix=".cu",
        launches=(
            Launch(f"{spec.symbol}_prepare", ("tiles_n", "batch", "heads_kv"), PREPARE_THREADS),
            Launch(
                spec.symbol,
                ("tiles_m", "batch", "heads_q"),
                128 * (consumers + 1),
                shared,
                t.persistent,
            ),
        ),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        parts=consumers if p.mask.listed else 1,
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=spans,
        bits="k" if p.mask is Mask.DENSE else "",
        dkv_accum=True,
        columns=PARTS * padded // 2,  # floats of a row of K in parts
        columns_v=PARTS * padded_v // 2,
        constants={
            "consumers": consumers,
            "type": "bf16",
            "padded": padded,
            "padded_v": padded_v,
            "span": span(p.head_dim),
            "span_v": span(p.head_dim_v),
            "columns_out": columns_out,
            # Two floats at a time: no pair of a row reaches past its end, and all are aligned.
            "pairs": p.align >= 8 and p.head_dim % 2 == 0 and p.head_dim_v % 2 == 0,
            "even_out": p.head_dim % 2 == 0 and p.head_dim_v % 2 == 0,
            "meets": t.ping_pong or not t.q_in_regs,
            "prepare_threads": PREPARE_THREADS,
            "shared_bytes": shared,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )
