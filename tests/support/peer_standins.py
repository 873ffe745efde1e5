"""Exact stand-ins of the peers of a layer on the CPU: FlashAttention-3's varlen operators, and the module `cudnn`.

They compute in float64 from what they are given, and write what the real ones write: no row beyond a sequence's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex


class Varlen:
    """The operators `fwd` and `bwd` of torch.ops.flash_attn_3 for sequences with `seqused_q`."""

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, num_splits: int, **options: Any
    ) -> tuple[Tensor, Tensor, None, None]:
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float64)
        for rows, keys, seen in sequences(q, k, **options):
            scores = _scores(q[rows], k[keys], seen)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = _heads_last(scores.softmax(-1) @ _heads_first(v[keys], q)).to(out.dtype)
        return out, lse, None, None

    def bwd(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        for rows, keys, seen in sequences(q, k, **options):
            p = (_scores(q[rows], k[keys], seen) - softmax_lse[:, rows, None]).exp()
            of_out = _heads_first(dout[rows], q)
            delta = (of_out * _heads_first(out[rows], q)).sum(-1, keepdim=True)
            ds = p * (of_out @ _heads_first(v[keys], q).mT - delta) / math.sqrt(q.shape[2])
            dq[rows] = _heads_last(ds @ _heads_first(k[keys], q)).to(dq.dtype)
            for to, heads in ((dk, ds.mT @ _heads_first(q[rows], q)), (dv, p.mT @ of_out)):
                to[keys] = _heads_last(heads.unflatten(0, (k.shape[1], -1)).sum(1)).to(to.dtype)
        return dq, dk, dv


def sequences(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of q, rows of k, and the visible pairs of each sequence; causal at the bottom right."""
    assert {x.dtype for x in (cu_seqlens_q, cu_seqlens_k, seqused_q)} == {torch.int32}
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(seqused_q) + 1
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k))
    sizes_k = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (int(seqused_q.max()), int(sizes_k.max()))
    assert bool((seqused_q <= cu_seqlens_q.diff()).all())  # else a sequence takes rows of the next one
    for start, used, begin, size in zip(
        cu_seqlens_q.tolist(), seqused_q.tolist(), cu_seqlens_k.tolist(), sizes_k.tolist(), strict=False
    ):
        seen = torch.ones(used, size, dtype=torch.bool)
        if is_causal:
            seen = seen.tril(size - used)
        yield slice(start, start + used), slice(begin, begin + size), seen


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = _heads_first(q, q) @ _heads_first(k, q).mT / math.sqrt(q.shape[2])
    return scores.masked_fill(~seen, -torch.inf)


def _heads_first(x: Tensor, q: Tensor) -> Tensor:
    """(heads of q, rows, head_dim), float64."""
    return x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0)


def _heads_last(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of (T, heads, head_dim) under a mask (T, T), in float64 and with torch's own gradients."""
    scores = _scores(q, k, seen)
    return _heads_last(scores.softmax(-1) @ _heads_first(v, q)).to(q.dtype)


def covered(ends: Tensor, keys: int) -> Tensor:
    """The mask (rows, keys) of endpoints int32 (1, n, rows): [0, F0), [F1, F2), ..."""
    assert (ends.dtype, ends.dim(), ends.shape[0], ends.shape[1] % 2) == (torch.int32, 3, 1, 1)
    assert ends.is_contiguous()
    assert bool((ends.diff(dim=1) >= 0).all())
    return (ends[0, :, :, None] <= torch.arange(keys)).sum(0) % 2 == 0


def cudnn() -> Any:
    """The module `cudnn`, as far as `cudnn_flex` uses it."""

    def create_mask_plan(ends: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Any:
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return SimpleNamespace(ends=ends, sizes=[(x.shape, x.dtype) for x in (q, k, v)], back=build_backward)

    def flex_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Any, softmax_scale: float | None
    ) -> Tensor:
        assert [(x.shape, x.dtype) for x in (q, k, v)] == mask_plan.sizes
        assert mask_plan.back
        assert softmax_scale is None
        return dense(q[0], k[0], v[0], covered(mask_plan.ends, k.shape[1]))[None]

    return SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)


def install(monkeypatch: Any) -> None:
    """Takes both in place of the real ones."""
    monkeypatch.setattr("attnforge.bagel.measure.fa3.operators", Varlen)
    monkeypatch.setattr(cudnn_flex, "installed", lambda: True)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn())
