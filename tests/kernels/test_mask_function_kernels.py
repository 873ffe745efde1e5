"""Functions of masks in the GPU kernels: their text on the CPU by the emulator, nvcc, and a GPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType

import gxx
import pytest
import torch
from cpu_kernel import Params, ScoreRef, full_params
from emulator import FLAGS, PARTS, Emulated
from list_pieces import pieces
from mask_functions import Function, functions, visible
from oracle import Shape, check, draw
from score_oracle import compare
from spaces import part, quickly
from strict_nvcc import SERIALISED, check_resources, compile_strictly
from torch import Tensor

import attnforge
from attnforge import masks, scores
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.masks import load_operators
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.reference import reference
from attnforge.runtime.search.worker import Bench

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
LIMIT = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 2e-5}
SHAPE = Shape(70, 161, 32, 2, 2, 2)


def longformer(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A window, a query that sees all keys, and keys that all queries see."""
    return ((q_idx - kv_idx).abs() <= 60) | (q_idx == 5000) | (kv_idx < 8)


def named(name: str, shape: Shape, device: str = "cpu") -> Function:
    return longformer if name == "longformer" else functions(shape, device)[name]


def first(
    direction: Direction,
    arch: Arch,
    dtype: DType,
    name: str,
    head_dim: int = 32,
    score: str = "",
    knobs: Mapping[str, bool] = MappingProxyType({}),
) -> Spec:
    text = MaskMod(masks.mask_mod(named(name, SHAPE), SHAPE.seq_q, SHAPE.seq_k, "cpu").text)
    problem = Problem(direction, arch, dtype, head_dim, Mask.DENSE, mask_mod=text, score=ScoreMod(score))
    return next(s for s in candidates(problem) if knobs.items() <= s.to_json()["tuning"].items())


