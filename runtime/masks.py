"""Mask values of the public API: which (query i, key j) pairs are looked at. No mask (None) is full."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attnforge.codegen.spec import Mask
from attnforge.runtime.inputs import MAX_INDEX


class Causal:
    """Key j is visible to query i when j <= i + seq_k - seq_q (bottom-right aligned, as in flash-attn).

    With seq_q > seq_k the first seq_q - seq_k queries see no key: zero output, lse -inf, zero gradients.
    """

    kind: ClassVar[Mask] = Mask.CAUSAL

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k), True = visible. For small sizes and tests."""
        query = torch.arange(seq_q, device=device)[:, None]
        key = torch.arange(seq_k, device=device)[None]
        return key <= query + (seq_k - seq_q)

    def __repr__(self) -> str:
        return "Causal()"


class Spans:
    """Key j is visible to the queries starts[j] <= i < ends[j]; an empty interval hides the key.

    `starts`, `ends`: int32 (seq_k) on the device of q, the same for every batch entry and head. Tile
    schedules are cached per pair of tensors; an in-place change that bumps their version counter is noticed,
    one that hides from it (through `.data`, or by a CUDA graph that computes them and is replayed before a
    call outside of it) is not. Inside a CUDA graph each call builds its schedule anew, at every replay.

    `visible_keys`: how many keys a query sees on average, where the host knows. By it, rounded down to a power of
    two, dispatch tells sparse packs from dense ones: it chooses kernels and changes nothing else.
    """

    kind: ClassVar[Mask] = Mask.SPANS

    def __init__(self, starts: Tensor, ends: Tensor, *, visible_keys: float | None = None) -> None:
        """Raises TypeError or ValueError for anything but two int32 vectors of one length on one device."""
        _check_vector("starts", starts)
        _check_vector("ends", ends)
        if starts.shape != ends.shape:
            raise ValueError(
                f"ends: got length {ends.shape[0]}, expected the length of starts, {starts.shape[0]}"
            )
        if starts.device != ends.device:
            raise ValueError(f"ends: is on {ends.device}, but starts is on {starts.device}; move one of them")
        self.starts = starts
        self.ends = ends
        self.visible_keys = visible_keys
        self.bucket = bucket(visible_keys)

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k), True = visible. For small sizes and tests."""
        if self.starts.shape[0] != seq_k:
            raise ValueError(f"mask: starts has length {self.starts.shape[0]}, but there are {seq_k} keys")
        query = torch.arange(seq_q, device=device)[:, None]
        return (self.starts.to(device)[None] <= query) & (query < self.ends.to(device)[None])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq_k={self.starts.shape[0]}, device={self.starts.device})"


class DenseMask:
    """Any mask: key j is visible to query i where `mask[..., i, j]` is True.

    `mask`: bool (seq_q, seq_k), or (batch or 1, heads_q or 1, seq_q, seq_k) for masks that differ between batch
    entries or query heads; on the device of q, with any strides, never copied. It is packed to bits and to lists
    of tiles on the device, so empty tiles are skipped and full ones cost nothing; a row that sees no key gives
    zeros. The result is cached as that of `Spans`, whose rules for changes in place hold here too: make one mask
    a step and pass it to all layers. `visible_keys` as for `Spans`, over all planes.
    """

    kind: ClassVar[Mask] = Mask.DENSE

    def __init__(self, mask: Tensor, *, visible_keys: float | None = None) -> None:
        """Raises TypeError or ValueError for anything but a bool tensor of 2 or 4 dimensions."""
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: got {type(mask).__name__}, expected a bool tensor")
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask: got dtype {mask.dtype}, expected torch.bool, True where a key is visible; "
                "use mask.to(torch.bool)"
            )
        if mask.dim() not in (2, 4):
            raise ValueError(
                f"mask: got shape {tuple(mask.shape)}, expected (seq_q, seq_k) "
                "or (batch or 1, heads_q or 1, seq_q, seq_k)"
            )
        for axis in range(mask.dim() - 2):  # what is expanded is one plane: nothing must ever write it out
            if mask.stride(axis) == 0:
                mask = mask.narrow(axis, 0, 1)
        self.mask = mask
        self.visible_keys = visible_keys
        self.bucket = bucket(visible_keys)

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k) or (B or 1, Hq or 1, seq_q, seq_k), True = visible. For tests."""
        if tuple(self.mask.shape[-2:]) != (seq_q, seq_k):
            raise ValueError(f"mask: has shape {tuple(self.mask.shape)}, but pairs are {seq_q} x {seq_k}")
        return self.mask.to(device)

    def __repr__(self) -> str:
        return f"DenseMask(shape={tuple(self.mask.shape)}, device={self.mask.device})"


def bucket(visible_keys: float | None) -> int:
    """The largest power of two that is not above `visible_keys`, at least 1; 0 for None. In a trace the number itself.

    Operators take either. A mask that is made outside of compiled code enters it as one of few numbers; one that is
    made inside may have a symbol, which a comparison would tie to a range.
    """
    if visible_keys is None:
        return 0
    if isinstance(visible_keys, bool) or not isinstance(visible_keys, (int, float, torch.SymInt)):
        raise TypeError(f"visible_keys: got {type(visible_keys).__name__}, expected a number or None")
    if not 0 <= visible_keys <= MAX_INDEX:
        raise ValueError(f"visible_keys: got {visible_keys}, expected 0 to {MAX_INDEX}")
    if torch.compiler.is_compiling():
        return int(visible_keys) if isinstance(visible_keys, float) else visible_keys
    return 1 << (max(int(visible_keys), 1).bit_length() - 1)


def _check_vector(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int32 tensor of length seq_k")
    if value.dtype != torch.int32:
        raise ValueError(f"{name}: got dtype {value.dtype}, expected torch.int32; use {name}.to(torch.int32)")
    if value.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected one dimension, (seq_k)")
