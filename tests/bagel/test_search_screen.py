"""What a search prints at its end: a table that fits 80 columns, how much was tried, and what spoils the result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from rich.console import Console

from attnforge.bagel.commands.bench import bench_table, say_notes
from attnforge.bagel.commands.search_screen import (
    Screen,
    clock,
    counts,
    remarks,
    search_table,
    to_json,
    warnings,
)
from attnforge.bagel.measure.bench import OURS, Row, best_peer, lead
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime.search.case import causal_case
from attnforge.runtime.search.conditions import Summary
from attnforge.runtime.search.journal import Result
from attnforge.runtime.search.search import Budget, Event, Finished, Measured, Started, varying_knobs

CASE = causal_case("causal/4x8192 7B", (4, 28, 4, 8192, 128), DType.BFLOAT16, torch.device("cpu"))
FORWARD = Direction.FORWARD
SPECS = list(islice(candidates(CASE.problem(FORWARD, Arch.SM90A)), 15))


def results(count: int) -> tuple[Result, ...]:
    return tuple(
        Result(
            spec,
            "ok",
            ms=1.25 + n,
            tflops=700.0 - n,
            repeats=9,
            registers=168,
            low_ms=1.0 + n,
            high_ms=1.5 + n,
        )
        for n, spec in enumerate(SPECS[:count])
    )


def finished(**changes: object) -> Finished:
    base = Finished(CASE, FORWARD, results(10), (Result(SPECS[11], "wrong"),), 50.0, 2, 21)
    return replace(base, **changes)  # type: ignore[arg-type]


def row(name: str, ms: float | None, ours_ms: float | None = None, note: str = "") -> Row:
    return Row(CASE.name, "fwd", "bf16", name, ms, 1.0, 5, note, low_ms=1.0, high_ms=1e4, ours_ms=ours_ms)


def text(*parts: object) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*parts)
    return capture.get()


def test_the_table_fits_80_columns_and_keeps_its_numbers() -> None:
    peers = [row("sdpa-efficient", 123.4, 1.5), row("fa4", None, note="takes no mask")]
    shown = text(search_table(finished(), peers))
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    for cell in ("700.0 TFLOP/s", "1.25", "1-1.5", "1.00x", "2.00-2.5", "82.27x"):
        assert cell.replace("2.00-2.5", "2-2.5") in shown
    assert "fa4" not in shown, "what was not timed is said below the table"


def test_one_sample_has_no_interval() -> None:
    once = replace(results(1)[0], ms=6977.0, low_ms=6977.0, high_ms=6977.0, repeats=1)
    twice = replace(once, repeats=2)
    peer = replace(row("flex", 6977.0), low_ms=6977.0, high_ms=6977.0, repeats=1)
    for shown in (text(search_table(finished(ranked=(once,)), [peer])), text(bench_table([peer], ""))):
        assert "6977-6977" not in shown
        assert re.search(r"flex .* 6977 +- ", shown)
    assert "6977-6977" in text(search_table(finished(ranked=(twice,)), []))


def test_only_knobs_that_differ_are_in_the_table() -> None:
    shown = text(search_table(finished(), []))
    names = SPECS[0].tuning.to_json()
    varying = varying_knobs(SPECS[:10])
    assert 0 < len(varying) < len(names)
    for name in names:
        assert (f"{name}=" in shown) == (name in varying)
    (common,) = (line for line in remarks(finished()) if line.startswith("in every variant:"))
    named = {knob.name for knob, _ in SPECS[0].tuning.named_knobs()}  # all but quiet ones at their defaults
    assert named < set(names)
    assert named - set(varying) == {word.partition("=")[0] for word in common.split()[3:]}


def test_ratios_are_of_one_timing() -> None:
    """Only finalists were timed together."""
    lines = text(search_table(finished(), [])).splitlines()
    assert sum("x  " in line for line in lines) == 2
    alone = text(search_table(finished(finalists=0), []))
    assert "x  " not in alone


def test_how_much_was_tried() -> None:
    assert counts(finished()) == "10 of 21 variants measured, 1 failed (1 wrong), 10 not tried; 50 s"
    assert counts(finished(failed=(), space=10)) == "10 of 10 variants measured; 50 s"


def test_ties_and_single_timings_are_explained() -> None:
    said = "\n".join(remarks(finished()))
    assert "cannot be told apart" not in said
    assert "the first 2 were timed again, interleaved; the others once" in said
    close = tuple(replace(result, low_ms=1.0, high_ms=2.0) for result in results(3))
    said = "\n".join(remarks(finished(ranked=close, finalists=3)))
    assert "the winner and 2 after it cannot be told apart" in said
    assert "timed again" not in said


def test_reports_show_clocks_and_other_processes() -> None:
    seen = finished(conditions=Summary({"clocks": "1 MHz"}, load={"other processes": "none"}))
    assert "conditions: clocks 1 MHz; other processes none" in list(remarks(seen))
    assert to_json(seen, [])["conditions"] == {"clocks": "1 MHz", "other processes": "none"}


def test_a_winner_that_loses_to_a_peer_is_said() -> None:
    peers = [row("sdpa-cudnn", 1.0, 1.25), row("flex", 9.0, 1.25), row("sdpa-math", None, note="too large")]
    spoiled = finished(conditions=Summary({"clocks": "1 MHz"}, ("the GPU was 80 % busy",)))
    assert list(warnings(spoiled, peers)) == [
        "the GPU was 80 % busy",
        "sdpa-cudnn is 1.25 times as fast as the winner",
    ]
    assert list(warnings(finished(), peers[1:])) == []
    elsewhere = [row("flex", 9.0, 6.0), row("fa3", 2.0, 1.3)]
    assert list(warnings(finished(), elsewhere)) == [
        "the winner took 1.25 ms in the search and 6 ms beside flex: the machine was not quiet, and milliseconds "
        "of winner and peers cannot be compared"
    ]
    data = to_json(spoiled, peers)
    assert data["warnings"] == list(warnings(spoiled, peers))
    assert (data["space"], data["finalists"], len(data["ranked"])) == (21, 2, 10)


@pytest.mark.parametrize(
    ("budget", "elapsed", "done", "expected"),
    [
        (Budget(seconds=60), 20.0, 2, 40.0),  # the space would take 80 s more
        (Budget(seconds=600), 20.0, 2, 80.0),
        (Budget(variants=10), 20.0, 2, 80.0),
        (Budget(seconds=60), 20.0, 10, 0.0),
    ],
)
def test_the_time_left(
    budget: Budget, elapsed: float, done: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("attnforge.bagel.commands.search_screen.time.monotonic", lambda: now[0])
    screen = Screen(CASE, FORWARD, budget)
    events: list[Event] = [Started(CASE, FORWARD, 21, 10), finished()]
    events[1:1] = [Measured(result, False) for result in results(done)]
    assert screen.watch(events) == (events[-1], False)
    now[0] += elapsed
    assert screen.left() == pytest.approx(expected)


def test_an_interrupted_search_ends_with_what_was_measured() -> None:
    def interrupted() -> Iterator[Event]:
        yield Started(CASE, FORWARD, 21, 10)
        yield Measured(Result(SPECS[11], "wrong"), resumed=False)
        yield from (Measured(result, resumed=False) for result in reversed(results(2)))
        raise KeyboardInterrupt

    end, early = Screen(CASE, FORWARD, Budget()).watch(interrupted())
    assert early
    assert (end.ranked, [result.status for result in end.failed], end.space) == (results(2), ["wrong"], 21)


def test_clock() -> None:
    assert [clock(seconds) for seconds in (-1, 5, 59.6, 180)] == ["0:00", "0:05", "1:00", "3:00"]


def test_bench_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(OURS, 1.0), row("flex", 3.0, 1.5), row("fa4", None, note="takes no mask")]
    shown = text(bench_table(rows, "a title"))
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert "2.00x" in shown, "of the timing beside ours, not 3.00x"
    assert "fa4" not in shown
    say_notes(rows)
    assert "not timed: fa4: takes no mask (causal/4x8192 7B fwd)" in capsys.readouterr().out


def test_the_best_peer_is_the_one_we_lead_by_least() -> None:
    rows = [row("slow day", 5.0, 4.0), row("quick day", 3.0, 1.0)]
    best = best_peer(rows)
    assert best is rows[0]
    assert lead(best, 1.0) == 1.25
    assert lead(row("alone", 3.0), 1.5) == 2.0
    assert lead(None, 1.0) is None
