"""Run the source of a GPU kernel of the mma.sync family, or of the Hopper float32 forward, on the CPU.

Its PTX functions are exchanged for C++ ones.
Slow, but exact about indices, masks and edges: what cannot run here for want of a GPU is at least computed once.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import gxx
import torch
from cpu_kernel import Params, ScoreRef, TensorRef, full_params, set_score_gradients
from torch import Tensor

import attnforge
from attnforge.codegen.plan import Launch
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import DType, Spec
from attnforge.runtime.masks import AnyMask, FunctionMask

# Like nvcc, g++ joins products and sums, where the machine has an instruction for it.
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fexpensive-optimizations",  # among them this one
    "-march=native",
    "-ffp-contract=fast",
    "-w",
    "-fPIC",
    "-shared",
    f"-I{gxx.HERE}",
)
PARTS = ("emulator.cpp", "emulator_warp.cpp", "emulator_hopper.cpp")  # of emulator.h
MULTIPROCESSORS = 3
# New bodies of the functions of templates/sm80/ptx.cuh.jinja and of the few beside them that hold PTX.
BODIES = {
    "cp_async_stat": "copy_async(dst, src, 8, 8);",
    "cp_async_commit": "copies_commit();",
    "store_shared": "std::memcpy(shared_at(dst, 16), x, 16);",
    "ldmatrix": "load_matrices(r, address, 4, false);",
    "ldmatrix_transposed": "load_matrices(r, address, 4, true);",
    "ldmatrix_half": "unsigned r[2]; load_matrices(r, address, 2, false); r0 = r[0]; r1 = r[1];",
    "ldmatrix_half_transposed": "unsigned r[2]; load_matrices(r, address, 2, true); r0 = r[0]; r1 = r[1];",
    "mma": "const unsigned b[2] = {b0, b1}; multiply(d, a, b, 16);",
    "mma_half": "const unsigned a[2] = {a0, a1}; multiply(d, a, &b0, 8);",
    "exp2_approx": "return std::exp2(x);",
    "log2_approx": "return std::log2(x);",
    "score_tanh_approx": "return std::tanh(x);",
    "min_or_nan": "return x > y ? y : x;",
    "pack": "return narrow_pair(low, high);",
    "to_float": "return widen(bits);",
}
# Of those of templates/sm80/fp32_ptx.cuh.jinja that share a name with one above.
FP32_BODIES = {
    "ldmatrix": "load_matrices(reinterpret_cast<unsigned*>(x), address, 4, false);",
    "mma": "multiply_tf32(d, a, b);",
}
# Of the functions of templates/sm90a/fp32_ptx.cuh.jinja.
HOPPER_BODIES = {
    "barrier_init": "make_barrier(barrier, count);",
    "barrier_init_fence": "",
    "barrier_arrive": "arrive(barrier, 0);",
    "barrier_expect": "arrive(barrier, bytes);",
    "barrier_wait": "wait_phase(barrier, parity);",
    "bulk_load": "copy_bulk(dst, src, bytes, barrier);",
    "shared_store": "std::memcpy(shared_at(address, 4), &x, 4);",
    "proxy_fence": "",
    "named_sync": "meet(id, threads, true);",
    "named_arrive": "meet(id, threads, false);",
    "wgmma_fence": "",
    "wgmma_commit": "",
    "wgmma_wait": "",
    "accumulator_fence": "",
    "wgmma_scores": "multiply_group(d, a, b, add, false);",
    "wgmma_out": "multiply_group(d, a, b, add, true);",
}
# The same for statements inside functions.
STATEMENTS = {
    r'asm volatile\("cp\.async\.wait_group (\d+);"[^;]*;': r"copies_wait(\1);",
    r'asm volatile\("ld\.acquire[^;]*;"[^;]*;': "added = *semaphore;",
    r'asm volatile\("red\.release[^;]*;"[^;]*;': "++*semaphore;",
    r'asm volatile\("griddepcontrol[^;]*;"[^;]*;': "",
    r'asm volatile\("setmaxnreg[^;]*;"\);': "",
    r'asm volatile\("ld\.shared\.v4\.s32[^;]*;"[^;]*"r"\(([^;]*)\)\);': r"load_bounds(\1, start, end);",
    r"extern __shared__[^;]* float shared\[\];": "float* shared = reinterpret_cast<float*>(shared_memory);",
    r"extern __shared__[^;]*;": "unsigned char* shared = shared_memory;",
    r"max\(kCacheBytes / bytes, (\w+)\)": r"max<long long>(kCacheBytes / bytes, \1)",
}


def translate(source: Source) -> str:
    """C++ that g++ compiles, with a function `run_<symbol>` for each launch."""
    text, align = full_params(source.text), source.spec.problem.align
    bytes_copied = "bytes" if "const void* src, int bytes)" in text else f"valid ? {align} : 0"
    add = "for (size_t i = 0; i < sizeof(x) / 4; ++i) { target[i] += reinterpret_cast<const float*>(&x)[i]; }"
    bodies = BODIES | {"cp_async": f"copy_async(dst, src, {align}, {bytes_copied});", "add_to": add}
    if source.spec.problem.family == "sm90a_fp32":
        bodies |= HOPPER_BODIES
    elif source.spec.problem.dtype is DType.FLOAT32:
        bodies |= FP32_BODIES
    for name, body in bodies.items():
        function = (
            rf"(__device__ __forceinline__ [^\n;{{]*\b{name}\([^;{{]*\) )\{{.*?\}}\n(?=\n|//|__device__|\Z)"
        )
        text = re.sub(function, rf"\1{{ {body} }}\n", text, flags=re.DOTALL)
    for statement, replacement in STATEMENTS.items():
        text = re.sub(statement, replacement, text)
    if "asm" in text:
        raise ValueError(f"{source.spec.slug}: no replacement for {text[text.index('asm') :][:80]!r}")
    text = text.replace("#pragma unroll", "//")
    return '#include "emulator.h"\n' + text + runs((*source.plan.launches, *source.plan.schedule))


def runs(launches: Iterable[Launch]) -> str:
    """C++ functions `run_<symbol>`."""
    return "".join(
        f'extern "C" void run_{item.symbol}(const Params* p, long long blocks, int threads, long long shared) '
        f"{{ launch([=] {{ {item.symbol}(*p); }}, blocks, threads, shared); }}\n"
        for item in launches
    )


class Emulated:
    """A variant of the mma.sync family, compiled for the CPU."""

    def __init__(self, spec: Spec, directory: Path, translate: Callable[[Source], str] = translate) -> None:
        self.spec = spec
        source = render(spec)
        self.plan = source.plan
        path = directory / f"{spec.slug}.cpp"
        path.write_text(translate(source))
        half = f"-DEMULATED_FP16={int(spec.problem.dtype is DType.FLOAT16)}"
        self.library = gxx.library(path, *FLAGS, half, parts=PARTS, header="emulator.h")
        self.held: list[Tensor] = []  # memory that Params point to
        self.scale: float | None = None
        self.ranges = 3  # of keys, if the kernel splits them
        self.score_tensors: tuple[Tensor, ...] = ()
        self.score_gradients: dict[int, Tensor] = {}  # of those that the score wants, after a backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> tuple[Tensor, Tensor]:
        """(out, lse), as the operator."""
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
        lse = torch.full(q.shape[:3], math.nan)
        p = self._params({"q": q, "k": k, "v": v, "out": out}, mask)
        p.lse = lse.data_ptr()
        if self.plan.dkv_accum:
            p.dkv_accum = self._kv_workspace(p)
        if self.plan.split_blocks:
            self._split_keys(p)
        self._run(self.plan.launches, p)
        return out, lse

    def _split_keys(self, p: Params) -> None:
        """As set_kv_splits and out_accum_of of runtime/native/, into `self.ranges` ranges."""
        p.set_splits(self.ranges, 1, self.spec.tuning.tile_m)
        p.out_accum = self._workspace(p.kv_splits * p.batch * p.heads_q * p.seq_q * (self.plan.columns_v + 1))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: AnyMask,
        dlse: Tensor | None = None,
    ) -> list[Tensor]:
        """[dq, dk, dv], as the operator."""
        grads = [torch.full(x.shape, math.nan, dtype=x.dtype) for x in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        p = self._params(tensors | dict(zip(("dq", "dk", "dv"), grads, strict=True)), mask)
        p.lse = lse.data_ptr()
        p.dlse = None if dlse is None else dlse.data_ptr()
        plan, heads = self.plan, p.batch * p.heads_q
        self.held += set_score_gradients(p, plan, self.score_tensors, self.score_gradients)
        p.delta = self._workspace(heads * p.padded_q * 2)
        p.dq_accum = self._workspace(heads * p.padded_q * plan.columns)
        p.dkv_accum = self._kv_workspace(p)
        p.dq_semaphore = self._workspace(heads * p.tiles_m + p.batch * p.heads_kv * p.tiles_n)
        self._run(plan.launches, p)
        return grads

    def _kv_workspace(self, p: Params) -> int:
        return self._workspace(p.batch * p.heads_kv * p.padded_k * (self.plan.columns + self.plan.columns_v))

    def _workspace(self, words: int) -> int:
        self.held.append(torch.full((words,), math.nan))
        return self.held[-1].data_ptr()

    def _params(self, tensors: dict[str, Tensor], mask: AnyMask) -> Params:
        p, tuning = Params(), self.spec.tuning
        for name, x in tensors.items():
            setattr(p, name, TensorRef(x.data_ptr(), *x.stride()[:3]))
        for i, x in enumerate(self.score_tensors):
            setattr(p, f"score{i}", ScoreRef.of(x))
        p.batch, p.heads_q, p.seq_q = tensors["q"].shape[:3]
        p.heads_kv, p.seq_k = tensors["k"].shape[1:3]
        p.set_tiles(tuning.tile_m, tuning.tile_n)
        p.padded_q, p.padded_k = p.tiles_m * tuning.tile_m, p.tiles_n * tuning.tile_n
        p.scale = self.scale or tensors["q"].shape[3] ** -0.5
        p.scale_log2 = p.scale / math.log(2)
        self._set_mask(p, mask)
        return p

    def _set_mask(self, p: Params, mask: AnyMask) -> None:
        """As set_dense of runtime/native/arguments.h and attach_schedule of runtime/native/schedules.h."""
        p.mask_batches = p.mask_heads = p.mask_planes = 1
        if isinstance(mask, attnforge.Spans) and self.spec.problem.unions:
            data = mask.data if mask.data.dim() == 5 else mask.data[None, None, None]
            p.spans = data.data_ptr()
            p.mask_batches, p.mask_heads = mask.planes
            p.mask_planes = p.mask_batches * p.mask_heads
        elif isinstance(mask, attnforge.Spans):
            p.starts, p.ends = (row.data_ptr() for row in mask.data)
        elif isinstance(mask, FunctionMask):
            mod, first = self.spec.problem.mask_mod, len(self.score_tensors)
            p.mask_batches = p.batch if mod.reads("b") else 1
            p.mask_heads = p.heads_q if mod.reads("h") else 1
            p.mask_planes = p.mask_batches * p.mask_heads
            for i, x in enumerate(mask.tensors, first):
                setattr(p, f"score{i}", ScoreRef.of(x))
        elif isinstance(mask, attnforge.DenseMask):
            p.mask_bits = mask.data.data_ptr()
            p.mask_batches, p.mask_heads, _, p.mask_words = mask.data.shape
            p.mask_planes = p.mask_batches * p.mask_heads
        if not self.plan.schedule:
            return
        owned, p.list_stride = p.tiles_m, p.tiles_n
        if self.plan.owner == "n":
            owned, p.list_stride = p.list_stride, owned
        p.bits_row = p.padded_k // 32
        p.bits = self._workspace(p.mask_planes * p.padded_q * p.bits_row)
        p.tile_count, p.tile_order = (self._workspace(p.mask_planes * owned) for _ in range(2))
        p.tile_list, p.dq_order = (self._workspace(p.mask_planes * owned * p.list_stride) for _ in range(2))
        p.kv_range = self._workspace(p.mask_planes * owned * 8)
        p.bounds = self._workspace(p.mask_planes * self.spec.problem.intervals * p.padded_k * 2)
        p.tile_counter = self._workspace(2)
        self._run(self.plan.schedule, p)

    def _run(self, launches: tuple[Launch, ...], p: Params) -> None:
        for launch in launches:
            blocks = math.prod(getattr(p, name) for name in launch.grid)
            blocks = min(blocks, MULTIPROCESSORS) if launch.persistent else blocks
            run = getattr(self.library, f"run_{launch.symbol}")
            run.argtypes = (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_longlong)
            run(ctypes.byref(p), blocks, launch.threads, launch.shared_bytes)
