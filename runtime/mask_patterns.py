"""`attnforge.masks`: the masks that papers and trainers name, as `Spans`: few intervals of queries for each key.

Each function states its rule as "query i sees key j when ...". Its result holds two integers an interval and
key, never S x S of anything, so sequences of a million tokens are cheap. Sequences are self-attention (as many queries
as keys) unless a function takes both lengths. Masks combine with `&`, `|` and `~`: documents(...) & window(...) is a
window inside each document.

They are made on the host, of lists: make a mask outside of compiled code, once a step, and pass it in. torch.compile
breaks its graph at a call, and with fullgraph=True its error says this.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import ParamSpec

import numpy as np
import numpy.typing as npt
import torch

from attnforge.runtime.inputs import MAX_ROWS, expect_integer, expect_integers, expect_number
from attnforge.runtime.masks import FunctionMask, Spans, average_visible_keys
from attnforge.runtime.score_trace import MaskFunction, traced_mask

Device = torch.device | str
Vector = npt.NDArray[np.int64]

P = ParamSpec("P")


def _on_host(function: Callable[P, Spans]) -> Callable[P, Spans]:
    """Keep torch.compile out of a function of lists and NumPy arrays; its error with fullgraph=True says what to do."""

    @functools.cache
    def untraced() -> Callable[P, Spans]:
        return torch._dynamo.disable(function)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> Spans:
        # Only where it is in use: torch.compiler.disable imports it, which takes a second or more.
        return (untraced() if "torch._dynamo" in sys.modules else function)(*arguments, **named)

    # What torch.compiler.disable sets, and Dynamo quotes.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        f"attnforge.masks.{function.__name__} makes a mask on the host; make it outside of compiled code and pass the "
        "mask in. For documents whose lengths are on the device, flash_attn_varlen_func takes cu_seqlens"
    )
    return call


@_on_host
def documents(lengths: Sequence[int], device: Device, *, causal: bool = False) -> Spans:
    """Documents packed end to end: query i sees key j when both are in one document (and j <= i if `causal`).

    lengths: tokens of each document; 0 is allowed. A tensor of cu_seqlens that is on the device already goes to
    `flash_attn_varlen_func`, which never reads it on the host, and which torch.compile traces.
    """
    starts, ends = _segments(lengths)
    return _spans(_rows(starts) if causal else starts, ends, device)


@_on_host
def window(seq_q: int, seq_k: int, left: int, right: int, device: Device) -> Spans:
    """Sliding window: query i sees key j when p - left <= j <= p + right, where p = i + seq_k - seq_q.

    left, right: keys before and after the query's own; -1: no limit on that side. (W - 1, 0) is the causal window of W
    keys that Mistral and Gemma train with.
    """
    return window_with_sinks(seq_q, seq_k, left, right, 0, device)


@_on_host
def window_with_sinks(seq_q: int, seq_k: int, left: int, right: int, sinks: int, device: Device) -> Spans:
    """`window`, and the first `sinks` keys are seen by every query at or after them (StreamingLLM)."""
    seq_q, seq_k = _length("seq_q", seq_q), _length("seq_k", seq_k)
    left, right, sinks = _distance("left", left, -1), _distance("right", right, -1), _distance("sinks", sinks)
    key = np.arange(seq_k, dtype=np.int64)
    own = key - (seq_k - seq_q)  # the query at the key's own position
    starts = own - right if right >= 0 else np.zeros_like(key)
    ends = own + left + 1 if left >= 0 else np.full_like(key, seq_q)
    ends = np.where(key < sinks, seq_q, ends)
    return _spans(np.clip(starts, 0, seq_q), np.clip(ends, 0, seq_q), device, seq_q)


@_on_host
def prefix_lm(prefixes: Sequence[int], lengths: Sequence[int], device: Device) -> Spans:
    """Prefix LM: query i sees key j of its document when j <= i or j is in the document's prefix.

    prefixes: tokens of each document's prefix, at most its length; lengths: tokens of each document.
    """
    expect_integers("prefixes", prefixes, "a list of lengths")
    starts, ends = _segments(lengths)
    if len(prefixes) != len(lengths):
        raise ValueError(f"prefixes: got {len(prefixes)} entries for {len(lengths)} documents")
    for index, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        if not 0 <= prefix <= length:
            raise ValueError(
                f"prefixes: entry {index} is {prefix}, expected 0 to the document's {length} tokens"
            )
    first_after = starts + np.repeat(np.asarray(prefixes, dtype=np.int64), lengths)
    row = _rows(starts)
    return _spans(np.where(row < first_after, starts, row), ends, device)


@_on_host
def chunked_causal(length: int, chunk: int, device: Device) -> Spans:
    """Chunked causal (Llama 4): query i sees key j when j <= i and both are in one chunk of `chunk` tokens."""
    length, chunk = _length("length", length), _distance("chunk", chunk, 1)
    row = np.arange(length, dtype=np.int64)
    return _spans(row, np.minimum((row // chunk + 1) * chunk, length), device)


@_on_host
def tree(parents: Sequence[int], lengths: Sequence[int], device: Device) -> Spans:
    """A tree of token segments: query i sees key j when j <= i and j's segment is i's own or one of its ancestors.

    What tree search and reinforcement learning pack: completions share the prefixes that they have in common.

    parents: the parent of each segment, -1 for a root; segments are in depth-first preorder, so that each subtree is
        contiguous. lengths: tokens of each segment, 0 is allowed.
    Raises ValueError naming the first segment that is out of order.
    """
    expect_integers("parents", parents, "a list of segments")
    starts, _ = _segments(lengths)
    if len(parents) != len(lengths):
        raise ValueError(f"parents: got {len(parents)} entries for {len(lengths)} segments")
    subtree_ends = _subtree_ends(parents, [0, *accumulate(map(operator.index, lengths))])
    return _spans(_rows(starts), np.repeat(np.asarray(subtree_ends, dtype=np.int64), lengths), device)


@_on_host
def shared_prefix(groups: Sequence[tuple[int, Sequence[int]]], device: Device) -> Spans:
    """Completions that share a prompt: query i sees key j <= i of its group in the prompt and in its own completion.

    groups: (prompt length, lengths of its completions) of each group, packed end to end: the prompt, then its
    completions. It is a `tree` of depth two.
    """
    parents: list[int] = []
    lengths: list[int] = []
    for prompt, completions in _groups(groups):
        root = len(parents)
        parents += [-1, *(root for _ in completions)]
        lengths += [prompt, *completions]
    return tree(parents, lengths, device)


@_on_host
def tree_by_times(tin: Sequence[int], tout: Sequence[int], device: Device) -> Spans:
    """A tree of tokens: query i sees key j when tin[j] <= tin[i] < tout[j].

    tin, tout: when a depth-first walk enters each token, or its node, and leaves its subtree. Tokens come in the order
        of tin; those with the same tin are of one node and see each other.
    Raises ValueError naming the first token that is out of order, leaves before it enters, or whose subtree crosses
    that of another.
    """
    entered, left = (_times(name, values) for name, values in (("tin", tin), ("tout", tout)))
    if len(entered) != len(left):
        raise ValueError(f"tout: got {len(left)} entries, expected {len(entered)}, as tin has")
    back = np.flatnonzero(entered[1:] < entered[:-1])
    if back.size:
        raise ValueError(f"tin: entry {back[0] + 1} is below the one before it; order tokens by tin")
    early = np.flatnonzero(left <= entered)
    if early.size:
        raise ValueError(f"tout: entry {early[0]} is {left[early[0]]}, expected more than its tin")
    _expect_nested(entered, left)
    return _spans(np.searchsorted(entered, entered), np.searchsorted(entered, left), device)


@_on_host
def block_diffusion(length: int, block: int, device: Device) -> Spans:
    """Block diffusion training (BD3-LM): `length` noisy tokens, then the same tokens clean, in blocks of `block`.

    A noisy query sees the noisy keys of its own block and the clean keys of earlier blocks; a clean query sees the
    clean keys of its own block and of earlier ones. The mask is of 2 * length tokens, with two intervals a key.
    """
    length, block = _length("length", length, MAX_ROWS // 2), _distance("block", block, 1)
    row = np.arange(length, dtype=np.int64)
    first, end = row // block * block, np.minimum((row // block + 1) * block, length)
    none = np.zeros_like(row)
    # Noisy queries, and clean ones, that see each noisy key and each clean key.
    starts = np.stack((np.concatenate((first, end)), np.concatenate((none, length + first))))
    ends = np.stack((np.concatenate((end, none + length)), np.concatenate((none, none + 2 * length))))
    return _spans(starts, ends, device, 2 * length)


@_on_host
def causal_or_image(
    lengths: Sequence[int], is_image: Sequence[bool], device: Device, *, window: int = -1
) -> Spans:
    """Text and images in one sequence: query i sees key j when j <= i or both are in one image (Gemma 3, PaliGemma).

    lengths: tokens of each segment; is_image: which segments are images. window: if not -1, j <= i holds for the last
    `window` keys of a query only, its own included, as in Gemma 3's local layers; an image sees all of itself.
    """
    starts, segment_ends = _segments(lengths)
    row = _rows(starts)
    image = np.repeat(_flags("is_image", is_image, len(lengths)), lengths)
    ends = np.full_like(row, len(row))
    if (window := _distance("window", window, -1)) >= 0:
        ends = np.minimum(row + window, ends)
        ends = np.where(image, np.maximum(ends, segment_ends), ends)
    return _spans(np.where(image, starts, row), ends, device)


def mask_mod(
    function: MaskFunction, seq_q: int, seq_k: int, device: Device, *, visible_keys: float | None = None
) -> FunctionMask:
    """Any mask: query i of batch entry b and query head h sees key j when function(b, h, i, j), as in FlexAttention.

    The function is traced once, with int32 scalar tensors, and becomes part of the kernels, which are compiled once for
    each text. A later function of the same code, with other tensors of the same form, is not traced again. Nothing
    S x S is stored. Where few intervals of queries see each key, Spans are faster.

    function: integers, floats, comparisons, &, |, ~, where, and up to 4 captured tensors, together with those of a
        score, indexed by numbers: int32, bool, float32, bfloat16, float16, other integers that fit int32 (int64 waits
        for the device to check that). They are copied to `device`: later changes do not change the mask. Integers
        of all widths, also `x.long()`, are computed as int32.
    visible_keys: as for `Spans`.
    Raises ScoreError, a ValueError, that names an operation which cannot be translated.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, expected a function (b, h, q_idx, kv_idx)")
    if torch.compiler.is_compiling():
        raise TypeError(
            "function: cannot be traced inside torch.compile; make the mask outside and pass that"
        )
    expect_number("visible_keys", visible_keys)
    seq_q, seq_k = _length("seq_q", seq_q), _length("seq_k", seq_k)
    text, tensors = traced_mask(function)
    with torch.inference_mode(False):  # as in traced_mask
        tensors = tuple(x.to(device) for x in tensors)
    return FunctionMask(text, tensors, seq_q, seq_k, device, visible_keys=visible_keys)


