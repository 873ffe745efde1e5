"""How often and in which order things are timed; no clock is asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb, inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnforge.runtime.search import timing
from attnforge.runtime.search.timing import (
    Effort,
    Timing,
    effort,
    final_effort,
    measure,
    measure_against,
    measure_alone,
    measure_interleaved,
    ranks,
    rotations,
)

CPU = torch.device("cpu")


def test_effort_counts() -> None:
    how = Effort(seconds=1.0, repeats=50, least=3, give_up_ms=400.0)
    assert [how.count(ms) for ms in (1.0, 100.0, 390.0, 401.0)] == [50, 10, 3, 1]


@pytest.mark.parametrize(("megabytes", "copies"), [(1, 8), (3, 4), (5, 2), (6, 2), (10, 1), (50, 1)], ids=str)
def test_copies_of_the_inputs_fill_the_cache_twice(
    megabytes: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no call finds its inputs there; eight at most."""
    cache = SimpleNamespace(L2_cache_size=5 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: cache)
    tensor = torch.empty(megabytes << 20, dtype=torch.int8)
    assert rotations([tensor], torch.device("cuda")) == copies
    assert rotations([tensor], CPU) == 1


def test_calls_are_timed_in_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[Tensor], None]:
        return lambda x: order.append(name)

    how = Effort(seconds=1.0, repeats=4, warmups=1)
    timings = measure_interleaved({"a": call("a"), "b": call("b")}, [(torch.ones(1),)], CPU, how)
    assert order[:4] == ["a", "a", "b", "b"]
    assert [set(order[turn : turn + 2]) for turn in (4, 6, 8)] == [{"a", "b"}] * 3
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_alone_each_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an order and its reverse; only the second half of a turn counts."""
    turns: list[tuple[int, int]] = []  # which call, how often

    def run(
        calls: Sequence[Callable[[], float]], arguments: Sequence[tuple[Any, ...]], _: object
    ) -> list[float]:
        assert len(set(calls)) == 1
        assert len(arguments) == len(calls)
        ms = calls[0]()
        turns.append((int(ms), len(calls)))
        return (
            [1000.0] * (len(calls) // 2) + [ms] * (len(calls) - len(calls) // 2) if len(calls) > 1 else [ms]
        )

    monkeypatch.setattr(timing, "_run", run)
    found = measure_alone({"a": lambda: 10.0, "b": lambda: 20.0}, [()], CPU, seconds=0.2, turns=3)
    counted = [turn for turn in turns if turn[1] > 1]
    assert counted == [(10, 20), (20, 10), (20, 10), (10, 20), (10, 20), (20, 10)]
    assert {name: (x.median, x.worst, x.repeats) for name, x in found.items()} == {
        "a": (10.0, 10.0, 3),
        "b": (20.0, 20.0, 3),
    }


def test_turns_have_orders_of_their_own() -> None:
    """Else one call would always run behind the same other one."""
    order: list[str] = []
    calls = {name: lambda x, name=name: order.append(name) for name in "abc"}
    measure_interleaved(calls, [(torch.ones(1),)], CPU, Effort(seconds=1.0, repeats=20, warmups=0))
    turns = {tuple(order[turn : turn + 3]) for turn in range(3, len(order), 3)}
    assert len(turns) > 3
    assert {turn[0] for turn in turns} == set("abc")


def test_slow_leaders_are_timed_often_and_others_as_before() -> None:
    """Within the seconds that there are for each."""
    gpu = torch.device("cuda")
    often, usual = final_effort(gpu, patience=4.5), effort(gpu)
    times = (0.01, 1.0, 6.0, 14.0, 15.0, 100.0, 300.0, 3000.0)
    assert [often.count(ms) for ms in times] == [50, 50, 50, 21, 21, 21, 15, 3]
    assert [usual.count(ms) for ms in times] == [50, 50, 50, 21, 20, 3, 3, 3]
    assert final_effort(gpu, patience=0.0).count(100.0) == 3
    assert final_effort(gpu, patience=inf).count(100.0) == 21
    assert final_effort(CPU, patience=4.5).count(500.0) == 9


def chosen_leaders(how: Effort, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which of four leaders, 1 % apart and of 100 ms, has the smallest median, in 300 comparisons of a noisy device.

    Times have noise of 2 %, a clock that drifts, and a call in twenty that takes 1.3 times as long.
    """
    rng = random.Random(0)

    def run(
        calls: Sequence[Callable[..., float]], arguments: Sequence[tuple[Any, ...]], _: object
    ) -> list[float]:
        drift, times = 1.0, []
        for call in calls:
            drift *= 1 + rng.gauss(0.0, 0.002)
            times.append(call() * drift * rng.gauss(1.0, 0.02) * rng.choices((1.0, 1.3), (19, 1))[0])
        return times

    monkeypatch.setattr(timing, "_run_cpu", run)
    calls = {str(n): (lambda n=n: 100.0 + n) for n in range(4)}
    found = []
    for _ in range(300):
        timings = measure_interleaved(calls, [()], CPU, how)
        found.append(int(min(timings, key=lambda name: timings[name].median)))
    return found


