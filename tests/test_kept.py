"""Locks between the processes of a test run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import kept


def hold(count: int) -> tuple[float, float]:
    with kept.place("test_kept_", count):
        begin = time.monotonic()
        time.sleep(0.3)
        return begin, time.monotonic()


def test_as_many_as_there_are_places_hold_one_at_a_time() -> None:
    with ThreadPoolExecutor(5) as pool:  # locks belong to open files, not to processes
        times = list(pool.map(hold, [2] * 5))
    held = [sum(begin <= at < end for begin, end in times) for at, _ in times]
    assert max(held) == 2
