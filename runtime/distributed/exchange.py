"""The operator of context parallelism: exchanges and kernels, overlapped. See context_parallel.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from attnforge.runtime import ops
from attnforge.runtime.distributed.parts import Place, add_gradients, score_at
from attnforge.runtime.distributed.shards import Layout
from attnforge.runtime.scores import Score

# torch 2.13 renamed it, and warns about the name of 2.11 and 2.12.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Edges = tuple[int, ...]  # rank i has rows [edges[i], edges[i + 1]) of the whole


@dataclass(frozen=True)
class Call:
    layout: Layout
    shared: int  # U
    held: Edges  # rows of q that ranks are given
    computed: Edges  # rows of q that their kernels compute; the same unless U is 1
    pieces: tuple[Piece, ...]
    places: tuple[Place, ...]  # of the pieces
    masks: tuple[ops.Mask, ...]  # of the pieces
    scale: float | None
    return_lse: bool
    deterministic: bool
    score: Score | None  # of the whole


class Piece(NamedTuple):
    """Query heads [q0, q1) of those that a rank gets, and the key heads [k0, k1) that they read."""

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


def cut(heads_q: int, heads_kv: int, pieces: int) -> tuple[Piece, ...]:
    """Up to `pieces` portions: whole groups of query heads if there are enough kv heads, else parts of groups."""
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


class _Flight:
    """A running collective. `land` makes the current stream wait for it and returns the result."""

    def __init__(self, result: Tensor, works: Sequence[Any] = (), source: Tensor | None = None) -> None:
        self._result, self._works, self._source = result, works, source

    def land(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._works, self._source = (), None
        return self._result


def _exchange(x: Tensor, group: Any) -> _Flight:
    """All-to-all of x (U, ...): slice u goes to rank u, slice u of the result came from it."""
    if group is None:
        return _Flight(x)
    if torch.compiler.is_compiling():
        # Compiled code needs functional collectives; the compiler inserts the waits.
        return _Flight(functional.all_to_all_single(x, None, None, group))
    result = torch.empty_like(x)
    return _Flight(result, [dist.all_to_all_single(result, x, group=group, async_op=True)], x)


def _move_rows(x: Tensor, source: Edges, target: Edges, group: Any) -> _Flight:
    """x (rows, ...): this rank's rows by `source` -> its rows by `target`; a view of x if it has all of them."""
    if source == target:
        return _Flight(x)
    rank = dist.get_rank(group)
    has, wants = source[rank : rank + 2], target[rank : rank + 2]
    first, last = max(has[0], wants[0]), min(has[1], wants[1])  # those that stay
    stays = x[first - has[0] : max(first, last) - has[0]]
    result = stays
    if stays.shape[0] < wants[1] - wants[0]:
        result = x.new_empty(wants[1] - wants[0], *x.shape[1:])
    x = x.contiguous() if stays.shape[0] < x.shape[0] else x
    transfers = []
    for peer in range(len(source) - 1):
        gives, takes = source[peer : peer + 2], target[peer : peer + 2]
        for call, mine, theirs, whole in ((dist.isend, has, takes, x), (dist.irecv, wants, gives, result)):
            begin, end = max(mine[0], theirs[0]), min(mine[1], theirs[1])
            if peer != rank and begin < end:
                part = whole[begin - mine[0] : end - mine[0]]
                transfers.append(dist.P2POp(call, part, dist.get_global_rank(group, peer), group))
    works = dist.batch_isend_irecv(transfers) if transfers else ()
    if result is not stays and first < last:  # while the others are on their way
        result[first - wants[0] : last - wants[0]].copy_(stays)
    return _Flight(result, works, x)


def _send_heads(x: Tensor, shared: int, first: int, last: int, group: Any) -> _Flight:
    """x (B, U h, n, D), heads [first, last) of each of the U shares -> (U n, B, last - first, D)."""
    shares = x.unflatten(1, (shared, -1))[:, :, first:last]
    return _exchange(shares.permute(1, 3, 0, 2, 4).contiguous().flatten(0, 1), group)


