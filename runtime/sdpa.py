"""`attnforge.sdpa()`, `enable()` and `disable()`: torch's scaled_dot_product_attention on our kernels.

What is replaced is the attribute of torch.nn.functional, so for the whole process: code that did
`from torch.nn.functional import scaled_dot_product_attention` before keeps torch's. A call that we cannot take
goes to torch, and the log (logger "attnforge") says why, once per reason.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnforge.runtime import kernels
from attnforge.runtime.masks import Causal
from attnforge.runtime.ops import attention

logger = logging.getLogger("attnforge")

_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
_MAX_DIM, _MAX_DIM_GRAD = 256, 128

_lock = threading.RLock()
_enabled = False  # by enable()
_depth = 0  # open sdpa() blocks, of all threads
_current: Any = None  # the replacement that takes calls; one that somebody else has wrapped may outlive it
_original: Any = None  # what it replaced
_told: set[str] = set()


def enable() -> None:
    """Send F.scaled_dot_product_attention to our kernels, until `disable()`; a second call changes nothing.

    Taken: no mask or is_causal with as many queries as keys, enable_gqa, scale; bfloat16 and float16 on a GPU,
    float32 and bfloat16 on the CPU; head_dim a multiple of 8 up to 256 (128 with gradients). Torch runs the
    rest: masks, dropout, is_causal with unequal lengths (which torch aligns top-left), tensor subclasses,
    other shapes, strides, dtypes and devices. sdpa_kernel() has no say over what we take.
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
        _original = F.scaled_dot_product_attention
        _current = _replacement(_original)
        F.scaled_dot_product_attention = _current
    elif not wanted and _current is not None:
        # Whoever wrapped ours meanwhile keeps the wrapper: ours passes calls on from now.
        if F.scaled_dot_product_attention is _current:
            F.scaled_dot_product_attention = _original
        _current = _original = None


def _replacement(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's, or attnforge.attention where that can take the call; see attnforge.enable."""
        if _current is scaled_dot_product_attention:
            reason = _why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if reason is None:
                return attention(query, key, value, Causal() if is_causal else None, scale=scale)
            _tell(reason)
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return scaled_dot_product_attention


def _tell(reason: str) -> None:
    if torch.compiler.is_compiling() or reason in _told:
        return  # a log call would break the graph
    _told.add(reason)
    logger.warning("scaled_dot_product_attention runs on torch's own kernels: %s", reason)


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why torch must run this call; None if we can. Few texts: each is logged once."""
    if attn_mask is not None:
        return "attn_mask is given; attnforge.attention takes Causal and Spans masks"
    if dropout_p > 0:
        return "dropout_p is above 0"
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        return f"scale is {scale}, not above 0"
    return _why_not_tensors(q, k, v) or _why_not_shapes(q, k, v, is_causal, enable_gqa)


def _why_not_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    compiling = torch.compiler.is_compiling()
    for x in (q, k, v):
        # The types are those of the trace while compiling, and transforms are refused by torch's own rules.
        if not compiling and type(x) not in (Tensor, torch.nn.Parameter):
            return f"a tensor is a {type(x).__name__}"
        if x.is_nested or x.layout is not torch.strided:
            return "a tensor is nested or sparse"
        if x.device != q.device or x.dtype != q.dtype:
            return "query, key and value differ in dtype or device"
        if x.dim() != 4:
            return f"a tensor has {x.dim()} dimensions, not 4"
        if x.stride(3) != 1:
            return "a tensor's last stride is not 1"
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform (vmap, grad, ...) is active"
    return _why_not_device(q)


def _why_not_device(q: Tensor) -> str | None:
    kind = q.device.type
    dtype = q.dtype
    if kind in _DTYPES and dtype.is_floating_point and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)  # which the operator casts to, as torch's does
    if kind not in _DTYPES or not _has_kernels(q.device):
        return f"there are no kernels for {q.device}"
    if dtype not in _DTYPES[kind]:
        return f"there are no kernels for {dtype} on {kind}"
    return None


def _has_kernels(device: torch.device) -> bool:
    if device not in _known:
        try:
            _known[device] = bool(kernels.targets(device))
        except ValueError:
            _known[device] = False
    return _known[device]


_known: dict[torch.device, bool] = {}
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in ops._load


def _why_not_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> str | None:
    heads, seq_q, dim = q.shape[1:]
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != dim:
        return "query, key and value differ in batch or head_dim"
    if 0 in q.shape or 0 in k.shape:
        return "a tensor is empty"
    if heads != k.shape[1] and not (enable_gqa and heads % k.shape[1] == 0):
        return "the heads of query and key differ, and enable_gqa does not cover it"
    if is_causal and seq_q != k.shape[2]:
        return "is_causal with unequal lengths: torch aligns top-left, our Causal bottom-right"
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    limit = _MAX_DIM_GRAD if grad else _MAX_DIM
    if dim % 8 or dim > limit:
        return f"head_dim {dim} is not a multiple of 8 up to {limit}"
    return None
