"""The short ways into the operators: what they leave out is what would have done nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Shape, draw, make_mask
from torch import Tensor
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import attnforge
from attnforge.runtime import ops
from attnforge.runtime.native.operators import operators

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
kinds = pytest.mark.parametrize("kind", ["full", "causal", "spans"])
DTYPE = torch.bfloat16
MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)
modes = pytest.mark.parametrize("mode", MODES)
Mode = Callable[[], AbstractContextManager[object]]


@pytest.fixture(autouse=True)
def loaded() -> None:
    operators()


@devices
@kinds
def test_opcheck(device: str, kind: str) -> None:
    x = draw(Shape(group=2), DTYPE, device)
    data, _, visible = ops.unpack_mask(make_mask(kind, 65, 65, device), x.q, x.k)
    op = getattr(torch.ops.attnforge, f"attend_{kind}").default
    rest = (data, visible) if kind == "spans" else ()
    for scale in ((), (0.2,)):
        torch.library.opcheck(op, (x.q, x.k, x.v, *rest, *scale))


@devices
@kinds
@modes
def test_default_scale_is_the_same_said_or_not(device: str, kind: str, mode: Mode) -> None:
    x = draw(Shape(group=2, head_dim=64), DTYPE, device)
    mask = make_mask(kind, 65, 65, device)
    with mode():
        short = attnforge.attention(x.q, x.k, x.v, mask)
        said = attnforge.attention(x.q, x.k, x.v, mask, scale=0.125)
        long = attnforge.attention(x.q, x.k, x.v, mask, scale=0.125, deterministic=True)
        other = attnforge.attention(x.q, x.k, x.v, mask, scale=0.5)
    assert torch.equal(short, said)
    assert torch.equal(short, long)
    assert not torch.equal(short, other)
    assert short.requires_grad == said.requires_grad == long.requires_grad == (mode is torch.enable_grad)
    assert short.is_inference() == (mode is torch.inference_mode)
    if mode is torch.enable_grad:
        for mine, theirs in zip(x.grads(short), x.grads(long), strict=True):
            assert torch.allclose(mine, theirs)  # one of them deterministic


@kinds
@pytest.mark.parametrize("scale", [None, 0.2])
def test_they_are_short(kind: str, scale: float | None) -> None:
    """The lse is no output of the graph where nobody gets it: so the dispatcher was not asked for `forward`."""
    x = draw(Shape(), DTYPE, "cpu")
    mask = make_mask(kind, 65, 65, "cpu")
    out = attnforge.attention(x.q, x.k, x.v, mask, scale=scale)
    both, _ = attnforge.attention(x.q, x.k, x.v, mask, scale=scale, return_lse=True)
    assert [len(y.grad_fn._input_metadata) for y in (out, both)] == [1, 2]  # type: ignore[union-attr]


@kinds
@modes
def test_profilers_see_forward(kind: str, mode: Mode) -> None:
    x = draw(Shape(), DTYPE, "cpu")
    with mode(), profile(activities=[ProfilerActivity.CPU]) as seen:
        attnforge.attention(x.q, x.k, x.v, make_mask(kind, 65, 65, "cpu"))
    assert "attnforge::forward" in {event.name for event in seen.events() or []}


class Wrapped(Tensor):
    """A tensor that stands for another one and notes what is done with it, as distributed ones do."""

    operators: list[str]
    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> Wrapped:
        wrapped: Wrapped = Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype)
        wrapped.content, wrapped.operators = content, []
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the operator
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in args:
            if isinstance(x, Wrapped):
                x.operators.append(str(op))
        return op(*(x.content if isinstance(x, Wrapped) else x for x in args), **(kwargs or {}))


@kinds
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_subclasses_see_forward(kind: str, which: int) -> None:
    x = draw(Shape(), DTYPE, "cpu")
    inputs = [x.q.detach(), x.k.detach(), x.v.detach()]
    mask = make_mask(kind, 65, 65, "cpu")
    expected = attnforge.attention(inputs[0], inputs[1], inputs[2], mask)
    wrapped = inputs[which] = Wrapped(inputs[which])
    assert torch.equal(attnforge.attention(inputs[0], inputs[1], inputs[2], mask), expected)
    assert wrapped.operators == ["attnforge.forward.default"]


@kinds
def test_autocast_is_not_left_out(kind: str) -> None:
    x = draw(Shape(), torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out = attnforge.attention(x.q, x.k, x.v, make_mask(kind, 65, 65, "cpu"))
    assert out.dtype == torch.bfloat16


def test_lazy_negation_is_not_left_out() -> None:
    x = draw(Shape(), DTYPE, "cpu")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    negative = torch._neg_view(q)
    assert negative.is_neg()
    assert torch.equal(attnforge.attention(negative, k, v), attnforge.attention(-q, k, v))


def test_vmap_goes_entry_by_entry() -> None:
    x = draw(Shape(), DTYPE, "cpu")
    k, v = x.k.detach(), x.v.detach()
    many = torch.stack([x.q.detach(), 2 * x.q.detach()])
    outs = torch.vmap(lambda q: attnforge.attention(q, k, v))(many)
    assert torch.equal(outs, torch.stack([attnforge.attention(q, k, v) for q in many]))


def test_nothing_is_recorded_below_autograd() -> None:
    x = draw(Shape(), DTYPE, "cpu")
    with torch._C._AutoDispatchBelowAutograd():
        assert not attnforge.attention(x.q, x.k, x.v).requires_grad


@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("call", [attnforge.attention, lambda q, k, v: ops.forward(q, k, v, None)])
def test_tangents_are_refused(which: int, call: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    x = draw(Shape(), DTYPE, "cpu")
    inputs = [x.q.detach(), x.k.detach(), x.v.detach()]
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises(NotImplementedError, match="forward mode"):
            call(inputs[0], inputs[1], inputs[2])


@kinds
def test_memory_of_somebody_else(kind: str) -> None:
    """Results go into torch's memory whatever q lies in: numpy's has no allocator of torch's."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((1, 2, 65, 64), dtype=np.float32) for _ in range(3)]
    q, k, v = (torch.from_numpy(array).requires_grad_() for array in arrays)
    mask = make_mask(kind, 65, 65, "cpu")
    out = attnforge.attention(q, k, v, mask)
    copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = attnforge.attention(copies[0], copies[1], copies[2], mask)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for mine, theirs in zip(grads, torch.autograd.grad(expected.sum(), copies), strict=True):
        assert torch.equal(mine, theirs)


