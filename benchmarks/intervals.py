"""The cost of more intervals a key, like for like: masks of one interval beside the same pairs in several.

    python benchmarks/intervals.py [--length 16384] [--model 28/4/128] [--intervals 2] [--markdown intervals.md]

The masks of one interval are causal, as Spans, and a causal window of `--window` keys. Beside each are two masks of n
intervals with as many visible pairs in as many full and partial tiles:

    cut     every interval is cut into n equal parts that touch: the same mask, by the kernel of n intervals. Spans
            unites the parts, so the others of a key are empty
    apart   blocks of `--block` queries are dealt to n parts of the sequence in turn, and each part has its rows in
            their old order. So a key is seen by n intervals with gaps between them (the first and last keys by
            fewer), and tiles whose rows divide a block have moved, but not changed

All masks of one are timed interleaved. Columns: the tile of the kernel that dispatch takes, the full and partial tiles
of that size, the median time, TFLOP/s of visible pairs, the time over that of one interval, and the largest error
against float64 relative to the exact RMS.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from dense_masks import tile_of
from torch import Tensor

from attnforge.bagel.measure.bench import machine, ours
from attnforge.bagel.measure.cases import make_case, pairs_of
from attnforge.bagel.measure.interleaved import Call, interleaved
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import memory_freed
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.mask_svg import span_shares
from attnforge.runtime.masks import Spans
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import rotate
from attnforge.runtime.search.verify import distances, make_check

ONE = "one interval"
HEAD = ("mask, pass", "intervals", "tile", "full", "partial", "ms", "TFLOP/s", "of one", "error")
NAMES = ("causal", "window")


def plain(name: str, args: argparse.Namespace) -> Case:
    """The case whose mask has one interval a key."""
    device = torch.device(args.device)
    window = args.length if name == "causal" else args.window
    case = make_case(f"window:{window}/{args.length}", args.model, DType(args.dtype), device)
    return replace(case, name=name if name == "causal" else f"window of {window}")


def cut(mask: Spans, parts: int) -> Spans:
    """The same mask, given as `parts` intervals that touch."""
    starts, ends = mask.starts.long(), mask.ends.long()
    edges = [starts + (ends - starts).clamp(min=0) * n // parts for n in range(parts + 1)]
    return _spans(edges[:-1], edges[1:], mask)


def apart(mask: Spans, parts: int, block: int, length: int) -> Spans:
    """The mask whose queries are moved as `moved` says."""
    share = length // (parts * block) * block  # rows of a part, but for those at the end of the last

    def before(bound: Tensor, part: int) -> Tensor:
        """How many of the rows before `bound` are in the part."""
        dealt = bound.clamp(max=parts * share)
        turns = dealt.div(parts * block, rounding_mode="floor")
        found = turns * block + (dealt - turns * parts * block - part * block).clamp(0, block)
        return found + (bound - dealt) if part == parts - 1 else found

    bounds = [x.long().clamp(0, length) for x in (mask.starts, mask.ends)]
    starts, ends = ([part * share + before(x, part) for part in range(parts)] for x in bounds)
    return _spans(starts, ends, mask)


def moved(length: int, parts: int, block: int) -> Tensor:
    """Where each query goes: blocks to the parts in turn, what is left over stays at the end."""
    rows = torch.arange(length)
    share = length // (parts * block) * block
    number = rows // block
    dealt = number % parts * share + number // parts * block + rows % block
    return torch.where(rows < parts * share, dealt, rows)


def _spans(starts: list[Tensor], ends: list[Tensor], like: Spans) -> Spans:
    first, last = (torch.stack(x).to(torch.int32) for x in (starts, ends))
    return Spans(first, last, visible_keys=like.visible_keys)


def cases_of(one: Case, args: argparse.Namespace) -> dict[str, Case]:
    """The cases that are compared, by name; the first has one interval."""
    assert isinstance(one.mask, Spans)
    found = {ONE: one}
    for parts in args.intervals:
        found[f"{parts}, cut"] = replace(one, mask=cut(one.mask, parts))
        dealt = apart(one.mask, parts, args.block, args.length)
        found[f"{parts}, apart"] = replace(one, mask=dealt)
        if (pairs := pairs_of(dealt, one.seq_q)) != one.pairs:
            raise ValueError(f"{one.name}: {pairs} visible pairs in {parts} intervals, expected {one.pairs}")
    return found


def tiles(case: Case, tile: tuple[int, int]) -> tuple[int, int]:
    """Full and partial tiles."""
    assert isinstance(case.mask, Spans)
    shares = span_shares(case.mask.starts, case.mask.ends, case.seq_q, *tile)
    full = int((shares == 1).sum())
    return full, int((shares > 0).sum()) - full


def worst_error(case: Case, direction: Direction) -> float:
    """Of sampled rows, against float64."""
    check = make_check(case, direction)
    got = ours(case, direction, [check.inputs])(0)
    names = ("out", "lse") if direction is Direction.FORWARD else ("dq", "dk", "dv")
    errors = distances(check, dict(zip(names, got, strict=True)))
    return max(error for name, error in errors.items() if name != "lse")


def rows(one: Case, direction: Direction, args: argparse.Namespace) -> list[str]:
    """Rows of the table: all masks of one, interleaved."""
    cases = cases_of(one, args)
    with memory_freed(one.device):
        sets = [Inputs(*tensors) for tensors in rotate(tuple(one.inputs()), one.device)]
        calls: dict[str, Call] = {name: ours(case, direction, sets) for name, case in cases.items()}
        for call in calls.values():
            call(0)  # compiles, and lists the tiles
        times = interleaved(calls, range(len(sets)), one.device, args.seconds, args.repeats)
        del calls, sets
    table = []
    for name, case in cases.items():
        ms, tile = times[name].median, tile_of(case, direction)
        cells = (
            f"{one.name}, {direction.value}",
            name,
            f"{tile[0]} x {tile[1]}",
            *map(str, tiles(case, tile)),
            f"{ms:.3f}",
            f"{case.flops(direction) / ms / 1e9:.4g}",
            f"{ms / times[ONE].median:.3f}",
            f"{worst_error(case, direction):.1e}",
        )
        table.append(markdown_row(cells))
        print(table[-1], flush=True)
    return table


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Masks of several intervals a key beside those of one.")
    parser.add_argument("--masks", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--window", type=int, default=4096, help="keys that a query sees")
    parser.add_argument("--intervals", type=int, nargs="+", default=[2], choices=(2, 3, 4))
    # A multiple of 128, 192 and 256, the rows of tiles.
    parser.add_argument("--block", type=int, default=768, help="queries that move together")
    parser.add_argument("--model", default="28/4/128")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of timed calls of a mask and pass"
    )
    parser.add_argument("--repeats", type=int, default=100, help="timed calls of each, at most")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(words)
    if args.length < max(args.intervals) * args.block:
        parser.error(f"--length must be at least {max(args.intervals)} blocks of {args.block}")
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    facts = facts_line(machine(torch.device(args.device)))
    table = markdown_head(HEAD)
    print("\n".join(table), flush=True)
    for name in args.masks:
        one = plain(name, args)
        for direction in Direction:
            table += rows(one, direction, args)
    what = f"S = {args.length}, {args.model} {args.dtype}, blocks of {args.block}; {facts}"
    print(what)
    if args.markdown:
        args.markdown.write_text("\n".join((what, "", *table, "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
