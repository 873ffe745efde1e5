"""The float32 forward kernel on FP32 cores: where it is chosen, that it compiles, that it is right."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
import torch
from emulator import Emulated
from strict_nvcc import compile_strictly
from torch import Tensor

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80_fp32 import Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, kernels, ops
from attnforge.runtime.call import Call
from attnforge.runtime.export import alignment
from attnforge.runtime.masks import AnyMask, Causal, DenseMask, Spans
from attnforge.runtime.search.reference import reference

TUNINGS = (Fp32Forward(128, 64, 8, 1, 0, 1), Fp32Forward(64, 32, 4, 2, 0, 1), Fp32Forward(32, 16, 2, 1, 0, 1))


def spec_of(tuning: Fp32Forward, arch: Arch, dim: int, mask: Mask, dim_v: int = 0) -> Spec:
    align = alignment(arch, DType.FLOAT32, dim, dim_v or dim)
    return Spec(Problem(Direction.FORWARD, arch, DType.FLOAT32, dim, mask, align, dim_v), tuning)


@pytest.mark.parametrize(
    ("arch", "lanes"), [(Arch.SM80, False), (Arch.SM86, True), (Arch.SM89, True), (Arch.SM120, True)]
)
def test_it_is_chosen_where_tensor_cores_have_no_lead(arch: Arch, lanes: bool) -> None:
    problem = Problem(Direction.FORWARD, arch, DType.FLOAT32, 64, Mask.DENSE)
    choice = next(choosing.choose(Call(problem, 1, 4096), ""))
    spec, reason = choice.spec, choice.reason
    assert isinstance(spec.tuning, Fp32Forward)
    assert (spec.tuning.o_splits == 0) == lanes
    assert reason.startswith("modelled, not measured")


def test_it_stands_last_in_the_space() -> None:
    """A guess without a measurement is the other kernel's; a search finds this one."""
    found = [
        spec.tuning
        for spec in candidates(Problem(Direction.FORWARD, Arch.SM90, DType.FLOAT32, 64, Mask.FULL))
    ]
    splits = [tuning.o_splits > 0 for tuning in found if isinstance(tuning, Fp32Forward)]
    assert splits == sorted(splits, reverse=True)
    assert not splits[-1]


def test_it_has_no_instruction_of_tensor_cores() -> None:
    text = render(spec_of(TUNINGS[0], Arch.SM89, 64, Mask.DENSE)).text
    assert "mma" not in text
    assert "ldmatrix" not in text
    assert "fmaf" in text


@pytest.mark.parametrize(
    ("tuning", "reason"),
    [
        (Fp32Forward(128, 64, 8, 0, 0, 1), "at least 1"),
        (Fp32Forward(36, 32, 2, 1, 0, 1), "tile_m 36: must be a multiple of 8"),
        (Fp32Forward(64, 24, 2, 1, 0, 1), "tile_n 24: must be a multiple of 16"),
        (Fp32Forward(256, 64, 8, 2, 0, 1), "shared memory"),
        (Fp32Forward(128, 64, 2, 1, 0, 1), "registers"),
    ],
)
def test_what_does_not_fit(tuning: Fp32Forward, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(spec_of(tuning, Arch.SM89, 64, Mask.SPANS))


@pytest.mark.nvcc
@pytest.mark.parametrize("dim", [41, 56])
def test_it_compiles_without_spills(dim: int, nvcc: None, tmp_path: Path) -> None:
    tunings = {mask: TUNINGS[dim % 2] if mask is Mask.DENSE else TUNINGS[1 - dim % 2] for mask in Mask}
    specs = [spec_of(tuning, Arch.SM89, dim, mask) for mask, tuning in tunings.items()]
    _, resources = compile_strictly([render(spec) for spec in specs], tmp_path)
    assert all(used["spill_bytes"] == 0 for used in resources.values())


def make_mask(kind: Mask, rows: int, keys: int, device: str) -> AnyMask:
    if kind is Mask.CAUSAL:
        return Causal()
    if kind is Mask.SPANS:
        starts = torch.randint(0, rows - 10, (keys,), dtype=torch.int32, device=device)
        return Spans(starts, (starts + 40).clamp(max=rows))
    if kind is Mask.DENSE:
        visible = torch.rand(rows, keys, device=device) < 0.4
        visible[7] = False
        return DenseMask(visible)
    return None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize(
    ("tuning", "dim", "dim_v", "kind"),
    [
        (Fp32Forward(64, 64, 2, 1, 0, 1), 64, 0, Mask.FULL),
        (Fp32Forward(64, 32, 4, 2, 0, 1), 41, 0, Mask.CAUSAL),
        (Fp32Forward(32, 16, 2, 2, 0, 1), 44, 52, Mask.SPANS),
        (Fp32Forward(64, 64, 2, 1, 0, 1), 56, 0, Mask.DENSE),
        (Fp32Forward(32, 32, 2, 2, 0, 1), 40, 24, Mask.DENSE),
        (Fp32Forward(32, 16, 1, 1, 0, 1), 1, 3, Mask.SPANS),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_its_source_is_right_on_the_cpu(
    tuning: Fp32Forward, dim: int, dim_v: int, kind: Mask, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    rows, keys = 75, 93 if kind is not Mask.CAUSAL else 60  # then some rows see nothing
    q = torch.randn(1, 2, rows, dim)
    k, v = (torch.randn(1, 1, keys, d) for d in (dim, dim_v or dim))
    mask = make_mask(kind, rows, keys, "cpu")
    exact = reference(q, k, v, mask)
    out, lse = Emulated(spec_of(tuning, Arch.SM89, dim, kind, dim_v), tmp_path).forward(q, k, v, mask)
    close(out, exact.out)
    close(lse, exact.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(Mask), ids=lambda kind: kind.value)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 0), (41, 0), (44, 52)])
def test_it_is_right(dim: int, dim_v: int, kind: Mask) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    rows, keys = 301, 277
    q = torch.randn(2, 4, rows, dim, device=device)
    k, v = (torch.randn(2, 2, keys, d, device=device) for d in (dim, dim_v or dim))
    mask = make_mask(kind, rows, keys, "cuda")
    exact = reference(q, k, v, mask)
    ran = 0
    for tuning in TUNINGS[:2]:
        spec = spec_of(tuning, kernels.targets(device)[-1], dim, kind, dim_v)
        if kind is Mask.DENSE and tuning.tile_n % 32:
            spec = dataclasses.replace(spec, tuning=dataclasses.replace(tuning, tile_n=32))
        try:
            handle = kernels.load(spec, device)
        except Infeasible:
            continue
        out, lse = ops.forward(q, k, v, mask, variant=handle)
        close(out, exact.out)
        close(lse, exact.lse)
        ran += 1
    assert ran


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, atol=3e-6, rtol=3e-6)
