"""The command `tune`: which problems, on which GPU, and that processes share them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnforge.bagel.commands.tune import Place, knobs, place
from attnforge.bagel.measure.case_scores import with_score
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.tuning_set import chosen, measured
from attnforge.cli import main
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime import tables
from attnforge.runtime.search import search as engine
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.conditions import Summary
from attnforge.runtime.search.journal import Result
from attnforge.runtime.search.search import Event, Finished, Measured
from attnforge.runtime.search.worker import Worker

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SMALL = (
    "--pack",
    "full/64",
    "--pack",
    "causal/64",
    "--model",
    "2/1/16",
    "--direction",
    "fwd",
)


def test_knobs_of_a_winner() -> None:
    assert knobs("fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_h2") == "m192 n80 s3 p1 h2"
    assert knobs("none of 3 variants worked") == "none of 3 variants worked"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Place()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS": "9"},
            Place(5, 8, 1, 4),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
            Place(3, 4, 1, 2),
        ),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Place()),
        (
            {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "6"},
            Place(3, 6),
        ),
    ],
)
def test_the_place_of_a_process(env: dict[str, str], expected: Place) -> None:
    assert place(env) == expected


def test_problems_of_a_cpu() -> None:
    found = list(
        chosen(torch.device("cpu"), (), ("full/64",), (DType.FLOAT32, DType.BFLOAT16), tuple(Direction))
    )
    assert len(found) == len(set(found)) == 4 * 2 * 2  # models, dtypes, passes
    assert {problem.pack for problem in found} == {"full/64"}
    assert len({problem.slug for problem in found}) == len(found)
    assert not any(set("/ :") & set(problem.slug) for problem in found)


def test_problems_with_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and files say so, and an entry of one gives it back."""
    (problem,) = chosen(CPU, ["2/1/16"], ["full/64"], [DType.FLOAT32], [Direction.FORWARD], ["softcap:2"])
    assert str(problem) == "full/64 2/1/16 softcap:2 fp32 fwd cpu"
    assert problem.slug == "full_64_2_1_16_softcap_2_fp32_fwd_cpu"
    case = with_score(make_case(problem.pack, problem.model, problem.dtype, CPU), problem.score)
    spec = next(candidates(case.problem(Direction.FORWARD, problem.arch)))
    notes = {"case": case.name}
    monkeypatch.setenv("ATTNFORGE_TABLES", str(tmp_path))
    tables.save("cpu of a test", [tables.Tuned(spec, 2, 64, 1.0, 1.0, notes)], tmp_path)
    assert problem in list(measured(CPU))


def test_an_unfit_score_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("softcap:x", f"{tmp_path}/none.py:f"):
        result = CliRunner().invoke(main, ["tune", "--list", "--device", "cpu", "--score", name])
        assert result.exit_code == 2
        assert f"Error: --score {name}: " in result.output


def test_another_version_of_a_file_is_another_problem(tmp_path: Path) -> None:
    file = tmp_path / "mods.py"
    slugs = set()
    for sign in "+-":
        file.write_text(f"def f(score, b, h, q_idx, kv_idx):\n    return score {sign} 0.5\n")
        (problem,) = chosen(CPU, ["2/1/16"], ["full/64"], [DType.FLOAT32], [Direction.FORWARD], [f"{file}:f"])
        slugs.add(problem.slug)
    assert len(slugs) == 2


