"""Do attentions agree: results of a forward and backward, and the relative difference of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from attnforge.bagel.measure.attentions import Attention
from attnforge.codegen.spec import DType
from attnforge.runtime.search.case import Inputs

# What `relative` may be between two attentions in a dtype, whose roundings differ.
TOLERANCE = {DType.BFLOAT16: 2e-2, DType.FLOAT16: 5e-3, DType.FLOAT32: 1e-4}

PART = 1 << 26  # elements that are compared at a time: gradients of a bias are large


def results(call: Attention, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk and dv."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    out = call(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), x.dout)
    return out.detach(), dq, dk, dv


def relative(got: Tensor, exact: Tensor) -> float:
    """RMS of the difference over the RMS of `exact`, in float64: 0 where they are equal, inf where one holds NaN."""
    parts = zip(got.reshape(-1).split(PART), exact.reshape(-1).split(PART), strict=True)
    sums = [((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in parts]
    error, size = (torch.stack(column).sum() for column in zip(*sums, strict=True))
    if not error:
        return 0.0
    return float((error / size).sqrt().nan_to_num(torch.inf))
