"""Pictures of masks: each tile's visible share against the mask itself, aspect, and what notebooks get."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnforge
from attnforge.runtime.mask_svg import dense_shares, span_shares, svg, tile_of

NAMESPACE = "{http://www.w3.org/2000/svg}"


def by_definition(seen: Tensor, tile_m: int, tile_n: int) -> Tensor:
    """Mean of the pairs of each tile."""
    rest = (0, -seen.shape[1] % tile_n, 0, -seen.shape[0] % tile_m)
    area, pairs = (F.pad(x.double(), rest) for x in (torch.ones_like(seen), seen))
    tiled = [x.unflatten(1, (-1, tile_n)).unflatten(0, (-1, tile_m)).sum((1, 3)) for x in (pairs, area)]
    shares: Tensor = tiled[0] / tiled[1]
    return shares


def covered(picture: str, seq_q: int, seq_k: int) -> Tensor:
    """The rectangles of a picture as pairs, without the background."""
    drawn = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    for rect in list(ET.fromstring(picture).iter(f"{NAMESPACE}rect"))[1:]:
        x, y, width, height = (int(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert not drawn[y : y + height, x : x + width].any(), "drawn twice"
        drawn[y : y + height, x : x + width] = True
    return drawn


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "tile_m", "tile_n"), [(60, 90, 16, 32), (90, 60, 32, 7), (5, 5, 8, 8)]
)
def test_shares_and_rectangles(seq_q: int, seq_k: int, tile_m: int, tile_n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    starts, ends = torch.randint(-9, seq_q + 9, (2, seq_k), generator=generator).int()
    mask = attnforge.Spans(starts, ends)
    seen = mask.visible(seq_q, seq_k)
    expected = by_definition(seen, tile_m, tile_n)
    torch.testing.assert_close(span_shares(starts, ends, seq_q, tile_m, tile_n), expected)
    torch.testing.assert_close(dense_shares(seen, tile_m, tile_n), expected)
    planes = torch.stack((seen, ~seen))[:, None]
    torch.testing.assert_close(dense_shares(planes, tile_m, tile_n), torch.full_like(expected, 0.5))

    picture = svg(expected, seq_q, seq_k, tile_m, tile_n, side=300)
    touched = (expected > 0).repeat_interleave(tile_m, 0)[:seq_q].repeat_interleave(tile_n, 1)[:, :seq_k]
    assert torch.equal(covered(picture, seq_q, seq_k), touched)
    root = ET.fromstring(picture)
    assert root.attrib["viewBox"] == f"0 0 {seq_k} {seq_q}"
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    assert max(width, height) == 300
    assert width / height == pytest.approx(seq_k / seq_q, rel=0.01), "true aspect"


def test_full_tiles_are_dark_and_equal_ones_are_joined() -> None:
    shares = torch.tensor([[1.0, 1.0, 0.5, 0.0]])
    rects = list(ET.fromstring(svg(shares, 8, 30, 8, 8)).iter(f"{NAMESPACE}rect"))[1:]
    assert [(rect.attrib["x"], rect.attrib["width"]) for rect in rects] == [("0", "16"), ("16", "8")]
    assert rects[0].attrib["fill"] != rects[1].attrib["fill"]


def test_notebooks_get_a_small_picture() -> None:
    length = 20000
    pack = attnforge.bagel.PackedMask([12000, 8000], [12000, 8000], ["causal", "full"], "cpu")
    dense = attnforge.DenseMask(torch.ones(100, 300, dtype=torch.bool).tril())
    late = attnforge.Spans(torch.zeros(10, dtype=torch.int32), torch.full((10,), 40, dtype=torch.int32))
    for mask, words in (
        (pack, f"{length:,} queries"),
        (dense, "100 queries x 300 keys"),
        (late, "10 queries x 10"),
    ):
        shown = mask._repr_html_()
        assert words in shown
        assert repr(mask).replace("<", "&lt;") in shown
        assert len(shown) < 200_000
        assert shown.count("<svg") == shown.count("</svg>") == 1
    visible = 12000 * 12001 // 2 + 8000**2
    assert f"{visible / length**2:.1%} of the pairs" in pack._repr_html_()
    assert attnforge.Spans(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))._repr_html_()


def test_tiles_of_notebooks() -> None:
    assert [tile_of(n, 1) for n in (0, 8, 384, 385, 20000, 10**6)] == [8, 8, 8, 16, 512, 32768]


@pytest.mark.parametrize("shape", [(0, 0), (5, 0), (0, 5), (2, 3, 5, 0), (0, 3, 5, 5)], ids=str)
def test_masks_without_pairs_have_a_picture(shape: tuple[int, ...]) -> None:
    assert "0.0% of the pairs" in attnforge.DenseMask(torch.ones(shape, dtype=torch.bool))._repr_html_()


def test_a_long_row_is_seen() -> None:
    root = ET.fromstring(svg(torch.ones(1, 10), 1, 10_000, 1, 1000))
    assert (root.attrib["width"], root.attrib["height"]) == ("320", "1")
