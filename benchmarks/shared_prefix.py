"""Completions of one prompt: one pack with the mask `shared_prefix`, against the prefix repeated for each completion.

    python benchmarks/shared_prefix.py [--completions 16] [--tokens 1024] [--prefix 16384] [--markdown FILE]

Layouts: `pack` is one sequence, the prefix and then all completions; ours, FlexAttention and cudnn.flex_attention take
its mask. `batch` is causal attention on a batch entry for each completion, which begins with a copy of the prefix;
`varlen` the same for FlashAttention-3 and 4, as documents of one sequence. Before any time, out, dq, dk and dv of
everybody are compared with ours on the pack, where copies of the prefix are averaged (out) or summed (gradients):
`differs` is the largest RMS difference of one of them, in the prefix or in the completions, relative to its RMS. Who
differs by more than rounding is not timed, and the exit status is 1.

Times are medians, all interleaved; "of ours" is the time over that of our pack, "both" that of forward + backward.
TFLOP/s are those of the visible pairs of the line's own layout: copies of the prefix count as work. The memory is that
of q, k, v and dout, and the peak of a forward and backward above them, without what is made once for a mask.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import attnforge
from attnforge.bagel.measure import peers
from attnforge.bagel.measure.agreement import TOLERANCE, relative, results
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import model_of, pairs_of
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import OURS
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.case import Case, Inputs, causal_case
from attnforge.runtime.search.timing import Effort, measure_interleaved, rotate

PEERS = ("flex", "cudnn-flex", "fa3")
HEAD = (
    "attention", "layout", "tokens", "fwd ms", "bwd ms", "of ours: fwd", "bwd", "both", "fwd TFLOP/s", "bwd TFLOP/s",
    "memory MiB", "differs",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """One prompt of `prefix` tokens and its completions of `tokens` each."""

    completions: int
    tokens: int
    prefix: int

    @property
    def length(self) -> int:
        """Of a completion with its prefix."""
        return self.prefix + self.tokens

    def repeat(self, x: Tensor) -> Tensor:
        """(1, H, S, D) of the pack to (completions, H, length, D), in (B, S, H, D) memory as x."""
        prefix, own = x[0].transpose(0, 1).split((self.prefix, self.completions * self.tokens))
        copies = prefix.expand(self.completions, *prefix.shape)
        return torch.cat((copies, own.unflatten(0, (self.completions, self.tokens))), 1).transpose(1, 2)

    def repeat_inputs(self, x: Inputs) -> Inputs:
        """A copy's dout of the prefix is divided, so that gradients summed over the copies are those of the pack."""
        dout = self.repeat(x.dout)
        dout[:, :, : self.prefix] /= self.completions
        return Inputs(self.repeat(x.q), self.repeat(x.k), self.repeat(x.v), dout)

    def parts(self, x: Tensor, layout: str, total: bool) -> tuple[Tensor, Tensor]:
        """The prefix (H, prefix, D), float32, and the completions (H, completions * tokens, D) of a result.

        Copies of the prefix are summed if `total`, else averaged.
        """
        if layout == "pack":
            return x[0, :, : self.prefix].float(), x[0, :, self.prefix :]
        if layout == "varlen":
            x = x[0].unflatten(1, (self.completions, self.length)).transpose(0, 1)
        prefix = x[:, :, : self.prefix].sum(0, dtype=torch.float32)
        own = x[:, :, self.prefix :].transpose(0, 1).flatten(1, 2)
        return prefix if total else prefix / self.completions, own


def flat(x: Inputs) -> Inputs:
    """A batch as one sequence; nothing is copied."""
    return Inputs(*(t.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for t in x))


def cases_of(group: Group, model: str, dtype: DType, device: torch.device) -> dict[str, Case]:
    """By layout."""
    heads = model_of(model)
    lengths = [group.length] * group.completions
    batch = causal_case(
        "batch",
        (group.completions, heads.heads_q, heads.heads_kv, group.length, heads.head_dim),
        dtype,
        device,
    )
    batch = replace(batch, dim_v=heads.head_dim_v)
    mask = attnforge.masks.shared_prefix([(group.prefix, [group.tokens] * group.completions)], device)
    size = mask.starts.numel()
    pack = replace(batch, name="pack", batch=1, seq_q=size, seq_k=size, mask=mask, pairs=pairs_of(mask, size))
    documents = PackedMask(lengths, lengths, ["causal"] * group.completions, device)
    size = documents.starts.numel()
    varlen = replace(
        pack, name="varlen", seq_q=size, seq_k=size, mask=documents, pairs=batch.pairs * group.completions
    )
    return {"pack": pack, "batch": batch, "varlen": varlen}


