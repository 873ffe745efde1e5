"""benchmarks/step_time.py on the CPU: every row is measured, and every operator computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from step_time import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rows(tmp_path: Path) -> None:
    pack = {
        "sample_lens": [60, 50, 18],
        "split_lens": [20, 40, 50, 18],
        "attn_modes": ["causal", "noise", "full", "causal"],
        "vit_lens": [],
        "used": 110,
    }
    packs, table = tmp_path / "packs.jsonl", tmp_path / "table.md"
    packs.write_text(json.dumps(pack) + "\n")
    options = ["--packs", f"{packs}:1", "--operators", "attnforge,sdpa", "--model", "tiny", "--repeats", "1"]
    done = CliRunner().invoke(main, [*options, "--device", "cpu", "--markdown", str(table)])
    assert done.exit_code == 0, done.output
    rows = [
        line.strip("| ").split(" | ") for line in table.read_text().splitlines() if line.startswith("| /")
    ]
    assert [tuple(row[1:3]) for row in rows] == [
        ("attnforge", "full"),
        ("attnforge", "selective"),
        ("attnforge", "none"),
        ("sdpa", "full"),
    ]
    for _, operator, _, layer, step, _, _, differs in rows:
        assert float(layer) > 0
        assert float(step) > 0
        assert float(differs) < (1e-2 if operator == "sdpa" else 1e-6)
