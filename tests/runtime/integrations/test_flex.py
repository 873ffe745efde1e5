"""FlexAttention's BlockMask on our kernels: what becomes of it, and results beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask

import attnforge
from attnforge.bagel.packing import visible_from_definition
from attnforge.runtime.integrations import flex
from attnforge.runtime.masks import FunctionMask

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([70, 1, 150, 79]))
HOLES = torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.5


TEXT = torch.arange(300) % 7 < 2


def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


MODS: dict[str, tuple[Mod, type]] = {
    "everything": (lambda b, h, q, k: q >= 0, type(None)),
    "causal": (lambda b, h, q, k: q >= k, attnforge.Causal),
    "documents": (document, attnforge.Spans),
    "causal documents": (lambda b, h, q, k: document(b, h, q, k) & (q >= k), attnforge.Spans),
    "prefix": (lambda b, h, q, k: (k < 40) | (q >= k), attnforge.Spans),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 33), attnforge.Spans),
    "nothing": (lambda b, h, q, k: q < 0, attnforge.Spans),
    "holes": (lambda b, h, q, k: HOLES[q, k], attnforge.DenseMask),
    "comb": (lambda b, h, q, k: (q // 16 + k // 8) % 3 != h, FunctionMask),
    "images": (lambda b, h, q, k: document(b, h, q, k) | (TEXT[k] & TEXT[q]), FunctionMask),
    "two windows": (lambda b, h, q, k: (q >= k) & ((q - k < 20) | ((q - k) // 64 == 2)), attnforge.Spans),
    "ends alone": (lambda b, h, q, k: (q < 3) | (q >= 297) | (q == 128) | (q // 64 == 3), attnforge.Spans),
    "a run too many": (lambda b, h, q, k: (q % 64 < 63) | (k != 77), FunctionMask),
    "unions of heads": (lambda b, h, q, k: (q < k) | ((h > 0) & (q > k)), attnforge.Spans),
    "heads": (lambda b, h, q, k: q >= k + h, attnforge.Spans),
    "batch": (lambda b, h, q, k: q >= k * b, attnforge.Spans),
}


def dense(mask: Any, seq_q: int, seq_k: int) -> Tensor:
    if isinstance(mask, FunctionMask):
        return mask.visible(seq_q, seq_k, batch=1)
    return torch.ones(seq_q, seq_k, dtype=torch.bool) if mask is None else mask.visible(seq_q, seq_k)


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("block", [128, 64])
def test_a_block_mask_becomes_what_it_is(name: str, block: int) -> None:
    mod, kind = MODS[name]
    sizes = {"holes": (1, 1), "heads": (1, 2), "unions of heads": (1, 2), "batch": (2, 1)}.get(name, (1, 2))
    mask = create_block_mask(mod, *sizes, 300, 300, device="cpu", BLOCK_SIZE=block)
    ours = attnforge.from_block_mask(mask)
    assert type(ours) is kind
    expected = create_mask(mod, *sizes, 300, 300, device="cpu")
    assert torch.equal(dense(ours, 300, 300).expand(expected.shape), expected)
    assert attnforge.from_block_mask(mask) is ours  # converted once


@pytest.mark.parametrize("block", [(128, 64), (32, 128)])
def test_unions_are_found_a_few_columns_at_a_time(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "CHUNK", 1)
    for name in ("two windows", "ends alone"):
        mask = create_block_mask(MODS[name][0], 1, 1, 300, 260, device="cpu", BLOCK_SIZE=block)
        ours = attnforge.from_block_mask(mask)
        assert isinstance(ours, attnforge.Spans)
        assert ours.intervals == {"two windows": 2, "ends alone": 4}[name]
        expected = create_mask(MODS[name][0], 1, 1, 300, 260, device="cpu")[0, 0]
        assert torch.equal(ours.visible(300, 260), expected)
        assert ours.visible_keys == int(expected.sum()) / 300


@given(st.data())
def test_packs_of_bagel(data: st.DataObject) -> None:
    splits = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    modes = data.draw(
        st.lists(st.sampled_from(["causal", "full", "noise"]), min_size=len(splits), max_size=len(splits))
    )
    last = data.draw(st.integers(0, len(splits) - 1))
    samples = [size for size in (sum(splits[:last]), sum(splits[last:])) if size]
    visible = visible_from_definition(samples, splits, modes)
    total = visible.shape[0]
    mask = create_block_mask(
        lambda b, h, q, k: visible[q, k], None, None, total, total, device="cpu", BLOCK_SIZE=64
    )
    ours = attnforge.from_block_mask(mask)
    assert not isinstance(ours, attnforge.DenseMask)
    assert torch.equal(dense(ours, total, total), visible)


def test_whole_blocks_alone() -> None:
    """No block is partial, and the mask_mod indexes a tensor."""
    visible = torch.ones(64, 64, dtype=torch.bool)
    mask = create_block_mask(
        lambda b, h, q, k: visible[q, k], None, None, 64, 64, device="cpu", BLOCK_SIZE=64
    )
    ours = attnforge.from_block_mask(mask)
    assert not isinstance(ours, attnforge.DenseMask)
    assert torch.equal(dense(ours, 64, 64), visible)


def test_other_lengths_and_block_sizes() -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 100 >= k) & (k < 311)

    mask = create_block_mask(mod, 1, 1, 200, 333, device="cpu", BLOCK_SIZE=(64, 128))
    ours = attnforge.from_block_mask(mask)
    assert isinstance(ours, attnforge.Spans)
    assert torch.equal(ours.visible(200, 333), create_mask(mod, 1, 1, 200, 333, device="cpu")[0, 0])


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", torch.float32, 2e-5), pytest.param("cuda", torch.bfloat16, 3e-2, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", ["everything", "causal", "prefix", "window", "comb", "images"])
def test_same_as_torch(name: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    mod, _ = MODS[name]
    if name == "images":
        documents, text = DOCUMENTS.to(device), TEXT.to(device)
        mod = lambda b, h, q, k: (documents[q] == documents[k]) | (text[k] & text[q])  # noqa: E731
    heads = 4 if name == "comb" else 1
    mask = create_block_mask(mod, 1, heads, 300, 300, device=device)
    q, k, v = (
        torch.randn(2, heads, 300, 32, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)
    )
    ours = attnforge.flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
    assert isinstance(ours, Tensor)
    visible = create_mask(mod, 1, heads, 300, 300, device=device)
    theirs = F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours.square().sum(), (q, k, v))),
        (theirs, *torch.autograd.grad(theirs.square().sum(), (q, k, v))),
        strict=True,
    ):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_lists_of_blocks_that_say_something_else_than_the_function() -> None:
    """BlockMask.from_kv_blocks takes any lists; the mask_mod decides in partial blocks only."""
    mod = MODS["comb"][0]
    made = create_block_mask(mod, 1, 1, 256, 256, device="cpu", BLOCK_SIZE=128)
    first = made.kv_indices.clone()
    mask = BlockMask.from_kv_blocks(torch.ones_like(made.kv_num_blocks), first, BLOCK_SIZE=128, mask_mod=mod)
    ours = attnforge.from_block_mask(mask)
    assert isinstance(ours, attnforge.DenseMask)
    expected = create_mask(mod, 1, 1, 256, 256, device="cpu")[0, 0]
    expected[:, 128:] = False
    assert torch.equal(ours.visible(256, 256), expected)


def test_lse_as_torch_gives_it() -> None:
    q, k, v = (torch.randn(1, 2, 130, 16) for _ in range(3))
    expected = (q @ k.mT * 0.25).logsumexp(-1)
    pair: Any = attnforge.flex_attention(q, k, v, return_lse=True)
    assert (pair[1] - expected).abs().max() < 1e-4
    again: Any = attnforge.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert torch.equal(again[1].lse, pair[1])
    assert torch.equal(again[0], pair[0])


def test_score_mods_as_torch_computes_them() -> None:
    q, k, v = (torch.randn(2, heads, 70, 16) for heads in (2, 1, 1))
    slopes = torch.rand(2)
    mask = create_block_mask(MODS["causal"][0], None, None, 70, 70, device="cpu")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 5 * torch.tanh(score / 5) - slopes[h] * (q_idx - kv_idx)

    ours: Any = attnforge.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
    theirs: Any = torch.nn.attention.flex_attention.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)


def test_a_block_mask_of_one_plane_does_not_stand_for_others() -> None:
    """Where torch's kernels evaluate the mask_mod of each batch entry and head."""
    q = torch.randn(2, 2, 40, 16)
    shift = torch.tensor([[0, 3]])
    batches: Mod = lambda b, h, i, j: i + 2 * b >= j  # noqa: E731
    both: Mod = lambda b, h, i, j: i + shift[b, h] >= j  # noqa: E731 - of one batch entry
    for mod, batch, heads, axes in ((batches, None, 2, "B=2"), (both, 1, None, "H=2"), (both, 1, 2, "")):
        mask = create_block_mask(mod, batch, heads, 40, 40, device="cpu")
        if axes:
            with pytest.raises(ValueError, match=f"shows other pairs in others; create it with .*{axes}"):
                attnforge.flex_attention(q, q, q, block_mask=mask)
        else:
            attnforge.flex_attention(q, q, q, block_mask=mask)
    many = [torch.randint(0, 3, (40,)) for _ in range(5)]  # more tensors than can be translated
    opaque = create_block_mask(
        lambda b, h, i, j: sum(x[i] for x in many) + h >= 3, 1, None, 40, 40, device="cpu"
    )
    with pytest.raises(ValueError, match=r"cannot be compared .+; create it with H=2"):
        attnforge.flex_attention(q[:1], q[:1], q[:1], block_mask=opaque)
    alike = create_block_mask(lambda b, h, i, j: (i >= j) | (b > 9), None, None, 40, 40, device="cpu")
    attnforge.flex_attention(q, q, q, block_mask=alike)


