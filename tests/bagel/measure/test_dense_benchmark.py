"""benchmarks/dense_masks.py: what it counts, by hand; a small run on the CPU; and the search of its cases."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnforge.bagel.measure import peers
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.cases import make_case
from attnforge.cli import main
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.masks import DenseMask
from attnforge.runtime.search.case import Case

CPU = torch.device("cpu")
FORWARD = Direction.FORWARD


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "dense_masks.py"))


def blocks(length: int = 512) -> Case:
    return make_case(f"blocks/0.5/{length}", "2/1/16", DType.FLOAT32, CPU)


def test_visited_pairs_by_hand(script: dict[str, Any]) -> None:
    mask = torch.zeros(256, 256, dtype=torch.bool)
    mask[:128, :128] = True
    case = Case("one block", 1, 2, 1, 256, 256, 16, DType.FLOAT32, DenseMask(mask), 128 * 128, CPU)
    assert script["visited"](case, 128, 128) == 1 / 4
    assert script["visited"](case, 64, 128) == 1 / 4
    assert script["visited"](case, 192, 128) == 192 / 2 / 256  # one tile, half of it in the next block
    assert (
        script["visited"](case, 96, 80) == 4 * 96 * 80 / 256**2
    )  # two tiles a side, each cut off by the block


def test_masks_show_as_many_pairs_each(script: dict[str, Any]) -> None:
    cases = script["cases_of"](blocks(2048), 0.5)
    spans, same, coarse, fine = cases.values()
    assert torch.equal(same.mask.mask, spans.mask.visible(2048, 2048))
    assert spans.pairs == same.pairs == coarse.pairs == fine.pairs == 2048**2 // 2
    assert {case.mask.visible_keys for case in cases.values()} == {1024}, "one problem class of dispatch"
    for case in (coarse, fine):
        assert int(case.mask.mask.sum()) == case.pairs
    assert script["visited"](coarse, 128, 128) == 0.5
    assert script["visited"](fine, 64, 64) == 0.5 < script["visited"](fine, 128, 128)


def test_rows_are_relative_to_spans(script: dict[str, Any]) -> None:
    line = script["Line"]
    lines = [line("spans", "128 x 128", 0.5, 0.5, 1.0, 600.0), line("x", "192 x 64", 0.5, 0.75, 1.5, 400.0)]
    assert lines[1].tflops_visited == 600.0
    assert script["rows"]("50% fwd", lines)[1] == (
        "| 50% fwd | x | 192 x 64 | 0.500 | 0.750 | 1.500 | 400 | 600 | 0.67 | 1.00 | - |"
    )
    assert len(script["HEAD"]) == script["rows"]("", lines)[0].count("|") - 1


def test_a_run_on_the_cpu(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(*arguments: Any) -> Any:
        raise Unavailable("no compiler")

    monkeypatch.setattr(peers, "_flex", nothing)
    options = {
        "device": "cpu",
        "dtype": "fp32",
        "length": 512,
        "model": "2/1/16",
        "seconds": 0.0,
        "flex": True,
    }
    lines = script["measure"](0.5, FORWARD, argparse.Namespace(**options))
    assert [line.mask for line in lines] == ["spans", "the same, dense", "blocks of 128", "blocks of 64"]
    assert "FlexAttention fwd: no compiler" in capsys.readouterr().out
    tile = script["tile_of"](blocks(), FORWARD)
    for line in lines:
        assert line.tile == f"{tile[0]} x {tile[1]}"
        assert line.ms > 0
        assert line.share == 0.5 <= line.visited
        assert line.lists_ms is not None


def test_a_search_makes_the_table_know_dense_masks(tmp_path: Path) -> None:
    pack = ("--pack", "blocks/0.5/256", "--model", "2/1/16", "--dtype", "fp32", "--device", "cpu")
    words = (
        "search",
        *pack,
        "--direction",
        "fwd",
        "--variants",
        "1",
        "--no-peers",
        "--table-out",
        str(tmp_path),
    )
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    (table,) = tmp_path.glob("cpu-*.json")
    (entry,) = json.loads(table.read_text())
    assert (entry["class"]["mask"], entry["class"]["octave"], entry["class"]["visible_octave"]) == (
        "dense",
        8,
        7,
    )
    assert entry["notes"]["case"] == "blocks/0.5/256 2/1/16"
