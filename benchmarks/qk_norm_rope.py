"""`qk_norm_rope` against Liger's kernels, torch.compile and BAGEL's own modules, in one run.

    python benchmarks/qk_norm_rope.py                                  # BAGEL-7B, 36864 tokens, one and two experts
    python benchmarks/qk_norm_rope.py --model qwen3-32b --tokens 16384 --markdown prologue.md

From the projections' outputs to q, k and v as attention reads them: RMSNorm of each head of q and k, rotary embedding.

    one    one set of weights with a projection each for q, k and v, as Qwen has them: v stays where it is
    two    two experts, runs of 64 tokens; both experts' fused projections go to one pack in the order of tokens

    attnforge      one kernel a direction
    compile        torch.compile of the modules' code
    liger          LigerRMSNormFunction and LigerRopeFunction, where liger-kernel is installed
    bagel          the modules of BAGEL's forward_train, eager: scatter, gather and norm, scatter, rotate

"GB/s" is what must be read and written once (attnforge.runtime.search.prologue.Workload.bytes; with one expert
without v) over the time; "of copy" is that over the rate of torch's copy of as many bytes, timed in the same run.
"error" is the largest error of an output or gradient against float64, over one rounding of the element and 1e-5 of
the tensor's largest value: at most 1 where float32 is rounded once. Times are medians, interleaved.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import attnforge
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.models import MODELS
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.prologue import CHECKED, Workload, error_of
from attnforge.runtime.search.timing import Effort, Timing, measure_interleaved

HEADER = ("experts", "pass", "operator", "ms", "low", "high", "GB/s", "of copy", "of --peak", "error")
NAMES = ("attnforge", "compile", "liger", "bagel")


@dataclass
class Data:
    """Leaves and constants of one workload.

    `projections`: with two experts (rows, heads_q + 2 heads_kv, head_dim) of each; with one q and k by themselves. As
    views of one tensor, autograd would concatenate their gradients, which takes as long as a pass of ours.
    """

    projections: list[Tensor]
    weights: list[Tensor]  # q, k of the first expert, q, k of the second
    cos: Tensor
    sin: Tensor
    rows: list[Tensor]
    experts: attnforge.ExpertRows | None
    heads: tuple[int, int]
    dout: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.projections, *self.weights]

    def split(self, expert: int) -> list[Tensor]:
        """q, k, and with two experts v."""
        if self.experts is None:
            return self.projections
        return list(self.projections[expert].split((*self.heads, self.heads[1]), 1))

    def double(self) -> Data:
        wide = [
            [x.detach().double().requires_grad_() for x in part] for part in (self.projections, self.weights)
        ]
        dout = [x.double() for x in self.dout]
        return replace(
            self,
            projections=wide[0],
            weights=wide[1],
            cos=self.cos.double(),
            sin=self.sin.double(),
            dout=dout,
        )


def make(w: Workload, dtype: torch.dtype, two: bool) -> Data:
    generator = torch.Generator(w.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=w.device).to(dtype)

    index = torch.arange(w.tokens, device=w.device)
    second = (index // 64 % 3 == 2) & two
    rows = [index[~second], index[second]] if two else [index]
    total = w.heads_q + 2 * w.heads_kv
    shapes = [(len(part), total) for part in rows] if two else [(w.tokens, w.heads_q), (w.tokens, w.heads_kv)]
    cos, sin = attnforge.rope_tables(index, w.head_dim, 1e6)
    kinds = (w.heads_q, w.heads_kv, w.heads_kv)[: 3 if two else 2]
    return Data(
        [normal(*shape, w.head_dim).requires_grad_() for shape in shapes],
        [(1 + 0.2 * normal(w.head_dim)).requires_grad_() for _ in range(2 * len(rows))],
        cos,
        sin,
        rows,
        attnforge.ExpertRows(rows[0], rows[1], w.tokens) if two else None,
        (w.heads_q, w.heads_kv),
        [normal(w.tokens, heads, w.head_dim) for heads in kinds],
    )


# ---- The operators: Data -> q, k, and with two experts v


def ours(d: Data) -> tuple[Tensor, ...]:
    if d.experts is None:
        q, k = d.split(0)
        q_weight, k_weight = d.weights
        return attnforge.qk_norm_rope(q, k, cos=d.cos, sin=d.sin, q_weight=q_weight, k_weight=k_weight)
    q0, k0, q1, k1 = d.weights
    return attnforge.qk_norm_rope(
        (d.projections[0], d.projections[1]),
        heads=d.heads,
        cos=d.cos,
        sin=d.sin,
        q_weight=(q0, q1),
        k_weight=(k0, k1),
        experts=d.experts,
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Qwen2RMSNorm."""
    wide = x if x.dtype is torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb of one tensor, tables in its dtype as BAGEL has them."""
    cos, sin = (torch.cat((t, t), 1)[:, None].to(x.dtype) for t in (cos, sin))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def modules(d: Data) -> tuple[Tensor, ...]:
    """PackedAttention(MoT).forward_train from the projections to attention."""
    if d.experts is None:
        q, k = d.split(0)
        return rotate(norm(q, d.weights[0]), d.cos, d.sin), rotate(norm(k, d.weights[1]), d.cos, d.sin)
    und, gen = d.rows
    outputs = []
    for kind, parts in enumerate(zip(d.split(0), d.split(1), strict=True)):
        x = parts[0].new_zeros(d.cos.shape[0], *parts[0].shape[1:])
        x[und], x[gen] = parts
        if kind < 2:
            y = torch.zeros_like(x)
            y[und], y[gen] = norm(x[und], d.weights[kind]), norm(x[gen], d.weights[2 + kind])
            x = rotate(y, d.cos, d.sin)
        outputs.append(x)
    return tuple(outputs)


def liger() -> Callable[[Data], tuple[Tensor, ...]]:
    """Liger's kernels; the way between experts as cheap as torch has it (one index_copy each)."""
    rms: Any = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    rope: Any = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction

    def call(d: Data) -> tuple[Tensor, ...]:
        parts = []
        for expert in range(len(d.rows)):
            q, k, *v = d.split(expert)
            wq, wk = d.weights[2 * expert : 2 * expert + 2]
            args = (1e-6, 0.0, "llama", False)
            parts.append((rms.apply(q.contiguous(), wq, *args), rms.apply(k.contiguous(), wk, *args), *v))
        q, k, *v = parts[0]
        if d.experts is not None:
            whole = []
            for first, second in zip(*parts, strict=True):
                x = first.new_empty(d.cos.shape[0], *first.shape[1:])
                whole.append(x.index_copy(0, d.rows[0], first).index_copy(0, d.rows[1], second))
            q, k, *v = whole
        cos, sin = (torch.cat((t, t), 1)[None].to(q.dtype) for t in (d.cos, d.sin))
        q, k = rope.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return (q[0].transpose(0, 1), k[0].transpose(0, 1), *v)

    return call


