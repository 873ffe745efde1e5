"""The log of a search: what it remembers, and what it does not trust."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import fakes
import pytest

from attnforge.codegen.spec import Arch, Spec
from attnforge.runtime.build.toolchain import Command
from attnforge.runtime.search.journal import Journal, Result, environment, expect_log


def result_of(spec: Spec, status: str = "ok", ms: float = 1.0) -> Result:
    return Result(spec, status, ms=ms, errors={"out": (1e-8, 1e-7)})


def journal(path: Path, **env: str) -> Journal:
    return Journal(path, "a case", "fwd", {"device": "x", **env})


def test_log_resumes_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    result = result_of(fakes.spec())
    journal(path).add("key", result)
    assert journal(path).find("key") == result
    assert journal(path).find("other") is None
    assert journal(path, torch="another").find("key") is None


def test_log_forgets_crashes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for status in ("launch", "timeout", "compile", "wrong"):
        journal(path).add(status, result_of(fakes.spec(), status))
    found = {status for status in ("launch", "timeout", "compile", "wrong") if journal(path).find(status)}
    assert found == {"compile", "wrong"}


def test_device_flags_and_compiler_are_part_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another device, other flags or another compiler gave is not resumed from."""

    def env(identity: str, *flags: str, device: str = "a device") -> dict[str, str]:
        command = Command("g++", Path("g++"), identity, flags, "kernel.so")
        monkeypatch.setattr("attnforge.runtime.search.journal.toolchain", lambda arch: command)
        return environment(device, Arch.CPU)

    base = env("g++ 12", "-O3")
    assert env("g++ 12", "-O3") == base
    assert env("g++ 12", "-O2") != base
    assert env("g++ 12", "-O3", "-ffast-math") != base
    assert env("g++ 13", "-O3") != base
    assert env("g++ 12", "-O3", device="another") != base


def test_log_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal(path).add("first", result_of(fakes.spec()))
    journal(path).add("second", result_of(fakes.spec()))
    path.write_bytes(path.read_bytes()[:-40])
    assert journal(path).find("first")
    assert journal(path).find("second") is None
    journal(path).add("third", result_of(fakes.spec()))
    assert journal(path).find("first")
    assert journal(path).find("third")


def test_only_logs_are_appended_to(tmp_path: Path) -> None:
    """A log is also one whose only line is torn, and a file that is new or empty."""
    path = tmp_path / "log.jsonl"
    expect_log(path)
    for content in (b"", b'{"case": "a case", "direct'):
        path.write_bytes(content)
        expect_log(path)
    journal(path).add("key", result_of(fakes.spec()))
    expect_log(path)
    for content in (b"print('hello')\n", b'[{"case": 1}]', b"\n", b"\x00\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"--log: .*log\.jsonl is not the log of a search"):
            expect_log(path)


def test_notes_are_for_readers_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A note is a line of its own, and resuming passes it by without a warning."""
    path = tmp_path / "log.jsonl"
    journal(path).note("search", {"space": 3})
    journal(path).add("key", result_of(fakes.spec()))
    journal(path).note("peers", [])
    first, _, last = map(json.loads, path.read_text().splitlines())
    assert first["search"] == {"space": 3}
    assert last["peers"] == []
    assert first["case"] == last["case"] == "a case"
    assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(last["time"])
    assert journal(path).find("key")
    assert not caplog.records