@pytest.mark.parametrize(
    ("arch", "dtype", "name", "knobs"),
    [
        (Arch.SM80, DType.BFLOAT16, "documents", {"split_heads": True}),
        (Arch.SM90, DType.FLOAT16, "heads", {"split_heads": False}),
        (Arch.SM120, DType.BFLOAT16, "window", {}),
        (Arch.SM80, DType.FLOAT32, "documents", {}),
        (Arch.SM89, DType.FLOAT32, "blocks", {}),
    ],
    ids=lambda x: getattr(x, "value", x),
)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda x: x.value)
def test_emulated(
    direction: Direction, arch: Arch, dtype: DType, name: str, knobs: dict[str, bool], tmp_path: Path
) -> None:
    """One variant against float64, on lengths off every tile."""
    spec = first(direction, arch, dtype, name, knobs=knobs if direction is BACKWARD else {})
    x = draw(SHAPE, TORCH[dtype], "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = masks.mask_mod(functions(SHAPE)[name], SHAPE.seq_q, SHAPE.seq_k, "cpu")
    exact = reference(q, k, v, attnforge.DenseMask(visible(functions(SHAPE)[name], SHAPE)), dout=x.dout)
    assert exact.dq is not None
    assert exact.dk is not None
    assert exact.dv is not None
    kernel = Emulated(spec, tmp_path)
    if direction is FORWARD:
        compare(list(kernel.forward(q, k, v, mask)), [exact.out, exact.lse], LIMIT[dtype])
    else:
        out, lse = exact.out.to(q.dtype), exact.lse.float().contiguous()
        answers = [exact.out, exact.lse, exact.dq, exact.dk, exact.dv]
        compare([*answers[:2], *kernel.backward(x.dout, q, k, v, out, lse, mask)], answers, LIMIT[dtype])


# What a Hopper kernel leaves of ones in a warp's 16 rows, from row `row` and column `column` on.
RUN = """
extern "C" void run(const Params* p, int plane, int row, int column, float* out) {
    launch([=] {
        float s[kWidth / 2];
        std::fill(s, s + kWidth / 2, 1.0f);
        APPLY
        for (int i = 0; i < kWidth / 2; ++i) {
            const int place = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            out[(threadIdx.x / 4 + i / 2 % 2 * 8) * kWidth + place] = s[i];
        }
    }, 1, 32, 0);
}
"""


ALIBI = "alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)"
# A score whose derivative is not 1, whose backward takes the visible pairs as bits.
CURVED = "softcap: 30.0 * tanh(score / 30.0)"
FOUND = """unsigned seen[kSeenWords];
        find_seen(*p, plane, PLACE, seen);
        """
FOUND_BITS = """for (int i = 0; i < kWidth / 2; ++i) {
            s[i] = seen[i / 32] >> i % 32 & 1;
        }"""
CALL = "apply_mask(*p, plane, s, PLACE);"
BITS = """const unsigned seen = seen_pairs(*p, plane, PLACE);
        for (int i = 0; i < kWidth / 2; ++i) {
            s[i] = seen >> i & 1;
        }"""


@pytest.mark.parametrize("name", ["documents", "window", "heads"])
@pytest.mark.parametrize(
    ("direction", "score"),
    [(FORWARD, ""), (BACKWARD, ""), (BACKWARD, CURVED)],
    ids=["fwd", "bwd", "bwd of a curved score"],
)
def test_a_warp_of_the_hopper_kernels(direction: Direction, score: str, name: str, tmp_path: Path) -> None:
    """Which pair an element of a fragment is: rows are queries in the forward, keys in the backward."""
    spec, forward = first(direction, Arch.SM90A, DType.BFLOAT16, name, 64, score), direction is FORWARD
    mask = masks.mask_mod(functions(SHAPE)[name], SHAPE.seq_q, SHAPE.seq_k, "cpu")
    head, *sections = re.split(r"(?=^// ---- )", full_params(render(spec).text), flags=re.MULTILINE)
    kept = [s for s in sections if s.startswith(("// ---- Specialisation", "// ---- Mask"))]
    bits = render(spec).plan.slot_words > 0
    called = "unsigned seen_pairs(" if score else "void apply_mask("
    apply = re.search(
        rf"^__device__ [^\n]* {re.escape(called)}.*?^}}\n", "".join(sections), re.MULTILINE | re.DOTALL
    )
    assert apply is not None or (bits and score)
    width, place = (
        ("kTileN", "row + threadIdx.x / 4, column")
        if forward
        else ("kTileM", "column, row + threadIdx.x / 4")
    )
    text = "".join((head, *kept)) + (apply.group() if apply and called not in "".join(kept) else "")
    path = tmp_path / "mask.cpp"
    applied = FOUND + (FOUND_BITS if score else "apply_mask(s, seen);") if bits else BITS if score else CALL
    run = RUN.replace("APPLY", applied)
    if bits and not forward:  # the row comes first
        place = "row + threadIdx.x / 4, column"
    run = run.replace("kWidth", width).replace("PLACE", place)
    path.write_text('#include "emulator.h"\n' + text.replace("#pragma unroll", "//") + run)
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    columns = spec.tuning.tile_n if forward else spec.tuning.tile_m
    p, mod = Params(seq_q=SHAPE.seq_q, seq_k=SHAPE.seq_k), spec.problem.mask_mod
    p.mask_batches, p.mask_heads = 2 if mod.reads("b") else 1, 4 if mod.reads("h") else 1
    for i, x in enumerate(mask.tensors):
        setattr(p, f"score{i}", ScoreRef.of(x))
    batch, q_head = p.mask_batches - 1, p.mask_heads - 1
    expected = visible(functions(SHAPE)[name], SHAPE)[batch, q_head]
    expected = expected if forward else expected.mT
    for row, column in ((16, 0), (48, 40)):
        out = torch.full((16, columns), torch.nan)
        plane = p.mask_batches * p.mask_heads - 1
        library.run(ctypes.byref(p), plane, row, column, ctypes.c_void_p(out.data_ptr()))
        inside = expected[row : row + 16, column : column + columns]
        assert torch.equal(out[: inside.shape[0], : inside.shape[1]] == 1, inside)
        hidden = -torch.inf if forward else 0.0
        if forward:
            assert (out[:, inside.shape[1] :] == hidden).all(), "keys past the end"
        assert ((out == 1) | (out == hidden)).all()


# Pieces of tile 1 to slots 3 and on of a head: O, row maxima and row sums by row.
PIECES = """
extern "C" void run(const Params* p, int head, int pieces, const float* o, const float* most, const float* sums) {
    for (int i = 0; i < pieces; ++i) {
        launch([=] {
            Work work = {};
            work.tile = 1, work.head = head, work.slot = 3 + i;
            RowStats stats;
            float s[kHeadDim / 2];
            const int first = i * kTileM + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
            for (int half = 0; half < 2; ++half) {
                stats.row_max[half] = most[first + half * 8];
                stats.row_sum[half] = sums[first + half * 8] / 4;
            }
            for (int j = 0; j < kHeadDim / 2; ++j) {
                s[j] = o[(first + j / 2 % 2 * 8) * kHeadDim + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2];
            }
            store_piece(*p, work, stats, s, threadIdx.x / 128);
        }, 1, kConsumers * 128, 0);
    }
    launch([=] { COMBINE(*p); }, p->tiles_m * p->batch * p->heads_q, kConsumers * 128, 0);
}
"""
AROUND_PIECES = """
struct RowStats {
    float row_max[2], row_sum[2];
};
static float exp2_approx(float x) { return exp2f(x); }
static float log2_approx(float x) { return log2f(x); }
static unsigned pack(float low, float high) {
    const auto round = [](float x) { return __builtin_bit_cast(unsigned, x) + 0x8000 >> 16; };
    return round(high) << 16 | round(low);
}
"""


# Row maxima of pieces: their spread, and a number that is added to all; the scale.
ORDINARY, LARGE, HUGE = (20.0, 0.0, 0.25), (2.0, 1e7, 0.25), (2.0, 5.0, 1e38)


@pytest.mark.parametrize(
    ("head_dim", "scores"), [(72, ORDINARY), (128, ORDINARY), (128, LARGE), (128, HUGE)], ids=str
)
def test_results_of_pieces_are_combined(
    head_dim: int, scores: tuple[float, float, float], tmp_path: Path
) -> None:
    """One tile of one head has four pieces: rows that see keys in all of them, in some, and in none."""
    spec, pieces, head, heads = first(FORWARD, Arch.SM90A, DType.BFLOAT16, "window", head_dim), 4, 1, 3
    text = full_params(render(spec).text)
    start, *sections = re.split(r"(?=^// ---- )", text, flags=re.MULTILINE)
    kept = {"// ---- Specialisation": "", "// ---- Mask": "", "// ---- Pieces": ""}
    for name, section in product(kept, sections):
        kept[name] += section if section.startswith(name) else ""
    specialisation, mask, combined = kept.values()
    functions_ = "".join(
        found.group()
        for name in ("sum_of_row", "lse_of")
        if (found := re.search(rf"^__device__ [^\n]* {name}\(.*?^}}\n", text, re.MULTILINE | re.DOTALL))
    )
    work = re.search(r"^struct Work \{.*?^};\n", text, re.MULTILINE | re.DOTALL)
    assert work is not None
    parts = (start, specialisation, mask, work.group(), AROUND_PIECES, functions_, combined)
    path = tmp_path / "pieces.cpp"
    run = PIECES.replace("COMBINE", f"{spec.symbol}_combine")
    path.write_text('#include "emulator.h"\n' + "".join(parts).replace("#pragma unroll", "//") + run)
    library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)

    tile_m, seq_q = (
        spec.tuning.tile_m,
        2 * spec.tuning.tile_m - 9,
    )  # the last rows of tile 1 are past the end
    spread, offset, scale = scores
    p = Params(seq_q=seq_q, batch=1, heads_q=heads, tiles_m=2, piece_slots=8, scale=scale)
    p.scale_log2 = scale / math.log(2)
    p.mask_batches = p.mask_heads = 1
    draw = torch.Generator().manual_seed(5)
    sums = torch.rand(pieces, tile_m, generator=draw) * (torch.rand(pieces, tile_m, generator=draw) < 0.6)
    sums[:, 5], sums[:, 6] = 0.0, 1.0
    most = torch.randn(pieces, tile_m, generator=draw).round() * spread + offset
    o = torch.randn(pieces, tile_m, head_dim, generator=draw) * sums[..., None]
    out = torch.full((1, heads, seq_q, head_dim), -7.0, dtype=torch.bfloat16)
    lse = torch.full((1, heads, seq_q), -7.0)
    slots = torch.tensor([[0, 0], [3, 3 + pieces]], dtype=torch.int32)
    accum = torch.full((heads * 8 * tile_m * (head_dim + 2),), torch.nan)
    p.out.data, p.out.head, p.out.row = out.data_ptr(), out.stride(1), out.stride(2)
    p.lse, p.tile_slots, p.out_accum = lse.data_ptr(), slots.data_ptr(), accum.data_ptr()
    for other in range(heads):  # the slots of a tile are those of all heads: the others have results, too
        given = (x.data_ptr() for x in (o, most, sums))
        library.run(ctypes.byref(p), other, pieces, *(ctypes.c_void_p(x) for x in given))

    # Relative to the greatest of the pieces: beside a huge score a logarithm is lost in float64, too.
    top = torch.where(sums > 0, most, -torch.inf).amax(0).double().nan_to_num(neginf=0.0)
    of_piece = (most.double() - top) * p.scale + sums.double().log()
    expected_lse = top * p.scale + of_piece.logsumexp(0)
    weights = (of_piece - of_piece.logsumexp(0)).exp().nan_to_num(0.0)
    expected = (weights[..., None] * (o.double() / sums.double()[..., None]).nan_to_num(0.0)).sum(0)
    rows = seq_q - tile_m
    assert (out[:, :, :tile_m] == -7).all()
    assert (lse[:, :, :tile_m] == -7).all()
    # A scale of 1e38 has an lse beyond float32, and an out that is right.
    torch.testing.assert_close(lse[0, head, tile_m:], expected_lse[:rows].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0, head, tile_m:].double(), expected[:rows], rtol=1e-2, atol=1e-4)
    assert lse[0, head, tile_m + 5] == -torch.inf


