"""Run kernels for Intel AMX on any x86 CPU: where it refuses their instructions, amx_emulator.cpp executes them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import gxx
import pytest

from attnforge.codegen import cpu_features

SOURCE = Path(__file__).with_name("amx_emulator.cpp")
NATIVE = not cpu_features.amx_refusal()
FLAGS = ("-std=c++14", "-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="AMX is of x86, the emulator of Linux",
)


@cache
def emulator() -> ctypes.CDLL:
    """The compiled emulator."""
    library = gxx.library(SOURCE, *FLAGS)
    library.stop_amx_emulation.restype = ctypes.c_longlong
    return library


@contextmanager
def emulated() -> Iterator[ctypes.CDLL]:
    """Instructions of AMX work inside, and some were executed."""
    library = emulator()
    library.start_amx_emulation()
    try:
        yield library
    finally:
        count = library.stop_amx_emulation()
    assert count > 0 or NATIVE, "no instruction of AMX was emulated"
