"""The barriers of the Hopper forward kernel, run on the CPU in random order: nothing hangs, nothing is overwritten.

The rendered producer, consumer, epilogue and kernel run as they are (pipeline.h replaces PTX, products and softmax).
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import gxx
import pytest
import torch
from cpu_kernel import MaskRef, Params, full_params
from emulated_schedule import EmulatedSchedule
from torch import Tensor

from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

FLAGS = ("-std=c++17", "-O1", "-w", "-Wno-psabi", "-fPIC", "-shared", f"-I{gxx.HERE}")
SEEDS = 4
# What pipeline.h stands in for.
REPLACED = ("PTX", "Softmax", "Products", "Tile schedule")
TENSORS = ("q", "k", "v", "out")
# (batch, heads_q, heads_kv, query tiles, key tiles): odd and even, fewer and more pieces than there are blocks.
SIZES = [(1, 1, 1, 1, 1), (1, 2, 1, 3, 2), (2, 7, 1, 3, 3), (1, 3, 3, 4, 1), (1, 2, 2, 5, 7)]

MISSING = (1, 60)

Run = Callable[[tuple[int, int, int, int, int], int, int], str]


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
    parts = [text.replace(stores, f"check_tile(p, tail.work, warpgroup);\n        {stores}")]
    return "".join(parts) + (
        'extern "C" const char* run(const Params* p, const TensorMaps* maps, int count, unsigned seed) {\n'
        f"    body = [=] {{ {source.spec.symbol}(*p, *maps); }};\n"
        "    static std::string said;\n    said = run_blocks(*p, count, seed);\n    return said.c_str();\n}\n"
    )


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


def build(source: Source, directory: Path, change: tuple[str, str] = ("", "")) -> Run:
    """(sizes, seed, missing) -> what was wrong in a run with 4 multiprocessors, or nothing.

    The last query tile lacks `missing` rows times the seed: up to two warpgroups have none in it.
    """
    path, plan = directory / "kernel.cpp", source.plan
    text = translate(source)
    assert change[0] in text
    path.write_text(text.replace(*change) if change[0] else text)
    words = [f"-DCLUSTER={plan.cluster}"] if plan.cluster > 1 else []
    listed = source.spec.problem.mask.listed
    words += [f"-DkCausal={int(plan.from_end)}", f"-DMASKED={int(listed)}"]
    library = gxx.library(path, *FLAGS, *words)
    library.run.restype = ctypes.c_char_p
    schedule = EmulatedSchedule(source.spec, directory) if listed else None
    per_tensor = len(plan.tensor_maps) // len(TENSORS)
    boxes = (ctypes.c_ulonglong * (16 * len(plan.tensor_maps) + 8))()
    start = -ctypes.addressof(boxes) % 64 // 8
    for i, box in enumerate(plan.tensor_maps):
        boxes[start + 16 * i : start + 16 * i + 4] = [1 + i // per_tensor, box.columns, box.rows, box.panels]
    (launch,) = plan.launches
    held: list[Tensor] = []  # memory that Params point to

    def run(sizes: tuple[int, int, int, int, int], seed: int, missing: int) -> str:
        p, tuning = Params(), plan.spec.tuning
        p.batch, p.heads_q, p.heads_kv, tiles_m, p.tiles_n = sizes
        p.seq_q, p.seq_k = max(1, tiles_m * tuning.tile_m - seed * missing), p.tiles_n * tuning.tile_n - seed
        p.tiles_m = -(-p.seq_q // tuning.tile_m)
        held[:] = attach(p, schedule, seed) if schedule else []
        lse = (ctypes.c_float * (p.batch * p.heads_q * p.seq_q))()
        row = (ctypes.c_char * 1024)()  # what all rows that see nothing are written to
        p.lse, p.out.data = ctypes.addressof(lse), ctypes.addressof(row)
        count = -(-p.tiles_m // launch.cluster) * launch.cluster * p.batch * p.heads_q
        count = min(count, 4) if launch.persistent else count
        at = ctypes.c_void_p(ctypes.addressof(boxes) + start * 8)
        return str(library.run(ctypes.byref(p), at, count, seed).decode())

    return run


def attach(p: Params, schedule: EmulatedSchedule, seed: int) -> list[Tensor]:
    """Point `p` to a mask and to the tables that the kernel's own schedule makes of it; returns what it points to."""
    starts, ends = spans(p.seq_q, p.seq_k, seed)
    query = torch.arange(p.seq_q)[:, None]
    dense = (starts <= query) & (query < ends)
    if schedule.spec.problem.mask is Mask.SPANS:
        held = {"starts": starts, "ends": ends} | schedule.run(starts, ends, p.seq_q, p.seq_k)
    else:
        held = {"dense": dense} | schedule.run(dense, None, p.seq_q, p.seq_k)
        held["tile_counter"].zero_()
    for name, table in held.items():
        setattr(p, name, MaskRef(table.data_ptr()) if name == "dense" else table.data_ptr())
    p.dense.row, p.list_stride = p.seq_k, p.tiles_n
    p.mask_batches = p.mask_heads = p.mask_planes = 1
    return list(held.values())


