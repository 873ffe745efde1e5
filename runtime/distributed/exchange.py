"""The operator of context parallelism: exchanges and kernels, overlapped. See context_parallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from attnforge.runtime import ops
from attnforge.runtime.distributed.shards import Layout
from attnforge.runtime.masks import DenseMask

# torch 2.13 renamed both, and warns about the names of 2.11 and 2.12.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Call:
    layout: Layout
    shared: int  # U
    pieces: int
    mask: ops.Mask
    scale: float | None
    return_lse: bool
    deterministic: bool


class _Piece(NamedTuple):
    """Query heads [q0, q1) of those that a rank gets, and the key heads [k0, k1) that they read."""

    q0: int
    q1: int
    k0: int
    k1: int


def _cut(heads_q: int, heads_kv: int, pieces: int) -> list[_Piece]:
    """Up to `pieces` portions: whole groups of query heads if there are enough kv heads, else parts of groups."""
    group = heads_q // heads_kv

    def edges(count: int, parts: int) -> list[int]:
        return [count * i // parts for i in range(parts + 1)]

    if pieces <= heads_kv:
        cuts = edges(heads_kv, pieces)
        return [_Piece(a * group, b * group, a, b) for a, b in pairwise(cuts)]
    cuts = edges(group, min(group, -(-pieces // heads_kv)))
    return [
        _Piece(head * group + a, head * group + b, head, head + 1)
        for head in range(heads_kv)
        for a, b in pairwise(cuts)
    ]


class _Flight:
    """A running collective. `land` makes the current stream wait for it and returns the result."""

    def __init__(self, result: Tensor, work: Any, source: Tensor | None = None) -> None:
        self._result, self._work, self._source = result, work, source

    def land(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        self._work = self._source = None
        return self._result


def _exchange(x: Tensor, group: Any) -> _Flight:
    """All-to-all of x (U, ...): slice u goes to rank u, slice u of the result came from it."""
    if group is None:
        return _Flight(x, None)
    if torch.compiler.is_compiling():
        # Compiled code needs functional collectives; the compiler inserts the waits.
        return _Flight(functional.all_to_all_single(x, None, None, group), None)
    result = torch.empty_like(x)
    return _Flight(result, dist.all_to_all_single(result, x, group=group, async_op=True), x)


def _send_heads(x: Tensor, shared: int, first: int, last: int, group: Any) -> _Flight:
    """x (B, U h, n, D), heads [first, last) of each of the U shares -> (U, n, B, last - first, D), by rows."""
    shares = x.unflatten(1, (shared, -1))[:, :, first:last]
    return _exchange(shares.permute(1, 3, 0, 2, 4).contiguous(), group)


def _take_heads(into: Tensor, x: Tensor, shared: int, first: int, last: int) -> None:
    """The inverse, x (U, n, B, last - first, D) into its heads of `into` (B, U h, n, D)."""
    into.unflatten(1, (shared, -1))[:, :, first:last].copy_(x.permute(2, 0, 3, 1, 4))


def _heads_view(x: Tensor) -> Tensor:
    """(rows, B, h, D) as (B, h, rows, D)."""
    return x.permute(1, 2, 0, 3)


class Attention(torch.autograd.Function):
    """Exchanges and kernels, forward and backward. Names with `u`: tensors with shared heads, laid out by rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, ...]:
        shared, group = call.shared, call.layout.among_heads
        pieces = _cut(q.shape[1] // shared, k.shape[1] // shared, call.pieces)
        keys = _send_keys(k, v, shared, group)
        flights = [_send_heads(q, shared, piece.q0, piece.q1, group) for piece in pieces]
        kv = _gather_keys(keys.land().flatten(0, 1), call.layout.among_rows)
        k_u, v_u = (_heads_view(x) for x in kv.split((k.shape[3], v.shape[3]), dim=3))
        out, saved, back, lses = _like(q, v.shape[3]), [], [], []
        for piece, flight in zip(pieces, flights, strict=True):
            q_u = _heads_view(flight.land().flatten(0, 1))
            heads = slice(piece.k0, piece.k1)
            mask = _mask_of(call, piece, q.shape[1])
            out_u, lse_u = ops.forward(q_u, k_u[:, heads], v_u[:, heads], mask, call.scale)
            saved += [q_u, out_u, lse_u]
            back.append(_return_rows(out_u, shared, group))
            if call.return_lse:
                lses.append(_return_rows(lse_u[..., None], shared, group))
        for piece, flight in zip(pieces, back, strict=True):
            _take_heads(out, flight.land(), shared, piece.q0, piece.q1)
        ctx.save_for_backward(kv, *saved)
        ctx.call, ctx.pieces, ctx.dims = call, pieces, (k.shape[3], v.shape[3])
        ctx.layouts = [torch.empty_like(x, device="meta") for x in (q, k, v)]
        if not call.return_lse:
            return (out,)
        lse = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
        for piece, flight in zip(pieces, lses, strict=True):
            _take_heads(lse, flight.land(), shared, piece.q0, piece.q1)
        return out, lse.squeeze(3)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *dlse: Tensor) -> Any:
        call, pieces = ctx.call, ctx.pieces
        shared, group = call.shared, call.layout.among_heads
        kv, *saved = ctx.saved_tensors
        flights = [_send_heads(dout, shared, piece.q0, piece.q1, group) for piece in pieces]
        rows = [
            [_send_heads(x[..., None], shared, piece.q0, piece.q1, group) for x in dlse] for piece in pieces
        ]
        k_u, v_u = (_heads_view(x) for x in kv.split(ctx.dims, dim=3))
        split = len(pieces) > pieces[-1].k1
        summed = split or call.layout.among_rows is not None
        dkv, back, begun = torch.empty_like(kv, dtype=torch.float32 if summed else None), [], set()
        dk_u, dv_u = (_heads_view(x) for x in dkv.split(ctx.dims, dim=3))
        for index, (piece, flight) in enumerate(zip(pieces, flights, strict=True)):
            q_u, out_u, lse_u = saved[3 * index : 3 * index + 3]
            heads = slice(piece.k0, piece.k1)
            dlse_u = [_heads_view(row.land().flatten(0, 1)).squeeze(3) for row in rows[index]]
            dq_u, dk, dv = ops.backward(
                _heads_view(flight.land().flatten(0, 1)), q_u, k_u[:, heads], v_u[:, heads], out_u, lse_u,
                _mask_of(call, piece, ctx.layouts[0].shape[1]), call.scale, call.deterministic,
                dlse=dlse_u[0] if dlse_u else None,
            )  # fmt: skip
            back.append(_return_rows(dq_u, shared, group))
            for into, part in ((dk_u[:, heads], dk), (dv_u[:, heads], dv)):
                into.add_(part) if piece.k0 in begun else into.copy_(part)
            begun.add(piece.k0)
        keys = _return_keys(dkv, kv.dtype, call)
        dq, dk, dv = (torch.empty_like(x, device=dout.device) for x in ctx.layouts)
        for piece, flight in zip(pieces, back, strict=True):
            _take_heads(dq, flight.land(), shared, piece.q0, piece.q1)
        for into, part in zip((dk, dv), keys.land().split(ctx.dims, dim=4), strict=True):
            _take_heads(into, part, shared, 0, part.shape[3])
        return dq, dk, dv, None


