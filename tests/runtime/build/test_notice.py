"""What a first run says on stderr: each thing once, to a terminal only, and not from helpers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import fakes
import pytest

from attnforge.runtime.build import cache, notice
from attnforge.runtime.build.notice import announce


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_said", set())
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_once_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for subject in ("a", "a", "b"):
        announce(subject, f"says {subject}")
    said = capsys.readouterr()
    assert said.err == "attnforge: says a\nattnforge: says b\n"
    assert said.out == ""


def test_quiet_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    announce("a", "says a")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "text"), [("0", "attnforge: says a\n"), ("3", "")])
def test_one_rank_of_a_machine_speaks(
    rank: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", rank)
    announce("a", "says a")
    assert capsys.readouterr().err == text


def test_helpers_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    announce("a", "says a")
    assert capsys.readouterr().err == ""


def test_the_first_compilation_is_announced(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(fakes.compiler(tmp_path).path))
    said: list[str] = []
    monkeypatch.setattr(cache, "announce", lambda subject, text: said.append(text))
    source = fakes.source()
    cache.obtain(source)
    cache.obtain(source)
    assert len(said) == 1
    assert str(cache_dir) in said[0]
