"""The simulated schedule: its arithmetic is that of small cases worked out by hand; its order: test_order.py."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from list_pieces import pieces

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.occupancy import (
    LEAST_VISITS,
    MOST_PIECES,
    Costs,
    Order,
    Sections,
    _cut,
    _ranks,
    _tiles_by_rank,
    simulate,
)
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.pictures.occupancy import FILL, LOSS, draw_schedules
from attnforge.codegen.families import make_plan
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.masks import Spans
from attnforge.runtime.search.case import Case

CPU = torch.device("cpu")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def documents(*lengths: int, heads: int = 1) -> Case:
    """Documents that see all of themselves."""
    mask = PackedMask(lengths, lengths, ["full"] * len(lengths), CPU)
    total = sum(lengths)
    return Case("documents", 1, heads, 1, total, total, 64, DType.BFLOAT16, mask, mask.pairs, CPU)


def test_the_cache_budget_is_that_of_the_kernels() -> None:
    for direction in Direction:
        problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
        source = render(next(iter(candidates(problem))))
        assert f"kCacheBytes = {Sections.of(source.plan).cache_mb} << 20;" in source.text
    with_pieces = next(spec for spec in candidates(problem) if make_plan(spec).cut_lists)
    text = render(with_pieces).text
    assert f"constexpr int kLeastVisits = {LEAST_VISITS};" in text
    assert f"constexpr int kMostPieces = {MOST_PIECES};" in text


@pytest.mark.parametrize("name", ["causal/4x8192", "causal/1x65536", "causal/1x4096"])
def test_causal_rounds_turn_every_other_section_around(name: str) -> None:
    case, tiles = make_case(name, "7B", DType.BFLOAT16, CPU), 7
    ranks = _ranks(case, FORWARD, tiles, True, alternating=True).tolist()
    assert Counter(ranks) == dict.fromkeys(range(tiles), 28 * case.batch)
    assert ranks[-1] == tiles - 1, "the last section ends with the smallest tiles"
    assert max(abs(a - b) for a, b in pairwise(ranks)) == 1, "sections meet at tiles of one size"


def test_causal_query_tiles_end_with_the_last_query() -> None:
    case = make_case("causal/300", "1/1/64", DType.BFLOAT16, CPU)
    # Tiles of 128 begin at -64, 64 and 192. Parts of 64 rows see 64, 128, 192, 256 and 300 keys: 2 + 4 + 6 + 8 + 10
    # tiles of 32.
    found = simulate(case, FORWARD, 128, 32, "static", multiprocessors=1, row_groups=2)
    assert found.full + found.masked == 30
    assert found.busy == (30 / 2,)
    # Without row groups 2, 6 and 10.
    assert simulate(case, FORWARD, 128, 32, "static", multiprocessors=1).busy == (18,)


@pytest.mark.parametrize(
    ("order", "busy"),
    [
        # Pieces of 3, 3, 3, 2, 2, 1 tiles. Rounds of two, the second backwards: 3 + 2 + 2 and 3 + 3 + 1.
        ("static", [7, 7]),
        ("dynamic", [7, 7]),
    ],
)
def test_small_schedule_by_hand(order: Order, busy: list[int]) -> None:
    case = documents(48, 32, 16)
    found = simulate(case, FORWARD, 16, 16, order, multiprocessors=2)
    assert (found.full, found.masked) == (14, 0)
    assert list(found.busy) == busy
    assert found.tile_use == found.balance == found.allowed == 1.0


def test_waste_tail_and_costs() -> None:
    case = documents(24, 24)  # tiles of 16: the middle one belongs to both documents
    found = simulate(case, FORWARD, 16, 16, "dynamic", multiprocessors=2)
    assert found.full == 2
    assert found.masked == 5
    assert found.tile_use == pytest.approx(2 * 24 * 24 / (7 * 256))
    assert sorted(found.busy) == [3, 4]  # 3, then 2 and 2
    assert found.balance == pytest.approx(7 / 8)
    assert found.allowed == pytest.approx(found.tile_use * found.balance)
    dear = simulate(
        case, FORWARD, 16, 16, "dynamic", costs=Costs(masked=2.0, work_tile=0.5), multiprocessors=2
    )
    assert sum(dear.busy) == 2 + 5 * 2 + 3 * 0.5
    assert dear.allowed < found.allowed
    assert [found.running(time) for time in (0.0, 3.5, 4.0)] == [2, 1, 0]


def test_parts_of_a_tile_pass_by_what_is_hidden_from_them() -> None:
    case = documents(24, 24)
    found = simulate(case, FORWARD, 32, 16, "dynamic", multiprocessors=1, row_groups=2)
    # The row groups are the tiles of 16: five of the first tile, two of the second.
    assert (found.full, found.masked) == (2, 5)
    assert found.busy == (7 / 2,)
    assert found.tile_use == pytest.approx(2 * 24 * 24 / (7 * 256))
    whole = simulate(case, FORWARD, 32, 16, "dynamic", multiprocessors=1)
    assert (whole.full, whole.masked, whole.busy) == (1, 4, (5,))


def test_rounds_deal_from_both_ends() -> None:
    case = documents(64, 48, 32, 16)  # pieces of 4 4 4 4 3 3 3 2 2 1
    found = simulate(case, FORWARD, 16, 16, "static", multiprocessors=4)
    assert list(found.busy) == [4 + 2 + 2, 4 + 3 + 1, 4 + 3, 4 + 3]
    few = simulate(documents(16), FORWARD, 16, 16, "static", multiprocessors=4)
    assert list(few.busy) == [1, 0, 0, 0]


def test_backward_pieces_are_key_tiles_of_q_or_kv_heads() -> None:
    case = documents(48, heads=3)
    split, whole = (
        simulate(case, BACKWARD, 16, 16, "dynamic", split, multiprocessors=2) for split in (True, False)
    )
    assert sum(split.busy) == sum(whole.busy) == 27
    assert sorted(split.busy) == [12, 15]  # nine pieces of 3
    assert sorted(whole.busy) == [9, 18]  # three pieces of 9


def test_backward_lists_of_keys_that_all_queries_see_are_cut() -> None:
    """128 tiles of 16 keys, each seen by its own queries, the first by all: that list of 128 is cut into 8 of 16."""
    queries = torch.arange(2048, dtype=torch.int32)
    starts, ends = queries // 16 * 16, queries // 16 * 16 + 16
    starts[:16], ends[:16] = 0, 2048
    mask = Spans(starts, ends)
    case = Case("sink", 1, 1, 1, 2048, 2048, 64, DType.BFLOAT16, mask, 2048 * 16 * 2 - 256, CPU)
    found = simulate(case, BACKWARD, 16, 16, "dynamic", multiprocessors=8)
    assert sorted(found.busy) == [31] + [32] * 7  # 8 pieces of 16 and 127 tiles of 1
    whole = simulate(case, BACKWARD, 16, 16, "dynamic", False, multiprocessors=8)
    assert max(whole.busy) == 128, "a block per kv head walks its list alone"
    uncut = simulate(case, BACKWARD, 16, 16, "dynamic", multiprocessors=8, sections=Sections(cut_lists=False))
    assert max(uncut.busy) == 128, "and so does a block of a kernel that does not divide lists"


@pytest.mark.parametrize("counts", [[1, 130, 6] * 9 + [900], [5] * 30 + [70, 16, 17], [3, 2, 100], [0, 0]])
def test_pieces_are_those_of_the_kernel(counts: list[int]) -> None:
    visits = torch.tensor(counts)
    assert _cut(visits.double(), visits, 0.0).tolist() == [count for *_, count in pieces(counts)]


def test_deterministic_blocks_start_with_their_last_or_longest_tiles() -> None:
    """Documents of 1, 4 and 2 tiles, and twelve of one: a list of 4 visits is long, the mean of the 19 is 33 / 19."""
    case = documents(16, 64, 32, *[16] * 12)
    visits = torch.tensor([1, 4, 4, 4, 4, 2, 2, *[1] * 12])
    ones = [0, *range(7, 19)]

    def tiles(sections: Sections) -> list[int]:
        return _tiles_by_rank(case, BACKWARD, visits, sections).tolist()

    assert tiles(Sections()) == [1, 2, 3, 4, 5, 6, *ones]
    assert tiles(Sections(descending=True, launch_order=3)) == [*reversed(range(19))]
    assert tiles(Sections(launch_order=4)) == [4, 3, 2, 1, 5, 6, *ones]
    causal = make_case("causal/64", "1/1/64", DType.BFLOAT16, CPU)  # key tiles of 4, 3, 2 and 1
    for sections, busy in ((Sections(), [5, 5]), (Sections(descending=True), [4, 6])):
        found = simulate(causal, BACKWARD, 16, 16, "dynamic", multiprocessors=2, sections=sections)
        assert sorted(found.busy) == busy


def test_dense_masks() -> None:
    for name, tiles in (("full/64", 16), ("causal/64", 10)):
        found = simulate(make_case(name, "1/1/64", DType.BFLOAT16, CPU), FORWARD, 16, 16, multiprocessors=1)
        assert found.busy == (tiles,)
    assert found.allowed == pytest.approx(64 * 65 / 2 / (10 * 256))


def test_picture_shows_work_and_idleness() -> None:
    found = simulate(documents(48, heads=3), BACKWARD, 16, 16, "dynamic", False, multiprocessors=2)
    image = draw_schedules("title", [("one", found)])
    colours = {colour for _, colour in image.getcolors(1 << 24) or []}
    assert {FILL, LOSS} <= colours
