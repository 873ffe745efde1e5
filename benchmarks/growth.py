"""How the rate of ours depends on the size: sequences of 11k to 131k tokens at one density, batches of 1 to 64 at 1k.

    python benchmarks/growth.py [--only "28/4/128 causal bwd"] [--seconds 4] [--markdown growth.md]

A line of the tables is one mask at all sizes, which are timed interleaved, with a matrix product beside. The mask of a
pack ("pretrain/0", "documents/0") is scaled: all its splits are longer by the same factor, so the share of the pairs
that are visible stays the same ("visible" has the smallest and the largest share); causal has it anyway. Cells are
TFLOP/s of visible pairs by the median time, and in parentheses the slowest over the fastest of the timed samples, less
1. A sample is as many calls as make a TFLOP of arithmetic, at least one, so that the microseconds of the events around
it do not count. "flat within" is the highest rate over the lowest, less 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from attnforge.bagel.measure.bench import machine, ours
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.interleaved import MATMUL, Call, interleaved, matrix_product
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import memory_freed
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Timing, rotate

HEADS = ("28/4/128", "14/2/64")
MASKS = ("pretrain/0", "documents/0", "causal")  # of the lengths
LENGTHS = (11520, 18432, 36864, 65536, 131072)
BATCH_MASKS = ("full", "causal")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 1024  # of an entry of a batch
SAMPLE = 1e12  # flops of a timed sample, at least


@dataclass(frozen=True)
class Series:
    """One line of a table: cases that differ in size alone, by the size."""

    name: str
    direction: Direction
    cases: dict[int, Case]

    def visible(self) -> str:
        """The smallest and the largest share of visible pairs, in percent."""
        shares = [100 * case.pairs / (case.seq_q * case.seq_k) for case in self.cases.values()]
        low, high = (f"{share:.4g}" for share in (min(shares), max(shares)))
        return low if low == high else f"{low} to {high}"


def scaled(mask: PackedMask, length: int) -> PackedMask:
    """The pack with `length` tokens: the bounds of its splits and samples, padding left out, times one factor.

    Raises ValueError if a split would have no token.
    """
    splits = [split for split in mask.splits if split.start < mask.used and split.end > split.start]
    bounds = [0, *accumulate(split.end - split.start for split in splits)]
    moved = [round(bound * length / bounds[-1]) for bound in bounds]
    lengths = [after - before for before, after in pairwise(moved)]
    if min(lengths) < 1:
        raise ValueError(f"length: {length} tokens are too few for a pack of {len(splits)} splits")
    samples: dict[int, int] = {}
    for split, tokens in zip(splits, lengths, strict=True):
        samples[split.sample] = samples.get(split.sample, 0) + tokens
    return PackedMask(list(samples.values()), lengths, [split.mode for split in splits], mask.device)


def of_length(mask: str, length: int, heads: str, dtype: DType, device: torch.device) -> Case:
    """A sequence of `length` tokens under a dense mask or a scaled pack."""
    if mask in BATCH_MASKS:
        return make_case(f"{mask}/{length}", heads, dtype, device)
    pack = make_case(mask, heads, dtype, device)
    assert isinstance(pack.mask, PackedMask)
    longer = scaled(pack.mask, length)
    name = f"{mask} of {length} {heads}"
    return replace(pack, name=name, seq_q=length, seq_k=length, mask=longer, pairs=longer.pairs)


def by_length(heads: str, mask: str, args: argparse.Namespace) -> dict[int, Case]:
    """The cases of a line of the first table."""
    dtype, device = DType(args.dtype), torch.device(args.device)
    return {length: of_length(mask, length, heads, dtype, device) for length in args.lengths}


def by_batch(heads: str, mask: str, args: argparse.Namespace) -> dict[int, Case]:
    """The cases of a line of the second table."""
    dtype, device = DType(args.dtype), torch.device(args.device)
    return {n: make_case(f"{mask}/{n}x{args.tokens}", heads, dtype, device) for n in args.batches}


def sample_of(case: Case, direction: Direction) -> tuple[Call, int]:
    """A timed sample, and how many calls of ours it makes, on inputs in turn."""
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    call = ours(case, direction, sets)
    count = max(1, round(SAMPLE / case.flops(direction))) if case.device.type == "cuda" else 1
    call(0)  # compiles

    def sample(index: int) -> None:
        for n in range(count):
            call((index * count + n) % len(sets))

    return sample, count


def rates(series: Series, args: argparse.Namespace) -> tuple[dict[int, tuple[float, Timing]], float]:
    """(TFLOP/s, timing of samples) by size, and the matrix product's TFLOP/s."""
    device = torch.device(args.device)
    with memory_freed(device):
        samples = {size: sample_of(case, series.direction) for size, case in series.cases.items()}
        calls = {str(size): call for size, (call, _) in samples.items()}
        calls[MATMUL], flops = matrix_product(device)
        timings = interleaved(calls, range(args.repeats), device, args.seconds, args.repeats)
        ceiling = flops / timings[MATMUL].median / 1e9
        found = {}
        for size, (_, count) in samples.items():
            timing = timings[str(size)]
            work = count * series.cases[size].flops(series.direction)
            found[size] = work / timing.median / 1e9, timing
        del calls, samples
    return found, ceiling


