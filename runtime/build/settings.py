"""The few environment variables that change what the runtime does, read in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

CACHE_DIR = "ATTNFORGE_CACHE_DIR"
TABLES = "ATTNFORGE_TABLES"
COMPILER = "ATTNFORGE_COMPILER"
NO_JIT = "ATTNFORGE_NO_JIT"
CHAOS = "ATTNFORGE_CHAOS"

COMPILERS = ("auto", "nvcc", "nvrtc")


class SettingsError(ValueError):
    """An environment variable has a value that means nothing; the message names it and what is accepted."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    cache_dir: Path  # absolute; private to this user (see runtime/build/store.py)
    compiler: str  # of GPU kernels: one of COMPILERS
    jit: bool  # False: a kernel that is not in the cache is an error
    tables: tuple[Path, ...]  # absolute folders of tuned tables; searches write into the first
    chaos: int = 0  # above 0: GPU kernels sleep at random at their barriers, by this seed (codegen/chaos.py)


def settings() -> Settings:
    """Settings of this moment. Cheap, and re-read on each call, so that a test or a notebook can change them.

    Raises SettingsError, a ValueError that names the variable, for a value that means nothing.
    """
    compiler = os.environ.get(COMPILER, "auto").lower()
    if compiler not in COMPILERS:
        raise SettingsError(f"{COMPILER}={compiler!r}: accepted are {', '.join(COMPILERS)}")
    no_jit = os.environ.get(NO_JIT, "0")
    if no_jit not in ("", "0", "1"):
        raise SettingsError(f"{NO_JIT}={no_jit!r}: accepted are 0 and 1")
    return Settings(_cache_dir(), compiler, jit=no_jit != "1", tables=_tables(), chaos=_chaos())


def _chaos() -> int:
    given = os.environ.get(CHAOS) or "0"
    if not (given.isdecimal() and int(given) < 1 << 32):
        raise SettingsError(f"{CHAOS}={given!r}: accepted are 0, no chaos, and seeds up to {(1 << 32) - 1}")
    return int(given)


def _tables() -> tuple[Path, ...]:
    given = [part for part in os.environ.get(TABLES, "").split(os.pathsep) if part]
    default = platformdirs.user_data_path("attnforge", appauthor=False) / "tables"
    return tuple(Path.cwd() / Path(part).expanduser() for part in given) or (default,)


def _cache_dir() -> Path:
    given = os.environ.get(CACHE_DIR)
    path = Path(given).expanduser() if given else platformdirs.user_cache_path("attnforge", appauthor=False)
    # Not resolve(): whether the last component is a symbolic link is for the cache to judge.
    return Path.cwd() / path
