"""benchmarks/near_entries.py on the CPU: which kernels are timed, and what a row says; no time is judged."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import near_entries
import pytest
import torch
from markdown_table import body

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import markdown_row
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.search.timing import Timing

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


def test_gain_is_of_the_second_timing(
    filled: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def made_up(calls: dict[str, object], *rest: object) -> dict[str, Timing]:
        asked.append(list(calls))
        times = {"chosen": 3.0} if len(asked) % 2 else {"chosen": 2.5}
        return {name: Timing.of([times.get(name, 2.0 + 0.1 * n)]) for n, name in enumerate(calls)}

    monkeypatch.setattr(near_entries, "measure_interleaved", made_up)
    table = tmp_path / "near.md"
    words = ["--heads", "4/2/32", "--packs", "causal/96", "--dtype", "fp32", "--device", "cpu"]
    near_entries.main([*words, "--entries", "2", "--jobs", "1", "--markdown", str(table)])
    rows = body(table.read_text())
    assert [row[:2] for row in rows] == [["causal/96 4/2/32", "fwd"], ["causal/96 4/2/32", "bwd"]]
    cells = rows[0]
    assert cells[3:6] == ["2.5000", "2.1000", "1.190"]
    assert cells[6] == asked[0][1]
    assert len(asked[1]) == 2
    assert markdown_row(cells) in capsys.readouterr().out
