"""benchmarks/search_replay.py, on logs that are made up and on those of benchmarks/logs/."""

from __future__ import annotations

import math
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import search_log
import search_replay
from made_up_logs import write_log

from attnforge.bagel.report.read import read
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.search.strategies import DEFAULT, STRATEGIES

COUNT = 80  # variants
LOGS = Path(search_log.__file__).parent / "logs"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "search.jsonl"
    write_log(path, Direction.FORWARD, COUNT)
    first, *lines = path.read_text().splitlines()
    random.Random(0).shuffle(lines)  # as a search tried them
    path.write_text("\n".join((first, *lines)) + "\n")
    return path


def test_times_are_those_of_the_log(log: Path) -> None:
    (subject,) = read([log]).subjects
    times = search_replay.times_of(subject)
    assert len(times) == COUNT
    space = candidates(next(iter(times)).problem)
    assert list(times) == list(islice(space, COUNT)), "in the order of the space"
    failed = [variant.spec for variant in subject.runs[0].variants if variant.status != "ok"]
    assert 0 < len(failed) == sum(ms == math.inf for ms in times.values())
    assert min(times.values()) == min(v.ms for v in subject.runs[0].variants if v.status == "ok")


def test_a_replay_ends_with_the_best(log: Path) -> None:
    (subject,) = read([log]).subjects
    times = search_replay.times_of(subject)
    exhaustive = list(search_replay.replay(STRATEGIES["exhaustive"](list(times), 0), times, 4))
    best = [min(list(times.values())[: n + 1]) for n in range(COUNT)]
    assert exhaustive == best
    for name in ("greedy", "additive", "random"):
        for curve in search_replay.curves(name, times, 3, 4, 8):
            assert len(curve) == COUNT
            assert curve == sorted(curve, reverse=True)
            assert curve[-1] == 0.0


def test_evaluations_until_close() -> None:
    assert search_replay.evaluations([0.5, 0.02, 0.01, 0.0]) == 3
    assert search_replay.evaluations([0.0]) == 1


def test_seeds_keep_the_first_guesses() -> None:
    numbers: list[Any] = list(range(100))
    lists = [search_replay.shuffled(numbers, seed, 8) for seed in (1, 2)]
    assert lists[0][:8] == lists[1][:8] == numbers[:8]
    assert lists[0] != lists[1]
    assert {*lists[0]} == {*numbers}
    assert search_replay.shuffled(numbers, 1, 0)[:8] != numbers[:8], "blind"


@pytest.mark.parametrize(
    ("direction", "count"),
    [(Direction.FORWARD, 1825), (Direction.BACKWARD, 648)],
    ids=["fwd", "bwd"],
)
def test_the_default_strategy_needs_a_tenth_of_the_kept_logs(direction: Direction, count: int) -> None:
    """In four of five replays without any first guess."""
    path = LOGS / f"h200_pretrain_{search_log.NAMES[direction]}.jsonl.gz"
    logs = read([path])
    (subject,) = logs.subjects
    times = search_replay.times_of(subject)
    space = list(candidates(Problem(direction, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)))
    assert not logs.skipped[path], "values of knobs that are gone"
    assert {*times} == {*space}, "the logs are of another space: measure them anew"
    assert len(space) == count, "as docs/search.md has it"
    found = sorted(search_replay.evaluations(c) for c in search_replay.curves(DEFAULT, times, 5, 16, 0))
    assert found[3] <= len(times) / 10, found
    assert found[0] > 1, "some seed finds one by chance, not all"


@pytest.mark.parametrize("name", ["greedy", "random"])
def test_blind_replays_are_as_documented(name: str) -> None:
    """The row of docs/search.md: median and worst tenth of both logs, then the shares within a tenth of the space."""
    page = (LOGS.parents[1] / "docs" / "search.md").read_text()
    (row,) = (
        line for line in page.splitlines() if line.startswith(f"| `{name}` |") and line.endswith(" % |")
    )
    needed, shares = [], []
    for direction in ("forward", "backward"):
        (subject,) = read([LOGS / f"h200_pretrain_{direction}.jsonl.gz"]).subjects
        times = search_replay.times_of(subject)
        found = {name: search_replay.curves(name, times, 50, 16, 0)}
        _, _, middle, worst, _, share, _ = search_replay.table(found, len(times)).splitlines()[-1].split("|")
        needed.append(f"{middle.strip()}, {worst.strip()}")
        shares.append(share.strip().replace("%", " %"))
    assert [cell.strip() for cell in row.split("|")[4:8]] == needed + shares


def test_the_command(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("altair")
    picture = tmp_path / "regret.svg"
    arguments = ["--strategies", "greedy,random", "--seeds", "3", "--workers", "4", "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", ["search_replay", str(log), *arguments])
    search_replay.main()
    said = capsys.readouterr().out
    assert f"finetune/0 7B, fwd, bf16: {COUNT} variants, 3 replays" in said
    assert sum(line.startswith(("| greedy |", "| random |")) for line in said.splitlines()) == 4
    assert "bf16, blind: " in said
    assert "\n| tile_m | " in said
    assert "<svg" in picture.read_text()
