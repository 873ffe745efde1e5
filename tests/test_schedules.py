"""Schedules of spans masks: shared, dropped and rebuilt when they must be; threads, streams, CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from oracle import Shape, draw, spans
from torch import Tensor

import attnforge
from attnforge.runtime.reference import reference

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16
pytestmark = pytest.mark.usefixtures("no_schedules")


def schedules() -> int:
    return int(torch.ops.attnforge.schedule_count())


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
    assert schedules() == 1, "one that belongs to the graph is in the cache"
    for seed in (1, 2):
        other = spans(300, 300, "cuda", seed)
        mask.starts.copy_(other.starts)
        mask.ends.copy_(other.ends)
        graph.replay()
        exact = reference(q, k, v, other)
        assert (out - exact.out).abs().max().item() < 2e-2
        assert (again - exact.out).abs().max().item() < 2e-2


@pytest.mark.gpu
def test_cached_schedules_are_in_nobodys_pool() -> None:
    """Warming up a CUDA graph, torch.compile redirects allocations and wants nothing left in that pool."""
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    mask = spans(300, 300, "cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        out = attnforge.attention(x.q, x.k, x.v, mask)
        x.grads(out)
    assert schedules() == 2
    del out
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert not [block for block in blocks if block["state"] == "active_allocated"]


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
