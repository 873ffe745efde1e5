"""What the tests keep in .pytest_cache, for the next run and for each other."""

from __future__ import annotations

import fcntl
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
