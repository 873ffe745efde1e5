"""The operators behind `qk_norm_rope`: choose a kernel, compile and load it, pack its argument, launch it.

Arguments are checked in runtime/prologue.py. In Python, unlike attention's operators: a call is one launch of at least
tens of microseconds, and queues behind others.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.prologue import (
    HEADS,
    PARAMS,
    SUMS_THREADS,
    ProloguePlan,
    PrologueProblem,
    PrologueSpec,
    candidates,
    make_plan,
    render,
    spec_from_slug,
    why_infeasible,
)
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime import kernels, tables
from attnforge.runtime.build.cache import obtain
from attnforge.runtime.functorch import KEY, functionalized, is_functionalize
from attnforge.runtime.native.launcher import launcher

log = logging.getLogger("attnforge")

TUNED = "prologue"  # folder of a folder of tables
_CTYPES: dict[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_float, "long long": ctypes.c_longlong}

# ---- Choosing and loading


@dataclass(frozen=True)
class Kernel:
    """A loaded variant: its functions' handles, and blocks of a launch at most (0: no limit)."""

    plan: ProloguePlan
    main: int
    sums: int
    blocks: int

    def blocks_of(self, tokens: int) -> int:
        """Blocks of the main launch, on a CPU tasks."""
        turns = -(-tokens // self.plan.tokens)
        return min(turns, self.blocks) if self.blocks else turns


_loaded: dict[tuple[PrologueSpec, torch.device], Kernel] = {}
_lock = threading.Lock()


def load(spec: PrologueSpec, device: torch.device) -> Kernel:
    """`spec` on `device`; compiled if it is not in the cache. Errors as `kernels.load`."""
    if (spec, device) not in _loaded:
        if spec.problem.arch not in kernels.targets(device):
            raise ValueError(
                f"spec: {spec.slug} is for {spec.problem.arch.value}, which {device} does not run"
            )
        launcher()
        source = render(spec)
        entry = obtain(source)
        binary = kernels.binary_of(entry)
        with _lock:
            handles = []
            for symbol in source.symbols:
                with entry.library() as path:
                    handles.append(int(torch.ops.attnforge.add_function(symbol, device, binary, path)))
            _loaded[spec, device] = Kernel(
                source.plan, handles[0], handles[-1], _most_blocks(source.plan, device)
            )
    return _loaded[spec, device]


def _most_blocks(plan: ProloguePlan, device: torch.device) -> int:
    if not plan.blocks:
        return 0
    return plan.blocks * int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose(problem: PrologueProblem, device_name: str) -> PrologueSpec:
    """The tuned variant, else the first candidate. Raises Infeasible if there is none."""
    spec = next(chain(_tuned(problem, device_name), candidates(problem)), None)
    if spec is None:
        raise Infeasible(f"qk_norm_rope: {why_infeasible(problem)}")
    log.debug("qk_norm_rope: %s", spec.slug)
    return spec


def _tuned(problem: PrologueProblem, device_name: str) -> Iterator[PrologueSpec]:
    """Feasible tunings of the tables: of this problem first, then of those with other tables, weights or alignment."""

    def near(p: PrologueProblem) -> tuple[object, ...]:
        return p.direction, p.arch, p.dtype, p.head_dim, p.norm

    known = [spec for folder in tables.folders() for spec in tuned_specs(device_name, folder)]
    for match in (lambda p: p == problem, lambda p: near(p) == near(problem)):
        for other in known:
            if match(other.problem):
                spec = PrologueSpec(problem, other.tuning)
                try:
                    make_plan(spec)
                except Infeasible:
                    continue
                yield spec


def tuned_specs(device_name: str, folder: Path) -> tuple[PrologueSpec, ...]:
    """The winners that a folder of tables has for a device. ValueError names a file that is no table."""
    path = tables.table_path(device_name, folder / TUNED)
    version = tables.file_version(path)
    return _read(path, *version) if version else ()


@lru_cache(maxsize=32)
def _read(path: Path, modified: int, inode: int) -> tuple[PrologueSpec, ...]:
    try:
        return tuple(spec_from_slug(entry["spec"]) for entry in json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a table of prologue kernels: {error}; delete it or restore it"
        ) from error


@cache
def _chosen(problem: PrologueProblem, device: torch.device) -> Kernel:
    return load(choose(problem, tables.device_name(device)), device)


def _kernel(
    direction: Direction,
    x: Tensor,
    weights: Sequence[Tensor],
    cos: Tensor,
    bits: int,
    spec: PrologueSpec | None,
) -> Kernel:
    """That of `spec`, else the chosen one, for heads like x (tokens, heads, head_dim) at addresses of these bits."""
    if spec is not None:
        return load(spec, x.device)
    wide = kernels.DTYPES[weights[0].dtype] if weights else DType.FLOAT32
    dtype, head_dim = kernels.DTYPES[x.dtype], x.shape[2]
    bits |= head_dim * x.element_size() | 16
    arch, table, norm = kernels.target(x.device), kernels.DTYPES[cos.dtype], bool(weights)
    problem = PrologueProblem(direction, arch, dtype, head_dim, wide, table, norm, bits & -bits)
    return _chosen(problem, x.device)


def forget() -> None:
    """Drop all choices, so that the next calls choose again."""
    _chosen.cache_clear()


# ---- Arguments


def _mirror(name: str, fields: Sequence[tuple[str, str, tuple[int, ...]]]) -> type[ctypes.Structure]:
    """The ctypes class of a C struct."""
    found = []
    for ctype, field, sizes in fields:
        value = _CTYPES.get(ctype, ctypes.c_void_p)
        for size in reversed(sizes):
            value = value * size
        found.append((field, value))
    return type(name, (ctypes.Structure,), {"_fields_": found})


Heads: Any = _mirror("Heads", [(ctype, name, ()) for ctype, name, _ in HEADS])
_CTYPES["Heads"] = Heads
Params: Any = _mirror("Params", [(ctype, name, sizes) for ctype, name, sizes, _ in PARAMS])


@dataclass(frozen=True)
class Layout:
    """How the heads of q, k and v lie in a list of tensors: `parts` tensors an expert, 1 being the fused one."""

    parts: int
    heads: tuple[int, int, int]

    @staticmethod
    def of(parts: int, heads_q: int, heads_kv: int) -> Layout:
        return Layout(parts, (heads_q, heads_kv, 0 if parts == 2 else heads_kv))

    def sizes(self) -> tuple[int, ...]:
        """Heads of an expert's tensors."""
        return (sum(self.heads),) if self.parts == 1 else self.heads[: self.parts]

    def split(self, tensors: Sequence[Tensor], expert: int) -> list[Tensor]:
        """q, k and v of an expert, as far as they are there."""
        if self.parts == 1:
            return list(tensors[expert].split(self.heads, 1))
        return list(tensors[expert * self.parts : (expert + 1) * self.parts])


def _point(heads: Any, x: Tensor) -> int:
    """Set a Heads to x (rows, heads, head_dim); the bits of all addresses of its heads."""
    if not x.numel():
        return 0
    address, size = x.data_ptr(), x.element_size()
    row, head, column = x.stride()
    if column != 1 and x.shape[2] > 1:
        raise ValueError(f"qk_norm_rope: got stride {column} along head_dim, expected 1")
    heads.data, heads.row, heads.head = address, row, head
    # A stride of one element along an axis of one is never stepped along.
    return address | (row * size if x.shape[0] > 1 else 0) | (head * size if x.shape[1] > 1 else 0)


def _point_all(places: Any, groups: Sequence[Sequence[Tensor]]) -> int:
    bits = 0
    for place, tensors in zip(places, groups, strict=False):
        for heads, x in zip(place, tensors, strict=False):
            bits |= _point(heads, x)
    return bits


def aligned(x: Tensor) -> Tensor:
    """x with adjacent columns and rows that vector loads can read: itself, or a copy."""
    size = x.element_size()
    wide = 16
    while x.shape[-1] * size % wide:
        wide //= 2
    rows = x.stride(0) * size if x.dim() > 1 else 0
    return (
        x
        if x.stride(-1) == 1 and (x.data_ptr() | rows) % wide == 0
        else x.clone(memory_format=torch.contiguous_format)
    )


def _params(
    tokens: int,
    rows: Tensor | None,
    eps: float,
    layout: Layout,
    cos: Tensor,
    sin: Tensor,
    weights: Sequence[Tensor],
) -> Any:
    """The kernels' argument, without the heads. It points to the tensors, which must live until the launch."""
    p = Params()
    p.rows = None if rows is None else rows.data_ptr()
    p.heads[:] = layout.heads
    p.tokens, p.eps, p.threads = tokens, eps, torch.get_num_threads()
    p.cos, p.sin, p.cos_row, p.sin_row = cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0)
    for i, weight in enumerate(weights):
        p.weight[i // 2][i % 2] = weight.data_ptr()
    return p


def _launch(kernel: Kernel, function: int, blocks: int, threads: int, p: Any) -> None:
    argument = torch.frombuffer(p, dtype=torch.uint8)
    torch.ops.attnforge.launch_function(function, blocks, threads, argument)


# ---- The operators

_FORWARD = (
    "(Tensor[] sources, Tensor cos, Tensor sin, Tensor[] weights, Tensor? rows, int parts, int heads_q, int heads_kv, "
    "float eps) -> (Tensor q, Tensor k, Tensor v)"
)
_BACKWARD = (
    "(Tensor dq, Tensor dk, Tensor dv, Tensor[] sources, SymInt[] lengths, Tensor cos, Tensor sin, Tensor[] weights, "
    "Tensor? rows, int parts, int heads_q, int heads_kv, float eps) -> (Tensor[] gradients, Tensor[] weights)"
)


def _outputs(sources: Sequence[Tensor], rows: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    first = sources[0]
    tokens = first.shape[0] if rows is None else rows.shape[0]
    q, k, v = (first.new_empty((tokens, heads, first.shape[2])) for heads in layout.heads)
    return q, k, v


def run_forward(
    sources: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    rows: Tensor | None,
    parts: int,
    heads_q: int,
    heads_kv: int,
    eps: float,
    spec: PrologueSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), by the kernel `spec` or the one that is chosen; arguments as the operator's (`_FORWARD`)."""
    layout = Layout.of(parts, heads_q, heads_kv)
    outputs = _outputs(sources, rows, layout)
    q = outputs[0]
    if not q.shape[0]:
        return outputs
    cos, sin, weights = aligned(cos), aligned(sin), [aligned(x) for x in weights]
    p = _params(q.shape[0], rows, eps, layout, cos, sin, weights)
    experts = [layout.split(sources, expert) for expert in range(len(sources) // parts)]
    # With one source for two experts, both find their rows in it.
    bits = _point_all(p.source, experts * 2) | _point_all([p.packed], [outputs])
    kernel = _kernel(Direction.FORWARD, q, weights, cos, bits, spec)
    _launch(kernel, kernel.main, kernel.blocks_of(q.shape[0]), kernel.plan.threads, p)
    return outputs


def _gradients(
    dq: Tensor, lengths: Sequence[int], weights: Sequence[Tensor], layout: Layout
) -> tuple[list[Tensor], list[Tensor]]:
    sources = [dq.new_empty((n, heads, dq.shape[2])) for n in lengths for heads in layout.sizes()]
    return sources, [torch.empty_like(x, memory_format=torch.contiguous_format) for x in weights]


def run_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sources: list[Tensor],
    lengths: list[int],
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    rows: Tensor | None,
    parts: int,
    heads_q: int,
    heads_kv: int,
    eps: float,
    spec: PrologueSpec | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the projections and of the weights, as `run_forward`; `lengths`: rows of each expert."""
    layout = Layout.of(parts, heads_q, heads_kv)
    found, found_weights = _gradients(dq, lengths, weights, layout)
    if not dq.shape[0]:
        return found, [x.zero_() for x in found_weights]
    cos, sin, weights = aligned(cos), aligned(sin), [aligned(x) for x in weights]
    p = _params(dq.shape[0], rows, eps, layout, cos, sin, weights)
    packed = [x if x.stride(2) == 1 else x.contiguous() for x in (dq, dk, dv)]
    experts = [layout.split(found, expert) for expert in range(len(lengths))]
    bits = _point_all([p.packed], [packed]) | _point_all(p.gradient, experts * 2)
    if weights:
        saved = Layout(1, layout.heads) if parts == 1 else Layout(2, layout.heads)  # v is not needed
        known = [saved.split(sources, expert)[:2] for expert in range(len(lengths))]
        bits |= _point_all(p.source, known * 2)
    kernel = _kernel(Direction.BACKWARD, dq, weights, cos, bits, spec)
    _launch_backward(kernel, p, dq, found_weights)
    return found, found_weights


def _launch_backward(kernel: Kernel, p: Any, dq: Tensor, weights: Sequence[Tensor]) -> None:
    p.blocks = kernel.blocks_of(dq.shape[0])
    if weights:
        columns = 4 * dq.shape[2]
        sums = dq.new_empty((p.blocks, columns), dtype=torch.float32)
        p.sums = sums.data_ptr()
        for i, x in enumerate(weights):
            p.weight_gradient[i // 2][i % 2] = x.data_ptr()
    _launch(kernel, kernel.main, p.blocks, kernel.plan.threads, p)
    if weights:
        _launch(kernel, kernel.sums, -(-columns // 32), SUMS_THREADS, p)


def _fake_forward(
    sources: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    rows: Tensor | None,
    parts: int,
    heads_q: int,
    heads_kv: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(sources, rows, Layout.of(parts, heads_q, heads_kv))


def _fake_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sources: list[Tensor],
    lengths: list[int],
    cos: Tensor,
    sin: Tensor,
    weights: list[Tensor],
    rows: Tensor | None,
    parts: int,
    heads_q: int,
    heads_kv: int,
    eps: float,
) -> tuple[list[Tensor], list[Tensor]]:
    return _gradients(dq, lengths, weights, Layout.of(parts, heads_q, heads_kv))


# ---- Autograd


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, cos, sin, weights, rows, parts, heads_q, heads_kv, eps = inputs
    # Rotation alone is linear: its gradient needs no input. And no gradient needs v.
    kept = [x for i, x in enumerate(sources) if parts == 1 or i % parts < 2] if weights else []
    ctx.save_for_backward(cos, sin, rows, *weights, *kept)
    ctx.counts = len(sources), len(weights)
    ctx.lengths = [x.shape[0] for x in sources[::parts]]
    ctx.rest = parts, heads_q, heads_kv, eps


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    cos, sin, rows, *others = ctx.saved_tensors
    _, count = ctx.counts
    weights, sources = others[:count], others[count:]
    gradients, of_weights = torch.ops.attnforge.qk_norm_rope_backward(
        dq, dk, dv, sources, ctx.lengths, cos, sin, weights, rows, *ctx.rest
    )
    return gradients, None, None, of_weights, None, None, None, None, None


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "attnforge: second derivatives of qk_norm_rope are not implemented; call backward without create_graph=True"
    )


class _Transformed(torch.autograd.Function):
    """An operator inside torch.func's transforms, which do not see tensors in lists: `leaves` are all arguments."""

    @staticmethod
    def forward(op: Any, spec: TreeSpec, *leaves: Any) -> Any:
        return op(*tree_unflatten(leaves, spec))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "attnforge: torch.func's transforms of qk_norm_rope (grad, vjp, jvp, vmap, ...) are not implemented; use "
            "torch.autograd.grad or backward()"
        )

    jvp = backward
    vmap = backward


def _transformed(op: Any) -> Callable[..., Any]:
    """The kernel of `op` inside torch.func's transforms. Without it, tangents of forward mode would be lost."""

    def kernel(*args: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        if is_functionalize(interpreter):
            return functionalized(interpreter, op, args)
        leaves, spec = tree_flatten(args)
        return _Transformed.apply(op, spec, *leaves)  # type: ignore[no-untyped-call]

    return kernel


def _register(name: str, schema: str, call: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    op = torch.library.custom_op(f"attnforge::{name}", call, mutates_args=(), schema=schema)
    op.register_fake(fake)
    torch.library.impl(f"attnforge::{name}", KEY, _transformed(op))
    return op


_forward_op = _register("qk_norm_rope", _FORWARD, run_forward, _fake_forward)
_backward_op = _register("qk_norm_rope_backward", _BACKWARD, run_backward, _fake_backward)
_forward_op.register_autograd(_differentiate, setup_context=_setup)
_backward_op.register_autograd(_refuse)
