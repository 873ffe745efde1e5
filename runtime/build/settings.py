"""The environment variables that the runtime reads."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from attnforge.runtime.build.errors import CacheError

CACHE_DIR = "ATTNFORGE_CACHE_DIR"
TABLES = "ATTNFORGE_TABLES"
COMPILER = "ATTNFORGE_COMPILER"
NO_JIT = "ATTNFORGE_NO_JIT"
CHAOS = "ATTNFORGE_CHAOS"
CANARY = "ATTNFORGE_CANARY"
DISABLE = "ATTNFORGE_DISABLE"

PREFIX = "ATTNFORGE_"
OURS = (CACHE_DIR, TABLES, COMPILER, NO_JIT, CHAOS, CANARY, DISABLE)
KNOWN = (*OURS, "ATTNFORGE_REQUIRE_GPU", "ATTNFORGE_MEMORY_STEPS")  # the last ones are of the tests

log = logging.getLogger("attnforge")
_warned: set[str] = set()

COMPILERS = ("auto", "nvcc", "nvrtc")


class SettingsError(ValueError):
    """An environment variable has an invalid value; the message names it and the accepted values."""


@dataclass(frozen=True)
class Settings:
    """The settings in the environment variables."""

    cache_dir: Path  # absolute; private to this user (see runtime/build/store.py)
    compiler: str  # of GPU kernels: one of COMPILERS
    jit: bool  # False: a kernel that is not in the cache is an error
    tables: tuple[Path, ...]  # absolute folders of tuned tables; searches write into the first
    chaos: int = 0  # above 0: GPU kernels sleep at random at their barriers, by this seed (codegen/chaos.py)
    canary: int = 0  # above 0: every canary-th forward and backward is checked by float64 (runtime/canary.py)
    disabled: bool = False  # True: drop-ins and patches change nothing


def settings() -> Settings:
    """The current settings. Read again at each call, so that a test or a notebook can change them.

    Raises SettingsError, a ValueError that names the variable, for an invalid value, and CacheError without a home.
    """
    for name, meant in unknown_variables().items():
        if name not in _warned:
            _warned.add(name)
            log.warning("%s is not a variable of attnforge; %s", name, meant)
    compiler = os.environ.get(COMPILER, "auto").lower()
    if compiler not in COMPILERS:
        raise SettingsError(f"{COMPILER}={compiler!r}: accepted are {', '.join(COMPILERS)}")
    return Settings(
        _cache_dir(),
        compiler,
        jit=not _flag(NO_JIT),
        tables=table_folders(),
        chaos=_number(CHAOS, "seeds"),
        canary=_number(CANARY, "numbers of calls"),
        disabled=_flag(DISABLE),
    )


def disabled(what: str, instead: str) -> bool:
    """Whether ATTNFORGE_DISABLE=1. Then says once of each `what` that it does nothing, and what runs `instead`."""
    if not settings().disabled:
        return False
    if what not in _warned:
        _warned.add(what)
        log.warning("%s=1: %s changes nothing; %s", DISABLE, what, instead)
    return True


def unknown_variables() -> dict[str, str]:
    """Variables that are set and begin with ATTNFORGE_, but mean nothing here: a remedy for each, by name."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1, 0.8)
            found[name] = f"did you mean {near[0]}?" if near else f"there are {', '.join(OURS)}"
    return found


def _flag(name: str) -> bool:
    given = os.environ.get(name, "0")
    if given not in ("", "0", "1"):
        raise SettingsError(f"{name}={given!r}: accepted are 0 and 1")
    return given == "1"


def _number(name: str, words: str) -> int:
    given = os.environ.get(name) or "0"
    if not (given.isdecimal() and int(given) < 1 << 32):
        raise SettingsError(f"{name}={given!r}: accepted are 0 (off) and {words} from 1 to {(1 << 32) - 1}")
    return int(given)


def table_folders() -> tuple[Path, ...]:
    """`Settings.tables` alone, which dispatch reads at each choice."""
    given = [part for part in os.environ.get(TABLES, "").split(os.pathsep) if part]
    if not given:
        return (_user_folder(platformdirs.user_data_path) / "tables",)
    return tuple(Path.cwd() / Path(part).expanduser() for part in given)


def _user_folder(folder: Callable[..., Path]) -> Path:
    """A folder of platformdirs, which raises or leaves the "~" if neither HOME nor the user database names a home."""
    with contextlib.suppress(RuntimeError):
        path = folder("attnforge", appauthor=False)
        if path.parts[0] != "~":
            return path
    raise CacheError(
        f"this user has no home directory; set HOME, or both {CACHE_DIR} and {TABLES}, to directories of your own"
    )


def _cache_dir() -> Path:
    given = os.environ.get(CACHE_DIR)
    path = Path(given).expanduser() if given else _user_folder(platformdirs.user_cache_path)
    # Not resolve(): the cache refuses a symbolic link, so the last component must be kept.
    return Path.cwd() / path