@devices
def test_results_hold_no_memory_but_their_own(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    with torch.no_grad():
        out, lse = attnforge.attention(x.q, x.k, x.v, return_lse=True)
        short = attnforge.attention(x.q, x.k, x.v)
    for result in (out, lse, short):
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
        assert (result.storage_offset(), result._version) == (0, 0)


@pytest.mark.gpu
@kinds
def test_results_come_from_torchs_allocator(kind: str) -> None:
    """What a call allocates, the allocator counts, and gets back."""
    x = draw(Shape(), DTYPE, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    mask = make_mask(kind, 65, 65, "cuda")
    attnforge.attention(q, k, v, mask)
    before = torch.cuda.memory_allocated()
    out = attnforge.attention(q, k, v, mask)
    kept = torch.cuda.memory_allocated() - before
    assert out.nbytes <= kept < out.nbytes + 512
    del out
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_addresses_sizes_and_strides_in_turns() -> None:
    """Tensor maps are kept by sizes and strides, and moved to each call's addresses: more of them than are kept."""
    cases = []
    for rows in range(64, 64 + 4 * 40, 4):
        for packed in (False, True):
            shape = (1, rows, 2, 64) if packed else (1, 2, rows, 64)
            qkv = [torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(3)]
            q, k, v = (y.transpose(1, 2) if packed else y for y in qkv)
            cases.append((q, k, v, attnforge.attention(q.contiguous(), k.contiguous(), v.contiguous())))
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(cases)), 4))
    for index in order:
        q, k, v, expected = cases[index]
        assert torch.equal(attnforge.attention(q, k, v), expected)
        moved = q.clone(memory_format=torch.preserve_format)
        assert torch.equal(attnforge.attention(moved, k, v), expected)