def operators(names: tuple[str, ...]) -> dict[str, Callable[[Data], tuple[Tensor, ...]]]:
    found: dict[str, Callable[[Data], tuple[Tensor, ...]]] = {}
    for name in names:
        if name == "liger" and importlib.util.find_spec("liger_kernel") is None:
            click.echo("liger: liger-kernel is not installed", err=True)
            continue
        compiled = torch.compile(modules, dynamic=False) if name == "compile" else modules
        found[name] = {"attnforge": ours, "liger": liger() if name == "liger" else ours}.get(name, compiled)
    return found


# ---- Measuring


def error_of_call(
    call: Callable[[Data], tuple[Tensor, ...]], d: Data, exact: list[Tensor], dtype: DType
) -> float:
    outputs = call(d)
    dout = [x.clone() for x in d.dout]  # Liger rotates gradients in place
    gradients = torch.autograd.grad(outputs, d.leaves, dout)
    return error_of((*outputs, *gradients), exact, dtype)


def moved(w: Workload, direction: Direction, two: bool) -> int:
    """Bytes that must be read and written."""
    v = 0 if two else 2 * w.tokens * w.heads_kv * w.head_dim * w.dtype.bytes
    return w.bytes(direction) - v - (0 if two else 4 * w.tokens)


def timings(
    calls: dict[str, Callable[[Data], tuple[Tensor, ...]]], d: Data, size: dict[Direction, int]
) -> dict[Direction, dict[str, Timing]]:
    """Of all operators and of torch's copy ("copy"), by pass."""
    device = d.cos.device
    how = Effort(seconds=2.0, repeats=60, warmups=3)
    outputs = {name: call(d) for name, call in calls.items()}

    def back(name: str) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(outputs[name], d.leaves, d.dout, retain_graph=True)

    def ahead(call: Callable[[Data], Any]) -> Callable[[], Any]:
        return lambda: call(d)

    found = {}
    for direction in Direction:
        forward = direction is Direction.FORWARD
        runs = {name: ahead(call) if forward else back(name) for name, call in calls.items()}
        source = torch.empty(size[direction] // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        runs["copy"] = lambda a=target, b=source: a.copy_(b)  # type: ignore[misc]
        found[direction] = measure_interleaved(runs, [()], device, how)
    return found


def rows_of(w: Workload, names: tuple[str, ...], two: bool, peak: float | None) -> list[tuple[str, ...]]:
    dtype = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}[
        w.dtype
    ]
    calls = operators(names)
    small = make(replace(w, tokens=CHECKED), dtype, two)
    wide = small.double()
    outputs = modules(wide)
    exact = [*outputs, *torch.autograd.grad(outputs, wide.leaves, wide.dout)]
    errors = {name: error_of_call(call, small, exact, w.dtype) for name, call in calls.items()}
    size = {direction: moved(w, direction, two) for direction in Direction}
    rows = []
    for direction, found in timings(calls, make(w, dtype, two), size).items():
        for name, t in found.items():
            rate = size[direction] / t.median / 1e6
            cells = [f"{t.median:.4f}", f"{t.low:.4f}", f"{t.high:.4f}", f"{rate:.0f}"]
            cells.append(f"{found['copy'].median / t.median:.1%}")
            cells.append(f"{rate / peak:.1%}" if peak else "")
            cells.append(f"{errors[name]:.2f}" if name in errors else "")
            rows.append(("two" if two else "one", direction.value, name, *cells))
    return rows


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--model", default="7B", help="Heads, as `attnforge models` lists them.")
@click.option("--tokens", type=int, help="Of the pack.  [default: 36864, on a CPU 512]")
@click.option("--dtype", type=click.Choice([dtype.value for dtype in DType]), default="bf16")
@click.option("--operators", "names", default=",".join(NAMES), help="Some of them, with commas.")
@click.option(
    "--peak", type=float, help="Memory bandwidth of the data sheet in GB/s: 4800 of an H200, 3350 of an H100."
)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write the table to this file.")
def main(
    model: str,
    tokens: int | None,
    dtype: str,
    names: str,
    peak: float | None,
    device: str,
    markdown: Path | None,
) -> None:
    """Time and check qk_norm_rope and its peers."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    shape = MODELS[model]
    tokens = tokens or (36864 if place.type == "cuda" else 512)
    w = Workload(tokens, shape.heads_q, shape.heads_kv, shape.head_dim, DType(dtype), place)
    rows: list[tuple[str, ...]] = []
    for two in (False, True):
        rows += rows_of(w, tuple(names.split(",")), two, peak)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    lines = [f"{w.name}, {name}, torch {torch.__version__}", ""]
    lines += [*markdown_head(HEADER), *map(markdown_row, rows)]
    click.echo("\n".join(lines))
    if markdown is not None:
        markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
