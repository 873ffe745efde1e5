"""Score functions, mask functions and mask planes for the heads and rows that one rank computes.

A function's indices count from the first head and row of the whole call. `score_at` and `mask_at` rewrite the
function's text for the kernel of one rank, whose indices count from its own first head and row
(codegen/formula_slice.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnforge.codegen.formula import MAX_TENSORS, Formula
from attnforge.codegen.formula_slice import FormulaSlice, Leaf, slice_formula
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.runtime.inputs import axes_read
from attnforge.runtime.masks import DenseMask, FunctionMask, Spans
from attnforge.runtime.scores import Score

_FORMULAS: dict[str, type[Formula]] = {cls.argument: cls for cls in (ScoreMod, MaskMod)}


class LocalSlice(NamedTuple):
    """Query heads [head, head + heads) and rows [row, row + rows) of a call with `total` rows and keys.

    heads_q: query heads of the whole call. keys: keys of the whole call with padding.
    offset_indices: the indices that need an offset on at least one rank. It is the same on all ranks, so that they
        share one kernel.
    """

    head: int
    heads: int
    heads_q: int
    row: int
    rows: int
    total: int
    keys: int
    offset_indices: tuple[Leaf, ...]
    device: torch.device


def reads_positions(score: Score) -> bool:
    """Whether the score reads the index of the query or of the key."""
    return bool({"q_idx", "kv_idx"} & set(_read("score", score.text)))


def reads_heads(mask: FunctionMask) -> bool:
    """Whether the mask differs between heads, or is restricted to a number of heads."""
    return mask.shape[1] is not None or "h" in _read("mask_mod", mask.text)


@lru_cache(maxsize=64)
def _leaves(argument: str, text: str) -> tuple[str, ...]:
    program, _ = _FORMULAS[argument](text).parsed
    return tuple(sorted({str(node.value) for node in program.nodes if node.op == "leaf"}))


def _read(argument: str, text: str) -> tuple[str, ...]:
    """The leaves of a function's expression: the indices that it reads, and "score"."""
    return _leaves(argument, text)


def _axes(argument: str, text: str) -> tuple[tuple[int, int, str], ...]:
    """(tensor, axis, index) wherever a function reads an axis of a captured tensor at an index itself."""
    return axes_read(_FORMULAS[argument](text))


def score_at(
    score: Score, tensors: Sequence[Tensor], local_slice: LocalSlice, wanted: Sequence[int] = ()
) -> Score:
    """The score function of a local slice.

    tensors: the captured tensors of the whole call.
    wanted: indices of the tensors whose gradients the backward computes.
    """
    text, found = _at("score", score.text, tensors, local_slice, False)
    return Score(_wanting(text, tuple(wanted)), found)


def add_gradients(
    score: Score, local_slice: LocalSlice, sums: dict[int, Tensor], gradients: Sequence[Tensor]
) -> None:
    """Add the gradients of a local slice's tensors to `sums`.

    sums: gradients of the whole call's tensors by tensor index, ascending. gradients: in the same order.
    """
    part = _part("score", score.text, local_slice.offset_indices, False)
    for (number, whole), gradient in zip(sums.items(), gradients, strict=True):
        into = _narrow(whole, number, part, local_slice)
        into.add_(gradient[tuple(slice(size) for size in into.shape)])  # without what `_lengthened` added


def mask_at(mask: FunctionMask, local_slice: LocalSlice, keys: int) -> FunctionMask:
    """The mask function of a local slice, with keys padded to `keys`. Padding is hidden and sees nothing."""
    padded, batch = False, mask.shape[0]
    # A branch, since in a trace both may be symbolic, and bool() makes no constant of that.
    if local_slice.total < keys:
        padded = True
    heads = None if mask.shape[1] is None else local_slice.heads
    part = _part("mask_mod", mask.text, local_slice.offset_indices, padded)
    if mask.shape == (batch, heads, local_slice.rows, keys) and not part.has_offsets and not part.narrowed:
        return mask  # the same object keeps its tile schedules
    text, tensors = _at("mask_mod", mask.text, mask.tensors, local_slice, padded)
    return FunctionMask(
        text,
        tensors,
        local_slice.rows,
        keys,
        mask.device,
        batch=batch,
        heads=heads,
        visible_keys=mask.visible_keys,
    )


