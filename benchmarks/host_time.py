"""Host time of one warm call on tiny inputs: what the operators themselves cost, beside torch's own.

    python benchmarks/host_time.py [cpu|cuda]

On a GPU calls are timed until they are enqueued, in bursts short enough to fit the queue.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import attnforge

BURST, BURSTS = 100, 50


def host_microseconds(call: Callable[[], object], device: str) -> float:
    """Median over bursts of the time that one call keeps the host."""
    times = []
    for _ in range(BURSTS + 5):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - begin) / BURST)
    return statistics.median(times[5:]) * 1e6


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    starts = torch.zeros(8, dtype=torch.int32, device=device)
    masks = {"full": None, "causal": attnforge.Causal(), "spans": attnforge.Spans(starts, starts + 8)}

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    for name, grad in (("no grad", False), ("grad", True)):
        for x in (q, k, v):
            x.requires_grad_(grad)
        for kind, mask in masks.items():
            us = host_microseconds(lambda m=mask: attnforge.attention(q, k, v, m), device)  # type: ignore[misc]
            print(f"{device} forward  {kind:7s} {name:8s} {us:6.1f} us")
        print(f"{device} forward  SDPA    {name:8s} {host_microseconds(peer, device):6.1f} us")
    dout = torch.ones_like(q)
    outputs = {kind: attnforge.attention(q, k, v, mask) for kind, mask in masks.items()} | {"SDPA": peer()}
    for kind, out in outputs.items():

        def backward(out: torch.Tensor = out) -> object:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        print(f"{device} backward {kind:7s} {'':8s} {host_microseconds(backward, device):6.1f} us")


if __name__ == "__main__":
    main()
