"""CPU kernels that multiply in the tile registers of Intel AMX, emulated where the CPU has none."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import amx
import pytest
import torch
from cpu_kernel import Kernel
from oracle import Shape, draw, make_mask
from score_oracle import attended, compare, functions, oracle
from test_cpu_kernels import SHAPES, check_backward, check_forward, inputs, problem
from test_cpu_kernels import Shape as CpuShape

from attnforge.codegen import cpu_features
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.cpu import CpuBackward, CpuForward, needs_amx
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Spec, Tuning
from attnforge.runtime import dispatch, export, kernels, tables
from attnforge.runtime.call import Call

pytestmark = amx.needs_x86

FORWARD = CpuForward(32, 64, 4, 16, 32, 2, pairs=True, amx=True)
BACKWARD = CpuBackward(64, 64, 16, 32, 2, pairs=True, amx=True)


@pytest.fixture
def emulator() -> Iterator[ctypes.CDLL]:
    """Instructions of AMX work."""
    with amx.emulated() as library:
        yield library


@pytest.fixture
def has_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine has tile registers, as far as Python knows."""
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: "")
    dispatch.forget()
    yield
    dispatch.forget()


def kernel(tuning: Tuning, head_dim: int, mask: Mask, directory: Path, dim_v: int = 0) -> Kernel:
    direction = Direction.FORWARD if isinstance(tuning, CpuForward) else Direction.BACKWARD
    there = replace(problem(direction, DType.BFLOAT16, head_dim, mask), dim_v=dim_v)
    return Kernel(Spec(there, tuning), directory)


# Head dims in whole tile registers, and with columns that pad them; blocks of one, two and three registers of rows.
@pytest.mark.parametrize(
    ("mask", "head_dim", "tuning"),
    [
        (Mask.FULL, 64, FORWARD),
        (Mask.CAUSAL, 72, FORWARD),
        (Mask.SPANS, 128, FORWARD),
        (Mask.SPANS, 33, CpuForward(48, 96, 2, 16, 16, 3, pairs=True, amx=True)),
        (Mask.CAUSAL, 40, CpuForward(32, 192, 7, 16, 48, 1, pairs=True, amx=True)),
    ],
)
def test_forward(
    mask: Mask, head_dim: int, tuning: CpuForward, tmp_path: Path, emulator: ctypes.CDLL
) -> None:
    made = kernel(tuning, head_dim, mask, tmp_path)
    for shape in SHAPES:
        check_forward(made, inputs(shape, head_dim, DType.BFLOAT16, mask))
    assert emulator.amx_is_released()


@pytest.mark.parametrize(
    ("mask", "head_dim", "tuning"),
    [
        (Mask.FULL, 72, BACKWARD),
        (Mask.CAUSAL, 64, CpuBackward(32, 128, 16, 32, 2, pairs=True, amx=True)),
        (Mask.SPANS, 33, CpuBackward(64, 96, 16, 16, 2, pairs=True, amx=True)),
    ],
)
def test_backward(
    mask: Mask, head_dim: int, tuning: CpuBackward, tmp_path: Path, emulator: ctypes.CDLL
) -> None:
    made = kernel(tuning, head_dim, mask, tmp_path)
    for shape in (SHAPES[1], SHAPES[3], CpuShape(1, 3, 1, 70, 75)):
        check_backward(made, inputs(shape, head_dim, DType.BFLOAT16, mask))
    assert emulator.amx_is_released()


@pytest.mark.parametrize("tuning", [FORWARD, BACKWARD])
def test_negative_scale(tuning: Tuning, tmp_path: Path, emulator: ctypes.CDLL) -> None:
    x = replace(inputs(CpuShape(1, 2, 2, 70, 90), 64, DType.BFLOAT16, Mask.CAUSAL), scale=-0.2)
    made = kernel(tuning, 64, Mask.CAUSAL, tmp_path)
    (check_forward if isinstance(tuning, CpuForward) else check_backward)(made, x)


# What lies in scratch of the call before must not reach a later result, not even as 0 * NaN.
@pytest.mark.parametrize("tuning", [FORWARD, BACKWARD])
def test_nothing_is_left_from_the_call_before(tuning: Tuning, tmp_path: Path, emulator: ctypes.CDLL) -> None:
    made = kernel(tuning, 40, Mask.FULL, tmp_path)
    forward = isinstance(tuning, CpuForward)
    bad = inputs(CpuShape(1, 4, 1, 128, 128), 40, DType.BFLOAT16, Mask.FULL)
    bad = replace(bad, q=torch.full_like(bad.q, torch.nan), v=torch.full_like(bad.v, torch.nan))
    if forward:
        made.forward(bad, threads=1)
    else:
        made.backward(bad, bad.q, bad.q, torch.zeros(bad.q.shape[:3]), threads=1)
    good = inputs(CpuShape(1, 4, 1, 35, 35), 40, DType.BFLOAT16, Mask.FULL)
    (check_forward if forward else check_backward)(made, good)


