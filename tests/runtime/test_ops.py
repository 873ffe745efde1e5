"""The operators inside torch: dispatcher contracts, autograd, autocast, checkpointing."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import Shape, draw, make_mask, spans
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.codegen.variant import describe
from attnforge.runtime import dispatch, ops, tables
from attnforge.runtime.build import cache
from attnforge.runtime.masks import load_operators
from attnforge.runtime.native.launcher import launcher

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16
KINDS = ("full", "causal", "spans")


class Seen(TorchDispatchMode):
    """Notes the operators that come by."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_arguments_keep_their_names() -> None:
    """Compiled graphs name them, and Inductor keeps graphs on disk: after a renaming, those of before would raise."""
    load_operators()
    attention = ["mask", "kind", "scale", "deterministic", "visible"]
    names = {
        "forward": ["q", "k", "v", *attention, "variant"],
        "backward": ["dout", "q", "k", "v", "out", "lse", *attention, "dlse", "variant"],
        "attend": ["q", "k", "v", "scale", "deterministic", "kind", "mask", "visible"],
        "attend_spans": ["q", "k", "v", "mask", "visible", "scale"],
    }
    for name, arguments in names.items():
        schema = getattr(torch.ops.attnforge, name).default._schema
        found = [argument.name for argument in schema.arguments]
        assert found[: len(arguments)] == arguments, name
        assert all(argument.has_default_value() for argument in schema.arguments[len(arguments) :]), name


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device: str, kind: str) -> None:
    load_operators()
    x = draw(Shape(group=2), DTYPE, device)
    data, code, visible = ops.unpack_mask(make_mask(kind, 65, 65, device), x.q, x.k)
    shared = {"visible": visible}
    torch.library.opcheck(torch.ops.attnforge.forward.default, (x.q, x.k, x.v, data, code, None), shared)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    out, lse = ops.forward(q, k, v, make_mask(kind, 65, 65, device))
    arguments = (x.dout, q, k, v, out, lse, data, code, 0.2)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(torch.ops.attnforge.backward.default, arguments, shared | {"dlse": dlse})


@devices
def test_opcheck_masks(device: str) -> None:
    """The operators that make the data of masks."""
    mask, make = spans(65, 65, device), torch.ops.attnforge
    visible = torch.rand(2, 1, 33, 70, device=device) < 0.5
    cu = torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=device)
    torch.library.opcheck(make.mask_of_spans.default, (mask.starts, mask.ends))
    torch.library.opcheck(make.mask_of_pairs.default, (visible,))
    torch.library.opcheck(make.mask_of_pairs.default, (visible[0, 0].mT,))
    torch.library.opcheck(make.mask_of_pairs.default, (visible.expand(2, 3, 33, 70),))
    torch.library.opcheck(make.mask_of_documents.default, (cu, cu, 9, 11, -1, 0))
    torch.library.opcheck(make.mask_of_data.default, (mask.data,))
    torch.library.opcheck(make.mask_of_splits.default, ([3, 9], [-1, 3], [9, 9], 9, torch.device(device)))


