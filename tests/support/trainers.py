"""Stand-ins of the symbols that `register_veomni` and `register_nemo` need, where the packages are not installed.

They copy the names, and as little of what these do as their callers notice, of VeOmni 0.1.12, NeMo Automodel 0.7.0 and
transformers 5.18.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, Optional

import pytest
import torch.nn.functional as F
from torch import Tensor

Known = dict[str, Any]


def module(patch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    patch.setitem(sys.modules, name, made)
    return made


def transformers(patch: pytest.MonkeyPatch) -> tuple[Known, Known]:
    """Its registries of attention and of masks."""
    known: Known = {"sdpa": "sdpa"}
    masks: Known = {}

    class AttentionInterface:
        register = staticmethod(known.__setitem__)

        def __getitem__(self, name: str) -> Any:
            return known[name]

    class AttentionMaskInterface:
        register = staticmethod(masks.__setitem__)

    module(patch, "transformers", AttentionInterface=AttentionInterface, __version__="5.18.0")
    module(
        patch,
        "transformers.masking_utils",
        AttentionMaskInterface=AttentionMaskInterface,
        sdpa_mask=lambda *sizes, **named: ("sdpa_mask", sizes, named),
    )
    return known, masks


def veomni(patch: pytest.MonkeyPatch, state: Any) -> SimpleNamespace:
    """veomni's modules by their last names; `state` is its parallel state. Ulysses' exchanges note that they ran."""
    known, masks = transformers(patch)
    dispatch: Known = {}
    exchanged: list[str] = []

    def fused_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
    ) -> Any:
        named = {"sliding_window": None, "softcap": None, "skip_ulysses": False} | named
        return dispatch[module.config._attn_implementation](
            module, query, key, value, attention_mask, **named
        )

    def prepare_ulysses_qkv(q: Tensor, k: Tensor, v: Tensor, *, group: Any, ulysses_size: int) -> Any:
        exchanged.append("prepare")
        return q, k, v, q.shape[2]

    def restore_ulysses_output(output: Tensor, *, group: Any) -> Tensor:
        exchanged.append("restore")
        return output

    def _load_veomni_local_flash_kernel(implementation: str) -> Any:
        raise ValueError(implementation)

    @dataclass
    class OpsImplementationConfig:
        attn_implementation: Optional[Literal["eager", "flash_attention_2"]] = "flash_attention_2"  # noqa: UP045

        def __post_init__(self) -> None:
            if self.attn_implementation == "flash_attention_2":
                self.attn_implementation = "veomni_flash_attention_2_with_sp"  # type: ignore[assignment]

    package = "veomni.ops.kernels.attention"
    return SimpleNamespace(
        known=known,
        masks=masks,
        exchanged=exchanged,
        attention=module(
            patch,
            package,
            _ATTENTION_FORWARD_DISPATCH=dispatch,
            ALL_ATTENTION_FUNCTIONS=SimpleNamespace(register=known.__setitem__),
            fused_attention_forward=fused_attention_forward,
        ),
        flash=module(
            patch,
            f"{package}.flash",
            _VEOMNI_FLASH_ATTN_IMPL_MAPPING={},
            _load_veomni_local_flash_kernel=_load_veomni_local_flash_kernel,
        ),
        ulysses=module(
            patch,
            f"{package}.ulysses",
            prepare_ulysses_qkv=prepare_ulysses_qkv,
            restore_ulysses_output=restore_ulysses_output,
            slice_ulysses_head_auxiliary=lambda auxiliary, **sizes: auxiliary,
        ),
        state=module(patch, "veomni.distributed.parallel_state", get_parallel_state=lambda: state),
        varlen=module(
            patch, "veomni.models.transformers.attention_utils", VARLEN_ATTENTION_TYPES=("flash_attention_2",)
        ),
        arguments=module(
            patch, "veomni.arguments.arguments_types", OpsImplementationConfig=OpsImplementationConfig
        ),
        gpt_oss=module(
            patch,
            "veomni.models.transformers.gpt_oss.generated.patched_modeling_gpt_oss_gpu",
            GptOssPreTrainedModel=type("Model", (), {"_compatible_flash_implementations": ["theirs"]}),
        ),
    )


def nemo(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """nemo_automodel's modules: `utils`, `kernels`, and `layers`, a model that has bound the functions of `utils`."""
    known, _ = transformers(patch)

    def initialize_attn_module_and_func(
        attn_impl: str, num_attention_heads: int, num_qk_channels: int, num_v_channels: int,
        softmax_scale: float, attn_mask_type: str = "causal", qkv_format: str = "bshd",
        num_gqa_groups: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if attn_impl != "sdpa":
            raise ValueError(f"Unsupported attention implementation: {attn_impl}")

        def attn_func(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True, **call)

        return None, attn_func

    def preprocess_args_and_kwargs_for_attn(
        q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, attn_impl: str, **kwargs: Any
    ) -> Any:
        mask = {"is_causal": True} if attention_mask is None else {"attn_mask": attention_mask}
        return *(x.transpose(1, 2) for x in (q, k, v)), mask

    def postprocess_output_for_attn(x: Tensor, attn_impl: str) -> Tensor:
        return x.transpose(1, 2) if attn_impl == "sdpa" else x

    functions = {
        f.__name__: f
        for f in (
            initialize_attn_module_and_func,
            preprocess_args_and_kwargs_for_attn,
            postprocess_output_for_attn,
        )
    }
    return SimpleNamespace(
        known=known,
        utils=module(patch, "nemo_automodel.components.attention.utils", **functions),
        layers=module(patch, "nemo_automodel.components.models.qwen3_moe.layers", **functions),
        kernels=module(
            patch,
            "nemo_automodel._transformers.kernel_patches",
            FLASH_ATTN_IMPLEMENTATIONS=("flash_attention_2",),
        ),
    )
