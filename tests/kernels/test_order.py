"""The rendered order of the work: every piece once, and as the simulated schedule has it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from order_of_work import Additions, WorkOrder

from attnforge.bagel.measure import occupancy
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.occupancy import Sections, _even_heads, _ranks
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.case import Case

# In one section and in several, the last of which is full or not; a last query tile that is full or not.
CASES = ("causal/1x4096", "full/3x8192", "causal/4x8192", "causal/1x65536", "full/9x5000", "finetune/0")
# Heads without sharing: sections of one to two rounds, and (with tiles of 192 rows) some that are enlarged to two.
ALONE = (("causal/8x2048", "128/128/128"), ("causal/16x1024", "8/8/128"), ("causal/2x8192", "16/16/128"))
SMALL = (("causal/2x12000", "16/16/128"), ("causal/16x3000", "8/8/128"))
ROUNDS = Sm90Forward(192, 80, 2, True, True, False, False)
PIECES = Sm90Forward(192, 80, 2, False, False, False, False)


def order_of(mask: Mask, tuning: Sm90Forward | Sm90Backward, directory: Path) -> WorkOrder:
    direction = Direction.FORWARD if isinstance(tuning, Sm90Forward) else Direction.BACKWARD
    return WorkOrder(
        render(Spec(Problem(direction, Arch.SM90A, DType.BFLOAT16, 128, mask), tuning)), directory
    )


def every_piece(case: Case, order: WorkOrder) -> list[tuple[int, int, int]]:
    p = order.params(case)
    heads = p.heads_kv if order.per_kv_head else p.heads_q
    return list(product(range(order.ranks(case)), range(heads), range(p.batch)))


@pytest.mark.parametrize("tuning", [ROUNDS, PIECES], ids=["rounds", "a block each"])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_forward(mask: Mask, tuning: Sm90Forward, tmp_path: Path) -> None:
    order = order_of(mask, tuning, tmp_path)
    for name in CASES:
        case = make_case(name, "7B", DType.BFLOAT16, torch.device("cpu"))
        places = order.places(case)
        assert sorted(places) == every_piece(case, order), name
        if case.mask_kind is mask:
            last = mask is Mask.FULL and case.seq_q % tuning.tile_m > 0
            tiles = -(-case.seq_q // tuning.tile_m)
            ranks = _ranks(case, Direction.FORWARD, tiles, True, last, tuning.persistent)
            assert ranks.tolist() == [rank for rank, _, _ in places], name


@pytest.mark.parametrize("tile_m", [128, 192])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL], ids=lambda mask: mask.value)
def test_pairs_of_blocks(mask: Mask, tile_m: int, tmp_path: Path) -> None:
    """Blocks of a cluster take the pieces of a pair in the same round: those that their multicasts take for granted."""
    tuning = Sm90Forward(tile_m, 64, 2, True, True, False, False, multicast=True)
    order = order_of(mask, tuning, tmp_path)
    sizes = "1x4096", "3x8192", "9x5000", "2x300", "1x100"
    for size, heads in product(sizes, ("28/4/128", "32/8/128", "3/3/128")):
        case = make_case(f"{mask.value}/{size}", heads, DType.BFLOAT16, torch.device("cpu"))
        places = order.places(case)
        assert sorted(places) == every_piece(case, order)
        whole = case.seq_q // tile_m // 2 * 2 * case.heads_q * case.batch
        group = case.heads_q // case.heads_kv
        paired = whole if mask is Mask.FULL else len(places) if group % 2 == 0 else 0
        for (rank, head, batch), (other, head_there, batch_there) in zip(
            places[:paired:2], places[1:paired:2], strict=True
        ):
            assert batch == batch_there
            if mask is Mask.FULL:
                assert (rank % 2, other, head_there) == (0, rank + 1, head)
            else:
                assert (other, head_there // group, head_there) == (rank, head // group, head + 1)
        taken = [order.rounds(case, block, 132) for block in range(132)]
        assert sorted(index for block in taken for index in block if index < len(places)) == [
            *range(len(places))
        ]
        for first, second in zip(taken[::2], taken[1::2], strict=True):
            assert [index + 1 for index in first][: len(second)] == second
            assert len(first) - len(second) in ((0,) if paired else (0, 1))


@pytest.mark.parametrize(("pack", "heads"), ALONE, ids=str)
@pytest.mark.parametrize("tile_m", [128, 192])
def test_causal_rounds_are_even(pack: str, heads: str, tile_m: int, tmp_path: Path) -> None:
    """As the simulated schedule has it, and no block gets much more than its share of the ranks."""
    tuning = Sm90Forward(tile_m, 64, 2, True, True, False, False)
    order = order_of(Mask.CAUSAL, tuning, tmp_path)
    case = make_case(pack, heads, DType.BFLOAT16, torch.device("cpu"))
    for blocks in (132, 114):
        places = order.places(case, blocks)
        assert sorted(places) == every_piece(case, order)
        tiles = -(-case.seq_q // tile_m)
        ranks = _ranks(case, Direction.FORWARD, tiles, True, False, True, blocks)
        assert ranks.tolist() == [rank for rank, _, _ in places]
        work = tiles - ranks
        loads = [int(work[order.rounds(case, block, blocks)].sum()) for block in range(blocks)]
        assert sum(loads) / blocks > 0.8 * max(loads)


@pytest.mark.parametrize(("pack", "heads"), SMALL, ids=str)
def test_small_sections_become_two_rounds(
    pack: str, heads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks then get more even shares than with the sections that the cache would hold."""
    order = order_of(Mask.CAUSAL, Sm90Forward(192, 64, 2, True, True, False, False), tmp_path)
    case = make_case(pack, heads, DType.BFLOAT16, torch.device("cpu"))
    tiles = -(-case.seq_q // 192)
    fits = (16 << 20) // (4 * case.head_dim * case.seq_k)
    assert _even_heads(fits, tiles, 132, 2) > fits
    found = order.places(case)
    assert sorted(found) == every_piece(case, order)
    ranks = _ranks(case, Direction.FORWARD, tiles, True, False, True)
    assert ranks.tolist() == [rank for rank, _, _ in found]
    shares = []
    monkeypatch.setattr(occupancy, "_even_heads", lambda fits, *_: fits)
    for some in (ranks, _ranks(case, Direction.FORWARD, tiles, True, False, True)):
        loads = [int((tiles - some)[order.rounds(case, block, 132)].sum()) for block in range(132)]
        shares.append(sum(loads) / 132 / max(loads))
    assert shares[0] > shares[1] + 0.02


@pytest.mark.parametrize(
    "knobs", [{"cache_mb": 8}, {"cache_mb": 32}, {"heads_together": 2}, {}], ids=lambda knobs: str(knobs)
)
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
@pytest.mark.parametrize("heads", ["16/16/128", "8/8/192/128"])
def test_sections_of_other_knobs(knobs: dict[str, Any], mask: Mask, heads: str, tmp_path: Path) -> None:
    """The schedule that is simulated has the sections of the kernel."""
    tuning = replace(Sm90Forward(128, 64, 2, True, True, False, False), **knobs)
    case = make_case(f"{mask.value}/8x2048", heads, DType.BFLOAT16, torch.device("cpu"))
    problem = case.problem(Direction.FORWARD, Arch.SM90A)
    order = WorkOrder(render(Spec(problem, tuning)), tmp_path)
    for blocks in (132, 114):
        sections = Sections.of(make_plan(Spec(problem, tuning)))
        ranks = _ranks(case, Direction.FORWARD, 16, True, False, True, blocks, sections)
        assert ranks.tolist() == [rank for rank, _, _ in order.places(case, blocks)]


@pytest.mark.parametrize("split", [True, False], ids=["q heads", "kv heads"])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_backward(mask: Mask, split: bool, tmp_path: Path) -> None:
    tuning = Sm90Backward(64, 128, 3, 2, False, 0, split, False)
    order = order_of(mask, tuning, tmp_path)
    for name in CASES:
        case = make_case(name, "7B", DType.BFLOAT16, torch.device("cpu"))
        places = order.places(case)
        assert sorted(places) == every_piece(case, order), name
        ranks = _ranks(case, Direction.BACKWARD, order.ranks(case), split)
        assert ranks.tolist() == [rank for rank, _, _ in places], name


def deterministic(split: bool, launch_order: int, **more: Any) -> Sm90Backward:
    tuning = Sm90Backward(64, 128, 3, 2, False, 0, split, True)
    return replace(tuning, launch_order=launch_order, **more)


@pytest.mark.parametrize("together", [0, 2, 3, 16])
@pytest.mark.parametrize(
    ("mask", "split", "launch_order"),
    [
        (Mask.CAUSAL, False, 1),
        (Mask.CAUSAL, False, 2),
        (Mask.CAUSAL, True, 3),
        (Mask.SPANS, True, 3),
        (Mask.SPANS, True, 4),
        (Mask.SPANS, False, 0),
    ],
    ids=str,
)
def test_deterministic_launch_orders(
    mask: Mask, split: bool, launch_order: int, together: int, tmp_path: Path
) -> None:
    """The simulated schedule of a deterministic kernel has its order."""
    tuning = deterministic(split, launch_order, heads_together=together)
    order = order_of(mask, tuning, tmp_path)
    sections = Sections.of(
        make_plan(Spec(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, mask), tuning))
    )
    for name, heads in (("causal/3x4900", "14/2/128"), ("causal/16x1024", "28/4/128"), ("finetune/0", "7B")):
        case = make_case(name, heads, DType.BFLOAT16, torch.device("cpu"))
        ranks = _ranks(case, Direction.BACKWARD, order.ranks(case), split, sections=sections)
        assert ranks.tolist() == [rank for rank, _, _ in order.places(case)], name


