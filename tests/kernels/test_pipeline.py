"""The barriers of the Hopper forward kernel, run on the CPU in random order: nothing hangs, nothing is overwritten.

The rendered producer, consumer, epilogue and kernel run as they are (pipeline.h replaces PTX, products and softmax, and
pipeline.cpp is the machine that they run on).
"""

from __future__ import annotations

import ctypes
import random
import re
import zlib
from collections.abc import Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Protocol

import gxx
import pytest
import torch
from cpu_kernel import MaskRef, Params, ScoreRef, full_params
from emulated_schedule import EmulatedSchedule
from torch import Tensor

from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.render import Source, render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import masks

FLAGS = ("-std=c++17", "-Og", "-w", "-Wno-psabi", "-fPIC", "-shared", f"-I{gxx.HERE}")
SEEDS = 4
# What pipeline.h stands in for.
REPLACED = ("PTX", "Softmax", "Products", "Score", "Tile schedule")
TENSORS = ("q", "k", "v", "out")
# (batch, heads_q, heads_kv, query tiles, key tiles): odd and even, fewer and more pieces than there are blocks.
SIZES = [(1, 1, 1, 1, 1), (1, 2, 1, 3, 2), (2, 7, 1, 3, 3), (1, 3, 3, 4, 1), (1, 2, 2, 5, 7)]

MISSING = (1, 60)

ALIBI = "alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)"

PAIRS = "pairs(t0: int32[2]): t0[q_idx, kv_idx] != 0"

# What follows the text of a kernel.
RUN = """
static const Params* params;
static const TensorMaps* tensor_maps;
extern "C" const char* run(const Params* p, const TensorMaps* maps, int count, unsigned seed, int change) {
    params = p, tensor_maps = maps, broken = change;
    const Shape shape = {
        .consumers = kConsumers, .tile_m = kTileM, .tile_n = kTileN, .columns = kColumns,
        .swizzle_bytes = kSwizzleBytes, .panels = kPanels, .main = kMain, .row_bytes = kRowBytes, FACTS
    };
    const Call call = {
        .batch = p->batch, .heads_q = p->heads_q, .heads_kv = p->heads_kv, .seq_q = p->seq_q, .seq_k = p->seq_k,
        .padded_k = p->padded_k, .tiles_m = p->tiles_m, .planes = max(1, p->mask_planes),
        .dense = p->dense.data, .dense_head = p->dense.head, .dense_row = p->dense.row,
        .starts = p->starts, .ends = p->ends, .bounds = p->bounds,
        .tile_slots = p->tile_slots, .tile_counter = p->tile_counter,
    };
    return run_blocks([] { SYMBOL(*params, *tensor_maps); }, shape, call, count, seed);
}
"""

# What the text becomes if `broken` is n, and what is then found (among other things).
Break = tuple[dict[str, str], str]
NO_BREAKS: Mapping[str, Break] = {}


class Run(Protocol):
    """(sizes, seed, missing) -> what was wrong in a run with 4 multiprocessors, or nothing; with break number `broken`.

    The last query tile lacks `missing` rows times the seed: up to two warpgroups have none in it.
    """

    def __call__(
        self, sizes: tuple[int, int, int, int, int], seed: int, missing: int, broken: int = 0
    ) -> str: ...


