"""Launches of the Hopper backward that start before the launch before them has ended (programmatic dependent launch).

tests/kernels/test_backward_pipeline.py has the order of events in the main kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import islice
from pathlib import Path

import pytest
from exported import COMMAND, NAME
from gxx import HERE

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.package import Item, Tree
from attnforge.codegen.plan import Plan
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.doctor import compilers
from attnforge.runtime.native.launcher import sources

WAIT, LET = "griddepcontrol_wait();", "griddepcontrol_launch_dependents();"
PROBLEMS = [
    Problem(Direction.BACKWARD, Arch.SM90A, dtype, head_dim, mask)
    for dtype, head_dim in (
        (DType.BFLOAT16, 64),
        (DType.FLOAT16, 72),
        (DType.BFLOAT16, 128),
        (DType.BFLOAT16, 40),
    )
    for mask in Mask
]


def specs(problem: Problem) -> list[Spec]:
    """The first of the space, and one of each way to keep sums that the problem has."""
    found: dict[tuple[bool, bool], Spec] = {}
    for spec in candidates(problem):
        tuning = spec.tuning
        assert isinstance(tuning, Sm90Backward)
        found.setdefault((tuning.split_heads, tuning.deterministic), spec)
    return list(found.values())


def body(text: str, name: str) -> str:
    """What stands between the braces of a function, or of all that bear this name."""
    found = re.findall(
        rf"^(?:__device__ [^;{{]*?\b)?{name}\([^;{{]*\) {{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL
    )
    assert found, name
    return "".join(found)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.dtype.value}-{p.head_dim}-{p.mask.value}")
def test_every_launch_but_the_first_waits(problem: Problem) -> None:
    ways = set()
    for spec in specs(problem):
        ways.add((spec.tuning.split_heads, spec.tuning.deterministic))  # type: ignore[attr-defined]
        source = render(spec)
        launches = source.plan.launches
        assert [launch.overlaps for launch in launches] == [False] + [True] * (len(launches) - 1)
        assert not any(launch.overlaps for launch in source.plan.schedule)
        for launch in launches:
            if launch.symbol != spec.symbol:
                require_helper(body(source.text, launch.symbol), launch.overlaps, launch is launches[-1])
        require_main(source.text, spec.symbol, source.plan.constants["loaders"])
        schedule = "".join(body(source.text, launch.symbol) for launch in source.plan.schedule)
        assert WAIT not in schedule
        assert LET not in schedule
    assert (True, False) in ways
    assert (True, True) in ways


def require_helper(text: str, overlaps: bool, last: bool) -> None:
    """All threads wait, at the kernel's own level and before anything but addresses; the last lets nobody start."""
    assert text.count(f"\n    {WAIT}\n") == text.count(WAIT) == int(overlaps)
    before = text.partition(WAIT)[0] if overlaps else ""
    assert not re.search(r"gather|scatter|rows\[\w+ /|dq_semaphore|\bif\b|\bfor\b|return", before)
    assert text.count(LET) == int(not last)
    assert last or text.lstrip().startswith(LET)


def require_main(text: str, symbol: str, loaders: int) -> None:
    """What reads row_stats or adds to sums waits, and blocks without work; the loader of Q lets go, at its end."""
    main = body(text, symbol)
    assert f"if (work.visits == 0) {{\n        {WAIT}\n" in main
    assert main.count("return") == 1
    assert LET not in main
    loads = body(text, "produce_q" if loaders == 2 else "produce")
    assert loads.index(WAIT) < loads.index("row_stats_of(") < loads.index("load_q(")
    users = body(text, "row_stats_of") + body(text, f"{symbol}_preprocess")
    assert text.count("p.delta") == users.count("p.delta")
    assert loads.endswith(f"    {LET}\n")
    assert body(text, "reduce_dq").lstrip().startswith(WAIT)
    if loaders == 2:
        assert WAIT not in body(text, "produce_dout")
    # What consumers write, they write in the epilogue, after the main loop, which takes row_stats.
    consumer = re.search(r"^struct Consumer \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    assert consumer
    assert WAIT not in consumer[1]
    run, epilogue = (
        re.search(rf"^    \S.* void {name}\(.*?^    }}", consumer[1], re.MULTILINE | re.DOTALL)
        for name in ("run", "epilogue")
    )
    assert run
    assert epilogue
    assert run[0].endswith("epilogue();\n    }")
    for write in ("add_dkv(", "semaphore_wait(", "store_tile("):
        assert consumer[1].count(write) == epilogue[0].count(write)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(direction, arch, dtype, 64, mask)
        for direction in Direction
        for arch, dtype in (
            (Arch.SM80, DType.BFLOAT16),
            (Arch.SM90, DType.BFLOAT16),
            (Arch.SM90, DType.FLOAT32),
        )
        for mask in (Mask.FULL, Mask.SPANS)
    ]
    + [
        Problem(Direction.FORWARD, Arch.SM90A, dtype, 64, Mask.SPANS)
        for dtype in (DType.BFLOAT16, DType.FLOAT32)
    ],
    ids=lambda p: f"{p.direction.value}-{p.arch.value}-{p.dtype.value}-{p.mask.value}",
)
def test_nothing_else_overlaps(problem: Problem) -> None:
    """Other kernels do not wait, so they must not start early."""
    for spec in islice(candidates(problem), 2):
        source = render(spec)
        assert not any(launch.overlaps for launch in (*source.plan.launches, *source.plan.schedule))
        assert "griddepcontrol" not in source.text


