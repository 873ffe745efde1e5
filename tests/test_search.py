"""The search engine: log, every kind of failure, verification, timing, and one real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnforge.bagel.cases import make_case
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import Source
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Spec
from attnforge.runtime import search as engine
from attnforge.runtime import tables, winners
from attnforge.runtime.case import Case, Inputs, causal_case
from attnforge.runtime.errors import CompileError
from attnforge.runtime.journal import Journal, Result
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.reference import reference
from attnforge.runtime.search import Budget, Finished, Measured, Started
from attnforge.runtime.tables import device_name
from attnforge.runtime.timing import Effort, Timing, measure, measure_interleaved
from attnforge.runtime.verify import Outputs, WrongResult, make_check, odd_case, verify
from attnforge.runtime.worker import Outcome, Worker

CPU = torch.device("cpu")
TARGET = (Arch.CPU, "a test machine")
Damage = Callable[[Outputs], None]
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def small_case(dtype: DType = DType.FLOAT32) -> Case:
    return causal_case("causal/64", (1, 4, 2, 64, 64), dtype, CPU)


# ---- The log


def result_of(spec: Spec, status: str = "ok", ms: float = 1.0) -> Result:
    return Result(spec, status, ms=ms, errors={"out": (1e-8, 1e-7)})


def a_spec() -> Spec:
    return next(iter(candidates(small_case().problem(FORWARD, Arch.CPU))))


def journal(path: Path, **env: str) -> Journal:
    return Journal(path, "a case", "fwd", {"device": "x", **env})


def test_log_resumes_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    result = result_of(a_spec())
    journal(path).add("key", result)
    assert journal(path).find("key") == result
    assert journal(path).find("other") is None
    assert journal(path, torch="another").find("key") is None


def test_log_forgets_crashes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for status in ("launch", "timeout", "compile", "wrong"):
        journal(path).add(status, result_of(a_spec(), status))
    found = {status for status in ("launch", "timeout", "compile", "wrong") if journal(path).find(status)}
    assert found == {"compile", "wrong"}


def test_log_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal(path).add("first", result_of(a_spec()))
    journal(path).add("second", result_of(a_spec()))
    path.write_bytes(path.read_bytes()[:-40])
    assert journal(path).find("first")
    assert journal(path).find("second") is None
    journal(path).add("third", result_of(a_spec()))
    assert journal(path).find("first")
    assert journal(path).find("third")


# ---- The engine, with a fake compiler and a fake device


@dataclass
class FakeEntry:
    meta: dict[str, Any] = field(default_factory=lambda: {"resources": {}, "seconds": 0.1})


class FakeWorker:
    """Answers from `OUTCOMES` by the order of requests; later ones are slower."""

    outcomes: dict[int, Outcome] = {}  # noqa: RUF012
    asked: list[tuple[Spec, float]] = []  # noqa: RUF012

    def __init__(self, case: Case, direction: Direction) -> None:
        pass

    def trial(self, spec: Spec, give_up_ms: float) -> Outcome:
        FakeWorker.asked.append((spec, give_up_ms))
        number = len(FakeWorker.asked)
        ms = 10.0 + number
        return self.outcomes.get(number, Outcome("ok", timing=Timing(ms, ms, ms, 3)))

    def compare(self, specs: list[Spec]) -> list[Timing]:
        # In turns, the last of them proves fastest.
        times = [20.0 - number for number in range(len(specs))]
        return [Timing(ms, ms, ms, 3) for ms in times]

    def close(self) -> None:
        pass


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker.outcomes, FakeWorker.asked = {}, []
    monkeypatch.setattr(engine, "Worker", FakeWorker)
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
    monkeypatch.setattr(tables, "choose", lambda *_: iter([(late, "tuned")]))
    started, measured, _ = run(Budget(variants=3))
    slugs = [event.result.spec.slug for event in measured]
    assert slugs[0] == late.slug
    assert len(set(slugs)) == 3
    assert started.space == len(list(candidates(small_case().problem(FORWARD, Arch.CPU))))


@pytest.mark.usefixtures("fakes")
def test_budget_of_seconds_ends_after_one_that_works() -> None:
    FakeWorker.outcomes = {1: Outcome("wrong", "out: off"), 2: Outcome("launch", "boom")}
    _, measured, finished = run(Budget(seconds=0.0))
    assert [event.result.status for event in measured] == ["wrong", "launch", "ok"]
    assert finished.winner is not None


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
    # 11, 12, 13 ms at first; only those within 10 % of the best are timed again, and swap.
    assert [r.ms for r in finished.ranked] == [12.0, 11.0, 13.0]
    assert finished.winner is not None
    assert finished.winner.spec == measured[1].result.spec
    assert finished.winner.repeats == 6


@pytest.mark.usefixtures("fakes")
def test_losers_are_given_up_early() -> None:
    run(Budget(variants=3))
    assert [give_up for _, give_up in FakeWorker.asked] == [0.0, 11.0 * engine.LOST, 11.0 * engine.LOST]


@pytest.mark.usefixtures("fakes")
def test_resume_measures_nothing_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run(Budget(variants=4), log)
    lines = log.read_text().splitlines()
    assert len(lines) == 4
    assert all(json.loads(line)["case"] == "causal/64" for line in lines)
    FakeWorker.asked = []
    _, measured, finished = run(Budget(variants=4), log)
    assert [event.resumed for event in measured] == [True] * 4
    assert FakeWorker.asked == []
    assert len(finished.ranked) == 4


def test_no_candidate_is_an_error_with_the_reason() -> None:
    case = replace(small_case(), head_dim=300)
    with pytest.raises(Infeasible, match="no kernel can do it"):
        next(engine.search(case, FORWARD, TARGET, Budget()))


# ---- Verification


def kernel(
    case: Case, direction: Direction, damage: Callable[[Outputs], None]
) -> Callable[[Inputs], Outputs]:
    """The exact answer in the case's dtype, then damaged."""

    def call(x: Inputs) -> Outputs:
        exact = reference(x.q, x.k, x.v, case.mask, case.scale, x.dout)._asdict()
        names = ("out", "lse") if direction is FORWARD else ("dq", "dk", "dv")
        results = {name: exact[name].to(x.q.dtype if name != "lse" else torch.float32) for name in names}
        damage(results)
        return results

    return call


