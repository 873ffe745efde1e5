"""Attention in many places at once: ranks under DDP and FSDP2, streams, GPUs of one process, graphs of whole steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from oracle import Inputs, Shape, draw, spans
from ranks import torchrun
from torch import Tensor

import attnforge

WORKER = Path(__file__).parent / "parallel_worker.py"
DTYPE = torch.bfloat16
ROWS = 300


def several_gpus(count: int) -> None:
    """Skips unless there are that many."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, {count} needed")


def run_ranks(device: str, ranks: int) -> None:
    assert f"{ranks} ranks agree on {device}" in torchrun(ranks, WORKER, device)


def test_ranks_under_ddp_and_fsdp2() -> None:
    """Each kind of checkpointing, compiled and not: see the worker."""
    run_ranks("cpu", 2)


@pytest.mark.gpu
def test_ranks_under_ddp_and_fsdp2_with_nccl() -> None:
    several_gpus(2)
    run_ranks("cuda", 2)


def case(seed: int, device: str = "cuda") -> tuple[Inputs, attnforge.Spans]:
    return draw(Shape(seq_q=ROWS, seq_k=ROWS, group=2), DTYPE, device, seed=seed), spans(
        ROWS, ROWS, device.partition(":")[0], seed
    )


def step(x: Inputs, mask: attnforge.Spans) -> tuple[Tensor, ...]:
    out = attnforge.attention(x.q, x.k, x.v, mask, deterministic=True)
    return (out.detach(), *x.grads(out))


def assert_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.gpu
def test_many_streams_at_once() -> None:
    """Each stream has data of its own, and all share a mask; nothing waits for another stream."""
    cases = [case(seed) for seed in range(6)]
    mask = cases[0][1]
    expected = [step(x, mask) for x, _ in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results: list[tuple[Tensor, ...]] = []
    for _ in range(5):
        results = []
        for stream, (x, _) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(x, mask))
    torch.cuda.synchronize()
    for ours, theirs in zip(results, expected, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.gpu
def test_a_thread_for_each_stream() -> None:
    cases = [case(seed) for seed in range(4)]
    expected = [step(*one) for one in cases]
    torch.cuda.synchronize()
    results: list[tuple[Tensor, ...]] = [()] * len(cases)

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                results[index] = step(*cases[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    torch.cuda.synchronize()
    for ours, theirs in zip(results, expected, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.gpu
def test_a_cuda_graph_of_forward_and_backward() -> None:
    """The step is recorded once; replays take what is in the inputs' memory then."""
    x, mask = case(0)
    other, _ = case(1)
    expected = step(other, mask)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(x, mask)
    with torch.no_grad():
        for name in ("q", "k", "v", "dout"):
            getattr(x, name).copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(results, expected)


@pytest.mark.gpu
def test_several_gpus_in_one_process() -> None:
    """The tensors' device counts, not the current one; kernels are loaded on each."""
    several_gpus(2)
    expected = step(*case(0, "cuda:0"))
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, mask = case(0, "cuda:0")
        x = Inputs(*(t.detach().to(device).requires_grad_(t.requires_grad) for t in (x.q, x.k, x.v, x.dout)))
        mask = attnforge.Spans(mask.starts.to(device), mask.ends.to(device))
        assert torch.cuda.current_device() == 0
        got = step(x, mask)
        assert all(t.device == torch.device(device) for t in got)
        assert_equal(got, expected)


@pytest.mark.gpu
def test_several_gpus_in_threads() -> None:
    several_gpus(2)
    expected = step(*case(0))
    results: list[tuple[Tensor, ...]] = [(), ()]

    def work(index: int) -> None:
        torch.cuda.set_device(index)
        for _ in range(5):
            results[index] = step(*case(0))
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for index, ours in enumerate(results):
        assert ours[0].device == torch.device("cuda", index)
        assert_equal(ours, expected)


@pytest.mark.gpu
def test_tensors_on_different_gpus_are_refused() -> None:
    several_gpus(2)
    x, mask = case(0)
    with pytest.raises(ValueError, match="k"):
        attnforge.attention(x.q, x.k.to("cuda:1"), x.v, mask)
