"""The model that chooses how heads and rows are divided: its traffic is what the code sends, and what it prefers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from context_parallel import DIM, HEADS_KV, HEADS_Q
from context_parallel_model import simulate

import attnforge
from attnforge.runtime.distributed.cost import Shapes, Way, fastest, nodes_of, seconds, traffic, ways

ROWS = 8  # of a rank


def shapes(world: int, node: int, rows: int = ROWS) -> Shapes:
    return Shapes(1, rows, HEADS_Q, HEADS_KV, DIM, 2, tuple(rank // node for rank in range(world)))


@pytest.mark.parametrize(("world", "heads"), [(4, 1), (4, 2), (4, 4), (8, 4), (8, 2)])
def test_traffic_is_what_the_code_sends(world: int, heads: int) -> None:
    """Of a mask that is the same work for all rows, so that none move."""
    key = torch.arange(world * ROWS, dtype=torch.int32)
    mask = attnforge.Spans(key, key + 1)
    way, loads = simulate(mask, world * ROWS, world, 4, heads)
    assert way.shared == heads
    for rank, (forward, backward) in enumerate(loads):
        assert traffic(shapes(world, 4), way, rank, False) == forward.sent
        assert traffic(shapes(world, 4), way, rank, True) == backward.sent


def test_traffic_of_neighbours() -> None:
    """Whole all-to-alls stay in a node of four, and each rank gathers from one rank of the other node."""
    row = ROWS * DIM * 2
    of_heads = 2 * (HEADS_Q + HEADS_KV) * row / 4 * 3
    for rank, backward in product(range(8), (False, True)):
        near, far, collectives = traffic(shapes(8, 4), Way(4, True), rank, backward)
        # Nobody else in the rank's node gathers these keys.
        assert (near, far, collectives) == (of_heads, 2 * HEADS_KV * row, 6)


def test_ways() -> None:
    assert ways(shapes(4, 4), 4, False) == [Way(4, False), Way(2, False), Way(2, True), Way(1, False)]
    assert ways(shapes(4, 4), 4, True) == [Way(4, False), Way(2, True), Way(1, False)]
    assert ways(shapes(8, 4), 1, True) == [Way(1, False)]
    assert ways(shapes(1, 1), 1, True) == [Way(1, False)]


def test_what_is_preferred() -> None:
    """Few ranks with few key heads gather keys; two nodes keep all-to-alls inside unless work decides."""
    equal, causal = (1e7,) * 16, tuple(float(2 * i + 1) * 1e9 for i in range(16))
    assert fastest(shapes(2, 2, 18432), 2, False, (1e8,) * 2, 0.0).shared == 1
    assert fastest(shapes(16, 8, 8192), 4, False, equal, 0.0) == Way(4, True)
    assert fastest(shapes(16, 8, 8192), 4, False, causal, 0.0).beside is False
    assert fastest(shapes(16, 8, 8192), 4, True, equal, 0.0) == Way(4, True)


def test_the_slowest_rank_decides() -> None:
    few, many = (seconds(shapes(4, 4), Way(2, True), work, 0.0) for work in ([1e9] * 4, [2e9, 2e9, 0.0, 0.0]))
    assert many > 1.9 * few
    assert seconds(shapes(4, 4), Way(1, False), [2e9, 2e9, 0.0, 0.0], 0.0) < many


def test_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of equally many ranks: with 8 + 4, ranks of the two nodes would choose differently, and wait for ever."""
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "2"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 1, 1)
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 0, 0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert nodes_of([2, 3, 6, 7]) == (0, 0, 0, 0)
