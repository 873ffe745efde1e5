"""What calls lose by the choice of their kernel: each beside the kernels of the nearest tuned entries.

    python benchmarks/near_entries.py [--heads 28/4/128 ...] [--packs window:512/8192 ...] [--markdown near.md]

All kernels of a call are interleaved, the present choice of dispatch among them as "chosen"; then the fastest one and
the choice once more, for longer. "gain" is the time of the choice over that of the fastest kernel, in the second
timing. Only kernels that tables have are tried, so that few must be compiled; `attnforge search` looks for new ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.bench import machine, ours
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.codegen.spec import Direction, DType, Spec
from attnforge.runtime import kernels, tables
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Effort, Timing, measure_interleaved, rotate

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
CHOSEN = "chosen"
HEAD = ("call", "pass", "kernels", "chosen, ms", "fastest, ms", "gain", "fastest kernel")


@dataclass(frozen=True)
class Job:
    """A call, and the kernels of its nearest entries."""

    case: Case
    direction: Direction
    specs: dict[str, Spec]  # by slug


def near(case: Case, direction: Direction, count: int) -> dict[str, Spec]:
    """The kernels of the nearest entries that differ, at most `count`, in dispatch's order."""
    arch, name = kernels.target(case.device), tables.device_name(case.device)
    choices = tables.choose(
        case.problem(direction, arch),
        case.heads_q // case.heads_kv,
        case.seq_q,
        name,
        visible_keys=case.visible_keys,
        rounds=case.rounds(direction),
    )
    return {spec.slug: spec for spec in tables.different(choices, count)}


def jobs_of(args: argparse.Namespace) -> list[Job]:
    device = torch.device(args.device)
    found = []
    with tables.unchanged():
        for heads, pack in product(args.heads, args.packs):
            case = make_case(pack, heads, DType(args.dtype), device)
            found += [Job(case, way, near(case, way, args.entries)) for way in Direction]
    return found


def compile_all(jobs: list[Job], args: argparse.Namespace) -> None:
    """Load every kernel, `--jobs` compilers at a time."""
    specs = {slug: spec for job in jobs for slug, spec in job.specs.items()}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda spec: kernels.load(spec, torch.device(args.device)), specs.values()))


def measure(job: Job, args: argparse.Namespace) -> str:
    """The row of a call."""
    case, way = job.case, job.direction
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    calls: dict[str, Callable[[int], Any]] = {CHOSEN: ours(case, way, sets)}
    calls |= {slug: ours(case, way, sets, spec) for slug, spec in job.specs.items()}

    def timed(some: Mapping[str, Callable[[int], Any]], seconds: float) -> dict[str, Timing]:
        how = Effort(seconds=seconds, repeats=80, least=7, warmups=2)
        return measure_interleaved(some, [(index,) for index in range(len(sets))], case.device, how)

    first = timed(calls, args.seconds)
    best = min(first, key=lambda name: first[name].median)
    again = (
        first if best == CHOSEN else timed({name: calls[name] for name in (CHOSEN, best)}, 6 * args.seconds)
    )
    chosen, fastest = again[CHOSEN].median, again[best].median
    numbers = (str(len(job.specs)), f"{chosen:.4f}", f"{fastest:.4f}", f"{chosen / fastest:.3f}")
    return markdown_row((case.name, way.value, *numbers, best))


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calls beside the kernels of their nearest tuned entries.")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HEADS")
    parser.add_argument("--packs", nargs="+", default=list(PACKS), metavar="PACK")
    parser.add_argument("--entries", type=int, default=10, help="kernels of a call, at most")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.01, help="of timed calls of each kernel, at first")
    parser.add_argument("--jobs", type=int, default=15, help="compilers at a time")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    jobs = jobs_of(args)
    compile_all(jobs, args)
    facts = ", ".join(f"{key} {value}" for key, value in machine(torch.device(args.device)).items())
    lines = [facts, "", *markdown_head(HEAD)]
    print("\n".join(lines), flush=True)
    for job in jobs:
        lines.append(measure(job, args))
        print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join((*lines, "")))


if __name__ == "__main__":
    main()