def _send_rows(x: Tensor, call: Call, first: int, last: int) -> _Flight:
    """The same of q and dout: to the ranks that compute these heads of these rows."""
    if call.shared > 1:
        return _send_heads(x, call.shared, first, last, call.layout.among_heads)
    rows = x[:, first:last].permute(2, 0, 1, 3)
    return _move_rows(rows, call.held, call.computed, call.layout.among_rows)


def _return_rows(x: Tensor, call: Call) -> _Flight:
    """The inverse: x (B, h, rows, D) as kernels computed it -> (U n, B, h, D), by shares of heads."""
    rows = x.permute(2, 0, 1, 3)
    if call.shared > 1:
        return _exchange(rows.contiguous(), call.layout.among_heads)
    return _move_rows(rows, call.computed, call.held, call.layout.among_rows)


def _take_heads(into: Tensor, x: Tensor, shared: int, first: int, last: int) -> None:
    """x (U n, B, last - first, D) into its heads of `into` (B, U h, n, D)."""
    rows = x.unflatten(0, (shared, -1))
    into.unflatten(1, (shared, -1))[:, :, first:last].copy_(rows.permute(2, 0, 3, 1, 4))


def _collect(
    heads: Sequence[tuple[int, int]], flights: Sequence[_Flight], shared: int, like: Tensor
) -> Tensor:
    """All heads in the layout of `like` (B, U h, n, D): what a single flight brings, if it has that layout."""
    landed = [flight.land() for flight in flights]
    if shared == 1 and len(landed) == 1:
        whole = _heads_view(landed[0])
        strides = zip(whole.stride(), like.stride(), like.shape, strict=True)
        if all(a == b for a, b, size in strides if size > 1):
            return whole
    into = torch.empty_like(like, device=landed[0].device)
    for (first, last), x in zip(heads, landed, strict=True):
        _take_heads(into, x, shared, first, last)
    return into


def _heads_view(x: Tensor) -> Tensor:
    """(rows, B, h, D) as (B, h, rows, D)."""
    return x.permute(1, 2, 0, 3)


