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