def test_a_kernel_without_functions_is_no_choice() -> None:
    plain = first(FORWARD, Arch.SM89, DType.FLOAT32, "documents")
    assert isinstance(plain.tuning, Fp32Forward)
    spec = Spec(plain.problem, Fp32Forward(64, 32, 4, 1, 0, 1))
    with pytest.raises(Infeasible, match=r"mask_mod: .*supports no mask function"):
        make_plan(spec)
    problem = Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.DENSE, mask_mod=plain.problem.mask_mod)
    assert "the sm90a fp32 kernels take none; sm90 takes this call" in why_infeasible(problem)


def test_one_text_has_each_helper_once() -> None:
    """A score and a mask that read tensors of one form share what loads them; the tensors of the score come first."""
    learned = "a(t0: float32[1] grad, t1: int32[1]): score + t0[t1[q_idx]] * tanh_approx(score)"
    for arch in (Arch.CPU, Arch.SM80):
        text = render(first(BACKWARD, arch, DType.BFLOAT16, "documents", score=learned)).text
        helpers = re.findall(
            r"(\w+)(\(const ScoreRef& t.*?\)|\(float x\)(?= \{ return| \{$))", text, re.MULTILINE
        )
        assert {"score_at", "load_int32_1d", "place_1d", "score_tanh_approx"} <= {name for name, _ in helpers}
        assert len(helpers) == len(set(helpers)), "some helper is defined twice"
    score = "a(t0: int32[1]): score + t0[h] * floor(score)"
    for arch in (Arch.CPU, Arch.SM80, Arch.SM90A):
        text = render(first(FORWARD, arch, DType.BFLOAT16, "documents", score=score)).text
        assert text.count("score_at(const ScoreRef& t, int axis, int i") == 1
        assert text.count("load_int32_1d(const ScoreRef& t") == 1
        assert "load_int32_1d(p.score2, static_cast<unsigned>(kv_idx))" in text
        assert "load_int32_2d(p.score1, b, static_cast<unsigned>(q_idx))" in text


