"""Render, compile and call one CPU kernel through ctypes: what test_cpu_kernels.py measures with."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gxx
import torch
from list_pieces import more_pieces

from attnforge.codegen import params
from attnforge.codegen.plan import Plan
from attnforge.codegen.render import render
from attnforge.codegen.spec import DType, Mask, Spec

TORCH_DTYPE = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}
FLAGS = (
    *("-std=c++14", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    "-Wno-psabi",  # GCC's warning of vectors wider than the CPU's, as the AMX kernels have where AMX is emulated
)


class TensorRef(ctypes.Structure):
    """Mirror of `struct TensorRef`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("batch", "head", "row")),
    )


class MaskRef(ctypes.Structure):
    """Mirror of `struct MaskRef`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("batch", "head", "row", "col")),
    )


class ScoreRef(ctypes.Structure):
    """Mirror of `struct ScoreRef`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_longlong * 4),
        ("size", ctypes.c_int * 4),
    )

    @staticmethod
    def of(x: torch.Tensor) -> ScoreRef:
        """As score_ref of runtime/native/arguments.h."""
        rest = [0] * (4 - x.dim())
        strides = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return ScoreRef(x.data_ptr(), (*strides, *rest), (*x.shape, *(1 for _ in rest)))


CTYPES: dict[str, Any] = {
    "ScoreRef": ScoreRef,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "TensorRef": TensorRef,
    "MaskRef": MaskRef,
}
STRUCTS = re.compile(
    r"(?:// A (?:tensor|bool mask|captured tensor) .*\nstruct \w+ \{\n(?:    .*\n)*\};\n\n)*"
    r"struct Params \{\n(?:    .*\n)*\};"
)


