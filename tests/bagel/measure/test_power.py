"""benchmarks/power.py on the CPU: which kernels are timed, and what stands in the table; no time is judged."""

from __future__ import annotations

from pathlib import Path

import power
import pytest
import torch
from markdown_table import body

from attnforge.bagel.measure.cases import make_case
from attnforge.codegen.spec import DType

pytestmark = pytest.mark.usefixtures("one_thread")


def test_knobs() -> None:
    assert power.knobs_of("multicast=1,tile_m=128") == {"multicast": 1, "tile_m": 128}


def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel with other knobs is compared; one that cannot run is named, as is a peer."""
    case = make_case("causal/1x96", "2/1/16", DType.FLOAT32, torch.device("cpu"))
    (_, spec), *_ = power.specs_of(case, [])
    other = 32 if spec.tuning.to_json()["tile_n"] != 32 else 64
    out = tmp_path / "power.md"
    words = "--pack causal/1x96 --model 2/1/16 --dtype fp32 --device cpu --size 64 --seconds 0.01 --peers fa3"
    power.main([*words.split(), f"--try=tile_n={other}", "--try=tile_m=7", "--markdown", str(out)])
    said = capsys.readouterr().out
    assert f"{case.name} tile_m=7: " in said
    assert f"{case.name} fa3: " in said
    rows = body(out.read_text())
    assert [row[1] for row in rows] == [power.FIRST, f"tile_n={other}"]
    assert [rows[0][column] for column in (3, 4, 6)] == ["1.000"] * 3
    assert all(float(cell) > 0 for row in rows for cell in (row[3], row[4], row[6]))
