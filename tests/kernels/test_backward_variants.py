"""The Hopper backward's variants: plans by hand, what is refused, and gradients of each way to keep sums."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from oracle import Shape, draw, make_mask

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.fitting import without_sums
from attnforge.runtime.search.reference import reference

TUNING = Sm90Backward(64, 128, 3, 2, False, 0, True, False)
LIMIT = 1.2e-2  # of the rms of a gradient, the rms error; bf16 inputs and factors give about 0.004
# Queries and keys that end within a tile, at its end, and a row after it.
SHAPES = [
    Shape(1, 1, 128),
    Shape(64, 128, 128, group=7),
    Shape(65, 129, 128, group=7, batch=2),
    Shape(333, 590, 128, heads_kv=1, group=7),
    Shape(1003, 777, 128, heads_kv=2, group=7, batch=2),
    Shape(1003, 777, 128, heads_kv=3, batch=2),
]


def problem(mask: Mask, head_dim: int = 128) -> Problem:
    return Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)


def test_the_plan_by_hand() -> None:
    plan = make_plan(Spec(problem(Mask.FULL), TUNING))
    # K and V, three of Q with row_stats and visit, two of dO, two of dS, dQ in fp32.
    buffers = 2 * 128 * 256 + 3 * (64 * (256 + 32) + 8) + 2 * 64 * 256 + 2 * 64 * 256 + 64 * 512
    # Barriers: K, V, full dS; two of each Q and dO; two of each dQ.
    assert plan.launches[1].shared_bytes == buffers + 8 * (3 + 2 * (3 + 2) + 2 * 2)
    # dK and dV 128, P and dP 32 each, P packed 16; 28 beside them.
    assert plan.registers == 128 + 64 + 16 + 28
    # Deterministic sums: two barriers for a full dQ.
    deterministic = make_plan(Spec(problem(Mask.FULL), replace(TUNING, deterministic=True)))
    assert deterministic.launches[1].shared_bytes == plan.launches[1].shared_bytes + 8 * 2


def test_the_plan_with_lag_by_hand() -> None:
    plan = make_plan(Spec(problem(Mask.FULL, 64), Sm90Backward(64, 128, 4, 4, True, 2, False, False)))
    # K and V, four of Q with row_stats and visit, four of dO, four of dS, dQ in fp32 of both consumers.
    buffers = 2 * 128 * 128 + 4 * (64 * (128 + 32) + 8) + 4 * 64 * 128 + 4 * 64 * 256 + 2 * 64 * 256
    assert plan.launches[1].shared_bytes == buffers + 8 * (3 + 2 * (4 + 4) + 2 * 2)
    # dK and dV 64, K and V 16 each; the next S 32, P and dS packed 16 each, dP or dQ 32, and 16; 28 beside them.
    assert plan.registers == 64 + 32 + 32 + 32 + 32 + 16 + 28


@pytest.mark.parametrize("head_dim", range(16, 129, 8))
def test_the_consumers_compute_every_column_of_dq(head_dim: int) -> None:
    """As the kernel's constants say: where each begins, how many columns it computes, which of them it hands over."""
    source = render(Spec(problem(Mask.FULL, head_dim), TUNING))
    values = dict(re.findall(r"^constexpr int (k\w+) = ([^;]+);", source.text, re.MULTILINE))
    computed, columns, panels = (int(values[name]) for name in ("kDqColumns", "kColumns", "kPanels"))
    starts = {"kDqColumns": computed, "kMain - kDqColumns": columns * panels - computed}
    second = starts[values["kDqSecond"]]
    assert (
        second <= computed < head_dim <= second + computed
    )  # the second hands over those from `computed` on
    # An operand begins where a panel does, or lies within the only panel.
    assert second % columns == 0 or panels == 1
    assert second % 8 == computed % 8 == 0


@pytest.mark.parametrize(
    ("where", "changes", "reason"),
    [
        (problem(Mask.FULL), {"tile_m": 128}, "tile_m 128: must be 64"),
        (problem(Mask.FULL), {"tile_n": 64}, "tile_n 64: must be 128"),
        (problem(Mask.FULL), {"stages": 1}, "stages 1: must be at least 2"),
        (problem(Mask.FULL), {"stages_dout": 5}, "stages_dout 5: must be 1 to 4"),
        (problem(Mask.FULL), {"stages": 4, "stages_dout": 3}, "21704 more than sm90a has"),
        (problem(Mask.FULL), {"in_regs": 1}, "28 more than are available"),
        (problem(Mask.FULL, 64), {"lag": True, "stages_dout": 1}, "stages_dout 1: .* at least 2 with lag"),
        (problem(Mask.DENSE), {"split_heads": False}, "dense mask: needs split_heads"),
        (problem(Mask.CAUSAL), {"stores_dkv": 1}, "stores_dkv: needs split_heads, a mask with lists"),
        (problem(Mask.SPANS), {"stores_dkv": 1, "deterministic": True}, "stores_dkv: needs .* any order"),
        (problem(Mask.SPANS), {"stores_dkv": 1, "split_heads": False}, "stores_dkv: needs split_heads"),
        (problem(Mask.SPANS), {"stores_dkv": 2}, "stores_dkv 2: must be 0 or 1"),
    ],
)
def test_what_it_cannot_do_is_said(where: Problem, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(where, replace(TUNING, **changes)))  # type: ignore[arg-type]