class Params(ctypes.Structure):
    """Mirror of the launcher's `struct Params`, with all members."""

    _fields_ = tuple((f.name, CTYPES.get(f.ctype, ctypes.c_void_p)) for f in params.FIELDS)

    def set_tiles(self, tile_m: int, tile_n: int) -> None:
        """The tiles of seq_q and seq_k, and how many pieces of cut lists there may be, as make_params sets them.

        Reads batch and heads_q, too.
        """
        self.tiles_m, self.tiles_n = -(-self.seq_q // tile_m), -(-self.seq_k // tile_n)
        self.blocks_n = self.tiles_n + more_pieces(self.tiles_n)
        self.blocks_m = self.tiles_m + more_pieces(self.tiles_m, True, max(self.batch * self.heads_q, 1))

    def set_splits(self, kv_splits: int, cluster_size: int, tile_m: int) -> None:
        """So many splits of the keys, as set_kv_splits of runtime/native/launch.h sets them."""
        self.kv_splits, self.cluster_size = kv_splits, cluster_size
        self.tiles_packed = -(-self.seq_q * (self.heads_q // self.heads_kv) // tile_m)
        self.combine_warps = next((warps for warps in (1, 2, 4) if kv_splits <= 4 * warps), 8)
        rows = self.batch * self.heads_q * self.seq_q
        self.combine_blocks = 0 if kv_splits == 1 else -(-rows * self.combine_warps // 8)

    def packed(self, names: tuple[str, ...]) -> ctypes.Array[ctypes.c_char]:
        """The argument of a kernel that prints the members `names`."""
        places = (getattr(Params, name) for name in names)
        return ctypes.create_string_buffer(
            b"".join(bytes(self)[x.offset : x.offset + x.size] for x in places)
        )


def full_params(text: str) -> str:
    """A kernel's text with all members of Params, as the mirror has them and harnesses use them."""
    whole, count = STRUCTS.subn(lambda _: params.struct(), text)
    assert count == 1
    return whole


def set_score_gradients(
    p: Params, plan: Plan, tensors: Sequence[torch.Tensor], gradients: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Sets where `p` sums gradients of a score's tensors, as runtime/native/, each new in `gradients`; returns bins."""
    score, found = plan.spec.problem.score, []
    sizes = {"b": p.batch, "h": p.heads_q, "q": p.seq_q, "k": p.seq_k}
    for i in score.wanted:
        gradients[i] = torch.zeros(tensors[i].shape)
        setattr(p, f"dscore{i}", ScoreRef.of(gradients[i]))
        axes = dict(zip(score.axes[i], tensors[i].shape, strict=False))
        of_pair = {"q", "k"} <= axes.keys() and all(size <= axes.get(name, 1) for name, size in sizes.items())
        if plan.score_bins and not of_pair:
            found.append(torch.zeros(tensors[i].numel(), params.SCORE_WORDS, dtype=torch.int64))
            setattr(p, f"score_bins{i}", found[-1].data_ptr())
    return found


@dataclass(frozen=True)
class Inputs:
    """q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), any strides with a unit last one; spans as int32 (Sk)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    starts: torch.Tensor | None = None
    ends: torch.Tensor | None = None


class Kernel:
    """A compiled spec."""

    def __init__(self, spec: Spec, directory: Path, flags: tuple[str, ...] = FLAGS) -> None:
        self.spec = spec
        source = render(spec)
        self.members = source.params
        path = directory / source.file_name
        path.write_text(source.text)
        self.library = gxx.library(path, *flags)

    def forward(self, x: Inputs, threads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """out like q, lse (B, Hq, Sq) fp32."""
        out = torch.empty_like(x.q).fill_(math.nan)
        lse = torch.full(x.q.shape[:3], math.nan)
        self._call(x, {"out": out}, {"lse": lse}, threads)
        return out, lse

    def backward(
        self,
        x: Inputs,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        threads: int = 2,
        dlse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv like q, k, v."""
        grads = {
            f"d{n}": torch.empty_like(t).fill_(math.nan) for n, t in zip("qkv", (x.q, x.k, x.v), strict=True)
        }
        tile_m = self.spec.tuning.tile_m
        padded = -(-x.q.shape[2] // tile_m) * tile_m
        delta = torch.full((*x.q.shape[:2], padded), math.nan)
        dq_accum = torch.full((*delta.shape, x.q.shape[3]), math.nan)
        turns = torch.full((*x.q.shape[:2], padded // tile_m), -1, dtype=torch.int32)
        flat = {"lse": lse, "delta": delta, "dq_accum": dq_accum, "dq_semaphore": turns}
        if dlse is not None:
            flat["dlse"] = dlse
        self._call(x, {"dout": dout, "out": out, **grads}, flat, threads)
        return grads["dq"], grads["dk"], grads["dv"]

    def prepare(
        self, x: Inputs, strided: dict[str, torch.Tensor], flat: dict[str, torch.Tensor], threads: int
    ) -> Params:
        """Params of a call; they point into the tensors given, which the caller keeps alive."""
        p = Params()
        for name, tensor in {"q": x.q, "k": x.k, "v": x.v, **strided}.items():
            setattr(p, name, TensorRef(tensor.data_ptr(), *tensor.stride()[:3]))
        for name, tensor in flat.items():
            setattr(p, name, tensor.data_ptr())
        p.batch, p.heads_q, p.seq_q = x.q.shape[:3]
        p.heads_kv, p.seq_k = x.k.shape[1:3]
        tile_m, tile_n = self.spec.tuning.tile_m, self.spec.tuning.tile_n
        p.tiles_m, p.tiles_n = -(-p.seq_q // tile_m), -(-p.seq_k // tile_n)
        p.padded_q = p.tiles_m * tile_m
        p.threads, p.scale, p.scale_log2 = threads, x.scale, x.scale / math.log(2)
        return p

    def schedule(self, p: Params, x: Inputs) -> list[torch.Tensor]:
        """Fill the tile lists of `p`; returns the tensors that hold them."""
        assert x.starts is not None
        assert x.ends is not None
        owned, other = p.tiles_m, p.tiles_n
        if hasattr(self.spec.tuning, "heads") is False:
            owned, other = other, owned
        p.list_stride = other
        held = [torch.empty(owned, dtype=torch.int32) for _ in range(2)]
        held.append(torch.empty(owned, other, dtype=torch.int32))
        p.starts, p.ends = x.starts.data_ptr(), x.ends.data_ptr()
        held.append(torch.empty_like(held[2]))
        p.tile_count, p.tile_order, p.tile_list, p.dq_order = (t.data_ptr() for t in held)
        getattr(self.library, f"{self.spec.symbol}_schedule")(p.packed(self.members))
        return held

    def _call(
        self, x: Inputs, strided: dict[str, torch.Tensor], flat: dict[str, torch.Tensor], threads: int
    ) -> None:
        p = self.prepare(x, strided, flat, threads)
        held = self.schedule(p, x) if self.spec.problem.mask is Mask.SPANS else []
        getattr(self.library, self.spec.symbol)(p.packed(self.members))
        del held
