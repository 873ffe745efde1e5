"""Run the schedule kernels of any GPU variant on the CPU: their own text, on the fibers of emulator.h."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from pathlib import Path

import gxx
import torch
from cpu_kernel import Params, ScoreRef
from emulator import FLAGS, PARTS
from torch import Tensor

from attnforge.codegen.params import struct
from attnforge.codegen.render import render
from attnforge.codegen.spec import Mask, Spec
from attnforge.runtime.masks import AnyMask, DenseMask, FunctionMask, Spans

SENTINEL = -7  # what memory holds that nothing has written


def schedule_text(spec: Spec) -> str:
    """The sections of a kernel's source that its schedule is made of, for g++."""
    source = render(spec)
    titles = re.compile(r"^// ---- (Mask|Tile schedule).*?(?=^// ---- |\Z)", re.MULTILINE | re.DOTALL)
    sections = "".join(match.group() for match in titles.finditer(source.text))
    sizes = {"kTileM": spec.tuning.tile_m, "kTileN": spec.tuning.tile_n}
    if source.plan.row_groups > 1:
        sizes["kRowGroups"] = source.plan.row_groups
    # apply_mask stands in the same section; it is compiled and not called.
    sizes |= {name: 1 for name in ("kFragsM", "kFragsN") if f"[{name}]" in sections}
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in sizes.items())
    runs = "".join(
        f'extern "C" void run_{item.symbol}(const Params* p, long long blocks) '
        f"{{ launch([=] {{ {item.symbol}(*p); }}, blocks, {item.threads}, 0); }}\n"
        for item in source.plan.schedule
    )
    return '#include "emulator.h"\n' + struct() + constants + sections.replace("#pragma unroll", "//") + runs


