"""nvcc on what a search tries first: no warning, no spill, nothing that serialises wgmma. Needs no GPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from spaces import part, quickly
from strict_nvcc import SERIALISED, SPILLED, check_resources, compile_strictly, part_of

from attnforge.codegen.families import FAMILIES
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.render import Source, render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.build import toolchain
from attnforge.runtime.call import Call

pytestmark = [pytest.mark.nvcc, pytest.mark.usefixtures("nvcc")]

# Of the targets that share sources, tile sizes and first choices, or nearly so, one head_dim each; others are slow.
SIBLINGS = {(Arch.SM86, 64), (Arch.SM89, 72), (Arch.SM100, 128), (Arch.SM120, 128)}
FP32_SIBLINGS = {(Arch.SM86, 128), (Arch.SM89, 41), (Arch.SM100, 128), (Arch.SM120, 64)}


def by_target(
    archs: list[Arch], head_dims: tuple[int, ...], siblings: set[tuple[Arch, int]]
) -> list[ParameterSet]:
    """For each target the head_dims that are compiled together, those of siblings but one in slow tests."""
    chosen = dict(siblings)
    cases = []
    for arch in archs:
        quick = tuple(dim for dim in head_dims if chosen.get(arch, dim) == dim)
        slow = tuple(dim for dim in head_dims if dim not in quick)
        cases.append(pytest.param(arch, quick, id=arch.value))
        cases += [pytest.param(arch, slow, id=f"{arch.value}-others", marks=pytest.mark.slow)] if slow else []
    return cases


def first(
    arch: Arch, direction: Direction, head_dim: int, mask: Mask = Mask.SPANS, dtype: DType = DType.BFLOAT16
) -> Source:
    return render(next(candidates(Problem(direction, arch, dtype, head_dim, mask))))


def directions(arch: Arch) -> list[Direction]:
    return [direction for direction in Direction if (arch.family, direction) in FAMILIES]


@pytest.mark.parametrize(
    ("arch", "head_dims"), by_target([arch for arch in Arch if arch.is_gpu], (64, 72, 128), SIBLINGS)
)
def test_defaults_compile_cleanly(arch: Arch, head_dims: tuple[int, ...], tmp_path: Path) -> None:
    sources = [first(arch, direction, dim) for direction, dim in product(directions(arch), head_dims)]
    log = check_resources(sources, tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.parametrize("arch", [arch for arch in Arch if arch.is_gpu], ids=lambda arch: arch.value)
def test_mask_kernels_compile(arch: Arch, tmp_path: Path) -> None:
    built = toolchain.toolchain(arch).compile(mask_kernels(arch), tmp_path)
    assert set(built.resources) == set(mask_kernels(arch).symbols)
    assert all(used["spill_bytes"] == 0 for used in built.resources.values())


@pytest.mark.parametrize(
    ("arch", "head_dims"),
    by_target([arch for arch in Arch if arch.family == "sm80"], (41, 64, 128), FP32_SIBLINGS),
)
def test_float32_defaults_compile_cleanly(arch: Arch, head_dims: tuple[int, ...], tmp_path: Path) -> None:
    masks = {dim: Mask.DENSE if dim == 41 else Mask.SPANS for dim in head_dims}
    check_resources(
        [
            first(arch, direction, dim, masks[dim], DType.FLOAT32)
            for direction in Direction
            for dim in head_dims
        ],
        tmp_path,
    )


@pytest.mark.parametrize(
    "mask", [pytest.param(Mask.CAUSAL, marks=pytest.mark.slow), Mask.FULL], ids=lambda mask: mask.value
)
@pytest.mark.parametrize(
    "head_dims", [pytest.param((40, 112, 120, 224), marks=pytest.mark.slow, id="others"), (80, 160)]
)
def test_kernels_found_for_other_head_dims_compile_cleanly(
    head_dims: tuple[int, ...], mask: Mask, tmp_path: Path
) -> None:
    """What the package's tables have for a call of a head_dim without entries."""
    specs = []
    for direction, dim in product(Direction, head_dims):
        problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, dim, mask)
        specs.append(
            next(choosing.choose(Call(problem, 1, 4096), "NVIDIA H100 80GB HBM3", [tables.PACKAGED])).spec
        )
    check_hopper(specs, tmp_path)


@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A], ids=lambda arch: arch.value)
def test_other_masks_compile_cleanly(arch: Arch, tmp_path: Path) -> None:
    problems = [
        Problem(direction, arch, DType.BFLOAT16, 128, mask)
        for direction, mask in product(directions(arch), (Mask.FULL, Mask.CAUSAL, Mask.DENSE))
    ]
    log, _ = compile_strictly([render(next(candidates(problem))) for problem in problems], tmp_path)
    assert not SERIALISED.search(log), log


def test_messages_are_of_the_kernels_that_they_name() -> None:
    """Kernels of several tests are compiled together; each test reads what was said of its own."""
    one, other = (first(Arch.SM90A, direction, 64) for direction in Direction)
    lines = [
        "warning: of no kernel",
        f"ptxas info : Compiling entry function '{one.spec.symbol}' for 'sm_90a'",
        "Used 168 registers",
        f"ptxas info : (C7510) wgmma are serialized in function '{other.spec.symbol}'",
        f"ptxas info : Compiling entry function '{other.spec.symbol}_preprocess' for 'sm_90a'",
        "Used 40 registers",
    ]
    assert part_of("\n".join(lines), one).splitlines() == lines[:3]
    assert part_of("\n".join(lines), other).splitlines() == [lines[0], *lines[3:]]


