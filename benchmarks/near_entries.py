"""What calls lose by the choice of their kernel: each beside the kernels of the nearest tuned entries.

    python benchmarks/near_entries.py [--heads 28/4/128 ...] [--packs window:512/8192 ...] [--markdown near.md]
    python benchmarks/near_entries.py --call 16/16/80 full/4x4096 images/0 --call 8/8/40 full/2x4096
    python benchmarks/near_entries.py --untuned --part 0/2 --table-out DIR        # on one of two GPUs

All kernels of a call are interleaved, the present choice of dispatch among them as "chosen"; then the fastest one and
the choice once more, for longer. "gain" is the time of the choice over that of the fastest kernel, in the second
timing. Only kernels that tables have are tried, so that few must be compiled; `attnforge search` looks for new ones.

Where a head_dim has no entries, the kernels are the first guess of the search space, which has a column of its own, and
those of the nearest head dims, wider and narrower ones, as far as they are feasible. `--untuned` measures such calls.

`--table-out` writes an entry for each call: the fastest kernel if it gains `--least` or more, else the choice, so that
an entry of another call does not displace it. The kernel is verified first, as a search does.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.bench import machine, ours
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.benchmarks.goals import part_of
from attnforge.codegen.families import family_of
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Direction, DType, Problem, Spec
from attnforge.runtime import choosing, dispatch, fitting, kernels, tables
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.journal import environment
from attnforge.runtime.search.timing import Effort, Timing, measure_interleaved, rotate
from attnforge.runtime.search.verify import WrongResult, odd_case
from attnforge.runtime.search.winners import entry_of
from attnforge.runtime.search.worker import Bench

HEADS = (
    "28/4/128",
    "32/8/128",
    "16/16/128",
    "64/8/64",
    "14/2/64",
    "8/8/64",
    "8/4/256",
    "16/16/72",
    "24/24/96",
)
LENGTHS, WINDOWS = (1024, 4096, 16384, 65536), (128, 512, 1024, 4096)
SHAPES = ("1x1024", "1x4096", "2x2048", "4x2048", "2x4096", "1x8192", "1x16384")
PACKS = (
    *(f"window:{keys}/{length}" for length, keys in product(LENGTHS, WINDOWS) if keys < length),
    *(f"{mask}/{shape}" for mask, shape in product(("causal", "full"), SHAPES)),
)
# Calls of models whose head_dim has no entries: vision towers (Qwen2-VL), Phi-2 and Stable LM, Stable Diffusion.
UNTUNED = (
    ("16/16/80", "full/1x4096", "full/4x4096", "full/16x1024", "images/0", "window:512/8192"),
    ("32/32/80", "causal/1x2048", "causal/4x2048", "causal/8x1024", "documents/0"),
    ("8/8/40", "full/2x4096"),
    ("8/8/80", "full/2x1024"),
    ("8/8/160", "full/2x1024", "full/2x4096"),
    ("32/8/112", "causal/4x2048"),
    ("40/8/120", "causal/4x2048"),
    ("16/16/32", "full/8x2048"),
    ("12/12/48", "full/8x1024", "causal/4x2048"),
    ("16/8/224", "causal/4x2048"),
)
NEIGHBOURS = 3  # head dims whose entries are tried where the call's own has none
CHOSEN = "chosen"
HEAD = ("call", "pass", "kernels", "chosen, ms", "first guess, ms", "fastest, ms", "gain", "fastest kernel")


@dataclass(frozen=True)
class Job:
    """A call, the kernels to time, and which of them dispatch chooses."""

    case: Case
    direction: Direction
    specs: dict[str, Spec]  # by slug
    chosen: str = ""
    first_guess: str = ""  # where the head_dim has no entries


@dataclass(frozen=True)
class Measured:
    """The first timing of all kernels, and the second one of a few."""

    job: Job
    first: dict[str, Timing]
    again: dict[str, Timing]

    @property
    def fastest(self) -> str:
        """The winner of the first timing."""
        return min(self.first, key=lambda name: self.first[name].median)

    @property
    def gain(self) -> float:
        return self.again[CHOSEN].median / self.again[self.fastest].median


def near(case: Case, direction: Direction, count: int) -> dict[str, Spec]:
    """The kernels of the nearest entries that differ, at most `count`, in dispatch's order."""
    problem = case.problem(direction, kernels.target(case.device))
    return {spec.slug: spec for spec in choosing.different(_choices(problem, case), count)}


