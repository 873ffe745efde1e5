"""attnforge: generated, compiled, searched attention kernels for mixed-mask multimodal training.

    out = attnforge.attention(q, k, v, mask)   # mask: None, attnforge.Causal(), attnforge.Spans(starts, ends)

Importing this package imports neither torch nor anything else: names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnforge import bagel as bagel
    from attnforge.runtime.aten import register_torch as register_torch
    from attnforge.runtime.checkpointing import save_attention as save_attention
    from attnforge.runtime.checkpointing import save_attention_policy as save_attention_policy
    from attnforge.runtime.context_parallel import context_parallel as context_parallel
    from attnforge.runtime.dropins import flash_attn_func as flash_attn_func
    from attnforge.runtime.dropins import flash_attn_varlen_func as flash_attn_varlen_func
    from attnforge.runtime.flex import flex_attention as flex_attention
    from attnforge.runtime.flex import from_block_mask as from_block_mask
    from attnforge.runtime.huggingface import register_huggingface as register_huggingface
    from attnforge.runtime.masks import Causal as Causal
    from attnforge.runtime.masks import DenseMask as DenseMask
    from attnforge.runtime.masks import Spans as Spans
    from attnforge.runtime.ops import attention as attention
    from attnforge.runtime.sdpa import disable as disable
    from attnforge.runtime.sdpa import enable as enable
    from attnforge.runtime.sdpa import sdpa as sdpa

__all__ = [
    "Causal",
    "DenseMask",
    "Spans",
    "attention",
    "bagel",
    "context_parallel",
    "disable",
    "enable",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "from_block_mask",
    "register_huggingface",
    "register_torch",
    "save_attention",
    "save_attention_policy",
    "sdpa",
]

_HOME = {
    "attention": "attnforge.runtime.ops",
    "Causal": "attnforge.runtime.masks",
    "DenseMask": "attnforge.runtime.masks",
    "Spans": "attnforge.runtime.masks",
    "save_attention": "attnforge.runtime.checkpointing",
    "save_attention_policy": "attnforge.runtime.checkpointing",
    "context_parallel": "attnforge.runtime.context_parallel",
    "disable": "attnforge.runtime.sdpa",
    "enable": "attnforge.runtime.sdpa",
    "sdpa": "attnforge.runtime.sdpa",
    "flash_attn_func": "attnforge.runtime.dropins",
    "flash_attn_varlen_func": "attnforge.runtime.dropins",
    "flex_attention": "attnforge.runtime.flex",
    "from_block_mask": "attnforge.runtime.flex",
    "register_huggingface": "attnforge.runtime.huggingface",
    "register_torch": "attnforge.runtime.aten",
}


def __getattr__(name: str) -> Any:
    if name == "bagel":
        return importlib.import_module("attnforge.bagel")
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
