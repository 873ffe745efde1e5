"""Packed vision attention as the official siglip_navit.py calls it. Written for tests."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn


class SiglipFlashAttention2(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, max_seqlen: int, **kwargs: Any) -> Tensor:
        tokens = hidden_states.shape[0]
        q, k, v = (proj(hidden_states).view(tokens, self.heads, -1) for proj in self.qkv)
        attn_output = flash_attn_varlen_func(
            q.to(torch.bfloat16),
            k.to(torch.bfloat16),
            v.to(torch.bfloat16),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            causal=False,
        )
        out: Tensor = self.out_proj(attn_output.reshape(tokens, -1))
        return out
