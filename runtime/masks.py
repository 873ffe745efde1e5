"""Masks of the public API: which (query i, key j) pairs are visible. None is the full mask.

A mask copies its source and never changes. It owns the tile schedules of its kernels: each is built at its first use
and shared by all layers, by forward and backward, in eager and compiled code. See native/masks.h.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.spec import MAX_INTERVALS, Mask
from attnforge.runtime import mask_svg
from attnforge.runtime.inputs import MAX_INDEX, expect_local, expect_tensors
from attnforge.runtime.native.operators import operators
from attnforge.runtime.score_trace import evaluate

UNEVEN = 4  # see average_visible_keys

_operators = torch.ops.attnforge


def load_operators() -> bool:
    """Make torch.ops.attnforge usable, as the first call does; True.

    What torch saved with our operators in it needs this before it is loaded in another process: torch.export.load,
    AOTInductor's packages. Raises CompileError, NoCompilerError or CacheError if the launcher cannot be built.
    """
    operators()
    return True


# Dynamo runs the function while tracing and keeps the result. torch.compiler.assume_constant_result sets the same
# attribute, but it imports torch._dynamo, which takes a second or more.
load_operators._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Whole:
    """Base of the masks that `&`, `|` and `~` do not combine; they say what to do instead."""

    def _cannot(self, _: object = None) -> NoReturn:
        raise TypeError(
            f"mask: {type(self).__name__} cannot be combined by &, | or ~, which take Spans; in place of Causal() use "
            "masks.documents([seq], device, causal=True); combine bool tensors before DenseMask, and functions inside "
            "one mask_mod"
        )

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = _cannot


class Causal(_Whole):
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """This mask on `device`, as Tensor.to; returns itself if it is there already."""
        moved = self.data.to(device, non_blocking=non_blocking)
        return self if moved is self.data else self._replaced(moved)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled tensor has a plain storage, which cannot own schedules.
        load_operators()
        self.__dict__.update(state | {"data": _operators.mask_of_data(state["data"])})


class Spans(_Listed):
    """Key j is visible to the queries starts[j] <= i < ends[j], or to those of up to 4 such intervals.

    `starts`, `ends`: int32 on the device of q, any values, an interval with ends <= starts is empty:

    - (seq_k): one interval a key, the same for every batch entry and head;
    - (n, seq_k), n = 1 to 4: the union of n intervals, in any order, which may overlap;
    - (batch or 1, heads or 1, n, seq_k): also one plane for each batch entry, and for each query head or kv head.

    The mask takes 8 n bytes for each key, its tile lists 4 (of a deterministic backward 8) for each pair of a query
    tile and a key tile: nothing is stored for a pair of a query and a key. `starts` and `ends` are copied: later
    changes of the tensors do not change the mask. A mask that is made while a CUDA graph is captured is made again,
    with its schedules, at every replay.

    `&`, `|` and `~` give new Spans on the same device, without a host sync, for any query rows. Their number of
    intervals follows from shapes: at most n + m - 1, n + m and n + 1. Beyond 4 they raise a ValueError.

    `visible_keys`: the average number of keys that a query sees, if it is known; negative if a few keys are seen
    by far more queries than the others, as sinks are. Dispatch rounds it to a power of two. It chooses between kernels
    for sparse and dense packs, and those that divide the work of such keys; results do not depend on it.
    """

    kind: ClassVar[Mask] = Mask.SPANS

    def __init__(self, starts: Tensor, ends: Tensor, *, visible_keys: float | None = None) -> None:
        """Raises TypeError or ValueError for anything but two int32 tensors of one such shape on one device."""
        _check_bounds("starts", starts)
        _check_bounds("ends", ends)
        if starts.shape != ends.shape:
            of_rows = starts.dim() == ends.dim() == 1
            raise ValueError(
                f"ends: got length {ends.shape[0]}, expected the length of starts, {starts.shape[0]}"
                if of_rows
                else f"ends: got shape {tuple(ends.shape)}, expected that of starts, {tuple(starts.shape)}"
            )
        if starts.device != ends.device:
            raise ValueError(f"ends: is on {ends.device}, but starts is on {starts.device}; move one of them")
        load_operators()
        if starts.dim() > 1:
            starts, ends = _plain(*_united(*_planes(starts, ends)))
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
        return self.data.shape[-1]

    @property
    def intervals(self) -> int:
        """Intervals that a key may have."""
        return self.data.shape[2] if self.data.dim() == 5 else 1

    @property
    def planes(self) -> tuple[int, int]:
        """(batch entries or 1, heads or 1) that have intervals of their own."""
        return (self.data.shape[0], self.data.shape[1]) if self.data.dim() == 5 else (1, 1)

    @property
    def starts(self) -> Tensor:
        """int32, a copy: (seq_k), (n, seq_k) or (batch or 1, heads or 1, n, seq_k).

        Of several intervals the first ones are disjoint and ascending, and do not touch; the others are empty, 0 to 0.
        """
        return self._bounds(0)

    @property
    def ends(self) -> Tensor:
        """int32, a copy, shaped as `starts`."""
        return self._bounds(1)

    def _bounds(self, which: int) -> Tensor:
        bounds = self.data.select(-2, which).clone()
        return bounds[0, 0] if self.data.dim() == 5 and self.planes == (1, 1) else bounds

    def _by_plane(self) -> tuple[Tensor, Tensor]:
        """Starts and ends as views (batch or 1, heads or 1, n, seq_k)."""
        data = self.data if self.data.dim() == 5 else self.data[None, None, None]
        return data[..., 0, :], data[..., 1, :]

    def narrow(self, dim: int, start: int, length: int) -> Spans:
        """Planes [start, start + length) of the batch (dim 0) or heads (dim 1); itself if that axis has one plane."""
        if dim not in (0, 1):
            raise ValueError(f"dim: got {dim}, expected 0 for batch entries or 1 for heads")
        if self.planes[dim] == 1:
            return self
        starts, ends = (x.narrow(dim, start, length) for x in self._by_plane())
        return Spans(starts, ends, visible_keys=self.visible_keys)

    def visible_rows(self, rows: Tensor) -> Tensor:
        """The keys that the query rows `rows` (R) see: bool (R, seq_k) or (batch or 1, heads or 1, R, seq_k)."""
        starts, ends = (x.to(rows.device)[..., None, :] for x in self._by_plane())
        seen = ((starts <= rows[:, None]) & (rows[:, None] < ends)).any(2)
        return seen[0, 0] if self.planes == (1, 1) else seen

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k) or (batch or 1, heads or 1, seq_q, seq_k), True = visible. For tests."""
        if self.seq_k != seq_k:
            raise ValueError(
                f"mask: has {self.seq_k} keys, but there are {seq_k}; expected seq_k={self.seq_k}"
            )
        return self.visible_rows(torch.arange(seq_q, device=device))

    def __and__(self, other: Spans) -> Spans:
        """The pairs that both masks show.

        Raises ValueError unless both are of the same keys on one device, their planes can be broadcast, and the result
        has at most 4 intervals: n + m - 1 for masks of n and m.
        """
        if not isinstance(other, Spans):
            return NotImplemented
        count = self._count(other, self.intervals + other.intervals - 1, "&")
        known = [n for n in (self.visible_keys, other.visible_keys) if n is not None]
        (starts, ends), (others, other_ends) = self._by_plane(), other._by_plane()
        # All pairs of intervals; of two disjoint lists no more than `count` pairs meet.
        starts = torch.maximum(starts[:, :, :, None], others[:, :, None]).flatten(2, 3)
        ends = torch.minimum(ends[:, :, :, None], other_ends[:, :, None]).flatten(2, 3)
        starts, ends = (x[:, :, :count] for x in _united(starts, ends))
        return Spans(starts, ends, visible_keys=min(known, key=abs, default=None))

    def __or__(self, other: Spans) -> Spans:
        """The pairs that either mask shows, in at most 4 intervals: n + m for masks of n and m. Errors as `&`."""
        if not isinstance(other, Spans):
            return NotImplemented
        self._count(other, self.intervals + other.intervals, "|")
        known = [n for n in (self.visible_keys, other.visible_keys) if n is not None]
        mine, theirs = self._by_plane(), other._by_plane()
        planes = torch.broadcast_shapes(mine[0].shape[:2], theirs[0].shape[:2])
        starts, ends = (
            torch.cat([x.expand(*planes, -1, -1) for x in pair], 2) for pair in zip(mine, theirs, strict=True)
        )
        sign = -1 if min(known, default=0) < 0 else 1
        return Spans(starts, ends, visible_keys=sign * sum(map(abs, known)) if len(known) == 2 else None)

    def __invert__(self) -> Spans:
        """The pairs that this mask hides, in n + 1 intervals. Raises ValueError if these are more than 4.

        Not inside compiled code: torch.compile does not trace this operator for objects.
        """
        _expect_few(self.intervals + 1, "~")
        starts, ends = self._by_plane()
        empty = starts >= ends  # these come last, or are alone
        starts, ends = (x.masked_fill(empty, MAX_INDEX) for x in (starts, ends))
        first = torch.full_like(starts[:, :, :1], -MAX_INDEX)
        return Spans(torch.cat([first, ends], 2), torch.cat([starts, -first], 2))

    def _count(self, other: Spans, count: int, operation: str) -> int:
        """`count`, the intervals of `self operation other`. Raises ValueError if there is no such mask."""
        if self.seq_k != other.seq_k or self.device != other.device:
            raise ValueError(
                f"mask: {self.seq_k} keys on {self.device} and {other.seq_k} keys on {other.device} cannot be "
                "combined; make both masks for the same keys on one device"
            )
        if any(a != b and 1 not in (a, b) for a, b in zip(self.planes, other.planes, strict=True)):
            raise ValueError(
                f"mask: planes {self.planes} and {other.planes}, of batch entries and heads, cannot be combined; "
                "each must be 1 or equal"
            )
        return _expect_few(count, operation)

    def __repr__(self) -> str:
        form = f", intervals={self.intervals}, planes={self.planes}" if self.data.dim() == 5 else ""
        return f"{type(self).__name__}(seq_k={self.seq_k}{form}, device={self.device})"

    def _repr_html_(self) -> str:
        """For notebooks: a picture of the tiles, for as many queries as keys."""
        length = self.seq_k
        tile = mask_svg.tile_of(length, length)
        shares = mask_svg.span_shares(self.starts, self.ends, length, tile, tile)
        return mask_svg.html(repr(self), shares, length, length, tile)


