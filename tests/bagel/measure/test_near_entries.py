"""benchmarks/near_entries.py on the CPU: which kernels are timed, and what a row says; no time is judged."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import near_entries
import pytest
import torch
from markdown_table import body

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import markdown_row
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, dispatch, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.timing import Timing
from attnforge.runtime.search.verify import WrongResult

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PROBLEM = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 32, Mask.CAUSAL, 4)


FIRST, SECOND = islice(candidates(PROBLEM), 2)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of this machine with three lengths, two of which have the same kernel."""
    found = ((FIRST, 128), (SECOND, 1024), (FIRST, 8192))
    entries = [tables.Tuned(spec, 2, size, 1.0, 1.0) for spec, size in found]
    tables.save(tables.device_name(CPU), entries, tmp_path)
    monkeypatch.setenv(TABLES, str(tmp_path))


def test_each_kernel_once_and_the_nearest_first(filled: None) -> None:
    case = make_case("causal/900", "4/2/32", DType.FLOAT32, CPU)
    found = near_entries.near(case, Direction.FORWARD, 10)
    assert list(found.values())[:2] == [SECOND, FIRST]
    assert len(near_entries.near(case, Direction.FORWARD, 1)) == 1


def test_choices_are_for_what_the_case_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its GQA ratio, rows, visible keys and rounds, for dispatch and for the nearest entries."""
    asked: list[Call] = []

    def noting(call: Call, *_: object) -> SimpleNamespace:
        asked.append(call)
        return SimpleNamespace(spec=FIRST)

    monkeypatch.setattr(Case, "rounds", lambda self, direction, _: 3 + (direction is Direction.BACKWARD))
    monkeypatch.setattr(choosing, "choose", lambda *of: iter([noting(*of)]))
    monkeypatch.setattr(dispatch, "choose", noting)
    case = make_case("window:8/96", "6/2/32", DType.FLOAT32, CPU)
    assert case.visible_keys > 0
    for way in Direction:
        near_entries.near(case, way, 2)
        near_entries.choice_of(case, way)
    expected = [
        Call(case.problem(way, Arch.CPU), 3, 96, visible_keys=case.visible_keys, rounds=n)
        for way, n in zip(Direction, (3, 4), strict=True)
    ]
    assert asked == [one for one in expected for _ in range(2)]


class MadeUp:
    """Times in place of measured ones: kernels by their place in the first timing, "chosen" as given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: float, second: float) -> None:
        self.asked: list[list[str]] = []
        self.chosen = first, second
        monkeypatch.setattr(near_entries, "measure_interleaved", self)

    def __call__(self, calls: dict[str, object], *rest: object) -> dict[str, Timing]:
        self.asked.append(list(calls))
        names = self.asked[-1] if len(self.asked) % 2 else self.asked[-2]
        times = {name: 2.0 + 0.1 * names.index(name) for name in calls}
        times[near_entries.CHOSEN] = self.chosen[1 - len(self.asked) % 2]
        return {name: Timing.of([times[name]]) for name in calls}


WORDS = ("--dtype", "fp32", "--device", "cpu", "--jobs", "1")


