"""Directories and files that only this user can write. The cache holds code, so it uses no others."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from attnforge.runtime.build.errors import CacheError
from attnforge.runtime.build.settings import CACHE_DIR, settings

REMEDY = f"set {CACHE_DIR} to a directory of your own on a disk with free space"

# bford.info/cachedir: backup programs leave directories with this file out.
TAG = "CACHEDIR.TAG"
TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Kernels compiled by attnforge; safe to delete.\n"


class BadEntry(Exception):
    """A published directory is not what its builder wrote; the message gives the difference."""


class Absent(BadEntry):
    """There is no such directory."""


def root() -> Path:
    """The cache directory, created with mode 0700 if it is missing. Raises CacheError if it is not private to this
    user, or if it holds other files, which `cache clear` would delete."""
    path = settings().cache_dir
    make_private(path)
    tag = path / TAG
    if not tag.exists():
        with reporting(path):
            foreign = any(path.iterdir())
            # Checked again: another process may have created the tag in between.
            if foreign and not tag.exists():
                raise CacheError(
                    f"{path} holds files and no {TAG}: it is not a cache; "
                    f"set {CACHE_DIR} to a directory that is empty or does not exist"
                )
            fd = os.open(tag, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(TAG_TEXT)
    return path


def folder(name: str) -> Path:
    """A folder of the root, with the same guarantees."""
    path = root() / name
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Create `path` with mode 0700, or check that what is there belongs to this user alone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        with reporting(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process created it: check that one
                path.mkdir(mode=0o700)
            status = path.lstat()
    except OSError as error:
        raise CacheError(f"cache {path}: {error.strerror}; {REMEDY}") from error
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise CacheError(f"cache {path} is {kind}; remove it, or set {CACHE_DIR} to a real directory")
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"cache {path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}; {REMEDY}"
        )
    if status.st_mode & 0o022:
        raise CacheError(
            f"cache {path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}) and what it "
            f"holds is run as code; delete it, or check its contents and run: chmod go-w {path}"
        )


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn an operating-system error of a write into a CacheError that names the remedy."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write the cache {path}: {error.strerror} ({error.filename or path}); {REMEDY}"
        ) from error


def open_to_read(path: Path) -> int:
    """Descriptor of a file that is no symbolic link. Does not wait for a writer where the path is a pipe."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def read(path: Path) -> bytes:
    """Bytes of a file of the store. BadEntry unless it is a regular file that only this user can write."""
    try:
        fd = open_to_read(path)
    except OSError as error:
        raise BadEntry(f"{path.name}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadEntry(f"{path.name} is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise BadEntry(f"{path.name} can be written by others")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise BadEntry(f"{path.name}: {error.strerror}") from error
    finally:
        os.close(fd)
