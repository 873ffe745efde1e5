"""torch's registry of flash attentions: our functions beside torch's on the same arguments, and on a GPU for real."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime.integrations import torch_backend

registry: Any = nn.attention


@pytest.fixture
def registered() -> None:
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no register_flash_attention_impl")
    attnforge.register_torch()


def test_it_is_activated_and_restored(registered: None) -> None:
    """Also in a torch without CUDA, which has no kernels that ours would replace."""
    registry.activate_flash_attention_impl("attnforge")
    try:
        assert registry.current_flash_attention_impl() == "attnforge"
    finally:
        registry.restore_flash_attention_impl()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_on_torchs_list(registered: None) -> None:
    assert "attnforge" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() != "attnforge"  # until the user says so


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_functions(causal: bool) -> None:
    q, k, v, dout = (
        draw(2, 4, 33, 16),
        draw(2, 2, 33, 16, seed=1),
        draw(2, 2, 33, 16, seed=2),
        draw(2, 4, 33, 16, seed=3),
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    a, b, c = leaves
    expected = F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=0.4, enable_gqa=True)
    gradients = torch.autograd.grad(expected, leaves, dout)
    out, lse, _, _, max_q, max_k, seed, offset, debug = torch_backend.scaled_forward(
        q, k, v, 0.0, causal, scale=0.4
    )
    assert (max_q, max_k, debug.numel()) == (33, 33, 0)
    assert (out - expected).abs().max() < 1e-5
    ours = torch_backend.scaled_backward(
        dout, q, k, v, out, lse, None, None, 33, 33, 0.0, causal, seed, offset, scale=0.4
    )
    for one, other in zip(ours, gradients, strict=True):
        assert (one - other).abs().max() < 1e-4


@pytest.mark.parametrize("window", [(None, None), (-1, 0), (5, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_functions(packed: bool, window: tuple[int | None, int | None]) -> None:
    """(B, S, H, D), and two documents packed."""
    row = torch.arange(20)
    left, right = (20 if side in (None, -1) else side for side in window)
    visible = (row[None] >= row[:, None] - left) & (row[None] <= row[:, None] + right)
    shape = (40,) if packed else (2, 20)
    q, k, v, dout = (draw(*shape, heads, 16, seed=i) for i, heads in enumerate((4, 2, 2, 4)))
    cu = torch.tensor([0, 20, 40], dtype=torch.int32) if packed else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    a, b, c = (x.view(2, 20, -1, 16).transpose(1, 2) for x in leaves)
    expected = F.scaled_dot_product_attention(a, b, c, visible, enable_gqa=True)
    expected = expected.transpose(1, 2).reshape(q.shape)
    gradients = torch.autograd.grad(expected, leaves, dout)
    sizes: Any = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, seed, offset, _ = torch_backend.forward(q, k, v, cu, cu, 20, 20, 0.0, False, False, **sizes)
    assert lse.shape == ((4, 40) if packed else (2, 4, 20))
    assert (out - expected).abs().max() < 1e-5
    ours = torch_backend.backward(dout, q, k, v, out, lse, cu, cu, 20, 20, 0.0, False, seed, offset, **sizes)
    for one, other in zip(ours, gradients, strict=True):
        assert (one - other).abs().max() < 1e-4


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "expanded heads": lambda x: x[..., :1, :].expand(x.shape),
    "heads first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "of one projection": lambda x: torch.cat((x, x, x), -2)[..., : x.shape[-2], :],
    "every other row": lambda x: x.repeat_interleave(2, -3)[..., ::2, :, :],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_torchs(name: str, packed: bool) -> None:
    """Those of empty_like, as its meta functions say and its nested tensors rely on."""
    shape = (20,) if packed else (2, 10)
    q, k, v, dout = (LAYOUTS[name](draw(*shape, 4, 16, seed=i)) for i in range(4))
    cu = torch.tensor([0, 20], dtype=torch.int32) if packed else None
    out, lse, seed, offset, _ = torch_backend.forward(q, k, v, cu, cu, 20, 20, 0.0, False, False)
    assert out.stride() == torch.empty_like(q).stride()
    for gradient, x in zip(
        torch_backend.backward(dout, q, k, v, out, lse, cu, cu, 20, 20, 0.0, False, seed, offset),
        (q, k, v),
        strict=True,
    ):
        assert gradient.stride() == torch.empty_like(x).stride()


BATCH, HEADS, DIM = 5, 4, 16


def nested(batch: int, heads: int, lengths: list[int], seed: int) -> Tensor:
    """A strided nested tensor (batch, *, heads, dim)."""
    return torch.nested.nested_tensor(
        [draw(n, heads, DIM, seed=seed + i) for i, n in enumerate(lengths[:batch])]
    )


def as_handed_over(x: Tensor) -> Tensor:
    """As torch hands a nested (batch, *, heads, dim) to its flash backend: view_as_dense of its
    NestedTensorTransformerUtils.cpp, with the batch or the heads broadcast by strides of 0.
    """
    flat, rows, heads = x.values(), int(x._nested_tensor_size()[:, 0].sum()), x.size(2)
    row, head = HEADS * DIM if heads == HEADS else DIM, DIM if heads == HEADS else 0
    if x.size(0) == BATCH:
        return flat.as_strided((rows, HEADS, DIM), (row, head, 1))
    return flat.as_strided((BATCH, rows, HEADS, DIM), (0, row, head, 1)).reshape(-1, HEADS, DIM)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("one_batch", [(), (0,), (1, 2)])
@pytest.mark.parametrize("one_head", [(), (0,), (1,), (2,), (1, 2), (0, 1)])
def test_nested_broadcasts(one_batch: tuple[int, ...], one_head: tuple[int, ...]) -> None:
    """Which torch has for inference: each of q, k and v with one entry for all batches, or one head for all."""
    some: tuple[list[int], list[int]] = ([3, 9, 1, 4, 2], [7, 2, 5, 1, 8])
    lengths = [[n[0]] * BATCH if i in one_batch else n for i, n in enumerate((some[0], some[1], some[1]))]
    q, k, v = (
        nested(1 if i in one_batch else BATCH, 1 if i in one_head else HEADS, lengths[i], 10 * i)
        for i in range(3)
    )
    cu_q, cu_k = offsets(lengths[0]), offsets(lengths[1])
    a, b, c = (as_handed_over(x) for x in (q, k, v))
    out = torch_backend.forward(a, b, c, cu_q, cu_k, max(lengths[0]), max(lengths[1]), 0.0, False, False)[0]
    flat = out.view(-1).view(-1, HEADS, DIM)  # as torch makes a nested tensor of it
    for entry in range(BATCH):
        a, b, c = (
            x[0 if i in one_batch else entry].expand(-1, HEADS, -1).transpose(0, 1)[None]
            for i, x in enumerate((q, k, v))
        )
        expected = F.scaled_dot_product_attention(a, b, c)[0].transpose(0, 1)
        assert (flat[cu_q[entry] : cu_q[entry + 1]] - expected).abs().max() < 1e-5


@pytest.fixture
def jagged_route(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's attention of jagged tensors, with our functions as its flash kernels: on the CPU it has none."""
    import torch.nested._internal.sdpa as jagged

    monkeypatch.setattr(jagged, "_select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    library = Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", torch_backend.forward)
    library.impl("_flash_attention_backward", torch_backend.backward)
    yield
    library._destroy()