def test_warnings_of_a_search_are_printed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the problem's line, in its note, and in a line at the end, which a later run prints, too."""
    seen = "other processes used 3.0 of 4 CPUs [all of them] while variants were timed"

    def disturbed(case: Case, direction: Direction, *_: object, **__: object) -> Iterator[Finished]:
        spec = next(candidates(case.problem(direction, Arch.CPU)))
        result = Result(spec, "ok", ms=1.0, tflops=2.0)
        warnings = (seen,) if case.name.startswith("full") else ()
        yield Finished(case, direction, (result,), (), 1.0, conditions=Summary(warnings=warnings))

    monkeypatch.setattr(engine, "search", disturbed)
    monkeypatch.setattr(Worker, "start", lambda *_: None)
    places = ("--table-out", str(tmp_path / "tables"), "--dir", str(tmp_path / "work"))
    command = ("tune", *SMALL, "--dtype", "fp32", "--device", "cpu", *places)
    texts = []
    for _ in range(2):
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        texts.append(" ".join(result.output.split()))
    assert texts[0].count(f"warning: {seen}") == 1
    assert f"best of 1 warning: {seen}" in texts[0]
    for text in texts:
        assert "warning: 1 of 2 problems were disturbed; their logs in" in text
        assert text.count("(disturbed)") == 1
    notes = [json.loads(path.read_text()) for path in (tmp_path / "work").glob("*.json")]
    assert sorted(note["warnings"] for note in notes) == [[], [seen]]


def test_the_speed_shown_is_that_of_the_entry_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter((90e-3, 20e-3))  # TFLOP/s

    def found(case: Case, direction: Direction, *_: object, **__: object) -> Iterator[Finished]:
        tflops = next(speeds)
        spec = list(candidates(case.problem(direction, Arch.CPU)))[tflops < 50e-3]
        yield Finished(case, direction, (Result(spec, "ok", ms=1.0, tflops=tflops),), (), 1.0)

    monkeypatch.setattr(engine, "search", found)
    monkeypatch.setattr(Worker, "start", lambda *_: None)
    for run in ("first", "second"):
        places = ("--table-out", str(tmp_path / "tables"), "--dir", str(tmp_path / run))
        command = ("tune", *SMALL[2:], "--dtype", "fp32", "--device", "cpu", *places)
        result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert "20.0 GFLOP/s, best of 1; a faster entry stays" in " ".join(result.output.split())
    shown = result.output.partition("tuned")[2]
    assert "90.0 GFLOP/s" in shown
    assert "20.0 GFLOP/s" not in shown


def test_two_processes_share_the_work_and_a_second_run_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tables"
    command = [
        sys.executable,
        "cli.py",
        "tune",
        *SMALL,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--seconds",
        "0",
    ]
    command += ["--table-out", str(out), "--dir", str(tmp_path / "work")]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(n), "WORLD_SIZE": "2", "LOCAL_RANK": str(n), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    texts = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert sum(text.count(", best of ") for text in texts) == 2
    assert "winners are in" in texts[0]
    notes = [json.loads(path.read_text()) for path in (tmp_path / "work").glob("*.json")]
    winners = {entry.spec.slug for entry in tables.load(tables.device_name(torch.device("cpu")), out)}
    assert len(notes) == 2
    assert {note["stays"] or note["winner"] for note in notes} == winners
    monkeypatch.setattr(
        Worker, "start", lambda *_: pytest.fail("a measuring process with nothing to measure")
    )
    again = CliRunner().invoke(main, command[2:], catch_exceptions=False)
    assert again.exit_code == 0
    assert "winners are in" in again.output
    assert ", best of " not in again.output


def test_an_interrupt_keeps_the_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def events(case: Case, direction: Direction, *_: object, **__: object) -> Iterator[Event]:
        begun.append(next(iter(candidates(case.problem(direction, Arch.CPU)))))
        yield Measured(Result(begun[0], "ok", ms=1.0, tflops=2.0), resumed=False)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal comes first

    monkeypatch.setattr(engine, "search", events)
    command = [
        "tune",
        *SMALL,
        "--device",
        "cpu",
        "--table-out",
        str(tmp_path),
        "--dir",
        str(tmp_path / "work"),
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "interrupted; 0 of 2 problems are finished, the best so far of another is saved" in result.output
    assert f"run the same command to resume from {tmp_path / 'work'}" in result.output.replace("\n", "")
    name = tables.device_name(torch.device("cpu"))
    assert [entry.spec for entry in tables.load(name, tmp_path)] == begun
    assert not list((tmp_path / "work").glob("*.json")), "the problem is not finished"
