"""kill -9 of processes that compile, publish, save a tuned table or search: what they were told is done stays."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fakes
from cache_place import PATIENCE, Place, check_all, make_place, sources_of, start, wait

from attnforge.codegen.render import Source
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime.build import cache


def kill_later(processes: list[BaseProcess], seconds: float) -> int:
    """Kill them after so long; how many of them still ran."""
    time.sleep(seconds)
    for process in processes:
        process.kill()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL), f"a child ended with {process.exitcode}"
    return sum(process.exitcode == -signal.SIGKILL for process in processes)


def kills_while_compiling(directory: Path, count: int, chance: random.Random) -> str:
    """Two processes obtain the same entries and die; what either was given stays, and the next process finds all."""
    place = make_place(directory, "compiling", 0.02)
    killed = tries = 0
    while killed < count:
        sources = sources_of(tries, 4)
        tries += 1
        group = [start(obtain_in_order, place, sources, order) for order in range(2)]
        killed += kill_later(group, chance.uniform(0.0, 0.25))
        runs, told = place.compiler.runs, set(place.finished())
        kept = [source for source in sources if source.text.split()[1] in told]
        for source in kept:
            assert cache.obtain(source).binary == source.text.encode()
        assert place.compiler.runs <= runs + 2, (
            "an entry that was given out is lost"
        )  # compilers that still ran
        if tries % 10 == 0 or killed >= count:  # the last time, too: a small run has fewer than 10
            time.sleep(0.1)  # compilers of the dead end
            check_all(sources)
    return f"{killed} killed while compiling"


def obtain_in_order(place: Place, sources: list[Source], order: int) -> None:
    for source in random.Random(order).sample(sources, len(sources)):
        assert cache.obtain(source).binary == source.text.encode()
        place.tell(source.text.split()[1])


def kills_while_publishing(directory: Path, count: int, chance: random.Random) -> str:
    """Death at each file, lock or process operation of `obtain` in turn, at random ones."""
    place = make_place(directory, "publishing", 0.0)
    killed = tries = 0
    while killed < count:
        source = sources_of(tries, 1)[0]
        tries += 1
        process = start(die_at, place, source, chance.randrange(1, 220))
        process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL), f"a child ended with {process.exitcode}"
        killed += process.exitcode == -signal.SIGKILL
        check_all([source])
    return f"{killed} killed while publishing"


def die_at(place: Place, source: Source, number: int) -> None:
    """Kill this process at the `number`-th operation."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.partition(".")[0] in ("open", "os", "fcntl", "subprocess", "tempfile", "shutil"):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    cache.obtain(source)


def kills_while_saving(directory: Path, count: int, chance: random.Random) -> str:
    """Three processes save entries of their own into one table and die: it stays whole, and no saved entry is lost."""
    from attnforge.runtime import tables

    place = make_place(directory, "saving", 0.0)
    folder, killed, tries = place.directory / "tuned", 0, 0
    while killed < count:
        first = tries * 100
        tries += 1
        group = [start(save_entries, place, folder, first + 30 * number) for number in range(3)]
        killed += kill_later(group, chance.uniform(0.0, 0.15))
        tables._read.cache_clear()
        saved = {entry.notes["number"] for entry in tables.load("device", folder)}
        lost = {int(word) for word in place.finished()} - saved
        assert not lost, f"entries {sorted(lost)} are lost"
        if tries % 8 == 0 or killed >= count:  # a table does not grow for ever; a small run has fewer than 8
            save_entries(place, folder, first + 90, 1)
            stay = {"device.json", ".lock"}  # a lock's file is never removed
            left = {path.name for path in folder.iterdir()} - stay
            assert not left, f"left behind: {sorted(left)}"
            shutil.rmtree(folder)
            place.done.unlink()
    return f"{killed} killed while saving a table"


def save_entries(place: Place, folder: Path, first: int, count: int = 30) -> None:
    from attnforge.runtime import tables

    for number in range(first, first + count):
        # Each number a class of its own: GQA ratios.
        entry = tables.Tuned(fakes.spec(), number + 1, 64, 1.0, 1.0, {"number": number})
        tables.save("device", [entry], folder)
        place.tell(str(number))


def kills_while_searching(directory: Path, count: int, chance: random.Random) -> str:
    """A search with a log dies: the next one resumes all that was reported, and in the end all is found."""
    place = make_place(directory, "searching", 0.01)
    log, killed, tries = place.directory / "log.jsonl", 0, 0
    while killed < count:
        process = start(search_once, place, log)
        killed += kill_later([process], chance.uniform(0.05, 0.8))
        missing = set(place.finished()) - known(log)
        assert not missing, f"results {sorted(missing)} are lost"
        tries += 1
        if tries % 8 == 0:
            wait(start(search_once, place, log))
            # Which variants a search takes depends on what it resumes: together they may have taken more.
            assert len(known(log)) >= VARIANTS, f"{len(known(log))} of {VARIANTS} variants"
            log.unlink()
            place.done.unlink()
            cache.clear()
    return f"{killed} killed while searching"


VARIANTS = 12


def search_once(place: Place, log: Path) -> None:
    """A real search with the stub compiler and a worker that measures nothing."""
    import torch

    from attnforge.codegen.render import render
    from attnforge.runtime.search import search as engine
    from attnforge.runtime.search.case import causal_case
    from attnforge.runtime.search.journal import source_key
    from attnforge.runtime.search.timing import Timing
    from attnforge.runtime.search.worker import Outcome

    class Idle:
        def prepare(self, *_: object) -> None: ...

        def ready_at(self) -> float:
            return 0.0

        def trial(self, *_: object) -> Outcome:
            time.sleep(0.01)
            return Outcome("ok", timing=Timing(1.0, 1.0, 1.0, 3))

        def compare(self, specs: list[Any], how: Any) -> list[Timing]:
            return [Timing(1.0, 1.0, 1.0, 3) for _ in specs]

        def close(self) -> None: ...

    engine.__dict__["Worker"] = Idle
    case = causal_case("causal/64", (1, 4, 2, 64, 64), DType.FLOAT32, torch.device("cpu"))
    budget = engine.Budget(variants=VARIANTS)
    for event in engine.search(case, Direction.FORWARD, (Arch.CPU, "a device"), budget, log, workers=2):
        if isinstance(event, engine.Measured):
            assert event.result.status == "ok", event.result.detail
            place.tell(source_key(render(event.result.spec).text))


def known(log: Path) -> set[str]:
    """Sources with a whole line in the log; a torn one is at the end of what some process wrote."""
    found = set()
    for line in log.read_bytes().splitlines() if log.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "source" in row:  # not a line about the search as a whole
            assert row["result"]["status"] == "ok"
            found.add(row["source"])
    return found


KILLS = (kills_while_compiling, kills_while_publishing, kills_while_saving, kills_while_searching)
