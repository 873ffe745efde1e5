"""The public operator `attention`, and `forward` and `backward`, which run a given kernel variant.

The operators are C++ (runtime/native/launcher.cpp); a warm call spends microseconds in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnforge.codegen.formula import MAX_TENSORS
from attnforge.runtime.inputs import (
    MASKS,
    check_score,
    expect_flags,
    expect_number,
    expect_tensors,
    have_dtensor,
)
from attnforge.runtime.masks import AnyMask, Causal, DenseMask, FunctionMask, Spans, load_operators
from attnforge.runtime.score_trace import ScoreFunction, wants_gradients
from attnforge.runtime.scores import Score, as_score
from attnforge.runtime.sinks import with_sinks

_CODES = {mask: code for code, mask in enumerate(MASKS)}
_FULL, _CAUSAL, _SPANS, _DENSE = (_CODES[kind] for kind in MASKS)
# Kept in a variable because finding the namespace takes half of an operator's look-up.
_operators = torch.ops.attnforge


def _load_then_call(name: str) -> Callable[..., Tensor]:
    """An operator at its first call: it loads them all. Later calls skip this and `OpOverload.__call__`."""

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


_attend = _load_then_call("attend")
# Without the argument `deterministic`: each argument costs about 100 ns, passed or not.
_attend_full, _attend_causal, _attend_spans = (
    _load_then_call(f"attend_{kind}") for kind in ("full", "causal", "spans")
)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    score: Score | ScoreFunction | None = None,
    sinks: Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    score: Score | ScoreFunction | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    score: Score | ScoreFunction | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score(scale * q k^T) + mask) v, differentiable in q, k and v.

    q: (B, Hq, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv). float32, bfloat16 or, on a GPU, float16; float32 is
        not reduced to tf32. Any strides, with a unit stride along head_dim. Query head h reads kv head
        h // (Hq / Hkv). Pass packed (T, H, D) as x.transpose(0, 1)[None]: no copy. D, Dv: 1-256, forward also 384, 512.
    mask: None (all pairs), Causal(), Spans(starts, ends), of up to 4 intervals a key and with planes for batch entries
        or heads, DenseMask(bool tensor), or masks.mask_mod(function). A row that sees no key gives zeros and zero
        gradients.
    scale: factor of q k^T, above 0 in float32 (kernels use the nearest value in 1e-30 to 2e38); None: D ** -0.5.
    deterministic: gradients have the same bits on every run; implied by torch.use_deterministic_algorithms(True).
    score: a function of each scaled score, see attnforge.scores. sinks: (Hq), logits that join each row's softmax
        denominator, differentiable; see `with_sinks`.

    Returns out (B, Hq, Sq, Dv) in the layout and dtype of q. With return_lse also the natural logarithm of the softmax
    denominator, float32 (B, Hq, Sq), differentiable, -inf for a row that sees no key. Under autocast, inputs are cast
    as those of scaled_dot_product_attention. Without queries the result is empty, without keys it is zeros.
    Finite inputs give finite results if q k^T and dout v^T fit float32; rows of |lse| above 2^22 get zero gradients,
    as float32 cannot hold the fraction of their lse. Memory that the backward needs: docs/attention.md, "Memory".
    Raises ValueError or TypeError naming an unsupported argument; there is no slow fallback.
    """
    if score is not None or sinks is not None:
        return _scored(q, k, v, mask, scale, return_lse, deterministic, score, sinks)
    if (scale is not None and type(scale) is not float and type(scale) is not int) or is_compiling():
        return _traced(q, k, v, mask, scale, return_lse, deterministic)
    try:
        if return_lse:
            return forward(q, k, v, mask, scale, 0, deterministic)
        if not deterministic:  # an omitted scale costs nothing
            if mask is None:
                return _attend_full(q, k, v) if scale is None else _attend_full(q, k, v, scale)
            if isinstance(mask, Causal):
                return _attend_causal(q, k, v) if scale is None else _attend_causal(q, k, v, scale)
            if isinstance(mask, Spans):
                spans = (q, k, v, mask.data, mask.visible_keys_rounded)
                return _attend_spans(*spans) if scale is None else _attend_spans(*spans, scale)
        return _attended(q, k, v, mask, scale, deterministic)
    except (RuntimeError, ValueError):
        return _on_refusal(q, k, v, mask, scale, return_lse, deterministic)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, scale: float | None, deterministic: bool
) -> Tensor:
    """`attention` with any mask."""
    if isinstance(mask, FunctionMask):
        return forward(q, k, v, mask, scale, 0, deterministic)[0]
    data, kind, visible_keys = unpack_mask(mask, q, k)
    return _attend(q, k, v, scale, deterministic, kind, data, visible_keys)


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask,
    scale: float | None,
    return_lse: bool,
    deterministic: bool,
    score: Score | ScoreFunction | None,
    sinks: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with a score function or sinks."""
    expect_tensors(q=q, k=k, v=v)
    expect_number("scale", scale)
    expect_flags(return_lse=return_lse, deterministic=deterministic)
    if have_dtensor(q, k, v):
        raise ValueError("score, sinks: are not supported on DTensors; pass local tensors")
    found = None if score is None else as_score(score)
    out, lse = forward(q, k, v, mask, scale, deterministic=deterministic, score=found)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _traced(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` under torch.compile, or with a scale that is no float or int, and may be of a wrong type."""
    expect_number("scale", scale)
    if have_dtensor(q, k, v):
        return _on_dtensors(q, k, v, mask, scale, return_lse, deterministic)
    out, lse = forward(q, k, v, mask, scale, deterministic=deterministic)
    return (out, lse) if return_lse else out