class EmulatedSchedule:
    """The schedule kernels of a variant, compiled for the CPU."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        self.spec, self.plan = spec, render(spec).plan
        path = directory / f"{spec.slug}.cpp"
        path.write_text(schedule_text(spec))
        self.library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS, header="emulator.h")

    def attach(self, p: Params, mask: AnyMask) -> dict[str, Tensor]:
        """Points `p`, which has the sizes of a call, to a mask and to its tables; returns what holds these."""
        problem, sizes = self.spec.problem, (p.seq_q, p.seq_k)
        p.list_stride = p.tiles_m if self.plan.owner == "n" else p.tiles_n
        if isinstance(mask, FunctionMask):
            reads = problem.mask_mod.reads
            p.mask_batches, p.mask_heads = p.batch if reads("b") else 1, p.heads_q if reads("h") else 1
            planes = p.mask_batches, p.mask_heads
            p.bit_slots = math.prod(planes) * p.tiles_m * p.tiles_n
            tables = self.run(torch.empty(0), None, *sizes, mask.tensors, planes=planes)
        elif isinstance(mask, DenseMask):
            p.mask_bits, p.mask_words = mask.data.data_ptr(), mask.data.shape[3]
            p.bits_row = -(-(p.padded_k if self.plan.bits == "k" else p.padded_q) // 32)
            tables = self.run(mask.data, None, *sizes)
        elif problem.unions:
            assert isinstance(mask, Spans)
            p.spans = mask.data.data_ptr()
            p.mask_batches, p.mask_heads = mask.data.shape[:2]
            tables = self.run(mask.data, None, *sizes, heads=(p.heads_q, p.heads_kv))
        else:
            assert isinstance(mask, Spans)
            p.starts, p.ends = mask.data[0].data_ptr(), mask.data[-1].data_ptr()
            tables = self.run(mask.data[0], mask.data[-1], *sizes)
        p.mask_planes = p.mask_batches * p.mask_heads
        if self.plan.cut_lists and self.plan.owner == "m":
            p.blocks_m = len(tables["tile_order"]) // p.mask_planes
        for name, table in tables.items():
            setattr(p, name, table.data_ptr())
        return tables

    def run(
        self,
        mask: Tensor,
        ends: Tensor | None,
        seq_q: int,
        seq_k: int,
        captured: Sequence[Tensor] = (),
        *,
        planes: tuple[int, int] = (1, 1),
        heads: tuple[int, int] | None = None,
        bit_slots: int = 1 << 20,
    ) -> dict[str, Tensor]:
        """The int32 tables of runtime/native/schedules.h for starts and ends (seq_k), or a mask of pairs.

        Pairs are bool (seq_q, seq_k) or (batch, heads, seq_q, seq_k) of any strides, or the int32 data of a DenseMask.
        For unions of intervals `mask` is their data (batch, heads, intervals, 2, seq_k), and tables begin with an axis
        of planes; `heads` are those of q and of k, if these are not as many. A function needs no mask, but the tensors
        that it captures; it may have `planes` (batch, heads), of which tables have a row for each owned tile. There is
        memory for the bits of `bit_slots` visits at most.
        """
        p, tuning = Params(), self.spec.tuning
        p.batch = p.heads_q = p.heads_kv = p.mask_batches = p.mask_heads = p.mask_planes = 1
        if self.spec.problem.unions:
            p.batch = p.mask_batches = mask.shape[0]
            p.mask_heads, p.mask_planes = mask.shape[1], mask.shape[0] * mask.shape[1]
            p.heads_q, p.heads_kv = heads or (p.mask_heads, p.mask_heads)
        p.seq_q, p.seq_k = seq_q, seq_k
        p.set_tiles(tuning.tile_m, tuning.tile_n)
        p.padded_q, p.padded_k = p.tiles_m * tuning.tile_m, p.tiles_n * tuning.tile_n
        p.list_stride, owned = p.tiles_n, p.tiles_m
        if self.plan.owner == "n":
            p.list_stride, owned = owned, p.list_stride
        if self.spec.problem.mask_mod:
            p.batch, p.heads_q = p.mask_batches, p.mask_heads = planes
            p.mask_planes, p.heads_kv = p.batch * p.heads_q, p.heads_q
            for i, x in enumerate(captured):
                setattr(p, f"score{i}", ScoreRef.of(x))
        elif self.spec.problem.mask is Mask.DENSE:
            mask = mask if mask.dim() == 4 else mask[None, None]
            p.batch, p.heads_q = p.mask_batches, p.mask_heads = mask.shape[:2]
            p.mask_planes, p.heads_kv = p.batch * p.heads_q, p.heads_q
            if mask.dtype == torch.bool:
                p.dense.data = mask.data_ptr()
                p.dense.batch, p.dense.head, p.dense.row, p.dense.col = mask.stride()
            else:
                p.mask_bits, p.mask_words = mask.data_ptr(), mask.shape[3]
            p.bits_row = -(-(p.padded_k if self.plan.bits == "k" else p.padded_q) // 32)
        elif self.spec.problem.unions:
            p.spans = mask.data_ptr()
        else:
            assert ends is not None
            p.starts, p.ends = mask.data_ptr(), ends.data_ptr()
        shapes: dict[str, tuple[int, ...]] = {
            "tile_count": (owned,),
            "tile_order": (owned,),
            "tile_list": (owned, p.list_stride),
            "dq_order": (owned, p.list_stride),
            "kv_range": (p.tiles_m, 4, 2),
            "bounds": (p.padded_k, 2),
            "tile_counter": (2,),
            "bits": (p.padded_q if self.plan.bits == "k" else p.padded_k, max(1, p.bits_row)),
        }
        if self.plan.slot_words:
            p.bit_slots = min(bit_slots, p.mask_planes * owned * p.list_stride)
            shapes |= {
                "visit_slots": (owned, p.list_stride),
                "slot_visits": (p.bit_slots, 2),
                "slots_taken": (1,),
                "visit_bits": (p.bit_slots, self.plan.slot_words),
            }
        if self.plan.cut_lists and self.plan.owner == "m":
            shapes |= {"tile_order": (p.blocks_m, 4), "tile_slots": (p.tiles_m, 2)}
        elif self.plan.cut_lists:
            shapes |= {"tile_order": (p.blocks_n, 3), "tile_pieces": (p.tiles_n,)}
        if self.spec.problem.unions:
            shapes["bounds"] = (p.tiles_n, self.spec.problem.intervals, tuning.tile_n, 2)
            shapes = {
                name: shape if name == "tile_counter" else (p.mask_planes, *shape)
                for name, shape in shapes.items()
            }
        elif p.mask_planes > 1:
            shared = ("slot_visits", "slots_taken", "visit_bits", "tile_counter")
            shapes = {
                name: shape if name in shared else (p.mask_planes * shape[0], *shape[1:])
                for name, shape in shapes.items()
            }
        tables = {name: torch.full(shape, SENTINEL, dtype=torch.int32) for name, shape in shapes.items()}
        for name, table in tables.items():
            setattr(p, name, table.data_ptr())
        for launch in self.plan.schedule:
            run = getattr(self.library, f"run_{launch.symbol}")
            run.argtypes = (ctypes.c_void_p, ctypes.c_longlong)
            run(ctypes.byref(p), math.prod(getattr(p, name) for name in launch.grid))
        return tables
