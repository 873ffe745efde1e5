"""What keeps the cache safe beside its digests: who may write an entry, what is on disk for good, who holds a lock."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fakes
import pytest

from attnforge.runtime.build import cache, locks, private

SOURCE = fakes.source()


@pytest.mark.parametrize("mode", [0o720, 0o702])
@pytest.mark.parametrize("name", ["", "kernel.so", "meta.json"])
def test_what_a_group_or_others_can_write_is_rebuilt(
    mode: int, name: str, compiler: fakes.Compiler, cache_dir: Path
) -> None:
    entry = cache.obtain(SOURCE).directory
    (entry / name).chmod(mode)
    assert cache.obtain(SOURCE).binary == SOURCE.text.encode()
    assert compiler.runs == 2


def test_a_published_name_is_durable(
    compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the rename, the directory that holds the new name is synced: else a power cut may take it back."""
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def recording(fd: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), any(cache_dir.glob("fwd_*"))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    cache.obtain(SOURCE)
    assert (str(cache_dir), True) in synced
    assert any(name.endswith("kernel.so") and not published for name, published in synced)


def test_a_directory_that_is_gone_cannot_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweeper may remove it between its opening and its lock: whoever made it must make another."""
    path = tmp_path / "stage"
    path.mkdir()
    lock = locks.try_flock

    def late(fd: int) -> bool | None:
        path.rmdir()
        return lock(fd)

    monkeypatch.setattr(locks, "try_flock", late)
    assert locks.hold(path) is None


def test_a_forked_child_does_not_keep_the_lock(cache_dir: Path) -> None:
    """A data loader that is forked while a kernel compiles inherits the descriptor and lives on."""
    private.folder(locks.LOCKS)
    path = cache_dir / locks.LOCKS / "entry.lock"
    with locks.lock("entry"):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        fd = os.open(path, os.O_RDWR)
        assert locks.try_flock(fd) is True
        os.close(fd)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_link_is_neither_read_nor_locked(tmp_path: Path) -> None:
    """Not even one to a file that only this user can write."""
    path, link = tmp_path / "meta.json", tmp_path / "link"
    path.write_bytes(b"{}")
    path.chmod(0o600)
    link.symlink_to(path)
    assert private.read(path) == b"{}"
    with pytest.raises(private.BadEntry, match="link"):
        private.read(link)
    with pytest.raises(OSError, match="link"):
        locks.hold(link)
