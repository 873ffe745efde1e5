"""`flash_attn_func` and `flash_attn_varlen_func`: the signatures and semantics of flash-attn 2, on our kernels.

Unsupported features (dropout, paged keys) raise a ValueError that names the argument.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnforge.runtime.inputs import (
    DTYPES,
    MAX_INDEX,
    expect_integers,
    expect_layout,
    expect_number,
    expect_tensors,
)
from attnforge.runtime.kernels import with_index
from attnforge.runtime.masks import Causal, Spans, load_operators, stream_id, transient
from attnforge.runtime.ops import attention
from attnforge.runtime.scores import Score, alibi
from attnforge.runtime.scores import softcap as softcap_of

# As flash-attn: out, or with return_attn_probs (out, lse, None); without dropout it has no probabilities.
Result = Any

_KEPT = 4  # masks of windows; a model uses one or two


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (B, Sq, Hq, D) on k, v (B, Sk, Hkv, D) -> (B, Sq, Hq, D), differentiable, without copies.

    causal: bottom-right aligned: key j is visible to query i if j <= i + Sk - Sq. A row that sees no key gives zeros.
    window_size: (left, right), key j is visible when i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1: no limit.
    softcap: softcap * tanh(score / softcap), 0 for none. alibi_slopes: float32 (Hq) or (B, Hq), differentiable:
        score - slope * |i + Sk - Sq - j|.
    return_attn_probs: return (out, lse, None), lse float32 (B, Hq, Sq), differentiable.
    Dtypes, head dims and GQA as in `attnforge.attention`.
    Raises ValueError or TypeError naming an unsupported argument.
    """
    _refuse(dropout_p)
    expect_layout("(batch, seq, heads, head_dim)", q=q, k=k, v=v)
    slanted = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, "batch", q.shape[0], q.shape[2])
        slanted = alibi(alibi_slopes, k.shape[1] - q.shape[1])
    score = score_of(softcap, slanted)
    mask = band(q.shape[1], k.shape[1], sides_of(causal, window_size), q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    given: dict[str, Any] = {"scale": softmax_scale, "deterministic": deterministic, "score": score}
    if not return_attn_probs:
        return attention(q, k, v, mask, **given).transpose(1, 2)
    out, lse = attention(q, k, v, mask, return_lse=True, **given)
    return out.transpose(1, 2), lse, None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention inside documents that are packed end to end: q (Tq, Hq, D), k, v (Tk, Hkv, D) -> (Tq, Hq, D).

    cu_seqlens_q, cu_seqlens_k: int32 (documents + 1) on the device of q; document d has the queries
        cu_seqlens_q[d] to cu_seqlens_q[d + 1], and the keys likewise. They are not read on the host. Each call makes
        a mask from them on the device, in a few microseconds; one attnforge.Spans for all layers of a step saves that.
    causal: bottom-right aligned in each document. Rows that see no key, and rows after the last document, give zeros.
        All rows have to be finite, also those after the last document.
    window_size: as for `flash_attn_func`, in each document.
    softcap: as for `flash_attn_func`. alibi_slopes: float32 (Hq) or (documents, Hq), differentiable; positions count
        within each document, the last query at the last key. One (Hq) with the same tensor for cu_seqlens_q and
        cu_seqlens_k costs least: then distances are those of the packed tokens.
    return_attn_probs: return (out, lse, None), lse float32 (Hq, Tq), differentiable.
    max_seqlen_q, max_seqlen_k: ignored.

    Raises ValueError or TypeError naming an unsupported argument.
    """
    _refuse(dropout_p)
    if block_table is not None:
        raise ValueError("block_table: paged keys are not supported; pass None")
    expect_layout("(tokens, heads, head_dim)", q=q, k=k, v=v)
    mask = documents(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal, window_size)
    slanted = None
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, "documents", cu_seqlens_q.numel() - 1, q.shape[1])
        slanted = alibi_of_documents(alibi_slopes, cu_seqlens_q, cu_seqlens_k, q.shape[0])
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    given: dict[str, Any] = {"scale": softmax_scale, "deterministic": deterministic}
    given["score"] = score_of(softcap, slanted)
    if not return_attn_probs:
        return attention(q, k, v, mask, **given).squeeze(0).transpose(0, 1)
    out, lse = attention(q, k, v, mask, return_lse=True, **given)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), None


def _refuse(dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: got {dropout_p}, only 0.0 is supported")


def _check_slopes(slopes: Tensor, what: str, count: int, heads: int) -> None:
    """Raises ValueError or TypeError unless alibi_slopes are (heads) or (count, heads), as flash-attn expects."""
    expect_tensors(alibi_slopes=slopes)
    if tuple(slopes.shape) not in ((heads,), (count, heads)):
        raise ValueError(
            f"alibi_slopes: got shape {tuple(slopes.shape)}, expected (heads_q) = {(heads,)} or "
            f"({what}, heads_q) = {(count, heads)}"
        )
    if slopes.dtype not in DTYPES:
        raise ValueError(
            f"alibi_slopes: got dtype {slopes.dtype}, accepted are float32, bfloat16 and float16"
        )


def alibi_of_documents(slopes: Tensor, cu_q: Tensor, cu_k: Tensor, total_q: int) -> Score:
    """score - slope * |i + Sk - Sq - j| of packed documents, i and j within the document, Sq and Sk its lengths.

    slopes: (Hq) or (documents, Hq), float32 or bfloat16. cu_q, cu_k: int32 (documents + 1). total_q: rows of q. Query
    row r of the pack is at r + cu_k[d + 1] - cu_q[d + 1] among the packed keys, if it is of document d. Nothing is
    read on the host.
    """
    count = cu_q.numel() - 1
    plain = alibi(slopes)
    if total_q == 0 or (slopes.dim() == 1 and cu_q is cu_k):
        return plain if slopes.dim() == 1 else alibi(slopes[0])
    rows = torch.arange(total_q, dtype=torch.int32, device=cu_q.device)
    # Rows after the last document see no key: any document does for them.
    document = torch.searchsorted(cu_q, rows, right=True).clamp(1, count) - 1
    shift = (cu_k - cu_q)[1:][document]
    dtype = plain.text.partition("t0: ")[2].partition("[")[0]
    moved = "abs(q_idx + t1[q_idx] - kv_idx)"
    if slopes.dim() == 1:
        text = f"alibi(t0: {dtype}[1], t1: int32[1]): score - t0[h] * {moved}"
        return Score(text, (*plain.tensors, shift))
    text = f"alibi(t0: {dtype}[2], t1: int32[1], t2: int32[1]): score - t0[t2[q_idx], h] * {moved}"
    return Score(text, (*plain.tensors, shift, document.int()))


def score_of(softcap: float, slanted: Score | None) -> Score | None:
    """The function of flash-attn's arguments: the cap first, 0 for none, then ALiBi."""
    expect_number("softcap", softcap, optional=False)
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"softcap: got {softcap}, expected a number above 0, or 0 for none")
    capped = softcap_of(softcap) if softcap != 0.0 else None
    if slanted is None or capped is None:
        return slanted or capped
    head, _, formula = slanted.text.partition(": score ")
    cap = capped.text.removeprefix("softcap: ")
    return Score(f"softcap_{head}: {cap} {formula}", slanted.tensors)


