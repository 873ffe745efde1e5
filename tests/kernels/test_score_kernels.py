"""Functions of scores in the GPU kernels: their text on the CPU by the emulator, nvcc, and a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path

import gxx
import pytest
import torch
from _pytest.mark import ParameterSet
from cpu_kernel import Params, ScoreRef, full_params, set_score_gradients
from emulator import FLAGS, PARTS, Emulated
from oracle import Shape, draw, make_mask
from score_oracle import attended, compare, functions, learned, learned_oracle, oracle
from spaces import covering
from strict_nvcc import SERIALISED, check_resources
from torch import Tensor

from attnforge import scores
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
LIMIT = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 2e-5}
SHAPE = Shape(70, 100, 32, 1, 2, 2)


MANY = (
    "many(t0: float32[4], t1: float32[3], t2: int32[2], t3: float32[2]): score * t3[b, h] "
    "+ t0[b, h, q_idx, kv_idx] + t1[h, q_idx, kv_idx] * float(t2[b, kv_idx])"
)


LEARNED = "learned(t0: float32[2] grad): score + t0[h, minimum(maximum(kv_idx - q_idx, -128), 128) + 128]"


def ordered(spec: Spec, deterministic: bool) -> Spec:
    """The same with gradients of tensors that do not depend on the order of their sums, or as it was."""
    knobs = {"deterministic": deterministic}
    return Spec(spec.problem, dataclasses.replace(spec.tuning, **knobs))


def run(spec: Spec, name: str, directory: Path) -> None:
    """One variant against float64, on lengths off every tile."""
    p = spec.problem
    x = draw(SHAPE, TORCH[p.dtype], "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = make_mask(p.mask.value, SHAPE.seq_q, SHAPE.seq_k, "cpu")
    score, formula = functions(SHAPE.batch, 2, SHAPE.seq_q, SHAPE.seq_k)[name]
    exact = oracle(q, k, v, mask, formula, x.dout)
    kernel = Emulated(spec, directory)
    kernel.score_tensors = score.tensors
    if p.direction is FORWARD:
        compare(list(kernel.forward(q, k, v, mask)), exact[:2], LIMIT[p.dtype])
    else:
        out, lse = exact[0].to(q.dtype), exact[1].float().contiguous()
        compare([*exact[:2], *kernel.backward(x.dout, q, k, v, out, lse, mask)], exact, LIMIT[p.dtype])


def first(direction: Direction, arch: Arch, dtype: DType, mask: Mask, name: str, head_dim: int = 32) -> Spec:
    known = functions(SHAPE.batch, 2, SHAPE.seq_q, SHAPE.seq_k)
    score = ScoreMod({"many": MANY, "learned": LEARNED}.get(name) or known[name][0].text)
    return next(candidates(Problem(direction, arch, dtype, head_dim, mask, score=score)))


@pytest.mark.parametrize(
    ("arch", "dtype", "mask", "name"),
    [
        (Arch.SM80, DType.BFLOAT16, Mask.SPANS, "mixed"),
        (Arch.SM80, DType.FLOAT16, Mask.CAUSAL, "softcap"),
        (Arch.SM80, DType.FLOAT16, Mask.CAUSAL, "wide softcap"),
        (Arch.SM80, DType.BFLOAT16, Mask.FULL, "approximate"),
        (Arch.SM80, DType.BFLOAT16, Mask.CAUSAL, "stepped"),
        (Arch.SM90, DType.BFLOAT16, Mask.DENSE, "relative"),
        (Arch.SM80, DType.FLOAT32, Mask.FULL, "mixed"),
        (Arch.SM80, DType.FLOAT32, Mask.SPANS, "alibi"),
    ],
    ids=lambda x: getattr(x, "value", x),
)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda x: x.value)
def test_emulated(
    direction: Direction, arch: Arch, dtype: DType, mask: Mask, name: str, tmp_path: Path
) -> None:
    run(first(direction, arch, dtype, mask, name), name, tmp_path)


@pytest.mark.parametrize(
    ("arch", "dtype", "name"),
    [
        (Arch.SM80, DType.BFLOAT16, "table"),
        (Arch.SM80, DType.FLOAT16, "sharpened"),
        (Arch.SM80, DType.FLOAT32, "slopes"),
    ],
    ids=lambda x: getattr(x, "value", x),
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_emulated_gradients_of_tensors(
    arch: Arch, dtype: DType, name: str, deterministic: bool, tmp_path: Path
) -> None:
    shape = Shape(40, 70, 16, 1, 2)
    x = draw(shape, TORCH[dtype], "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = make_mask("spans", shape.seq_q, shape.seq_k, "cpu")
    score, formula, tensors = learned(shape.batch, 2, shape.seq_q, shape.seq_k)[name]
    exact = learned_oracle(q, k, v, mask, formula, tensors, x.dout)
    found = score(*tensors)
    text = ScoreMod(re.sub(r"(t\d: \w+\[\d\])", r"\1 grad", found.text))
    problem = Problem(BACKWARD, arch, dtype, shape.head_dim, Mask.SPANS, score=text)
    kernel = Emulated(ordered(next(candidates(problem)), deterministic), tmp_path)
    kernel.score_tensors = tuple(t.detach() for t in found.tensors)
    out, lse, *_ = oracle(q, k, v, mask, lambda *at: formula(*at, *(t.double() for t in tensors)), x.dout)
    ours = kernel.backward(x.dout, q, k, v, out.to(q.dtype), lse.float().contiguous(), mask)
    for got, answer in zip((*ours, *kernel.score_gradients.values()), exact, strict=True):
        error = (got.double() - answer.reshape(got.shape)).abs().max()
        assert error <= 2 * LIMIT[dtype] * answer.abs().max(), error / answer.abs().max()


def test_factors_of_the_score_have_no_gradients_on_hopper() -> None:
    for formula in ("score * t0[q_idx, kv_idx]", "t0[q_idx, kv_idx] + tanh(score)"):
        text = ScoreMod(f"a(t0: float32[2] grad): {formula}")
        problem = Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=text)
        assert "of a score plus what does not depend on it; sm90" in why_infeasible(problem)


def test_a_kernel_without_scores_is_no_choice() -> None:
    plain = first(FORWARD, Arch.SM89, DType.FLOAT32, Mask.FULL, "alibi")
    assert isinstance(plain.tuning, Fp32Forward)
    spec = Spec(plain.problem, Fp32Forward(64, 32, 4, 1, 0, 1))
    with pytest.raises(Infeasible, match="supports no score function"):
        make_plan(spec)


# What apply_score of a Hopper kernel makes of 2 in a warp's 16 rows, from row `row` and column `column` on.
HOPPER = """#include "emulator.h"
static float exp2_approx(float x) { return std::exp2(x); }
"""
RUN = """
extern "C" void run(const Params* p, int b, int h, int row, int column, float* out) {
    launch([=] {
        float s[kWidth / 2];
        std::fill(s, s + kWidth / 2, 2.0f);
        APPLY
        for (int i = 0; i < kWidth / 2; ++i) {
            const int place = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            out[(threadIdx.x / 4 + i / 2 % 2 * 8) * kWidth + place] = s[i];
        }
    }, 1, 32, 0);
}
"""


@pytest.mark.parametrize("direction", list(Direction), ids=lambda x: x.value)
def test_a_warp_of_the_hopper_kernels(direction: Direction, tmp_path: Path) -> None:
    """Which pair an element of a fragment is: rows are queries in the forward, keys in the backward."""
    plane = torch.randn(2, 3, 70, 300)
    score = scores.bias(plane)
    problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=ScoreMod(score.text))
    spec = next(candidates(problem))
    first, *sections = re.split(r"(?=^// ---- )", full_params(render(spec).text), flags=re.MULTILINE)
    kept = [s for s in sections if s.startswith(("// ---- Specialisation", "// ---- Score"))]
    forward = direction is FORWARD
    width, apply = (
        ("kTileN", "row + threadIdx.x / 4, column")
        if forward
        else ("kTileM", "column, row + threadIdx.x / 4")
    )
    run = RUN.replace("kWidth", width).replace("APPLY", f"apply_score(*p, s, b, h, {apply});")
    path = tmp_path / "score.cpp"
    path.write_text(HOPPER + "".join((first, *kept)).replace("#pragma unroll", "//") + run)
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    columns = spec.tuning.tile_n if forward else spec.tuning.tile_m
    out = torch.full((16, columns), torch.nan)
    p = Params(scale=0.5, score0=ScoreRef.of(plane))
    library.run(ctypes.byref(p), 1, 2, 5, 7, ctypes.c_void_p(out.data_ptr()))
    expected = (plane if forward else plane.mT)[1, 2]
    assert torch.equal(out[:, :50], 1 + expected[5:21, 7:57])


TILE = """
extern "C" void run(const Params* p, const float* values, float* out) {
    launch([] { STORE }, 1, 256, 0);
    launch([=] {
        float s[kTileN / 2];
        const auto place = [](int i) {
            return (threadIdx.x / 4 + i / 2 % 2 * 8) * kTileN + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        };
        for (int i = 0; i < kTileN / 2; ++i) {
            s[i] = values[place(i)];
        }
        APPLY
        for (int i = 0; i < kTileN / 2; ++i) {
            out[place(i)] = s[i];
        }
    }, 1, 32, 0);
}
"""
# A complete S is in units of the score, or, with row_line, in those of Q K^T and without it.
APPLIED = "apply_score(*p, s, 1, 2, 40 + threadIdx.x / 4, KEY);"
LINED = """
        float row_line[2];
        const ScoreLines lines = score_lines(*p, 1, 2);
        const int row = 40 + threadIdx.x / 4;
        const auto slope = line_at(lines, row, KEY, row_line);
        ADD_SLOPE
        BEND
        for (int i = 0; i < kTileN / 2; ++i) {
            s[i] = (s[i] + row_line[i / 2 % 2]) * p->scale;
        }
