"""Random problems against float64: `python tests/fuzzing/fuzz.py --seconds 60`, or `make fuzz SECONDS=60`.

Every case is drawn from one integer; a failure prints the command that repeats it. See docs/reliability.md for what is
drawn, how far from float64 a result may be (tests/fuzzing/fuzz_exact.py), and what was run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz_exact
import torch
import torch.nn.functional as F
from fuzz_data import Data, data, poison
from fuzz_problems import CASES, FAMILIES, LATER, MISSING, Problem, problem, without
from torch import Tensor

import attnforge

HANGS = 300.0  # seconds after which a case counts as hanging: the stacks are printed and the process ends
WARMED = 3  # cases of a family that are run ahead, in parallel, to compile its kernels


# ---- One case


def call(case: Problem, x: Data, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None), out (B, Hq, Sq, Dv)."""
    options: dict[str, Any] = {"deterministic": case.deterministic}
    if case.way == "flash_attn_func":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attnforge.flash_attn_func(q, k, v, softmax_scale=case.scale, **x.extra, **options).transpose(
            1, 2
        ), None
    if case.way == "flash_attn_varlen_func":
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out = attnforge.flash_attn_varlen_func(q, k, v, softmax_scale=case.scale, **x.extra, **options)
        return out.transpose(0, 1)[None], None
    if case.way == "sdpa":
        masked: dict[str, Any] = {"is_causal": True} if case.family.mask == "causal" else x.extra
        with (
            contextlib.suppress(PassedOn),
            mock.patch.object(F, "scaled_dot_product_attention", pass_on),
            attnforge.sdpa(),
        ):
            return F.scaled_dot_product_attention(q, k, v, **masked, scale=case.scale, enable_gqa=True), None
    options |= {"scale": case.scale, "return_lse": case.lse}
    found: Any = attnforge.attention(q, k, v, x.mask, **options)
    return found if case.lse else (found, None)


class PassedOn(Exception):
    """`sdpa()` left a call to torch, whose results are none of ours."""


def pass_on(*_: object, **__: object) -> Tensor:
    raise PassedOn


def compute(case: Problem, x: Data) -> dict[str, Tensor]:
    """The results of our kernels: out, lse where it is asked for, and gradients where they are."""
    if case.mode != "grad":
        with torch.no_grad() if case.mode == "no_grad" else torch.inference_mode(), casting(case):
            out, lse = wrapped(case)(case, x, x.q, x.k, x.v)
        return {"out": out} | ({} if lse is None else {"lse": lse})
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    with casting(case):
        out, lse = wrapped(case)(case, x, *leaves)
    poison(case)
    ends, gradients = [out], [x.dout]
    if case.lse_grad and lse is not None and x.dlse is not None:
        ends.append(lse)
        gradients.append(x.dlse)
    grads = torch.autograd.grad(ends, leaves, gradients, retain_graph=True)
    if case.deterministic:
        again = torch.autograd.grad(ends, leaves, gradients)
        for name, first, second in zip(("dq", "dk", "dv"), grads, again, strict=True):
            if not torch.equal(first, second):
                raise AssertionError(f"{name} differs between two runs of a deterministic backward")
    for name, grad, leaf in zip(("dq", "dk", "dv"), grads, leaves, strict=True):
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise AssertionError(f"{name} is {grad.dtype} of shape {tuple(grad.shape)}")
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    return found | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def casting(case: Problem) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(case.device, case.family.dtype, enabled=case.wrap == "autocast")


def wrapped(case: Problem) -> Any:
    """`call`, or what torch.compile makes of it."""
    if case.wrap != "compile":
        return call
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=case.way == "attention", backend="aot_eager")


def check(case: Problem) -> list[str]:
    """What is wrong with our results of a case, a sentence each; empty if nothing is."""
    x = data(case)
    before = [torch.tensor([], dtype=torch.uint8, device=case.device).set_(s).clone() for s in x.storages]
    poison(case)
    try:
        found = compute(case, x)
    except Exception as error:
        if "CUDA error" in str(error):
            raise  # nothing works in this process any more
        if case.deterministic and str(error).startswith("deterministic: no "):
            return check(
                replace(case, deterministic=False)
            )  # a refusal in words, where nothing sums in a fixed order
        return [f"{type(error).__name__}: {error}"]
    after = [torch.tensor([], dtype=torch.uint8, device=case.device).set_(s) for s in x.storages]
    wrong = [
        f"{name} or memory around it was written to"
        for name, old, new in zip(("q", "k", "v", "dout"), before, after, strict=True)
        if not torch.equal(old, new)
    ]
    if found["out"].dtype != case.family.dtype:
        wrong.append(f"out is {found['out'].dtype}")
    q, k, v = (t.detach().to(case.family.dtype) for t in (x.q, x.k, x.v))
    inputs = q, k, v
    dout, dlse = (x.dout, x.dlse) if "dq" in found else (None, None)
    right = fuzz_exact.answer(inputs, x.seen, x.scale, dout, dlse)
    theirs = fuzz_exact.plain(inputs, x.seen, x.scale, dout, dlse)
    limit = inputs[2].abs().max().item() if inputs[2].numel() else 0.0
    expected = functools.cache(lambda: fuzz_exact.typical(inputs, x.seen, x.scale, dout, dlse, right))
    return wrong + fuzz_exact.complaints(found, right, theirs, limit, expected)


