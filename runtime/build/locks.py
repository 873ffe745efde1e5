"""File locks of the kernel store: they avoid duplicate compilation and show which processes are alive."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from attnforge.runtime.build.private import folder, open_to_read, reporting

log = logging.getLogger("attnforge")

LOCKS = "locks"
LOCK_SECONDS = 300.0  # longest wait for another process's build before building it here too
POLL_SECONDS = 0.02


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the build lock of `name` if that is possible within LOCK_SECONDS; go on without it if not.

    The file stays: removing it would let two processes lock two files of one name.
    """
    path = folder(LOCKS) / f"{name}.lock"
    with reporting(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while try_flock(fd) is False:
            if time.monotonic() > deadline:
                log.info("%s is locked for %.0f s: building it without its lock", name, LOCK_SECONDS)
                break
            time.sleep(POLL_SECONDS)
        yield
    finally:
        # A process forked meanwhile shares the lock: closing our descriptor alone would not release it.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def try_flock(fd: int) -> bool | None:
    """Take the lock without waiting: True, False if it is held, None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("no flock here: %s", error)
        return None
    return True


def hold(path: Path) -> int | None:
    """Descriptor that holds a flock on `path`; None if someone else holds it or it is gone."""
    try:
        fd = open_to_read(path)
    except FileNotFoundError:
        return None
    if try_flock(fd) is False or os.fstat(fd).st_nlink == 0:
        os.close(fd)
        return None
    return fd


@lru_cache(maxsize=1)
def boot() -> str:
    """Name of the running kernel: flock is reliable among processes that share it, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
