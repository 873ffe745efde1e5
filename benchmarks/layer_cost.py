"""Fits `attnforge.bagel.LayerCost` to measured times of one decoder layer, and tests its predictions.

    python benchmarks/layer_cost.py --markdown cost.md         # BAGEL-7B-MoT: without checkpointing, and full
    python benchmarks/layer_cost.py --kinds none --packs pretrain/0 finetune/0 finetune/1 finetune/2 t2i_lowres/0:16384

The layer is that of step_time.py, forward and backward with an existing mask. "pretrain/0:16384" are the first samples
of pretrain/0, as many as 16384 tokens hold; padding is left out. All packs of a kind of checkpointing are timed
interleaved; "spread" is the slowest over the fastest time, less 1. Columns of errors: predicted over measured time,
less 1, by the fit to all packs, by the fit to all other packs ("left out"), and by `LayerCost()`. Then the constants
of the fits, in seconds: times of `token`, `pair` and `fixed`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from step_time import KINDS, Bench

from attnforge.bagel import LayerCost
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.interleaved import Call, interleaved
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import memory_freed
from attnforge.bagel.mot.attention import make_operator
from attnforge.bagel.mot.layer import CONFIGS, MotConfig, MotLayer
from attnforge.bagel.workloads import Workload, workload
from attnforge.runtime.search.timing import Timing

# All kinds, from 6k to 37k tokens; with as many tokens, packs with few pairs and with many.
PACKS = (
    *("pretrain/0", "pretrain/1", "vlm_only/0", "edit_only/0", "edit_only/1", "t2i_lowres/0"),
    *("finetune/0", "finetune/1", "finetune/2", "t2i_lowres/1:16384", "vlm_only/1:24576", "pretrain/2:20480"),
)
LEAST = 4  # packs: a fit to all but one needs three
HEAD = ("pack", "tokens", "pairs, 1e6", "ms", "spread", "fit", "left out", "default")


@dataclass(frozen=True)
class Measured:
    """A pack and its time."""

    pack: Workload
    timing: Timing

    @property
    def seconds(self) -> float:
        return self.timing.median / 1e3

    @property
    def work(self) -> tuple[int, int]:
        """(tokens, visible pairs)"""
        return self.pack.used, self.pack.mask("cpu").pairs

    def error(self, cost: LayerCost) -> float:
        """Predicted over measured time, less 1."""
        return cost.seconds(*self.work) / self.seconds - 1


def pack_of(name: str) -> Workload:
    """The pack called so, or of "NAME:TOKENS" the first samples of pack NAME. Raises ValueError if that is none."""
    known, _, tokens = name.rpartition(":")
    if not known or known.endswith(".jsonl"):
        return workload(name)
    pack = workload(known)
    ends = [end for end in accumulate(pack.sample_lens) if end <= min(int(tokens), pack.used)]
    if not ends:
        raise ValueError(
            f"--packs: {name} has no sample, the first of {known} has {pack.sample_lens[0]} tokens"
        )
    splits = list(accumulate(pack.split_lens)).index(ends[-1]) + 1
    # The last sample and split of a pack are its padding.
    samples, lengths = (*pack.sample_lens[: len(ends)], 0), (*pack.split_lens[:splits], 0)
    modes = (*pack.attn_modes[:splits], "causal")
    return replace(
        pack, name=name, sample_lens=samples, split_lens=lengths, attn_modes=modes, used=ends[-1], facts={}
    )


def measure(
    layer: MotLayer, packs: Sequence[Workload], kind: str, config: MotConfig, args: argparse.Namespace
) -> list[Measured]:
    """Time the layer on all packs, interleaved."""
    device = torch.device(args.device)
    with memory_freed(device):
        calls = {pack.name: step(layer, pack, kind, config) for pack in packs}
        timings = interleaved(calls, range(1), device, args.seconds, args.repeats)
        calls.clear()
    return [Measured(pack, timings[pack.name]) for pack in packs]


def step(layer: MotLayer, pack: Workload, kind: str, config: MotConfig) -> Call:
    """Forward and backward with an existing mask, which has run once."""
    operator = make_operator("attnforge", config.heads_q, pack.tokens, next(layer.parameters()).dtype)
    bench = Bench(layer, pack, operator, kind, config)
    shared = bench.share()

    def call(index: int) -> None:
        bench.run(shared)
        bench.forget()

    call(0)
    return call


def fit(found: Sequence[Measured]) -> LayerCost:
    """The cost nearest to the times."""
    return LayerCost.fit([one.pack for one in found], [one.seconds for one in found])


def left_out(found: Sequence[Measured]) -> list[float]:
    """The error of each pack's prediction by the fit to all others."""
    return [one.error(fit([other for other in found if other is not one])) for one in found]


def rows(found: Sequence[Measured]) -> list[str]:
    """The table of a kind of checkpointing."""
    cost, table = fit(found), markdown_head(HEAD)
    for one, without in zip(found, left_out(found), strict=True):
        tokens, pairs = one.work
        errors = (f"{error:+.1%}" for error in (one.error(cost), without, one.error(LayerCost())))
        spread = f"{one.timing.worst / one.timing.best - 1:.1%}"
        cells = (
            one.pack.name,
            str(tokens),
            f"{pairs / 1e6:.1f}",
            f"{one.timing.median:.2f}",
            spread,
            *errors,
        )
        table.append(markdown_row(cells))
    return table


def constants(found: dict[str, list[Measured]]) -> list[str]:
    """A row for each kind: the fit to all packs, and the worst errors."""
    head = ("checkpointing", "token", "pair", "fixed", "worst, fit", "worst, left out", "worst, default")
    table = markdown_head(head)
    for kind, measured in found.items():
        cost = fit(measured)
        errors = (
            [one.error(cost) for one in measured],
            left_out(measured),
            [one.error(LayerCost()) for one in measured],
        )
        numbers = (f"{value:.4g}" for value in (cost.token, cost.pair, cost.fixed))
        worst = (f"{max(map(abs, column)):.1%}" for column in errors)
        table.append(markdown_row((kind, *numbers, *worst)))
    return table


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LayerCost from measured times of a decoder layer.")
    parser.add_argument("--packs", nargs="+", default=list(PACKS), metavar="PACK")
    parser.add_argument("--kinds", nargs="+", default=["none", "full"], choices=KINDS["attnforge"])
    parser.add_argument("--model", choices=tuple(CONFIGS), default="7B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of timed steps of each kind")
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each pack, at most")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args(words)
    if len(args.packs) < LEAST:
        parser.error(f"--packs: got {len(args.packs)}, expected at least {LEAST}")
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    packs, config = [pack_of(name) for name in args.packs], CONFIGS[args.model]
    torch.manual_seed(0)
    with torch.device(args.device):
        layer = MotLayer(config, make_operator("attnforge", config.heads_q, 0)).to(torch.bfloat16)
    found = {}
    facts = facts_line(machine(torch.device(args.device)))
    text = [f"One layer of {args.model}, forward + backward, bf16; {facts}"]
    for kind in args.kinds:
        found[kind] = measure(layer, packs, kind, config, args)
        text += ["", f"checkpointing: {kind}", "", *rows(found[kind])]
        print("\n".join(text[-len(packs) - 5 :]), flush=True)
    text += ["", *constants(found), ""]
    print("\n".join((text[0], *text[-len(found) - 4 :])))
    if args.markdown:
        args.markdown.write_text("\n".join(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