def _choices(problem: Problem, case: Case) -> Iterator[Spec]:
    """Dispatch's, by the tables, for a problem like the case's."""
    found = choosing.choose(case.call(problem), tables.device_name(case.device))
    return (choice.spec for choice in found)


def choice_of(case: Case, direction: Direction) -> Spec:
    """What dispatch chooses."""
    problem = case.problem(direction, kernels.target(case.device))
    return dispatch.choose(case.call(problem), case.device).spec


def of_other_head_dims(case: Case, direction: Direction, count: int) -> dict[str, Spec]:
    """The kernels of entries of the nearest head dims, one of each in turn; none if the call's has entries."""
    problem = case.problem(direction, kernels.target(case.device))

    def translated(there: Problem) -> Iterator[Spec]:
        for spec in _choices(there, case):
            try:
                yield fitting.planned(Spec(problem, spec.tuning))
            except Infeasible:
                continue

    each = [translated(there) for there in neighbours(problem, tables.device_name(case.device))]
    in_turn = (spec for spec in chain.from_iterable(zip_longest(*each)) if spec)
    return {spec.slug: spec for spec in choosing.different(in_turn, count)}


def neighbours(problem: Problem, name: str) -> list[Problem]:
    """The problem with the NEIGHBOURS nearest head dims that have entries; none if its own head dims have."""
    entries = [entry.spec.problem for entry in tables.known(name)]
    there = {
        replace(problem, head_dim=one.head_dim, dim_v=one.dim_v)
        for one in entries
        if (one.direction, one.arch, one.family) == (problem.direction, problem.arch, problem.family)
    }

    def octaves(other: Problem) -> float:
        ratios = other.head_dim / problem.head_dim, other.head_dim_v / problem.head_dim_v
        return sum(abs(math.log2(ratio)) for ratio in ratios)

    return [] if problem in there else sorted(there, key=octaves)[:NEIGHBOURS]


