"""Scores in CuTe's language, as FlashAttention-4 takes them: ALiBi and a relative bias. Needs flash-attn-4.

A score function of FlashAttention-4 maps vectors of scores, and of the indices that belong to them, to new scores; what
it reads from memory are `aux_tensors`. Its gradient function maps the gradient of the new scores to that of the old.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute


@cute.jit
def _element(tensor: Any, first: Any, second: Any) -> Any:
    """tensor[first, second] of two indices that are vectors of one element, in float32."""
    row, column = cute.make_rmem_tensor(1, cutlass.Int32), cute.make_rmem_tensor(1, cutlass.Int32)
    row.store(first)
    column.store(second)
    value = cute.make_rmem_tensor(1, tensor.element_type)
    value[0] = tensor[row[0], column[0]]
    return value.load().to(cutlass.Float32)


@cute.jit
def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """score - slopes[h, 0] * |q_idx - kv_idx|, with slopes (Hq, 1)."""
    slope = _element(aux_tensors[0], h, cute.full_like(h, 0))
    behind, ahead = (q_idx - kv_idx).to(cutlass.Float32), (kv_idx - q_idx).to(cutlass.Float32)
    return score - slope * cute.where(behind > ahead, behind, ahead)


@cute.jit
def relative_bias(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """score + table[h, n + clamp(kv_idx - q_idx, -n, n)], with a table (Hq, 2 n + 1)."""
    table = aux_tensors[0]
    most = table.shape[1] - 1
    at = kv_idx - q_idx + most // 2
    at = cute.where(at < 0, cute.full_like(at, 0), at)
    at = cute.where(at > most, cute.full_like(at, most), at)
    return score + _element(table, h, at)


@cute.jit
def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    """score + bias[q_idx, kv_idx]."""
    return score + _element(aux_tensors[0], q_idx, kv_idx)


@cute.jit
def unchanged(
    grad: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """The gradient of scores to which something is added that does not depend on them."""
    return grad
