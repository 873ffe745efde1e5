"""What the patch of the official trainer puts in place: dense masks to spans, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer import MODES, SAMPLES, SPLITS, TOKENS, nested

import attnforge
from attnforge.bagel.trainer import substitutes


def test_dense_masks_become_spans_again() -> None:
    pack = substitutes.from_dense(nested(), SAMPLES)
    expected = attnforge.bagel.PackedMask(SAMPLES, SPLITS, MODES, "cpu")
    mask = pack.mask(TOKENS)
    assert torch.equal(mask.starts, expected.starts)
    assert torch.equal(mask.ends, expected.ends)


def test_long_dense_masks_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = substitutes.from_dense(nested(), SAMPLES).mask(TOKENS)
    monkeypatch.setattr(substitutes, "_COLUMNS", 7)
    parts = substitutes.from_dense(nested(), SAMPLES).mask(TOKENS)
    assert torch.equal(parts.starts, whole.starts)
    assert torch.equal(parts.ends, whole.ends)


def test_other_dense_masks_are_refused() -> None:
    gap, bias = nested(), nested()
    gap[0][20, 3] = -torch.inf
    bias[1][20, 3] = -1.0
    for masks in (gap, bias):
        with pytest.raises(ValueError, match="a mask is not BAGEL's"):
            substitutes.from_dense(masks, SAMPLES)
    with pytest.raises(ValueError, match=r"do not fit sample_lens \[40, 20\]"):
        substitutes.from_dense(nested(), [40, 20])


def test_a_mask_from_before_the_patch_is_refused() -> None:
    q = torch.randn(1, 2, 8, 8)
    other: Any = object()
    with pytest.raises(TypeError, match=r"^block_mask: got object"):
        substitutes.flex_attention(q, q, q, block_mask=other)
    with pytest.raises(TypeError, match=r"^mask_mod: got object"):
        substitutes.create_block_mask(other)
    pack = substitutes.create_sparse_mask([4, 4], [4, 4], ["full", "causal"], "cpu")
    with pytest.raises(ValueError, match=r"^used: 6 real tokens end inside a sample"):
        pack.mask(6)
    with pytest.raises(ValueError, match=r"^sample_lens: 9 tokens"):
        pack.mask(9)
