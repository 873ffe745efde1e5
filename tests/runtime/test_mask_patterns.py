"""Named masks against their rules written out for every pair, and through the operator on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnforge
from attnforge import masks
from attnforge.runtime.masks import Spans
from attnforge.runtime.search.reference import reference

Rule = Callable[[int, int], bool]


def dense(rule: Rule, seq_q: int, seq_k: int) -> Tensor:
    return torch.tensor([[rule(i, j) for j in range(seq_k)] for i in range(seq_q)])


def belongs(lengths: list[int]) -> list[int]:
    return [segment for segment, length in enumerate(lengths) for _ in range(length)]


LENGTHS = [5, 0, 7, 1, 4]
OF = belongs(LENGTHS)
FIRST = [sum(LENGTHS[: OF[j]]) for j in range(17)]
PREFIXES = [2, 0, 7, 0, 4]
IMAGES = [False, True, True, False, True]
PARENTS = [-1, 0, 1, 0, -1]  # 0 has the children 1 and 3; 2 is below 1; 4 is a tree of its own
ANCESTORS = {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {0, 3}, 4: {4}}

TIN = [0, 1, 2, 2, 2, 5, 6, 7, 8, 8, 10, 20, 21, 21, 23, 30, 31]
TOUT = [20, 8, 5, 5, 5, 7, 7, 8, 20, 10, 20, 30, 24, 23, 24, 32, 32]

CASES: dict[str, tuple[Callable[[], Spans], Rule]] = {
    "documents": (lambda: masks.documents(LENGTHS, "cpu"), lambda i, j: OF[i] == OF[j]),
    "causal documents": (
        lambda: masks.documents(LENGTHS, "cpu", causal=True),
        lambda i, j: OF[i] == OF[j] and j <= i,
    ),
    "causal window": (lambda: masks.window(17, 17, 4, 0, "cpu"), lambda i, j: i - 4 <= j <= i),
    "two-sided window": (lambda: masks.window(17, 17, 2, 3, "cpu"), lambda i, j: i - 2 <= j <= i + 3),
    "no limit left": (lambda: masks.window(17, 17, -1, 3, "cpu"), lambda i, j: j <= i + 3),
    "no limit right": (lambda: masks.window(17, 17, 3, -1, "cpu"), lambda i, j: i - 3 <= j),
    "sinks": (
        lambda: masks.window_with_sinks(17, 17, 3, 0, 2, "cpu"),
        lambda i, j: j <= i and (j < 2 or i - 3 <= j),
    ),
    "prefix": (
        lambda: masks.prefix_lm(PREFIXES, LENGTHS, "cpu"),
        lambda i, j: OF[i] == OF[j] and (j <= i or j - FIRST[j] < PREFIXES[OF[j]]),
    ),
    "chunks": (lambda: masks.chunked_causal(17, 5, "cpu"), lambda i, j: j <= i and i // 5 == j // 5),
    "tree": (
        lambda: masks.tree(PARENTS, LENGTHS, "cpu"),
        lambda i, j: j <= i and OF[j] in ANCESTORS[OF[i]],
    ),
    "shared prefix": (
        lambda: masks.shared_prefix([(3, [2, 4]), (0, [5]), (2, [1, 0])], "cpu"),
        lambda i, j: j <= i and shared(i, j),
    ),
    "images": (
        lambda: masks.causal_or_image(LENGTHS, IMAGES, "cpu"),
        lambda i, j: j <= i or (OF[i] == OF[j] and IMAGES[OF[i]]),
    ),
    "window in documents": (
        lambda: masks.documents(LENGTHS, "cpu") & masks.window(17, 17, 2, 1, "cpu"),
        lambda i, j: OF[i] == OF[j] and i - 2 <= j <= i + 1,
    ),
    "tree by times": (
        lambda: masks.tree_by_times(TIN, TOUT, "cpu"),
        lambda i, j: TIN[j] <= TIN[i] < TOUT[j],
    ),
    "images in a window": (
        lambda: masks.causal_or_image(LENGTHS, IMAGES, "cpu", window=3),
        lambda i, j: i - 3 < j <= i or (OF[i] == OF[j] and IMAGES[OF[i]]),
    ),
}
GROUPS = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
PARTS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 1]  # 0 is the prompt


def shared(i: int, j: int) -> bool:
    return GROUPS[i] == GROUPS[j] and PARTS[j] in (0, PARTS[i])


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    make, rule = CASES[name]
    mask = make()
    expected = dense(rule, 17, 17)
    assert torch.equal(mask.visible(17, 17), expected)
    if "in documents" not in name:
        assert mask.visible_keys == pytest.approx(expected.sum().item() / 17)


@pytest.mark.parametrize(("length", "block"), [(9, 3), (10, 4), (3, 1), (5, 8)])
def test_block_diffusion(length: int, block: int) -> None:
    mask = masks.block_diffusion(length, block, "cpu")

    def rule(i: int, j: int) -> bool:
        of_i, of_j = (x % length // block for x in (i, j))
        if j < length:
            return i < length and of_i == of_j
        return of_j < of_i if i < length else of_j <= of_i

    expected = dense(rule, 2 * length, 2 * length)
    assert torch.equal(mask.visible(2 * length, 2 * length), expected)
    assert mask.intervals == 2
    assert mask.visible_keys == pytest.approx(expected.sum().item() / (2 * length))


def test_unions_of_patterns() -> None:
    """A window, or the first two keys of each document, but not in noise."""
    documents = masks.documents(LENGTHS, "cpu", causal=True)
    first = torch.tensor([j - FIRST[j] < 2 for j in range(17)])
    sinks = Spans(documents.starts, torch.where(first, documents.ends, 0).int())
    noise = Spans(torch.full((17,), 9).int(), torch.full((17,), 11).int())
    mask = ((masks.window(17, 17, 2, 0, "cpu") & documents) | sinks) & ~noise
    rule = dense(
        lambda i, j: OF[i] == OF[j] and j <= i and (i - 2 <= j or bool(first[j])) and i not in (9, 10), 17, 17
    )
    assert mask.intervals == 3
    assert torch.equal(mask.visible(17, 17), rule)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 9), (9, 5)])
def test_windows_of_other_lengths_are_bottom_right_aligned(seq_q: int, seq_k: int) -> None:
    far = seq_k - seq_q
    mask = masks.window_with_sinks(seq_q, seq_k, 2, 1, 1, "cpu")
    rule = dense(lambda i, j: j <= i + far + 1 and (j < 1 or i + far - 2 <= j), seq_q, seq_k)
    assert torch.equal(mask.visible(seq_q, seq_k), rule)


def test_attention_with_a_tree() -> None:
    q, k, v = (torch.randn(1, 2, 17, 16) for _ in range(3))
    mask = masks.tree(PARENTS, LENGTHS, "cpu")
    out = attnforge.attention(q, k, v, mask)
    torch.testing.assert_close(out, reference(q, k, v, mask)[0].to(out.dtype))


def test_a_million_tokens_take_no_square() -> None:
    mask = masks.documents([600_000, 400_000], "cpu", causal=True) & masks.window(
        10**6, 10**6, 4095, 0, "cpu"
    )
    assert mask.data.numel() == 2 * 10**6
    assert mask.ends[[0, 599_999, 999_999]].tolist() == [4096, 600_000, 1_000_000]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.tree([-1, 0, 0, 1], [1] * 4, "cpu"), "parents: segment 3 has parent 1"),
        (lambda: masks.tree([1, -1], [1, 1], "cpu"), "parents: segment 0 has parent 1"),
        (lambda: masks.tree([-1], [1, 1], "cpu"), "parents: got 1 entries for 2 segments"),
        (lambda: masks.tree_by_times([0, 2, 1], [9, 9, 9], "cpu"), "tin: entry 2 is below the one before it"),
        (
            lambda: masks.tree_by_times([0, 1], [9, 1], "cpu"),
            "tout: entry 1 is 1, expected more than its tin",
        ),
        (
            lambda: masks.tree_by_times([0, 1, 2], [9, 3, 4], "cpu"),
            "tout: entry 2 is 4, but lies in a subtree that ends at 3",
        ),
        (lambda: masks.tree_by_times([0], [9, 3], "cpu"), "tout: got 2 entries, expected 1, as tin has"),
        (lambda: masks.block_diffusion(8, 0, "cpu"), "block: got 0, expected 1 or more"),
        (lambda: masks.documents([3, -1], "cpu"), "lengths: entry 1 is -1"),
        (lambda: masks.prefix_lm([4], [3], "cpu"), "prefixes: entry 0 is 4"),
        (lambda: masks.chunked_causal(8, 0, "cpu"), "chunk: got 0, expected 1 or more"),
        (lambda: masks.window(8, 8, -2, 0, "cpu"), "left: got -2"),
        (lambda: masks.causal_or_image([2, 3], [True], "cpu"), "is_image: got 1 entries for 2 segments"),
        (lambda: masks.documents([2], "cpu") & masks.documents([3], "cpu"), "2 keys on cpu and 3 keys"),
        (lambda: masks.shared_prefix([(2, [-1])], "cpu"), "groups: entry 0 is"),
        # int32 would wrap around.
        (lambda: masks.documents([2**32], "cpu"), "lengths: 4294967296 tokens in all, at most 1073741823"),
        (lambda: masks.documents(np.full(3, 2**30, np.int32), "cpu"), "lengths: 3221225472 tokens in all"),  # type: ignore[arg-type]
        (lambda: masks.window(2**31, 4, 1, 0, "cpu"), "seq_q: got 2147483648, at most 1073741823"),
        (lambda: masks.block_diffusion(2**29, 4, "cpu"), "length: got 536870912, at most 536870911"),
        (lambda: masks.tree_by_times([0], [2**70], "cpu"), "tout: a time does not fit 64 bits"),
    ],
)
def test_errors(call: Callable[[], Spans], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


UNTYPED: Any = masks


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: UNTYPED.documents(iter([3, 4]), "cpu"), "lengths: got list_iterator"),
        (lambda: UNTYPED.documents({3: 4}, "cpu"), "lengths: got dict"),
        (lambda: UNTYPED.documents(np.array(5), "cpu"), "lengths: got ndarray"),
        (
            lambda: UNTYPED.documents(np.ones((1, 2), dtype=int), "cpu"),
            "lengths: entry 0 is .*, not an integer",
        ),
        (
            lambda: UNTYPED.documents([torch.tensor(3.5)], "cpu"),
            "lengths: entry 0 is .*, not an integer",
        ),
        (lambda: UNTYPED.window(8, 8, 1.5, 0, "cpu"), "left: got 1.5, expected an integer"),
        (lambda: UNTYPED.window(8, 8, 1, "0", "cpu"), "right: got '0', expected an integer"),
        (lambda: UNTYPED.shared_prefix(5, "cpu"), "groups: got int, expected a list of .prompt length"),
        (lambda: UNTYPED.shared_prefix([5], "cpu"), "groups: entry 0 is 5, expected .prompt length"),
        (
            lambda: UNTYPED.shared_prefix([(5, 3)], "cpu"),
            r"groups\[0\]\[1\]: got int, expected a list of lengths",
        ),
        (
            lambda: UNTYPED.shared_prefix([(5.0, [3])], "cpu"),
            r"groups\[0\]\[0\]: got 5.0, expected an integer",
        ),
        (
            lambda: UNTYPED.causal_or_image([3], True, "cpu"),
            "is_image: got bool, expected a list of True and False",
        ),
        (
            lambda: UNTYPED.causal_or_image([3, 2], {True, False}, "cpu"),
            "is_image: got set, expected a list of True and False",
        ),
        (
            lambda: UNTYPED.causal_or_image([3], np.array(1), "cpu"),
            "is_image: got ndarray, expected a list of True and False",
        ),
        (
            lambda: UNTYPED.causal_or_image([3], ["no"], "cpu"),
            "is_image: entry 0 is 'no', expected True or False",
        ),
    ],
)
def test_wrong_types(call: Callable[[], Spans], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("far", [sys.maxsize, 2**70])
def test_distances_beyond_all_sequences_are_no_limit(far: int) -> None:
    """Sums with them would wrap around int64."""
    past, both = masks.window(9, 9, far, 0, "cpu"), masks.window(9, 9, far, far, "cpu")
    assert torch.equal(past.visible(9, 9), attnforge.Causal().visible(9, 9))
    assert both.visible(9, 9).all()
    chunk, image = masks.chunked_causal(9, far, "cpu"), masks.causal_or_image([9], [False], "cpu", window=far)
    for mask in (chunk, image, masks.window_with_sinks(9, 9, 0, 0, far, "cpu")):
        assert torch.equal(mask.visible(9, 9), past.visible(9, 9))
    assert torch.equal(masks.block_diffusion(9, far, "cpu").data, masks.block_diffusion(9, 9, "cpu").data)


@pytest.mark.parametrize("number", [np.uint8, np.int8, torch.tensor], ids=lambda number: number.__name__)
def test_narrow_integers_do_not_wrap_around(number: Callable[[int], Any]) -> None:
    """Of NumPy, and tensors without axes."""
    n = number
    for ours, expected in (
        (masks.window(n(8), n(4), n(2), n(0), "cpu"), masks.window(8, 4, 2, 0, "cpu")),
        (masks.chunked_causal(n(100), n(30), "cpu"), masks.chunked_causal(100, 30, "cpu")),
        (masks.block_diffusion(n(100), n(30), "cpu"), masks.block_diffusion(100, 30, "cpu")),
        (masks.tree([-1, 0], [n(100), n(120)], "cpu"), masks.tree([-1, 0], [100, 120], "cpu")),
        (masks.shared_prefix([(n(100), [n(90)])], "cpu"), masks.shared_prefix([(100, [90])], "cpu")),
    ):
        assert torch.equal(ours.data, expected.data)


@pytest.mark.parametrize("flags", [np.array, torch.tensor], ids=lambda flags: flags.__name__)
def test_flags_may_be_an_array(flags: Callable[[list[bool]], Any]) -> None:
    """Of NumPy, or a tensor."""
    ours, expected = (masks.causal_or_image(LENGTHS, x, "cpu") for x in (flags(IMAGES), IMAGES))
    assert torch.equal(ours.data, expected.data)


def test_no_tokens() -> None:
    for mask in (
        masks.documents([], "cpu"),
        masks.window(0, 0, 1, 1, "cpu"),
        masks.chunked_causal(0, 4, "cpu"),
        masks.block_diffusion(0, 4, "cpu"),
        masks.tree([], [], "cpu"),
    ):
        assert mask.visible(0, 0).shape == (0, 0)
        assert mask.visible_keys is None


def test_times_at_the_ends_of_64_bits() -> None:
    mask = masks.tree_by_times([-(2**63), 2**62], [2**63 - 1, 2**63 - 1], "cpu")
    assert mask.visible(2, 2).tolist() == [[True, False], [True, True]]