def row(series: Series, args: argparse.Namespace) -> str:
    """Measure a line of a table."""
    found, ceiling = rates(series, args)
    speeds = [rate for rate, _ in found.values()]
    cells = (
        series.name,
        series.visible(),
        *(f"{rate:.4g} ({timing.worst / timing.best - 1:.1%})" for rate, timing in found.values()),
        f"{max(speeds) / min(speeds) - 1:.1%}",
        f"{ceiling:.4g}",
        str(min(timing.repeats for _, timing in found.values())),
    )
    return markdown_row(cells)


def table(what: str, sizes: Sequence[int], lines: Sequence[Series], args: argparse.Namespace) -> list[str]:
    """A table; nothing without lines. Rows are also printed one by one, since a run may be cut off."""
    if not lines:
        return []
    head = (what, "visible, %", *map(str, sizes), "flat within", MATMUL, "samples")
    text = markdown_head(head)
    print("\n".join(text), flush=True)
    for series in lines:
        text.append(row(series, args))
        print(text[-1], flush=True)
    return [*text, ""]


def chosen(args: argparse.Namespace) -> tuple[list[Series], list[Series]]:
    """The lines of both tables that --only matches."""
    found: list[list[Series]] = []
    for kind, masks, make in (("length", args.masks, by_length), ("batch", BATCH_MASKS, by_batch)):
        wanted = [
            (f"{heads} {mask} {direction.value}", heads, mask, direction)
            for heads in args.heads
            for mask in masks
            for direction in Direction
        ]
        found.append(
            [
                Series(name, direction, make(heads, mask, args))
                for name, heads, mask, direction in wanted
                if re.search(args.only, f"{kind} {name}")
            ]
        )
    return found[0], found[1]


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TFLOP/s by length and by batch size.")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HEADS")
    parser.add_argument(
        "--masks", nargs="+", default=list(MASKS), help="of the lengths: packs, causal or full"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an entry of a batch")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help='lines, such as "length 28/4/128 causal bwd" or "batch"'
    )
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of timed samples of each line")
    parser.add_argument("--repeats", type=int, default=40, help="timed samples of each size, at most")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    lengths, batches = chosen(args)
    facts = facts_line(machine(torch.device(args.device)))
    text = [f"TFLOP/s, {args.dtype}; {facts}", ""]
    text += table("tokens", args.lengths, lengths, args)
    text += table(f"batch of {args.tokens} tokens", args.batches, batches, args)
    print(text[0])
    if args.markdown:
        args.markdown.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
