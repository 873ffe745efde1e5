"""Functions of scores in the GPU kernels: their text on the CPU by the emulator, nvcc, and a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulator import Emulated
from oracle import Shape, draw, make_mask
from score_oracle import attended, compare, functions, oracle
from strict_nvcc import check_resources

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
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
    with pytest.raises(Infeasible, match="FP32 cores takes none"):
        make_plan(spec)


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ["softcap", "mixed", "alibi"])
@pytest.mark.parametrize("direction", list(Direction), ids=lambda x: x.value)
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90, Arch.SM120], ids=lambda x: x.value)
def test_nvcc(
    arch: Arch, direction: Direction, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if toolchain.find_nvcc(dict(toolchain._environment())) is None:
        pytest.skip(toolchain.NVCC_PLACES)
    monkeypatch.setenv(COMPILER, "nvcc")
    check_resources(render(first(direction, arch, DType.BFLOAT16, Mask.SPANS, name, 128)), tmp_path)


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
