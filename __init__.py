"""attnforge: a generator of CUDA and C++ attention kernels for mixed-mask multimodal training.

    out = attnforge.attention(q, k, v, mask)  # mask: None, Causal(), Spans(starts, ends), DenseMask(visible), ...

Importing this package does not import torch: names are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnforge import bagel as bagel
    from attnforge.runtime import mask_patterns as masks
    from attnforge.runtime import scores as scores
    from attnforge.runtime.distributed.context_parallel import context_parallel as context_parallel
    from attnforge.runtime.integrations.checkpointing import save_attention as save_attention
    from attnforge.runtime.integrations.checkpointing import save_attention_policy as save_attention_policy
    from attnforge.runtime.integrations.flash_attn import flash_attn_func as flash_attn_func
    from attnforge.runtime.integrations.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
    from attnforge.runtime.integrations.flex import flex_attention as flex_attention
    from attnforge.runtime.integrations.flex import from_block_mask as from_block_mask
    from attnforge.runtime.integrations.huggingface import register_huggingface as register_huggingface
    from attnforge.runtime.integrations.nemo import register_nemo as register_nemo
    from attnforge.runtime.integrations.sdpa import disable as disable
    from attnforge.runtime.integrations.sdpa import enable as enable
    from attnforge.runtime.integrations.sdpa import sdpa as sdpa
    from attnforge.runtime.integrations.torch_backend import register_torch as register_torch
    from attnforge.runtime.integrations.veomni import register_veomni as register_veomni
    from attnforge.runtime.masks import Causal as Causal
    from attnforge.runtime.masks import DenseMask as DenseMask
    from attnforge.runtime.masks import Spans as Spans
    from attnforge.runtime.masks import load_operators as load_operators
    from attnforge.runtime.ops import attention as attention
    from attnforge.runtime.prologue import ExpertRows as ExpertRows
    from attnforge.runtime.prologue import qk_norm_rope as qk_norm_rope
    from attnforge.runtime.prologue import rope_tables as rope_tables

__version__ = "0.1.0"  # the only place: pyproject.toml and `attnforge --version` read it

__all__ = [
    "Causal",
    "DenseMask",
    "ExpertRows",
    "Spans",
    "__version__",
    "attention",
    "bagel",
    "context_parallel",
    "disable",
    "enable",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "from_block_mask",
    "load_operators",
    "masks",
    "qk_norm_rope",
    "register_huggingface",
    "register_nemo",
    "register_torch",
    "register_veomni",
    "rope_tables",
    "save_attention",
    "save_attention_policy",
    "scores",
    "sdpa",
]

_HOME = {
    "attention": "attnforge.runtime.ops",
    "Causal": "attnforge.runtime.masks",
    "DenseMask": "attnforge.runtime.masks",
    "ExpertRows": "attnforge.runtime.prologue",
    "qk_norm_rope": "attnforge.runtime.prologue",
    "rope_tables": "attnforge.runtime.prologue",
    "Spans": "attnforge.runtime.masks",
    "load_operators": "attnforge.runtime.masks",
    "save_attention": "attnforge.runtime.integrations.checkpointing",
    "save_attention_policy": "attnforge.runtime.integrations.checkpointing",
    "context_parallel": "attnforge.runtime.distributed.context_parallel",
    "disable": "attnforge.runtime.integrations.sdpa",
    "enable": "attnforge.runtime.integrations.sdpa",
    "sdpa": "attnforge.runtime.integrations.sdpa",
    "flash_attn_func": "attnforge.runtime.integrations.flash_attn",
    "flash_attn_varlen_func": "attnforge.runtime.integrations.flash_attn",
    "flex_attention": "attnforge.runtime.integrations.flex",
    "from_block_mask": "attnforge.runtime.integrations.flex",
    "register_huggingface": "attnforge.runtime.integrations.huggingface",
    "register_nemo": "attnforge.runtime.integrations.nemo",
    "register_torch": "attnforge.runtime.integrations.torch_backend",
    "register_veomni": "attnforge.runtime.integrations.veomni",
}


_MODULES = {
    "bagel": "attnforge.bagel",
    "masks": "attnforge.runtime.mask_patterns",
    "scores": "attnforge.runtime.scores",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
