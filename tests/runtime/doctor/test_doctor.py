"""What `doctor` reports, of machines that lack something too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnforge.runtime.build import nvrtc, toolchain
from attnforge.runtime.build.settings import CACHE_DIR, COMPILER, NO_JIT
from attnforge.runtime.doctor import checks, compilers
from attnforge.runtime.doctor.checks import report
from attnforge.runtime.doctor.findings import FAILURE, INFO, OK, WARNING, Finding


def by_name() -> dict[str, Finding]:
    return {finding.name: finding for finding in report()}


def test_every_subject_is_there_and_every_trouble_has_a_remedy(cache_dir: Path) -> None:
    findings = report()
    names = {finding.name for finding in findings}
    assert {"python", "torch", "driver", "nvcc", "NVRTC", "GPU kernels"} <= names
    assert {"CPU kernels", "OpenMP", "cache", "launcher", "tuned table"} <= names
    for finding in findings:
        assert finding.status in (OK, INFO, WARNING, FAILURE)
        assert bool(finding.remedy) == (finding.status in (WARNING, FAILURE)), finding
    assert not list((cache_dir / "tmp").iterdir())
    assert not [finding for finding in findings if finding.status == FAILURE]


def test_a_cache_that_others_can_write_is_reported(cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    finding = by_name()["cache"]
    assert finding.status == FAILURE
    assert "can be written by others" in finding.value
    assert f"chmod go-w {cache_dir}" in finding.remedy


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.0+cu128", FAILURE), ("2.11.0", OK), ("2.11.0+cpu", OK), ("3.0.0a0", OK)]
)
def test_the_oldest_torch_that_will_do(
    version: str, status: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", version)
    assert by_name()["torch"].status == status


def test_a_full_cache_is_reported(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_FREE", 1 << 62)
    assert by_name()["cache"].status == WARNING


def test_no_compiler_is_reported(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda env: None)
    monkeypatch.setattr(nvrtc, "find", lambda env: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = by_name()
    assert found["CPU kernels"].status == FAILURE
    assert "apt-get install g++" in found["CPU kernels"].remedy
    assert found["nvcc"].status == found["NVRTC"].status == INFO
    assert found["GPU kernels"].status in (INFO, FAILURE)  # the latter with a GPU


def test_what_the_environment_asks_is_shown(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER, "nvrtc")
    monkeypatch.setenv(NO_JIT, "1")
    found = by_name()
    assert found[COMPILER].value == "nvrtc"
    assert found[CACHE_DIR].value == str(cache_dir)
    assert NO_JIT in found["compiling"].value


@pytest.mark.parametrize(("name", "accepted"), [(NO_JIT, "0 and 1"), (COMPILER, "auto, nvcc, nvrtc")])
def test_a_meaningless_setting_is_told_once_and_stops_only_its_own_checks(
    name: str, accepted: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "perhaps")
    findings = report()
    assert by_name()["torch"].status == OK
    failed = [finding for finding in findings if finding.status == FAILURE]
    assert [finding.name for finding in failed] == [name]
    assert failed[0].value == f"{name}='perhaps': accepted are {accepted}"
    assert failed[0].remedy.startswith(f"unset {name}")


def test_a_check_that_breaks_is_a_finding(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _gpus() -> Iterator[Finding]:
        raise OSError("the driver is on fire")

    monkeypatch.setattr(checks, "_gpus", _gpus)
    found = by_name()
    assert (found["gpus"].status, found["gpus"].value) == (FAILURE, "OSError: the driver is on fire")
    assert "cache" in found


@pytest.mark.nvcc
def test_a_compiler_newer_than_the_driver_is_reported(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "driver_cuda", lambda: (1, 1))
    troubles = [f for f in report() if f.name == "GPU kernels" and f.status == FAILURE]
    assert len(troubles) == 1
    assert "supports up to 1.1" in troubles[0].value


def test_cuda_release() -> None:
    assert compilers.cuda_release("Cuda compilation tools, release 13.0, V13.0.88") == (13, 0)
    assert compilers.cuda_release("nvrtc 12.9, libnvrtc.so.12, 9 bytes") == (12, 9)
    assert compilers.cuda_release("g++ 12.2") is None


def test_file_system() -> None:
    assert checks.file_system(Path("/proc/self")) == "proc"


def test_an_unknown_variable_of_ours_is_reported(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFORGE_CASHE_DIR", "x")
    monkeypatch.setenv("ATTNFORGE_ZZZZ", "x")
    found = by_name()
    assert found["ATTNFORGE_CASHE_DIR"].status == WARNING
    assert found["ATTNFORGE_CASHE_DIR"].remedy == f"did you mean {CACHE_DIR}?"
    assert CACHE_DIR in found["ATTNFORGE_ZZZZ"].remedy
    assert found[CACHE_DIR].status == INFO
