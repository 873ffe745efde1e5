"""The kernels that build schedules, run without a GPU, against lists made from the whole mask."""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gxx
import pytest
import torch
from cpu_kernel import Params
from emulated_schedule import SENTINEL, EmulatedSchedule
from emulator import FLAGS, PARTS
from list_pieces import pieces
from oracle import dense, spans, unions
from torch import Tensor

import attnforge
from attnforge.codegen.families.sm80 import Sm80Forward
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.score_trace import evaluate

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
# direction, target, tuning: three, two and one group of a query tile; lists of key tiles and of query tiles
VARIANTS: dict[str, tuple[Direction, Arch, Any]] = {
    "192x128": (FORWARD, Arch.SM90A, Sm90Forward(192, 128, 2, True, True, False, False)),
    "192x80": (FORWARD, Arch.SM90A, Sm90Forward(192, 80, 2, False, True, True, False)),
    "128x96": (FORWARD, Arch.SM90A, Sm90Forward(128, 96, 2, False, True, False, False)),
    "64x144": (FORWARD, Arch.SM90A, Sm90Forward(64, 144, 2, False, True, False, False)),
    "sm80": (FORWARD, Arch.SM80, Sm80Forward(128, 64, 4, 2, False)),
    "backward": (BACKWARD, Arch.SM90A, Sm90Backward(64, 128, 2, 2, True, 0, True, False)),
    "deterministic": (BACKWARD, Arch.SM80, Sm80Backward(64, 64, 4, 2, 2, 2, 2, False, True)),
    "descending": (BACKWARD, Arch.SM90A, Sm90Backward(64, 128, 2, 2, True, 0, True, True)),
    "long tiles first": (
        BACKWARD,
        Arch.SM90A,
        Sm90Backward(64, 128, 2, 2, True, 0, True, True, launch_order=4),
    ),
}
# seq_q, seq_k: one pair; a few tiles; more query tiles and more key tiles than a block has threads
SIZES = [(1, 1), (701, 431), (8300, 140), (65, 10300)]


def spec_of(name: str, mask: Mask) -> Spec:
    direction, arch, tuning = VARIANTS[name]
    return Spec(Problem(direction, arch, DType.BFLOAT16, 64, mask), tuning)


