"""Our scaled_dot_product_attention where torch's own code meets it: subclasses, modes, recorders and transforms."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import attnforge
from attnforge.runtime.integrations import sdpa as module

TORCH = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    assert TORCH is F.scaled_dot_product_attention


@pytest.fixture
def calls(masks_from: Callable[[ModuleType], list[Any]]) -> list[Any]:
    """The masks of the calls that our operator gets."""
    return masks_from(module)


def inputs(heads: int = 4, heads_kv: int = 4, seq_q: int = 33, seq_k: int = 33) -> list[Tensor]:
    shapes = ((heads, seq_q), (heads_kv, seq_k), (heads_kv, seq_k))
    return [torch.randn(2, *shape, 16).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads_kv", "seq_q", "seq_k"), [(4, 33, 50), (4, 33, 33), (2, 50, 33)])
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(
    lower_right: bool, heads_kv: int, seq_q: int, seq_k: int, compiled: bool, calls: list[Any]
) -> None:
    """torch's own tensor subclasses for masks, which look at the function that they are called with."""
    q, k, v = inputs(4, heads_kv, seq_q, seq_k)
    bias = (causal_lower_right if lower_right else causal_upper_left)(seq_q, seq_k)
    grouped = heads_kv != 4
    torch._dynamo.reset()  # one code for all cases, which would reach the limit of recompilations

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=0.3, enable_gqa=grouped)

    results = []
    for context in (sdpa_kernel(SDPBackend.MATH), attnforge.sdpa()):
        with context:
            out = (torch.compile(block, backend="eager", fullgraph=True) if compiled else block)(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for theirs, ours in zip(*results, strict=True):
        assert (theirs - ours).abs().max() <= 2e-5 * theirs.abs().max()
    ran_here = lower_right or seq_q == seq_k
    assert [type(mask) for mask in calls] == [attnforge.Causal] * ran_here


def test_causal_bias_of_other_lengths(calls: list[Any]) -> None:
    """Upper-left ones never look at their lengths, lower-right ones do not broadcast."""
    q, k, v = (x.detach() for x in inputs())
    expected = TORCH(q, k, v, causal_upper_left(7, 9))
    with attnforge.sdpa():
        assert (
            F.scaled_dot_product_attention(q, k, v, causal_upper_left(7, 9)) - expected
        ).abs().max() < 1e-5
        with pytest.raises(RuntimeError, match="must match the size"):
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(7, 9))
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(33, 33), is_causal=True)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_recorded_code_is_torchs(calls: list[Any]) -> None:
    """torch.jit.script, torch.jit.trace and torch.fx: with graphs that hold torch's operator, and need no attnforge."""
    q, k, v = (x.detach() for x in inputs())
    expected = TORCH(q, k, v, is_causal=True)
    before = torch.jit.script(Attention())
    with attnforge.sdpa():
        scripted = torch.jit.script(Attention())
        traced = torch.jit.trace(Attention(), (q, k, v), check_trace=False)
        recorded = torch.fx.symbolic_trace(Attention())
        for module in (before, scripted, traced, recorded):
            assert torch.equal(module(q, k, v), expected)
    assert not calls
    assert "aten::scaled_dot_product_attention" in str(scripted.graph)
    assert "aten::scaled_dot_product_attention" in str(traced.inlined_graph)
    assert TORCH in [node.target for node in recorded.graph.nodes]


def test_scripting_in_a_fresh_process() -> None:
    """Where TorchScript has compiled nothing yet, also a function that somebody wrapped before."""
    program = """
import torch, torch.nn.functional as F
import attnforge
torch_s = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lambda *a, **b: torch_s(*a, **b)
attnforge.enable()
attnforge.disable()
F.scaled_dot_product_attention = torch_s
attnforge.enable()
layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
x = torch.randn(2, 5, 16, requires_grad=True)
print((torch.jit.script(layer)(x) - layer(x)).abs().max().item() < 1e-5)
"""
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_a_subclass_has_its_say(calls: list[Any]) -> None:
    """Its __torch_function__ gets torch's own function and every argument; what it returns is returned."""
    seen: list[Any] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, len(args) + len(kwargs or {})))
            return "watched"

    q, k, v = (x.detach() for x in inputs())
    odd: Any = torch.ones(33, 33).as_subclass(Watching)
    with attnforge.sdpa():
        assert F.scaled_dot_product_attention(q, k.as_subclass(Watching), v) == "watched"
        assert F.scaled_dot_product_attention(q, k, v, attn_mask=odd) == "watched"
    assert seen == [(TORCH, 8)] * 2
    assert not calls


def test_a_mode_has_its_say_and_ours_run(calls: list[Any]) -> None:
    """As torch.set_default_device, which is a mode that looks at every call."""
    seen: list[Any] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = inputs()
    with attnforge.sdpa():
        with Watching():
            ours = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert seen == [F.scaled_dot_product_attention]
        with torch.device("cpu"):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), ours)
    assert len(calls) == 2


