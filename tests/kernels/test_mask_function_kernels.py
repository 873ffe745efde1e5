"""Functions of masks in the GPU kernels: their text on the CPU by the emulator, nvcc, and a GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from emulator import Emulated
from mask_functions import functions, visible
from oracle import Shape, check, draw
from score_oracle import compare
from strict_nvcc import SERIALISED, check_resources

import attnforge
from attnforge import masks
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import MaskMod, ScoreMod
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import toolchain
from attnforge.runtime.build.settings import COMPILER
from attnforge.runtime.search.reference import reference

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}
LIMIT = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 2e-5}
SHAPE = Shape(70, 161, 32, 2, 2, 2)
SCORE = ScoreMod("mixed(t0: float32[1]): 3.0 * tanh(score / 3.0) + t0[h] * (q_idx - kv_idx)")


def first(
    direction: Direction,
    arch: Arch,
    dtype: DType,
    name: str,
    head_dim: int = 32,
    score: str = "",
    **knobs: bool,
) -> Spec:
    text = MaskMod(masks.mask_mod(functions(SHAPE)[name], SHAPE.seq_q, SHAPE.seq_k, "cpu").text)
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
    spec = first(direction, arch, dtype, name, **(knobs if direction is BACKWARD else {}))
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


def test_a_kernel_without_functions_is_no_choice() -> None:
    plain = first(FORWARD, Arch.SM89, DType.FLOAT32, "documents")
    assert isinstance(plain.tuning, Fp32Forward)
    spec = Spec(plain.problem, Fp32Forward(64, 32, 4, 1, 0, 1))
    with pytest.raises(Infeasible, match="mask_mod: the forward on FP32 cores takes none"):
        make_plan(spec)
    problem = Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.DENSE, mask_mod=plain.problem.mask_mod)
    assert "the sm90a fp32 kernels take none; sm90 takes this call" in why_infeasible(problem)


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [*product((Arch.SM80, Arch.SM90A, Arch.SM120), (DType.BFLOAT16,)), (Arch.SM80, DType.FLOAT32)],
    ids=lambda x: x.value,
)
@pytest.mark.parametrize("name", ["documents", "window", "blocks"])
@pytest.mark.parametrize("direction", list(Direction), ids=lambda x: x.value)
def test_nvcc(
    direction: Direction, name: str, arch: Arch, dtype: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if toolchain.find_nvcc(dict(toolchain._environment())) is None:
        pytest.skip(toolchain.NVCC_PLACES)
    monkeypatch.setenv(COMPILER, "nvcc")
    log = check_resources(render(first(direction, arch, dtype, name, 128)), tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["documents", "window", "heads", "blocks", "nothing", "everything"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu(head_dim: int, dtype: torch.dtype, name: str) -> None:
    shape = Shape(459, 391, head_dim, 2, 2, 2)
    function = functions(shape, "cuda")[name]
    check(draw(shape, dtype, "cuda"), masks.mask_mod(function, shape.seq_q, shape.seq_k, "cuda"))
