"""Upper bounds on a kernel's speed from its tile schedule.

Two effects are counted: hidden pairs inside visited tiles, and SMs that are idle at the end of the kernel. The host
simulates the lists of tiles and the order in which thread blocks take them, as templates/common/schedule.cuh.jinja
implements it. Waits of deterministic blocks for each other are not counted. Unit of time: one full tile of one head
takes 1.
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

MULTIPROCESSORS = 132  # SMs of an H100 or H200
LEAST_VISITS = 16  # visited tiles of a piece, at least (kLeastVisits of the template)
MOST_PIECES = 32  # of a list (kMostPieces)
ENLARGED_MB = 32  # MiB of L2 cache of an enlarged section, at most (kEnlarged)

# static: one persistent block per SM; in every other round, blocks take work tiles in reverse order.
# dynamic: the next work tile goes to the SM that is free first.
Order = Literal["static", "dynamic"]


@dataclass(frozen=True)
class Sections:
    """Parameters of the launch order: heads are processed in sections whose k and v fit into the L2 cache.

    cache_mb: MiB of the L2 cache per section (kCacheBytes of the template). least: heads per section at least
        (kHeadsTogether).
    cut_lists: whether a backward with a block per q head divides long lists. descending: blocks start with the last
        owned tile. launch_order: the knob of deterministic backwards.
    """

    cache_mb: int = SECTION_MB
    least: int = 1
    cut_lists: bool = True
    descending: bool = False
    launch_order: int = 0

    @staticmethod
    def of(plan: Plan) -> Sections:
        """The parameters of a GPU kernel, with the defaults of schedule.cuh.jinja."""
        problem, tuning = plan.spec.problem, plan.spec.tuning
        larger = 32 if problem.direction is Direction.FORWARD else 40
        listed = plan.descending and problem.mask.listed
        least = getattr(tuning, "heads_together", 0) or (8 if listed else 1)
        return Sections(
            getattr(tuning, "cache_mb", larger),
            least,
            plan.cut_lists,
            plan.descending,
            getattr(tuning, "launch_order", 0),
        )


DEFAULT_SECTIONS = Sections()


@dataclass(frozen=True)
class Costs:
    """Costs in units of a full tile.

    masked: a tile that needs the mask. work_tile: the overhead of each work tile (first loads and epilogue).
    """

    masked: float = 1.0
    work_tile: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The simulated schedule of one pass. A work tile is one query tile (backward: key tile) of one head."""

    full: int  # visited row groups of one head that need no mask
    masked: int  # visited row groups of one head that need the mask
    tile_use: float  # visible pairs / pairs in visited row groups
    useful: float  # visible pairs of all heads and batch entries, in tiles
    busy: tuple[float, ...]  # work of each SM; all start at time 0 and never pause

    @property
    def balance(self) -> float:
        """Mean over maximum of the SMs' work."""
        return sum(self.busy) / (len(self.busy) * max(self.busy))

    @property
    def allowed(self) -> float:
        """Upper bound on the rate of visible pairs, relative to SMs that compute full tiles all the time."""
        return self.useful / (len(self.busy) * max(self.busy))

    def running(self, time: float) -> int:
        """Number of SMs that are busy at `time`."""
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
    """Simulate the schedule of a case.

    order: the tile scheduler, see `Order`.
    split_heads: backward: one work tile per key tile and query head; if False, per key tile and kv head.
    row_groups: row groups per tile, each of which skips tiles that are hidden from it. A visited one costs 1 /
        row_groups.
    """
    costs = costs or Costs()
    kinds = _kinds(case, tile_m, tile_n, row_groups, _causal_forward(case, direction))
    # Sum over row groups and over the axis that a work tile iterates over.
    others = (1, 2) if direction is Direction.FORWARD else (0, 1)
    full, masked = (kinds == FULL).sum(others), (kinds == PARTIAL).sum(others)
    visits = (kinds != EMPTY).any(1).sum(1 if direction is Direction.FORWARD else 0)
    loops = 1 if direction is Direction.FORWARD or split_heads else case.heads_q // case.heads_kv
    steps = (full + masked * costs.masked).double() / row_groups * loops
    listed = direction is Direction.BACKWARD and split_heads and case.mask_kind is Mask.SPANS
    if listed and sections.cut_lists:
        ranked = _cut(steps, visits, costs.work_tile)
    else:
        ranked = (steps + costs.work_tile)[_tiles_by_rank(case, direction, visits, sections)]
    # Without a mask, incomplete query tiles are launched after all others.
    last = row_groups > 1 and case.mask_kind is Mask.FULL and case.seq_q % tile_m > 0
    rounds = order == "static"
    work_tiles = ranked[
        _ranks(case, direction, ranked.numel(), split_heads, last, rounds, multiprocessors, sections)
    ]
    busy = (
        _static(work_tiles, multiprocessors) if order == "static" else _dynamic(work_tiles, multiprocessors)
    )
    area = tile_m * tile_n
    return Schedule(
        int(full.sum()),
        int(masked.sum()),
        case.pairs * row_groups / (area * int((full + masked).sum())),
        case.pairs * case.batch * case.heads_q / area,
        tuple(busy.tolist()),
    )


def _causal_forward(case: Case, direction: Direction) -> bool:
    """Whether tiles are aligned with the last query. The last tile then has the most work."""
    return case.mask_kind is Mask.CAUSAL and direction is Direction.FORWARD


