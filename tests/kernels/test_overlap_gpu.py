"""Hopper's backward on a GPU, whose launches overlap: calls in a row, CUDA graphs, blocks that have nothing to do."""

from __future__ import annotations

import pytest
import torch
from oracle import Inputs, Shape, draw, make_mask
from torch import Tensor

import attnforge
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.search.reference import reference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
LIMIT = 2e-2  # of the rms error, as a share of the gradients' own: bfloat16 of all that goes in and out
# tile_m, tile_n, stages, stages_dout, lag, in_regs, split_heads, deterministic
VARIANTS = [
    (64, Mask.FULL, Sm90Backward(64, 128, 3, 3, True, 2, False, False)),
    (64, Mask.SPANS, Sm90Backward(64, 128, 3, 3, True, 2, True, False)),
    (64, Mask.SPANS, Sm90Backward(64, 128, 3, 3, True, 2, True, True)),
    (72, Mask.CAUSAL, Sm90Backward(64, 128, 4, 3, True, 1, False, False)),
    (128, Mask.SPANS, Sm90Backward(64, 128, 3, 2, False, 0, False, False)),
    (128, Mask.DENSE, Sm90Backward(64, 128, 3, 2, False, 0, True, True)),
    (128, Mask.FULL, Sm90Backward(64, 128, 3, 2, False, 0, True, False)),
    (96, Mask.CAUSAL, Sm90Backward(64, 128, 3, 2, False, 1, False, False, persistent=1)),
    (96, Mask.FULL, Sm90Backward(64, 128, 3, 2, False, 1, False, True, persistent=1)),
    (64, Mask.CAUSAL, Sm90Backward(64, 128, 4, 3, True, 2, False, False, persistent=1)),
    (64, Mask.SPANS, Sm90Backward(64, 128, 4, 3, True, 2, False, False, persistent=1)),
    (64, Mask.SPANS, Sm90Backward(64, 128, 4, 3, True, 2, False, True, persistent=1)),
    (72, Mask.SPANS, Sm90Backward(64, 128, 4, 3, False, 1, False, False, loaders=2, persistent=1)),
]
variants = pytest.mark.parametrize(
    ("head_dim", "mask", "tuning"),
    VARIANTS,
    ids=[
        f"{d}-{m.value}-{t.tile_m}-h{t.split_heads:d}-o{t.deterministic:d}-p{t.persistent}"
        for d, m, t in VARIANTS
    ],
)
# Short ones: all blocks of a launch run at once, and the next launches' beside them. The last takes several rounds,
# or several work tiles of a persistent block.
SHAPES = [
    Shape(seq_q=64, seq_k=64, heads_kv=1),
    Shape(seq_q=300, seq_k=190, heads_kv=2, group=3),
    Shape(seq_q=129, seq_k=640, heads_kv=1, group=7),
    Shape(seq_q=700, seq_k=700, heads_kv=4, group=2, batch=12),
]
Grads = tuple[Tensor, ...]


def handle_of(head_dim: int, mask: Mask, tuning: Sm90Backward) -> int:
    """Of the variant on the GPU; skips on one that is no Hopper."""
    if kernels.target(DEVICE) is not Arch.SM90A:
        pytest.skip("launches overlap in Hopper's backward")
    return kernels.load(
        Spec(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask), tuning), DEVICE
    )


class Call:
    """Inputs of a backward, exact out and lse rounded, and the exact gradients."""

    def __init__(self, x: Inputs, mask: AnyMask) -> None:
        self.q, self.k, self.v = (t.detach() for t in (x.q, x.k, x.v))
        self.dout, self.mask = x.dout, mask
        exact = reference(self.q, self.k, self.v, mask, None, x.dout)
        self.out, self.lse = exact.out.to(self.q.dtype), exact.lse.float()
        assert exact.dq is not None
        assert exact.dk is not None
        assert exact.dv is not None
        self.exact = (exact.dq, exact.dk, exact.dv)

    def run(self, handle: int, deterministic: bool) -> Grads:
        return ops.backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, self.mask, None, deterministic, handle
        )

    def require_right(self, grads: Grads) -> None:
        for name, got, exact in zip(("dq", "dk", "dv"), grads, self.exact, strict=True):
            size = exact.pow(2).mean().sqrt().item()
            error = (got - exact).pow(2).mean().sqrt().item()
            assert error <= LIMIT * size, f"{name}: rms error {error:.3g} of {size:.3g}"  # false for NaN


