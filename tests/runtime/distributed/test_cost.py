"""The model that chooses how heads and rows are divided: its traffic is what the code sends, and what it prefers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from context_parallel import DIM, HEADS_KV, HEADS_Q
from context_parallel_model import simulate

import attnforge
from attnforge.runtime.distributed.cost import Shapes, Way, fastest, seconds, traffic, ways
from attnforge.runtime.distributed.deal import Deal, deal
from attnforge.runtime.distributed.links import nodes_of

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
    for number, value in (("TILE", 2), ("BLOCK", 2), ("GAP", 2)):  # of a few rows, too
        monkeypatch.setattr(f"attnforge.runtime.distributed.deal.{number}", value)
    monkeypatch.setattr("attnforge.runtime.distributed.links.RATE", 1e6)  # so that rows move
    mask = masks(world * ROWS)[name]
    way, loads = simulate(mask, world * ROWS, world, 4, heads)
    assert way.shared == heads
    dealt = deal(mask, shapes(world, 4).nodes, ROWS) if heads == 1 else None
    for rank, (forward, backward) in enumerate(loads):
        assert traffic(shapes(world, 4), way, rank, False, dealt) == forward.sent
        assert traffic(shapes(world, 4), way, rank, True, dealt) == backward.sent


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


def dealt(world: int, rows: int, work: list[float] | None = None, in_order: bool = False) -> Deal:
    """Of a mask of all pairs; or of ranks that see only their own keys, with this work."""
    if work is None:
        return deal(masks(world * rows)["all"], (0,) * world, rows, in_order)
    own = deal(masks(world * rows)["itself"], (0,) * world, rows)
    return own._replace(work=tuple(work), load=(sum(work) / world,) * world)


def test_what_is_preferred() -> None:
    """Few ranks with few key heads gather keys; two nodes keep all-to-alls inside unless work decides."""
    two, many, later = shapes(2, 2, 18432), shapes(16, 8, 8192), [float(2 * i + 1) * 1e9 for i in range(16)]
    assert fastest(two, 2, False, dealt(2, 18432)._replace(work=(1e8,) * 2, load=(1e8,) * 2)).shared == 1
    everything = dealt(16, 8192)
    equal = everything._replace(work=(1e7,) * 16, load=(1e7,) * 16)
    assert fastest(many, 4, False, equal) == Way(4, True)
    causal = everything._replace(work=tuple(later), load=(sum(later) / 16,) * 16)
    assert fastest(many, 4, False, causal).beside is False
    assert fastest(many, 4, True, equal) == Way(4, True)


def test_documents_of_a_rank_share_no_heads() -> None:
    """No rank sees a key of another: nothing is sent, on one node or two."""
    assert fastest(shapes(16, 8, 8192), 4, False, dealt(16, 8192, [1e7] * 16)) == Way(1, False)


def test_the_slowest_rank_decides() -> None:
    four, half = shapes(4, 4), [2e9, 2e9, 0.0, 0.0]
    few, many = (seconds(four, Way(2, True), dealt(4, ROWS, work)) for work in ([1e9] * 4, half))
    assert many > 1.9 * few
    even = dealt(4, ROWS, half)
    assert seconds(four, Way(1, False), even) < many
    assert seconds(four, Way(1, False), even._replace(load=even.work)) > 1.9 * seconds(
        four, Way(1, False), even
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
