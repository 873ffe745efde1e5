"""The Hopper forward where V has a head_dim of its own, on a GPU. Its plans and barriers are tested beside others'."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from oracle import Inputs, Shape, draw, make_mask

from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.build import cache
from attnforge.runtime.search.reference import reference

# DeepSeek's first; both orders, rows of whole panels and not, more panels of V than of K.
DIMS = ((192, 128), (128, 64), (96, 128), (40, 136), (256, 16), (24, 256), (192, 136))
# Lengths just past and just short of tiles; one query or key; more queries than keys and fewer; several rounds of work.
SHAPES = (
    Shape(1, 1),
    Shape(385, 130, heads_kv=1, group=7),
    Shape(127, 1000, group=4),
    Shape(1000, 257, group=2, batch=3),
    Shape(901, 1300, group=7, batch=5),
)
# Of the first pair, beside its first guesses: one to three consumers, buffers of Q, Q in registers or not.
VARIANTS = (
    (Mask.FULL, Sm90Forward(64, 128, 2, False, False, False, False)),
    (Mask.FULL, Sm90Forward(128, 96, 2, True, True, False, False)),
    (Mask.FULL, Sm90Forward(192, 64, 3, False, True, False, False)),
    (Mask.CAUSAL, Sm90Forward(128, 128, 2, True, True, False, False)),
    (Mask.CAUSAL, Sm90Forward(192, 64, 3, True, True, False, False)),
    (Mask.SPANS, Sm90Forward(192, 64, 3, False, True, False, False)),
    (Mask.SPANS, Sm90Forward(128, 112, 2, False, True, False, True)),
    (Mask.DENSE, Sm90Forward(128, 96, 2, False, True, False, False)),
)


def problem_of(head_dim: int, dim_v: int, mask: Mask, dtype: DType = DType.BFLOAT16) -> Problem:
    return Problem(Direction.FORWARD, Arch.SM90A, dtype, head_dim, mask, 16, dim_v)


def check(spec: Spec) -> None:
    """Against float64, in tensors whose rows lie among others'; twice, with the same bits."""
    device, p = torch.device("cuda"), spec.problem
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    handle = kernels.load(spec, device)
    for shape in SHAPES:
        shape = replace(shape, head_dim=p.head_dim, dim_v=p.dim_v)
        x: Inputs = draw(shape, kernels.TORCH_DTYPES[p.dtype], "cuda", "slice")
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        mask = make_mask(p.mask.value, shape.seq_q, shape.seq_k, "cuda")
        exact = reference(q, k, v, mask)
        empty = exact.lse == -torch.inf
        out, lse = ops.forward(q, k, v, mask, variant=handle)
        assert out.shape == exact.out.shape
        assert (out - exact.out).abs().le(1e-2 + 1e-2 * exact.out.abs()).all(), shape
        assert not out[empty].any(), shape
        assert torch.equal(lse == -torch.inf, empty), shape
        assert (lse - exact.lse)[~empty].abs().le(2e-3).all(), shape
        assert all(map(torch.equal, ops.forward(q, k, v, mask, variant=handle), (out, lse))), shape


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "mask"), list(product(DIMS, Mask)), ids=str)
def test_first_guesses(dims: tuple[int, int], mask: Mask) -> None:
    check(next(candidates(problem_of(*dims, mask))))


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "tuning"), VARIANTS, ids=str)
def test_other_variants(mask: Mask, tuning: Sm90Forward) -> None:
    check(Spec(problem_of(*DIMS[0], mask), tuning))


@pytest.mark.gpu
def test_fp16() -> None:
    check(next(candidates(problem_of(*DIMS[0], Mask.CAUSAL, DType.FLOAT16))))


@pytest.mark.nvcc
@pytest.mark.parametrize("dims", [(40, 136), (192, 136)], ids=str)
def test_rows_of_v_that_end_in_half_a_matrix(dims: tuple[int, int]) -> None:
    assert cache.obtain(render(next(candidates(problem_of(*dims, Mask.FULL))))).path.exists()


def test_all_variants_are_feasible() -> None:
    """What a GPU would be asked for above."""
    for mask, tuning in VARIANTS:
        assert Spec(problem_of(*DIMS[0], mask), tuning) in list(candidates(problem_of(*DIMS[0], mask)))
