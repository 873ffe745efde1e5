"""The autograd function of context parallelism: communication and kernels (see context_parallel.py).

Shapes: B batch, n rows per rank, W ranks, U the Ulysses degree, h the heads of a piece that one rank computes, D
head_dim. Exchanged tensors have the rows first, (rows, B, h, D), so that the rows of one rank are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from attnforge.runtime import ops
from attnforge.runtime.distributed.local_slice import LocalSlice, add_gradients, score_at
from attnforge.runtime.distributed.row_assignment import (
    RowAssignment,
    RowRange,
    RowRanges,
    RowTransfers,
    row_transfers,
)
from attnforge.runtime.distributed.shards import Layout
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.scores import Score

# torch 2.13 renamed it, and warns about the name of 2.11 and 2.12.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Call:
    """How one rank computes its part of a call. `local_slices` and `masks` have one element per piece."""

    layout: Layout
    ulysses_degree: int  # U, the number of ranks that split the heads
    assignment: RowAssignment | None  # for U = 1, if the mask could be read; else None
    pieces: tuple[Piece, ...]
    local_slices: tuple[LocalSlice, ...]
    masks: tuple[AnyMask, ...]
    scale: float | None
    return_lse: bool
    deterministic: bool
    score: Score | None  # of the whole call


class Piece(NamedTuple):
    """A chunk of heads that is exchanged and computed at once.

    [q0, q1): its query heads, counted from the first head that the rank computes. [k0, k1): the kv heads that they
    read.
    """

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def queries(self) -> tuple[int, int]:
        return self.q0, self.q1

    @property
    def keys(self) -> tuple[int, int]:
        return self.k0, self.k1


def split_heads(heads_q: int, heads_kv: int, pieces: int) -> tuple[Piece, ...]:
    """Split the heads that a rank computes into up to `pieces` chunks.

    A chunk has whole groups of query heads if there are at least `pieces` kv heads, else a part of one group.
    """
    group = heads_q // heads_kv

    def edges(count: int, parts: int) -> list[int]:
        return [count * i // parts for i in range(parts + 1)]

    if pieces <= heads_kv:
        cuts = edges(heads_kv, pieces)
        return tuple(Piece(a * group, b * group, a, b) for a, b in pairwise(cuts))
    cuts = edges(group, min(group, -(-pieces // heads_kv)))
    return tuple(
        Piece(head * group + a, head * group + b, head, head + 1)
        for head in range(heads_kv)
        for a, b in pairwise(cuts)
    )


class _AsyncResult:
    """The result of a communication that may still be running. `wait` must be called before it is used."""

    def __init__(self, result: Tensor, works: Sequence[Any] = (), *sources: Tensor) -> None:
        """works: torch.distributed's handles. sources: tensors to keep alive until the communication ends."""
        self.result, self.works, self.sources = result, [*works], [*sources]
        self.steps: list[Callable[[], object]] = []  # run after the wait

    def wait(self) -> Tensor:
        """Make the current stream wait for the communication and return the result."""
        while self.works:  # the list is shared by several results; gloo allows only one wait per work
            self.works.pop().wait()
        for step in self.steps:
            step()
        self.sources, self.steps = [], []
        return self.result


def _exchange(x: Tensor, group: Any) -> _AsyncResult:
    """All-to-all of x (U, ...): x[u] is sent to rank u of `group`, and result[u] is received from it."""
    if group is None:
        return _AsyncResult(x)
    if torch.compiler.is_compiling():
        # Compiled code needs functional collectives; the compiler inserts the waits.
        return _AsyncResult(functional.all_to_all_single(x, None, None, group))
    result = torch.empty_like(x)
    return _AsyncResult(result, [dist.all_to_all_single(result, x, group=group, async_op=True)], x)


