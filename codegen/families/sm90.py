"""The Hopper forward in 16 bits: TMA, wgmma, a producer warpgroup and one to three consumer warpgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.hopper import (
    REASONS,
    REGISTERS,
    REGISTERS_BESIDES,
    REGISTERS_BUSY,
    SWIZZLE_CODE,
    consumer_warpgroups,
    require_hopper,
    require_registers,
    require_shared,
    require_tiles,
    wgmma_type,
)
from attnforge.codegen.families.limits import SHARED_LIMIT, require_words
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.spec import Arch, Mask, Problem, Spec, Tuning, knob

# Of a thread, for the addresses in several tensors that a score reads: an estimate, so that the tiles which are left do
# not spill (96 keys a tile: 156 bytes, with three consumers 1200; tests/kernels/test_score_kernels.py compiles 64).
SCORE_REGISTERS = 80


@dataclass(frozen=True)
class Sm90Forward(Tuning):
    """Tuning of the Hopper forward kernel (TMA, wgmma, a producer warpgroup)."""

    tile_m: int = knob("m", "query rows per tile, 64 for each consumer warpgroup")
    tile_n: int = knob("n", "keys per step of the main loop")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    ping_pong: bool = knob(
        "p", "warpgroup ordering barrier: the softmax of one overlaps the products of another"
    )
    persistent: bool = knob("r", "one block per multiprocessor walks many tiles")
    dynamic: bool = knob(
        "k", "dynamic tile scheduler: a block takes its next work tile from tile_counter", was="counter"
    )
    q_in_regs: bool = knob("q", "keep the fragments of Q in registers")
    cluster: int = knob(
        "c", "blocks, 1 or 2, of neighbouring query tiles that share their loads of K and V", 1
    )


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a Hopper spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Forward)
    require_hopper(p, "forward", 256)
    require_words(spec)
    consumers = consumer_warpgroups(t.tile_m, t.tile_n, t.stages, t.ping_pong)
    if t.cluster not in (1, 2):
        raise Infeasible(f"cluster {t.cluster}: must be 1 or 2")
    if t.cluster > 1 and p.mask is not Mask.FULL:
        raise Infeasible(
            f"cluster: its blocks must visit the same key tiles, which a {p.mask.value} mask denies"
        )
    if p.intervals > 2 and consumers > 2:
        raise Infeasible(
            f"intervals {p.intervals}: their bounds take registers that {consumers} consumer warpgroups do not have; "
            "tile_m 128 fits"
        )
    if len(p.score.tensors) > 1 and consumers > 2:
        raise Infeasible(
            f"score: reads {len(p.score.tensors)} tensors, whose addresses take registers that {consumers} consumer "
            "warpgroups do not have; tile_m 128 fits"
        )
    return _forward(spec, t, consumers)


@dataclass(frozen=True)
class Panels:
    """How a row of `head_dim` columns lies in shared memory: `count` panels of `columns`, then one of `tail` columns.

    A TMA copy takes time by the row of its box, not by the byte, so panels are as wide as the widest swizzle (64
    columns). 72 columns are stored as 64 + 16; a remainder above 32 takes a whole panel. Tails are zeros.
    """

    columns: int
    count: int
    tail: int

    @property
    def row(self) -> int:
        """Columns of a stored row."""
        return self.columns * self.count + self.tail


def panels_of(head_dim: int) -> Panels:
    """The panels of a tile with rows of `head_dim` columns."""
    whole, rest = divmod(head_dim, 64)
    if rest == 0 or rest > 32:
        return Panels(64, whole + (rest > 0), 0)
    narrow = 16 if rest <= 16 else 32
    return Panels(64, whole, narrow) if whole else Panels(narrow, 1, 0)


def tensor_maps(tensor: str, head_dim: int, rows: int, together: int) -> tuple[TensorMap, ...]:
    """Descriptors that copy `rows` rows of `tensor`: `together` panels at once, and the tail if there is one."""
    panels = panels_of(head_dim)
    maps = (TensorMap(tensor, panels.columns, rows, together),)
    return (*maps, TensorMap(tensor, panels.tail, rows, 1)) if panels.tail else maps


def _hidden(t: Sm90Forward) -> int:
    """Most key tiles that a causal query tile visits although its first 64 rows see nothing of them."""
    return -(-(t.tile_m - 64) // t.tile_n)


def _order(mask: Mask, t: Sm90Forward) -> dict[str, Any]:
    """Fields of a plan about the order of work: which warpgroup computes which tiles, and which tiles start first."""
    consumers, causal = t.tile_m // 64, mask is Mask.CAUSAL
    return {
        "row_groups": consumers if mask.listed else 1,
        "short_last": mask is Mask.FULL and consumers > 1 and t.cluster == 1,
        "from_end": causal,
        # Hidden tiles are released while the last P V of the previous work tile still holds its buffer: the first
        # visible tile needs another one.
        "staggered": causal and 0 < _hidden(t) < t.stages,
        "alternating": causal and t.persistent,
    }


def _forward(spec: Spec, t: Sm90Forward, consumers: int) -> Plan:
    d, mask = spec.problem.head_dim, spec.problem.mask
    order = _order(mask, t)
    shared, q_buffers, broadcast = _shared(spec, t, order["row_groups"])
    busy = broadcast or t.cluster > 1
    producer_registers, consumer_registers = (REGISTERS_BUSY if busy else REGISTERS)[consumers]
    live = t.tile_n // 2 + t.tile_n // 4 + d // 2 + (-(-d // 16) * 4 if t.q_in_regs else 0)
    addresses = SCORE_REGISTERS if len(spec.problem.score.tensors) > 1 else 0
    require_registers(live + addresses, consumer_registers, "S, P, O and Q")
    threads = 128 * (consumers + 1)
    grid = ("tiles_m", "batch", "heads_q")
    return Plan(
        spec=spec,
        template="sm90a/forward.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, grid, threads, shared, t.persistent, t.cluster),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        **order,
        cluster=t.cluster,
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=mask is Mask.SPANS,
        bits="k" if mask is Mask.DENSE else "",
        tensor_maps=_forward_maps(t, d),
        constants=_panel_constants(d)
        | {
            "consumers": consumers,
            "type": wgmma_type(spec.problem.dtype),
            "shared_bytes": shared,
            "q_buffers": q_buffers,
            "broadcast": broadcast,
            "hidden": _hidden(t),
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _shared(spec: Spec, t: Sm90Forward, row_groups: int) -> tuple[int, int, bool]:
    """Bytes of shared memory, buffers of Q, and whether the producer broadcasts each work tile to the consumers."""
    row, mask = panels_of(spec.problem.head_dim).row * 2, spec.problem.mask
    q_bytes, kv_bytes = t.tile_m * row, t.tile_n * row
    require_tiles(64 * row, kv_bytes)
    bounds = t.stages * t.tile_n * 8 * spec.problem.intervals if mask is Mask.SPANS else 0
    shared = 2 * t.stages * kv_bytes + bounds + 8 * 4 * t.stages
    # With two buffers, Q of the next work tile arrives before O of this one is stored.
    q_buffers = 2 if t.persistent and shared + 2 * (q_bytes + 16) <= SHARED_LIMIT[Arch.SM90] else 1
    shared += q_buffers * (q_bytes + 16)
    if t.dynamic and (q_buffers < 2 or mask is not Mask.SPANS):
        raise Infeasible(
            "dynamic: takes spans (tile_counter is part of their schedule), persistent, room for two Q"
        )
    # The producer runs ahead, so it decodes a work tile and broadcasts it: 16 bytes, and 16 for each row group if
    # there are several.
    work_tile = 16 * (1 + row_groups if row_groups > 1 else 1)
    fits = q_buffers > 1 and shared + q_buffers * work_tile <= SHARED_LIMIT[Arch.SM90]
    broadcast = t.dynamic or (fits and not mask.listed)
    shared += q_buffers * work_tile if broadcast else 0
    require_shared(shared)
    return shared, q_buffers, broadcast


def _together(panels: Panels, head_dim: int) -> int:
    """Panels of one copy: all, or one where the last panel reaches past head_dim."""
    return panels.count if panels.columns * panels.count <= head_dim else 1


def _forward_maps(t: Sm90Forward, head_dim: int) -> tuple[TensorMap, ...]:
    together = _together(panels_of(head_dim), head_dim)
    # Neither the 64 rows of O that a warpgroup stores nor the rows of K and V that a block of a cluster loads are a
    # whole tile: their panels are not adjacent, so each takes a copy of its own.
    share = (t.tile_n // t.cluster, together if t.cluster == 1 else 1)
    tiles = (("q", t.tile_m, together), ("k", *share), ("v", *share), ("out", 64, 1))
    return sum((tensor_maps(name, head_dim, *tile) for name, *tile in tiles), ())


def _panel_constants(head_dim: int) -> dict[str, int | str]:
    """Constants about a row of a tile."""
    panels = panels_of(head_dim)
    return {
        "columns": panels.columns,
        "panels": panels.count,
        "tail": panels.tail,
        "copies": panels.count // _together(panels, head_dim),
        "swizzle": SWIZZLE_CODE[panels.columns * 2],
        "tail_swizzle": SWIZZLE_CODE[panels.tail * 2] if panels.tail else 0,
    }


# ---- Space

# What won on an H200 (docs/performance.md), up to 96 columns and beyond. Without a table, the first that fits is taken.
# tile_m, tile_n, stages, ping_pong, persistent, dynamic, q_in_regs, cluster
NARROW = (
    Sm90Forward(192, 96, 3, True, True, True, True),
    Sm90Forward(192, 128, 3, True, True, False, False),
    Sm90Forward(192, 128, 2, True, True, True, False),
    Sm90Forward(192, 96, 3, True, True, False, True),
    Sm90Forward(192, 128, 2, True, True, False, False),
    Sm90Forward(192, 112, 3, True, True, False, True),
)
WIDE = (
    Sm90Forward(192, 80, 3, True, True, True, False),
    Sm90Forward(192, 80, 3, False, True, False, False),
    Sm90Forward(192, 80, 2, True, True, False, False),
    Sm90Forward(128, 128, 2, False, True, True, True),
    Sm90Forward(128, 128, 2, True, True, False, True),
    Sm90Forward(128, 144, 2, False, True, True, True),
    Sm90Forward(128, 160, 2, False, True, False, False),
    Sm90Forward(192, 64, 3, False, True, False, False),
)
# A third buffer lets warpgroups begin at their own diagonals (`staggered`).
CAUSAL_WIDE = Sm90Forward(192, 80, 3, True, True, False, False)
# Without a mask, blocks may share their loads of K and V: behind the guesses, among the eight of a short search.
CLUSTERS = {
    True: (
        Sm90Forward(192, 128, 3, True, True, False, False, 2),
        Sm90Forward(192, 128, 2, True, True, False, False, 2),
    ),
    False: (
        Sm90Forward(192, 64, 3, False, True, False, False, 2),
        Sm90Forward(192, 80, 2, True, True, False, False, 2),
    ),
}
# Dense masks often come in blocks of 64 or 128: tiles that such blocks fill are seen whole or not at all.
# The first two are the winners of blocks of 128 on an H200, half and nine tenths hidden (docs/performance.md).
DENSE = (
    Sm90Forward(128, 128, 2, True, True, False, True),
    Sm90Forward(128, 128, 2, False, True, False, True),
    Sm90Forward(128, 64, 3, False, True, False, False),
    Sm90Forward(128, 128, 2, False, True, False, False),
    Sm90Forward(128, 64, 3, True, True, False, True),
    Sm90Forward(128, 128, 2, True, True, False, False),
    Sm90Forward(64, 64, 3, False, True, False, False),
)


# Of three or four intervals, whose bounds take registers.
INTERVALS = Sm90Forward(128, 128, 2, False, True, True, False)
# Of scores that read several tensors, whose addresses take more.
TENSORS = Sm90Forward(128, 64, 3, False, True, False, False)


def tunings(problem: Problem) -> Iterator[Sm90Forward]:
    """What a search tries, best guess first."""
    narrow = problem.head_dim <= 96
    if len(problem.score.tensors) > 1:
        yield TENSORS
    if problem.intervals > 2:
        yield INTERVALS
    if problem.mask is Mask.DENSE:
        yield from DENSE
    if problem.mask is Mask.CAUSAL and not narrow:
        yield CAUSAL_WIDE
    yield from NARROW if narrow else WIDE
    clusters = problem.mask is Mask.FULL  # other masks have none
    if clusters:
        yield from CLUSTERS[narrow]
    tiles = (192, 128, 64) if narrow else (128, 192, 64)
    blocks = ((True, True), (True, False), (False, False))  # persistent, dynamic
    for cluster, tile_m, tile_n, stages, (persistent, dynamic), ping_pong, q_in_regs in product(
        (1, 2) if clusters else (1,),
        tiles,
        (128, 160, 144, 112, 96, 80, 64),
        (2, 3),
        blocks,
        (True, False),
        (True, False),
    ):
        yield Sm90Forward(tile_m, tile_n, stages, ping_pong, persistent, dynamic, q_in_regs, cluster)


FORWARD = Family(
    Sm90Forward, plan, tunings, honours=frozenset({"intervals", "planes", "score"}), reasons=REASONS
)