def poison() -> None:
    """The memory that calls take next holds NaN."""
    for size in (1 << 16, 1 << 20, 1 << 23):
        torch.full((size,), torch.nan, device=DEVICE)


@variants
def test_calls_in_a_row(head_dim: int, mask: Mask, tuning: Sm90Backward) -> None:
    """Calls of many sizes take each other's memory at once, with nothing between them."""
    handle = handle_of(head_dim, mask, tuning)
    calls = []
    for seed, shape in enumerate(SHAPES * 2):
        sizes = Shape(**{**vars(shape), "head_dim": head_dim})
        x = draw(sizes, torch.bfloat16, "cuda", seed=seed)
        calls.append(Call(x, make_mask(mask.value, shape.seq_q, shape.seq_k, "cuda", seed)))
    alone = []
    for call in calls:
        poison()
        torch.cuda.synchronize()
        alone.append(call.run(handle, tuning.deterministic))
        torch.cuda.synchronize()
        call.require_right(alone[-1])
    for _ in range(8):
        poison()
        for call, expected, grads in zip(
            calls, alone, [call.run(handle, tuning.deterministic) for call in calls], strict=True
        ):
            if tuning.deterministic:
                assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
            else:
                call.require_right(grads)


@variants
def test_keys_that_nobody_sees(head_dim: int, mask: Mask, tuning: Sm90Backward) -> None:
    """Blocks without work, among others and alone: they wait, too, and gradients are zero."""
    if mask not in (Mask.SPANS, Mask.DENSE):
        pytest.skip("all keys are seen")
    handle = handle_of(head_dim, mask, tuning)
    length = 900
    x = draw(Shape(seq_q=length, seq_k=length, head_dim=head_dim, group=7), torch.bfloat16, "cuda")
    for first in (length, 130, 0):  # keys from this one on are hidden
        ends = torch.full((length,), length, dtype=torch.int32, device=DEVICE)
        ends[first:] = 0
        hidden: AnyMask = attnforge.Spans(torch.zeros_like(ends), ends)
        if mask is Mask.DENSE:
            hidden = attnforge.DenseMask((ends > 0).expand(length, length))
        call = Call(x, hidden)
        for _ in range(5):
            poison()
            grads = call.run(handle, tuning.deterministic)
            call.require_right(grads)
            assert not grads[1][:, :, first:].any()
            assert not grads[2][:, :, first:].any()


@pytest.mark.parametrize(
    ("head_dim", "kind"), [(64, "full"), (64, "spans"), (72, "causal"), (128, "spans"), (128, "dense")]
)
def test_graphs_of_several_layers(head_dim: int, kind: str) -> None:
    """Recorded once, with what waits for what; replays take what is in the inputs' memory then."""
    shape = Shape(seq_q=333, seq_k=333, head_dim=head_dim, group=2)
    x, other = (draw(shape, torch.bfloat16, "cuda", seed=seed) for seed in (0, 1))
    mask = make_mask(kind, 333, 333, "cuda")

    def step(x: Inputs) -> Grads:
        """Three layers, each with the gradients of the one before as dout, so none may run too early."""
        dout, found = x.dout, []
        for _ in range(3):
            out = attnforge.attention(x.q, x.k, x.v, mask, deterministic=True)
            found.append(torch.autograd.grad(out, (x.q, x.k, x.v), dout))
            dout = found[-1][0]
        return tuple(grad for grads in found for grad in grads)

    expected = [step(one) for one in (other, x)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    values = [t.detach().clone() for t in (x.q, x.k, x.v, x.dout)]
    with torch.cuda.graph(graph):
        results = step(x)
    for source, right in (((other.q, other.k, other.v, other.dout), expected[0]), (values, expected[1])):
        with torch.no_grad():
            for target, value in zip((x.q, x.k, x.v, x.dout), source, strict=True):
                target.copy_(value)
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))
