"""attention under torch.compile: fullgraph, changing lengths, masks made inside the graph, CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import Shape, draw, make_mask, spans
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import attnforge
from attnforge.runtime.masks import AnyMask

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPE = torch.bfloat16
KINDS = ("full", "causal", "spans")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def module(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> Tensor:
    out = attnforge.attention(q * 2, k, v + 1, mask)
    assert isinstance(out, Tensor)
    return out * 3


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_compile_with_changing_lengths(device: str, kind: str) -> None:
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (65, 130, 77):
        x = draw(Shape(seq_q=length, seq_k=length, group=2), DTYPE, device)
        mask = make_mask(kind, length, length, device)
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
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_compile_with_autocast(device: str, inside: bool) -> None:
    """float32 goes in, attention runs in bfloat16, gradients come back in float32; lengths change."""

    def step(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> Tensor:
        if not inside:
            return module(q, k, v, mask)
        with torch.autocast(device, dtype=DTYPE):
            return module(q, k, v, mask)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (65, 130):
        x = draw(Shape(seq_q=length, seq_k=length, group=2), torch.float32, device)
        mask = spans(length, length, device)
        with torch.autocast(device, dtype=DTYPE, enabled=not inside):
            expected, got = step(x.q, x.k, x.v, mask), compiled(x.q, x.k, x.v, mask)
        assert got.dtype is DTYPE
        assert torch.equal(got, expected)
        dout = x.dout.to(DTYPE)
        grads = torch.autograd.grad(got, (x.q, x.k, x.v), dout)
        for ours, theirs in zip(grads, torch.autograd.grad(expected, (x.q, x.k, x.v), dout), strict=True):
            assert ours.dtype is torch.float32
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


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


def test_masks_of_lists_are_made_outside() -> None:
    """The error of a whole graph says so; else the graph breaks there, and nothing of the mask is compiled."""
    x = draw(Shape(seq_q=64, seq_k=64), DTYPE, "cpu")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()

    def step(q: Tensor, lengths: list[int]) -> Tensor:
        return attnforge.attention(q * 2, k, v, attnforge.masks.documents(lengths, q.device, causal=True))

    with pytest.raises(
        Exception, match=r"masks\.documents makes a mask on the host; make it outside of compiled"
    ):
        torch.compile(step, fullgraph=True, backend="eager")(q, [20, 44])
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter)
    for lengths in ([20, 44], [30, 34], [44, 20]):
        assert torch.equal(compiled(q, lengths), step(q, lengths))
    assert counter.frame_count <= 2, "q * 2, and attention"


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


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["mask-given", "mask-computed"])
def test_compile_with_cuda_graphs(inside: bool) -> None:
    """torch's own graphs: a warm-up, a recording, then replays. Nothing may stay in their memory pool."""

    def step(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        mask = attnforge.Spans(starts + 1, ends + 1) if inside else attnforge.Spans(starts, ends)
        return module(q, k, v, mask)

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        x = draw(Shape(seq_q=300, seq_k=300, group=2), DTYPE, "cuda", seed=seed)
        mask = spans(300, 300, "cuda", seed)
        expected = step(x.q, x.k, x.v, mask.starts, mask.ends)
        wanted = x.grads(expected)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x.q, x.k, x.v, mask.starts, mask.ends)
        torch.testing.assert_close(got, expected)
        for ours, theirs in zip(x.grads(got), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = attnforge.masks.documents([20, 12], "cpu", causal=True)

    def forward(self, x: Tensor) -> Tensor:
        out = attnforge.attention(x, x, x, self.mask)
        assert isinstance(out, Tensor)
        return out


def test_an_exported_program_is_loaded_by_another_process(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 32, 16)
    torch.export.save(torch.export.export(Layer(), (x,)), tmp_path / "layer.pt2")
    torch.save(x, tmp_path / "x.pt")
    code = """
import torch
import attnforge
attnforge.load_operators()
torch.save(torch.export.load("layer.pt2").module()(torch.load("x.pt")), "out.pt")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "out.pt"), Layer()(x))


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_sizes_need_no_bounds(axis: int, strict: bool) -> None:
    """`Dim("n")` without max=: our limits of sizes are no guards."""

    class Plain(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attnforge.attention(x, x, x, attnforge.Causal())

    shapes = {"x": {axis: torch.export.Dim("n")}}
    exported = torch.export.export(
        Plain(), (torch.randn(2, 2, 32, 16),), dynamic_shapes=shapes, strict=strict
    )
    x = torch.randn(5, 2, 32, 16) if axis == 0 else torch.randn(2, 2, 50, 16)
    assert torch.equal(exported.module()(x), Plain()(x))