def _on_refusal(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Called when an operator raised: runs DTensors, and otherwise raises a clear error for a wrong type."""
    if have_dtensor(q, k, v):
        return _on_dtensors(q, k, v, mask, scale, return_lse, deterministic)
    # For an argument of a wrong type torch's message names an internal operator; ours names the argument.
    expect_tensors(q=q, k=k, v=v)
    expect_number("scale", scale)
    expect_flags(return_lse=return_lse, deterministic=deterministic)
    raise


def _on_dtensors(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, scale: float | None, return_lse: bool, deterministic: bool
) -> Tensor | tuple[Tensor, Tensor]:
    from attnforge.runtime.distributed.dtensor import (
        attention_on_dtensors,  # imports torch.distributed.tensor
    )

    return attention_on_dtensors(
        attention, q, k, v, mask, scale=scale, return_lse=return_lse, deterministic=deterministic
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask,
    scale: float | None = None,
    variant: int = 0,
    deterministic: bool = False,
    score: Score | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out, lse), as `attention`. `variant`: a handle of kernels.load; 0 lets dispatch choose the kernel.

    check: whether captured tensors are compared with the sizes of q and k; reads past the end give the last element.
    """
    load_operators()
    data, kind, visible_keys = unpack_mask(mask, q, k)
    words = _words(q, k, mask, score, check)
    result: tuple[Tensor, Tensor] = _operators.forward.default(
        q, k, v, data, kind, scale, deterministic, visible_keys, variant, *words
    )
    return result


def _words(
    q: Tensor, k: Tensor, mask: AnyMask, score: Score | None, check: bool = True
) -> tuple[str | Tensor | None, ...]:
    """The operators' last arguments, for functions of a score and of a mask. Raises ValueError for unfit tensors."""
    mod = mask if isinstance(mask, FunctionMask) else None
    if score is None and mod is None:
        return ()
    text, tensors = ("", ()) if score is None else (score.text, score.tensors)
    tensors += () if mod is None else mod.tensors
    if len(tensors) > MAX_TENSORS:
        raise ValueError(
            f"score, mask: capture {len(tensors)} tensors, at most {MAX_TENSORS} are supported together"
        )
    if check and q.dim() == k.dim() == 4 and not is_compiling():  # then the fake kernels check
        check_score(q, k, text, tensors, "" if mod is None else mod.text)
    return (
        (text, *tensors)
        if mod is None
        else (text, *tensors, *[None] * (MAX_TENSORS - len(tensors)), mod.text)
    )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: AnyMask,
    scale: float | None = None,
    deterministic: bool = False,
    variant: int = 0,
    dlse: Tensor | None = None,
    score: Score | None = None,
    check: bool = True,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in the layouts of q, k and v, from what `forward` returned. `variant`, `check` as in `forward`.

    dlse: gradient of lse, float32 (B, Hq, Sq); None for zero. Behind dv come the gradients of the captured tensors that
    the text of the score marks `grad`.
    Workspace on a GPU: docs/attention.md, "Memory".
    """
    load_operators()
    data, kind, visible_keys = unpack_mask(mask, q, k)
    words = _words(q, k, mask, score, check)
    wanted = score is not None and wants_gradients(score.text)
    operator = _operators.score_backward if wanted else _operators.backward
    return tuple(
        operator.default(
            dout, q, k, v, out, lse, data, kind, scale, deterministic, visible_keys, dlse, variant, *words
        )
    )


def unpack_mask(mask: AnyMask, q: Tensor, k: Tensor) -> tuple[Tensor | None, int, int]:
    """The operators' arguments for a mask: its data, the number of its kind, its visible_keys_rounded."""
    if mask is None:
        return None, _FULL, 0
    if isinstance(mask, Spans):
        return mask.data, _SPANS, mask.visible_keys_rounded
    if isinstance(mask, Causal):
        return None, _CAUSAL, 0
    if isinstance(mask, FunctionMask):
        if q.dim() == k.dim() == 4 and not mask.fits(*q.shape[:3], k.shape[2]):
            raise ValueError(
                f"mask: is of shape {mask.shape} (batch, heads_q, seq_q, seq_k), but the call is of "
                f"{(*q.shape[:3], k.shape[2])}"
            )
        return mask.data, _DENSE, mask.visible_keys_rounded
    if isinstance(mask, DenseMask):
        # The data holds words of 32 keys, so the operators cannot check the number of keys.
        if q.dim() == k.dim() == 4 and mask.shape[2:] != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"mask: has shape {mask.shape}, expected (seq_q, seq_k) = {(q.shape[2], k.shape[2])}, with planes "
                "(batch or 1, heads_q or 1) in front if it has any"
            )
        return mask.data, _DENSE, mask.visible_keys_rounded
    refuse_mask(mask)


def refuse_mask(mask: object) -> NoReturn:
    """The TypeError for what is no mask."""
    hint = "; a bool tensor, True where a key is visible, goes in as attnforge.DenseMask(mask)"
    raise TypeError(
        f"mask: got {type(mask).__name__}, accepted are None, attnforge.Causal(), attnforge.Spans(...), "
        f"attnforge.masks.mask_mod(...) and attnforge.DenseMask(...){hint if isinstance(mask, Tensor) else ''}"
    )
