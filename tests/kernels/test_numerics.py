"""Finite inputs give finite outputs and gradients: huge scores, scores that differ by ulps, limits of scale and spans.

On both devices by the public interface; kernels of GPUs also by their source on the CPU.

Gradients of rows whose |lse| is above 2^22 are zeros by rule, as float32 holds no fraction of such an lse.
"""

from __future__ import annotations

import math
import platform
from pathlib import Path

import pytest
import torch
from emulator import Emulated
from oracle import place, spans
from torch import Tensor

import attnforge
from attnforge.codegen.families.sm80_fp32 import Fp32Backward, Fp32Forward
from attnforge.codegen.families.sm90_fp32 import Sm90Fp32Forward
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime.inputs import LARGEST_SCALE, LEAST_SCALE, check_forward
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.search.reference import reference

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
EPSILON = {BFLOAT16: 2.0**-7, FLOAT16: 2.0**-10, FLOAT32: 1e-5}
LENGTH = 150
# device, dtype, head_dim, layout: on a Hopper GPU the wgmma kernels, those of mma.sync, and those of float32.
TARGETS = [
    ("cpu", FLOAT32, 41, "bshd"),
    ("cpu", BFLOAT16, 64, "bshd"),
    *(
        pytest.param("cuda", *target, marks=pytest.mark.gpu)
        for target in (
            (BFLOAT16, 64, "bshd"),
            (BFLOAT16, 128, "bshd"),
            (FLOAT16, 128, "bshd"),
            (BFLOAT16, 64, "offset"),
            (FLOAT16, 128, "offset"),
            (BFLOAT16, 41, "bshd"),
            (BFLOAT16, 256, "bshd"),
            (FLOAT32, 64, "bshd"),
            (FLOAT32, 41, "bshd"),
            (FLOAT32, 200, "bshd"),
        )
    ),
]
targets = pytest.mark.parametrize(("device", "dtype", "head_dim", "layout"), TARGETS)
KINDS = ("full", "causal", "spans", "dense")
LEAST, MOST = -(2**31), 2**31 - 1


