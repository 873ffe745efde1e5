"""Process groups, row layout and local masks of context parallelism (see context_parallel.py).

A block is the n consecutive rows that one rank holds. Block i belongs to rank i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attnforge.runtime.masks import DenseMask, Spans


class Layout(NamedTuple):
    """Process groups and blocks of one rank, for one `Partition`."""

    ulysses_group: Any  # process group of the all-to-all between heads and rows; None if U = 1
    gather_group: Any  # process group of the all-gather of keys; None if R = 1
    queries: tuple[int, ...]  # blocks whose queries this rank computes, ascending
    keys: tuple[int, ...]  # blocks in the order of the gathered keys


def make_layout(group: Any, ulysses_degree: int, contiguous: bool) -> Layout:
    """Create the layout of this rank. Creating a process group is collective among the members of that group only."""
    ranks = dist.get_process_group_ranks(group)
    world = len(ranks)
    queries, gather_ranks, keys = divide(world, ulysses_degree, dist.get_rank(group), contiguous)
    if ulysses_degree in (1, world):
        return Layout(
            group if ulysses_degree > 1 else None, group if ulysses_degree < world else None, queries, keys
        )
    ulysses_group = dist.new_group([ranks[block] for block in queries], use_local_synchronization=True)
    gather_group = dist.new_group([ranks[block] for block in gather_ranks], use_local_synchronization=True)
    return Layout(ulysses_group, gather_group, queries, keys)


def divide(
    world: int, ulysses_degree: int, rank: int, contiguous: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(Ulysses group, gather group, blocks of keys in the order in which they are gathered) of a rank.

    The Ulysses group exchanges rows for heads by all-to-all. The gather group all-gathers the keys of the same heads;
    it has one rank of each Ulysses group.

    contiguous: Ulysses groups, which send the most bytes, have consecutive ranks, and keys keep their order. Otherwise
        every Ulysses group has early and late blocks, so that a causal mask gives all ranks the same work.
    """
    gather_size = world // ulysses_degree
    if contiguous:
        index, place = divmod(rank, ulysses_degree)
        return (
            tuple(range(index * ulysses_degree, (index + 1) * ulysses_degree)),
            tuple(range(place, world, ulysses_degree)),
            tuple(range(world)),
        )

    def group_of(block: int) -> int:
        """The Ulysses group of a block: 0, 1, .., R - 1, R - 1, .., 1, 0, 0, 1, .. for blocks 0, 1, ..."""
        round_, place = divmod(block, gather_size)
        return place if round_ % 2 == 0 else gather_size - 1 - place

    groups = [tuple(block for block in range(world) if group_of(block) == t) for t in range(gather_size)]
    # Ranks at the same position of their Ulysses groups have the same heads.
    first = rank // gather_size * gather_size
    gather_ranks = tuple(range(first, first + gather_size))
    return (
        groups[group_of(rank)],
        gather_ranks,
        tuple(b for block in gather_ranks for b in groups[group_of(block)]),
    )


def local_spans(
    mask: Spans,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    rows: int,
    total: int,
) -> Spans:
    """The mask between the queries of the blocks `queries` and the keys of the blocks `keys`.

    rows: rows of a block. total: rows of the whole sequence without padding; padding is hidden from all queries.
    """
    device = mask.device
    first = torch.tensor(queries, device=device) * rows

    def count(position: Tensor) -> Tensor:
        """Number of this rank's queries before a position of the whole sequence."""
        return (position.clamp(0, total)[..., None] - first).clamp(0, rows).sum(-1)

    return renumbered_spans(mask, count, rows_of(keys, rows, device), len(keys) * rows - total)


def renumbered_spans(mask: Spans, count: Callable[[Tensor], Tensor], keys: Tensor, padding: int) -> Spans:
    """The mask between a rank's queries and a selection of keys.

    count: maps positions of the whole sequence to the number of the rank's queries before them.
    keys: (n,) int64, indices of the selected keys in the padded sequence.
    padding: number of padding keys after the keys of `mask`; no query sees them.
    """
    starts, ends = (
        torch.nn.functional.pad(count(x).to(torch.int32), (0, padding))[..., keys]
        for x in (mask.starts, mask.ends)
    )
    # The mean over a rank's queries is close to the mean over all queries, because a rank has early and late rows.
    return Spans(starts, ends, visible_keys=mask.visible_keys)


def local_dense(
    mask: DenseMask, queries: tuple[int, ...], keys: tuple[int, ...], rows: int, total: int
) -> DenseMask:
    """`local_spans` for a DenseMask; the result has the heads of `mask`."""
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
    """`local_spans` for Causal() (`causal=True`) or for no mask."""
    return local_spans(plain_spans(causal, total, device), queries, keys, rows, total)


def plain_spans(causal: bool, total: int, device: torch.device) -> Spans:
    """Causal() (`causal=True`) or no mask, as Spans of `total` rows and keys."""
    key = torch.arange(total, dtype=torch.int32, device=device)
    starts = key if causal else torch.zeros_like(key)
    return Spans(starts, torch.full_like(key, total), visible_keys=total // 2 if causal else total)


def rows_of(blocks: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Indices in the whole sequence of the rows of `blocks`, int64, of length len(blocks) * rows."""
    return torch.cat([torch.arange(block * rows, (block + 1) * rows, device=device) for block in blocks])