def _kinds(case: Case, tile_m: int, tile_n: int, row_groups: int, from_end: bool) -> Tensor:
    """The kind (EMPTY, PARTIAL or FULL) of each row group of each tile: (tiles_m, row_groups, tiles_n).

    Row groups after the last query are EMPTY. from_end: the last tile ends with the last query, and row groups before
    the first query are EMPTY.
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
    """The mask of a case as Spans. The mask must not be dense."""
    if isinstance(case.mask, Spans):
        return case.mask
    key = torch.arange(case.seq_k, dtype=torch.int32)
    offset = case.seq_k - case.seq_q
    starts = key * 0 if case.mask_kind is Mask.FULL else (key - offset).clamp(min=0)
    return Spans(starts, torch.full_like(key, case.seq_q))


def _tiles_by_rank(case: Case, direction: Direction, visits: Tensor, sections: Sections) -> Tensor:
    """The tile of each rank, (tiles,). Rank 0 starts first.

    Spans: by descending number of visited tiles, ties by ascending tile. Other masks: the fixed order of the template.
    Deterministic blocks start with the last tile or, with `launch_order` 4, with tiles of at least 1.5 times the mean
    work in descending order.
    """
    tile = torch.arange(visits.numel())
    if sections.descending or _causal_forward(case, direction):
        return tile.flip(0)
    if case.mask_kind is not Mask.SPANS:
        return tile
    most_first = torch.argsort(visits, descending=True, stable=True)
    if sections.launch_order != 4:
        return most_first
    is_long = 2 * visits * visits.numel() >= 3 * visits.sum()
    return torch.cat((tile[is_long].flip(0), most_first[~is_long[most_first]]))


def _cut(steps: Tensor, visits: Tensor, work_tile: float) -> Tensor:
    """Work of each piece of a list of visited tiles, longest first. Long lists are cut as by the template's `_order`.

    The grid has tiles + ceil(tiles / 8) - 1 entries; entries without a piece have no work.
    """
    tiles = visits.numel()
    spare = -(-tiles // 8)
    least = max(LEAST_VISITS, 3 * int(visits.sum()) // (2 * tiles))
    most = max(least, int(visits[visits > least].sum()) // spare + 1)
    longest = (-(-visits // MOST_PIECES)).clamp(min=most)
    pieces = (-(-visits // longest)).clamp(min=1)
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
    """Rank of the tile of each work tile, in launch order (`place_of` of the template).

    last: the work tiles of the last rank are launched after all others.
    alternating: in a causal forward, every other section begins with the last rank, and small sections are enlarged.
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
    if sections.launch_order in (1, 2):
        return _last_section_turned(whole, heads * case.batch, section, folded=sections.launch_order == 2)
    if sections.launch_order == 3:
        return _on_diagonals(whole, heads * case.batch, section)
    index = torch.arange(whole * heads * case.batch)
    first = index // (section * max(whole, 1)) * section
    width = (heads * case.batch - first).clamp(max=section)
    ranks = (index - first * whole) // width
    if alternates:
        ascends = (heads * case.batch - 1 - first) // section % 2 == 1
        ranks = torch.where(ascends, whole - 1 - ranks, ranks)
    return torch.cat((ranks, ranks.new_full((last * heads * case.batch,), whole)))


def _last_section_turned(tiles: int, planes: int, section: int, folded: bool) -> Tensor:
    """Ranks with `launch_order` 1 or, if `folded`, 2. The last section also takes the planes that fill no section."""
    index = torch.arange(tiles * planes)
    last = planes // section - 1
    number = (index // (section * tiles)).clamp(max=last)
    first = number * section
    is_last = number == last
    started = (index - first * tiles) // torch.where(is_last, planes - first, section)
    down = torch.where(is_last, (tiles + 1) // 2 if folded else 0, tiles)
    return torch.where(started < down, tiles - down + started, tiles - 1 - started)


def _on_diagonals(tiles: int, planes: int, section: int) -> Tensor:
    """Ranks with `launch_order` 3 (`place_on_diagonals` of the template)."""
    parts = []
    for first in range(0, planes, section):
        width = min(section, planes - first)
        rank = torch.arange(tiles).repeat_interleave(width)
        plane = torch.arange(width).repeat(tiles)
        parts.append(rank if width > tiles else rank[torch.argsort((rank + plane) * width + plane)])
    return torch.cat(parts)


def _even_heads(fits: int, tiles: int, blocks: int, enlarged: int) -> int:
    """kv heads per section of an alternating order (`even_heads` of the template).

    fits: kv heads that fit into the cache. tiles: work tiles per kv head. blocks: thread blocks. enlarged: largest
        factor.
    """
    return min(fits * enlarged, -(-2 * blocks // tiles)) if 4 * fits * tiles < 5 * blocks else fits


def _static(work_tiles: Tensor, multiprocessors: int) -> Tensor:
    """Work of each SM. Each runs one persistent block; blocks take work tiles in rounds of alternating direction."""
    grid = min(multiprocessors, work_tiles.numel())
    padded = torch.zeros(-(-work_tiles.numel() // grid) * grid, dtype=work_tiles.dtype)
    padded[: work_tiles.numel()] = work_tiles
    rounds = padded.view(-1, grid)
    rounds[1::2] = rounds[1::2].flip(1)
    return torch.cat((rounds.sum(0), work_tiles.new_zeros(multiprocessors - grid)))


def _dynamic(work_tiles: Tensor, multiprocessors: int) -> Tensor:
    """Work of each SM, if every work tile goes to the SM that is free first."""
    ends = [0.0] * multiprocessors
    for work_tile in work_tiles.tolist():
        heapq.heapreplace(ends, ends[0] + work_tile)
    return torch.tensor(ends, dtype=torch.float64)
