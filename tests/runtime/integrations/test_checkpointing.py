"""Selective checkpointing: attention's forward kernel runs once, and nothing else changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from calls import Calls
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from oracle import spans
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import attnforge

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BF16 = torch.bfloat16
HEADS, DIM, ROWS = 2, 64, 65


class Layer(nn.Module):
    """A projection, attention, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.outer = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor, mask: attnforge.Spans) -> Tensor:
        q, k, v = self.inner(x).unflatten(1, (3 * HEADS, DIM)).transpose(0, 1)[None].chunk(3, 1)
        out = attnforge.attention(q, k, v, mask)
        result: Tensor = x + self.outer(out[0].transpose(0, 1).flatten(1))
        return result


class Stack(nn.Module):
    """Layers, each under `checkpointed`."""

    def __init__(self, wrap: Any, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(wrap(Layer()) for _ in range(layers))

    def forward(self, x: Tensor, mask: attnforge.Spans) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def plain(layer: nn.Module) -> nn.Module:
    return layer


def full(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def selective(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(
        layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=attnforge.save_attention
    )


def step(stack: nn.Module, device: str, dtype: torch.dtype) -> tuple[tuple[int, int], list[Tensor]]:
    """Calls of our operators in one forward and backward, and the output followed by the gradients."""
    x = torch.randn(ROWS, HEADS * DIM, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x.requires_grad_()
    with Calls() as calls:
        out = stack(x, spans(ROWS, ROWS, device))
        out.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in stack.parameters() if p.grad is not None]
    return calls.count(), [out.detach(), x.grad, *grads]


def assert_same(ours: list[Tensor], theirs: list[Tensor], device: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if device == "cpu":
            assert torch.equal(a, b)
        else:  # dq is summed in any order
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.float().abs().max()))


@devices
@pytest.mark.parametrize(("wrap", "forwards"), [(plain, 2), (full, 4), (selective, 2)])
def test_calls_of_a_stack(device: str, wrap: Any, forwards: int) -> None:
    expected = step(Stack(plain).to(device, BF16), device, BF16)[1]
    calls, got = step(Stack(wrap).to(device, BF16), device, BF16)
    assert calls == (forwards, 2)
    assert_same(got, expected, device)


@devices
@pytest.mark.parametrize(
    ("reentrant", "policy", "forwards"), [(True, False, 2), (False, False, 2), (False, True, 1)]
)
def test_calls_of_a_function(device: str, reentrant: bool, policy: bool, forwards: int) -> None:
    layer = Layer().to(device, BF16)
    x = torch.randn(ROWS, HEADS * DIM, device=device, dtype=BF16, requires_grad=True)
    mask = spans(ROWS, ROWS, device)
    options: dict[str, Any] = {"context_fn": attnforge.save_attention} if policy else {}
    with Calls() as calls:
        checkpoint(layer, x, mask, use_reentrant=reentrant, **options).sum().backward()
    assert calls.count() == (forwards, 1)


def test_reentrant_checkpoints_refuse_the_policy() -> None:
    x = torch.randn(ROWS, HEADS * DIM, requires_grad=True)
    with pytest.raises(ValueError, match="context_fn"):
        checkpoint(
            Layer(), x, spans(ROWS, ROWS, "cpu"), use_reentrant=True, context_fn=attnforge.save_attention
        )


def test_several_calls_and_lse_in_one_layer() -> None:
    """Each call gets back what it returned itself."""
    x = torch.randn(1, 2, ROWS, DIM, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        first, lse = attnforge.attention(x, x, x, attnforge.Causal(), return_lse=True)
        return attnforge.attention(first * 2, x, x) * lse[..., None].exp()

    twice(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with Calls() as calls:
        out = checkpoint(twice, x, use_reentrant=False, context_fn=attnforge.save_attention)
        out.square().sum().backward()
    assert calls.count() == (2, 2)
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_the_policy_composes() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op is torch.ops.aten.addmm.default:
            return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        return attnforge.save_attention_policy(context, op, *args, **kwargs)

    x = torch.randn(ROWS, HEADS * DIM, requires_grad=True)
    layer, mask = Layer(), spans(ROWS, ROWS, "cpu")
    with Calls() as calls:
        out = checkpoint(
            layer,
            x,
            mask,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        out.sum().backward()
    assert calls.count() == (1, 1)
    assert calls.seen.count("aten.addmm.default") == 2  # of the layer's two linears, none again


@devices
@pytest.mark.parametrize("policy", [False, True])
def test_compiled(device: str, policy: bool) -> None:
    """In a compiled graph the partitioner obeys: with the policy, the backward graph has no forward of ours."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    layer, mask = Layer().to(device, BF16), spans(ROWS, ROWS, device)
    x = torch.randn(ROWS, HEADS * DIM, device=device, dtype=BF16, requires_grad=True)
    options: dict[str, Any] = {"context_fn": attnforge.save_attention} if policy else {}

    def run(x: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, attnforge.Spans(starts, ends), use_reentrant=False, **options)
        return result

    expected = run(x, mask.starts, mask.ends)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    got = torch.compile(run, backend=compiler, fullgraph=True)(x, mask.starts, mask.ends)
    (grad,) = torch.autograd.grad(got.sum(), x)
    torch._dynamo.reset()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(grad, wanted, rtol=2e-2, atol=2e-2)
    forward, backward = graphs
    assert forward.count("attnforge.forward.default") == 1
    assert backward.count("attnforge.forward.default") == (0 if policy else 1)
    assert backward.count("attnforge.backward.default") == 1


# ---- FSDP2


@pytest.mark.parametrize(("wrap", "forwards"), [(plain, 2), (full, 4), (selective, 2)])
def test_fsdp2(wrap: Any, forwards: int, group: None) -> None:
    stack: Any = Stack(wrap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (*stack.layers, stack):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
        calls, got = step(stack, "cpu", torch.float32)
    assert calls == (forwards, 2)
    expected = step(Stack(plain).to(BF16), "cpu", BF16)[1]
    for a, b in zip(got[1:], expected[1:], strict=True):
        whole = a.full_tensor() if hasattr(a, "full_tensor") else a
        torch.testing.assert_close(whole.to(BF16), b)
