"""BAGEL: its packed mask, its training packs, its models' attention heads, and the patch of its trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnforge.bagel.official import patch as patch
    from attnforge.bagel.official import unpatch as unpatch
    from attnforge.bagel.packing import PackedMask as PackedMask
    from attnforge.bagel.recording import record as record

__all__ = ["PackedMask", "patch", "record", "unpatch"]

_HOME = {
    "PackedMask": "attnforge.bagel.packing",
    "patch": "attnforge.bagel.official",
    "record": "attnforge.bagel.recording",
    "unpatch": "attnforge.bagel.official",
}


def __getattr__(name: str) -> Any:
    # torch is imported at the first use of a name, not by `attnforge --help`.
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge.bagel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
