"""Upper bounds from tile schedules: hidden pairs in visited tiles, and SMs that idle until the last one ends.

A simulation on the host, from the lists of tiles and the order in which blocks take them (schedule.cuh.jinja).
Time is counted in full tiles: one tile of one head takes 1.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnforge.bagel.measure.tiles import EMPTY, FULL, PARTIAL, tile_map
from attnforge.codegen.families.hopper import SECTION_MB
from attnforge.codegen.plan import Plan
from attnforge.codegen.spec import Direction, Mask
from attnforge.runtime.masks import Spans
from attnforge.runtime.search.case import Case

MULTIPROCESSORS = 132  # of an H100 or H200
LEAST_VISITS = 32  # kLeastVisits of the template
ENLARGED_MB = 32  # of a section that is enlarged, at most (kEnlarged)

# static: one persistent block per SM takes work tiles alternately from both ends of a round.
# dynamic: the next work tile goes to the first free SM.
Order = Literal["static", "dynamic"]


@dataclass(frozen=True)
class Sections:
    """Sections of heads of a kernel: MiB of the L2 cache (kCacheBytes), heads at least (kHeadsTogether)."""

    cache_mb: int = SECTION_MB
    least: int = 1

    @staticmethod
    def of(plan: Plan) -> Sections:
        """Those of a GPU kernel, as schedule.cuh.jinja has them."""
        problem, tuning = plan.spec.problem, plan.spec.tuning
        larger = 32 if problem.direction is Direction.FORWARD else 40
        listed = plan.descending and problem.mask.listed
        least = getattr(tuning, "heads_together", 0) or (8 if listed else 1)
        return Sections(getattr(tuning, "cache_mb", larger), least)


DEFAULT_SECTIONS = Sections()


@dataclass(frozen=True)
class Costs:
    """Costs in units of a full tile: a masked tile, and the overhead of a work tile (first loads, the epilogue)."""

    masked: float = 1.0
    work_tile: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """One pass under one tile shape. A work tile is one query tile (backward: key tile) of one head."""

    full: int  # row groups of the tiles of one head that need no mask; a tile has one by default
    masked: int  # visited row groups that need the mask
    tile_use: float  # visible pairs over pairs in visited row groups
    useful: float  # visible pairs of all heads, in tiles
    busy: tuple[float, ...]  # work of each SM: all start at 0 and run without a pause

    @property
    def balance(self) -> float:
        """Work over what all SMs could have done until the last one finished."""
        return sum(self.busy) / (len(self.busy) * max(self.busy))

    @property
    def allowed(self) -> float:
        """Rate of visible pairs, relative to full tiles without a pause."""
        return self.useful / (len(self.busy) * max(self.busy))

    def running(self, time: float) -> int:
        """Number of busy SMs at `time`."""
        return sum(end > time for end in self.busy)


def simulate(
    case: Case,
    direction: Direction,
    tile_m: int,
    tile_n: int,
    order: Order = "static",
    split_heads: bool = True,
    costs: Costs | None = None,
    multiprocessors: int = MULTIPROCESSORS,
    row_groups: int = 1,
    sections: Sections = DEFAULT_SECTIONS,
) -> Schedule:
    """The schedule of a case. Backward has a work tile per key tile and query head, without `split_heads` per kv head.

    A tile may have several `row_groups` that skip what is hidden from them: a visited one is 1 / row_groups of a tile.
    """
    costs = costs or Costs()
    kinds = _kinds(case, tile_m, tile_n, row_groups, _causal_forward(case, direction))
    # The dimensions that a work tile is summed over.
    others = (1, 2) if direction is Direction.FORWARD else (0, 1)
    full, masked = (kinds == FULL).sum(others), (kinds == PARTIAL).sum(others)
    visits = (kinds != EMPTY).any(1).sum(1 if direction is Direction.FORWARD else 0)
    loops = 1 if direction is Direction.FORWARD or split_heads else case.heads_q // case.heads_kv
    steps = (full + masked * costs.masked).double() / row_groups * loops
    if direction is Direction.BACKWARD and split_heads and case.mask_kind is Mask.SPANS:
        ranked = _cut(steps, visits, costs.work_tile)
    else:
        ranked = (steps + costs.work_tile)[_longest_first(case, direction, visits)]
    # Without a mask, last query tiles that are not full start after all others.
    last = row_groups > 1 and case.mask_kind is Mask.FULL and case.seq_q % tile_m > 0
    rounds = order == "static"
    work_tiles = ranked[
        _ranks(case, direction, ranked.numel(), split_heads, last, rounds, multiprocessors, sections)
    ]
    busy = (
        _static(work_tiles, multiprocessors) if order == "static" else _dynamic(work_tiles, multiprocessors)
    )
    visited = int((full + masked).sum())
    area = tile_m * tile_n
    useful = case.pairs * case.batch * case.heads_q / area
    return Schedule(
        int(full.sum()),
        int(masked.sum()),
        case.pairs * row_groups / (area * visited),
        useful,
        tuple(busy.tolist()),
    )


def _causal_forward(case: Case, direction: Direction) -> bool:
    """Whether tiles end with the last query, so that the last one has most work."""
    return case.mask_kind is Mask.CAUSAL and direction is Direction.FORWARD


def _kinds(case: Case, tile_m: int, tile_n: int, row_groups: int, from_end: bool) -> Tensor:
    """Kind of each row group of each tile: (tiles_m, row_groups, tiles_n). Those beyond the last query are empty.

    With `from_end` the last tile ends with the last query, and row groups before the first one are empty.
    """
    spans, queries = spans_of(case), case.seq_q
    if from_end:
        before = -queries % tile_m // 64 * 64  # rows of whole warpgroups
        shift = (spans.ends > spans.starts).int() * before
        spans = Spans(spans.starts + shift, spans.ends + shift)
        queries += before
    rows = tile_map(spans, queries, tile_m // row_groups, tile_n).kinds
    beyond = rows.new_full((-rows.shape[0] % row_groups, rows.shape[1]), EMPTY)
    return torch.cat((rows, beyond)).view(-1, row_groups, rows.shape[1])


def spans_of(case: Case) -> Spans:
    """The case's mask, which is not dense, as intervals."""
    if isinstance(case.mask, Spans):
        return case.mask
    key = torch.arange(case.seq_k, dtype=torch.int32)
    offset = case.seq_k - case.seq_q
    starts = key * 0 if case.mask_kind is Mask.FULL else (key - offset).clamp(min=0)
    return Spans(starts, torch.full_like(key, case.seq_q))


