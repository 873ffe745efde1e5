"""`attnforge.sdpa()`, `enable()` and `disable()`: torch's scaled_dot_product_attention on our kernels.

They replace the attribute of torch.nn.functional, for the whole process. Code that imported the function by name
before keeps torch's. torch runs a call that we do not support, and the logger "attnforge" gives each reason once.
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

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.sdpa_calls import why_not
from attnforge.runtime.masks import Causal, DenseMask
from attnforge.runtime.ops import attention

logger = logging.getLogger("attnforge")

_TORCHS = "scaled_dot_product_attention stays torch's"

_lock = threading.RLock()
_enabled = False  # by enable()
_depth = 0  # open sdpa() blocks, of all threads
_current: Any = None  # the active replacement; code that wrapped it may still hold it later
_original: Any = None  # the function that it replaced
_logged: set[str] = set()


def enable() -> None:
    """Run F.scaled_dot_product_attention on our kernels until `disable()`; a second call changes nothing.

    Supported: no mask, bool masks, is_causal with as many queries as keys, torch's causal_lower_right, enable_gqa,
    scale, and the dtypes and head dims of our kernels. torch runs the rest: additive masks, dropout, is_causal with
    unequal lengths (which torch aligns at the top left), tensor subclasses, torch.func transforms, TorchScript, other
    shapes, strides, dtypes and devices. torch also runs calls for which sdpa_kernel() allows no backend, or only math
    (which has second derivatives); otherwise sdpa_kernel() does not affect our kernels.
    The `__torch_function__` of a tensor subclass receives torch's own function, that of a mode ours.
    With ATTNFORGE_DISABLE=1 it does nothing, and torch runs every call.
    """
    global _enabled
    if disabled("attnforge.enable()", _TORCHS):
        return
    with _lock:
        _enabled = True
        _update()


def disable() -> None:
    """Undo `enable()`. Open `sdpa()` blocks keep our kernels."""
    global _enabled
    with _lock:
        _enabled = False
        _update()


@contextmanager
def sdpa() -> Iterator[None]:
    """As `enable()`, for the block. Blocks nest, also across threads: leaving the last one restores torch.

    backward() may run outside the block, except with activation checkpointing: it calls
    scaled_dot_product_attention again, and both calls must run the same kernels.
    With ATTNFORGE_DISABLE=1 torch runs the block's calls.
    """
    global _depth
    if disabled("attnforge.sdpa()", _TORCHS):
        yield
        return
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
    """Install or remove the replacement, as `_enabled` and `_depth` require. The lock is held."""
    global _current, _original
    wanted = _enabled or _depth > 0
    if wanted and _current is None:
        _original, _current = _replacement(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _current
    elif not wanted and _current is not None:
        # If other code wrapped ours meanwhile, its wrapper stays, and ours forwards calls to torch.
        if F.scaled_dot_product_attention is _current:
            F.scaled_dot_product_attention = _original
        _current = _original = None


def _replacement(original: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(torch's function, its replacement) for `original`, which may be either of them."""
    for theirs, ours in _replacements:
        if original is theirs or original is ours:
            return theirs, ours
    ours = _make_replacement(original)
    _introduce(original, ours)
    _replacements.append((original, ours))
    return original, ours


# Never shrinks: torch's tables identify functions by id, and compiled code guards on the function that it traced.
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
        """A call with an active mode or a tensor subclass (`__torch_function__`)."""
        tensors = (query, key, value, attn_mask)
        if not torch.compiler.is_compiling() and torch._C._len_torch_function_stack() > 0:
            # A mode, such as set_default_device's, receives our function and calls it again.
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
    """A call with torch.nn.attention.bias.CausalBias, which only recognises torch's own function.

    Its upper-left variant is is_causal. The lower-right one is our Causal if the lengths agree.
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
    if torch.compiler.is_compiling() or reason in _logged:
        return  # logging would break the graph
    _logged.add(reason)
    logger.warning("scaled_dot_product_attention runs on torch's own kernels: %s", reason)


def _dense(mask: Tensor, q: Tensor, k: Tensor) -> DenseMask:
    """torch's bool mask, of any shape that broadcasts to (B, Hq, Sq, Sk), as a view."""
    if mask.dim() == 3:
        mask = mask[None]
    return DenseMask(mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2]))
