"""Host time of one warm call on tiny inputs: what the operators themselves cost, beside others' on the same tensors.

    python benchmarks/host_time.py [cpu|cuda]

Others are torch's SDPA, compiled FlexAttention, FlashAttention-4 if it is installed, our Triton attention and, as the
least that a Python launch costs, a Triton kernel with as many tensors that does nothing. On a GPU calls are timed until
they are enqueued, in bursts short enough to fit the queue.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import attnforge
from attnforge.bagel import fa4
from attnforge.bagel.peers import attention_of
from attnforge.codegen.spec import DType
from attnforge.runtime.case import full_case

BURST, BURSTS = 100, 50
ROWS = {"cuda": 128, "cpu": 8}  # a CPU computes within the time
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


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


def attentions(device: str) -> dict[str, Attention]:
    """Ours by mask, then the others that there are here."""
    rows = ROWS[device]
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    masks = {"full": None, "causal": attnforge.Causal(), "spans": attnforge.Spans(starts, starts + rows)}
    found: dict[str, Attention] = {
        f"ours, {kind}": lambda q, k, v, mask=mask: attnforge.attention(q, k, v, mask)
        for kind, mask in masks.items()
    }
    found["SDPA"] = F.scaled_dot_product_attention
    if device == "cpu":
        return found
    case = full_case("tiny", (1, 2, 2, rows, 64), DType.BFLOAT16, torch.device(device))
    found["FlexAttention"] = attention_of("flex", case)
    if fa4.installed():
        found["FA4"] = attention_of("fa4", case)
    try:
        from attnforge.benchmarks.triton_attention import attention
    except ImportError as error:
        print(f"{device} Triton is not installed: {error}")
        return found
    return {**found, "Triton attention": attention}


def triton_launch(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """The launch of a Triton kernel that takes four tensors and does nothing."""
    from attnforge.benchmarks.triton_attention import nothing

    out = torch.empty_like(q)
    return lambda: nothing[(1,)](q, k, v, out)


def report(device: str, what: str, name: str, call: Callable[[], object]) -> None:
    try:
        call()
        print(f"{device} {what:18s} {name:18s} {host_microseconds(call, device):7.1f} us", flush=True)
    except Exception as error:  # one of the others must not cost the rest
        print(
            f"{device} {what:18s} {name:18s} failed: {type(error).__name__}: {str(error)[:200]}", flush=True
        )


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, ROWS[device], 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    dout = torch.ones_like(q)
    found = attentions(device)
    if "Triton attention" in found:
        report(device, "launch", "Triton kernel", triton_launch(q, k, v))
    for what, grad in (("forward, no grad", False), ("forward, grad", True)):
        for x in (q, k, v):
            x.requires_grad_(grad)
        for name, attention in found.items():
            report(device, what, name, lambda attention=attention: attention(q, k, v))
    for name, attention in found.items():

        def both(attention: Attention = attention) -> object:
            return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

        report(device, "forward, backward", name, both)


if __name__ == "__main__":
    main()
