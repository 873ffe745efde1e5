"""`attnforge.register_huggingface()`: transformers models with attn_implementation="attnforge"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations import alibi_models
from attnforge.runtime.integrations.flash_attn import band, documents, sides_of
from attnforge.runtime.integrations.spans_tensor import SpansTensor, combined
from attnforge.runtime.mask_intervals import spans_of
from attnforge.runtime.masks import AnyMask, Causal, Spans, transient
from attnforge.runtime.ops import attention
from attnforge.runtime.scores import Score, alibi, bias, softcap

NAME = "attnforge"

# Arguments of models that change the result and that we do not support. The other ones are for other kernels.
_UNSUPPORTED = ("sinks", "head_mask", "block_indices")

# Classes that add masks to scores themselves, in modules of transformers 5 that also use its interface.
_OUTSIDE = (
    "BigBirdPegasusSelfAttention",
    "InformerProbSparseAttention",
    "PegasusXGlobalLocalAttention",
)


def register_huggingface() -> None:
    """Make "attnforge" an attention implementation of Hugging Face transformers (4.53 or newer).

        attnforge.register_huggingface()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnforge", dtype=torch.bfloat16)

    Masks are those that transformers makes for SDPA: none if full or causal is enough, else one bool mask for the
    whole model (padding, sliding windows, packed sequences). Bloom, MPT and Falcon, with ALiBi, do not take their
    attention from transformers' interface: their classes are changed (transformers 5). Other such models raise a
    ValueError where transformers makes their masks. A second call changes nothing. With ATTNFORGE_DISABLE=1 the name
    stands for transformers' "sdpa", or "eager". Raises ImportError without transformers, RuntimeError if it is too old.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
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
    AttentionMaskInterface.register(NAME, torch_mask if off else model_mask)
    alibi_models.install(NAME, attention_forward, torch_only=off)


def torch_mask(*arguments: Any, config: Any = None, **named: Any) -> Tensor | None:
    """transformers' mask function with ATTNFORGE_DISABLE=1: its mask for SDPA, or for a model's own attention."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    mask: Tensor | None = (sdpa_mask if _own_attention(config) is None else eager_mask)(
        *arguments, config=config, **named
    )
    return mask


def model_mask(*arguments: Any, config: Any = None, **named: Any) -> Tensor | None:
    """transformers' mask function: its mask for SDPA. Raises ValueError if the model's attention would not be ours.

    Such a model runs its own attention, which adds masks to the scores: a bool mask would hide nothing.
    """
    own = _own_attention(config)
    if own is not None:
        raise ValueError(
            f"attn_implementation: {own} computes attention itself, not through transformers' interface; use "
            "attn_implementation='sdpa' or 'eager' for this model, or for this part of it, as in "
            "{'text_config': 'attnforge', 'audio_config': 'eager'}"
        )
    from transformers.masking_utils import sdpa_mask

    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "model_type", "") == "mpt":
        # In such layers Gemma 4 keeps the last queries only, and their rows of the mask. "Causal" would not tell which.
        # MPT converts its mask, without asking whether there is one.
        named["allow_is_causal_skip"] = False
    if arguments or transient():
        mask: Tensor | None = sdpa_mask(*arguments, config=config, **named)
        return mask
    return _made_by(sdpa_mask, {"config": config, **named})


class _Needed(Exception):
    """Raised where transformers begins to make a mask."""


def _stop(*_: Any) -> Tensor:
    raise _Needed


def _made_by(sdpa_mask: Callable[..., Tensor | None], named: dict[str, Any]) -> Tensor | None:
    """sdpa_mask(**named), as a SpansTensor where Spans can hold it: then the pairs of a few keys at a time are made."""
    try:
        # First, whether transformers takes no mask for enough; reading padding, it waits for the device.
        return sdpa_mask(**{**named, "mask_function": _stop})
    except _Needed:
        pass
    named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    offset = named.get("kv_offset", 0)

    def part(first: int, end: int) -> Tensor:
        made = sdpa_mask(**{**named, "kv_length": end - first, "kv_offset": offset + first})
        assert made is not None
        return made

    keys = named["kv_length"]
    sample = part(0, 1) if keys else None
    if sample is None or sample.numel() == 0 or sample.device.type not in ("cpu", "cuda"):
        return sdpa_mask(**named)
    spans = spans_of(part, keys)
    return sdpa_mask(**named) if spans is None else SpansTensor(spans, (*sample.shape[:3], keys))


def _own_attention(config: Any) -> str | None:
    """The name of a class, if the model with this config has attention outside of the interface."""
    return None if config is None else _own_class(type(config).__module__, type(config).__name__)


def _own_class(config_module: str, config: str) -> str | None:
    if config == "Gemma4AudioConfig":  # the other parts of Gemma 4 use the interface
        return "Gemma4AudioAttention"
    package, _, name = config_module.rpartition(".configuration_")
    prefix = f"{package}.modeling_"
    # Some configs have models in several modules: BlipTextConfig's is in modeling_blip_text.
    models = [
        m for key in (prefix + name, prefix + name + "_text") if (m := sys.modules.get(key)) is not None
    ]
    for model in models:
        names = vars(model)
        if "ALL_ATTENTION_FUNCTIONS" in names or "AttentionInterface" in names:
            if own := next((x for x in _OUTSIDE if x in names), None):
                return own
            continue
        for cls_name, value in list(names.items()):
            # A model that is made of others defines no attention: theirs may be in the interface.
            mine = isinstance(value, type) and value.__module__ == model.__name__ and "forward" in vars(value)
            if mine and "Attention" in cls_name and not getattr(value, "_attnforge", False):
                return cls_name
    return None


# As in masks.load_operators: Dynamo does not trace sys.modules.
_own_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D) -> (B, Sq, Hq, D), no weights.

    attention_mask: bool, True = visible, or floating-point, added to the scores, of any shape that broadcasts to
    (B, Hq, Sq, Sk); None: causal if the module is and there is more than one query, else full, within sliding_window
    keys on each side, the query's own included. cu_seq_lens_q and cu_seq_lens_k, which collators of packed samples
    pass for flash-attn, keep samples apart whatever the mask is. position_bias is T5's, softcap Gemma 2's, s_aux are
    gpt-oss's sinks, indices (B, Sq, n) the keys that DeepSeek V3.2's indexer selects, alibi_slopes (Hq) or (B, Hq)
    those of alibi_models.py. Raises ValueError for dropout, weights as a result, and unsupported arguments.
    """
    _refuse(dropout, kwargs)
    if query.shape[0] == 1:  # learned queries, for any batch
        query = query.expand(key.shape[0], -1, -1, -1)
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    reach = (sliding_window or 0) - 1  # -1: none
    window = (reach, reach) if attention_mask is None and reach < key.shape[2] - 1 else (-1, -1)
    samples = _samples(query, key, causal and attention_mask is None, window, kwargs)
    mask = _mask_of(query, key, causal, window) if samples is None else samples
    if attention_mask is not None:
        if attention_mask.shape[-1] != key.shape[2]:
            attention_mask = attention_mask[..., : key.shape[2]]
    elif isinstance(mask, Causal):
        key, value, position_bias = _written(query.shape[2], key, value, position_bias)
    indices = kwargs.get("indices")
    if indices is not None:
        attention_mask = _selected(attention_mask, indices, key.shape[2])
    if attention_mask is not None:
        position_bias = _added(attention_mask, position_bias, alibi_slopes)
        sizes = query.shape[2], key.shape[2]
        mask = combined(attention_mask, samples, *sizes, of_layer=indices is not None)
        alibi_slopes = None if attention_mask.dtype.is_floating_point else alibi_slopes
    # Of lines, queries are no earlier than Sk - Sq, so that all visible keys are on one side.
    score = _score(kwargs.get("softcap"), position_bias, alibi_slopes, key.shape[2] - query.shape[2])
    out = attention(query, key, value, mask, scale=scaling, score=score, sinks=kwargs.get("s_aux"))
    return out.transpose(1, 2), None


