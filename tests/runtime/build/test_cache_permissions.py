"""The cache holds code: what others can write is refused, and what cannot be written is said."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import fakes
import pytest

from attnforge.runtime.build import cache, store
from attnforge.runtime.build.errors import CacheError

SOURCE = fakes.source()
BINARY = SOURCE.text.encode()


def test_everything_is_private_whatever_the_umask(compiler: fakes.Compiler, cache_dir: Path) -> None:
    before = os.umask(0)
    try:
        cache.obtain(SOURCE)
        cache.publish_directory("launcher", lambda directory: (directory / "x").touch())
    finally:
        os.umask(before)
    assert compiler.runs == 1
    for path in (cache_dir, *cache_dir.rglob("*")):
        assert path.lstat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_root_that_others_can_write_is_refused(
    mode: int, compiler: fakes.Compiler, cache_dir: Path
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    with pytest.raises(CacheError, match=rf"{cache_dir} can be written by others.*chmod go-w {cache_dir}"):
        cache.obtain(SOURCE)
    assert compiler.runs == 0
    assert not list(cache_dir.iterdir())


@pytest.mark.parametrize("name", ["tmp", "locks", "failed"])
def test_a_folder_that_others_can_write_is_refused(
    name: str, compiler: fakes.Compiler, cache_dir: Path
) -> None:
    cache.obtain(SOURCE)
    cache.clear()
    (cache_dir / name).chmod(0o777)
    store._swept.clear()
    with pytest.raises(CacheError, match=f"{name} can be written by others"):
        cache.obtain(SOURCE)


def test_a_root_that_is_a_link_or_a_file_is_refused(
    compiler: fakes.Compiler, cache_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    cache_dir.symlink_to(tmp_path / "real")
    with pytest.raises(CacheError, match=f"{cache_dir} is a symbolic link"):
        cache.obtain(SOURCE)
    cache_dir.unlink()
    cache_dir.touch()
    with pytest.raises(CacheError, match=f"{cache_dir} is not a directory"):
        cache.obtain(SOURCE)


def test_a_root_of_another_user_is_refused(
    compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.obtain(SOURCE)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(CacheError, match=f"belongs to user {user}, this process runs as {user + 1}"):
        cache.obtain(SOURCE)


def test_a_link_in_place_of_a_lock_is_not_followed(
    compiler: fakes.Compiler, cache_dir: Path, tmp_path: Path
) -> None:
    name = cache.obtain(SOURCE).directory.name
    cache.clear()
    victim = tmp_path / "victim"
    lock = cache_dir / "locks" / f"{name}.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(victim)
    with pytest.raises(CacheError, match="cannot write the cache"):
        cache.obtain(SOURCE)
    assert not victim.exists()


def test_a_read_only_cache_answers_and_says_why_it_cannot_build(
    compiler: fakes.Compiler, cache_dir: Path, tmp_path: Path
) -> None:
    """In a child that is not root: permissions do not bind root."""
    for parent in tmp_path.parents:  # one more where pytest-xdist runs it
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o711)
    tmp_path.chmod(0o777)
    user = 65534 if os.geteuid() == 0 else os.geteuid()

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        assert cache.obtain(SOURCE).binary == BINARY
        for path in (cache_dir, *cache_dir.iterdir()):
            path.chmod(0o500)
        assert cache.obtain(SOURCE).binary == BINARY
        with pytest.raises(
            CacheError, match=r"cannot write the cache .*Permission denied.*ATTNFORGE_CACHE_DIR"
        ):
            cache.obtain(fakes.source("void g();\n"))
        for path in (cache_dir, *cache_dir.iterdir()):
            path.chmod(0o700)

    in_child(child)


def in_child(body: Callable[[], None]) -> None:
    """Run `body` in a fork of this process; fails with its traceback."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    assert not output, output
