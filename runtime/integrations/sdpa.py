"""`attnforge.sdpa()`, `enable()` and `disable()`: torch's scaled_dot_product_attention on our kernels.

What is replaced is the attribute of torch.nn.functional, so for the whole process: code that did
`from torch.nn.functional import scaled_dot_product_attention` before keeps torch's. A call that we cannot take
goes to torch, and the log (logger "attnforge") says why, once per reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from attnforge.runtime.integrations.sdpa_calls import why_not
from attnforge.runtime.masks import Causal, DenseMask
from attnforge.runtime.ops import attention

logger = logging.getLogger("attnforge")

_lock = threading.RLock()
_enabled = False  # by enable()
_depth = 0  # open sdpa() blocks, of all threads
_current: Any = None  # the replacement that takes calls; one that somebody else has wrapped may outlive it
_original: Any = None  # what it replaced
_told: set[str] = set()


def enable() -> None:
    """Send F.scaled_dot_product_attention to our kernels, until `disable()`; a second call changes nothing.

    Taken: no mask, bool masks, is_causal with as many queries as keys, torch's causal_lower_right, enable_gqa,
    scale; dtypes and head dims that there are kernels for. Torch runs the rest: masks that are added, dropout,
    is_causal with unequal lengths (which torch aligns top-left), tensor subclasses, torch.func transforms,
    TorchScript, other shapes, strides, dtypes and devices. sdpa_kernel() has no say over what we take, but for calls
    to which it leaves no backend of torch's, or only the one for math (which has second derivatives).
    The `__torch_function__` of a tensor subclass gets torch's own function, that of a mode the one of ours.
    """
    global _enabled
    with _lock:
        _enabled = True
        _update()


def disable() -> None:
    """Undo `enable()`. Blocks of `sdpa()` that are still open keep ours."""
    global _enabled
    with _lock:
        _enabled = False
        _update()


@contextmanager
def sdpa() -> Iterator[None]:
    """As `enable()`, for the block; blocks nest, and threads may overlap: the last to leave restores torch.

    Gradients of what was computed inside may be taken outside. With activation checkpointing keep backward()
    inside too: it calls scaled_dot_product_attention again, and both calls must go the same way.
    """
    global _depth
    with _lock:
        _depth += 1
        _update()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            _update()


def _update() -> None:
    """Install or remove the replacement as the state wants it. The lock is held."""
    global _current, _original
    wanted = _enabled or _depth > 0
    if wanted and _current is None:
        _original, _current = _replacement(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _current
    elif not wanted and _current is not None:
        # Whoever wrapped ours meanwhile keeps the wrapper: ours passes calls on from now.
        if F.scaled_dot_product_attention is _current:
            F.scaled_dot_product_attention = _original
        _current = _original = None


def _replacement(original: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`original` and its replacement; where `original` is a replacement already, what that replaces and itself."""
    for theirs, ours in _replacements:
        if original is theirs or original is ours:
            return theirs, ours
    ours = _make_replacement(original)
    _introduce(original, ours)
    _replacements.append((original, ours))
    return original, ours


# Never shrinks: torch's tables know functions by their ids, and a trace guards on the function that it has seen.
_replacements: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = []


def _introduce(original: Callable[..., Tensor], ours: Any) -> None:
    """Enter `ours` beside `original` where torch looks functions up by identity, and give it the same name."""
    ours.__module__, ours.__qualname__ = F.__name__, ours.__name__  # so it pickles as what is installed
    ours.__doc__ = original.__doc__
    torch.jit._builtins._register_builtin(ours, "aten::scaled_dot_product_attention")  # for TorchScript
    overrides = torch.overrides.get_testing_overrides()
    if original in overrides:
        overrides[ours] = overrides[original]
    overridable, names = torch.overrides._get_overridable_functions()
    if original in names:
        names[ours] = names[original]
        overridable[F].append(ours)


def _make_replacement(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if _current is scaled_dot_product_attention:
            if has_torch_function_variadic(query, key, value, attn_mask):
                return _overridden(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            reason = why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if reason is None:
                mask = _dense(attn_mask, query, key) if attn_mask is not None else None
                return attention(query, key, value, Causal() if is_causal else mask, scale=scale)
            _tell(reason)
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _overridden(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *rest: Any, **named: Any
    ) -> Tensor:
        """A call that a mode or a tensor subclass has a say in (`__torch_function__`)."""
        tensors = (query, key, value, attn_mask)
        if not torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0:
            # A mode gets ours, and calls it again: as long as one is active, set_default_device's say.
            result: Tensor = handle_torch_function(
                scaled_dot_product_attention, tensors, *tensors, *rest, **named
            )
            return result
        if attn_mask is not None and not has_torch_function_variadic(query, key, value):
            from torch.nn.attention.bias import CausalBias  # imports torch._dynamo

            if isinstance(attn_mask, CausalBias):
                return _causal_bias(query, key, value, attn_mask, *rest, **named)
        _tell("a tensor subclass overrides it")
        return original(*tensors, *rest, **named)

    return scaled_dot_product_attention


def _causal_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """torch.nn.attention.bias.CausalBias, which would not recognise the function that ours hands the call on to.

    Its upper-left variant is is_causal. The lower-right one is our Causal where its lengths are the call's.
    """
    if (
        bias.variant == type(bias.variant).LOWER_RIGHT
        and not is_causal
        and why_not(query, key, value, None, dropout_p, False, scale, enable_gqa) is None
        and (bias.seq_len_q, bias.seq_len_kv) == (query.shape[2], key.shape[2])
    ):
        return attention(query, key, value, Causal(), scale=scale)
    result: Tensor = bias._dispatch(
        query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


def _tell(reason: str) -> None:
    if torch.compiler.is_compiling() or reason in _told:
        return  # a log call would break the graph
    _told.add(reason)
    logger.warning("scaled_dot_product_attention runs on torch's own kernels: %s", reason)


def _dense(mask: Tensor, q: Tensor, k: Tensor) -> DenseMask:
    """torch's bool mask, of any shape that broadcasts to (B, Hq, Sq, Sk), as a view."""
    if mask.dim() == 3:
        mask = mask[None]
    return DenseMask(mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2]))
