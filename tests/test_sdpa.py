"""F.scaled_dot_product_attention on our kernels: what is taken, what is left to torch, and how it ends."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.runtime import sdpa as module

TORCH = F.scaled_dot_product_attention
TARGETS = [
    pytest.param("cpu", torch.float32, 2e-5, id="cpu-fp32"),
    pytest.param("cuda", torch.bfloat16, 3e-2, id="gpu-bf16", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_told", set())
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
