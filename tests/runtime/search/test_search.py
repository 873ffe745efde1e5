"""The search engine with a fake compiler and a fake device, and one real run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.status import Status

from attnforge import __version__
from attnforge.bagel.commands import search_screen
from attnforge.bagel.measure.bench import Row
from attnforge.codegen.families import make_plan, make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import Source, render
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.masks import Spans
from attnforge.runtime.search import search as engine
from attnforge.runtime.search import timing, winners
from attnforge.runtime.search.case import Case, as_deterministic, causal_case
from attnforge.runtime.search.conditions import Summary
from attnforge.runtime.search.journal import Result
from attnforge.runtime.search.search import (
    Budget,
    Event,
    Finished,
    Measured,
    Scope,
    Started,
    _noise,
    _Run,
)
from attnforge.runtime.search.strategies import STRATEGIES, Greedy, Times
from attnforge.runtime.search.timing import Effort, Timing
from attnforge.runtime.search.worker import Outcome, Worker
from attnforge.runtime.tables import device_name

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TARGET = (Arch.CPU, "a test machine")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def small_case() -> Case:
    return causal_case("causal/64", (1, 4, 2, 64, 64), DType.FLOAT32, CPU)


def a_spec() -> Spec:
    return next(iter(candidates(small_case().problem(FORWARD, Arch.CPU))))


@dataclass
class FakeEntry:
    meta: dict[str, Any] = field(default_factory=lambda: {"resources": {}, "seconds": 0.1})


class FakeWorker:
    """Answers from `OUTCOMES` by the order of requests; later ones are slower."""

    outcomes: dict[int, Outcome] = {}  # noqa: RUF012
    asked: list[tuple[Spec, float]] = []  # noqa: RUF012
    references: list[tuple[Spec, float] | None] = []  # noqa: RUF012
    compared: list[list[Spec]] = []  # noqa: RUF012

    def prepare(self, case: Case, direction: Direction) -> None:
        pass

    def ready_at(self) -> float:
        return 0.0

    def trial(self, spec: Spec, give_up_ms: float, reference: tuple[Spec, float] | None) -> Outcome:
        FakeWorker.asked.append((spec, give_up_ms))
        FakeWorker.references.append(reference)
        number = len(FakeWorker.asked)
        ms = 10.0 + number
        return self.outcomes.get(number, Outcome("ok", timing=Timing(ms, ms, ms, 3)))

    def compare(self, specs: list[Spec], how: Effort) -> list[Timing]:
        # In turns, the last of them proves fastest.
        FakeWorker.compared.append(specs)
        times = [20.0 - number for number in range(len(specs))]
        return [Timing(ms, ms, ms, 3, ms - 0.1, ms + 0.1) for ms in times]

    def close(self) -> None:
        pass


class Quiet:
    """Conditions that spoil nothing."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def summary(self) -> Summary:
        return Summary({"others": "none"}, ("a warning",))

    def close(self) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker.outcomes, FakeWorker.asked, FakeWorker.references, FakeWorker.compared = {}, [], [], []
    monkeypatch.setattr(engine, "Worker", FakeWorker)
    monkeypatch.setattr(engine, "watch", lambda device: Quiet())
    monkeypatch.setattr(engine, "obtain", lambda source: FakeEntry())


def run(budget: Budget, log: Path | None = None) -> tuple[Started, list[Measured], Finished]:
    started, *measured, finished = engine.search(small_case(), FORWARD, TARGET, budget, log, workers=1)
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    return started, [event for event in measured if isinstance(event, Measured)], finished


@pytest.mark.usefixtures("fakes")
def test_budget_of_variants() -> None:
    started, measured, finished = run(Budget(variants=5))
    assert started.planned == len(measured) == len(finished.ranked) == 5
    assert started.space > 5
    slugs = [event.result.spec.slug for event in measured]
    assert len(set(slugs)) == 5
    assert slugs[0] == a_spec().slug


@pytest.mark.usefixtures("fakes")
def test_what_the_tables_run_now_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    late = list(candidates(small_case().problem(FORWARD, Arch.CPU)))[7]
    monkeypatch.setattr(choosing, "choose", lambda *_, **__: iter([choosing.Choice(late, "tuned")]))
    started, measured, _ = run(Budget(variants=3))
    slugs = [event.result.spec.slug for event in measured]
    assert slugs[0] == late.slug
    assert len(set(slugs)) == 3
    assert started.space == len(list(candidates(small_case().problem(FORWARD, Arch.CPU))))


