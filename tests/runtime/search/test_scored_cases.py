"""Cases with a score: the exact results, the limits, what a search does with them, and which entries a call takes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import Shape, draw, make_mask
from score_oracle import functions, oracle

from attnforge import scores
from attnforge.bagel.measure.case_scores import with_score
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, kernels, tables
from attnforge.runtime.call import Call
from attnforge.runtime.scores import Score
from attnforge.runtime.search import reference as reference_module
from attnforge.runtime.search import verify, winners
from attnforge.runtime.search.case import Case, causal_case
from attnforge.runtime.search.search import Budget, Finished, search
from attnforge.runtime.search.worker import Bench, Worker
from attnforge.runtime.tables import Tuned

CPU = torch.device("cpu")
SHAPE = Shape(70, 100, 32, 1, 2, 2)
NAMES = tuple(functions(SHAPE.batch, 2, SHAPE.seq_q, SHAPE.seq_k))


def case_with(score: str, dtype: DType = DType.FLOAT32) -> Case:
    return with_score(causal_case("causal/90", (1, 4, 2, 90, 32), dtype, CPU), score)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", ["full", "spans"])
def test_reference(name: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlexAttention's formula with autograd has it, several chunks of rows."""
    monkeypatch.setattr(reference_module, "CHUNK", 1 << 11)
    x = draw(SHAPE, torch.float32, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    visible = make_mask(mask, SHAPE.seq_q, SHAPE.seq_k, "cpu")
    score, formula = functions(SHAPE.batch, 2, SHAPE.seq_q, SHAPE.seq_k)[name]
    found = reference_module.reference(q, k, v, visible, dout=x.dout, score=score)
    for mine, theirs in zip(found, oracle(q, k, v, visible, formula, x.dout), strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)  # constants and tables are float32


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("name", ["softcap:2", "alibi", "relative_bias:20"])
def test_right_kernels_pass_and_those_of_another_score_do_not(direction: Direction, name: str) -> None:
    case = case_with(name)
    bench = Bench(case, direction)
    assert len(list(bench.verify(0))) == 2
    other = next(candidates(replace(case, score=scores.softcap(1.9)).problem(direction, Arch.CPU)))
    bench.case = replace(case, score=scores.softcap(1.9))
    bench._checks = [
        replace(check, case=replace(check.case, score=scores.softcap(1.9))) for check in bench._checks
    ]
    with pytest.raises(verify.WrongResult):
        list(bench.verify(kernels.load(other, CPU)))


def test_limits_are_of_the_dtype() -> None:
    """Operands in 16 bits make a thousand times the error that float32 has."""
    peers = [
        verify.make_check(case_with("softcap:2", dtype), Direction.BACKWARD).peer
        for dtype in (DType.FLOAT32, DType.BFLOAT16)
    ]
    for name in ("out", "dq", "dk", "dv"):
        assert 300 * peers[0][name][0] < peers[1][name][0] < 0.01


def test_search(tmp_path: Path) -> None:
    """A process measures variants of the score, and calls with it take the winner."""
    case = case_with("softcap:2")
    with contextlib.closing(Worker()) as worker:
        *_, finished = search(
            case, Direction.FORWARD, (Arch.CPU, "dev"), Budget(variants=2), tmp_path / "log", worker=worker
        )
    assert isinstance(finished, Finished)
    assert finished.winner is not None
    assert finished.winner.spec.problem.score == "softcap: 2.0 * tanh(score / 2.0)"
    assert finished.winner.errors["out"][0] < 1e-6
    winners.keep(finished, "dev", {}, tmp_path)
    choice, *_ = choosing.choose(Call(finished.winner.spec.problem, 2, 90), "dev", [tmp_path])
    assert choice.spec == finished.winner.spec
    assert choice.reason.startswith("tuned as")


def entry(score: str, size: int, number: int) -> Tuned:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.CAUSAL, score=ScoreMod(score))
    plain = replace(problem, score=ScoreMod(""))
    tuning = [spec.tuning for spec in candidates(plain)][number]
    return Tuned(Spec(problem, tuning), 4, size, 1.0, 100.0)


@pytest.mark.parametrize(
    ("wanted", "size", "order"),
    [
        ("softcap: 30.0 * tanh(score / 30.0)", 1024, [0, 1, 2, 3]),
        ("softcap: 20.0 * tanh(score / 20.0)", 8192, [1, 0, 2, 3]),
        ("alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)", 1024, [3, 2, 0, 1]),
        ("", 1024, [2, 0, 3, 1]),
    ],
)
def test_nearest_entries(wanted: str, size: int, order: list[int], tmp_path: Path) -> None:
    """The same score, then the same formula, then none, then other scores; among equals the nearest length."""
    entries = [
        entry("softcap: 30.0 * tanh(score / 30.0)", 1024, 0),
        entry("softcap: 50.0 * tanh(score / 50.0)", 8192, 1),
        entry("", 1024, 2),
        entry("alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)", 4096, 3),
    ]
    tables.save("dev", entries, tmp_path)
    problem = replace(entries[0].spec.problem, score=ScoreMod(wanted))
    offers = choosing.offers(Call(problem, 4, size), "dev", [tmp_path])
    assert [offer.entry.spec.tuning for offer in offers] == [entries[i].spec.tuning for i in order]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tanh", "expected softcap:50"),
        ("softcap", "expected softcap:50"),
        ("softcap:1.2.3", "expected softcap:50"),
        ("softcap:0", "cap: got 0"),
        ("my mods.py:f", "a path with a space"),
        ("{broken}:f", "SyntaxError"),
        ("{file}:two", r"two: score: .* has to take the arguments \(score, b, h, q_idx, kv_idx\)"),
        ("there_is_none.py:f", "there is no file"),
        ("{file}:missing", "does not define missing"),
        ("{file}:steep", "jumps or is approximate"),
        ("{file}:number", "expected an attnforge.scores.Score"),
    ],
)
def test_unfit_names_are_refused(name: str, words: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    given = name.format(file=written(tmp_path), broken=broken)
    with pytest.raises(ValueError, match=words) as error:
        case_with(given)
    assert str(error.value).startswith(f"--score {given}: ")


def test_functions_of_a_file(tmp_path: Path) -> None:
    file = written(tmp_path)
    case = case_with(f"{file}:near")
    assert case.name.endswith(f"{file}:near")
    assert isinstance(case.score, Score)
    assert len(list(Bench(case, Direction.FORWARD).verify(0))) == 2
    capped = case_with(f"{file}:cap").score
    assert capped is not None
    assert capped.text == "softcap: 3.0 * tanh(score / 3.0)"
    learned = case_with(f"{file}:learned").score
    assert learned is not None
    assert not learned.tensors[0].requires_grad  # a search takes it as it is


def written(directory: Path) -> Path:
    path = directory / "mods.py"
    path.write_text(
        "import torch, attnforge\n"
        "number = 3\n"
        "cap = attnforge.scores.softcap(3.0)\n"
        "learned = attnforge.scores.relative_bias(torch.nn.Parameter(torch.zeros(4, 5)))\n"
        "def two(score, b):\n    return score\n"
        "def near(score, b, h, q_idx, kv_idx):\n    return score - 0.1 * (q_idx - kv_idx).abs()\n"
        "def steep(score, b, h, q_idx, kv_idx):\n    return torch.where(score > 0, score, 0.0)\n"
    )
    return path
