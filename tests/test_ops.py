"""The operators inside torch: dispatcher contracts, compile, autocast, checkpointing, schedules, threads."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from oracle import Shape, draw, spans
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.runtime import ops
from attnforge.runtime.launcher import launcher
from attnforge.runtime.reference import reference

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16
KINDS = ("full", "causal", "spans")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    launcher()
    torch.ops.attnforge.forget_schedules()
    yield
    torch._dynamo.reset()


def make(kind: str, device: str, length: int = 65) -> ops.Mask:
    return {"full": None, "causal": attnforge.Causal(), "spans": spans(length, length, device)}[kind]


def schedules() -> int:
    return int(torch.ops.attnforge.schedule_count())


# ---- Contracts


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(device: str, kind: str) -> None:
    x = draw(Shape(group=2), DTYPE, device)
    code, starts, ends = ops._unpack(make(kind, device))
    torch.library.opcheck(torch.ops.attnforge.forward.default, (x.q, x.k, x.v, starts, ends, code, None))
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    out, lse = ops.forward(q, k, v, make(kind, device))
    torch.library.opcheck(
        torch.ops.attnforge.backward.default, (x.dout, q, k, v, out, lse, starts, ends, code, 0.2)
    )


@devices
def test_opcheck_snapshot(device: str) -> None:
    torch.library.opcheck(torch.ops.attnforge.snapshot.default, (spans(65, 65, device).starts,))


@devices
def test_lse_is_not_differentiable(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    out, lse = attnforge.attention(x.q, x.k, x.v, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


@devices
def test_second_derivatives_are_refused(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    out = attnforge.attention(x.q, x.k, x.v)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(out.sum(), x.q, create_graph=True)


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


# ---- torch.compile


def module(q: Tensor, k: Tensor, v: Tensor, mask: ops.Mask) -> Tensor:
    out = attnforge.attention(q * 2, k, v + 1, mask)
    assert isinstance(out, Tensor)
    return out * 3


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_compile_with_changing_lengths(device: str, kind: str) -> None:
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (65, 130, 77):
        x = draw(Shape(seq_q=length, seq_k=length, group=2), DTYPE, device)
        mask = make(kind, device, length)
        expected, got = module(x.q, x.k, x.v, mask), compiled(x.q, x.k, x.v, mask)
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
        for ours, theirs in zip(x.grads(got), x.grads(expected), strict=True):
            torch.testing.assert_close(ours, theirs)


@devices
def test_compile_with_inductor(device: str) -> None:
    compiled = torch.compile(module, fullgraph=True)
    x = draw(Shape(group=2), DTYPE, device, "slice")
    mask = spans(65, 65, device)
    expected, got = module(x.q, x.k, x.v, mask), compiled(x.q, x.k, x.v, mask)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(x.grads(got), x.grads(expected), strict=True):
        torch.testing.assert_close(ours, theirs)


@devices
def test_masks_computed_inside_a_compiled_graph(device: str) -> None:
    """Inductor may put both masks into one buffer; the second must not meet the first one's schedule."""
    x = draw(Shape(), DTYPE, device)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()

    def masks(base: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for shift in (1, 9, 30):
            after = base + (q[0, 0, :, 0] > 100).int()  # cannot be computed before the attention that made q
            mask = attnforge.Spans(after - shift, after + shift)
            q = attnforge.attention(q, k, v, mask)
        return q

    base = torch.arange(65, dtype=torch.int32, device=device)
    expected = masks(base, q, k, v)
    torch.testing.assert_close(torch.compile(masks, fullgraph=True)(base, q, k, v), expected)


def test_first_call_may_be_compiled() -> None:
    """A fresh process whose first call ever is traced: the extension is loaded during the trace."""
    code = (
        "import torch, attnforge\n"
        "q = torch.randn(1, 2, 8, 64)\n"
        "f = torch.compile(lambda q: attnforge.attention(q, q, q), fullgraph=True, backend='aot_eager')\n"
        "assert torch.equal(f(q), attnforge.attention(q, q, q))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    code = "import sys, attnforge, attnforge.codegen.render; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
    assert schedules() == 2  # one for each direction, recomputation and detached copies included


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


# ---- Schedule cache


@devices
def test_one_schedule_for_all_layers(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    y = x.q
    for _ in range(3):
        y = attnforge.attention(y, x.k, x.v, mask)
    y.backward(x.dout)
    assert schedules() == 2


@devices
def test_schedule_follows_the_mask(device: str) -> None:
    """A change in place is noticed; new masks in the memory of old ones never meet their schedules."""
    x = draw(Shape(), DTYPE, device)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()

    def wrong(mask: attnforge.Spans) -> float:
        exact = reference(q, k, v, mask)
        return float((attnforge.attention(q, k, v, mask) - exact.out).abs().max())

    mask = spans(65, 65, device)
    assert wrong(mask) < 0.02
    mask.starts.fill_(3)
    mask.ends.fill_(40)
    assert wrong(mask) < 0.02
    del mask
    for end in range(1, 66, 4):
        starts = torch.zeros(65, dtype=torch.int32, device=device)
        assert wrong(attnforge.Spans(starts, starts + end)) < 0.02
    attnforge.attention(q, k, v, spans(65, 65, device))
    assert schedules() <= 2  # those of the dead masks are dropped


@devices
def test_inference_masks_are_not_cached(device: str) -> None:
    """They have no version counter, so a change in place could not be noticed."""
    x = draw(Shape(), DTYPE, device)
    with torch.inference_mode():
        mask = spans(65, 65, device)
        first = attnforge.attention(x.q, x.k, x.v, mask)
        mask.ends.fill_(0)
        second = attnforge.attention(x.q, x.k, x.v, mask)
    assert schedules() == 0
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.any()
    assert not second.any()


# ---- Concurrency


@devices
def test_many_threads(device: str) -> None:
    """Threads with masks of their own and of classes new to the router."""
    cases = [
        (draw(Shape(seq_q=n, seq_k=n), DTYPE, device, seed=n), spans(n, n, device)) for n in range(33, 49)
    ]
    expected = [x.grads(attnforge.attention(x.q, x.k, x.v, mask)) for x, mask in cases]
    torch.ops.attnforge.forget_routes()
    torch.ops.attnforge.forget_schedules()
    results: list[tuple[Tensor, ...]] = [()] * len(cases)

    def work(index: int) -> None:
        x, mask = cases[index]
        for _ in range(5):
            results[index] = x.grads(attnforge.attention(x.q, x.k, x.v, mask))

    run_threads([lambda i=i: work(i) for i in range(len(cases))])  # type: ignore[misc]
    for ours, theirs in zip(results, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def run_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


# ---- GPU only


@pytest.mark.gpu
def test_cuda_graph_follows_a_changed_mask() -> None:
    """The schedule is built inside the graph, from what the mask's memory holds at replay."""
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    mask = spans(300, 300, "cuda")
    attnforge.attention(q, k, v, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnforge.attention(q, k, v, mask)
        again = attnforge.attention(q, k, v, mask)
    for seed in (1, 2):
        other = spans(300, 300, "cuda", seed)
        mask.starts.copy_(other.starts)
        mask.ends.copy_(other.ends)
        graph.replay()
        exact = reference(q, k, v, other)
        assert (out - exact.out).abs().max().item() < 2e-2
        assert (again - exact.out).abs().max().item() < 2e-2


@pytest.mark.gpu
def test_compile_with_cuda_graphs() -> None:
    """torch's own graphs: inputs are copied into static memory, then everything is replayed."""
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        x = draw(Shape(seq_q=300, seq_k=300, group=2), DTYPE, "cuda", seed=seed)
        mask = spans(300, 300, "cuda", seed)
        expected = module(x.q, x.k, x.v, mask)
        got = compiled(x.q, x.k, x.v, mask)
        torch.testing.assert_close(got, expected)
        for ours, theirs in zip(x.grads(got), x.grads(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_streams_have_schedules_of_their_own() -> None:
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    mask = spans(300, 300, "cuda")
    expected = attnforge.attention(x.q, x.k, x.v, mask)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = attnforge.attention(x.q, x.k, x.v, mask)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert schedules() == 2


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    for _ in range(2):  # the first call loads kernels
        mask = spans(300, 300, "cuda")
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            x.grads(attnforge.attention(x.q, x.k, x.v, mask))
        finally:
            torch.cuda.set_sync_debug_mode("default")
