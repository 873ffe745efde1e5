"""Masks that share a class of the tuned tables: what the class's one kernel costs each, and which one costs least.

    python benchmarks/shared_classes.py [--heads 28/4/128 ...] [--lengths 8192 ...] [--markdown FILE] [--json FILE]
    python benchmarks/shared_classes.py --part 0/2 --table-out DIR        # on one of two GPUs

A class tells masks apart by the average number of keys that a query sees, not by how uneven they are: a window of 4,096
keys and documents of 8,192 tokens are of one class. For each length and octave of visible keys this times a window,
causal documents, and documents that see themselves whole ("images"), and with `--packs` packs of their class, with the
kernels of the nearest entries of all of them, interleaved. "loss" is the time of a kernel over that of the fastest one
of the same call. A class's kernel is what dispatch chooses now, unless another one lowers the largest loss by
`--least`; then it is the one with the smallest largest loss.

`--table-out` writes an entry of each class, also where nothing changes, so that an entry of another class does not
displace it, and one for deterministic calls if some of the kernels sum in a fixed order: of these the one with the
smallest average loss. The kernels are verified first, as a search does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.packing import PackedMask
from attnforge.benchmarks import near_entries
from attnforge.benchmarks.goals import part_of
from attnforge.benchmarks.near_entries import CHOSEN, Job, Measured
from attnforge.codegen.spec import Direction, DType, Spec
from attnforge.runtime import tables
from attnforge.runtime.rounds import MANY
from attnforge.runtime.search.case import Case, as_deterministic
from attnforge.runtime.tables import Tuned

HEADS = ("28/4/128", "32/8/128", "16/16/128", "14/2/64", "8/8/64")
LENGTHS = (8192, 16384, 32768, 65536)
PACKS = ("pretrain/0", "vlm_only/0", "edit_only/0", "finetune/0", "t2i_lowres/0", "documents/0", "images/0")
OCTAVES = range(8, 14)  # of visible keys
MIDDLE = 1.4  # of an octave
LEAST_DOCUMENTS = 3
HEAD = ("class", "call", "chosen", "loss", "class's kernel", "loss")


# ---- Calls


def packed(name: str, visible: float, like: Case) -> Case:
    """Documents or images of half to one and a half times their mean length, in which a query sees `visible` keys."""
    length = like.seq_q
    spread = 1 + 1 / 12  # E[n^2] / E[n]^2 of lengths n
    mean = visible / spread * (2 if name == "documents" else 1)
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, round(draw.uniform(0.5, 1.5) * mean)))
    mask = PackedMask(
        lengths, lengths, ["causal" if name == "documents" else "full"] * len(lengths), like.device
    )
    heads = like.name.split()[-1]
    return replace(like, name=f"{name}:{round(mean)}/{length} {heads}", mask=mask, pairs=mask.pairs)


def calls_of(heads: str, length: int, dtype: DType, device: torch.device) -> Iterator[Case]:
    """A window, documents and images in the middle of each octave that leaves several documents."""
    for octave in OCTAVES:
        visible = MIDDLE * 2**octave
        if length < LEAST_DOCUMENTS * 2 * visible:
            return
        window = make_case(f"window:{round(visible)}/{length}", heads, dtype, device)
        yield window
        yield from (packed(name, visible, window) for name in ("documents", "images"))


def classes_of(args: argparse.Namespace) -> list[list[Job]]:
    """Calls by their class, each with the kernels of the nearest entries of all calls of its class."""
    device, dtype = torch.device(args.device), DType(args.dtype)
    cases = [
        case
        for heads, length in product(args.heads, args.lengths)
        for case in calls_of(heads, length, dtype, device)
    ]
    cases += [make_case(pack, heads, dtype, device) for heads, pack in product(args.heads, args.packs)]
    found: dict[str, list[Job]] = defaultdict(list)
    for case, way in product(cases, Direction):
        job = near_entries.job_of(case, way, args.entries)
        if job.specs:
            found[json.dumps(class_of(job))].append(job)
    part, parts = args.part
    shared = [jobs for jobs in found.values() if len(jobs) > 1][part::parts]
    return [[replace(job, specs=_all_specs(jobs)) for job in jobs] for jobs in shared]


def class_of(job: Job) -> dict[str, Any]:
    """The class of the tables that the call is in."""
    spec = next(iter(job.specs.values()))
    call = job.case.call(spec.problem)
    return Tuned(
        spec, call.group, call.size, 0.0, 0.0, visible_keys=call.visible_keys, rounds=call.rounds
    ).cls


def _in_words(cls: dict[str, Any]) -> str:
    tokens, keys, rounds = 2 ** cls["octave"], 2 ** cls["visible_octave"], cls.get("rounds", MANY)
    what = f"{cls['direction']}, head_dim {cls['head_dim']}, ratio {cls['group']}"
    return f"{what}, {tokens} tokens, {keys} keys, {rounds} rounds"


def _all_specs(jobs: list[Job]) -> dict[str, Spec]:
    return {slug: spec for job in jobs for slug, spec in job.specs.items()}


# ---- Losses


@dataclass(frozen=True)
class Shared:
    """The timings of a class's calls, and what follows from them."""

    calls: list[Measured]
    least: float

    def loss(self, one: Measured, slug: str) -> float:
        times = {name: timing.median for name, timing in one.first.items()}
        return times[slug] / min(times.values())

    def worst(self, slug: str) -> float:
        """The largest loss of a kernel."""
        return max(self.loss(one, slug) for one in self.calls)

    @property
    def kernel(self) -> str:
        """The class's: what is chosen now, or the one with the smallest largest loss."""
        job = self.calls[0].job
        best = min(job.specs, key=self.worst)
        gains = self.worst(CHOSEN) >= self.least * self.worst(best)
        return best if gains or job.chosen not in job.specs else job.chosen

    @property
    def fixed_order(self) -> str | None:
        """Of the kernels that sum in a fixed order, if there are any, the one with the smallest geometric mean."""
        specs = self.calls[0].job.specs
        names = [name for name, spec in specs.items() if getattr(spec.tuning, "deterministic", False)]
        return min(
            names, key=lambda name: math.prod(self.loss(one, name) for one in self.calls), default=None
        )

    def rows(self) -> Iterator[str]:
        head = _in_words(class_of(self.calls[0].job))
        for one in self.calls:
            now, then = (f"{self.loss(one, name):.3f}" for name in (CHOSEN, self.kernel))
            yield markdown_row((head, one.job.case.name, one.job.chosen, now, self.kernel, then))

    def log(self) -> Iterator[str]:
        for one in self.calls:
            times = {slug: timing.median for slug, timing in one.first.items()}
            job = one.job
            facts = {"class": class_of(job), "case": job.case.name, "visible_keys": job.case.visible_keys}
            yield json.dumps(facts | {"chosen": job.chosen, "ms": times})

    def save(self, args: argparse.Namespace) -> Iterator[str]:
        """Write the entries of the class, each with the call that loses most; yields what they are."""
        yield self._save(self.kernel, args)
        if self.fixed_order is not None:
            yield f"deterministic: {self._save(self.fixed_order, args, deterministic=True)}"

    def _save(self, kernel: str, args: argparse.Namespace, deterministic: bool = False) -> str:
        loser = max(self.calls, key=lambda one: self.loss(one, kernel if deterministic else CHOSEN))
        case = as_deterministic(loser.job.case) if deterministic else loser.job.case
        times = {name: loser.first[name] for name in (CHOSEN, kernel)}
        only = Measured(replace(loser.job, case=case), {kernel: times[kernel]}, times)
        return near_entries.save(only, argparse.Namespace(**vars(args) | {"least": 0.0}))


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Masks that share a class of the tuned tables.")
    parser.add_argument("--heads", nargs="+", default=HEADS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--packs", nargs="*", default=PACKS, metavar="PACK")
    parser.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="I/N", help="of N shares of the classes"
    )
    parser.add_argument("--entries", type=int, default=4, help="kernels that each call brings, at most")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.01, help="of timed calls of each kernel")
    parser.add_argument("--jobs", type=int, default=15, help="compilers at a time")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="write all times to this file, a line a call")
    parser.add_argument("--table-out", type=Path, metavar="DIR", help="write entries to the table there")
    parser.add_argument("--least", type=float, default=1.015, help="gain from which the kernel changes")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    with tables.unchanged():
        classes = classes_of(args)
    near_entries.compile_all([job for jobs in classes for job in jobs], args)
    facts = facts_line(machine(torch.device(args.device)))
    lines = [facts, "", *markdown_head(HEAD)]
    print("\n".join(lines), flush=True)
    measured = []
    for jobs in classes:
        measured.append(Shared([near_entries.measure(job, args) for job in jobs], args.least))
        lines += measured[-1].rows()
        print("\n".join(lines[-len(jobs) :]), flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join((*lines, "")))
    if args.json:
        args.json.write_text("".join(f"{line}\n" for shared in measured for line in shared.log()))
    if args.table_out:  # last: calls must not take the entries of calls before
        for shared in measured:
            for entry in shared.save(args):
                print(f"{_in_words(class_of(shared.calls[0].job))}: {entry}", flush=True)


if __name__ == "__main__":
    main()
