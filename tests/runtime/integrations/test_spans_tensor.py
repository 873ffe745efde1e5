"""Spans that stand for a bool mask, and bool masks that become Spans; needs no transformers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnforge
from attnforge.runtime import mask_intervals, per_tensor
from attnforge.runtime.integrations import huggingface
from attnforge.runtime.integrations.spans_tensor import SpansTensor, mask_of
from attnforge.runtime.mask_intervals import spans_of
from attnforge.runtime.masks import DenseMask, Spans

SIZE = 12
EYE = torch.eye(SIZE, dtype=torch.bool)


def padded_causal() -> Tensor:
    """Bool (2, 1, SIZE, SIZE), causal, the first entry padded at its left."""
    visible = torch.ones(2, 1, SIZE, SIZE, dtype=torch.bool).tril()
    visible[0, :, :, :3] = False
    return visible


def both() -> tuple[SpansTensor, Tensor]:
    """A mask without pairs, and the same pairs."""
    visible = padded_causal()
    spans = spans_of(lambda first, end: visible[..., first:end], SIZE)
    assert spans is not None
    return SpansTensor(spans, tuple(visible.shape)), visible


def layer(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return huggingface.attention_forward(nn.Module(), q, k, v, mask)[0]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 2, SIZE, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    return q.requires_grad_(), k, v


def runs(count: int) -> Tensor:
    """Bool (1, 1, 16, 5), in which a key has up to `count` intervals of queries, and one has none."""
    visible = torch.zeros(1, 1, 16, 5, dtype=torch.bool)
    for key in range(5):
        for run in range(min(key, count)):
            visible[..., 3 * run + key % 2 : 3 * run + 2, key] = True
    visible[..., 15, 4] |= count == 5
    return visible


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_intervals_are_found(count: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_intervals, "CHUNK", chunk)
    visible = runs(count)
    spans = spans_of(lambda first, end: visible[..., first:end], 5)
    assert spans is not None
    assert spans.intervals == count
    assert torch.equal(spans.visible(16, 5), visible[0, 0])
    assert spans.visible_keys == visible.sum().item() / 16


def test_five_intervals_are_none() -> None:
    assert spans_of(lambda first, end: runs(5)[..., first:end], 5) is None


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_columns_of_many_queries(rows: int, share: float) -> None:
    """Counted by blocks of queries."""
    visible = torch.rand(2, 3, rows, 17, generator=torch.Generator().manual_seed(1)) < share
    first, seen, runs = mask_intervals.columns(visible)
    begins = torch.cat([visible[..., :1, :], visible[..., 1:, :] & ~visible[..., :-1, :]], -2)
    assert torch.equal(first, visible.to(torch.uint8).argmax(-2))
    assert torch.equal(seen, visible.sum(-2))
    assert torch.equal(runs, begins.sum(-2))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_planes_are_those_of_the_mask(shape: tuple[int, int]) -> None:
    visible = torch.zeros(*shape, 9, 7, dtype=torch.bool)
    for b in range(shape[0]):
        for h in range(shape[1]):
            visible[b, h, b : 6 + h] = True
    spans = spans_of(lambda first, end: visible[..., first:end], 7)
    assert spans is not None
    assert spans.planes == shape
    assert torch.equal(spans.visible(9, 7).expand(visible.shape), visible)


def test_batch_entries_that_agree_have_one_plane() -> None:
    visible = torch.ones(3, 1, 9, 7, dtype=torch.bool).tril()
    spans = spans_of(lambda first, end: visible[..., first:end], 7)
    assert spans is not None
    assert spans.planes == (1, 1)


def test_few_keys_that_most_queries_see_are_reported() -> None:
    """Dispatch divides the work of such keys."""
    visible = torch.eye(200, dtype=torch.bool)[None, None]
    visible[..., 0] = True
    spans = spans_of(lambda first, end: visible[..., first:end], 200)
    assert spans is not None
    assert spans.visible_keys == -399 / 200


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda mask: mask.__setitem__((..., slice(0, 3)), False),
    "and": lambda mask: mask.__iand__(EYE),
    "view": lambda mask: mask[:, :, 2:].fill_(True),
    "view of a view": lambda mask: mask.view(-1)[5:][::2].logical_not_(),
    "detached": lambda mask: mask.detach()[..., :3].fill_(False),
    "out": lambda mask: torch.logical_not(mask, out=mask),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("plain", [False, True])
def test_a_mask_that_is_edited_in_place(edit: str, plain: bool) -> None:
    """Also after attention has used it: the next call sees the new pairs."""
    lazy, visible = both()
    mask = visible.clone() if plain else lazy
    before = mask_of(mask, SIZE, SIZE)
    assert mask_of(mask, SIZE, SIZE) is before
    EDITS[edit](mask)
    EDITS[edit](visible)
    after = mask_of(mask, SIZE, SIZE)
    assert after is not before
    assert torch.equal(after.visible(SIZE, SIZE).expand(visible.shape), visible)


READS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda mask: mask[:, :, 1:, ::2],
    "where": lambda mask: torch.where(mask, 0.0, -torch.inf),
    "and": lambda mask: mask & EYE,
    "float": lambda mask: mask.float(),
    "expand": lambda mask: mask.expand(2, 4, SIZE, SIZE),
    "cat": lambda mask: torch.cat([mask, mask]),
    "list": lambda mask: torch.tensor(mask.tolist()),
    "array": lambda mask: torch.from_numpy(mask.numpy()),
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),  # noqa: S301
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("read", READS)
def test_a_mask_that_is_read(read: str) -> None:
    """Gives plain tensors of its pairs, and stays Spans."""
    mask, visible = both()
    answer = READS[read](mask)
    assert type(answer) is Tensor
    assert torch.equal(answer, READS[read](visible))
    assert mask.spans is not None


def test_no_pairs_unless_they_are_read() -> None:
    mask, visible = both()
    assert (mask.shape, mask.dtype, mask.device) == (visible.shape, visible.dtype, visible.device)
    assert mask.to("cpu", torch.bool) is mask
    layer(mask, *operands())
    assert mask._pairs.dense is None


def test_a_mask_of_more_keys_or_of_other_rows() -> None:
    """Caches with room, and layers that keep the last queries only."""
    mask, visible = both()
    q, k, v = operands()
    few = layer(mask, q, k[:, :, :9], v[:, :, :9])
    assert torch.equal(few, layer(visible.clone(), q, k[:, :, :9], v[:, :, :9]))
    last = layer(mask[:, :, -4:], q[:, :, -4:], k, v)
    assert torch.allclose(last, layer(visible, q, k, v)[:, -4:], atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    mask, visible = both()
    gradients = []
    for each in (mask, visible):
        q, k, v = operands()
        checkpoint(layer, each, q, k, v, use_reentrant=reentrant).square().sum().backward()
        assert q.grad is not None
        gradients.append(q.grad)
    assert torch.equal(*gradients)
    assert mask._pairs.dense is None


def test_compiled_layers() -> None:
    """The mask is made outside; other masks run the same code."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask, visible = both()
    for each, pairs in (
        (mask, visible),
        (SpansTensor(_causal(), (2, 1, SIZE, SIZE)), visible | EYE.new_ones(SIZE, SIZE).tril()),
    ):
        q, k, v = operands()
        mine, answer = compiled(each, q, k, v), layer(pairs, q, k, v)
        assert torch.equal(mine, answer)
        assert torch.equal(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (mine, answer)))


