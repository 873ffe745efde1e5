"""`attnforge.register_veomni()`: VeOmni models with attn_implementation: attnforge.

The names are those of VeOmni 0.1.12: veomni/ops/kernels/attention and veomni/arguments.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, Optional, get_args, get_type_hints

import torch
from torch import Tensor, nn

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnforge.runtime.integrations.huggingface import attention_forward, register_huggingface
from attnforge.runtime.integrations.trainers import NAME, is_ours, marked, replace_everywhere, symbols

log = logging.getLogger("attnforge")

# VeOmni and transformers pass cu_seqlens to vision towers, and no dense mask, if "flash" is part of the name.
FULL_NAME = "veomni_attnforge_flash_attention_with_sp"

_ATTENTION = "veomni.ops.kernels.attention"
_FLASH = f"{_ATTENTION}.flash"
_ULYSSES = f"{_ATTENTION}.ulysses"
_STATE = "veomni.distributed.parallel_state"
_VARLEN = "veomni.models.transformers.attention_utils"
_ARGUMENTS = "veomni.arguments.arguments_types"
_NEEDED = {
    _ATTENTION: ("_ATTENTION_FORWARD_DISPATCH", "ALL_ATTENTION_FUNCTIONS", "fused_attention_forward"),
    _FLASH: ("_VEOMNI_FLASH_ATTN_IMPL_MAPPING", "_load_veomni_local_flash_kernel"),
    _ULYSSES: ("prepare_ulysses_qkv", "restore_ulysses_output", "slice_ulysses_head_auxiliary"),
    _STATE: ("get_parallel_state",),
    _VARLEN: ("VARLEN_ATTENTION_TYPES",),
    _ARGUMENTS: ("OpsImplementationConfig",),
}
_GPT_OSS = "veomni.models.transformers.gpt_oss.generated.patched_modeling_gpt_oss_gpu"

# Arguments with a dimension of heads, which no exchange between ranks divides.
_OF_HEADS = ("position_bias", "alibi_slopes", "indices")


def register_veomni() -> None:
    """Make "attnforge" an attention implementation of VeOmni: in YAML files, on the command line and in code.

        attnforge.register_veomni()     # in the training script, before it parses its arguments
        model: {ops_implementation: {attn_implementation: attnforge}}      # the YAML file

    Packed samples stay apart by cu_seq_lens_q and cu_seq_lens_k, and sliding windows, softcaps and sinks are the
    model's. With Ulysses sequence parallelism, VeOmni's own functions exchange heads and rows around our kernels.
    A mask other than causal or a sliding window, with or without padding, is one bool mask for the whole model; under
    Ulysses it raises a ValueError. So do dropout, attention weights as a result, and a context parallel size above 1.
    VeOmni's log says that such a model misses sequence parallelism, because its list of names is fixed: ignore it.

    A second call changes nothing. With ATTNFORGE_DISABLE=1 the name stands for VeOmni's "flash_attention_2". Raises
    ImportError without VeOmni, and RuntimeError, naming its version and what is missing, if its code is not as known.
    """
    modules = symbols("register_veomni", "veomni", _NEEDED)
    config = modules[_ARGUMENTS].OpsImplementationConfig
    if is_ours(config.__post_init__):
        return
    register_huggingface()
    off = disabled(
        "attnforge.register_veomni()", "attn_implementation: attnforge runs as 'flash_attention_2'"
    )
    if not off:
        _register_attention(modules)
        _register_flash_name(modules)
        _join_gpt_oss()
    _accept_name(config, "flash_attention_2" if off else FULL_NAME)


def _register_attention(modules: dict[str, Any]) -> None:
    from transformers.masking_utils import AttentionMaskInterface

    package = modules[_ATTENTION]
    state = modules[_STATE].get_parallel_state
    package._ATTENTION_FORWARD_DISPATCH[FULL_NAME] = _forward_with(modules[_ULYSSES], state)
    package.ALL_ATTENTION_FUNCTIONS.register(FULL_NAME, package.fused_attention_forward)
    AttentionMaskInterface.register(FULL_NAME, _mask_with(state))
    varlen = modules[_VARLEN].VARLEN_ATTENTION_TYPES
    replace_everywhere("veomni", "VARLEN_ATTENTION_TYPES", varlen, (*varlen, FULL_NAME))


def _register_flash_name(modules: dict[str, Any]) -> None:
    """transformers loads the kernels of each implementation with "flash" in its name; VeOmni answers for its own."""
    flash = modules[_FLASH]
    original = flash._load_veomni_local_flash_kernel

    @functools.wraps(original)
    def load(implementation: str) -> Any:
        if implementation != FULL_NAME:
            return original(implementation)
        return SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)

    flash._load_veomni_local_flash_kernel = load
    flash._VEOMNI_FLASH_ATTN_IMPL_MAPPING[FULL_NAME] = FULL_NAME


def _join_gpt_oss() -> None:
    """gpt-oss has a list of its flash implementations, and transformers would replace a name that is not in it."""
    try:
        model: Any = importlib.import_module(_GPT_OSS).GptOssPreTrainedModel
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: another version of `kernels`
        log.info("register_veomni: gpt-oss cannot be imported, and is left out: %s", error)
        return
    names = getattr(model, "_compatible_flash_implementations", None)
    if names is not None:
        model._compatible_flash_implementations = [*names, FULL_NAME]


def _accept_name(config: Any, stands_for: str) -> None:
    """Let OpsImplementationConfig have "attnforge", which the command line checks against its type."""
    hint = get_type_hints(config)["attn_implementation"]
    names = (*(name for part in get_args(hint) for name in get_args(part)), NAME)
    config.__annotations__["attn_implementation"] = Optional[Literal[names]]  # noqa: UP045 (VeOmni reads its __origin__)
    original = config.__post_init__

    @functools.wraps(original)
    def resolve(self: Any) -> None:
        if self.attn_implementation == NAME:
            self.attn_implementation = stands_for
        original(self)

    config.__post_init__ = marked(resolve)


def _forward_with(ulysses: Any, parallel_state: Callable[[], Any]) -> Callable[..., tuple[Tensor, None]]:
    def attnforge_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        skip_ulysses: bool = False,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """VeOmni's attention function: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D) -> (B, Sq, Hq, D), no weights.

        Under Ulysses q, k and v have the rows of this rank and all heads; elsewhere as `attention_forward`.
        """
        state = parallel_state()
        if state.cp_size > 1:
            raise ValueError(
                f"cp_size: got {state.cp_size}, expected 1; attnforge in VeOmni exchanges heads between ranks "
                "(ulysses_size), not keys"
            )
        if skip_ulysses or not state.ulysses_enabled:
            return attention_forward(module, query, key, value, attention_mask, **named)
        group = state.ulysses_group
        query, key, value, heads = ulysses.prepare_ulysses_qkv(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), group=group,
            ulysses_size=state.ulysses_size,
        )  # fmt: skip
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        _expect_whole(attention_mask, query.shape[2], key.shape[2], named)
        if named.get("s_aux") is not None:
            named["s_aux"] = ulysses.slice_ulysses_head_auxiliary(
                named["s_aux"], query_head_count=heads, local_query_head_count=query.shape[1], group=group
            )
        out, _ = attention_forward(module, query, key, value, attention_mask, **named)
        return ulysses.restore_ulysses_output(out, group=group), None

    return attnforge_forward


def _expect_whole(mask: Tensor | None, rows: int, keys: int, named: dict[str, Any]) -> None:
    """Raises ValueError for what has heads or rows of one rank only: attention computes all rows of some heads."""
    for name in _OF_HEADS:
        if named.get(name) is not None:
            raise ValueError(f"{name}: not supported with Ulysses sequence parallelism")
    if mask is None:
        return
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, rows) or mask.shape[3] != keys:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected (batch, 1, {rows}, {keys}) with Ulysses sequence "
            "parallelism: all rows, and the same for all heads"
        )


def _mask_with(parallel_state: Callable[[], Any]) -> Callable[..., Tensor | None]:
    def attnforge_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        *,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **named: Any,
    ) -> Tensor | None:
        """transformers' mask function: None for causal and sliding windows, which attention makes itself.

        Else its mask for SDPA. Raises ValueError for one under Ulysses, where rows are those of one rank.
        """
        from transformers.masking_utils import sdpa_mask

        state = parallel_state()
        ranks = state.ulysses_size if state.ulysses_enabled else 1
        # Without a cache; under Ulysses an attention_mask has the columns of all ranks.
        fresh = isinstance(q_offset, int) and q_offset == 0 and kv_length in (q_length, q_length * ranks)
        fresh = fresh and (allow_is_causal_skip or allow_is_bidirectional_skip)
        if fresh and (attention_mask is None or bool(torch.all(attention_mask))):
            return None
        if ranks > 1:
            raise ValueError(
                "attention_mask: with Ulysses sequence parallelism only causal masks and sliding windows are "
                "supported, without padding or a cache; pass a mask of ones, and packed samples by cu_seq_lens_q"
            )
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **named,
        )  # fmt: skip
        return mask

    return attnforge_mask
