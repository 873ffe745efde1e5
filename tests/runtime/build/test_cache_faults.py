"""The cache against bad bytes and bad disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import fakes
import pytest

from attnforge.runtime.build import cache, locks, private
from attnforge.runtime.build.errors import CacheError

SOURCE = fakes.source()
BINARY = SOURCE.text.encode()

# Spoils a published entry; the second argument is another good entry.
Damage = Callable[[Path, Path], object]


# ---- Corruption


def flip(path: Path, offset: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir():
        path.rename(path.with_name("aside"))
    else:
        path.unlink()
    make(path)


DAMAGES: dict[str, Damage] = {
    "binary flipped": lambda entry, other: flip(entry / "kernel.so", 3, 5),
    "binary truncated": lambda entry, other: os.truncate(entry / "kernel.so", 4),
    "binary longer": lambda entry, other: (entry / "kernel.so").write_bytes(BINARY + b"\0"),
    "binary empty": lambda entry, other: (entry / "kernel.so").write_bytes(b""),
    "binary missing": lambda entry, other: (entry / "kernel.so").unlink(),
    "binary is a directory": lambda entry, other: replace(entry / "kernel.so", Path.mkdir),
    "binary is a link": lambda entry, other: replace(
        entry / "kernel.so", lambda path: path.symlink_to(other / "kernel.so")
    ),
    "binary is a pipe": lambda entry, other: replace(entry / "kernel.so", os.mkfifo),
    "binary of another": lambda entry, other: (entry / "kernel.so").write_bytes(b"void g();\n"),
    "binary writable by all": lambda entry, other: (entry / "kernel.so").chmod(0o666),
    "meta empty": lambda entry, other: (entry / "meta.json").write_bytes(b""),
    "meta truncated": lambda entry, other: os.truncate(entry / "meta.json", 100),
    "meta missing": lambda entry, other: (entry / "meta.json").unlink(),
    "meta not UTF-8": lambda entry, other: (entry / "meta.json").write_bytes(b"\xff\xfe{}"),
    "meta not an object": lambda entry, other: (entry / "meta.json").write_text("[]"),
    "meta nested deeply": lambda entry, other: (entry / "meta.json").write_text("[" * 200_000),
    "meta of an old schema": lambda entry, other: edit(entry / "meta.json", schema=0),
    "meta without digest": lambda entry, other: edit(entry / "meta.json", sha256=None),
    "meta names another file": lambda entry, other: edit(entry / "meta.json", binary="../x"),
    "entries swapped": lambda entry, other: replace(entry, lambda path: other.rename(path)),
    "entry empty": lambda entry, other: replace(entry, Path.mkdir),
    "entry is a file": lambda entry, other: replace(entry, Path.touch),
    "entry is a link": lambda entry, other: replace(entry, lambda path: path.symlink_to(other)),
    "entry writable by all": lambda entry, other: entry.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_bad_entry_is_rebuilt_with_one_warning(
    damage: Damage, compiler: fakes.Compiler, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = cache.obtain(SOURCE)
    other = cache.obtain(fakes.source("void g();\n"))
    damage(good.directory, other.directory)
    again = cache.obtain(SOURCE)
    assert (again.binary, again.meta["key"]) == (BINARY, good.meta["key"])
    assert compiler.runs == 3
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(good.directory) in warnings[0].getMessage()
    assert not list((cache_dir / "tmp").iterdir())
    assert cache.obtain(SOURCE).binary == BINARY
    assert compiler.runs == 3


def test_every_flipped_bit_of_the_binary_and_cut_of_the_meta_is_noticed(
    compiler: fakes.Compiler, cache_dir: Path
) -> None:
    entry = cache.obtain(SOURCE)
    for offset in range(len(BINARY)):
        for bit in range(8):
            flip(entry.path, offset, bit)
            with pytest.raises(private.BadEntry):
                cache._read(entry.directory, entry.meta["key"])
            flip(entry.path, offset, bit)
    meta = entry.directory / "meta.json"
    whole = meta.read_bytes()
    for length in range(0, len(whole) - 2, 7):
        meta.write_bytes(whole[:length])
        with pytest.raises(private.BadEntry):
            cache._read(entry.directory, entry.meta["key"])


def test_a_disk_that_returns_something_else_is_reported(
    compiler: fakes.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "read", lambda path: b"{}")
    with pytest.raises(CacheError, match="damaged after each of 3 builds"):
        cache.obtain(SOURCE)


# ---- Disks

ERRNOS = ("ENOSPC", "EROFS", "EACCES", "EMFILE", "EDQUOT", "EIO")
CALLS = ("os.fsync", "os.fchmod", "pathlib.Path.rename", "pathlib.Path.write_text", "tempfile.mkdtemp")


@pytest.mark.parametrize("code", ERRNOS)
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_write_is_one_clear_error_and_leaves_nothing(
    call: str, code: str, compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, code)

    def fail(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    cache.clear()  # the folders exist: their creation has a test of its own
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(CacheError) as caught:
            cache.obtain(SOURCE)
    assert os.strerror(number) in str(caught.value)
    assert "set ATTNFORGE_CACHE_DIR" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert not list((cache_dir / "tmp").iterdir())
    assert cache.entries() == []
    assert cache.obtain(SOURCE).binary == BINARY


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "ESTALE"])
def test_a_disk_without_locks_still_works(
    code: str, compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(getattr(errno, code), "no flock")

    monkeypatch.setattr("fcntl.flock", fail)
    private.folder("tmp")
    alive, left = (cache_dir / "tmp" / f"{locks.boot()}-{name}" for name in ("alive", "left"))
    alive.mkdir()
    left.mkdir()
    os.utime(left, (0, 0))
    assert cache.obtain(SOURCE).binary == BINARY
    assert alive.exists(), "without locks only age tells the dead from the living"
    assert not left.exists()
    assert cache.obtain(SOURCE).binary == BINARY
    assert compiler.runs == 1


def test_a_compiler_that_fills_the_disk_is_a_cache_error(
    compiler: fakes.Compiler, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.write_text(
        compiler.path.read_text().replace("echo run", "echo No space left on device; exit 1; echo")
    )
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    with pytest.raises(CacheError, match=r"no space left.*ATTNFORGE_CACHE_DIR"):
        cache.obtain(SOURCE)
    assert not list((cache_dir / "failed").iterdir())


def test_a_really_full_disk(
    compiler: fakes.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "none", str(disk))
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        monkeypatch.setenv("ATTNFORGE_CACHE_DIR", str(disk / "cache"))
        assert cache.obtain(SOURCE).binary == BINARY
        with pytest.raises(CacheError, match=r"(?i)no space left on device"):
            cache.obtain(fakes.source("x" * 200_000 + "\n"))
        assert cache.obtain(SOURCE).binary == BINARY
        assert not list((disk / "cache" / "tmp").iterdir())
        assert len(cache.entries()) == 1
    finally:
        subprocess.run(("umount", str(disk)), check=True)