class DenseMask(_Listed, _Whole):
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
        expect_tensors(mask=mask)
        expect_local("mask", mask)
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
        narrowed = object.__new__(DenseMask)  # not _replaced: Dynamo of torch 2.11 cannot read __dict__
        narrowed.seq_k = self.seq_k
        narrowed._adopt(_operators.mask_of_data(self.data.narrow(dim, start, length)), self.visible_keys)
        return narrowed

    def visible(self, seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
        """Dense bool mask (seq_q, seq_k) or (B or 1, Hq or 1, seq_q, seq_k), True = visible. For tests."""
        if self.shape[-2:] != (seq_q, seq_k):
            raise ValueError(f"mask: has shape {self.shape}, expected (seq_q, seq_k) = {(seq_q, seq_k)}")
        return self.mask.to(device)

    def __repr__(self) -> str:
        return f"DenseMask(shape={self.shape}, device={self.device})"

    def _repr_html_(self) -> str:
        """For notebooks: a picture of the tiles, averaged over planes."""
        tile = mask_svg.tile_of(self.seq_q, self.seq_k)
        shares = mask_svg.dense_shares(self.mask, tile, tile)
        return mask_svg.html(repr(self), shares, self.seq_q, self.seq_k, tile)


class FunctionMask(_Listed, _Whole):
    """Key j is visible to query i of batch entry b and query head h where a function of (b, h, i, j) says so.

    `attnforge.masks.mask_mod` makes it. Once per mask a kernel lists the tiles; empty ones are skipped, and the
    function is evaluated for the pairs of partial ones: on Hopper once, for as many tiles as 40 MiB of bits hold.
    """

    kind: ClassVar[Mask] = Mask.DENSE

    def __init__(
        self,
        text: str,
        tensors: tuple[Tensor, ...],
        seq_q: int,
        seq_k: int,
        device: torch.device | str,
        *,
        batch: int | None = None,
        heads: int | None = None,
        visible_keys: float | None = None,
    ) -> None:
        """`text`: see codegen/mask_function.py. `tensors`: those that it reads, on `device`; they must not change.

        `batch`, `heads`: entries and query heads of the calls that it is for, None: any.
        """
        load_operators()
        self.text, self.tensors, self.shape = text, tensors, (batch, heads, seq_q, seq_k)
        self._adopt(_operators.mask_of_function(seq_k, torch.device(device)), visible_keys)

    @property
    def seq_q(self) -> int:
        """Number of queries."""
        return self.shape[2]

    @property
    def seq_k(self) -> int:
        """Number of keys."""
        return self.shape[3]

    def fits(self, *sizes: int) -> bool:
        """Is it for calls of these sizes (batch, heads_q, seq_q, seq_k)?"""
        return all(mine in (None, size) for mine, size in zip(self.shape, sizes, strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> FunctionMask:
        """This mask on `device`, as Tensor.to; returns itself if it is there already."""
        moved: FunctionMask = super().to(device, non_blocking)
        if moved is not self:
            moved.tensors = tuple(x.to(device, non_blocking=non_blocking) for x in self.tensors)
        return moved

    def visible_rows(self, rows: Tensor, batch: int | None = None, heads: int | None = None) -> Tensor:
        """The keys that the query rows `rows` (R) see: bool (batch or 1, heads or 1, R, seq_k).

        `batch`, `heads`: where the function depends on them and the mask does not know them; else a ValueError.
        """
        batch, heads = self.shape[0] or batch, self.shape[1] or heads
        formula = MaskMod(self.text)
        index = {"q_idx": rows.int()[:, None], "kv_idx": torch.arange(self.seq_k, device=rows.device).int()}
        shape = [1, 1, rows.numel(), self.seq_k]
        for axis, (leaf, name, size) in enumerate((("b", "batch", batch), ("h", "heads", heads))):
            if not formula.reads(leaf):
                continue
            if size is None:
                raise ValueError(
                    f"{name}: got None, but the function of the mask depends on {leaf}; pass {name}=N"
                )
            shape[axis] = size
            index[leaf] = torch.arange(size, device=rows.device).int().view(-1, *(1,) * (3 - axis))
        return evaluate(formula, index, self.tensors).expand(shape)

    def visible(
        self,
        seq_q: int,
        seq_k: int,
        device: torch.device | str = "cpu",
        batch: int | None = None,
        heads: int | None = None,
    ) -> Tensor:
        """Dense bool mask (seq_q, seq_k) or (batch or 1, heads or 1, seq_q, seq_k), True = visible. For tests."""
        if (self.seq_q, self.seq_k) != (seq_q, seq_k):
            raise ValueError(
                f"mask: has {self.seq_q} x {self.seq_k} pairs, but got seq_q={seq_q} and seq_k={seq_k}"
            )
        seen = self.visible_rows(torch.arange(seq_q, device=device), batch, heads)
        return seen[0, 0] if seen.shape[:2] == (1, 1) else seen

    def __repr__(self) -> str:
        return f"FunctionMask({self.text!r}, seq_q={self.seq_q}, seq_k={self.seq_k}, device={self.device})"


# What `attention` takes; None: all pairs are visible.
AnyMask = Causal | Spans | DenseMask | FunctionMask | None


def transient() -> bool:
    """Whether tensors that are made now must not be kept, or read on the host.

    So it is in a trace, under FakeTensorMode and torch.func's transforms, and while a CUDA graph is captured.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def stream_id(device: torch.device) -> int:
    """Of the current CUDA stream, on which masks make their tile schedules; 0 on the CPU."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


def average_visible_keys(pairs: int, most: int, queries: int, keys: int) -> float | None:
    """`visible_keys` of a mask of `pairs` visible pairs; None without queries.

    most: queries that see the key that most see. queries, keys: of all planes together. The number is negative if
    `most` is more than UNEVEN times what a key has on average.
    """
    if queries == 0:
        return None
    return (-1 if most * keys > UNEVEN * pairs else 1) * pairs / queries


def seen_by(starts: Tensor, ends: Tensor, queries: int) -> Tensor:
    """How many of the queries see each key, int64 (seq_k) or (batch, heads, seq_k).

    starts, ends: as Spans takes them, but the intervals of a key are disjoint.
    """
    lengths = (ends.long().clamp(max=queries) - starts.long().clamp(min=0)).clamp(min=0)
    return lengths.sum(-2) if lengths.dim() > 1 else lengths


def visible_keys_of(starts: Tensor, ends: Tensor, queries: int) -> float | None:
    """`average_visible_keys` of intervals of queries, as `seen_by` takes them. Waits for the device."""
    seen = seen_by(starts, ends, queries)
    if seen.numel() == 0:
        return None
    pairs, most = torch.stack([seen.sum(), seen.max()]).tolist()
    return average_visible_keys(pairs, most, queries * (seen.numel() // seen.shape[-1]), seen.numel())


def round_visible_keys(visible_keys: float | None) -> int:
    """`visible_keys` rounded towards 0 to a power of two, 1 at least; 0 for None. Under torch.compile as it is.

    Operators accept both. A mask from outside compiled code contributes one of few numbers, so few recompilations; one
    made inside may have a symbolic number, and a comparison would specialise on its range.
    """
    if visible_keys is None:
        return 0
    if isinstance(visible_keys, bool) or not isinstance(visible_keys, (int, float, torch.SymInt)):
        raise TypeError(f"visible_keys: got {type(visible_keys).__name__}, expected a number or None")
    if not -MAX_INDEX <= visible_keys <= MAX_INDEX:
        raise ValueError(f"visible_keys: got {visible_keys}, expected {-MAX_INDEX} to {MAX_INDEX}")
    if torch.compiler.is_compiling():
        return int(visible_keys) if isinstance(visible_keys, float) else visible_keys
    rounded = 1 << (max(int(abs(visible_keys)), 1).bit_length() - 1)
    return -rounded if visible_keys < 0 else rounded


def _check_bounds(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int32 tensor of length seq_k")
    expect_local(name, value)
    if value.dtype != torch.int32:
        raise ValueError(f"{name}: got dtype {value.dtype}, expected torch.int32; use {name}.to(torch.int32)")
    if value.dim() not in (1, 2, 4):
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}, expected (seq_k), (intervals, seq_k) or "
            "(batch or 1, heads or 1, intervals, seq_k)"
        )
    if value.dim() > 1 and not 1 <= value.shape[-2] <= MAX_INTERVALS:
        raise ValueError(
            f"{name}: got {value.shape[-2]} intervals a key in shape {tuple(value.shape)}, expected 1 to "
            f"{MAX_INTERVALS}; DenseMask takes any mask"
        )


def _expect_few(count: int, operation: str) -> int:
    if count > MAX_INTERVALS:
        raise ValueError(
            f"mask: the result of {operation} may have {count} intervals a key, at most {MAX_INTERVALS} are supported; "
            "use DenseMask"
        )
    return count


def _planes(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (batch or 1, heads or 1, n, seq_k); an axis that is expanded in both becomes one plane."""
    if starts.dim() == 2:
        return starts[None, None], ends[None, None]
    for axis in (0, 1):
        if starts.shape[axis] > 1 and starts.stride(axis) == ends.stride(axis) == 0:
            starts, ends = starts.narrow(axis, 0, 1), ends.narrow(axis, 0, 1)
    return starts, ends


def _plain(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """One interval in one plane as (seq_k)."""
    single = starts.shape[:3] == (1, 1, 1)
    return (starts[0, 0, 0], ends[0, 0, 0]) if single else (starts, ends)


def _united(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The same unions (batch, heads, n, seq_k) as intervals that are disjoint and ascending and do not touch.

    As many as before; those that are left over come last and are 0 to 0.
    """
    count = starts.shape[2]
    if count == 1:
        return starts, ends
    empty = starts >= ends
    starts, order = starts.masked_fill(empty, MAX_INDEX).sort(2)
    # Where the intervals up to each one end.
    reach = ends.masked_fill(empty, -MAX_INDEX - 1).gather(2, order).cummax(2).values
    # An interval that begins beyond all ends before it opens a new one, which ends where the next one opens.
    opens = [torch.ones_like(empty[:, :, 0])]
    opens += [starts[:, :, i] > reach[:, :, i - 1] for i in range(1, count)]
    last = [reach[:, :, count - 1]]
    for i in range(count - 2, -1, -1):
        last.insert(0, torch.where(opens[i + 1], reach[:, :, i], last[0]))
    ends = torch.stack(last, 2)
    starts, order = torch.where(torch.stack(opens, 2) & (starts < ends), starts, MAX_INDEX).sort(2)
    left = starts == MAX_INDEX
    return starts.masked_fill(left, 0), ends.gather(2, order).masked_fill(left, 0)


# torch.load(weights_only=True), its default, makes only what is listed. Not FunctionMask, whose text becomes code.
torch.serialization.add_safe_globals([Causal, Spans, DenseMask])
