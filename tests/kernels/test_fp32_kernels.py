"""The float32 kernels of tensor cores lose no more than float32 does: their source on the CPU, which cuts sums off.

Tensor cores cut off where other units round, and what is cut off adds up. emulator_warp.cpp does as they do.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulator import Emulated
from oracle import NAMES, Shape, distance, draw, make_mask, peers, unions

from attnforge.codegen.families.sm80_fp32 import Fp32Backward, Fp32Forward
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.reference import reference

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")

# Small tiles, so that sums of tiles are added often; gradients of kv heads and of q heads.
FORWARD = Fp32Forward(64, 16, 4, 2, 1, 1)
ON_LANES = Fp32Forward(32, 16, 2, 1, 0, 1)  # of FP32 cores
GRADIENTS = (
    Fp32Backward(32, 32, 4, 1, 2, 2, 2, 1, 1, False, False),
    Fp32Backward(32, 64, 4, 1, 2, 4, 2, 2, 1, True, False),
)
# rms error, as a multiple of that of the worse of two peers that compute in float32 on the CPU.
LIMIT = 1.1


def spec_of(tuning: Fp32Forward | Fp32Backward, dim: int, mask: str) -> Spec:
    direction = Direction.FORWARD if isinstance(tuning, Fp32Forward) else Direction.BACKWARD
    return Spec(Problem(direction, Arch.SM80, DType.FLOAT32, dim, Mask(mask), 4), tuning)


@pytest.mark.parametrize(
    ("dim", "mask", "backward"), [(64, "causal", GRADIENTS[0]), (41, "spans", GRADIENTS[1])]
)
def test_errors_are_those_of_float32(dim: int, mask: str, backward: Fp32Backward, tmp_path: Path) -> None:
    length = 270
    x = draw(Shape(length, length, dim, heads_kv=1), torch.float32, "cpu", "bhsd")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    hidden = make_mask(mask, length, length, "cpu")
    exact = reference(q, k, v, hidden, None, x.dout)
    out, lse = Emulated(spec_of(FORWARD, dim, mask), tmp_path).forward(q, k, v, hidden)
    grads = Emulated(spec_of(backward, dim, mask), tmp_path).backward(x.dout, q, k, v, out, lse, hidden)
    theirs = zip(*peers(x, hidden), strict=True)
    answers = (exact.out, exact.dq, exact.dk, exact.dv)
    for name, mine, pair, answer in zip(NAMES, (out, *grads), theirs, answers, strict=True):
        assert answer is not None
        rms, limit = distance(mine, answer)[0], LIMIT * max(distance(peer, answer)[0] for peer in pair)
        assert rms <= limit, f"{name}: {rms:.3g}, more than {limit:.3g}"
    seen = exact.lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (lse - exact.lse)[seen].pow(2).mean().sqrt() <= 2.5e-7, "lse"


@pytest.mark.parametrize(("forward", "backward"), list(zip((FORWARD, ON_LANES), GRADIENTS, strict=True)))
def test_three_intervals(forward: Fp32Forward, backward: Fp32Backward, tmp_path: Path) -> None:
    x = draw(Shape(150, 131, 41, heads_kv=1), torch.float32, "cpu", "bhsd")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = unions(150, 131, 3, "cpu")
    specs = [spec_of(tuning, 41, "spans") for tuning in (forward, backward)]
    kernels = [Emulated(replace(s, problem=replace(s.problem, intervals=3)), tmp_path) for s in specs]
    out, lse = kernels[0].forward(q, k, v, mask)
    grads = kernels[1].backward(x.dout, q, k, v, out, lse, mask)
    exact = reference(q, k, v, mask, None, x.dout)
    answers = (exact.out, exact.dq, exact.dk, exact.dv)
    for name, mine, answer in zip(NAMES, (out, *grads), answers, strict=True):
        assert answer is not None
        assert (mine - answer).abs().max() <= 1e-5 * answer.abs().max(), name


def test_one_key(tmp_path: Path) -> None:
    """P is 1 and dS is 0, the difference of two numbers that are computed in different ways."""
    x = draw(Shape(17, 1, 64, heads_kv=1), torch.float32, "cpu", "bhsd")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    out, lse = Emulated(spec_of(FORWARD, 64, "full"), tmp_path).forward(q, k, v, None)
    dq, dk, _ = Emulated(spec_of(GRADIENTS[0], 64, "full"), tmp_path).backward(
        x.dout, q, k, v, out, lse, None
    )
    assert torch.allclose(out, v.expand(out.shape), rtol=2e-7, atol=0)
    assert dq.pow(2).mean().sqrt() <= 3e-7
    assert dk.pow(2).mean().sqrt() <= 1e-6
