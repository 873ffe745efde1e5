"""BAGEL: its packed mask, training packs, models, and the patch of its trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnforge.bagel.balancing import LayerCost as LayerCost
    from attnforge.bagel.balancing import balance as balance
    from attnforge.bagel.packing import PackedMask as PackedMask
    from attnforge.bagel.trainer.patch import patch as patch
    from attnforge.bagel.trainer.patch import unpatch as unpatch
    from attnforge.bagel.trainer.recording import record as record

__all__ = ["LayerCost", "PackedMask", "balance", "patch", "record", "unpatch"]

_HOME = {
    "LayerCost": "attnforge.bagel.balancing",
    "balance": "attnforge.bagel.balancing",
    "PackedMask": "attnforge.bagel.packing",
    "patch": "attnforge.bagel.trainer.patch",
    "record": "attnforge.bagel.trainer.recording",
    "unpatch": "attnforge.bagel.trainer.patch",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Lazy, so that `attnforge --help` does not import torch.
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge.bagel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