def test_errors_of_mask_operators_say_what_they_got() -> None:
    load_operators()
    make, x = torch.ops.attnforge, torch.zeros(3, dtype=torch.int32)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: make.mask_of_spans(x, x.long()), "starts, ends: got Int [3] on cpu and Long [3] on cpu"),
        (lambda: make.mask_of_data(x.float()), "data: got Float [3] on cpu"),
        (lambda: make.mask_of_splits([1, 2], [0], [2], 2, x.device), "got 2, 1 and 1 numbers"),
        (lambda: make.mask_of_documents(x, x[1:], 3, 3, -1, -1), "got Int [3] on cpu and Int [2] on cpu"),
        (lambda: make.mask_of_documents(x, x, 1 << 40, 3, -1, -1), "q, k: got 1099511627776 and 3 rows"),
        (lambda: make.mask_of_pairs(x), "mask: got Int [3] on cpu, expected a bool tensor"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_attend(device: str, kind: str) -> None:
    x = draw(Shape(group=2), DTYPE, device)
    data, code, visible = ops.unpack_mask(make_mask(kind, 65, 65, device), x.q, x.k)
    given = (0.2, True, code, data, visible)
    torch.library.opcheck(torch.ops.attnforge.attend.default, (x.q, x.k, x.v, *given))


@devices
@pytest.mark.parametrize("kind", [*KINDS, "dense"])
def test_asking_for_lse_changes_nothing_else(device: str, kind: str) -> None:
    """`attend` and `forward` get the same: out and gradients are the same bits, recorded or not."""
    x = draw(Shape(group=2), DTYPE, device)
    causal = attnforge.Causal().visible(65, 65, device)
    mask = attnforge.DenseMask(causal) if kind == "dense" else make_mask(kind, 65, 65, device)
    out = attnforge.attention(x.q, x.k, x.v, mask, scale=0.2, deterministic=True)
    other, _ = attnforge.attention(x.q, x.k, x.v, mask, scale=0.2, deterministic=True, return_lse=True)
    assert torch.equal(out, other)
    for mine, theirs in zip(x.grads(out), x.grads(other), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert torch.equal(out, attnforge.attention(x.q, x.k, x.v, mask, scale=0.2))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_modes_see_forward_alone(grad: Callable[[], AbstractContextManager[object]]) -> None:
    """Policies of selective checkpointing, and whatever else looks at operators, need to know one name."""
    x = draw(Shape(), DTYPE, "cpu")
    with grad(), Seen() as seen:
        attnforge.attention(x.q, x.k, x.v, attnforge.Causal())
    assert [name for name in seen.names if name.startswith("attnforge")] == ["attnforge.forward.default"]


@pytest.mark.parametrize("grad", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_fake_tensors_outside_of_compilers(grad: Callable[[], AbstractContextManager[object]]) -> None:
    with FakeTensorMode(), grad():
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        out = attnforge.attention(q, q, q, scale=0.5)
        assert isinstance(out, FakeTensor)
        assert (out.shape, out.requires_grad) == (q.shape, torch.is_grad_enabled())


@devices
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", ["both", "lse", "out"])
def test_lse_is_differentiable(device: str, kind: str, used: str) -> None:
    """Against float64; rows that see nothing have an lse of -inf and pass no gradient on."""
    x = draw(Shape(group=2), torch.float32, device)
    mask = make_mask(kind, 65, 65, device)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        seen = lse > -torch.inf
        of_lse = (torch.where(seen, lse, 0.0).sin() * torch.linspace(-1, 2, 65, device=device)).sum()
        of_out = (out * x.dout).sum()
        return of_lse if used == "lse" else of_out if used == "out" else of_lse + of_out

    leaves = (x.q, x.k, x.v)
    ours = torch.autograd.grad(
        loss(*attnforge.attention(*leaves, mask, return_lse=True)), leaves, allow_unused=True
    )
    wide = [t.detach().double().requires_grad_() for t in leaves]
    visible = (
        torch.ones(65, 65, dtype=torch.bool, device=device) if mask is None else mask.visible(65, 65, device)
    )
    k, v = (t.repeat_interleave(2, 1) for t in wide[1:])
    scores = (wide[0] @ k.mT * x.q.shape[3] ** -0.5).masked_fill(~visible, -1e300)
    lse = scores.logsumexp(3)
    weights = (scores - lse[..., None]).exp() * visible
    loss_of_both = loss(weights @ v, torch.where(visible.any(1), lse, -torch.inf))
    exact = torch.autograd.grad(loss_of_both, wide, allow_unused=True)
    for name, a, given in zip("qkv", ours, exact, strict=True):
        b = torch.zeros_like(a) if given is None else given  # v has no part in lse
        assert (a.double() - b).abs().max() <= 2e-5 * max(1.0, float(b.abs().max())), name


@devices
def test_second_derivatives_are_refused(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    out = attnforge.attention(x.q, x.k, x.v)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(out.sum(), x.q, create_graph=True)


def test_second_derivatives_by_captured_tensors_are_refused() -> None:
    """In a sum with another term they would be missing without a word."""
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    bias = torch.randn(5, requires_grad=True)
    loss = attnforge.attention(q, k, v, score=attnforge.scores.bias(bias)).sum() + bias.square().sum()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(loss, bias, create_graph=True)


def test_tangents_are_refused() -> None:
    """Of captured tensors alone, and of what a backward takes: they would be missing without a word."""
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    out, lse = attnforge.attention(q.requires_grad_(), k, v, return_lse=True)
    with forward_ad.dual_level():
        bias, dout, dlse = (
            forward_ad.make_dual(x, x) for x in (torch.randn(5), torch.randn_like(out), q[..., 0])
        )
        for call in (
            lambda: attnforge.attention(q.detach(), k, v, score=attnforge.scores.bias(bias)),
            lambda: torch.autograd.grad(out, q, dout, retain_graph=True),
            lambda: torch.autograd.grad(lse, q, dlse, retain_graph=True),
        ):
            with pytest.raises(NotImplementedError, match="forward mode"):
                call()


@devices
def test_gradients_of_some_inputs(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    every = x.grads(attnforge.attention(x.q, x.k, x.v))
    out = attnforge.attention(x.q.detach(), x.k, x.v.detach())
    (dk,) = torch.autograd.grad(out, x.k, x.dout)
    torch.testing.assert_close(dk, every[1])


@devices
def test_backward_twice_with_retained_graph(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    out = attnforge.attention(x.q, x.k, x.v, spans(65, 65, device))
    out.backward(x.dout, retain_graph=True)
    first = x.v.grad
    assert first is not None
    first = first.clone()
    out.backward(x.dout)
    torch.testing.assert_close(x.v.grad, 2 * first)


@devices
def test_input_changed_before_backward(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    q = x.q * 1
    out = attnforge.attention(q, x.k, x.v)
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@devices
def test_no_graph_without_grad(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    with torch.no_grad():
        assert attnforge.attention(x.q, x.k, x.v).grad_fn is None
    with torch.inference_mode():
        assert attnforge.attention(x.q, x.k, x.v, spans(65, 65, device)).is_inference()


# ---- Training features


@devices
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(device: str, reentrant: bool) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    plain = x.grads(attnforge.attention(x.q, x.k, x.v, mask))
    out = checkpoint(attnforge.attention, x.q, x.k, x.v, mask, use_reentrant=reentrant)
    out.backward(x.dout)
    for value, expected in zip((x.q, x.k, x.v), plain, strict=True):
        torch.testing.assert_close(value.grad, expected)
    # One schedule for each direction, recomputation and detached copies included.
    assert torch.ops.attnforge.schedule_count(mask.data) == 2


@devices
def test_autocast(device: str) -> None:
    x = draw(Shape(), torch.float32, device)
    with torch.autocast(device, dtype=DTYPE):
        out = attnforge.attention(x.q, x.k, x.v)
    assert out.dtype is DTYPE
    with torch.no_grad():
        q, k, v = (t.to(DTYPE) for t in (x.q, x.k, x.v))
        assert torch.equal(out, attnforge.attention(q, k, v))
    grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout.to(DTYPE))
    assert all(grad.dtype is torch.float32 for grad in grads)


@devices
def test_saved_tensor_hooks(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    expected = x.grads(attnforge.attention(x.q, x.k, x.v, mask))
    with torch.autograd.graph.save_on_cpu():
        out = attnforge.attention(x.q, x.k, x.v, mask)
    for ours, theirs in zip(x.grads(out), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@devices
def test_module_copies(device: str) -> None:
    mask = spans(65, 65, device)
    assert torch.equal(copy.deepcopy(mask).starts, mask.starts)


# ---- torch.use_deterministic_algorithms

NAMES = {
    SDPBackend.FLASH_ATTENTION: "Flash Attention",
    SDPBackend.EFFICIENT_ATTENTION: "Memory Efficient attention",
    SDPBackend.CUDNN_ATTENTION: "cuDNN Attention",
}


REFUSED = r"does not fit this call \(.*, deterministic\)"


@contextmanager
def determinism(warn_only: bool) -> Iterator[None]:
    """torch's mode, in which each warning comes every time."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_warn_always(False)


def unordered() -> int:
    """Handle of a CPU backward that calls itself not deterministic, which no CPU kernel is."""
    cpu = torch.device("cpu")
    launcher()
    problem = Problem(Direction.BACKWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 4, 64)
    source = render(next(candidates(problem)))
    entry = cache.obtain(source)
    with entry.library() as path:
        described = describe(replace(source, plan=replace(source.plan, deterministic=False)))
        return int(
            torch.ops.attnforge.add_variant(described, cpu, torch.empty(0, dtype=torch.uint8), str(path))
        )


class Unordered(torch.autograd.Function):
    """Attention with that backward: only what autograd runs has its C++ warnings turned into Python's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, handle: int, deterministic: bool) -> Tensor:
        out, lse = ops.forward(q, k, v, None)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = deterministic, handle
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        deterministic, handle = ctx.options
        grads = ops.backward(dout, q, k, v, out, lse, None, None, deterministic, handle)
        return *grads, None, None


@pytest.mark.parametrize("backend", [None, *NAMES])
def test_warn_only_warns_as_torch_does(backend: SDPBackend | None) -> None:
    """What adds in any order runs, with torch's words; where the caller asks for order, it does not."""
    x, handle = draw(Shape(), torch.float32, "cpu"), unordered()
    attend: Any = Unordered.apply
    name = NAMES.get(backend, "Flash Attention")  # type: ignore[arg-type]
    with sdpa_kernel(backend) if backend else nullcontext(), determinism(warn_only=True):
        with pytest.warns(UserWarning, match=f"^{name} defaults to a non-deterministic algorithm. To expl"):
            x.grads(attend(x.q, x.k, x.v, handle, False))
        with pytest.raises(ValueError, match=REFUSED):
            x.grads(attend(x.q, x.k, x.v, handle, True))
    with determinism(warn_only=False), pytest.raises(ValueError, match=REFUSED):
        x.grads(attend(x.q, x.k, x.v, handle, False))


def test_what_is_deterministic_does_not_warn() -> None:
    x = draw(Shape(), torch.float32, "cpu")
    for warn_only in (False, True):
        with determinism(warn_only), warnings.catch_warnings():
            warnings.simplefilter("error")
            x.grads(attnforge.attention(x.q, x.k, x.v))


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """First guesses: no table names a deterministic backward as the fastest."""
    monkeypatch.setenv("ATTNFORGE_TABLES", str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("backend", [None, *NAMES])
def test_determinism_on_a_gpu(backend: SDPBackend | None) -> None:
    """sdpa() and attention(): silent and the same bits when torch is strict, one warning with warn_only."""
    x = draw(Shape(seq_q=700, seq_k=700), DTYPE, "cuda")  # no GQA: one of torch's has none
    name = NAMES.get(backend, "Flash Attention")  # type: ignore[arg-type]

    def run(deterministic: bool = False) -> tuple[Tensor, ...]:
        if backend is None:
            return x.grads(attnforge.attention(x.q, x.k, x.v, deterministic=deterministic))
        with attnforge.sdpa(), sdpa_kernel(backend):
            return x.grads(torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v))

    with (
        determinism(warn_only=True),
        pytest.warns(UserWarning, match=f"^{name} defaults to a non-deterministic"),
    ):
        run()
    if backend is SDPBackend.CUDNN_ATTENTION:
        return  # torch's has no deterministic backward, so that sdpa_kernel() leaves none
    with determinism(warn_only=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with determinism(warn_only=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        if backend is None:
            assert all(torch.equal(a, b) for a, b in zip(run(deterministic=True), first, strict=True))