def plan_of(mask: Mask = Mask.SPANS) -> Plan:
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, mask)
    return make_plan(next(iter(candidates(problem))))


def test_exported_launches_know_whether_they_overlap() -> None:
    plan = plan_of()
    tree = Tree(NAME, Arch.SM90A, (Item(plan.spec, 1024, "guess"),))
    files = tree.files(COMMAND)
    described = files[f"{NAME}/{NAME}.cu"]
    for launch in (*plan.schedule, *plan.launches):
        (section,) = re.findall(rf"\n  symbol {launch.symbol}\n((?:  .*\n)*)", described)
        assert f"  overlaps {int(launch.overlaps)}\n" in section
    assert any(launch.overlaps for launch in plan.launches)
    assert files[f"{NAME}/native/driver.h"] == sources()["driver.h"]


@pytest.mark.parametrize(("version", "overlapping"), [(12020, False), (12030, True), (13000, True)])
def test_old_drivers_launch_one_after_the_other(version: int, overlapping: bool, tmp_path: Path) -> None:
    texts = sources()
    for name in ("driver.h", "launch_config.h"):
        (tmp_path / name).write_text(texts[name])
    for name in (
        "c10/core/Device.h",
        "c10/util/Exception.h",
    ):  # overlapping_driver.cpp has its own
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    command = ("g++", "-std=c++17", "-Wall", "-Werror", f"-I{tmp_path}", HERE / "overlapping_driver.cpp")
    subprocess.run((*command, "-DFAKE", "-fPIC", "-shared", "-o", tmp_path / "libcuda.so.1"), check=True)
    subprocess.run((*command, "-ldl", "-o", tmp_path / "program"), check=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_VERSION": str(version)}
    done = subprocess.run([tmp_path / "program"], env=env, capture_output=True, text=True, check=True)
    launch = "function 11 grid 40 1 1 block 384 1 1 shared 1000 stream 12 argument 5"
    second = ("overlapping", "7") if overlapping else ("plain", "0")
    clusters = (
        [f"clusters of 8 {launch}", f"overlapping clusters of 8 {launch}", "25", "0"] if overlapping else []
    )
    expected = [f"plain {launch}", "0", f"{second[0]} {launch}", second[1], *clusters]
    assert done.stdout.splitlines() == expected


LAYOUT = """
#include <cstddef>
#include <cuda.h>
#include "launch_config.h"
using namespace attnforge;
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
#define SAME(a, b) static_assert(offsetof(LaunchConfig, a) == offsetof(CUlaunchConfig, b))
SAME(grid, gridDimX);
SAME(block, blockDimX);
SAME(shared_bytes, sharedMemBytes);
SAME(stream, hStream);
SAME(attributes, attrs);
SAME(count, numAttrs);
static_assert(offsetof(LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(LaunchAttribute, flag) ==
              offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));
static_assert(offsetof(LaunchAttribute, sizes) == offsetof(CUlaunchAttribute, value.clusterDim.x));
static_assert(kProgrammaticStreamSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(kClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
"""


@pytest.mark.nvcc
def test_the_argument_of_the_launch_is_cudas(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on the PATH, which knows where cuda.h is")
    (tmp_path / "launch_config.h").write_text(sources()["launch_config.h"])
    (tmp_path / "layout.cpp").write_text(LAYOUT)
    done = subprocess.run(
        [nvcc, "-c", "layout.cpp", "-o", "layout.o"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_launcher_and_doctor_ask_for_the_same_driver() -> None:
    major, minor = compilers.OVERLAP
    number = major * 1000 + minor * 10
    assert f"kOverlappingDriver = {number};" in sources()["launch_config.h"]


@pytest.mark.parametrize(("version", "said"), [((12, 2), True), ((12, 3), False), ((13, 0), False)])
def test_doctor_says_so(version: tuple[int, int], said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "driver_cuda", lambda: version)
    (finding,) = compilers.driver()
    assert ("overlap" in finding.value) is said
