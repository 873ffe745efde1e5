"""generated/: which variants are shown there, and what `render --tuned` writes and removes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from strict_nvcc import SPILLED, compile_strictly

from attnforge.codegen.families import FAMILIES
from attnforge.codegen.families.cpu import needs_amx
from attnforge.codegen.prologue import render as render_prologue
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, DType, Spec
from attnforge.runtime.search import examples
from attnforge.runtime.search.winners import GENERATED, tuned_entries, tuned_specs


def key(spec: Spec) -> tuple[object, ...]:
    problem = spec.problem
    return problem.family, problem.direction, problem.mask, bool(problem.mask_mod), needs_amx(spec)


def test_one_example_for_each_family_pass_and_mask() -> None:
    chosen = examples.examples()
    short = [spec for spec in chosen if getattr(spec.tuning, "splits", 0)]
    assert len(short) == 1
    chosen = [spec for spec in chosen if spec not in short]
    assert len({key(spec) for spec in chosen}) == len(chosen)
    tuned = [spec for spec in tuned_specs() if spec.problem.arch.is_gpu]
    assert {key(spec) for spec in tuned} <= {key(spec) for spec in chosen}
    assert {key(spec)[:2] for spec in chosen} == set(FAMILIES)
    assert len(chosen) <= 23


def test_examples_are_of_the_flagship_where_it_was_tuned() -> None:
    largest = max(
        (
            e
            for e in tuned_entries()
            if e.spec.problem.arch.value == "sm90a" and e.notes["case"] == "pretrain/0 7B"
        ),
        key=lambda entry: entry.tflops,
    )
    assert largest.spec in examples.examples()
    dims = {spec.problem.head_dim for spec in examples.examples() if spec.problem.family == "sm90a"}
    assert dims == {examples.FLAGSHIP}


def test_the_index_describes_every_source() -> None:
    text = (GENERATED / examples.INDEX).read_text()
    linked = set(re.findall(r"\(([\w.]+\.(?:cu|cpp))\)", text))
    on_disk = {path.name for path in GENERATED.glob("*.c*")}
    names = {render(spec).file_name for spec in examples.examples()}
    names |= {render_prologue(spec).file_name for spec in examples.prologues()}
    assert linked == on_disk == names
    assert not re.search(r"\|  ?\. Mask", text), "a family has no description"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tuned").mkdir()
    shutil.copy(GENERATED / "tuned" / "nvidia-h200.json", tmp_path / "tuned")
    examples.write(tmp_path)
    return tmp_path


def test_write_repairs_and_removes_what_is_ours_only(directory: Path) -> None:
    assert examples.differences(directory) == []
    source = sorted(directory.glob("*.cu"))[0]
    source.write_text(source.read_text().replace("const", "CONST", 1))
    (directory / "stale.cpp").write_text("// attnforge_stale\nint x;\n")
    (directory / "mine.cpp").write_bytes(b"// somebody's own, \xff\n")
    changed = "".join(examples.differences(directory))
    assert "+++" in changed
    assert "CONST" in changed
    assert "-int x;" in changed
    assert sorted(path.name for path in examples.write(directory)) == sorted([source.name, "stale.cpp"])
    assert examples.differences(directory) == []
    assert not (directory / "stale.cpp").exists()
    assert (directory / "mine.cpp").exists()


def test_every_tuned_kernel_renders() -> None:
    """The slow ones below are compiled only on demand."""
    specs = tuned_specs()
    assert len({render(spec).file_name for spec in specs}) == len(set(specs)) > 30


def tuned_params() -> Iterator[ParameterSet]:
    """The winners of each family, compiled together; those that are no example in generated/ in slow tests."""
    shown = examples.examples()
    for arch, dtype in product(filter(lambda arch: arch.is_gpu, Arch), DType):
        winners = [spec for spec in tuned_specs() if (spec.problem.arch, spec.problem.dtype) == (arch, dtype)]
        for name, marks in (("shown", ()), ("others", pytest.mark.slow)):
            specs = [spec for spec in winners if (spec in shown) == (name == "shown")]
            if specs:
                yield pytest.param(specs, id=f"{arch.value}-{dtype.value}-{name}", marks=marks)


@pytest.mark.nvcc
@pytest.mark.parametrize("specs", list(tuned_params()))
def test_every_tuned_kernel_compiles(specs: list[Spec], nvcc: None, tmp_path: Path) -> None:
    """Most winners have no file in generated/. float32 kernels of the mma.sync family won although they spill."""
    _, resources = compile_strictly([render(spec) for spec in specs], tmp_path)
    for spec in specs:
        if spec.problem.family != "sm80_fp32":
            assert resources[spec.symbol]["spill_bytes"] <= SPILLED
