"""`attnforge.register_nemo()`: NeMo Automodel models with attn_implementation or backend.attn set to attnforge.

The names are those of NeMo Automodel 0.7.0: nemo_automodel/components/attention/utils.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.flash_attn import band, documents, sides_of
from attnforge.runtime.integrations.huggingface import register_huggingface
from attnforge.runtime.integrations.spans_tensor import combined
from attnforge.runtime.integrations.trainers import NAME, is_ours, marked, replace_everywhere, symbols
from attnforge.runtime.masks import AnyMask, Causal, Spans
from attnforge.runtime.ops import attention
from attnforge.runtime.scores import Score, bias, softcap

_UTILS = "nemo_automodel.components.attention.utils"
_KERNELS = "nemo_automodel._transformers.kernel_patches"
_FUNCTIONS = (
    "initialize_attn_module_and_func",
    "preprocess_args_and_kwargs_for_attn",
    "postprocess_output_for_attn",
)
_NEEDED = {_UTILS: _FUNCTIONS, _KERNELS: ("FLASH_ATTN_IMPLEMENTATIONS",)}

Inputs = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


def register_nemo() -> None:
    """Make "attnforge" a name of attention in NeMo Automodel, for its own models and those of transformers.

        attnforge.register_nemo()       # before the recipe builds the model
        model: {backend: {attn: attnforge}}         # YAML: models with a BackendConfig, such as Qwen3-MoE, DeepSeek V3
        model: {attn_implementation: attnforge}     # models of transformers, and Llama, Qwen2, Qwen3, Mistral 3

    backend.attn: causal attention; padding and document ids as attention_mask (B, S), any mask (B, 1 or H, Sq, Sk),
    packed tokens (T, H, D) with cu_seqlens, sliding windows and softcaps. A row of padding gives zeros. Learned sinks
    (gpt-oss), dropout and a context parallel size above 1 raise a ValueError. BAGEL: `attnforge.bagel.patch`.
    attn_implementation: as `register_huggingface`, which is called; packing keeps the name.

    A second call changes nothing. With ATTNFORGE_DISABLE=1 the name stands for "sdpa". Raises ImportError without
    NeMo Automodel, and RuntimeError, naming its version and what is missing, if its code is not as known.
    """
    modules = symbols("register_nemo", "nemo-automodel", _NEEDED)
    utils, kernels = modules[_UTILS], modules[_KERNELS]
    if is_ours(utils.initialize_attn_module_and_func):
        return
    register_huggingface()
    off = disabled("attnforge.register_nemo()", "backend.attn: attnforge runs as 'sdpa'")
    functions: tuple[Callable[..., Any], ...] = (initialize, preprocess, postprocess)
    for name, ours in zip(_FUNCTIONS, functions, strict=True):
        original = getattr(utils, name)
        # Models bind these functions by name when they are imported.
        replace_everywhere("nemo_automodel", name, original, _by_name(original, None if off else ours))
    # Names that packing keeps; another one becomes flash_attention_2.
    names = (*kernels.FLASH_ATTN_IMPLEMENTATIONS, NAME)
    replace_everywhere(
        "nemo_automodel", "FLASH_ATTN_IMPLEMENTATIONS", kernels.FLASH_ATTN_IMPLEMENTATIONS, names
    )


def _by_name(original: Callable[..., Any], ours: Callable[..., Any] | None) -> Callable[..., Any]:
    """`original` for all names but "attnforge", which is `ours`, or SDPA without it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def by_name(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        if given.arguments["attn_impl"] != NAME:
            return original(*arguments, **named)
        if ours is not None:
            return ours(*arguments, **named)
        given.arguments["attn_impl"] = "sdpa"
        return original(*given.args, **given.kwargs)

    return marked(by_name)


def initialize(
    attn_impl: str,
    num_attention_heads: int,
    num_qk_channels: int,
    num_v_channels: int,
    softmax_scale: float,
    attn_mask_type: str = "causal",
    qkv_format: str = "bshd",
    num_gqa_groups: int | None = None,
    **rest: Any,
) -> tuple[None, Callable[..., Tensor]]:
    """NeMo's module (none) and function of attention, which takes what `preprocess` returns.

    Raises ValueError naming what the kernels do not compute.
    """
    if attn_mask_type != "causal":
        raise ValueError(f"attn_mask_type: got {attn_mask_type!r}, accepted by attnforge is 'causal'")
    if rest.pop("attention_dropout", 0.0):
        raise ValueError("attention_dropout: only 0 is supported by attnforge; set it in the model's config")
    if rest.pop("softmax_type", "vanilla") != "vanilla":
        raise ValueError(
            "softmax_type: learned sinks are parameters of Transformer Engine's module, or of the model with "
            "backend.attn='flex'; use one of these for this model, or transformers' model with "
            "attn_implementation='attnforge'"
        )
    if rest:
        raise ValueError(f"{', '.join(sorted(rest))}: not supported by attnforge; use backend.attn='sdpa'")
    return None, functools.partial(attend, scale=softmax_scale)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AnyMask,
    scale: float,
    score: Score | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (B, Sq, Hq, D) or (T, Hq, D), k and v likewise -> q's layout, without copies."""
    packed = q.dim() == 3
    q, k, v = ((x[None] if packed else x).transpose(1, 2) for x in (q, k, v))
    out = attention(q, k, v, mask, scale=scale, score=score, sinks=sinks).transpose(1, 2)
    return out[0] if packed else out


def preprocess(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, attn_impl: str, **given: Any
) -> Inputs:
    """NeMo's inputs as they are, and the mask that its arguments describe.

    attention_mask: (B, Sk), 0 or False is padding, other integers number documents; or (B, 1 or Hq, Sq, Sk), bool or
    added to the scores, which says all by itself. window_size: (left, right) or left, a number of keys with the
    query's own, negative or None for no limit; attention is causal. cu_seqlens: int32 (documents + 1), of (T, H, D),
    or of a batch of 1 without attention_mask. Raises ValueError naming what is not supported.
    """
    rows, keys = (x.shape[0] if q.dim() == 3 else x.shape[1] for x in (q, k))
    _refuse(q, attention_mask, given)
    left = _left(given.get("window_size"))
    score = None if given.get("softcap") is None else softcap(given["softcap"])
    mask: AnyMask
    if attention_mask is None or q.dim() == 3:
        mask = _plain(q, k, rows, keys, left, given)
    elif attention_mask.dim() == 2:
        mask = _numbered(attention_mask, rows, keys, left)
    else:
        mask = None if left < 0 else band(rows, keys, sides_of(True, (left, 0)), q.device)
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype.is_floating_point:
            if score is not None:
                raise ValueError(
                    "attention_mask: an additive mask is not supported with a softcap; pass a bool mask"
                )
            score = bias(attention_mask)
        mask = combined(attention_mask, mask, rows, keys)
    return q, k, v, {"mask": mask, "score": score, "sinks": given.get("learnable_sink")}


def postprocess(x: Tensor, attn_impl: str) -> Tensor:
    """The output of `attend`, which has NeMo's layout."""
    return x


def _refuse(q: Tensor, mask: Tensor | None, given: dict[str, Any]) -> None:
    if given.get("cp_size", 1) > 1:
        raise ValueError(
            f"cp_size: got {given['cp_size']}, expected 1; backend.attn='te' exchanges keys between ranks"
        )
    if given.get("magi_attn_spec") is not None:
        raise ValueError(
            "magi_attn_spec: not supported by attnforge; pass an attention_mask, or use backend.attn='magi'"
        )
    if mask is not None and mask.dim() not in ((4,) if q.dim() == 3 else (2, 4)):
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected (batch, seq_k), or (batch, 1 or heads, seq_q, "
            "seq_k); packed tokens (T, H, D) take cu_seqlens"
        )
    if mask is None and given.get("packed_token_indices") is not None:
        raise ValueError(
            "packed_token_indices: not supported by attnforge; pass an attention_mask that numbers the documents"
        )


def _left(window_size: Any) -> int:
    """Keys left of the query that it sees; -1: all."""
    left = window_size[0] if isinstance(window_size, (tuple, list)) else window_size
    if left is None or left < 0:
        return -1
    if left == 0:
        raise ValueError("window_size: got 0 on the left, expected at least 1: the query's own key counts")
    return int(left) - 1


def _plain(q: Tensor, k: Tensor, rows: int, keys: int, left: int, given: dict[str, Any]) -> Causal | Spans:
    """The mask of causal attention, in documents if there are cu_seqlens."""
    cu_q, cu_k = (
        next((given[x] for x in (f"cu_seqlens{side}_padded", "cu_seqlens_padded", f"cu_seqlens{side}", "cu_seqlens")
              if given.get(x) is not None), None)
        for side in ("_q", "_kv")
    )  # fmt: skip
    if cu_q is None or cu_k is None:
        if q.dim() == 3:
            raise ValueError("cu_seqlens: expected with packed tokens (T, H, D)")
        mask = band(rows, keys, sides_of(True, (left, 0)), q.device)
        assert mask is not None
        return mask
    if q.dim() == 4 and q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: given with a batch of {q.shape[0]}, expected packed tokens or a batch of 1"
        )
    cu_q, cu_k = (x.to(q.device, torch.int32) for x in (cu_q, cu_k))
    return documents(cu_q, cu_k, rows, keys, True, (left, 0))


def _numbered(mask: Tensor, rows: int, keys: int, left: int) -> Spans:
    """The causal mask of documents that `mask` (B, Sk or more) numbers from 1; 0 is padding. No host sync."""
    numbers = mask[:, -keys:].long()
    key = torch.arange(keys, device=mask.device).expand_as(numbers)
    last = torch.zeros(mask.shape[0], keys + 1, dtype=torch.long, device=mask.device)
    last = last.scatter_reduce(1, numbers, key, "amax")
    shift = keys - rows  # the first query is at this key
    starts = key - shift
    ends = last.gather(1, numbers) + 1 - shift
    if left >= 0:
        ends = torch.minimum(ends, starts + left + 1)
    ends = torch.where(numbers > 0, ends, starts)
    return Spans(*(x.int()[:, None, None].contiguous() for x in (starts, ends)))
