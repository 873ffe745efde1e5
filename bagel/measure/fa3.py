"""FlashAttention-3 (`flash_attn_interface`, built from flash-attention's hopper/) as a peer, for what FA4 takes."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from attnforge.bagel.measure.fa4 import Attention, Unavailable, attention_by
from attnforge.runtime.search.case import Case

MODULE = "flash_attn_interface"


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