@pytest.mark.parametrize("expanded", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_jagged(expanded: tuple[int, ...], causal: bool, jagged_route: None) -> None:
    """Nested tensors of layout torch.jagged, also with the values of one head expanded, gradients included."""
    lengths = [[3, 9, 1], [3, 9, 1] if causal else [7, 2, 5]]
    leaves = [
        draw(13 if i == 0 or causal else 14, 1 if i in expanded else HEADS, DIM, seed=i).requires_grad_()
        for i in range(3)
    ]
    cu = [offsets(n).long() for n in (lengths[0], lengths[1], lengths[1])]
    values = [x.expand(-1, HEADS, -1) for x in leaves]
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, c).transpose(1, 2) for x, c in zip(values, cu, strict=True)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).values()
    documents = []
    for i in range(3):
        a, b, c = (x[c[i] : c[i + 1]].transpose(0, 1)[None] for x, c in zip(values, cu, strict=True))
        documents.append(F.scaled_dot_product_attention(a, b, c, is_causal=causal)[0].transpose(0, 1))
    expected, dout = torch.cat(documents), draw(*out.shape, seed=9)
    assert (out - expected).abs().max() < 1e-5
    for one, other in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        assert (one - other).abs().max() < 1e-4


def test_what_is_refused() -> None:
    q = draw(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.1"):
        torch_backend.scaled_forward(q, q, q, 0.1)
    for name, value, said in (
        ("num_splits", 3, "3"),
        ("seqused_k", torch.zeros(1, dtype=torch.int32), "a tensor"),
        ("alibi_slopes", torch.ones(2), "a tensor"),
    ):
        rest: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name}: got {said}"):
            torch_backend.forward(q, q, q, None, None, 8, 8, 0.0, False, False, **rest)


def test_what_is_refused_goes_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Registered, with the arguments as they came; told once an argument."""
    given: list[Any] = []

    class Kernel:
        def call_boxed(self, *arguments: Any, **named: Any) -> str:
            given.append((arguments, named))
            return "torch's"

    monkeypatch.setattr(torch_backend, "_logged", set())
    q = draw(1, 2, 8, 16)
    alone: Any = torch_backend._or_torchs(torch_backend.scaled_forward, None)
    with pytest.raises(ValueError, match="dropout_p"):
        alone("keys", q, q, q, 0.1)
    run: Any = torch_backend._or_torchs(torch_backend.scaled_forward, Kernel())
    assert len(run("keys", q, q, q, scale=0.3)) == 9
    assert not given
    for _ in range(2):
        assert run("keys", q, q, q, 0.1, scale=0.3) == "torch's"
    assert given == [(("keys", q, q, q, 0.1), {"scale": 0.3})] * 2
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "dropout_p: got 0.1" in told[0]


@pytest.mark.gpu
def test_on_a_gpu(registered: None) -> None:
    """torch's own dispatcher calls ours between activate and restore, forward and backward, GQA included."""
    q, k, v = (
        torch.randn(2, heads, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )

    def run() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.profiler.profile() as profile:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        names = {event.key for event in profile.key_averages()}
        ran.append({"attnforge::forward", "attnforge::backward"} <= names)
        return out, *gradients

    ran: list[bool] = []

    def drop() -> tuple[Tensor, ...]:
        """What we do not have: torch's own kernels run, in both directions."""
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return out, *torch.autograd.grad(out.float().square().sum(), q)

    theirs = run()
    dropped = [drop()]
    registry.activate_flash_attention_impl("attnforge")
    try:
        ours = run()
        dropped.append(drop())
    finally:
        registry.restore_flash_attention_impl()
    run()
    assert ran == [False, True, False]
    assert len(dropped) == 2
    for a, b in zip(*dropped, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 3e-2 * b.abs().max()