def _expect(name: str, value: int, least: int) -> int:
    """The value as an int of Python, checked: a sum of NumPy's would wrap around."""
    expect_integer(name, value)
    if value < least:
        raise ValueError(f"{name}: got {value}, expected {least} or more")
    return operator.index(value)


def _length(name: str, value: int, most: int = MAX_ROWS) -> int:
    """A number of tokens, checked."""
    value = _expect(name, value, 0)
    if value > most:
        raise ValueError(f"{name}: got {value}, at most {most} are supported")
    return value


def _distance(name: str, value: int, least: int = 0) -> int:
    """A distance between tokens, checked; one beyond all sequences is as MAX_ROWS, and its sums fit int64."""
    return min(_expect(name, value, least), MAX_ROWS)


def _groups(groups: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, list[int]]]:
    """The groups of `shared_prefix`, checked."""
    form = "(prompt length, lengths of its completions)"
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise TypeError(f"groups: got {type(groups).__name__}, expected a list of {form}")
    found = []
    for index, group in enumerate(groups):
        if not isinstance(group, Sequence) or len(group) != 2:
            raise TypeError(f"groups: entry {index} is {group!r}, expected {form}")
        expect_integer(f"groups[{index}][0]", group[0])
        expect_integers(f"groups[{index}][1]", group[1], "a list of lengths")
        if group[0] < 0 or any(length < 0 for length in group[1]):
            raise ValueError(f"groups: entry {index} is {group!r}; lengths must be 0 or more")
        found.append((group[0], list(group[1])))
    return found


