"""SwiGLU's activation, silu(gate) * up: one kernel a direction where there is a Triton, else torch's own.

gate and up are the halves of one product's columns, and so are their gradients: the product of the two gradients with
the weights sums both. Autograd of the plain expression keeps gate, up and silu(gate), and its five kernels read and
write 14 tensors; here gate and up are kept, and two kernels read and write 8. Operators, which selective checkpointing
sees as one call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnforge.bagel.mot.triton_kernels import fit, triton_kernels


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (N, mlp) of gate_up (N, 2 mlp), gate first, in its dtype; differentiable once."""
    result: Tensor = _forward_op(gate_up)
    return result


def _ahead(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


def _back(dout: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return torch.cat((torch.ops.aten.silu_backward(dout * up, gate), dout * F.silu(gate)), 1)


def _forward(gate_up: Tensor) -> Tensor:
    kernels = triton_kernels("swiglu_triton") if fit(gate_up) else None
    result: Tensor = (_ahead if kernels is None else kernels.forward)(gate_up)
    return result


def _backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    kernels = triton_kernels("swiglu_triton") if fit(dout, gate_up) else None
    result: Tensor = (_back if kernels is None else kernels.backward)(dout, gate_up)
    return result


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> Tensor:
    gradient: Tensor = _backward_op(dout, *ctx.saved_tensors)
    return gradient


_forward_op: Any = torch.library.custom_op(
    "attnforge::swiglu", _forward, mutates_args=(), schema="(Tensor gate_up) -> Tensor"
)
_backward_op: Any = torch.library.custom_op(
    "attnforge::swiglu_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor gate_up) -> Tensor",
)
# The formulas themselves: their results' strides depend on all arguments.
_forward_op.register_fake(_ahead)
_backward_op.register_fake(_back)
_forward_op.register_autograd(_differentiate, setup_context=_setup)
