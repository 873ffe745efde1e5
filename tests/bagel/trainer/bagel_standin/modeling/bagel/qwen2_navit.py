"""Packed attention as the official qwen2_navit.py calls it, and the least model around it. Written for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, block_mask: Any) -> Tensor:
    """The official code calls torch's, which has no backward pass on a CPU: the same from its mask_mod."""
    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device=str(q.device))
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa)


def pad_sequence(tensor: Tensor, pad_size: int) -> Tensor:
    heads, _, dim = tensor.shape
    return torch.cat([tensor, tensor.new_zeros((heads, pad_size, dim))], dim=1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([-right, left], dim=-1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


class Qwen2RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)


class PackedAttention(nn.Module):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_norm: Qwen2RMSNorm
    k_norm: Qwen2RMSNorm

    def __init__(self, hidden: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, heads_kv, hidden // heads
        self.num_key_value_groups, self.hidden_size = heads // heads_kv, hidden
        self.config = SimpleNamespace(freeze_und=False)
        self.add_projections("", heads_kv * self.head_dim)

    def add_projections(self, suffix: str, size_kv: int) -> None:
        size = self.num_heads * self.head_dim
        for name, rows in (("q", size), ("k", size_kv), ("v", size_kv)):
            setattr(self, f"{name}_proj{suffix}", nn.Linear(self.hidden_size, rows))
        for name in ("q", "k"):
            setattr(self, f"{name}_norm{suffix}", Qwen2RMSNorm(self.head_dim))
        setattr(self, f"o_proj{suffix}", nn.Linear(size, self.hidden_size, bias=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self.forward_train(*args, **kwargs)
        return self.forward_inference(*args, **kwargs)

    def forward_train(
        self,
        packed_sequence: Tensor,
        sample_lens: list[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        q = self.q_norm(self.q_proj(packed_sequence).view(-1, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(packed_sequence).view(-1, self.num_key_value_heads, self.head_dim))
        v = self.v_proj(packed_sequence).view(-1, self.num_key_value_heads, self.head_dim)
        cos, sin = packed_position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
        if isinstance(attention_mask, list):
            k = (
                k[:, :, None, :]
                .repeat(1, 1, self.num_key_value_groups, 1)
                .reshape(-1, self.num_heads, self.head_dim)
            )
            v = (
                v[:, :, None, :]
                .repeat(1, 1, self.num_key_value_groups, 1)
                .reshape(-1, self.num_heads, self.head_dim)
            )
            parts = (x.transpose(0, 1).split(sample_lens, dim=1) for x in (q, k, v))
            outs = []
            for q_one, k_one, v_one, mask in zip(*parts, attention_mask, strict=True):
                attn_output = scaled_dot_product_attention(
                    q_one.to(torch.bfloat16).unsqueeze(0),
                    k_one.to(torch.bfloat16).unsqueeze(0),
                    v_one.to(torch.bfloat16).unsqueeze(0),
                    mask.to(torch.bfloat16).unsqueeze(0),
                )
                outs.append(attn_output.squeeze(0))
            out = torch.cat(outs, dim=1)
        else:
            pad_size = sum(sample_lens) - q.shape[0]
            q = pad_sequence(q.permute(1, 0, 2), pad_size)
            k = pad_sequence(k.permute(1, 0, 2), pad_size)
            v = pad_sequence(v.permute(1, 0, 2), pad_size)
            padded: Any = flex_attention(
                q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), enable_gqa=True, block_mask=attention_mask
            )
            end_index = padded.shape[2] - pad_size
            out = padded[0, :, :end_index, :]
        flat: Tensor = self.o_proj(out.transpose(0, 1).reshape(-1, self.hidden_size))
        return flat

    def forward_inference(
        self, packed_query_sequence: Tensor, query_lens: Tensor, is_causal: bool = True
    ) -> Tensor:
        heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        q, k, v = (
            proj(packed_query_sequence).view(-1, count, self.head_dim).to(torch.bfloat16)
            for proj, count in zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
        )
        cu_seqlens = nn.functional.pad(torch.cumsum(query_lens, dim=0), (1, 0)).to(torch.int32)
        longest = int(query_lens.max())
        out = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=is_causal,
        )
        flat: Tensor = self.o_proj(out.reshape(-1, self.num_heads * self.head_dim))
        return flat


class PackedAttentionMoT(PackedAttention):
    q_proj_moe_gen: nn.Linear
    k_proj_moe_gen: nn.Linear
    v_proj_moe_gen: nn.Linear
    o_proj_moe_gen: nn.Linear
    q_norm_moe_gen: Qwen2RMSNorm
    k_norm_moe_gen: Qwen2RMSNorm

    def __init__(self, hidden: int, heads: int, heads_kv: int) -> None:
        super().__init__(hidden, heads, heads_kv)
        self.add_projections("_moe_gen", heads_kv * self.head_dim)

    def forward_train(  # type: ignore[override]
        self,
        packed_sequence: Tensor,
        sample_lens: list[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
        packed_und_token_indexes: Tensor,
        packed_gen_token_indexes: Tensor,
    ) -> Tensor:
        und, gen = packed_und_token_indexes, packed_gen_token_indexes
        x_und, x_gen = packed_sequence[und], packed_sequence[gen]
        raw = []
        for first, second, heads in (
            (self.q_proj, self.q_proj_moe_gen, self.num_heads),
            (self.k_proj, self.k_proj_moe_gen, self.num_key_value_heads),
            (self.v_proj, self.v_proj_moe_gen, self.num_key_value_heads),
        ):
            x = packed_sequence.new_zeros((packed_sequence.shape[0], heads * self.head_dim))
            x[und] = first(x_und).to(x)
            x[gen] = second(x_gen).to(x)
            raw.append(x.view(-1, heads, self.head_dim))
        v = raw[2]
        if self.config.freeze_und:
            v[und] = v[und].detach()
        normed = []
        for x, norm, norm_gen in (
            (raw[0], self.q_norm, self.q_norm_moe_gen),
            (raw[1], self.k_norm, self.k_norm_moe_gen),
        ):
            y = x.new_zeros(x.shape)
            y[und] = norm(x[und])
            if self.config.freeze_und:
                y[und] = y[und].detach()
            y[gen] = norm_gen(x[gen])
            normed.append(y)
        cos, sin = packed_position_embeddings
        q, k = apply_rotary_pos_emb(normed[0], normed[1], cos, sin, unsqueeze_dim=1)
        if isinstance(attention_mask, list):
            k = (
                k[:, :, None, :]
                .repeat(1, 1, self.num_key_value_groups, 1)
                .reshape(-1, self.num_heads, self.head_dim)
            )
            v = (
                v[:, :, None, :]
                .repeat(1, 1, self.num_key_value_groups, 1)
                .reshape(-1, self.num_heads, self.head_dim)
            )
            parts = (x.transpose(0, 1).split(sample_lens, dim=1) for x in (q, k, v))
            outs = []
            for q_one, k_one, v_one, mask in zip(*parts, attention_mask, strict=True):
                attn_output = scaled_dot_product_attention(
                    q_one.to(torch.bfloat16).unsqueeze(0),
                    k_one.to(torch.bfloat16).unsqueeze(0),
                    v_one.to(torch.bfloat16).unsqueeze(0),
                    mask.to(torch.bfloat16).unsqueeze(0),
                )
                outs.append(attn_output.squeeze(0))
            out = torch.cat(outs, dim=1)
        else:
            pad_size = sum(sample_lens) - q.shape[0]
            q = pad_sequence(q.permute(1, 0, 2), pad_size)
            k = pad_sequence(k.permute(1, 0, 2), pad_size)
            v = pad_sequence(v.permute(1, 0, 2), pad_size)
            padded: Any = flex_attention(
                q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), enable_gqa=True, block_mask=attention_mask
            )
            end_index = padded.shape[2] - pad_size
            out = padded[0, :, :end_index, :]
        flat = out.transpose(0, 1).reshape(-1, self.num_heads * self.head_dim)
        result = flat.new_zeros(flat.shape)
        result[und] = self.o_proj(flat[und]).to(flat)
        result[gen] = self.o_proj_moe_gen(flat[gen]).to(flat)
        return result


class Qwen2Model(nn.Module):
    def __init__(self, hidden: int, heads: int, heads_kv: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedAttentionMoT(hidden, heads, heads_kv) for _ in range(layers))
        self.head_dim = hidden // heads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self.forward_train(*args, **kwargs)
        return self.forward_inference(*args, **kwargs)

    def forward_train(
        self,
        packed_sequence: Tensor,
        sample_lens: list[int],
        attention_mask: Any,
        packed_position_ids: Tensor,
        packed_und_token_indexes: Tensor | None = None,
        packed_gen_token_indexes: Tensor | None = None,
    ) -> Tensor:
        powers = torch.linspace(0, 1, self.head_dim // 2, device=packed_sequence.device).repeat(2)
        angles = packed_position_ids[:, None] / 10**powers
        embeddings = (angles.cos().to(packed_sequence.dtype), angles.sin().to(packed_sequence.dtype))
        for layer in self.layers:
            out = checkpoint(
                layer,
                use_reentrant=False,
                packed_sequence=packed_sequence,
                sample_lens=sample_lens,
                attention_mask=attention_mask,
                packed_position_embeddings=embeddings,
                packed_und_token_indexes=packed_und_token_indexes,
                packed_gen_token_indexes=packed_gen_token_indexes,
            )
            assert isinstance(out, Tensor)
            packed_sequence = packed_sequence + out
        return packed_sequence

    def forward_inference(
        self, packed_query_sequence: Tensor, query_lens: Tensor, is_causal: bool = True
    ) -> Tensor:
        for layer in self.layers:
            packed_query_sequence = packed_query_sequence + layer(
                packed_query_sequence, query_lens, is_causal
            )
        return packed_query_sequence
