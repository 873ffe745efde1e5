"""benchmarks/step_time.py on the CPU: every row is measured, and every operator computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import peer_standins
import pytest
from click.testing import CliRunner
from step_time import main

from attnforge.bagel.measure import cudnn_flex, fa3
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.runtime.prologue import qk_norm_rope

pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(tmp_path: Path, operators: str, *more: str) -> list[list[str]]:
    """Cells of the table of a small pack."""
    pack = {
        "sample_lens": [60, 50, 18],
        "split_lens": [20, 40, 50, 18],
        "attn_modes": ["causal", "noise", "full", "causal"],
        "vit_lens": [],
        "used": 110,
    }
    packs, table = tmp_path / "packs.jsonl", tmp_path / "table.md"
    packs.write_text(json.dumps(pack) + "\n")
    options = ["--packs", f"{packs}:1", "--operators", operators, "--model", "tiny", "--repeats", "1"]
    done = CliRunner().invoke(main, [*options, "--device", "cpu", "--markdown", str(table), *more])
    assert done.exit_code == 0, done.output
    lines = table.read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| /")]


def test_rows(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "attnforge,sdpa")
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


@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_other_packages(tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact stand-ins of them. The prologue is ours if that is asked for, else torch's modules are."""
    calls = 0

    def counted(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return qk_norm_rope(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("attnforge.bagel.mot.layer.qk_norm_rope", counted)
    peer_standins.install(monkeypatch)
    rows = rows_of(tmp_path, "sdpa,cudnn-flex,fa3", *["--fused-prologue"][:fused])
    label = ", qk_norm_rope" if fused else ""
    assert [tuple(row[1:3]) for row in rows] == [
        ("sdpa", "full"),
        *((name + label, kind) for name in ("cudnn-flex", "fa3") for kind in ("full", "none")),
    ]
    assert bool(calls) == fused
    assert all(float(row[-1]) < 1e-2 for row in rows)
    assert any(float(row[-1]) > 0 for row in rows)


def test_operators_are_checked_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise Unavailable(f"FlashAttention-3 is not installed: {fa3.INSTALL}")

    monkeypatch.setattr(fa3, "operators", absent)
    monkeypatch.setattr(cudnn_flex, "installed", lambda: False)
    monkeypatch.setattr("step_time.measure_pack", lambda *arguments: pytest.fail("nothing is to be timed"))
    for operators, words in (
        ("attnforge,fa3", ("fa3: ", "not installed: pip install")),
        ("attnforge,cudnn-flex", ("cudnn-flex: ", "not installed: pip install")),
        ("attnforge,fa2", ("'fa2'", "accepted are attnforge, flex, sdpa, cudnn-flex, fa3")),
    ):
        done = CliRunner().invoke(main, ["--operators", operators, "--model", "tiny", "--device", "cpu"])
        assert done.exit_code != 0
        assert isinstance(done.exception, SystemExit)  # a message, no traceback
        message = " ".join(done.output.replace("│", " ").split())
        assert all(word in message for word in words), message