def test_it_passes_for_torchs_own() -> None:
    """Where torch, pickle and people look functions up."""
    overrides: Any = torch.overrides
    with attnforge.sdpa():
        ours = F.scaled_dot_product_attention
        assert pickle.loads(pickle.dumps(ours)) is ours  # noqa: S301
        assert (ours.__name__, ours.__doc__) == (TORCH.__name__, TORCH.__doc__)
        for function in (ours, TORCH):
            assert overrides.resolve_name(function) == "torch.nn.functional.scaled_dot_product_attention"
            assert function in overrides.get_overridable_functions()[F]
            assert function in overrides.get_testing_overrides()
    with attnforge.sdpa():
        assert F.scaled_dot_product_attention is ours  # so what was compiled for it still serves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", ours)  # as one who puts back what was there before
        with attnforge.sdpa():
            assert F.scaled_dot_product_attention is ours
        assert F.scaled_dot_product_attention is TORCH


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((None,), {}),
        ((), {"attn_mask": [1]}),
        ((), {"is_causal": 1}),
        ((), {"enable_gqa": 1}),
        ((), {"scale": "large"}),
        ((), {"dropout_p": "none"}),
        ((), {"mask": None}),
        ((None, 0.0, False, 0.5), {}),
    ],
)
def test_wrong_arguments_are_told_by_torch(arguments: Any, named: Any, calls: list[Any]) -> None:
    q, k, v = inputs()
    given = (*arguments, k, v) if arguments == (None,) else (q, k, v, *arguments)
    with pytest.raises(TypeError):
        TORCH(*given, **named)
    with attnforge.sdpa(), pytest.raises(TypeError, match="scaled_dot_product_attention"):
        F.scaled_dot_product_attention(*given, **named)
    assert not calls


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_torchs(compiled: bool, calls: list[Any]) -> None:
    q, k, v = (x.detach() for x in inputs())

    def loss(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    transforms: list[Any] = [torch.func.grad(loss), torch.func.vmap(loss), torch.func.functionalize(loss)]
    for transform in transforms:
        argument = torch.stack((q, q)) if transform is transforms[1] else q
        expected = transform(argument)
        with attnforge.sdpa():
            run = torch.compile(transform, backend="aot_eager", fullgraph=True) if compiled else transform
            if transform is transforms[2] and compiled:
                continue  # torch.compile has no functionalize
            assert (run(argument) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not calls


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    q, k, v = (x.detach() for x in inputs())
    with attnforge.sdpa():
        program = torch.export.export(Attention(), (q, k, v), strict=strict)
    assert (program.module()(q, k, v) - TORCH(q, k, v, is_causal=True)).abs().max() < 1e-5


def test_fake_and_meta_tensors_are_torchs(calls: list[Any]) -> None:
    q = torch.randn(2, 4, 33, 16)
    with attnforge.sdpa():
        assert F.scaled_dot_product_attention(*(q.to("meta"),) * 3).is_meta
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            assert F.scaled_dot_product_attention(fake, fake, fake).shape == q.shape
    assert not calls


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("backends", "taken"),
    [
        ([SDPBackend.MATH], False),
        ([SDPBackend.FLASH_ATTENTION], True),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], True),
    ],
)
def test_the_math_backend_is_torchs(
    backends: list[SDPBackend], taken: bool, compiled: bool, calls: list[Any]
) -> None:
    q, k, v = (x.detach() for x in inputs())

    def block(q: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v)

    expected = block(q)
    with attnforge.sdpa():
        torch._dynamo.reset()
        run = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
        assert (run(q) - expected).abs().max() < 1e-5
        assert torch.backends.cuda.math_sdp_enabled()
    assert len(calls) == taken


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_backends_are_asked_about_what_autocast_hands_on(
    cast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    choose, asked = torch._fused_sdp_choice, []

    def noting(*tensors: Any, **named: Any) -> int:
        asked.append([x.dtype for x in tensors[:3]])
        return choose(*tensors, **named)

    monkeypatch.setattr(torch, "_fused_sdp_choice", noting)
    q, k, v = inputs()
    with (
        attnforge.sdpa(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        torch.autocast("cpu", cast, cast is not None),
    ):
        F.scaled_dot_product_attention(q, k, v)
    assert asked == [[cast or torch.float32] * 3]
    assert len(calls) == 1


@pytest.mark.gpu
def test_flash_backend_under_autocast(calls: list[Any]) -> None:
    """torch's has no float32, and gets none."""
    q, k, v = (x.detach().cuda() for x in inputs())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.float16):
        expected = F.scaled_dot_product_attention(q, k, v)
        with attnforge.sdpa():
            out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.float16
    assert len(calls) == 1
    assert (out - expected).abs().max() < 1e-2


def test_what_no_backend_can_run_raises(calls: list[Any]) -> None:
    """As it does in torch: one backend is asked for, and it cannot."""
    q, k, v = inputs()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # which is CUDA's alone
        for block in (nullcontext(), attnforge.sdpa()):
            with block, pytest.raises(RuntimeError, match="No viable backend"):
                F.scaled_dot_product_attention(q, k, v)
    assert not calls


def test_second_derivatives_of_the_math_backend(calls: list[Any]) -> None:
    """Which is the one that has them."""
    q, k, v = inputs()
    results = []
    for ours in (False, True):
        if ours:
            attnforge.enable()
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v)
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), (q, k, v)))
    attnforge.disable()
    for theirs, same in zip(*results, strict=True):
        assert torch.equal(theirs, same)
    assert not calls
