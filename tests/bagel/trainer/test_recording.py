"""attnforge.bagel.record() on the stand-in of the official trainer, and what it writes as workloads."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from packs import lists, packs
from trainer import MODES, PAD, SAMPLES, SPLITS, TOKENS, batch, clean, flash_attn, make_model, nemo, train

import attnforge
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.trainer.ports import Port
from attnforge.bagel.trainer.recording import splits_of
from attnforge.bagel.workloads import recorded, workload
from attnforge.cli import main

__all__ = ["clean", "flash_attn", "nemo"]  # fixtures


@pytest.mark.parametrize("patched", [False, True])
def test_the_packs_of_a_trainer(patched: bool, tmp_path: Path, flash_attn: object) -> None:
    path = tmp_path / "packs.jsonl"
    model = make_model()
    forward = type(model).forward
    if patched:
        attnforge.bagel.patch()
    with attnforge.bagel.record(path) as recording:
        train(model, batch(True, PAD, True), torch.bfloat16)
        train(model, batch(False, 0, False), torch.bfloat16)
        assert recording.packs == 2
    assert type(model).forward is forward
    train(model, batch(True, PAD, True), torch.bfloat16)
    flex, nested = (json.loads(line) for line in path.read_text().splitlines())
    assert flex == {
        "sample_lens": [*SAMPLES, PAD],
        "split_lens": [*SPLITS, PAD],
        "attn_modes": [*MODES, "causal"],
        "used": TOKENS,
        "vit_lens": [4, 5],
    }
    assert nested["sample_lens"] == SAMPLES
    assert nested["used"] == TOKENS
    assert nested["vit_lens"] == []
    expected = PackedMask(SAMPLES, SPLITS, MODES, "cpu")
    for line, used in ((1, expected.pairs), (2, expected.pairs)):
        pack = workload(f"{path}:{line}")
        assert pack.mask("cpu").pairs == used
        assert torch.equal(pack.mask("cpu").ends[:TOKENS], expected.ends)
    assert workload(f"{path}:1").vit_mask("cpu").pairs == 4 * 4 + 5 * 5


def test_a_stopped_recording_that_was_wrapped_is_silent(tmp_path: Path, flash_attn: object) -> None:
    path = tmp_path / "packs.jsonl"
    owner: Any = type(make_model())
    recording = attnforge.bagel.record(path)
    inner = owner.forward
    owner.forward = lambda self, **data: inner(self, **data)
    recording.stop()
    recording.stop()
    train(owner().train(), batch(True, PAD, False), torch.float32)
    assert not path.exists()


@given(packs)
def test_splits_are_read_back(samples: list[list[tuple[int, str]]]) -> None:
    sample_lens, split_lens, modes = lists(samples)
    mask = PackedMask(sample_lens, split_lens, modes, "cpu")
    again = PackedMask(sample_lens, *splits_of(sample_lens, mask.starts, mask.ends), "cpu")
    assert torch.equal(again.starts, mask.starts)
    assert torch.equal(again.ends, mask.ends)


def test_other_spans_have_no_splits() -> None:
    window = torch.arange(6, dtype=torch.int32)
    with pytest.raises(ValueError, match="not made of causal, full and noise splits"):
        splits_of([6], window, (window + 3).clamp(max=6))


def test_nemo_automodels_packs(nemo: Port, tmp_path: Path, flash_attn: object) -> None:
    path = tmp_path / "packs.jsonl"
    with attnforge.bagel.record(path, trainer="nemo") as recording:
        train(make_model(nemo), batch(True, PAD, False), torch.float32)
    assert recording.packs == 1
    assert json.loads(path.read_text())["used"] == TOKENS


def test_record_needs_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if "standin" not in path])
    with pytest.raises(RuntimeError, match="record: cannot import Bagel"):
        attnforge.bagel.record(tmp_path / "packs.jsonl")


def write(path: Path, *lengths: int) -> Path:
    rows = (
        {"sample_lens": [n], "split_lens": [n], "attn_modes": ["full"], "used": n, "vit_lens": []}
        for n in lengths
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(st.integers(1, 4))
def test_as_many_packs_as_asked_for(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "packs.jsonl", 9, 2, 4, 7, 5)
        chosen = [workload(name).tokens for name in recorded(path, count)]
    assert chosen == {1: [2], 2: [2, 9], 3: [2, 5, 9], 4: [2, 4, 7, 9]}[count]


def test_search_tunes_for_a_recorded_file(tmp_path: Path) -> None:
    path = write(tmp_path / "packs.jsonl", 40)
    data = tmp_path / "search.json"
    arguments = f"search --packs {path} --device cpu --model 0.5B --dtype fp32 --direction fwd --variants 1"
    result = CliRunner().invoke(
        main, [*arguments.split(), "--no-peers", "--table-out", str(tmp_path), "--json", str(data)]
    )
    assert result.exit_code == 0, result.output
    assert f"{path}:1" in data.read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("packs.txt", "", "expected a .jsonl file"),
        ("packs.jsonl", "", "has no pack"),
        ("packs.jsonl", "{}\n", "packs.jsonl:1 is not a pack"),
        ("packs.jsonl", "nonsense\n", "packs.jsonl:1 is not a pack"),
    ],
)
def test_a_wrong_file_is_one_message(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = CliRunner().invoke(main, ["search", "--packs", str(path), "--device", "cpu"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_line_that_is_not_there_and_a_file_that_is_not(tmp_path: Path) -> None:
    short, folder = tmp_path / "short.jsonl", tmp_path / "folder.jsonl"
    short.write_text("{}\n{}\n")
    folder.mkdir()
    messages = {
        f"{short}:3": f"pack: there is no line {short}:3",
        f"{tmp_path}/other.jsonl:3": f"pack: there is no file {tmp_path}/other.jsonl",
        f"{folder}:3": f"pack: {folder} cannot be read: Is a directory",
    }
    for pack, message in messages.items():
        result = CliRunner().invoke(main, ["search", "--pack", pack, "--device", "cpu"])
        assert result.exit_code == 2
        assert message in result.stderr
