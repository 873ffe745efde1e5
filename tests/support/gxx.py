"""Compile C++ for the tests, each text once: for all tests, all workers and the next run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import kept

from attnforge.codegen.spec import Arch
from attnforge.runtime.build.toolchain import host_compiler, toolchain

HERE = Path(__file__).parents[1] / "emulator"  # headers and programs
KEPT = 300  # libraries; those used longest ago go first
KEPT_HEADERS = 6  # 50 MB each


def library(
    source: Path,
    *flags: str,
    parts: tuple[str, ...] = (),
    for_parts: tuple[str, ...] = (),
    header: str = "",
) -> ctypes.CDLL:
    """The shared library of a C++ file that includes nothing but headers of the system and of tests/emulator.

    `parts` are files of tests/emulator that it is linked with, and `header` is one that it includes; they are compiled
    once for all libraries with these flags. `for_parts`: more flags, of the parts alone.
    """
    folder = kept.directory / "libraries"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{digest(source, *flags, *parts, *for_parts)}.so"
    try:
        os.utime(built)  # another process may remove an old one
    except FileNotFoundError:
        objects = [str(compiled(HERE / name, (*flags, *for_parts))) for name in parts]
        # Its own definitions, not those of the same names in another library.
        first = ("-include", str(precompiled(header, flags))) if header else ()
        words = (*flags, *first, "-Wl,-Bsymbolic", str(source), *objects)
        aside = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *words, "-o", str(aside)], check=True)
        aside.rename(built)
        for old in sorted(folder.glob("*.so"), key=last_used)[:-KEPT]:
            old.unlink(missing_ok=True)
    return ctypes.CDLL(str(built))


def unoptimising_compiler() -> Path:
    """A C++ compiler, for $CXX, that does not optimise kernels: those of a program that tests something else.

    It has a version of its own, by which the cache keeps its kernels apart. The launcher is everybody's, and compiled
    as ever.
    """
    compiler = shlex.join(host_compiler(os.environ))
    text = f"""#!/bin/sh
case "$*" in
--version) {compiler} --version | sed '1s/$/, kernels unoptimised/' ;;
*kernel.cpp*) exec {compiler} "$@" -O0 ;;
*) exec {compiler} "$@" ;;
esac
"""
    path = kept.directory / "unoptimising-c++"
    with kept.lock("unoptimising"):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            path.chmod(0o755)
    return path


def compiled(source: Path, flags: tuple[str, ...]) -> Path:
    """The object file of a part."""
    built = kept.directory / "libraries" / f"{digest(source, *flags)}.o"
    with kept.lock("parts"):
        if not built.exists():
            words = [flag for flag in flags if flag != "-shared"]
            aside = built.with_suffix(f".{os.getpid()}")
            subprocess.run(["g++", *words, "-c", str(source), "-o", str(aside)], check=True)
            aside.rename(built)
    return built


def precompiled(header: str, flags: tuple[str, ...]) -> Path:
    """A copy of a header with its precompiled form beside it, which g++ takes in its place."""
    common = tuple(flag for flag in flags if flag != "-shared" and not flag.startswith("-D"))
    place = kept.directory / "headers" / digest(HERE / header, *common)
    with kept.lock("headers"):
        if not place.exists():
            aside = place.with_suffix(f".{os.getpid()}")
            aside.mkdir(parents=True)
            copy = shutil.copy(HERE / header, aside)
            words = ("g++", *common, "-x", "c++-header", str(copy), "-o", f"{copy}.gch")
            subprocess.run(words, check=True)
            aside.rename(place)
            for old in sorted(place.parent.iterdir(), key=last_used)[:-KEPT_HEADERS]:
                shutil.rmtree(old)
    return place / header


def digest(source: Path, *flags: str) -> str:
    words = "\0".join((source.read_text(), *flags, surroundings()))
    return hashlib.sha256(words.encode()).hexdigest()[:20]


def last_used(path: Path) -> float:
    """0 for a file that another process has removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def surroundings() -> str:
    """What else a library depends on: the compiler, the machine and the emulator's headers and parts."""
    tool = toolchain(Arch.CPU)
    files = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    return "\0".join((tool.identity, *(path.read_text() for path in files)))
