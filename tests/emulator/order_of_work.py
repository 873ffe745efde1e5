"""The order of the work of a rendered Hopper kernel, as g++ compiles it: which piece is which tile of which head."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import gxx
from cpu_kernel import Params, full_params

from attnforge.codegen.render import Source
from attnforge.runtime.search.case import Case

ROUNDS = re.compile(r"^__device__ __forceinline__ int (?:count_work|work_index)\(.*?^}\n", re.M | re.S)
CALLS = """
extern "C" void places(const Params* p, unsigned blocks, int pieces, int (*found)[3]) {
    gridDim.x = blocks;
    for (int i = 0; i < pieces; ++i) {
        const Place place = place_of(*p, i);
        found[i][0] = place.rank, found[i][1] = place.head, found[i][2] = place.batch;
    }
}
"""
TURN = """
extern "C" int turn(const Params* p, unsigned block, unsigned blocks, int round) {
    blockIdx.x = block, gridDim.x = blocks;
    return work_index(*p, round);
}
"""

KEPT = ("Specialisation", "Mask", "Order of", "Work", "Semaphores")
ADDITIONS = """
extern "C" int additions(const Params* p, int block, int (*found)[3]) {
    const Work work = work_of(*p, block);
    int count = 0;
    for (int head = 0; head < work.heads; ++head) {
        for (int i = 0; i < work.visits; ++i, ++count) {
            found[count][0] = static_cast<int>(first_plane(*p, work)) + head;
            found[count][1] = visit_of(*p, work, i) >> 1;
            found[count][2] = dq_order(*p, work, i);
        }
    }
    TO_DKV
    return count;
}
"""
TO_DKV = """
    found[count][0] = work.batch * p->heads_kv + work.head_kv;
    found[count][1] = -1 - work.tile;
    found[count++][2] = dkv_order(*p, work) / (4 * kConsumers);
"""


class Additions:
    """Of a deterministic kernel without lists: the sums that each block adds to, and how many blocks add before it."""

    def __init__(self, source: Source, directory: Path) -> None:
        # Sections hold as many heads as the tuning says at least.
        text = re.sub(r"(kCacheBytes = )[^;]*;", r"\g<1>0;", full_params(source.text))
        head, *sections = re.split(r"(?=^// ---- )", text, flags=re.MULTILINE)
        kept = (part for part in sections if part.startswith(tuple(f"// ---- {name}" for name in KEPT)))
        self.splits_heads = source.plan.dkv_accum
        calls = ADDITIONS.replace("TO_DKV", TO_DKV if self.splits_heads else "")
        text = f'#include "cuda_words.h"\n{head}{"".join(kept)}{calls}'
        path = directory / f"{source.spec.slug}_additions.cpp"
        path.write_text(re.sub(r"asm volatile\(.*\);", "", text))
        self.library = gxx.library(path, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{gxx.HERE}")
        self.tile_m, self.tile_n = source.spec.tuning.tile_m, source.spec.tuning.tile_n

    def of(self, batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_k: int) -> list[list[list[int]]]:
        """(plane, tile, blocks before) by block: a query tile of a q head or, as -1 - tile, a key tile of a kv head."""
        p = Params()
        p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k = batch, heads_q, heads_kv, seq_q, seq_k
        p.set_tiles(self.tile_m, self.tile_n)
        found = (ctypes.c_int * 3 * (p.tiles_m * heads_q + 1))()
        blocks = p.tiles_n * batch * (heads_q if self.splits_heads else heads_kv)
        return [
            [list(each) for each in found[: self.library.additions(ctypes.byref(p), block, found)]]
            for block in range(blocks)
        ]


class WorkOrder:
    """`place_of` of a kernel, and `work_index` where it has that."""

    def __init__(self, source: Source, directory: Path) -> None:
        head, *sections = re.split(r"(?=^// ---- )", full_params(source.text), flags=re.MULTILINE)
        kept = [part for part in sections if part.startswith(("// ---- Specialisation", "// ---- Order of"))]
        rounds = "".join(ROUNDS.findall(full_params(source.text)))
        text = (
            '#include "cuda_words.h"\nstatic struct { unsigned x; } blockIdx, gridDim;\n'
            + head
            + "".join(kept)
        )
        text += CALLS + (rounds + TURN if "work_index" in rounds else "")
        path = directory / f"{source.spec.slug}.cpp"
        path.write_text(text)
        flags = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{gxx.HERE}")
        self.library = gxx.library(path, *flags)
        self.forward = source.plan.owner == "m"
        self.tile_m, self.tile_n = source.spec.tuning.tile_m, source.spec.tuning.tile_n
        self.cut = source.plan.cut_lists
        self.per_kv_head = not self.forward and not getattr(source.spec.tuning, "split_heads", True)

    def params(self, case: Case) -> Params:
        """The sizes of the case and its tiles."""
        p = Params()
        p.batch, p.heads_q, p.heads_kv = case.batch, case.heads_q, case.heads_kv
        p.seq_q, p.seq_k = case.seq_q, case.seq_k
        p.set_tiles(self.tile_m, self.tile_n)
        return p

    def ranks(self, case: Case) -> int:
        """Pieces of work of a head."""
        p = self.params(case)
        return int(p.tiles_m if self.forward else p.blocks_n if self.cut else p.tiles_n)

    def places(self, case: Case, blocks: int = 132) -> list[tuple[int, int, int]]:
        """(rank, head, batch) of each piece of work of a grid of so many blocks, or fewer."""
        p = self.params(case)
        pieces = self.ranks(case) * (p.heads_kv if self.per_kv_head else p.heads_q) * p.batch
        found = (ctypes.c_int * 3 * pieces)()
        self.library.places(ctypes.byref(p), min(blocks, pieces), pieces, found)
        return [(rank, head, batch) for rank, head, batch in found]

    def rounds(self, case: Case, block: int, blocks: int) -> list[int]:
        """What block `block` of `blocks` works on, in turn."""
        p, taken = self.params(case), list[int]()
        while (index := self.library.turn(ctypes.byref(p), block, blocks, len(taken))) >= 0:
            taken.append(index)
        return taken