def expect_few_tensors(score: Score | None, mask: object, local_slice: LocalSlice) -> None:
    """Raises ValueError if score and mask of a rank capture more tensors than a kernel takes."""
    found = len(mask.tensors) if isinstance(mask, FunctionMask) else 0
    if score is not None:
        part = _part("score", score.text, local_slice.offset_indices, False)
        found += len(score.captured) + part.has_offsets
    if found > MAX_TENSORS:
        raise ValueError(
            f"score, mask: capture {found} tensors, at most {MAX_TENSORS} are supported; context_parallel adds one to "
            "each of them where a rank needs the index of its first head and row"
        )


def planes_at(mask: Spans | DenseMask, local_slice: LocalSlice) -> Spans | DenseMask:
    """The mask's planes of a local slice's heads. Returns the mask itself if one plane is for all heads."""
    planes = mask.planes[1] if isinstance(mask, Spans) else mask.shape[1]
    if planes == 1 or local_slice.heads == local_slice.heads_q:
        return mask
    group = local_slice.heads_q // planes  # query heads per plane: 1, or those of a kv head
    return mask.narrow(1, local_slice.head // group, max(1, local_slice.heads // group))


@lru_cache(maxsize=64)
def _known_part(argument: str, text: str, offset_indices: tuple[Leaf, ...], padded: bool) -> FormulaSlice:
    return slice_formula(_FORMULAS[argument](text), offset_indices, padded)


def _part(argument: str, text: str, offset_indices: tuple[Leaf, ...], padded: bool) -> FormulaSlice:
    return _known_part(argument, text, offset_indices, padded)


def _wanting(text: str, wanted: tuple[int, ...]) -> str:
    """The text of a score function with its tensors `wanted` marked as requiring gradients."""
    for number in wanted:
        text = re.sub(rf"\bt{number}: \w+\[\d\]", r"\g<0> grad", text, count=1)
    return text


# Dynamo runs these functions of strings while tracing, as it does masks.load_operators. It looks through lru_cache, so
# each cached function needs an uncached wrapper to mark.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]
_axes._dynamo_marked_constant = True  # type: ignore[attr-defined]
_part._dynamo_marked_constant = True  # type: ignore[attr-defined]
_wanting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _at(
    argument: str, text: str, tensors: Sequence[Tensor], local_slice: LocalSlice, padded: bool
) -> tuple[str, tuple[Tensor, ...]]:
    """Text and captured tensors of a function for a local slice."""
    part = _part(argument, text, local_slice.offset_indices, padded)
    found = tuple(_narrow(x, number, part, local_slice) for number, x in enumerate(tensors))
    if torch.compiler.is_compiling():  # then the fake kernels compare sizes; eager calls pass check=False
        axes = _axes(argument, part.text)
        found = tuple(_lengthened(x, number, axes, local_slice) for number, x in enumerate(found))
    if part.has_offsets:
        numbers = (local_slice.row, local_slice.head, local_slice.total)
        fake = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        found += ((_numbers if fake else _kept_numbers)(numbers, local_slice.device),)
    return part.text, found


def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _kept_numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The offsets that a rewritten function reads: (row, head, total), int32.

    Cached, because copying them to a GPU synchronizes.
    """
    with torch.inference_mode(False):
        return _numbers(numbers, device)


def _narrow(x: Tensor, number: int, part: FormulaSlice, local_slice: LocalSlice) -> Tensor:
    """The elements of a captured tensor that a local slice reads.

    If the slice begins past the end of an axis, where rows are padding, this is the last element.
    """
    for tensor, axis, leaf in part.narrowed:
        if tensor == number:
            first, count = (
                (local_slice.head, local_slice.heads) if leaf == "h" else (local_slice.row, local_slice.rows)
            )
            first = min(first, x.shape[axis] - 1)
            x = x.narrow(axis, first, min(count, x.shape[axis] - first))
    return x


def _lengthened(
    x: Tensor, number: int, axes: tuple[tuple[int, int, str], ...], local_slice: LocalSlice
) -> Tensor:
    """x with its last element repeated for the rows and keys of the padding, which no kernel uses."""
    for tensor, axis, index in axes:
        if tensor == number and index in ("q_idx", "kv_idx"):
            missing = (local_slice.rows if index == "q_idx" else local_slice.keys) - x.shape[axis]
            if missing > 0:
                sizes = [missing if i == axis else -1 for i in range(x.dim())]
                x = torch.cat((x, x.narrow(axis, x.shape[axis] - 1, 1).expand(sizes)), axis)
    return x
