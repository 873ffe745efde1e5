"""Masks between transformers' mask functions and attention: Spans that models take for a bool tensor.

Models pass a mask from one to the other, and some read, slice or change it on the way. `SpansTensor` is a tensor for
them, and `mask_of` gives attention its Spans. A bool tensor that somebody else made is converted once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attnforge.runtime.mask_intervals import spans_of
from attnforge.runtime.masks import AnyMask, DenseMask, Spans
from attnforge.runtime.per_tensor import may_keep, once

_aten = torch.ops.aten


class _Pairs:
    """The pairs of a SpansTensor once something read them, and the versions of both tensors at that time."""

    def __init__(self) -> None:
        self.dense: Tensor | None = None
        self.versions = (0, 0)


class SpansTensor(Tensor):
    """The bool mask (batch, 1, seq_q, seq_k) that `spans` describe, without its pairs until an operator reads them.

    Operators run on the pairs and give plain tensors. Changes in place, also of views, change the pairs, after which
    `spans` is None. Compiled code may pass it on to attention; an operator on it breaks the graph.
    """

    @staticmethod
    def __new__(cls, spans: Spans, shape: tuple[int, ...], pairs: _Pairs | None = None) -> SpansTensor:
        made: SpansTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=spans.device
        )
        made._made_of = spans
        made._pairs = _Pairs() if pairs is None else pairs
        return made

    _made_of: Spans
    _pairs: _Pairs

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def spans(self) -> Spans | None:
        """The mask; None if the tensor was changed since."""
        dense = self._pairs.dense
        if dense is None:
            return self._made_of
        if dense.is_inference() or self.is_inference():
            return None  # these do not count changes
        return self._made_of if self._pairs.versions == (self._version, dense._version) else None

    def dense(self) -> Tensor:
        """The pairs, the same tensor at each call."""
        if self._pairs.dense is None:
            seen = self._made_of.visible_rows(torch.arange(self.shape[2], device=self.device))
            pairs = seen.expand(self.shape).contiguous()
            self._pairs.dense = pairs
            if not pairs.is_inference() and not self.is_inference():
                self._pairs.versions = (self._version, pairs._version)
        return self._pairs.dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.detach.default:  # activation checkpointing detaches what it keeps
            mask: SpansTensor = args[0]
            return SpansTensor(mask._made_of, tuple(mask.shape), mask._pairs)
        args, kwargs = tree_map_only(SpansTensor, SpansTensor.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpansTensor({self._made_of!r}, shape={tuple(self.shape)})"

    def tolist(self) -> Any:
        """The pairs as nested lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The pairs as an array, which shares their memory."""
        return self.dense().numpy(force=force)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()


def mask_of(mask: Tensor, rows: int, keys: int) -> Spans | DenseMask:
    """The mask of a bool tensor that broadcasts to (batch, heads, rows, keys or more), 2-D or 4-D.

    Spans where at most 4 intervals of queries see each key. They are kept with the tensor until it changes, so that the
    layers of a model share one mask: a host sync for the first. No conversion where `may_keep` forbids it.
    """
    if isinstance(mask, SpansTensor):
        spans = mask.spans if tuple(mask.shape[-2:]) == (rows, keys) else None
        if spans is not None:
            return spans
        mask = mask.dense()
    visible = _of_rows(mask[..., :keys], rows)
    if visible.dim() not in (2, 4) or visible.numel() == 0 or not may_keep(mask):
        return DenseMask(visible)
    return once(_converted, visible)


def combined(
    mask: Tensor, limits: AnyMask, rows: int, keys: int, of_layer: bool = False
) -> Spans | DenseMask:
    """What a model's mask, bool or additive, and `limits` both show; limits: of at most one interval a key.

    of_layer: each layer makes a mask, which is not worth converting; additive masks are not converted either.
    """
    if of_layer or mask.dtype != torch.bool:
        pairs = _of_rows(visible_pairs(mask), rows)
    else:
        found = mask_of(mask, rows, keys)
        if limits is None:
            return found
        if isinstance(found, Spans) and isinstance(limits, Spans):
            return found & limits  # no more intervals than before
        pairs = found.visible(rows, keys, mask.device)
    return DenseMask(pairs if limits is None else pairs & limits.visible(rows, keys, mask.device))


def visible_pairs(mask: Tensor) -> Tensor:
    """A model's mask as bool. Models hide keys by False, or in an additive mask by -inf or the dtype's least value."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.dtype.is_floating_point else mask.bool()


def _of_rows(visible: Tensor, rows: int) -> Tensor:
    """A mask with one row for all queries as one of `rows` rows."""
    return visible.expand(*visible.shape[:-2], rows, -1) if visible.shape[-2] == 1 else visible


@torch.no_grad()
def _converted(visible: Tensor) -> Spans | DenseMask:
    planes = visible if visible.dim() == 4 else visible[None, None]
    spans = spans_of(lambda first, end: planes[..., first:end], planes.shape[3])
    return DenseMask(visible) if spans is None else spans
