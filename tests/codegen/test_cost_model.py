"""The model of kernels that nothing was measured on: against a search's measurements, and the tables made with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from strict_nvcc import compile_strictly

from attnforge.bagel.measure.modelled import ARCHS, Target, model, targets
from attnforge.bagel.measure.tiles import EMPTY, tile_map
from attnforge.bagel.workloads import workload
from attnforge.codegen.cost_model import GPUS, Prediction, Work, occupancy, predict
from attnforge.codegen.families import FAMILIES, make_plan
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.call import Call

# [knobs..., registers, milliseconds] of every variant of a search: H200, mma.sync, finetune/0 28/4/128 bf16 spans.
MEASURED = json.loads((Path(__file__).parent / "data" / "sm90_finetune0.json").read_text())


def predicted(direction: Direction) -> list[tuple[float, float]]:
    """(predicted, measured) milliseconds of each variant."""
    mask = workload("finetune/0").mask("cpu")
    rows = mask.starts.numel()
    problem = Problem(direction, Arch.SM90, DType.BFLOAT16, 128, Mask.SPANS)
    found = []
    for *knobs, registers, ms in MEASURED[direction.value]:
        spec = Spec(problem, FAMILIES["sm80", direction].tuning(*knobs))
        kinds = tile_map(mask, rows, spec.tuning.tile_m, spec.tuning.tile_n).kinds
        work = Work(28, 7, rows, int((kinds != EMPTY).sum()))
        found.append((predict(make_plan(spec), work, registers).ms, ms))
    return found


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) for i in range(len(values))]


@pytest.mark.parametrize(("direction", "correlation"), [(Direction.FORWARD, 0.85), (Direction.BACKWARD, 0.7)])
def test_model_orders_what_was_measured(direction: Direction, correlation: float) -> None:
    pairs = predicted(direction)
    a, b = (ranks([pair[i] for pair in pairs]) for i in (0, 1))
    n = len(pairs)
    assert n > 50
    assert 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / (n * (n * n - 1)) > correlation
    choice = min(pairs)[1]
    assert choice < 1.2 * min(ms for _, ms in pairs)


def test_occupancy_counts_every_limit() -> None:
    spec = next(candidates(Problem(Direction.FORWARD, Arch.SM89, DType.BFLOAT16, 64, Mask.SPANS)))
    plan, gpu = make_plan(spec), GPUS[Arch.SM89]
    launch = max(plan.launches, key=lambda launch: launch.shared_bytes)
    assert occupancy(plan, dataclasses.replace(gpu, shared_bytes=1 << 20), 128) == 65536 // (
        128 * launch.threads
    )
    large = dataclasses.replace(gpu, shared_bytes=1 << 30, threads=1 << 20, blocks=1 << 10)
    assert occupancy(plan, large, 33) == 65536 // (40 * launch.threads), (
        "a warp has multiples of 256 registers"
    )
    for spare, blocks in ((0, 3), (-1, 2)):
        shared = 3 * (launch.shared_bytes + 1024) + spare
        assert occupancy(plan, dataclasses.replace(large, shared_bytes=shared), 16) == blocks
    assert occupancy(plan, gpu, 32) == min(
        (100 << 10) // (launch.shared_bytes + 1024), 1536 // launch.threads
    )
    assert occupancy(plan, dataclasses.replace(gpu, blocks=1), 32) == 1
    assert predict(plan, Work(8, 1, 1024, 64), 10**4) == Prediction(float("inf"), 0, "registers")


def test_visits_agree_with_the_tiles_of_a_mask() -> None:
    dense = Target("final round", DType.FLOAT32, 64, Mask.DENSE, 2, 1, 100)
    # 25 text rows: three tiles of 32 queries by 64 keys hold text only below their row; images see no text.
    assert dense.visits(100, 100) == 1
    assert dense.visits(1, 1) == dense.pairs == 25 * 26 // 2 + 100 * 75
    assert dense.visits(25, 25) == 4 + 3 * 3


def test_half_rate_sums_make_a_geforce_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Direction.FORWARD, Arch.SM89, DType.BFLOAT16, 128, Mask.SPANS)
    plan, work = make_plan(next(candidates(problem))), Work(28, 7, 11520, 2000)
    half = predict(plan, work, 200)
    monkeypatch.setitem(GPUS, Arch.SM89, dataclasses.replace(GPUS[Arch.SM89], half_fma=512))
    full = predict(plan, work, 200)
    assert half.bound == "tensor cores"
    assert 1.3 < half.ms / full.ms < 2


# ---- The tables


ENTRIES = [
    pytest.param(entry, id=entry.spec.slug)
    for arch in ARCHS
    for entry in tables.load(arch.value, tables.PACKAGED / tables.MODELLED)
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_say_what_they_are(entry: tables.Tuned) -> None:
    assert entry.notes["basis"] == "modelled, not measured"
    assert entry.notes["gpu"] == GPUS[entry.spec.problem.arch].name
    assert entry.notes["spill_bytes"] == 0
    assert entry.notes["blocks"] >= 1
    assert make_plan(entry.spec).spec == entry.spec


def test_every_architecture_has_the_models_and_the_challenges_heads() -> None:
    for arch in ARCHS:
        entries = tables.load(arch.value, tables.PACKAGED / tables.MODELLED)
        found = {
            (e.spec.problem.direction, e.spec.problem.dtype, e.spec.problem.head_dim, e.spec.problem.mask)
            for e in entries
        }
        wanted = {(d, t.dtype, t.head_dim, t.mask) for t in targets() for d in Direction}
        assert found == wanted


def test_measured_entries_come_first() -> None:
    problem = Problem(Direction.FORWARD, Arch.SM89, DType.FLOAT16, 64, Mask.SPANS)
    reasons = [choice.reason for choice in choosing.choose(Call(problem, 7, 8192), "")]
    assert reasons
    assert all(reason.startswith("modelled, not measured") for reason in reasons)
    hopper = dataclasses.replace(problem, arch=Arch.SM90, head_dim=128)
    assert all(choice.reason.startswith("tuned as") for choice in choosing.choose(Call(hopper, 7, 8192), ""))


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
def test_chosen_kernels_spill_nothing(arch: Arch, nvcc: None, tmp_path: Path) -> None:
    """One of each table; `attnforge model` compiled all of them."""
    entries = tables.load(arch.value, tables.PACKAGED / tables.MODELLED)
    entry = entries[ARCHS.index(arch) * 5 % len(entries)]
    _, resources = compile_strictly(render(entry.spec), tmp_path)
    assert all(used["spill_bytes"] == 0 for used in resources.values())


@pytest.mark.nvcc
def test_model_chooses_without_spills(cache_dir: Path) -> None:
    target = Target("final round", DType.FLOAT32, 8, Mask.DENSE, 2, 1, 200)
    entry = model(target, Direction.FORWARD, Arch.SM86)
    assert entry is not None
    assert entry.notes["spill_bytes"] == 0
    assert entry.notes["registers"] > 0