def test_kernels_of_near_entries_come_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, four at most, then the list without them."""
    space = list(islice(candidates(small_case().problem(FORWARD, Arch.CPU)), 12))
    near = [space[n] for n in (7, 7, 3, 9, 3, 5, 1)]
    monkeypatch.setattr(
        choosing, "choose", lambda *_, **__: (choosing.Choice(spec, "tuned") for spec in near)
    )
    first = [space[n] for n in (7, 3, 9, 5)]
    order = engine._with_incumbent(space, small_case(), "dev")
    assert order == [*first, *(spec for spec in space if spec not in first)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_incumbent_is_what_a_call_of_the_case_takes(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its GQA ratio, rows of q, visible keys and rounds."""
    key = torch.arange(90, dtype=torch.int32)
    mask = Spans(key // 9, key // 3, visible_keys=15)
    case = Case("spans", 1, 6, 2, 40, 90, 64, DType.BFLOAT16, mask, 600, CPU, deterministic=deterministic)
    space = list(islice(candidates(case.problem(BACKWARD, Arch.SM90A)), 9))
    asked: list[tuple[Call, str]] = []

    def choose_for(call: Call, target: Target) -> SimpleNamespace:
        asked.append((call, target.name))
        return SimpleNamespace(spec=space[5])

    def choose(call: Call, name: str) -> Iterator[choosing.Choice]:
        asked.append((call, name))
        return iter([choosing.Choice(space[5], "tuned")])

    monkeypatch.setattr(Case, "rounds", lambda *_: 4)
    monkeypatch.setattr(engine, "choose_for", choose_for)
    monkeypatch.setattr(choosing, "choose", choose)
    assert engine._with_incumbent(space, case, "dev")[0] == space[5]
    expected = Call(
        space[0].problem, 3, 40, visible_keys=case.visible_keys, deterministic=deterministic, rounds=4
    )
    assert asked == [(expected, "dev")]


@pytest.mark.parametrize(
    ("mask", "changes", "twin"),
    [
        (Mask.CAUSAL, {"persistent": 1}, {"persistent": 0}),  # a block for each q head walks no tiles
        (Mask.SPANS, {"deterministic": 1, "launch_order": 4}, {}),  # an order of both owners
        (
            Mask.CAUSAL,
            {"deterministic": 1, "launch_order": 1},
            {"launch_order": 0},
        ),  # an order of blocks per kv head
    ],
    ids=str,
)
def test_the_other_owner_of_dk_and_dv_comes_next(
    mask: Mask, changes: dict[str, int], twin: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The incumbent with the other split_heads, changed as calls change an entry."""
    case = causal_case("causal/64", (1, 4, 2, 64, 64), DType.BFLOAT16, CPU)
    problem = replace(case.problem(BACKWARD, Arch.SM90A), mask=mask)
    space = list(islice(candidates(problem), 99))
    plain = next(spec.tuning for spec in space if not spec.to_json()["tuning"]["split_heads"])
    knobs = plain.to_json() | {"stages": 2} | changes
    first = Spec(problem, make_tuning(problem, knobs))
    make_plan(first)
    monkeypatch.setattr(choosing, "choose", lambda *_, **__: iter([choosing.Choice(first, "tuned")]))
    expected = [first, Spec(problem, make_tuning(problem, knobs | {"split_heads": 1} | twin))]
    order = engine._with_incumbent(space, case, "dev")
    assert order == [*expected, *(spec for spec in space if spec not in expected)]


def scoped(**values: int) -> list[dict[str, int]]:
    """The knobs of what is measured if each of these has this value only."""
    scope = Scope({name: frozenset({value}) for name, value in values.items()}, "exhaustive")
    events = engine.search(small_case(), FORWARD, TARGET, Budget(), None, workers=1, scope=scope)
    return [event.result.spec.tuning.to_json() for event in events if isinstance(event, Measured)]


@pytest.mark.usefixtures("fakes")
def test_knobs_restrict_the_space() -> None:
    """An exhaustive search measures all of what is left, in the order of the list."""
    first = a_spec().tuning.to_json()
    space = [spec.tuning.to_json() for spec in candidates(small_case().problem(FORWARD, Arch.CPU))]
    expected = [knobs for knobs in space if knobs["tile_m"] == first["tile_m"]]
    assert scoped(tile_m=first["tile_m"]) == expected
    assert 1 < len(expected) < len(space)


@pytest.mark.usefixtures("fakes")
def test_a_scope_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="knob: there is no tile_z; the knobs are tile_m, "):
        scoped(tile_z=1)
    with pytest.raises(Infeasible, match="no feasible variant has all of these values"):
        scoped(tile_m=7)
    with pytest.raises(ValueError, match="strategy: got 'luck', expected one of additive, "):
        list(engine.search(small_case(), FORWARD, TARGET, Budget(), scope=Scope(strategy="luck")))


@pytest.mark.usefixtures("fakes")
def test_later_choices_follow_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for first is known when more is asked for, failures included."""
    seen: list[dict[str, float]] = []

    class Told(Greedy):
        def suggest(self, times: Times, count: int) -> list[Spec]:
            seen.append({spec.slug: ms for spec, ms in times.items()})
            return super().suggest(times, count)

    monkeypatch.setitem(STRATEGIES, "greedy", Told)
    FakeWorker.outcomes = {1: Outcome("wrong", "out: off")}
    _, measured, _ = run(Budget(variants=4))
    names = [event.result.spec.slug for event in measured]
    assert seen[:3] == [{}, {names[0]: math.inf}, {names[0]: math.inf, names[1]: 12.0}]


@pytest.mark.usefixtures("fakes")
def test_budget_of_seconds_ends_after_one_that_works() -> None:
    FakeWorker.outcomes = {1: Outcome("wrong", "out: off"), 2: Outcome("launch", "boom")}
    _, measured, finished = run(Budget(seconds=0.0))
    assert [event.result.status for event in measured] == ["wrong", "launch", "ok"]
    assert finished.winner is not None


@pytest.mark.usefixtures("fakes")
def test_what_runs_today_is_measured_even_if_it_compiles_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, where variants are measured while others compile; a CPU compiles a batch first."""
    arch, device = Arch.SM80, "a test device"
    space = list(candidates(small_case().problem(FORWARD, arch)))
    incumbent, others_done = engine._with_incumbent(space, small_case(), device)[0], threading.Event()

    def obtain(source: Source) -> FakeEntry:
        if source.spec == incumbent:
            assert others_done.wait(30)
        return FakeEntry()

    def trial(self: FakeWorker, spec: Spec, give_up_ms: float, reference: object) -> Outcome:
        others_done.set()
        ms = 10.0 if spec == incumbent else 20.0
        return Outcome("ok", timing=Timing(ms, ms, ms, 3))

    monkeypatch.setattr(engine, "obtain", obtain)
    monkeypatch.setattr(FakeWorker, "trial", trial)
    monkeypatch.setattr(FakeWorker, "compare", lambda self, specs, how: None)
    *_, finished = engine.search(small_case(), FORWARD, (arch, device), Budget(seconds=0.0), workers=4)
    assert isinstance(finished, Finished)
    assert finished.winner is not None
    assert finished.winner.spec == incumbent


@pytest.mark.usefixtures("fakes")
def test_failures_are_recorded_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def obtain(source: Source) -> FakeEntry:
        if source.spec == first:
            raise CompileError(source.spec.slug, ["cc"], Path("kernel.cpp"), "kernel.cpp:1:1: error: no")
        return FakeEntry()

    first = a_spec()
    monkeypatch.setattr(engine, "obtain", obtain)
    FakeWorker.outcomes = {1: Outcome("wrong", "out: off"), 2: Outcome("timeout", "hangs")}
    _, _, finished = run(Budget(variants=6))
    assert [result.status for result in finished.failed] == ["compile", "wrong", "timeout"]
    assert "error: no" in finished.failed[0].detail
    assert len(finished.ranked) == 3


@pytest.mark.usefixtures("fakes")
def test_leaders_are_ranked_by_the_timing_in_turns() -> None:
    _, measured, finished = run(Budget(variants=3))
    # 11, 12, 13 ms at first; only those within 10 % of the best are timed again, and swap. They take 1.7 times as long
    # as in their trials, so the third would, too.
    assert [r.ms for r in finished.ranked] == [19.0, 20.0, pytest.approx(13.0 * (20 / 11 + 19 / 12) / 2)]
    assert finished.ranked[2].tflops == pytest.approx(
        small_case().flops(FORWARD) / finished.ranked[2].ms / 1e9
    )
    assert finished.finalists == 2
    assert finished.winner is not None
    assert finished.winner.spec == measured[1].result.spec
    assert finished.winner.repeats == 3, "of the last timing alone"
    assert (finished.winner.low_ms, finished.winner.high_ms) == (18.9, 19.1)
    assert finished.tied == 0
    assert any("took from 1.58 to 1.82 times" in warning for warning in finished.conditions.warnings)


@pytest.mark.usefixtures("fakes")
def test_a_sole_leader_is_timed_again() -> None:
    _, measured, finished = run(Budget(variants=1))
    assert FakeWorker.compared == [[measured[0].result.spec]]
    assert finished.winner is not None
    assert finished.winner.ms == 20.0
    assert (finished.finalists, finished.space, finished.tried) == (1, finished.space, 1)
    assert finished.space > 1


@pytest.mark.usefixtures("fakes")
def test_the_last_timing_of_slow_leaders_is_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of it is kept for them, of which short calls need nothing."""
    monkeypatch.setattr(engine, "effort", lambda device: Effort())
    monkeypatch.setattr(engine, "final_effort", lambda device, patience: timing.final_effort(GPU, patience))
    search = _Run(small_case(), FORWARD, TARGET, Budget(seconds=100.0), None, 1, Scope(), None)
    try:
        assert [search.reserved(ms) for ms in (0.1, 5.0, 14.0)] == [0.0, 0.0, 0.0]
        assert search.reserved(100.0) == pytest.approx(4 * (21 - 3) * 0.1)
        assert all(search.reserved(ms) <= 10.0 for ms in (15.0, 120.0, 500.0, 2000.0, 60000.0))
        assert search.final(2).patience == 5.0
        assert not search.expired(), "nothing works yet"
        search.results.append(Result(a_spec(), "ok", ms=100.0))
        search.started = time.monotonic() - 92.0
        assert not search.expired()
        search.started = time.monotonic() - 93.0
        assert search.expired()
    finally:
        search.close()


@pytest.mark.usefixtures("fakes")
def test_noise_makes_more_finalists() -> None:
    """Variants whose intervals overlap the best's may be faster than it."""
    FakeWorker.outcomes = {
        1: Outcome("ok", timing=Timing(10.0, 5.0, 20.0, 9, 8.0, 15.0)),
        2: Outcome("ok", timing=Timing(14.0, 9.0, 20.0, 9, 14.5, 16.0)),
        3: Outcome("ok", timing=Timing(18.0, 9.0, 20.0, 9, 15.5, 19.0)),
    }
    _, measured, finished = run(Budget(variants=3))
    assert FakeWorker.compared == [[event.result.spec for event in measured[:2]]]
    assert finished.finalists == 2


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("alone", [False, True])
def test_leaders_may_be_timed_alone(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of power all are slower than in trials, which is no sign of noise then."""
    asked: list[Effort] = []

    def compare(self: FakeWorker, specs: list[Spec], how: Effort) -> list[Timing]:
        asked.append(how)
        return [Timing(ms, ms, ms, 4) for ms in (26.0, 24.0, 28.0, 30.0)[: len(specs)]]

    monkeypatch.setattr(FakeWorker, "compare", compare)
    finished = run(Budget(variants=3, alone=alone))[2]
    assert [how.alone for how in asked] == [alone]
    assert finished.alone == alone
    assert finished.ranked[0].ms == 24.0
    assert (len(finished.conditions.warnings) > 1) == (not alone)


@pytest.mark.usefixtures("fakes")
def test_a_dead_comparison_leaves_the_ranking_of_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "compare", lambda self, specs, how: None)
    _, _, finished = run(Budget(variants=3))
    assert [r.ms for r in finished.ranked] == [11.0, 12.0, 13.0]
    assert finished.finalists == 0
    assert finished.conditions.warnings == ("a warning",)


@pytest.mark.usefixtures("fakes")
def test_what_is_tied_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(self: FakeWorker, specs: list[Spec], how: Effort) -> list[Timing]:
        return [Timing(ms, ms, ms, 9, ms - 0.6, ms + 0.6) for ms in (12.0, 11.0)]

    monkeypatch.setattr(FakeWorker, "compare", compare)
    finished = run(Budget(variants=3))[2]
    assert finished.tied == 1
    assert replace(finished, ranked=()).tied == 0


@pytest.mark.usefixtures("fakes")
def test_the_log_ends_with_the_leaders_last_times(tmp_path: Path) -> None:
    """The ranking of the end, not that of the trials."""
    _, _, finished = run(Budget(variants=3), tmp_path / "log.jsonl")
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    leaders = finished.ranked[: finished.finalists]
    assert len(leaders) == 2
    assert last["final"]["results"] == json.loads(json.dumps([r.to_json() for r in leaders]))
    assert last["final"]["warnings"] == list(finished.conditions.warnings)


@pytest.mark.usefixtures("fakes")
def test_losers_are_given_up_early() -> None:
    run(Budget(variants=3))
    assert [give_up for _, give_up in FakeWorker.asked] == [0.0, 11.0 * engine.LOST, 11.0 * engine.LOST]


@pytest.mark.usefixtures("fakes")
def test_all_are_timed_in_turns_with_the_first_that_works(tmp_path: Path) -> None:
    """Also those of a resumed search, so that the times of its log are of one scale."""
    FakeWorker.outcomes = {1: Outcome("wrong", "out: off")}
    _, measured, _ = run(Budget(variants=4), tmp_path / "log.jsonl")
    first = (measured[1].result.spec, 12.0)
    assert FakeWorker.references == [None, None, first, first]
    run(Budget(variants=5), tmp_path / "log.jsonl")
    assert FakeWorker.references[4:] == [first]


@pytest.mark.usefixtures("fakes")
def test_resume_measures_nothing_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run(Budget(variants=4), log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("result" in line for line in lines) == 4
    assert all(line["case"] == "causal/64" for line in lines)
    assert (lines[0]["search"]["planned"], lines[0]["search"]["incumbent"]) == (4, a_spec().to_json())
    FakeWorker.asked = []
    _, measured, finished = run(Budget(variants=4), log)
    assert [event.resumed for event in measured] == [True] * 4
    assert FakeWorker.asked == []
    assert len(finished.ranked) == 4


def test_no_candidate_is_an_error_with_the_reason() -> None:
    case = replace(small_case(), head_dim=300)
    with pytest.raises(Infeasible, match="no kernel can do it"):
        next(engine.search(case, FORWARD, TARGET, Budget()))


# ---- For real: compiler, process, kernels


def test_a_real_search_and_its_winner(tmp_path: Path) -> None:
    case = causal_case("causal/96", (1, 4, 2, 96, 64), DType.FLOAT32, CPU)
    target = (Arch.CPU, device_name(CPU))
    *_, finished = engine.search(case, FORWARD, target, Budget(variants=2), tmp_path / "log.jsonl")
    assert isinstance(finished, Finished)
    assert [result.status for result in finished.failed] == []
    winner = finished.winner
    assert winner is not None
    assert winner.tflops == pytest.approx(case.flops(FORWARD) / winner.ms / 1e9)
    assert 0 < winner.limit_used < 1

    kept = winners.keep(finished, target[1], {"torch": "x"}, tmp_path)
    assert kept.table.parent == tmp_path
    assert json.loads(kept.table.read_text())[0]["spec"] == winner.spec.to_json()
    assert kept.source is not None
    assert kept.source.read_text() == render(winner.spec).text


def finished_with(*results: Result) -> Finished:
    return Finished(small_case(), FORWARD, results, (), 1.0)


def test_a_worse_winner_never_replaces_a_better_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the search has timed the better one's kernel too: then both were measured in one run."""
    packaged, mine = tmp_path / "packaged", tmp_path / "mine"
    monkeypatch.setattr(tables, "PACKAGED", packaged)
    monkeypatch.setenv(TABLES, str(mine))
    first, second, *_ = candidates(small_case().problem(FORWARD, Arch.CPU))
    fast, slow = Result(first, "ok", ms=1.0, tflops=9.0), Result(second, "ok", ms=2.0, tflops=4.5)
    assert winners.keep(finished_with(fast), "dev", {}, mine).stays is None
    kept = winners.keep(finished_with(slow), "dev", {}, mine)
    assert kept.stays is not None
    assert kept.stays.spec == first
    assert [entry.spec for entry in tables.known("dev")] == [first]
    again = finished_with(replace(slow, tflops=5.0), replace(fast, tflops=4.0))
    assert winners.keep(again, "dev", {}, mine).stays is None
    assert [entry.spec for entry in tables.known("dev")] == [second]

    # What the package brings counts likewise, and is never written.
    mine.joinpath("dev.json").rename(mine / "moved.json")
    winners.keep(finished_with(fast), "dev", {}, mine)
    packaged.mkdir()
    mine.joinpath("dev.json").rename(packaged / "dev.json")
    assert winners.keep(finished_with(slow), "dev", {}, mine).stays is not None
    assert not mine.joinpath("dev.json").exists()
    faster = winners.keep(finished_with(replace(slow, tflops=10.0)), "dev", {}, mine)
    assert faster.table == mine / "dev.json"
    assert [entry.spec for entry in tables.known("dev")] == [second], "the user's folder comes first"
    assert [entry.spec for entry in tables.load("dev", packaged)] == [first]


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what an older log had, and what was being shown."""
    case, now, shown = small_case(), [100.0], list[Event]()
    slow, fast, *_ = candidates(case.problem(FORWARD, Arch.CPU))
    results = Result(slow, "ok", ms=2.0, tflops=1.0), Result(fast, "ok", ms=1.0, tflops=2.0)
    begin = Started(case, FORWARD, 21, 3)
    events: list[Event] = [begin, Measured(results[0], resumed=True), Measured(results[1], resumed=False)]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def show(event: Event) -> None:
        shown.append(event)
        now[0] += 5.0
        if event == events[-1]:
            raise KeyboardInterrupt

    end, interrupted = engine.watch_events(events, case, FORWARD, show)
    assert (shown, interrupted) == (events, True)
    assert (end.ranked, end.space, end.seconds) == (results[::-1], 21, 15.0)
    last = Finished(case, FORWARD, results[1:], (), 1.0)
    shown.clear()
    assert engine.watch_events([begin, last], case, FORWARD, shown.append) == (last, False)
    assert shown == [begin, last]
    with pytest.raises(RuntimeError, match="ended without a result"):
        engine.watch_events(events, case, FORWARD)


def test_an_interrupted_search_keeps_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, specs = small_case(), list(candidates(small_case().problem(FORWARD, Arch.CPU)))

    def events(*_: object) -> Iterator[Event]:
        yield Started(case, FORWARD, 3, 3)
        yield Measured(Result(specs[0], "ok", ms=2.0, tflops=1.0), resumed=False)
        yield Measured(Result(specs[1], "ok", ms=1.0, tflops=2.0), resumed=False)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal comes first

    monkeypatch.setattr(search_screen, "search", events)
    options = search_screen.Options(Budget(), out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        search_screen.run_search(case, FORWARD, (Arch.CPU, "dev"), options)
    assert [entry.spec for entry in tables.load("dev", tmp_path)] == [specs[1]]
    said = capsys.readouterr().out
    assert "interrupted; the best so far" in said
    assert "run the same command to resume from" in said


def test_an_interrupt_keeps_the_winner_while_peers_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, specs = small_case(), list(candidates(small_case().problem(FORWARD, Arch.CPU)))
    best = Result(specs[1], "ok", ms=1.0, tflops=2.0)

    def peers(case: Case, direction: Direction, names: tuple[str, ...], spec: Spec) -> Iterator[Row]:
        assert spec == best.spec, "they are timed beside the winner"
        assert [f"timing {name}" for name in names] == [shown[-1].split(" on ")[0]]
        if shown == ["timing sdpa-math on the same case"]:
            yield Row(case.name, "fwd", "fp32", "sdpa-math", ms=3.0, tflops=0.7, ours_ms=1.0)
            return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal comes first

    shown: list[str] = []
    monkeypatch.setattr(Status, "update", lambda _, text: shown.append(text))
    monkeypatch.setattr(search_screen, "usual", lambda _: ("sdpa-math", "flex"))
    monkeypatch.setattr(
        search_screen, "search", lambda *_: iter_events(Finished(case, FORWARD, (best,), (), 1.0))
    )
    monkeypatch.setattr(search_screen, "peers_of", peers)
    with pytest.raises(KeyboardInterrupt):
        search_screen.run_search(
            case, FORWARD, (Arch.CPU, "dev"), search_screen.Options(Budget(), out=tmp_path)
        )
    assert [entry.spec for entry in tables.load("dev", tmp_path)] == [specs[1]]
    said = capsys.readouterr().out
    assert "sdpa-math" in said
    assert shown[1].startswith("timing flex on the same case, which torch compiles first")
    assert "interrupted while peers were timed; the winner is saved; run the same command to resume" in said


def iter_events(*events: Event) -> Iterator[Event]:
    yield from events


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([1.0, 1.05], ""),
        (
            [1.06, 11.69],
            "leaders took from 1.06 to 11.69 times as long as at first: the machine was not quiet",
        ),
        ([1.98, 2.0], "all leaders took 1.99 times as long as at first: the machine's speed changed"),
        ([0.5, 0.5], "all leaders took 0.50 times as long"),
    ],
)
def test_what_the_last_timing_tells_of_the_machine(changes: list[float], said: str) -> None:
    found = list(_noise(changes))
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_the_measuring_process_ends_in_silence_with_its_caller() -> None:
    """Its caller is killed while it waits for requests."""
    program = (
        "import os, signal, torch\n"
        "from attnforge.runtime.search.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(); worker.start(torch.device('cpu'))\n"
        "    worker._connection.poll(60)  # an unread reply makes the pipe end by a reset\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""


def test_a_dying_process_is_one_failure() -> None:
    worker, spec = Worker(), a_spec()
    worker.prepare(small_case(), FORWARD)
    assert worker.trial(spec, 0.0).status == "ok"
    worker._process.kill()
    dead = worker.trial(spec, 0.0)
    assert (dead.status, dead.detail) == ("launch", "the process died of SIGKILL")
    assert worker.trial(spec, 0.0).status == "ok"
    worker.close()


def test_one_process_measures_one_problem_after_another() -> None:
    spec, before = a_spec(), time.monotonic()
    with contextlib.closing(Worker()) as worker:
        worker.start(torch.device("cpu"))
        first, ready_at = worker._process.pid, worker.ready_at()
        assert before < ready_at < time.monotonic()
        worker.prepare(small_case(), FORWARD)
        assert worker.ready_at() > ready_at, "the case is prepared, too"
        assert worker.trial(spec, 0.0).status == "ok"
        worker.release()
        worker.prepare(replace(small_case(), name="another", batch=1), FORWARD)
        assert worker.trial(spec, 0.0).status == "ok"
        assert worker._process.pid == first


def test_a_reply_that_nobody_waited_for_is_not_taken_for_another() -> None:
    spec = a_spec()
    with contextlib.closing(Worker()) as worker:
        worker.prepare(small_case(), FORWARD)
        worker.prepare(small_case(), FORWARD)  # the search before ended before its first trial
        assert worker.trial(spec, 0.0).status == "ok"
        assert worker._connection is not None
        worker._connection.send(("compare", ([spec], Effort())))
        worker._asking = True  # the search was interrupted while it waited
        worker.prepare(small_case(), FORWARD)
        assert worker.trial(spec, 0.0).status == "ok"


def test_a_problem_that_cannot_be_measured_is_said() -> None:
    with contextlib.closing(Worker()) as worker:
        for ask in (lambda: worker.trial(a_spec(), 0.0), worker.ready_at):
            worker.prepare(replace(small_case(), heads_q=3, heads_kv=2), FORWARD)
            with pytest.raises(RuntimeError, match="cannot prepare the measurement"):
                ask()
        worker.prepare(small_case(), FORWARD)
        assert worker.trial(a_spec(), 0.0).status == "ok"


@pytest.mark.parametrize("starts_late", [False, True])
def test_the_start_of_a_process_does_not_take_from_the_budget(
    fakes: None, monkeypatch: pytest.MonkeyPatch, starts_late: bool
) -> None:
    ready_at = time.monotonic() + 1000 if starts_late else 0.0
    monkeypatch.setattr(FakeWorker, "ready_at", lambda self: ready_at)
    list(engine.search(small_case(), FORWARD, TARGET, Budget(seconds=0.0)))
    assert (len(FakeWorker.asked) > 2) == starts_late  # the first to work and the incumbent run in any case


def test_a_restart_does_not_give_time_back(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that crashed is ready anew long after the start; only the wait for it is added."""
    now = [0.0]
    monkeypatch.setattr("attnforge.runtime.search.search.time.monotonic", lambda: now[0])
    ready = iter((0.5, *range(100, 200)))

    def trial(self: FakeWorker, *_: object) -> Outcome:
        now[0] += 1.0
        FakeWorker.asked.append((a_spec(), 0.0))
        return Outcome("ok", timing=Timing(1.0, 1.0, 1.0, 3))

    monkeypatch.setattr(FakeWorker, "trial", trial)
    monkeypatch.setattr(FakeWorker, "ready_at", lambda self: next(ready))
    *_, finished = engine.search(small_case(), FORWARD, TARGET, Budget(seconds=3.0), workers=1)
    assert isinstance(finished, Finished)
    assert 4 <= len(FakeWorker.asked) <= 5
    assert finished.seconds == now[0]


def test_why_a_process_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the device arrives, and the next problem starts a process again."""
    with contextlib.closing(Worker()) as worker:
        worker.start(torch.device("meta"))
        with pytest.raises(RuntimeError, match=r"did not start: .*[Mm]eta"):
            worker.ready_at()
        worker.start(torch.device("cpu"))
        worker._process.kill()
        worker._process.join()
        worker.prepare(small_case(), FORWARD)
        assert worker.trial(a_spec(), 0.0).status == "ok"


def test_a_lent_process_stays(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    monkeypatch.setattr(FakeWorker, "close", lambda self: ended.append("closed"))
    monkeypatch.setattr(FakeWorker, "release", lambda self: ended.append("released"), raising=False)
    for worker in (None, FakeWorker()):
        list(engine.search(small_case(), FORWARD, TARGET, Budget(variants=1), worker=worker))  # type: ignore[arg-type]
    assert ended == ["closed", "released"]


def test_no_compiler_runs_while_a_cpu_is_timed(fakes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the compilers would take the cores that are being measured; on a GPU they go on meanwhile."""
    running, seen = [0], list[int]()

    def obtain(source: Source) -> FakeEntry:
        running[0] += 1
        # Of two that are compiled at the same time one ends later.
        time.sleep(0.002 if len(seen) % 2 else 0.05)
        running[0] -= 1
        return FakeEntry()

    class Watching(FakeWorker):
        def trial(self, spec: Spec, give_up_ms: float, reference: tuple[Spec, float] | None) -> Outcome:
            seen.append(running[0])
            time.sleep(0.01)
            seen.append(running[0])
            return super().trial(spec, give_up_ms, reference)

    monkeypatch.setattr(engine, "obtain", obtain)
    monkeypatch.setattr(engine, "Worker", Watching)
    list(engine.search(small_case(), FORWARD, TARGET, Budget(variants=6), None, workers=2))
    assert len(seen) == 12
    assert not any(seen)


@pytest.mark.usefixtures("fakes")
def test_a_deterministic_case_is_searched_and_saved_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only kernels that sum in a fixed order, first what dispatch takes today. Its winner is of a class of its own."""
    monkeypatch.setenv(TABLES, str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    plain = causal_case("causal/64 2/2/64", (1, 2, 2, 64, 64), DType.BFLOAT16, CPU)
    case, device, arch = as_deterministic(plain), "a test device", Arch.SM90A
    loose = list(candidates(plain.problem(BACKWARD, arch)))[200]
    tables.save(device, [tables.Tuned(loose, 1, 64, 1.0, 1e9)], tmp_path)
    incumbent = choose_for(Call(loose.problem, 1, 64, deterministic=True), Target(device, (arch,))).spec
    logs = tmp_path / "log.jsonl"
    started, *measured, finished = engine.search(
        case, BACKWARD, (arch, device), Budget(variants=30), logs, workers=1
    )
    assert isinstance(started, Started)
    assert started.space == len(list(deterministic_candidates(loose.problem)))
    tried = [event.result.spec for event in measured if isinstance(event, Measured)]
    assert tried[0] == incumbent != loose
    assert all(make_plan(spec).deterministic for spec in tried)
    assert {json.loads(line)["case"] for line in logs.read_text().splitlines()} == {
        f"{plain.name} deterministic"
    }
    assert isinstance(finished, Finished)
    facts = {"driver": "580.1", "clocks": "1980 MHz (1980 to 1980)"}
    conditions = Summary(facts, load={"other processes": "0.1 of 8 CPUs before, 0.0 while timing"})
    winners.keep(replace(finished, conditions=conditions), device, {"torch": "2.11.0"}, tmp_path)
    assert finished.winner is not None
    saved = {entry.deterministic: entry for entry in tables.load(device, tmp_path)}
    assert (saved[False].spec, saved[True].spec) == (loose, finished.winner.spec)
    notes = saved[True].notes
    assert notes["case"] == case.name
    assert {name: notes[name] for name in ("torch", "driver", "clocks")} == {"torch": "2.11.0"} | facts
    assert "other processes" not in notes, "which only reports show"
    assert notes["attnforge"].startswith(__version__)
    assert notes["date"].startswith("20")
    taken = choose_for(Call(loose.problem, 1, 64, deterministic=True), Target(device, (arch,)))
    assert taken.spec == finished.winner.spec
    assert (
        engine._with_incumbent(list(deterministic_candidates(loose.problem)), case, device)[0] == taken.spec
    )
    with pytest.raises(ValueError, match="deterministic: the forward always is; search the backward"):
        list(engine.search(case, FORWARD, (arch, device), Budget()))
