"""A kernel's description (codegen/variant.py) as the launcher reads it: errors, grids and the packed argument."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import replace
from functools import cache
from itertools import accumulate, islice
from pathlib import Path

import pytest

from attnforge.codegen import host_sources, params, variant
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.plan import Launch
from attnforge.codegen.render import Source, render
from attnforge.codegen.space import candidates, splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem

HERE = Path(__file__).parent
STUBS = (
    "driver.h",
    "c10/core/Device.h",
    "c10/core/DeviceGuard.h",
    "c10/core/ScalarType.h",
    "c10/util/Exception.h",
)


@cache
def source(
    arch: Arch = Arch.SM90A, direction: Direction = Direction.FORWARD, mask: Mask = Mask.SPANS
) -> Source:
    dtype = DType.FLOAT32 if arch is Arch.CPU else DType.BFLOAT16
    return render(next(candidates(Problem(direction, arch, dtype, 64, mask))))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("variant")
    for name, text in (host_sources.sources("launch.h") | host_sources.sources("schedule_layout.h")).items():
        (directory / name).write_text(text)
    for name in STUBS:  # variant.cpp has its own
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("")
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{directory}")
    subprocess.run(["g++", *flags, HERE / "variant.cpp", "-o", directory / "program"], check=True)
    return directory / "program"


def read(
    program: Path, text: str, multiprocessors: int = 132, *more: int, queries: int | str = 6
) -> tuple[int, list[str]]:
    """(exit status, lines printed)."""
    path = program.with_name("description")
    path.write_text(text)
    words = map(str, (multiprocessors, queries, *more))
    done = subprocess.run([program, path, *words], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("arch", [Arch.CPU, Arch.SM80, Arch.SM90A])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("mask", list(Mask))
def test_every_description_is_read(program: Path, arch: Arch, direction: Direction, mask: Mask) -> None:
    of = source(arch, direction, mask)
    status, lines = read(program, variant.describe(of))
    backward = int(direction is Direction.BACKWARD)
    assert (status, lines[0]) == (
        0,
        f"{of.spec.slug} {backward} {of.spec.tuning.tile_m} {of.plan.row_groups}",
    )
    assert [line.split()[0] for line in lines[1:-1]] == [launch.symbol for launch in of.plan.launches]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\nhead_dim 64", "", "it lacks the field 'head_dim'"),
        ("\nhead_dim 64", "\nhead_dims 64", "it lacks the field 'head_dim'"),
        ("\nhead_dim 64", "\nhead_dim 64\nwarps 4", "it has an unknown field 'warps'"),
        ("\nhead_dim 64", "\nhead_dim 64\nhead_dim 64", "variant has the field 'head_dim' twice"),
        ("\nhead_dim 64", "\nhead_dim 64x", "field 'head_dim' is '64x', expected a number"),
        ("\nbackward 0", "\nbackward no", "field 'backward' is 'no', which is unknown here"),
        ("\ndtype bf16", "\ndtype fp8", "field 'dtype' is 'fp8'"),
        ("\nmask spans", "\nmask banded", "field 'mask' is 'banded'"),
        ("\nparams ", "\nparams q_scale ", "field 'params' names 'q_scale', which Params does not have"),
        ("\n  grid ", "\n  grid heads ", "field 'grid' is 'heads'"),
        ("\n  threads 512", "", "a launch lacks the field 'threads'"),
        ("\n  threads 512", "\n  threads -1", "field 'threads' is -1"),
        ("\n  tensor q", "\n  tensor x", "unknown tensor 'x' in a tensor map"),
        ("tensor_maps:", "maps:", "unknown section 'maps'"),
        ("\nlaunches:", "\nschedule:", "launches nothing"),
    ],
)
def test_a_wrong_field_is_named(program: Path, old: str, new: str, said: str) -> None:
    text = variant.describe(source())
    assert old in text
    status, (line,) = read(program, text.replace(old, new, 1))
    assert status == 1
    assert said in line


@pytest.mark.parametrize(
    ("grid", "sizes", "blocks"),
    [
        (("tiles_m", "heads_q"), {}, 35),
        (("tiles_m", "heads_q"), {"persistent": True}, 9),
        (("tiles_n",), {"persistent": True}, 3),
        (("tiles_m", "heads_q"), {"per_tile": 2}, 70),
        (("tiles_m", "heads_q"), {"paired": True}, 36),
        (("tiles_m", "heads_q"), {"paired": True, "persistent": True}, 8),
        (("tiles_n",), {"paired": True, "persistent": True}, 4),
    ],
)
def test_grids(program: Path, grid: tuple[str, ...], sizes: dict[str, int], blocks: int) -> None:
    launch = Launch("kernel", grid, 128, **sizes)  # type: ignore[arg-type]
    of = replace(source(), plan=replace(source().plan, launches=(launch,)))
    assert read(program, variant.describe(of), 9)[1][1] == f"kernel {blocks}"


@pytest.mark.parametrize(
    ("multiprocessors", "blocks", "combining"), [(132, 6, 4), (3, 6, 4), (2, 4, 4), (1, 2, 0)]
)
def test_ranges_of_keys_fill_the_device(
    program: Path, multiprocessors: int, blocks: int, combining: int
) -> None:
    """6 queries of 5 q heads are 2 tiles of 16 rows, their keys 3 tiles; 2 blocks run on a multiprocessor at once."""
    spec = next(splitting(Problem(Direction.FORWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.FULL), 16))
    lines = read(program, variant.describe(render(spec)), multiprocessors)[1]
    assert lines[1:-1] == [f"{spec.symbol} {blocks}", f"{spec.symbol}_combine {combining}"]


@pytest.mark.parametrize(("tiles_n", "ranges"), [(30, 1), (33, 3)])
def test_a_round_of_blocks_costs_ten_key_tiles(program: Path, tiles_n: int, ranges: int) -> None:
    """13 queries of 5 heads are 5 tiles of 16 rows for 8 blocks: one round of 1 range each, or two of 3."""
    spec = next(splitting(Problem(Direction.FORWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.FULL), 16))
    lines = read(program, variant.describe(render(spec)), 4, queries=f"13:{tiles_n}")[1]
    assert lines[1] == f"{spec.symbol} {5 * ranges}"


def test_packed_rows_that_an_int_cannot_number_are_refused(program: Path) -> None:
    """Of 5 q heads; the last tile of 16 rows ends at 2^31 - 16 at most, so that kernels can number all its rows."""
    spec = next(splitting(Problem(Direction.FORWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.FULL), 16))
    assert spec.tuning.tile_m == 16
    text = variant.describe(render(spec))
    most = (2**31 - 16) // 5
    status, lines = read(program, text, queries=most)
    assert (status, lines[1]) == (0, f"{spec.symbol} {2**27 - 1}")
    status, lines = read(program, text, queries=most + 1)
    assert status == 1
    assert f"q: {most + 1} queries of 5 heads for each of k are {5 * most + 5} rows, more than" in lines[-1]
    assert spec.slug in lines[-1]


@pytest.mark.parametrize(
    ("planes", "limit", "slots"), [(1, 40 << 20, 21), (3, 40 << 20, 63), (1, 9000, 4), (6, 4100, 8)]
)
@pytest.mark.parametrize("direction", list(Direction))
def test_tables_of_a_schedule_with_bits(
    program: Path, direction: Direction, planes: int, limit: int, slots: int
) -> None:
    """They follow each other, as long as codegen/params.py says; bits take no more memory than they may."""
    mask_mod = MaskMod("causal: kv_idx <= q_idx")
    problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, 64, Mask.DENSE, mask_mod=mask_mod)
    of = render(next(candidates(problem)))
    plan, forward = of.plan, direction is Direction.FORWARD
    assert plan.slot_words == (512 if forward else 256)  # 128 x 128 or 128 x 64 pairs, 32 in a word
    slots = slots if forward or limit == 40 << 20 else 2 * slots
    *begins, found = map(int, read(program, variant.describe(of), 132, planes, limit)[1][-1].split())
    owned, visited = (7, 3) if forward else (3, 7)
    tiles = planes * owned
    words = {
        "visit_bits": found * plan.slot_words,
        "kv_range": 8 * tiles if forward else 0,
        "tile_slots": 2 * tiles if forward else 0,
        "slot_visits": 2 * found,
        "tile_count": tiles,
        "tile_order": tiles * (4 if forward else 3),
        "tile_pieces": 0 if forward else tiles,
        "tile_list": tiles * visited,
        "visit_slots": tiles * visited,
        "slots_taken": 1 + 2 * forward,  # behind it is tile_counter
    }
    assert begins == [0, *accumulate(words.values())]
    assert found == slots
    assert words["visit_bits"] * 4 <= limit * min(planes, 4)


def test_arguments_are_packed_in_the_order_of_the_description(program: Path) -> None:
    words = variant.describe(source()).splitlines()
    text = "\n".join("params scale q heads_q tiles_m" if x.startswith("params ") else x for x in words)
    expected = struct.pack("=f4q2i", 0.5, 4096, 11, 12, 13, 5, 7)
    assert read(program, text)[1][-1] == expected.hex()


def test_any_subset_of_params_has_no_padding() -> None:
    wide = {"int": 4, "float": 4}
    sizes = [wide.get(field.ctype, 8) for field in params.FIELDS]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("arch", [Arch.CPU, Arch.SM80, Arch.SM90A])
def test_descriptions_name_the_members_that_kernels_print(arch: Arch) -> None:
    for spec in islice(candidates(Problem(Direction.FORWARD, arch, DType.BFLOAT16, 64, Mask.DENSE)), 3):
        text = render(spec).text
        rows = text[text.index("struct Params {") :].partition("};")[0].splitlines()[1:]
        printed = [row.partition(";")[0].split()[-1] for row in rows]
        assert len(printed) == len(render(spec).params)
