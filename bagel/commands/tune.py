"""The command `tune`: searches all problems of a device, shared out between the processes that run it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnforge.bagel.commands.console import console, echo, make_table, short_path, warn
from attnforge.bagel.commands.options import (
    DIRECTORY,
    SCORE_HELP,
    Name,
    Seconds,
    alone_option,
    choices,
    deterministic_option,
    device_option,
    direction_option,
    knob_option,
    pack_option,
    score_option,
    values,
    workers_option,
)
from attnforge.codegen.spec import Direction, DType

if TYPE_CHECKING:
    import torch

    from attnforge.bagel.commands.selection import Selection
    from attnforge.bagel.measure.tuning_set import TuningProblem
    from attnforge.runtime.search.claims import Claims
    from attnforge.runtime.search.search import Budget, Scope
    from attnforge.runtime.search.worker import Worker

POLL = 0.2  # seconds between looks at what other processes finished


@dataclass(frozen=True)
class Place:
    """This process among those of a launch, and its GPU's number on its host."""

    rank: int = 0
    world: int = 1
    local: int = 0
    beside: int = 1  # processes on this host


def place(env: Mapping[str, str]) -> Place:
    """From what torchrun sets, else Slurm for the tasks of a step, else for an array of jobs."""
    if "WORLD_SIZE" in env:
        local, beside = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), local, beside)
    if int(env.get("SLURM_NTASKS", 1)) > 1:
        beside = int(env.get("SLURM_NTASKS_PER_NODE", 1))
        return Place(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]), beside)
    if "SLURM_ARRAY_TASK_ID" in env:
        rank = int(env["SLURM_ARRAY_TASK_ID"]) - int(env["SLURM_ARRAY_TASK_MIN"])
        return Place(rank, int(env["SLURM_ARRAY_TASK_COUNT"]))
    return Place()


