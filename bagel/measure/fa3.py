"""FlashAttention-3 (`flash_attn_interface`, built from flash-attention's hopper/) as a peer, for what FA4 takes.

`operators` are those below its interface, which xformers has too.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.fa4 import Attention, Unavailable, attention_by
from attnforge.runtime.search.case import Case

MODULE = "flash_attn_interface"
LIBRARY = Path("flash_attn_3", "_C.so")  # in the folder of xformers
# What that library is linked with, in the folder of nvidia-cuda-runtime-cu12; torch of CUDA 13 has another one.
RUNTIME = Path("nvidia", "cuda_runtime", "lib", "libcudart.so.12")
INSTALL = "pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12"


def installed() -> bool:
    """Whether FlashAttention-3 is installed; does not import it."""
    return find_spec(MODULE) is not None


def attention(case: Case, softcap: float = 0.0) -> Attention:
    """FA3 on a case, with softcap * tanh(score / softcap) unless that is 0; deterministic if the case is.

    Raises Unavailable without FA3, or for other masks than those of FA4.
    """
    if not installed():
        raise Unavailable("FlashAttention-3 is not installed")
    module = importlib.import_module(MODULE)
    options: dict[str, Any] = {"softcap": softcap} if softcap else {}
    options |= {"deterministic": True} if case.deterministic else {}
    return attention_by(module, case, **options)


def operators() -> Any:
    """torch.ops.flash_attn_3, which has `fwd` and `bwd`: of `flash_attn_interface`, or else of xformers.

    Raises Unavailable without both, or if the library cannot be loaded.
    """
    if not _loaded() and installed():
        importlib.import_module(MODULE)
    if not _loaded():
        _load(_library())
    if not _loaded():
        raise Unavailable("FlashAttention-3 has no operators torch.ops.flash_attn_3.fwd and bwd")
    return torch.ops.flash_attn_3


def _loaded() -> bool:
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def _library() -> Path:
    """xformers' library. The package itself is not imported: it wants one version of torch."""
    spec = find_spec("xformers")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        if Path(folder, LIBRARY).exists():
            return Path(folder, LIBRARY)
    raise Unavailable(f"FlashAttention-3 is not installed: {INSTALL}")


def _load(library: Path) -> None:
    try:
        runtime = next(
            (path for folder in sys.path if (path := Path(folder, RUNTIME)).exists()), RUNTIME.name
        )
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
    except OSError as error:
        raise Unavailable(f"FlashAttention-3 cannot be loaded: {error}; {INSTALL}") from error
