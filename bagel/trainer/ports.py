"""The trainers of BAGEL that `attnforge.bagel.patch` supports: where their symbols are, and their expected form."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from typing import Any

BAGEL = "modeling.bagel.bagel"
QWEN = "modeling.bagel.qwen2_navit"
SIGLIP = "modeling.bagel.siglip_navit"
VAE = "modeling.autoencoder"


@dataclass(frozen=True)
class Known:
    """The expected form of a function: its first parameters, globals that it must call, names that it may use."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    uses: frozenset[str] | None = None  # None: any

    def differences(self) -> list[str]:
        """Differences from the expected form; the module must be imported."""
        value: Any = sys.modules[self.module]
        for part in self.name.split("."):
            value = getattr(value, part, None)
        where = f"{self.module}.{self.name}"
        if not callable(value):
            return [f"{where} is missing"]
        function = inspect.unwrap(value)
        found = []
        if self.parameters:
            names = tuple(inspect.signature(function).parameters)
            if names[: len(self.parameters)] != self.parameters:
                found.append(f"{where} takes ({', '.join(names)}), not ({', '.join(self.parameters)})")
        code = getattr(function, "__code__", None)
        used = () if code is None else code.co_names
        found += [f"{where} does not call {name}" for name in self.calls if name not in used]
        if self.uses is not None:
            found += [
                f"{where} uses {name}, which attnforge's deep mode does not know"
                for name in used
                if name not in self.uses
            ]
        return found


@dataclass(frozen=True)
class Port:
    """One trainer: its modules, the class of its whole model, and its names for the replaced functions.

    The module of the VAE is used only where it can be imported and is as known.
    """

    title: str
    bagel: str
    qwen: str
    siglip: str
    vae: str
    model: str
    flex: str
    pad: str
    varlen: str
    needs_flash_attn: bool  # its modules import flash_attn
    remedy: str  # if it cannot be imported

    @property
    def modules(self) -> tuple[str, str, str]:
        return self.bagel, self.qwen, self.siglip

    def load(self) -> None:
        """Import its modules. Raises RuntimeError with the remedy."""
        for name in self.modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise RuntimeError(
                    f"patch: cannot import {name} ({error}); {self.remedy}. Nothing is patched"
                ) from error

    def why_not_vae(self) -> str:
        """Why the VAE's attention cannot be replaced; empty if it can. Imports its module."""
        try:
            importlib.import_module(self.vae)
        except ImportError as error:
            return f"cannot import {self.vae} ({error})"
        known = Known(self.vae, "AttnBlock.attention", ("self", "h_"), ("scaled_dot_product_attention",))
        return "; ".join(known.differences())

    def owner(self) -> Any:
        """The class of the whole model; its module must be imported."""
        return getattr(sys.modules[self.bagel], self.model)

    def known(self, deep: bool) -> tuple[Known, ...]:
        """Everything that a patch replaces or relies on."""
        train = ("self", "packed_sequence", "sample_lens", "attention_mask")
        layers = ("PackedAttention", "PackedAttentionMoT")
        return (
            Known(self.bagel, "create_sparse_mask", ("document_lens", "split_lens", "attn_modes", "device")),
            Known(self.bagel, "create_block_mask", ("mask_mod",)),
            Known(self.bagel, f"{self.model}.forward", calls=("create_sparse_mask", "create_block_mask")),
            Known(self.qwen, self.pad, ("tensor", "pad_size")),
            Known(self.qwen, self.flex),
            Known(self.qwen, self.varlen),
            Known(self.qwen, "Qwen2Model.forward_train", (*train, "packed_position_ids")),
            *(
                Known(
                    self.qwen,
                    f"{layer}.forward_train",
                    (*train, "packed_position_embeddings"),
                    (self.flex, self.pad),
                    NAMES | {self.flex, self.pad} if deep else None,
                )
                for layer in layers
            ),
            *(Known(self.qwen, f"{layer}.forward_inference", calls=(self.varlen,)) for layer in layers),
            *((Known(self.qwen, "apply_rotary_pos_emb", ("q", "k", "cos", "sin")),) if deep else ()),
            Known(self.siglip, self.varlen),
            Known(self.siglip, "SiglipFlashAttention2.forward", calls=(self.varlen,)),
        )


# All names that the attention layers' forward_train uses in the versions that deep mode was written for.
_NAMES = """
EFFICIENT_ATTENTION List SDPBackend _apply_qk_norm _index_put_matching_dtype append
apply_rotary_pos_emb backend bfloat16 cat config detach freeze_und fused_rope getattr head_dim
hidden_size isinstance k_norm k_norm_moe_gen k_proj k_proj_moe_gen list new_zeros num_heads
num_key_value_groups num_key_value_heads o_proj o_proj_moe_gen permute q_norm q_norm_moe_gen q_proj
q_proj_moe_gen repeat reshape rms_norm_eps scaled_dot_product_attention sdpa_kernel shape split
squeeze sum to torch transpose unsqueeze v_proj v_proj_moe_gen view zip
"""
NAMES = frozenset(_NAMES.split())

OFFICIAL = Port(
    title="ByteDance-Seed/Bagel",
    bagel=BAGEL,
    qwen=QWEN,
    siglip=SIGLIP,
    vae=VAE,
    model="Bagel",
    flex="flex_attention",
    pad="pad_sequence",
    varlen="flash_attn_varlen_func",
    needs_flash_attn=True,
    remedy="put the root of the Bagel repository on sys.path and install what it needs",
)
_NEMO = "nemo_automodel.components.models.bagel"
NEMO = Port(
    title="NVIDIA NeMo Automodel",
    bagel=f"{_NEMO}.model",
    qwen=f"{_NEMO}.modeling_qwen2_packed",
    siglip=f"{_NEMO}.modeling_siglip_navit",
    vae=f"{_NEMO}.autoencoder",
    model="BagelForUnifiedMultimodal",
    flex="_flex_attention",
    pad="_pad_sequence",
    varlen="_flash_attn_varlen",
    needs_flash_attn=False,
    remedy="install nemo_automodel and what it needs",
)
PORTS = {"bagel": OFFICIAL, "nemo": NEMO}


def pick(trainer: str | None) -> Port:
    """The port called `trainer` ("bagel" or "nemo"). None: the one that is imported already, else the installed one.

    If neither is installed, the official repository. Raises ValueError for another name.
    """
    if trainer is not None:
        if not isinstance(trainer, str) or trainer not in PORTS:
            raise ValueError(f"trainer: got {trainer!r}, accepted are {', '.join(map(repr, PORTS))} and None")
        return PORTS[trainer]
    imported = [port for port in PORTS.values() if port.bagel in sys.modules]
    there = [port for port in PORTS.values() if importlib.util.find_spec(port.bagel.partition(".")[0])]
    return (*imported, *there, OFFICIAL)[0]