@click.command(short_help="Search every problem of a device, on one GPU or many.")
@click.option(
    "--model",
    "models",
    type=Name(),
    multiple=True,
    metavar="NAME",
    help="Model preset. Repeatable.  [default: BAGEL's models]",
)
@pack_option("by device; --list shows them")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=values(DType),
    metavar="DTYPE",
    help=f"{choices(DType)}. Repeatable.",
)
@direction_option()
@score_option(help=SCORE_HELP)
@deterministic_option()
@alone_option()
@click.option("--everything", is_flag=True, help="Also every problem in any table.")
@click.option("--seconds", type=Seconds(), metavar="S", help="Time per problem.  [default: as search]")
@knob_option()
@click.option(
    "--dir", "folder", type=DIRECTORY, metavar="DIR", help="Logs and progress.  [default: beside the tables]"
)
@click.option(
    "--table-out", type=DIRECTORY, metavar="DIR", help="Write the winners to DIR.  [default: as search]"
)
@device_option(help="cpu, cuda or cuda:N.  [default: this process's GPU]")
@click.option("--list", "only_list", is_flag=True, help="Print the problems and stop.")
@workers_option()
def tune(
    models: tuple[str, ...],
    packs: tuple[str, ...],
    dtypes: tuple[str, ...],
    direction: str,
    scores: tuple[str, ...],
    deterministic: bool,
    alone: bool,
    everything: bool,
    seconds: float | None,
    allowed: dict[str, frozenset[int]],
    folder: Path | None,
    table_out: Path | None,
    device: str | None,
    only_list: bool,
    workers: int | None,
) -> None:
    """Search every problem of a device and add the winners to its tuned table.

    Processes that share --dir share the work, each on its own GPU. Start them with torchrun (`torchrun
    --nproc-per-node 4 -m attnforge.cli tune`) or as a Slurm array. There is no server: each problem has a lock and a
    JSONL log in DIR. Run the command again to continue an interrupted search, or with other --knob to search again.
    """
    from attnforge.bagel.commands.search_screen import sigterm_as_interrupt
    from attnforge.bagel.commands.selection import Request, select
    from attnforge.runtime import tables
    from attnforge.runtime.search.worker import Worker

    here = place(os.environ)
    own = device or _own_gpu(here)
    selection = select(Request(dtype=dtypes[0] if dtypes else None, direction=direction, device=own))
    problems = _problems(selection, models, packs, dtypes, scores, everything, deterministic)
    if only_list:
        for problem in problems:
            echo(str(problem))
        return
    out = tables.writable(table_out or tables.folders()[0])
    folder = folder or out / "tune" / tables.table_path(tables.device_name(selection.device), out).stem
    workers = workers or max(1, len(os.sched_getaffinity(0)) // here.beside)
    with closing(Worker()) as worker, sigterm_as_interrupt():
        claims = _claims(folder, allowed)
        budget, scope = _how(selection.device, seconds, alone, allowed)
        run = Run(problems, claims, folder, out, selection.device, budget, scope, workers, worker)
        if run.left():
            worker.start(selection.device)
        who = f"{len(problems)} problems, process {here.rank + 1} of {here.world}"
        echo(f"{who}; logs in {short_path(folder)}")
        run.work(here)
    if here.rank == 0:
        run.show()


def _problems(
    selection: Selection,
    models: Sequence[str],
    packs: Sequence[str],
    dtypes: Sequence[str],
    scores: Sequence[str],
    everything: bool,
    deterministic: bool,
) -> list[TuningProblem]:
    """What to search, each problem once.

    Raises ValueError for an unknown model or pack, an unfit dtype or score, and as `with_deterministic`.
    """
    import torch

    from attnforge.bagel.commands.selection import expect_dtype
    from attnforge.bagel.measure.case_scores import function_named
    from attnforge.bagel.measure.cases import make_case
    from attnforge.bagel.measure.tuning_set import chosen, measured

    for score in scores:
        function_named(score)
    if deterministic:
        selection = selection.with_deterministic()
    device, directions = selection.device, selection.directions
    wanted = tuple(map(DType, dtypes)) or (selection.dtype,)
    for dtype in wanted:
        expect_dtype(dtype, device)
    problems = list(chosen(device, models, packs, wanted, directions, scores))
    for pack, model in dict.fromkeys((one.pack, one.model) for one in problems if models or packs):
        make_case(pack, model, wanted[0], torch.device("cpu"))
    problems += measured(device) if everything else ()
    if deterministic:
        backward = (problem for problem in problems if problem.direction is Direction.BACKWARD)
        problems = [replace(problem, deterministic=True) for problem in backward]
    return list(dict.fromkeys(problems))


def _claims(folder: Path, allowed: Mapping[str, frozenset[int]]) -> Claims:
    """Those of all variants, or of some: what was searched with other values is not finished."""
    from attnforge.runtime.search.claims import Claims

    named = (f"{knob}={','.join(map(str, sorted(allowed[knob])))}" for knob in sorted(allowed))
    return Claims(folder / "_".join(named))


def _how(
    device: torch.device, seconds: float | None, alone: bool, allowed: dict[str, frozenset[int]]
) -> tuple[Budget, Scope]:
    """How to search each problem."""
    from attnforge.bagel.measure.tuning_set import search_seconds
    from attnforge.runtime.search.search import Budget, Scope

    return Budget(search_seconds(device) if seconds is None else seconds, alone=alone), Scope(allowed)


def _own_gpu(here: Place) -> str | None:
    """The GPU of this process where several run on a host; None: as other commands choose."""
    return f"cuda:{here.local}" if here.beside > 1 else None


@dataclass(frozen=True)
class Run:
    """The searches of one process."""

    problems: list[TuningProblem]
    claims: Claims
    folder: Path
    out: Path  # of tables
    device: torch.device
    budget: Budget  # of a problem
    scope: Scope
    workers: int  # parallel compilations
    worker: Worker  # measures all problems

    def work(self, here: Place) -> None:
        """Search what nobody else does until all is finished; processes begin at different places.

        Interrupted by Ctrl-C or SIGTERM, it says how to resume, and raises KeyboardInterrupt.
        """
        first = here.rank * len(self.problems) // here.world
        try:
            while left := self.left(first):
                if not any(self._attempt(problem) for problem in left):
                    time.sleep(POLL)  # others are at work
        except KeyboardInterrupt as interrupt:
            done, count = len(self.problems) - len(self.left()), len(self.problems)
            echo(", ".join((f"interrupted; {done} of {count} problems are finished", *interrupt.args)))
            echo(f"run the same command to resume from {short_path(self.folder)}")
            raise

    def left(self, first: int = 0) -> list[TuningProblem]:
        """The problems that are not finished, from number `first` on and then those before it."""
        order = self.problems[first:] + self.problems[:first]
        return [problem for problem in order if self.claims.note(problem.slug) is None]

    def _attempt(self, problem: TuningProblem) -> bool:
        """Search a problem unless another process does or did; whether it was searched."""
        with self.claims.take(problem.slug) as mine:
            if mine:
                begin = time.monotonic()
                note = self._search(problem)
                self.claims.finish(problem.slug, {**note, "seconds": round(time.monotonic() - begin, 1)})
                echo(f"{problem}: {summary(note)}")
                for warning in note.get("warnings", ()):
                    warn(warning)
            return mine

    def _search(self, problem: TuningProblem) -> dict[str, Any]:
        """The note of a problem: the winner, what was in its place, or why there is none."""
        from attnforge.bagel.measure.case_scores import with_score
        from attnforge.bagel.measure.cases import make_case
        from attnforge.codegen.plan import Infeasible
        from attnforge.runtime import tables
        from attnforge.runtime.native.launcher import launcher
        from attnforge.runtime.search import winners
        from attnforge.runtime.search.case import as_deterministic
        from attnforge.runtime.search.journal import environment
        from attnforge.runtime.search.search import search, watch_events

        launcher()
        device_name = tables.device_name(self.device)
        try:
            case = make_case(problem.pack, problem.model, problem.dtype, self.device)
            case = with_score(case, problem.score)
            case = as_deterministic(case) if problem.deterministic else case
            log = self.folder / f"{problem.slug}.jsonl"
            target = problem.arch, device_name
            events = search(
                case,
                problem.direction,
                target,
                self.budget,
                log,
                self.workers,
                self.scope,
                worker=self.worker,
            )
            with closing(events):
                finished, interrupted = watch_events(events, case, problem.direction)
        except (Infeasible, ValueError) as error:
            return {"failed": str(error)}
        if finished.winner is not None:
            saved = winners.keep(finished, device_name, environment(device_name, problem.arch), self.out)
        if interrupted:
            raise KeyboardInterrupt(*(["the best so far of another is saved"] if finished.winner else []))
        if finished.winner is None:
            return {"failed": f"none of {len(finished.failed)} variants worked"}
        return {
            "winner": finished.winner.spec.slug,
            "tflops": finished.winner.tflops,
            "variants": len(finished.ranked) + len(finished.failed),
            "stays": saved.stays.spec.slug if saved.stays else None,
            "stays_tflops": saved.stays.tflops if saved.stays else None,
            "warnings": list(finished.conditions.warnings),
        }

    def show(self) -> None:
        """A line for each problem, how many had warnings, and where the table is."""
        from attnforge.bagel.measure.report import speed

        table = make_table("tuned", ("problem", "winner"), ("speed", "variants", "seconds"))
        notes = list(self._notes())
        for problem, note in notes:
            numbers = (str(note.get(key, "")) for key in ("variants", "seconds"))
            winner = knobs(note.get("stays") or note.get("winner") or note["failed"])
            winner += " (disturbed)" if note.get("warnings") else ""
            tflops = note.get("stays_tflops") or note.get("tflops")
            table.add_row(str(problem), winner, speed(tflops) if tflops else "", *numbers)
        console.print(table)
        disturbed = sum(bool(note.get("warnings")) for _, note in notes)
        if disturbed:
            count = f"{disturbed} of {len(self.problems)} problems were disturbed"
            warn(f"{count}; their logs in {short_path(self.folder)} say how")
        if not any("winner" in note for _, note in notes):
            raise click.ClickException("no problem has a winner")
        echo(f"winners are in {short_path(self.out)}")

    def _notes(self) -> Iterator[tuple[TuningProblem, dict[str, Any]]]:
        for problem in self.problems:
            note = self.claims.note(problem.slug)
            if note is not None:
                yield problem, note


def knobs(winner: str) -> str:
    """What a winner's name says beyond the problem: `m192 n80 s3` of `fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3`."""
    found = re.search(r"_a\d+_(.*)", winner)
    return found[1].replace("_", " ") if found else winner


def summary(note: Mapping[str, Any]) -> str:
    """A note as text: `fwd_..., 771.2 TFLOP/s, best of 21`."""
    from attnforge.bagel.measure.report import speed

    if "failed" in note:
        return f"no winner: {note['failed']}"
    stays = f"; a faster entry stays: {note['stays']}" if note["stays"] else ""
    return f"{note['winner']}, {speed(note['tflops'])}, best of {note['variants']}{stays}"
