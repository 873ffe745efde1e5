"""Runs compute-sanitizer on the GPU kernels of the tuned tables and those of short queries, and counts its reports.

    python benchmarks/sanitize.py --seconds 540 --log sanitize.log --markdown sanitize.md
    python benchmarks/sanitize.py --specs specs.json      # the kernels of a JSON list of specs instead
    CUDA_VISIBLE_DEVICES=1 python benchmarks/sanitize.py --part 1/4    # every fourth kernel, on one of four GPUs

Needs a GPU. Each tool checks each kernel in a process of its own, several at a time: Hopper's kernels first, by
memcheck, racecheck, synccheck and initcheck. Checks that do not start in time count as not run. The exit status is 1
if there is any report, or anything was not run. docs/reliability.md lists known false reports.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from goals import part_of

import attnforge
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.codegen.families import make_plan
from attnforge.codegen.render import render
from attnforge.codegen.space import splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.build import cache
from attnforge.runtime.export import read_specs
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.scores import Score
from attnforge.runtime.search.winners import tuned_specs

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LENGTH = 400  # long enough that buffers are reused; no tile size divides it
WALKS = 24  # sequences for persistent blocks: more work tiles than an H200 has multiprocessors
SHORT = 40, 6 * LENGTH  # queries and keys of kernels that split the keys: several ranges of several tiles
BATCHES = 1, 12  # of those: an H200 splits the keys among blocks, and among those of a cluster
HANGS = 240  # seconds after which a process is ended
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass(frozen=True)
class Outcome:
    """The number of reports of a tool on a kernel, -1 if the tool or the kernel failed, and the log."""

    reports: int
    log: str


def gpu_specs(listed: Path | None = None) -> list[Spec]:
    """GPU kernels that run here, of a JSON list, or of the tuned tables and short queries; none of a mask function.

    Hopper's own come first, and backward before forward.
    """
    here = kernels.targets(torch.device("cuda", 0))
    known = [item.spec for item in read_specs(listed)] if listed else [*tuned_specs(), *short_specs(here)]
    specs = [spec for spec in known if spec.problem.arch.is_gpu and not spec.problem.mask_mod]
    found = [spec for spec in specs if spec.problem.arch in here]
    return sorted(found, key=lambda spec: (spec.problem.arch is not Arch.SM90A, spec.slug))


def short_specs(archs: Sequence[Arch]) -> Iterator[Spec]:
    """Kernels that split the keys, in bf16, for the fewest and for many rows."""
    for arch, head_dim, mask, rows in product(
        archs, (64, 128), (Mask.FULL, Mask.CAUSAL, Mask.SPANS), (1, 1000)
    ):
        yield next(splitting(Problem(Direction.FORWARD, arch, DType.BFLOAT16, head_dim, mask, 16), rows))


def run_kernel(slug: str, listed: Path | None) -> None:
    """Launch one kernel, once or for each of BATCHES."""
    spec = next(spec for spec in gpu_specs(listed) if spec.slug == slug)
    persistent = any(launch.persistent for launch in make_plan(spec).launches)
    batches = BATCHES if getattr(spec.tuning, "splits", 0) else (WALKS if persistent else 1,)
    for batch in batches:
        run_batch(spec, batch)
    torch.cuda.synchronize()
    print("launched", slug)


def run_batch(spec: Spec, batch: int) -> None:
    """Launch a kernel once. Inputs come from the host, so that initcheck sees them written."""
    problem = spec.problem
    dtype, generator = kernels.TORCH_DTYPES[problem.dtype], torch.Generator().manual_seed(0)
    seq_q, seq_k = SHORT if getattr(spec.tuning, "splits", 0) else (LENGTH, LENGTH)
    dim, dim_v = problem.head_dim, problem.head_dim_v
    q, k, v, dout = (
        torch.randn(batch, length, heads, width, generator=generator).to(dtype).cuda().transpose(1, 2)
        for length, heads, width in ((seq_q, 4, dim), (seq_k, 2, dim), (seq_k, 2, dim_v), (seq_q, 4, dim_v))
    )
    mask = mask_of(problem.mask, seq_q, seq_k)
    score = score_of(problem, generator)
    handle = kernels.load(spec, q.device)
    if problem.direction is Direction.FORWARD:
        ops.forward(q, k, v, mask, None, handle, score=score)
    else:  # not the forward's out and lse: initcheck does not see TMA stores
        out = torch.randn(dout.shape, generator=generator).to(dtype).cuda()
        lse = torch.full(dout.shape[:3], math.log(LENGTH)).cuda()
        ops.backward(dout, q, k, v, out, lse, mask, None, False, handle, score=score)


def score_of(problem: Problem, generator: torch.Generator) -> Score | None:
    """The score of a kernel; it reads numbers for each q head, or (Hq, distances)."""
    if not problem.score:
        return None
    shapes = [(4, 2 * LENGTH)[:dims] for _, dims in problem.score.tensors]
    return Score(str(problem.score), tuple(torch.rand(shape, generator=generator).cuda() for shape in shapes))


def mask_of(kind: Mask, seq_q: int, seq_k: int) -> AnyMask:
    if kind is Mask.FULL:
        return None
    if kind is Mask.CAUSAL:
        return attnforge.Causal()
    if kind is Mask.SPANS and seq_q < seq_k:  # a third of the queries see a key, none see the last keys
        starts = torch.arange(seq_k, dtype=torch.int32) * 7 % seq_q
        ends = (starts + seq_q // 3).clamp(max=seq_q)
        ends[-seq_k // 8 :] = starts[-seq_k // 8 :]
        return attnforge.Spans(starts.cuda(), ends.cuda())
    if kind is Mask.SPANS:
        modes = ["causal", "noise", "full", "causal", "noise"]
        return attnforge.bagel.PackedMask([250, 150], [70, 100, 80, 50, 100], modes, "cuda")
    generator = torch.Generator().manual_seed(1)
    blocks = (torch.rand(LENGTH // 40, LENGTH // 40, generator=generator) < 0.5).repeat_interleave(40, 0)
    seen = blocks.repeat_interleave(40, 1) & (torch.rand(LENGTH, LENGTH, generator=generator) < 0.9)
    return attnforge.DenseMask(seen.cuda())


def sanitizer() -> list[str]:
    """The path of compute-sanitizer, and its option that selects kernels by name."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = next(
        (p for place in places if (p := shutil.which("compute-sanitizer", path=f"{place}/bin"))), None
    )
    found = found or shutil.which("compute-sanitizer")
    if found is None:
        raise SystemExit("compute-sanitizer is not in $CUDA_HOME/bin, /usr/local/cuda/bin or PATH")
    said = subprocess.run([found, "--help"], capture_output=True, text=True).stdout
    option = next((name for name in ("--kernel-regex", "--kernel-name") if name in said), None)
    return [found, option or ""]


