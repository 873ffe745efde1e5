"""Fused attention in Triton, forward and backward, in the style of Triton's tutorials: a peer for small dense shapes.

Full or causal, grouped heads, bf16 or fp16; lengths equal and multiples of 128, head_dim a power of two from 16 to
128. Forward: one program per tile of queries. Backward: one per tile of keys, which loops over the query heads that
share it, for dk and dv; one per tile of queries for dq. Tiles, warps and stages are tuned by Triton.
"""

# mypy: ignore-errors
# Kernels are in Triton's own language, which has no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


def _configs(*choices: tuple[int, int, int, int]) -> list[triton.Config]:
    return [triton.Config({"M": m, "N": n}, num_warps=w, num_stages=s) for m, n, w, s in choices]


FORWARD = _configs((128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 4, 2), (64, 64, 4, 3))
BACKWARD = _configs((64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 4, 3), (64, 128, 4, 2))
BACKWARD_DQ = _configs((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 3), (128, 64, 4, 2))
KEY = ["length", "group", "D", "CAUSAL"]


@triton.jit
def _rows(x, batch_stride, head_stride, row_stride, batch, head, rows, D: tl.constexpr):
    """Pointers to (rows, D) of one head."""
    return (
        x + batch * batch_stride + head * head_stride + rows[:, None] * row_stride + tl.arange(0, D)[None, :]
    )


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, rows, k, v, kb, kh, ks, batch, head, scale_log2, begin, end, D: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Online softmax over the key tiles from `begin` to `end`."""
    for start in range(begin, end, N):
        cols = start + tl.arange(0, N)
        s = tl.dot(q, tl.trans(tl.load(_rows(k, kb, kh, ks, batch, head, cols, D)))) * scale_log2
        if MASKED:
            s = tl.where(rows[:, None] >= cols[None, :], s, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(p, 1)
        value = tl.load(_rows(v, kb, kh, ks, batch, head, cols, D))
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def empty_kernel(q, k, v, out):
    """Does nothing: its time is the cost of a launch."""


@triton.autotune(FORWARD, key=KEY)
@triton.jit
def _forward(
    q, k, v, out, lse, qb, qh, qs, kb, kh, ks, scale_log2, heads, group, length, D: tl.constexpr,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Tile of queries of one head: out, and the base-2 logarithm of its denominators."""
    begin = tl.program_id(0) * M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = begin + tl.arange(0, M)
    query = tl.load(_rows(q, qb, qh, qs, batch, head, rows, D))
    acc = tl.zeros((M, D), tl.float32)
    row_max, row_sum = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    unmasked = begin if CAUSAL else length  # keys that every row of the tile sees
    acc, row_max, row_sum = _attend_tiles(
        acc,
        row_max,
        row_sum,
        query,
        rows,
        k,
        v,
        kb,
        kh,
        ks,
        batch,
        head // group,
        scale_log2,
        0,
        unmasked,
        D,
        N,
        False,
    )
    if CAUSAL:
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, query, rows, k, v, kb, kh, ks, batch, head // group, scale_log2, begin, begin + M,
            D, N, True
        )  # fmt: skip
    tl.store(_rows(out, qb, qh, qs, batch, head, rows, D), (acc / row_sum[:, None]).to(query.dtype))
    tl.store(lse + tl.program_id(1) * length + rows, row_max + tl.log2(row_sum))


