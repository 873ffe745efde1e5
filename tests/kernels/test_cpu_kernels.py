"""CPU kernels against an fp64 oracle: masks, strides, GQA, tails, dtypes, empty rows."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cpu_kernel import FLAGS, TORCH_DTYPE, Inputs, Kernel

from attnforge.codegen import cpu_features
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.cpu import CpuBackward, CpuForward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

# Largest error of out against fp64, for unit-normal inputs: a few ulps of the dtype at 1.
OUT_LIMIT = {DType.FLOAT32: 2e-6, DType.BFLOAT16: 1.6e-2}
# Largest error of a gradient relative to the largest element of the three.
GRADIENT_LIMIT = {DType.FLOAT32: 2e-6, DType.BFLOAT16: 1e-2}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int


SHAPES = [
    Shape(1, 7, 1, 131, 197),
    Shape(2, 4, 2, 97, 1),
    Shape(2, 2, 2, 1, 333),
    Shape(1, 6, 2, 300, 129),
]


def visible(mask: Mask, x: Inputs) -> torch.Tensor:
    """(seq_q, seq_k) bool."""
    seq_q, seq_k = x.q.shape[2], x.k.shape[2]
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)[None]
    if mask is Mask.FULL:
        return torch.ones(seq_q, seq_k, dtype=torch.bool)
    if mask is Mask.CAUSAL:
        return j <= i + seq_k - seq_q
    assert x.starts is not None
    assert x.ends is not None
    return (i >= x.starts) & (i < x.ends)


def inputs(shape: Shape, head_dim: int, dtype: DType, mask: Mask) -> Inputs:
    """Random packed (T, H, D) tensors seen as (B, H, S, D): k and v are parts of one fused tensor."""
    torch.manual_seed(shape.seq_q * 1000 + shape.seq_k)
    s, kind = shape, TORCH_DTYPE[dtype]
    q = torch.randn(s.batch, s.seq_q, s.heads_q, head_dim).to(kind).transpose(1, 2)
    fused = torch.randn(s.batch, s.seq_k, 2 * s.heads_kv, head_dim).to(kind).transpose(1, 2)
    k, v = fused[:, : s.heads_kv], fused[:, s.heads_kv :]
    if mask is not Mask.SPANS:
        return Inputs(q, k, v, head_dim**-0.5)
    starts = torch.randint(0, s.seq_q, (s.seq_k,), dtype=torch.int32)
    ends = starts + torch.randint(0, s.seq_q, (s.seq_k,), dtype=torch.int32)
    starts[: s.seq_k // 2] = 0  # makes full tiles
    ends[: s.seq_k // 2] = s.seq_q - 1  # and leaves the last query with few keys, or none
    starts[s.seq_k // 3 : s.seq_k // 2] = ends[s.seq_k // 3 : s.seq_k // 2] = 0
    return Inputs(q, k, v, head_dim**-0.5, starts, ends)


def oracle(x: Inputs, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64."""
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (x.k, x.v))
    scores = (x.q.double() @ k.transpose(2, 3) * x.scale).masked_fill(~visible(mask, x), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    return weights @ v, lse


def oracle_gradients(x: Inputs, mask: Mask, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv in fp64."""
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q, x.k, x.v))
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * x.scale
    hidden = ~visible(mask, x)
    weights = scores.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0)
    out = weights @ v.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (q, k, v), dout.double())


def problem(direction: Direction, dtype: DType, head_dim: int, mask: Mask) -> Problem:
    return Problem(direction, Arch.CPU, dtype, head_dim, mask, dtype.bytes)


def check_forward(kernel: Kernel, x: Inputs) -> None:
    dtype, mask = kernel.spec.problem.dtype, kernel.spec.problem.mask
    out, lse = kernel.forward(x)
    expected_out, expected_lse = oracle(x, mask)
    assert (out.double() - expected_out).abs().max() <= OUT_LIMIT[dtype]
    empty = ~visible(mask, x).any(1)
    assert (lse[:, :, empty] == -math.inf).all()
    assert (out[:, :, empty] == 0).all()
    assert torch.allclose(lse.double()[:, :, ~empty], expected_lse[:, :, ~empty], atol=2e-6, rtol=1e-6)
    again, _ = kernel.forward(x, threads=1)
    assert torch.equal(again, out)


def check_backward(kernel: Kernel, x: Inputs) -> None:
    dtype, mask = kernel.spec.problem.dtype, kernel.spec.problem.mask
    out, lse = oracle(x, mask)
    dout = torch.randn(x.q.shape).to(x.q.dtype)
    saved = (dout, out.to(x.q.dtype), lse.float().contiguous())
    grads = kernel.backward(x, *saved)
    expected_grads = oracle_gradients(x, mask, dout)
    largest = max(g.abs().max().item() for g in expected_grads)
    for name, grad, expected in zip("qkv", grads, expected_grads, strict=True):
        error = (grad.double() - expected).abs().max()
        assert error <= GRADIENT_LIMIT[dtype] * largest, f"d{name}"
    seen = visible(mask, x)
    assert (grads[0][:, :, ~seen.any(1)] == 0).all()
    assert (grads[1][:, :, ~seen.any(0)] == 0).all()
    assert (grads[2][:, :, ~seen.any(0)] == 0).all()
    for again, grad in zip(kernel.backward(x, *saved, threads=1), grads, strict=True):
        assert torch.equal(again, grad)


FORWARD = {
    DType.FLOAT32: CpuForward(48, 64, 2, 16, 8, 3, False),
    DType.BFLOAT16: CpuForward(48, 64, 3, 16, 8, 3, True),
}

BACKWARD = {
    DType.FLOAT32: CpuBackward(48, 96, 16, 8, 3, False),
    DType.BFLOAT16: CpuBackward(96, 48, 16, 8, 3, True),
}


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "tuning"),
    [
        (DType.FLOAT32, 64, FORWARD[DType.FLOAT32]),
        (DType.BFLOAT16, 72, FORWARD[DType.BFLOAT16]),
        (DType.FLOAT32, 8, CpuForward(64, 32, 1, 8, 4, 2, False)),
    ],
    ids=["float32", "bfloat16", "small"],
)
def test_forward(mask: Mask, dtype: DType, head_dim: int, tuning: CpuForward, tmp_path: Path) -> None:
    kernel = Kernel(Spec(problem(Direction.FORWARD, dtype, head_dim, mask), tuning), tmp_path)
    for shape in SHAPES:
        check_forward(kernel, inputs(shape, head_dim, dtype, mask))


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "tuning"),
    [
        (DType.FLOAT32, 64, BACKWARD[DType.FLOAT32]),
        (DType.BFLOAT16, 72, BACKWARD[DType.BFLOAT16]),
        (DType.FLOAT32, 8, CpuBackward(64, 48, 8, 4, 2, False)),
    ],
    ids=["float32", "bfloat16", "small"],
)
def test_backward(mask: Mask, dtype: DType, head_dim: int, tuning: CpuBackward, tmp_path: Path) -> None:
    kernel = Kernel(Spec(problem(Direction.BACKWARD, dtype, head_dim, mask), tuning), tmp_path)
    for shape in SHAPES:
        check_backward(kernel, inputs(shape, head_dim, dtype, mask))


def test_limits_of_head_dim(tmp_path: Path) -> None:
    widest = problem(Direction.FORWARD, DType.FLOAT32, 256, Mask.FULL)
    kernel = Kernel(Spec(widest, CpuForward(48, 64, 1, 16, 8, 3, False)), tmp_path)
    check_forward(kernel, inputs(SHAPES[0], 256, DType.FLOAT32, Mask.FULL))
    with pytest.raises(Infeasible, match="head_dim 257: the cpu kernels take 1 to 256"):
        make_plan(Spec(replace(widest, dim_v=257), CpuForward(48, 64, 1, 16, 8, 3, False)))
    with pytest.raises(Infeasible, match="more than the CPU has"):
        make_plan(Spec(widest, CpuForward(64, 64, 1, 16, 8, 4, False)))
    with pytest.raises(Infeasible, match="bytes per thread"):
        make_plan(Spec(widest, CpuForward(192, 64, 8, 16, 8, 3, False)))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_sign_of_scale(scale: float, tmp_path: Path) -> None:
    for direction, tunings in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        spec = Spec(problem(direction, DType.FLOAT32, 16, Mask.CAUSAL), tunings[DType.FLOAT32])
        x = replace(inputs(SHAPES[3], 16, DType.FLOAT32, Mask.CAUSAL), scale=scale)
        (check_forward if direction is Direction.FORWARD else check_backward)(Kernel(spec, tmp_path), x)


def test_nan_is_not_hidden(tmp_path: Path) -> None:
    spec = Spec(problem(Direction.FORWARD, DType.FLOAT32, 16, Mask.CAUSAL), FORWARD[DType.FLOAT32])
    x = inputs(Shape(1, 1, 1, 100, 100), 16, DType.FLOAT32, Mask.CAUSAL)
    x.q[0, 0, 40] = math.nan
    x.k[0, 0, 70] = math.nan
    out, _ = Kernel(spec, tmp_path).forward(x)
    wrong = out[0, 0].isnan().any(1)
    assert wrong.nonzero().flatten().tolist() == [40, *range(70, 100)]


def test_more_threads_than_cores_wait_their_turn(tmp_path: Path) -> None:
    spec = Spec(problem(Direction.BACKWARD, DType.BFLOAT16, 64, Mask.SPANS), BACKWARD[DType.BFLOAT16])
    kernel = Kernel(spec, tmp_path)
    x = inputs(Shape(1, 3, 1, 900, 700), 64, DType.BFLOAT16, Mask.SPANS)
    dout, out = torch.randn(2, *x.q.shape).bfloat16()
    lse = torch.rand(x.q.shape[:3])
    alone = kernel.backward(x, dout, out, lse, threads=1)
    for threads in (2, 3, 13):
        for grad, expected in zip(kernel.backward(x, dout, out, lse, threads), alone, strict=True):
            assert torch.equal(grad, expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize("isa", ["x86-64", "x86-64-v3"])
def test_sources_need_no_avx512(isa: str, tmp_path: Path) -> None:
    flags = tuple(f"-march={isa}" if flag == "-march=native" else flag for flag in FLAGS)
    x = inputs(SHAPES[3], 64, DType.BFLOAT16, Mask.SPANS)
    for direction, tunings in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD)):
        spec = Spec(problem(direction, DType.BFLOAT16, 64, Mask.SPANS), tunings[DType.BFLOAT16])
        kernel = Kernel(spec, tmp_path, flags)
        (check_forward if direction is Direction.FORWARD else check_backward)(kernel, x)


@pytest.mark.parametrize("direction", Direction)
def test_a_score_is_the_same_with_less_optimisation(direction: Direction, tmp_path: Path) -> None:
    """Other tests of scores compile with less of it than users do."""
    softcap = ScoreMod("softcap: 2.0 * tanh(score / 2.0)")
    plain = problem(direction, DType.FLOAT32, 16, Mask.SPANS)
    tuning = (FORWARD if direction is Direction.FORWARD else BACKWARD)[DType.FLOAT32]
    x = inputs(SHAPES[3], 16, DType.FLOAT32, Mask.SPANS)
    out, lse = oracle(x, Mask.SPANS)
    saved = (torch.randn(x.q.shape), out.float(), lse.float().contiguous())
    results = []
    for flags in (FLAGS, tuple(flag.replace("-O3", "-O1") for flag in FLAGS)):
        kernel = Kernel(Spec(replace(plain, score=softcap), tuning), tmp_path, flags)
        forward = direction is Direction.FORWARD
        results.append(kernel.forward(x) if forward else kernel.backward(x, *saved))
    for optimised, other in zip(*results, strict=True):
        torch.testing.assert_close(optimised, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_space(direction: Direction, dtype: DType) -> None:
    for head_dim in (8, 64, 72, 128):
        specs = list(candidates(problem(direction, dtype, head_dim, Mask.SPANS)))
        assert 10 <= len(specs) <= 40
        assert len({render(spec).text for spec in specs}) == len(specs)
        assert f"_l{cpu_features.lanes()}_" in specs[0].slug