TARGETS = [*product((Arch.SM80, Arch.SM90A, Arch.SM120), (DType.BFLOAT16,)), (Arch.SM80, DType.FLOAT32)]
Compiled = tuple[tuple[Arch, DType], Direction, str]


def pairs(case: Compiled) -> Iterator[Hashable]:
    """Each mask and each direction on each target, and each mask in each direction."""
    yield from combinations(case, 2)


@pytest.mark.nvcc
@quickly
@pytest.mark.parametrize(("arch", "dtype"), TARGETS, ids=lambda x: x.value)
def test_nvcc(arch: Arch, dtype: DType, quick: bool, nvcc: None, tmp_path: Path) -> None:
    cases = part(product(TARGETS, Direction, ("documents", "window", "blocks")), quick, pairs)
    specs = [
        first(direction, arch, dtype, name, 128)
        for target, direction, name in cases
        if target == (arch, dtype)
    ]
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


# A side with the truth of two conditions, integers that wrap around, and every other helper.
HELPERS = """all(t0: float32[1]): x0 = q_idx * 1013904223 + 12345; (((q_idx > 2) & (x0 % 7 < 3)) & (kv_idx <= q_idx))
 | (-x0 - h * kv_idx < abs(x0) << b) & (x0 >> b != -2147483648) ^ (t0[q_idx] * t0[kv_idx] - t0[h] / 3.0 == 0.0)"""


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A], ids=lambda arch: arch.value)
def test_nvcc_with_helpers(arch: Arch, nvcc: None, tmp_path: Path) -> None:
    mod = MaskMod(HELPERS.replace("\n", ""))
    problem = Problem(FORWARD, arch, DType.BFLOAT16, 64, Mask.DENSE, mask_mod=mod)
    source = render(next(candidates(problem)))
    compile_strictly(source, tmp_path)
    for name in ("add", "sub", "mul", "neg", "abs"):
        assert f"int wrapping_{name}(int" in source.text


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A], ids=lambda arch: arch.value)
def test_nvcc_with_a_score(arch: Arch, nvcc: None, tmp_path: Path) -> None:
    cases = list(product(Direction, (ALIBI,)))
    cases += [(BACKWARD, CURVED)] if arch is Arch.SM90A else []
    specs = [first(direction, arch, DType.BFLOAT16, "documents", 128, score) for direction, score in cases]
    assert not SERIALISED.search(check_resources([render(spec) for spec in specs], tmp_path))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        *((BF16, 128, name) for name in functions(SHAPE)),
        (BF16, 64, "documents"),
        (BF16, 72, "heads"),
        (BF16, 41, "blocks"),  # of the mma.sync kernels, as float32 is
        (FP16, 64, "heads"),
        (FP32, 64, "documents"),
        (FP32, 128, "heads"),
    ],
    ids=str,
)
def test_on_a_gpu(dtype: torch.dtype, head_dim: int, name: str) -> None:
    shape = Shape(459, 391, head_dim, 2, 2, 2)
    function = functions(shape, "cuda")[name]
    check(draw(shape, dtype, "cuda"), masks.mask_mod(function, shape.seq_q, shape.seq_k, "cuda"))


