"""Looks for races: results must be the same bits on every run, also with random delays at barriers. Needs a GPU.

    python benchmarks/race_hunt.py --seconds 150

Each problem runs `--repeats` times with ordinary kernels, then `--chaos-runs` times with kernels that sleep at random
at their barriers (ATTNFORGE_CHAOS): forward with lse, and deterministic gradients. All results must equal those of the
first ordinary run bit by bit; then the exit status is 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

import attnforge
from attnforge.runtime import dispatch, kernels
from attnforge.runtime.build.settings import CHAOS
from attnforge.runtime.masks import AnyMask

HANGS = 120  # seconds after which a problem counts as hanging: the stacks are printed and the process ends
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """One call: sizes, dtype, and the kind of mask."""

    mask: str
    head_dim: int
    heads: int
    heads_kv: int
    length: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.length} {self.heads}/{self.heads_kv}/{self.head_dim} {self.mask} {kind}"


# Few kernels and many shapes: tiles that end early, fewer and more work tiles than multiprocessors.
PROBLEMS = (
    Problem("spans", 128, 28, 4, 4096),
    Problem("full", 128, 28, 4, 1111),
    Problem("causal", 128, 8, 2, 2500),
    Problem("dense", 128, 8, 8, 1500),
    Problem("spans", 64, 14, 2, 3000),
    Problem("full", 64, 16, 2, 2048, 2),
    Problem("causal", 64, 14, 2, 1999, 2),
    Problem("dense", 64, 6, 2, 2049),
    Problem("full", 72, 16, 16, 1024, 4),
    Problem("causal", 128, 8, 8, 1025, 2, torch.float16),
    Problem("dense", 64, 4, 4, 1300, dtype=torch.float32),
    Problem("spans", 128, 4, 4, 777, 3),
    Problem("full", 128, 4, 1, 129, 3),
    Problem("causal", 128, 40, 8, 640),
    Problem("dense", 128, 4, 1, 3333),
    Problem("spans", 64, 8, 1, 1025, 2),
    Problem("full", 64, 2, 2, 5000),
    Problem("causal", 64, 32, 32, 321, 4),
    Problem("full", 72, 4, 2, 333, 5),
    Problem("causal", 128, 4, 2, 3000, 1, torch.float16),
    Problem("causal", 96, 24, 24, 1000, 4),
    Problem("full", 96, 6, 2, 1025, 3),
    Problem("spans", 96, 4, 4, 1500, 2),
    Problem("causal", 64, 8, 8, 1024, 16),
    Problem("causal", 192, 8, 2, 1500),
    Problem("full", 256, 4, 4, 1025, 2),
    Problem("causal", 256, 8, 8, 2048),
    Problem("spans", 256, 4, 2, 1300),
)


def mask_of(problem: Problem) -> AnyMask:
    """A mask of the kind: a BAGEL pack, random blocks, or none."""
    length, device = problem.length, "cuda"
    if problem.mask == "full":
        return None
    if problem.mask == "causal":
        return attnforge.Causal()
    if problem.mask == "spans":
        samples = [length // 2, length // 3, length - length // 2 - length // 3]
        splits = [
            part
            for sample in samples
            for part in (sample // 5, sample // 2, sample - sample // 5 - sample // 2)
        ]
        return attnforge.bagel.PackedMask(samples, splits, ["causal", "noise", "full"] * 3, device)
    generator = torch.Generator(device).manual_seed(1)
    share = (
        torch.rand((length // 64 + 1, length // 64 + 1), generator=generator, device=device)
        .mul(2.5)
        .sub(0.75)
    )
    share = share.repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length]
    return attnforge.DenseMask(torch.rand((length, length), generator=generator, device=device) < share)


def inputs_of(problem: Problem) -> list[Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [problem.heads, problem.heads_kv, problem.heads_kv, problem.heads]
    shapes = [(problem.batch, problem.length, heads, problem.head_dim) for heads in sizes]
    drawn = [
        torch.randn(s, generator=generator, device="cuda").to(problem.dtype).transpose(1, 2) for s in shapes
    ]
    return drawn


def run(inputs: list[Tensor], mask: AnyMask) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = attnforge.attention(q, k, v, mask, return_lse=True, deterministic=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def compile_all(problems: Iterable[Problem]) -> None:
    """Run each problem once, in threads, so that the compilers run in parallel."""
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda problem: run(inputs_of(problem), mask_of(problem)), problems))
    torch.cuda.synchronize()


def differing(
    inputs: list[Tensor], mask: AnyMask, first: list[Tensor], count: int, late: Callable[[], bool]
) -> tuple[int, Tensor]:
    """The number of runs made, at most `count`, and for each result in how many of them it differs from `first`."""
    wrong = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for done in range(count):
        if late():
            return done, wrong
        found = run(inputs, mask)
        # Compared as integers: 0 and -0 differ, and NaNs of the same bits are equal.
        wrong += torch.stack(
            [(x.view(_word(x)) != y.view(_word(y))).any() for x, y in zip(found, first, strict=True)]
        )
        if done % 50 == 49:
            torch.cuda.synchronize()
    return count, wrong


def _word(x: Tensor) -> torch.dtype:
    return torch.int32 if x.element_size() == 4 else torch.int16


def hunt(
    seed: int, count: int, firsts: dict[Problem, list[Tensor]], late: Callable[[], bool]
) -> tuple[int, int]:
    """Runs and differing runs of all problems, with random delays by `seed` (0: none). `firsts` keeps results."""
    os.environ[CHAOS] = str(seed)
    dispatch.forget()
    started = time.monotonic()
    compile_all(PROBLEMS)
    if seed and not any(key[2] == seed for key in kernels._handles):
        raise RuntimeError("no kernel with chaos was loaded")
    print(
        f"{f'chaos {seed}' if seed else 'ordinary'}: compiled in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    total = bad = 0
    for problem in PROBLEMS:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        inputs, mask = inputs_of(problem), mask_of(problem)
        first = firsts.setdefault(problem, run(inputs, mask))
        started = time.monotonic()
        runs, wrong = differing(inputs, mask, first, count, late)
        counts = dict(zip(NAMES, wrong.tolist(), strict=True))
        each = (time.monotonic() - started) / max(runs, 1) * 1e3
        verdict = "equal" if not any(counts.values()) else f"DIFFERENT: {counts}"
        print(f"  {problem!s:40s} {runs:5d} runs of {each:6.2f} ms, {verdict}", flush=True)
        total, bad = total + runs, bad + max(counts.values())
    return total, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit, with compilation")
    parser.add_argument("--repeats", type=int, default=1000, help="ordinary runs of each problem")
    parser.add_argument(
        "--chaos-runs", type=int, default=200, help="runs with random delays of each problem and seed"
    )
    parser.add_argument(
        "--chaos", type=int, nargs="*", default=[1], help="seeds of the delays; each compiles all kernels"
    )
    arguments = parser.parse_args()
    faulthandler.enable()
    end = time.monotonic() + arguments.seconds
    firsts: dict[Problem, list[Tensor]] = {}
    results = {}
    for seed in (0, *arguments.chaos):
        count = arguments.chaos_runs if seed else arguments.repeats
        results[seed] = hunt(seed, count, firsts, lambda: time.monotonic() > end)
    faulthandler.cancel_dump_traceback_later()
    wanted = {seed: len(PROBLEMS) * (arguments.chaos_runs if seed else arguments.repeats) for seed in results}
    for seed, (total, bad) in results.items():
        name = f"chaos {seed}" if seed else "ordinary"
        print(f"{torch.cuda.get_device_name()}: {name}: {total} of {wanted[seed]} runs, {bad} different")
    return int(any(bad or total < wanted[seed] for seed, (total, bad) in results.items()))


if __name__ == "__main__":
    sys.exit(main())
