"""BAGEL: its packed mask, its training packs and its models' attention heads."""

from attnforge.bagel.packing import PackedMask

__all__ = ["PackedMask"]