@pytest.fixture
def few_bits() -> Iterator[Callable[[int], None]]:
    """Limits the bytes of bits in schedules that are made from then on."""
    load_operators()
    before = torch.ops.attnforge.limit_bits(0)
    torch.ops.attnforge.limit_bits(before)
    yield torch.ops.attnforge.limit_bits
    torch.ops.attnforge.limit_bits(before)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "heads", "window"])
def test_with_bits_of_all_visits_of_some_and_of_none(
    name: str, head_dim: int, few_bits: Callable[[int], None]
) -> None:
    """The same results, bit by bit where sums have a fixed order. 20,000 bytes are 9 or 19 slots in each plane."""
    shape = Shape(1459, 1391, head_dim, 2, 2, 2)
    x, function = draw(shape, BF16, "cuda"), functions(shape, "cuda")[name]
    found = []
    for limit in (40 << 20, 20_000, 0):
        few_bits(limit)
        mask = masks.mask_mod(function, shape.seq_q, shape.seq_k, "cuda")
        check(x, mask)
        out = attnforge.attention(x.q, x.k, x.v, mask, deterministic=True)
        found.append([out, *x.grads(out)])
        few_bits(40 << 20)  # another layout: the mask has schedules for both
        out = attnforge.attention(x.q, x.k, x.v, mask, deterministic=True)
        found.append([out, *x.grads(out)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
def test_deterministic_and_in_a_cuda_graph() -> None:
    """With tile lists of each head, and with a score; schedules are built anew at each replay."""
    shape = Shape(700, 600, 64, 2, 2, 2)
    x, function = draw(shape, BF16, "cuda"), functions(shape, "cuda")["heads"]
    mask = masks.mask_mod(function, shape.seq_q, shape.seq_k, "cuda")
    slopes = scores.alibi(torch.rand(4, device="cuda"))
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    first = x.grads(attnforge.attention(x.q, x.k, x.v, mask, deterministic=True))
    for _ in range(3):
        again = x.grads(attnforge.attention(x.q, x.k, x.v, mask, deterministic=True))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    seen = attnforge.DenseMask(visible(function, shape, "cuda"))
    expected = attnforge.attention(q, k, v, seen, score=slopes)
    assert (attnforge.attention(q, k, v, mask, score=slopes) - expected).abs().max().item() < 2e-2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnforge.attention(q, k, v, mask, score=slopes)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert (out - expected).abs().max().item() < 2e-2


def is_cut(direction: Direction, head_dim: int, shape: Shape) -> bool:
    """Does the first choice of the Hopper kernels cut a list of `longformer`?"""
    spec = first(direction, Arch.SM90A, DType.BFLOAT16, "longformer", head_dim)
    tile_m, tile_n = spec.tuning.tile_m, spec.tuning.tile_n
    q_tile, k_tile = (
        torch.arange(-(-size // tile)) * tile for size, tile in ((shape.seq_q, tile_m), (shape.seq_k, tile_n))
    )
    q_tile = q_tile[:, None]
    near = (q_tile - 60 < k_tile + tile_n) & (k_tile - 60 < q_tile + tile_m)
    shows = near | ((q_tile <= 5000) & (q_tile + tile_m > 5000)) | (k_tile == 0)
    forward = direction is Direction.FORWARD
    counts = shows.sum(1 if forward else 0)
    planes = shape.batch * shape.heads_kv * shape.group
    begins = [begin for _, begin, *_ in pieces(counts.tolist(), forward, planes)]
    return make_plan(spec).cut_lists and any(begins)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_first_choices_cut_the_lists_of_the_test_on_a_gpu(head_dim: int) -> None:
    assert all(is_cut(direction, head_dim, Shape(9300, 16000, head_dim, 1, 2, 1)) for direction in Direction)
    assert not is_cut(FORWARD, head_dim, Shape(9300, 2000, head_dim, 1, 2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tokens_that_see_all_and_that_all_see(head_dim: int) -> None:
    """As Longformer's: their lists of tiles are cut, in the forward and in the backward, some of them with a score."""
    shape = Shape(9300, 16000, head_dim, 1, 2, 1)
    assert all(is_cut(direction, head_dim, shape) for direction in Direction)
    x = draw(shape, BF16, "cuda")
    mask = masks.mask_mod(longformer, shape.seq_q, shape.seq_k, "cuda")
    check(x, mask)
    slopes = scores.alibi(torch.rand(2, device="cuda") / 100)
    seen = attnforge.DenseMask(visible(longformer, shape, "cuda")[:1, :1])
    expected = attnforge.attention(x.q, x.k, x.v, seen, score=slopes)
    assert (attnforge.attention(x.q, x.k, x.v, mask, score=slopes) - expected).abs().max().item() < 2e-2


@pytest.mark.gpu
def test_one_mask_for_calls_of_few_heads_and_of_many() -> None:
    """Its lists are cut into other numbers of pieces, for the same kernel."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    handle = kernels.load(first(FORWARD, Arch.SM90A, DType.BFLOAT16, "longformer", 64), device)
    few, many = Shape(9300, 16000, 64, 2), Shape(9300, 16000, 64, 70)
    mask = masks.mask_mod(longformer, few.seq_q, few.seq_k, "cuda")
    for shape in (few, many, few):
        x = draw(shape, BF16, "cuda")
        q, k, v = (t.detach() for t in (x.q, x.k, x.v))
        exact = reference(q[:, -2:], k[:, -2:], v[:, -2:], mask)
        out, _ = ops.forward(q, k, v, mask, variant=handle)
        assert (out[:, -2:] - exact.out).abs().max().item() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["longformer", *functions(SHAPE)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dynamic_tile_scheduler(head_dim: int, name: str) -> None:
    """The first choice that has it, against float64; the lists of `longformer` are cut."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    shape = Shape(1459, 1391, head_dim, 2, 14, 2)
    if name == "longformer":
        shape = Shape(9300, 16000, head_dim, 1, 2, 1)
    mask = masks.mask_mod(named(name, shape, "cuda"), shape.seq_q, shape.seq_k, "cuda")
    sizes = (shape.batch, shape.heads_kv * shape.group, shape.heads_kv, shape.seq_q, shape.seq_k, head_dim)
    case = Case(name, *sizes, DType.BFLOAT16, mask, pairs=0, device=device)
    spec = first(FORWARD, Arch.SM90A, DType.BFLOAT16, name, head_dim, knobs={"dynamic": True})
    assert len(list(Bench(case, FORWARD).verify(kernels.load(spec, device)))) == 2