def test_the_fastest_of_slow_leaders_is_found_in_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    usual = chosen_leaders(replace(effort(gpu), warmups=0), monkeypatch)
    often = chosen_leaders(replace(final_effort(gpu, patience=4.5), warmups=0), monkeypatch)
    assert usual.count(0) < 0.68 * len(usual)
    assert often.count(0) > 0.8 * len(often)
    assert sum(often) < 0.4 * sum(usual), "what the choice loses, in percent"


def test_a_slow_moment_of_the_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes 5 ms of a device that slows down: what takes twice as long stays at 10."""
    clock = iter(range(1, 1000))

    def run(
        calls: Sequence[Callable[[float], float]], arguments: Sequence[tuple[float]], _: object
    ) -> list[float]:
        slow = [1 + next(clock) / 5 for _ in range(0, len(calls), 2)]
        return [
            call(*args) * slow[n // 2] for n, (call, args) in enumerate(zip(calls, arguments, strict=True))
        ]

    monkeypatch.setattr(timing, "_run_cpu", run)
    how = Effort(seconds=1.0, repeats=9, warmups=0)
    found = measure_against(lambda x: 2 * x, lambda x: x, 5.0, [(1.0,)], CPU, how)
    assert (found.best, found.median, found.worst, found.repeats) == (10.0, 10.0, 10.0, 8)
    hopeless = measure_against(
        lambda x: 500 * x, lambda x: x, 5.0, [(1.0,)], CPU, Effort(give_up_ms=3.0, warmups=0)
    )
    assert hopeless.repeats == 1


def test_inputs_rotate() -> None:
    seen: list[int] = []
    measure(seen.append, [(0,), (1,), (2,)], CPU, Effort(seconds=1.0, repeats=5, warmups=1))
    assert seen == [0, 2, 0, 1, 2, 0]


def test_intervals_of_the_median() -> None:
    """By order statistics: ranks that the binomial distribution gives, checked against its definition."""
    for count in range(1, 60):
        low, high = ranks(count)
        assert 0 <= low <= high == count - 1 - low
        below = sum(comb(count, k) for k in range(low + 1)) / 2**count  # the median lies below sample `low`
        assert below <= 0.025 or low == 0
        wider = sum(comb(count, k) for k in range(low + 2)) / 2**count
        assert wider > 0.025, "a narrower interval would do"
    assert Timing.of([5.0, 1.0, 3.0]) == Timing(3.0, 1.0, 5.0, 3, 1.0, 5.0)
    many = Timing.of([float(x) for x in range(100, 0, -1)])
    assert (many.median, many.low, many.high) == (50.5, 40.0, 61.0)
