"""The Hopper forward in float32: wgmma on three bf16 splits of every float, a producer warpgroup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.hopper import (
    ALIGNMENT,
    REASONS,
    REGISTERS_BESIDES,
    consumer_warpgroups,
    require_registers,
    require_shared,
)
from attnforge.codegen.families.limits import require_fp32, up
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan
from attnforge.codegen.spec import Mask, Problem, Spec, Tuning, knob

SPLITS = 3  # bf16 that a float is the sum of
PREPARE_THREADS = 256  # of a block of _preprocess
HEAD_DIM_LIMIT = 160  # the largest that tests run on a GPU; registers would do for 184
# Registers of a producer and of a consumer thread by number of consumer warpgroups; with fewer, producers spill.
REGISTERS = {1: (40, 240), 2: (40, 232), 3: (56, 152)}


@dataclass(frozen=True)
class Sm90Fp32Forward(Tuning):
    """Tuning of the Hopper float32 forward kernel (wgmma on bf16 splits of floats, a producer warpgroup)."""

    tile_m: int = knob("m", "query rows per tile, 64 for each consumer warpgroup")
    tile_n: int = knob("n", "keys per step of the main loop")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    ping_pong: bool = knob(
        "p", "warpgroup ordering barrier: the softmax of one overlaps the products of another"
    )
    persistent: bool = knob("r", "one block per multiprocessor walks many tiles")
    q_in_regs: bool = knob("q", "keep the fragments of Q in registers")


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    assert isinstance(spec.tuning, Sm90Fp32Forward)
    require_fp32(spec)
    widest = max(spec.problem.head_dim, spec.problem.head_dim_v)
    if widest > HEAD_DIM_LIMIT:
        raise Infeasible(
            f"the sm90a fp32 forward takes 1 to {HEAD_DIM_LIMIT}; sm90 takes this call", f"head_dim {widest}"
        )
    t = spec.tuning
    return _plan(spec, t, consumer_warpgroups(t.tile_m, t.tile_n, t.stages, t.ping_pong))


def span(head_dim: int) -> int:
    """Bytes of a row of a panel: the widest swizzle whose panels tile a row of whole k16 steps."""
    return next(size for size in (128, 64, 32) if up(head_dim, 16) * 2 % size == 0)


def _plan(spec: Spec, t: Sm90Fp32Forward, consumers: int) -> Plan:
    p = spec.problem
    shared, live = _shared(spec, t), _live(spec, t)
    require_shared(shared)
    require_registers(live, REGISTERS[consumers][1], "O, a tile's share of it, bf16 splits of P and Q")
    main, threads = ("tiles_m", "batch", "heads_q"), 128 * (consumers + 1)
    return Plan(
        spec=spec,
        template="sm90a/forward_fp32.cu.jinja",
        suffix=".cu",
        launches=(
            Launch(f"{spec.symbol}_preprocess", ("tiles_n", "batch", "heads_kv"), PREPARE_THREADS),
            Launch(spec.symbol, main, threads, shared, t.persistent),
        ),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        row_groups=consumers if p.mask.listed else 1,
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=p.mask is Mask.SPANS,
        bits="k" if p.packed else "",
        dkv_accum=True,
        columns=SPLITS * up(p.head_dim, 16) // 2,  # floats of a row of bf16 splits of K
        columns_v=SPLITS * up(p.head_dim_v, 16) // 2,
        constants=_constants(p, t, consumers) | {"shared_bytes": shared},
    )


def _shared(spec: Spec, t: Sm90Fp32Forward) -> int:
    """Bytes: splits of Q unless registers hold them, buffers of those of K, then of V with bounds and barriers."""
    row, row_v = (SPLITS * up(dim, 16) * 2 for dim in (spec.problem.head_dim, spec.problem.head_dim_v))
    bounds = 8 * t.tile_n * spec.problem.intervals if spec.problem.mask is Mask.SPANS else 0
    q_bytes = 0 if t.q_in_regs else t.tile_m * row
    offset_v = up(q_bytes + t.stages * t.tile_n * row, ALIGNMENT)
    return offset_v + t.stages * (t.tile_n * row_v + bounds + 8 * 4)


def _live(spec: Spec, t: Sm90Fp32Forward) -> int:
    """Registers of a consumer thread for O, a tile's share of it and P's splits; S is gone by then. Before, S and O."""
    out, p_splits = up(spec.problem.head_dim_v, 8) // 2, SPLITS * t.tile_n // 4
    q_splits = SPLITS * up(spec.problem.head_dim, 16) // 4 if t.q_in_regs else 0
    return max(2 * out + p_splits, out + t.tile_n // 2) + q_splits


def _constants(p: Problem, t: Sm90Fp32Forward, consumers: int) -> dict[str, Any]:
    producer_registers, consumer_registers = REGISTERS[consumers]
    even = p.head_dim % 2 == 0 and p.head_dim_v % 2 == 0
    return {
        "consumers": consumers,
        "type": "bf16",
        "padded": up(p.head_dim, 16),
        "padded_v": up(p.head_dim_v, 16),
        "span": span(p.head_dim),
        "span_v": span(p.head_dim_v),
        "columns_out": up(p.head_dim_v, 8),
        # Two floats at a time: no pair of a row reaches past its end, and all are aligned.
        "pairs": p.align >= 8 and even,
        "even_out": even,
        "meets": t.ping_pong or not t.q_in_regs,
        "prepare_threads": PREPARE_THREADS,
        "producer_registers": producer_registers,
        "consumer_registers": consumer_registers,
    }


# ---- Space

# Of the Hopper kernel: (largest head_dim, tuning). Of those up to 128 the first was within 8 % of the fastest in all
# shapes of docs/challenge.md, on an H200; beyond 128 nothing was measured.
# tile_m, tile_n, stages, ping_pong, persistent, q_in_regs
GUESSES = (
    (64, Sm90Fp32Forward(128, 64, 2, True, True, True)),
    (64, Sm90Fp32Forward(128, 64, 2, True, False, True)),
    (64, Sm90Fp32Forward(128, 96, 2, True, True, True)),
    (64, Sm90Fp32Forward(192, 64, 2, True, False, False)),
    (128, Sm90Fp32Forward(128, 64, 1, True, True, False)),
    (128, Sm90Fp32Forward(128, 32, 2, True, True, False)),
    (HEAD_DIM_LIMIT, Sm90Fp32Forward(128, 32, 1, True, True, False)),
    (HEAD_DIM_LIMIT, Sm90Fp32Forward(64, 32, 1, False, True, False)),
)


def tunings(problem: Problem) -> Iterator[Sm90Fp32Forward]:
    """What a search tries, best guess first."""
    yield from (tuning for limit, tuning in GUESSES if problem.largest_dim <= limit)
    for tile_m, tile_n, stages, ping_pong, persistent, q_in_regs in product(
        (128, 192, 64), (64, 96, 80, 128, 48, 32), (2, 1, 3), (True, False), (True, False), (True, False)
    ):
        yield Sm90Fp32Forward(tile_m, tile_n, stages, ping_pong, persistent, q_in_regs)


FORWARD = Family(
    Sm90Fp32Forward,
    plan,
    tunings,
    honours=frozenset({"align", "dim_v", "intervals", "planes"}),
    reasons=REASONS,
)
