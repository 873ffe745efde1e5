"""`flash_attn_func` and `flash_attn_varlen_func`: the signatures and semantics of flash-attn 2, on our kernels.

What we do not have (dropout, softcap, ALiBi, paged keys, returned probabilities) raises a ValueError that names
the argument; nothing is ignored.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnforge.runtime.inputs import expect_integers, expect_layout
from attnforge.runtime.masks import Causal, Spans
from attnforge.runtime.ops import attention

_KEPT = 32  # document masks; a training step has one or two


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
) -> Tensor:
    """Attention of q (B, Sq, Hq, D) on k, v (B, Sk, Hkv, D) -> (B, Sq, Hq, D), differentiable, uncopied.

    causal: bottom-right aligned, key j is visible to query i when j <= i + Sk - Sq; a row that sees no key
        gives zeros.
    window_size: (left, right), key j is visible when i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1: no limit.
    Dtypes, head dims and GQA as in `attnforge.attention`, which raises for what it cannot take.
    Raises ValueError, or TypeError, naming an argument with a value that is not supported.
    """
    _refuse(dropout_p, softcap, alibi_slopes, return_attn_probs)
    expect_layout("(batch, seq, heads, head_dim)", q=q, k=k, v=v)
    mask = band(q.shape[1], k.shape[1], sides_of(causal, window_size), q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return attention(q, k, v, mask, scale=softmax_scale, deterministic=deterministic).transpose(1, 2)


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
) -> Tensor:
    """Attention inside documents that are packed end to end: q (Tq, Hq, D), k, v (Tk, Hkv, D) -> (Tq, Hq, D).

    cu_seqlens_q, cu_seqlens_k: int32 (documents + 1) on the device of q; document d has the queries
        cu_seqlens_q[d] to cu_seqlens_q[d + 1] and the keys likewise. They are never read on the host; the mask
        made of them is kept while the same two tensors come in unchanged (all layers of a step).
    causal: bottom-right aligned in each document. Rows that see no key, also those behind the last document,
        give zeros.
    window_size: as for `flash_attn_func`, in each document.
    max_seqlen_q, max_seqlen_k: not needed here, and not looked at.

    Raises ValueError, or TypeError, naming an argument with a value that is not supported.
    """
    _refuse(dropout_p, softcap, alibi_slopes, return_attn_probs)
    if block_table is not None:
        raise ValueError("block_table: paged keys are not supported; pass None")
    expect_layout("(tokens, heads, head_dim)", q=q, k=k, v=v)
    mask = documents(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal, window_size)
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return attention(q, k, v, mask, scale=softmax_scale, deterministic=deterministic)[0].transpose(0, 1)


def _refuse(
    dropout_p: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: got {dropout_p}, only 0.0 is supported")
    if softcap != 0.0:
        raise ValueError(f"softcap: got {softcap}, only 0.0, no cap, is supported")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes: ALiBi is not supported; pass None")
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs: not supported; attnforge.attention(..., return_lse=True) returns the lse"
        )


class Sides(NamedTuple):
    """Keys that a query sees beside the one on its diagonal, bottom-right aligned; -1: all on that side."""

    left: int
    right: int


def sides_of(causal: bool, window_size: tuple[int, int]) -> Sides:
    """flash-attn's arguments: any negative size is all, and causal is nothing to the right."""
    if type(window_size) is not tuple or len(window_size) != 2:
        expect_integers("window_size", window_size, "(left, right), two integers")
        if len(window_size) != 2:
            raise ValueError(f"window_size: got {len(window_size)} entries, expected (left, right)")
    left, right = (max(int(side), -1) for side in window_size)
    return Sides(left, 0 if causal else right)


