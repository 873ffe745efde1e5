"""benchmarks/shared_classes.py on the CPU: which calls share a class, and which kernel it gets; no time is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import shared_classes
import torch
from shared_classes import Shared

from attnforge.bagel.measure.cases import make_case, pairs_of
from attnforge.benchmarks.near_entries import CHOSEN, Job, Measured
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.masks import Spans
from attnforge.runtime.search.timing import Timing

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PROBLEM = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 32, Mask.SPANS, 4)
FIRST, SECOND, THIRD = islice(candidates(PROBLEM), 3)


@pytest.mark.parametrize("length", [8192, 16384])
def test_calls_of_an_octave_see_as_many_keys(length: int) -> None:
    found = list(shared_classes.calls_of("2/1/32", length, DType.FLOAT32, CPU))
    assert len(found) >= 6
    for n, case in enumerate(found):
        assert case.visible_keys.bit_length() - 1 == shared_classes.OCTAVES[n // 3], case.name
        assert isinstance(case.mask, Spans)
        assert case.pairs == pairs_of(case.mask, length)


def measured(*times: dict[str, float]) -> Shared:
    """Calls that take these times; the second kernel is chosen."""
    case = make_case("window:8/64", "2/1/32", DType.FLOAT32, CPU)
    specs = {"first": FIRST, "second": SECOND, "third": THIRD}
    found = []
    for n, ms in enumerate(times):
        job = Job(replace(case, name=f"call {n}"), Direction.FORWARD, specs, "second")
        timings = {name: Timing(t, t, t, 1) for name, t in (ms | {CHOSEN: ms["second"]}).items()}
        found.append(Measured(job, timings, timings))
    return Shared(found, least=1.015)


def test_the_kernel_with_the_smallest_largest_loss() -> None:
    shared = measured(
        {"first": 1.0, "second": 1.3, "third": 1.1}, {"first": 1.2, "second": 1.0, "third": 1.05}
    )
    assert shared.kernel == "third"
    assert shared.worst("third") == pytest.approx(1.1)
    assert shared.worst(CHOSEN) == pytest.approx(1.3)
    rows = [row.split(" | ") for row in shared.rows()]
    assert [(row[1], row[3], row[4], row[5].rstrip(" |")) for row in rows] == [
        ("call 0", "1.300", "third", "1.100"),
        ("call 1", "1.000", "third", "1.050"),
    ]


def test_what_is_chosen_stays_where_little_is_gained() -> None:
    shared = measured(
        {"first": 1.0, "second": 1.01, "third": 2.0}, {"first": 1.0, "second": 1.0, "third": 2.0}
    )
    assert shared.kernel == "second"


def test_deterministic_calls_get_the_best_kernel_of_a_fixed_order() -> None:
    """The first kernel is the fastest; of the others the third loses less on average, though more at worst."""
    times = ({"first": 1.0, "second": 1.3, "third": 1.0}, {"first": 1.0, "second": 1.3, "third": 1.4})
    shared = measured(*times)
    assert shared.fixed_order is None
    found = candidates(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS, 16))
    any_order, fixed = (
        next(s for s in found if s.tuning.to_json()["deterministic"] == knob) for knob in (0, 1)
    )
    specs = {"first": any_order, "second": fixed, "third": fixed}
    calls = [replace(one, job=replace(one.job, specs=specs)) for one in shared.calls]
    assert replace(shared, calls=calls).fixed_order == "third"


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards and a backward of a table; an entry for each class."""
    backward = next(candidates(replace(PROBLEM, direction=Direction.BACKWARD)))
    known = ((FIRST, 512), (SECOND, 2048), (backward, 512))
    entries = [tables.Tuned(spec, 2, size, 1.0, 1.0) for spec, size in known]
    tables.save(tables.device_name(CPU), entries, tmp_path / "before")
    monkeypatch.setenv(TABLES, str(tmp_path / "before"))
    monkeypatch.setattr(shared_classes, "OCTAVES", range(5, 6))
    calls = ["--heads", "2/1/32", "--lengths", "512", "--packs", "--dtype", "fp32", "--device", "cpu"]
    outputs = ["--json", str(tmp_path / "log"), "--table-out", str(tmp_path / "after")]
    shared_classes.main([*calls, "--seconds", "0.001", *outputs])
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["case"].partition(":")[0] for line in lines] == ["window", "documents", "images"] * 2
    assert all({CHOSEN, line["chosen"]} <= line["ms"].keys() for line in lines)
    monkeypatch.setenv(TABLES, str(tmp_path / "after"))
    found = tables.table_path(tables.device_name(CPU), tmp_path / "after")
    assert [entry["class"]["direction"] for entry in json.loads(found.read_text())] == ["bwd", "fwd"]
