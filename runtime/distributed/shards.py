"""How context parallelism divides heads, rows and masks among ranks (see context_parallel.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attnforge.runtime.masks import DenseMask, Spans


class Layout(NamedTuple):
    """Process groups and the distribution of rows, for one U. A block is the n rows of one rank."""

    among_heads: Any  # process group of the all-to-all, None if U is 1
    among_rows: Any  # process group of the all-gather, None if R is 1
    queries: tuple[int, ...]  # blocks whose queries this rank computes, ascending
    keys: tuple[int, ...]  # blocks in the order of the gathered keys


def make_layout(group: Any, shared: int, beside: bool) -> Layout:
    """Create the layout. Only the members of a process group take part in creating it."""
    ranks = dist.get_process_group_ranks(group)
    world = len(ranks)
    queries, neighbours, keys = divide(world, shared, dist.get_rank(group), beside)
    if shared in (1, world):
        return Layout(group if shared > 1 else None, group if shared < world else None, queries, keys)
    among_heads = dist.new_group([ranks[block] for block in queries], use_local_synchronization=True)
    among_rows = dist.new_group([ranks[block] for block in neighbours], use_local_synchronization=True)
    return Layout(among_heads, among_rows, queries, keys)


def divide(
    world: int, shared: int, rank: int, beside: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(all-to-all group of a rank, its all-gather group, blocks of keys in the order of the gathered keys).

    beside: groups of the all-to-all, which moves most bytes, are of neighbours, and so of one node. Keys stay in order.
    Otherwise each has early and late rows.
    """
    gathered = world // shared
    if beside:
        team, place = divmod(rank, shared)
        return (
            tuple(range(team * shared, (team + 1) * shared)),
            tuple(range(place, world, shared)),
            tuple(range(world)),
        )

    def team_of(block: int) -> int:
        """The all-to-all group of a block: 0 1 .. R-1, R-1 .. 1 0, 0 1 ..: early and late rows in each."""
        turn, place = divmod(block, gathered)
        return place if turn % 2 == 0 else gathered - 1 - place

    teams = [tuple(block for block in range(world) if team_of(block) == t) for t in range(gathered)]
    # One rank of each team, at the same place of its team: they have the same heads.
    first = rank // gathered * gathered
    neighbours = tuple(range(first, first + gathered))
    return teams[team_of(rank)], neighbours, tuple(b for block in neighbours for b in teams[team_of(block)])


def local_spans(
    mask: Spans,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    rows: int,
    total: int,
) -> Spans:
    """The mask between the queries of the blocks `queries` and the keys of the blocks `keys`; `total` rows are real."""
    device = mask.device
    first = torch.tensor(queries, device=device) * rows

    def count(position: Tensor) -> Tensor:
        """Number of this rank's queries before a position."""
        return (position.clamp(0, total)[..., None] - first).clamp(0, rows).sum(-1)

    return renumbered_spans(mask, count, rows_of(keys, rows, device), len(keys) * rows - total)


def renumbered_spans(mask: Spans, count: Callable[[Tensor], Tensor], keys: Tensor, padding: int) -> Spans:
    """The mask between a rank's queries and the keys with these numbers in the whole sequence.

    `count` gives the number of the rank's queries before a position. Nothing sees the `padding` keys behind the mask's.
    """
    starts, ends = (
        torch.nn.functional.pad(count(x).to(torch.int32), (0, padding))[..., keys]
        for x in (mask.starts, mask.ends)
    )
    # A rank has early and late rows, so its queries see about as many keys as all queries do.
    return Spans(starts, ends, visible_keys=mask.visible_keys)


def local_dense(
    mask: DenseMask, queries: tuple[int, ...], keys: tuple[int, ...], rows: int, total: int
) -> DenseMask:
    """As `local_spans`, for a mask of all heads."""
    row, column = (rows_of(blocks, rows, mask.device) for blocks in (queries, keys))
    real = (row < total)[:, None] & (column < total)[None]
    row, column = row.clamp(max=total - 1), column.clamp(max=total - 1)
    visible = mask.mask.index_select(-2, row).index_select(-1, column) & real
    return DenseMask(visible, visible_keys=mask.visible_keys)


def local_plain(
    causal: bool,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    rows: int,
    total: int,
    device: torch.device,
) -> Spans:
    """As `local_spans`, of Causal() or None."""
    return local_spans(plain_spans(causal, total, device), queries, keys, rows, total)


def plain_spans(causal: bool, total: int, device: torch.device) -> Spans:
    """Causal() or None of `total` rows."""
    key = torch.arange(total, dtype=torch.int32, device=device)
    starts = key if causal else torch.zeros_like(key)
    return Spans(starts, torch.full_like(key, total), visible_keys=total // 2 if causal else total)


def rows_of(blocks: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Row numbers in the whole sequence of the rows of some blocks, int64."""
    return torch.cat([torch.arange(block * rows, (block + 1) * rows, device=device) for block in blocks])
