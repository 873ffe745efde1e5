"""Run Hopper's 16-bit forwards on the CPU: hopper_values.cpp in place of their PTX."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path

import torch
from cpu_kernel import Params
from emulated_schedule import EmulatedSchedule
from hopper_kernel import call_params, compiled, tensor_maps, translate
from oracle import Shape, draw, make_mask, visible
from score_oracle import Function, oracle
from torch import Tensor

import attnforge
from attnforge.codegen.render import render
from attnforge.codegen.spec import Spec
from attnforge.runtime.masks import AnyMask, FunctionMask

LIMIT = 5e-3  # of the rms error of out, as a share of out itself: bfloat16 of P and of out
LSE_LIMIT = 1e-5  # of the largest, or of 1
BLOCKS = 3  # persistent ones, which run at the same time


class EmulatedForward:
    """A variant, compiled for the CPU."""

    def __init__(self, spec: Spec, directory: Path, breaks: dict[str, str] | None = None) -> None:
        source = render(spec)
        self.plan = source.plan
        self.persistent = self.plan.launches[0].persistent
        main = self.plan.template == "sm90a/forward.cu.jinja"
        text = translate(source, breaks or {}, BLOCKS if self.persistent else 1, by_warpgroup=main)
        self.library = compiled(text, directory)
        self.schedule = EmulatedSchedule(spec, directory) if self.plan.schedule else None
        self.score_tensors: tuple[Tensor, ...] = ()  # that the score reads
        self.splits = 1, 1  # of the keys, and blocks of a cluster, of a kernel that splits them

    def forward(
        self, tensors: dict[str, Tensor], mask: AnyMask, seed: int = 0, change: int = 0
    ) -> tuple[str, Tensor, Tensor]:
        """What went wrong ("" if nothing), out and lse. `tensors`: q, k and v, bf16, B H S D."""
        lse = torch.full(tensors["q"].shape[:3], math.nan)
        out = tensors["q"].new_full((*tensors["q"].shape[:3], tensors["v"].shape[3]), math.nan)
        tensors = tensors | {"out": out}
        captured = (*self.score_tensors, *(mask.tensors if isinstance(mask, FunctionMask) else ()))
        p = call_params(self.plan.spec, tensors, captured)
        tuning, launch = self.plan.spec.tuning, self.plan.launches[0]
        p.lse = lse.data_ptr()
        tables = self.schedule.attach(p, mask) if self.schedule else {}
        tables |= self._split_keys(p) | self._cut_lists(p)
        maps, first = tensor_maps(self.plan.tensor_maps, tensors)
        results = tables.get("out_accum")
        size = 0 if results is None else results.numel()
        self.library.prepare(seed, change, ctypes.c_void_p(p.out_accum), ctypes.c_long(size))
        size = p.cluster_size if launch.clustered else 2 if launch.paired else launch.per_tile
        clusters = math.prod(getattr(p, name) for name in launch.grid if name != "cluster_size")
        clusters = (clusters + 1) // 2 if launch.paired else clusters
        clusters = min(clusters, BLOCKS) if self.persistent else clusters
        sizes = clusters, size, launch.threads, launch.shared_bytes
        said = self.library.run_main(ctypes.byref(p), ctypes.c_void_p(first), *sizes).decode()
        if len(self.plan.launches) > 1 and not said:
            combine = self.plan.launches[1]
            if blocks := math.prod(getattr(p, name) for name in combine.grid):
                self.library.run_combine(ctypes.byref(p), blocks, combine.threads)
        if not said and getattr(tuning, "dynamic", False) and tables["tile_counter"].any():
            said = "the counter of the dynamic scheduler is not zero"
        del tables, maps
        return said, tensors["out"], lse

    def failure(
        self,
        shape: Shape,
        seed: int,
        change: int = 0,
        mask: AnyMask = None,
        sharpness: float = 1,
        formula: Function = lambda score, *at: score,
    ) -> str:
        """What is wrong with the results of a call, or why there are none.

        `mask`: in place of a random one. `sharpness`: of the softmax, whose row maxima then grow in later visits, too.
        `formula`: that of the score, in torch.
        """
        problem = self.plan.spec.problem
        shape = replace(shape, head_dim=problem.head_dim, dim_v=problem.dim_v)
        x = draw(shape, torch.bfloat16, "cpu", "slice", seed)
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()  # NaN follows each row
        q *= sharpness
        mask = mask or make_mask(problem.mask.value, shape.seq_q, shape.seq_k, "cpu", seed)
        said, out, lse = self.forward({"q": q, "k": k, "v": v}, mask, seed, change)
        if said:
            return said
        if isinstance(mask, FunctionMask):
            heads, batch = shape.heads_kv * shape.group, shape.batch
            mask = attnforge.DenseMask(visible(mask, shape.seq_q, shape.seq_k, "cpu", heads, batch))
        exact, exact_lse, *_ = oracle(q, k, v, mask, formula, x.dout)
        seen = exact_lse > -math.inf
        if out.isnan().any() or lse.isnan().any():
            return "NaN"
        if not torch.equal(lse > -math.inf, seen) or out[~seen].any():
            return "other rows see nothing, or their out is not 0"
        error, size = (
            (ours - other).pow(2).mean().sqrt().item() for ours, other in ((out, exact), (exact, 0))
        )
        if error > LIMIT * size:
            return f"out: rms error {error:.3g} of {size:.3g}"
        error, size = (
            (x[seen].abs().max().item() if seen.any() else 0) for x in (lse - exact_lse, exact_lse)
        )
        if error > LSE_LIMIT * max(size, 1):
            return f"lse: error {error:.3g} of {size:.3g}"
        return ""

    def _split_keys(self, p: Params) -> dict[str, Tensor]:
        """As runtime/native/arguments.h, into `self.splits`; returns the memory of results."""
        if not self.plan.split_blocks:
            return {}
        p.set_splits(*self.splits, self.plan.spec.tuning.tile_m)
        results = torch.full(
            (p.kv_splits * p.batch * p.heads_q * p.seq_q * (self.plan.columns_v + 1),), math.nan
        )
        p.out_accum = results.data_ptr()
        return {"out_accum": results}

    def _cut_lists(self, p: Params) -> dict[str, Tensor]:
        """As runtime/native/arguments.h; returns the memory of pieces' results."""
        if not self.plan.cut_lists:
            return {}
        p.piece_slots = 2 * (p.blocks_m - p.tiles_m)
        rows = p.batch * p.heads_q * p.piece_slots * self.plan.spec.tuning.tile_m
        results = torch.full((rows * (self.plan.spec.problem.head_dim_v + 2),), math.nan)
        p.out_accum = results.data_ptr()
        return {"out_accum": results}