class _PointToPoint:
    """One batched launch of point-to-point transfers between ranks, for Ulysses degree 1.

    First register tensors (rows, B, heads, D) with `fetch`, `return_rows` and `reduce`, then call `start`. All ranks
    must register the same tensors in the same order, so that sends and receives match.
    """

    def __init__(self, call: Call) -> None:
        assert call.assignment is not None
        self._assignment, self._group = call.assignment, call.layout.gather_group
        self._rank = dist.get_rank(self._group)
        self._transfers: list[Any] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._results: list[_AsyncResult] = []

    def fetch(self, x: Tensor, wanted: tuple[RowRanges, ...]) -> _AsyncResult:
        """Rows that this rank holds -> rows `wanted[rank]`, received from the ranks that hold them."""
        held = self._assignment.held
        return self._exchange_rows(x, row_transfers(held[self._rank], held, wanted, self._rank))

    def return_rows(self, x: Tensor) -> _AsyncResult:
        """Rows of this rank's `queries` -> rows that it holds, each received from the rank that computed it."""
        assignment = self._assignment
        rows = assignment.queries[self._rank]
        return self._exchange_rows(x, row_transfers(rows, assignment.computed, assignment.held, self._rank))

    def _exchange_rows(self, x: Tensor, transfers: RowTransfers) -> _AsyncResult:
        """The rows that this rank wants: a view of x if it contains them, else a new tensor.

        Rows of other ranks are received into the result.
        """
        # Selective checkpointing, a dispatch mode, keeps the kernel's results and refuses that they change.
        keep = any(transfers.received) and torch._C._len_torch_dispatch_stack() > 0
        if transfers.whole is not None and not keep:
            result = x[slice(*transfers.whole)]
        else:
            result = x.new_empty(transfers.rows, *x.shape[1:])
            self._copies += [(result[slice(*to)], x[slice(*at)]) for to, at in transfers.kept]
        handle = self._register(result, x, transfers)
        for peer, ranges in enumerate(transfers.received):
            for row_range in ranges:
                self._receive(handle, result[slice(*row_range)], peer)
        return handle

    def reduce(self, x: Tensor, dtype: torch.dtype) -> _AsyncResult:
        """Gradients of this rank's `keys` -> sums over all ranks for the rows that it holds, in `dtype`."""
        keys, held = self._assignment.keys, self._assignment.held
        transfers = row_transfers(keys[self._rank], keys, held, self._rank)
        assert transfers.whole is not None  # a rank reads all keys that it holds
        own = x[slice(*transfers.whole)]
        handle = self._register(own if x.dtype == dtype else own.to(dtype), x, transfers)
        parts: list[tuple[RowRange, Tensor]] = []
        for peer, ranges in enumerate(transfers.received):
            for row_range in ranges:
                parts.append((row_range, own.new_empty(row_range[1] - row_range[0], *own.shape[1:])))
                self._receive(handle, parts[-1][1], peer)
        handle.steps.append(lambda: _add_received(handle.result, own, parts))
        return handle

    def start(self) -> None:
        """Launch all transfers, and copy the rows that stay on this rank while they run."""
        works = [*dist.batch_isend_irecv(self._transfers)] if self._transfers else []
        for target, source in self._copies:
            target.copy_(source)
        for handle in self._results:
            handle.works = works

    def _register(self, result: Tensor, x: Tensor, transfers: RowTransfers) -> _AsyncResult:
        """Add a result, and the rows of x that this rank sends to others for theirs."""
        handle = _AsyncResult(result, (), x)
        self._results.append(handle)
        for peer, ranges in enumerate(transfers.sent):
            for row_range in ranges:
                handle.sources.append(x[slice(*row_range)].contiguous())
                self._transfer(dist.isend, handle.sources[-1], peer)
        return handle

    def _receive(self, handle: _AsyncResult, into: Tensor, peer: int) -> None:
        x = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
        if x is not into:
            handle.steps.append(lambda: into.copy_(x))
        self._transfer(dist.irecv, x, peer)

    def _transfer(self, call: Any, x: Tensor, peer: int) -> None:
        self._transfers.append(dist.P2POp(call, x, dist.get_global_rank(self._group, peer), self._group))


