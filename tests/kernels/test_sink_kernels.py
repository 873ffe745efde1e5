"""The kernels that add sinks to the results of attention: in the emulator, compiled by nvcc, and on a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import gxx
import pytest
import torch
from emulator import FLAGS, PARTS
from torch import Tensor

from attnforge.codegen.modules import sink_kernels
from attnforge.codegen.spec import Arch, DType
from attnforge.runtime import sinks
from attnforge.runtime.build import toolchain
from attnforge.runtime.kernels import TORCH_DTYPES

BODIES = {
    "unpack": "return make_float2(widen(pair & 0xffffu), widen(pair >> 16));",
    "pack": "return narrow_pair(low, high);",
}
LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(dtype: torch.dtype, dim: int, seq: int, device: str = "cpu") -> Case:
    """out, lse, sinks, and gradients of the results; heads lie beside each other, one row and one sink are -inf."""
    torch.manual_seed(dim + seq)
    out, dout = torch.randn(2, 2, seq, 3, dim, device=device).to(dtype).transpose(2, 3)
    lse, dlse = torch.randn(2, 2, 3, seq, device=device) * 2
    z = torch.tensor([0.5, -1.0, -torch.inf], device=device)
    out[:, :, 1], lse[:, :, 1] = 0, -torch.inf
    dlse[:, 2, 1] = 0  # of an lse of -inf
    return out, lse, z, dout, dlse


def check(case: Case, found: tuple[Tensor, ...]) -> None:
    """(out, lse, their gradients, that of the sinks) against torch's operations in float64."""
    out, lse, z, dout, dlse = case
    exact = [x.detach().double().requires_grad_() for x in (out, lse, z)]
    total, sink = exact[1].clamp(min=-1e30), exact[2].clamp(min=-1e30)[:, None]
    sunk = exact[0] * torch.where(lse == -torch.inf, 0.0, torch.sigmoid(total - sink))[..., None]
    joined = torch.logaddexp(total, sink)
    gradients = torch.autograd.grad([sunk, joined], exact, [dout.double(), dlse.double()])
    answers = (sunk, joined.where(joined > -1e30, -torch.inf), *gradients)
    for got, answer in zip(found, answers, strict=True):
        limit = LIMIT[out.dtype] * float(answer.detach().where(answer.isfinite(), 0).abs().max())
        torch.testing.assert_close(got.double(), answer, rtol=0, atol=limit)


@pytest.mark.parametrize(("dim", "seq"), [(128, 70), (8, 64), (72, 5)])
@pytest.mark.parametrize("dtype", list(DType), ids=lambda x: x.value)
def test_emulated(dtype: DType, dim: int, seq: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sink_kernels(Arch.SM80, dtype)
    text = module.text.replace("#pragma unroll", "//")
    for name, body in BODIES.items():
        function = rf"(__device__ __forceinline__ [^\n;{{]*\b{name}\([^;{{]*\) )\{{.*?\n\}}\n"
        text = re.sub(function, rf"\1{{ {body} }}\n", text, flags=re.DOTALL)
    assert "asm" not in text
    for name in module.symbols:
        text += f'extern "C" void run_{name}(const Params* p, long long blocks) '
        text += f"{{ launch([=] {{ {name}(*p); }}, blocks, kThreads, 0); }}\n"
    path = tmp_path / "sinks.cpp"
    path.write_text('#include "emulator.h"\n' + text)
    library = gxx.library(path, *FLAGS, f"-DEMULATED_FP16={int(dtype is DType.FLOAT16)}", parts=PARTS)

    def launch(backward: bool, x: Tensor, p: sinks.Params) -> None:
        run = getattr(library, f"run_{module.symbols[backward]}")
        run(ctypes.byref(p), ctypes.c_longlong(sinks._blocks(x)))

    monkeypatch.setattr(sinks, "_launch", launch)
    case = draw(TORCH_DTYPES[dtype], dim, seq)
    out, lse, z, dout, dlse = case
    sunk, joined = sinks.run_forward(out, lse, z)
    assert sunk.stride() == out.stride()
    check(case, (sunk, joined, *sinks.run_backward(dout, dlse, sunk, lse, z)))
    check_nan(sinks.run_forward, case)


def check_nan(run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], case: Case) -> None:
    """A row whose lse is NaN, with any sink, and all rows of a head whose sink is, get NaN; no other does."""
    out, lse, z = (x.clone() for x in case[:3])
    out[1, :, 3:], lse[1, :, 3:], z[0] = torch.nan, torch.nan, torch.nan
    nan = lse.isnan() | z.isnan()[:, None]
    sunk, joined = run(out, lse, z)
    assert torch.equal(joined.isnan(), nan)
    seen = lse != -torch.inf  # a row that sees no key stays zeros
    assert torch.equal(sunk.isnan().any(-1), nan & seen)


def test_nan_with_torchs_operations() -> None:
    check_nan(sinks._composed, draw(torch.float32, 8, 5))


def test_vector_loads_get_aligned_rows() -> None:
    for start in (0, 1, 8):
        x = torch.randn(2 * 3 * 64 + start).bfloat16()[start:].view(1, 2, 3, 64)
        readable = sinks._vectors(x)
        assert readable.data_ptr() % 16 == 0
        assert torch.equal(readable, x)
        assert (readable is x) == (start % 8 == 0)


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", list(DType), ids=lambda x: x.value)
def test_nvcc(dtype: DType, nvcc: None, tmp_path: Path) -> None:
    module = sink_kernels(Arch.SM80, dtype)
    built = toolchain.toolchain(Arch.SM80).compile(module, tmp_path)
    assert set(built.resources) == set(module.symbols)
    assert all(used["spill_bytes"] == 0 for used in built.resources.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 64, 17, 256])
@pytest.mark.parametrize("dtype", list(DType), ids=lambda x: x.value)
def test_on_a_gpu(dtype: DType, dim: int) -> None:
    """Head dim 17, and 256 of float32, take torch's operations."""
    case = draw(TORCH_DTYPES[dtype], dim, 259, "cuda")
    inputs = [x.requires_grad_() for x in case[:3]]
    assert sinks._fits(case[0]) == (dim % 8 == 0 and not (dim == 256 and dtype is DType.FLOAT32))
    for call in (sinks.with_sinks, torch.compile(sinks.with_sinks, fullgraph=True, backend="aot_eager")):
        results = call(*inputs)
        gradients = torch.autograd.grad(results, inputs, case[3:])
        check(case, tuple(x.detach() for x in (*results, *gradients)))


@pytest.mark.gpu
def test_the_operators_are_as_torch_expects() -> None:
    out, lse, z, dout, dlse = draw(torch.bfloat16, 64, 70, "cuda")
    torch.library.opcheck(torch.ops.attnforge.sinks.default, (out.requires_grad_(), lse, z))
    torch.library.opcheck(torch.ops.attnforge.sinks_backward.default, (dout, dlse, out.detach(), lse, z))
