"""The oracle: attention from its definition, in float64, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from attnforge.codegen.score import ScoreMod
from attnforge.runtime.masks import AnyMask, Causal, FunctionMask, Spans
from attnforge.runtime.sampled import apply_score, indices_of
from attnforge.runtime.scores import Score

CHUNK = 1 << 22  # scores held at a time


class Exact(NamedTuple):
    """Results in the oracle's dtype. Gradients are None without dout. R: the chosen rows, else all."""

    out: Tensor  # (B, Hq, R, Dv)
    lse: Tensor  # (B, Hq, R)
    dq: Tensor | None = None  # (B, Hq, R, D)
    dk: Tensor | None = None  # (B, Hkv, Sk, D)
    dv: Tensor | None = None  # (B, Hkv, Sk, Dv)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    scale: float | None = None,
    dout: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    rows: Tensor | None = None,
    score: Score | None = None,
    operands: torch.dtype | None = None,
) -> Exact:
    """Attention of q (B, Hq, Sq, D) on k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); with `dout` (B, Hq, Sq, Dv) gradients.

    `rows` (R) restricts the work to those query rows; dk and dv are then their contributions only. `operands`: round
    P, dS and what delta reads of out to this dtype, as kernels do before their products. Memory: CHUNK scores at
    a time, never seq_q x seq_k. Rows that see no key: out 0, lse -inf, gradients 0.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
    group = q.shape[1] // k.shape[1]
    keys, values = k.to(dtype), v.to(dtype)
    queries = q[:, :, rows].to(dtype)
    gradient = None if dout is None else dout[:, :, rows].to(dtype)
    lse = queries.new_empty(queries.shape[:3])
    out = queries.new_zeros(*lse.shape, v.shape[3])
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))

    def rounded(x: Tensor) -> Tensor:
        return x if operands is None else x.to(operands).to(dtype)

    for chunk, planes in _chunks(rows, mask, q.shape, k.shape[2]):
        for b, h in product(range(q.shape[0]), range(q.shape[1])):
            # A plane for all heads, for each q head, or for each kv head.
            seen = planes[b % planes.shape[0], h * planes.shape[1] // q.shape[1]]
            query, key, value = queries[b, h, chunk], keys[b, h // group], values[b, h // group]
            scores, slope = _scored(query @ key.T * scale, score, b, h, rows[chunk])
            weights, lse[b, h, chunk] = _softmax(scores, seen & (scores != -torch.inf))
            out[b, h, chunk] = rounded(weights) @ value
            if gradient is None:
                continue
            do = gradient[b, h, chunk]
            dv[b, h // group] += rounded(weights).T @ do
            delta = (do * rounded(out[b, h, chunk])).sum(1, keepdim=True)
            ds = weights * (do @ value.T - delta) * scale
            ds = rounded((ds * slope).masked_fill(weights == 0, 0))
            dq[b, h, chunk] = ds @ key
            dk[b, h // group] += ds.T @ query
    return Exact(out, lse) if gradient is None else Exact(out, lse, dq, dk, dv)


def _scored(raw: Tensor, score: Score | None, b: int, h: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of `rows` and all keys of a head, to write to, and the derivative of their function."""
    if score is None:
        return raw, torch.ones_like(raw)
    indices = indices_of(b, h, rows, torch.arange(raw.shape[1], device=rows.device))
    value, slope = apply_score(ScoreMod(score.text), raw, indices, score.tensors)
    return value.clone(), slope


def _softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (R, Sk) of the pairs that are `seen`, and the log of each row's denominator (R). Overwrites `scores`."""
    # exp is taken relative to the row maximum, because lse loses the digits of large scores. An empty row has maximum
    # -inf, and -inf - -inf is NaN: its weights are set to 0.
    row_max = scores.masked_fill_(~seen, -torch.inf).amax(1, keepdim=True)
    weights = (scores - row_max).exp().masked_fill_(~seen, 0)
    row_sum = weights.sum(1, keepdim=True)
    return weights / row_sum.where(row_sum > 0, 1), (row_max + row_sum.log())[:, 0]


def _chunks(rows: Tensor, mask: AnyMask, q_shape: torch.Size, seq_k: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of `rows` with the pairs they see, bool (B or 1, Hq or 1, rows of the slice, seq_k)."""
    step = max(1, CHUNK // seq_k)
    for begin in range(0, rows.numel(), step):
        chunk = rows[begin : begin + step]
        yield (
            slice(begin, begin + step),
            visible_rows(mask, chunk, q_shape[2], seq_k, batch=q_shape[0], heads=q_shape[1]),
        )


def visible_rows(
    mask: AnyMask,
    rows: Tensor,
    seq_q: int,
    seq_k: int,
    batch: int | None = None,
    heads: int | None = None,
) -> Tensor:
    """The keys that the query rows `rows` (R) see, bool (B or 1, Hq, Hkv or 1, R, seq_k).

    `batch`, `heads`: where a function depends on them, see `FunctionMask.visible_rows`.
    """
    key, row = torch.arange(seq_k, device=rows.device), rows[:, None]
    if mask is None:
        seen = torch.ones(row.shape[0], seq_k, dtype=torch.bool, device=rows.device)
    elif isinstance(mask, Causal):
        seen = key <= row + (seq_k - seq_q)
    elif isinstance(mask, Spans):
        seen = mask.visible_rows(rows)
    elif isinstance(mask, FunctionMask):
        seen = mask.visible_rows(rows, batch, heads)
    else:
        seen = mask.mask.to(rows.device)[..., rows, :]
    return seen.reshape(*(seen.shape[:-2] or (1, 1)), *seen.shape[-2:])
