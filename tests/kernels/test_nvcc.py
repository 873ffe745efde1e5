"""nvcc on what a search tries first: no warning, no spill, nothing that serialises wgmma. Needs no GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from strict_nvcc import SERIALISED, SPILLED, check_resources, compile_strictly

from attnforge.codegen.families import FAMILIES
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.render import Source, render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import toolchain
from attnforge.runtime.build.settings import COMPILER

pytestmark = pytest.mark.nvcc

# Of the targets that share sources, tile sizes and first choices, or nearly so, one head_dim each; others are slow.
SIBLINGS = {(Arch.SM86, 64), (Arch.SM89, 72), (Arch.SM100, 128), (Arch.SM120, 128)}
FP32_SIBLINGS = {(Arch.SM86, 128), (Arch.SM89, 41), (Arch.SM100, 128), (Arch.SM120, 64)}


def marks(arch: Arch, head_dim: int, siblings: set[tuple[Arch, int]]) -> tuple[pytest.MarkDecorator, ...]:
    alone = all(arch is not other for other, _ in siblings)
    return () if alone or (arch, head_dim) in siblings else (pytest.mark.slow,)


CASES = [
    pytest.param(
        arch,
        direction,
        head_dim,
        id=f"{direction.value}-{arch.value}-{head_dim}",
        marks=marks(arch, head_dim, SIBLINGS),
    )
    for direction, arch, head_dim in product(Direction, Arch, (64, 72, 128))
    if arch.is_gpu and (arch.family, direction) in FAMILIES
]


def first(
    arch: Arch, direction: Direction, head_dim: int, mask: Mask = Mask.SPANS, dtype: DType = DType.BFLOAT16
) -> Source:
    return render(next(candidates(Problem(direction, arch, dtype, head_dim, mask))))


@pytest.fixture(autouse=True)
def nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    if toolchain.find_nvcc(dict(toolchain._environment())) is None:
        pytest.skip(toolchain.NVCC_PLACES)
    monkeypatch.setenv(COMPILER, "nvcc")


@pytest.mark.parametrize(("arch", "direction", "head_dim"), CASES)
def test_defaults_compile_cleanly(arch: Arch, direction: Direction, head_dim: int, tmp_path: Path) -> None:
    log = check_resources(first(arch, direction, head_dim), tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch.is_gpu], ids=lambda arch: arch.value)
def test_mask_kernels_compile(arch: Arch, tmp_path: Path) -> None:
    built = toolchain.toolchain(arch).compile(mask_kernels(arch), tmp_path)
    assert set(built.resources) == set(mask_kernels(arch).symbols)
    assert all(used["spill_bytes"] == 0 for used in built.resources.values())


FP32_CASES = [
    pytest.param(arch, head_dim, id=f"{arch.value}-{head_dim}", marks=marks(arch, head_dim, FP32_SIBLINGS))
    for arch, head_dim in product(Arch, (41, 64, 128))
    if arch.family == "sm80"
]


@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
@pytest.mark.parametrize(("arch", "head_dim"), FP32_CASES)
def test_float32_defaults_compile_cleanly(
    arch: Arch, direction: Direction, head_dim: int, tmp_path: Path
) -> None:
    mask = Mask.DENSE if head_dim == 41 else Mask.SPANS
    check_resources(first(arch, direction, head_dim, mask, DType.FLOAT32), tmp_path)


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.DENSE], ids=lambda mask: mask.value)
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A], ids=lambda arch: arch.value)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_other_masks_compile_cleanly(direction: Direction, arch: Arch, mask: Mask, tmp_path: Path) -> None:
    if (arch.family, direction) not in FAMILIES:
        pytest.skip(f"{arch.value} has no {direction.value} kernel")
    if next(candidates(Problem(direction, arch, DType.BFLOAT16, 128, mask)), None) is None:
        pytest.skip(f"{arch.value} {direction.value} leaves {mask.value} to another family")
    log, _ = compile_strictly(first(arch, direction, 128, mask), tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(64, (192, 128, 3)), (72, (192, 128, 3)), (128, (192, 64, 3)), (128, (128, 128, 2))],
)
def test_clusters_compile_cleanly(
    head_dim: int, tile: tuple[int, int, int], persistent: bool, tmp_path: Path
) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.FULL)
    source = render(Spec(problem, Sm90Forward(*tile, head_dim < 128, persistent, False, False, 2)))
    log, resources = compile_strictly(source, tmp_path)
    assert not SERIALISED.search(log), log
    assert [used["spill_bytes"] for used in resources.values()] == [0]


@pytest.mark.parametrize(
    ("head_dim", "knobs"),
    [
        (64, (192, 128, 3, 1, 1)),
        (64, (192, 128, 2, 1, 0)),
        (72, (192, 128, 3, 1, 1)),
        (128, (192, 80, 2, 1, 1)),
        (128, (192, 80, 3, 1, 1)),
        (128, (192, 64, 3, 0, 1)),
        (128, (128, 176, 2, 0, 1)),
    ],
)
def test_causal_tiles_compile_cleanly(
    head_dim: int, knobs: tuple[int, int, int, int, int], tmp_path: Path
) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.CAUSAL)
    tuning = Sm90Forward(*knobs[:3], bool(knobs[3]), bool(knobs[4]), False, False)
    log, resources = compile_strictly(render(Spec(problem, tuning)), tmp_path)
    assert not SERIALISED.search(log), log
    assert [used["spill_bytes"] for used in resources.values()] == [0]


@pytest.mark.parametrize(
    ("mask", "split", "deterministic"),
    [(Mask.FULL, 0, 1), (Mask.CAUSAL, 1, 0), (Mask.SPANS, 1, 1), (Mask.SPANS, 0, 0)],
)
def test_sums_of_the_backward_compile_cleanly(
    mask: Mask, split: int, deterministic: int, tmp_path: Path
) -> None:
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, mask)
    tuning = Sm90Backward(64, 128, 3, 2, False, 0, bool(split), bool(deterministic), False)
    log, resources = compile_strictly(render(Spec(problem, tuning)), tmp_path)
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


# Each form with one head_dim; registers are scarcest with the larger one. The other pairs are slow.
UNIONS = [
    pytest.param(*form, dim, marks=() if dim == chosen else pytest.mark.slow)
    for *form, chosen in ((1, 1, 64), (2, 0, 64), (2, 1, 128), (4, 1, 128))
    for dim in (64, 128)
]


@pytest.mark.parametrize(("intervals", "planes", "head_dim"), UNIONS)
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        (Arch.SM80, DType.BFLOAT16),
        (Arch.SM80, DType.FLOAT32),
        (Arch.SM90A, DType.BFLOAT16),
        (Arch.SM90A, DType.FLOAT32),
    ],
    ids=lambda value: value.value,
)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_unions_compile_cleanly(
    direction: Direction, arch: Arch, dtype: DType, intervals: int, planes: int, head_dim: int, tmp_path: Path
) -> None:
    if (arch, dtype, direction) == (Arch.SM90A, DType.FLOAT32, Direction.BACKWARD):
        pytest.skip("there is none")
    problem = Problem(direction, arch, dtype, head_dim, Mask.SPANS, intervals=intervals, planes=planes)
    log = check_resources(render(next(candidates(problem))), tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.parametrize(
    ("head_dim", "dim_v", "mask"),
    [
        *((192, 128, mask) for mask in Mask),
        (128, 64, Mask.SPANS),
        (96, 128, Mask.CAUSAL),
        (40, 136, Mask.FULL),
    ],
)
def test_hopper_with_a_head_dim_of_v_compiles_cleanly(
    head_dim: int, dim_v: int, mask: Mask, tmp_path: Path
) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, 16, dim_v)
    log, resources = compile_strictly(render(next(candidates(problem))), tmp_path)
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


@pytest.mark.parametrize("align", [8, 4, 2])
def test_rows_aligned_to_less_compile_cleanly(align: int, tmp_path: Path) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM90, DType.FLOAT16, 72, Mask.CAUSAL, align)
    compile_strictly(render(next(candidates(problem))), tmp_path)


@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
@pytest.mark.parametrize(
    ("arch", "head_dim", "dim_v", "mask", "align"),
    [
        (Arch.SM80, 44, 0, Mask.DENSE, 8),
        (Arch.SM80, 256, 0, Mask.SPANS, 16),
        (Arch.SM89, 41, 0, Mask.DENSE, 2),
        (Arch.SM89, 52, 0, Mask.SPANS, 8),
        (Arch.SM89, 255, 0, Mask.DENSE, 2),
        (Arch.SM90, 41, 0, Mask.DENSE, 16),
        (Arch.SM90, 192, 128, Mask.CAUSAL, 16),
        (Arch.SM90, 64, 0, Mask.DENSE, 16),
        (Arch.SM120, 41, 64, Mask.DENSE, 2),
        (Arch.SM120, 250, 0, Mask.FULL, 4),
    ],
)
def test_head_dims_and_dense_masks_compile_cleanly(
    arch: Arch, head_dim: int, dim_v: int, mask: Mask, align: int, direction: Direction, tmp_path: Path
) -> None:
    problem = Problem(direction, arch, DType.BFLOAT16, head_dim, mask, align, dim_v)
    source = render(next(candidates(problem)))
    _, resources = compile_strictly(source, tmp_path)
    spilled = {name: used["spill_bytes"] for name, used in resources.items() if used["spill_bytes"]}
    assert all(name == source.spec.symbol and size <= SPILLED for name, size in spilled.items()), spilled