def job_of(case: Case, direction: Direction, count: int) -> Job:
    """The kernels to time: dispatch's choice and those of the nearest entries, at most `count` in all."""
    choice = choice_of(case, direction)
    others = of_other_head_dims(case, direction, count)
    if not others:
        return Job(case, direction, near(case, direction, count), choice.slug)
    guess = next(candidates(choice.problem))
    found = {choice.slug: choice, guess.slug: guess, **others}
    return Job(case, direction, dict(islice(found.items(), count)), choice.slug, guess.slug)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Those of this part: whole head dims, whose calls share kernels and entries."""
    device = torch.device(args.device)
    calls = [*(UNTUNED if args.untuned else ()), *(args.call or ())]
    pairs = [(heads, pack) for heads, *packs in calls for pack in packs]
    pairs = pairs or list(product(args.heads, args.packs))
    cases = [make_case(pack, heads, DType(args.dtype), device) for heads, pack in pairs]
    with tables.unchanged():
        return [job_of(case, way, args.entries) for case in share(cases, *args.part) for way in Direction]


def share(cases: list[Case], part: int, parts: int) -> list[Case]:
    """The cases of one of `parts` shares of about as many cases: each head_dim goes to the smallest share so far."""
    dims = Counter((case.head_dim, case.dim_v) for case in cases)
    taken, shares = [0] * parts, {}
    for dim, count in dims.most_common():
        shares[dim] = taken.index(min(taken))
        taken[shares[dim]] += count
    return [case for case in cases if shares[case.head_dim, case.dim_v] == part]


def compile_all(jobs: list[Job], args: argparse.Namespace) -> None:
    """Load every kernel, `--jobs` compilers at a time, backwards first, which take longest."""
    specs = {slug: spec for job in jobs for slug, spec in job.specs.items()}
    if args.table_out:  # and what the backwards of the small case of a verification begin with
        small = [choice_of(odd_case(job.case), Direction.FORWARD) for job in jobs]
        specs |= {spec.slug: spec for spec in small}
    longest_first = sorted(specs.values(), key=lambda spec: spec.problem.direction is Direction.FORWARD)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda spec: kernels.load(spec, torch.device(args.device)), longest_first))


def measure(job: Job, args: argparse.Namespace) -> Measured:
    """All kernels of a call, then the fastest one, the choice and the first guess again."""
    case, way = job.case, job.direction
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    calls: dict[str, Callable[[int], Any]] = {CHOSEN: ours(case, way, sets)}
    calls |= {slug: ours(case, way, sets, spec) for slug, spec in job.specs.items()}

    def timed(some: Mapping[str, Callable[[int], Any]], seconds: float) -> dict[str, Timing]:
        how = Effort(seconds=seconds, repeats=80, least=7, warmups=2)
        return measure_interleaved(some, [(index,) for index in range(len(sets))], case.device, how)

    first = timed(calls, args.seconds)
    best = min(first, key=lambda name: first[name].median)
    few = dict.fromkeys((CHOSEN, best, job.first_guess or CHOSEN))
    again = first if len(few) == 1 else timed({name: calls[name] for name in few}, 6 * args.seconds)
    return Measured(job, first, again)


def row_of(found: Measured) -> str:
    job, again = found.job, found.again
    guess = f"{again[job.first_guess].median:.4f}" if job.first_guess else "-"
    times = f"{again[CHOSEN].median:.4f}", guess, f"{again[found.fastest].median:.4f}"
    head = job.case.name, job.direction.value, str(len(job.specs))
    return markdown_row((*head, *times, f"{found.gain:.3f}", found.fastest))


def save(found: Measured, args: argparse.Namespace) -> str:
    """Write the entry of a call into `--table-out`; returns what it is, or why there is none."""
    job, case = found.job, found.job.case
    wins = found.gain >= args.least
    slug = found.fastest if wins else job.chosen
    if slug not in job.specs:
        return "no entry: the choice is of no table"
    spec, timing = job.specs[slug], found.again[found.fastest if wins else CHOSEN]
    if spec.tuning not in family_of(spec.problem).space(spec.problem):
        return f"no entry: {slug} is in no search's space"
    try:
        list(Bench(case, job.direction).verify(kernels.load(spec, case.device)))
    except WrongResult as error:
        return f"no entry: {slug} is wrong: {error}"
    name = tables.device_name(case.device)
    flops = case.flops(job.direction) / timing.median / 1e9
    notes = {"variants": len(job.specs), "by": "benchmarks/near_entries.py"}
    env = environment(name, spec.problem.arch)
    entry = entry_of(case, spec, timing.median, flops, notes, env)
    tables.save(name, [entry], args.table_out, beside=list(job.specs.values()))
    return f"entry: {slug}"


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calls beside the kernels of their nearest tuned entries.")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HEADS")
    parser.add_argument("--packs", nargs="+", default=list(PACKS), metavar="PACK")
    parser.add_argument(
        "--call", nargs="+", action="append", metavar="WORD", help="heads and their packs, instead"
    )
    parser.add_argument("--untuned", action="store_true", help="calls of head dims without entries, instead")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="I/N", help="of N shares by head_dim")
    parser.add_argument("--entries", type=int, default=10, help="kernels of a call, at most")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.01, help="of timed calls of each kernel, at first")
    parser.add_argument("--jobs", type=int, default=15, help="compilers at a time")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--table-out", type=Path, metavar="DIR", help="write entries to the table there")
    parser.add_argument("--least", type=float, default=1.02, help="gain from which the fastest one is taken")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    jobs = jobs_of(args)
    compile_all(jobs, args)
    facts = facts_line(machine(torch.device(args.device)))
    lines = [facts, "", *markdown_head(HEAD)]
    print("\n".join(lines), flush=True)
    measured = []
    for job in jobs:
        measured.append(measure(job, args))
        lines.append(row_of(measured[-1]))
        print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join((*lines, "")))
    if args.table_out:  # last: calls must not take the entries of calls before
        for found in measured:
            print(f"{found.job.case.name} {found.job.direction.value}: {save(found, args)}", flush=True)


if __name__ == "__main__":
    main()
