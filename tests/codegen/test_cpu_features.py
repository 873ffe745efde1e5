"""What this machine's CPU offers to kernels, as /proc/cpuinfo and Linux say."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
from collections.abc import Iterator
from typing import Any

import pytest

from attnforge.codegen import cpu_features

AMX = {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cpu_features.amx_refusal.cache_clear()
    yield
    cpu_features.amx_refusal.cache_clear()


class Linux:
    """libc.syscall, which answers with an error number; 0 is permission."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[tuple[int, ...]] = []

    def syscall(self, *numbers: Any) -> int:
        self.calls.append(tuple(number.value for number in numbers))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


def on(flags: set[str], error: int, monkeypatch: pytest.MonkeyPatch) -> Linux:
    linux = Linux(error)
    monkeypatch.setattr(cpu_features, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: linux)
    return linux


def test_permission_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    linux = on(AMX, 0, monkeypatch)
    assert cpu_features.amx_refusal() == cpu_features.amx_refusal() == ""
    assert linux.calls == [(158, 0x1023, 18)]  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on(AMX, errno.EINVAL, monkeypatch)
    with caplog.at_level(logging.DEBUG, logger="attnforge"):
        assert cpu_features.amx_refusal() == "Linux refuses tile registers (Invalid argument)"
    assert "no kernels for Intel AMX: Linux refuses" in caplog.text


@pytest.mark.parametrize("missing", sorted(AMX - {"avx512f"}))
def test_a_cpu_without_is_not_asked(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linux = on(AMX - {missing}, 0, monkeypatch)
    assert cpu_features.amx_refusal() == f"this CPU has no {missing}"
    assert not linux.calls


@pytest.mark.parametrize(
    ("machine", "flags", "lanes"),
    [("x86_64", AMX, 16), ("x86_64", {"avx2"}, 8), ("x86_64", {"sse2"}, 4), ("aarch64", set[str](), 4)],
)
def test_lanes(machine: str, flags: set[str], lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on(flags, 0, monkeypatch)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    cpu_features.lanes.cache_clear()
    assert cpu_features.lanes() == lanes
    cpu_features.lanes.cache_clear()
