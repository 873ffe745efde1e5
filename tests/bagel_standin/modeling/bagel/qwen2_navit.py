"""Packed attention as the official qwen2_navit.py calls it, and the least model around it. Written for tests."""

from __future__ import annotations

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


class PackedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, heads_kv, hidden // heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, heads_kv * self.head_dim)
        self.v_proj = nn.Linear(hidden, heads_kv * self.head_dim)
        self.o_proj = nn.Linear(hidden, hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return self.forward_train(*args, **kwargs)
        return self.forward_inference(*args, **kwargs)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.q_proj(x).view(-1, self.num_heads, self.head_dim),
            self.k_proj(x).view(-1, self.num_key_value_heads, self.head_dim),
            self.v_proj(x).view(-1, self.num_key_value_heads, self.head_dim),
        )

    def forward_train(
        self,
        packed_sequence: Tensor,
        sample_lens: list[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        q, k, v = self.project(packed_sequence)
        cos, _ = packed_position_embeddings
        q, k = q * cos[:, None], k * cos[:, None]
        if isinstance(attention_mask, list):
            group = self.num_heads // self.num_key_value_heads
            k = k[:, :, None, :].repeat(1, 1, group, 1).reshape(-1, self.num_heads, self.head_dim)
            v = v[:, :, None, :].repeat(1, 1, group, 1).reshape(-1, self.num_heads, self.head_dim)
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
        flat: Tensor = self.o_proj(out.transpose(0, 1).reshape(-1, self.num_heads * self.head_dim))
        return flat

    def forward_inference(
        self, packed_query_sequence: Tensor, query_lens: Tensor, is_causal: bool = True
    ) -> Tensor:
        q, k, v = (x.to(torch.bfloat16) for x in self.project(packed_query_sequence))
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
    def __init__(self, hidden: int, heads: int, heads_kv: int) -> None:
        super().__init__(hidden, heads, heads_kv)
        self.gen = PackedAttention(hidden, heads, heads_kv)

    def forward_train(  # type: ignore[override]
        self,
        packed_sequence: Tensor,
        sample_lens: list[int],
        attention_mask: Any,
        packed_position_embeddings: tuple[Tensor, Tensor],
        packed_und_token_indexes: Tensor,
        packed_gen_token_indexes: Tensor,
    ) -> Tensor:
        states = []
        for und, gen in zip(self.project(packed_sequence), self.gen.project(packed_sequence), strict=True):
            x = und.new_zeros(und.shape)
            x[packed_und_token_indexes] = und[packed_und_token_indexes]
            x[packed_gen_token_indexes] = gen[packed_gen_token_indexes]
            states.append(x)
        q, k, v = states
        cos, _ = packed_position_embeddings
        q, k = q * cos[:, None], k * cos[:, None]
        if isinstance(attention_mask, list):
            group = self.num_heads // self.num_key_value_heads
            k = k[:, :, None, :].repeat(1, 1, group, 1).reshape(-1, self.num_heads, self.head_dim)
            v = v[:, :, None, :].repeat(1, 1, group, 1).reshape(-1, self.num_heads, self.head_dim)
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
        result[packed_und_token_indexes] = self.o_proj(flat[packed_und_token_indexes]).to(flat.dtype)
        result[packed_gen_token_indexes] = self.gen.o_proj(flat[packed_gen_token_indexes]).to(flat.dtype)
        return result

    def forward_inference(
        self, packed_query_sequence: Tensor, query_lens: Tensor, is_causal: bool = True
    ) -> Tensor:
        q, k, v = (x.to(torch.bfloat16) for x in self.project(packed_query_sequence))
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
        powers = torch.linspace(0, 1, self.head_dim, device=packed_sequence.device)
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
