"""All goals of `bagel/measure/goals.py` in one run: ours and the peers interleaved, with goals, ratios and errors.

    python benchmarks/goals.py [--suite forward] [--only "28/4/128"] [--seeds 2] [--out DIR]
    python benchmarks/goals.py --suite grid --seeds 1 --seconds 0.25 --out DIR    # then benchmarks/draw_grid.py
    python benchmarks/goals.py --suite grid --part 0/2 --out DIR0                 # on one of two GPUs
    python benchmarks/goals.py --suite grid --add-peers flex --out DIR            # FlexAttention in every cell, too

First compiles everything in separate processes. Then measures case by case, the first seed of all packs before the
second seed of any, and appends a line per case to DIR/goals.jsonl; DIR/goals.md has the tables. A run with the same
DIR continues an earlier one. A case that killed the process is tried once more, without the peers. FlexAttention is no
peer of the grid unless it is added: Inductor compiles it for half a minute and more in each cell.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.measure.bench import OURS, machine
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.goal_report import markdown, missed, one_line
from attnforge.bagel.measure.goals import GOALS, SEEDS, Goal
from attnforge.bagel.measure.interleaved import Entry, Line, run_goal
from attnforge.bagel.measure.peers import EXTRA, known
from attnforge.codegen.spec import DType, Mask
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.search.case import Case

SUITES = ("forward", "backward", "step")  # unless others are named


def triton_peer(case: Case) -> Attention:
    """Our Triton attention as a peer."""
    if case.mask_kind not in (Mask.FULL, Mask.CAUSAL):
        raise Unavailable("takes no mask")
    try:
        from attnforge.benchmarks.triton_attention import attention
    except ImportError as error:
        raise Unavailable(f"Triton is not installed: {error}") from None
    causal = case.mask_kind is Mask.CAUSAL
    return lambda q, k, v: attention(q, k, v, causal, case.scale)


def chosen(args: argparse.Namespace) -> list[tuple[Goal, str, str]]:
    """(goal, pack, model) in the order of the run."""
    goals = [
        with_peers(goal, args.add_peers)
        for suite in args.suite or SUITES
        for goal in GOALS[suite]
        if re.search(args.only, f"{goal.label} {goal.work}")
    ]
    rows = [
        (goal, *goal.cases[seed]) for seed in range(args.seeds) for goal in goals if seed < len(goal.cases)
    ]
    heads = list(dict.fromkeys(model for _, _, model in rows))
    part, parts = args.part
    return [row for row in rows if heads.index(row[2]) % parts == part]  # whole heads: they share kernels


def with_peers(goal: Goal, names: Sequence[str]) -> Goal:
    """The goal with more peers."""
    return replace(goal, peers=tuple(dict.fromkeys((*goal.peers, *names))))


def part_of(text: str) -> tuple[int, int]:
    """The value of --part."""
    part, parts = (int(number) for number in text.split("/"))
    if not 0 <= part < parts:
        raise ValueError
    return part, parts


Job = tuple[str, str, str]  # label, work, pack of a goal


def warm(rows: list[tuple[Goal, str, str]], args: argparse.Namespace) -> None:
    """Compile what the rows need, `--jobs` processes at a time. A failure is reported; measuring meets it again."""
    groups: dict[tuple[object, ...], dict[tuple[int, int], Job]] = {}
    for goal, pack, model in rows:
        case = make_case(pack, model, DType.BFLOAT16, torch.device("cpu"))
        alike = groups.setdefault((case.mask_kind, model, goal.work, goal.peers), {})  # share most kernels
        alike.setdefault((case.batch, case.seq_q), (goal.label, goal.work, pack))
    jobs = sorted((list(alike.values()) for alike in groups.values()), key=lambda job: job[0][1])

    def one(job: list[Job]) -> None:
        named = [word for part in job for word in ("--one", *part)]
        added = ("--add-peers", *args.add_peers) if args.add_peers else ()
        command = [sys.executable, __file__, *named, *added, "--device", args.device]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(f"compiling {job}: status {done.returncode}: {done.stdout[-500:]}", flush=True)

    begin = time.time()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, jobs))  # backward first: it takes longest
    print(f"compiled in {len(jobs)} processes, {time.time() - begin:.0f} s", flush=True)


def compile_one(label: str, work: str, pack: str, names: Sequence[str], device: torch.device) -> None:
    """Run every contestant of one case once or twice."""
    goal, model = next(
        (goal, model)
        for goals in GOALS.values()
        for goal in goals
        for name, model in goal.cases
        if (goal.label, goal.work, name) == (label, work, pack)
    )
    case = make_case(pack, model, DType.BFLOAT16, device)
    run_goal(with_peers(goal, names), case, seconds=0.0, errors=False)


Key = tuple[str, str, str]  # label, work, case
DEAD = Entry(note="the process died")


def history(path: Path) -> tuple[dict[Key, Line], set[Key]]:
    """Lines of an earlier run, and cases that killed their process once. Those that did so twice have a line."""
    lines: dict[Key, Line] = {}
    begun: Counter[Key] = Counter()
    for text in path.read_text().splitlines() if path.exists() else []:
        data = json.loads(text)
        if "begin" in data:
            begun[tuple(data["begin"])] += 1
        else:
            line = Line.from_json(data)
            lines[line.label, line.work, line.case] = line
    once = {key for key, count in begun.items() if key not in lines and count == 1}
    for key in begun.keys() - lines.keys() - once:
        lines[key] = Line(*key, {OURS: DEAD})
    return lines, once


def measure(rows: list[tuple[Goal, str, str]], args: argparse.Namespace) -> list[Line]:
    """Measure the rows that are not in the log; stop at the time limit."""
    device, path = torch.device(args.device), args.out / "goals.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    lines, died = history(path)
    begin = time.time()
    with path.open("a") as log:
        for goal, pack, model in rows:
            if time.time() - begin > args.limit:
                print(
                    f"time limit reached: {pack} {goal.work} and all later cases are not measured", flush=True
                )
                break
            key = (goal.label, goal.work, f"{pack} {model}")
            if key in lines:
                continue
            log.write(json.dumps({"begin": key}) + "\n")
            log.flush()
            since = time.time()
            case = make_case(pack, model, DType.BFLOAT16, device)
            line = one_case(goal, case, args, key in died)
            lines[key] = line
            log.write(json.dumps(line.to_json()) + "\n")
            log.flush()
            print(f"{one_line(line)} [{time.time() - since:.1f} s]", flush=True)
            write_tables(list(lines.values()), args)  # a run may be cut off
    return list(lines.values())


def write_tables(lines: list[Line], args: argparse.Namespace) -> str:
    """Write DIR/goals.md: all tables, and the goals that were missed."""
    text = markdown(lines, machine(torch.device(args.device)))
    text += "\n".join(("", "Missed:", "", *(f"- {one}" for one in missed(lines) or ["nothing"]), ""))
    (args.out / "goals.md").write_text(text)
    return text


def one_case(goal: Goal, case: Case, args: argparse.Namespace, alone: bool) -> Line:
    """The line of a case; `alone`: without the peers, one of which killed the process. Raises if the device is lost."""
    errors = case.name.split()[0] == goal.cases[0][0] and not args.no_errors and args.errors in goal.label
    line = run_goal(replace(goal, peers=()) if alone else goal, case, args.seconds, args.repeats, errors)
    if case.device.type == "cuda":
        torch.cuda.synchronize()  # an asynchronous error belongs to this case, not to the next one
    return replace(line, entries={**line.entries, **dict.fromkeys(goal.peers, DEAD)}) if alone else line


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure all performance goals in one run.")
    parser.add_argument("--suite", action="append", choices=list(GOALS))
    parser.add_argument(
        "--only",
        type=re.compile,
        default=re.compile(""),
        metavar="REGEX",
        help='only goals that match, as "28/4/128 full/4x8192 bwd" does',
    )
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="I/N", help="of N shares by heads")
    parser.add_argument(
        "--add-peers", nargs="+", default=[], choices=known(), metavar="NAME", help="of every goal, as flex"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds of timed calls per case")
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each contestant, at most")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no new case starts")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile at a time")
    parser.add_argument("--no-warm", action="store_true", help="skip the compilation step")
    parser.add_argument(
        "--errors", default="", metavar="TEXT", help="only of goals whose label contains this"
    )
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--one", nargs=3, action="append", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    EXTRA["triton"] = triton_peer
    for label, work, pack in args.one or ():
        compile_one(label, work, pack, args.add_peers, torch.device(args.device))
    if args.one:
        return
    launcher()  # once, before the processes that need it
    rows = chosen(args)
    if not args.no_warm:
        warm(rows, args)
    print(write_tables(measure(rows, args), args))


if __name__ == "__main__":
    main()
