"""The search of `qk_norm_rope`'s kernels: compile, compare with float64, time, save the winner.

Smaller than attention's (search.py): a kernel takes tenths of a millisecond and is bound by memory, so all variants
are timed at the workload's own size, and the leaders again interleaved.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.prologue import (
    PrologueProblem,
    PrologueSpec,
    candidates,
    render,
    spec_from_slug,
    why_infeasible,
)
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime import kernels, prologue_kernels, tables
from attnforge.runtime.build.atomic import replace_file
from attnforge.runtime.build.cache import obtain
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.prologue import ExpertRows, rope_tables
from attnforge.runtime.search.timing import Timing, effort, measure, measure_interleaved

LEADERS = 6  # timed again, interleaved
CHECKED = 515  # tokens of the workload that results are compared on: an odd number, of both experts
LIMITS = {DType.FLOAT32: 2e-6, DType.BFLOAT16: 4e-3, DType.FLOAT16: 5e-4}  # half a unit in the last place


@dataclass(frozen=True)
class Workload:
    """A pack of two experts: every third run of 64 tokens is the second one's."""

    tokens: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: DType
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {self.heads_q}/{self.heads_kv}/{self.head_dim}, {self.dtype.value}"

    def problem(self, direction: Direction) -> PrologueProblem:
        """As bagel/mot calls it: weights of the heads' dtype, float32 tables."""
        arch = kernels.target(self.device)
        row = math.gcd(16, self.head_dim * self.dtype.bytes)
        return PrologueProblem(direction, arch, self.dtype, self.head_dim, self.dtype, align=row)

    def bytes(self, direction: Direction) -> int:
        """What must be read and written once: projections, results, angles, rows."""
        heads = self.heads_q + 2 * self.heads_kv
        moved = 2 * heads
        if direction is Direction.BACKWARD:  # also q and k of the forward
            moved += self.heads_q + self.heads_kv
        return self.tokens * (moved * self.head_dim * self.dtype.bytes + 4 * self.head_dim + 4)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operators for one workload."""

    sources: list[Tensor]
    weights: list[Tensor]
    cos: Tensor
    sin: Tensor
    rows: Tensor
    dout: tuple[Tensor, Tensor, Tensor]
    heads: tuple[int, int]

    def forward(self, spec: PrologueSpec | None) -> tuple[Tensor, ...]:
        """q, k, v."""
        return prologue_kernels.run_forward(
            self.sources, self.cos, self.sin, self.weights, self.rows, 1, *self.heads, 1e-6, spec
        )

    def backward(self, spec: PrologueSpec | None) -> tuple[Tensor, ...]:
        """Gradients of the sources, then of the weights."""
        sources, weights = prologue_kernels.run_backward(
            *self.dout, self.sources, [len(x) for x in self.sources], self.cos, self.sin, self.weights, self.rows, 1,
            *self.heads, 1e-6, spec,
        )  # fmt: skip
        return (*sources, *weights)

    def run(self, direction: Direction, spec: PrologueSpec | None) -> tuple[Tensor, ...]:
        return self.forward(spec) if direction is Direction.FORWARD else self.backward(spec)

    def exact(self, direction: Direction) -> tuple[Tensor, ...]:
        """The same in float64 torch."""
        leaves = [x.double().requires_grad_() for x in (*self.sources, *self.weights)]
        first, second, *weights = leaves
        back = torch.where(self.rows < 0, len(first) + ~self.rows.long(), self.rows.long())
        whole = torch.cat((first, second))[back]
        of_second = self.rows < 0
        outputs = []
        q, k, v = whole.split((*self.heads, self.heads[1]), 1)
        for kind, x in enumerate((q, k)):
            w = torch.where(of_second[:, None], weights[2 + kind], weights[kind])[:, None]
            n = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
            left, right = n.chunk(2, -1)
            c, s = self.cos.double()[:, None], self.sin.double()[:, None]
            outputs.append(torch.cat((left * c - right * s, right * c + left * s), -1))
        outputs.append(v)
        if direction is Direction.FORWARD:
            return tuple(x.detach() for x in outputs)
        return torch.autograd.grad(outputs, leaves, [x.double() for x in self.dout])


def draw(workload: Workload) -> Inputs:
    """Random inputs."""
    device, w = workload.device, workload
    dtype = kernels.TORCH_DTYPES[w.dtype]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    index = torch.arange(w.tokens, device=device)
    second = index // 64 % 3 == 2
    rows = [index[~second], index[second]]
    total = w.heads_q + 2 * w.heads_kv
    dout = [normal(w.tokens, heads, w.head_dim) for heads in (w.heads_q, w.heads_kv, w.heads_kv)]
    cos, sin = rope_tables(index, w.head_dim, 1e6)
    return Inputs(
        [normal(len(part), total, w.head_dim) for part in rows],
        [1 + 0.2 * normal(w.head_dim) for _ in range(4)],
        cos,
        sin,
        ExpertRows(rows[0], rows[1], w.tokens).rows,
        (dout[0], dout[1], dout[2]),
        (w.heads_q, w.heads_kv),
    )


def error_of(got: Sequence[Tensor], exact: Sequence[Tensor], dtype: DType) -> float:
    """The largest error, as a multiple of the allowed one; inf if an element is NaN.

    Allowed are one rounding of the element, and 1e-5 of the largest element for sums in float32.
    """
    worst = 0.0
    for x, y in zip(got, exact, strict=True):
        allowed = LIMITS[dtype] * y.abs() + 1e-5 * y.abs().max()
        error = (x.double() - y).abs() / allowed.clamp(min=1e-30)
        worst = max(worst, error.max().nan_to_num(torch.inf, posinf=torch.inf).item())  # max would drop NaN
    return worst


@dataclass(frozen=True)
class Result:
    """One variant: "ok", "compile" or "wrong", its time, and the bandwidth that it amounts to."""

    spec: PrologueSpec
    status: str
    detail: str = ""
    timing: Timing | None = None
    bytes: int = 0
    spill_bytes: int = 0

    @property
    def ms(self) -> float:
        return self.timing.median if self.timing else math.inf

    @property
    def gbps(self) -> float:
        """10^9 bytes a second."""
        return self.bytes / self.ms / 1e6


@dataclass(frozen=True)
class Found:
    """The leaders, timed interleaved, fastest first, and what did not work."""

    leaders: tuple[Result, ...]
    failed: tuple[Result, ...]
    tried: int


def search(
    workload: Workload, direction: Direction, variants: int | None = None, workers: int | None = None
) -> Found:
    """Measure all variants, or the first `variants`.

    Raises Infeasible if there is no kernel, NoCompilerError and CacheError.
    """
    specs = list(candidates(workload.problem(direction)))[:variants]
    if not specs:
        raise Infeasible(f"{workload.name}: {why_infeasible(workload.problem(direction))}")
    small, inputs = draw(replace(workload, tokens=CHECKED)), draw(workload)
    exact = small.exact(direction)
    results = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        compiled = [pool.submit(_compile, spec) for spec in specs]
        for spec, future in zip(specs, compiled, strict=True):
            result = future.result()
            if result.status == "ok":
                error = error_of(small.run(direction, spec), exact, workload.dtype)
                result = _timed(result, error, inputs, direction, workload)
            results.append(result)
    leaders = sorted((r for r in results if r.status == "ok"), key=lambda r: r.ms)[:LEADERS]
    calls = {r.spec.slug: _call(inputs, direction, r.spec) for r in leaders}
    timings = measure_interleaved(calls, [()], workload.device, effort(workload.device)) if calls else {}
    again = sorted((replace(r, timing=timings[r.spec.slug]) for r in leaders), key=lambda r: r.ms)
    return Found(tuple(again), tuple(r for r in results if r.status != "ok"), len(results))


def _compile(spec: PrologueSpec) -> Result:
    try:
        entry = obtain(render(spec))
    except CompileError as error:
        return Result(spec, "compile", str(error))
    return Result(spec, "ok", spill_bytes=entry.meta["resources"].get(spec.symbol, {}).get("spill_bytes", 0))


def _timed(result: Result, error: float, inputs: Inputs, direction: Direction, workload: Workload) -> Result:
    if error > 1:
        return replace(result, status="wrong", detail=f"an error is {error:.3g} times the allowed one")
    timing = measure(_call(inputs, direction, result.spec), [()], workload.device)
    return replace(result, timing=timing, bytes=workload.bytes(direction))


def _call(inputs: Inputs, direction: Direction, spec: PrologueSpec) -> Callable[[], Any]:
    return lambda: inputs.run(direction, spec)


def keep(result: Result, workload: Workload, folder: Path) -> Path:
    """Write a winner into `folder`/prologue/<device>.json, in place of that of the same problem. Returns the file."""
    path = tables.table_path(
        tables.device_name(workload.device), tables.writable(folder / prologue_kernels.TUNED)
    )
    entry = {
        "spec": result.spec.slug,
        "ms": round(result.ms, 5),
        "gbps": round(result.gbps, 1),
        "workload": workload.name,
        "torch": torch.__version__,
    }
    with FileLock(path.parent / ".lock", mode=0o644):
        old = json.loads(path.read_text()) if path.exists() else []
        problem = result.spec.problem
        kept = [e for e in old if spec_from_slug(e["spec"]).problem != problem]
        text = json.dumps(sorted([*kept, entry], key=lambda e: e["spec"]), indent=1) + "\n"
        replace_file(path, text)
    prologue_kernels.forget()
    return path