"""
STEPPED = """
        float row_line[2];
        if (!set_row_line(*p, row_line, 1, 2, 40 + threadIdx.x / 4, KEY)) {
            add_score(*p, s, 1, 2, 40 + threadIdx.x / 4, KEY);
        }
        for (int i = 0; i < kTileN / 2; ++i) {
            s[i] = (s[i] + row_line[i / 2 % 2]) * p->scale;
        }
"""
ADD_SLOPE = {
    DType.FLOAT16: """
        float begun[kTileN / 2];
        begin_scores(begun, slope);
        for (int i = 0; i < kTileN / 2; ++i) {
            s[i] += begun[i];
        }
""",
    DType.BFLOAT16: """
        for (int column = 0; column < 8; ++column) {
            const unsigned pair = __shfl_sync(~0u, slope, threadIdx.x / 4 * 4 + column / 2);
            for (int i = 0; i < kTileN / 2; ++i) {
                const int key = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                const unsigned numbers = numbers_of[key][column / 2];
                s[i] += widen(pair >> column % 2 * 16 & 0xffff) * widen(numbers >> column % 2 * 16 & 0xffff);
            }
        }
""",
}
NUMBERS = """
static int numbers_of[512][4];
static unsigned pack(float low, float high) { return narrow_pair(low, high); }
static void shared_store(unsigned address, int4 x) { std::memcpy(numbers_of[address / 16], &x, 16); }
static void proxy_fence() {}
"""
Function = Callable[[Tensor, Tensor], Tensor]  # of scores and of kv_idx - q_idx
TABLE, SLOPES = torch.randn(3, 41), torch.rand(3)
TILES: dict[str, tuple[scores.Score, Function, float]] = {
    "nearest": (scores.softcap(2.0), lambda s, d: 2 * (s / 2).tanh(), 0.39),
    "near": (scores.softcap(2.0), lambda s, d: 2 * (s / 2).tanh(), 1.9),
    "far": (scores.softcap(2.0), lambda s, d: 2 * (s / 2).tanh(), 9.0),
    "approximate": (scores.softcap(2.0, approximate=True), lambda s, d: 2 * (s / 2).tanh(), 9.0),
    "alibi": (scores.alibi(SLOPES), lambda s, d: s - SLOPES[2] * d.abs(), 1.0),
    "aligned": (scores.alibi(SLOPES, 9), lambda s, d: s - SLOPES[2] * (9 - d).abs(), 1.0),
    "line": (
        scores.Score("line(t0: float32[1]): score + (kv_idx - q_idx) * t0[b] - 0.25", (SLOPES,)),
        lambda s, d: s + d * SLOPES[1] - 0.25,
        1.0,
    ),
    "kink": (
        scores.Score(
            "kink(t0: float32[1]): (abs(kv_idx - q_idx - 7) - (q_idx - kv_idx) * 0.5) * t0[h] + score",
            (SLOPES,),
        ),
        lambda s, d: s + ((d - 7).abs() + d * 0.5) * SLOPES[2],
        1.0,
    ),
    "relative": (scores.relative_bias(TABLE), lambda s, d: s + TABLE[2, 20 + d.clamp(-20, 20)], 1.0),
}


ORDER = """
struct Params { int seq_q, seq_k; };
struct Work { int tile; };
static const int* entries;
static int visit_of(const Params&, const Work&, int index) { return entries[index]; }
static int first_row(const Params&, const Work& work) { return work.tile * kTileM; }
FUNCTIONS
extern "C" void order(const int* list, int count, int tile, int seq_q, int seq_k, int* out) {
    entries = list;
    const int first = first_index({seq_q, seq_k}, {tile}, count);
    for (int i = 0; i < count; ++i) {
        out[i] = index_of(i, first, count);
    }
}
"""


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.SPANS], ids=lambda mask: mask.value)
@pytest.mark.parametrize("name", ["alibi", "line"])
def test_hopper_visits_begin_where_lines_are_highest(name: str, mask: Mask, tmp_path: Path) -> None:
    """At the diagonal, down to the first key tile, then from the last one down; without a kink at the last one."""
    problem = Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 64, mask, score=ScoreMod(TILES[name][0].text))
    source = render(next(candidates(problem)))
    text = source.text[source.text.index("// The place in its list of a work tile's first visit") :]
    text = text[: text.index("\n// ---- ")].replace("__device__ __forceinline__", "static")
    m, n, groups = source.spec.tuning.tile_m, source.spec.tuning.tile_n, source.plan.row_groups
    constants = f"constexpr int kTileM = {m}, kTileN = {n}, kRowGroups = {groups};\n"
    path = tmp_path / "order.cpp"
    path.write_text('#include "emulator.h"\n' + constants + ORDER.replace("FUNCTIONS", text))
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    random = torch.Generator().manual_seed(0)
    for seq_q, seq_k in ((1000, 1000), (500, 2000), (2000, 300)):
        for tile in range(-(-seq_q // m)):
            tiles = torch.arange(-(-seq_k // n))
            if mask is Mask.SPANS:
                tiles = tiles[torch.rand(len(tiles), generator=random) < 0.7]
            entries = (tiles << groups | 1).int()
            out = torch.empty_like(entries)
            places = (ctypes.c_void_p(x.data_ptr()) for x in (entries, out))
            library.order(next(places), len(tiles), tile, seq_q, seq_k, next(places))
            last = tile * m + m - 1 + seq_k - seq_q
            near = tiles * n <= last if name == "alibi" else tiles >= 0
            before = tiles[near].flip(0)
            after = tiles[~near].flip(0)
            if not len(before):  # all keys are ahead: the first one is the nearest
                before, after = tiles[:1], tiles[1:].flip(0)
            assert tiles[out.long()].tolist() == [*before.tolist(), *after.tolist()]


@pytest.mark.parametrize("key0", [0, 47, 64, 256])  # before, on and behind the diagonal
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DType.BFLOAT16) for name in TILES] + [(name, DType.FLOAT16) for name in ("alibi", "line")],
    ids=lambda x: x if isinstance(x, str) else x.value,
)
def test_a_tile_of_the_hopper_forward(name: str, dtype: DType, key0: int, tmp_path: Path) -> None:
    score, formula, size = TILES[name]
    text = ScoreMod(score.text)
    problem = Problem(FORWARD, Arch.SM90A, dtype, 64, Mask.FULL, score=text)
    spec = next(candidates(problem))
    first, *sections = re.split(r"(?=^// ---- )", full_params(render(spec).text), flags=re.MULTILINE)
    kept = "".join(s for s in sections if s.startswith(("// ---- Specialisation", "// ---- Score")))
    kept = re.sub(r"asm\(\"tanh.*", "y = std::tanh(x);", kept).replace("#pragma unroll", "//")
    path = tmp_path / "tile.cpp"
    lined = LINED.replace("ADD_SLOPE", ADD_SLOPE[dtype])
    apply = lined if text.lines else STEPPED if text.row_lines else APPLIED
    store = "store_numbers(0);" if "store_numbers" in kept else ""
    bend = "bend_scores(s, lines, row, KEY);" if "bend_scores" in kept else ""
    tile = TILE.replace("APPLY", apply).replace("STORE", store).replace("BEND", bend)
    path.write_text(HOPPER + NUMBERS + first + kept + tile.replace("KEY", str(key0)))
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    values = (torch.rand(16, spec.tuning.tile_n) * 2 - 1) * size
    out = torch.full_like(values, torch.nan)
    tensors = {f"score{i}": ScoreRef.of(x) for i, x in enumerate(score.tensors)}
    stored = values * 2  # times the scale of 0.5
    library.run(
        *(ctypes.byref(Params(scale=0.5, **tensors)), *(ctypes.c_void_p(x.data_ptr()) for x in (stored, out)))
    )
    distance = torch.arange(spec.tuning.tile_n) + key0 - torch.arange(40, 56)[:, None]
    rtol = 3e-5 if text.lines is None else 5e-6  # two bfloat16 in place of three would be 8e-6 off
    torch.testing.assert_close(out * text.unit, formula(values, distance), rtol=rtol, atol=1e-5)


CURVED = """
static const float* lse_of_tile;
static float2 load_pair(unsigned address) { return {lse_of_tile[address / 4], lse_of_tile[address / 4 + 1]}; }
static unsigned pack(float low, float high) { return narrow_pair(low, high); }
"""
RUN_CURVED = """
extern "C" void run(const Params* p, const float* s_, const float* lse, const unsigned* seen, float* weights,
                    float* out) {
    lse_of_tile = lse;
    launch([=] {
        float s[kTileM / 2];
        unsigned frags[kTileM / 16][4];
        for (int i = 0; i < kTileM / 2; ++i) {
            s[i] = s_[threadIdx.x * (kTileM / 2) + i];
        }
        probabilities(*p, s, frags, 0, seen[threadIdx.x], 1, 2, 7, 5 + threadIdx.x / 4);
        for (int i = 0; i < kTileM / 2; ++i) {
            const unsigned pair = frags[i / 8][i / 2 % 4];
            weights[threadIdx.x * (kTileM / 2) + i] = widen(i % 2 ? pair >> 16 : pair & 0xffff);
            out[threadIdx.x * (kTileM / 2) + i] = s[i];
        }
    }, 1, 32, 0);
}
"""


@pytest.mark.parametrize("size", [0.19, 0.5, 3.0], ids=["nearest", "near", "far"])
def test_weights_and_slopes_of_a_warp_of_the_hopper_backward(size: float, tmp_path: Path) -> None:
    """P and P f' of a curved score that reads its indices; scores beyond the cap take the general tanh."""
    slopes = torch.rand(3)
    text = ScoreMod("a(t0: float32[1]): 2.0 * tanh(score / 2.0) - t0[h] * abs(q_idx - kv_idx)")
    assert text.near == 2.0
    problem = Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=text)
    spec = next(candidates(problem))
    parts = re.split(r"(?=^// ---- )", full_params(render(spec).text), flags=re.MULTILINE)
    kept = [s for s in parts[1:] if s.startswith(("// ---- Specialisation", "// ---- Score"))]
    path = tmp_path / "curved.cpp"
    path.write_text(HOPPER + CURVED + "".join((parts[0], *kept)).replace("#pragma unroll", "//") + RUN_CURVED)
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    thread, i = torch.arange(32)[:, None], torch.arange(32)
    key, query = 5 + thread // 4 + i // 2 % 2 * 8, 7 + i // 4 * 8 + thread % 4 * 2 + i % 2
    plain = (torch.rand(32, 32) * 2 - 1) * size * 4  # times the scale of 0.5
    lse, seen = torch.randn(64), torch.randint(0, 2, (32, 32))
    bits = (seen.long() << i).sum(1).to(torch.int64).to(torch.uint32)
    weights, out = torch.full((32, 32), torch.nan), torch.full((32, 32), torch.nan)
    p = Params(scale=0.5, score0=ScoreRef.of(slopes))
    rows = lse / math.log(2)
    library.run(ctypes.byref(p), *(ctypes.c_void_p(x.data_ptr()) for x in (plain, rows, bits, weights, out)))
    t = torch.tanh(plain.double() * 0.25)
    exact = (2 * t - slopes[2] * (query - key).abs() - lse[query - 7]).exp() * seen
    torch.testing.assert_close(weights.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(out.double(), exact * (1 - t * t), rtol=5e-5, atol=1e-6)


# Of a warp of the Hopper backward in three steps: what it adds to the gradients of the score's tensors.
SUMMED = """
extern "C" void run(const Params* p, const float* weights, const float* dp_, int query0) {
    launch([=] {
        HELD
        for (int step = 0; step < 3; ++step) {
            float s[kTileM / 2], dp[kTileM / 2];
            for (int i = 0; i < kTileM / 2; ++i) {
                const int at = (step * 32 + threadIdx.x) * (kTileM / 2) + i;
                s[i] = weights[at];
                dp[i] = dp_[at];
            }
            add_score_gradients(*p, ARGUMENTS s, dp, 1, 2, query0 + step * kTileM, 5 + threadIdx.x / 4);
        }
        FLUSH
    }, 1, 32, 0);
    ROUND
}
"""
LEARNED_TILES: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "relative": (
        "t0[h, minimum(maximum(kv_idx - q_idx, -20), 20) + 20]",
        (3, 41),
        lambda t, q, k: t[2, (k - q).clamp(-20, 20) + 20],
    ),
    "wide relative": (
        "t0[h, 200 - minimum(maximum(q_idx - kv_idx, -200), 200)]",
        (3, 401),
        lambda t, q, k: t[2, 200 + (k - q).clamp(-200, 200)],
    ),
    "buckets": (
        "t0[h, int(4 * log(1 + float(abs(q_idx - kv_idx))))]",
        (3, 30),
        lambda t, q, k: t[2, (4 * torch.log(1 + (q - k).abs().float())).int()],
    ),
    "two tables": (
        "t0[minimum(maximum(kv_idx - q_idx, -20), 20) + 20] * float(kv_idx) + t0[minimum(abs(q_idx - kv_idx), 40)]",
        (41,),
        lambda t, q, k: t[(k - q).clamp(-20, 20) + 20] * k + t[(q - k).abs().clamp(max=40)],
    ),
    "slopes": ("t0[h] * abs(q_idx - kv_idx)", (3,), lambda t, q, k: t[2] * (q - k).abs()),
    "of every pair": ("t0[q_idx, kv_idx]", (500, 40), lambda t, q, k: t[q, k]),
    "of blocks": ("t0[q_idx // 64, kv_idx // 8]", (8, 5), lambda t, q, k: t[q // 64, k // 8]),
    "of keys": ("t0[b, kv_idx]", (2, 40), lambda t, q, k: t[1, k]),
    "of queries": ("t0[b, q_idx] / float(q_idx)", (2, 500), lambda t, q, k: t[1, q] / q),
}


@pytest.mark.parametrize(("query0", "deterministic"), [(0, False), (256, False), (256, True)])
@pytest.mark.parametrize("name", LEARNED_TILES)
def test_gradients_of_tensors_in_a_warp_of_the_hopper_backward(
    name: str, query0: int, deterministic: bool, tmp_path: Path
) -> None:
    """Three steps, of which pairs are hidden; the dP of these is NaN where the formula's derivative is not constant."""
    formula, shape, function = LEARNED_TILES[name]
    text = ScoreMod(f"a(t0: float32[{len(shape)}] grad): score + {formula}")
    problem = Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=text)
    source = render(ordered(next(candidates(problem)), deterministic))
    parts = re.split(r"(?=^// ---- )", full_params(source.text), flags=re.MULTILINE)
    kept = "".join(s for s in parts[1:] if s.startswith(("// ---- Specialisation", "// ---- Score")))
    held = sum(read.held for read in text.reads)
    words = {
        "HELD": f"GradientSum held[{held}] = {{}};",
        "ARGUMENTS": "held,",
        "FLUSH": "add_held(*p, held);",
    }
    rounding = "launch([=] { round_score_gradients(*p, 32); }, 2, 32, 0);"
    run = SUMMED.replace("ROUND", rounding if deterministic else "")
    for word, code in words.items():
        run = run.replace(word, code if held else "")
    path = tmp_path / "summed.cpp"
    path.write_text(HOPPER + parts[0] + kept.replace("#pragma unroll", "//") + run)
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    step, thread, i = torch.meshgrid(torch.arange(3), torch.arange(32), torch.arange(32), indexing="ij")
    key = 5 + thread // 4 + i // 2 % 2 * 8
    query = query0 + step * 64 + i // 4 * 8 + thread % 4 * 2 + i % 2
    seen = (torch.rand(key.shape) < 0.7) & (query > 0)
    weights, dp = torch.rand(key.shape).where(seen, 0), torch.randn(key.shape)
    varying = all(read.slope.names for read in text.reads)
    tensor, found = torch.zeros(shape, requires_grad=True), dict[int, Tensor]()
    p = Params(score0=ScoreRef.of(tensor.detach()), batch=2, heads_q=3, seq_q=500, seq_k=40)
    bins = set_score_gradients(p, source.plan, [tensor], found)
    assert len(bins) == deterministic
    given = dp.where(seen, torch.nan) if varying else dp
    library.run(ctypes.byref(p), *(ctypes.c_void_p(x.data_ptr()) for x in (weights, given)), query0)
    changes = function(tensor, query.clamp(min=1), key).double()
    (exact,) = torch.autograd.grad(changes, tensor, weights.double() * dp)
    torch.testing.assert_close(found[0], exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


def test_scores_of_several_tensors_get_small_tiles() -> None:
    spec = first(FORWARD, Arch.SM90A, DType.BFLOAT16, Mask.CAUSAL, "many", 128)
    assert (spec.tuning.tile_m, spec.tuning.tile_n) == (128, 80)
    for tile_m, tile_n, message in ((192, 64, "reads 4 tensors"), (128, 96, "S, P, O and Q")):
        tuning = dataclasses.replace(spec.tuning, tile_m=tile_m, tile_n=tile_n)
        with pytest.raises(Infeasible, match=message):
            make_plan(Spec(spec.problem, tuning))


MASKS = (Mask.CAUSAL, Mask.SPANS)
# The targets of mma.sync share their sources and nearly their tiles: each mask is compiled for one of them, and the
# function that takes most registers for all. The others are slow.
CHOSEN = {Arch.SM80: Mask.CAUSAL, Arch.SM90: Mask.SPANS, Arch.SM120: None}


def nvcc_cases() -> Iterator[ParameterSet]:
    """A target, and what is compiled for it together."""
    # Of "many" the first guess must fit: its four tensors spill 1200 bytes where plain kernels start.
    hopper = {
        FORWARD: ("softcap", "alibi", "many"),
        BACKWARD: ("softcap", "alibi", "relative", "stepped", "learned"),
    }
    for direction, names in hopper.items():
        cases = [(direction, *case) for case in product(names, MASKS)]
        # Masks in turn; both with many tensors, which take most registers.
        turn = [cases[2 * i + i % 2] for i in range(len(names))]
        quick = [case for case in cases if case in turn or case[1] == "many"]
        yield pytest.param(Arch.SM90A, quick, id=f"sm90a-{direction.value}")
        others = [case for case in cases if case not in quick]
        yield pytest.param(Arch.SM90A, others, id=f"sm90a-{direction.value}-others", marks=pytest.mark.slow)
    # Each pair of an arch, a direction, a score and a mask in each run; always the backward with the largest score.
    every_arch = list(product(CHOSEN, Direction, ("softcap", "mixed", "alibi"), MASKS))
    covered = covering(every_arch, lambda case: combinations(enumerate(case), 2))
    for arch, chosen in CHOSEN.items():
        every = list(product(Direction, ("softcap", "mixed", "alibi"), MASKS))
        most = BACKWARD, "mixed", Mask.CAUSAL
        quick = [case for case in every if (arch, *case) in covered or case == most]
        learned = [(BACKWARD, "learned", chosen)] if chosen else []
        yield pytest.param(arch, quick + learned, id=arch.value)
        others = [case for case in every if case not in quick]
        yield pytest.param(arch, others, id=f"{arch.value}-others", marks=pytest.mark.slow)


@pytest.mark.nvcc
@pytest.mark.parametrize(("arch", "cases"), list(nvcc_cases()))
def test_nvcc(arch: Arch, cases: list[tuple[Direction, str, Mask]], nvcc: None, tmp_path: Path) -> None:
    specs = [first(direction, arch, DType.BFLOAT16, mask, name, 128) for direction, name, mask in cases]
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


# Sums of tables by distance, of a bias that each pair or several read, of factors of the score.
LEARNED_TEXTS = {
    "table": LEARNED,
    "plane": "plane(t0: float32[3] grad): score + t0[h, q_idx, kv_idx]",
    "keys": "keys(t0: float32[2] grad): score + t0[b, kv_idx]",
    "factor": "factor(t0: float32[1] grad): score * t0[h]",
}


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        (
            Arch.SM80,
            [
                ("table", DType.BFLOAT16, 128, Mask.SPANS),
                ("factor", DType.BFLOAT16, 64, Mask.CAUSAL),
            ],
        ),
        (Arch.SM80, [("plane", DType.FLOAT32, 64, Mask.CAUSAL)]),
        (
            Arch.SM90A,
            [
                ("table", DType.BFLOAT16, 128, Mask.SPANS),
                ("plane", DType.BFLOAT16, 128, Mask.CAUSAL),
                ("keys", DType.FLOAT16, 64, Mask.CAUSAL),
            ],
        ),
    ],
    ids=["sm80", "sm80-fp32", "sm90a"],
)
def test_nvcc_of_deterministic_gradients_of_tensors(
    arch: Arch, cases: list[tuple[str, DType, int, Mask]], nvcc: None, tmp_path: Path
) -> None:
    """Those of wide heads: tests/kernels/test_wide_scores.py."""
    problems = [
        Problem(BACKWARD, arch, dtype, dim, mask, score=ScoreMod(LEARNED_TEXTS[name]))
        for name, dtype, dim, mask in cases
    ]
    specs = [next(deterministic_candidates(problem)) for problem in problems]
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize(
    "name",
    [
        "softcap",
        "wide softcap",
        "approximate",
        "alibi",
        "aligned",
        "bias",
        "relative",
        "walled",
        "mixed",
        "stepped",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype, name: str, mask: str) -> None:
    shape = Shape(259, 391, 64, 2, 2, 2)
    x = draw(shape, dtype, "cuda")
    score, formula = functions(2, 4, 259, 391, "cuda")[name]
    seen = make_mask(mask, 259, 391, "cuda")
    dlse = torch.rand(2, 4, 259, device="cuda")
    exact = oracle(x.q, x.k, x.v, seen, formula, x.dout, dlse)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    compare(attended(x.q, x.k, x.v, seen, score, x.dout, dlse), exact, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize(
    ("head_dim", "size", "cap"), [(128, 1, 50.0), (128, 6, 50.0), (64, 30, 50.0), (256, 3, 30.0)]
)
def test_caps_on_a_gpu(head_dim: int, size: int, cap: float, mask: str) -> None:
    """Scores of a standard deviation of `size`, a row of much larger ones, and negative ones; many visits."""
    seq_q, seq_k = 515, 1291
    x = draw(Shape(seq_q, seq_k, head_dim, 1, 2, 2), torch.bfloat16, "cuda")
    with torch.no_grad():
        x.q.mul_(size)
        x.q[:, :, 100] *= 10
        x.k.add_(0.5)
        x.q[:, :, 300:310] = -x.q[:, :, 300:310].abs()
    seen = make_mask(mask, seq_q, seq_k, "cuda")
    exact = oracle(x.q, x.k, x.v, seen, lambda s, b, h, i, j: cap * torch.tanh(s / cap), x.dout)
    compare(attended(x.q, x.k, x.v, seen, scores.softcap(cap), x.dout), exact, 2e-2)