def translate(source: Source) -> str:
    """C++ that g++ compiles, with a function `run`."""
    text = full_params(source.text).replace("#pragma unroll", "//")
    text = re.sub(r"extern __shared__[^;]*;", "unsigned char* shared = nullptr;", text)
    text = re.sub(r'asm volatile\("setmaxnreg[^;]*;"\);', "", text)
    text = text.replace('extern "C" __global__', "static")
    parts = []
    for section in re.split(r"(?=^// ---- )", text, flags=re.MULTILINE):
        title = section.removeprefix("// ---- ")
        if title.startswith("PTX"):
            parts.append('#include "pipeline.h"\n')
        elif not title.startswith(REPLACED):
            parts.append(section)
    text = "".join(parts).replace("kConsumers * 4)", "kConsumers * 2)")  # of four warps there are two here
    assert "asm" not in text
    stores = "store_out(p, maps, tail.work,"
    assert stores in text
    work = [f"tail.work.{name}" for name in ("batch", "head", "tile")]
    work.append("tail.work.slot" if source.plan.cut_lists else "-1")
    for call in (stores, "store_piece(p, tail.work,"):
        text = text.replace(call, f"check_tile({', '.join(work)}, warpgroup);\n        {call}")
    plan, problem = source.plan, source.spec.problem
    facts = {
        "head_dim_v": problem.head_dim_v,
        "panels_v": plan.constants["panels_v"],
        "out_panels": plan.constants["out_panels"],
        "intervals": problem.intervals,
        "causal": int(plan.from_end),
        "listed": int(problem.mask.listed),
        "cut": int(plan.cut_lists),
        "lines": int(problem.score.lines is not None),
    }
    words = ", ".join(f".{name} = {value}" for name, value in facts.items())
    return text + RUN.replace("FACTS", words).replace("SYMBOL", source.spec.symbol)


