"""Calls at the edge: no batch, no queries, no keys, head_dim 1, any strides; eager and traced, as SDPA has them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime.masks import AnyMask, load_operators


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16
EMPTY = {"batch": (0, 5, 7), "queries": (2, 0, 7), "keys": (2, 5, 0), "both": (1, 0, 0)}


def mask_of(kind: str, seq_q: int, seq_k: int, device: str) -> AnyMask:
    if kind == "spans":
        starts = torch.zeros(seq_k, dtype=torch.int32, device=device)
        return attnforge.Spans(starts, starts + seq_q)
    if kind == "dense":
        return attnforge.DenseMask(torch.ones(seq_q, seq_k, dtype=torch.bool, device=device))
    return attnforge.Causal() if kind == "causal" else None


@devices
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize("what", EMPTY)
def test_empty_calls(device: str, compiled: bool, kind: str, what: str) -> None:
    """Empty results, or zeros where there are queries but no keys; gradients of every input, as from SDPA."""
    batch, seq_q, seq_k = EMPTY[what]
    shapes = ((4, seq_q, 16), (2, seq_k, 16), (2, seq_k, 24))
    q, k, v = (torch.randn(batch, *s, device=device, dtype=DTYPE, requires_grad=True) for s in shapes)
    mask = mask_of(kind, seq_q, seq_k, device)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attnforge.attention(q, k, v, mask, return_lse=True)

    out, lse = (
        torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v) if compiled else step(q, k, v)
    )
    with sdpa_kernel(SDPBackend.MATH):  # torch 2.11's own choice on a GPU fails without a batch
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert torch.equal(out, attnforge.attention(q, k, v, mask))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert lse.shape == (batch, 4, seq_q)
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@devices
def test_empty_drop_ins(device: str) -> None:
    q, k = (torch.randn(n, 2, 16, device=device, dtype=DTYPE, requires_grad=True) for n in (0, 6))
    none, some = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 0, 0], [0, 0, 6]))
    assert attnforge.flash_attn_varlen_func(q, k, k, none, some, causal=True).shape == (0, 2, 16)
    out = attnforge.flash_attn_varlen_func(k, q, q, some, none)
    assert torch.equal(out, torch.zeros_like(k))
    rows = attnforge.flash_attn_func(k[None], q[None], q[None], window_size=(2, 0))
    assert torch.equal(rows, torch.zeros_like(k[None]))


def layout(shape: tuple[int, int, int, int], chance: random.Random) -> Tensor:
    """Any order of axes, padding between rows, slices and expanded axes; the last stride is 1 as far as it is used."""
    order = (*chance.choice(list(itertools.permutations(range(3)))), 3)
    sizes = [shape[axis] for axis in order]
    sizes[3] += chance.choice((0, 0, 1, 4))
    sizes[chance.randrange(3)] += chance.choice((0, 1))
    x = torch.randn(sizes).permute([order.index(axis) for axis in range(4)])
    x = x[: shape[0], : shape[1], : shape[2], : shape[3]]
    if chance.random() < 0.2:
        axis = chance.randrange(3)
        x = x.narrow(axis, 0, 1).expand(shape)
    return x


def test_strides_of_fake_results_are_the_real_ones() -> None:
    """What a trace takes for granted: axes of size 1 aside, whose strides are never used."""
    load_operators()
    chance = random.Random(0)
    forward, backward = torch.ops.attnforge.forward.default, torch.ops.attnforge.backward.default
    for _ in range(150):
        b, g, h, s, t, d = (chance.choice(pair) for pair in ((1, 2), (1, 2), (1, 2), (1, 5), (1, 6), (1, 8)))
        q, k = layout((b, g * h, s, d), chance), layout((b, g, t, d), chance)
        v = layout((b, g, t, chance.choice((d, 1))), chance)
        out, lse = forward(q, k, v, None, 0, None)
        dout = layout(tuple(out.shape), chance)
        real = (out, lse, *backward(dout, q, k, v, out, lse, None, 0, None))
        with FakeTensorMode() as mode:
            q, k, v, dout = (mode.from_tensor(x) for x in (q, k, v, dout))
            out, lse = forward(q, k, v, None, 0, None)
            fake = (out, lse, *backward(dout, q, k, v, out, lse, None, 0, None))
        for a, x in zip(real, fake, strict=True):
            assert a.shape == x.shape
            assert all(m == n for m, n, size in zip(a.stride(), x.stride(), a.shape, strict=True) if size > 1)


@devices
def test_head_dim_1(device: str) -> None:
    """A contiguous tensor's last stride need not be 1 then; results are right, eager and compiled."""
    x = torch.randn(1, 3, 1, 5, generator=torch.Generator().manual_seed(0)).to(device)
    x = x.transpose(2, 3).contiguous().requires_grad_()

    def step(x: Tensor) -> Tensor:
        return attnforge.attention(x * 2, x, x + 1)

    wide = x.detach().double().requires_grad_()
    exact = F.scaled_dot_product_attention(wide * 2, wide, wide + 1)
    (grad_exact,) = torch.autograd.grad(exact.square().sum(), wide)
    for run in (step, torch.compile(step, fullgraph=True)):
        out = run(x)
        torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-5)
        # Products of tensor cores are right to 2^-21, and larger ones than the gradient cancel in it.
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert (grad - grad_exact).abs().max() <= 1e-5 * grad_exact.abs().max()
