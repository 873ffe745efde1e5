"""Schedules: a mask owns them, they are built once for each tile shape, shared by all that use it, and go with it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracle import Shape, draw, spans
from torch import Tensor

import attnforge
from attnforge.runtime.search.reference import reference

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16


def schedules(mask: attnforge.Spans | attnforge.DenseMask | None = None) -> int:
    """Those that a mask owns; without one all that live."""
    return int(torch.ops.attnforge.schedule_count(None if mask is None else mask.data))


@devices
def test_one_schedule_for_all_layers(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    y = x.q
    for _ in range(3):
        y = attnforge.attention(y, x.k, x.v, mask)
    y.backward(x.dout)
    assert schedules(mask) == 2


@devices
def test_they_go_with_the_mask(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    before = schedules()
    for seed in range(5):
        mask = spans(65, 65, device, seed)
        x.grads(attnforge.attention(x.q, x.k, x.v, mask))
        assert schedules() == before + 2
        out = attnforge.attention(x.q, x.k, x.v, mask)
        del mask  # but the graph still needs it
        assert schedules() == before + 2
        x.grads(out)
        del out
        assert schedules() == before


@devices
def test_a_mask_is_a_value(device: str) -> None:
    """Whoever writes the tensors that it was made from, whether torch notices or not, changes nothing."""
    x = draw(Shape(), DTYPE, device)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    starts, ends = (t.to(device) for t in spans(65, 65, "cpu").data)
    visible = torch.rand(65, 65, device=device) < 0.5
    masks: list[attnforge.Spans | attnforge.DenseMask] = [
        attnforge.Spans(starts, ends),
        attnforge.DenseMask(visible),
    ]
    expected = [x.grads(attnforge.attention(x.q, x.k, x.v, mask)) for mask in masks]
    for mask, same in zip(masks, [copy.deepcopy(mask) for mask in masks], strict=True):
        out = attnforge.attention(x.q, x.k, x.v, mask)
        for changed in (starts, ends, visible):
            changed.data.fill_(1)  # no version counter moves
        assert torch.equal(out, attnforge.attention(x.q, x.k, x.v, same))
        for ours, theirs in zip(x.grads(out), expected[masks.index(mask)], strict=True):
            torch.testing.assert_close(ours, theirs)
    for end in range(1, 66, 4):  # in the memory of masks that are gone
        starts = torch.zeros(65, dtype=torch.int32, device=device)
        mask = attnforge.Spans(starts, starts + end)
        exact = reference(q, k, v, mask)
        assert float((attnforge.attention(q, k, v, mask) - exact.out).abs().max()) < 0.02


def test_writers_that_torch_does_not_see() -> None:
    """numpy, storage copies and fresh `.data` aliases, between masks of the same tensors."""
    x = torch.randn(1, 2, 64, 16)
    host = np.zeros(64, dtype=np.int32)
    starts, ends = torch.from_numpy(host), torch.full((64,), 64, dtype=torch.int32)

    def check() -> None:
        ours = attnforge.attention(x, x, x, attnforge.Spans(starts.data, ends.data))
        fresh = attnforge.attention(x, x, x, attnforge.Spans(starts.clone(), ends.clone()))
        assert torch.equal(ours, fresh)

    check()
    host[:] = 20
    check()
    starts.untyped_storage().copy_(torch.full((64,), 40, dtype=torch.int32).untyped_storage())
    check()
    with torch.inference_mode():
        starts.fill_(10)
    check()
    with torch.no_grad():
        starts.set_(torch.full((64,), 30, dtype=torch.int32))  # type: ignore[call-overload]
    check()


@devices
def test_copies_own_schedules_of_their_own(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    expected = attnforge.attention(x.q, x.k, x.v, mask)
    for same in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask.to("cpu"))).to(device)):  # noqa: S301
        assert torch.equal(attnforge.attention(x.q, x.k, x.v, same), expected)
        assert (schedules(mask), schedules(same)) == (1, 1)
    assert mask.to(mask.device) is mask


@devices
def test_data_without_an_owner_serves_one_call(device: str) -> None:
    """A copy of the data is the mask, too: a CUDA graph's static inputs are such."""
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    expected = x.grads(attnforge.attention(x.q, x.k, x.v, mask))
    before = schedules()
    alias = object.__new__(attnforge.Spans)
    alias._adopt(mask.data.clone(), None)
    for ours, theirs in zip(x.grads(attnforge.attention(x.q, x.k, x.v, alias)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert schedules() == before


@devices
def test_lengths_of_q_have_schedules_of_their_own(device: str) -> None:
    """Spans say nothing of how many queries there are."""
    x = draw(Shape(), DTYPE, device)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    mask = spans(65, 65, device)
    for rows in (65, 30, 65):
        exact = reference(q[:, :, :rows], k, v, mask)
        assert float((attnforge.attention(q[:, :, :rows], k, v, mask) - exact.out).abs().max()) < 0.02
    assert schedules(mask) == 2


@devices
def test_inference_masks_are_masks(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    with torch.inference_mode():
        mask = spans(65, 65, device)
        for _ in range(3):
            attnforge.attention(x.q, x.k, x.v, mask)
        assert schedules(mask) == 1
    x.grads(attnforge.attention(x.q, x.k, x.v, mask))
    assert schedules(mask) == 2


@devices
def test_regional_compilation_shares_them(device: str) -> None:
    """Layers that are compiled one by one, and eager ones beside them."""
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)

    def layer(q: Tensor, mask: attnforge.Spans) -> Tensor:
        out = attnforge.attention(q * 2, x.k.detach(), x.v.detach(), mask)
        assert isinstance(out, Tensor)
        return out

    layers = [torch.compile(layer, fullgraph=True, backend="aot_eager") for _ in range(3)]
    y = x.q
    for one in (*layers, layer):
        y = one(y, mask)
    y.sum().backward()
    assert schedules(mask) == 2


@devices
def test_many_threads(device: str) -> None:
    """Threads with masks of their own and of classes new to the router."""
    cases = [
        (draw(Shape(seq_q=n, seq_k=n), DTYPE, device, seed=n), spans(n, n, device)) for n in range(33, 49)
    ]
    expected = [x.grads(attnforge.attention(x.q, x.k, x.v, mask)) for x, mask in cases]
    torch.ops.attnforge.forget_routes()
    fresh = [copy.deepcopy(mask) for _, mask in cases]
    results: list[tuple[Tensor, ...]] = [()] * len(cases)

    def work(index: int) -> None:
        x = cases[index][0]
        for _ in range(5):
            results[index] = x.grads(attnforge.attention(x.q, x.k, x.v, fresh[index]))

    run_threads([lambda i=i: work(i) for i in range(len(cases))])  # type: ignore[misc]
    for ours, theirs in zip(results, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@devices
def test_threads_share_one_mask(device: str) -> None:
    x = draw(Shape(), DTYPE, device)
    mask = spans(65, 65, device)
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(5):
            results.append(attnforge.attention(x.q.detach(), x.k.detach(), x.v.detach(), mask))

    run_threads([work] * 8)
    assert len(results) == 40
    assert all(torch.equal(out, results[0]) for out in results)
    assert schedules(mask) == 1


def run_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["mask-given", "mask-made"])
def test_cuda_graph(inside: bool) -> None:
    """A mask that is made during capture follows its tensors at each replay; one from outside is constant."""
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    first = spans(300, 300, "cuda")
    starts, ends = first.starts, first.ends
    attnforge.attention(q, k, v, first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = attnforge.Spans(starts, ends) if inside else first
        out = attnforge.attention(q, k, v, mask)
        again = attnforge.attention(out, k, v, mask)
    assert schedules(first) == 1, "one that belongs to the graph is kept"
    for seed in (1, 2):
        other = spans(300, 300, "cuda", seed)
        starts.copy_(other.starts)
        ends.copy_(other.ends)
        graph.replay()
        wanted = other if inside else first
        assert (out - reference(q, k, v, wanted).out).abs().max().item() < 2e-2
        assert (again - reference(out, k, v, wanted).out).abs().max().item() < 2e-2


@pytest.mark.gpu
def test_cached_schedules_are_in_nobodys_pool() -> None:
    """Warming up a CUDA graph, torch.compile redirects allocations and wants nothing left in that pool."""
    x = draw(Shape(seq_q=300, seq_k=300), DTYPE, "cuda")
    mask = spans(300, 300, "cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        out = attnforge.attention(x.q, x.k, x.v, mask)
        x.grads(out)
    assert schedules(mask) == 2
    del out
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert not [block for block in blocks if block["state"] == "active_allocated"]


@pytest.mark.gpu
def test_streams_share_one_schedule() -> None:
    """Built by whoever comes first; others wait for it on the device, and count their work tiles apart."""
    x = draw(Shape(seq_q=3000, seq_k=3000, group=2), DTYPE, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    expected = attnforge.attention(q, k, v, spans(3000, 3000, "cuda"))
    torch.cuda.synchronize()
    for _ in range(20):
        mask = spans(3000, 3000, "cuda")
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        results = []
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(2_000_000)
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                results.append(attnforge.attention(q, k, v, mask))
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in results)
        assert schedules(mask) == 1


@pytest.mark.gpu
def test_memory_is_flat() -> None:
    """A new pack each step, by all that make masks of one."""
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=DTYPE, requires_grad=True) for _ in range(3))
    a, b, c = (x.transpose(1, 2) for x in (q, k, v))

    def step(n: int) -> None:
        cut = 100 + n % 1000
        pack = attnforge.bagel.PackedMask([cut, 4096 - cut], [cut, 4096 - cut], ["causal", "full"], "cuda")
        cu = torch.tensor([0, cut, 4096], dtype=torch.int32, device="cuda")
        short = slice(0, 4096 - n % 7)
        out = attnforge.attention(q, k, v, pack).sum()
        out = out + attnforge.flash_attn_varlen_func(a[0], b[0], c[0], cu, cu, causal=True).sum()
        out = (
            out + attnforge.flash_attn_func(a[:, short], b[:, short], c[:, short], window_size=(cut, 0)).sum()
        )
        torch.autograd.grad(out, (q, k, v))

    def settle() -> None:
        """A tiny backward: until it begins, autograd's thread may still hold the gradients of the last one."""
        one = torch.ones((), device="cuda", requires_grad=True)
        (one * one).backward()
        torch.cuda.synchronize()

    step(0)
    gc.collect()  # what other tests left is not freed meanwhile
    used = []
    for n in range(int(os.environ.get("ATTNFORGE_MEMORY_STEPS", "300"))):
        step(n)
        if n % 100 == 99:
            settle()
            used.append(torch.cuda.memory_allocated())
    print(f"{n + 1} steps, bytes allocated: {min(used)} to {max(used)}")
    assert max(used) - min(used) < 1 << 20


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
