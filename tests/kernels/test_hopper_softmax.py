"""Softmax of the Hopper forward, and P of its backward, of 16-bit kernels: their own source, one warp on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import math
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gxx
import pytest
import torch
from cpu_kernel import Params, full_params
from emulator import FLAGS, PARTS
from torch import Tensor

from attnforge.codegen.render import Source, render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

PRELUDE = """#include "emulator.h"
static float exp2_approx(float x) { return std::exp2(x); }
static float min_or_nan(float x, float y) { return x < y || std::isnan(x) ? x : y; }
static float max_or_nan(float x, float y) { return x > y || std::isnan(x) ? x : y; }
static unsigned pack(float low, float high) { return narrow_pair(low, high); }
template <class Sums> static void accumulator_fence(Sums&) {}
static const int* bounds_of_keys;  // starts and ends side by side
static void read_bounds(unsigned address, int* start, int* end) {
    for (int i = 0; i < 2; ++i) {
        start[i] = bounds_of_keys[address / 4 + i * 2];
        end[i] = bounds_of_keys[address / 4 + i * 2 + 1];
    }
}
"""
# A warp's softmax, visit after visit: S (visits, 16, kTileN) to P relative to the last maxima, these, and sums by lane.
FORWARD = """
static int row_of(int i) { return threadIdx.x / 4 + i / 2 % 2 * 8; }
static int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
extern "C" bool exact_visits[8] = {};
extern "C" void run(const Params* params, const float* scores, int visits, float factor_of_s, float* p, float* tops,
                    float* sums) {
    launch([=] {
        RowStats stats;
        stats.reset();
        for (int visit = 0; visit < visits; ++visit) {
            float s[kTileN / 2];
            for (int i = 0; i < kTileN / 2; ++i) {
                s[i] = scores[(visit * 16 + row_of(i)) * kTileN + column_of(i)];
            }
            unsigned frags[kTileN / 16][4];
            float2 factor;
            const bool exact = exact_visits[visit] = EXACT;
            const bool moved = softmax_step(STEP);
            for (int earlier = 0; moved && earlier < visit; ++earlier) {
                for (int i = 0; i < kTileN / 2; ++i) {
                    p[(earlier * 16 + row_of(i)) * kTileN + column_of(i)] *= i / 2 % 2 ? factor.y : factor.x;
                }
            }
            for (int i = 0; i < kTileN / 2; ++i) {
                const unsigned pair = frags[i / 8][i / 2 % 4];
                p[(visit * 16 + row_of(i)) * kTileN + column_of(i)] = widen(i % 2 ? pair >> 16 : pair & 0xffff);
            }
        }
        for (int half = 0; half < 2; ++half) {
            tops[row_of(half * 2)] = stats.row_max[half];
            sums[row_of(half * 2) * 4 + threadIdx.x % 4] = stats.row_sum[half];
        }
    }, 1, 32, 0);
}
"""
# S of a warp's 16 rows after the mask, all 1 before; `keys`: starts and ends, side by side. The rows are the queries
# from `query0` on, but where they are those of several heads: then the second 8 may be any, here descending ones.
SPANS = """
extern "C" void run(const int* keys, int query0, float* out) {
    bounds_of_keys = keys;
    launch([=] {
        float s[kTileN / 2];
        std::fill(s, s + kTileN / 2, 1.0f);
        apply_mask(s, query0 + threadIdx.x / 4, BELOW 0);
        for (int i = 0; i < kTileN / 2; ++i) {
            const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            out[(threadIdx.x / 4 + i / 2 % 2 * 8) * kTileN + column] = s[i];
        }
    }, 1, 32, 0);
}
"""
# P of a warp's 16 keys from `key` on and kTileM queries from `query0` on, where x is what the products leave.
BACKWARD = """
extern "C" void run(const Params* p, int key, int query0, float x, float* out) {
    launch([=] {
        const int row = key + threadIdx.x / 4;
        SEEN_BY;
        float s[kTileM / 2];
        std::fill(s, s + kTileM / 2, x);
        MASKED;
        for (int i = 0; i < kTileM / 2; ++i) {
            const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            out[(threadIdx.x / 4 + i / 2 % 2 * 8) * kTileM + column] = s[i];
        }
    }, 1, 32, 0);
}
"""


# The queries that see a thread's two keys, as its constructor finds them.
SEEN_BY = {
    False: "const int2 seen_by[2] = {queries_of(*p, row), queries_of(*p, row + 8)}",
    True: "int2 seen_by[2][kIntervals]; for (int i = 0; i < kIntervals; ++i) "
    "{ seen_by[0][i] = queries_of(*p, row, i); seen_by[1][i] = queries_of(*p, row + 8, i); }",
}
# The score may have a slope other than 1: its P takes the visible pairs as bits.
CURVED = "softcap: 30.0 * tanh(score / 30.0)"
MASKED = {
    False: "probabilities(s, p->scale_log2); apply_mask(s, query0, seen_by);",
    True: "const unsigned seen = seen_pairs(query0, seen_by); "
    "for (int i = 0; i < kTileM / 2; ++i) { s[i] = seen >> i & 1 ? 0.5f : 0.0f; }",
}


def build(source: Source, harness: str, directory: Path) -> ctypes.CDLL:
    """The constants, the mask and the softmax of a kernel, with a function `run`."""
    first, *sections = re.split(r"(?=^// ---- )", full_params(source.text), flags=re.MULTILINE)
    problem = source.spec.problem
    curved = problem.direction is Direction.BACKWARD and bool(problem.score)
    softmax = () if curved else ("Softmax",)
    names = ("Specialisation", "Mask", *softmax, *(("Score",) if source.plan.capped else ()))
    kept = [s for s in sections if s.removeprefix("// ---- ").startswith(names)]
    spans = re.findall(
        r"^__device__ __forceinline__ (?:int2 queries_of|unsigned seen_pairs).*?^}\n",
        full_params(source.text),
        re.MULTILINE | re.DOTALL,
    )
    text = "".join((first, *kept, *spans))  # the section of the mask has span_of, which queries_of calls
    bounds = r'asm volatile\("ld\.shared\.v4\.s32[^;]*;"[^;]*"r"\(([^;]*)\)\);'
    text = re.sub(bounds, r"read_bounds(\1, start, end);", text)
    text = re.sub(r'asm volatile\("ld\.shared[^;]*;"[^;]*;', "", text)
    assert "asm" not in text
    text = text.replace("\n    __device__ __forceinline__ ", "\n    ")  # members, which are not static
    path = directory / "softmax.cpp"
    harness = harness.replace("SEEN_BY;", SEEN_BY[problem.unions] + ";").replace("MASKED;", MASKED[curved])
    below = "query0 + 20 - threadIdx.x / 4," if getattr(source.spec.tuning, "splits", 0) else ""
    harness = harness.replace("BELOW", below)
    path.write_text(PRELUDE + text.replace("#pragma unroll", "//") + harness)
    return gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)


def run_forward(
    library: ctypes.CDLL, scores: Tensor, scale: float, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """P (16, keys of all visits), row maxima (16) and row sums (16) of a warp; `factor` is what the softmax takes."""
    p, tops, sums = torch.full_like(scores, math.nan), torch.zeros(16), torch.zeros(16, 4)
    params = Params()
    params.scale = scale
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (scores, p, tops, sums))
    at, p_at, tops_at, sums_at = pointers
    library.run(ctypes.byref(params), at, len(scores), ctypes.c_float(factor), p_at, tops_at, sums_at)
    return p.double().transpose(0, 1).flatten(1), tops.double(), sums.double().sum(1)


@pytest.fixture(scope="module", params=[{}, {"exact_visits": 0}, None], ids=str)
def forward(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, int]:
    """The library, and keys a visit. None: that of a kernel with a score."""
    score = ScoreMod("softcap: 2.0 * tanh(score / 2.0)" if request.param is None else "")
    spec = next(
        candidates(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.FULL, score=score))
    )
    knobs = request.param or {}
    spec = replace(spec, tuning=replace(spec.tuning, **knobs))
    exact = "true" if knobs.get("exact_visits") == 0 else "visit < kExact || !stats.ordinary"
    exact += " || stats.growing" if score else ""
    harness = FORWARD.replace("EXACT;", f"{exact};").replace(
        "STEP", "s, frags, stats, exact, factor_of_s, factor"
    )
    return build(render(spec), harness, tmp_path_factory.mktemp("forward")), spec.tuning.tile_n


def ordinary(visits: int, keys: int) -> Tensor:
    return torch.randn(visits, 16, keys)


def growing(visits: int, keys: int) -> Tensor:
    """Maxima that grow, by little and by much, in visits in which nobody looks for them."""
    steps = torch.tensor([0.0, 0, 0, 0, 3, 3, 60, 60])[:visits, None, None]
    return torch.randn(visits, 16, keys) + steps * torch.linspace(0, 1, 16)[:, None]


def late(visits: int, keys: int) -> Tensor:
    """Rows that see nothing at first, and one that never does."""
    s = torch.randn(visits, 16, keys)
    s[:4, ::3] = -math.inf
    s[:, 7] = -math.inf
    return s


def equal(visits: int, keys: int) -> Tensor:
    return (
        torch.full((visits, 16, keys), 1133871366144.0) * torch.tensor([1.0, -1])[torch.arange(16) % 2, None]
    )


def ulps(visits: int, keys: int) -> Tensor:
    """Numbers near 2^30 that differ by single ulps; beside them rows of ordinary ones, and of none for long."""
    s = 2.0**30 + 128.0 * torch.randint(0, 8, (visits, 16, keys))
    s[:, 8:12] *= -1
    s[:, 3] = torch.randn(visits, keys)
    s[:5, 4] = -math.inf
    return s


def falling_away(visits: int, keys: int) -> Tensor:
    """A large negative maximum that becomes an ordinary one, and the other way round."""
    s = torch.randn(visits, 16, keys)
    s[:5, ::2] -= 1e9
    s[5:, 1::2] += 1e9
    return s


@pytest.mark.parametrize("scale", [0.125, 2.0**-7, 1e-30, 2e38], ids=str)
@pytest.mark.parametrize(
    "make", [ordinary, growing, late, equal, ulps, falling_away], ids=lambda x: x.__name__
)
def test_forward(forward: tuple[ctypes.CDLL, int], make: Callable[[int, int], Tensor], scale: float) -> None:
    """Weights are a softmax to the precision of bf16, and their sums the denominators, for any finite scores."""
    library, keys = forward
    torch.manual_seed(0)
    scores = make(8, keys).float().contiguous()
    got, tops, total = run_forward(library, scores, scale, scale / math.log(2))
    exact = scores.double().transpose(0, 1).flatten(1)
    blind = exact.amax(1) == -math.inf
    weights = ((exact - exact.amax(1, keepdim=True)) * scale).softmax(1)[~blind]
    assert not got[blind].any()
    assert not total[blind].any()
    got, total = got[~blind], total[~blind]
    torch.testing.assert_close(got / total[:, None], weights, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(got.sum(1), total, rtol=5e-3, atol=0)
    # The maximum may be an earlier one: then the sum is larger.
    lse = tops[~blind] * scale + total.log()
    torch.testing.assert_close(lse, (exact[~blind] * scale).logsumexp(1), rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize(
    ("forward", "jumps", "exact"),
    [
        (None, [0, 0, 0, 0, 60, 60, 60, 60], [1, 1, 1, 0, 0, 1, 0, 0]),
        (None, [0, 0, 0, 0, 60, 120, 180, 180], [1, 1, 1, 0, 0, 1, 1, 1]),
        ({}, [0, 0, 0, 0, 60, 60, 60, 60], [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
    indirect=["forward"],
    ids=["once", "every time", "without a score"],
)
def test_exact_visits(forward: tuple[ctypes.CDLL, int], jumps: list[int], exact: list[int]) -> None:
    """After P was large, a kernel with a score searches for maxima as long as each search finds new ones."""
    library, keys = forward
    scores = torch.tensor(jumps, dtype=torch.float32)[:, None, None].expand(8, 16, keys).contiguous()
    run_forward(library, scores, 0.125, 0.125 / math.log(2))
    assert [*map(int, (ctypes.c_bool * 8).in_dll(library, "exact_visits"))] == exact


@pytest.fixture(scope="module", params=[50.0, 30.0], ids=str)
def capped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[float, ctypes.CDLL, int]:
    """A cap, a kernel with it, and keys a visit."""
    score = ScoreMod(f"softcap: {request.param} * tanh(score / {request.param})")
    spec = next(
        candidates(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.FULL, score=score))
    )
    source = render(spec)
    assert source.plan.capped
    step = "*params, s, frags, stats, exact, factor"
    harness = FORWARD.replace("EXACT;", "visit < kExact || !stats.ordinary;").replace("STEP", step)
    return request.param, build(source, harness, tmp_path_factory.mktemp("capped")), spec.tuning.tile_n


def shifted(shift: float) -> Callable[[int, int], Tensor]:
    """All rows near one score, on one side or the other of the limits of the polynomial; lower ones in later visits."""

    def make(visits: int, keys: int) -> Tensor:
        s = torch.randn(visits, 16, keys) * 2 + shift
        s[4:6] -= torch.tensor([20.0, 100.0])[:, None, None]
        return s

    make.__name__ = f"shifted by {shift:g}"
    return make


def outliers(visits: int, keys: int) -> Tensor:
    """Single scores in visits in which nobody looks for maxima: around the limit, around the cap, and far beyond."""
    s = torch.randn(visits, 16, keys)
    for visit, (low, high) in zip((4, 5, 6, 7), ((10, 30), (40, 60), (1e3, 1e6), (1e20, 3e38)), strict=True):
        s[visit, ::2, 3] = torch.linspace(low, high, 8)
        s[visit, 1::2, 5] = -torch.linspace(low, high, 8)
    return s


@pytest.mark.parametrize("scale", [1.0, 0.125, 1e-9], ids=str)
@pytest.mark.parametrize(
    "make",
    [ordinary, growing, late, outliers, equal, *map(shifted, (-40.0, -20.0, -6.0, 4.0, 12.0, 16.0, 40.0))],
    ids=lambda x: x.__name__,
)
def test_capped_forward(
    capped: tuple[float, ctypes.CDLL, int], make: Callable[[int, int], Tensor], scale: float
) -> None:
    """As `test_forward`, of the softmax of capped scores: `make` gives the scaled ones."""
    cap, library, keys = capped
    torch.manual_seed(0)
    scores = (make(8, keys).double() / scale).clamp(-3e38, 3e38).float().contiguous()
    scores[make(8, keys) == -math.inf] = -math.inf
    got, tops, total = run_forward(library, scores, scale, math.nan)
    exact = scores.double().transpose(0, 1).flatten(1)
    blind = exact.amax(1) == -math.inf
    exact = torch.where(exact == -math.inf, exact, cap * (exact * scale / cap).tanh())
    assert not got[blind].any()
    assert not total[blind].any()
    got, total, exact = got[~blind], total[~blind], exact[~blind]
    torch.testing.assert_close(got / total[:, None], exact.softmax(1), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(got.sum(1), total, rtol=5e-3, atol=0)
    torch.testing.assert_close(tops[~blind] * cap + total.log(), exact.logsumexp(1), rtol=1e-6, atol=2e-3)


def test_forward_sees_any_spans(tmp_path: Path) -> None:
    """Key j is visible to the queries starts[j] <= i < ends[j]."""
    spec = next(candidates(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)))
    library, keys = build(render(spec), SPANS, tmp_path), spec.tuning.tile_n
    numbers = [-(2**31), -1, 0, 1, 15, 16, 17, 31, 32, 2**31 - 1]
    pairs = [(x, y) for x in numbers for y in numbers][:: max(1, 100 // keys)][:keys]
    bounds = torch.tensor(pairs + [(0, 0)] * (keys - len(pairs)), dtype=torch.int32)
    for query0 in (0, 16):
        got = torch.full((16, keys), math.nan)
        at, to = ctypes.c_void_p(bounds.data_ptr()), ctypes.c_void_p(got.data_ptr())
        library.run(at, query0, to)
        query = torch.arange(query0, query0 + 16)[:, None]
        seen = (bounds[:, 0] <= query) & (query < bounds[:, 1])
        assert torch.equal(got, torch.where(seen, 1.0, -math.inf)), query0


@pytest.mark.parametrize("score", ["", CURVED])
def test_backward_sees_any_spans(score: str, tmp_path: Path) -> None:
    """The queries starts[j] <= i < ends[j] have weight, for all int32."""
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
    spec = next(candidates(replace(problem, score=ScoreMod(score))))
    library, tile_m = build(render(spec), BACKWARD, tmp_path), spec.tuning.tile_m
    least, most = -(2**31), 2**31 - 1
    numbers = [least, least + 1, -1, 0, 1, 63, 64, 65, 100, 127, 128, 129, 200, most - 1, most]
    pairs = torch.tensor([(x, y) for x in numbers for y in numbers] + [(0, 0)] * 15, dtype=torch.int32)
    starts, ends = (pairs[:, side].contiguous() for side in (0, 1))
    p = Params()
    p.seq_k, p.seq_q, p.scale_log2 = len(pairs), 256, 1.0
    p.starts, p.ends = starts.data_ptr(), ends.data_ptr()
    for query0 in (0, 64, 128, 2**30 - tile_m):
        query = torch.arange(query0, query0 + tile_m)
        for key in range(0, len(pairs) - 15, 16):
            got = torch.full((16, tile_m), math.nan)
            x = ctypes.c_float(-1.0)
            library.run(ctypes.byref(p), key, query0, x, ctypes.c_void_p(got.data_ptr()))
            seen = (starts[key : key + 16, None] <= query) & (query < ends[key : key + 16, None])
            assert torch.equal(got, seen * 0.5), (query0, key)


def bounds_of_unions(count: int, keys: int) -> Tensor:
    """(keys, count, 2): starts and ends of every kind, disjoint or not: a pair is seen if one interval holds it."""
    numbers = torch.tensor([-(2**31), -1, 0, 1, 15, 16, 17, 31, 32, 2**31 - 1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(count)
    return numbers[torch.randint(0, len(numbers), (keys, count, 2), generator=generator)]


@pytest.mark.parametrize(("count", "splits"), [(2, False), (4, False), (1, True), (3, True)])
def test_forward_sees_unions(count: int, splits: bool, tmp_path: Path) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS, intervals=count)
    spec = next(splitting(problem, 1) if splits else candidates(problem))
    library, keys = build(render(spec), SPANS, tmp_path), spec.tuning.tile_n
    bounds = bounds_of_unions(count, keys)
    by_interval = bounds.transpose(0, 1).contiguous()  # as they lie in shared memory
    for query0 in (0, 16):
        got = torch.full((16, keys), math.nan)
        library.run(ctypes.c_void_p(by_interval.data_ptr()), query0, ctypes.c_void_p(got.data_ptr()))
        below = 20 - torch.arange(8) if splits else torch.arange(8, 16)
        query = query0 + torch.cat((torch.arange(8), below))[:, None, None]
        seen = ((bounds[..., 0] <= query) & (query < bounds[..., 1])).any(2)
        assert torch.equal(got, torch.where(seen, 1.0, -math.inf)), query0


@pytest.mark.parametrize(("count", "score"), [(2, ""), (4, ""), (3, CURVED)], ids=str)
def test_backward_sees_unions(count: int, score: str, tmp_path: Path) -> None:
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS, intervals=count)
    spec = next(candidates(replace(problem, score=ScoreMod(score))))
    library, tile_m = build(render(spec), BACKWARD, tmp_path), spec.tuning.tile_m
    bounds = bounds_of_unions(count, 64)
    data = bounds.permute(1, 2, 0).contiguous()
    p = Params()
    p.seq_k, p.seq_q, p.scale_log2, p.spans = 64, 256, 1.0, data.data_ptr()
    for query0, key in itertools.product((0, 64), range(0, 64, 16)):
        query = torch.arange(query0, query0 + tile_m)[:, None]
        got = torch.full((16, tile_m), math.nan)
        x = ctypes.c_float(-1.0)
        library.run(ctypes.byref(p), key, query0, x, ctypes.c_void_p(got.data_ptr()))
        of_keys = bounds[key : key + 16, None]
        seen = ((of_keys[..., 0] <= query) & (query < of_keys[..., 1])).any(2)
        assert torch.equal(got, seen * 0.5), (query0, key)
