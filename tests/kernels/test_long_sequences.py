"""Addresses of the Hopper backward's loads in the longest sequences that calls accept, 2^30 - 1 rows."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import gxx

from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

LONGEST = 2**30 - 1  # INT_MAX / 2 of runtime/native/checks.h
FLAGS = (
    "-std=c++17",
    "-fwrapv",
    "-w",
    "-fPIC",
    "-shared",
    f"-I{gxx.HERE}",
)  # integers wrap around as on a GPU
PRELUDE = """#include "cuda_words.h"
struct TensorMap {};
struct TensorMaps { TensorMap q; };
struct Work { int batch; };
struct Ring { unsigned stage, phase; void advance(unsigned) {} };
static const float* loaded;
static void barrier_wait(unsigned, unsigned) {}
static void barrier_expect(unsigned, int) {}
static void store_int(unsigned, int) {}
static void load_tile(unsigned, const TensorMap&, unsigned, int, int, int, int) {}
static void bulk_load(unsigned, const void* src, int, unsigned) { loaded = static_cast<const float*>(src); }
"""
RUN = """
extern "C" long long floats_to_row_stats(int tile) {
    static float first[1];
    Ring ring = {0, 0};
    load_q(TensorMaps{}, 0, Work{}, 0, tile * 2, first, ring, true);
    return loaded - first;
}
"""


def test_row_stats_of_the_last_query_tile(tmp_path: Path) -> None:
    tuning = Sm90Backward(64, 128, 2, 2, True, 0, False, False)
    spec = Spec(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL), tuning)
    source = render(spec)
    constants = re.findall(r"^constexpr int .*;", source.text, re.M)
    load_q = re.search(r"^__device__ [^\n]* load_q\(.*?^}$", source.text, re.M | re.S)
    assert load_q
    path = tmp_path / "load_q.cpp"
    path.write_text("\n".join((PRELUDE, *constants, load_q[0], RUN)))
    library = gxx.library(path, *FLAGS)
    library.floats_to_row_stats.restype = ctypes.c_longlong
    last = (LONGEST - 1) // 64
    assert library.floats_to_row_stats(last) == last * 64 * source.plan.row_stats