@pytest.mark.parametrize(("launch_order", "turned"), [(1, 0), (2, 1)], ids=["most work first", "folded"])
@pytest.mark.parametrize("heads", ["32/8/128", "14/2/128", "6/6/128"])
def test_the_last_section_ends_with_little_work(
    launch_order: int, turned: int, heads: str, tmp_path: Path
) -> None:
    """Descending tiles end with the first one, which all queries see."""
    order = order_of(Mask.CAUSAL, deterministic(False, launch_order, heads_together=3), tmp_path)
    for name in ("causal/1x8192", "causal/3x4900", "causal/16x1024"):
        case = make_case(name, heads, DType.BFLOAT16, torch.device("cpu"))
        places, tiles = order.places(case), order.ranks(case)
        assert sorted(places) == every_piece(case, order), name
        starts: dict[tuple[int, int], list[int]] = {}
        for rank, head, batch in places:
            starts.setdefault((batch, head), []).append(tiles - 1 - rank)
        down = (tiles + 1) // 2 if turned else 0
        last = [*reversed(range(down)), *range(down, tiles)]
        section = min(max((16 << 20) // (8 * 128 * case.seq_q), 3), len(starts))
        before = (len(starts) // section - 1) * section  # heads of other sections
        assert [starts[each] for each in sorted(starts)] == [
            last if n >= before else [*reversed(range(tiles))] for n in range(len(starts))
        ], name


@pytest.mark.parametrize("together", [7, 16])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_heads_of_a_group_start_a_tile_apart(mask: Mask, together: int, tmp_path: Path) -> None:
    """The same tile of the heads of a group starts in their order, as they add to dK and dV, but not side by side."""
    for launch_order in (0, 3):
        order = order_of(mask, deterministic(True, launch_order, heads_together=together), tmp_path)
        for name, heads in (
            ("causal/3x4096", "14/2/128"),
            ("full/2x2500", "28/4/128"),
            ("causal/9x300", "9/3/64"),
            ("causal/1x2048", "16/2/128"),  # a section of as many heads as a head has tiles
        ):
            case = make_case(name, heads, DType.BFLOAT16, torch.device("cpu"))
            places, group = order.places(case), case.heads_q // case.heads_kv
            assert sorted(places) == every_piece(case, order), name
            numbers = {place: number for number, place in enumerate(places)}
            apart = [
                numbers[rank, head + 1, batch] - number
                for (rank, head, batch), number in numbers.items()
                if (head + 1) % group
            ]
            assert min(apart) > 0, name
            if order.ranks(case) >= together:
                assert (min(apart) > case.heads_kv) == (launch_order == 3), name


@pytest.mark.parametrize("together", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("mask", "split", "launch_order"),
    [
        (Mask.CAUSAL, False, 0),
        (Mask.CAUSAL, False, 1),
        (Mask.CAUSAL, False, 2),
        (Mask.CAUSAL, True, 0),
        (Mask.CAUSAL, True, 3),
        (Mask.FULL, False, 0),
        (Mask.FULL, True, 3),
    ],
    ids=str,
)
def test_blocks_start_in_the_order_in_which_they_add(
    mask: Mask, split: bool, launch_order: int, together: int, tmp_path: Path
) -> None:
    """To dQ and, with split_heads, to dK and dV: blocks wait for earlier ones only, so the first of all never does."""
    tuning = deterministic(split, launch_order, heads_together=together)
    check_additions(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, mask), tuning, tmp_path)


@pytest.mark.parametrize("pair", [False, True])
def test_blocks_of_wide_heads_start_in_that_order(pair: bool, tmp_path: Path) -> None:
    tuning = Sm90BackwardWide(64, 128, 2, 1, True, pair, heads_together=2, staging=2 * pair)
    dims = (192, 0) if pair else (64, 128)
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, dims[0], Mask.CAUSAL, dim_v=dims[1])
    check_additions(problem, tuning, tmp_path)


def check_additions(problem: Problem, tuning: Sm90Backward | Sm90BackwardWide, tmp_path: Path) -> None:
    """To each tile of dQ, and of dK and dV with split_heads, by as many blocks as see it, in the order of the grid."""
    mask = problem.mask
    additions = Additions(render(Spec(problem, tuning)), tmp_path)
    heads = ((1, 1), (3, 1), (4, 2), (3, 3), (6, 2))
    for batch, (heads_q, heads_kv), tiles in product((1, 2), heads, range(1, 8)):
        for seq_q in (tiles * 128, tiles * 64 - 3, tiles * 200):
            sizes = batch, heads_q, heads_kv, seq_q, tiles * 128 - 5
            added: dict[tuple[int, int], int] = {}
            for block in additions.of(*sizes):
                for plane, tile, before in block:
                    assert before == added.get((plane, tile), 0), sizes
                    added[plane, tile] = before + 1
            counts = [
                added.get((plane, tile), 0)
                for plane in range(batch * heads_q)
                for tile in range(-(-seq_q // tuning.tile_m))
            ]
            keys = [(tile + 1) * 64 + sizes[4] - seq_q for tile in range(-(-seq_q // 64))]
            seen = [min(tiles, max(0, -(-each // 128))) if mask is Mask.CAUSAL else tiles for each in keys]
            assert counts == seen * (batch * heads_q), sizes


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL], ids=lambda mask: mask.value)
def test_rounds_deal_every_piece_once(mask: Mask, tmp_path: Path) -> None:
    order = order_of(mask, ROUNDS, tmp_path)
    for name in CASES[:3]:
        case = make_case(name, "7B", DType.BFLOAT16, torch.device("cpu"))
        pieces = len(order.places(case))
        for blocks in (1, 7, 132, pieces):
            taken = [order.rounds(case, block, blocks) for block in range(blocks)]
            assert sorted(index for each in taken for index in each) == list(range(pieces)), (name, blocks)
            assert max(map(len, taken)) - min(map(len, taken)) <= 1, (name, blocks)
