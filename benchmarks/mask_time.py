"""The cost of a new mask: wall time of a PackedMask with its forward and backward tile schedules.

    python benchmarks/mask_time.py [--pack pretrain/0] [--seconds 2] [--device cuda]

Two kinds of steps are interleaved: forward and backward of one attention head with one mask for all steps, and the
same with a new mask for each step. The difference of the medians is the cost of a mask. Also measured: the constructor
alone, and a varlen call, which makes the mask of its documents.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import attnforge
from attnforge.bagel.workloads import workload


def wall(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Milliseconds of a call, from an idle device until it is idle again."""
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def interleaved(
    calls: dict[str, Callable[[], object]], seconds: float, synchronize: Callable[[], None]
) -> dict[str, float]:
    """Median milliseconds of calls that run alternately for `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(), call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            times[name].append(wall(call, synchronize))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", default="pretrain/0")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    pack, device = workload(args.pack), torch.device(args.device)
    kept = pack.mask(device)
    rows = sum(pack.sample_lens)
    q, k, v = (
        torch.randn(1, rows, 1, 128, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    dout = torch.randn_like(q)
    bounds = torch.tensor([0, *pack.sample_lens], device=device).cumsum(0).to(torch.int32)

    def step(mask: attnforge.Spans) -> None:
        torch.autograd.grad(attnforge.attention(q, k, v, mask), (q, k, v), dout)

    def varlen() -> None:
        a, b, c = (x.transpose(1, 2)[0] for x in (q, k, v))
        attnforge.flash_attn_varlen_func(a, b, c, bounds, bounds, causal=True)

    calls: dict[str, Callable[[], object]] = {
        "kept": lambda: step(kept),
        "new": lambda: step(pack.mask(device)),
        "made": lambda: pack.mask(device),
        "varlen": varlen,
    }
    ms = interleaved(calls, args.seconds, torch.cuda.synchronize if device.type == "cuda" else lambda: None)
    print(
        f"{args.pack} on {device}: step with a kept mask {ms['kept']:.3f} ms, with a new one {ms['new']:.3f} ms"
    )
    print(
        f"a new mask with both schedules {ms['new'] - ms['kept']:.3f} ms, its constructor {ms['made']:.3f} ms"
    )
    print(f"flash_attn_varlen_func, forward {ms['varlen']:.3f} ms")


if __name__ == "__main__":
    main()