def check_hopper(specs: list[Spec], directory: Path) -> None:
    """No spill at all, nothing serialised."""
    log, resources = compile_strictly([render(spec) for spec in specs], directory)
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


def test_causal_tiles_compile_cleanly(tmp_path: Path) -> None:
    tiles = [
        (64, 192, 128, 3, 1, 1),
        (64, 192, 128, 2, 1, 0),
        (72, 192, 128, 3, 1, 1),
        (128, 192, 80, 2, 1, 1),
        (128, 192, 80, 3, 1, 1),
        (128, 192, 64, 3, 0, 1),
        (128, 128, 176, 2, 0, 1),
    ]
    specs = [
        Spec(
            Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.CAUSAL),
            Sm90Forward(tile_m, tile_n, stages, bool(ping_pong), bool(persistent), False, False),
        )
        for head_dim, tile_m, tile_n, stages, ping_pong, persistent in tiles
    ]
    check_hopper(specs, tmp_path)


def test_sums_of_the_backward_compile_cleanly(tmp_path: Path) -> None:
    sums = [(Mask.FULL, 0, 1), (Mask.CAUSAL, 1, 0), (Mask.SPANS, 1, 1), (Mask.SPANS, 0, 0)]
    specs = [
        Spec(
            Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, mask),
            Sm90Backward(64, 128, 3, 2, False, 0, bool(split), bool(deterministic)),
        )
        for mask, split, deterministic in sums
    ]
    check_hopper(specs, tmp_path)


# Intervals, planes, head_dim: each form with one head_dim; registers are scarcest with the larger one.
UNIONS = ((1, 1, 64), (2, 0, 64), (2, 1, 128), (4, 1, 128))


UNION_TARGETS = [*product((Arch.SM80, Arch.SM90A), (DType.BFLOAT16, DType.FLOAT32))]


def unions(other_head_dims: bool = False) -> list[Problem]:
    return [
        Problem(
            direction,
            arch,
            dtype,
            192 - dim if other_head_dims else dim,
            Mask.SPANS,
            intervals=intervals,
            planes=planes,
        )
        for (arch, dtype), direction, (intervals, planes, dim) in product(UNION_TARGETS, Direction, UNIONS)
        if (arch, dtype, direction) != (Arch.SM90A, DType.FLOAT32, Direction.BACKWARD)
    ]


def of_a_union(problem: Problem) -> Iterator[Hashable]:
    """Each form once on each target and in each direction, and each direction on each target."""
    target, form = (problem.arch, problem.dtype), (problem.intervals, problem.planes)
    yield from ((target, form), (target, problem.direction), (problem.direction, form))


@quickly
@pytest.mark.parametrize(("arch", "dtype"), UNION_TARGETS, ids=lambda x: x.value)
def test_unions_compile_cleanly(arch: Arch, dtype: DType, quick: bool, tmp_path: Path) -> None:
    problems = part(unions(), quick, of_a_union) + ([] if quick else unions(other_head_dims=True))
    sources = [render(next(candidates(x))) for x in problems if (x.arch, x.dtype) == (arch, dtype)]
    log = check_resources(sources, tmp_path)
    assert not SERIALISED.search(log), log


def test_hopper_with_a_head_dim_of_v_compiles_cleanly(tmp_path: Path) -> None:
    dims = [(192, 128, mask) for mask in Mask]
    dims += [(128, 64, Mask.SPANS), (96, 128, Mask.CAUSAL), (40, 136, Mask.FULL)]
    problems = [
        Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, 16, dim_v)
        for head_dim, dim_v, mask in dims
    ]
    check_hopper([next(candidates(problem)) for problem in problems], tmp_path)


def test_rows_aligned_to_less_compile_cleanly(tmp_path: Path) -> None:
    problems = [
        Problem(Direction.FORWARD, Arch.SM90, DType.FLOAT16, 72, Mask.CAUSAL, align) for align in (8, 4, 2)
    ]
    compile_strictly([render(next(candidates(problem))) for problem in problems], tmp_path)


HEAD_DIMS = {
    Arch.SM80: [(44, 0, Mask.DENSE, 8), (256, 0, Mask.SPANS, 16)],
    Arch.SM89: [(41, 0, Mask.DENSE, 2), (52, 0, Mask.SPANS, 8), (255, 0, Mask.DENSE, 2)],
    Arch.SM90: [(41, 0, Mask.DENSE, 16), (192, 128, Mask.CAUSAL, 16), (64, 0, Mask.DENSE, 16)],
    Arch.SM120: [(41, 64, Mask.DENSE, 2), (250, 0, Mask.FULL, 4)],
}


@pytest.mark.parametrize("arch", HEAD_DIMS, ids=lambda arch: arch.value)
def test_head_dims_and_dense_masks_compile_cleanly(arch: Arch, tmp_path: Path) -> None:
    sources = [
        render(next(candidates(Problem(direction, arch, DType.BFLOAT16, head_dim, mask, align, dim_v))))
        for direction, (head_dim, dim_v, mask, align) in product(Direction, HEAD_DIMS[arch])
    ]
    _, resources = compile_strictly(sources, tmp_path)
    main = {source.spec.symbol for source in sources}
    spilled = {name: used["spill_bytes"] for name, used in resources.items() if used["spill_bytes"]}
    assert all(name in main and size <= SPILLED for name, size in spilled.items()), spilled
