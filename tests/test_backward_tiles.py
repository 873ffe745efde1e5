"""The Hopper backward with tiles of 80 queries, which computes dQ transposed. tests/test_backward_pipeline.py too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import Shape, draw, make_mask

from attnforge.codegen.plan import Infeasible, make_plan
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.codegen.tuning import Sm90Backward
from attnforge.runtime import kernels, ops
from attnforge.runtime.reference import reference

TUNING = Sm90Backward(80, 128, 3, 2, False, 0, True, False, False)
LIMIT = 1.2e-2  # of the rms of a gradient, the rms error; bf16 inputs and factors give about 0.004
# Queries and keys that end within a tile, at its end, and a row after it.
SHAPES = [
    Shape(1, 1, 128),
    Shape(80, 128, 128, group=7),
    Shape(81, 129, 128, group=7, batch=2),
    Shape(333, 590, 128, heads_kv=1, group=7),
    Shape(1003, 777, 128, heads_kv=2, group=7, batch=2),
]


def problem(mask: Mask, head_dim: int = 128) -> Problem:
    return Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)


def of_80(mask: Mask) -> list[Spec]:
    return [spec for spec in candidates(problem(mask)) if spec.tuning.tile_m == 80]


def test_the_plan_by_hand() -> None:
    plan = make_plan(Spec(problem(Mask.FULL), TUNING))
    # K and V, three of Q with statistics and visit, two of dO, dS, dQ in fp32.
    buffers = 2 * 128 * 256 + 3 * (80 * (256 + 8) + 8) + 2 * 80 * 256 + 80 * 256 + 80 * 512
    # Barriers: K, V, full dS of both, empty dS, the first P; two of each Q and dO; two of each dQ.
    assert plan.launches[1].shared_bytes == buffers + 8 * (2 + 2 + 2 + 2 * (3 + 2) + 2 * 2)
    # dK and dV 128, P and dP 40 each, 16 queries of P packed; 28 beside them.
    assert plan.registers == 128 + 80 + 4 + 28


@pytest.mark.parametrize(
    ("where", "changes", "reason"),
    [
        (problem(Mask.FULL), {"tile_m": 96}, "tile_m 96: must be 64, .* or 80"),
        (problem(Mask.FULL, 64), {}, "tile_m 80: takes head_dim 128"),
        (problem(Mask.DENSE), {}, "tile_m 80: must be a multiple of 32"),
        (problem(Mask.FULL), {"lag": True}, "tile_m 80: has no lag"),
        (problem(Mask.FULL), {"stages": 2}, "stages 2: with tile_m 80 .* takes 3"),
        (problem(Mask.FULL), {"stages_dout": 3}, "19528 more than sm90a has"),
        (problem(Mask.FULL), {"in_regs": 1}, "more than fit"),
    ],
)
def test_what_it_cannot_do_is_said(where: Problem, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(where, replace(TUNING, **changes)))  # type: ignore[arg-type]


def test_the_search_tries_it_after_the_untuned_choice() -> None:
    tunings = [spec.tuning for spec in of_80(Mask.CAUSAL)]
    flags = [(t.split_heads, t.ordered, t.descending) for t in tunings if isinstance(t, Sm90Backward)]
    plain = [(split, False, late) for split in (True, False) for late in (False, True)]
    assert flags == [*plain, (True, True, False)]
    assert not of_80(Mask.DENSE)
    for mask in Mask:
        deterministic = (s for s in candidates(problem(mask)) if make_plan(s).deterministic)
        firsts = next(candidates(problem(mask))), next(deterministic)
        assert [spec.tuning.tile_m for spec in firsts] == [64, 64]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.SPANS], ids=lambda mask: mask.value)
def test_gradients(mask: Mask) -> None:
    """All variants against float64; those with ordered sums give the same bits again."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    for shape in SHAPES:
        x = draw(shape, torch.bfloat16, "cuda")
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        visible = make_mask(mask.value, shape.seq_q, shape.seq_k, "cuda")
        exact = reference(q, k, v, visible, dout=x.dout)
        out, lse = ops.forward(q, k, v, visible)
        for spec in of_80(mask):
            handle, fixed = kernels.load(spec, device), make_plan(spec).deterministic
            runs = [ops.backward(x.dout, q, k, v, out, lse, visible, None, fixed, handle) for _ in range(2)]
            for name, grad, again, answer in zip("qkv", *runs, (exact.dq, exact.dk, exact.dv), strict=True):
                assert answer is not None
                error, size = (y.double().square().mean().sqrt().item() for y in (grad - answer, answer))
                assert error <= LIMIT * size + 1e-4, f"d{name} {shape} {spec.to_cli()}: {error} of {size}"
                assert not fixed or torch.equal(grad, again), f"d{name} {shape} {spec.to_cli()}"
