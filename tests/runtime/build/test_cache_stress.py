"""A slice of the stress of caches, tables and logs; all of it: `python tests/support/cache_stress.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import cache_stress
import pytest
from cache_kills import KILLS

from attnforge.runtime.build.settings import CACHE_DIR


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """The stress points the process at caches of its own."""
    before = {name: os.environ.get(name) for name in (CACHE_DIR, "CXX")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def test_processes_together(tmp_path: Path) -> None:
    assert "6 compiles" in cache_stress.together(tmp_path, processes=8, keys=3, rounds=2)


@pytest.mark.parametrize("kill", KILLS)
def test_kills(kill: Callable[[Path, int, random.Random], str], tmp_path: Path) -> None:
    assert kill(tmp_path, 8, random.Random(1))


def test_damages(tmp_path: Path) -> None:
    assert cache_stress.damages(tmp_path, 24, random.Random(2))
