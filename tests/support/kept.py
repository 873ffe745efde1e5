"""What the tests keep in .pytest_cache, for the next run and for each other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# conftest.py sets pytest's own cache folder; a program that imports a test's helpers uses the same one.
directory = Path(__file__).parents[2] / ".pytest_cache" / "d" / "attnforge"


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Held by one worker at a time."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def place(name: str, count: int) -> Iterator[None]:
    """One of `count` places, each held by one worker at a time; a free one if there is any."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        with (directory / f"{name}{number}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield
            return
    with lock(f"{name}{os.getpid() % count}"):
        yield
