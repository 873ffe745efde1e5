"""benchmarks/host_time.py: who takes part, who fails, what the table and the verdict say. No time is judged."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "host_time.py"))


def test_columns_of_a_run_on_the_cpu(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def no_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise RuntimeError("no backward")
        return q

    contestant = script["Contestant"]
    q, k, v = (torch.randn(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    found = script["contestants"]("cpu", q, k, v)
    assert list(found) == ["attnforge, full", "attnforge, causal", "attnforge, spans", "SDPA flash"]
    found |= {"poor": contestant(no_backward), "bare": contestant(lambda q, k, v: None, bare=True)}
    for column in script["COLUMNS"]:
        script["measure"](found, column, (q, k, v), 1)
    assert {name: list(one.times) for name, one in found.items()} == {
        **{key: list(script["COLUMNS"]) for key in list(found)[:4]},
        "poor": [script["COLUMNS"][0]],
        "bare": [script["COLUMNS"][0]],
    }
    assert capsys.readouterr().out.count("poor, forward, recorded: RuntimeError: no backward") == 1
    rows = script["table"](found).splitlines()
    assert [row.count("-") for row in rows[-2:]] == [2, 2]
    assert len({row.count("|") for row in rows}) == 1


def test_verdict(script: dict[str, Any]) -> None:
    contestant, (first, second, _) = script["Contestant"], script["COLUMNS"]
    found = {name: contestant(print) for name in (script["OURS"], script["FLASH"])}
    assert script["verdict"](found).count("not measured") == 2
    found[script["OURS"]].times = {first: 9.0, second: 20.0}
    found[script["FLASH"]].times = {first: 12.0, second: 19.0}
    assert script["verdict"](found) == (
        f"{first}: 9.0 of at most 10 and 12.0 us, met; {second}: 20.0 of at most 25 and 19.0 us, missed"
    )
