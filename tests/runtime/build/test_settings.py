"""Environment variables: what is accepted, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from attnforge.runtime.build.errors import CacheError
from attnforge.runtime.build.settings import CACHE_DIR, CANARY, COMPILER, DISABLE, NO_JIT, TABLES, settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_DIR, COMPILER, NO_JIT):
        monkeypatch.delenv(name, raising=False)
    now = settings()
    assert now.cache_dir == platformdirs.user_cache_path("attnforge", appauthor=False)
    assert now.compiler == "auto"
    assert now.jit


def test_every_call_reads_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    monkeypatch.setenv(COMPILER, "NVRTC")
    monkeypatch.setenv(NO_JIT, "1")
    now = settings()
    assert (now.cache_dir, now.compiler, now.jit) == (tmp_path, "nvrtc", False)


def test_a_relative_directory_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_DIR, "here")
    assert settings().cache_dir == tmp_path / "here"


@pytest.mark.parametrize("raises", [True, False])
def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raises: bool
) -> None:
    """As in containers: platformdirs 4.14 raises, older ones name a folder "~" below the current one."""

    def folder(*_: object, **__: object) -> Path:
        if raises:
            raise RuntimeError("could not determine the home directory")
        return Path("~/.cache/attnforge")

    monkeypatch.setattr(platformdirs, "user_cache_path", folder)
    monkeypatch.setattr(platformdirs, "user_data_path", folder)
    monkeypatch.delenv(TABLES, raising=False)
    monkeypatch.delenv(CACHE_DIR, raising=False)
    with pytest.raises(CacheError, match="no home directory; set HOME, or both ATTNFORGE_CACHE_DIR and"):
        settings()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    monkeypatch.setenv(TABLES, str(tmp_path))
    assert settings().tables == (tmp_path,)


@pytest.mark.parametrize(
    ("name", "value"), [(COMPILER, "gcc"), (NO_JIT, "yes"), (CANARY, "-1"), (DISABLE, "on")]
)
def test_a_meaningless_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        settings()


def test_an_unknown_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("attnforge.runtime.build.settings._warned", set())
    monkeypatch.setenv("ATTNFORGE_NO_JITS", "1")
    settings()
    settings()
    said = [record.message for record in caplog.records]
    assert said == ["ATTNFORGE_NO_JITS is not a variable of attnforge; did you mean ATTNFORGE_NO_JIT?"]
