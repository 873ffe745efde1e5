"""Values and gradients of `attention` against float64: masks, dtypes, head dims, lengths and layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Inputs, Shape, check, draw, make_mask, place, spans, visible
from torch import Tensor

import attnforge
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Direction, DType, Mask, Problem
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.reference import reference

CPU, GPU = "cpu", "cuda"
ON_GPU = pytest.mark.gpu
TARGETS = [
    pytest.param(CPU, torch.float32, id="cpu-fp32"),
    pytest.param(CPU, torch.bfloat16, id="cpu-bf16"),
    pytest.param(GPU, torch.bfloat16, id="gpu-bf16", marks=ON_GPU),
    pytest.param(GPU, torch.float16, id="gpu-fp16", marks=ON_GPU),
    pytest.param(GPU, torch.float32, id="gpu-fp32", marks=ON_GPU),
]
MASKS = ("full", "causal", "spans", "dense")

targets = pytest.mark.parametrize(("device", "dtype"), TARGETS)
masks = pytest.mark.parametrize("kind", MASKS)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nothing has written holds NaN (floats) or the largest number (integers)."""
    if torch.cuda.is_available():
        block = torch.full((1 << 26,), torch.nan, device=GPU)
        del block  # back to the allocator, which hands it out again as it is
        yield
        return
    # Outputs come from empty_like, which fills them in this mode; CPU kernels are deterministic anyway.
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@targets
@masks
@pytest.mark.parametrize("group", [1, 2, 7])
def test_masks_and_groups(device: str, dtype: torch.dtype, kind: str, group: int) -> None:
    x = draw(Shape(group=group, batch=2, seq_q=130, seq_k=130), dtype, device)
    check(x, make_mask(kind, 130, 130, device))


@targets
@pytest.mark.parametrize("head_dim", [8, 72, 128])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    x = draw(Shape(head_dim=head_dim, group=2, seq_q=70, seq_k=100), dtype, device)
    check(x, spans(70, 100, device))


@targets
@masks
@pytest.mark.parametrize(
    ("seq_q", "seq_k"), [(1, 1), (1, 17), (17, 1), (17, 63), (63, 65), (65, 130), (130, 65), (257, 129)]
)
def test_lengths(device: str, dtype: torch.dtype, kind: str, seq_q: int, seq_k: int) -> None:
    x = draw(Shape(seq_q=seq_q, seq_k=seq_k, group=2), dtype, device)
    check(x, make_mask(kind, seq_q, seq_k, device))


@targets
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed", "slice", "offset", "expanded"])
def test_layouts(device: str, dtype: torch.dtype, layout: str) -> None:
    batch = 1 if layout == "packed" else 2
    x = draw(Shape(batch=batch, group=2, seq_q=65, seq_k=77), dtype, device, layout)
    check(x, spans(65, 77, device))


@targets
@pytest.mark.parametrize(
    ("batch", "heads_kv", "seq"), [(1, 1, 65), (1, 2, 65), (3, 1, 65), (2, 2, 1), (1, 1, 1)]
)
def test_axes_of_one_have_any_stride(
    device: str, dtype: torch.dtype, batch: int, heads_kv: int, seq: int
) -> None:
    """Strides that alignment and TMA would refuse, if they were ever used."""
    x = draw(Shape(batch=batch, heads_kv=heads_kv, seq_q=seq, seq_k=seq), dtype, device, "loose")
    assert 3 in x.q.stride()
    check(x, attnforge.Causal())


@targets
def test_layout_of_results(device: str, dtype: torch.dtype) -> None:
    x = draw(Shape(group=2), dtype, device, "packed")
    out = attnforge.attention(x.q, x.k, x.v)
    assert (out.stride(), out.dtype) == (x.q.stride(), x.q.dtype)
    for grad, value in zip(x.grads(out), (x.q, x.k, x.v), strict=True):
        assert grad.stride() == value.stride()


@targets
def test_mixed_layouts(device: str, dtype: torch.dtype) -> None:
    x = draw(Shape(batch=2, group=2), dtype, device)
    q, k, v = (
        place(t.detach(), how).requires_grad_() for t, how in ((x.q, "bhsd"), (x.k, "slice"), (x.v, "offset"))
    )
    check(Inputs(q, k, v, x.dout), attnforge.Causal())