def _add_received(into: Tensor, own: Tensor, parts: Sequence[tuple[RowRange, Tensor]]) -> None:
    """into = own + parts, summed in float32 and rounded once. parts: (rows of own, what is added to them)."""
    edges = sorted({edge for row_range, _ in parts for edge in row_range})
    for a, b in pairwise(edges):
        received = [x[a - at[0] : b - at[0]] for at, x in parts if at[0] <= a and b <= at[1]]
        if len(received) == 1:
            into[a:b] = own[a:b] + received[0]
        elif received:
            into[a:b] = torch.stack([own[a:b], *received]).sum(0)


def _ulysses_all_to_all(x: Tensor, ulysses_degree: int, first: int, last: int, group: Any) -> _AsyncResult:
    """x (B, U h, n, D): rows of all heads -> (U n, B, last - first, D): some heads of the rows of all U ranks.

    Each rank gets heads [first, last) of its share, 1/U of the heads.
    """
    shares = x.unflatten(1, (ulysses_degree, -1))[:, :, first:last]
    return _exchange(shares.permute(1, 3, 0, 2, 4).contiguous().flatten(0, 1), group)


def _redistribute_inputs(
    call: Call, rows: Sequence[Tensor], keys: Sequence[Tensor], piece: Piece
) -> tuple[list[_AsyncResult], list[_AsyncResult]]:
    """Send a piece's heads of row tensors (q; dout and dlse) and key tensors (k and v) to the computing ranks.

    Each tensor (B, U h, n, D) becomes (rows or keys of the kernel, B, heads of the piece, D).
    """
    if call.assignment is None:
        return (
            [_redistribute_rows(x, call, *piece.queries) for x in rows],
            [_gather_keys(x, call, *piece.keys) for x in keys],
        )
    p2p = _PointToPoint(call)
    handles = (
        [p2p.fetch(_rows_first(x[:, slice(*piece.queries)]), call.assignment.queries) for x in rows],
        [p2p.fetch(_rows_first(x[:, slice(*piece.keys)]), call.assignment.keys) for x in keys],
    )
    p2p.start()
    return handles


def _return_results(
    call: Call, rows: Sequence[Tensor], keys: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[_AsyncResult], list[_AsyncResult]]:
    """Send row tensors (out and lse; dq) back to the ranks that hold these rows, and sum key tensors (dk and dv).

    Each tensor (B, h, rows or keys of the kernel, D) becomes (U n, B, h, D). Key tensors are summed over ranks in
    float32 and rounded to `dtype`.
    """
    if call.assignment is None:
        return [_return_rows(x, call) for x in rows], _reduce_key_gradients(keys, dtype, call) if keys else []
    p2p = _PointToPoint(call)
    handles = (
        [p2p.return_rows(_rows_first(x)) for x in rows],
        [p2p.reduce(_rows_first(x), dtype) for x in keys],
    )
    p2p.start()
    return handles


def _rows_first(x: Tensor) -> Tensor:
    """(B, h, rows, D) -> (rows, B, h, D), a view."""
    return x.permute(2, 0, 1, 3)


def _redistribute_rows(x: Tensor, call: Call, first: int, last: int) -> _AsyncResult:
    """`_redistribute_inputs` of one row tensor, heads [first, last), without a row assignment."""
    if call.ulysses_degree > 1:
        return _ulysses_all_to_all(x, call.ulysses_degree, first, last, call.layout.ulysses_group)
    return _AsyncResult(_rows_first(x[:, first:last]))


def _return_rows(x: Tensor, call: Call) -> _AsyncResult:
    """`_return_results` of one row tensor, without a row assignment."""
    if call.ulysses_degree > 1:
        return _exchange(_rows_first(x).contiguous(), call.layout.ulysses_group)
    return _AsyncResult(_rows_first(x))