def spans(seq_q: int, seq_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Starts and ends: documents, noise that only some rows see, keys that nobody sees, rows that see nothing."""
    random = torch.Generator().manual_seed(zlib.crc32(repr((seq_q, seq_k, seed)).encode()))
    key = torch.arange(seq_k)
    length = int(torch.randint(1, seq_k + 1, (), generator=random))
    starts = key // length * length * seq_q // seq_k
    ends = torch.randint(0, 2, (seq_k,), generator=random) * seq_q
    ends = torch.where(key // length % 2 == 0, ends, starts + length * seq_q // seq_k)
    if seed == 2:  # late rows see the first keys already, early ones the last keys only
        starts, ends = seq_q - 1 - key * seq_q // seq_k, torch.full((seq_k,), seq_q)
    if seed % 2:
        starts, ends = starts.clamp(min=seq_q // 3), ends.clamp(max=seq_q - seq_q // 4)
    return starts.int(), ends.int()


def build(spec: Spec, directory: Path, breaks: Mapping[str, Break] = NO_BREAKS) -> Run:
    """The kernel, compiled for the CPU, with breaks of its protocol that can be switched on."""
    source = render(spec)
    path, plan = directory / "kernel.cpp", source.plan
    text = translate(source)
    for n, (name, (changes, _)) in enumerate(breaks.items(), 1):
        for old, new in changes.items():
            assert old in text, name
            text = text.replace(old, re.sub(r"(?<=broken [=!]= )n\b", str(n), new))
    path.write_text(text)
    library = gxx.library(path, *FLAGS, parts=("pipeline.cpp",), for_parts=("-O2",))
    library.run.restype = ctypes.c_char_p
    schedule = EmulatedSchedule(spec, directory) if spec.problem.mask.listed else None
    per_tensor = len(plan.tensor_maps) // len(TENSORS)
    boxes = (ctypes.c_ulonglong * (16 * len(plan.tensor_maps) + 8))()
    start = -ctypes.addressof(boxes) % 64 // 8
    for i, box in enumerate(plan.tensor_maps):
        boxes[start + 16 * i : start + 16 * i + 4] = [1 + i // per_tensor, box.columns, box.rows, box.panels]
    launch = plan.launches[0]
    held: list[Tensor] = []  # memory that Params point to

    def run(sizes: tuple[int, int, int, int, int], seed: int, missing: int, broken: int = 0) -> str:
        p, tuning = Params(), plan.spec.tuning
        p.batch, p.heads_q, p.heads_kv, tiles_m, p.tiles_n = sizes
        p.seq_q, p.seq_k = max(1, tiles_m * tuning.tile_m - seed * missing), p.tiles_n * tuning.tile_n - seed
        p.tiles_m = -(-p.seq_q // tuning.tile_m)
        p.padded_k = p.tiles_n * tuning.tile_n
        p.blocks_m, p.piece_slots = 3 * p.tiles_m, 3 * p.tiles_m
        floats = p.batch * p.heads_q * p.piece_slots * tuning.tile_m * (plan.spec.problem.head_dim_v + 1)
        results = torch.empty(floats if plan.cut_lists else 0)
        p.out_accum = results.data_ptr()
        held[:] = attach(p, schedule, seed) if schedule else []
        lse = (ctypes.c_float * (p.batch * p.heads_q * p.seq_q))()
        row = (ctypes.c_char * 1024)()  # what all rows that see nothing are written to
        p.lse, p.out.data = ctypes.addressof(lse), ctypes.addressof(row)
        count = (p.blocks_m if plan.cut_lists else p.tiles_m) * p.batch * p.heads_q
        count = min(count, 4) if launch.persistent else count
        at = ctypes.c_void_p(ctypes.addressof(boxes) + start * 8)
        return str(library.run(ctypes.byref(p), at, count, seed, broken).decode())

    return run


def attach(p: Params, schedule: EmulatedSchedule, seed: int) -> list[Tensor]:
    """Point `p` to a mask and to the tables that the kernel's own schedule makes of it; returns what it points to."""
    p.mask_batches = p.mask_heads = p.mask_planes = 1
    if schedule.spec.problem.unions:
        return attach_unions(p, schedule, seed)
    starts, ends = spans(p.seq_q, p.seq_k, seed)
    query = torch.arange(p.seq_q)[:, None]
    dense = (starts <= query) & (query < ends)
    if schedule.spec.problem.mask is Mask.SPANS:
        held = {"starts": starts, "ends": ends} | schedule.run(starts, ends, p.seq_q, p.seq_k)
    elif schedule.spec.problem.mask_mod:
        table = dense.int()
        p.score0 = ScoreRef.of(table)
        p.blocks_m = p.tiles_m + 1
        slots = (1 << 20, 4, 0, 1 << 20)[seed % 4]  # bits of all partial visits, of some, of none
        held = {"dense": dense} | schedule.run(dense, None, p.seq_q, p.seq_k, (table,), bit_slots=slots)
        held["tile_counter"].zero_()
        order, of_tiles = cut(held["tile_count"].tolist(), 3 * p.tiles_m, seed)
        held |= {"tile_order": torch.tensor(order).int(), "tile_slots": torch.tensor(of_tiles).int()}
        p.blocks_m, held["score0"] = 3 * p.tiles_m, table
    else:
        held = {"dense": dense} | schedule.run(dense, None, p.seq_q, p.seq_k)
        held["tile_counter"].zero_()
    for name, table in held.items():
        if name != "score0":
            setattr(p, name, MaskRef(table.data_ptr()) if name == "dense" else table.data_ptr())
    p.dense.row, p.list_stride = p.seq_k, p.tiles_n
    return list(held.values())


def cut(counts: list[int], blocks: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Lists of query tiles in up to three pieces each, as in tile_order, and the slots of each tile."""
    draw, order, slots, used = random.Random(seed), list[list[int]](), list[list[int]](), 0
    for tile, count in enumerate(counts):
        inner = sorted({draw.randint(1, count) for _ in range(draw.randint(0, 2))} - {count}) if count else []
        bounds = [0, *inner, count]
        slots.append([used, used + len(inner) + 1] if inner else [0, 0])
        for i, (begin, end) in enumerate(pairwise(bounds)):
            order.append([tile, begin, end - begin, used + i if inner else -1])
        used += len(inner) + 1 if inner else 0
    draw.shuffle(order)
    return order + [[-1, 0, 0, -1]] * (blocks - len(order)), slots


def attach_unions(p: Params, schedule: EmulatedSchedule, seed: int) -> list[Tensor]:
    """As `attach`, for spans of several intervals, and of a plane for each q head of each batch entry."""
    problem = schedule.spec.problem
    batch, heads = (p.batch, p.heads_q) if problem.planes else (1, 1)
    bounds = [spans(p.seq_q, p.seq_k, seed + 4 * i) for i in range(batch * heads * problem.intervals)]
    starts, ends = (
        torch.stack(side).view(batch, heads, problem.intervals, -1) for side in zip(*bounds, strict=True)
    )
    first, last = masks._united(starts, ends)
    query = torch.arange(p.seq_q)[:, None]
    seen = ((starts[:, :, :, None] <= query) & (query < ends[:, :, :, None])).any(2)  # for pipeline.h alone
    held = {"spans": torch.stack([first, last], 3).contiguous(), "dense": seen}
    held |= schedule.run(held["spans"], None, p.seq_q, p.seq_k)
    for name, table in held.items():
        setattr(p, name, MaskRef(table.data_ptr()) if name == "dense" else table.data_ptr())
    p.dense.head, p.dense.row = p.seq_q * p.seq_k, p.seq_k
    p.list_stride = p.tiles_n
    p.mask_batches, p.mask_heads, p.mask_planes = batch, heads, batch * heads
    return list(held.values())


def hopper(
    head_dim: int,
    *knobs: int,
    mask: Mask = Mask.FULL,
    intervals: int = 1,
    planes: int = 0,
    dim_v: int = 0,
    score: str = "",
    mask_mod: str = "",
    **more: Any,
) -> Spec:
    tile_m, tile_n, stages, ping_pong, persistent, q_in_regs, *counter = knobs
    flags = (bool(ping_pong), bool(persistent), bool(counter), bool(q_in_regs))
    tuning = Sm90Forward(tile_m, tile_n, stages, *flags, **more)
    problem = Problem(
        Direction.FORWARD,
        Arch.SM90A,
        DType.BFLOAT16,
        head_dim,
        mask,
        16,
        dim_v,
        intervals,
        planes,
        score=ScoreMod(score),
        mask_mod=MaskMod(mask_mod),
    )
    return Spec(problem, tuning)


# Those of test_a_broken_protocol_is_found are run there, sound as well.
@pytest.mark.parametrize(
    "spec",
    [
        hopper(64, 128, 128, 2, 1, 0, 1),
        hopper(72, 192, 128, 3, 1, 1, 0),
        hopper(72, 64, 64, 1, 0, 0, 0),
        hopper(128, 192, 80, 2, 1, 1, 0),
        hopper(128, 192, 64, 3, 0, 1, 0),
        hopper(64, 192, 128, 3, 1, 0, 0),
        *(
            hopper(head_dim, *knobs, mask=Mask.CAUSAL)
            for head_dim, *knobs in (
                (128, 192, 80, 3, 1, 1, 0),
                (128, 192, 64, 3, 0, 1, 0),
                (64, 128, 128, 2, 1, 1, 1),
                (64, 192, 128, 2, 1, 0, 0),
                (128, 128, 176, 2, 0, 1, 0),
            )
        ),
        *(
            hopper(head_dim, *knobs, mask=mask)
            for mask, head_dim, *knobs in (
                (Mask.SPANS, 128, 192, 80, 3, 1, 1, 0, 1),
                (Mask.SPANS, 128, 128, 128, 2, 0, 1, 1, 1),
                (Mask.SPANS, 128, 192, 80, 2, 1, 1, 0),
                (Mask.SPANS, 64, 192, 128, 2, 1, 0, 0),
                (Mask.DENSE, 128, 128, 128, 2, 1, 1, 1),
                (Mask.DENSE, 128, 128, 64, 3, 0, 1, 0),
                (Mask.DENSE, 64, 64, 64, 3, 0, 0, 0),
                (Mask.DENSE, 128, 128, 128, 2, 0, 1, 1, 1),
                (Mask.DENSE, 64, 192, 96, 3, 1, 1, 1, 1),
            )
        ),
        *(
            hopper(head_dim, *knobs, mask=Mask.DENSE, mask_mod=PAIRS)
            for head_dim, *knobs in (
                (128, 128, 128, 2, 0, 1, 1),
                (128, 128, 64, 3, 0, 1, 0),
                (64, 64, 144, 2, 0, 0, 0),
                (128, 128, 128, 2, 0, 1, 1, 1),
                (64, 192, 128, 2, 1, 1, 0, 1),
                (64, 64, 64, 3, 0, 1, 0, 1),
            )
        ),
        hopper(192, 128, 64, 2, 0, 1, 0, 1, mask=Mask.DENSE, mask_mod=PAIRS, k_ahead=True),
        hopper(64, 128, 64, 2, 0, 1, 0, 1, mask=Mask.DENSE, score=ALIBI),
        hopper(128, 192, 80, 3, 1, 1, 0, 1, mask=Mask.SPANS, intervals=2),
        hopper(128, 192, 80, 3, 1, 1, 0, 1, mask=Mask.SPANS, planes=1),
        hopper(64, 128, 128, 2, 0, 1, 1, mask=Mask.SPANS, intervals=3, planes=1),
        hopper(128, 192, 80, 3, 1, 1, 0, 1, mask=Mask.SPANS, hand_over=1),
        hopper(64, 192, 96, 2, 1, 1, 0, mask=Mask.SPANS, hand_over=2),
        hopper(128, 128, 112, 2, 0, 1, 0, mask=Mask.FULL, heads_together=2),
        hopper(64, 192, 128, 3, 1, 1, 0, mask=Mask.CAUSAL, hand_over=2),
        hopper(64, 192, 64, 4, 1, 0, 0, mask=Mask.CAUSAL, hand_over=1, exact_visits=0),
        hopper(64, 128, 64, 2, 1, 1, 1, mask=Mask.FULL, hand_over=1),
        hopper(192, 128, 96, 2, 0, 1, 0, 1, mask=Mask.SPANS, dim_v=128),
        hopper(192, 128, 128, 2, 0, 1, 1, mask=Mask.CAUSAL, dim_v=128),
        hopper(64, 192, 80, 3, 1, 1, 0, mask=Mask.CAUSAL, dim_v=128),
        hopper(40, 192, 64, 2, 0, 1, 1, dim_v=136),
        # O through a buffer of its own: of two panels in two rounds, of two and one, of one in two rounds.
        hopper(256, 128, 64, 2, 1, 1, 0),
        hopper(256, 128, 64, 2, 1, 1, 0, mask=Mask.CAUSAL),
        hopper(192, 128, 64, 3, 1, 1, 0),
        hopper(192, 128, 96, 2, 1, 1, 0, mask=Mask.CAUSAL),
        hopper(192, 192, 64, 3, 1, 1, 0, mask=Mask.CAUSAL, dim_v=128, hand_over=2),
        hopper(192, 192, 64, 3, 0, 1, 0, dim_v=128),
        hopper(192, 128, 96, 2, 0, 1, 0, mask=Mask.DENSE),
        hopper(256, 128, 64, 2, 1, 1, 0, mask=Mask.SPANS),
        hopper(256, 64, 64, 1, 0, 1, 0),
        hopper(248, 128, 64, 2, 1, 1, 0),
        hopper(192, 128, 64, 3, 1, 1, 0, dim_v=136),
        # Other buffers for V than for K, and K a visit ahead.
        hopper(256, 128, 64, 2, 1, 1, 0, mask=Mask.CAUSAL, k_ahead=True),
        hopper(256, 128, 64, 2, 0, 1, 0, stages_v=3),
        hopper(192, 128, 80, 2, 1, 1, 0, 1, mask=Mask.SPANS, k_ahead=True),
        hopper(192, 128, 80, 2, 1, 1, 0, mask=Mask.SPANS, dim_v=128, stages_v=3, hand_over=2),
        hopper(192, 192, 80, 2, 1, 1, 0, mask=Mask.CAUSAL, dim_v=128, stages_v=3),
        hopper(192, 192, 64, 2, 1, 1, 0, mask=Mask.CAUSAL, dim_v=128, stages_v=3, k_ahead=True),
        hopper(192, 128, 64, 3, 0, 1, 0, dim_v=128, stages_v=4),
        hopper(192, 192, 48, 2, 1, 1, 0, mask=Mask.CAUSAL, k_ahead=True),
        hopper(192, 128, 96, 2, 0, 1, 0, mask=Mask.DENSE, mask_mod=PAIRS, k_ahead=True),
        hopper(64, 192, 64, 3, 1, 1, 0, score=ALIBI, stages_v=4, k_ahead=True),
        hopper(64, 192, 128, 3, 1, 1, 0, score=ALIBI),
        hopper(128, 192, 80, 3, 1, 1, 0, mask=Mask.CAUSAL, score=ALIBI),
        hopper(64, 128, 96, 2, 0, 0, 1, mask=Mask.SPANS, score=ALIBI),
        hopper(64, 128, 64, 3, 0, 1, 0, mask=Mask.DENSE, score=ALIBI),
    ],
    ids=lambda spec: spec.slug,
)
def test_nothing_hangs_and_nothing_is_overwritten(spec: Spec, tmp_path: Path) -> None:
    run = build(spec, tmp_path)
    for case in product(SIZES, range(SEEDS), MISSING):
        assert run(*case) == "", case


OF_CAUSAL: dict[str, Break] = {
    "releases-v": ({"arrives, smem + kEmptyV": "broken != n && arrives, smem + kEmptyV"}, "it hangs"),
    "order": (
        {"named_sync_if(key_tile < ordered": "named_sync_if(key_tile < ordered + (broken == n)"},
        "it hangs",
    ),
    "mask": ({"key_tile >= whole": "key_tile >= whole + (broken == n)"}, "hidden pairs are not masked"),
    "waits-k": ({"waits, smem + kFullK": "broken != n && waits, smem + kFullK"}, "a copy overwrites"),
    "waits-v": ({"waits, smem + kFullV": "broken != n && waits, smem + kFullV"}, "a copy overwrites"),
    "visits": (
        {"tiles_before(p, query0 + 64)": "tiles_before(p, query0 + (broken == n ? 0 : 64))"},
        "a key tile is missing",
    ),
}
NEXT_Q = "smem + kEmptyQ + q_pipe.stage * 8);\n        q_pipe.advance();"
ALL_WARPS = "named_sync(kWarpgroupBarrier + warpgroup, 128);\n    if"
OF_SPANS: dict[str, Break] = {
    "awaits-bounds": (
        {"kTileBytesN + masked * kBoundsBytes": "kTileBytesN + (broken != n && masked) * kBoundsBytes"},
        "bounds of other keys",
    ),
    "bounds-of-all": (
        {"(entry & (1 << kRowGroups) - 1) != 0": "(entry & (broken == n ? 1 : (1 << kRowGroups) - 1)) != 0"},
        "bounds of other keys",
    ),
    "frees-q": (
        {
            "barrier_arrive_if(leader, smem + kEmptyQ": "barrier_arrive_if(broken != n && leader, smem + kEmptyQ",
        },
        "it hangs",
    ),
    "next-q": (
        {
            NEXT_Q: "smem + kEmptyQ + (broken == n ? 0 : q_pipe.stage * 8));\n"
            "        if (broken != n) q_pipe.advance();",
        },
        "it hangs",
    ),
    "frees-q-late": ({"stored && leader": "stored != (broken == n) && leader"}, "it hangs"),
    "order": ({"visit_count, visit_count - 1": "visit_count, visit_count - (broken != n)"}, "it hangs"),
    "skips-before": (
        {
            "skip_visits(kv_range.begin, kv_range.begin)": "skip_visits(broken == n ? 0 : kv_range.begin,"
            " broken == n ? 0 : kv_range.begin)",
        },
        "a key tile is missing",
    ),
    "skips-after": (
        {"visit_count - kv_range.end;": "broken == n ? 0 : visit_count - kv_range.end;"},
        "a wrong tile",
    ),
    "mask": (
        {"entry >> warpgroup & 1": "entry >> (broken == n ? 0 : warpgroup) & 1"},
        "hidden pairs are not masked",
    ),
    "reset": (
        {"p.tile_counter[1] = 0": "p.tile_counter[1] = (broken == n)"},
        "the scheduler is not reset",
    ),
    "all-warps": ({ALL_WARPS: f"if (broken != n) {ALL_WARPS}"}, "before all warps have written it"),
    "fence": ({"proxy_fence();": "if (broken != n) proxy_fence();"}, "O is stored without a fence"),
}
OF_LINES: dict[str, Break] = {
    "keys": (
        {"line_at(lines, row, (entry": "line_at(lines, row, (broken == n ? 0 : entry"},
        "lines of other keys",
    ),
    "rows": (
        {"+ warpgroup * 64 + threadIdx": "+ (broken == n ? 0 : warpgroup * 64) + threadIdx"},
        "other rows",
    ),
    "head": (
        {"score_lines(p, work.batch, work.head)": "score_lines(p, work.batch, broken == n ? 0 : work.head)"},
        "another head",
    ),
    "in-order": (
        {"index_of(i, first, visit_count)": "(broken == n ? i : index_of(i, first, visit_count))"},
        "lines of other keys",
    ),
    "told-first": (
        {"range.x, range.y, first": "range.x, range.y, broken == n ? 0 : first"},
        "lines of other keys",
    ),
    "turns": (
        {"range = range_in_order(": "if (broken != n) range = range_in_order("},
        "a key tile is missing",
    ),
    "second-part": (
        {"max(begin, first + 1) + count + 1": "max(begin, first + 1) + count + (broken != n)"},
        "a key tile is missing",
    ),
}
OF_PIECES: dict[str, Break] = {
    "place-in-list": (
        {"work.first_visit + index": "(broken == n ? 0 : work.first_visit) + index"},
        "a key tile is met twice",
    ),
    "all-visits": (
        {"if (work.slot >= 0) {\n        return": "if (broken != n && work.slot >= 0) {\n        return"},
        "bits of other pairs",
    ),
    "bits-of-the-visit": (
        {"visit_slot(p, work.plane, work.tile, ": "visit_slot(p, work.plane, broken == n ? 0 : work.tile, "},
        "bits of other pairs",
    ),
    "bits-of-the-rows": (
        {"load_seen(p, slot, warpgroup, seen)": "load_seen(p, slot, broken == n ? 0 : warpgroup, seen)"},
        "bits of other pairs",
    ),
    "no-slot": (
        {"if (slot < 0) {": "if (broken != n && slot < 0) {"},
        "bits of other pairs",
    ),
}
OF_BROADCAST_PIECES: dict[str, Break] = {
    name: change for name, change in OF_PIECES.items() if name in ("place-in-list", "all-visits")
} | {
    "no-place": (
        {"make_int4(work.first_visit,": "make_int4(broken == n ? 0 : work.first_visit,"},
        "bits of other pairs",
    ),
    "other-slot": (
        {" work.slot, 0, 0)": " broken == n ? -1 : work.slot, 0, 0)"},
        "a slot is not stored once",
    ),
    "over-a-range": (
        {"words + kBroadcastBytes - 16, make": "words + kBroadcastBytes - (broken == n ? 32 : 16), make"},
        "it hangs",
    ),
}
OF_OWN_HEAD_DIM: dict[str, Break] = {
    "place-of-o": (
        {"i / 4 + lane / 16, kTileM)": "i / 4 + lane / 16, broken == n ? 64 : kTileM)"},
        "reads what is not there",
    ),
    "bytes-of-v": (
        {"* 8, kTileBytesV)": "* 8, broken == n ? kTileBytesN : kTileBytesV)"},
        "reads what is not there",
    ),
    "panels-of-v": ({"kTileN, kPanelsV)": "kTileN, broken == n ? kPanels : kPanelsV)"}, "it hangs"),
    "buffers-of-q": (
        {"stage * kBufferBytesQ": "stage * (broken == n ? kTileBytesM : kBufferBytesQ)"},
        "a copy overwrites",
    ),
}

BEFORE_ROUND = "named_sync(kWarpgroupBarrier + warpgroup, 128);\n        }"
OF_OWN_BUFFER: dict[str, Break] = {
    "frees-q": (
        {"barrier_wait(smem + kEmptyK + (wraps": "if (broken != n) barrier_wait(smem + kEmptyK + (wraps"},
        "a copy overwrites",
    ),
    "tile-before-q": (
        {
            "wait_empty_q();\n                    broadcast(work, count);": "if (broken == n) broadcast(work, count);\n"
            "                    wait_empty_q();\n                    broadcast(work, count);"
        },
        "a wrong tile",
    ),
    "waits-for-store": (
        {"tma_store_wait();  // the thread": "if (broken != n) tma_store_wait();  // the thread"},
        "O is overwritten",
    ),
    "waits-at-the-end": (
        {"tma_store_wait();  // before": "if (broken != n) tma_store_wait();  // before"},
        "a block ends while O is stored",
    ),
    "all-warps-wait": ({BEFORE_ROUND: f"if (broken != n) {BEFORE_ROUND}"}, "O is overwritten"),
    "all-warps": (
        {
            ALL_WARPS.replace(
                "    if", "            if"
            ): f"if (broken != n) {ALL_WARPS.replace('    if', '            if')}"
        },
        "before all warps have written it",
    ),
}


@pytest.mark.parametrize(
    ("spec", "breaks"),
    [
        (hopper(64, 192, 128, 2, 1, 1, 0, mask=Mask.CAUSAL), OF_CAUSAL),
        (hopper(64, 192, 96, 3, 1, 1, 0, 1, mask=Mask.SPANS), OF_SPANS),
        (hopper(40, 192, 64, 2, 0, 1, 0, dim_v=104), OF_OWN_HEAD_DIM),
        (hopper(256, 128, 64, 2, 1, 1, 0, mask=Mask.CAUSAL), OF_OWN_BUFFER),
        (hopper(64, 192, 96, 3, 1, 1, 0, 1, mask=Mask.SPANS, score=ALIBI), OF_LINES),
        (hopper(128, 128, 128, 2, 1, 1, 1, mask=Mask.DENSE, mask_mod=PAIRS), OF_PIECES),
        (hopper(64, 128, 128, 2, 1, 1, 0, 1, mask=Mask.DENSE, mask_mod=PAIRS), OF_BROADCAST_PIECES),
    ],
    ids=["causal", "spans", "own-head-dim", "own-buffer", "lines", "pieces", "broadcast-pieces"],
)
def test_a_broken_protocol_is_found(spec: Spec, breaks: dict[str, Break], tmp_path: Path) -> None:
    """One compilation serves all breaks of a kernel, and without any of them it is sound."""
    run = build(spec, tmp_path, breaks)
    cases = list(product(SIZES, range(SEEDS), MISSING))
    for case in cases:
        assert run(*case) == "", case
    for n, (name, (_, said)) in enumerate(breaks.items(), 1):
        assert any(said in run(*case, n) for case in cases), name


def test_causal_sections_of_heads_meet_at_tiles_of_one_size(tmp_path: Path) -> None:
    """With a small cache heads fall into several sections, by turns from the largest tiles and from the smallest."""
    spec = hopper(64, 192, 128, 2, 1, 1, 0, mask=Mask.CAUSAL)
    small = {"small cache": ({"kCacheBytes = 16 << 20": "kCacheBytes = 1 << 18"}, "")}
    run = build(spec, tmp_path, small)
    for case in product([(2, 4, 2, 5, 5), (3, 3, 3, 4, 6), (1, 7, 1, 3, 3)], range(SEEDS), MISSING):
        assert run(*case) == "", case


def test_a_causal_tile_that_just_misses_being_whole(tmp_path: Path) -> None:
    """Rows from one on that sees all keys of a tile but the last: seq_k - seq_q is -2 modulo tile_n."""
    spec, sizes = hopper(128, 192, 64, 3, 0, 1, 0, mask=Mask.CAUSAL), (1, 2, 2, 5, 7)
    first_row = "query + 1 + p.seq_k - p.seq_q)) / kTileN"
    one_more: dict[str, Break] = {
        "one more": ({first_row: f"(broken == n) + {first_row}"}, "hidden pairs are not masked")
    }
    run = build(spec, tmp_path, one_more)
    assert run(sizes, 2, 0) == ""
    assert one_more["one more"][1] in run(sizes, 2, 0, 1)
