"""Rounds of a call: C++ counts them in each one, Python where it chooses a kernel ahead of calls."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gxx
from hypothesis import example, given
from hypothesis import strategies as st

from attnforge.codegen import host_sources
from attnforge.runtime.rounds import MANY, rounds_of

ENTRY = """
extern "C" long rounds_of(long batch, long heads, long rows, long multiprocessors) {
    return attnforge::rounds(batch, heads, rows, multiprocessors);
}
"""


def test_both_count_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rounds.cpp"
    path.write_text(host_sources.sources("rounds.h")["rounds.h"] + ENTRY)
    library = gxx.library(path, "-std=c++17", "-O1", "-fPIC", "-shared")
    library.rounds_of.restype = ctypes.c_long

    @given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 40_000), st.integers(1, 200))
    @example(1, 9, 1280, 120)  # 90 tiles are three quarters of it
    @example(1, 9, 1281, 132)  # 99 tiles are
    @example(2, 7, 896, 132)  # 98 are not
    def same(batch: int, heads: int, rows: int, multiprocessors: int) -> None:
        sizes = (batch, heads, rows, multiprocessors)
        assert library.rounds_of(*map(ctypes.c_long, sizes)) == rounds_of(*sizes)

    same()


def test_rounds_count_key_tiles_of_kv_heads() -> None:
    assert rounds_of(2, 7, 896, 132) == 0  # 98 tiles for 132 multiprocessors
    assert rounds_of(1, 9, 1281, 132) == 1  # 99
    assert rounds_of(16, 4, 1024, 132) == 5
    assert rounds_of(1000, 8, 3000, 132) == MANY
    assert rounds_of(1, 1, 1, 0) == MANY  # no GPU
