"""Python's half of the operators in launcher.cpp: fake kernels for tracing, and answers to its questions.

Importing this registers them, so the extension must be loaded first: use runtime/launcher.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnforge.runtime import dispatch, inputs


def _like(x: Tensor) -> Tensor:
    # As `like` of launcher.cpp: x's layout, as long as that leaves a unit last stride.
    y = torch.empty_like(x)
    return y if y.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _output(q: Tensor, v: Tensor) -> Tensor:
    # As `output` of launcher.cpp.
    if q.shape[3] == v.shape[3]:
        return _like(q)
    batch, heads, seq = q.shape[:3]
    if q.stride(1) < q.stride(2):
        return torch.empty((batch, seq, heads, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((batch, heads, seq, v.shape[3]), dtype=q.dtype, device=q.device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    mask: int,
    scale: float | None,
    deterministic: bool = False,
    visible: int = 0,
    dense: Tensor | None = None,
    variant: int = 0,
) -> tuple[Tensor, Tensor]:
    inputs.check_forward(q, k, v, starts, ends, mask, scale, dense)
    return _output(q, v), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    mask: int,
    scale: float | None,
    deterministic: bool = False,
    visible: int = 0,
    dense: Tensor | None = None,
    variant: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs.check_forward(q, k, v, starts, ends, mask, scale, dense)
    inputs.check_backward(q, v, dout, out, lse)
    return _like(q), _like(k), _like(v)


def _snapshot(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _complain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    mask: int,
    scale: float | None,
    dense: Tensor | None,
    visible: int,
    dout: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    inputs.check_forward(q, k, v, starts, ends, mask, scale, dense, visible)
    if dout is not None and out is not None and lse is not None:
        inputs.check_backward(q, v, dout, out, lse)


torch.library.register_fake("attnforge::forward", _forward)
torch.library.register_fake("attnforge::backward", _backward)
torch.library.register_fake("attnforge::snapshot", _snapshot)
torch.library.impl("attnforge::complain", "CompositeExplicitAutograd", _complain)
torch.library.impl("attnforge::resolve", "CompositeExplicitAutograd", dispatch.resolve)
