"""benchmarks/shared_prefix.py: both layouts are one problem, and its table is complete; no times are judged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnforge.bagel.measure import peers

ARGUMENTS = "--device cpu --prompt 40 --completions 3 --tokens 24 --model 4/2/16 --dtype fp32 --seconds 0.01"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["shared_prefix.py", *ARGUMENTS.split()])
    found = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "shared_prefix.py"))
    monkeypatch.setitem(peers.EXTRA, peers.OURS, found["_ours"])
    return found


def test_both_layouts_hold_the_same_rows(script: dict[str, Any]) -> None:
    pack, repeated = script["layouts"](script["arguments"](), torch.device("cpu")).values()
    assert pack.case.seq_q == 40 + 3 * 24
    assert (repeated.case.batch, repeated.case.seq_q) == (3, 40 + 24)
    for one, other in zip(pack.inputs, repeated.inputs, strict=True):
        assert torch.equal(
            script["_flat"](one, pack.completions), script["_flat"](other, repeated.completions)
        )
        assert all(torch.equal(one[0, :, :40], copy[:, :40]) for copy in other)
    # A prompt, each completion on it, and each alone.
    assert pack.case.pairs == 40 * 41 // 2 + 3 * (24 * 40 + 24 * 25 // 2)


def test_table(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    script["main"]()
    said = capsys.readouterr().out
    lines = [
        line.split(" | ")[:3] for line in said.splitlines() if line.startswith("| pack") or "| rep" in line
    ]
    assert ["| pack", "attnforge", "112"] in lines
    assert ["| repeated", "attnforge", "192"] in lines
    assert "cudnn-flex: " in said, "who cannot run is named"


def test_a_wrong_answer_ends_it(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = script["layouts"](script["arguments"](), torch.device("cpu"))
    monkeypatch.setitem(script["PEERS"], script["REPEATED"], ("wrong",))
    monkeypatch.setitem(
        peers.EXTRA, "wrong", lambda case: lambda q, k, v: 1.01 * script["_ours"](case)(q, k, v)
    )
    with pytest.raises(SystemExit, match="repeated wrong: an error of"):
        script["contestants"](found, "fp32")
