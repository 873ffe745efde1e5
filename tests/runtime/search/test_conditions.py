"""What is said about the conditions of a timing, from made-up readings; and one real reading of this machine."""

from __future__ import annotations

import threading

import pytest

from attnforge.runtime.search import conditions
from attnforge.runtime.search.conditions import (
    CpuConditions,
    GpuConditions,
    Reading,
    cpu_seconds,
    judge,
)

IDLE = Reading(300)


def test_a_quiet_gpu() -> None:
    summary = judge(IDLE, [Reading(1500), Reading(1980), Reading(1755, ("SwPowerCap",))])
    assert summary.facts == {"clocks": "1755 MHz (1500 to 1980)", "power cap": "33% of the readings"}
    assert summary.warnings == ()
    assert judge(IDLE, [Reading(1980, driver="580.159.03")]).facts["driver"] == "580.159.03"


@pytest.mark.parametrize(
    ("before", "readings", "warning"),
    [
        (Reading(300, busy=80), [Reading(1500)], "the GPU was 80 % busy before the search"),
        (IDLE, [Reading(900, ("HwThermalSlowdown",))], "because of heat in 100% of the readings"),
        (IDLE, [Reading(900, ("HwPowerBrakeSlowdown",))], "because of an external power brake"),
        (IDLE, [Reading(1, others=frozenset({7})), Reading(1, others=frozenset({9}))], "on the GPU: 7, 9"),
    ],
)
def test_what_spoils_a_gpu_run(before: Reading, readings: list[Reading], warning: str) -> None:
    (said,) = judge(before, readings).warnings
    assert warning in said


def test_unknown_processes_and_rare_slowdowns_are_not_accused() -> None:
    readings = [Reading(1500, others=None)] * 30 + [Reading(1400, ("SwThermalSlowdown",))]
    assert judge(IDLE, readings).warnings == ()
    assert judge(None, []).facts == {}


def test_readings_are_taken_only_while_watching() -> None:
    took = threading.Event()
    count = 0

    def read() -> Reading:
        nonlocal count
        count += 1
        took.set()
        return Reading(1000 + count)

    conditions = GpuConditions(read, rest=0)
    assert count == 1, "before anything runs"
    took.clear()
    assert not took.wait(0.25), "nobody is watching"
    with conditions.watching():
        assert took.wait(10)
    conditions.close()
    facts = conditions.summary().facts
    assert "1001" not in facts["clocks"]
    assert "to" in facts["clocks"]


def test_a_failing_reading_is_left_out() -> None:
    calls = []
    second = threading.Event()

    def read() -> Reading:
        calls.append(1)
        if len(calls) > 1:
            second.set()
            raise RuntimeError("lost")
        return IDLE

    conditions = GpuConditions(read, rest=0)
    with conditions.watching():
        assert second.wait(10)
    conditions.close()
    assert conditions.summary().warnings == ()


def test_without_nvml_the_reason_is_a_fact() -> None:
    conditions = GpuConditions("nvidia-ml-py is not installed")
    with conditions.watching():
        pass
    conditions.close()
    assert conditions.summary().facts == {"clocks": "not read: nvidia-ml-py is not installed"}


def test_others_on_a_cpu() -> None:
    """All processes took 30 s, ours 10 of them, in far less time than that: 20 s are of others."""
    counters = iter([(0.0, 0.0), (0.0, 0.0), (100.0, 50.0), (130.0, 60.0)])
    busy = CpuConditions(lambda: next(counters))
    with busy.watching():
        pass
    (warning,) = busy.summary().warnings
    assert "while variants were timed" in warning

    counters = iter([(0.0, 0.0), (0.0, 0.0), (100.0, 50.0), (110.0, 60.0)])
    quiet = CpuConditions(lambda: next(counters))
    with quiet.watching():
        pass
    assert quiet.summary().warnings == ()
    assert "0.0 while timing" in quiet.summary().load["other processes"]


def test_others_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 2 s of the hundredth of a second before the first timing, and nothing later."""
    monkeypatch.setattr(conditions, "AT_REST", 0.01)
    counters = iter([(0.0, 0.0), (3.0, 1.0), (100.0, 50.0), (100.0, 50.0)])
    busy = CpuConditions(lambda: next(counters))
    with busy.watching():
        pass
    (warning,) = busy.summary().warnings
    assert "before the search" in warning


def test_our_own_work_is_not_that_of_others() -> None:
    before = cpu_seconds()
    x = 1
    while cpu_seconds()[1] - before[1] < 0.05:
        x = (x * 3) % 1000003
    total, own = cpu_seconds()
    assert x
    assert 0.05 <= own - before[1] <= total - before[0] + 0.05