def check(tool: str, spec: Spec, program: list[str], listed: Path | None) -> Outcome:
    """Run a tool over one kernel."""
    command = [program[0], "--tool", tool, "--print-limit", "20"]
    if program[1] and tool != "initcheck":  # initcheck must also see the writes of other kernels
        command += [program[1], "kns=attnforge_"]
    command += [sys.executable, __file__, "--kernel", spec.slug]
    command += ["--specs", str(listed)] if listed else []
    # Each tensor is an allocation of its own, so that accesses beyond its end are found.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS)
    except subprocess.TimeoutExpired:
        return Outcome(-1, f"still ran after {HANGS} s")
    log = done.stdout + done.stderr
    summary = SUMMARY.findall(log)
    ran = f"launched {spec.slug}" in log and summary
    return Outcome(int(summary[-1]) if ran else -1, log)


def table(specs: list[Spec], outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = markdown_head(("kernel", *TOOLS))
    for spec in specs:
        cells = [said(outcomes.get((tool, spec.slug))) for tool in TOOLS]
        lines.append(markdown_row((spec.slug, *cells)))
    return "\n".join(lines)


def said(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    return "failed" if outcome.reports < 0 else str(outcome.reports)


def compile_ahead(specs: list[Spec], listed: Path | None) -> None:
    launcher()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda spec: cache.obtain(render(spec)), specs))
    for spec in specs:  # also compiles the kernels that make masks and schedules
        run_kernel(spec.slug, listed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=540.0, help="time after which no check starts")
    parser.add_argument("--workers", type=int, default=8, help="processes at a time")
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument(
        "--only",
        default="",
        help="only kernels whose name contains this: bwd, sm90a_ (Hopper's own), sm90_ ...",
    )
    parser.add_argument("--part", type=part_of, default=(0, 1), help="I/N: every Nth kernel, from the Ith on")
    parser.add_argument("--log", type=Path, help="write the output of the tools for kernels with reports")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--specs", type=Path, help="JSON list of specs to check instead of the tuned tables")
    parser.add_argument("--kernel", help="launch this kernel once; the tools run this")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.kernel:
        run_kernel(arguments.kernel, arguments.specs)
        return 0
    started = time.monotonic()
    part, parts = arguments.part
    specs = [spec for spec in gpu_specs(arguments.specs) if arguments.only in spec.slug][part::parts]
    if not specs:
        raise SystemExit(f"--only {arguments.only}: no kernel for this GPU has that in its name")
    program = sanitizer()
    compile_ahead(specs, arguments.specs)
    print(f"{len(specs)} kernels compiled and run in {time.monotonic() - started:.0f} s", flush=True)

    def one(job: tuple[str, Spec]) -> None:
        if time.monotonic() - started < arguments.seconds:
            tool, spec = job
            outcomes[tool, spec.slug] = outcome = check(tool, spec, program, arguments.specs)
            print(
                f"{time.monotonic() - started:5.0f} s {tool:9s} {said(outcome):>8s} {spec.slug}", flush=True
            )

    outcomes: dict[tuple[str, str], Outcome] = {}
    jobs = [(tool, spec) for tool in arguments.tools for spec in specs]
    jobs.sort(key=lambda job: job[1].problem.arch is not Arch.SM90A)
    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(one, jobs))
    text = table(specs, outcomes)
    bad = {key: outcome for key, outcome in outcomes.items() if outcome.reports}
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")
    if arguments.log:
        parts = [f"==== {tool} {slug}\n{outcome.log}\n" for (tool, slug), outcome in sorted(bad.items())]
        arguments.log.write_text("".join(parts))
    print(text)
    print(
        f"{len(outcomes)} of {len(jobs)} runs on {torch.cuda.get_device_name()}; with reports or failed: {len(bad)}"
    )
    return int(bool(bad) or len(outcomes) < len(jobs))


if __name__ == "__main__":
    sys.exit(main())