def _copy_heads(into: Tensor, x: Tensor, ulysses_degree: int, first: int, last: int) -> None:
    """Copy x (U n, B, last - first, D) to heads [first, last) of each of the U shares of `into` (B, U h, n, D)."""
    rows = x.unflatten(0, (ulysses_degree, -1))
    into.unflatten(1, (ulysses_degree, -1))[:, :, first:last].copy_(rows.permute(2, 0, 3, 1, 4))


def _assemble_heads(
    heads: Sequence[tuple[int, int]], handles: Sequence[_AsyncResult], ulysses_degree: int, like: Tensor
) -> Tensor:
    """The heads of all pieces as one tensor with the shape and strides of `like` (B, U h, n, D).

    A single piece that already has these strides is returned without a copy.
    """
    received = [handle.wait() for handle in handles]
    if ulysses_degree == 1 and len(received) == 1:
        whole = _heads_first(received[0])
        strides = zip(whole.stride(), like.stride(), like.shape, strict=True)
        if all(a == b for a, b, size in strides if size > 1):
            return whole
    into = torch.empty_like(like, device=received[0].device)
    for (first, last), x in zip(heads, received, strict=True):
        _copy_heads(into, x, ulysses_degree, first, last)
    return into


def _heads_first(x: Tensor) -> Tensor:
    """(rows, B, h, D) -> (B, h, rows, D), a view."""
    return x.permute(1, 2, 0, 3)


