"""Run a Hopper backward for wide heads on the CPU: wide.cpp in place of its PTX functions."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gxx
import torch
from cpu_kernel import Params, ScoreRef, TensorRef, full_params, set_score_gradients
from oracle import Shape, draw, make_mask
from score_oracle import Function, learned_oracle, oracle
from torch import Tensor

import attnforge
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import Spec
from attnforge.runtime.masks import AnyMask, FunctionMask

FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-fno-semantic-interposition",  # functions of a shared library may be inlined
    "-w",
    "-fPIC",
    "-shared",
    f"-I{gxx.HERE}",
)
LIMIT = 5e-3  # of the rms error, as a share of the gradients' own
TOGETHER = 3  # clusters that run at a time, so that they add to the same dQ in random order unless they wait
WORDS = 16  # of a tensor map, 64 bits each
# Functions of wide.h without PTX of their own, or templates of which only the asm statement goes.
REPLACED = "accumulator_fence|load_float|load_int|load_pair|load_quad|load_span|pack|shared_address|unpack"
KEPT = ("start_dq", "start_scores")
FUNCTION = r"^__device__ __forceinline__ [^\n;{]*?\b(\w+)\([^;{]*\) \{\n(?:.*\n)*?\}\n"
RUNS = """
struct Arguments { const Params* p; const TensorMaps* maps; };
extern "C" const char* run_main(const Params* p, const TensorMaps* maps, int clusters, int blocks, int shared) {
    const Arguments x = {p, maps};
    const auto call = [](const void* x) {
        const auto* all = static_cast<const Arguments*>(x);
        SYMBOL(*all->p, *all->maps);
    };
    run_grid(call, &x, clusters, blocks, TOGETHER, 384, shared);
    return what_went_wrong();
}
"""
RUN_ROWS = """
extern "C" void run_KERNEL(const Params* p, int count) {
    const auto call = [](const void* p) { SYMBOL_KERNEL(*static_cast<const Params*>(p)); };
    run_grid(call, p, count, 1, 1, 256, 16);
}
"""


def translate(source: Source, breaks: dict[str, str]) -> str:
    """C++ that g++ compiles. `breaks`: statements that are skipped if `broken` is their number, from 1."""
    text = full_params(source.text)
    for number, statement in enumerate(breaks.values(), 1):
        assert statement in text, statement
        text = text.replace(statement, f"if (broken != {number}) {statement}")

    def keep(match: re.Match[str]) -> str:
        gone = "asm" in match[0] and match[1] not in KEPT
        return "" if gone or re.fullmatch(REPLACED, match[1]) else match[0]

    text = re.sub(FUNCTION, keep, text, flags=re.MULTILINE)
    text = re.sub(r"^template <int \w+>\n(?=\n|//|template)", "", text, flags=re.MULTILINE)
    text = re.sub(r'asm volatile\("(setmaxnreg[^;]*;)?"[^;]*;', "", text)
    text = re.sub(r"extern __shared__[^;]*;", "unsigned char* shared = shared_memory;", text)
    text = text.replace("#pragma unroll", "//")
    sections = re.split(r"(?=^// ---- )", text, flags=re.MULTILINE)
    text = "".join(x for x in sections if not x.startswith("// ---- Tile schedule"))
    assert "asm" not in text
    runs = RUNS + "".join(RUN_ROWS.replace("KERNEL", name) for name in ("preprocess", "postprocess"))
    together = TOGETHER if source.plan.deterministic else 1
    runs = runs.replace("TOGETHER", str(together)).replace("SYMBOL", source.spec.symbol)
    return '#include "wide.h"\n' + text + runs


class EmulatedWide:
    """A variant, compiled for the CPU."""

    def __init__(self, spec: Spec, directory: Path, breaks: dict[str, str] | None = None) -> None:
        self.plan = render(spec).plan
        path = directory / "wide.cpp"
        path.write_text(translate(render(spec), breaks or {}))
        self.library = gxx.library(path, *FLAGS, parts=("wide.cpp",), header="wide.h")
        self.library.run_main.restype = ctypes.c_char_p
        self.score_tensors: tuple[Tensor, ...] = ()
        self.score_gradients: dict[int, Tensor] = {}  # of those that the score wants, after a backward

    def backward(
        self,
        tensors: dict[str, Tensor],
        lse: Tensor,
        mask: AnyMask,
        seed: int = 0,
        change: int = 0,
    ) -> tuple[str, list[Tensor]]:
        """What went wrong ("" if nothing), and [dq, dk, dv]. `tensors`: q, k, v, out and dout, bf16, B H S D."""
        grads = {f"d{name}": torch.full_like(tensors[name], math.nan) for name in "qkv"}
        tensors = tensors | grads
        p = Params()
        for name, x in tensors.items():
            setattr(p, name, TensorRef(x.data_ptr(), *x.stride()[:3]))
        p.batch, p.heads_q, p.seq_q, head_dim = tensors["q"].shape
        columns = self.plan.columns  # of a row of sums of dQ
        p.heads_kv, p.seq_k = tensors["k"].shape[1:3]
        tuning = self.plan.spec.tuning
        assert isinstance(tuning, Sm90BackwardWide)
        p.set_tiles(tuning.tile_m, tuning.tile_n)
        p.padded_q = p.tiles_m * tuning.tile_m
        p.scale, p.scale_log2 = head_dim**-0.5, head_dim**-0.5 / math.log(2)
        rows = p.batch * p.heads_q * p.padded_q
        sums = [torch.full((rows * width,), math.nan) for width in (self.plan.row_stats, columns)]
        p.delta, p.dq_accum, p.lse = sums[0].data_ptr(), sums[1].data_ptr(), lse.data_ptr()
        captured = (*self.score_tensors, *(mask.tensors if isinstance(mask, FunctionMask) else ()))
        for i, x in enumerate(captured):
            setattr(p, f"score{i}", ScoreRef.of(x))
        bins = set_score_gradients(p, self.plan, self.score_tensors, self.score_gradients)
        lists = list_tiles(mask, p, tuning.tile_n) if isinstance(mask, attnforge.Spans | FunctionMask) else []
        semaphores = torch.full((rows // tuning.tile_m,), -1, dtype=torch.int32)
        p.dq_semaphore = semaphores.data_ptr()
        dq_accum = ctypes.c_void_p(p.dq_accum)
        self.library.prepare(seed, change, dq_accum, ctypes.c_long(rows * columns))
        self.library.run_preprocess(ctypes.byref(p), rows // tuning.tile_m)
        maps, first = self._maps(tensors)
        sizes = p.tiles_n * p.batch * p.heads_kv, 1 + tuning.pair, self.plan.launches[1].shared_bytes
        said = self.library.run_main(ctypes.byref(p), ctypes.c_void_p(first), *sizes).decode()
        if not said:
            self.library.run_postprocess(ctypes.byref(p), rows // tuning.tile_m)
        del lists, maps, bins
        return said, list(grads.values())

    def failure(
        self,
        shape: Shape,
        seed: int,
        change: int = 0,
        formula: Function = lambda s, *at: s,
        learned: Sequence[Tensor] = (),
        mask: attnforge.Spans | FunctionMask | None = None,
    ) -> str:
        """What is wrong with the gradients of a call, or why there are none.

        `formula`: that of the score, in torch; of tensors whose gradients are computed, too, if `learned` has them.
        `mask`: in place of a random one.
        """
        problem = self.plan.spec.problem
        sizes = replace(shape, head_dim=problem.head_dim, dim_v=problem.head_dim_v)
        x = draw(sizes, torch.bfloat16, "cpu", "slice", seed)  # NaN follows each row
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        visible = mask or make_mask(problem.mask.value, shape.seq_q, shape.seq_k, "cpu", seed)
        values = [t.detach().double() for t in learned]
        out, lse, *exact = oracle(q, k, v, visible, lambda *at: formula(*at, *values), x.dout)
        if learned:
            exact = learned_oracle(q, k, v, visible, formula, list(learned), x.dout, out.to(q.dtype))
        tensors = {"q": q, "k": k, "v": v, "out": out.to(q.dtype), "dout": x.dout}
        lse = lse.float().contiguous()
        said, grads = self.backward(tensors, lse, visible, seed, change)
        if not said and self.plan.deterministic:
            grads += self.score_gradients.values()
            said, again = self.backward(tensors, lse, visible, seed + 1, change)
            again += self.score_gradients.values()
            if not said and not all(map(torch.equal, grads, again)):
                said = "other bits in another order of the warps"
        grads = [*grads[:3], *self.score_gradients.values()]
        names = ("dq", "dk", "dv", *(f"gradient of t{i}" for i in self.score_gradients))
        for name, got, expected in zip(names, grads, exact, strict=True):
            error = ((got - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()
            if not said and not error <= LIMIT:  # NaN, too
                said = f"{name}: rms error {error:.3g}"
        return said

    def _maps(self, tensors: dict[str, Tensor]) -> tuple[ctypes.Array[ctypes.c_longlong], int]:
        """Tensor maps as wide.cpp reads them, and where they begin."""
        boxes = self.plan.tensor_maps
        words = (ctypes.c_longlong * (WORDS * len(boxes) + 8))()
        first = -ctypes.addressof(words) % 64 // 8
        for i, box in enumerate(boxes):
            x = tensors[box.tensor]
            width = box.columns if box.panels > 1 else x.shape[3]
            values = [x.data_ptr(), *x.stride()[:3], x.shape[2], box.columns, box.rows, box.panels, width]
            for place, value in enumerate(values, first + WORDS * i):
                words[place] = value
        return words, ctypes.addressof(words) + first * 8


def list_tiles(mask: attnforge.Spans | FunctionMask, p: Params, tile_n: int) -> list[Tensor]:
    """Sets the schedule of `p`, each visit marked as one of which some pairs are hidden; returns what holds it."""
    batches = {"batch": p.batch} if isinstance(mask, FunctionMask) else {}
    seen = mask.visible(p.seq_q, p.seq_k, **batches).reshape(-1, p.seq_q, p.seq_k)  # by plane
    p.mask_batches, p.mask_heads, p.mask_planes = len(seen), 1, len(seen)
    counts, orders, lists, ranks = (
        torch.cat(x) for x in zip(*(lists_of(plane, p, tile_n) for plane in seen), strict=True)
    )
    p.tile_count, p.tile_order, p.tile_list = counts.data_ptr(), orders.data_ptr(), lists.data_ptr()
    p.list_stride, p.dq_order = p.tiles_m, ranks.data_ptr()
    if isinstance(mask, attnforge.Spans):
        p.spans = mask.data.data_ptr()  # where there are several intervals
        p.starts, p.ends = mask.data[0].data_ptr(), mask.data[-1].data_ptr()
    return [counts, orders, lists, ranks]


def lists_of(seen: Tensor, p: Params, tile_n: int) -> list[Tensor]:
    """Of a plane: how long the lists are, the tiles with the longest first, the lists, the order of additions to dQ."""
    visits = [
        [
            m * 2 + 1
            for m in range(p.tiles_m)
            if seen[m * 64 : m * 64 + 64, n * tile_n : (n + 1) * tile_n].any()
        ]
        for n in range(p.tiles_n)
    ]
    counts = torch.tensor([len(x) for x in visits], dtype=torch.int32)
    lists = torch.tensor([x + [-1] * (p.tiles_m - len(x)) for x in visits], dtype=torch.int32)
    # Deterministic blocks start with the last key tile, and add in this order.
    later = [[sum(m in other for other in visits[n + 1 :]) for m in visits[n]] for n in range(p.tiles_n)]
    ranks = torch.tensor([x + [-1] * (p.tiles_m - len(x)) for x in later], dtype=torch.int32)
    return [counts, counts.argsort(descending=True).int(), lists, ranks]
