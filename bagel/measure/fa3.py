"""FlashAttention-3 as a peer, for what FA4 takes.

It is `flash_attn_interface`, built from flash-attention's hopper/, or else the operators of the same kernels that
xformers has.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.measure.fa4 import attention_by
from attnforge.runtime.search.case import Case

MODULE = "flash_attn_interface"
LIBRARY = Path("flash_attn_3", "_C.so")  # in the folder of xformers
# What that library is linked with, in the folder of nvidia-cuda-runtime-cu12; torch of CUDA 13 has another one.
RUNTIME = Path("nvidia", "cuda_runtime", "lib", "libcudart.so.12")
INSTALL = "pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12"


def installed() -> bool:
    """Whether FlashAttention-3 is installed, from one source or the other; does not import it."""
    return _has_interface() or _library() is not None


def attention(case: Case, softcap: float = 0.0) -> Attention:
    """FA3 on a case, with softcap * tanh(score / softcap) unless that is 0; deterministic if the case is.

    Raises Unavailable without FA3, or for other masks than those of FA4.
    """
    module = importlib.import_module(MODULE) if _has_interface() else Interface(operators())
    options: dict[str, Any] = {"softcap": softcap} if softcap else {}
    options |= {"deterministic": True} if case.deterministic else {}
    return attention_by(module, case, **options)


class Interface:
    """The two functions of `flash_attn_interface` that peers call, by the operators below it."""

    def __init__(self, operators: Any) -> None:
        self.operators = operators

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """out (B, Sq, Hq, Dv) of q (B, Sq, Hq, D), k and v; options as FlashAttention-3 names them."""
        out: Tensor = _Attend.apply(q, k, v, self.operators, options)  # type: ignore[no-untyped-call]
        return out

    flash_attn_varlen_func = flash_attn_func  # the operators tell them apart by cu_seqlens_q


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, operators: Any, options: dict[str, Any]) -> Tensor:
        options = dict(options)
        deterministic, pack_gqa = options.pop("deterministic", False), options.pop("pack_gqa", None)
        options["is_causal"] = options.pop("causal", False)
        left, right = options.pop("window_size", (-1, -1))
        options |= {"window_size_left": left, "window_size_right": right}
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse, *_ = operators.fwd(q, k, v, num_splits=1, pack_gqa=pack_gqa, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = partial(operators.bwd, deterministic=deterministic, **options)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        dout = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        ctx.call(dout, *saved, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None, None


def operators() -> Any:
    """torch.ops.flash_attn_3, which has `fwd` and `bwd`: of `flash_attn_interface`, or else of xformers.

    Raises Unavailable without both, or if the library cannot be loaded.
    """
    if not _loaded() and _has_interface():
        importlib.import_module(MODULE)
    if not _loaded():
        library = _library()
        if library is None:
            raise Unavailable(f"FlashAttention-3 is not installed: {INSTALL}")
        _load(library)
    if not _loaded():
        raise Unavailable("FlashAttention-3 has no operators torch.ops.flash_attn_3.fwd and bwd")
    return torch.ops.flash_attn_3


def _has_interface() -> bool:
    return MODULE in sys.modules or find_spec(MODULE) is not None


def _loaded() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _library() -> Path | None:
    """xformers' library. The package itself is not imported: it requires one version of torch."""
    spec = find_spec("xformers")
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () if (path := Path(folder, LIBRARY)).exists()), None)


def _load(library: Path) -> None:
    try:
        runtime = next(
            (path for folder in sys.path if (path := Path(folder, RUNTIME)).exists()), RUNTIME.name
        )
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
    except OSError as error:
        raise Unavailable(f"FlashAttention-3 cannot be loaded: {error}; {INSTALL}") from error