def pad(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def check(schedule: EmulatedSchedule, tables: dict[str, Tensor], visible: Tensor) -> None:
    """Compare with what follows from `visible` (seq_q, seq_k)."""
    plan, tuning = schedule.plan, schedule.spec.tuning
    (seq_q, seq_k), row_groups, unit = visible.shape, plan.row_groups, tuning.tile_m // plan.row_groups
    tiles_m, tiles_n = -(-seq_q // tuning.tile_m), -(-seq_k // tuning.tile_n)
    rows, columns = tiles_m * tuning.tile_m, tiles_n * tuning.tile_n
    exists = (torch.arange(rows) < seq_q)[:, None]
    shape = (tiles_m, row_groups, unit, tiles_n, tuning.tile_n)
    shows = pad(visible, rows, columns).view(shape).any(4).any(2)  # (tiles_m, row_groups, tiles_n)
    misses = (~pad(visible, rows, columns) & exists).view(shape).any(4).any(2)
    real = exists.view(tiles_m, row_groups, unit).any(2)  # row_groups that have rows
    bits = (1 << torch.arange(row_groups))[None, :, None]
    flags = (misses * bits).sum(1)
    asked = (real * bits[..., 0]).sum(1)  # flags of row_groups without rows may be anything
    visits = shows.any(1) if plan.owner == "m" else shows.any(1).T
    for tile in range(visits.shape[0]):
        count = int(tables["tile_count"][tile])
        visited = visits[tile].nonzero()[:, 0]
        assert count == visited.numel()
        entries = tables["tile_list"][tile, :count].long()
        assert torch.equal(entries >> row_groups, visited)
        index = (tile, visited) if plan.owner == "m" else (visited, tile)
        of_rows = asked[index[0]]
        assert torch.equal(entries & of_rows, flags[index] & of_rows)
        for group in range(row_groups if row_groups > 1 else 0):
            slots = shows[tile, group, visited].nonzero()[:, 0].tolist()
            assert tables["kv_range"][tile, group].tolist() == (
                [slots[0], slots[-1] + 1] if slots else [0, 0]
            )
    order = torch.sort(visits.sum(1), descending=True, stable=True).indices
    if plan.long_first:
        work = visits.sum(1)
        long = 2 * work * work.numel() >= 3 * work.sum()
        order = torch.cat((long.nonzero()[:, 0].flip(0), order[~long[order]]))
    if plan.cut_lists:
        forward = plan.owner == "m"
        expected = pieces(visits.sum(1).tolist(), slots=forward)
        assert tables["tile_order"].tolist() == expected
        owners = [owner for owner, *_ in expected]
        for tile in range(visits.shape[0]):
            if not forward:
                assert tables["tile_pieces"][tile] == owners.count(tile) * bool(visits[tile].any())
                continue
            used = [slot for owner, _, _, slot in expected if owner == tile and slot >= 0]
            assert tables["tile_slots"][tile].tolist() == ([used[0], used[-1] + 1] if used else [0, 0])
    elif plan.descending:
        order = order.sort(descending=True).values
    else:
        assert tables["tile_order"].tolist() == order.tolist()
    assert (tables["tile_counter"] == (0 if plan.schedule_counter else SENTINEL)).all()
    if plan.dq_semaphore:
        turn = visits[order].cumsum(0) - 1
        for rank, tile in enumerate(order.tolist()):
            mine = visits[tile]
            assert torch.equal(tables["dq_order"][tile, : int(mine.sum())].long(), turn[rank, mine])


@pytest.mark.parametrize("name", VARIANTS)
def test_spans(name: str, tmp_path: Path) -> None:
    schedule = EmulatedSchedule(spec_of(name, Mask.SPANS), tmp_path)
    for seq_q, seq_k in SIZES:
        random = spans(seq_q, seq_k, "cpu")
        masks = [(random.starts, random.ends)]
        if seq_q * seq_k < 1_000_000:
            documents = torch.arange(seq_k, dtype=torch.int32) * seq_q // seq_k // 150 * 150
            masks += [
                (documents, documents + 150),
                (documents // 2, torch.where(documents % 300 == 0, 40, documents + 7).int()),  # with gaps
                (torch.full_like(documents, 5), torch.full_like(documents, 5)),  # nothing
                (torch.full_like(documents, -3), torch.full_like(documents, 1 << 30)),  # all
            ]
        for starts, ends in masks:
            tables = schedule.run(starts, ends, seq_q, seq_k)
            query = torch.arange(seq_q)[:, None]
            check(schedule, tables, (starts <= query) & (query < ends))
            if schedule.plan.bounds:
                assert torch.equal(tables["bounds"][:seq_k], torch.stack((starts, ends), 1))
                assert not tables["bounds"][seq_k:].any()


def test_long_tiles_are_so_beside_the_mean_of_all(tmp_path: Path) -> None:
    """Of more key tiles than a block has threads, of which the last ones raise the mean."""
    schedule = EmulatedSchedule(spec_of("long tiles first", Mask.SPANS), tmp_path)
    seq_q, seq_k = 320, 17000
    tile = torch.arange(seq_k, dtype=torch.int32) // 128
    visits = torch.where(tile < 128, 1 + (tile % 3 == 0).int(), 5)
    starts, ends = torch.zeros_like(tile), (64 * visits).int()
    tables = schedule.run(starts, ends, seq_q, seq_k)
    check(schedule, tables, torch.arange(seq_q)[:, None] < ends)
    assert tables["tile_order"][:6].tolist() == [132, 131, 130, 129, 128, 0]


@pytest.mark.parametrize("planes", [0, 1])
def test_lists_much_longer_than_others_are_cut(planes: int, tmp_path: Path) -> None:
    """Keys that all queries see, in the first, one in the middle and the last tile; the other keys see few."""
    spec = spec_of("backward", Mask.SPANS)
    spec = replace(spec, problem=replace(spec.problem, planes=planes))
    schedule = EmulatedSchedule(spec, tmp_path)
    sizes = (
        (8300, 2100, (0,)),
        (8300, 4300, (3, 2000, 4299)),
        (300000, 1100, (700,)),
        (70000, 35000, (700,)),  # would be 69 pieces of 16 visits
    )
    for seq_q, seq_k, wide in sizes:
        starts = torch.arange(seq_k, dtype=torch.int32) * 2
        ends = starts + 100
        starts[list(wide)], ends[list(wide)] = 0, seq_q
        data = torch.stack((starts, ends))[None].expand(1, 2 * planes, 1, 2, seq_k).contiguous()
        tables = (
            schedule.run(data, None, seq_q, seq_k) if planes else schedule.run(starts, ends, seq_q, seq_k)
        )
        for plane in range(2 if planes else 1):
            of_plane = {
                name: tables[name][plane] if planes else tables[name] for name in ("tile_count", "tile_order")
            }
            counts = of_plane["tile_count"].tolist()
            order = pieces(counts)
            assert of_plane["tile_order"].tolist() == order
            cut = {tile for tile, begin, _ in order if begin > 0}
            assert cut == {key // 128 for key in wide}
            if seq_k == 35000:
                assert sum(tile == 700 // 128 for tile, *_ in order) == 32


def some_counts(draw: random.Random) -> list[int]:
    """Lengths of lists: alike or not, a few of them long, also just beside a limit."""
    mean = draw.choice((0, 1, 6, 11, 40))
    counts = [draw.randint(0, 2 * mean) if draw.random() < 0.5 else mean for _ in range(draw.randint(1, 300))]
    for _ in range(draw.choice((0, 1, 2, 9))):
        counts[draw.randrange(len(counts))] = draw.choice((15, 16, 17, 33, 3 * mean, 60, 513, 900, 70000))
    return counts


@pytest.mark.parametrize("name", ["backward", "128x96"])
def test_lists_of_any_lengths_are_cut_by_the_rule(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, Mask.DENSE)
    spec = replace(spec, problem=replace(spec.problem, mask_mod=MaskMod("causal: kv_idx <= q_idx")))
    schedule, forward = EmulatedSchedule(spec, tmp_path), name != "backward"
    (symbol,) = (launch.symbol for launch in schedule.plan.schedule if launch.symbol.endswith("_order"))
    draw, cut = random.Random(name), 0
    for _ in range(150):
        counts = some_counts(draw)
        p = Params(
            seq_q=len(counts) * spec.tuning.tile_m, seq_k=len(counts) * spec.tuning.tile_n, mask_planes=1
        )
        p.set_tiles(spec.tuning.tile_m, spec.tuning.tile_n)
        order = torch.zeros(p.blocks_m if forward else p.blocks_n, 4 if forward else 3, dtype=torch.int32)
        count, of_tiles = (
            torch.tensor(counts, dtype=torch.int32),
            torch.zeros(2 * len(counts), dtype=torch.int32),
        )
        p.tile_count, p.tile_order = count.data_ptr(), order.data_ptr()
        p.tile_slots = p.tile_pieces = of_tiles.data_ptr()
        counter = torch.ones(2, dtype=torch.int32)
        p.tile_counter = counter.data_ptr()
        run = getattr(schedule.library, f"run_{symbol}")
        run.argtypes = (ctypes.c_void_p, ctypes.c_longlong)
        run(ctypes.byref(p), len(counts))
        assert order.tolist() == pieces(counts, slots=forward), counts
        cut += any(begin > 0 for _, begin, *_ in order.tolist())
    assert 20 < cut < 130


# starts and ends of two intervals, that cover rows of a tile together but not alone, or cover it, or miss it by a row
BLOCKS = (
    (0, 192, 384, 640),
    (0, 128, 129, 700),
    (0, 191, 192, 384),
    (64, 65, 66, 701),
    (-5, 3, 500, 1 << 30),
)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "long tiles first"])  # no planes
@pytest.mark.parametrize(("count", "planes"), [(2, (1, 1)), (3, (2, 2)), (1, (1, 3))], ids=str)
def test_unions(name: str, count: int, planes: tuple[int, int], tmp_path: Path) -> None:
    spec = spec_of(name, Mask.SPANS)
    apart = planes != (1, 1)
    spec = replace(spec, problem=replace(spec.problem, intervals=count, planes=int(apart)))
    schedule = EmulatedSchedule(spec, tmp_path)
    for seq_q, seq_k in SIZES:
        masks = [unions(seq_q, seq_k, count, "cpu", planes)]
        if count == 2 and seq_q == 701:
            blocks = torch.tensor(BLOCKS, dtype=torch.int32)[torch.arange(seq_k) // 150 % 5].T
            masks += [attnforge.Spans(blocks[::2].contiguous(), blocks[1::2].contiguous())]
        for mask in masks:
            data = mask.data if mask.data.dim() == 5 else mask.data[None, None, None]
            tables = schedule.run(data, None, seq_q, seq_k)
            visible = mask.visible(seq_q, seq_k).reshape(-1, seq_q, seq_k)
            for plane in range(visible.shape[0]):
                alone = {name: x if name == "tile_counter" else x[plane] for name, x in tables.items()}
                check(schedule, alone, visible[plane])
            if schedule.plan.bounds:
                bounds = (
                    tables["bounds"].permute(0, 2, 4, 1, 3).flatten(3)
                )  # (planes, intervals, 2, padded_k)
                assert torch.equal(bounds[..., :seq_k], data.flatten(0, 1))
                assert not bounds[..., seq_k:].any()


@pytest.mark.parametrize("heads_kv", [2, 4])
def test_q_heads_of_a_kv_head_share_an_order(heads_kv: int, tmp_path: Path) -> None:
    """Of tiles by the work of their planes: a block serves them one after another. Planes of 4 q or 4 kv heads."""
    spec = spec_of("deterministic", Mask.SPANS)
    spec = replace(spec, problem=replace(spec.problem, intervals=2, planes=1))
    tiles = torch.randint(
        1, 11, (2, 4, 7), generator=torch.Generator().manual_seed(0)
    )  # of queries, by key tile
    data = torch.zeros(2, 4, 2, 2, 431, dtype=torch.int32)
    data[:, :, 0, 1] = 64 * tiles[:, :, torch.arange(431) // 64]
    tables = EmulatedSchedule(spec, tmp_path).run(data, None, 701, 431, heads=(2 * heads_kv, heads_kv))
    group = 4 // heads_kv  # planes of a kv head
    counts, lists = tables["tile_count"], tables["tile_list"]
    assert torch.equal(counts, tiles.flatten(0, 1))
    work = counts.view(-1, group, 7).sum(1)
    order = torch.sort(work, descending=True, stable=True).indices
    assert torch.equal(tables["tile_order"][::group].long(), order)
    for plane, _ in enumerate(counts):
        earlier = torch.zeros(11, dtype=torch.int)  # visits to each query tile
        for tile in order[plane // group]:
            count = counts[plane, tile]
            visited = lists[plane, tile, :count] // 2
            assert torch.equal(tables["dq_order"][plane, tile, :count], earlier[visited])
            earlier[visited] += 1


@pytest.mark.parametrize("name", ["192x128", "128x96", "sm80", "backward", "deterministic"])
def test_dense(name: str, tmp_path: Path) -> None:
    """Of bools, of bools with the keys' stride longer than the queries', and of bits."""
    schedule = EmulatedSchedule(spec_of(name, Mask.DENSE), tmp_path)
    for (seq_q, seq_k), planes in ((SIZES[0], (1, 1)), (SIZES[1], (1, 1)), ((130, 300), (2, 3))):
        mask = dense(seq_q, seq_k, "cpu", planes=planes)
        visible = mask.mask.view(mask.shape)
        by_key = visible.transpose(2, 3).contiguous().transpose(2, 3)
        tables = schedule.run(visible, None, seq_q, seq_k)
        for other in (by_key, mask.data):
            again = schedule.run(other, None, seq_q, seq_k)
            assert all(torch.equal(table, again[key]) for key, table in tables.items())
        count = planes[0] * planes[1]
        for plane, pairs in enumerate(visible.flatten(0, 1)):
            alone = {
                key: x if key == "tile_counter" else x.unflatten(0, (count, -1))[plane]
                for key, x in tables.items()
            }
            check(schedule, alone, pairs)


def test_pairs_become_the_bits_of_a_mask(tmp_path: Path) -> None:
    """The kernel of masks.cu, against the CPU's code: ends of words and of rows, planes, strides."""
    text = mask_kernels(Arch.SM90).text.replace("#pragma unroll", "//")
    call = "attnforge_mask_of_pairs(visible, s[0], s[1], s[2], s[3], heads, seq_q, seq_k, rows, bits)"
    path = tmp_path / "masks.cpp"
    path.write_text(
        f'#include "emulator.h"\n{text}\nextern "C" void run(const unsigned char* visible, const long long* s, '
        "int heads, int seq_q, int seq_k, long long rows, unsigned* bits) {\n"
        f"    launch([=] {{ {call}; }}, (rows + 3) / 4, kThreads, 0);\n}}\n"
    )
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS, header="emulator.h")
    for seq_q, seq_k, planes in ((5, 31, (1, 1)), (3, 2085, (1, 1)), (7, 1024, (2, 3)), (6, 33, (3, 1))):
        mask = dense(seq_q, seq_k, "cpu", planes=planes)
        pairs = mask.mask.view(mask.shape)
        rows = pairs.shape[:3].numel()
        by_key = pairs.transpose(2, 3).contiguous().transpose(2, 3)
        apart = torch.cat((pairs, ~pairs), 1)[:, : planes[1]]  # other heads between two batch entries
        for visible in (pairs, by_key, apart):
            bits = torch.full_like(mask.data, SENTINEL)
            strides = (ctypes.c_longlong * 4)(*visible.stride())
            library.run(
                ctypes.c_void_p(visible.data_ptr()), strides, planes[1], seq_q, seq_k, ctypes.c_longlong(rows),
                ctypes.c_void_p(bits.data_ptr()),
            )  # fmt: skip
            assert torch.equal(bits, mask.data)


@pytest.mark.parametrize("name", ["192x128", "128x96", "sm80", "backward", "deterministic"])
def test_functions(name: str, tmp_path: Path) -> None:
    """Documents of which some keys are seen by all later queries; a window; and what no interval decides."""
    header = "(t0: int32[1], t1: int32[1])"
    formulas = (
        f"documents{header}: (t0[q_idx] == t0[kv_idx]) | ((t1[kv_idx] != 0) & (kv_idx <= q_idx))",
        "window: (abs(q_idx - kv_idx) <= 70) | (kv_idx < 4) | (q_idx == 200)",
        f"bits{header}: ((q_idx ^ kv_idx) & 64) == t1[0]",
    )
    draw = torch.Generator().manual_seed(2)
    for text in formulas:
        mod = MaskMod(text)
        spec = spec_of(name, Mask.DENSE)
        schedule = EmulatedSchedule(replace(spec, problem=replace(spec.problem, mask_mod=mod)), tmp_path)
        long = name in ("128x96", "backward") and "window" in text
        for seq_q, seq_k in [*SIZES, (4500, 9900)] if long else SIZES:
            longest = max(seq_q, seq_k)
            document = torch.arange(longest, dtype=torch.int32) // 190
            image = (torch.rand(longest, generator=draw) < 3 / longest).int()
            captured = (document, image) if mod.tensors else ()
            index = {"q_idx": torch.arange(seq_q)[:, None], "kv_idx": torch.arange(seq_k)[None]}
            index = {leaf: x.int() for leaf, x in index.items()}
            visible = evaluate(mod, index, captured)
            tables = schedule.run(torch.empty(0), None, seq_q, seq_k, captured)
            check(schedule, tables, visible)
            if seq_k == 9900 and schedule.plan.owner == "m":
                assert tables["tile_slots"].any(), "a query that sees all keys"


def bits_of(words: Tensor, rows: int, columns: int) -> Tensor:
    """bool (rows, columns): the bits of a slot, which lie as the threads of warpgroups hold their pairs."""
    words = words.view(rows // 64, 4, 8, 4, -1)  # warpgroups, warps, rows of 8, lanes of a row
    found = torch.zeros(rows, columns, dtype=torch.bool)
    for i in range(columns // 2):
        seen = (words[..., i // 32].long() >> i % 32 & 1).bool()
        place = i // 4 * 8 + i % 2
        found.view(rows // 64, 4, 2, 8, columns)[:, :, i // 2 % 2, :, place : place + 8 : 2] = seen
    return found


# Documents of batch entries, of which some keys are seen by all later queries of some heads.
PLANES = (
    "planes(t0: int32[2]): (t0[b, q_idx] == t0[b, kv_idx]) | ((kv_idx % (50 + h) == 0) & (kv_idx <= q_idx))"
)


@pytest.mark.parametrize("bit_slots", [1 << 20, 5, 0])
@pytest.mark.parametrize("name", ["192x128", "128x96", "64x144", "backward"])
def test_bits_of_partial_visits(name: str, bit_slots: int, tmp_path: Path) -> None:
    """Each partial visit has the bits of its pairs, or no slot once all are taken; others have none."""
    mod, spec, (batch, heads) = MaskMod(PLANES), spec_of(name, Mask.DENSE), (2, 3)
    schedule = EmulatedSchedule(replace(spec, problem=replace(spec.problem, mask_mod=mod)), tmp_path)
    plan, tuning = schedule.plan, spec.tuning
    forward = plan.owner == "m"
    rows, columns = (tuning.tile_m, tuning.tile_n)[:: 1 if forward else -1]
    for seq_q, seq_k in ((1, 1), (389, 431), (700, 260)):
        document = (
            torch.randint(0, 3, (batch, 700), generator=torch.Generator().manual_seed(3)).sort(1).values.int()
        )
        tables = schedule.run(
            torch.empty(0), None, seq_q, seq_k, (document,), planes=(batch, heads), bit_slots=bit_slots
        )
        sizes = {"b": batch, "h": heads, "q_idx": seq_q, "kv_idx": seq_k}
        index = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in sizes.values()), indexing="ij")
        visible = evaluate(mod, dict(zip(sizes, index, strict=True)), (document,)).flatten(0, 1)
        visible = visible if forward else visible.mT
        owned = -(-visible.shape[1] // rows)
        taken = []
        for tile, count in enumerate(tables["tile_count"].tolist()):
            plane, first = tile // owned, tile % owned * rows
            for i in range(count):
                entry, slot = int(tables["tile_list"][tile, i]), int(tables["visit_slots"][tile, i])
                visited = entry >> plan.row_groups
                inside = visible[plane, first : first + rows, visited * columns : visited * columns + columns]
                if slot >= 0:
                    taken.append(slot)
                    assert tables["slot_visits"][slot].tolist() == [tile, visited]
                    found = bits_of(tables["visit_bits"][slot], rows, columns)
                    assert torch.equal(found[: inside.shape[0], : inside.shape[1]], inside)
                    assert not found[:, inside.shape[1] :].any() or not forward, "keys past the end"
                    assert not found[inside.shape[0] :].any() or forward, "keys past the end"
                else:
                    assert slot == -1
                    assert inside.all() or len(tables["slot_visits"]) == bit_slots
        assert sorted(taken) == list(range(len(taken)))
        partial = int(
            (tables["tile_list"] & (1 << plan.row_groups) - 1)
            .where(torch.arange(tables["tile_list"].shape[1]) < tables["tile_count"].view(-1, 1), 0)
            .count_nonzero()
        )
        assert len(taken) == min(partial, bit_slots)
        assert int(tables["slots_taken"]) <= min(partial, bit_slots)


def test_schedules_are_shared_by_plans_that_render_the_same() -> None:
    """What `schedule_kind` says are the same tables comes from the same text, names aside."""
    texts: dict[str, set[str]] = {}
    section = re.compile(r"^// ---- Tile schedule.*?(?=^// ---- |\Z)", re.MULTILINE | re.DOTALL)
    problems = itertools.product(
        Direction,
        (Arch.CPU, Arch.SM80, Arch.SM90A),
        (DType.BFLOAT16, DType.FLOAT32),
        (64,),
        (Mask.SPANS, Mask.DENSE),
    )
    specs = [
        spec
        for problem in itertools.starmap(Problem, problems)
        for spec in itertools.islice(candidates(problem), 0, 24, 6)
    ]
    specs += [spec_of(name, Mask.SPANS) for name in VARIANTS]
    before_hopper = replace(
        spec_of("deterministic", Mask.SPANS), tuning=Sm80Backward(64, 128, 8, 2, 4, 8, 4, False, True)
    )
    for spec in (*specs, before_hopper):
        source = render(spec)
        text = "".join(section.findall(source.text)).replace(spec.symbol, "kernel")
        texts.setdefault(source.plan.schedule_kind, set()).add(text)
    assert len(texts) > 10
    assert {kind for kind, found in texts.items() if len(found) > 1} == set()


def test_pieces_of_a_forward_are_short_beside_the_work_of_a_block(tmp_path: Path) -> None:
    """Of queries that see all keys, as Longformer's: as short as the blocks that are left over allow."""
    spec = spec_of("128x96", Mask.DENSE)
    mod = MaskMod("longformer: (abs(q_idx - kv_idx) <= 70) | (q_idx % 9000 == 200)")
    schedule = EmulatedSchedule(replace(spec, problem=replace(spec.problem, mask_mod=mod)), tmp_path)
    tables = schedule.run(torch.empty(0), None, 18000, 17000, bit_slots=9)
    counts = tables["tile_count"].tolist()
    assert tables["tile_order"].tolist() == pieces(counts, slots=True)
    order = [piece for piece in tables["tile_order"].tolist() if piece[2] > 0]
    assert sorted(counts)[-3:] == [4, 178, 178]
    assert max(piece[2] for piece in order) == 18  # ten pieces each, of at most three times the mean
    for tile, count in enumerate(counts):
        assert sum(piece[2] for piece in order if piece[0] == tile) == count
