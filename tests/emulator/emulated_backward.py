"""Run a Hopper 16-bit backward on the CPU: hopper_values.cpp in place of its PTX functions."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cpu_kernel import Params, set_score_gradients
from emulated_schedule import EmulatedSchedule
from hopper_kernel import call_params, compiled, tensor_maps, translate
from oracle import Shape, draw, make_mask, visible
from score_oracle import Function, learned_oracle, oracle
from torch import Tensor

import attnforge
from attnforge.codegen.render import render
from attnforge.codegen.spec import Spec
from attnforge.runtime.masks import AnyMask, FunctionMask

LIMIT = 5e-3  # of the rms error, as a share of the gradients' own
TOGETHER = 3  # clusters that run at a time, so that they add to the same dQ in random order unless they wait
RUN_ROWS = """
extern "C" void run_KERNEL(const Params* p, int count) {
    const auto call = [](const void* p) { SYMBOL_KERNEL(*static_cast<const Params*>(p)); };
    run_grid(call, p, count, 1, 1, 256, 16);
}
"""


class EmulatedBackward:
    """A variant, compiled for the CPU."""

    def __init__(self, spec: Spec, directory: Path, breaks: dict[str, str] | None = None) -> None:
        source = render(spec)
        self.plan = source.plan
        self.launches = {x.symbol.removeprefix(spec.symbol).lstrip("_"): x for x in self.plan.launches}
        self.main = self.launches.pop("")
        together = TOGETHER if self.plan.deterministic or self.main.persistent else 1
        narrow = self.plan.template == "sm90a/backward.cu.jinja"
        text = translate(source, breaks or {}, together, by_warpgroup=narrow)
        rows = RUN_ROWS.replace("SYMBOL", spec.symbol)
        text += "".join(rows.replace("KERNEL", name) for name in self.launches)
        self.library = compiled(text, directory)
        self.schedule = EmulatedSchedule(spec, directory) if narrow and self.plan.schedule else None
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
        captured = (*self.score_tensors, *(mask.tensors if isinstance(mask, FunctionMask) else ()))
        p = call_params(self.plan.spec, tensors, captured)
        bins = set_score_gradients(p, self.plan, self.score_tensors, self.score_gradients)
        lists = {}
        if self.schedule is not None:
            lists = self.schedule.attach(p, mask)
        elif isinstance(mask, attnforge.Spans | FunctionMask):
            lists = list_tiles(mask, p, self.plan.spec.tuning.tile_n)
        p.lse = lse.data_ptr()
        memory = self._memory(p)
        sums = memory[0]
        self.library.prepare(seed, change, ctypes.c_void_p(sums.data_ptr()), ctypes.c_long(len(sums)))
        blocks = {name: math.prod(getattr(p, x) for x in it.grid) for name, it in self.launches.items()}
        self.library.run_preprocess(ctypes.byref(p), blocks.pop("preprocess"))
        maps, first = tensor_maps(self.plan.tensor_maps, tensors)
        clusters = math.prod(getattr(p, name) for name in self.main.grid)
        clusters = min(clusters, TOGETHER) if self.main.persistent else clusters
        sizes = clusters, self.main.per_tile, self.main.threads, self.main.shared_bytes
        said = self.library.run_main(ctypes.byref(p), ctypes.c_void_p(first), *sizes).decode()
        for name, count in blocks.items():
            if not said:
                getattr(self.library, f"run_{name}")(ctypes.byref(p), count)
        del lists, maps, bins, memory
        return said, list(grads.values())

    def _memory(self, p: Params) -> list[Tensor]:
        """Points `p` to memory for sums, row_stats, semaphores and the counter of work tiles; returns what holds it.

        First the sums of dQ and, behind them, of dK and dV.
        """
        problem, tuning = self.plan.spec.problem, self.plan.spec.tuning
        columns = self.plan.columns or problem.head_dim  # of a row of dQ and dK, and of dV
        columns_v = self.plan.columns_v or problem.head_dim_v
        rows = p.batch * p.heads_q * p.padded_q
        of_dkv = p.batch * p.heads_kv * p.padded_k * (columns + columns_v) if self.plan.dkv_accum else 0
        lengths = rows * columns + of_dkv, rows * self.plan.row_stats
        sums, row_stats = (torch.full((length,), math.nan) for length in lengths)
        p.dq_accum, p.delta = sums.data_ptr(), row_stats.data_ptr()
        p.dkv_accum = p.dq_accum + rows * columns * 4 if of_dkv else None
        tiles = rows // tuning.tile_m + p.batch * p.heads_kv * p.tiles_n  # of dQ, and of dK and dV
        semaphores, counter = (torch.full((length,), -1, dtype=torch.int32) for length in (tiles, 2))
        p.dq_semaphore = semaphores.data_ptr()
        p.tile_counter = p.tile_counter or counter.data_ptr()  # a schedule may have one
        return [sums, row_stats, semaphores, counter]

    def failure(
        self,
        shape: Shape,
        seed: int,
        change: int = 0,
        formula: Function = lambda s, *at: s,
        learned: Sequence[Tensor] = (),
        mask: AnyMask = None,
    ) -> str:
        """What is wrong with the gradients of a call, or why there are none.

        `formula`: that of the score, in torch; of tensors whose gradients are computed, too, if `learned` has them.
        `mask`: in place of a random one.
        """
        problem = self.plan.spec.problem
        sizes = replace(shape, head_dim=problem.head_dim, dim_v=problem.head_dim_v)
        x = draw(sizes, torch.bfloat16, "cpu", "slice", seed)  # NaN follows each row
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        mask = mask or make_mask(problem.mask.value, shape.seq_q, shape.seq_k, "cpu", seed)
        seen = mask
        if isinstance(mask, FunctionMask):
            heads, batch = shape.heads_kv * shape.group, shape.batch
            seen = attnforge.DenseMask(visible(mask, shape.seq_q, shape.seq_k, "cpu", heads, batch))
        values = [t.detach().double() for t in learned]
        out, lse, *exact = oracle(q, k, v, seen, lambda *at: formula(*at, *values), x.dout)
        if learned:
            exact = learned_oracle(q, k, v, seen, formula, list(learned), x.dout, out.to(q.dtype))
        tensors = {"q": q, "k": k, "v": v, "out": out.to(q.dtype), "dout": x.dout}
        lse = lse.float().contiguous()
        said, grads = self.backward(tensors, lse, mask, seed, change)
        if not said and self.plan.deterministic:
            grads += self.score_gradients.values()
            said, again = self.backward(tensors, lse, mask, seed + 1, change)
            again += self.score_gradients.values()
            if not said and not all(map(torch.equal, grads, again)):
                said = "other bits in another order of the warps"
        grads = [*grads[:3], *self.score_gradients.values()]
        names = ("dq", "dk", "dv", *(f"gradient of t{i}" for i in self.score_gradients))
        for name, got, expected in zip(names, grads, exact, strict=True):
            error, size = (x.pow(2).mean().sqrt().item() for x in (got - expected, expected))
            error = error / size if size else error
            if not said and not error <= LIMIT:  # NaN, too
                said = f"{name}: rms error {error:.3g}"
        return said


def list_tiles(mask: attnforge.Spans | FunctionMask, p: Params, tile_n: int) -> dict[str, Tensor]:
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
    return {"tile_count": counts, "tile_order": orders, "tile_list": lists, "dq_order": ranks}


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
