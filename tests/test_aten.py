"""torch's registry of flash attentions: our functions beside torch's on the same arguments, and on a GPU for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime import aten

registry: Any = nn.attention


@pytest.fixture
def registered() -> None:
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no register_flash_attention_impl")
    attnforge.register_torch()


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
    out, lse, _, _, max_q, max_k, seed, offset, debug = aten.scaled_forward(q, k, v, 0.0, causal, scale=0.4)
    assert (max_q, max_k, debug.numel()) == (33, 33, 0)
    assert (out - expected).abs().max() < 1e-5
    ours = aten.scaled_backward(
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
    out, lse, seed, offset, _ = aten.forward(q, k, v, cu, cu, 20, 20, 0.0, False, False, **sizes)
    assert lse.shape == ((4, 40) if packed else (2, 4, 20))
    assert (out - expected).abs().max() < 1e-5
    ours = aten.backward(dout, q, k, v, out, lse, cu, cu, 20, 20, 0.0, False, seed, offset, **sizes)
    for one, other in zip(ours, gradients, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_what_is_refused() -> None:
    q = draw(1, 8, 2, 16)
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.1"):
        aten.scaled_forward(q, q, q, 0.1)
    with pytest.raises(ValueError, match="num_splits: got 3"):
        aten.forward(q, q, q, None, None, 8, 8, 0.0, False, False, num_splits=3)


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
    theirs = run()
    registry.activate_flash_attention_impl("attnforge")
    try:
        ours = run()
    finally:
        registry.restore_flash_attention_impl()
    run()
    assert ran == [False, True, False]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 3e-2 * b.abs().max()
