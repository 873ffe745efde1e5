"""The training forward pass of the official bagel.py, as far as attention goes. Written for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from .qwen2_navit import Qwen2Model
from .siglip_navit import SiglipFlashAttention2


def create_sparse_mask(
    document_lens: list[int], split_lens: list[int], attn_modes: list[str], device: torch.device
) -> Any:
    def expand(values: list[int], lens: list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor(lens)).to(device)

    kinds = list(enumerate(attn_modes))
    whole = expand([i if mode in ("full", "noise") else -1 for i, mode in kinds], split_lens)
    noise = expand([i if mode == "noise" else -1 for i, mode in kinds], split_lens)
    document = expand(list(range(len(document_lens))), document_lens)

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (whole[q] == whole[k]) & (whole[q] >= 0)

    def clean(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~((noise[k] >= 0) & (noise[q] != noise[k]))

    def together(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    return and_masks(or_masks(causal, full), clean, together)


class Bagel(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 4, heads_kv: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.language_model = Qwen2Model(hidden, heads, heads_kv, layers)
        self.vit_model = SiglipFlashAttention2(hidden, heads)

    def forward(
        self,
        sequence_length: int,
        packed_sequence: Tensor,
        sample_lens: list[int],
        packed_position_ids: Tensor,
        packed_text_indexes: Tensor,
        packed_vae_token_indexes: Tensor,
        nested_attention_masks: list[Tensor] | None = None,
        split_lens: list[int] | None = None,
        attn_modes: list[str] | None = None,
        packed_vit_tokens: Tensor | None = None,
        packed_vit_token_indexes: Tensor | None = None,
        vit_token_seqlens: Tensor | None = None,
    ) -> Tensor:
        attention_mask: Any = nested_attention_masks
        if nested_attention_masks is None:
            assert split_lens is not None
            assert attn_modes is not None
            sparse_mask = create_sparse_mask(sample_lens, split_lens, attn_modes, packed_sequence.device)
            seqlen = sum(sample_lens)
            # The official code compiles it; that takes half a minute on a CPU and gives the same mask.
            attention_mask = create_block_mask(
                sparse_mask, B=1, H=self.num_heads, Q_LEN=seqlen, KV_LEN=seqlen,
                device=str(packed_sequence.device), BLOCK_SIZE=128, _compile=False,
            )  # fmt: skip
        und = packed_text_indexes
        if packed_vit_tokens is not None:
            assert packed_vit_token_indexes is not None
            assert vit_token_seqlens is not None
            cu_seqlens = nn.functional.pad(torch.cumsum(vit_token_seqlens, dim=0), (1, 0)).to(torch.int32)
            vit = self.vit_model(packed_vit_tokens, cu_seqlens, int(vit_token_seqlens.max()))
            packed_sequence = packed_sequence.clone()
            packed_sequence[packed_vit_token_indexes] = vit.to(packed_sequence.dtype)
            und = torch.cat([packed_text_indexes, packed_vit_token_indexes])
        out: Tensor = self.language_model(
            packed_sequence=packed_sequence,
            sample_lens=sample_lens,
            attention_mask=attention_mask,
            packed_position_ids=packed_position_ids,
            packed_und_token_indexes=und,
            packed_gen_token_indexes=packed_vae_token_indexes,
        )
        return out