class Sides(NamedTuple):
    """Number of visible keys left and right of a query's diagonal, bottom-right aligned; -1: no limit."""

    left: int
    right: int


def sides_of(causal: bool, window_size: tuple[int, int]) -> Sides:
    """The sides of flash-attn's arguments: a negative size is no limit, causal is 0 on the right."""
    if type(window_size) is not tuple or tuple(map(type, window_size)) != (int, int):
        expect_integers("window_size", window_size, "(left, right), two integers")
        if len(window_size) != 2:
            raise ValueError(f"window_size: got {len(window_size)} entries, expected (left, right)")
    # A side beyond int32 shows all keys.
    left, right = (min(max(int(side), -1), MAX_INDEX) for side in window_size)
    return Sides(left, 0 if causal else right)


def band(seq_q: int, seq_k: int, sides: Sides, device: torch.device) -> Causal | Spans | None:
    """The mask of unpacked sequences. Masks of windows are kept for the next call with the same lengths."""
    if sides.left < 0 and sides.right <= 0:
        return Causal() if sides.right == 0 else None
    device = with_index(device)
    if transient():
        return _make_band(seq_q, seq_k, sides, device)
    return _kept_band(seq_q, seq_k, sides, device, stream_id(device))


@lru_cache(maxsize=_KEPT)
def _kept_band(seq_q: int, seq_k: int, sides: Sides, device: torch.device, stream: int) -> Spans:
    return _make_band(seq_q, seq_k, sides, device)


def _make_band(seq_q: int, seq_k: int, sides: Sides, device: torch.device) -> Spans:
    cu_q, cu_k = (torch.arange(2, dtype=torch.int32, device=device) * n for n in (seq_q, seq_k))
    load_operators()
    data = torch.ops.attnforge.mask_of_documents(cu_q, cu_k, seq_q, seq_k, *sides)
    left, right = (side if side >= 0 else seq_k // 2 for side in sides)
    return Spans._of(data, min(left + right + 1, seq_k))


def documents(
    cu_q: Tensor,
    cu_k: Tensor,
    total_q: int,
    total_k: int,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Spans:
    """The mask of packed documents, made on the device from cu_q, cu_k int32 (documents + 1) without a host sync.

    total_q, total_k: rows of q and of k. Rows after the last document see nothing and are hidden.
    Raises ValueError naming cu_seqlens_q or cu_seqlens_k.
    """
    _check(cu_q, cu_k)
    sides = sides_of(causal, window_size)
    load_operators()
    return Spans._of(torch.ops.attnforge.mask_of_documents(cu_q, cu_k, total_q, total_k, *sides), None)


def _check(cu_q: Tensor, cu_k: Tensor) -> None:
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor, torch.int32 (documents + 1)")
        if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] < 2:
            raise ValueError(
                f"{name}: got {x.dtype} of shape {tuple(x.shape)}, expected torch.int32 (documents + 1)"
            )
    if cu_q.shape != cu_k.shape or cu_q.device != cu_k.device:
        raise ValueError(
            f"cu_seqlens_k: got {cu_k.shape[0]} entries on {cu_k.device}, expected as cu_seqlens_q: "
            f"{cu_q.shape[0]} on {cu_q.device}"
        )