def _flags(name: str, values: Sequence[bool], count: int) -> npt.NDArray[np.bool_]:
    if not isinstance(values, Sequence) and getattr(values, "ndim", 0) != 1:
        raise TypeError(f"{name}: got {type(values).__name__}, expected a list of True and False")
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} entries for {count} segments")
    for index, value in enumerate(values):
        if value not in (0, 1):
            raise TypeError(f"{name}: entry {index} is {value!r}, expected True or False")
    return np.array([bool(value) for value in values], dtype=bool)


def _segments(lengths: Sequence[int]) -> tuple[Vector, Vector]:
    """First row and end of each row's own segment, int64 (sum(lengths)) each."""
    expect_integers("lengths", lengths, "a list of lengths")
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"lengths: entry {index} is {length}; lengths must be 0 or more")
    if (total := sum(map(operator.index, lengths))) > MAX_ROWS:
        raise ValueError(f"lengths: {total} tokens in all, at most {MAX_ROWS} are supported")
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    return np.repeat(ends - sizes, sizes), np.repeat(ends, sizes)


def _subtree_ends(parents: Sequence[int], bounds: Sequence[int]) -> list[int]:
    """The row where each segment's subtree ends; segment n has the rows bounds[n] to bounds[n + 1]."""
    ends = [0] * len(parents)
    path: list[int] = []  # the open segments: each the parent of the next
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = bounds[segment]
        if not path and parent != -1:
            raise ValueError(
                f"parents: segment {segment} has parent {parent}, whose subtree has ended or not begun; "
                "order segments depth first, each right behind its parent or a sibling's subtree"
            )
        path.append(segment)
    for segment in path:
        ends[segment] = bounds[-1]
    return ends


