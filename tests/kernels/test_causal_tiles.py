"""The Hopper forward of causal masks: tiles from the end, warpgroups that begin later. test_pipeline.py too."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from oracle import Shape, draw

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.reference import reference

# Persistent and not, with one, two and three consumers; hidden key tiles handed back: none, one, two; one buffer of Q.
VARIANTS = [
    (128, Sm90Forward(192, 80, 2, True, True, False, False)),
    (128, Sm90Forward(192, 64, 3, False, True, False, False)),
    (128, Sm90Forward(192, 80, 3, True, True, False, False)),
    (128, Sm90Forward(128, 176, 2, False, True, False, False)),
    (64, Sm90Forward(192, 128, 2, True, True, False, False)),
    (64, Sm90Forward(192, 128, 2, True, False, False, False)),
    (64, Sm90Forward(128, 128, 2, True, True, False, True)),
    (64, Sm90Forward(64, 96, 3, False, True, False, True)),
    (72, Sm90Forward(192, 96, 3, True, True, False, True)),
]
# Queries that end within a warpgroup's rows and a tile, at their ends, and a row after; more keys than queries and
# fewer (then the first queries see none); fewer and more pieces of work than a GPU has multiprocessors.
SHAPES = [
    Shape(1, 1),
    Shape(1, 300),
    Shape(300, 1, heads_kv=3),
    Shape(64, 64, group=7),
    Shape(200, 200, group=7, batch=2),
    Shape(193, 385, group=2),
    Shape(577, 449, group=2, batch=9),
    Shape(449, 577, group=2, batch=9),
    Shape(1000, 130, heads_kv=1, group=4),
    Shape(1024, 1024, group=7, batch=8),
]
PROBLEM = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.CAUSAL)


def test_who_begins_later() -> None:
    """Only where a buffer is left for the tiles that are handed back while the last product runs."""
    for spec in islice(candidates(PROBLEM), 300):
        plan, tuning = make_plan(spec), spec.tuning
        assert isinstance(tuning, Sm90Forward)
        hidden = -(-(tuning.tile_m - 64) // tuning.tile_n)
        assert plan.from_end
        assert plan.staggered == (0 < hidden < tuning.stages), spec.to_cli()
    others = [replace(PROBLEM, mask=mask) for mask in Mask if mask is not Mask.CAUSAL]
    plans = [make_plan(next(candidates(problem))) for problem in others]
    assert not any(plan.from_end or plan.staggered or plan.alternating for plan in plans)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "tuning"), VARIANTS, ids=[f"{d}-{t.tile_m}x{t.tile_n}x{t.stages}" for d, t in VARIANTS]
)
def test_forward(head_dim: int, tuning: Sm90Forward) -> None:
    """Against float64; several times over, as blocks and warpgroups run at speeds of their own."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.CAUSAL)
    handle = kernels.load(Spec(problem, tuning), device)
    for shape in SHAPES:
        x = draw(replace(shape, head_dim=head_dim), torch.bfloat16, "cuda", "slice")
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        exact = reference(q, k, v, attnforge.Causal())
        empty = exact.lse == -torch.inf
        first = None
        for _ in range(3):
            out, lse = ops.forward(q, k, v, attnforge.Causal(), variant=handle)
            assert (out - exact.out).abs().max().item() < 2e-2, shape
            assert torch.equal(lse == -torch.inf, empty), shape
            assert not out[empty].any(), shape
            assert (lse - exact.lse)[~empty].abs().max().item() < 2e-3, shape
            assert first is None or torch.equal(out, first), shape
            first = out
