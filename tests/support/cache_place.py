"""Where the stress of the cache happens: a cache of its own, a stub compiler, and children that report what they did.

The compiler copies the source, so an entry is right if its binary is its source.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import fakes

from attnforge.codegen.render import Source
from attnforge.runtime.build import cache, store
from attnforge.runtime.build.private import root
from attnforge.runtime.build.settings import CACHE_DIR

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["attnforge.runtime.search.search", "attnforge.runtime.build.nvrtc", "fakes"])
PATIENCE = 120.0  # seconds after which a child counts as hanging


@dataclass(frozen=True)
class Place:
    """Where one part of the stress happens: its cache, its compiler, and the file of what is done."""

    directory: Path
    compiler: fakes.Compiler

    @property
    def env(self) -> dict[str, str]:
        return {CACHE_DIR: str(self.directory / "cache"), "CXX": str(self.compiler.path)}

    @property
    def done(self) -> Path:
        return self.directory / "done"

    def finished(self) -> list[str]:
        """What children reported, one word each."""
        return self.done.read_text().split() if self.done.exists() else []

    def tell(self, word: str) -> None:
        """Report `word` in one write."""
        fd = os.open(self.done, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{word}\n".encode())
        os.close(fd)


def make_place(directory: Path, name: str, seconds: float) -> Place:
    """A new one, whose compiler takes `seconds`."""
    path = directory / name
    path.mkdir()
    place = Place(path, fakes.compiler(path, seconds=seconds))
    os.environ.update(place.env)
    return place


def start(target: Callable[..., None], place: Place, *arguments: object) -> BaseProcess:
    process = SERVER.Process(target=child, args=(target, place, arguments))
    process.start()
    return process


def child(target: Callable[..., None], place: Place, arguments: tuple[object, ...]) -> None:
    os.environ.update(place.env)
    target(place, *arguments)


def wait(*processes: BaseProcess) -> None:
    """Until they have ended; AssertionError if one hangs or fails."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            raise AssertionError(f"a child still ran after {PATIENCE:.0f} s")
        assert process.exitcode == 0, f"a child ended with {process.exitcode}"


def check_all(sources: list[Source]) -> None:
    """Every entry can be had and is right, and no leftover stays."""
    store._swept.clear()  # as in a new process
    for source in sources:
        assert cache.obtain(source).binary == source.text.encode(), "a wrong binary"
    left = list((root() / store.TMP).iterdir())
    assert not left, f"left behind: {left}"


def sources_of(number: int, keys: int) -> list[Source]:
    return [fakes.source(f"void round{number}key{key}();\n") for key in range(keys)]
