"""Functions of scores in the GPU kernels: their text on the CPU by the emulator, nvcc, and a GPU."""

from __future__ import annotations

import ctypes
import re
from itertools import product
from pathlib import Path
from typing import Any

import gxx
import pytest
import torch
from cpu_kernel import Params, ScoreRef, full_params
from emulator import FLAGS, PARTS, Emulated
from oracle import Shape, draw, make_mask
from score_oracle import attended, compare, functions, oracle
from strict_nvcc import SERIALISED, check_resources

from attnforge import scores
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import toolchain
from attnforge.runtime.build.settings import COMPILER

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
LIMIT = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 2e-5}
SHAPE = Shape(70, 100, 32, 1, 2, 2)


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
    score = ScoreMod(functions(SHAPE.batch, 2, SHAPE.seq_q, SHAPE.seq_k)[name][0].text)
    return next(candidates(Problem(direction, arch, dtype, head_dim, mask, score=score)))


@pytest.mark.parametrize(
    ("arch", "dtype", "mask", "name"),
    [
        (Arch.SM80, DType.BFLOAT16, Mask.SPANS, "mixed"),
        (Arch.SM80, DType.FLOAT16, Mask.CAUSAL, "softcap"),
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


MASKS = (Mask.CAUSAL, Mask.SPANS)
FAMILY_CASES = ((Arch.SM80, Mask.CAUSAL), (Arch.SM90, Mask.SPANS))
NVCC_CASES: list[Any] = [(Arch.SM90A, FORWARD, name, mask) for name in ("softcap", "alibi") for mask in MASKS]
NVCC_CASES += [(Arch.SM90A, BACKWARD, name, mask) for name in ("bias", "alibi", "relative") for mask in MASKS]
# The targets of mma.sync share their sources and nearly their tiles: each mask is compiled for one of them, and the
# function that takes most registers for all. The others are slow.
NVCC_CASES += [
    pytest.param(
        arch,
        direction,
        name,
        mask,
        marks=() if name == "mixed" or (arch, mask) in FAMILY_CASES else pytest.mark.slow,
    )
    for arch, direction, name, mask in product(
        (Arch.SM80, Arch.SM90, Arch.SM120), Direction, ("softcap", "mixed", "alibi"), MASKS
    )
]


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "direction", "name", "mask"), NVCC_CASES, ids=lambda x: getattr(x, "value", x)
)
def test_nvcc(
    arch: Arch, direction: Direction, name: str, mask: Mask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if toolchain.find_nvcc(dict(toolchain._environment())) is None:
        pytest.skip(toolchain.NVCC_PLACES)
    monkeypatch.setenv(COMPILER, "nvcc")
    log = check_resources(render(first(direction, arch, DType.BFLOAT16, mask, name, 128)), tmp_path)
    assert not SERIALISED.search(log), log


def test_the_hopper_backward_refuses_curved_scores() -> None:
    problem = Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=ScoreMod("a: score * score"))
    assert not list(candidates(problem))
    assert "only functions that add to the score; use arch sm90" in why_infeasible(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize("name", ["softcap", "alibi", "aligned", "bias", "relative", "mixed"])
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