@pytest.mark.usefixtures("emulator", "has_amx")
@pytest.mark.parametrize(
    ("name", "mask", "shape"),
    [
        ("mixed", "dense", Shape(67, 101, 16, 2, 2, 2)),
        ("softcap", "causal", Shape(130, 70, 40, 1, 3, 1, 9)),
        ("relative", "spans", Shape(35, 260, 64, 1, 2)),
    ],
)
def test_calls_take_tile_registers(
    name: str, mask: str, shape: Shape, caplog: pytest.LogCaptureFixture
) -> None:
    """Forward and backward of the operator, with a score function, dispatched as on a machine that has them."""
    x = draw(shape, torch.bfloat16, "cpu")
    seen = make_mask(mask, shape.seq_q, shape.seq_k, "cpu")
    score, formula = functions(shape.batch, shape.heads_kv * shape.group, shape.seq_q, shape.seq_k)[name]
    with caplog.at_level(logging.DEBUG, logger="attnforge"):
        found = attended(x.q, x.k, x.v, seen, score, x.dout)
    compare(found, oracle(x.q, x.k, x.v, seen, formula, x.dout), 2e-2)
    chosen = [record.message for record in caplog.records if "first feasible" in record.message]
    assert len(chosen) == 2
    assert all("_x1" in message for message in chosen)


def test_without_tile_registers_they_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the table of this very machine names one; and loading one says why not."""
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: "Linux refuses")
    monkeypatch.setattr(tables, "folders", lambda: (tmp_path,))
    spec = Spec(problem(Direction.FORWARD, DType.BFLOAT16, 64, Mask.FULL), FORWARD)
    device = torch.device("cpu")
    tables.save(tables.device_name(device), [tables.Tuned(spec, 1, 512, 1.0, 1.0)], tmp_path)
    with caplog.at_level(logging.DEBUG, logger="attnforge"):
        assert not needs_amx(dispatch.choose(Call(spec.problem, 1, 512), device).spec)
    assert f"{spec.slug} of {tables.device_name(device)} cannot run here: Linux refuses" in caplog.text
    with pytest.raises(ValueError, match=r"needs the tile registers of Intel AMX, but Linux refuses"):
        kernels.load(spec, device)


def test_tables_tell_the_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: "Linux refuses")
    without = tables.device_name(cpu)
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: "")
    assert tables.device_name(cpu) == f"{without} amx"


def test_packages_do_without(has_amx: None, tmp_path: Path) -> None:
    (item,) = export.collect(
        Arch.CPU, [export.Shape(1, 2, 512, 64)], [DType.BFLOAT16], [Mask.FULL], [Direction.FORWARD]
    )
    assert not needs_amx(item.spec)
    listed = tmp_path / "specs.json"
    spec = Spec(problem(Direction.FORWARD, DType.BFLOAT16, 64, Mask.FULL), FORWARD)
    listed.write_text(json.dumps([spec.to_json()]))
    with pytest.raises(ValueError, match="needs the tile registers of Intel AMX, which packages do not use"):
        export.read_specs(listed)


@pytest.mark.parametrize("direction", Direction)
def test_space(direction: Direction, has_amx: None) -> None:
    for head_dim in (64, 72, 128, 256):
        specs = list(candidates(problem(direction, DType.BFLOAT16, head_dim, Mask.SPANS)))
        with_amx = [spec for spec in specs if needs_amx(spec)]
        assert specs[: len(with_amx)] == with_amx
        assert len(with_amx) >= 3
        assert len({render(spec).text for spec in with_amx}) == len(with_amx)
    plain = candidates(problem(direction, DType.FLOAT32, 64, Mask.SPANS))
    assert not any(needs_amx(spec) for spec in plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": False}, "amx: needs pairs, and 16 lanes"),
        ({"rows": 24}, "rows 24: with amx a multiple of 16"),
        ({"tile_n": 80, "rows": 16}, "tile_n 80: with amx a multiple of 32"),
        ({"tile_m": 48, "cols": 3}, "takes 11 tile registers, 3 more than the CPU has"),
    ],
)
def test_what_blocks_must_be(change: dict[str, Any], message: str) -> None:
    spec = Spec(problem(Direction.FORWARD, DType.BFLOAT16, 64, Mask.FULL), replace(FORWARD, **change))
    with pytest.raises(Infeasible, match=message):
        make_plan(spec)
