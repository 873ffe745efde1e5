"""What is made of a tensor, kept with it until it changes: the layers of a model share what is made of one mask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnforge.runtime.masks import stream_id, transient

Made = TypeVar("Made")
_LAYOUTS = 4  # parts of a tensor of which something is kept


class _Kept(NamedTuple):
    version: int
    made: Any


# By tensor (of a view, what it is a view of), then by layout, stream and function.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def once(make: Callable[[Tensor], Made], mask: Tensor) -> Made:
    """make(mask), the same object for the same tensor until torch counts a change of it."""
    owner = mask if mask._base is None else mask._base
    key = (mask.shape, mask.stride(), mask.storage_offset(), stream_id(mask.device), make)
    with _lock:
        masks: dict[Any, _Kept] = _known.setdefault(owner, {})
        kept = masks.get(key)
        if kept is None or kept.version != owner._version:
            if len(masks) == _LAYOUTS:
                masks.clear()
            masks[key] = kept = _Kept(owner._version, make(mask))
    made: Made = kept.made
    return made


def may_keep(mask: Tensor) -> bool:
    """Whether `once` can be used: not in a trace or capture (`transient`), nor if changes are not counted."""
    return not (transient() or mask.is_inference())
