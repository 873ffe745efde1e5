"""Directories of built code on disk: private, published whole, checked on every read.

Guarantees
- A directory is built under `tmp/`, fsynced, and published by one rename: readers see all of it or none.
- Locks only save duplicate work. A lost, stuck or unsupported lock costs a second compile, never correctness.
- Every read is checked. The reader's `check` rejects a bad directory, which is then moved aside and rebuilt.
- kill -9 leaves one directory under `tmp/`, whose flock was released with its process; later starts remove it.
- The cache holds code: a root or folder that others can write is refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError
from attnforge.runtime.build.locks import LOCKS, boot, hold, lock, try_flock
from attnforge.runtime.build.private import REMEDY, Absent, BadEntry, folder, open_to_read, reporting, root
from attnforge.runtime.build.settings import CACHE_DIR, NO_JIT, settings

log = logging.getLogger("attnforge")

T = TypeVar("T")

TMP, FAILED = "tmp", "failed"
STALE_SECONDS = 3600.0  # age at which another host's unfinished build counts as abandoned
FAILED_KEPT = 64  # sources of failed compiles that are kept, newest first
ATTEMPTS = 3  # builds of one entry whose content reads back wrong, before giving up

_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,199}")


# ---- Publishing


def look(name: str, check: Callable[[Path], T]) -> T:
    """`check` of the published directory `name`. Raises Absent or BadEntry; writes nothing."""
    path = root() / _safe(name)
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise Absent("not in the cache") from error
    if not stat.S_ISDIR(status.st_mode):
        raise BadEntry("not a directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BadEntry("can be written by others")
    return check(path)


def publish(name: str, build: Callable[[Path], None], check: Callable[[Path], T]) -> T:
    """`check` of the directory `name` of the root, built first if it is missing or bad.

    `build` fills an empty directory; `check` reads a published one and raises BadEntry to have it rebuilt.
    Many processes may call this at once: normally one builds, the others wait and read. Raises CacheError if
    the cache cannot be written, NoCompilerError if compiling is forbidden, and whatever `build` raises; in
    all these cases nothing is published.
    """
    try:
        return look(name, check)
    except BadEntry as why:
        if not settings().jit:
            raise NoCompilerError(
                f"{name}: {why} (looked in {root()}), and {NO_JIT}=1 forbids compiling; "
                f"unset it once to fill the cache, or point {CACHE_DIR} at a filled one"
            ) from why
    sweep()
    for _ in range(ATTEMPTS):
        with lock(name):
            try:
                return look(name, check)
            except Absent:
                pass
            except BadEntry as why:
                _quarantine(root() / name, why)
            _build(name, build)
    try:
        return look(name, check)
    except BadEntry as why:
        raise CacheError(
            f"cache entry {root() / name} is damaged after each of {ATTEMPTS} builds: {why}; check the disk"
        ) from why


def _safe(name: str) -> str:
    if not _NAME.fullmatch(name) or name in (TMP, LOCKS, FAILED):
        raise ValueError(f"name: {name!r} is not usable as a cache entry; use letters, digits and _ . + -")
    return name


def _build(name: str, build: Callable[[Path], None]) -> None:
    """Build aside and rename into place; if another process was faster, its directory stays."""
    path = root() / name
    with _staging() as stage:
        try:
            with reporting(stage):
                build(stage)
                seal(stage)
        except CompileError as error:
            if "No space left on device" in error.log:
                raise CacheError(f"no space left to compile in {stage.parent}; {REMEDY}") from error
            raise error.moved_to(_keep_failed(name, stage, error)) from None
        with reporting(path):
            try:
                stage.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                log.debug("%s was published by another process first", name)
            else:
                _sync(path.parent)


def publish_probe() -> None:
    """Perform each step of publishing once, with a probe file. Raises CacheError if a step fails."""
    with reporting(root()), lock("probe"), _staging() as stage:
        (stage / "file").write_bytes(b"probe")
        seal(stage)
        aside = stage.with_name(f"{stage.name}-renamed")
        stage.rename(aside)
        remove(aside)


def seal(directory: Path) -> None:
    """Make every file durable and private; directories after the files in them."""
    for folder_name, _, files in os.walk(directory, topdown=False):
        for file in files:
            _sync(Path(folder_name, file), private=True)
        _sync(Path(folder_name))


def _sync(path: Path, *, private: bool = False) -> None:
    if path.is_symlink():
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if private:  # compilers follow the umask, which may be 0
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & 0o700)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _staging() -> Iterator[Path]:
    """An empty directory under `tmp/`, marked alive by a flock until it is published or removed."""
    parent = folder(TMP)
    while True:
        with reporting(parent):
            stage = Path(tempfile.mkdtemp(prefix=f"{boot()}-", dir=parent))
            fd = hold(stage)
        if fd is not None:
            break  # else a sweeper took it between its creation and its lock
    try:
        yield stage
    finally:
        remove(stage)
        os.close(fd)


# ---- Leftovers


def sweep() -> None:
    """Remove what killed processes left under `tmp/`, and old failed sources. Once a process and root."""
    if root() in _swept:
        return
    _swept.add(root())
    for path in folder(TMP).iterdir():
        with contextlib.suppress(OSError):  # another sweeper may be at the same one
            _sweep_one(path)
    failed = sorted(folder(FAILED).iterdir(), key=_age)
    for path in failed[FAILED_KEPT:]:
        remove(path)


_swept: set[Path] = set()


def _sweep_one(path: Path) -> None:
    fd = open_to_read(path)
    try:
        # A lock shows whether the builder lives only among processes on one kernel.
        free = try_flock(fd) if path.name.startswith(f"{boot()}-") else None
        if free or (free is None and _age(path) > STALE_SECONDS):
            remove(path)
    finally:
        os.close(fd)


def _age(path: Path) -> float:
    """Seconds since `path` changed; infinite if it is gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")


def remove(path: Path) -> None:
    """Remove a file or a tree; what cannot be removed stays for the next sweep."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def discard(path: Path) -> bool:
    """Take a published directory out of the root in one step; False if it was gone already."""
    aside = folder(TMP) / f"{boot()}-bad-{os.urandom(8).hex()}"
    with reporting(path):
        try:
            path.rename(aside)
        except FileNotFoundError:
            return False
    remove(aside)
    return True


def _quarantine(path: Path, why: BadEntry) -> None:
    """Discard a bad entry. The process that discards it logs a warning."""
    if discard(path):
        log.warning("cache entry %s is bad (%s): rebuilding it", path, why)


def _keep_failed(name: str, stage: Path, error: CompileError) -> Path:
    """Move the directory of a failed compile to `failed/`; returns the new path of its source.

    If that fails, too, the compile error is still reported: its source is lost, but not its log.
    """
    target = folder(FAILED) / f"{name}.{os.urandom(3).hex()}"
    try:
        (stage / "build.log").write_text(error.log)
        stage.rename(target)
    except OSError as why:
        log.warning("cannot keep the source of a failed compile in %s: %s", target, why)
    return target / error.source_path.relative_to(stage)
