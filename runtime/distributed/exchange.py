"""The operator of context parallelism: exchanges and kernels, overlapped. See context_parallel.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from attnforge.runtime import ops
from attnforge.runtime.distributed.deal import Deal, Run, Runs, common, place_of, size_of
from attnforge.runtime.distributed.parts import Place, add_gradients, score_at
from attnforge.runtime.distributed.shards import Layout
from attnforge.runtime.scores import Score

# torch 2.13 renamed it, and warns about the name of 2.11 and 2.12.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Call:
    layout: Layout
    shared: int  # U
    deal: Deal | None  # where U is 1 and the mask can be read
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
    """A running exchange. `land` makes the current stream wait for it and returns the result."""

    def __init__(self, result: Tensor, works: Sequence[Any] = (), *sources: Tensor) -> None:
        self.result, self.works, self.sources = result, [*works], [*sources]
        self.steps: list[Callable[[], object]] = []  # after the wait

    def land(self) -> Tensor:
        while self.works:  # those of several flights; gloo's can be waited for only once
            self.works.pop().wait()
        for step in self.steps:
            step()
        self.sources, self.steps = [], []
        return self.result


def _exchange(x: Tensor, group: Any) -> _Flight:
    """All-to-all of x (U, ...): slice u goes to rank u, slice u of the result came from it."""
    if group is None:
        return _Flight(x)
    if torch.compiler.is_compiling():
        # Compiled code needs functional collectives; the compiler inserts the waits.
        return _Flight(functional.all_to_all_single(x, None, None, group))
    result = torch.empty_like(x)
    return _Flight(result, [dist.all_to_all_single(result, x, group=group, async_op=True)], x)


class _Moves:
    """What ranks that share no heads send each other in one launch: any number of tensors (rows, ...).

    All ranks add the same tensors in the same order, so that what one sends is what the other expects.
    """

    def __init__(self, call: Call) -> None:
        assert call.deal is not None
        self._deal, self._group = call.deal, call.layout.among_rows
        self._rank = dist.get_rank(self._group)
        self._transfers: list[Any] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._flights: list[_Flight] = []

    def fetch(self, x: Tensor, wanted: tuple[Runs, ...]) -> _Flight:
        """x: the rows that this rank holds -> those that it wants."""
        held = self._deal.held
        return self._move(x, held[self._rank], held, wanted)

    def give_back(self, x: Tensor) -> _Flight:
        """x: the rows of this rank's `queries` -> those that it holds, each from the rank that computed it."""
        deal = self._deal
        return self._move(x, deal.queries[self._rank], deal.computed, deal.held)

    def _move(self, x: Tensor, rows: Runs, source: tuple[Runs, ...], target: tuple[Runs, ...]) -> _Flight:
        """x: `rows`, of which this rank sends those of its `source` -> the rows of its `target`.

        Where x has places for all of these, the result is a view of x, into which the others' rows are received.
        """
        mine, rank = target[self._rank], self._rank
        whole = common(mine, rows) == mine
        result = _rows(x, mine[0], rows) if whole else x.new_empty(size_of(mine), *x.shape[1:])
        flight = self._flight(result, x)
        if not whole:
            own = common(mine, source[rank])
            self._copies += [(_rows(result, run, mine), _rows(x, run, rows)) for run in own]
        for peer in self._peers():
            for run in common(source[rank], target[peer]):
                self._send(flight, _rows(x, run, rows), peer)
            for run in common(mine, source[peer]):
                self._receive(flight, _rows(result, run, mine), peer)
        return flight

    def add_up(self, x: Tensor, dtype: torch.dtype) -> _Flight:
        """x: a gradient of the rows of this rank's `keys` -> of those that it holds the ranks' sum, in `dtype`."""
        held, keys, rank = self._deal.held, self._deal.keys, self._rank
        mine, rows = held[rank], keys[rank]
        own = _rows(x, mine[0], rows)
        flight = self._flight(own if x.dtype == dtype else own.to(dtype), x)
        parts: list[tuple[Run, Tensor]] = []
        for peer in self._peers():
            for run in common(rows, held[peer]):
                self._send(flight, _rows(x, run, rows), peer)
            for run in common(mine, keys[peer]):
                parts.append((run, own.new_empty(size_of((run,)), *own.shape[1:])))
                self._receive(flight, parts[-1][1], peer)
        flight.steps.append(lambda: _add_parts(flight.result, own, mine[0][0], parts))
        return flight

    def start(self) -> None:
        works = [*dist.batch_isend_irecv(self._transfers)] if self._transfers else []
        for target, source in self._copies:  # while the others are on their way
            target.copy_(source)
        for flight in self._flights:
            flight.works = works

    def _peers(self) -> Iterator[int]:
        return (peer for peer in range(len(self._deal.held)) if peer != self._rank)

    def _flight(self, result: Tensor, source: Tensor) -> _Flight:
        self._flights.append(_Flight(result, (), source))
        return self._flights[-1]

    def _send(self, flight: _Flight, x: Tensor, peer: int) -> None:
        flight.sources.append(x.contiguous())
        self._transfer(dist.isend, flight.sources[-1], peer)

    def _receive(self, flight: _Flight, into: Tensor, peer: int) -> None:
        x = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
        if x is not into:
            flight.steps.append(lambda: into.copy_(x))
        self._transfer(dist.irecv, x, peer)

    def _transfer(self, call: Any, x: Tensor, peer: int) -> None:
        self._transfers.append(dist.P2POp(call, x, dist.get_global_rank(self._group, peer), self._group))


def _rows(x: Tensor, run: Run, runs: Runs) -> Tensor:
    """A run of the rows of x, whose rows are those of `runs`."""
    first, last = place_of(run, runs)
    return x[first:last]


