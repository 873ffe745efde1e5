"""SwiGLU's activation, silu(gate) * up: one kernel a direction where there is a Triton, else torch's own.

Autograd of the plain expression keeps gate, up and silu(gate), and its five kernels read and write 14 tensors; here
gate and up are kept, and two kernels read and write 8. Operators, which selective checkpointing sees as one call.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype of both; differentiable once. gate, up: of one shape."""
    result: Tensor = _forward_op(gate, up)
    return result


def _ahead(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _back(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dup = dout * F.silu(gate)
    return torch.ops.aten.silu_backward(dout * up, gate), dup


@cache
def _kernels() -> ModuleType | None:
    """swiglu_triton.py, where there is a Triton."""
    found = importlib.util.find_spec("triton") is not None
    return importlib.import_module("attnforge.bagel.mot.swiglu_triton") if found else None


def _fit(*tensors: Tensor) -> bool:
    """Whether the kernels take them; others take torch's."""
    return all(x.is_cuda and x.numel() and x.is_contiguous() and x.dtype.itemsize < 8 for x in tensors)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    kernels = _kernels() if _fit(gate, up) else None
    result: Tensor = _ahead(gate, up) if kernels is None else kernels.forward(gate, up)
    return result


def _backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    kernels = _kernels() if _fit(dout, gate, up) else None
    dgate, dup = (_back if kernels is None else kernels.backward)(dout, gate, up)
    return dgate, dup


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _backward_op(dout, *ctx.saved_tensors)
    return gradients


_forward_op: Any = torch.library.custom_op(
    "attnforge::swiglu", _forward, mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor"
)
_backward_op: Any = torch.library.custom_op(
    "attnforge::swiglu_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)",
)
# The formulas themselves: their results' strides depend on all arguments.
_forward_op.register_fake(_ahead)
_backward_op.register_fake(_back)
_forward_op.register_autograd(_differentiate, setup_context=_setup)
