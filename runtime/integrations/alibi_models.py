"""Bloom, MPT and Falcon of transformers: models with ALiBi, whose attention classes do not use its interface.

`install` gives these classes a forward that runs attnforge if the model's attn_implementation is "attnforge", and
transformers' own otherwise. They add slopes[h] * kv_idx to the scores. Of the keys that a causal mask shows, this is
-slopes[h] * |q_idx - kv_idx| plus a number that is the same for the whole row, which softmax ignores: `scores.alibi`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attnforge.runtime.integrations.spans_tensor import visible_pairs
from attnforge.runtime.per_tensor import may_keep, once

Forward = Callable[..., tuple[Tensor, None]]

log = logging.getLogger("attnforge")


def install(name: str, attention: Forward, torch_only: bool) -> None:
    """Change the attention classes of transformers 5, unless `torch_only`; a second call changes nothing.

    name: the attn_implementation with which they use `attention`, a function as transformers' interface has them.
    """
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        return  # their arguments and results differ
    for kind, (prefix, forward) in _MODELS.items():
        try:
            library = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            cls, model = (getattr(library, f"{prefix}{part}") for part in ("Attention", "Model"))
            if kind == "falcon":
                library.FALCON_ATTENTION_CLASSES[name] = cls
        except (ImportError, AttributeError) as error:
            log.warning("register_huggingface: %s of this transformers is not supported: %s", prefix, error)
            continue
        if not torch_only and not hasattr(cls, "_attnforge"):
            model.forward = _giving_config(cls, model.forward)
            cls.forward = _choosing(name, functools.partial(forward, attention), cls.forward)
            cls._attnforge = True


def _giving_config(cls: type, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward, which first gives its attention modules the config, also if it was built before `install`."""

    @functools.wraps(forward)
    def given(self: Any, *arguments: Any, **named: Any) -> Any:
        if not getattr(self, "_attnforge_given", False):
            for module in self.modules():
                if isinstance(module, cls):
                    vars(module)["config"] = self.config
            self._attnforge_given = True
        return forward(self, *arguments, **named)

    return given


def _choosing(name: str, ours: Forward, theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def chosen(self: Any, *arguments: Any, **named: Any) -> Any:
        config = getattr(self, "config", None)  # none where a layer runs without its model
        own = ours if getattr(config, "_attn_implementation", None) == name else theirs
        return own(self, *arguments, **named)

    return chosen


def _bloom(
    attention: Forward,
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **rest: Any,
) -> tuple[Tensor, None]:
    """BloomAttention.forward; alibi is (B * H, 1, Sk)."""
    if self.pretraining_tp > 1 and self.slow_but_exact:
        raise ValueError(
            "slow_but_exact: not supported by attnforge; use attn_implementation='eager' for this model"
        )
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    biases = alibi.view(q.shape[0], q.shape[1], 1, -1)
    dropout = self.attention_dropout.p if self.training else 0.0
    out = _attend(attention, self, (q, k, v), attention_mask, biases, dropout, output_attentions)
    projected = nn.functional.dropout(self.dense(out), self.hidden_dropout, self.training)
    return residual + projected, None


def _mpt(
    attention: Forward,
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """MptAttention.forward; position_bias is (H, 1, max_seq_len), and reads the same for every query."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    cache = past_key_values if cache is None else cache
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    slopes = -position_bias[:, 0, -2]  # the last bias is 0
    dropout = self.attn_dropout_p if self.training else 0.0
    out, _ = attention(
        self, q, k, v, attention_mask, self.softmax_scale, dropout, is_causal=True, alibi_slopes=slopes
    )
    return self.out_proj(out.flatten(2)), None


def _falcon(
    attention: Forward,
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """FalconAttention.forward. With alibi, (B, H, 1, Sk) to be scaled, the mask is what the model adds for SDPA."""
    split = self._split_heads(self.query_key_value(hidden_states))
    q, k, v = (x.transpose(1, 2) for x in split)
    if alibi is None:
        model = importlib.import_module(type(self).__module__)
        cos, sin = position_embeddings
        q, k = model.apply_rotary_pos_emb(q, k, cos, sin)
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    dropout = 0.0
    if alibi is not None:
        dropout = self.attention_dropout.p if self.training else 0.0
        if attention_mask is not None:
            attention_mask = _visible_once(attention_mask[:, :1])
        alibi = alibi.view(q.shape[0], q.shape[1], 1, -1) * self.inv_norm_factor
    out = _attend(attention, self, (q, k, v), attention_mask, alibi, dropout, output_attentions)
    return self.dense(out), None


def _visible_once(mask: Tensor) -> Tensor:
    """`visible_pairs`, as one tensor for all layers, of which attention makes one mask."""
    keep = mask.dtype.is_floating_point and may_keep(mask)  # what is kept must not be the mask itself
    return once(visible_pairs, mask) if keep else visible_pairs(mask)


def _attend(
    attention: Forward,
    module: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    biases: Tensor | None,
    dropout: float,
    output_attentions: bool,
) -> Tensor:
    """Attention, (B, Sq, H * D). `biases` (B, H, 1, Sk) do not count hidden keys as positions, so they are a line only
    without a mask.
    """
    slopes = None
    if biases is not None and mask is None and biases.shape[-1] > 1:
        slopes, biases = biases[:, :, 0, 1], None  # the first one is 0
    out, _ = attention(
        module,
        *qkv,
        mask,
        module.inv_norm_factor,
        dropout,
        is_causal=True,
        position_bias=biases,
        alibi_slopes=slopes,
        output_attentions=output_attentions,
    )
    return out.flatten(2)


_MODELS: dict[str, tuple[str, Forward]] = {
    "bloom": ("Bloom", _bloom),
    "mpt": ("Mpt", _mpt),
    "falcon": ("Falcon", _falcon),
}
