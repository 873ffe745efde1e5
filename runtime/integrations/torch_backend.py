"""`attnforge.register_torch()`: the name "attnforge" among torch's implementations of flash attention.

torch.nn.attention.activate_flash_attention_impl("attnforge") then sends what torch gives to its flash backend to our
kernels: scaled_dot_product_attention without a mask or with is_causal, and torch.nn.attention.varlen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from attnforge.runtime import ops
from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.flash_attn import band, documents, sides_of
from attnforge.runtime.masks import AnyMask, Causal

logger = logging.getLogger("attnforge")

NAME = "attnforge"

_logged: set[str] = set()

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Scaled = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def register_torch() -> None:
    """Register "attnforge" with torch.nn.attention.register_flash_attention_impl. The user then activates it:

        attnforge.register_torch()
        torch.nn.attention.activate_flash_attention_impl("attnforge")      # ... restore_flash_attention_impl()

    It affects calls on CUDA devices that torch gives to its flash backend (see sdpa_kernel). A call with dropout or
    another unsupported argument runs on torch's own kernel, and the logger "attnforge" says so, once per argument.
    Other masks never reach this backend: use `attnforge.sdpa()`.
    With ATTNFORGE_DISABLE=1 the name is registered all the same, and activating it leaves torch's own kernels.
    Raises RuntimeError if torch has no such registry (before 2.11).
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise RuntimeError(
            f"register_torch: torch {torch.__version__} has no register_flash_attention_impl; use torch 2.11 or newer, "
            "or attnforge.sdpa()"
        ) from error
    register_flash_attention_impl(NAME, register_fn=_activate)


class _Handle:
    """torch keeps this while our kernels are active; `remove` removes them from its dispatcher."""

    def __init__(self, library: Library | None) -> None:
        self._library = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None


def _activate() -> _Handle:
    if disabled("attnforge.register_torch()", "torch's own flash attention runs"):
        return _Handle(None)
    library = Library("aten", "IMPL", "CUDA")
    for name, function in (
        ("_scaled_dot_product_flash_attention", scaled_forward),
        ("_scaled_dot_product_flash_attention_backward", scaled_backward),
        ("_flash_attention_forward", forward),
        ("_flash_attention_backward", backward),
    ):
        library.impl(name, _or_torchs(function, _kernel(name)), "CUDA", with_keyset=True)
    return _Handle(library)


def _kernel(name: str) -> Any:
    """The kernel that ours replaces; None if torch has no CUDA, or no get_kernel."""
    try:
        return torch.library.get_kernel(f"aten::{name}", "CUDA")
    except (AttributeError, RuntimeError):
        return None


def _or_torchs(function: Callable[..., Any], kernel: Any) -> Callable[..., Any]:
    """`function`; `kernel`, which it replaces, runs the calls that it refuses."""

    def run(keys: torch.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except _RefusedError as refused:
            if kernel is None:
                raise
            if refused.argument not in _logged:
                _logged.add(refused.argument)
                logger.warning("flash attention runs on torch's own kernels: %s", refused)
        return kernel.call_boxed(keys, *arguments, **named)

    return run


class _RefusedError(ValueError):
    """`argument` has a value that our kernels do not support."""

    def __init__(self, argument: str, value: object) -> None:
        given = "a tensor" if isinstance(value, Tensor) else repr(value)
        super().__init__(f"{argument}: got {given}, which attnforge does not support")
        self.argument = argument


def scaled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Scaled:
    """aten::_scaled_dot_product_flash_attention: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D)."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse = ops.forward(query, key, value, Causal() if is_causal else None, scale)
    return (out, lse, None, None, query.shape[2], key.shape[2], *_random_state(query))


def scaled_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    """aten::_scaled_dot_product_flash_attention_backward."""
    _refuse(dropout_p=dropout_p)
    mask = Causal() if is_causal else None
    dq, dk, dv = ops.backward(grad_out, query, key, value, out, logsumexp, mask, scale)
    return dq, dk, dv


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> Forward:
    """aten::_flash_attention_forward: (B, S, H, D), or packed (T, H, D) with cum_seq_q and cum_seq_k."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **rest)
    mask = _mask(query, key, cum_seq_q, cum_seq_k, is_causal, (window_size_left, window_size_right))
    out, lse = ops.forward(_heads_first(query), _heads_first(key), _heads_first(value), mask, scale)
    return (_heads_last(out, query), lse[0] if cum_seq_q is not None else lse, *_random_state(query))


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """aten::_flash_attention_backward, layouts as in `forward`."""
    _refuse(dropout_p=dropout_p)
    mask = _mask(query, key, cum_seq_q, cum_seq_k, is_causal, (window_size_left, window_size_right))
    lse = logsumexp if cum_seq_q is None else logsumexp[None]
    dout, q, k, v, o = (_heads_first(x) for x in (grad_out, query, key, value, out))
    dq, dk, dv = ops.backward(dout, q, k, v, o, lse, mask, scale)
    return _heads_last(dq, query), _heads_last(dk, key), _heads_last(dv, value)


def _mask(
    query: Tensor,
    key: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
) -> AnyMask:
    left, right = (-1 if side is None else side for side in window)
    if cum_seq_q is None or cum_seq_k is None:
        return band(query.shape[1], key.shape[1], sides_of(is_causal, (left, right)), query.device)
    return documents(cum_seq_q, cum_seq_k, query.shape[0], key.shape[0], is_causal, (left, right))


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value not in (None, False, 0):
            raise _RefusedError(name, value)


def _heads_first(x: Tensor) -> Tensor:
    return (x if x.dim() == 4 else x[None]).transpose(1, 2)


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """The axes of `like`, with the strides that torch's kernels would choose, because callers rely on them.

    They differ only if `like` is not dense in memory, e.g. if heads or batches are expanded.
    """
    last = x.transpose(1, 2) if like.dim() == 4 else x[0].transpose(0, 1)
    if last.stride() == like.stride() or last.shape != like.shape:
        return last
    expected = torch.empty_like(like)
    return last if last.stride() == expected.stride() else expected.copy_(last)


def _random_state(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed and offset (only dropout reads them), and an empty debug mask."""
    seed, offset = (torch.zeros(size, dtype=torch.uint64, device=x.device) for size in ((2,), ()))
    return seed, offset, x.new_empty(0)
