"""`context_parallel`: attention over sequences that are sharded over the ranks of a device mesh.

Rank i of W holds rows [i n, (i + 1) n) of q, k and v. The Ulysses degree U divides W and the number of kv heads; R = W
/ U.

- U > 1 (head parallel, as in DeepSpeed Ulysses): an all-to-all among U ranks exchanges "all heads of n rows" for "1/U
  of the heads of U n rows". It is applied to q, k and v before the kernel and to the output after it.
- R > 1 and U > 1: in addition, k and v are all-gathered among the R ranks that have the same heads. Each rank computes
  the rows of its Ulysses group. Groups mix early and late rows, so that a causal mask gives all ranks the same work.
- U = 1 (row parallel): a rank fetches only the keys that its rows see. Ranks with many visible pairs send some of their
  rows to ranks with few, which compute them and send the output back (row_assignment.py).

By default U is the fastest according to a model of kernels and links (cost.py). U = 1 is usually the fastest for
document masks, under which a rank needs few keys of others, and for few kv heads and ranks, because k and v are then
smaller than q and out.

Masks keep their type on every rank. Local queries are in ascending order, so that an interval of queries stays one
interval. Local keys may be permuted or left out, because Spans are stored per key. Score and mask functions that read
positions need keys in order; then Ulysses groups have consecutive ranks, and a rank adds its first row and head to the
indices (local_slice.py). With `pieces` > 1, communication overlaps with kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnforge.codegen.formula_slice import Leaf
from attnforge.runtime import ops
from attnforge.runtime.distributed.agreement import (
    ERROR,
    can_compare,
    debug_is_detail,
    describe,
    expect_same,
)
from attnforge.runtime.distributed.cost import Partition, Shapes, fastest
from attnforge.runtime.distributed.exchange import Attention, Call, all_gather, split_heads
from attnforge.runtime.distributed.links import nodes_of
from attnforge.runtime.distributed.local_slice import (
    LocalSlice,
    expect_few_tensors,
    mask_at,
    planes_at,
    reads_heads,
    reads_positions,
)
from attnforge.runtime.distributed.row_assignment import (
    RowAssignment,
    assign_rows,
    assigned_spans,
    count_rows,
)
from attnforge.runtime.distributed.shards import (
    Layout,
    local_dense,
    local_plain,
    local_spans,
    make_layout,
    plain_spans,
)
from attnforge.runtime.inputs import (
    check_score,
    expect_flags,
    expect_integer,
    expect_layout,
    expect_local,
    expect_scale,
    expect_tensors,
)
from attnforge.runtime.masks import AnyMask, Causal, DenseMask, FunctionMask, Spans, stream_id
from attnforge.runtime.score_trace import ScoreFunction
from attnforge.runtime.scores import Score, as_score
from attnforge.runtime.sinks import expect_sinks, with_sinks

KEPT = 4  # size of each cache of local masks and row assignments


def context_parallel(
    device_mesh: DeviceMesh, *, heads: int | None = None, pieces: int = 1
) -> ContextParallel:
    """Attention over sequences that are sharded over a one-dimensional `device_mesh` (or `mesh["cp"]`).

        cp = attnforge.context_parallel(mesh)         # once, on every rank of the mesh
        x = cp.shard(x, dim=0)                        # this rank's rows, zero-padded to ceil(S / W)
        out = cp.attention(q, k, v, mask)             # shards in, shard out; the mask is that of the whole sequence

    heads: the Ulysses degree, the number of ranks that split the heads: a divisor of the mesh size and of the number of
        kv heads. 1 splits rows only. None: the fastest for the mask of a call, by a cost model that reads the mask
        once. For a DenseMask or a mask_mod, and in compiled code, which cannot read the mask, None is the largest
        possible degree.
    pieces: number of chunks of heads; the communication of one chunk overlaps with the kernel of another. 1 does not
        overlap. It was the fastest on H200s, because kernels occupy all SMs (docs/recipes/context_parallel.md).

    Raises ValueError for a mesh of several dimensions and for numbers that do not divide, TypeError for wrong types.
    """
    return ContextParallel(device_mesh, heads, pieces)


class ContextParallel:
    """The result of `context_parallel`: `attention` on shards, `shard` and `gather` for other tensors."""

    def __init__(self, device_mesh: DeviceMesh, heads: int | None, pieces: int) -> None:
        for name, number in (("heads", 1 if heads is None else heads), ("pieces", pieces)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name}: got {type(number).__name__}, expected an integer")
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"device_mesh: got {type(device_mesh).__name__}, expected torch's DeviceMesh")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh: got {device_mesh.ndim} dimensions {device_mesh.mesh_dim_names}, expected one; "
                "pass a dimension of it, mesh['cp']"
            )
        self._group = device_mesh.get_group()
        self.world, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if heads is not None and (heads < 1 or self.world % heads):
            raise ValueError(f"heads: got {heads}, expected a divisor of the {self.world} ranks of the mesh")
        if pieces < 1:
            raise ValueError(f"pieces: got {pieces}, expected at least 1")
        self._heads, self._pieces = heads, pieces
        self._nodes = nodes_of(dist.get_process_group_ranks(self._group))
        self._device = device_mesh.device_type
        self._compared = False
        self._joined = set[torch.device]()
        self._layouts: dict[Partition, Layout] = {}
        self._plain: dict[Any, Spans] = {}
        self._plain_assignments: dict[Any, RowAssignment] = {}
        self._assignments: weakref.WeakKeyDictionary[Spans, dict[Any, RowAssignment]] = (
            weakref.WeakKeyDictionary()
        )
        self._masks: weakref.WeakKeyDictionary[Spans | DenseMask, dict[Any, Spans | DenseMask]] = (
            weakref.WeakKeyDictionary()
        )
        self._parts: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[AnyMask, ...]]] = (
            weakref.WeakKeyDictionary()
        )

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of the whole `x`: ceil(S / W) along `dim`. The last ranks are padded with zeros."""
        expect_tensors(x=x)
        total = x.shape[dim]
        rows = -(-total // self.world)
        begin = min(self.rank * rows, total)
        mine = x.narrow(dim, begin, min(rows, total - begin))
        missing = rows - mine.shape[dim]
        if not missing:
            return mine
        zeros = mine.new_zeros([missing if i == dim % x.dim() else size for i, size in enumerate(mine.shape)])
        return torch.cat([mine, zeros], dim)

    def gather(self, x: Tensor, dim: int = 0, total: int | None = None) -> Tensor:
        """The inverse of `shard`: the whole tensor on every rank, without gradients.

        total: number of rows of the whole tensor, without which the padding stays.
        """
        expect_local("x", x)
        with torch.no_grad():
            first = x.movedim(dim, 0).contiguous()
            whole = first.new_empty(self.world * first.shape[0], *first.shape[1:])
            all_gather(whole, first, self._group)
            return whole[:total].movedim(0, dim)

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask = None,
        *,
        total: int | None = None,
        scale: float | None = None,
        return_lse: Literal[False] = False,
        deterministic: bool = False,
        score: Score | ScoreFunction | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask = None,
        *,
        total: int | None = None,
        scale: float | None = None,
        return_lse: Literal[True],
        deterministic: bool = False,
        score: Score | ScoreFunction | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask = None,
        *,
        total: int | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        score: Score | ScoreFunction | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`attnforge.attention` of the whole sequence. Every rank passes its rows and gets the output of its rows.

        q: (B, Hq, n, D), rows [rank n, (rank + 1) n) of the sequence, with the same n on all ranks. k: (B, Hkv, n, D)
            and v: (B, Hkv, n, Dv) alike.
        mask: of the whole sequence, the same on all ranks: any that `attnforge.attention` takes, with `total` queries
            and keys.
        score, sinks: as for `attnforge.attention`, the same on all ranks. Indices and captured tensors are those of the
            whole call. The gradients of captured tensors and sinks are partial: sum them over the ranks, as for any
            parameter.
        total: number of rows without padding, if the last of the W n rows are padding; n must be ceil(total / W).
            Padding keys are hidden, and the output of padding rows is zero. Default: the length of the mask, else W n.

        Returns this rank's rows, with the layout and dtype of q; with return_lse also their lse, float32 (B, Hq, n),
        which is -inf for padding. Both are differentiable with respect to this rank's q, k and v. The first call with a
        number of kv heads may create process groups: call it once before compiling. Raises as `attnforge.attention`,
        and ValueError for shards that do not match the mask or each other. At the first call, and at all calls with
        TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks compare their arguments: if these differ, or one rank's are refused, all
        ranks raise.
        """
        with self._comparing(q) as mine:
            expect_layout("(batch, heads, rows, head_dim)", q=q, k=k, v=v)
            expect_scale(scale)
            expect_flags(return_lse=return_lse, deterministic=deterministic)
            q, k, v = _as_autocast(q, k, v)
            total = self._check(q, k, v, mask, total)
            found = None if score is None else as_score(score)
            self._check_functions(q, k, mask, found, sinks, total)
            if mine is not None:
                mine |= describe(q=q, k=k, v=v, mask=mask, total=total, score=found, sinks=sinks)
                mine |= describe(scale=scale, return_lse=return_lse, deterministic=deterministic)
        call = self._call(q, k, v, mask, found, total, scale, return_lse or sinks is not None, deterministic)
        captured = () if found is None else found.tensors
        results: tuple[Tensor, ...] = Attention.apply(q, k, v, call, *captured)  # type: ignore[no-untyped-call,unused-ignore]
        if sinks is not None:
            results = self._with_sinks(results[0], results[1], sinks, total)
        return (results[0], results[1]) if return_lse else results[0]

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AnyMask,
        score: Score | None,
        total: int,
        scale: float | None,
        with_lse: bool,
        deterministic: bool,
    ) -> Call:
        """Choose the partition of a call and make this rank's masks."""
        rows, heads_q, keys = q.shape[2], q.shape[1], self.world * q.shape[2]
        # A mask function always reads positions, because it hides padding by position.
        in_order = isinstance(mask, FunctionMask) or (score is not None and reads_positions(score))
        candidate = self._assign_rows(mask, rows, total, in_order, q.device)
        partition = self._partition(q, k, v, candidate, in_order)
        assignment = candidate if partition.ulysses_degree == 1 else None
        layout = self._layout(partition)
        heads = heads_q // partition.ulysses_degree
        pieces = split_heads(heads, k.shape[1] // partition.ulysses_degree, self._pieces)
        row, count = layout.queries[0] * rows, len(layout.queries) * rows
        if assignment is not None:
            # Used by functions of positions, for which `queries` is one range.
            row, count = assignment.queries[self.rank][0][0], count_rows(assignment.queries[self.rank])
        head = 0 if layout.ulysses_group is None else dist.get_rank(layout.ulysses_group) * heads
        offset_indices: tuple[Leaf, ...] = ("q_idx",) if partition.ulysses_degree < self.world else ()
        offset_indices += ("h",) if heads < heads_q or len(pieces) > 1 else ()
        local_slices = tuple(
            LocalSlice(head + x.q0, x.q1 - x.q0, heads_q, row, count, total, keys, offset_indices, q.device)
            for x in pieces
        )
        masks = self._local_masks(mask, layout, rows, total, q.device, assignment, local_slices)
        expect_few_tensors(score, masks[0], local_slices[0])
        return Call(
            layout,
            partition.ulysses_degree,
            assignment,
            pieces,
            local_slices,
            masks,
            scale,
            with_lse,
            deterministic,
            score,
        )

    def _with_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """`with_sinks`; the lse of padding rows stays -inf, since they do not attend to sinks either."""
        out, lse = with_sinks(out, lse, sinks)
        real = min(max(0, total - self.rank * lse.shape[2]), lse.shape[2])
        padding = lse.shape[2] - real
        return out, pad(lse[:, :, :real], (0, padding), value=-torch.inf) if padding else lse

    __call__ = attention

    @contextmanager
    def _comparing(self, q: object) -> Iterator[dict[str, str] | None]:
        """Around the checks of a call's arguments: gives a dict to describe them in, which all ranks then compare.

        At the first call and if torch's debug level is DETAIL; else gives None.
        """
        if not can_compare() or (self._compared and not debug_is_detail()):
            yield None
            return
        of_q = isinstance(q, Tensor) and q.device.type == self._device
        device = q.device if of_q else torch.device(self._device)  # type: ignore[attr-defined]
        mine = describe(heads=self._heads, pieces=self._pieces)
        try:
            yield mine
        except Exception as error:
            expect_same(self._group, device, {ERROR: f"{type(error).__name__}: {error}"})
            raise
        expect_same(self._group, device, mine)
        self._compared = True

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, total: int | None) -> int:
        rows = q.shape[2]
        expect_local("q, k, v", q, k, v)
        if mask is not None and not isinstance(mask, (Causal, Spans, DenseMask, FunctionMask)):
            ops.refuse_mask(mask)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype or x.device != q.device or x.shape[0] != q.shape[0]:
                raise ValueError(
                    f"{name}: got {x.dtype} on {x.device}, batch {x.shape[0]}, expected as q: {q.dtype} on {q.device}, "
                    f"batch {q.shape[0]}"
                )
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"q: got {q.shape[1]} heads, expected a multiple of the {k.shape[1]} heads of k")
        if k.shape[:3] != v.shape[:3] or k.shape[2] != rows:
            raise ValueError(
                f"k: got shapes {tuple(k.shape)} and {tuple(v.shape)} for k and v, expected equal ones with the "
                f"{rows} rows of q"
            )
        if total is not None:
            expect_integer("total", total)
        if isinstance(mask, (Spans, DenseMask, FunctionMask)):
            if mask.device != q.device:
                raise ValueError(f"mask: is on {mask.device}, but q is on {q.device}; move the mask there")
            length = mask.seq_k
            if isinstance(mask, Spans) and mask.planes[1] not in (1, k.shape[1], q.shape[1]):
                raise ValueError(
                    f"mask: has spans for {mask.planes[1]} heads, expected 1, {k.shape[1]} (of k) or "
                    f"{q.shape[1]} (of q)"
                )
            if isinstance(mask, DenseMask) and mask.shape[1] not in (1, q.shape[1]):
                raise ValueError(
                    f"mask: has shape {mask.shape}, expected one plane for all heads or {q.shape[1]} of q's"
                )
            if not isinstance(mask, Spans) and mask.seq_q != length:
                raise ValueError(f"mask: has {mask.seq_q} queries and {length} keys, expected equally many")
            if isinstance(mask, FunctionMask) and not mask.fits(*q.shape[:2], length, length):
                raise ValueError(
                    f"mask: is of shape {mask.shape} (batch, heads_q, seq_q, seq_k), but the call is of "
                    f"{(*q.shape[:2], length, length)}"
                )
            if total is not None and total != length:
                raise ValueError(f"total: got {total}, but the mask has {length} rows")
            total = length
        total = self.world * rows if total is None else total
        if rows != -(-total // self.world):
            raise ValueError(
                f"q: got {rows} rows on rank {self.rank}, expected {-(-total // self.world)} on each of {self.world} "
                f"ranks for {total} in all, padded at the end (ContextParallel.shard does it)"
            )
        return total

    def _check_functions(
        self,
        q: Tensor,
        k: Tensor,
        mask: AnyMask,
        score: Score | None,
        sinks: Tensor | None,
        total: int,
    ) -> None:
        """Raise errors that would otherwise occur while other ranks wait. In a trace the fake kernels check instead."""
        if sinks is not None:
            expect_sinks(sinks, q.shape[1], q.device)
        if torch.compiler.is_compiling():
            return
        mod = mask if isinstance(mask, FunctionMask) else None
        text, tensors = ("", ()) if score is None else (score.text, score.captured)
        if score is not None or mod is not None:
            of_mask = () if mod is None else mod.tensors
            check_score(q, k, text, (*tensors, *of_mask), "" if mod is None else mod.text, (total, total))

    def _assign_rows(
        self, mask: AnyMask, rows: int, total: int, in_order: bool, device: torch.device
    ) -> RowAssignment | None:
        """The row assignment for U = 1, cached per mask. None if U = 1 is excluded or the mask cannot be read."""
        unknown = isinstance(mask, (DenseMask, FunctionMask))
        if unknown or self.world == 1 or rows == 0 or torch.compiler.is_compiling() or (self._heads or 1) > 1:
            return None
        key: Any = (rows, total, in_order)
        if isinstance(mask, Spans):
            known = self._assignments.setdefault(mask, {})
        else:
            key, known = (isinstance(mask, Causal), *key), self._plain_assignments
        if key not in known:
            self._join(device)
            if not isinstance(mask, Spans):
                mask = plain_spans(isinstance(mask, Causal), total, torch.device("cpu"))
            _keep(known, key, assign_rows(mask, self._nodes, rows, in_order))
        return known[key]

    def _join(self, device: torch.device) -> None:
        """Create the group's communicator, which takes all ranks; ranks without transfers skip later launches."""
        if device not in self._joined:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            self._joined.add(device)

    def _partition(
        self, q: Tensor, k: Tensor, v: Tensor, assignment: RowAssignment | None, in_order: bool
    ) -> Partition:
        """The partition of a call: of the given Ulysses degree, else the fastest by the model of cost.py.

        assignment: the row assignment for U = 1; without it the largest possible degree is used.
        in_order: only partitions that keep the keys in order.
        """
        heads_kv, world = k.shape[1], self.world
        if self._heads is not None:
            if heads_kv % self._heads:
                raise ValueError(
                    f"heads: {self._heads} ranks cannot share the {heads_kv} heads of k and v; use a divisor of them"
                )
            return (
                Partition.with_keys_in_order(self._heads, world)
                if in_order
                else Partition(self._heads, False)
            )
        # Not math.gcd: Dynamo does not support it for symbolic numbers.
        most = max(u for u in range(1, world + 1) if world % u == 0 and heads_kv % u == 0)
        largest = Partition.with_keys_in_order(most, world) if in_order else Partition(most, False)
        if not torch.compiler.is_compiling():
            self._layout(
                largest
            )  # for compiled code, which uses this partition and cannot create process groups
        if assignment is None:
            return largest
        dim = (q.shape[3] + v.shape[3]) / 2
        shapes = Shapes(q.shape[0], q.shape[2], q.shape[1], heads_kv, dim, q.element_size(), self._nodes)
        return fastest(shapes, most, in_order, assignment)

    def _layout(self, partition: Partition) -> Layout:
        if partition not in self._layouts:
            self._layouts[partition] = make_layout(self._group, *partition)
        return self._layouts[partition]

    def _local_masks(
        self,
        mask: AnyMask,
        layout: Layout,
        rows: int,
        total: int,
        device: torch.device,
        assignment: RowAssignment | None,
        local_slices: tuple[LocalSlice, ...],
    ) -> tuple[AnyMask, ...]:
        """The mask of each piece, cached per mask because masks own their tile schedules."""
        if isinstance(mask, FunctionMask):
            keys = self.world * rows
            if not reads_heads(mask):  # all pieces share one mask and its tile lists
                return self._kept(
                    mask, local_slices[:1], lambda local_slice: mask_at(mask, local_slice, keys)
                ) * len(local_slices)
            return self._kept(mask, local_slices, lambda local_slice: mask_at(mask, local_slice, keys))
        local = self._local_mask(mask, layout, rows, total, device, assignment)
        if isinstance(local, (Spans, DenseMask)):
            return self._kept(local, local_slices, lambda local_slice: planes_at(local, local_slice))
        return (local,) * len(local_slices)

    def _kept(
        self, mask: Any, local_slices: tuple[LocalSlice, ...], make: Callable[[LocalSlice], AnyMask]
    ) -> tuple[AnyMask, ...]:
        """`make(local_slice)` for each slice, cached as long as `mask` exists; not cached in a trace."""
        if torch.compiler.is_compiling():
            return tuple(make(local_slice) for local_slice in local_slices)
        key = (local_slices, stream_id(mask.device))
        known = self._parts.get(mask)
        if known is None or known[0] != key:
            known = (key, tuple(make(local_slice) for local_slice in local_slices))
            # A value that refers to its key would never be freed: None stands for the mask itself.
            self._parts[mask] = (known[0], tuple(None if x is mask else x for x in known[1]))
        return tuple(mask if x is None else x for x in known[1])

    def _local_mask(
        self,
        mask: AnyMask,
        layout: Layout,
        rows: int,
        total: int,
        device: torch.device,
        assignment: RowAssignment | None = None,
    ) -> AnyMask:
        """The mask between this rank's queries and keys, in their local order."""
        if total == self.world * rows and (len(layout.queries) == self.world or mask is None):
            return mask
        # Cached per mask, because the result owns tile schedules. Not in a trace, which has no tensors yet.
        trace = torch.compiler.is_compiling()
        where = (layout.queries, layout.keys, rows, total)
        of_rank = None if assignment is None else assignment.of(self.rank)
        key: Any = (where, of_rank, 0 if trace else stream_id(device))
        if not isinstance(mask, (Spans, DenseMask)):
            causal = isinstance(mask, Causal)
            if trace:
                return local_plain(causal, *where, device)
            key = (causal, device, key)
            if key not in self._plain:
                plain = plain_spans(causal, total, device)
                local = (
                    local_spans(plain, *where)
                    if assignment is None
                    else assigned_spans(plain, assignment, self.rank)
                )
                _keep(self._plain, key, local)
            return self._plain[key]
        known: dict[Any, Spans | DenseMask] = {} if trace else self._masks.setdefault(mask, {})
        if key in known:
            return known[key]
        if isinstance(mask, DenseMask):
            _keep(known, key, local_dense(mask, *where))
        else:
            local = (
                local_spans(mask, *where)
                if assignment is None
                else assigned_spans(mask, assignment, self.rank)
            )
            _keep(known, key, local)
        return known[key]


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add a value to a cache of at most `KEPT` values; the oldest one is removed."""
    if len(known) >= KEPT:
        del known[next(iter(known))]
    known[key] = value


def _as_autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors, in autocast's dtype where it is enabled."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return iter(tensors)
    return (x.to(torch.get_autocast_dtype(kind)) for x in tensors)