# ---- Many


def seeds(palette: int, families: int) -> Iterator[int]:
    """Seeds of a run: the families of the palette in turns."""
    for number in itertools.count():
        for index in range(families):
            yield (palette * FAMILIES + index) * CASES + number


def compile_ahead(device: str, palette: int, families: int, workers: int, later: tuple[str, ...]) -> None:
    """Compile in parallel what the first cases of each family need, in every direction."""

    def one(seed: int, deterministic: bool) -> None:
        case = without(problem(seed, device), (*later, "empties"))
        case = replace(case, mode="grad", wrap="plain", deterministic=deterministic, overwrite=False)
        if case.way == "sdpa":  # replaces a function of torch for the whole process
            case = replace(case, way="attention")
        with contextlib.suppress(
            RuntimeError, ValueError, TypeError, AssertionError
        ):  # the run itself will tell
            compute(case, data(case))

    first = [next(itertools.islice(seeds(palette, families), n, None)) for n in range(families * WARMED)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, first + first[:families], [False] * len(first) + [True] * families))


def main() -> int:
    arguments = parse()
    device, later = arguments.device, tuple(arguments.without)
    if device == "cpu":
        torch.set_num_threads(arguments.threads)
    if arguments.replay is not None:
        return replay(arguments.replay, device, later)
    faulthandler.enable()
    path = Path(tempfile.mkstemp(prefix="fuzz-", suffix=".seed")[1])
    print(
        f"palette {arguments.palette}, {arguments.families} families on {device}; "
        f"left out: {', '.join(later) or 'nothing'}"
    )
    print(f"the seed of the case that runs is in {path}", flush=True)
    started = time.monotonic()
    compile_ahead(device, arguments.palette, arguments.families, arguments.workers, later)
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", flush=True)
    counts, wrong = run(arguments, path, later)
    report(counts, wrong, time.monotonic() - started)
    path.unlink()
    return min(wrong.total(), 1)


def run(
    arguments: argparse.Namespace, path: Path, later: tuple[str, ...]
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Cases until the time or their number is up; how many there were, and how many were wrong, by what they were."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + arguments.seconds
    shown = time.monotonic()
    with path.open("w") as file:
        for done, seed in enumerate(seeds(arguments.palette, arguments.families)):
            if done >= arguments.cases or time.monotonic() > end:
                break
            os.pwrite(file.fileno(), f"{seed}\n".encode(), 0)
            faulthandler.dump_traceback_later(HANGS, exit=True)
            case = without(problem(seed, arguments.device), later)
            said = check(case)
            counts.update(kinds(case))
            if said:
                wrong.update(kinds(case))
                tell(case, said, later)
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{done + 1} cases, {wrong['all']} wrong", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return counts, wrong


def kinds(case: Problem) -> list[str]:
    """What a case counts as in the report."""
    names = [
        "all",
        str(case.family.dtype),
        f"mask {case.family.mask}",
        f"by {case.way}",
        case.mode,
        f"values {case.values}",
    ]
    names += [case.wrap] if case.wrap != "plain" else []
    names += ["an empty tensor"] if 0 in (case.batch, case.seq_q, case.seq_k) else []
    names += (
        ["deterministic"] * case.deterministic
        + ["return_lse"] * case.lse
        + ["gradient of lse"] * case.lse_grad
    )
    return names + ["mask overwritten"] * case.overwrite


def tell(case: Problem, said: list[str], later: tuple[str, ...]) -> None:
    flags = " --without" + "".join(f" '{feature}'" for feature in later)
    print(f"WRONG {case}")
    for sentence in said:
        print(f"    {sentence}")
    print(f"    python tests/fuzzing/fuzz.py --device {case.device} --replay {case.seed}{flags}", flush=True)


def replay(seed: int, device: str, later: tuple[str, ...]) -> int:
    case = without(problem(seed, device), later)
    said = check(case)
    if said:
        tell(case, said, later)
    else:
        print(f"right: {case}")
    return bool(said)


def report(counts: collections.Counter[str], wrong: collections.Counter[str], seconds: float) -> None:
    for name in sorted(counts, key=lambda name: (name != "all", name)):
        print(f"{name:28s} {counts[name]:7d} cases {wrong[name]:5d} wrong")
    print(f"{counts['all']} cases, {wrong['all']} wrong, {seconds:.0f} s")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after so many, compiling not counted"
    )
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="stop after so many")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument(
        "--palette", type=int, default=0, help="which families; another number, other kernels"
    )
    parser.add_argument("--families", type=int, default=24, help="how many: each compiles 2 kernels or more")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a CPU kernel")
    parser.add_argument("--replay", type=int, help="run the case of this seed alone")
    parser.add_argument("--without", nargs="*", default=MISSING, choices=LATER, help="features to leave out")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
