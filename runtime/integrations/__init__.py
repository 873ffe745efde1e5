"""Attention under other names: SDPA, flash-attn, FlexAttention, transformers, checkpointing."""