def make_mask(kind: str, device: str) -> AnyMask:
    """A row of the last two sees nothing."""
    if kind == "spans":
        return spans(LENGTH, LENGTH, device)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device)
    seen[: LENGTH // 2, LENGTH // 3 :] = False
    seen[7] = False
    return {"full": None, "causal": attnforge.Causal(), "dense": attnforge.DenseMask(seen)}[kind]


def near_2_to_30(head_dim: int, sign: float = 1.0) -> list[Tensor]:
    """q, k, v, (1, 1, LENGTH, head_dim), whose scores are sign 2^30 and up to seven ulps of float32 more."""
    q, k = torch.zeros(2, 1, 1, LENGTH, head_dim)
    q[..., 0], q[..., 1], k[..., 0] = sign * 2.0**15, 128.0, 2.0**15
    k[..., 1] = torch.arange(LENGTH) * 5 % 8
    return [q, k, torch.randn(1, 1, LENGTH, head_dim)]


def assert_right(out: Tensor, lse: Tensor, inputs: list[Tensor], mask: AnyMask, scale: float | None) -> None:
    """Against float64."""
    q, k, v = (x.detach() for x in inputs)
    exact = reference(q, k, v, mask, scale)
    error = (out - exact.out).abs().max().item()
    assert error <= 2 * EPSILON[q.dtype] * exact.out.abs().max().item()
    seen = exact.lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    torch.testing.assert_close(lse[seen].double(), exact.lse[seen], rtol=1e-6, atol=1e-3)


def both(
    inputs: list[Tensor], mask: AnyMask, scale: float | None = None, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    q, k, v = inputs
    return attnforge.attention(q, k, v, mask, scale=scale, deterministic=deterministic, return_lse=True)


def attend(inputs: list[Tensor], mask: AnyMask, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse); the gradients are finite."""
    out, lse = both(inputs, mask, scale)
    for deterministic in (False, True):
        again, _ = both(inputs, mask, scale, deterministic)
        for grad in torch.autograd.grad(again, inputs, torch.randn_like(out)):
            assert torch.isfinite(grad).all()
    return out.detach(), lse.detach()


def ready(inputs: list[Tensor], device: str, dtype: torch.dtype, layout: str) -> list[Tensor]:
    return [place(x.to(dtype).to(device), layout).requires_grad_() for x in inputs]


@targets
@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores(device: str, dtype: torch.dtype, head_dim: int, layout: str, kind: str) -> None:
    """The mean of v, however large they are."""
    for size in (240.0, 4096.0) if dtype is FLOAT16 else (133120.0, 1e15):
        for sign in (1.0, -1.0):
            whole = torch.full((1, 2, LENGTH, head_dim), size)
            # fp16 holds no gradients of that size
            v = torch.ones_like(whole) if dtype is FLOAT16 else whole
            inputs = ready([whole * sign, whole, v], device, dtype, layout)
            mask = make_mask(kind, device)
            assert_right(*attend(inputs, mask), inputs, mask, None)


@targets
@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_differ_by_ulps(
    device: str, dtype: torch.dtype, head_dim: int, layout: str, kind: str
) -> None:
    mask = make_mask(kind, device)
    for sign in (1.0, -1.0):
        inputs = ready(near_2_to_30(head_dim, sign), device, dtype, layout)
        for scale in (1.0, 2.0**-7, 2.0**-16):
            assert_right(*attend(inputs, mask, scale), inputs, mask, scale)


@targets
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_the_scale(device: str, dtype: torch.dtype, head_dim: int, layout: str, kind: str) -> None:
    """All weights are equal at one end; at the other one key has all weight."""
    mask = make_mask(kind, device)
    inputs = ready([torch.randn(1, 2, LENGTH, head_dim) for _ in range(3)], device, dtype, layout)
    for scale in (LEAST_SCALE, 1e-40, 1e-30, 1e-20):
        out, lse = attend(inputs, mask, scale)
        assert_right(out, lse, inputs, mask, scale)
        (dv,) = torch.autograd.grad(both(inputs, mask, scale)[0], inputs[2], torch.ones_like(out))
        q, k, v = (x.detach() for x in inputs)
        exact = reference(q, k, v, mask, scale, torch.ones_like(out)).dv
        assert exact is not None
        assert (dv - exact).abs().max() <= 3 * EPSILON[dtype] * exact.abs().max()
    for scale in (1e20, 1e37, LARGEST_SCALE):
        out, lse = attend(inputs, mask, scale)
        assert torch.isfinite(out).all()
        assert not lse.isnan().any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_scale_beyond_what_kernels_take_is_the_nearest_one(device: str) -> None:
    """1e-30 to 2e38: where it makes a difference to lse and dq, scores are above 1e22 or differences below 1e-36."""
    results = []
    for scale, size in ((LEAST_SCALE, 1.0), (1e-30, 1.0), (LARGEST_SCALE, 1e-19), (2e38, 1e-19)):
        torch.manual_seed(0)
        q, k = torch.randn(2, 1, 1, LENGTH, 64) * size
        inputs = ready([q, k, torch.randn(1, 1, LENGTH, 64)], device, FLOAT32, "bhsd")
        out, lse = both(inputs, None, scale, deterministic=True)
        results.append((out, lse, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for pair in (results[:2], results[2:]):
        for got, expected in zip(*pair, strict=True):
            assert torch.equal(got, expected)
            assert torch.isfinite(got).all()
            assert got.any()


@targets
def test_any_int32_in_spans(device: str, dtype: torch.dtype, head_dim: int, layout: str) -> None:
    """As the numbers that are nearest to them among 0 to the number of queries."""
    key = torch.arange(LENGTH, dtype=torch.int32, device=device)
    least, most = torch.full_like(key, LEAST), torch.full_like(key, MOST)
    inputs = ready([torch.randn(1, 2, LENGTH, head_dim) for _ in range(3)], device, dtype, layout)
    dout = torch.randn_like(inputs[0])
    for starts, ends in (
        (least, key + 50),
        (key, most),
        (least, most),
        (torch.where(key % 2 == 0, 0, key), torch.where(key % 2 == 0, least, key + 70)),
        (torch.where(key % 3 == 0, most, 0), torch.where(key % 3 == 0, least, key + 1)),
    ):
        mask = attnforge.Spans(starts.int(), ends.int())
        plain = attnforge.Spans(starts.clamp(0, LENGTH).int(), ends.clamp(0, LENGTH).int())
        results = []
        for one in (mask, plain):
            out, lse = both(inputs, one, deterministic=True)
            results.append((out, lse, *torch.autograd.grad(out, inputs, dout)))
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("scale", [1e300, 4e38, 1e-50, 0.0, -1.0, math.inf, math.nan])
def test_a_scale_is_what_float32_holds(scale: float) -> None:
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"scale: got .*, expected a number above 0 that float32 holds"):
        check_forward(x, x, x, None, 0, scale)
    for good in (LEAST_SCALE, 1e-40, 2, LARGEST_SCALE, None):
        check_forward(x, x, x, None, 0, good)


# ---- Kernels of GPUs, by their source on the CPU -------------------------------------------------------------------

KERNELS: dict[str, tuple[DType, Arch, Tuning | None, Arch, Tuning | None]] = {
    "mma-bf16": (DType.BFLOAT16, Arch.SM80, None, Arch.SM80, None),
    "mma-fp16": (DType.FLOAT16, Arch.SM80, None, Arch.SM80, None),
    "mma-fp32": (
        DType.FLOAT32,
        *(Arch.SM80, Fp32Forward(64, 16, 4, 2, 1, 1)),
        *(Arch.SM80, Fp32Backward(32, 32, 4, 1, 2, 2, 2, 1, 1, False, False)),
    ),
    "lanes-and-mma-fp32": (
        DType.FLOAT32,
        *(Arch.SM80, Fp32Forward(64, 32, 4, 2, 0, 1)),
        *(Arch.SM80, Fp32Backward(32, 64, 4, 1, 2, 4, 2, 2, 1, True, False)),
    ),
    "wgmma-and-mma-fp32": (
        DType.FLOAT32,
        *(Arch.SM90A, Sm90Fp32Forward(128, 64, 2, True, True, True)),
        *(Arch.SM80, Fp32Backward(32, 32, 4, 1, 2, 2, 2, 1, 1, False, False)),
    ),
}


def kernel_of(
    direction: Direction, dtype: DType, arch: Arch, tuning: Tuning | None, directory: Path
) -> Emulated:
    problem = Problem(direction, arch, dtype, 32, Mask.SPANS, 16)
    return Emulated(Spec(problem, tuning) if tuning else next(candidates(problem)), directory)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_gpus(name: str, tmp_path: Path) -> None:
    """Equal scores, ulps at 2^30, 1e5 at random, -infinity to infinity in spans: out is right, gradients are finite."""
    dtype, arch, tuning, arch_backward, tuning_backward = KERNELS[name]
    forward = kernel_of(Direction.FORWARD, dtype, arch, tuning, tmp_path)
    backward = kernel_of(Direction.BACKWARD, dtype, arch_backward, tuning_backward, tmp_path)
    kind = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}[dtype]
    key = torch.arange(LENGTH, dtype=torch.int32)
    starts = torch.where(key % 4 == 0, LEAST, torch.where(key % 4 == 1, MOST, key)).int()
    mask = attnforge.Spans(starts, torch.where(key % 3 == 0, MOST, key + 90).int())
    large = 240.0 if kind is FLOAT16 else 133120.0
    equal = torch.full((1, 1, LENGTH, 32), large)
    normal = [torch.randn(1, 1, LENGTH, 32) for _ in range(3)]
    # Weights of a random softmax at this size are 0 and 1, where float32 says which.
    many = [normal[0] * large, normal[1] * large, normal[2]]
    for inputs, right in (
        ([equal, equal, torch.ones_like(equal)], True),
        ([-equal, equal, torch.ones_like(equal)], True),
        (near_2_to_30(32), True),
        (near_2_to_30(32, -1.0), True),
        (normal, True),
        (many, False),
    ):
        q, k, v = (x.to(kind) for x in inputs)
        out, lse = forward.forward(q, k, v, mask)
        if right:
            assert_right(out, lse, [q, k, v], mask, None)
        assert torch.isfinite(out).all()
        for grad in backward.backward(torch.randn_like(out), q, k, v, out, lse, mask):
            assert torch.isfinite(grad).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scale", [1e30, 2e38])
def test_kernels_of_gpus_at_large_scales(name: str, scale: float, tmp_path: Path) -> None:
    """Scores whose product with the scale is beyond float32, of ordinary inputs: no NaN, and finite gradients."""
    dtype, arch, tuning, arch_backward, tuning_backward = KERNELS[name]
    forward = kernel_of(Direction.FORWARD, dtype, arch, tuning, tmp_path)
    backward = kernel_of(Direction.BACKWARD, dtype, arch_backward, tuning_backward, tmp_path)
    forward.scale = backward.scale = scale
    kind = {DType.FLOAT32: FLOAT32, DType.BFLOAT16: BFLOAT16, DType.FLOAT16: FLOAT16}[dtype]
    key = torch.arange(LENGTH, dtype=torch.int32)
    mask = attnforge.Spans(key, key + 90)
    q, k, v, dout = (torch.randn(1, 1, LENGTH, 32).to(kind) for _ in range(4))
    out, lse = forward.forward(q, k, v, mask)
    assert torch.isfinite(out).all()
    assert not lse.isnan().any()
    for grad in backward.backward(dout, q, k, v, out, lse, mask):
        assert torch.isfinite(grad).all()