def ways(mask: Mask) -> list[Spec]:
    """Of the search space, every way to keep sums, with the buffers tried first, and `without_sums` of each."""
    flags = product((False, True), repeat=2)
    wanted = {replace(TUNING, split_heads=h, deterministic=o) for h, o in flags}
    found = [spec for spec in candidates(problem(mask)) if spec.tuning in wanted]
    return list(dict.fromkeys((*found, *(without_sums(spec, 1) for spec in found))))


@pytest.mark.parametrize(
    ("mask", "count"), [(Mask.FULL, 4), (Mask.CAUSAL, 4), (Mask.SPANS, 5), (Mask.DENSE, 3)]
)
def test_the_space_has_every_way_to_keep_sums(mask: Mask, count: int) -> None:
    specs = ways(mask)
    assert len(specs) == count
    assert specs[0] == next(candidates(problem(mask)))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("mask", "planes"), [(Mask.SPANS, False), (Mask.DENSE, False), (Mask.DENSE, True)])
def test_a_key_that_all_queries_see(mask: Mask, planes: bool, group: int) -> None:
    """Key tiles with far more visits than others, which several blocks share, against float64.

    Others have a block for each q head, which stores dK and dV if heads have no group. `planes`: other keys for each
    head.
    """
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    shape = Shape(8200, 8200, 128, heads_kv=2, group=group)
    x = draw(shape, torch.bfloat16, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    starts = torch.arange(shape.seq_k, dtype=torch.int32, device=device)
    ends = starts + 100
    for key in (0, 3000, 8199):
        starts[key], ends[key] = 0, shape.seq_q
    visible: attnforge.Spans | attnforge.DenseMask = attnforge.Spans(starts, ends)
    if mask is Mask.DENSE:
        pairs = visible.visible(shape.seq_q, shape.seq_k).to(device)
        shifted = [pairs.roll(1000 * head, 1) for head in range(shape.heads_kv * group if planes else 1)]
        visible = attnforge.DenseMask(torch.stack(shifted)[None])
    exact = reference(q, k, v, visible, dout=x.dout)
    out, lse = ops.forward(q, k, v, visible)
    cut = [spec for spec in ways(mask) if make_plan(spec).cut_lists]
    assert cut
    for spec in cut:
        grads = ops.backward(x.dout, q, k, v, out, lse, visible, None, False, kernels.load(spec, device))
        for name, grad, answer in zip("qkv", grads, (exact.dq, exact.dk, exact.dv), strict=True):
            assert answer is not None
            error, size = (y.double().square().mean().sqrt().item() for y in (grad - answer, answer))
            assert error <= LIMIT * size + 1e-4, f"d{name} {spec.to_cli()}: {error} of {size}"


@pytest.mark.gpu
@pytest.mark.parametrize("mask", list(Mask), ids=lambda mask: mask.value)
def test_gradients(mask: Mask) -> None:
    """All ways against float64; those with deterministic sums give the same bits again."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("wgmma is Hopper's")
    for shape in SHAPES:
        x = draw(shape, torch.bfloat16, "cuda")
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        visible = make_mask(mask.value, shape.seq_q, shape.seq_k, "cuda")
        exact = reference(q, k, v, visible, dout=x.dout)
        out, lse = ops.forward(q, k, v, visible)
        for spec in ways(mask):
            handle, fixed = kernels.load(spec, device), make_plan(spec).deterministic
            runs = [ops.backward(x.dout, q, k, v, out, lse, visible, None, fixed, handle) for _ in range(2)]
            for name, grad, again, answer in zip("qkv", *runs, (exact.dq, exact.dk, exact.dv), strict=True):
                assert answer is not None
                error, size = (y.double().square().mean().sqrt().item() for y in (grad - answer, answer))
                assert error <= LIMIT * size + 1e-4, f"d{name} {shape} {spec.to_cli()}: {error} of {size}"
                assert not fixed or torch.equal(grad, again), f"d{name} {shape} {spec.to_cli()}"
