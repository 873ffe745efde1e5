"""Masks of the public API: which (query i, key j) pairs are visible. None is the full mask.

A mask copies its source and never changes. It owns the tile schedules of its kernels: each is built at its first use
and shared by all layers, by forward and backward, in eager and compiled code. See native/masks.h.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnforge.codegen.spec import Mask
from attnforge.runtime.inputs import MAX_INDEX
from attnforge.runtime.native.operators import operators

_operators = torch.ops.attnforge


def load_operators() -> bool:
    """Load the operators, once."""
    operators()
    return True


# Dynamo runs the function while tracing and keeps the result. torch.compiler.assume_constant_result sets the same
# attribute, but it imports torch._dynamo, which takes a second or more.
load_operators._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


class _Listed:
    """Base of `Spans` and `DenseMask`: data on a device, whose storage owns the tile schedules."""

    data: Tensor
    visible_keys: float | None
    visible_keys_rounded: int

    def _adopt(self, data: Tensor, visible_keys: float | None) -> None:
        self.data = data
        self.visible_keys = visible_keys
        self.visible_keys_rounded = round_visible_keys(visible_keys)

    @property
    def device(self) -> torch.device:
        """The device of the mask, which must be that of q."""
        return self.data.device

    def _replaced(self, data: Tensor) -> Any:
        """A copy of this mask with other data, and without schedules yet."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.data = _operators.mask_of_data(data)
        return other

    def to(self, device: torch.device | str) -> Any:
        """This mask on `device`; returns itself if it is there already."""
        moved = self.data.to(device)
        return self if moved is self.data else self._replaced(moved)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled tensor has a plain storage, which cannot own schedules.
        load_operators()
        self.__dict__.update(state | {"data": _operators.mask_of_data(state["data"])})


class Spans(_Listed):
    """Key j is visible to the queries starts[j] <= i < ends[j]; an empty interval hides the key.

    `starts`, `ends`: int32 (seq_k) on the device of q, any values, the same for every batch entry and head. They are
    copied: later changes of the tensors do not change the mask. A mask that is made while a CUDA graph is captured is
    made again, with its schedules, at every replay.

    `visible_keys`: the average number of keys that a query sees, if the host knows it. Dispatch rounds it down to a
    power of two and uses it to choose between kernels for sparse and dense packs; results do not depend on it.
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
        load_operators()
        self._adopt(_operators.mask_of_spans(starts, ends), visible_keys)

    @classmethod
    def _of(cls, data: Tensor, visible_keys: float | None) -> Spans:
        """A mask around data that an operator made."""
        mask = object.__new__(Spans)
        mask._adopt(data, visible_keys)
        return mask

    @property
    def seq_k(self) -> int:
        """Number of keys."""
        return self.data.shape[1]

    @property
    def starts(self) -> Tensor:
        """int32 (seq_k), a copy."""
        return self.data[0].clone()

    @property
    def ends(self) -> Tensor:
        """int32 (seq_k), a copy."""
        return self.data[1].clone()

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k), True = visible. For small sizes and tests."""
        if self.seq_k != seq_k:
            raise ValueError(f"mask: is of {self.seq_k} keys, but there are {seq_k}")
        query = torch.arange(seq_q, device=device)[:, None]
        starts, ends = self.data.to(device)[:, None]
        seen: Tensor = (starts <= query) & (query < ends)
        return seen

    def __and__(self, other: Spans) -> Spans:
        """The pairs that both masks show, as new Spans on their device, without a host sync.

        Raises ValueError unless both are of the same keys on one device.
        """
        if not isinstance(other, Spans):
            return NotImplemented
        if self.data.shape != other.data.shape or self.device != other.device:
            raise ValueError(
                f"mask: {self.seq_k} keys on {self.device} and {other.seq_k} keys on {other.device} have no common "
                "pairs; make both masks for the same keys on one device"
            )
        known = [n for n in (self.visible_keys, other.visible_keys) if n is not None]
        starts = torch.maximum(self.data[0], other.data[0])
        ends = torch.minimum(self.data[1], other.data[1])
        return Spans(starts, ends, visible_keys=min(known, default=None))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seq_k={self.seq_k}, device={self.device})"


class DenseMask(_Listed):
    """Any mask: key j is visible to query i where `mask[..., i, j]` is True.

    `mask`: bool (seq_q, seq_k), or (batch or 1, heads_q or 1, seq_q, seq_k) for masks that differ between batch
    entries or query heads; on the device of q, with any strides. It is copied, packed to one bit per pair. Kernels
    skip its empty tiles and run no mask code in full ones; a row that sees no key gives zeros. Make one mask per step
    and pass it to all layers. `visible_keys` as for `Spans`, averaged over all planes.
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
        load_operators()
        # An axis of stride 0 becomes one plane: an expanded mask is not written out.
        self.seq_k = mask.shape[-1]
        self._adopt(_operators.mask_of_pairs(mask), visible_keys)

    @property
    def seq_q(self) -> int:
        """Number of queries."""
        return self.data.shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch or 1, heads_q or 1, seq_q, seq_k)."""
        return (*self.data.shape[:3], self.seq_k)

    @property
    def mask(self) -> Tensor:
        """The mask as bool, of `shape`, (seq_q, seq_k) if there is one plane; unpacked at each access."""
        bit = torch.arange(32, dtype=torch.int32, device=self.device)
        visible = ((self.data[..., None] >> bit) & 1).bool().flatten(-2)[..., : self.seq_k]
        return visible[0, 0] if visible.shape[:2] == (1, 1) else visible

    def narrow(self, dim: int, start: int, length: int) -> DenseMask:
        """Planes [start, start + length) of the batch (dim 0) or heads (dim 1); itself if that axis has one plane."""
        if dim not in (0, 1):
            raise ValueError(f"dim: got {dim}, expected 0 for batch entries or 1 for heads")
        if self.data.shape[dim] == 1:
            return self
        narrowed: DenseMask = self._replaced(self.data.narrow(dim, start, length))
        return narrowed

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k) or (B or 1, Hq or 1, seq_q, seq_k), True = visible. For tests."""
        if self.shape[-2:] != (seq_q, seq_k):
            raise ValueError(f"mask: has shape {self.shape}, but pairs are {seq_q} x {seq_k}")
        return self.mask.to(device)

    def __repr__(self) -> str:
        return f"DenseMask(shape={self.shape}, device={self.device})"


def round_visible_keys(visible_keys: float | None) -> int:
    """`visible_keys` rounded down to a power of two, at least 1; 0 for None. Under torch.compile the number itself.

    Operators accept both. A mask from outside compiled code contributes one of few numbers, so few recompilations; one
    made inside may have a symbolic number, and a comparison would specialise on its range.
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
