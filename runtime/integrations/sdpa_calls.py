"""Which calls of scaled_dot_product_attention our kernels support (see sdpa.py), and why not the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attnforge.codegen.spec import Direction, Mask, Problem
from attnforge.runtime import dispatch, kernels
from attnforge.runtime.call import Call
from attnforge.runtime.inputs import MASKS, is_scale

_FULL, _CAUSAL, _DENSE = (MASKS.index(kind) for kind in (Mask.FULL, Mask.CAUSAL, Mask.DENSE))


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """Why torch must run this call; None if our kernels can. The texts are few, because each is logged once."""
    return (
        _why_not_tensors(q, k, v)
        or _why_not_options(dropout_p, is_causal, scale, enable_gqa)
        or _why_not_shapes(q, k, v, is_causal, enable_gqa)
        or (attn_mask is not None and _why_not_mask(attn_mask, q, k, is_causal))
        or _why_not_kernels(q, k, v, attn_mask, is_causal)
        or _why_not_backends(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    )


def _why_not_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    for x in (q, k, v):
        if type(x) not in (Tensor, torch.nn.Parameter):
            return f"a tensor is a {type(x).__name__}"
        if x.is_nested or x.layout is not torch.strided:
            return "a tensor is nested or sparse"
        if x.device != q.device or x.dtype != q.dtype:
            return "query, key and value differ in dtype or device"
        if x.dim() != 4:
            return f"a tensor has {x.dim()} dimensions, not 4"
        if x.stride(3) != 1:
            return "a tensor's last stride is not 1"
    if _in_transform():
        return "a functorch transform (vmap, grad, ...) is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is recording"
    return None


def _why_not_backends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    """The reason if sdpa_kernel() allows no backend, or only math, which is chosen for its second derivatives."""
    flash, math_too, *others = _enabled_backends()
    if flash and math_too:
        return None
    if torch.compiler.is_compiling():
        fused = flash or any(others)
    else:
        q, k, v = (x.to(_dtype_of(x)) for x in (q, k, v))
        choice = torch._fused_sdp_choice(
            q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        fused = choice not in (SDPBackend.ERROR.value, SDPBackend.MATH.value)
    return None if fused else "sdpa_kernel() leaves torch its math backend or none"


def _enabled_backends() -> tuple[bool, bool, bool, bool]:
    get: Any = torch._C
    return (
        get._get_flash_sdp_enabled(),
        get._get_math_sdp_enabled(),
        get._get_mem_efficient_sdp_enabled(),
        get._get_cudnn_sdp_enabled(),
    )


# As in masks.load_operators. In compiled code, Dynamo enters sdpa_kernel() itself while it traces.
_enabled_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# As in masks.load_operators; Dynamo guards on the stack of transforms.
_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_not_options(dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> str | None:
    if dropout_p != 0:
        return "dropout_p is not 0"
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return "is_causal or enable_gqa is not a bool"  # torch raises for it
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)) or not is_scale(scale):
        return f"scale is {scale}, not a number above 0 in float32"
    return None


def _why_not_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> str | None:
    heads, seq_q, dim = q.shape[1:]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != dim:
        return "query, key and value differ in batch or head_dim"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "a tensor is empty"
    if heads != k.shape[1] and not (enable_gqa and heads % k.shape[1] == 0):
        return "the heads of query and key differ, and enable_gqa does not cover it"
    if is_causal and seq_q != k.shape[2]:
        return "is_causal with unequal lengths: torch aligns top-left, our Causal bottom-right"
    return None


def _why_not_mask(mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask and is_causal are both given"
    if type(mask) is not Tensor:
        return f"attn_mask is a {type(mask).__name__}"
    if mask.dtype != torch.bool:
        return "attn_mask is added to the scores; ours are bool, True where a key is visible"
    if mask.layout is not torch.strided or mask.device != q.device:
        return "attn_mask is sparse or on another device"
    whole = (*q.shape[:3], k.shape[2])
    sizes = (*(1,) * (4 - mask.dim()), *mask.shape)
    if mask.dim() not in (2, 3, 4) or any(
        size not in (1, full) for size, full in zip(sizes, whole, strict=True)
    ):
        return "attn_mask has a shape that does not broadcast to (batch, heads, queries, keys)"
    return None


def _why_not_kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str | None:
    dtype = _dtype_of(q)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    dim, dim_v = q.shape[3], v.shape[3]
    if (
        torch.compiler.is_compiling()
    ):  # the lookup needs numbers: a trace with dynamic shapes specialises here
        dim, dim_v = len(range(dim)), len(range(dim_v))
    code = _CAUSAL if is_causal else _FULL if mask is None else _DENSE
    return _missing(q.device, dtype, dim, dim_v, code, grad)


def _dtype_of(x: Tensor) -> torch.dtype:
    """The dtype that a kernel sees of an input: under autocast the one that ours and torch's operators cast to."""
    place = x.device.type
    if place in ("cpu", "cuda") and torch.is_autocast_enabled(place) and x.dtype in kernels.DTYPES:
        return torch.get_autocast_dtype(place)
    return x.dtype


def _missing(
    device: torch.device, dtype: torch.dtype, dim: int, dim_v: int, mask: int, grad: bool
) -> str | None:
    """The reason if there is no kernel, for rows of any alignment; None if there is one."""
    key = (device, dtype, dim, dim_v, mask, grad)
    if key not in _known:
        _known[key] = _find_missing(*key)
    return _known[key]


_known: dict[tuple[torch.device, torch.dtype, int, int, int, bool], str | None] = {}
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in masks.load_operators


def _find_missing(
    device: torch.device, dtype: torch.dtype, dim: int, dim_v: int, mask: int, grad: bool
) -> str | None:
    try:
        arch = kernels.target(device)
    except ValueError:
        return f"there are no kernels for {device}"
    if dtype not in kernels.DTYPES:
        return f"there are no kernels for {dtype}"
    for direction in (Direction.FORWARD, Direction.BACKWARD)[: 2 if grad else 1]:
        align = min(4, kernels.DTYPES[dtype].bytes)
        problem = Problem(direction, arch, kernels.DTYPES[dtype], dim, MASKS[mask], align, dim_v)
        try:
            dispatch.choose(Call(problem, group=1, size=1024), device)
        except ValueError:
            dims = f"{dim}" if dim == dim_v else f"{dim} and {dim_v}"
            what = f"{direction.value} kernels for {MASKS[mask].value} masks, {dtype} and head_dim {dims}"
            return f"there are no {what} on {device.type}"
    return None