def dense_case(dtype: DType = DType.BFLOAT16) -> Case:
    """A mask for each query head, and a head_dim of v of its own."""
    mask = DenseMask(torch.rand(1, 4, 90, 64, generator=torch.Generator().manual_seed(0)) < 0.5)
    return Case("dense", 2, 4, 2, 90, 64, 41, dtype, mask, 0, CPU, dim_v=64)


CASES = [
    small_case(),
    odd_case(make_case("finetune/0", "0.5B", DType.BFLOAT16, CPU)),
    dense_case(),
    odd_case(dense_case(DType.FLOAT32)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_verification_accepts_the_exact_answer(case: Case, direction: Direction) -> None:
    errors = verify(make_check(case, direction), kernel(case, direction, lambda results: None))
    assert set(errors) == ({"out", "lse"} if direction is FORWARD else {"dq", "dk", "dv"})
    assert all(error.ok for error in errors.values())


def poke(name: str, value: float) -> Damage:
    """Change one element."""

    def damage(results: Outputs) -> None:
        results[name][0, 0, 3, ...] = value

    return damage


def transposed_heads(results: Outputs) -> None:
    results["out"].copy_(results["out"].flip(1))


@pytest.mark.parametrize(
    ("direction", "damage", "message"),
    [
        (FORWARD, poke("out", float("nan")), "out: holds NaN"),
        (FORWARD, poke("out", 9.0), "out: error rms .* worst"),
        (FORWARD, transposed_heads, "out: error rms"),
        (FORWARD, poke("lse", -torch.inf), "lse: rows without a visible key"),
        (FORWARD, poke("lse", 9.0), "lse: error"),
        (BACKWARD, poke("dq", 9.0), "dq: error"),
        (BACKWARD, poke("dk", 9.0), "dk: error"),
        (BACKWARD, poke("dv", 9.0), "dv: error"),
    ],
)
def test_verification_rejects_one_wrong_element(direction: Direction, damage: Damage, message: str) -> None:
    case = small_case()
    with pytest.raises(WrongResult, match=message):
        verify(make_check(case, direction), kernel(case, direction, damage))


def test_a_large_case_is_sampled() -> None:
    length = 1100
    edge = torch.tensor([0, 700]).repeat_interleave(torch.tensor([700, 400])).int()
    spans = Spans(edge, torch.where(edge == 0, 700, length).int())
    case = Case("two documents", 1, 6, 2, length, length, 32, DType.FLOAT32, spans, 700**2 + 400**2, CPU)
    check = make_check(case, BACKWARD)
    assert check.heads_kv == 1
    assert check.rows.numel() < 300
    assert {0, length - 1} <= set(check.rows.tolist())
    assert not check.inputs.dout[:, :, 1:-1].any(-1).all()
    verify(check, kernel(case, BACKWARD, lambda results: None))

    def leak(results: Outputs) -> None:
        row = next(i for i in range(length) if i not in set(check.rows.tolist()))
        results["dq"][0, 0, row] = 1e-9

    with pytest.raises(WrongResult, match="dq: rows whose dout is zero"):
        verify(check, kernel(case, BACKWARD, leak))


def test_odd_cases_have_hidden_rows_and_keys() -> None:
    spans = odd_case(make_case("finetune/0", "0.5B", DType.FLOAT32, CPU)).mask
    assert isinstance(spans, Spans)
    seen = spans.visible(333, 333)
    assert (~seen.any(0)).any()
    assert (~seen.any(1)).any()
    assert not seen.all(1).any()


# ---- Timing


def test_effort_counts() -> None:
    how = Effort(seconds=1.0, repeats=50, least=3, give_up_ms=400.0)
    assert [how.count(ms) for ms in (1.0, 100.0, 390.0, 401.0)] == [50, 10, 3, 1]


def test_calls_are_timed_in_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Callable[[Tensor], None]:
        return lambda x: order.append(name)

    how = Effort(seconds=1.0, repeats=4, warmups=1)
    timings = measure_interleaved({"a": call("a"), "b": call("b")}, [(torch.ones(1),)], CPU, how)
    assert order[:4] == ["a", "a", "b", "b"]
    assert [set(order[turn : turn + 2]) for turn in (4, 6, 8)] == [{"a", "b"}] * 3
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_inputs_rotate() -> None:
    seen: list[int] = []
    measure(seen.append, [(0,), (1,), (2,)], CPU, Effort(seconds=1.0, repeats=5, warmups=1))
    assert seen == [0, 2, 0, 1, 2, 0]


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

    table, source = winners.keep(finished, target[1], {"torch": "x"}, tmp_path)
    assert json.loads(table.read_text())[0]["spec"] == winner.spec.to_json()
    assert winners.differences(tmp_path) == []
    source.write_text(source.read_text().replace("const", "CONST", 1))
    (tmp_path / "stale.cpp").write_text("int x;\n")
    changed = "".join(winners.differences(tmp_path))
    assert "+++" in changed
    assert "CONST" in changed
    assert "-int x;" in changed
    assert sorted(path.name for path in winners.write(tmp_path)) == sorted([source.name, "stale.cpp"])
    assert winners.differences(tmp_path) == []


def test_a_dying_process_is_one_failure() -> None:
    worker = Worker(small_case(), FORWARD)
    spec = a_spec()
    assert worker.trial(spec, 0.0).status == "ok"
    worker._process.kill()
    dead = worker.trial(spec, 0.0)
    assert (dead.status, dead.detail) == ("launch", "the process died of SIGKILL")
    assert worker.trial(spec, 0.0).status == "ok"
    worker.close()
