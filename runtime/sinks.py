"""Learned sinks: `with_sinks` joins them to the results of attention, in one pass over them on a GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnforge.codegen.modules import sink_kernels
from attnforge.runtime import kernels
from attnforge.runtime.build.cache import obtain
from attnforge.runtime.inputs import expect_local, expect_tensors
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.native.layout import like

THREADS, ROWS = 256, 64  # kThreads and kRows of templates/common/sinks.cu.jinja


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention whose rows' denominators also hold e^sink, for learned sinks as gpt-oss has them.

    out (B, Hq, Sq, Dv) and lse (B, Hq, Sq) as `attention` returns them; sinks (Hq), a floating-point tensor.
    Exact and differentiable in all three: out * sigmoid(lse - sink), and logaddexp(lse, sink), in float32. A row that
    sees no key stays zeros; its lse becomes the sink. Raises ValueError or TypeError naming the argument.
    """
    expect_sinks(sinks, out.shape[1], out.device)
    if _fits(out):
        sunk: tuple[Tensor, Tensor] = _forward_op(out, lse, sinks.float())
        return sunk
    return _composed(out, lse, sinks)


def expect_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless these are sinks of that many query heads."""
    expect_tensors(sinks=sinks)
    expect_local("sinks", sinks)
    if sinks.shape != (heads,) or not sinks.dtype.is_floating_point or sinks.device != device:
        raise ValueError(
            f"sinks: got {tuple(sinks.shape)} {sinks.dtype} on {sinks.device}, expected (heads_q) = "
            f"{(heads,)} of a floating-point dtype on {device}"
        )


def _composed(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`with_sinks` by torch's operations: on the CPU, in torch.func's transforms, and where the kernels do not fit."""
    # Both may be -inf, of which differences and their gradients are NaN. As numbers, -1e30 has the same effect.
    total, sink = (x.float().clamp(min=-1e30) for x in (lse, sinks[None, :, None]))
    share = torch.sigmoid(total - sink)
    joined = torch.logaddexp(total, sink)
    whole = torch.where(joined <= -1e30, -torch.inf, joined)  # NaN stays
    return (out * torch.where(lse == -torch.inf, 0.0, share)[..., None]).to(out.dtype), whole


def _fits(out: Tensor) -> bool:
    """Whether the kernels take these rows: up to 32 whole vectors of 16 bytes each."""
    size = out.shape[-1] * out.element_size()
    transformed = not is_compiling() and torch._C._are_functorch_transforms_active()
    return out.device.type == "cuda" and size % 16 == 0 and size <= 512 and not transformed


# ---- The kernels


class Rows(ctypes.Structure):
    """A tensor (B, Hq, Sq, Dv): `Tensor` of the kernels' source."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("batch", "head", "row")))

    @staticmethod
    def of(x: Tensor) -> Rows:
        return Rows(x.data_ptr(), *x.stride()[:3])


class Params(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = (
        *((name, Rows) for name in ("rows", "sunk", "dout")),
        *((name, ctypes.c_void_p) for name in ("z", "lse", "lse_sunk", "dlse_sunk", "dlse", "dz")),
        *((name, ctypes.c_int) for name in ("heads", "seq", "vectors", "lanes")),
    )


@cache
def _load(dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Handles of the forward and the backward, compiled if they are not in the cache."""
    launcher()
    module = sink_kernels(kernels.target(device), kernels.DTYPES[dtype])
    entry = obtain(module)
    binary = kernels.binary_of(entry)
    forward, backward = (
        int(torch.ops.attnforge.add_function(name, device, binary, "")) for name in module.symbols
    )
    return forward, backward


def _launch(backward: bool, x: Tensor, p: Params) -> None:
    function = _load(x.dtype, x.device)[backward]  # before the operator is looked up: the launcher defines it
    argument = torch.frombuffer(p, dtype=torch.uint8)
    torch.ops.attnforge.launch_function(function, _blocks(x), THREADS, argument)


def _blocks(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * -(-x.shape[2] // ROWS)


def _vectors(x: Tensor) -> Tensor:
    """x if 16-byte loads can read its rows, else a copy: a contiguous tensor, too, may begin anywhere."""
    steps = [x.data_ptr(), *(n * x.element_size() for n in x.stride()[:3])]
    readable = x.stride(3) == 1 and all(n % 16 == 0 for n in steps)
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _params(x: Tensor, sunk: Tensor, **pointers: Tensor) -> Params:
    p = Params(Rows.of(x), Rows.of(sunk), heads=x.shape[1], seq=x.shape[2])
    p.vectors = x.shape[3] * x.element_size() // 16
    p.lanes = 1 << (p.vectors - 1).bit_length()
    for name, tensor in pointers.items():
        setattr(p, name, tensor.data_ptr())
    return p


# ---- The operators


def run_forward(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with sinks (Hq), float32."""
    out, lse, sinks = _vectors(out), lse.contiguous(), sinks.contiguous()
    sunk, lse_sunk = like(out), torch.empty_like(lse)
    if out.numel():
        _launch(False, out, _params(out, sunk, z=sinks, lse=lse, lse_sunk=lse_sunk))
    return sunk, lse_sunk


def run_backward(
    dout_sunk: Tensor, dlse_sunk: Tensor, sunk: Tensor, lse: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of out, lse and sinks, from those of the results of `run_forward` and its first result."""
    dout_sunk, sunk = _vectors(dout_sunk), _vectors(sunk)
    dlse_sunk, lse, sinks = dlse_sunk.contiguous(), lse.contiguous(), sinks.contiguous()
    dout, dlse = like(sunk), torch.empty_like(lse)
    dz = torch.empty(
        (_blocks(sunk) // max(1, sinks.numel()), sinks.numel()), dtype=torch.float32, device=sunk.device
    )
    if sunk.numel():
        p = _params(dout_sunk, sunk, z=sinks, lse=lse, dlse_sunk=dlse_sunk, dlse=dlse, dz=dz)
        p.dout = Rows.of(dout)
        _launch(True, sunk, p)
    return dout, dlse, dz.sum(0)


def _fake_forward(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return like(out), torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)


def _fake_backward(
    dout_sunk: Tensor, dlse_sunk: Tensor, sunk: Tensor, lse: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return like(sunk), torch.empty_like(lse), torch.empty_like(sinks)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, lse, sinks = inputs
    ctx.save_for_backward(output[0], lse, sinks)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward_op(dout, dlse, *ctx.saved_tensors)
    return gradients


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "attnforge: second derivatives of attention are not implemented; call backward without create_graph=True"
    )


_forward_op = torch.library.custom_op(
    "attnforge::sinks",
    run_forward,
    mutates_args=(),
    schema="(Tensor out, Tensor lse, Tensor sinks) -> (Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "attnforge::sinks_backward",
    run_backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor out, Tensor lse, Tensor sinks) -> (Tensor, Tensor, Tensor)",
)
_forward_op.register_fake(_fake_forward)
_backward_op.register_fake(_fake_backward)
_forward_op.register_autograd(_differentiate, setup_context=_setup)
_backward_op.register_autograd(_refuse)
