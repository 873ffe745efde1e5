"""The barriers of the Hopper backward kernel, run on the CPU in random turns: nothing hangs, every sum gets its parts.

The rendered producers, reducing warps, consumers and kernel run as they are (backward_pipeline.cpp replaces single
instructions, backward_products.h products and backward_results.h scalar work).
"""

from __future__ import annotations

import ctypes
import platform
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gxx
import pytest
from backward_breaks import (
    APART,
    BITS,
    BREAKS,
    BY_TURNS,
    CUT,
    LAGGING,
    ORDERED,
    PLAIN,
    SLOPES,
    TURNED,
    WALKING,
    WALKING_LAGGING,
    WALKING_ORDERED,
    WALKING_PLAIN,
    Break,
)
from cpu_kernel import Params, full_params

from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.render import Source, render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

FLAGS = ("-std=c++17", "-Og", "-w", "-Wno-psabi", "-fPIC", "-shared", f"-I{gxx.HERE}")
REPLACED = ("PTX", "Tile schedule", "Products", "Score", "Softmax", "How results", "Preprocess")
KINDS = {"q": 1, "dout": 2, "k": 3, "v": 4, "dk": 5, "dv": 6}  # enum Kind
FAKE = 1 << 40  # where device memory would be that nothing touches here
# (batch, heads_q, heads_kv, query tiles, key tiles); a key tile visits all query tiles, or some of them.
Sizes = tuple[int, int, int, int, int]
SIZES: list[Sizes] = [
    (1, 1, 1, 1, 1),
    (1, 2, 2, 2, 3),
    (2, 1, 1, 3, 2),
    (1, 7, 1, 1, 2),
    (1, 7, 1, 3, 2),
    (1, 2, 1, 8, 3),
]
SEEDS = 4
MULTIPROCESSORS = (2, 3, 1, 5)  # more than kResident: some blocks start when others have ended
# Work tiles that share blocks: of one visit and of many, heads in groups, more key tiles than query tiles; no queries.
WALKS: list[Sizes] = [*SIZES, (2, 3, 3, 1, 4), (3, 4, 2, 5, 3), (1, 2, 2, 16, 6), (2, 2, 1, 0, 2)]
ASM = {
    r'asm volatile\("setmaxnreg[^;]*;"\);': "",
    r'asm volatile\("" : [^;]*;': "",
    r'asm volatile\("ld.acquire.gpu.global[^;]*;" : "=r"\((\w+)\) : "l"\((\w+)\)[^;]*;': r"\1 = load_acquire(\2);",
    r'asm volatile\("red.release.gpu.global[^;]*;" ::"l"\((\w+)\)[^;]*;': r"add_release(\1);",
}


# What follows the text of a kernel.
RUN = """
static const Params* params;
static const TensorMaps* tensor_maps;
extern "C" const char* run(const Params* p, const TensorMaps* maps, int count, const int* visits, unsigned seed,
                           int change) {
    params = p, tensor_maps = maps, broken = change;
    const Shape shape = {
        .consumers = kConsumers, .tile_m = kTileM, .tile_n = kTileN, .head_dim = kHeadDim,
        .columns = kColumns, .swizzle_bytes = kSwizzleBytes, .panels = kPanels, .tile_bytes_m = kTileBytesM,
        .tile_bytes_n = kTileBytesN,
        .row_stats_bytes = kRowStatsBytes, .ds_bytes = kDsBytes, .ds_row_bytes = kDsRowBytes,
        .dq_columns = kDqColumns, .dq_bytes = kDqBytes,
        .offset_k = kOffsetK, .offset_v = kOffsetV, .offset_row_stats = kOffsetRowStats, .offset_dq = kOffsetDq,
        .shared_bytes = kSharedBytes, .deterministic = DETERMINISTIC,
    };
    const Call call = {
        .batch = p->batch, .heads_q = p->heads_q, .heads_kv = p->heads_kv, .tiles_m = p->tiles_m,
        .tiles_n = p->tiles_n, .seq_k = p->seq_k, .padded_q = p->padded_q, .padded_k = p->padded_k,
        .delta = p->delta, .dq_accum = p->dq_accum, .dkv_accum = p->dkv_accum,
        .tile_counter = p->tile_counter, .tile_pieces = STORES ? p->tile_pieces : nullptr,
        .scale = p->scale, .visits = visits,
    };
    return run_blocks([] { SYMBOL(*params, *tensor_maps); }, shape, call, count, seed);
}
"""

