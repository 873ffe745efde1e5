"""FlopCounterMode counts attention as it counts torch's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import flop_counter as torchs
from torch.utils.flop_counter import FlopCounterMode

import attnforge
from attnforge.runtime.integrations import flop_counter


def inputs(heads_kv: int = 4, head_dim_v: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, 4, 24, 16), (2, heads_kv, 40, 16), (2, heads_kv, 40, head_dim_v)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return q, k, v


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """FLOPs of a forward, and of its backward."""
    with FlopCounterMode(display=False) as forward:
        out = call()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


DENSE = 2 * 2 * 4 * 24 * 40 * (16 + 16), 2 * 2 * 4 * 24 * 40 * 5 * 16


def test_as_flash_attention_of_torch() -> None:
    """Torch counts nothing for its CPU kernel, so its CUDA operators are called without data."""
    q, k, v = (x.detach().to("meta", torch.bfloat16) for x in inputs())
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as forward:
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v)
    with FlopCounterMode(display=False) as backward:
        lengths = rest[0], rest[1], 24, 40
        aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, *lengths, 0.0, False, rest[4], rest[5]
        )
    expected = forward.get_total_flops(), backward.get_total_flops()
    q, k, v = inputs()
    assert count(lambda: attnforge.attention(q, k, v)) == expected == DENSE


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("head_dim_v", [8, 16])
def test_grouped_heads_and_other_head_dims(heads_kv: int, head_dim_v: int) -> None:
    q, k, v = inputs(heads_kv, head_dim_v)
    forward, backward = count(lambda: attnforge.attention(q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        assert forward == count(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))[0]
    k, v = (
        x.expand(-1, 4, -1, -1) if heads_kv == 1 else x.repeat_interleave(4 // heads_kv, 1) for x in (k, v)
    )
    dout = (*q.shape[:3], head_dim_v)
    assert backward == torchs.sdpa_backward_flop_count(dout, q.shape, k.shape, v.shape)


@pytest.mark.parametrize(
    "given",
    [
        {"mask": attnforge.Causal},
        {"mask": lambda: attnforge.masks.documents([24, 16], "cpu")},
        {"mask": lambda: attnforge.DenseMask(torch.rand(24, 40) < 0.5)},
        {"deterministic": True},
        {"score": lambda: attnforge.scores.softcap(5.0)},
        {"sinks": lambda: torch.zeros(4)},
    ],
    ids=["causal", "spans", "dense", "deterministic", "score", "sinks"],
)
def test_masks_and_scores_change_nothing(given: dict[str, Any]) -> None:
    q, k, v = inputs()
    named = {name: value() if callable(value) else value for name, value in given.items()}
    assert count(lambda: attnforge.attention(q, k, v, **named)) == DENSE


def test_gradients_of_captured_tensors() -> None:
    q, k, v = inputs()
    bias = torch.zeros(4, 24, 40, requires_grad=True)
    score = attnforge.scores.bias(bias)
    assert count(lambda: attnforge.attention(q, k, v, score=score)) == DENSE
    assert bias.grad is not None


def test_packed_sequences_are_one() -> None:
    q = torch.randn(24, 4, 16, requires_grad=True)
    cu = torch.tensor([0, 10, 24], dtype=torch.int32)
    got = count(lambda: attnforge.flash_attn_varlen_func(q, q, q, cu, cu, 14, 14))
    assert got == (2 * 4 * 24 * 24 * 32, 2 * 4 * 24 * 24 * 80)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k, v = inputs()
        assert count(lambda: attnforge.attention(q, k, v)) == DENSE


def test_the_first_call_of_all_may_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the operators become known when the counter has copied torch's table."""
    attnforge.load_operators()
    for op in [op for op in torchs.flop_registry if str(op).startswith("attnforge.")]:
        monkeypatch.delitem(torchs.flop_registry, op)
    q, k, v = inputs()
    with FlopCounterMode(display=False) as counter:
        attnforge.attention(q, k, v)
        assert counter.get_total_flops() == 0
        flop_counter.register()
        attnforge.attention(q, k, v)
    assert counter.get_total_flops() == DENSE[0]


def test_the_counter_is_imported_by_the_program_alone() -> None:
    """In a process that imports it after the operators were loaded."""
    code = f"""
import sys, torch, attnforge
attnforge.load_operators()
assert {flop_counter.MODULE!r} not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 1, 8, 16)
with FlopCounterMode(display=False) as counter:
    attnforge.attention(q, q, q)
assert counter.get_total_flops() == 2 * 8 * 8 * 32
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