def _return_rows(x: Tensor, shared: int, group: Any) -> _Flight:
    """(B, h, U n, D) -> (U, n, B, h, D) of this rank's rows, by shares of heads."""
    return _exchange(x.permute(2, 0, 1, 3).contiguous().unflatten(0, (shared, -1)), group)


def _like(q: Tensor, dim: int) -> Tensor:
    """A new tensor in the layout of q (B, H, n, D) with `dim` columns; packed if `dim` differs from D."""
    if dim == q.shape[3]:
        return torch.empty_like(q)
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dim).transpose(1, 2)


def _mask_of(call: Call, piece: _Piece, heads: int) -> ops.Mask:
    """The mask of a piece: of a DenseMask with one plane per query head, the planes of the piece's heads."""
    if not isinstance(call.mask, DenseMask):
        return call.mask
    group = call.layout.among_heads
    first = 0 if group is None else dist.get_rank(group) * (heads // call.shared)
    return call.mask.narrow(1, first + piece.q0, piece.q1 - piece.q0)


def _send_keys(k: Tensor, v: Tensor, shared: int, group: Any) -> _Flight:
    """k (B, U h, n, D), v (B, U h, n, Dv) -> (U, n, B, h, D + Dv), by rows."""
    both = torch.cat([k, v], dim=3)
    return _send_heads(both, shared, 0, k.shape[1] // shared, group)


def _gather_keys(kv: Tensor, group: Any) -> Tensor:
    """(U n, B, h, D + Dv) -> (W n, B, h, D + Dv): this rank's heads of all keys."""
    if group is None:
        return kv
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(kv, 0, group)
    whole = kv.new_empty(dist.get_world_size(group) * kv.shape[0], *kv.shape[1:])
    all_gather(whole, kv, group)
    return whole


def _return_keys(dkv: Tensor, dtype: torch.dtype, call: Call) -> _Flight:
    """The inverse of both for gradients: (W n, B, h, D + Dv) -> sums in `dtype` (U, n, ...)."""
    group, mine = call.layout.among_rows, dkv
    if group is not None and torch.compiler.is_compiling():
        mine = functional.reduce_scatter_tensor(dkv, "sum", 0, group)
    elif group is not None:
        mine = dkv.new_empty(dkv.shape[0] // dist.get_world_size(group), *dkv.shape[1:])
        reduce_scatter(mine, dkv, group=group)
    return _exchange(mine.to(dtype).unflatten(0, (call.shared, -1)), call.layout.among_heads)
