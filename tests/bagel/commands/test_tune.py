"""The command `tune`: which problems, on which GPU, and that processes share them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnforge.bagel.commands import selection
from attnforge.bagel.commands.tune import Place, knobs, place
from attnforge.bagel.measure.case_scores import with_score
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.tuning_set import chosen, measured
from attnforge.cli import main
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime import kernels, tables
from attnforge.runtime.search import search as engine
from attnforge.runtime.search.case import Case, as_deterministic
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


def test_variants_are_restricted_and_searched_again_for_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scopes = []

    def found(case: Case, direction: Direction, *arguments: Any, **_: object) -> Iterator[Finished]:
        scopes.append(arguments[-1].values)
        if "stages" in scopes[-1]:
            raise ValueError("knob: there is no stages")
        spec = next(candidates(case.problem(direction, Arch.CPU)))
        yield Finished(case, direction, (Result(spec, "ok", ms=1.0, tflops=2.0),), (), 1.0)

    monkeypatch.setattr(engine, "search", found)
    monkeypatch.setattr(Worker, "start", lambda *_: None)
    places = ("--table-out", str(tmp_path / "tables"), "--dir", str(tmp_path / "work"))
    command = ("tune", *SMALL[2:], "--dtype", "fp32", "--device", "cpu", *places)
    for more in ((), ("--knob", "tile_m=32,16"), ("--knob", "tile_m=16,32"), ("--knob", "tile_m=16")):
        assert CliRunner().invoke(main, (*command, *more), catch_exceptions=False).exit_code == 0
    assert scopes == [{}, {"tile_m": {16, 32}}, {"tile_m": {16}}]
    result = CliRunner().invoke(main, (*command, "--knob", "stages=2"))
    assert result.exit_code == 1
    assert "no winner: knob: there is no stages" in result.output


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


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run as on a Hopper GPU, as far as nothing is measured; tables are this test's."""
    monkeypatch.setenv("ATTNFORGE_TABLES", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path / "none")
    monkeypatch.setattr(selection, "_device", lambda text: torch.device("cuda"))
    monkeypatch.setattr(kernels, "targets", lambda device: (Arch.SM90A, Arch.SM90))
    monkeypatch.setattr(kernels, "load", lambda *_: 0)
    monkeypatch.setattr(tables, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(Worker, "start", lambda *_: None)


STRICT = ("tune", "--deterministic", "--dtype", "bf16", "--model", "14/2/64", "--model", "24/24/96")


def listed(*options: str) -> list[str]:
    result = CliRunner().invoke(main, (*STRICT, "--list", *options), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.usefixtures("hopper")
def test_problems_for_deterministic_gradients() -> None:
    packs = ("causal/16x1024", "full/4x8192", "pretrain/0")
    options = [word for pack in packs for word in ("--pack", pack)]
    found = listed(*options)
    assert found == [
        f"{pack} {model} deterministic bf16 bwd sm90a" for model in ("14/2/64", "24/24/96") for pack in packs
    ]
    assert listed(*options, "--direction", "bwd") == found
    (scored,) = listed("--pack", "full/64", "--model", "2/1/16", "--score", "alibi")[2:]
    assert scored == "full/64 2/1/16 alibi deterministic bf16 bwd sm90a"
    result = CliRunner().invoke(main, (*STRICT, "--direction", "fwd"))
    assert result.exit_code == 2
    assert "Error: --deterministic: the forward always is deterministic" in result.output


def test_every_cpu_kernel_is_deterministic() -> None:
    for command in ("tune", "search"):
        result = CliRunner().invoke(main, (command, "--deterministic", "--device", "cpu"))
        assert result.exit_code == 2
        assert (
            "Error: --deterministic: every CPU kernel is deterministic already; leave it out" in result.output
        )


@pytest.mark.usefixtures("hopper")
def test_a_deterministic_entry_gives_its_problem_back(tmp_path: Path) -> None:
    """With --everything; for --deterministic every backward of a table is such a problem."""
    case = as_deterministic(make_case("full/64", "2/1/16", DType.BFLOAT16, CPU))
    backward, forward = (next(candidates(case.problem(d, Arch.SM90A))) for d in reversed(Direction))
    strict = tables.Tuned(backward, 2, 64, 1.0, 1.0, {"case": case.name}, deterministic=True)
    other = tables.Tuned(backward, 2, 64, 1.0, 1.0, {"case": "full/96 2/1/16"})
    tables.save("NVIDIA H200", [strict, other, replace(other, spec=forward)], tmp_path / "user")
    found = [(p.pack, p.direction, p.deterministic) for p in measured(torch.device("cuda"))]
    plain = [("full/96", direction, False) for direction in Direction]
    assert sorted(found, key=str) == sorted([("full/64", Direction.BACKWARD, True), *plain], key=str)
    expected = [f"full/{n} 2/1/16 deterministic bf16 bwd sm90a" for n in (64, 96)]
    assert sorted(listed("--pack", "full/32", "--everything")[2:]) == expected


@pytest.mark.usefixtures("hopper")
def test_winners_for_deterministic_calls_and_others_live_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one --dir and one table, from which `tables merge` takes both."""

    def found(case: Case, direction: Direction, *_: object, **__: object) -> Iterator[Finished]:
        space = deterministic_candidates if case.deterministic else candidates
        spec = list(space(case.problem(direction, Arch.SM90A)))[-1]
        yield Finished(case, direction, (Result(spec, "ok", ms=1.0, tflops=9.0),), (), 1.0)

    monkeypatch.setattr(engine, "search", found)

    def on_the_cpu(pack: str, model: str, dtype: DType, device: torch.device) -> Case:
        return make_case(pack, model, dtype, CPU)

    monkeypatch.setattr("attnforge.bagel.measure.cases.make_case", on_the_cpu)
    out, work = tmp_path / "tables", tmp_path / "work"
    command = ("--pack", "causal/64", "--model", "14/2/64", "--dtype", "bf16", "--direction", "bwd")
    places = ("--seconds", "12", "--workers", "1", "--dir", str(work), "--table-out", str(out))
    for options in ((), ("--deterministic",)):
        result = CliRunner().invoke(main, ("tune", *command, *places, *options), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert "best of 1" in result.output
    names = {f"causal_64_14_2_64_{strict}bf16_bwd_sm90a.json" for strict in ("", "deterministic_")}
    assert {path.name for path in work.glob("*.json")} == names
    merged = CliRunner().invoke(main, ("tables", "merge", str(out), "--into", str(tmp_path / "all")))
    assert "2 of 2 entries taken" in merged.output
    entries = tables.load("NVIDIA H200", tmp_path / "all")
    assert sorted(entry.deterministic for entry in entries) == [False, True]
    monkeypatch.setenv("ATTNFORGE_TABLES", str(tmp_path / "all"))
    (strict,) = (entry.spec.slug for entry in entries if entry.deterministic)
    tables.save("NVIDIA H200", [e for e in entries if not e.deterministic], tmp_path / "plain")

    def say(*words: str) -> str:
        return CliRunner().invoke(main, ("tables", *words)).output

    shown = say("show", "nvidia-h200")
    assert f"{strict} deterministic; " in shown
    assert shown.count("deterministic") == 1
    assert "2 entries, measured; 1 for deterministic calls" in say("list")
    assert "deterministic" in say("diff", str(tmp_path / "all"), str(tmp_path / "plain"))