def band(seq_q: int, seq_k: int, sides: Sides, device: torch.device) -> Causal | Spans | None:
    """The mask of unpacked sequences; of windows once for the same lengths, not in a trace."""
    if sides.left < 0 and sides.right <= 0:
        return Causal() if sides.right == 0 else None
    if torch.compiler.is_compiling():
        return _make_band(seq_q, seq_k, sides, device)
    if device.type != "cuda":
        return _kept_band(seq_q, seq_k, sides, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return _make_band(seq_q, seq_k, sides, device)
    return _kept_band(seq_q, seq_k, sides, device, torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=_KEPT)
def _kept_band(seq_q: int, seq_k: int, sides: Sides, device: torch.device, stream: int) -> Spans:
    with torch.inference_mode(False), torch.no_grad():
        return _make_band(seq_q, seq_k, sides, device)


def _make_band(seq_q: int, seq_k: int, sides: Sides, device: torch.device) -> Spans:
    diagonal = torch.arange(seq_q - seq_k, seq_q, dtype=torch.int32, device=device)
    left, right = (side if side >= 0 else seq_k // 2 for side in sides)
    return Spans(*_queries_of(diagonal, seq_q, sides), visible_keys=min(left + right + 1, seq_k))


def _queries_of(diagonal: Tensor, length: Any, sides: Sides) -> tuple[Tensor, Tensor]:
    """Queries [start, end) of `length` that see a key, given the query that has the key on its diagonal."""
    start = (diagonal - sides.right).clamp(min=0) if sides.right >= 0 else torch.zeros_like(diagonal)
    end = (diagonal + sides.left + 1).clamp(min=0) if sides.left >= 0 else torch.zeros_like(diagonal) + length
    return start, torch.minimum(end, torch.zeros_like(end) + length)


class _Key(NamedTuple):
    cu_q: int  # id; the value's weak references tell whether it is still that tensor
    cu_k: int
    versions: tuple[int, int]
    total_q: int
    total_k: int
    sides: Sides
    stream: int  # work queued on one stream is not ordered before readers on another


_Value = tuple["weakref.ref[Tensor]", "weakref.ref[Tensor]", Spans]
_masks: OrderedDict[_Key, _Value] = OrderedDict()
_lock = threading.Lock()


def documents(
    cu_q: Tensor,
    cu_k: Tensor,
    total_q: int,
    total_k: int,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Spans:
    """The mask of packed documents, built on the device of cu_q, cu_k int32 (documents + 1) without a sync.

    total_q, total_k: rows of q and of k; what lies behind the last document sees and is seen by nothing.
    Raises ValueError naming cu_seqlens_q or cu_seqlens_k.
    """
    _check(cu_q, cu_k)
    sides = sides_of(causal, window_size)
    if not _cacheable(cu_q, cu_k):
        return _build(cu_q, cu_k, total_q, total_k, sides)
    stream = torch.cuda.current_stream(cu_q.device).cuda_stream if cu_q.is_cuda else 0
    key = _Key(id(cu_q), id(cu_k), (cu_q._version, cu_k._version), total_q, total_k, sides, stream)
    with _lock:
        found = _masks.get(key)
        if found is not None and found[0]() is cu_q and found[1]() is cu_k:
            _masks.move_to_end(key)
            return found[2]
    # Never as inference tensors: a later step that is recorded for backward may find them here.
    with torch.inference_mode(False), torch.no_grad():
        mask = _build(cu_q, cu_k, total_q, total_k, sides)
    with _lock:
        _masks[key] = (weakref.ref(cu_q), weakref.ref(cu_k), mask)
        while len(_masks) > _KEPT:
            _masks.popitem(last=False)
    return mask


def _cacheable(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return False  # a trace has no tensors; inference tensors have no version counter
    if any(type(x) is not Tensor for x in tensors):
        return False  # fake and other wrapped tensors
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


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


def _build(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, sides: Sides) -> Spans:
    options: Any = {"dtype": torch.int32, "device": cu_q.device}
    key = torch.arange(total_k, **options)
    # right: steps over documents without keys. Keys behind the last document are taken out below.
    document = torch.searchsorted(cu_k[1:].contiguous(), key, right=True).clamp(max=cu_k.shape[0] - 2)
    first, last = cu_q[document], cu_q[document + 1].clamp(max=total_q)
    # The last key of a document is on the diagonal of its last query, the one before it of the one before, ...
    starts, ends = _queries_of(key - cu_k[document + 1] + (last - first), last - first, sides)
    real = key < cu_k[-1]
    return Spans(torch.where(real, first + starts, 0), torch.where(real, first + ends, 0))
