"""Dense masks of random blocks against spans with as many visible pairs: the cost of tile lists and of partial tiles.

    python benchmarks/dense_masks.py [--sparsity 0.5 0.9] [--length 8192] [--model 7B] [--flex] [--markdown FILE]

Each sparsity has four masks: documents of whole blocks of 128, as spans and as a dense mask; random blocks of 128, of
which a tile whose sides divide 128 is full or empty; random blocks of 64. All are interleaved. Columns: TFLOP/s of
`visible` pairs, as in our other tables, and of all pairs in `visited` tiles, which depends on the tile size; the
ratios of both to spans; and the time to make the tile lists, once per mask for all layers. `--flex` adds FlexAttention
on blocks of 128.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.bench import machine, ours
from attnforge.bagel.measure.blocks import BLOCK, LENGTH, equal_documents, random_blocks
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import as_unavailable, contestant
from attnforge.bagel.measure.tiles import EMPTY, tile_map
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime import dispatch, kernels
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Effort, measure_interleaved, rotate

SPANS, FLEX = "spans", "FlexAttention"
HEAD = (
    "hidden, pass", "mask", "tile", "pairs visible", "visited", "ms", "TFLOP/s visible", "visited", "of spans: visible",
    "visited", "lists, ms",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One contestant of one sparsity and direction."""

    mask: str
    tile: str  # queries x keys
    share: float  # of all pairs that are visible
    visited: float  # of all pairs that lie in a visited tile, with what a tile has beyond the ends
    ms: float
    tflops: float  # of visible pairs
    lists_ms: float | None = None  # to make the lists of tiles

    @property
    def tflops_visited(self) -> float:
        return self.tflops * self.visited / self.share


def cases_of(blocks: Case, sparsity: float) -> dict[str, Case]:
    """The cases of a sparsity by the name of the mask; `blocks` is that of random blocks of BLOCK."""
    documents = equal_documents(1 - sparsity, blocks.seq_q, blocks.device)
    pairs = documents.visible(blocks.seq_q, blocks.seq_k, blocks.device)
    dense = DenseMask(pairs, visible_keys=documents.pairs / blocks.seq_q)
    fine = random_blocks(sparsity, blocks.seq_q, blocks.device, BLOCK // 2)
    return {
        SPANS: replace(blocks, mask=documents, pairs=documents.pairs),
        "the same, dense": replace(blocks, mask=dense, pairs=documents.pairs),
        f"blocks of {BLOCK}": blocks,
        f"blocks of {BLOCK // 2}": replace(blocks, mask=fine, pairs=int(fine.mask.sum())),
    }


def visited(case: Case, tile_m: int, tile_n: int) -> float:
    """The part of all pairs in tiles of which the kernel visits any pair."""
    assert isinstance(case.mask, (Spans, DenseMask))
    kinds = tile_map(case.mask, case.seq_q, tile_m, tile_n).kinds
    return int((kinds != EMPTY).sum()) * tile_m * tile_n / (case.seq_q * case.seq_k)


def tile_of(case: Case, direction: Direction) -> tuple[int, int]:
    """The tile of the kernel that dispatch takes."""
    problem = case.problem(direction, kernels.target(case.device))
    tuning = dispatch.choose(case.call(problem), case.device).spec.tuning
    return tuning.tile_m, tuning.tile_n


def measure(sparsity: float, direction: Direction, args: argparse.Namespace) -> list[Line]:
    """Time all contestants, interleaved. One that cannot run is reported and left out."""
    device = torch.device(args.device)
    dtype = DType(args.dtype)
    blocks = make_case(f"blocks/{sparsity}/{args.length}", args.model, dtype, device)
    cases = cases_of(blocks, sparsity)
    sets = [Inputs(*tensors) for tensors in rotate(tuple(blocks.inputs()), device)]
    calls: dict[str, Callable[[int], Any]] = {
        name: ours(case, direction, sets) for name, case in cases.items()
    }
    tiles = {name: tile_of(case, direction) for name, case in cases.items()}
    if args.flex:
        try:
            with as_unavailable():
                call = contestant("flex", blocks, direction, sets)
                call(0)
                calls[FLEX], cases[FLEX], tiles[FLEX] = call, blocks, (BLOCK, BLOCK)
        except Unavailable as reason:
            print(f"{FLEX} {direction.value}: {reason}", flush=True)
    effort = Effort(seconds=args.seconds, warmups=2)
    indices = [(index,) for index in range(len(sets))]
    timings = measure_interleaved(calls, indices, device, effort)
    # Timed separately: a call that drops its lists makes the other calls rebuild theirs.
    anew = {name: _anew(call, cases[name].mask) for name, call in calls.items() if name != FLEX}
    anew_timings = measure_interleaved(anew, indices, device, effort)
    lines = []
    for name, case in cases.items():
        ms, share = timings[name].median, case.pairs / (case.seq_q * case.seq_k)
        tile = tiles[name]
        tflops = case.flops(direction) / ms / 1e9
        lists_ms = anew_timings[name].median - ms if name in anew else None
        lines.append(Line(name, f"{tile[0]} x {tile[1]}", share, visited(case, *tile), ms, tflops, lists_ms))
    return lines


def _anew(call: Callable[[int], Any], mask: Any) -> Callable[[int], Any]:
    """The call, with the schedules of its mask dropped before it."""

    def without_schedules(index: int) -> Any:
        torch.ops.attnforge.forget_schedules(mask.data)
        return call(index)

    return without_schedules


def rows(what: str, lines: list[Line]) -> list[str]:
    """Rows of the table; the first line is that of spans."""
    base = lines[0]
    found = []
    for line in lines:
        cells = (
            what,
            line.mask,
            line.tile,
            f"{line.share:.3f}",
            f"{line.visited:.3f}",
            f"{line.ms:.3f}",
            f"{line.tflops:.3g}",
            f"{line.tflops_visited:.3g}",
            f"{line.tflops / base.tflops:.2f}",
            f"{line.tflops_visited / base.tflops_visited:.2f}",
            "-" if line.lists_ms is None else f"{line.lists_ms:.3f}",
        )
        found.append(markdown_row(cells))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Dense masks of random blocks beside spans.")
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=[0.5, 0.9], help="fractions of blocks that are hidden"
    )
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of timed calls of each contestant"
    )
    parser.add_argument(
        "--flex", action="store_true", help="add FlexAttention, which compiles for half a minute"
    )
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    facts = facts_line(machine(torch.device(args.device)))
    table = markdown_head(HEAD)
    for sparsity in args.sparsity:
        for direction in Direction:
            table += rows(f"{sparsity:.0%} {direction.value}", measure(sparsity, direction, args))
    text = "\n".join((f"S = {args.length}, {args.model}, {args.dtype}; {facts}", "", *table, ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
