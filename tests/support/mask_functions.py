"""Functions of masks (b, h, q_idx, kv_idx), and what they show by torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracle import Shape
from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def functions(shape: Shape, device: str = "cpu") -> dict[str, Function]:
    """Masks by name: with empty rows, of captured tensors, of batch entries and query heads."""
    draw = torch.Generator().manual_seed(7)
    length = max(shape.seq_q, shape.seq_k)
    document = torch.randint(0, 3, (shape.batch, length), generator=draw).sort(1).values.to(device)
    image = (torch.rand(length, generator=draw) < 0.3).to(device)
    limit = torch.rand(shape.heads_kv * shape.group, generator=draw).bfloat16().to(device)

    def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document[b, q_idx] == document[b, kv_idx]) & (image[kv_idx] | (kv_idx <= q_idx))

    def heads(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        far = (q_idx - kv_idx).abs() > limit[h] * 64
        return torch.where((h + b) % 2 == 0, far, ~far) & (q_idx != 11)

    def blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx // 24 > kv_idx // 24) | ((q_idx // 24 == kv_idx // 24) & (q_idx % 24 != 5))

    return {
        "documents": documents,
        "heads": heads,
        "blocks": blocks,
        "window": lambda b, h, i, j: (j <= i) & (i - j < 40),
        "nothing": lambda b, h, i, j: i < 0,
        "everything": lambda b, h, i, j: i >= 0,
    }


def visible(function: Function, shape: Shape, device: str = "cpu") -> Tensor:
    """bool (batch, heads_q, seq_q, seq_k): the function of every pair."""
    sizes = (shape.batch, shape.heads_kv * shape.group, shape.seq_q, shape.seq_k)
    index = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
    return function(*index).expand(sizes)