CURVED = "softcap: 30.0 * tanh(score / 30.0)"  # its derivative is not 1


PAIRS = "pairs(t0: int32[2]): t0[q_idx, kv_idx] != 0"


def hopper(head_dim: int, mask: Mask, *knobs: int, score: str = "", mask_mod: str = "", **more: Any) -> Spec:
    stages, stages_dout, lag, in_regs, split, deterministic = knobs
    flags = (bool(split), bool(deterministic))
    tuning = Sm90Backward(64, 128, stages, stages_dout, bool(lag), in_regs, *flags)
    tuning = replace(tuning, **more)
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, score=ScoreMod(score))
    return Spec(replace(problem, mask_mod=MaskMod(mask_mod)), tuning)


def translate(source: Source, breaks: dict[str, Break]) -> str:
    """C++ that g++ compiles, with a function `run`."""
    text = (
        full_params(source.text)
        .replace("#pragma unroll", "//")
        .replace("work_of(p, blockIdx.x)", "work_of(p, block_number())")
        .replace("= blockIdx.x;", "= block_number();")
        .replace(
            " << 20;", " << 10;"
        )  # kCacheBytes: with sizes as small as here, several sections of heads, too
        .replace("work_of(p, index)", "work_of(p, note_work(index))")
    )
    text = re.sub(r"extern __shared__[^;]*;", "unsigned char* shared = nullptr;", text)
    text = text.replace('extern "C" __global__', "static")
    for pattern, call in ASM.items():
        text = re.sub(pattern, call, text)
    text = re.sub(r"^__device__ [^;{]* void find_seen\(.*?^}\n", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = []
    for section in re.split(r"(?=^// ---- )", text, flags=re.MULTILINE):
        title = section.removeprefix("// ---- ")
        if title.startswith("PTX"):
            parts.append('#include "backward_pipeline.h"\n')
        elif not title.startswith(REPLACED):
            parts.append(section)
    text = "".join(parts)
    assert "asm" not in text
    for n, (name, (changes, _)) in enumerate(breaks.items(), 1):
        for old, new in changes.items():
            assert old in text, name
            text = text.replace(old, re.sub(r"\bn\b(?=[ )|])", str(n), new))
    words = {
        "DETERMINISTIC": str(source.plan.dq_semaphore).lower(),
        "STORES": str(bool(getattr(source.spec.tuning, "stores_dkv", 0))).lower(),
        "SYMBOL": source.spec.symbol,
    }
    return text + re.sub("|".join(words), lambda match: words[match[0]], RUN)


def list_visits(mask: Mask, p: Params, seed: int) -> list[list[int]]:
    """By key tile, the query tiles that see it: query tile * 2 + (1 if some pairs are hidden)."""
    if mask.listed:
        draw = random.Random(seed)
        full = draw.random() < 0.5
        return [
            [m * 2 + draw.randint(0, 1) for m in range(p.tiles_m) if full or draw.random() < 0.6]
            for _ in range(p.tiles_n)
        ]
    visits: list[list[int]] = []
    ahead = p.seq_k - p.seq_q if mask is Mask.CAUSAL else p.seq_k
    for n in range(p.tiles_n):
        # The keys that the first, the last query of a tile see.
        keys = [[min(p.seq_k, q + 1 + ahead) for q in (m * 64, m * 64 + 63)] for m in range(p.tiles_m)]
        visits.append(
            [m * 2 + (first < (n + 1) * 128) for m, (first, last) in enumerate(keys) if last > n * 128]
        )
    return visits


def give_slots(visits: list[list[int]], seed: int) -> tuple[list[list[int]], list[int]]:
    """Slots of the visits, -1: none, which some partial ones have; and the bits, see bits_of in backward_results.h."""
    draw, slots, bits = random.Random(seed), list[list[int]](), list[int]()
    for n, entries in enumerate(visits):
        slots.append([])
        for entry in entries:
            has = entry % 2 == 1 and draw.random() < 0.6
            slots[-1].append(len(bits) // 256 if has else -1)
            for group in range(2 * has):
                bits += [(n * 2 + group) << 16 | entry // 2] * 128
    return slots, bits


def number_turns(visits: list[list[int]], starts: list[int]) -> list[list[int]]:
    """By key tile and visit, how many key tiles that start earlier visit the same query tile."""
    turns: list[list[int]] = [[] for _ in visits]
    taken: dict[int, int] = {}
    for n in starts:
        for entry in visits[n]:
            turns[n].append(taken.get(entry // 2, 0))
            taken[entry // 2] = turns[n][-1] + 1
    return turns


def cut(starts: list[int], counts: list[int], blocks: int, seed: int) -> list[list[int]]:
    """Pieces of tiles, at most three each, as in tile_order: tile, first visit, number of visits."""
    draw, pieces = random.Random(seed), []
    for tile in starts:
        ends = [*sorted(draw.choices(range(counts[tile] + 1), k=draw.randint(0, 2))), counts[tile]]
        pieces += [[tile, begin, end - begin] for begin, end in zip([0, *ends], ends, strict=False)]
    return pieces + [[-1, 0, 0]] * (blocks - len(pieces))


def table(*rows: Sequence[int], width: int = 0) -> ctypes.Array[ctypes.c_int]:
    values = [x for row in rows for x in (*row, *[-1] * (width - len(row)))]
    return (ctypes.c_int * len(values))(*values)


class Simulated:
    """A kernel, compiled for the CPU, with breaks of its protocol that can be switched on."""

    def __init__(self, spec: Spec, directory: Path, breaks: dict[str, Break]) -> None:
        source = render(spec)
        self.plan = source.plan
        self.sizes = WALKS if source.plan.tile_counter else SIZES
        path = directory / "kernel.cpp"
        path.write_text(translate(source, breaks))
        self.library = gxx.library(path, *FLAGS, parts=("backward_pipeline.cpp",), for_parts=("-O2",))
        self.library.run.restype = ctypes.c_char_p
        self.words = (ctypes.c_ulonglong * (16 * len(self.plan.tensor_maps) + 8))()
        start = -ctypes.addressof(self.words) % 64 // 8
        for i, box in enumerate(self.plan.tensor_maps):
            first = start + 16 * i
            self.words[first : first + 4] = [KINDS[box.tensor], box.columns, box.rows, box.panels]
        self.maps = ctypes.c_void_p(ctypes.addressof(self.words) + start * 8)

    def run(self, sizes: Sizes, seed: int, change: int = 0) -> str:
        """What was wrong, or nothing; with break number `change`, from 1."""
        p, plan = Params(), self.plan
        p.batch, p.heads_q, p.heads_kv, p.tiles_m, p.tiles_n = sizes
        p.padded_q, p.padded_k, p.list_stride = p.tiles_m * 64, p.tiles_n * 128, p.tiles_m
        p.blocks_n = p.tiles_n * 3
        p.seq_q, p.seq_k, p.scale = max(0, p.padded_q - seed), p.padded_k - seed % 4 * 32, 0.5
        p.delta = p.dq_accum = FAKE
        p.dkv_accum = FAKE if plan.dkv_accum else None
        visits = list_visits(plan.spec.problem.mask, p, seed)
        starts = list(reversed(range(p.tiles_n)))
        if not plan.descending:
            starts.sort(key=lambda n: (-len(visits[n]), n))
        counts = [len(entries) for entries in visits]
        held = {
            "starts": table([0] * p.seq_k),
            "ends": table([0] * p.seq_k),
            "tile_count": table(counts),
            "tile_order": table(starts),
            "tile_list": table(*visits, width=p.tiles_m),
            "dq_order": table(*number_turns(visits, starts), width=p.tiles_m),
            "dq_semaphore": table([0] * (p.batch * (p.heads_q * p.tiles_m + p.heads_kv * p.tiles_n))),
        }
        if plan.cut_lists:
            order = cut(starts, counts, p.blocks_n, seed)
            tiles = [piece[0] for piece in order]
            held |= {
                "tile_order": table(*order),
                "tile_pieces": table([tiles.count(tile) * bool(counts[tile]) for tile in range(p.tiles_n)]),
            }
        if plan.tile_counter:
            held["tile_counter"] = table([99])  # until _preprocess has ended
        if plan.slot_words:
            slots, bits = give_slots(visits, seed)
            held |= {"visit_slots": table(*slots, width=p.tiles_m), "visit_bits": table(bits)}
            p.mask_batches = p.mask_heads = p.mask_planes = 1
        for name, values in held.items():
            setattr(p, name, ctypes.addressof(values))
        blocks = p.blocks_n if plan.cut_lists else p.tiles_n
        count = blocks * p.batch * (p.heads_q if plan.dkv_accum else p.heads_kv)
        if plan.tile_counter:
            count = min(count, MULTIPROCESSORS[seed % len(MULTIPROCESSORS)])
        seen = [{entry // 2: entry for entry in entries} for entries in visits]
        expected = table(*([row.get(m, -1) for m in range(p.tiles_m)] for row in seen))
        return str(self.library.run(ctypes.byref(p), self.maps, count, expected, seed, change).decode())

    def require_sound(self) -> None:
        """Nothing is wrong in any of the runs."""
        for sizes in self.sizes:
            for seed in range(SEEDS):
                assert self.run(sizes, seed) == "", (sizes, seed)


@pytest.mark.parametrize(
    "spec",
    [
        hopper(64, Mask.CAUSAL, 2, 3, 1, 2, 0, 0),
        hopper(72, Mask.FULL, 4, 3, 1, 1, 0, 0),
        hopper(72, Mask.SPANS, 2, 2, 1, 1, 1, 0),
        hopper(128, Mask.CAUSAL, 3, 2, 0, 0, 1, 1),
        hopper(64, Mask.FULL, 3, 3, 1, 2, 0, 1),
        hopper(128, Mask.FULL, 3, 2, 0, 0, 0, 1),
        hopper(128, Mask.CAUSAL, 3, 2, 0, 0, 0, 1),
        hopper(64, Mask.SPANS, 4, 3, 1, 2, 0, 1),
        hopper(128, Mask.CAUSAL, 3, 2, 0, 0, 0, 0),
        hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0),
        hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0, stores_dkv=1),
        hopper(72, Mask.SPANS, 2, 2, 1, 1, 1, 0, stores_dkv=1),
        hopper(64, Mask.DENSE, 4, 3, 1, 2, 1, 0, mask_mod=PAIRS, stores_dkv=1),
        hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0, loaders=2, heads_together=2),
        hopper(64, Mask.CAUSAL, 4, 2, 0, 2, 1, 0, loaders=2, heads_together=3),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, loaders=1, heads_together=2),
        hopper(64, Mask.SPANS, 3, 2, 1, 0, 1, 1, loaders=1, heads_together=16),
        hopper(64, Mask.CAUSAL, 2, 4, 0, 2, 1, 1, loaders=1, heads_together=3),
        hopper(96, Mask.FULL, 4, 1, 0, 1, 0, 1, loaders=1),
        hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0, score=CURVED),
        hopper(64, Mask.CAUSAL, 2, 3, 1, 2, 0, 0, score=CURVED),
        hopper(64, Mask.CAUSAL, 4, 2, 0, 0, 1, 0, score=CURVED),
        hopper(64, Mask.DENSE, 4, 3, 1, 2, 1, 1, mask_mod=PAIRS),
        hopper(128, Mask.DENSE, 3, 2, 0, 0, 1, 0, mask_mod=PAIRS),
        hopper(96, Mask.CAUSAL, 3, 2, 0, 1, 0, 0, persistent=1),
        hopper(96, Mask.FULL, 2, 1, 0, 0, 0, 0, persistent=1),
        hopper(96, Mask.CAUSAL, 3, 2, 0, 1, 0, 1, persistent=1),
        hopper(72, Mask.FULL, 4, 2, 0, 1, 0, 0, persistent=1, loaders=2),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 0, persistent=1),
        hopper(64, Mask.FULL, 2, 2, 1, 1, 0, 0, persistent=1, loaders=1),
        hopper(72, Mask.CAUSAL, 2, 2, 1, 1, 0, 0, persistent=1),
        hopper(72, Mask.FULL, 2, 2, 1, 0, 0, 0, persistent=1),
        hopper(64, Mask.CAUSAL, 3, 2, 1, 0, 0, 0, persistent=1),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, persistent=1),
        hopper(64, Mask.FULL, 4, 3, 1, 2, 0, 1, persistent=1),
        hopper(96, Mask.SPANS, 3, 2, 0, 1, 0, 0, persistent=1, loaders=2),
        hopper(64, Mask.SPANS, 4, 3, 1, 2, 0, 0, persistent=1),
        hopper(72, Mask.SPANS, 4, 3, 0, 1, 0, 1, persistent=1),
        hopper(64, Mask.SPANS, 4, 3, 1, 1, 0, 1, persistent=1),
        hopper(128, Mask.CAUSAL, 3, 2, 0, 0, 0, 1, launch_order=1),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, launch_order=1, heads_together=2),
        hopper(128, Mask.CAUSAL, 2, 2, 0, 0, 0, 1, launch_order=2, heads_together=2),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, launch_order=2),
        hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, launch_order=2, persistent=1),
        hopper(128, Mask.CAUSAL, 3, 2, 0, 0, 1, 1, launch_order=3, heads_together=3),
        hopper(128, Mask.FULL, 3, 2, 0, 0, 1, 1, launch_order=3, heads_together=2),
        hopper(64, Mask.SPANS, 4, 3, 1, 2, 1, 1, launch_order=3, heads_together=2),
        hopper(64, Mask.SPANS, 4, 3, 1, 2, 0, 1, launch_order=4, heads_together=2),
        hopper(128, Mask.SPANS, 2, 2, 0, 0, 1, 1, launch_order=4, heads_together=3),
    ],
    ids=lambda spec: spec.slug,
)
def test_nothing_hangs_and_every_sum_gets_its_parts(spec: Spec, tmp_path: Path) -> None:
    Simulated(spec, tmp_path, {}).require_sound()


