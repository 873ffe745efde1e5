"""flash-attn 2's functions on our kernels, against dense masks written out document by document."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnforge
from attnforge.runtime.integrations import flash_attn
from attnforge.runtime.search.reference import reference

HEADS, GROUP, DIM = 4, 2, 16
TARGETS = [
    pytest.param("cpu", torch.float32, 2e-6, id="cpu-fp32"),
    pytest.param("cuda", torch.bfloat16, 2e-2, id="gpu-bf16", marks=pytest.mark.gpu),
]
targets = pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5).filter(
    lambda pairs: all(sum(side) for side in zip(*pairs, strict=True))
)


@pytest.mark.parametrize(
    ("sides", "keys"), [((63, 0), 64), ((-1, 63), 576), ((63, -1), 576), ((700, 700), 1024)], ids=str
)
def test_dispatch_learns_how_many_keys_a_window_shows(sides: tuple[int, int], keys: int) -> None:
    """A side without a limit counts as half of the keys."""
    mask = flash_attn.band(1024, 1024, flash_attn.Sides(*sides), torch.device("cpu"))
    assert isinstance(mask, attnforge.Spans)
    assert mask.visible_keys == keys


def bounds(lens: list[int], device: str = "cpu") -> Tensor:
    cumulated = torch.tensor([0, *lens]).cumsum(0)
    return cumulated.to(device, torch.int32)


def dense(
    cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, causal: bool, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """What flash-attn's documentation says, bool (total_q, total_k)."""
    seen = torch.zeros(total_q, total_k, dtype=torch.bool)
    documents = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in documents:
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        shift = (k1 - k0) - (q1 - q0)
        block = block.tril(shift) if causal else block
        block = block.tril(shift + window[1]) if window[1] >= 0 else block
        seen[q0:q1, k0:k1] = block.triu(shift - window[0]) if window[0] >= 0 else block
    return seen


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


@settings(max_examples=150)
@given(lengths, st.booleans(), st.tuples(*[st.integers(-1, 5)] * 2), st.integers(0, 3), st.integers(0, 3))
def test_documents_are_spans(
    pairs: list[tuple[int, int]], causal: bool, window: tuple[int, int], rest_q: int, rest_k: int
) -> None:
    lens_q, lens_k = (list(side) for side in zip(*pairs, strict=True))
    cu_q, cu_k = bounds(lens_q), bounds(lens_k)
    total_q, total_k = sum(lens_q) + rest_q, sum(lens_k) + rest_k
    mask = flash_attn.documents(cu_q, cu_k, total_q, total_k, causal, window)
    assert mask.starts.dtype == mask.ends.dtype == torch.int32
    assert torch.equal(mask.visible(total_q, total_k), dense(cu_q, cu_k, total_q, total_k, causal, window))


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.tuples(*[st.integers(-1, 5)] * 2))
def test_windows_are_spans(seq_q: int, seq_k: int, causal: bool, window: tuple[int, int]) -> None:
    sides = flash_attn.sides_of(causal, window)
    mask = flash_attn.band(seq_q, seq_k, sides, torch.device("cpu"))
    expected = dense(bounds([seq_q]), bounds([seq_k]), seq_q, seq_k, causal, window)
    assert isinstance(mask, attnforge.Spans) == (sides.left >= 0 or sides.right > 0)
    assert (mask.visible(seq_q, seq_k) if mask else torch.ones_like(expected)).equal(expected)
    assert flash_attn.band(seq_q, seq_k, sides, torch.device("cpu")) is mask or not isinstance(
        mask, attnforge.Spans
    )