@triton.jit
def _delta(out, dout, delta, ob, oh, os, db, dh, ds, heads, length, D: tl.constexpr, M: tl.constexpr):
    """Row sums of dout * out."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    a = tl.load(_rows(out, ob, oh, os, batch, head, rows, D)).to(tl.float32)
    b = tl.load(_rows(dout, db, dh, ds, batch, head, rows, D)).to(tl.float32)
    tl.store(delta + tl.program_id(1) * length + rows, tl.sum(a * b, 1))


@triton.autotune(BACKWARD, key=KEY)
@triton.jit
def _backward_keys(
    q, k, v, dout, lse, delta, dk, dv, qb, qh, qs, kb, kh, ks, db, dh, ds, scale, scale_log2, heads, group, length,
    D: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Tile of keys of one kv head: dk and dv."""
    begin = tl.program_id(0) * N
    heads_kv = heads // group
    batch, head_kv = tl.program_id(1) // heads_kv, tl.program_id(1) % heads_kv
    cols = begin + tl.arange(0, N)
    key = tl.load(_rows(k, kb, kh, ks, batch, head_kv, cols, D))
    value = tl.load(_rows(v, kb, kh, ks, batch, head_kv, cols, D))
    sum_k, sum_v = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    for head in range(head_kv * group, head_kv * group + group):
        stats = (batch * heads + head) * length
        for start in range(begin // M * M if CAUSAL else 0, length, M):
            rows = start + tl.arange(0, M)
            query = tl.load(_rows(q, qb, qh, qs, batch, head, rows, D))
            do = tl.load(_rows(dout, db, dh, ds, batch, head, rows, D))
            s = tl.dot(key, tl.trans(query)) * scale_log2  # transposed: keys x queries
            p = tl.exp2(s - tl.load(lse + stats + rows)[None, :])
            if CAUSAL:
                p = tl.where(rows[None, :] >= cols[:, None], p, 0.0)
            sum_v = tl.dot(p.to(do.dtype), do, sum_v)
            dp = tl.dot(value, tl.trans(do))
            sum_k = tl.dot((p * (dp - tl.load(delta + stats + rows)[None, :])).to(query.dtype), query, sum_k)
    tl.store(_rows(dk, kb, kh, ks, batch, head_kv, cols, D), (sum_k * scale).to(key.dtype))
    tl.store(_rows(dv, kb, kh, ks, batch, head_kv, cols, D), sum_v.to(key.dtype))


@triton.autotune(BACKWARD_DQ, key=KEY)
@triton.jit
def _backward_queries(
    q, k, v, dout, lse, delta, dq, qb, qh, qs, kb, kh, ks, db, dh, ds, scale, scale_log2, heads, group, length,
    D: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Tile of queries of one head: dq."""
    begin = tl.program_id(0) * M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = begin + tl.arange(0, M)
    query = tl.load(_rows(q, qb, qh, qs, batch, head, rows, D))
    do = tl.load(_rows(dout, db, dh, ds, batch, head, rows, D))
    row_lse = tl.load(lse + tl.program_id(1) * length + rows)[:, None]
    row_delta = tl.load(delta + tl.program_id(1) * length + rows)[:, None]
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, begin + M if CAUSAL else length, N):
        cols = start + tl.arange(0, N)
        key = tl.load(_rows(k, kb, kh, ks, batch, head // group, cols, D))
        value = tl.load(_rows(v, kb, kh, ks, batch, head // group, cols, D))
        p = tl.exp2(tl.dot(query, tl.trans(key)) * scale_log2 - row_lse)
        if CAUSAL:
            p = tl.where(rows[:, None] >= cols[None, :], p, 0.0)
        acc = tl.dot((p * (tl.dot(do, tl.trans(value)) - row_delta)).to(key.dtype), key, acc)
    tl.store(_rows(dq, qb, qh, qs, batch, head, rows, D), (acc * scale).to(query.dtype))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        batch, heads, length, head_dim = q.shape
        group = heads // k.shape[1]
        out, lse = torch.empty_like(q), q.new_empty(batch, heads, length, dtype=torch.float32)

        def grid(meta: dict[str, int]) -> tuple[int, int]:
            return triton.cdiv(length, meta["M"]), batch * heads

        _forward[grid](
            q, k, v, out, lse, *q.stride()[:3], *k.stride()[:3], scale * LOG2E, heads, group, length, head_dim,
            causal
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale = ctx.settings
        batch, heads, length, head_dim = q.shape
        heads_kv = k.shape[1]
        delta, dq, dk, dv = (
            torch.empty_like(lse),
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
        )
        _delta[length // 128, batch * heads](
            out, dout, delta, *out.stride()[:3], *dout.stride()[:3], heads, length, head_dim, 128
        )
        strides = (*q.stride()[:3], *k.stride()[:3], *dout.stride()[:3])
        rest = (*strides, scale, scale * LOG2E, heads, heads // heads_kv, length, head_dim, causal)
        _backward_keys[lambda meta: (triton.cdiv(length, meta["N"]), batch * heads_kv)](
            q, k, v, dout, lse, delta, dk, dv, *rest
        )
        _backward_queries[lambda meta: (triton.cdiv(length, meta["M"]), batch * heads)](
            q, k, v, dout, lse, delta, dq, *rest
        )
        return dq, dk, dv, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """out, shaped and laid out like q (B, Hq, S, D); k, v (B, Hkv, S, D) in one layout. See the module.

    Raises ValueError for a shape or layout that it cannot take.
    """
    if q.shape[2] != k.shape[2] or q.shape[2] % 128:
        raise ValueError(f"q, k: {q.shape[2]} and {k.shape[2]} rows; takes equal multiples of 128")
    if q.shape[3] not in (16, 32, 64, 128):
        raise ValueError(f"q: head_dim {q.shape[3]}; takes 16, 32, 64 and 128")
    if q.stride(3) != 1 or k.stride(3) != 1 or k.stride() != v.stride():
        raise ValueError("q, k, v: rows must be contiguous, and k and v laid out alike")
    return _Attention.apply(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale)
