"""Few queries against many keys, as in inference, and one head of 512 columns, as in BAGEL's VAE: ours and peers.

    python benchmarks/short_queries.py [--seconds 60] [--wide] [--markdown FILE]

Each call is recorded several times into a CUDA graph, on inputs in turn that together exceed the L2 cache, so that
host time does not count and K and V come from memory. Graphs are replayed in turns, after as long as a GPU takes to
raise its clock. GB/s are those of K and V, read once. `--wide` times head_dim 512 instead. `--seconds` begins no case
after that time. The error is that of out against float64, of one head, relative to its RMS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.bagel.measure import fa3
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.runtime.search.reference import reference

# q heads, kv heads, head_dim; queries; keys; batch.
HEADS = ((28, 4, 128), (32, 8, 128), (16, 16, 128))
QUERIES, KEYS, BATCH = (1, 16, 128), (8192, 32768, 131072), (1, 4, 16)
MOST = 12 << 30  # bytes of K and V of a case
L2 = 120 << 20  # that inputs in turn exceed
CALLS, REPLAYS = 12, 9
WARM = 0.1  # seconds
Inputs = tuple[Tensor, Tensor, Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attnforge.attention(q, k, v)


def sdpa(backend: SDPBackend) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] != k.shape[1]
            out: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
            return out

    return call


def flash_attention_3() -> Call:
    operators = fa3.operators()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = (y.transpose(1, 2) for y in (q, k, v))
        out: Tensor = operators.fwd(*x, num_splits=0)[0]  # as many as it deems best
        return out.transpose(1, 2)

    return call


def contestants(wide: bool) -> dict[str, Call]:
    """By name, ours first."""
    if wide:
        return {"attnforge": ours, "sdpa-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION)}
    found = {
        "attnforge": ours,
        "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    return {**found, "fa3": flash_attention_3()} if fa3.installed() else found


def record(call: Call, sets: list[Inputs]) -> torch.cuda.CUDAGraph:
    """CALLS of them, on the inputs in turn."""
    for x in sets:
        call(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(*sets[i % len(sets)])
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median time of a call of each graph."""
    until = time.monotonic() + WARM
    while time.monotonic() < until:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: sorted(found)[REPLAYS // 2] for name, found in times.items()}


def inputs(heads: tuple[int, int, int], queries: int, keys: int, batch: int) -> list[Inputs]:
    """Sets of q, k, v in (batch, seq, heads, head_dim) memory, bfloat16."""
    heads_q, heads_kv, dim = heads

    def one(count: int, length: int) -> Tensor:
        x = torch.randn(batch, length, count, dim, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2)

    count = max(1, min(CALLS, -(-L2 // (4 * batch * keys * heads_kv * dim))))
    return [(one(heads_q, queries), one(heads_kv, keys), one(heads_kv, keys)) for _ in range(count)]


def error(call: Call, x: Inputs) -> float:
    q, k, v = x
    group, rows = q.shape[1] // k.shape[1], slice(0, 64)
    exact = reference(q[:1, :group, rows], k[:1, :1], v[:1, :1], None).out
    return float((call(*x)[:1, :group, rows] - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def time_case(
    heads: tuple[int, int, int], queries: int, keys: int, batch: int, wide: bool
) -> list[list[str]]:
    """Lines of the table for a case."""
    sets = inputs(heads, queries, keys, batch)
    case = f"{'/'.join(map(str, heads))} B {batch} Sq {queries} Sk {keys}"
    size = bytes_of(heads, keys, batch)
    flops = 4 * batch * heads[0] * queries * keys * heads[2]
    graphs, lines = {}, {}
    for name, call in contestants(wide).items():
        lines[name] = [case, name, "", "", "", ""]
        try:
            lines[name][5] = f"{error(call, sets[0]):.1e}"
            graphs[name] = record(call, sets)
        except Exception as reason:  # a peer that cannot do the case
            lines[name][2] = type(reason).__name__
            if name == "attnforge":
                raise
    for name, us in microseconds(graphs).items():
        lines[name][2:5] = f"{us:.1f}", f"{size / us / 1e3:.0f}", f"{flops / us / 1e6:.0f}"
    return list(lines.values())


def bytes_of(heads: tuple[int, int, int], keys: int, batch: int) -> int:
    """Bytes of K and V."""
    return 4 * batch * keys * heads[1] * heads[2]


def rows(wide: bool, seconds: float) -> list[list[str]]:
    """Lines of the table."""
    until, table = time.monotonic() + seconds, []
    wide_cases = [((1, 1, 512), s, s, 1) for s in (4096, 16384)]
    order = product(KEYS, QUERIES, HEADS, BATCH)
    cases = wide_cases if wide else [(heads, sq, sk, batch) for sk, sq, heads, batch in order]
    for heads, queries, keys, batch in cases:
        if bytes_of(heads, keys, batch) > MOST or time.monotonic() > until:
            continue
        for line in time_case(heads, queries, keys, batch, wide):
            table.append(line)
            print(" | ".join(line), flush=True)
        torch.cuda.empty_cache()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after so many")
    parser.add_argument("--wide", action="store_true", help="head_dim 512")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    head = ["case", "kernel", "us", "GB/s of K and V", "TFLOP/s", "error"]
    print(" | ".join(head))
    table = rows(options.wide, options.seconds)
    if options.markdown:
        lines = [*markdown_head(head), *map(markdown_row, table)]
        options.markdown.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