def test_a_changed_block_mask_is_converted_again() -> None:
    """As for decoding: slices get their mask_mod and lengths afterwards."""
    q = torch.randn(1, 2, 64, 16)
    mask = create_block_mask(MODS["causal"][0], 1, 1, 64, 64, device="cpu", BLOCK_SIZE=64)
    for offset in (0, 5):
        mod: Mod = lambda b, h, i, j, offset=offset: i >= j + offset  # type: ignore[misc] # noqa: E731
        mask.mask_mod = mod
        assert torch.equal(
            dense(attnforge.from_block_mask(mask), 64, 64), create_mask(mod, 1, 1, 64, 64, device="cpu")[0, 0]
        )
    mask.seq_lengths = (8, 64)
    assert attnforge.flex_attention(q[:, :, :8], q, q, block_mask=mask).shape == (1, 2, 8, 16)  # type: ignore[union-attr]


def test_one_batch_entry_of_keys() -> None:
    """Paged caches: each batch entry of queries sees its own part of the same keys."""
    q, k, v = (torch.randn(n, 2, 40, 16, requires_grad=True) for n in (2, 1, 1))
    mod: Mod = lambda b, h, i, j: (i >= j) == (b > 0)  # noqa: E731
    mask = create_block_mask(mod, 2, None, 40, 40, device="cpu")
    ours: Any = attnforge.flex_attention(q, k, v, block_mask=mask)
    theirs = F.scaled_dot_product_attention(
        q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), create_mask(mod, 2, 1, 40, 40, device="cpu")
    )
    seen = create_mask(mod, 2, 1, 40, 40, device="cpu").any(-1, keepdim=True)
    theirs = torch.where(seen, theirs, 0.0)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="k: got batch 1"):
        attnforge.flex_attention(q, k, v)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, heads, 300, 16) for heads in (2, 1, 1))
    mask: BlockMask = create_block_mask(MODS["holes"][0], 1, 1, 300, 300, device="cpu")
    with pytest.raises(ValueError, match=r"erfinv\.default is not supported"):
        attnforge.flex_attention(q, k, v, lambda s, b, h, i, j: torch.erfinv(s), enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa: is False"):
        attnforge.flex_attention(q, k, v)
    with pytest.raises(ValueError, match="max_scores"):
        attnforge.flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="return_lse: cannot be combined with return_aux"):
        attnforge.flex_attention(q, q, q, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(TypeError, match="block_mask: got tuple"):
        attnforge.flex_attention(q, q, q, block_mask=(1, 2))  # type: ignore[arg-type]
    short = create_block_mask(MODS["causal"][0], 1, 1, 200, 200, device="cpu")
    with pytest.raises(ValueError, match=r"has \(200, 200\) queries and keys"):
        attnforge.flex_attention(q, q, q, block_mask=short)
    monkeypatch.setattr(flex, "DENSE_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 4 intervals of queries"):
        attnforge.from_block_mask(mask)
