"""Which rows ranks compute and which keys they read, for Ulysses degree 1."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product

import pytest
import torch
from oracle import unions
from torch import Tensor

import attnforge
from attnforge.runtime.distributed.row_assignment import (
    TILE,
    RowAssignment,
    RowRanges,
    assign_rows,
    assigned_spans,
    count_rows,
    intersect,
    offsets_in,
    row_transfers,
)
from attnforge.runtime.distributed.shards import plain_spans

CPU = torch.device("cpu")


@lru_cache(maxsize=2)
def masks(total: int) -> dict[str, attnforge.Spans]:
    splits = [total // 3, total // 4, total - total // 3 - total // 4]
    key = torch.arange(total, dtype=torch.int32)
    last = total - total // 8
    sizes = [total // 2, total // 8, total // 8, total - total // 2 - 2 * (total // 8)]
    return {
        "packed": attnforge.bagel.PackedMask([total], splits, ["full", "noise", "causal"], "cpu"),
        "documents": attnforge.bagel.PackedMask(sizes, sizes, ["full", "causal", "causal", "full"], "cpu"),
        "causal": plain_spans(True, total, CPU),
        "none": plain_spans(False, total, CPU),
        "one image": attnforge.Spans(
            torch.where(key < last, key, last), torch.where(key < last, key + 1, total)
        ),
        "nothing": attnforge.Spans(key, key),
        "unions": unions(total, total, 2, "cpu"),
        "planes": unions(total, total, 3, "cpu", (2, 3)),
    }


def positions(ranges: RowRanges) -> Tensor:
    return torch.cat([torch.arange(*row_range) for row_range in ranges])


@lru_cache(maxsize=8)
def visible(name: str, total: int) -> Tensor:
    """The pairs of a mask, for all numbers of ranks."""
    return masks(total)[name].visible(total, total)


def padded(seen: Tensor, total: int, length: int) -> Tensor:
    whole = torch.zeros(*seen.shape[:-2], length, length, dtype=torch.bool)
    whole[..., :total, :total] = seen
    return whole


@pytest.mark.usefixtures("slow_kernels")
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("world", [2, 4, 7, 64])
@pytest.mark.parametrize("total", [1900, 1857])
def test_each_pair_is_computed_once(world: int, total: int, in_order: bool) -> None:
    """The parts' masks show what the whole's does, and no key that a rank's rows see is missing."""
    rows = -(-total // world)
    for name, mask in masks(total).items():
        found = assign_rows(mask, (0,) * world, rows, in_order)
        whole = padded(visible(name, total), total, world * rows)
        assert torch.equal(positions(tuple(sorted(sum(found.computed, ())))), torch.arange(world * rows)), (
            name
        )
        for rank in range(world):
            queries, computed, keys = found.of(rank)
            here, there = positions(queries), positions(keys)
            hidden = torch.isin(here, positions(computed), invert=True)
            expected = whole[..., here, :] & ~hidden[:, None]
            local = assigned_spans(mask, found, rank).visible(len(here), len(there))
            assert torch.equal(local, expected[..., there]), name
            assert local.sum() == expected.sum(), f"{name}: a key is missing"
            assert intersect(found.held[rank], keys) == found.held[rank]
            assert in_order or intersect(found.held[rank], queries) == found.held[rank]
            assert not in_order or (len(queries), keys) == (1, ((0, world * rows),))


@pytest.fixture
def slow_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any work is worth the links' time."""
    monkeypatch.setattr("attnforge.runtime.distributed.links.KERNEL_FLOPS", 1e6)


@pytest.mark.usefixtures("slow_kernels")
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("world", [2, 4, 7])
def test_all_ranks_have_as_much_work(world: int, in_order: bool) -> None:
    total = 40 * TILE * world
    for name, mask in masks(total).items():
        found = assign_rows(mask, (0,) * world, total // world, in_order)
        mean = sum(found.pairs_computed) / world
        assert sum(found.pairs_computed) == pytest.approx(sum(found.pairs_held))
        assert max(found.pairs_computed) <= 1.04 * mean, (name, found.pairs_computed)


def test_work_is_of_whole_tiles() -> None:
    """One key for a row costs as much as for its whole tile."""
    key = torch.arange(4 * TILE, dtype=torch.int32)
    found = assign_rows(attnforge.Spans(key, key + 1), (0,) * 2, 2 * TILE)
    assert found.pairs_held == found.pairs_computed == (2 * TILE * TILE,) * 2


def test_work_is_of_one_head() -> None:
    one = plain_spans(True, 4 * TILE, CPU)
    starts = one.starts.expand(1, 2, 1, -1)
    mask = attnforge.Spans(
        starts, torch.stack((one.ends, one.starts))[None, :, None]
    )  # one head sees nothing
    assert mask.planes == (1, 2)
    assert 2 * sum(assign_rows(mask, (0, 0), 2 * TILE).pairs_held) == sum(
        assign_rows(one, (0, 0), 2 * TILE).pairs_held
    )


def test_an_empty_interval_fetches_nothing() -> None:
    key = torch.arange(4 * TILE, dtype=torch.int32)
    gone = attnforge.Spans(torch.where(key % 2 == 0, key, 0), torch.where(key % 2 == 0, key + 1, 0))
    assert (
        not assign_rows(gone, (0, 0), 2 * TILE).rows_fetched(assign_rows(gone, (0, 0), 2 * TILE).keys).any()
    )


def test_rows_that_are_balanced_stay() -> None:
    found = assign_rows(plain_spans(False, 64, CPU), (0,) * 4, 16)
    assert found.computed == found.queries == found.held
    assert assign_rows(plain_spans(False, 64, CPU), (0,) * 4, 16, in_order=True).computed == found.held
    first = torch.zeros(64, dtype=torch.int32)
    alone = assign_rows(attnforge.Spans(first, first + 1), (0,) * 64, 1, in_order=True).computed
    assert alone == tuple((row_range,) for row_range in pairwise(range(65))), "a row each at least"


def test_the_end_with_fewer_rows_is_given() -> None:
    """Under a causal mask the last ranks give their last rows, which see most, straight to the first ranks."""
    found = assign_rows(plain_spans(True, 64 * TILE, CPU), (0,) * 4, 16 * TILE)
    for rank in (2, 3):
        ((first, last),) = found.computed[rank]
        assert first == found.held[rank][0][0]
        assert last < found.held[rank][0][1]
    given = [row_range for rank in (0, 1) for row_range in found.computed[rank][1:]]
    assert min(first for first, _ in given) > 32 * TILE
    assert count_rows(tuple(given)) < 16 * TILE
    assert all(len(ranges) > 1 for ranges in found.computed[:2])


def test_only_keys_that_are_seen_are_fetched() -> None:
    sizes = [1024, 1024, 1024, 1024]
    documents = attnforge.bagel.PackedMask(sizes, sizes, ["causal"] * 4, "cpu")
    found = assign_rows(documents, (0,) * 2, 2048)
    assert found.rows_fetched(found.keys).tolist() == [[0, 0], [0, 0]]
    sizes = [1920, 256, 1920]
    across = attnforge.bagel.PackedMask(sizes, sizes, ["causal"] * 3, "cpu")
    found = assign_rows(across, (0,) * 2, 2048)
    assert found.keys == (((0, 2048),), ((1920, 2048), (2048, 4096)))


def test_rows_with_few_pairs_stay() -> None:
    """To move a row over NVLink takes as long as 1600 of its pairs, and to another node as long as 7600."""
    block = 64 * TILE
    for pairs, moves in ((1000, False), (3000, True)):
        key = torch.arange(4 * block, dtype=torch.int32)
        band = attnforge.Spans(key, torch.where(key < block, key + pairs, key))
        for nodes in ((0, 0), (0, 0, 0, 0)):  # to three others the giver sends what each of them gets
            rows = 4 * block // len(nodes)
            assert (assign_rows(band, nodes, rows).computed != assign_rows(band, nodes, rows).held) == moves
        assert assign_rows(band, (0, 1), 2 * block).computed == assign_rows(band, (0, 1), 2 * block).held


def test_nodes_keep_their_rows() -> None:
    """Documents move inside a node, where one is; under a causal mask they also leave it."""
    block = 64 * TILE
    key = torch.arange(4 * block, dtype=torch.int32)
    uneven = attnforge.Spans(key, torch.where(key // block % 2 == 0, key + 4000, key + 300))
    found = assign_rows(uneven, (0, 0, 1, 1), block)
    assert found.rows_fetched(found.queries)[[0, 0, 1, 1, 2, 2, 3, 3], [2, 3, 2, 3, 0, 1, 0, 1]].sum() == 0
    assert max(found.pairs_computed) < 1.1 * sum(found.pairs_computed) / 4
    causal = plain_spans(True, 4 * block, CPU)
    found = assign_rows(causal, (0, 0, 1, 1), block)
    assert found.rows_fetched(found.queries)[:2, 2:].sum() > 0
    assert max(found.pairs_computed) < 1.1 * sum(found.pairs_computed) / 4


def test_places() -> None:
    ranges = ((10, 20), (40, 50))
    assert offsets_in((12, 15), ranges) == (2, 5)
    assert offsets_in((40, 50), ranges) == (10, 20)
    with pytest.raises(ValueError, match="not in one of"):
        offsets_in((15, 45), ranges)
    assert intersect(((0, 12), (18, 45)), ranges) == ((10, 12), (18, 20), (40, 45))


def numbers_of(ranges: RowRanges, known: RowRanges) -> Tensor:
    """The numbers of the rows `ranges`; -1 for those that are not `known`."""
    rows = torch.cat([torch.arange(*row_range) for row_range in ranges])
    inside = torch.zeros(len(rows), dtype=torch.bool)
    for first, last in known:
        inside |= (first <= rows) & (rows < last)
    return torch.where(inside, rows, -1)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("world", [2, 5])
def test_transfers_bring_what_ranks_want(world: int, in_order: bool) -> None:
    """Queries and keys to those that compute them, results back: each row from a rank that has it."""
    moved = False
    for mask in masks(world * 600).values():
        found = assign_rows(mask, [0] * world, 600, in_order)
        moved |= found.computed != found.held
        for rows, source, target in (
            (found.held, found.held, found.queries),
            (found.held, found.held, found.keys),
            (found.queries, found.computed, found.held),
        ):
            all_transfers = [row_transfers(rows[rank], source, target, rank) for rank in range(world)]
            tensors = [numbers_of(rows[rank], source[rank]) for rank in range(world)]
            for rank, transfers in enumerate(all_transfers):
                result = torch.full((transfers.rows,), -1)
                if transfers.whole is not None:
                    result = tensors[rank][slice(*transfers.whole)].clone()
                else:
                    for to, at in transfers.kept:
                        result[slice(*to)] = tensors[rank][slice(*at)]
                for peer, ranges in enumerate(transfers.received):
                    sent = all_transfers[peer].sent[rank]
                    for to, at in zip(ranges, sent, strict=True):
                        assert (result[slice(*to)] == -1).all(), "a row that the rank has"
                        result[slice(*to)] = tensors[peer][slice(*at)]
                assert torch.equal(result, numbers_of(target[rank], target[rank]))
    assert moved


@pytest.mark.usefixtures("slow_kernels")
def test_many_masks_at_random() -> None:
    """Documents of any lengths, given away by several ranks to several others."""
    generator = torch.Generator().manual_seed(1)
    for world, _ in product((3, 8), range(20)):
        rows = 5 * TILE
        sizes = torch.randint(1, 3 * rows, (40,), generator=generator).tolist()
        ends = torch.tensor(sizes).cumsum(0).clamp(max=world * rows)
        key = torch.arange(world * rows)
        end = ends[torch.searchsorted(ends, key, right=True).clamp(max=39)]
        mask = attnforge.Spans(key.int(), end.int())
        found: RowAssignment = assign_rows(mask, (0,) * world, rows)
        assert torch.equal(positions(tuple(sorted(sum(found.computed, ())))), key)
        assert max(found.pairs_computed) <= 1.05 * sum(found.pairs_computed) / world + 2 * 3 * rows
        seen = 0
        for rank in range(world):
            queries, _, keys = found.of(rank)
            seen += int(
                assigned_spans(mask, found, rank).visible(count_rows(queries), count_rows(keys)).sum()
            )
        assert seen == int((end - key).clamp(min=0).sum())