@pytest.mark.parametrize(
    ("spec", "breaks"),
    [
        (hopper(64, Mask.SPANS, 4, 4, 1, 2, 1, 0), BREAKS | LAGGING),
        (hopper(64, Mask.SPANS, 4, 4, 1, 2, 1, 1), BREAKS | LAGGING | ORDERED),
        (hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 1), BREAKS | ORDERED | BY_TURNS),
        (hopper(128, Mask.SPANS, 2, 1, 0, 0, 0, 0), BREAKS | PLAIN),
        (hopper(96, Mask.CAUSAL, 3, 2, 0, 1, 0, 0, persistent=1), WALKING | WALKING_PLAIN),
        (hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 0, persistent=1), WALKING | WALKING_LAGGING),
        (hopper(96, Mask.CAUSAL, 3, 2, 0, 1, 0, 1, persistent=1), ORDERED | WALKING_ORDERED),
        (hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0, score=CURVED), SLOPES),
        (hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 0, stores_dkv=1), CUT),
        (hopper(128, Mask.DENSE, 3, 2, 0, 0, 1, 0, mask_mod=PAIRS), BITS),
        (hopper(64, Mask.DENSE, 4, 4, 1, 2, 1, 0, mask_mod=PAIRS), BITS),
        (hopper(64, Mask.CAUSAL, 4, 3, 1, 2, 0, 1, launch_order=1), TURNED),
        (hopper(128, Mask.SPANS, 3, 2, 0, 0, 1, 1, launch_order=3, heads_together=16), APART),
    ],
    ids=[
        "lagging",
        "lagging deterministic",
        "deterministic",
        "plain",
        "persistent",
        "lagging persistent",
        "deterministic persistent",
        "curved score",
        "cut lists",
        "bits",
        "lagging bits",
        "last section turned",
        "heads apart",
    ],
)
def test_a_broken_protocol_is_found(spec: Spec, breaks: dict[str, Break], tmp_path: Path) -> None:
    kernel = Simulated(spec, tmp_path, breaks)
    kernel.require_sound()
    for n, (name, (_, said)) in enumerate(breaks.items(), 1):
        runs = (kernel.run(sizes, seed, n) for seed in range(4 * SEEDS) for sizes in kernel.sizes)
        assert any(said in one for one in runs), name
