"""The Hopper forward in 16 bits for wide heads: head dims 384 and 512, as in the attention of image autoencoders.

O of 64 queries takes 256 columns at most in a warpgroup's registers. So a cluster of two blocks shares a query tile,
and each block has half of the columns of Q, K, V and O. The blocks send each other their parts of S, of which both then
have all. What they send limits them: docs/experiments.md, 124.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.hopper import (
    COLUMNS,
    PAIR,
    REASONS,
    REGISTERS,
    REGISTERS_BESIDES,
    REGISTERS_BUSY,
    SWIZZLE_CODE,
    consumer_warpgroups,
    require_forward_knobs,
    require_hopper,
    require_registers,
    require_shared,
    wgmma_type,
)
from attnforge.codegen.families.limits import HEAD_DIM_LIMIT
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.spec import Mask, Problem, Spec, Tuning, knob

KERNEL = "the sm90a forward kernel for wide heads"
NONE = f"{KERNEL} takes none"
# Why other values do not work. The kernel of sm90 takes several intervals, and a head_dim of v of its own.
REFUSED = dict.fromkeys(("planes", "mask_mod", "score"), NONE) | {
    "intervals": f"{KERNEL} takes one; sm90 takes this call",
    "dim_v": f"{KERNEL} takes that of q and k; sm90 takes this call",
}


@dataclass(frozen=True)
class Sm90ForwardWide(Tuning):
    """Tuning of the Hopper forward for wide heads (two blocks share a query tile)."""

    tile_m: int = knob("m", "query rows per tile, 64 for each consumer warpgroup: 64 or 128")
    tile_n: int = knob("n", "keys per step of the main loop")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    stages_v: int = knob(
        "v", "shared-memory buffers for V, if more than for K; 0: as many as for K", 0, quiet=True
    )
    exact_visits: int = knob(
        "e",
        "first visits of a work tile that update row maxima, later ones only if P grows; 0: all",
        3,
        quiet=True,
    )


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a spec of this family, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90ForwardWide)
    require_hopper(p, "forward", PAIR * HEAD_DIM_LIMIT)
    _require_problem(p)
    consumers = consumer_warpgroups(t.tile_m, t.tile_n, t.stages, ping_pong=False)
    require_forward_knobs(t.stages, t.stages_v, t.exact_visits)
    columns = p.head_dim // PAIR
    panels = columns // COLUMNS
    live = t.tile_n // 2 + t.tile_n // 4 + columns // 2
    # With 256 columns and a mask consumers spill beside a busy producer; without a mask the other producer does.
    roomy = p.mask is Mask.FULL or columns < HEAD_DIM_LIMIT
    producer_registers, consumer_registers = (REGISTERS_BUSY if roomy else REGISTERS)[consumers]
    require_registers(live, consumer_registers, "S, P and O")
    shared = _shared_bytes(p, t, consumers)
    require_shared(shared)
    grid = ("tiles_m", "batch", "heads_q")
    tiles = (("q", t.tile_m, panels), ("k", t.tile_n, panels), ("v", t.tile_n, panels), ("out", 64, 1))
    return Plan(
        spec=spec,
        template="sm90a/forward_wide.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, grid, 128 * (consumers + 1), shared, per_tile=PAIR),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=p.mask is Mask.SPANS,
        tensor_maps=tuple(TensorMap(tensor, COLUMNS, rows, of_copy) for tensor, rows, of_copy in tiles),
        constants={
            "consumers": consumers,
            "type": wgmma_type(p.dtype),
            "shared_bytes": shared,
            "columns": COLUMNS,
            "panels": panels,
            "panels_v": panels,
            "out_panels": panels,
            "tail": 0,
            "copies": 1,
            "swizzle": SWIZZLE_CODE[COLUMNS * 2],
            "halved": True,
            "broadcast": False,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _require_problem(p: Problem) -> None:
    """Infeasible for problems that the kernel does not take."""
    if p.head_dim % (PAIR * COLUMNS):
        raise Infeasible(f"{KERNEL} takes 384 and 512", f"head_dim {p.head_dim}")
    if p.mask is Mask.DENSE:
        raise Infeasible(f"mask {p.mask.value}: {NONE}")


def _shared_bytes(p: Problem, t: Sm90ForwardWide, consumers: int) -> int:
    """Bytes of shared memory of a block."""
    stages_v = t.stages_v or t.stages
    tiles = (t.tile_m + (t.stages + stages_v) * t.tile_n) * p.head_dim // PAIR * 2  # Q, K and V
    parts = consumers * 64 * t.tile_n * 4  # of S, from the peer
    bounds = t.stages * t.tile_n * 8 if p.mask is Mask.SPANS else 0
    return tiles + parts + bounds + 8 * (1 + 2 * (t.stages + stages_v + consumers))  # barriers


# ---- Space

# The first is the fastest at 16,384 tokens on an H200 of those that do not spill. Beside Q and the peer's part of S
# there is room for two buffers of 64 keys.
GUESSES = (Sm90ForwardWide(128, 64, 2), Sm90ForwardWide(128, 48, 2), Sm90ForwardWide(64, 64, 2))


def tunings(_: Problem) -> Iterator[Sm90ForwardWide]:
    """What a search tries, best guess first."""
    yield from GUESSES
    loads = ((2, 0), (1, 0), (3, 0), (1, 2), (2, 3))  # stages, stages_v
    for tile, (stages, stages_v) in product(product((128, 64), (64, 80, 96, 48, 112, 128, 32)), loads):
        yield Sm90ForwardWide(*tile, stages, stages_v)


FORWARD = Family(Sm90ForwardWide, plan, tunings, reasons=REASONS | REFUSED)
