"""Deep mode of `attnforge.bagel.patch`: forward_train of BAGEL's two attention layers without its copies.

They compute the same: projections, norms and rotary embedding remain the trainer's modules and functions. The padding,
the second scatter and gather of q and k around the norms, and the padded output are left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnforge.bagel.trainer.substitutes import expect_pack
from attnforge.runtime.ops import attention

GENERATION = "_moe_gen"  # suffix of the second expert's modules


class Parts:
    """Functions that differ between the ports; looked up in the trainer's module at each call, as its own code does."""

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self._own_norm = hasattr(module, "_apply_qk_norm")  # of NeMo Automodel
        self._fused = "fused" in inspect.signature(self._module.apply_rotary_pos_emb).parameters

    def norm(self, layer: Any, name: str, x: Tensor) -> Tensor:
        """The q or k norm called `name` of a layer, of x (tokens, heads, head_dim)."""
        module = getattr(layer, name)
        if not self._own_norm:
            return module(x)  # type: ignore[no-any-return]
        eps = layer.config.rms_norm_eps
        return self._module._apply_qk_norm(module, x, backend=layer.backend, eps=eps)  # type: ignore[no-any-return]

    def rotate(
        self, layer: Any, q: Tensor, k: Tensor, embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q and k (tokens, heads, head_dim)."""
        options = {"fused": layer.backend.fused_rope} if self._fused else {}
        q, k = self._module.apply_rotary_pos_emb(q, k, *embeddings, unsqueeze_dim=1, **options)
        return q, k


def dense(original: Callable[..., Tensor], parts: Parts) -> Callable[..., Tensor]:
    """The replacement of PackedAttention.forward_train."""

    @functools.wraps(original)
    def forward_train(
        self: Any,
        packed_sequence: Tensor,
        sample_lens: Sequence[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        q, k, v = _project(self, parts, packed_sequence, "", frozen=False)
        q, k = parts.rotate(self, q, k, packed_position_embeddings)
        return self.o_proj(_attend(q, k, v, attention_mask))  # type: ignore[no-any-return]

    return forward_train


def mixture(original: Callable[..., Tensor], parts: Parts) -> Callable[..., Tensor]:
    """The replacement of PackedAttentionMoT.forward_train. `mot_perm`, `mot_inv` (NeMo): tokens grouped by expert."""

    @functools.wraps(original)
    def forward_train(
        self: Any,
        packed_sequence: Tensor,
        sample_lens: Sequence[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
        packed_und_token_indexes: Tensor,
        packed_gen_token_indexes: Tensor,
        mot_perm: Tensor | None = None,
        mot_inv: Tensor | None = None,
    ) -> Tensor:
        rows: tuple[Any, Any] = (packed_und_token_indexes, packed_gen_token_indexes)
        if mot_perm is not None:
            count = packed_und_token_indexes.shape[0]
            rows = (slice(count), slice(count, None))
        frozen = getattr(self.config, "freeze_und", False)
        und = _project(self, parts, packed_sequence[rows[0]], "", frozen)
        gen = _project(self, parts, packed_sequence[rows[1]], GENERATION, frozen=False)
        q, k, v = (_join(pair, rows, packed_sequence) for pair in zip(und, gen, strict=True))
        q, k = parts.rotate(self, q, k, packed_position_embeddings)
        if mot_inv is not None:
            q, k, v = q[mot_inv], k[mot_inv], v[mot_inv]
        out = _attend(q, k, v, attention_mask)
        if mot_perm is not None:
            out = out[mot_perm]
        return _join((self.o_proj(out[rows[0]]), self.o_proj_moe_gen(out[rows[1]])), rows, out)

    return forward_train


def _project(layer: Any, parts: Parts, x: Tensor, suffix: str, frozen: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (tokens, heads, head_dim) of one expert in the dtype of x, q and k with their norms."""
    q, k, v = (
        getattr(layer, f"{name}_proj{suffix}")(x).to(x.dtype).view(-1, heads, layer.head_dim)
        for name, heads in (
            ("q", layer.num_heads),
            ("k", layer.num_key_value_heads),
            ("v", layer.num_key_value_heads),
        )
    )
    q, k = (parts.norm(layer, f"{name}_norm{suffix}", y).to(x.dtype) for name, y in (("q", q), ("k", k)))
    return (_still(q), _still(k), _still(v)) if frozen else (q, k, v)


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def _still(x: Tensor) -> Tensor:
    """x with zero gradients. The trainer detaches in place, in a tensor that has gradients, so its frozen weights get
    zeros and not None; weight decay and DDP (unused parameters) treat the two differently."""
    return _ZeroGradient.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def _join(pair: tuple[Tensor, Tensor], rows: tuple[Any, Any], like: Tensor) -> Tensor:
    """Rows of both experts in one tensor, in the dtype of `like`; tokens of no expert are zero."""
    if isinstance(rows[0], slice):
        return torch.cat(pair)
    whole = like.new_zeros((like.shape[0], *pair[0].shape[1:]))
    for index, part in zip(rows, pair, strict=True):
        whole[index] = part.to(whole.dtype)
    return whole


def _attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Any) -> Tensor:
    """Attention of a pack (tokens, heads, head_dim), as views -> (tokens, heads * head_dim)."""
    pack = expect_pack("attention_mask", attention_mask)
    if pack.dtype is not None:
        q, k, v = (x.to(pack.dtype) for x in (q, k, v))
    out = attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), pack.mask(q.shape[0]))  # type: ignore[call-overload]
    return out[0].transpose(0, 1).flatten(1)  # type: ignore[no-any-return]
