"""F.scaled_dot_product_attention on our kernels: what is taken, what is left to torch, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.runtime.integrations import sdpa as module

TORCH = F.scaled_dot_product_attention
TARGETS = [
    pytest.param("cpu", torch.float32, 2e-5, id="cpu-fp32"),
    pytest.param("cuda", torch.bfloat16, 3e-2, id="gpu-bf16", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_logged", set())
    yield
    attnforge.disable()
    assert TORCH is F.scaled_dot_product_attention


@pytest.fixture
def calls(masks_from: Callable[[ModuleType], list[Any]]) -> list[Any]:
    """The masks of the calls that our operator gets."""
    return masks_from(module)


def inputs(
    heads: int = 4, heads_kv: int = 4, seq_q: int = 33, seq_k: int = 33, dim: int = 16, **kinds: Any
) -> list[Tensor]:
    shapes = ((heads, seq_q), (heads_kv, seq_k), (heads_kv, seq_k))
    return [torch.randn(2, *shape, dim, **kinds).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({}, {}),
        ({"seq_k": 50}, {}),
        ({}, {"is_causal": True}),
        ({"heads_kv": 2}, {"enable_gqa": True, "is_causal": True}),
        ({}, {"scale": 0.7}),
        ({"dim": 20}, {}),
        ({"seq_k": 50}, {"mask": (33, 50)}),
        ({"heads_kv": 2}, {"mask": (2, 1, 33, 33), "enable_gqa": True}),
        ({}, {"mask": (4, 33, 33)}),
        ({}, {"mask": (2, 4, 1, 33)}),
        ({}, {"mask": (33, 1), "scale": 0.7}),
    ],
)
def test_same_as_torch(
    device: str, dtype: torch.dtype, tolerance: float, sizes: Any, arguments: Any, calls: list[Any]
) -> None:
    q, k, v = inputs(device=device, dtype=dtype, **sizes)
    arguments = dict(arguments)
    if shape := arguments.pop("mask", None):
        arguments["attn_mask"] = (
            torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device) < 0.6
        )
    results = []
    # Torch's own choice on Hopper, cuDNN, reads a mask of shape (33, 1) from misaligned addresses in its backward
    # (torch 2.11), and lets rows without a key see all keys; its math backend gives them zeros, as we do.
    for block in (sdpa_kernel(SDPBackend.MATH), attnforge.sdpa()):
        with block:
            out = F.scaled_dot_product_attention(q, k, v, **arguments)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert len(calls) == 1
    assert isinstance(calls[0], attnforge.Causal) == arguments.get("is_causal", False)
    assert isinstance(calls[0], attnforge.DenseMask) == ("attn_mask" in arguments)
    for theirs, ours in zip(*results, strict=True):
        assert (theirs - ours).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(
    ("sizes", "arguments", "reason"),
    [
        ({}, {"attn_mask": torch.zeros(33, 33)}, "attn_mask is added"),
        ({}, {"dropout_p": 0.5}, "dropout_p"),
        ({"seq_k": 50}, {"is_causal": True}, "unequal lengths"),
        ({"dim": 264}, {}, "head_dim 264"),
        ({}, {"scale": -1.0}, "scale is -1.0"),
        ({"dtype": torch.float64}, {}, "torch.float64"),
        ({"dtype": torch.float16}, {}, "torch.float16"),
        ({}, {"attn_mask": nn.Parameter(torch.ones(33, 33) > 0, requires_grad=False)}, "is a Parameter"),
        ({}, {"scale": torch.tensor(0.5)}, "scale is 0.5"),
        ({}, {"scale": True}, "scale is True"),
    ],
)
def test_the_rest_is_torchs_and_told_once(
    sizes: Any, arguments: Any, reason: str, calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = inputs(**sizes)
    with caplog.at_level(logging.WARNING, "attnforge"), attnforge.sdpa():
        for _ in range(2):
            torch.manual_seed(0)
            ours = F.scaled_dot_product_attention(q, k, v, **arguments)
    torch.manual_seed(0)
    assert torch.equal(ours, TORCH(q, k, v, **arguments))
    assert not calls
    assert [reason in record.message for record in caplog.records] == [True]


def test_odd_tensors_are_torchs(calls: list[Any]) -> None:
    class Wrapped(Tensor):
        pass

    q, k, v = (x.detach() for x in inputs())
    expected = TORCH(q, k, v)
    with attnforge.sdpa():
        F.scaled_dot_product_attention(q.as_subclass(Wrapped), k, v)
        F.scaled_dot_product_attention(q[0], k[0], v[0])
        F.scaled_dot_product_attention(q[:, :, :0], k, v)
        F.scaled_dot_product_attention(q, k[:1], v[:1])
        F.scaled_dot_product_attention(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3))
        mapped = torch.vmap(F.scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None])
    assert not calls
    assert (mapped[:, 0] - expected).abs().max() < 1e-5


def test_autocast_decides_the_dtype(calls: list[Any]) -> None:
    q, k, v = inputs()
    with attnforge.sdpa(), torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert len(calls) == 1


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, torch.float16), (torch.float64, torch.bfloat16)])
def test_autocast_to_what_we_lack(dtype: torch.dtype, cast: torch.dtype, calls: list[Any]) -> None:
    """The CPU has no float16 kernels, and autocast leaves float64 alone."""
    q, k, v = inputs(dtype=dtype)
    with torch.autocast("cpu", cast):
        theirs = TORCH(q, k, v)
        with attnforge.sdpa():
            ours = F.scaled_dot_product_attention(q, k, v)
    assert not calls
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def test_blocks_nest_and_enable_outlives_them() -> None:
    with attnforge.sdpa():
        ours = F.scaled_dot_product_attention
        assert ours is not TORCH
        with suppress(KeyError), attnforge.sdpa():
            assert F.scaled_dot_product_attention is ours
            raise KeyError
        assert F.scaled_dot_product_attention is ours
        attnforge.enable()
        attnforge.enable()
    assert F.scaled_dot_product_attention is ours
    attnforge.disable()
    assert TORCH is F.scaled_dot_product_attention
    attnforge.disable()


def test_threads_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with attnforge.sdpa():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with attnforge.sdpa():
        thread.start()
        assert inside.wait(10)
    assert F.scaled_dot_product_attention is not TORCH
    leave.set()
    thread.join()
    assert TORCH is F.scaled_dot_product_attention


def test_a_wrapper_around_ours_survives(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    monkeypatch.setattr(F, "scaled_dot_product_attention", TORCH)  # restored in the end
    attnforge.enable()
    ours = F.scaled_dot_product_attention

    def wrapper(*args: Any, **rest: Any) -> Tensor:
        return ours(*args, **rest)

    F.scaled_dot_product_attention = wrapper
    attnforge.disable()
    assert F.scaled_dot_product_attention is wrapper
    wrapper(q, k, v)
    assert not calls
    with attnforge.sdpa():
        F.scaled_dot_product_attention(q, k, v, torch.zeros(33, 33))
        F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 1
    monkeypatch.undo()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, calls: list[Any]) -> None:
    q, k, v = inputs()
    plain = torch.autograd.grad(TORCH(q, k, v).sum(), (q, k, v))
    with attnforge.sdpa():

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

        out = checkpoint(block, q, k, v, use_reentrant=reentrant)
        out.sum().backward()
    assert len(calls) == 2
    for x, gradient in zip((q, k, v), plain, strict=True):
        assert x.grad is not None
        assert (x.grad - gradient).abs().max() < 1e-5


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool, calls: list[Any]) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None) * 2

    with attnforge.sdpa():
        compiled = torch.compile(block, fullgraph=True, backend="eager", dynamic=dynamic)
        for length in (33, 41):
            q, k, v = (x.detach() for x in inputs(seq_q=length, seq_k=length))
            mask = torch.rand(length, length) < 0.7
            assert (compiled(q, k, v) - 2 * TORCH(q, k, v, is_causal=True)).abs().max() < 1e-5
            assert (compiled(q, k, v, mask) - 2 * TORCH(q, k, v, mask)).abs().max() < 1e-5
    assert {type(mask) for mask in calls} == {attnforge.Causal, attnforge.DenseMask}
