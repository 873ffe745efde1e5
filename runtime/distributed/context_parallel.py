"""`context_parallel`: attention over a sequence that is split over the ranks of a device mesh.

Rank i of W holds rows [i n, (i + 1) n) of q, k and v. U divides W and the number of key heads, R = W / U:

- one all-to-all among U ranks turns "all heads of some rows" into "some heads of all their rows", for q, k and v
  before the kernel and for its output after it;
- if R > 1, an all-gather of k and v among R ranks completes the keys, and each of them computes the rows of its own
  all-to-all group. Groups mix early and late rows, so that under a causal mask all ranks have the same work;
- if U = 1, a rank fetches only the keys that its rows see. Some rows of ranks with many visible pairs are computed by
  ranks with few: these rows of q go there, and their output comes back (deal.py).

U is the fastest by a model of kernels and links (cost.py): with few key heads and ranks, keys are less than queries and
outputs, and documents see few keys of other ranks. The ranks of an all-to-all are neighbours, and so of one node, where
the model says that this is worth more than equal work. Masks keep their kind. Queries keep their order in every group,
so an interval of queries stays an interval; keys are permuted or left out, which spans, being per key, allow. Functions
that read positions take neighbours, too, which keep keys in order: a rank adds the numbers of its first row and head to
the indices (parts.py). With `pieces` > 1, exchanges overlap with kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from attnforge.codegen.part import Leaf
from attnforge.runtime import ops
from attnforge.runtime.dispatch import SCORE_GRADIENTS_IN_ANY_ORDER
from attnforge.runtime.distributed.cost import Shapes, Way, fastest
from attnforge.runtime.distributed.deal import Deal, deal, dealt_spans, size_of
from attnforge.runtime.distributed.exchange import Attention, Call, all_gather, cut
from attnforge.runtime.distributed.links import nodes_of
from attnforge.runtime.distributed.parts import (
    Place,
    expect_few_tensors,
    mask_at,
    planes_at,
    reads_heads,
    reads_positions,
)
from attnforge.runtime.distributed.shards import (
    Layout,
    local_dense,
    local_plain,
    local_spans,
    make_layout,
    plain_spans,
)
from attnforge.runtime.inputs import check_score, expect_flags, expect_layout, expect_number
from attnforge.runtime.masks import Causal, DenseMask, FunctionMask, Spans
from attnforge.runtime.score_trace import ScoreFunction
from attnforge.runtime.scores import Score, as_score
from attnforge.runtime.sinks import with_sinks

KEPT = 4  # lengths, kinds of scores and streams of which a mask's parts are kept


def context_parallel(
    device_mesh: DeviceMesh, *, heads: int | None = None, pieces: int = 1
) -> ContextParallel:
    """Attention over sequences that are sharded over a one-dimensional `device_mesh` (or `mesh["cp"]`).

        cp = attnforge.context_parallel(mesh)         # once; every rank of the mesh
        x = cp.shard(x, dim=0)                        # this rank's rows of a pack; padded if they do not divide
        out = cp.attention(q, k, v, mask)             # shards in, shard out; the mask is the whole pack's

    heads: number of ranks that share the heads (U above), a divisor of the mesh size and of the kv heads; 1 only
        gathers keys. None: the fastest for the mask of a call, by a model; the mask is read once. The largest possible
        number for a DenseMask or a mask_mod, and in compiled code, which cannot read it.
    pieces: number of portions of the heads in which exchanges and kernels overlap. 1 does not overlap, and was the
        fastest on H200s, whose kernels leave no SM to the exchange (docs/recipes/context_parallel.md).
    Raises ValueError for a mesh of more dimensions and for numbers that do not divide, TypeError for wrong types.
    """
    return ContextParallel(device_mesh, heads, pieces)


class ContextParallel:
    """The result of `context_parallel`: `attention` on shards; `shard` and `gather` for other tensors."""

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
        self._joined = set[torch.device]()
        self._layouts: dict[Way, Layout] = {}
        self._plain: dict[Any, Spans] = {}
        self._plain_deals: dict[Any, Deal] = {}
        self._deals: weakref.WeakKeyDictionary[Spans, dict[Any, Deal]] = weakref.WeakKeyDictionary()
        self._masks: weakref.WeakKeyDictionary[Spans | DenseMask, dict[Any, Spans | DenseMask]] = (
            weakref.WeakKeyDictionary()
        )
        self._parts: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[ops.Mask, ...]]] = (
            weakref.WeakKeyDictionary()
        )

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows of the whole `x`: ceil(S / W) along `dim`; the last ranks are padded with zeros."""
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
        """The inverse of `shard`, on every rank, without gradients.

        total: number of rows of the whole; without it the padding stays.
        """
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
        mask: ops.Mask = None,
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
        mask: ops.Mask = None,
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
        mask: ops.Mask = None,
        *,
        total: int | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        score: Score | ScoreFunction | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`attnforge.attention` of the whole sequence; every rank passes its rows and gets its rows.

        q: (B, Hq, n, D); k: (B, Hkv, n, D); v: (B, Hkv, n, Dv): rows [rank n, (rank + 1) n), n the same on all ranks.
        mask: of the whole sequence, the same on all ranks: any that `attnforge.attention` takes, of `total` keys (and
            queries).
        score, sinks: as `attnforge.attention`, the whole call's, the same on all ranks: indices count from the first
            row and head of the whole, captured tensors are of the whole. A rank's gradients of captured tensors and
            sinks are its part of them: their sums over the ranks are the whole's, as for any parameter.
        total: number of real rows, if the last of the W n rows are padding: padding sees nothing, is hidden, and its
            output is zero. Default: the mask's length, else W n. n must be ceil(total / W).

        Returns this rank's rows, in the layout and dtype of q; with return_lse also their lse, float32 (B, Hq, n), -inf
        for padding. Both are differentiable; gradients are those of this rank's q, k and v.
        The first call with a number of kv heads may create process groups: call it once before compiling.
        Raises as `attnforge.attention`; ValueError also for shards that do not match the mask or each other.
        """
        expect_layout("(batch, heads, rows, head_dim)", q=q, k=k, v=v)
        expect_number("scale", scale)
        expect_flags(return_lse=return_lse, deterministic=deterministic)
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        total = self._check(q, k, v, mask, total)
        found = None if score is None else as_score(score)
        self._check_functions(q, k, mask, found, total, deterministic)
        with_lse = return_lse or sinks is not None
        call = self._call(q, k, v, mask, found, total, scale, with_lse, deterministic)
        captured = () if found is None else found.tensors
        results: tuple[Tensor, ...] = Attention.apply(q, k, v, call, *captured)  # type: ignore[no-untyped-call,unused-ignore]
        if sinks is not None:
            out, lse = with_sinks(results[0], results[1], sinks)
            real = min(max(0, total - self.rank * q.shape[2]), q.shape[2])
            padding = q.shape[2] - real  # sees not even a sink
            results = (out, pad(lse[:, :, :real], (0, padding), value=-torch.inf) if padding else lse)
        return (results[0], results[1]) if return_lse else results[0]

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: ops.Mask,
        score: Score | None,
        total: int,
        scale: float | None,
        with_lse: bool,
        deterministic: bool,
    ) -> Call:
        """How this rank's part of a call is computed."""
        rows, heads_q = q.shape[2], q.shape[1]
        # A mask that is a function hides padding by its position, whatever it reads.
        in_order = isinstance(mask, FunctionMask) or (score is not None and reads_positions(score))
        found = self._deal(mask, rows, total, in_order, q.device)
        way = self._way(q, k, v, found, in_order)
        dealt = found if way.shared == 1 else None
        layout = self._layout(way)
        heads = heads_q // way.shared
        pieces = cut(heads, k.shape[1] // way.shared, self._pieces)
        row, count = layout.queries[0] * rows, len(layout.queries) * rows
        if dealt is not None:  # functions of positions compute one run
            row, count = dealt.queries[self.rank][0][0], size_of(dealt.queries[self.rank])
        head = 0 if layout.among_heads is None else dist.get_rank(layout.among_heads) * heads
        moved: tuple[Leaf, ...] = ("q_idx",) if way.shared < self.world else ()
        moved += ("h",) if heads < heads_q or len(pieces) > 1 else ()
        places = tuple(
            Place(head + x.q0, x.q1 - x.q0, heads_q, row, count, total, moved, q.device) for x in pieces
        )
        masks = self._local_masks(mask, layout, rows, total, q.device, dealt, places)
        expect_few_tensors(score, masks[0], places[0])
        return Call(layout, way.shared, dealt, pieces, places, masks, scale, with_lse, deterministic, score)

    __call__ = attention

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: ops.Mask, total: int | None) -> int:
        rows = q.shape[2]
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
        if isinstance(mask, (Spans, DenseMask, FunctionMask)):
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
                raise ValueError(f"mask: is of {mask.seq_q} queries and {length} keys, expected equally many")
            if isinstance(mask, FunctionMask) and not mask.fits(*q.shape[:2], length, length):
                raise ValueError(
                    f"mask: is of shape {mask.shape} (batch, heads_q, seq_q, seq_k), but the call is of "
                    f"{(*q.shape[:2], length, length)}"
                )
            if total is not None and total != length:
                raise ValueError(f"total: got {total}, but the mask is of {length} rows")
            total = length
        total = self.world * rows if total is None else total
        if rows != -(-total // self.world):
            raise ValueError(
                f"q: got {rows} rows on rank {self.rank}, expected {-(-total // self.world)} on each of {self.world} "
                f"ranks for {total} in all, padded at the end (ContextParallel.shard does it)"
            )
        return total

    def _check_functions(
        self, q: Tensor, k: Tensor, mask: ops.Mask, score: Score | None, total: int, deterministic: bool
    ) -> None:
        """What would be refused later, when other ranks wait for this one. In a trace the fake kernels check."""
        if torch.compiler.is_compiling():
            return
        mod = mask if isinstance(mask, FunctionMask) else None
        text, tensors = ("", ()) if score is None else (score.text, score.tensors)
        if score is not None or mod is not None:
            of_mask = () if mod is None else mod.tensors
            check_score(q, k, text, (*tensors, *of_mask), "" if mod is None else mod.text, (total, total))
        if deterministic and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError(SCORE_GRADIENTS_IN_ANY_ORDER)

    def _deal(
        self, mask: ops.Mask, rows: int, total: int, in_order: bool, device: torch.device
    ) -> Deal | None:
        """Rows and keys of the ranks if heads are not shared, once per mask; None if it cannot be known."""
        unknown = isinstance(mask, (DenseMask, FunctionMask))
        if unknown or self.world == 1 or torch.compiler.is_compiling() or (self._heads or 1) > 1:
            return None
        key: Any = (rows, total, in_order)
        if isinstance(mask, Spans):
            known = self._deals.setdefault(mask, {})
        else:
            key, known = (isinstance(mask, Causal), *key), self._plain_deals
        if key not in known:
            self._join(device)
            if not isinstance(mask, Spans):
                mask = plain_spans(isinstance(mask, Causal), total, torch.device("cpu"))
            _keep(known, key, deal(mask, self._nodes, rows, in_order))
        return known[key]

    def _join(self, device: torch.device) -> None:
        """Make the group's communicator, which takes all ranks: those that send nothing skip later exchanges."""
        if device not in self._joined:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
            self._joined.add(device)

    def _way(self, q: Tensor, k: Tensor, v: Tensor, found: Deal | None, in_order: bool) -> Way:
        """How many ranks share heads (U), and which: by default the fastest way by the model of cost.py.

        Without a deal it is the largest possible U. in_order: only ways that keep the keys in order.
        """
        heads_kv, world = k.shape[1], self.world
        if self._heads is not None:
            if heads_kv % self._heads:
                raise ValueError(
                    f"heads: {self._heads} ranks cannot share the {heads_kv} heads of k and v; use a divisor of them"
                )
            return Way.in_order(self._heads, world) if in_order else Way(self._heads, False)
        # Not math.gcd, which Dynamo does not take of symbolic numbers.
        most = max(u for u in range(1, world + 1) if world % u == 0 and heads_kv % u == 0)
        unknown = Way.in_order(most, world) if in_order else Way(most, False)
        if not torch.compiler.is_compiling():
            self._layout(unknown)  # compiled code takes this way, and cannot create process groups
        if found is None:
            return unknown
        dim = (q.shape[3] + v.shape[3]) / 2
        shapes = Shapes(q.shape[0], q.shape[2], q.shape[1], heads_kv, dim, q.element_size(), self._nodes)
        return fastest(shapes, most, in_order, found)

    def _layout(self, way: Way) -> Layout:
        if way not in self._layouts:
            self._layouts[way] = make_layout(self._group, *way)
        return self._layouts[way]

    def _local_masks(
        self,
        mask: ops.Mask,
        layout: Layout,
        rows: int,
        total: int,
        device: torch.device,
        dealt: Deal | None,
        places: tuple[Place, ...],
    ) -> tuple[ops.Mask, ...]:
        """The masks of the pieces, once per mask: what is made here owns tile schedules."""
        if isinstance(mask, FunctionMask):
            keys = self.world * rows
            if not reads_heads(mask):  # pieces share its tile lists
                return self._kept(mask, places[:1], lambda place: mask_at(mask, place, keys)) * len(places)
            return self._kept(mask, places, lambda place: mask_at(mask, place, keys))
        local = self._local_mask(mask, layout, rows, total, device, dealt)
        if isinstance(local, (Spans, DenseMask)):
            return self._kept(local, places, lambda place: planes_at(local, place))
        return (local,) * len(places)

    def _kept(
        self, mask: Any, places: tuple[Place, ...], make: Callable[[Place], ops.Mask]
    ) -> tuple[ops.Mask, ...]:
        """What `make` gives for each place, kept as long as the mask. In a trace there are no tensors to keep."""
        if torch.compiler.is_compiling():
            return tuple(make(place) for place in places)
        key = (places, _stream(mask.device))
        known = self._parts.get(mask)
        if known is None or known[0] != key:
            known = (key, tuple(make(place) for place in places))
            # Not the mask itself, which would never go.
            self._parts[mask] = (known[0], tuple(None if x is mask else x for x in known[1]))
        return tuple(mask if x is None else x for x in known[1])

    def _local_mask(
        self,
        mask: ops.Mask,
        layout: Layout,
        rows: int,
        total: int,
        device: torch.device,
        dealt: Deal | None = None,
    ) -> ops.Mask:
        """The mask of this rank's queries and keys, in the order in which it has them."""
        if total == self.world * rows and (len(layout.queries) == self.world or mask is None):
            return mask
        # Once per mask, not per layer: what is made here owns tile schedules. Not in a trace, which has no tensors yet.
        trace = torch.compiler.is_compiling()
        where = (layout.queries, layout.keys, rows, total)
        of_rank = None if dealt is None else dealt.of(self.rank)
        key: Any = (where, of_rank, 0 if trace else _stream(device))
        if not isinstance(mask, (Spans, DenseMask)):
            causal = isinstance(mask, Causal)
            if trace:
                return local_plain(causal, *where, device)
            key = (causal, device, key)
            if key not in self._plain:
                plain = plain_spans(causal, total, device)
                local = local_spans(plain, *where) if dealt is None else dealt_spans(plain, dealt, self.rank)
                _keep(self._plain, key, local)
            return self._plain[key]
        known: dict[Any, Spans | DenseMask] = {} if trace else self._masks.setdefault(mask, {})
        if key in known:
            return known[key]
        if isinstance(mask, DenseMask):
            _keep(known, key, local_dense(mask, *where))
        else:
            local = local_spans(mask, *where) if dealt is None else dealt_spans(mask, dealt, self.rank)
            _keep(known, key, local)
        return known[key]


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add a value; of more than `KEPT` the oldest goes."""
    if len(known) >= KEPT:
        del known[next(iter(known))]
    known[key] = value


def _stream(device: torch.device) -> int:
    """The number of the current stream, on which tile schedules are made."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
