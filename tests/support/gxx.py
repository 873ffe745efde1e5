"""Compile C++ for the tests, each text once: for all tests, all workers and the next run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

import kept

from attnforge.codegen.spec import Arch
from attnforge.runtime.build.toolchain import toolchain

HERE = Path(__file__).parents[1] / "emulator"  # headers and programs
KEPT = 300  # libraries; those used longest ago go first


def library(source: Path, *flags: str) -> ctypes.CDLL:
    """The shared library of a C++ file that includes nothing but headers of the system and of tests/emulator."""
    parts = (source.read_text(), *flags, surroundings())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = kept.directory / "libraries"
    folder.mkdir(exist_ok=True)
    built = folder / f"{digest}.so"
    if built.exists():
        built.touch()
    else:
        aside = folder / f"{digest}.{os.getpid()}"
        subprocess.run(["g++", *flags, str(source), "-o", str(aside)], check=True)
        aside.rename(built)
        for old in sorted(folder.glob("*.so"), key=last_used)[:-KEPT]:
            old.unlink(missing_ok=True)
    return ctypes.CDLL(str(built))


def last_used(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


@cache
def surroundings() -> str:
    """What else a library depends on: the compiler, the machine and the emulator's headers."""
    tool = toolchain(Arch.CPU)
    return "\0".join((tool.identity, *(path.read_text() for path in sorted(HERE.glob("*.h")))))
