"""What the tests keep in .pytest_cache, for the next run and for each other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

directory = Path()  # conftest.py sets it


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Held by one worker at a time."""
    with (directory / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
