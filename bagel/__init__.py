"""BAGEL: its packed mask, its training packs and its models' attention heads."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnforge.bagel.packing import PackedMask as PackedMask

__all__ = ["PackedMask"]


def __getattr__(name: str) -> Any:
    # torch is imported at the first use of a name, not by `attnforge --help`.
    if name not in __all__:
        raise AttributeError(f"module 'attnforge.bagel' has no attribute {name!r}")
    return getattr(importlib.import_module("attnforge.bagel.packing"), name)