@targets
@masks
def test_inputs_are_only_read(device: str, dtype: torch.dtype, kind: str) -> None:
    """NaN around the inputs reaches no result (see `place`), and no byte of their memory changes."""
    x = draw(Shape(batch=2), dtype, device, "slice")
    before = [whole(t).clone() for t in (x.q, x.k, x.v, x.dout)]
    check(x, make_mask(kind, 65, 65, device))
    for value, copy in zip((x.q, x.k, x.v, x.dout), before, strict=True):
        assert torch.equal(whole(value), copy)


def whole(x: Tensor) -> Tensor:
    """All bytes of the memory that x is a view of."""
    storage = x.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)


@targets
def test_rows_without_keys(device: str, dtype: torch.dtype) -> None:
    """check() asserts zeros and -inf for them; here nearly every row is one, then all are."""
    x = draw(Shape(seq_q=130, seq_k=130), dtype, device)
    starts = torch.full((130,), 100, dtype=torch.int32, device=device)
    check(x, attnforge.Spans(starts, starts + 2))
    check(x, attnforge.Spans(starts, starts))


@targets
def test_scale(device: str, dtype: torch.dtype) -> None:
    x = draw(Shape(), dtype, device)
    check(x, attnforge.Causal(), scale=0.3)


@targets
def test_large_logits(device: str, dtype: torch.dtype) -> None:
    """Scores of thousands: exp() of them overflows unless the maximum is taken off first.

    Nearly every row then looks at one key, and dq errs in the few that hesitate between two: it takes thousands of
    rows to have a hundred of those, and with them an error that does not depend on who was lucky.
    """
    x = draw(Shape(batch=8, heads_kv=16), dtype, device)
    q, k = ((t.detach() * 20).requires_grad_() for t in (x.q, x.k))
    # Kernels work in base 2, where scores are larger, and so is what float32 rounds off them.
    check(Inputs(q, k, x.v, x.dout), attnforge.Causal(), slack=2.0 if dtype is torch.float32 else 1.0)


@targets
@masks
@pytest.mark.parametrize("rise", [0.2, 3.0, -3.0])
def test_scores_that_rise_with_the_key(device: str, dtype: torch.dtype, kind: str, rise: float) -> None:
    """Maxima that move a little, far, or never again from one tile to the next; many tiles, one of them a stub."""
    x = draw(Shape(seq_q=530, seq_k=530, group=2), dtype, device)
    k = x.k.detach() * 0.1
    k[..., 0] = torch.linspace(0, rise * 8, 530, device=device).to(dtype)
    q = x.q.detach() * 0.5
    q[..., 0] = 8.0
    # Scores near 24, which our two kernels on Hopper round differently: dq sums what cancels, times keys near 24.
    apart = device == "cuda" and dtype is torch.float32 and rise > 1
    x = Inputs(q.requires_grad_(), k.requires_grad_(), x.v, x.dout)
    check(x, make_mask(kind, 530, 530, device), slack=3.0 if apart else 1.0)


@targets
def test_gradient_of_a_sum(device: str, dtype: torch.dtype) -> None:
    """sum() sends one number expanded to all of out: strides of 0, the last one too."""
    x = draw(Shape(), dtype, device)
    x = Inputs(x.q, x.k, x.v, torch.ones((), dtype=dtype, device=device).expand(x.dout.shape))
    check(x, attnforge.Causal())


@targets
def test_deterministic(device: str, dtype: torch.dtype) -> None:
    x = draw(Shape(seq_q=257, seq_k=257, group=2), dtype, device)
    mask = spans(257, 257, device)
    first, *others = (attnforge.attention(x.q, x.k, x.v, mask, deterministic=True) for _ in range(10))
    grads = x.grads(first)
    for other in others:
        assert torch.equal(first, other)
        assert all(torch.equal(a, b) for a, b in zip(grads, x.grads(other), strict=True))