@dataclass(frozen=True)
class Contestant:
    """An attention in a layout, checked: its case and inputs, and what the check found."""

    name: str
    case: Case
    sets: list[Inputs]
    memory: float  # bytes, see the module; nan on a CPU
    differs: float

    def call(self, direction: Direction) -> Callable[[int], object]:
        """As `measure_interleaved` takes it."""
        return peers.contestant(self.name, self.case, direction, self.sets)


def difference(group: Group, layout: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest of all tensors, in the prefix or in the completions; see the module."""
    worst = 0.0
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        pairs = zip(group.parts(one, layout, index > 0), group.parts(other, "pack", True), strict=True)
        for mine, exact in pairs:
            if exact.numel():
                worst = max(worst, relative(mine, exact))
    return worst


def check(
    name: str, case: Case, sets: list[Inputs], group: Group, expected: tuple[Tensor, ...] | None
) -> tuple[Contestant, tuple[Tensor, ...]]:
    """Run one forward and backward; its results, too. `expected`: ours on the pack, None for that itself.

    Raises Unavailable where the attention cannot run the case.
    """
    with peers.memory_freed(case.device), peers.as_unavailable():
        call = peers.attention_of(name, case)
        results(call, sets[0])  # compiles, and makes what is made once for a mask
        got, peak = peers.with_peak(lambda: results(call, sets[0]), case.device)
    differs = 0.0 if expected is None else difference(group, case.name, got, expected)
    memory = peak + sum(t.numel() * t.element_size() for t in sets[0])
    return Contestant(name, case, sets, memory, differs), got


def contestants(group: Group, args: argparse.Namespace) -> tuple[list[Contestant], bool]:
    """Those that agree with ours on the pack, which is the first; and whether any does not."""
    dtype, device = DType(args.dtype), torch.device(args.device)
    cases = cases_of(group, args.model, dtype, device)
    packs = [Inputs(*tensors) for tensors in rotate(tuple(cases["pack"].inputs()), device)]
    batches = [group.repeat_inputs(x) for x in packs]
    sets = {"pack": packs, "batch": batches, "varlen": [flat(x) for x in batches]}
    ours, expected = check(OURS, cases["pack"], packs, group, None)
    found, wrong = [ours], False
    layouts = {name: "varlen" if name == "fa3" or name in peers.FA4 else "pack" for name in args.peers}
    for name, layout in ((OURS, "batch"), *layouts.items()):
        try:
            one, _ = check(name, cases[layout], sets[layout], group, expected)
        except Unavailable as reason:
            print(f"{name}, {layout}: {reason}", flush=True)
            continue
        if one.differs > TOLERANCE[dtype]:
            print(f"{name}, {layout}: differs from ours by {one.differs:.1e}, so it is not timed", flush=True)
            wrong = True
        else:
            found.append(one)
    return found, wrong


def rows(found: list[Contestant], seconds: float) -> list[str]:
    """Time everybody in turns; rows of the table, the first is ours on the pack."""
    first = found[0]
    how = Effort(seconds=seconds, warmups=2)
    inputs = [(index,) for index in range(len(first.sets))]
    times: list[dict[str, float]] = []
    for direction in Direction:
        with peers.memory_freed(first.case.device):
            calls = {f"{one.name} {one.case.name}": one.call(direction) for one in found}
            timings = measure_interleaved(calls, inputs, first.case.device, how)
            times.append({name: timing.median for name, timing in timings.items()})
    base = [next(iter(by_name.values())) for by_name in times]
    table = []
    for one in found:
        ms = [by_name[f"{one.name} {one.case.name}"] for by_name in times]
        rates = [one.case.flops(direction) / t / 1e9 for direction, t in zip(Direction, ms, strict=True)]
        cells = (
            one.name,
            one.case.name,
            str(one.case.batch * one.case.seq_q),
            *(f"{t:.3f}" for t in ms),
            *(f"{t / ours:.2f}" for t, ours in zip(ms, base, strict=True)),
            f"{sum(ms) / sum(base):.2f}",
            *(f"{rate:.4g}" for rate in rates),
            "-" if math.isnan(one.memory) else f"{one.memory / 2**20:.0f}",
            f"{one.differs:.1e}",
        )
        table.append(markdown_row(cells))
    return table


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Completions in one pack, or each with a copy of its prefix."
    )
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of each completion")
    parser.add_argument("--prefix", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--model", default="28/4/128")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of timed calls of each line and pass"
    )
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=peers.known())
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(words)
    if min(args.completions, args.tokens, args.prefix) < 1:
        parser.error("--completions, --tokens and --prefix must be at least 1")
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    found, wrong = contestants(Group(args.completions, args.tokens, args.prefix), args)
    table = [*markdown_head(HEAD), *rows(found, args.seconds)]
    facts = facts_line(machine(torch.device(args.device)))
    what = (
        f"{args.completions} completions of {args.tokens} tokens on {args.prefix}, {args.model} {args.dtype}"
    )
    text = "\n".join((facts, what, "", *table, ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
