"""`attnforge.register_huggingface()`: transformers models with attn_implementation="attnforge"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.flash_attn import documents
from attnforge.runtime.masks import Causal, DenseMask, Spans
from attnforge.runtime.ops import Mask, attention
from attnforge.runtime.scores import softcap

NAME = "attnforge"

# Arguments of models that change the result and that we do not support. The other ones are for other kernels.
_UNSUPPORTED = ("position_bias", "sinks", "head_mask")


def register_huggingface() -> None:
    """Make "attnforge" an attention implementation of Hugging Face transformers (4.53 or newer).

        attnforge.register_huggingface()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnforge", dtype=torch.bfloat16)

    Masks are those that transformers makes for SDPA: none if full or causal is enough, else one bool mask for the
    whole model (padding, sliding windows, packed sequences). A second call changes nothing. With ATTNFORGE_DISABLE=1
    the name stands for transformers' "sdpa". Raises ImportError without transformers, RuntimeError if it is too old.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        try:
            import transformers
        except ImportError:
            raise ImportError(
                'register_huggingface: transformers is not installed; pip install "attnforge[huggingface]", or '
                "transformers>=4.53"
            ) from None
        raise RuntimeError(
            f"register_huggingface: transformers {transformers.__version__} has no interface to register attention "
            "and masks with; install transformers>=4.53"
        ) from error
    off = disabled("attnforge.register_huggingface()", "attn_implementation='attnforge' runs as 'sdpa'")
    AttentionInterface.register(NAME, AttentionInterface()["sdpa"] if off else attention_forward)
    # Without it, models would pass no mask at all.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D) -> (B, Sq, Hq, D), no weights.

    attention_mask: bool (B or 1, 1 or Hq, Sq, Sk), True = visible; None: causal if the module is and there is
    more than one query, else full. cu_seq_lens_q and cu_seq_lens_k, which collators of packed samples pass for
    flash-attn, keep samples apart whatever the mask is. softcap is Gemma 2's, s_aux are gpt-oss's sinks. Raises
    ValueError for dropout, additive masks, and unsupported arguments that change the scores.
    """
    if dropout:
        raise ValueError(
            f"dropout: got {dropout}, only 0 is supported; set attention_dropout=0 in the model's config"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: not supported by attnforge; use attn_implementation='eager' for this model"
            )
    mask: Mask = None
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    samples = _samples(query, key, causal and attention_mask is None, kwargs)
    if attention_mask is not None:
        visible = _bool(attention_mask)[..., : key.shape[2]]
        if samples is not None:
            visible = visible & samples.visible(query.shape[2], key.shape[2], query.device)
        mask = DenseMask(visible)
    elif samples is not None:
        mask = samples
    elif causal:
        # Queries start at the first key: keys after the last query are an unfilled part of the cache.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        mask = Causal()
    cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    score = None if cap is None else softcap(cap)
    out = attention(query, key, value, mask, scale=scaling, score=score, sinks=sinks)
    return out.transpose(1, 2), None


def _samples(query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any]) -> Spans | None:
    """The mask of the packed samples that transformers' arguments for flash-attn describe; None without them."""
    cu_q = kwargs.get("cu_seq_lens_q")
    if cu_q is None:
        return None
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q: given with a batch of {query.shape[0]}, expected packed samples in a batch of 1"
        )
    cu_k = kwargs.get("cu_seq_lens_k")
    cu_q, cu_k = (x.to(query.device, torch.int32) for x in (cu_q, cu_q if cu_k is None else cu_k))
    return documents(cu_q, cu_k, query.shape[2], key.shape[2], causal, (-1, -1))


def _bool(mask: Tensor) -> Tensor:
    if mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask: got {mask.dtype}, an additive mask; pass a bool mask, True where a key is visible"
        )
    return mask.bool()