def _times(name: str, values: Sequence[int]) -> Vector:
    expect_integers(name, values, "a list of times")
    try:
        return np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name}: a time does not fit 64 bits") from None


def _expect_nested(entered: Vector, left: Vector) -> None:
    """ValueError naming a token whose subtree ends behind one that it lies in. `entered` ascends."""
    open_ends: list[int] = []  # of the subtrees that the walk is in, each within the one before
    for token, (enters, leaves) in enumerate(zip(entered.tolist(), left.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= enters:
            open_ends.pop()
        if open_ends and leaves > open_ends[-1]:
            raise ValueError(
                f"tout: entry {token} is {leaves}, but lies in a subtree that ends at {open_ends[-1]}"
            )
        open_ends.append(leaves)


def _rows(like: Vector) -> Vector:
    return np.arange(len(like), dtype=np.int64)


def _spans(starts: Vector, ends: Vector, device: Device, seq_q: int | None = None) -> Spans:
    """Spans on `device` of int64 (seq_k), or (n, seq_k), disjoint. Sets `visible_keys` of the result."""
    queries = len(starts) if seq_q is None else seq_q
    lengths = np.maximum(ends - starts, 0)
    seen_by = lengths.sum(axis=0) if lengths.ndim > 1 else lengths
    visible_keys = average_visible_keys(
        int(seen_by.sum()), int(seen_by.max(initial=0)), queries, seen_by.size
    )
    both = torch.from_numpy(np.stack((starts, ends)).astype(np.int32)).to(device, non_blocking=True)
    return Spans(both[0], both[1], visible_keys=visible_keys)
