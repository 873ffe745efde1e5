"""Cache, tuned tables and search logs under many processes, kill -9 and damage: `python tests/support/cache_stress.py`.

Nothing may be lost, stale, wrong or hang. What was run: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import fakes
from cache_kills import KILLS
from cache_place import PATIENCE, SERVER, Place, check_all, make_place, sources_of, start, wait

from attnforge.runtime.build import cache, store

# ---- Many processes at once


def together(directory: Path, processes: int, keys: int, rounds: int) -> str:
    """All processes want all keys at the same time, in orders of their own: each key is compiled once."""
    place = make_place(directory, "together", 0.02)
    barrier = SERVER.Barrier(processes)
    wait(*(start(obtain_rounds, place, barrier, order, keys, rounds) for order in range(processes)))
    assert place.compiler.runs == keys * rounds, f"{place.compiler.runs} compiles of {keys * rounds} keys"
    assert len(place.finished()) == processes
    check_all([source for number in range(rounds) for source in sources_of(number, keys)])
    assert place.compiler.runs == keys * rounds, "compiled again"
    return f"{processes} processes x {keys} keys x {rounds} rounds: {place.compiler.runs} compiles, nothing wrong"


def obtain_rounds(place: Place, barrier: Barrier, order: int, keys: int, rounds: int) -> None:
    chance = random.Random(order)
    for number in range(rounds):
        sources = sources_of(number, keys)
        barrier.wait(PATIENCE)
        for source in chance.sample(sources, keys):
            assert cache.obtain(source).binary == source.text.encode()
    place.tell("all")


# ---- Damage


def damages(directory: Path, count: int, chance: random.Random) -> str:
    """A published entry is spoilt at random: the next reader gets the right bytes, and warns once."""
    place = make_place(directory, "damage", 0.0)
    kinds: dict[str, int] = {}
    other = cache.obtain(fakes.source("void other();\n")).directory
    for number in range(count):
        source = fakes.source(f"void damaged{number}();\n")
        entry = cache.obtain(source).directory
        name, spoil = chance.choice(list(SPOILS.items()))
        spoil(entry, other, chance)
        kinds[name] = kinds.get(name, 0) + 1
        assert cache.obtain(source).binary == source.text.encode(), f"{name}: a wrong binary"
        assert cache.obtain(fakes.source("void other();\n")).binary == b"void other();\n", name
    check_all([fakes.source(f"void damaged{number}();\n") for number in range(count)])
    assert place.compiler.runs >= count + 1
    return f"{count} damaged entries, none wrong: " + ", ".join(
        f"{n} {name}" for name, n in sorted(kinds.items())
    )


def flip(entry: Path, other: Path, chance: random.Random) -> None:
    path = entry / chance.choice(("kernel.so", "meta.json"))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(entry: Path, other: Path, chance: random.Random) -> None:
    path = entry / chance.choice(("kernel.so", "meta.json"))
    os.truncate(path, chance.randrange(path.stat().st_size))


def open_up(entry: Path, other: Path, chance: random.Random) -> None:
    path = chance.choice((entry, entry / "kernel.so", entry / "meta.json"))
    path.chmod(chance.choice((0o777, 0o775, 0o757, 0o722)))


def lose(entry: Path, other: Path, chance: random.Random) -> None:
    for name in chance.sample(("kernel.so", "meta.json"), chance.randint(1, 2)):
        (entry / name).unlink()


def swap(entry: Path, other: Path, chance: random.Random) -> None:
    name = chance.choice(("kernel.so", "meta.json"))
    shutil.copy2(other / name, entry / name)


def take_over(entry: Path, other: Path, chance: random.Random) -> None:
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


def link(entry: Path, other: Path, chance: random.Random) -> None:
    path = chance.choice((entry, entry / "kernel.so"))
    target = other if path == entry else other / "kernel.so"
    store.remove(path)
    path.symlink_to(target)


def replace(entry: Path, other: Path, chance: random.Random) -> None:
    path = chance.choice((entry, entry / "kernel.so", entry / "meta.json"))
    store.remove(path)
    make: Callable[[Path], Any] = chance.choice((Path.mkdir, Path.touch, os.mkfifo))
    make(path)


SPOILS: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "flipped bits": flip,
    "cut short": cut,
    "writable by others": open_up,
    "missing files": lose,
    "files of another": swap,
    "another entry": take_over,
    "links": link,
    "not files": replace,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    logging.getLogger("attnforge").setLevel(logging.ERROR)  # each damage is warned of
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run(lambda: together(directory, arguments.processes, arguments.keys, arguments.rounds))
        for kill in KILLS:
            run(lambda kill=kill: kill(directory, -(-arguments.kills // len(KILLS)), chance))  # type: ignore[misc]
        run(lambda: damages(directory, arguments.damages, chance))
    return 0


def run(part: Callable[[], str]) -> None:
    started = time.monotonic()
    print(f"{part()} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