def hopper(head_dim: int, *knobs: int, mask: Mask = Mask.FULL) -> Source:
    tile_m, tile_n, stages, ping_pong, persistent, q_in_regs, cluster, *counter = knobs
    flags = (bool(ping_pong), bool(persistent), bool(counter), bool(q_in_regs))
    tuning = Sm90Forward(tile_m, tile_n, stages, *flags, cluster)
    return render(Spec(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask), tuning))


@pytest.mark.parametrize(
    "source",
    [
        hopper(128, 192, 64, 3, 0, 1, 0, 2),
        hopper(128, 192, 80, 2, 1, 1, 0, 2),
        hopper(64, 128, 128, 2, 1, 0, 1, 2),
        hopper(72, 192, 128, 3, 1, 1, 0, 2),
        hopper(72, 64, 64, 1, 0, 0, 0, 2),
        hopper(128, 192, 80, 2, 1, 1, 0, 1),
        hopper(128, 192, 64, 3, 0, 1, 0, 1),
        hopper(64, 192, 128, 3, 1, 0, 0, 1),
        *(
            hopper(head_dim, *knobs, mask=Mask.CAUSAL)
            for head_dim, *knobs in (
                (128, 192, 80, 2, 1, 1, 0, 1),
                (128, 192, 80, 3, 1, 1, 0, 1),
                (64, 192, 128, 3, 1, 1, 0, 1),
                (128, 192, 64, 3, 0, 1, 0, 1),
                (64, 128, 128, 2, 1, 1, 1, 1),
                (64, 192, 128, 2, 1, 0, 0, 1),
                (128, 128, 176, 2, 0, 1, 0, 1),
            )
        ),
        *(
            hopper(head_dim, *knobs, mask=mask)
            for mask, head_dim, *knobs in (
                (Mask.SPANS, 128, 192, 80, 3, 1, 1, 0, 1, 1),
                (Mask.SPANS, 64, 192, 96, 3, 1, 1, 1, 1, 1),
                (Mask.SPANS, 128, 128, 128, 2, 0, 1, 1, 1, 1),
                (Mask.SPANS, 128, 192, 80, 2, 1, 1, 0, 1),
                (Mask.SPANS, 64, 192, 128, 2, 1, 0, 0, 1),
                (Mask.DENSE, 128, 128, 128, 2, 1, 1, 1, 1),
                (Mask.DENSE, 128, 128, 64, 3, 0, 1, 0, 1),
                (Mask.DENSE, 64, 64, 64, 3, 0, 0, 0, 1),
            )
        ),
    ],
    ids=lambda source: source.spec.slug,
)
def test_nothing_hangs_and_nothing_is_overwritten(source: Source, tmp_path: Path) -> None:
    run = build(source, tmp_path)
    for case in product(SIZES, range(SEEDS), MISSING):
        assert run(*case) == "", case


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("kConsumers * kCluster)", "kConsumers)"), "more arrivals than a barrier takes"),
        (("(barrier, threadIdx.x % 128", "(barrier, blockIdx.x % kCluster"), "a copy overwrites"),
        (("    }\n    cluster_sync();", "    }\n"), "a block that has left"),
        (("row + from, 0", "row, 0"), "reads what is not there"),
    ],
    ids=["count", "own-block", "leaves", "rows"],
)
def test_a_broken_protocol_is_found(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    run = build(hopper(64, 128, 64, 1, 1, 1, 0, 2), tmp_path, change)
    found = {run(*case) for case in product(SIZES, range(SEEDS), MISSING)}
    assert any(said in one for one in found), found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("arrives, smem + kEmptyV", "false, smem + kEmptyV"), "it hangs"),
        (("named_sync_if(key_tile < ordered", "named_sync_if(key_tile <= ordered"), "it hangs"),
        (("key_tile >= whole", "key_tile > whole"), "hidden pairs are not masked"),
        (("waits, smem + kFullK", "false, smem + kFullK"), "a copy overwrites"),
        (("waits, smem + kFullV", "false, smem + kFullV"), "a copy overwrites"),
        (("tiles_before(p, query0 + 64)", "tiles_before(p, query0)"), "a key tile is missing"),
    ],
    ids=["releases-v", "order", "mask", "waits-k", "waits-v", "visits"],
)
def test_a_broken_causal_protocol_is_found(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    run = build(hopper(64, 192, 128, 2, 1, 1, 0, 1, mask=Mask.CAUSAL), tmp_path, change)
    found = {run(*case) for case in product(SIZES, range(SEEDS), MISSING)}
    assert any(said in one for one in found), found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("kTileBytesN + masked * kBoundsBytes", "kTileBytesN"), "bounds of other keys"),
        (("(entry & (1 << kRowGroups) - 1) != 0", "entry & 1"), "bounds of other keys"),
        (("barrier_arrive_if(leader, smem + kEmptyQ", "barrier_arrive_if(false, smem + kEmptyQ"), "it hangs"),
        (("smem + kEmptyQ + q_pipe.stage * 8);\n        q_pipe.advance();", "smem + kEmptyQ);"), "hangs"),
        (("stored && leader", "!stored && leader"), "it hangs"),
        (("visit_count, visit_count - 1", "visit_count, visit_count"), "it hangs"),
        (("skip_visits(kv_range.begin, kv_range.begin)", "skip_visits(0, 0)"), "a key tile is missing"),
        (("visit_count - kv_range.end;", "0;"), "a wrong tile"),
        (("entry >> warpgroup & 1", "entry & 1"), "hidden pairs are not masked"),
        (("p.tile_counter[1] = 0", "p.tile_counter[1] = 1"), "the scheduler is not reset"),
        (
            ("named_sync(kWarpgroupBarrier + warpgroup, 128);\n    if", "if"),
            "before all warps have written it",
        ),
        (("proxy_fence();", ""), "O is stored without a fence"),
    ],
    ids=[
        *("awaits-bounds", "bounds-of-all", "frees-q", "next-q", "frees-q-late", "order", "skips-before"),
        *("skips-after", "mask", "reset", "all-warps", "fence"),
    ],
)
def test_a_broken_protocol_of_spans_is_found(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    run = build(hopper(64, 192, 96, 3, 1, 1, 0, 1, 1, mask=Mask.SPANS), tmp_path, change)
    found = {run(*case) for case in product(SIZES, range(SEEDS), MISSING)}
    assert any(said in one for one in found), found


def test_causal_sections_of_heads_meet_at_tiles_of_one_size(tmp_path: Path) -> None:
    """With a small cache heads fall into several sections, by turns from the largest tiles and from the smallest."""
    source = hopper(64, 192, 128, 2, 1, 1, 0, 1, mask=Mask.CAUSAL)
    run = build(source, tmp_path, ("kCacheBytes = 32 << 20", "kCacheBytes = 1 << 18"))
    for case in product([(2, 4, 2, 5, 5), (3, 3, 3, 4, 6), (1, 7, 1, 3, 3)], range(SEEDS), MISSING):
        assert run(*case) == "", case


def test_a_causal_tile_that_just_misses_being_whole(tmp_path: Path) -> None:
    """Rows from one on that sees all keys of a tile but the last: seq_k - seq_q is -2 modulo tile_n."""
    source, sizes = hopper(128, 192, 64, 3, 0, 1, 0, 1, mask=Mask.CAUSAL), (1, 2, 2, 5, 7)
    assert build(source, tmp_path)(sizes, 2, 0) == ""
    one_more = ("query + 1 + p.seq_k - p.seq_q)) / kTileN", "query + 2 + p.seq_k - p.seq_q)) / kTileN")
    (tmp_path / "wrong").mkdir()
    assert "hidden pairs are not masked" in build(source, tmp_path / "wrong", one_more)(sizes, 2, 0)