def _add_parts(into: Tensor, own: Tensor, first: int, parts: Sequence[tuple[Run, Tensor]]) -> None:
    """into = own + parts, where these are of some rows of own, which begin at `first`: in float32, rounded once."""
    edges = sorted({edge for run, _ in parts for edge in run})
    for a, b in pairwise(edges):
        rows = slice(a - first, b - first)
        found = [own[rows], *(_rows(x, (a, b), (run,)) for run, x in parts if run[0] <= a and b <= run[1])]
        if len(found) > 1:
            into[rows] = torch.stack(found).sum(0) if len(found) > 2 else found[0] + found[1]


def _send_heads(x: Tensor, shared: int, first: int, last: int, group: Any) -> _Flight:
    """x (B, U h, n, D), heads [first, last) of each of the U shares -> (U n, B, last - first, D)."""
    shares = x.unflatten(1, (shared, -1))[:, :, first:last]
    return _exchange(shares.permute(1, 3, 0, 2, 4).contiguous().flatten(0, 1), group)


def _bring(
    call: Call, rows: Sequence[Tensor], keys: Sequence[Tensor], piece: Piece
) -> tuple[list[_Flight], list[_Flight]]:
    """A piece's heads of `rows` (q or dout, lse's) and `keys` (k and v), to the ranks that compute with them.

    (B, U h, n, D) -> (rows or keys of the kernel, B, heads of the piece, D).
    """
    if call.deal is None:
        return (
            [_send_rows(x, call, *piece.queries) for x in rows],
            [_gather_keys(x, call, *piece.keys) for x in keys],
        )
    moves = _Moves(call)
    flights = (
        [moves.fetch(_by_rows(x[:, slice(*piece.queries)]), call.deal.queries) for x in rows],
        [moves.fetch(_by_rows(x[:, slice(*piece.keys)]), call.deal.keys) for x in keys],
    )
    moves.start()
    return flights


def _take_back(
    call: Call, rows: Sequence[Tensor], keys: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[_Flight], list[_Flight]]:
    """The inverse, of what kernels computed; gradients of keys are added up, and rounded to `dtype`.

    (B, h, rows or keys of the kernel, D) -> (U n, B, h, D), by shares of heads.
    """
    if call.deal is None:
        return [_return_rows(x, call) for x in rows], _return_keys(keys, dtype, call) if keys else []
    moves = _Moves(call)
    flights = (
        [moves.give_back(_by_rows(x)) for x in rows],
        [moves.add_up(_by_rows(x), dtype) for x in keys],
    )
    moves.start()
    return flights


def _by_rows(x: Tensor) -> Tensor:
    """(B, h, rows, D) as (rows, B, h, D)."""
    return x.permute(2, 0, 1, 3)


def _send_rows(x: Tensor, call: Call, first: int, last: int) -> _Flight:
    """`_bring` without a deal: rows with their share of the heads."""
    if call.shared > 1:
        return _send_heads(x, call.shared, first, last, call.layout.among_heads)
    return _Flight(_by_rows(x[:, first:last]))


def _return_rows(x: Tensor, call: Call) -> _Flight:
    """`_take_back` without a deal."""
    if call.shared > 1:
        return _exchange(_by_rows(x).contiguous(), call.layout.among_heads)
    return _Flight(_by_rows(x))


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
            new = () if piece.keys in keys else (k, v)
            (flight,), found = _bring(call, (q,), new, piece)
            flights.append(flight)
            keys.setdefault(piece.keys, found)
        saved, back, lses = [], [], []
        for piece, place, mask, flight in zip(pieces, call.places, call.masks, flights, strict=True):
            k_u, v_u = (_heads_view(x.land()) for x in keys[piece.keys])
            q_u = _heads_view(flight.land())
            score = None if call.score is None else score_at(call.score, captured, place)
            out_u, lse_u = ops.forward(q_u, k_u, v_u, mask, call.scale, score=score, check=False)
            saved += [q_u, k_u, v_u, out_u, lse_u]
            results = (out_u, lse_u[..., None]) if call.return_lse else (out_u,)
            (first, *lse), _ = _take_back(call, results, (), q.dtype)
            back.append(first)
            lses += lse
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
        wanted_rows = (dout, *(x[..., None] for x in dlse))
        flights = [_bring(call, wanted_rows, (), piece)[0] for piece in pieces]
        back = []
        keys: dict[tuple[int, int], list[_Flight]] = {}
        sums: list[Tensor] = []  # of dk and dv, of several pieces of one kv head
        for index, (piece, rows) in enumerate(zip(pieces, flights, strict=True)):
            q_u, k_u, v_u, out_u, lse_u = saved[5 * index : 5 * index + 5]
            dout_u, *dlse_u = (_heads_view(row.land()) for row in rows)
            place = call.places[index]
            score = None if call.score is None else score_at(call.score, captured, place, wanted)
            dq_u, dk_u, dv_u, *of_score = ops.backward(
                dout_u, q_u, k_u, v_u, out_u, lse_u, call.masks[index], call.scale, call.deterministic,
                dlse=dlse_u[0].squeeze(3) if dlse_u else None, score=score, check=False,
            )  # fmt: skip
            parts = [dk_u, dv_u]
            if call.score is not None:
                add_gradients(call.score, place, scores, of_score)
            more = piece.keys in (other.keys for other in pieces[index + 1 :])
            if sums or more:
                sums = (
                    [a + b for a, b in zip(sums, parts, strict=True)] if sums else [x.float() for x in parts]
                )
            (of_rows,), of_keys = _take_back(call, (dq_u,), () if more else sums or parts, k_u.dtype)
            back.append(of_rows)
            if not more:
                keys[piece.keys], sums = of_keys, []
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
