"""The public operator: `attention`, and its two halves for those who time or check a given variant.

Everything below the wrapper is C++ (runtime/native/launcher.cpp): a warm call spends microseconds in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnforge.runtime.inputs import MASKS, expect_flags, expect_number, expect_tensors
from attnforge.runtime.masks import Causal, DenseMask, Spans, load_operators

Mask = Causal | Spans | DenseMask | None

_CODES = {mask: code for code, mask in enumerate(MASKS)}
_FULL, _CAUSAL, _SPANS, _DENSE = (_CODES[kind] for kind in MASKS)
# Empty until they are loaded. Kept because finding it takes half of the look-up.
_operators = torch.ops.attnforge


def _first(name: str) -> Callable[..., Tensor]:
    """What an operator is called by until it is loaded. Later calls skip its look-up and `OpOverload.__call__`."""

    def call(*arguments: object) -> Tensor:
        global _attend, _attend_full, _attend_causal, _attend_spans
        load_operators()
        _attend, _attend_full = _operators.attend.default._op, _operators.attend_full.default._op
        _attend_causal, _attend_spans = (
            _operators.attend_causal.default._op,
            _operators.attend_spans.default._op,
        )
        out: Tensor = getattr(_operators, name).default(*arguments)
        return out

    return call


_attend = _first("attend")
# Not deterministic: an argument costs some 100 ns, whether it is passed or left out.
_attend_full, _attend_causal, _attend_spans = (
    _first(f"attend_{kind}") for kind in ("full", "causal", "spans")
)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, differentiable in q, k and v.

    q: (B, Hq, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv); float32 (never less exact), bfloat16 or, on a
        GPU, float16; any strides with a unit last one. Query head h reads key head h // (Hq / Hkv). A packed
        (T, H, D) goes in as x.transpose(0, 1)[None], uncopied. D and Dv: 1 to 256.
    mask: None (all pairs), Causal(), Spans(starts, ends) or DenseMask(bool tensor). A row that sees no key gives
        zeros, and zero gradients.
    scale: multiplies q k^T; above 0, as float32 holds it (kernels take the nearest in 1e-30 to 2e38); None: D ** -0.5.
    deterministic: gradients are the same bits on every run; torch.use_deterministic_algorithms(True) implies it. With
        warn_only=True it does not: as with torch's own kernels, a backward that adds in any order warns, once.

    Returns out (B, Hq, Sq, Dv) in the layout and dtype of q; with return_lse also the natural log of the softmax
    denominator, float32 (B, Hq, Sq), -inf for a row that sees no key, differentiable, too. Under autocast inputs are
    cast as those of scaled_dot_product_attention. Without queries the result is empty, without keys it is zeros.
    Finite inputs give finite results where q k^T and dout v^T fit float32. A row whose |lse| is above 2^22 (4e6) gets
    zero gradients: float32 holds no fraction of its lse.
    Raises ValueError or TypeError naming the argument; never falls back to something slow.
    What the two passes keep and allocate: docs/training.md, "Memory".
    """
    if scale is True or scale is False:
        expect_number("scale", scale)
    if is_compiling():
        return _traced(q, k, v, mask, scale, return_lse, deterministic)
    try:
        if return_lse:
            return forward(q, k, v, mask, scale, deterministic=deterministic)
        if not deterministic:  # scale last, and only if there is one
            if mask is None:
                return _attend_full(q, k, v) if scale is None else _attend_full(q, k, v, scale)
            if isinstance(mask, Causal):
                return _attend_causal(q, k, v) if scale is None else _attend_causal(q, k, v, scale)
            if isinstance(mask, Spans):
                if scale is None:
                    return _attend_spans(q, k, v, mask.data, mask.bucket)
                return _attend_spans(q, k, v, mask.data, mask.bucket, scale)
        data, kind, visible = _unpack(mask, q, k)
        return _attend(q, k, v, scale, deterministic, kind, data, visible)
    except (RuntimeError, ValueError):
        return _on_refusal(q, k, v, mask, scale, return_lse, deterministic)


def _traced(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` in a trace."""
    if _have_dtensor(q, k, v):
        return _on_dtensors(q, k, v, mask, scale, return_lse, deterministic)
    out, lse = forward(q, k, v, mask, scale, deterministic=deterministic)
    return (out, lse) if return_lse else out


def _on_refusal(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What `attention` does with a call that the operators refused: DTensors go another way, others raise."""
    if _have_dtensor(q, k, v):
        return _on_dtensors(q, k, v, mask, scale, return_lse, deterministic)
    # For an argument of a wrong type torch has words of its own, about operators that nobody has heard of.
    expect_tensors(q=q, k=k, v=v)
    expect_number("scale", scale)
    expect_flags(return_lse=return_lse, deterministic=deterministic)
    raise


def _on_dtensors(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    from attnforge.runtime.distributed.dtensor import (
        attention_on_dtensors,  # imports torch.distributed.tensor
    )

    return attention_on_dtensors(
        attention, q, k, v, mask, scale=scale, return_lse=return_lse, deterministic=deterministic
    )


def _have_dtensor(*tensors: object) -> bool:
    """Whether one is a DTensor, without importing what takes a second to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None = None,
    variant: int = 0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the variant of handle `variant` (see kernels.load), 0 = dispatch. Else as `attention`."""
    load_operators()
    data, kind, visible = _unpack(mask, q, k)
    result: tuple[Tensor, Tensor] = _operators.forward.default(
        q, k, v, data, kind, scale, deterministic, visible, variant
    )
    return result


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float | None = None,
    deterministic: bool = False,
    variant: int = 0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the layouts of q, k and v, given what `forward` returned. `variant` as there.

    dlse: gradient of lse, float32 (B, Hq, Sq); None for zero.

    Besides these, on a GPU, until the return, in bytes, with n and m for Sq and Sk rounded up to the variant's tiles:
    4 B Hq n D for sums of dq, none in float32; 8 B Hq n for row statistics, 32 B Hq n in Hopper's 16-bit kernels; with
    the knob `split_heads` 4 B Hkv m (D + Dv) for sums of dk and dv; with ordered sums 4 B (Hq n / tile_m +
    Hkv m / tile_n) for turns. Odd head dims are rounded up to what warps share. See docs/training.md, "Memory".
    """
    load_operators()
    data, kind, visible = _unpack(mask, q, k)
    result: tuple[Tensor, Tensor, Tensor] = _operators.backward.default(
        dout, q, k, v, out, lse, data, kind, scale, deterministic, visible, dlse, variant
    )
    return result


def _unpack(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor | None, int, int]:
    """What the operators take of a mask: its data, its kind by number, its bucket."""
    if mask is None:
        return None, _FULL, 0
    if isinstance(mask, Spans):
        return mask.data, _SPANS, mask.bucket
    if isinstance(mask, Causal):
        return None, _CAUSAL, 0
    if isinstance(mask, DenseMask):
        # Bits come in words: the data alone does not say how many keys there are.
        if q.dim() == k.dim() == 4 and mask.shape[2:] != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"mask: has shape {mask.shape}, expected (seq_q, seq_k) = {(q.shape[2], k.shape[2])}, with planes "
                "(batch or 1, heads_q or 1) in front if it has any"
            )
        return mask.data, _DENSE, mask.bucket
    raise TypeError(
        f"mask: got {type(mask).__name__}, accepted are None, attnforge.Causal(), attnforge.Spans(...) "
        "and attnforge.DenseMask(...)"
    )
