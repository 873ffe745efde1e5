"""One mask said in four ways: as Spans, as a function (masks.mask_mod), as a bool tensor, and to FlexAttention.

    python benchmarks/mask_functions.py [--length 16384] [--heads 16 16] [--head-dim 128] [--seconds 1] [--no-flex]

Masks: `window`, a causal window of 1024 keys, which reads no tensors; `documents`, eight causal documents by their ids.
Milliseconds of a forward, and of a forward and backward, bfloat16, interleaved; and of the first call of a new mask,
which lists its tiles, with kernels loaded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import attnforge
from attnforge.runtime.score_trace import MaskFunction

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
WINDOW, DOCUMENTS = 1024, 8


def masks_of(name: str, length: int, device: str) -> tuple[attnforge.Spans, MaskFunction]:
    """A mask as Spans and as a function."""
    if name == "window":
        spans = attnforge.masks.window(length, length, WINDOW - 1, 0, device)
        return spans, lambda b, h, i, j: (j <= i) & (i - j < WINDOW)
    lengths = [length // DOCUMENTS] * DOCUMENTS
    ids = torch.arange(DOCUMENTS, dtype=torch.int32, device=device).repeat_interleave(length // DOCUMENTS)
    spans = attnforge.masks.documents(lengths, device, causal=True)
    return spans, lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)


def calls_of(name: str, length: int, device: str, flex: bool) -> dict[str, tuple[Call, Callable[[], object]]]:
    """By contestant: the call with a mask that is made already, and what makes a new one."""
    spans, function = masks_of(name, length, device)

    def attended(make: Callable[[], attnforge.Spans]) -> tuple[Call, Callable[[], object]]:
        mask = make()
        return lambda q, k, v: attnforge.attention(q, k, v, mask), make

    shares = spans.visible_keys
    calls = {
        "Spans": attended(lambda: attnforge.Spans(spans.starts, spans.ends, visible_keys=shares)),
        "mask_mod": attended(
            lambda: attnforge.masks.mask_mod(function, length, length, device, visible_keys=shares)
        ),
    }
    if length <= 1 << 16:
        visible = spans.visible(length, length, device)
        calls["DenseMask"] = attended(lambda: attnforge.DenseMask(visible, visible_keys=shares))
    if flex:
        blocks = torch.compile(create_block_mask)

        def make() -> object:
            return blocks(function, None, None, length, length, device=device)

        compiled, mask = torch.compile(torch_flex), make()
        calls["FlexAttention"] = lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), make
    return calls


def milliseconds(call: Callable[[], object]) -> float:
    """Of a call, from an idle device until it is idle again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def interleaved(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median milliseconds of calls that run alternately for `seconds`."""
    for call in calls.values():
        call(), call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 16), metavar=("Q", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()
    q, k, v = (
        torch.randn(
            1, args.length, n, args.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
        ).transpose(1, 2)
        for n in (args.heads[0], args.heads[1], args.heads[1])
    )
    dout = torch.randn_like(q)
    for name in ("window", "documents"):
        calls = calls_of(name, args.length, "cuda", not args.no_flex)
        with torch.no_grad():
            forward = interleaved({n: lambda c=c: c(q, k, v) for n, (c, _) in calls.items()}, args.seconds)
        both = interleaved(
            {n: lambda c=c: torch.autograd.grad(c(q, k, v), (q, k, v), dout) for n, (c, _) in calls.items()},
            args.seconds,
        )
        for contestant, (_, make) in calls.items():
            first = (
                ""
                if contestant == "FlexAttention"
                else f"{new_mask(make, q, k, v) - forward[contestant]:8.2f}"
            )
            made = interleaved({"": make}, args.seconds / 4)[""]
            print(
                f"{name:10} {contestant:14} fwd {forward[contestant]:8.3f} ms, fwd + bwd {both[contestant]:8.3f} ms, "
                f"made in {made:7.2f} ms, tiles listed in {first} ms",
                flush=True,
            )


def new_mask(make: Callable[[], object], q: Tensor, k: Tensor, v: Tensor) -> float:
    """Median milliseconds of the first forward with a new mask."""
    times = []
    for _ in range(9):
        mask = make()
        with torch.no_grad():
            times.append(milliseconds(lambda mask=mask: attnforge.attention(q, k, v, mask)))
    return statistics.median(times)


if __name__ == "__main__":
    main()