def test_each_gpu_keeps_windows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda` is another one after torch.cuda.set_device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=0))
    monkeypatch.setattr(flash_attn, "_kept_band", lambda *key: key)
    kept = []
    for index in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        kept.append(flash_attn.band(9, 9, flash_attn.Sides(3, 0), torch.device("cuda")))
    assert kept[0] != kept[1]


@targets
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(device: str, dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    cu_q, cu_k = bounds([40, 0, 70, 9], device), bounds([60, 5, 33, 9], device)
    kinds: Any = {"device": device, "dtype": dtype}
    # Views of fused projections, as a trainer has them.
    q = draw(119, HEADS, DIM, seed=1, **kinds)
    kv = draw(107, 2, HEADS // GROUP, DIM, seed=2, **kinds)
    k, v = kv.unbind(1)
    out = attnforge.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 70, 60, causal=causal, softmax_scale=0.3)
    assert out.shape == q.shape
    assert out.is_contiguous()
    dout = draw(119, HEADS, DIM, seed=3, **kinds).detach()
    out.backward(dout)
    a, b, c, d = (x.detach().transpose(0, 1)[None] for x in (q, k, v, dout))
    mask = flash_attn.documents(cu_q, cu_k, 119, 107, causal)
    exact = reference(a, b, c, mask, 0.3, dout=d)
    assert q.grad is not None
    assert kv.grad is not None
    for ours, theirs in (
        (out, exact.out),
        (q.grad, exact.dq),
        (kv.grad[:, 0], exact.dk),
        (kv.grad[:, 1], exact.dv),
    ):
        assert theirs is not None
        assert (ours.detach() - theirs[0].transpose(0, 1)).abs().max().item() < tolerance * 5


@targets
@pytest.mark.parametrize("window", [(-1, -1), (9, 4)])
@pytest.mark.parametrize(("causal", "seq_q"), [(False, 50), (True, 50), (True, 20), (True, 70)])
def test_dense(
    device: str, dtype: torch.dtype, tolerance: float, causal: bool, seq_q: int, window: tuple[int, int]
) -> None:
    kinds: Any = {"device": device, "dtype": dtype}
    q = draw(2, seq_q, HEADS, DIM, seed=1, **kinds)
    k, v = (draw(2, 50, HEADS // GROUP, DIM, seed=seed, **kinds) for seed in (2, 3))
    out = attnforge.flash_attn_func(q, k, v, causal=causal, window_size=window)
    a, b, c = (x.detach().transpose(1, 2) for x in (q, k, v))
    visible = dense(bounds([seq_q]), bounds([50]), seq_q, 50, causal, window).to(device)
    exact = reference(a, b, c, attnforge.DenseMask(visible)).out.transpose(1, 2)
    assert out.shape == q.shape
    assert (out - exact).abs().max().item() < tolerance
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_the_mask_is_that_of_the_call() -> None:
    """cu_seqlens may change in any way between calls and before backward, noticed by torch or not."""
    q, k, v = (draw(7, 1, 16, device="cpu", dtype=torch.float32, seed=seed) for seed in range(3))
    host = np.array([0, 3, 7], dtype=np.int32)
    cu = torch.from_numpy(host)

    def run(lens: list[int], after: int | None = None) -> tuple[Tensor, ...]:
        host[1] = lens[0]
        out = attnforge.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True)
        if after is not None:
            host[1] = after  # the next micro-batch is written before backward
        return (out, *torch.autograd.grad(out.pow(2).sum(), (q, k, v)))

    for lens in ([3, 4], [5, 2], [1, 6]):
        for ours, expected in zip(run(lens, after=2), run(lens), strict=True):
            assert torch.equal(ours, expected)
        mask = flash_attn.documents(cu, cu, 7, 7, True)
        assert mask.ends.tolist() == [lens[0]] * lens[0] + [7] * lens[1]


def test_nothing_is_kept_of_packs_that_are_gone() -> None:
    q, k, v = (draw(70, 2, 16, device="cpu", dtype=torch.float32, seed=seed) for seed in range(3))
    alive = []
    for step in range(12):
        cu = bounds([20 + step, 50 - step])
        attnforge.flash_attn_varlen_func(q, k, v, cu, cu, 50, 50, causal=True).sum().backward()
        length = 60 + step % 10
        attnforge.flash_attn_func(
            q[None, :length], k[None, :length], v[None, :length], window_size=(3, 0)
        ).sum().backward()
        alive.append(int(torch.ops.attnforge.schedule_count()))
    assert max(alive[6:]) <= max(alive[:6])


def test_a_window_of_fake_tensors_stays_in_its_mode() -> None:
    x = torch.randn(1, 19, 2, 16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        attnforge.flash_attn_func(fake, fake, fake, window_size=(3, 0))
    assert type(attnforge.flash_attn_func(x, x, x, window_size=(3, 0))) is Tensor


def test_a_mask_made_in_inference_serves_training() -> None:
    x = draw(1, 2, 30, 16, device="cpu", dtype=torch.float32, seed=0)
    with torch.inference_mode():
        flash_attn.band(30, 30, flash_attn.Sides(3, 0), x.device)
        starts = torch.zeros(30, dtype=torch.int32)
        mask = attnforge.Spans(starts, starts + 20)
    attnforge.attention(x, x, x, mask).sum().backward()
    rows = x.transpose(1, 2)
    attnforge.flash_attn_func(rows, rows, rows, window_size=(3, 0)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("alibi_slopes", torch.ones(3, 1)),
        ("block_table", torch.zeros(1, 1, dtype=torch.int32)),
    ],
)
def test_what_is_not_supported_is_named(name: str, value: object) -> None:
    x = torch.randn(7, 1, 16)
    cu = bounds([3, 4])
    arguments: Any = {name: value}
    with pytest.raises(ValueError, match=f"^{name}: "):
        attnforge.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, **arguments)
    if name == "dropout_p":
        with pytest.raises(ValueError, match=f"^{name}: "):
            attnforge.flash_attn_func(x[None], x[None], x[None], **arguments)


@pytest.mark.parametrize("sides", [("a", 0), (None, 0), (3.0, 0), (torch.tensor(2.5), 0)], ids=str)
def test_sides_that_are_no_integers_are_named(sides: Any) -> None:
    x = torch.randn(1, 7, 1, 16)
    with pytest.raises(TypeError, match=r"^window_size: entry 0 is .*, not an integer"):
        attnforge.flash_attn_func(x, x, x, window_size=sides)


def test_sides_beyond_int64_are_no_limit() -> None:
    x = torch.randn(1, 7, 1, 16)
    whole = attnforge.flash_attn_func(x, x, x, causal=True)
    assert torch.equal(attnforge.flash_attn_func(x, x, x, window_size=(2**64, 0)), whole)


@pytest.mark.parametrize("cap", [np.float32(5), np.int64(5)], ids=repr)
def test_numbers_of_numpy_are_caps(cap: Any) -> None:
    x = torch.randn(1, 7, 1, 16)
    capped = attnforge.flash_attn_func(x, x, x, softcap=cap)
    assert torch.equal(capped, attnforge.flash_attn_func(x, x, x, softcap=5.0))


def test_returned_lse() -> None:
    """return_attn_probs without dropout: out, lse and no probabilities; the lse is differentiable."""
    q, k, v = (draw(7, 2, 16, device="cpu", dtype=torch.float32, seed=seed) for seed in range(3))
    cu = bounds([7])
    out, lse, probabilities = attnforge.flash_attn_varlen_func(
        q, k, v, cu, cu, causal=True, return_attn_probs=True
    )
    other, same, _ = attnforge.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True)
    assert probabilities is None
    assert (out.shape, lse.shape, same.shape) == (q.shape, (2, 7), (1, 2, 7))
    torch.testing.assert_close(out, other[0])
    scores = torch.einsum("qhd,khd->hqk", q, k) * 16**-0.5
    exact = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).logsumexp(2)
    torch.testing.assert_close(lse, exact)
    torch.testing.assert_close(same[0], exact)
    ours = torch.autograd.grad(lse.sin().sum(), (q, k), retain_graph=True)
    for a, b in zip(ours, torch.autograd.grad(exact.sin().sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_shapes_are_named() -> None:
    x, cu = torch.randn(7, 1, 16), bounds([3, 4])
    with pytest.raises(ValueError, match=r"^q: got shape"):
        attnforge.flash_attn_func(x, x, x)
    with pytest.raises(ValueError, match=r"^q: got shape"):
        attnforge.flash_attn_varlen_func(x[None], x, x, cu, cu, 4, 4)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: got torch.int64"):
        attnforge.flash_attn_varlen_func(x, x, x, cu.long(), cu, 4, 4)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: got 2 entries"):
        attnforge.flash_attn_varlen_func(x, x, x, cu, bounds([7]), 7, 7)
    for slopes in (torch.ones(2), torch.ones(3, 1), torch.ones(2, 2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^alibi_slopes: got "):
            attnforge.flash_attn_func(x[None], x[None], x[None], alibi_slopes=slopes)
        with pytest.raises(ValueError, match=r"^alibi_slopes: got "):
            attnforge.flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, alibi_slopes=slopes)


@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
def test_compiled(window: tuple[int, int]) -> None:
    cu = bounds([3, 4])
    q, k, v = (draw(7, 1, 16, device="cpu", dtype=torch.float32, seed=seed) for seed in range(3))

    def block(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        packed: Tensor = attnforge.flash_attn_varlen_func(
            q, k, v, cu, cu, 4, 4, causal=True, window_size=window
        )
        dense: Tensor = attnforge.flash_attn_func(q[None], k[None], v[None], window_size=window)
        return dense[0] + packed

    expected = block(q, k, v, cu)
    out = torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v, cu)
    assert torch.equal(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("slopes", [None, torch.rand(2), torch.rand(3, 2)], ids=["cap", "heads", "entries"])
def test_softcap_and_alibi(slopes: Tensor | None) -> None:
    """flash-attn caps first, and counts ALiBi's distances with the last query at the last key."""
    q, k, v = (torch.randn(3, length, 2, 16) for length in (7, 11, 11))
    out = attnforge.flash_attn_func(q, k, v, softcap=2.0, alibi_slopes=slopes, causal=True)
    score = 2 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * 16**-0.5 / 2)
    distance = torch.arange(11) - torch.arange(7)[:, None] - 4
    if slopes is not None:
        score = score - slopes.expand(3, 2)[:, :, None, None] * distance.abs()
    weights = score.masked_fill(distance > 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", weights, v))


@pytest.mark.parametrize("form", ["heads", "documents", "one cu_seqlens"])
def test_alibi_of_packed_documents(form: str) -> None:
    """Distances count within each document, the last query at the last key; slopes of documents are their own."""
    cu_q, cu_k = bounds([3, 0, 5, 2]), bounds([4, 2, 5, 6])
    if form == "one cu_seqlens":
        cu_k = cu_q
    slopes = (torch.rand(4, 2) if form == "documents" else torch.rand(2)).requires_grad_()
    q, k, v = (
        torch.randn(length, 2, 16) for length in (12, int(cu_k[-1]), int(cu_k[-1]))
    )  # two rows of no document
    out = attnforge.flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True, softcap=2.0, alibi_slopes=slopes)
    exact = torch.zeros_like(out)
    for d in range(4):
        of_q, of_k = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        found = attnforge.flash_attn_func(
            q[None, of_q], k[None, of_k], v[None, of_k], causal=True, softcap=2.0,
            alibi_slopes=slopes[d] if form == "documents" else slopes,
        )  # fmt: skip
        exact[of_q] = found[0]
    torch.testing.assert_close(out, exact)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), slopes),
        torch.autograd.grad(exact.square().sum(), slopes),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
