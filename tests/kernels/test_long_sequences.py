"""The longest sequences that calls accept: addresses of the Hopper backward's loads, tokens of the prologue's warps."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import gxx
import pytest

from attnforge.codegen import prologue
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.prologue import CudaTuning, PrologueProblem, PrologueSpec
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


TURNS = """#include "cuda_words.h"
static struct { int x; } threadIdx, blockIdx, gridDim;
struct Params { int tokens; };
%s
extern "C" int last_token(int tokens, int block, int blocks) {
    int last = -1;
    blockIdx.x = block, gridDim.x = blocks;
    for (int warp = 0; warp < kWarps; ++warp) {
        threadIdx.x = warp * 32;
        const Tokens mine = tokens_of(Params{tokens});
        %s
            if (index < 0) return -1;  // it wrapped around
            last = max(last, index);
        }
    }
    return last;
}
"""


@pytest.mark.parametrize("persistent", [0, 1, 2])
@pytest.mark.parametrize("warps", [1, 4, 31, 32])
def test_warps_of_the_prologue_end_at_the_last_token(warps: int, persistent: int, tmp_path: Path) -> None:
    """As many tokens as a call may have, of as many blocks as there are turns, or of 132: three of the blocks."""
    problem = PrologueProblem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 64)
    source = prologue.render(PrologueSpec(problem, CudaTuning(8, 8, 1, warps, 1, persistent)))
    constants = re.findall(r"^constexpr int .*;", source.text, re.M)
    tokens_of = re.search(r"^struct Tokens \{.*?^\};.*? tokens_of\(.*?^\}$", source.text, re.M | re.S)
    loops = re.findall(r"for \(int index = .*\{$", source.text, re.M)
    assert tokens_of
    assert len(loops) == 1
    path = tmp_path / "turns.cpp"
    path.write_text(TURNS % ("\n".join((*constants, tokens_of[0])), loops[0]))
    library = gxx.library(path, *FLAGS, "-O1")
    most = prologue.MOST_TOKENS
    blocks = 132 if persistent else -(-most // source.plan.tokens)
    last = [
        library.last_token(most, block, blocks) for block in (0, (most - 1) // source.plan.tokens % blocks)
    ]
    last.append(library.last_token(most, blocks - 1, blocks))
    assert min(last) >= 0
    assert max(last) == most - 1
