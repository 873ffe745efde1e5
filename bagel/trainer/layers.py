"""Deep mode of `attnforge.bagel.patch`: forward_train of BAGEL's two attention layers without its copies.

They compute the same. Projections remain the trainer's modules; norms of q and k, rotary embedding and the way from the
experts' rows to the pack's order are one kernel (`qk_norm_rope`), unless a norm is of a class that is not known here:
then the trainer's own modules and functions run. Padding and the padded output are left out.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from attnforge.bagel.trainer.substitutes import expect_pack
from attnforge.runtime.ops import attention
from attnforge.runtime.prologue import ExpertRows, qk_norm_rope

logger = logging.getLogger("attnforge")

GENERATION = "_moe_gen"  # suffix of the second expert's modules


Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v (tokens, heads, head_dim)


@dataclass(frozen=True)
class Norms:
    """Weights of a layer's q and k norms, of each expert, as `qk_norm_rope` takes them. None: there are no norms."""

    q: tuple[Tensor, ...] | None
    k: tuple[Tensor, ...] | None
    eps: float


def differences(module: ModuleType) -> list[str]:
    """In what the trainer's rotary embedding differs from ours, which replaces it."""
    q, k = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(12.0).view(3, 4)
    cos, sin = (torch.cat((x, x), 1) for x in (angles.cos(), angles.sin()))
    theirs = vars(module)["apply_rotary_pos_emb"](q, k, cos, sin, unsqueeze_dim=1)
    for x, rotated in zip((q, k), theirs, strict=True):
        left, right = x.chunk(2, -1)
        expected = x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
        if not torch.allclose(rotated, expected, rtol=1e-5, atol=1e-5):
            return [f"{module.__name__}.apply_rotary_pos_emb does not rotate the two halves of a head"]
    return []


class Parts:
    """Functions that differ between the ports; looked up in the trainer's module at each call, as its own code does."""

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self._own_norm = hasattr(module, "_apply_qk_norm")  # of NeMo Automodel
        self._fused = "fused" in inspect.signature(self._module.apply_rotary_pos_emb).parameters

    def norms(self, layer: Any, suffixes: Sequence[str], frozen: bool) -> Norms | None:
        """The norms of a layer's experts; None if a module is not a plain RMSNorm."""
        found = [[getattr(layer, f"{name}_norm{suffix}") for suffix in suffixes] for name in "qk"]
        modules = [module for pair in found for module in pair]
        if all(type(module) is nn.Identity for module in modules):
            return Norms(None, None, 0.0)
        rms = vars(self._module).get("Qwen2RMSNorm")
        epsilons: set[Any] = {getattr(module, "variance_epsilon", None) for module in modules}
        if len(epsilons) != 1 or None in epsilons or not all(_is_plain(module, rms) for module in modules):
            names = ", ".join(sorted({type(module).__name__ for module in modules}))
            logger.debug("patch: norms of q and k (%s) remain the trainer's modules", names)
            return None
        weights = [[module.weight for module in pair] for pair in found]
        if frozen:
            for pair in weights:
                pair[0] = _still(pair[0])
        return Norms(tuple(weights[0]), tuple(weights[1]), epsilons.pop())

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


def _is_plain(module: nn.Module, cls: type | None) -> bool:
    """Is it of exactly this class, without hooks and without a forward of its own?"""
    changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module) is cls and not changed


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
        q, k, v = _project(self, packed_sequence, "", frozen=False)
        norms = parts.norms(self, ("",), frozen=False)
        if norms is not None:
            q, k = _prologue(((q,), (k,)), norms, packed_position_embeddings, None)
        else:
            q, k, v = _normed(self, parts, (q, k, v), "", frozen=False)
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
        und = _project(self, packed_sequence[rows[0]], "", frozen)
        gen = _project(self, packed_sequence[rows[1]], GENERATION, frozen=False)
        norms = parts.norms(self, ("", GENERATION), frozen)
        embeddings = packed_position_embeddings
        if norms is not None:
            tokens = (packed_und_token_indexes, packed_gen_token_indexes)
            if mot_perm is not None:
                tokens = (mot_perm[rows[0]], mot_perm[rows[1]])
                embeddings = (embeddings[0][mot_inv], embeddings[1][mot_inv])
            pack = expect_pack("attention_mask", attention_mask)
            key = (packed_und_token_indexes, packed_gen_token_indexes, mot_perm)
            experts = pack.experts(key, lambda: ExpertRows(*tokens, packed_sequence.shape[0]))
            q, k, v = _prologue(tuple(zip(und, gen, strict=True)), norms, embeddings, experts)
        else:
            und = _normed(self, parts, und, "", frozen)
            gen = _normed(self, parts, gen, GENERATION, frozen=False)
            q, k, v = (_join(pair, rows, packed_sequence) for pair in zip(und, gen, strict=True))
            q, k = parts.rotate(self, q, k, embeddings)
            if mot_inv is not None:
                q, k, v = q[mot_inv], k[mot_inv], v[mot_inv]
        out = _attend(q, k, v, attention_mask)
        if mot_perm is not None:
            out = out[mot_perm]
        return _join((self.o_proj(out[rows[0]]), self.o_proj_moe_gen(out[rows[1]])), rows, out)

    return forward_train


def _project(layer: Any, x: Tensor, suffix: str, frozen: bool) -> Heads:
    """q, k, v of one expert in the dtype of x, before their norms."""
    q, k, v = (
        getattr(layer, f"{name}_proj{suffix}")(x).to(x.dtype).view(-1, heads, layer.head_dim)
        for name, heads in (
            ("q", layer.num_heads),
            ("k", layer.num_key_value_heads),
            ("v", layer.num_key_value_heads),
        )
    )
    return (_still(q), _still(k), _still(v)) if frozen else (q, k, v)


def _normed(layer: Any, parts: Parts, heads: Heads, suffix: str, frozen: bool) -> Heads:
    """The same with the norms of q and k, by the trainer's modules."""
    q, k = (
        parts.norm(layer, f"{name}_norm{suffix}", x).to(x.dtype) for name, x in zip("qk", heads, strict=False)
    )
    return (_still(q), _still(k), heads[2]) if frozen else (q, k, heads[2])


def _prologue(
    heads: Sequence[tuple[Tensor, ...]],
    norms: Norms,
    embeddings: tuple[Tensor, Tensor],
    experts: ExpertRows | None,
) -> tuple[Tensor, ...]:
    """q and k, and v if it is there, of one or two experts each, in the pack's order with norms and positions."""

    def shared(x: tuple[Tensor, ...] | None) -> Any:
        if x is None:
            return None
        return fit(x[0]) if experts is None else tuple(map(fit, x))

    def fit(x: Tensor) -> Tensor:  # a dtype that `qk_norm_rope` takes beside that of q
        return x if x.dtype is heads[0][0].dtype else x.float()

    cos, sin = map(fit, embeddings)
    tensors = heads if experts is not None else [x[0] for x in heads]
    return qk_norm_rope(
        *tensors,
        cos=cos,
        sin=sin,
        q_weight=shared(norms.q),
        k_weight=shared(norms.k),
        experts=experts,
        eps=norms.eps,
    )


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
    return _ZeroGradient.apply(x)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]


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
    return out.squeeze(0).transpose(0, 1).flatten(1)  # type: ignore[no-any-return]
