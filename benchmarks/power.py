"""Variants of a kernel at the GPU's limit of power: each alone, mixed with matrix products, and in turns.

    python benchmarks/power.py --pack full/4x8192 --model 28/4/128 --try multicast=0 --try multicast=1 [--markdown FILE]

The first kernel of each case is the one that dispatch takes. `--try KNOB=V,...` adds one with these values in place of
its own. Columns: TFLOP/s and the speed over the first kernel,

    alone       each repeated for `--seconds` a turn, so that its own power decides the clock
    mixed       the same with a matrix product of 8192^3 after each call, as in a training step; the time of both counts
    in turns    call by call, as tables and searches time: all kernels share the clock that their mean power decides

A kernel whose results differ from the first one's by more than the dtype's roundings is named and not timed. `--peers
fa3 fa4` adds FlashAttention-3 and -4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure import fa3, fa4
from attnforge.bagel.measure.agreement import TOLERANCE, relative
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.codegen.families import make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Direction, DType, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Effort, Timing, measure_alone, measure_interleaved
from attnforge.runtime.tables import device_name

SIZE = 8192  # of the matrix product
FIRST = "dispatch"
PEERS = {"fa3": fa3, "fa4": fa4}
HEAD = ("case", "kernel", "alone", "over the first", "mixed, over the first", "in turns", "over the first")
Call = Callable[[], Any]


def knobs_of(text: str) -> dict[str, int]:
    """The values of `--try`."""
    return {name: int(value) for name, _, value in (word.partition("=") for word in text.split(","))}


def specs_of(case: Case, tries: list[str]) -> Iterator[tuple[str, Spec]]:
    """The kernel that dispatch takes for a forward, and those with other values of knobs."""
    problem = case.problem(Direction.FORWARD, kernels.target(case.device))
    spec = choose_for(case.call(problem), Target(device_name(case.device), (problem.arch,))).spec
    yield FIRST, spec
    for text in tries:
        yield text, replace(spec, tuning=make_tuning(problem, spec.tuning.to_json() | knobs_of(text)))


def calls_of(case: Case, args: argparse.Namespace) -> dict[str, Call]:
    """Forwards by name, those that can run and agree with the first."""
    x = Inputs(*(t.detach() for t in case.inputs()))
    calls: dict[str, Call] = {}
    for name, spec in specs_of(case, args.tries):
        try:
            variant = kernels.load(spec, case.device)
        except (Infeasible, ValueError) as reason:
            print(f"{case.name} {name}: {reason}", flush=True)
            continue
        calls[name] = partial(ops.forward, x.q, x.k, x.v, case.mask, variant=variant, check=False)
    for name in args.peers:
        try:
            calls[name] = partial(PEERS[name].attention(case), x.q, x.k, x.v)
        except Unavailable as reason:
            print(f"{case.name} {name}: {reason}", flush=True)
    expected = out_of(calls[FIRST]())
    for name, call in list(calls.items()):
        if (apart := relative(out_of(call()), expected)) > TOLERANCE[case.dtype]:
            print(f"{case.name} {name}: differs by {apart:.1e}, so it is not timed", flush=True)
            del calls[name]
    return calls


def out_of(result: Any) -> torch.Tensor:
    """Of (out, lse), or of out alone."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def measure(case: Case, args: argparse.Namespace) -> list[str]:
    """Rows of the table of one case."""
    device, size = case.device, args.size
    calls = calls_of(case, args)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def followed(call: Call) -> Call:
        return lambda: (call(), torch.mm(a, b))

    alone = measure_alone(calls, [()], device, args.seconds)
    mixed = measure_alone({name: followed(call) for name, call in calls.items()}, [()], device, args.seconds)
    turns = measure_interleaved(calls, [()], device, Effort(seconds=args.seconds, repeats=400, warmups=2))
    rows = []
    for name in calls:
        rates = [f"{case.flops(Direction.FORWARD) / x[name].median / 1e9:.1f}" for x in (alone, turns)]
        cells = rates[0], over(alone, name), over(mixed, name), rates[1], over(turns, name)
        rows.append(markdown_row((case.name, name, *cells)))
        print(rows[-1], flush=True)
    return rows


def over(times: dict[str, Timing], name: str) -> str:
    """The speed over the first kernel's."""
    return f"{times[FIRST].median / times[name].median:.3f}"


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Forwards at the GPU's limit of power.")
    parser.add_argument("--pack", nargs="+", default=["full/4x8192"])
    parser.add_argument("--model", default="28/4/128")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="KNOB=V,...")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[], help="who is timed beside")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn of each kernel")
    parser.add_argument("--size", type=int, default=SIZE, help="rows of the matrix product")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args(words)


@torch.no_grad()
def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    device = torch.device(args.device)
    table = markdown_head(HEAD)
    for pack in args.pack:
        table += measure(make_case(pack, args.model, DType(args.dtype), device), args)
    facts = facts_line(machine(device))
    text = "\n".join((facts, "", *table, ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