def _causal() -> Spans:
    rows = torch.arange(SIZE, dtype=torch.int32)
    return Spans(rows, torch.full_like(rows, SIZE))


def test_compiled_code_that_changes_a_mask() -> None:
    torch._dynamo.reset()

    def changed(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask[..., :2] = False
        return layer(mask, q, k, v)

    mask, visible = both()
    out = torch.compile(changed, backend="aot_eager")(mask, *operands())
    assert torch.equal(out, changed(visible, *operands()))


def test_inference_mode() -> None:
    """Its tensors do not count changes: once read, the pairs are what holds."""
    with torch.inference_mode():
        mask, visible = both()
        assert torch.equal(layer(mask, *operands()), layer(visible, *operands()))
        mask[..., :2] = False
        visible[..., :2] = False
        assert torch.equal(layer(mask, *operands()), layer(visible, *operands()))
        assert type(mask_of(visible, SIZE, SIZE)) is DenseMask


def test_masks_are_kept_as_long_as_their_tensor() -> None:
    visible = padded_causal()
    mask = mask_of(visible, SIZE, SIZE)
    assert mask_of(visible[:], SIZE, SIZE) is mask
    assert mask_of(visible.clone(), SIZE, SIZE) is not mask
    held = weakref.ref(mask)
    del mask, visible
    gc.collect()
    assert held() is None


def test_few_parts_of_a_tensor_are_kept() -> None:
    """As in decoding, where each step takes other rows of one buffer."""
    buffer = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    for step in range(20):
        mask_of(buffer[:, :, step : step + 1, : step + 1], 1, step + 1)
    assert len(per_tensor._known[buffer]) <= per_tensor._LAYOUTS


def test_what_is_no_spans_is_converted_once() -> None:
    visible = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(1)) > 0.5
    mask = mask_of(visible, 40, 40)
    assert type(mask) is attnforge.DenseMask
    assert mask_of(visible, 40, 40) is mask
    assert torch.equal(mask.mask, visible[0, 0])


def test_no_conversion_under_modes_and_transforms() -> None:
    """A host sync is an error there, and what is made must not be kept."""
    visible = padded_causal()
    with FlopCounterMode(display=False):
        assert type(mask_of(visible, SIZE, SIZE)) is DenseMask
    assert type(mask_of(visible, SIZE, SIZE)) is Spans
