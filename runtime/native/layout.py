"""Results without values, in the layout of an argument: `like` and `output` of runtime/native/arguments.h."""

from __future__ import annotations

import torch
from torch import Tensor


def like(x: Tensor) -> Tensor:
    """A new tensor in x's layout. Kernels need a unit last stride, which some overlapping layouts do not keep."""
    if x.shape[3] == 1:  # the strides of such an axis are arbitrary
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    return y if y.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def output(q: Tensor, v: Tensor) -> Tensor:
    """The output: in q's layout, with the rows of v. With another head_dim only the order of the axes can be kept."""
    if q.shape[3] == v.shape[3]:
        return like(q)
    batch, heads, seq = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return torch.empty((batch, seq, heads, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((batch, heads, seq, v.shape[3]), dtype=q.dtype, device=q.device)
