"""Any head_dim from 1 to 256, v's own included: values, gradients, layouts, and a kernel for each on each target."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from oracle import Shape, check, dense, draw, make_mask, spans

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem

CPU, GPU = "cpu", "cuda"
ON_GPU = pytest.mark.gpu
# (head_dim, of v or 0). On the CPU each pair of dtype and dims costs two compilations.
DIMS = (
    (1, 0),
    (7, 0),
    (41, 0),
    (44, 0),
    (52, 0),
    (56, 0),
    (136, 0),
    (256, 0),
    (64, 41),
    (41, 64),
    (192, 128),
)
TARGETS = [
    *(pytest.param(CPU, torch.float32, *dims, id=f"cpu-fp32-{dims[0]}-{dims[1]}") for dims in DIMS[::2]),
    *(pytest.param(CPU, torch.bfloat16, *dims, id=f"cpu-bf16-{dims[0]}-{dims[1]}") for dims in DIMS[1::2]),
    *(
        pytest.param(GPU, dtype, *dims, id=f"gpu-{dtype}-{dims[0]}-{dims[1]}"[4:], marks=ON_GPU)
        for dtype, dims in product((torch.bfloat16, torch.float16), DIMS)
    ),
]
targets = pytest.mark.parametrize(("device", "dtype", "head_dim", "dim_v"), TARGETS)


@targets
def test_values_and_gradients(device: str, dtype: torch.dtype, head_dim: int, dim_v: int) -> None:
    x = draw(Shape(head_dim=head_dim, dim_v=dim_v, group=2, seq_q=70, seq_k=100), dtype, device)
    check(x, spans(70, 100, device))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [
        (CPU, torch.float32, 41),
        pytest.param(GPU, torch.bfloat16, 41, marks=ON_GPU),
        pytest.param(GPU, torch.bfloat16, 44, marks=ON_GPU),
    ],
)
@pytest.mark.parametrize("layout", ["bhsd", "packed", "slice", "offset", "expanded"])
def test_layouts(device: str, dtype: torch.dtype, layout: str, head_dim: int) -> None:
    """What surrounds the rows is NaN: nothing beyond column head_dim may reach a result, or be written."""
    batch = 1 if layout == "packed" else 2
    x = draw(Shape(batch=batch, head_dim=head_dim, seq_q=65, seq_k=77), dtype, device, layout)
    check(x, spans(65, 77, device))


@pytest.mark.parametrize(
    ("device", "dtype"), [(CPU, torch.float32), pytest.param(GPU, torch.bfloat16, marks=ON_GPU)]
)
@pytest.mark.parametrize("kind", ["causal", "dense"])
def test_masks(device: str, dtype: torch.dtype, kind: str) -> None:
    x = draw(Shape(head_dim=41, dim_v=64, seq_q=130, seq_k=130, group=2), dtype, device)
    check(x, make_mask(kind, 130, 130, device))


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [7, 1, 3])
def test_gpu_rows_padded_in_memory(pad: int) -> None:
    """41 columns in rows of 48, 42 and 44: wide, 4 and 8 bytes wide loads whose last one is cut off."""

    def one(heads: int) -> torch.Tensor:
        whole = torch.full((2, heads, 100, 41 + pad), torch.nan, device=GPU, dtype=torch.bfloat16)
        whole[..., :41] = torch.randn(2, heads, 100, 41, device=GPU)
        return whole[..., :41].requires_grad_()

    from oracle import Inputs

    check(Inputs(one(4), one(2), one(2), one(4).detach()), dense(100, 100, GPU))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layout_of_out_with_its_own_head_dim(layout: str) -> None:
    """Rows of v's width in the order of q's axes; the fake kernel says the same."""
    x = draw(Shape(head_dim=16, dim_v=24, group=2, batch=2), torch.float32, CPU, layout)
    out = attnforge.attention(x.q, x.k, x.v)
    assert out.shape == (2, 4, 65, 24)
    assert out.stride() == x.dout.stride()
    compiled = torch.compile(attnforge.attention, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v)
    assert compiled.stride() == out.stride()
    torch.testing.assert_close(compiled, out)
    args = (x.q.detach(), x.k.detach(), x.v.detach(), None, 0, None)
    torch.library.opcheck(torch.ops.attnforge.forward.default, args)


@pytest.mark.parametrize(
    "arch", [arch for arch in Arch if arch is not Arch.SM90A], ids=lambda arch: arch.value
)
def test_every_head_dim_has_a_kernel(arch: Arch) -> None:
    """Both directions, any mask, a head_dim of v on either side; sm90 serves the machines of sm90a too."""
    dtypes = (DType.BFLOAT16,) if arch.is_gpu else (DType.FLOAT32, DType.BFLOAT16)
    step = 5 if arch in (Arch.SM86, Arch.SM100, Arch.SM120) else 1  # of others' shared memory and registers
    for direction, head_dim, dtype in product(Direction, range(1, 257, step), dtypes):
        mask = list(Mask)[head_dim % 4]
        align = 2 if arch.is_gpu and head_dim % 2 else 4
        for dim_v in (0, 257 - head_dim):
            problem = Problem(direction, arch, dtype, head_dim, mask, align, dim_v)
            spec = next(candidates(problem), None)
            assert spec is not None, f"{problem}: {why_infeasible(problem)}"
            if direction is Direction.BACKWARD and dim_v == 0:
                assert any(make_plan(spec).deterministic for spec in candidates(problem)), problem