@targets
def test_deterministic_where_rows_see_nothing(device: str, dtype: torch.dtype) -> None:
    """Whole tiles of queries whose sums of dq nobody begins, and keys that no query sees."""
    x = draw(Shape(seq_q=700, seq_k=700, group=2), dtype, device)
    first = torch.arange(700, dtype=torch.int32, device=device) // 350 * 350
    mask = attnforge.Spans(first, first + 100)
    grads = x.grads(attnforge.attention(x.q, x.k, x.v, mask, deterministic=True))
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, dout=x.dout)
    for grad, answer in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
        assert answer is not None
        assert (grad - answer).abs().max().item() < 2e-2 * answer.abs().max().item()
    assert not grads[0][..., 100:350, :].any()


@targets
def test_batch_entries_are_independent(device: str, dtype: torch.dtype) -> None:
    x = draw(Shape(batch=3, seq_q=70, seq_k=70), dtype, device)
    together = attnforge.attention(x.q, x.k, x.v, attnforge.Causal())
    alone = attnforge.attention(x.q[1:2], x.k[1:2], x.v[1:2], attnforge.Causal())
    assert torch.equal(together[1:2], alone)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=ON_GPU)])
@pytest.mark.parametrize("direction", list(Direction))
def test_chosen_variants(device: str, direction: Direction) -> None:
    """A few variants by handle, as the search runs them, on lengths off every tile."""
    where = torch.device(device)
    problem = Problem(
        direction, kernels.target(where), DType.BFLOAT16, 64, Mask.SPANS, 4 if device == CPU else 16
    )
    x = draw(Shape(seq_q=150, seq_k=201, group=2), torch.bfloat16, device)
    mask = spans(150, 201, device)
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, dout=x.dout)
    specs = list(candidates(problem))
    for spec in specs[:: max(1, len(specs) // 3)][:4]:
        handle = kernels.load(spec, where)
        assert handle == kernels.load(spec, where) > 0
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        forward = direction is Direction.FORWARD
        out, lse = ops.forward(q, k, v, mask, None, handle if forward else 0)
        assert (out - exact.out).abs().max().item() < 2e-2, spec.to_cli()
        if not forward:
            grads = ops.backward(x.dout, q, k, v, out, lse, mask, None, False, handle)
            for grad, answer in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
                assert answer is not None
                assert (grad - answer).abs().max().item() < 2e-2 * answer.abs().max().item(), spec.to_cli()


@settings(max_examples=40, derandomize=True)
@given(
    seq_q=st.integers(1, 200),
    seq_k=st.integers(1, 200),
    heads_kv=st.integers(1, 3),
    group=st.integers(1, 4),
    batch=st.integers(1, 2),
    kind=st.sampled_from(MASKS),
    layout=st.sampled_from(["bhsd", "bshd", "slice", "offset", "expanded"]),
    seed=st.integers(0, 9),
)
def test_anything(
    seq_q: int, seq_k: int, heads_kv: int, group: int, batch: int, kind: str, layout: str, seed: int
) -> None:
    device = GPU if torch.cuda.is_available() else CPU
    shape = Shape(seq_q, seq_k, 64, heads_kv, group, batch)
    mask = make_mask(kind, seq_q, seq_k, device, seed)
    check(draw(shape, torch.bfloat16, device, layout, seed), mask)


def test_reference_is_the_definition() -> None:
    """The oracle itself, against the textbook formula and torch's autograd in float64."""
    x = draw(Shape(seq_q=20, seq_k=31, group=2, batch=2), torch.float64, CPU)
    mask = spans(20, 31, CPU)
    seen = visible(mask, 20, 31, CPU)
    k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.v))
    scores = (x.q @ k.transpose(2, 3) * 0.2).masked_fill(~seen, -1e300)
    out = (scores.softmax(-1) * seen) @ v
    expected = (out.detach(), *x.grads(out))
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, 0.2, x.dout)
    for got, want in zip((exact.out, exact.dq, exact.dk, exact.dv), expected, strict=True):
        torch.testing.assert_close(got, want)
    rows = torch.tensor([3, 11])
    some = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, 0.2, x.dout, rows=rows)
    torch.testing.assert_close(some.out, exact.out[:, :, rows])
    torch.testing.assert_close(some.dq, exact.dq[:, :, rows])  # type: ignore[index]