def _longest_first(case: Case, direction: Direction, visits: Tensor) -> Tensor:
    """Tile of each rank: by visited tiles, earlier tiles winning ties; without a list by the template's rule."""
    if case.mask_kind is Mask.SPANS:
        return torch.argsort(visits, descending=True, stable=True)
    tile = torch.arange(visits.numel())
    return tile.flip(0) if _causal_forward(case, direction) else tile


def _cut(steps: Tensor, visits: Tensor, work_tile: float) -> Tensor:
    """Work of the pieces of all lists of visits, the longest first, as `_order` of the template cuts them.

    There are blocks for an eighth more pieces than tiles, less one; those without a piece have no work.
    """
    tiles = visits.numel()
    spare = -(-tiles // 8)
    most = max(LEAST_VISITS, int(visits.sum()) // spare + 1)
    pieces = (-(-visits // most)).clamp(min=1)
    length = -(-visits // pieces)
    ranked = torch.argsort(length, descending=True, stable=True)
    tile = ranked.repeat_interleave(pieces[ranked])
    number = torch.cat([torch.arange(int(n)) for n in pieces[ranked]])
    visited = (visits[tile] - number * length[tile]).clamp(min=0).minimum(length[tile])
    work = steps[tile] * visited / visits[tile].clamp(min=1) + work_tile
    return torch.cat((work, work.new_zeros(tiles + spare - 1 - work.numel())))


def _ranks(
    case: Case,
    direction: Direction,
    tiles: int,
    split_heads: bool,
    last: bool = False,
    alternating: bool = False,
    multiprocessors: int = MULTIPROCESSORS,
    sections: Sections = DEFAULT_SECTIONS,
) -> Tensor:
    """Rank of the tile of each work tile, in the order in which they start (`place_of` of the template).

    With `last`, the work tiles of the last rank come after all others. With `alternating`, every other section of a
    causal forward starts with the last rank, and small sections are enlarged.
    """
    forward = direction is Direction.FORWARD
    heads = case.heads_q if forward or split_heads else case.heads_kv
    together = heads // case.heads_kv if forward else 1
    bytes_qk, bytes_v = case.dtype.bytes * case.head_dim, case.dtype.bytes * case.head_dim_v
    size = (
        (bytes_qk + bytes_v) * case.seq_k
        if forward
        else (bytes_qk + 4 * case.head_dim + bytes_v) * case.seq_q
    )
    planes = heads // together * case.batch
    fits, whole = min(max((sections.cache_mb << 20) // size, sections.least), planes), tiles - last
    alternates = alternating and _causal_forward(case, direction)
    if alternates:
        blocks = min(multiprocessors, tiles * heads * case.batch)
        fits = _even_heads(fits, together * tiles, blocks, max(ENLARGED_MB // sections.cache_mb, 1))
    section = fits * together
    index = torch.arange(whole * heads * case.batch)
    first = index // (section * max(whole, 1)) * section
    width = (heads * case.batch - first).clamp(max=section)
    ranks = (index - first * whole) // width
    if alternates:
        ascends = (heads * case.batch - 1 - first) // section % 2 == 1
        ranks = torch.where(ascends, whole - 1 - ranks, ranks)
    return torch.cat((ranks, ranks.new_full((last * heads * case.batch,), whole)))


def _even_heads(fits: int, tiles: int, blocks: int, enlarged: int) -> int:
    """KV heads of a section of an alternating order (`even_heads` of the template)."""
    return min(fits * enlarged, -(-2 * blocks // tiles)) if 4 * fits * tiles < 5 * blocks else fits


def _static(work_tiles: Tensor, multiprocessors: int) -> Tensor:
    """Work of each block, one per SM; blocks take work tiles alternately from both ends of each round."""
    grid = min(multiprocessors, work_tiles.numel())
    padded = torch.zeros(-(-work_tiles.numel() // grid) * grid, dtype=work_tiles.dtype)
    padded[: work_tiles.numel()] = work_tiles
    rounds = padded.view(-1, grid)
    rounds[1::2] = rounds[1::2].flip(1)
    return torch.cat((rounds.sum(0), work_tiles.new_zeros(multiprocessors - grid)))


def _dynamic(work_tiles: Tensor, multiprocessors: int) -> Tensor:
    """Work of each SM if every work tile goes to the first free one."""
    ends = [0.0] * multiprocessors
    for work_tile in work_tiles.tolist():
        heapq.heapreplace(ends, ends[0] + work_tile)
    return torch.tensor(ends, dtype=torch.float64)