class Attention(torch.autograd.Function):
    """Attention on sequence shards. Names that end in `_u` are tensors of the rank's kernel call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *captured: Tensor
    ) -> tuple[Tensor, ...]:
        """q (B, Hq, n, D), k (B, Hkv, n, D), v (B, Hkv, n, Dv) -> (out,) or (out, lse).

        captured: the tensors that the score of the whole call captures.
        """
        ulysses_degree, pieces = call.ulysses_degree, call.pieces
        keys: dict[tuple[int, int], list[_AsyncResult]] = {}
        handles = []
        for piece in pieces:
            new = () if piece.keys in keys else (k, v)
            (handle,), found = _redistribute_inputs(call, (q,), new, piece)
            handles.append(handle)
            keys.setdefault(piece.keys, found)
        saved, back, lses = [], [], []
        for piece, local_slice, mask, handle in zip(
            pieces, call.local_slices, call.masks, handles, strict=True
        ):
            k_u, v_u = (_heads_first(x.wait()) for x in keys[piece.keys])
            q_u = _heads_first(handle.wait())
            score = None if call.score is None else score_at(call.score, captured, local_slice)
            out_u, lse_u = ops.forward(q_u, k_u, v_u, mask, call.scale, score=score, check=False)
            saved += [q_u, k_u, v_u, out_u, lse_u]
            results = (out_u, lse_u[..., None]) if call.return_lse else (out_u,)
            (first, *lse), _ = _return_results(call, results, (), q.dtype)
            back.append(first)
            lses += lse
        heads = [piece.queries for piece in pieces]
        out = _assemble_heads(heads, back, ulysses_degree, _like(q, v.shape[3]))
        ctx.save_for_backward(*saved, *captured)
        ctx.call = call
        ctx.layouts = [torch.empty_like(x, device="meta") for x in (q, k, v)]
        if not call.return_lse:
            return (out,)
        like = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device="meta")
        return out, _assemble_heads(heads, lses, ulysses_degree, like).squeeze(3)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *dlse: Tensor) -> Any:
        call, pieces, saved = ctx.call, ctx.call.pieces, ctx.saved_tensors
        captured = saved[5 * len(pieces) :]
        wanted = [i for i in range(len(captured)) if ctx.needs_input_grad[4 + i]]
        scores = {i: torch.zeros_like(captured[i], dtype=torch.float32) for i in wanted}
        wanted_rows = (dout, *(x[..., None] for x in dlse))
        handles = [_redistribute_inputs(call, wanted_rows, (), piece)[0] for piece in pieces]
        back = []
        keys: dict[tuple[int, int], list[_AsyncResult]] = {}
        sums: list[Tensor] = []  # of dk and dv in float32, if several pieces have the same kv head
        for index, (piece, rows) in enumerate(zip(pieces, handles, strict=True)):
            q_u, k_u, v_u, out_u, lse_u = saved[5 * index : 5 * index + 5]
            dout_u, *dlse_u = (_heads_first(row.wait()) for row in rows)
            local_slice = call.local_slices[index]
            score = None if call.score is None else score_at(call.score, captured, local_slice, wanted)
            dq_u, dk_u, dv_u, *of_score = ops.backward(
                dout_u, q_u, k_u, v_u, out_u, lse_u, call.masks[index], call.scale, call.deterministic,
                dlse=dlse_u[0].squeeze(3) if dlse_u else None, score=score, check=False,
            )  # fmt: skip
            parts = [dk_u, dv_u]
            if call.score is not None:
                add_gradients(call.score, local_slice, scores, of_score)
            more = piece.keys in (other.keys for other in pieces[index + 1 :])
            if sums or more:
                sums = (
                    [a + b for a, b in zip(sums, parts, strict=True)] if sums else [x.float() for x in parts]
                )
            (of_rows,), of_keys = _return_results(call, (dq_u,), () if more else sums or parts, k_u.dtype)
            back.append(of_rows)
            if not more:
                keys[piece.keys], sums = of_keys, []
        dq = _assemble_heads([piece.queries for piece in pieces], back, call.ulysses_degree, ctx.layouts[0])
        dk, dv = (
            _assemble_heads(list(keys), handles, call.ulysses_degree, like)
            for handles, like in zip(zip(*keys.values(), strict=True), ctx.layouts[1:], strict=True)
        )
        of_scores = (scores[i].to(x.dtype) if i in scores else None for i, x in enumerate(captured))
        return dq, dk, dv, None, *of_scores


def _like(q: Tensor, dim: int) -> Tensor:
    """A meta tensor (B, H, n, dim) with the strides of q (B, H, n, D); if dim != D, a transposed (B, n, H, dim)."""
    if dim == q.shape[3]:
        return torch.empty_like(q, device="meta")
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dim, dtype=q.dtype, device="meta").transpose(1, 2)


def _gather_keys(x: Tensor, call: Call, first: int, last: int) -> _AsyncResult:
    """k or v (B, U h, n, D) -> (W n, B, last - first, D): heads [first, last) of the rank's share, all keys."""
    handle = _ulysses_all_to_all(x, call.ulysses_degree, first, last, call.layout.ulysses_group)
    group = call.layout.gather_group
    if group is None:
        return handle
    mine = handle.wait()
    if torch.compiler.is_compiling():
        return _AsyncResult(functional.all_gather_tensor(mine, 0, group))
    whole = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
    return _AsyncResult(whole, [all_gather(whole, mine, group, async_op=True)], mine)


def _reduce_key_gradients(gradients: Sequence[Tensor], dtype: torch.dtype, call: Call) -> list[_AsyncResult]:
    """dk and dv (B, h, W n, D) -> sums over the gather group (U n, B, h, D), in `dtype`.

    An all-to-all in the dtype of the gradients, followed by a sum in float32 that is rounded once. A reduce-scatter
    would round at every step.
    """
    group = call.layout.gather_group
    parts = [_exchange(x.permute(2, 0, 1, 3).contiguous(), group) for x in gradients]
    mine = [part.wait() for part in parts]
    if group is not None:
        mine = [x.unflatten(0, (dist.get_world_size(group), -1)).sum(0) for x in mine]
    return [_exchange(x.to(dtype), call.layout.ulysses_group) for x in mine]
