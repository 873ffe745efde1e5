"""Functions of scores and masks for some heads and rows: what the whole's function gives there."""

from __future__ import annotations

import pytest
import torch
from mask_functions import functions as mask_functions
from oracle import Shape
from score_oracle import functions, learned

import attnforge
from attnforge import masks, scores
from attnforge.codegen.formula_slice import slice_formula
from attnforge.codegen.score import ScoreMod
from attnforge.runtime.distributed.local_slice import (
    LocalSlice,
    add_gradients,
    expect_few_tensors,
    mask_at,
    planes_at,
    reads_heads,
    reads_positions,
    score_at,
)
from attnforge.runtime.masks import FunctionMask
from attnforge.runtime.score_trace import evaluate

SHAPE = Shape(70, 70, 16, 2, 2, 2)  # 4 query heads
SCORES = {
    **{name: score for name, (score, _) in functions(2, 4, 70, 70).items() if name != "approximate"},
    **{name: make(*tensors) for name, (make, _, tensors) in learned(2, 4, 70, 70).items()},
    "head number": scores.score_mod(lambda s, b, h, i, j: s * (1 + h % 3) + h),
}
# Heads 1 to 3 of rows 30 to 49; the same heads of all rows; all heads of rows 60 to 79, of which ten are padding.
PLACES = [(1, 3, 30, 20, ("q_idx", "h")), (1, 3, 0, 70, ("h",)), (0, 4, 60, 20, ("q_idx",))]


def slice_of(head: int, heads: int, row: int, rows: int, moved: tuple[str, ...]) -> LocalSlice:
    return LocalSlice(head, heads, 4, row, rows, 70, 70, moved, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("name", list(SCORES))
def test_scores(name: str, at: tuple[int, int, int, int, tuple[str, ...]]) -> None:
    score, (head, heads, row, rows, _) = SCORES[name], at
    part = score_at(score, score.tensors, slice_of(*at))
    real = min(row + rows, 70) - row
    # Scores are drawn for the whole; the part has those of its own rows.
    sizes = (2, 4, 70, 70)
    index = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in sizes), indexing="ij")
    plain = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    names = ("b", "h", "q_idx", "kv_idx")
    whole = evaluate(
        ScoreMod(score.text), {"score": plain, **dict(zip(names, index, strict=True))}, score.tensors
    )
    own = tuple(x[:, :heads, :real] for x in index)
    cut = (slice(None), slice(head, head + heads), slice(row, row + real))
    found = evaluate(
        ScoreMod(part.text), {"score": plain[cut], **dict(zip(names, own, strict=True))}, part.tensors
    )
    torch.testing.assert_close(found.expand(own[0].shape), whole.expand(sizes)[cut], rtol=0, atol=0)


def test_what_fast_kernels_recognise_stays() -> None:
    """ALiBi's lines, and a text without new tensors where only heads are taken."""
    alibi = SCORES["alibi"]
    part = score_at(alibi, alibi.tensors, slice_of(1, 3, 30, 20, ("q_idx", "h")))
    assert ScoreMod(alibi.text).lines is not None
    assert ScoreMod(part.text).lines is not None
    assert slice_formula(ScoreMod(alibi.text), ("h",)).text == alibi.text


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("name", list(mask_functions(SHAPE)))
def test_masks(name: str, at: tuple[int, int, int, int, tuple[str, ...]]) -> None:
    """Keys are padded to 80: padding is hidden, and sees nothing."""
    mask, (head, heads, row, rows, _) = masks.mask_mod(mask_functions(SHAPE)[name], 70, 70, "cpu"), at
    part = mask_at(mask, slice_of(*at), 80)
    whole = mask.visible_rows(torch.arange(70), 2, 4).expand(2, 4, 70, 70)
    whole = torch.nn.functional.pad(whole, (0, 10, 0, 10))[:, head : head + heads, row : row + rows]
    found = part.visible_rows(torch.arange(rows), 2, heads).expand(2, heads, rows, 80)
    assert torch.equal(found, whole)


