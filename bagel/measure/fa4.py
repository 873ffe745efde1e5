"""FlashAttention-4 (package flash-attn-4, `flash_attn.cute`) as a peer: dense, causal, and documents as varlen."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.packing import PackedMask
from attnforge.runtime import mask_patterns
from attnforge.runtime.masks import Causal, Spans
from attnforge.runtime.search.case import Case


def installed() -> bool:
    """Whether flash-attn-4 is installed; does not import it."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def require() -> None:
    """Raises Unavailable without flash-attn-4."""
    if not installed():
        raise Unavailable("flash-attn-4 is not installed")


def attention(case: Case, pack_gqa: bool | None = None, **options: Any) -> Attention:
    """FA4 on a case; `pack_gqa` folds the query heads of a group into the rows of a tile (None: its own choice).

    `options`: more arguments of FA4's functions, such as softcap. Raises Unavailable without the package, or for a mask
    that is neither full, causal, a window nor whole documents.
    """
    require()
    return attention_by(importlib.import_module("flash_attn.cute"), case, pack_gqa, **options)


def attention_by(module: Any, case: Case, pack_gqa: bool | None = None, **options: Any) -> Attention:
    """The same by the functions of any module of FlashAttention 3 or 4; `options` are theirs."""
    if isinstance(case.mask, Spans):
        window = window_of(case.mask, case.seq_q)
        if window is None:
            return _varlen(module.flash_attn_varlen_func, case, pack_gqa, **options)
        options["window_size"] = window
    elif not (case.mask is None or isinstance(case.mask, Causal)):
        raise Unavailable("takes no mask")
    causal = isinstance(case.mask, Causal)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = module.flash_attn_func(
            q, k, v, softmax_scale=case.scale, causal=causal, pack_gqa=pack_gqa, **options
        )
        return _first(out).transpose(1, 2)

    return call


def _varlen(function: Any, case: Case, pack_gqa: bool | None, **options: Any) -> Attention:
    lengths, causal = documents(case.mask)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(case.device)
    sizes = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = function(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            softmax_scale=case.scale,
            causal=causal,
            pack_gqa=pack_gqa,
            **sizes,
            **options,
        )
        return _first(out).transpose(0, 1)[None]

    return call


def window_of(mask: Spans, seq_q: int) -> tuple[int, int] | None:
    """(left, right) of the sliding window of as many queries as keys that the mask is, or None. See `masks.window`."""
    length = mask.seq_k
    if isinstance(mask, PackedMask) or mask.data.dim() > 2 or seq_q != length or not length:
        return None
    starts, ends = mask.starts, mask.ends
    left, right = int(ends[0]) - 1, length - 1 - int(starts[-1])
    if min(left, right) < 0:
        return None
    same = mask_patterns.window(length, length, left, right, mask.device)
    return (left, right) if torch.equal(starts, same.starts) and torch.equal(ends, same.ends) else None


def documents(mask: object) -> tuple[list[int], bool]:
    """Lengths of the documents of a pack, and whether all are causal; Unavailable where varlen is not enough."""
    if not isinstance(mask, PackedMask):
        raise Unavailable("takes no mask")
    splits = [split for split in mask.splits if split.end > split.start]
    modes = {split.mode for split in splits}
    whole = len({split.sample for split in splits}) == len(splits) and mask.used == splits[-1].end
    if not (whole and (modes == {"causal"} or modes <= {"full", "noise"})):
        raise Unavailable("takes no mask")
    return [split.end - split.start for split in splits], modes == {"causal"}


def _first(result: Any) -> Tensor:
    """FA4 returns (out, lse), lse perhaps None; FA3 out, or both."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
