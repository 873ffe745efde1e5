"""The Hopper forwards in 16 bits: TMA, wgmma, a producer warpgroup and one to three consumer warpgroups.

Knob `splits` chooses the kernel for short queries, whose blocks share the keys. Head dims above 256 have a family of
their own (sm90_forward_wide.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attnforge.codegen.families.family import Family, is_feasible
from attnforge.codegen.families.hopper import (
    REASONS,
    REGISTERS,
    REGISTERS_BESIDES,
    REGISTERS_BUSY,
    SECTION_MB,
    SWIZZLE_CODE,
    consumer_warpgroups,
    require_forward_knobs,
    require_hopper,
    require_registers,
    require_sections,
    require_shared,
    require_tiles,
    slot_words,
    wgmma_type,
)
from attnforge.codegen.families.limits import COMBINE_THREADS, HEAD_DIM_LIMIT, SHARED_LIMIT, require_words
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.spec import Arch, DType, Mask, Problem, Spec, Tuning, knob

# Of a thread, for the addresses in several tensors that a score reads for each pair: an estimate, so that the tiles
# which are left do not spill (96 keys a tile: 156 bytes, with three consumers 1200; test_score_kernels.py compiles 64).
SCORE_REGISTERS = 80


@dataclass(frozen=True)
class Sm90Forward(Tuning):
    """Tuning of the Hopper forward kernel (TMA, wgmma, a producer warpgroup)."""

    retired = {"cluster": 1}  # noqa: RUF012
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
    # Knobs that earlier tables and names do not have.
    hand_over: int = knob(
        "h",
        "with ping_pong, the next warpgroup may go on after 0: both products, 1: Q K^T, 2: S complete",
        0,
        quiet=True,
    )
    exact_visits: int = knob(
        "e",
        "first visits of a work tile that update row maxima, later ones only if P grows; 0: all",
        3,
        quiet=True,
    )
    heads_together: int = knob(
        "g", "least number of kv heads in a section; 0: as many as fit the L2 cache", 0, quiet=True
    )
    cache_mb: int = knob(
        "b", "MiB of the L2 cache for the operands of a section of heads", SECTION_MB, quiet=True
    )
    stages_v: int = knob(
        "v", "shared-memory buffers for V, if more than for K; 0: as many as for K", 0, quiet=True
    )
    k_ahead: bool = knob(
        "a", "K of the next visit is loaded before V of this one, not behind it", False, quiet=True
    )
    multicast: bool = knob(
        "c", "two blocks that visit the same key tiles load K and V once for both", False, quiet=True
    )
    splits: int = knob(
        "t",
        "1: for few queries: blocks split the keys, and the q heads of a kv head are rows of one tile",
        0,
        quiet=True,
    )


# ---- Plan


def plan(spec: Spec) -> Plan:
    """Plan of a Hopper spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Forward)
    require_hopper(p, "forward", HEAD_DIM_LIMIT)
    require_words(spec)
    _require_knobs(t)
    consumers = consumer_warpgroups(t.tile_m, t.tile_n, t.stages, t.ping_pong)
    if t.splits:
        return _split(spec, t, consumers)
    if _reads_several(p) and consumers > 2:
        raise Infeasible(
            f"score: reads {len(p.score.tensors)} tensors, whose addresses do not fit in the registers of {consumers} "
            "consumer warpgroups; set tile_m to 128 or less"
        )
    if t.multicast and (consumers == 1 or p.mask.listed):
        raise Infeasible("multicast: needs tile_m of 128 or 192, and a mask without lists of tiles")
    return _forward(spec, t, consumers)


def _reads_several(p: Problem) -> bool:
    """Does a score read several tensors for each pair? One that adds lines reads them once a work tile."""
    return len(p.score.tensors) > 1 and p.score.lines is None