def test_a_mask_that_is_the_same_for_a_part_keeps_its_schedules() -> None:
    window = masks.mask_mod(mask_functions(SHAPE)["window"], 70, 70, "cpu")
    assert mask_at(window, slice_of(1, 3, 0, 70, ("h",)), 70) is window
    assert mask_at(window, slice_of(1, 3, 0, 70, ("h",)), 80) is not window
    heads = masks.mask_mod(mask_functions(SHAPE)["heads"], 70, 70, "cpu")
    assert mask_at(heads, slice_of(1, 3, 0, 70, ("h",)), 70) is not heads


@pytest.mark.parametrize("planes", [1, 2, 4])
def test_planes(planes: int) -> None:
    """Of all query heads, of kv heads, of both; a part of a kv head's group has that head's plane."""
    starts = torch.arange(planes * 70, dtype=torch.int32).view(1, planes, 1, 70) % 50
    spans = attnforge.Spans(starts, starts + 20)
    for head, heads in ((0, 2), (2, 2), (3, 1), (0, 4)):
        part = planes_at(spans, slice_of(head, heads, 0, 70, ("h",)))
        seen = spans.visible(70, 70).expand(1, planes, 70, 70).repeat_interleave(4 // planes, 1)
        own = part.visible(70, 70)
        own = own.expand(1, -1, 70, 70) if own.dim() == 4 else own.expand(1, 1, 70, 70)
        expected = seen[:, head : head + heads]
        assert torch.equal(own.repeat_interleave(heads // own.shape[1], 1), expected)


def test_gradients_are_added_where_they_belong() -> None:
    """Two parts of the heads, each with half of the rows of a bias."""
    bias = scores.bias(torch.zeros(1, 4, 70, 1))
    sums = {0: torch.zeros(bias.tensors[0].shape)}
    for number, (head, row) in enumerate(((0, 0), (2, 35)), 1):
        place = slice_of(head, 2, row, 35, ("q_idx", "h"))
        (own,) = score_at(bias, bias.tensors, place, wanted=[0]).tensors
        add_gradients(bias, place, sums, [torch.full_like(own, number)])
    expected = torch.zeros(4, 70)
    expected[:2, :35], expected[2:, 35:] = 1, 2
    assert torch.equal(sums[0], expected)
    wanted = score_at(bias, bias.tensors, slice_of(0, 2, 0, 35, ("h",)), wanted=[0])
    assert ScoreMod(wanted.text).wanted == (0,)


def test_what_is_read() -> None:
    assert not reads_positions(scores.softcap(3.0))
    assert not reads_positions(SCORES["head number"])
    assert reads_positions(SCORES["alibi"])
    window, heads = (
        masks.mask_mod(mask_functions(SHAPE)[name], 70, 70, "cpu") for name in ("window", "heads")
    )
    assert reads_heads(heads)
    assert not reads_heads(window)
    of_four = FunctionMask(window.text, window.tensors, 70, 70, "cpu", heads=4)
    assert reads_heads(of_four), "a part is for fewer heads"


def test_too_many_tensors() -> None:
    """Score and mask each get one more where a rank has to know its place."""
    place, t = slice_of(0, 4, 30, 20, ("q_idx",)), [torch.rand(70) for _ in range(4)]
    four = scores.score_mod(lambda s, b, h, i, j: s + t[0][i] + t[1][j] + t[2][i] * t[3][(i + j) % 70])
    with pytest.raises(ValueError, match="score, mask: capture 5 tensors, at most 4 are supported"):
        expect_few_tensors(four, None, place)
    three = scores.score_mod(lambda s, b, h, i, j: s + t[0][i] + t[1][j] + t[2][i] * t[3][j])
    expect_few_tensors(three, attnforge.Causal(), place)
    assert len(score_at(three, three.tensors, place).tensors) == 4
    documents = masks.mask_mod(mask_functions(SHAPE)["documents"], 70, 70, "cpu")
    alibi = SCORES["alibi"]
    assert len(alibi.tensors) + len(documents.tensors) == 3
    with pytest.raises(ValueError, match="score, mask: capture 5 tensors"):
        expect_few_tensors(alibi, mask_at(documents, place, 70), place)