def _mask_of(query: Tensor, key: Tensor, causal: bool, window: tuple[int, int]) -> AnyMask:
    """The mask of a call without a mask tensor; `window` as flash-attn has it."""
    if window[0] >= 0:
        return band(query.shape[2], key.shape[2], sides_of(causal, window), query.device)
    return Causal() if causal else None


def _written(
    rows: int, key: Tensor, value: Tensor, position_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without keys after the last query: queries start at the first key, so these are an unfilled part of the cache."""
    return key[:, :, :rows], value[:, :, :rows], None if position_bias is None else position_bias[..., :rows]


def _samples(
    query: Tensor, key: Tensor, causal: bool, window: tuple[int, int], kwargs: dict[str, Any]
) -> Spans | None:
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
    return documents(cu_q, cu_k, query.shape[2], key.shape[2], causal, window)


def _refuse(dropout: float, arguments: dict[str, Any]) -> None:
    """Raises ValueError for what the kernels do not compute."""
    if dropout:
        raise ValueError(
            f"dropout: got {dropout}, only 0 is supported; set attention_dropout=0 in the model's config (some configs "
            "call it attention_probs_dropout_prob, attn_pdrop or dropout_rate)"
        )
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions: attnforge computes no attention weights; use attn_implementation='eager' for them"
        )
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}: not supported by attnforge; use attn_implementation='eager' for this model"
            )


def _added(mask: Tensor, position_bias: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """What is added to the scores beside `mask`: an additive one takes everything else along."""
    if not mask.dtype.is_floating_point:
        return position_bias
    if slopes is not None:
        position_bias = slopes[..., None, None] * torch.arange(mask.shape[-1], device=mask.device)
    return mask if position_bias is None else position_bias + mask


def _selected(mask: Tensor | None, indices: Tensor, keys: int) -> Tensor:
    """`mask` without the keys that an indexer did not select; as the models do it for SDPA."""
    if mask is None:
        raise ValueError("indices: expected an attention_mask with them")
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    return mask.masked_fill(~chosen, -torch.inf) if mask.dtype.is_floating_point else mask.bool() & chosen


def _score(cap: float | None, added: Tensor | None, slopes: Tensor | None, offset: int) -> Score | None:
    if slopes is not None:
        return alibi(slopes, offset)
    if cap is None:
        return None if added is None else bias(added)
    if added is not None:
        raise ValueError(
            "attention_mask: an additive mask or a bias is not supported with a softcap; pass a bool mask, True where "
            "a key is visible"
        )
    return softcap(cap)