def _require_knobs(t: Sm90Forward) -> None:
    """Infeasible for values of a knob that mean nothing here, or the same as another value."""
    if not 0 <= t.hand_over <= 2 or (t.hand_over and not t.ping_pong):
        raise Infeasible(f"hand_over {t.hand_over}: must be 0 to 2, and 0 without ping_pong")
    require_forward_knobs(t.stages, t.stages_v, t.exact_visits)
    if t.k_ahead and t.stages < 2:
        raise Infeasible("k_ahead: needs two buffers of K")
    if t.multicast and (not t.persistent or t.dynamic or t.splits):
        raise Infeasible("multicast: needs persistent, without dynamic and splits")
    if not 0 <= t.splits <= 1:
        raise Infeasible(f"splits {t.splits}: must be 0 or 1")
    require_sections(t.heads_together, t.cache_mb)


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


def _tensor_maps(tensor: str, panels: Panels, rows: int, together: bool) -> tuple[TensorMap, ...]:
    """Descriptors that copy `rows` rows of `tensor`: a panel or all panels at once, and the tail if there is one."""
    maps = (TensorMap(tensor, panels.columns, rows, panels.count if together else 1),)
    return (*maps, TensorMap(tensor, panels.tail, rows, 1)) if panels.tail else maps


def _hidden(t: Sm90Forward) -> int:
    """Most key tiles that a causal query tile visits although its first 64 rows see nothing of them."""
    return -(-(t.tile_m - 64) // t.tile_n)


def _order(mask: Mask, t: Sm90Forward) -> dict[str, Any]:
    """Fields of a plan about the order of work: which warpgroup computes which tiles, and which tiles start first."""
    consumers, causal = t.tile_m // 64, mask is Mask.CAUSAL
    return {
        "row_groups": consumers if mask.listed else 1,
        "short_last": mask is Mask.FULL and consumers > 1,
        "from_end": causal,
        # Hidden tiles are released while the last P V of the previous work tile still holds its buffer: the first
        # visible tile needs another one.
        "staggered": causal and 0 < _hidden(t) < t.stages,
        "alternating": causal and t.persistent,
    }


def _live(p: Problem, t: Sm90Forward) -> int:
    """Registers of a consumer thread that hold S, P, O and Q, and what spills beside them."""
    q = -(-p.head_dim // 16) * 4 if t.q_in_regs else 0
    live = t.tile_n // 2 + t.tile_n // 4 + p.head_dim_v // 2 + q
    # With Q in registers: consumers that find their work tiles in lists; the lines that a score adds beside a dense
    # mask.
    live += 12 if t.q_in_regs and p.mask.listed and not t.dynamic else 0
    live += 12 if t.q_in_regs and p.mask is Mask.DENSE and p.score.lines else 0
    # P from a polynomial, at head_dim 64 with 128 keys a tile: beside a dense mask, and where three consumers find
    # their work tiles in lists. Others spill less; causal ones and those without a mask do so between work tiles.
    in_lists = p.mask.listed and not t.dynamic and t.tile_m == 192
    live += 8 if _capped(p, t) and (p.mask is Mask.DENSE or in_lists) else 0
    return live + (SCORE_REGISTERS if _reads_several(p) else 0)


def _capped(p: Problem, t: Sm90Forward) -> bool:
    """Is P computed from Q K^T and a polynomial of the capped score?"""
    return bool(t.exact_visits and p.score.cap)


def _slope_product(p: Problem) -> bool:
    """Is the slope of a score's lines added to S by a product? Its parts have the range of float32 in bfloat16 only."""
    return p.score.lines is not None and p.dtype is DType.BFLOAT16


def _forward(spec: Spec, t: Sm90Forward, consumers: int) -> Plan:
    p, mask = spec.problem, spec.problem.mask
    order = _order(mask, t)
    live = _live(p, t)
    roomy = live + REGISTERS_BESIDES <= REGISTERS_BUSY[consumers][1]
    shared, q_buffers, out_panels, broadcast = _shared(spec, t, order["row_groups"], roomy)
    producer_registers, consumer_registers = (REGISTERS_BUSY if broadcast else REGISTERS)[consumers]
    require_registers(live, consumer_registers, "S, P, O and Q")
    threads = 128 * (consumers + 1)
    # Long lists of visits are cut with functions, of which global tokens are typical; it takes a second launch.
    cut, words = bool(p.mask_mod), slot_words(p, t.tile_m, t.tile_n)
    grid = ("blocks_m" if cut else "tiles_m", "batch", "heads_q")
    launches = [Launch(spec.symbol, grid, threads, shared, t.persistent, paired=t.multicast)]
    if cut:
        launches.append(Launch(f"{spec.symbol}_combine", ("tiles_m", "batch", "heads_q"), 128 * consumers))
    return Plan(
        spec=spec,
        template="sm90a/forward.cu.jinja",
        suffix=".cu",
        launches=tuple(launches),
        schedule=schedule_launches(spec, "tiles_m", bits=words > 0),
        owner="m",
        **order,
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=mask is Mask.SPANS,
        schedule_counter=mask.listed,
        cut_lists=cut,
        bits="k" if p.packed else "",
        slot_words=words,
        capped=_capped(p, t),
        tensor_maps=_forward_maps(t, p),
        constants=_panel_constants(p)
        | {
            "consumers": consumers,
            "type": wgmma_type(p.dtype),
            "shared_bytes": shared,
            "q_buffers": q_buffers,
            "out_panels": out_panels,
            "broadcast": broadcast,
            "hidden": _hidden(t),
            "slope_product": _slope_product(p),
            "multicast": t.multicast,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _shared(spec: Spec, t: Sm90Forward, row_groups: int, roomy: bool) -> tuple[int, int, int, bool]:
    """Bytes of shared memory, buffers of Q, panels of O's own buffer (0: O is stored through the buffer of Q), and
    whether the producer broadcasts each work tile to the consumers. `roomy`: consumers have registers enough beside a
    producer that does.
    """
    (panels, panels_v), mask = _panels(spec.problem), spec.problem.mask
    row, row_v = panels.row * 2, panels_v.row * 2
    q_bytes, k_bytes, v_bytes = t.tile_m * max(row, row_v), t.tile_n * row, t.tile_n * row_v
    require_tiles(64 * row, k_bytes, v_bytes)
    bounds = t.stages * t.tile_n * 8 * spec.problem.intervals if mask is Mask.SPANS else 0
    numbers = t.tile_n * 16 * 2 if _slope_product(spec.problem) else 0
    # Two barriers a buffer.
    shared = t.stages * (k_bytes + 2 * 8) + (t.stages_v or t.stages) * (v_bytes + 2 * 8) + bounds + numbers
    # Q of the next work tile should arrive before O of this one is stored. Two buffers of Q allow that, or else a
    # buffer for as many panels of O as fit, which is written 16 columns at a time. 16 bytes are left to broadcast work
    # tiles.
    q_buffers = 2 if t.persistent and shared + 2 * (q_bytes + 16) <= SHARED_LIMIT[Arch.SM90] else 1
    out_panels = 0
    if t.persistent and q_buffers == 1 and not panels_v.tail and spec.problem.head_dim_v % 16 == 0:
        own = shared + t.tile_m * row + 2 * 16
        panel = t.tile_m * panels_v.columns * 2
        out_panels = max(0, min(panels_v.count, (SHARED_LIMIT[Arch.SM90] - own) // panel))
        q_bytes = t.tile_m * row + out_panels * panel if out_panels else q_bytes
    shared += q_buffers * (q_bytes + 16)
    if t.dynamic and (q_buffers < 2 or not mask.listed):
        raise Infeasible(
            "dynamic: needs a mask with lists of tiles, persistent, and shared memory for two tiles of Q"
        )
    # The producer runs ahead, so it decodes a work tile and broadcasts it: 16 bytes, 16 for each row group if there
    # are several, and 16 for the piece of a list.
    work_tile = 16 * ((1 + row_groups if row_groups > 1 else 1) + bool(spec.problem.mask_mod))
    may = q_buffers > 1 or (out_panels > 0 and roomy)
    fits = shared + q_buffers * work_tile <= SHARED_LIMIT[Arch.SM90]
    broadcast = t.dynamic or (may and fits and not mask.listed)
    shared += q_buffers * work_tile if broadcast else 0
    require_shared(shared)
    return shared, q_buffers, out_panels, broadcast


def _panels(p: Problem) -> tuple[Panels, Panels]:
    """The panels of Q and K, and those of V and O.

    Without a buffer for O, a warpgroup stores O through the panels of its own rows of Q. Where O has other columns than
    Q, all panels are therefore of the widest swizzle: panel i of O then takes the bytes of panel i of Q, or follows all
    of them.
    """
    if not p.dim_v:
        return panels_of(p.head_dim), panels_of(p.head_dim)
    return Panels(64, -(-p.head_dim // 64), 0), Panels(64, -(-p.head_dim_v // 64), 0)


def _in_one_copy(p: Problem) -> bool:
    """Does one copy take all panels of a tile? Not where a last panel reaches past the head_dim."""
    dims = zip(_panels(p), (p.head_dim, p.head_dim_v), strict=True)
    return all(panels.columns * panels.count <= dim for panels, dim in dims)


def _forward_maps(t: Sm90Forward, p: Problem) -> tuple[TensorMap, ...]:
    """Of q, k, v and out; where keys are split, of k and v, as threads copy the others."""
    panels, panels_v = _panels(p)
    # The 64 rows of O that a warpgroup stores are no whole tile: their panels are not adjacent, so each takes a copy of
    # its own.
    whole = _in_one_copy(p)
    tiles = (
        ("q", panels, t.tile_m, whole),
        ("k", panels, t.tile_n, whole and not t.multicast),
        ("v", panels_v, t.tile_n, whole and not t.multicast),
        ("out", panels_v, 64, False),
    )
    return sum((_tensor_maps(*tile) for tile in (tiles[1:3] if t.splits else tiles)), ())


def _panel_constants(p: Problem) -> dict[str, int | str]:
    """Constants about a row of a tile."""
    panels, panels_v = _panels(p)
    return {
        "columns": panels.columns,
        "panels": panels.count,
        "panels_v": panels_v.count,
        "tail": panels.tail,
        "copies": 1 if _in_one_copy(p) else max(panels.count, panels_v.count),
        "swizzle": SWIZZLE_CODE[panels.columns * 2],
        "tail_swizzle": SWIZZLE_CODE[panels.tail * 2] if panels.tail else 0,
    }


def _split(spec: Spec, t: Sm90Forward, consumers: int) -> Plan:
    """Plan of the kernel for short queries."""
    p = spec.problem
    if p.in_planes or p.score:
        raise Infeasible(
            "splits: the q heads of a kv head share tiles, which takes one mask for all of them and no score"
        )
    if replace(t, tile_m=128, tile_n=128, stages=2, exact_visits=3) != SPLITS:
        raise Infeasible(
            "splits: takes tile_m, tile_n, stages and exact_visits; other knobs must be as in SPLITS"
        )
    producer_registers, consumer_registers = REGISTERS_BUSY[consumers]
    live = _live(p, t)
    require_registers(live, consumer_registers, "S, P and O")
    # Where there is room for P of two visits, P V runs beside the softmax of the next one.
    two_p = live + t.tile_n // 4 + REGISTERS_BESIDES <= consumer_registers
    live += t.tile_n // 4 if two_p else 0
    row, row_v = (panels.row * 2 for panels in _panels(p))
    require_tiles(64 * row, t.tile_n * row, t.tile_n * row_v)
    bounds = t.tile_n * 8 * p.intervals if p.mask is Mask.SPANS else 0
    shared = t.tile_m * row + t.stages * (t.tile_n * (row + row_v) + bounds + 4 * 8)  # four barriers
    require_shared(shared)
    grid = ("cluster_size", "tiles_packed", "kv_splits", "heads_kv", "batch")
    combine = Launch(f"{spec.symbol}_combine", ("combine_blocks",), COMBINE_THREADS, overlaps=True)
    return Plan(
        spec=spec,
        template="sm90a/forward_split.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, grid, 128 * (consumers + 1), shared, clustered=True), combine),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        registers=live + REGISTERS_BESIDES,
        split_blocks=1,
        deterministic=True,
        bounds=p.mask is Mask.SPANS,
        columns_v=p.head_dim_v,
        tensor_maps=_forward_maps(t, p),
        constants=_panel_constants(p)
        | {
            "consumers": consumers,
            "two_p": two_p,
            "type": wgmma_type(p.dtype),
            "shared_bytes": shared,
            "combine_threads": COMBINE_THREADS,
            "overlaps": True,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


# ---- Space

# What won on an H200 (docs/performance.md), up to 96 columns and beyond. Without a table, the first that fits is taken.
# tile_m, tile_n, stages, ping_pong, persistent, dynamic, q_in_regs
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
# Where V has a head_dim of its own nothing was measured. With one of V up to 96, longer rows of K leave room for two
# buffers of Q only beside two of K and V.
OWN_NARROW = (
    Sm90Forward(192, 128, 2, True, True, True, False),
    Sm90Forward(192, 128, 2, True, True, False, False),
)
# With one of Q, K or V above 128. FlashAttention-3 takes 128 x 128 without an ordering barrier for 192 and 128. With Q
# in shared memory the descriptors of its 12 steps take more uniform registers than there are. Two buffers of Q, which
# `dynamic` takes, fit beside 96 keys.
OWN_LONG = (
    Sm90Forward(128, 96, 2, False, True, True, False),
    Sm90Forward(128, 128, 2, False, True, False, True),
    Sm90Forward(128, 128, 2, False, True, False, False),
    Sm90Forward(128, 128, 2, True, True, False, True),
    Sm90Forward(128, 96, 2, True, True, False, False),
    Sm90Forward(128, 112, 2, False, True, False, False),
    Sm90Forward(128, 80, 2, False, True, False, False),
    Sm90Forward(192, 64, 3, False, True, False, False),
    Sm90Forward(128, 64, 2, False, True, False, False),
)
# A third buffer lets warpgroups begin at their own diagonals (`staggered`).
CAUSAL_WIDE = Sm90Forward(192, 80, 3, True, True, False, False)
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


# Of scores that read several tensors, whose addresses take more; the tiles that spill least.
# The keys say whether the mask is causal.
TENSORS = {
    True: Sm90Forward(128, 80, 3, False, True, False, False),
    False: Sm90Forward(128, 64, 3, False, True, False, False),
}


def tunings(problem: Problem) -> Iterator[Sm90Forward]:
    """What a search tries, best guess first."""
    narrow = problem.head_dim_v <= 96  # registers of O
    own_long = problem.dim_v and problem.largest_dim > 128
    if _reads_several(problem):
        yield TENSORS[problem.mask is Mask.CAUSAL]
    if own_long:
        # What finds the bits of a dense mask takes registers that Q would be kept in.
        yield from (t for t in OWN_LONG if not (t.q_in_regs and problem.mask is Mask.DENSE))
    if problem.mask is Mask.DENSE:
        yield from DENSE
    if problem.dim_v and narrow:
        yield from OWN_NARROW
    if problem.mask is Mask.CAUSAL and not narrow:
        yield CAUSAL_WIDE
    yield from NARROW if narrow else WIDE
    tiles = (192, 128, 64) if narrow else (128, 192, 64)
    blocks = ((True, True), (True, False), (False, False))  # persistent, dynamic
    for tile_m, tile_n, stages, (persistent, dynamic), ping_pong, q_in_regs in product(
        tiles,
        (128, 160, 144, 112, 96, 80, 64),
        (2, 3),
        blocks,
        (True, False),
        (True, False),
    ):
        yield Sm90Forward(tile_m, tile_n, stages, ping_pong, persistent, dynamic, q_in_regs)
    yield from _wider(problem)


NARROW_TILES = [*product((192,), (128, 112, 96)), *product((128,), (128, 96))]
# heads_together and cache_mb; more heads where all lists of visits are alike
SECTIONS = ((0, SECTION_MB), (2, SECTION_MB), (0, 8), (0, 32))
MORE_HEADS = ((16, SECTION_MB),)
WIDE_TILES = [*product((192,), (80, 64)), *product((128,), (176, 160, 144, 128, 112, 96))]
LONG_TILES = [*product((128,), (80, 64)), *WIDE_TILES]  # where q, k or v has more than 128 columns


def _wider(problem: Problem) -> Iterator[Sm90Forward]:
    """The rest of the space: tiles that may win, persistent, with all buffers and the values of the later knobs."""
    wide = LONG_TILES if problem.largest_dim > 128 else WIDE_TILES
    tiles = NARROW_TILES if problem.head_dim <= 96 else wide
    if problem.largest_dim >= 128 and not problem.mask.listed:
        yield from _multicast(problem, tiles)
    yield from _later_knobs(problem, tiles, ((3, 0, False), (2, 0, False), (4, 0, False)))
    if problem.largest_dim > 128:
        # Buffers of K, more of V than of K, and K loaded a visit ahead.
        others = (2, 3, False), (3, 4, False), (3, 0, True), (2, 0, True)
        yield from _later_knobs(problem, tiles, others)
    if problem.largest_dim > 128 and not problem.mask.listed:  # with lists it spills
        narrow = (3, 0, False), (2, 0, False), (3, 0, True), (2, 0, True), (3, 4, False), (2, 3, False)
        yield from _later_knobs(problem, [(192, 48)], narrow)


def _multicast(problem: Problem, tiles: Sequence[tuple[int, int]]) -> Iterator[Sm90Forward]:
    """Pairs of blocks that load for each other. That saves power, so it is for long calls, which are limited by it."""
    loads = (3, 0, False), (2, 0, False), (2, 0, True)
    for tuning in _later_knobs(problem, tiles, loads if problem.largest_dim > 128 else loads[:2]):
        if not tuning.dynamic and tuning.exact_visits and not tuning.heads_together:
            paired = replace(tuning, multicast=True)
            if is_feasible(problem, paired, plan):
                yield paired


def _later_knobs(
    problem: Problem, tiles: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int, bool]]
) -> Iterator[Sm90Forward]:
    """All `tiles`, `loads` (stages, stages_v, k_ahead) and values of the other knobs with each other."""
    sections = SECTIONS if problem.mask.listed else (*SECTIONS, *MORE_HEADS)
    ordering = ((True, 0), (True, 1), (True, 2), (False, 0))  # ping_pong, hand_over
    for tile, (stages, stages_v, k_ahead), dynamic, q_in_regs in product(
        tiles, loads, (True, False), (False, True)
    ):
        core = Sm90Forward(*tile, stages, False, True, dynamic, q_in_regs, stages_v=stages_v, k_ahead=k_ahead)
        if is_feasible(problem, core, plan):
            for (ping_pong, hand_over), exact_visits, (heads, cache_mb) in product(
                ordering, (3, 1, 0), sections
            ):
                yield replace(
                    core,
                    ping_pong=ping_pong,
                    hand_over=hand_over,
                    exact_visits=exact_visits,
                    heads_together=heads,
                    cache_mb=cache_mb,
                )


# For short queries.
SPLITS = Sm90Forward(128, 128, 2, False, False, False, False, splits=1)
SPLIT_TILES = ((64, (64, 48, 32)), (128, (128, 96, 80, 64, 48)))  # tile_m, and tile_n


def split_tunings(problem: Problem, fewest: int, most: int) -> Iterator[Sm90Forward]:
    """Kernels that split the keys, those whose tiles hold `most` query rows of a kv head first, if any do."""
    for tile_m, tiles_n in SPLIT_TILES if most <= SPLIT_TILES[0][0] else reversed(SPLIT_TILES):
        for tile_n, stages in product(tiles_n, (4, 3, 2)):
            yield replace(SPLITS, tile_m=tile_m, tile_n=tile_n, stages=stages)


FORWARD = Family(
    Sm90Forward,
    plan,
    tunings,
    honours=frozenset({"dim_v", "intervals", "planes", "mask_mod", "score"}),
    reasons=REASONS,
    split_space=split_tunings,
)
