"""The Hopper backward in 16 bits for wide heads: head dims above 128, and a head_dim of V that differs from that of Q.

Sums of dK and dV of 64 keys no longer fit beside each other in a warpgroup's registers, as in `sm90_backward`. Here two
warpgroups share a key tile: one sums dV, the other dK, both transposed (columns x keys), so that tiles may have any
number of keys. FlashAttention-3 (arXiv:2407.08608) chooses the same products for head_dim 192 and 256.

Rows lie in shared memory in panels of 64 columns. If head_dim is no multiple of 64, TMA fills the last panel with zeros
and drops what it would store past the row; S and dP take the k16 steps of head_dim alone, and of dQ only the columns of
head_dim are added.

Additions of dQ to device memory hold up the warps that issue them. So consumers store as much of dQ to shared memory as
there is room for (`staged_columns`), and warps of the producer have TMA add it. With deterministic sums consumers store
all of dQ there, if need be a subtile at a time, so that only those warps wait for the blocks that add before. With
`staging` 2 others store all of dQ there, too.

With the knob `pair` a cluster of two blocks shares a key tile. The blocks exchange dS, and each adds half of the
columns of dQ to device memory, for all keys of the tile: half of the traffic, which limits blocks of their own. There
the first consumer applies a score, and the second one sums the gradients of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.hopper import (
    COLUMNS,
    HELD,
    HELPER_THREADS,
    PAIR,
    REASONS,
    REGISTERS,
    REGISTERS_BESIDES,
    REGISTERS_BUSY,
    SECTION_MB,
    SWIZZLE_CODE,
    in_sections,
    require_hopper,
    require_registers,
    require_score_gradients,
    require_sections,
    require_shared,
    wgmma_type,
)
from attnforge.codegen.families.limits import HEAD_DIM_LIMIT, SHARED_LIMIT, curved
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.spec import Arch, Mask, Problem, Spec, Tuning, knob

CONSUMERS = 2  # warpgroups: the first sums dV, the second dK
ROW_STATS = 2  # floats of row_stats: lse and delta
# Registers of a consumer thread, more than REGISTERS_BESIDES, for the addresses of what a score reads for each pair,
# and for gradients of elements that differ.
SCORE_REGISTERS = 8
# Columns of dQ that a deterministic consumer may stage at a time.
SUBTILES = (COLUMNS, COLUMNS // 2, COLUMNS // 4)
PAIR_KEYS = 64  # of a block of a pair: the rows of its products
APART, WHOLE = 1, 2  # values of `staging`


@dataclass(frozen=True)
class Sm90BackwardWide(Tuning):
    """Tuning of the Hopper backward for wide heads (one block owns a key tile and walks the query tiles)."""

    retired = {"multicast": 0, "descending": 0}  # noqa: RUF012

    tile_m: int = knob("m", "query rows per step of the main loop; always 64, the rows of a product for dQ")
    tile_n: int = knob(
        "n", "keys per block, a multiple of 16; each consumer computes S and dP of half of them"
    )
    stages: int = knob("s", "shared-memory buffers for Q")
    stages_dout: int = knob("t", "shared-memory buffers for dO")
    deterministic: bool = knob("o", "blocks add to dQ in a fixed order: the same bits on every run")
    pair: bool = knob("p", "two blocks share a key tile and dQ", default=False, quiet=True)
    cache_mb: int = knob(
        "b", "MiB of the L2 cache for the operands of a section of heads", SECTION_MB, quiet=True
    )
    heads_together: int = knob(
        "g", "least number of heads in a section; 0: as many as fit the L2 cache", 0, quiet=True
    )
    loaders: int = knob("w", "warps that load, 1 or 2: the second one loads dO", 1, quiet=True)
    dq_of_second: int = knob(
        "u", "units of 64 columns of dQ that the consumer of dK computes; 0: balanced", 0, quiet=True
    )
    dq_behind_dv: bool = knob("v", "dQ is issued while dV of the same step may run", False, quiet=True)
    s_late: bool = knob(
        "l", "in pairs: S of the next step is issued behind dQ, not before dQ is added", False, quiet=True
    )
    staging: int = knob(
        "y",
        "dQ staged in shared memory, 0: what there is room for; 1: subtiles freed apart; 2: all of it",
        0,
        quiet=True,
    )


# ---- Plan


def panels_of(dim: int) -> int:
    """Panels of a row; the last one may end with zeros."""
    return -(-dim // COLUMNS)


def dq_units(p: Problem, of_second: int = 0) -> tuple[int, int]:
    """Units of 64 columns of dQ that each consumer computes; by default both have about the same work in a step."""
    units, units_v = panels_of(p.head_dim), panels_of(p.head_dim_v)
    first = units - of_second if of_second else min(units, max(0, (2 * units - units_v + 1) // 2))
    return first, units - first


def plan(spec: Spec) -> Plan:
    """Plan of a wide Hopper backward spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90BackwardWide)
    require_hopper(p, "backward", HEAD_DIM_LIMIT)
    _require_mask(p)
    require_score_gradients(spec)
    _require_tuning(p, t)
    _require_staging(p, t)
    shared = _shared_bytes(p, t, staged_columns(p, t))
    require_shared(shared)
    roomy = (
        t.pair and p.largest_dim <= 192
    )  # at 256 a producer of a pair gets fewer registers than it uses best
    producer_registers, consumer_registers = (REGISTERS_BUSY if roomy else REGISTERS)[CONSUMERS]
    live = live_registers(p, t)
    require_registers(live, consumer_registers, "the tiles")
    descending = t.deterministic and p.mask is not Mask.FULL
    return Plan(
        spec=spec,
        template=f"sm90a/backward_{'pair' if t.pair else 'wide'}.cu.jinja",
        suffix=".cu",
        launches=_launches(spec, t, shared),
        schedule=schedule_launches(spec, "tiles_n", t.deterministic, descending),
        owner="n",
        registers=live + REGISTERS_BESIDES,
        row_stats=ROW_STATS,
        dq_accum=True,
        dq_semaphore=t.deterministic,
        descending=descending,
        columns=panels_of(p.head_dim) * COLUMNS,
        deterministic=t.deterministic,
        tensor_maps=_tensor_maps(p, t),
        constants=_constants(p, t)
        | {
            "shared_bytes": shared,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _constants(p: Problem, t: Sm90BackwardWide) -> dict[str, int | str]:
    """Constants about the tiles, who computes what, and which shared parts of templates/sm90a/ are used."""
    panels, panels_v = panels_of(p.head_dim), panels_of(p.head_dim_v)
    common: dict[str, int | str] = {
        "type": wgmma_type(p.dtype),
        "columns": COLUMNS,
        "panels": panels,
        "panels_v": panels_v,
        "tail": 0,
        "copies": 1 if _whole_panels(p) else max(panels, panels_v),
        "swizzle": SWIZZLE_CODE[COLUMNS * 2],
        "first_dq_columns": "kHeadDim",
        "parted_dq": False,
        "keys_in_regs": False,
        "gradients_from_ds": True,
        "roles_meet": True,  # consumers meet at a named barrier, each in code of its own
        "columns_of_out": "kHeadDimV",
        "columns_of_sums": "kMain",
        "padded": panels * COLUMNS != p.head_dim,  # columns of dQ past head_dim are not added
        "half_matrices": False,  # TMA drops columns past head_dim
        "row_lanes": 1 << (p.head_dim_v // 8 - 1).bit_length(),
        "helper_threads": HELPER_THREADS,
    }
    return common | (_pair_constants(p, t) if t.pair else _block_constants(p, t))


def _block_constants(p: Problem, t: Sm90BackwardWide) -> dict[str, int | str]:
    first, second = dq_units(p, t.dq_of_second)
    return {
        "scores_by_query": True,  # rows of S are queries
        "s_early": s_early(p, t),
        "staged_columns": staged_columns(p, t),
        "bulk_dq": staged_columns(p, t) > 0,
        "adds_quads": staged_columns(p, t) < COLUMNS and not _stages_all(t),
        "units_of_values": first,
        "units_of_keys": second,
        "arrives_named": True,  # consumers arrive at named barriers without waiting
    }


def _pair_constants(p: Problem, t: Sm90BackwardWide) -> dict[str, int | str]:
    return {
        "pair": True,
        "scores_by_query": False,  # rows of S are keys
        "bulk_dq": True,
        "staged_first": staged_columns(p, t) > 0,
        "adds_quads": staged_columns(p, t) == 0 and not _stages_all(t),
        "dq_columns_of_first": COLUMNS,
        "dq_columns_of_second": panels_of(p.head_dim) * COLUMNS // PAIR - COLUMNS,
        "sums": _sum_columns(p.head_dim),  # columns of dK that are computed
        "sums_v": _sum_columns(p.head_dim_v),
        "peer_panels": _peer_panels(p),
        "arrives_named": False,
    }


def _peer_panels(p: Problem) -> int:
    """Panels of the other block's K that hold a block's half of the columns of dQ."""
    return -(-panels_of(p.head_dim) // PAIR)


def _whole_panels(p: Problem) -> bool:
    """Do whole panels make the rows, so that one copy moves all of them?"""
    return p.head_dim % COLUMNS == 0 and p.head_dim_v % COLUMNS == 0


def _sum_columns(dim: int) -> int:
    """Columns of dK or dV that a consumer of a pair computes: as many as stmatrix stores at a time."""
    return -(-dim // 16) * 16


def _require_mask(p: Problem) -> None:
    """Infeasible if the q heads of a block may visit different tiles."""
    if p.mask_mod.reads("h") if p.mask_mod else p.in_planes:
        what = "mask_mod that reads h" if p.mask_mod else f"{p.mask.value} mask in planes"
        raise Infeasible(
            f"{what}: the wide sm90a backward takes one mask for all heads; sm90 takes this call"
        )


def _require_tuning(p: Problem, t: Sm90BackwardWide) -> None:
    if t.tile_m != 64:
        raise Infeasible(f"tile_m {t.tile_m}: must be 64, the queries that a warpgroup multiplies for dQ")
    if t.tile_n % 16 or not 32 <= t.tile_n <= 128:
        raise Infeasible(f"tile_n {t.tile_n}: must be a multiple of 16 from 32 to 128")
    if t.pair:
        _require_pair(p, t)
    if not 2 <= t.stages <= 4:
        raise Infeasible(f"stages {t.stages}: must be 2 to 4, as S runs a step ahead of dK")
    if not 1 <= t.stages_dout <= 4:
        raise Infeasible(f"stages_dout {t.stages_dout}: must be 1 to 4")
    require_sections(t.heads_together, t.cache_mb)
    if t.loaders not in (1, 2):
        raise Infeasible(f"loaders {t.loaders}: must be 1 or 2")
    if not t.pair:
        _require_order(p, t)


def _require_staging(p: Problem, t: Sm90BackwardWide) -> None:
    if why := _why_not_staged(p, t):
        raise Infeasible(f"staging {t.staging}: {why}")


def _why_not_staged(p: Problem, t: Sm90BackwardWide) -> str:
    """Why there is no such staging, or one that equals another; empty if there is."""
    if t.staging not in (0, APART, WHOLE):
        return f"must be 0 to {WHOLE}"
    if t.staging == APART and t.pair:
        return "is what pairs do; set it to 0"
    if t.staging == APART and not t.deterministic:
        return "is for deterministic sums; set it to 0 or 2"
    if t.staging == WHOLE and not t.pair and max(dq_units(p, t.dq_of_second)) == 1:
        return "64 columns of a consumer are all that it computes; set it to 0"
    return ""


def _require_order(p: Problem, t: Sm90BackwardWide) -> None:
    """Infeasible for shares of dQ and orders of products that single blocks do not have."""
    if t.s_late:
        raise Infeasible("s_late: needs a pair of blocks; set it to 0 for single ones")
    units, balanced = panels_of(p.head_dim), dq_units(p)[1]
    if not 0 <= t.dq_of_second <= units:
        raise Infeasible(f"dq_of_second {t.dq_of_second}: must be 0 to {units}")
    if t.dq_of_second and t.dq_of_second == balanced:
        raise Infeasible(f"dq_of_second {t.dq_of_second}: is what 0 chooses here; set it to 0")
    if t.dq_behind_dv and not dq_units(p, t.dq_of_second)[0]:
        raise Infeasible("dq_behind_dv: the consumer of dV computes no dQ here; set it to 0")


def _require_pair(p: Problem, t: Sm90BackwardWide) -> None:
    if t.loaders > 1 or t.dq_of_second or t.dq_behind_dv:
        raise Infeasible(
            "loaders, dq_of_second, dq_behind_dv: knobs of single blocks; leave them out for a pair"
        )
    if t.tile_n != PAIR * PAIR_KEYS:
        raise Infeasible(f"tile_n {t.tile_n}: must be {PAIR * PAIR_KEYS} for a pair of blocks")
    if p.head_dim <= COLUMNS * PAIR or p.head_dim_v <= COLUMNS * (PAIR - 1):
        raise Infeasible(
            f"head_dim {p.head_dim} and {p.head_dim_v} of v: pairs of blocks take more than 128, and more than 64 of v"
        )


def live_registers(p: Problem, t: Sm90BackwardWide) -> int:
    """Registers of a consumer thread that tiles take where most are live: a sum, and S or P beside dP, or some dQ."""
    if t.pair:  # a sum, scores in fp32 and packed, and dQ
        return _sums_of_pair(p) + t.tile_m // 2 + t.tile_m // 4 + COLUMNS // 2
    scores = t.tile_n // 4
    packed = scores // 2 if curved(p) else 0  # P, since P f' takes its place
    most = max(2 * scores + packed, COLUMNS // 2, scores + COLUMNS // 2 if s_early(p, t) else 0)
    return _sums(p, t) + most + _score_registers(p, t)


def _sums_of_pair(p: Problem) -> int:
    """Of a consumer of a pair: dV beside what a score reads for each pair, or dK beside gradients of its tensors."""
    first = _sum_columns(p.head_dim_v) // 2 + SCORE_REGISTERS * _reads_apart(p)
    return max(first, _sum_columns(p.head_dim) // 2 + SCORE_REGISTERS * bool(p.score.wanted))


def _reads_apart(p: Problem) -> bool:
    """Does a score read another element for each pair?"""
    return p.score.reads_by_pair and not p.score.steps


def _score_registers(p: Problem, t: Sm90BackwardWide) -> int:
    """Registers of a consumer thread for what a score reads for each pair, for gradients of several elements, and for
    more of dQ than balances the consumers.
    """
    sums = any(not read.shared for read in p.score.reads)
    more_dq = bool(p.score) and t.dq_of_second > dq_units(p)[1]
    return SCORE_REGISTERS * (_reads_apart(p) + sums + more_dq)


def s_early(p: Problem, t: Sm90BackwardWide) -> bool:
    """Are there registers for the next S beside the last 64 columns of dQ, which are added while its product runs?"""
    live = _sums(p, t) + t.tile_n // 4 + COLUMNS // 2
    return live + REGISTERS_BESIDES <= REGISTERS[CONSUMERS][1]


def staged_columns(p: Problem, t: Sm90BackwardWide) -> int:
    """Columns of a unit of dQ that TMA adds from shared memory of their own: as many as there is room for.

    Both consumers stage as many, a multiple of 8, and add the others from registers. With deterministic sums, whose
    consumers must not wait until the blocks before have added, they stage a unit in subtiles of as many columns, and
    need room for some. In a pair these are the columns of the first consumer, which stages all of them or none; dQ of
    the second one takes the place of P. In a deterministic pair that of the first one takes it next, or with `staging`
    in any pair the place of dS. Single blocks with a place for all of dQ have no subtiles.
    """
    if t.pair and _stages_all(t):
        return 0
    if t.staging == WHOLE:
        return COLUMNS
    choices = (COLUMNS,) if t.pair else SUBTILES if _stages_all(t) else range(COLUMNS, 0, -8)
    least = SUBTILES[-1] if _stages_all(t) else 0
    return next((n for n in choices if _shared_bytes(p, t, n) <= SHARED_LIMIT[Arch.SM90]), least)


def _stages_all(t: Sm90BackwardWide) -> bool:
    """Do consumers stage all of dQ, so that none is added from registers?"""
    return t.deterministic or t.staging == WHOLE


def _sums(p: Problem, t: Sm90BackwardWide) -> int:
    return panels_of(p.largest_dim) * t.tile_n // 2


def _shared_bytes(p: Problem, t: Sm90BackwardWide, staged: int) -> int:
    """Shared memory of a block with `staged_columns` of dQ, in the order in which it lies there."""
    row, row_v = (panels_of(dim) * COLUMNS * 2 for dim in (p.head_dim, p.head_dim_v))
    keys = PAIR_KEYS if t.pair else t.tile_n
    tiles = keys * (row + row_v) + t.tile_m * (t.stages * row + t.stages_dout * row_v)
    scores, barriers = 3 * keys * t.tile_m * 2, 2 + 2 * (t.stages + t.stages_dout)
    dq = staged * t.tile_m * 4
    if t.pair:  # K of the other block; P in fp32, two dS of each block
        tiles += _peer_panels(p) * COLUMNS * 2 * keys
        of_dq = (2 + _stages_all(t)) * CONSUMERS
        of_ds = 4 if t.staging == WHOLE else 3  # of each buffer
        scores, barriers = keys * t.tile_m * (4 + 2 * PAIR * 2), barriers + 1 + of_ds * 2 + of_dq
    elif t.staging == WHOLE:  # a place for each unit of 64 columns, with two barriers
        units = panels_of(p.head_dim)
        dq, barriers = dq * units, barriers + 2 * units + CONSUMERS * t.deterministic
    elif staged:  # and other barriers for odd steps, or which unit is there
        dq, barriers = dq * CONSUMERS, barriers + 3 * CONSUMERS
    spans = p.intervals * keys * 8 if p.mask is Mask.SPANS else 0
    # Sums of gradients; in a pair these are in registers of the second consumer.
    held = 0 if t.pair else CONSUMERS * 128 * HELD * sum(read.held for read in p.score.reads)
    # With the q head, the batch entry, and the plane of the mask or, in a pair, the query tile.
    visit = 16 if p.score or p.mask_mod else 8
    stats = t.stages * (t.tile_m * ROW_STATS * 4 + visit)
    return tiles + scores + dq + spans + held + stats + 8 * barriers


def _tensor_maps(p: Problem, t: Sm90BackwardWide) -> tuple[TensorMap, ...]:
    together = _whole_panels(p)  # else a map of whole rows, which TMA copies panel by panel
    panels, panels_v = (panels_of(dim) if together else 1 for dim in (p.head_dim, p.head_dim_v))
    keys = PAIR_KEYS if t.pair else t.tile_n
    rows = (
        ("q", t.tile_m, panels),
        ("dout", t.tile_m, panels_v),
        ("k", keys, 1 if t.pair else panels),  # pairs load some panels of the other block's K
        ("v", keys, panels_v),
        ("dk", keys, panels),
        ("dv", keys, panels_v),
    )
    return tuple(TensorMap(name, COLUMNS, count, whole) for name, count, whole in rows)


def _launches(spec: Spec, t: Sm90BackwardWide, shared: int) -> tuple[Launch, ...]:
    queries = ("tiles_m", "batch", "heads_q")
    threads = 128 * (CONSUMERS + 1)
    return (
        Launch(f"{spec.symbol}_preprocess", queries, HELPER_THREADS),
        Launch(
            spec.symbol,
            ("tiles_n", "batch", "heads_kv"),
            threads,
            shared,
            overlaps=True,
            per_tile=PAIR if t.pair else 1,
        ),
        Launch(f"{spec.symbol}_postprocess", queries, HELPER_THREADS, overlaps=True),
    )


# ---- Space


def tunings(problem: Problem) -> Iterator[Sm90BackwardWide]:
    """What a search tries, best guess first, as measured on an H200 and an H100 (docs/experiments.md, 74, 99 and 113).

    The plan leaves out pairs and tiles that it has no registers for beside a score.
    """
    single, pairs = list(_single_blocks(problem)), list(_pairs(problem))
    wide, masked = problem.largest_dim > 192, problem.mask is not Mask.FULL
    tunings = [*pairs, *single] if wide and masked else [*single, *pairs]
    # Deterministic ones may be the fastest, since blocks that add first store their sums.
    strict = _in_order(problem)
    favourites = [t for t in strict if t.pair or t.tile_n == single[0].tile_n]
    staged = list(_staged(problem, favourites + [replace(t, deterministic=False) for t in favourites]))
    yield from (*tunings, *staged)
    yield from (replace(t, cache_mb=8) for t in (*tunings, *staged))
    yield from (replace(t, cache_mb=cache_mb) for cache_mb in (SECTION_MB, 8) for t in strict)
    yield from _wider(problem)


def _in_order(problem: Problem) -> list[Sm90BackwardWide]:
    """Deterministic ones: blocks with room for all columns of a unit of dQ come first, at 256 behind pairs."""
    single, pairs = list(_single_blocks(problem)), list(_pairs(problem))
    tunings = [*pairs, *single] if problem.largest_dim > 192 else [*single, *pairs]
    strict = [replace(t, deterministic=True) for t in tunings]
    return sorted(strict, key=lambda t: not t.pair and staged_columns(problem, t) < COLUMNS)


def _single_blocks(problem: Problem) -> Iterator[Sm90BackwardWide]:
    wide = problem.largest_dim > 192
    tiles, buffers = ((80, 64, 48), (1, 2)) if wide else ((96, 80, 64, 112, 128), (2, 1))
    behind = (False,) if wide or problem.dim_v else (True, False)  # the rest of the space has both
    for tile_n, stages_dout, dq_behind_dv in product(tiles, buffers, behind):
        yield Sm90BackwardWide(64, tile_n, 2, stages_dout, False, dq_behind_dv=dq_behind_dv)


def _pairs(problem: Problem) -> Iterator[Sm90BackwardWide]:
    late = (True, False) if problem.largest_dim > 192 else (False, True)
    for (stages, stages_dout), s_late in product(((2, 2), (2, 1), (3, 2)), late):
        yield Sm90BackwardWide(64, PAIR * PAIR_KEYS, stages, stages_dout, False, True, s_late=s_late)


# heads_together and cache_mb; more heads where all lists of visits are alike
SECTIONS = ((0, SECTION_MB), (2, SECTION_MB), (4, SECTION_MB), (0, 8), (0, 24), (0, 40))
MORE_HEADS = ((16, SECTION_MB),)


def _sections(problem: Problem) -> tuple[tuple[int, int], ...]:
    return SECTIONS if problem.mask.listed else (*SECTIONS, *MORE_HEADS)


def _staged(problem: Problem, tunings: list[Sm90BackwardWide]) -> Iterator[Sm90BackwardWide]:
    """The same with dQ staged in other ways, where there are such; the plan leaves out what has no room for it."""
    for core, staging in product(tunings, (WHOLE, APART)):
        tuning = replace(core, staging=staging)
        if not _why_not_staged(problem, tuning):
            yield tuning


def _wider(problem: Problem) -> Iterator[Sm90BackwardWide]:
    """The rest of the space: tiles, buffers, shares of dQ, ways to stage it, loads, orders of sums and sections."""
    sections = _sections(problem)
    for core, deterministic in product(
        chain(_wider_single_blocks(problem), _wider_pairs(problem)), (False, True)
    ):
        ordered = replace(core, deterministic=deterministic)
        for tuning in (ordered, *_staged(problem, [ordered])):
            yield from in_sections(problem, tuning, plan, sections)


def _wider_single_blocks(problem: Problem) -> Iterator[Sm90BackwardWide]:
    tiles = (80, 64, 48) if problem.largest_dim > 192 else (96, 80, 64, 112, 128)
    balanced = dq_units(problem)[1]
    shares = [0, *(n for n in (balanced + 1, balanced - 1) if 0 < n <= panels_of(problem.head_dim))]
    for tile_n, stages, stages_dout, dq_behind_dv, of_second, loaders in product(
        tiles, (2, 3), (1, 2), (True, False), shares, (1, 2)
    ):
        core = Sm90BackwardWide(64, tile_n, stages, stages_dout, False)
        yield replace(core, dq_behind_dv=dq_behind_dv, dq_of_second=of_second, loaders=loaders)


def _wider_pairs(problem: Problem) -> Iterator[Sm90BackwardWide]:
    buffers = (2, 2), (2, 1), (3, 2), (3, 1), (2, 3)
    for (stages, stages_dout), s_late in product(buffers, (True, False)):
        yield Sm90BackwardWide(64, PAIR * PAIR_KEYS, stages, stages_dout, False, True, s_late=s_late)


BACKWARD = Family(
    Sm90BackwardWide,
    plan,
    tunings,
    honours=frozenset({"intervals", "dim_v", "mask_mod", "score"}),
    reasons=REASONS,
)