def test_gain_is_of_the_second_timing(
    filled: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made_up = MadeUp(monkeypatch, 3.0, 2.5)
    table = tmp_path / "near.md"
    words = [*WORDS, "--heads", "4/2/32", "--packs", "causal/96", "--entries", "2", "--markdown", str(table)]
    near_entries.main(words)
    rows = body(table.read_text())
    assert [row[:2] for row in rows] == [["causal/96 4/2/32", "fwd"], ["causal/96 4/2/32", "bwd"]]
    cells = rows[0]
    assert cells[3:7] == ["2.5000", "-", "2.1000", "1.190"]
    assert cells[7] == made_up.asked[0][1]
    assert len(made_up.asked[1]) == 2
    assert markdown_row(cells) in capsys.readouterr().out


def test_a_head_dim_without_entries_is_timed_with_those_of_others(filled: None) -> None:
    """Of wider and narrower rows, beside the first guess, which dispatch takes where rows are narrower."""
    case = make_case("causal/900", "4/2/24", DType.FLOAT32, CPU)
    wider = near_entries.job_of(case, Direction.FORWARD, 10)
    there = replace(PROBLEM, head_dim=24)
    guess = next(candidates(there))
    assert wider.chosen == Spec(there, SECOND.tuning).slug, "as 32 columns are the same width"
    assert wider.first_guess == guess.slug
    assert {spec.tuning for spec in wider.specs.values()} == {FIRST.tuning, SECOND.tuning, guess.tuning}
    case = make_case("causal/900", "4/2/64", DType.FLOAT32, CPU)
    narrower = near_entries.job_of(case, Direction.FORWARD, 10)
    assert narrower.chosen == narrower.first_guess == next(candidates(replace(PROBLEM, head_dim=64))).slug
    assert {FIRST.tuning, SECOND.tuning} <= {spec.tuning for spec in narrower.specs.values()}
    assert len(near_entries.job_of(case, Direction.FORWARD, 2).specs) == 2


def test_the_nearest_head_dims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the octaves of both together; those of another pass do not count, and none if the call's have entries."""
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    monkeypatch.setenv(TABLES, str(tmp_path))
    dims = [(64, 0), (24, 0), (56, 0), (40, 64), (32, 0)]
    problems = [replace(PROBLEM, head_dim=head_dim, dim_v=dim_v) for head_dim, dim_v in dims]
    backward = replace(PROBLEM, head_dim=40, direction=Direction.BACKWARD)
    entries = [tables.Tuned(next(candidates(problem)), 2, 128, 1.0, 1.0) for problem in (*problems, backward)]
    tables.save("device", entries, tmp_path)
    found = near_entries.neighbours(replace(PROBLEM, head_dim=40), "device")
    assert [(one.head_dim, one.dim_v) for one in found] == [(32, 0), (40, 64), (56, 0)]
    assert near_entries.neighbours(replace(problems[0], mask=Mask.FULL), "device") == []


def test_head_dims_of_another_family_are_no_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards of wide heads have other knobs."""
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    monkeypatch.setenv(TABLES, str(tmp_path))
    call = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 112, Mask.CAUSAL, 16)
    narrow, wide = replace(call, head_dim=64), replace(call, head_dim=192)
    entries = [tables.Tuned(next(candidates(problem)), 2, 128, 1.0, 1.0) for problem in (narrow, wide)]
    tables.save("device", entries, tmp_path)
    assert near_entries.neighbours(call, "device") == [narrow]


@pytest.mark.parametrize(
    ("first", "second", "wins"), [(3.0, 2.5, True), (3.0, 2.11, False), (1.0, 1.0, False)]
)
def test_the_winner_becomes_an_entry(
    first: float,
    second: float,
    wins: bool,
    filled: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Verified; the choice if nothing gains 2 %."""
    made_up = MadeUp(monkeypatch, first, second)
    out = tmp_path / "out"
    job = near_entries.job_of(make_case("causal/96", "4/2/24", DType.FLOAT32, CPU), Direction.FORWARD, 10)
    fastest = job.specs[next(iter(job.specs))]
    monkeypatch.setattr(near_entries, "jobs_of", lambda args: [replace(job, chosen=list(job.specs)[1])])
    near_entries.main([*WORDS, "--table-out", str(out)])
    (entry,) = tables.load(tables.device_name(CPU), out)
    assert entry.spec == (fastest if wins else job.specs[list(job.specs)[1]])
    assert (entry.group, entry.size, entry.ms) == (2, 96, 2.1 if wins else second)
    assert entry.tflops == pytest.approx(job.case.flops(Direction.FORWARD) / entry.ms / 1e9, abs=1e-3)
    assert made_up.asked[0][0] == near_entries.CHOSEN


@pytest.mark.parametrize(("timed", "replaced"), [(True, True), (False, False)])
def test_a_faster_entry_of_another_run_stays(
    timed: bool, replaced: bool, filled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One whose kernel was timed in this run gives way."""
    job = near_entries.job_of(make_case("causal/96", "4/2/24", DType.FLOAT32, CPU), Direction.FORWARD, 10)
    here, rounds = list(job.specs.values()), job.case.rounds(job.direction)
    others = (spec for spec in candidates(here[0].problem) if spec not in here)
    there = tables.Tuned(here[-1] if timed else next(others), 2, 96, 1.0, 1e9, rounds=rounds)
    name = tables.device_name(CPU)
    tables.save(name, [there], tmp_path / "out")
    MadeUp(monkeypatch, 3.0, 2.5)
    monkeypatch.setattr(near_entries, "jobs_of", lambda args: [job])
    near_entries.main([*WORDS, "--table-out", str(tmp_path / "out")])
    (entry,) = tables.load(name, tmp_path / "out")
    assert (entry.spec in here and entry.tflops < 1e9) == replaced


def test_a_wrong_kernel_becomes_no_entry(
    filled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong:
        def __init__(self, *of: object) -> None: ...

        def verify(self, handle: int) -> None:
            raise WrongResult("out: holds NaN or infinity")

    MadeUp(monkeypatch, 3.0, 2.5)
    monkeypatch.setattr(near_entries, "Bench", Wrong)
    words = ["--call", "4/2/24", "causal/96", "--table-out", str(tmp_path / "out")]
    near_entries.main([*WORDS, *words])
    assert "is wrong: out: holds NaN or infinity" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_kernel_outside_of_the_space_becomes_no_entry(
    filled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search would not find it again."""

    class Empty:
        def space(self, problem: Problem) -> list[object]:
            return []

    MadeUp(monkeypatch, 3.0, 2.5)
    monkeypatch.setattr(near_entries, "family_of", lambda problem: Empty())
    words = ["--call", "4/2/24", "causal/96", "--table-out", str(tmp_path / "out")]
    near_entries.main([*WORDS, *words])
    assert "is in no search's space" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_parts_are_whole_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["16/16/80 causal/8 causal/9 causal/10", "8/8/40 full/8", "8/8/80 full/8", "8/8/64 full/8 full/9"]
    pairs = [(line.split()[0], pack) for line in words for pack in line.split()[1:]]
    cases = [make_case(pack, heads, DType.FLOAT32, CPU) for heads, pack in pairs]
    shares = [near_entries.share(cases, part, 2) for part in range(2)]
    assert [{case.head_dim for case in share} for share in shares] == [{80}, {40, 64}]
    assert sum(map(len, shares)) == len(cases)
    jobs = []
    monkeypatch.setattr(near_entries, "job_of", lambda case, *_: jobs.append(case.head_dim))
    calls = [word for line in words for word in ("--call", *line.split())]
    near_entries.jobs_of(near_entries.arguments([*WORDS, *calls, "--part", "1/2"]))
    assert set(jobs) == {40, 64}