class Attention(torch.autograd.Function):
    """Exchanges and kernels, forward and backward. Names with `u`: tensors with shared heads, laid out by rows."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, *captured: Tensor
    ) -> tuple[Tensor, ...]:
        """`captured`: the tensors of the whole's score."""
        shared, pieces = call.shared, call.pieces
        keys: dict[tuple[int, int], list[_Flight]] = {}
        flights = []
        for piece in pieces:
            if piece.keys not in keys:
                keys[piece.keys] = [_gather_keys(x, call, *piece.keys) for x in (k, v)]
            flights.append(_send_rows(q, call, *piece.queries))
        saved, back, lses = [], [], []
        for piece, place, mask, flight in zip(pieces, call.places, call.masks, flights, strict=True):
            k_u, v_u = (_heads_view(x.land()) for x in keys[piece.keys])
            q_u = _heads_view(flight.land())
            score = None if call.score is None else score_at(call.score, captured, place)
            out_u, lse_u = ops.forward(q_u, k_u, v_u, mask, call.scale, score=score, check=False)
            saved += [q_u, k_u, v_u, out_u, lse_u]
            back.append(_return_rows(out_u, call))
            if call.return_lse:
                lses.append(_return_rows(lse_u[..., None], call))
        heads = [piece.queries for piece in pieces]
        out = _collect(heads, back, shared, _like(q, v.shape[3]))
        ctx.save_for_backward(*saved, *captured)
        ctx.call = call
        ctx.layouts = [torch.empty_like(x, device="meta") for x in (q, k, v)]
        if not call.return_lse:
            return (out,)
        like = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device="meta")
        return out, _collect(heads, lses, shared, like).squeeze(3)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *dlse: Tensor) -> Any:
        call, pieces, saved = ctx.call, ctx.call.pieces, ctx.saved_tensors
        captured = saved[5 * len(pieces) :]
        wanted = [i for i in range(len(captured)) if ctx.needs_input_grad[4 + i]]
        scores = {i: torch.zeros_like(captured[i], dtype=torch.float32) for i in wanted}
        flights = [_send_rows(dout, call, *piece.queries) for piece in pieces]
        rows = [[_send_rows(x[..., None], call, *piece.queries) for x in dlse] for piece in pieces]
        back = []
        keys: dict[tuple[int, int], list[_Flight]] = {}
        sums: list[Tensor] = []  # of dk and dv, of several pieces of one kv head
        for index, (piece, flight) in enumerate(zip(pieces, flights, strict=True)):
            q_u, k_u, v_u, out_u, lse_u = saved[5 * index : 5 * index + 5]
            dlse_u = [_heads_view(row.land()).squeeze(3) for row in rows[index]]
            place = call.places[index]
            score = None if call.score is None else score_at(call.score, captured, place, wanted)
            dq_u, dk_u, dv_u, *of_score = ops.backward(
                _heads_view(flight.land()), q_u, k_u, v_u, out_u, lse_u, call.masks[index], call.scale,
                call.deterministic, dlse=dlse_u[0] if dlse_u else None, score=score, check=False,
            )  # fmt: skip
            parts = [dk_u, dv_u]
            if call.score is not None:
                add_gradients(call.score, place, scores, of_score)
            back.append(_return_rows(dq_u, call))
            more = piece.keys in (other.keys for other in pieces[index + 1 :])
            if sums or more:
                sums = (
                    [a + b for a, b in zip(sums, parts, strict=True)] if sums else [x.float() for x in parts]
                )
            if not more:
                keys[piece.keys] = _return_keys(sums or parts, k_u.dtype, call)
                sums = []
        dq = _collect([piece.queries for piece in pieces], back, call.shared, ctx.layouts[0])
        dk, dv = (
            _collect(list(keys), flights, call.shared, like)
            for flights, like in zip(zip(*keys.values(), strict=True), ctx.layouts[1:], strict=True)
        )
        of_scores = (scores[i].to(x.dtype) if i in scores else None for i, x in enumerate(captured))
        return dq, dk, dv, None, *of_scores


def _like(q: Tensor, dim: int) -> Tensor:
    """A tensor without data in the layout of q (B, H, n, D) with `dim` columns; packed if `dim` differs from D."""
    if dim == q.shape[3]:
        return torch.empty_like(q, device="meta")
    return torch.empty(q.shape[0], q.shape[2], q.shape[1], dim, dtype=q.dtype, device="meta").transpose(1, 2)


def _gather_keys(x: Tensor, call: Call, first: int, last: int) -> _Flight:
    """k or v (B, U h, n, D) -> (W n, B, last - first, D): heads [first, last) of this rank's share, of all keys."""
    flight = _send_heads(x, call.shared, first, last, call.layout.among_heads)
    group = call.layout.among_rows
    if group is None:
        return flight
    mine = flight.land()
    if torch.compiler.is_compiling():
        return _Flight(functional.all_gather_tensor(mine, 0, group))
    whole = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
    return _Flight(whole, [all_gather(whole, mine, group, async_op=True)], mine)


def _return_keys(gradients: Sequence[Tensor], dtype: torch.dtype, call: Call) -> list[_Flight]:
    """The inverse for dk and dv: (B, h, W n, D) -> sums (U n, B, h, D), in `dtype`.

    Ranks exchange what they add up instead of reducing it on the way: kernels' bf16, added in float32 and rounded once.
    """
    group = call.layout.among_rows
    parts = [_exchange(x.permute(2, 0, 1, 3).contiguous(), group) for x in gradients]
    mine = [part.land() for part in parts]
    if group is not None:
        mine = [x.unflatten(0, (dist.get_world_size(group), -1)).sum(0) for x in mine]
    return [_exchange(x.to(dtype), call.layout.among_heads) for x in mine]
