"""Host time of one warm call on tiny inputs: the overhead of our operators and of others, on the same tensors.

    python benchmarks/host_time.py [--device cuda] [--bursts 50] [--markdown FILE]

The others are torch's SDPA by backend, compiled FlexAttention, FlashAttention-4 if it is installed, our Triton
attention, and an empty Triton kernel with as many tensors, which shows the least that a launch from Python costs. On a
GPU a call is timed until it is enqueued, in bursts short enough to fit the queue; contestants are interleaved burst by
burst. On a CPU the time includes the computation. The table shows medians.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.bagel.measure import fa4
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import attention_of
from attnforge.codegen.spec import DType
from attnforge.runtime.search.case import full_case

BURST = 100
WARM = 3  # first bursts, not counted
ROWS = {"cuda": 128, "cpu": 8}  # few on a CPU, whose time includes the computation
COLUMNS = ("no grad", "forward, recorded", "forward and backward")
LIMITS = (10.0, 25.0)  # microseconds that ours may take in the first two
OURS, FLASH, LAUNCH = "attnforge, spans", "SDPA flash", "Triton kernel that does nothing"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Contestant:
    """An attention, or a call that only the first column times (`bare`); run with SDPA's `backend` if there is one."""

    call: Callable[..., Any]
    backend: SDPBackend | None = None
    bare: bool = False
    times: dict[str, float] = field(default_factory=dict)

    def within(self) -> contextlib.AbstractContextManager[object]:
        return sdpa_kernel(self.backend) if self.backend else contextlib.nullcontext()


def contestants(device: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Contestant]:
    """Ours by mask, then the others that are installed."""
    rows = ROWS[device]
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    masks = {"full": None, "causal": attnforge.Causal(), "spans": attnforge.Spans(starts, starts + rows)}
    found = {
        f"attnforge, {kind}": Contestant(lambda q, k, v, mask=mask: attnforge.attention(q, k, v, mask))
        for kind, mask in masks.items()
    }
    found[FLASH] = Contestant(F.scaled_dot_product_attention, SDPBackend.FLASH_ATTENTION)
    if device == "cpu":
        return found
    found["SDPA cuDNN"] = Contestant(F.scaled_dot_product_attention, SDPBackend.CUDNN_ATTENTION)
    case = full_case("tiny", (1, 2, 2, rows, 64), DType.BFLOAT16, torch.device(device))
    found["FlexAttention, compiled"] = Contestant(attention_of("flex", case))
    if fa4.installed():
        found["FlashAttention-4"] = Contestant(attention_of("fa4", case))
    return found | triton_ones(q, k, v)


def triton_ones(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Contestant]:
    """Our Triton attention, and the launch of a kernel that takes four tensors."""
    try:
        from attnforge.benchmarks.triton_attention import attention, empty_kernel
    except ImportError as error:
        print(f"Triton is not installed: {error}")
        return {}
    out = torch.empty_like(q)
    launch = Contestant(lambda q, k, v: empty_kernel[(1,)](q, k, v, out), bare=True)
    return {"Triton attention": Contestant(attention), LAUNCH: launch}


def burst_microseconds(call: Callable[[], object], device: str) -> float:
    """Host microseconds of a call: the mean over BURST calls that start with an idle device."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - begin) / BURST * 1e6


def measure(found: dict[str, Contestant], column: str, tensors: tuple[Tensor, ...], bursts: int) -> None:
    """Time one column of all contestants, interleaved. One that fails is left out, with a message."""
    q, k, v = (x.detach().requires_grad_(column != COLUMNS[0]) for x in tensors)
    dout = torch.ones_like(q)
    samples: dict[str, list[float]] = {}
    failed = set()

    def call_of(one: Contestant) -> Callable[[], object]:
        if column != COLUMNS[2]:
            return lambda: one.call(q, k, v)
        return lambda: torch.autograd.grad(one.call(q, k, v), (q, k, v), dout)

    for burst in range(WARM + bursts):
        for name, one in found.items():
            if name in failed or (one.bare and column != COLUMNS[0]):
                continue
            try:
                with one.within():
                    microseconds = burst_microseconds(call_of(one), q.device.type)
            except Exception as error:  # the remaining contestants are still measured
                print(f"{name}, {column}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                failed.add(name)
                continue
            if burst >= WARM:
                samples.setdefault(name, []).append(microseconds)
    for name, times in samples.items():
        if name not in failed:
            found[name].times[column] = statistics.median(times)


def table(found: dict[str, Contestant]) -> str:
    """A Markdown table with a row for each contestant."""
    lines = markdown_head(("microseconds a call", *COLUMNS))
    for name, one in found.items():
        cells = (f"{one.times[column]:.1f}" if column in one.times else "-" for column in COLUMNS)
        lines.append(markdown_row((name, *cells)))
    return "\n".join(lines)


def verdict(found: dict[str, Contestant]) -> str:
    """Whether the goals are met: LIMITS, and no slower than SDPA's flash backend."""
    words = []
    for column, limit in zip(COLUMNS, LIMITS, strict=False):
        mine, flash = found[OURS].times.get(column), found[FLASH].times.get(column)
        if mine is None or flash is None:
            words.append(f"{column}: not measured")
        else:
            met = "met" if mine <= min(limit, flash) else "missed"
            words.append(f"{column}: {mine:.1f} of at most {limit:.0f} and {flash:.1f} us, {met}")
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of one warm call.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(ROWS), default=default)
    parser.add_argument("--bursts", type=int, default=50, help=f"number of timed bursts of {BURST} calls")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (1, 2, ROWS[args.device], 64)
    q, k, v = (torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(3))
    found = contestants(args.device, q, k, v)
    for column in COLUMNS:
        measure(found, column, (q, k, v), args.bursts)
    facts = facts_line(machine(torch.device(args.device)))
    end = (verdict(found), "") if args.device == "cuda" else ()
    text = "\n".join((facts, "", table(found), "", *end))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
