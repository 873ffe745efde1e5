"""Masks and scores of a whole call for the query heads and rows that one rank computes (see context_parallel.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.part import Leaf, Part, part_of
from attnforge.codegen.score import MAX_TENSORS, Formula, ScoreMod
from attnforge.runtime.masks import DenseMask, FunctionMask, Spans
from attnforge.runtime.scores import Score

_FORMULAS: dict[str, type[Formula]] = {cls.argument: cls for cls in (ScoreMod, MaskMod)}


class Place(NamedTuple):
    """Query heads [head, head + heads) and rows [row, row + rows) of a call with `total` rows and keys.

    `heads_q`: of the whole call. `moved`: the indices that do not count from the first head or row of the whole on
    every rank; all ranks have the same kernels.
    """

    head: int
    heads: int
    heads_q: int
    row: int
    rows: int
    total: int
    moved: tuple[Leaf, ...]
    device: torch.device


def reads_positions(score: Score) -> bool:
    """Does the score need to know which query or key a row is?"""
    return bool({"q_idx", "kv_idx"} & set(_read("score", score.text)))


def reads_heads(mask: FunctionMask) -> bool:
    """Are pieces of different heads, or what they may be called with, different masks?"""
    return mask.shape[1] is not None or "h" in _read("mask_mod", mask.text)


@lru_cache(maxsize=64)
def _leaves(argument: str, text: str) -> tuple[str, ...]:
    program, _ = _FORMULAS[argument](text).parsed
    return tuple(sorted({str(node.value) for node in program.nodes if node.op == "leaf"}))


def _read(argument: str, text: str) -> tuple[str, ...]:
    """The indices, and the score, that a function reads."""
    return _leaves(argument, text)


def score_at(score: Score, tensors: Sequence[Tensor], place: Place, wanted: Sequence[int] = ()) -> Score:
    """The score of a part; `tensors` are those that the whole's captures.

    wanted: the tensors whose gradients the part's backward computes.
    """
    text, found = _at("score", score.text, tensors, place, False)
    return Score(_wanting(text, tuple(wanted)), found)


def add_gradients(score: Score, place: Place, sums: dict[int, Tensor], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of a part's tensors to `sums`, of the whole's tensors by ascending number."""
    part = _part("score", score.text, place.moved, False)
    for (number, whole), gradient in zip(sums.items(), gradients, strict=True):
        _narrow(whole, number, part, place).add_(gradient)


def mask_at(mask: FunctionMask, place: Place, keys: int) -> FunctionMask:
    """The mask of a part, whose keys are padded to `keys`; padding is hidden and sees nothing."""
    padded, batch = bool(place.total < keys), mask.shape[0]  # of a symbolic number, too
    heads = None if mask.shape[1] is None else place.heads
    part = _part("mask_mod", mask.text, place.moved, padded)
    if mask.shape == (batch, heads, place.rows, keys) and not part.placed and not part.narrowed:
        return mask  # with its schedules
    text, tensors = _at("mask_mod", mask.text, mask.tensors, place, padded)
    return FunctionMask(
        text,
        tensors,
        place.rows,
        keys,
        mask.device,
        batch=batch,
        heads=heads,
        visible_keys=mask.visible_keys,
    )


def expect_few_tensors(score: Score | None, mask: object, place: Place) -> None:
    """ValueError where a part's score and mask together capture more tensors than a kernel takes."""
    found = len(mask.tensors) if isinstance(mask, FunctionMask) else 0
    if score is not None:
        found += len(score.tensors) + _part("score", score.text, place.moved, False).placed
    if found > MAX_TENSORS:
        raise ValueError(
            f"score, mask: capture {found} tensors, at most {MAX_TENSORS} are supported; context_parallel adds one to "
            "each of them where a rank has to know its place among heads and rows"
        )


def planes_at(mask: Spans | DenseMask, place: Place) -> Spans | DenseMask:
    """The planes of a part's heads; the mask itself if it has one for all heads."""
    planes = mask.planes[1] if isinstance(mask, Spans) else mask.shape[1]
    if planes == 1 or place.heads == place.heads_q:
        return mask
    group = place.heads_q // planes  # q heads of a plane: 1, or those of a kv head
    return mask.narrow(1, place.head // group, max(1, place.heads // group))


@lru_cache(maxsize=64)
def _known_part(argument: str, text: str, moved: tuple[Leaf, ...], padded: bool) -> Part:
    return part_of(_FORMULAS[argument](text), moved, padded)


def _part(argument: str, text: str, moved: tuple[Leaf, ...], padded: bool) -> Part:
    return _known_part(argument, text, moved, padded)


def _wanting(text: str, wanted: tuple[int, ...]) -> str:
    """The text with the mark of these tensors' gradients."""
    for number in wanted:
        text = re.sub(rf"\bt{number}: \w+\[\d\]", r"\g<0> grad", text, count=1)
    return text


# Functions of texts, which Dynamo runs while tracing, as masks.load_operators. It looks through lru_cache, so the kept
# results have functions of their own.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]
_part._dynamo_marked_constant = True  # type: ignore[attr-defined]
_wanting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _at(
    argument: str, text: str, tensors: Sequence[Tensor], place: Place, padded: bool
) -> tuple[str, tuple[Tensor, ...]]:
    part = _part(argument, text, place.moved, padded)
    found = tuple(_narrow(x, number, part, place) for number, x in enumerate(tensors))
    if part.placed:
        numbers = (place.row, place.head, place.total)
        fake = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        found += ((_numbers if fake else _kept_numbers)(numbers, place.device),)
    return part.text, found


def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _kept_numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """What a part's function reads of its place. Kept, because the host waits when it copies it to a GPU."""
    with torch.inference_mode(False):
        return _numbers(numbers, device)


def _narrow(x: Tensor, number: int, part: Part, place: Place) -> Tensor:
    """The elements of a captured tensor that a part has: past the end of an axis, where padding is, its last one."""
    for tensor, axis, leaf in part.narrowed:
        if tensor == number:
            first, count = (place.head, place.heads) if leaf == "h" else (place.row, place.rows)
            first = min(first, x.shape[axis] - 1)
            x = x.narrow(axis, first, min(count, x.shape[axis] - first))
    return x
