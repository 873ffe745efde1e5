"""The model that chooses how heads and rows are divided: its traffic is what the code sends, and what it prefers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from context_parallel import DIM, HEADS_KV, HEADS_Q
from context_parallel_model import simulate

import attnforge
from attnforge.runtime.distributed.cost import Partition, Shapes, fastest, partitions, seconds, traffic
from attnforge.runtime.distributed.links import nodes_of
from attnforge.runtime.distributed.row_assignment import RowAssignment, assign_rows

ROWS = 8  # of a rank


def shapes(world: int, node: int, rows: int = ROWS) -> Shapes:
    return Shapes(1, rows, HEADS_Q, HEADS_KV, DIM, 2, tuple(rank // node for rank in range(world)))


def masks(length: int) -> dict[str, attnforge.Spans]:
    key = torch.arange(length, dtype=torch.int32)
    return {
        "itself": attnforge.Spans(key, key + 1),
        "causal": attnforge.Spans(key, torch.full_like(key, length)),
        "all": attnforge.Spans(torch.zeros_like(key), torch.full_like(key, length)),
        # The first rank only sends.
        "sinks": attnforge.Spans(torch.zeros_like(key), (key < 4).int() * length),
    }


@pytest.mark.parametrize("name", ["itself", "causal", "all", "sinks"])
@pytest.mark.parametrize(("world", "heads"), [(4, 1), (4, 2), (4, 4), (8, 4), (8, 2), (8, 1)])
def test_traffic_is_what_the_code_sends(
    world: int, heads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, value in (("TILE", 2), ("KEY_BLOCK", 2), ("MAX_GAP", 2)):  # of a few rows, too
        monkeypatch.setattr(f"attnforge.runtime.distributed.row_assignment.{number}", value)
    monkeypatch.setattr("attnforge.runtime.distributed.links.KERNEL_FLOPS", 1e6)  # so that rows move
    mask = masks(world * ROWS)[name]
    partition, loads = simulate(mask, world * ROWS, world, 4, heads)
    assert partition.ulysses_degree == heads
    assignment = assign_rows(mask, shapes(world, 4).nodes, ROWS) if heads == 1 else None
    for rank, (forward, backward) in enumerate(loads):
        assert traffic(shapes(world, 4), partition, rank, False, assignment) == forward.sent
        assert traffic(shapes(world, 4), partition, rank, True, assignment) == backward.sent


def test_traffic_of_neighbours() -> None:
    """Whole all-to-alls stay in a node of four, and each rank gathers from one rank of the other node."""
    row = ROWS * DIM * 2
    of_heads = 2 * (HEADS_Q + HEADS_KV) * row / 4 * 3
    for rank, backward in product(range(8), (False, True)):
        near, far, collectives = traffic(shapes(8, 4), Partition(4, True), rank, backward)
        # Nobody else in the rank's node gathers these keys.
        assert (near, far, collectives) == (of_heads, 2 * HEADS_KV * row, 6)


def test_partitions() -> None:
    assert partitions(shapes(4, 4), 4, False) == [
        Partition(4, False),
        Partition(2, False),
        Partition(2, True),
        Partition(1, False),
    ]
    assert partitions(shapes(4, 4), 4, True) == [Partition(4, False), Partition(2, True), Partition(1, False)]
    assert partitions(shapes(8, 4), 1, True) == [Partition(1, False)]
    assert partitions(shapes(1, 1), 1, True) == [Partition(1, False)]


def assignment(
    world: int, rows: int, work: list[float] | None = None, in_order: bool = False
) -> RowAssignment:
    """Of a mask of all pairs; or of ranks that see only their own keys, with this work."""
    if work is None:
        return assign_rows(masks(world * rows)["all"], (0,) * world, rows, in_order)
    own = assign_rows(masks(world * rows)["itself"], (0,) * world, rows)
    return own._replace(pairs_held=tuple(work), pairs_computed=(sum(work) / world,) * world)


def test_what_is_preferred() -> None:
    """Few ranks with few key heads gather keys; two nodes keep all-to-alls inside unless work decides."""
    two, many, later = shapes(2, 2, 18432), shapes(16, 8, 8192), [float(2 * i + 1) * 1e9 for i in range(16)]
    assert (
        fastest(
            two, 2, False, assignment(2, 18432)._replace(pairs_held=(1e8,) * 2, pairs_computed=(1e8,) * 2)
        ).ulysses_degree
        == 1
    )
    everything = assignment(16, 8192)
    equal = everything._replace(pairs_held=(1e7,) * 16, pairs_computed=(1e7,) * 16)
    assert fastest(many, 4, False, equal) == Partition(4, True)
    causal = everything._replace(pairs_held=tuple(later), pairs_computed=(sum(later) / 16,) * 16)
    assert fastest(many, 4, False, causal).contiguous is False
    assert fastest(many, 4, True, equal) == Partition(4, True)


def test_documents_inside_ranks_need_no_ulysses() -> None:
    """No rank sees a key of another: nothing is sent, on one node or two."""
    assert fastest(shapes(16, 8, 8192), 4, False, assignment(16, 8192, [1e7] * 16)) == Partition(1, False)


def test_the_slowest_rank_decides() -> None:
    four, half = shapes(4, 4), [2e9, 2e9, 0.0, 0.0]
    few, many = (seconds(four, Partition(2, True), assignment(4, ROWS, work)) for work in ([1e9] * 4, half))
    assert many > 1.9 * few
    even = assignment(4, ROWS, half)
    assert seconds(four, Partition(1, False), even) < many
    assert seconds(four, Partition(1, False), even._replace(pairs_computed=even.pairs_held)) > 1.9 * seconds(
        four, Partition(1, False), even
    )


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of equally many ranks: with 8 + 4, ranks of the two nodes would choose differently, and wait for ever."""
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "2"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 1, 1)
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 0, 0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 0, 0)
