"""Roofs of devices, and what a variant's tile schedule allows below them.

Two things bound a variant from outside its main loop. Its tiles hold hidden pairs, and its work tiles do not divide
evenly among multiprocessors: `Schedule.allowed` of bagel/measure/occupancy.py is the rate that is left. And each step
of the loop loads a tile from the L2 cache, so that a small tile needs more bytes per FLOP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from attnforge.bagel.measure.case_scores import without_score
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.occupancy import Order, Sections, simulate, spans_of
from attnforge.bagel.measure.tiles import EMPTY, tile_map
from attnforge.bagel.report.read import Run, Variant
from attnforge.codegen.cost_model import Gpu, data_sheet, occupancy, step_bytes
from attnforge.codegen.families import make_plan
from attnforge.codegen.plan import Plan
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.search.case import Case, without_order

PRODUCTS_OF_FLOAT32 = 6  # bf16 products for one of float32, or three tf32 ones at half their rate
_BATCH = re.compile(r"(\d+) x (.+)")


@dataclass(frozen=True)
class Roof:
    """What a device can do: TFLOP/s of the problem's products, TB/s of the L2 cache and of memory (0: unknown)."""

    tflops: float
    l2: float
    memory: float
    measured: bool  # from the log, not from a data sheet


@dataclass(frozen=True)
class Bound:
    """One variant under a roof. `intensity` is FLOP of visible pairs per byte between L2 cache and multiprocessors."""

    intensity: float
    tile_use: float  # visible pairs over pairs in visited row groups of tiles
    # Work over what all multiprocessors could have done until the last one is ready; 1 on a CPU.
    balance: float
    tflops: float  # what tile use, balance and loads allow


def case_of(name: str, dtype: str) -> Case:
    """The case of a log by its name, on the CPU. Raises ValueError or OSError if it cannot be made here."""
    match = _BATCH.fullmatch(name)
    pack, _, model = without_score(without_order(match[2] if match else name))[0].rpartition(" ")
    case = make_case(pack, model, DType(dtype), torch.device("cpu"))
    if isinstance(case.mask, Spans) and case.mask.starts.dim() > 1:
        raise ValueError(
            f"mask: {case.mask} has several intervals or planes, which the report does not support"
        )
    return replace(case, name=name, batch=int(match[1])) if match else case


def bounds(case: Case, run: Run) -> tuple[Roof, list[tuple[Variant, Bound]]]:
    """The roof of a run's device, and the bound of each variant that works.

    For a device whose multiprocessors `cost_model.DATA_SHEETS` does not list, the roof is the highest rate that a
    variant reached, hidden pairs included.
    """
    sheet = data_sheet(run.device)
    gpu = sheet.gpu if sheet else None
    shapes = [(v, _shape(case, make_plan(v.spec), gpu, v.registers)) for v in run.ranked]
    if sheet is None or gpu is None:
        roof = Roof(max((v.tflops / use for v, (_, use, _) in shapes), default=0.0), 0.0, 0.0, measured=True)
    else:
        roof = _roof(gpu, sheet.memory, case.dtype)
    limits = [(v, Bound(*shape, _allowed(roof, *shape))) for v, shape in shapes]
    return roof, limits


def memory_ms(case: Case, roof: Roof, direction: Direction) -> float:
    """Milliseconds that the operands alone take, each moved once between memory and the device; 0 if unknown."""
    if not roof.memory:
        return 0.0
    rows_q = case.batch * case.heads_q * case.seq_q * (case.head_dim + case.head_dim_v)
    rows_k = case.batch * case.heads_kv * case.seq_k * (case.head_dim + case.head_dim_v)
    times = 1 if direction is Direction.FORWARD else 2  # read; gradients of the same sizes written
    return times * (rows_q + rows_k) * case.dtype.bytes / roof.memory / 1e9


def _roof(gpu: Gpu, memory: float, dtype: DType) -> Roof:
    clocks = gpu.multiprocessors * gpu.ghz / 1e3
    share = PRODUCTS_OF_FLOAT32 if dtype is DType.FLOAT32 else 1
    return Roof(2 * gpu.half_fma * clocks / share, gpu.l2_bytes * clocks, memory, measured=False)


def _allowed(roof: Roof, intensity: float, use: float, balance: float) -> float:
    allowed = roof.tflops * use * balance
    return min(allowed, roof.l2 * intensity) if roof.l2 else allowed


def _shape(case: Case, plan: Plan, gpu: Gpu | None, registers: int) -> tuple[float, float, float]:
    """(intensity, tile use, balance) of a plan."""
    t = plan.spec.tuning
    direction = plan.spec.problem.direction
    use, visits = _visited(case, t.tile_m, t.tile_n)
    together = getattr(t, "heads", 1)  # heads that share a load
    loaded = step_bytes(plan) * visits * case.batch * case.heads_q / together
    balance = 1.0
    if gpu is not None and not isinstance(case.mask, DenseMask):
        persistent = any(launch.persistent for launch in plan.launches)
        resident = 1 if persistent else max(1, occupancy(plan, gpu, registers))
        fixed = persistent and not getattr(t, "dynamic", False) and not plan.tile_counter
        split = bool(getattr(t, "split_heads", True))
        key = (t.tile_m, t.tile_n, "static" if fixed else "dynamic", split, gpu.multiprocessors * resident)
        use, balance = _simulated(case, direction, *key, plan.row_groups, Sections.of(plan))
    return case.flops(direction) / loaded, use, balance


@lru_cache(maxsize=4096)
def _visited(case: Case, tile_m: int, tile_n: int) -> tuple[float, int]:
    """(tile use, visited tiles) of one head, averaged over the planes of a dense mask."""
    if isinstance(case.mask, DenseMask):
        planes = case.mask.mask.flatten(0, -3) if case.mask.mask.dim() > 2 else case.mask.mask[None]
        kinds = [tile_map(DenseMask(plane), case.seq_q, tile_m, tile_n).kinds for plane in planes]
        visits = sum(int((one != EMPTY).sum()) for one in kinds) / len(kinds)
    else:
        visits = int((tile_map(spans_of(case), case.seq_q, tile_m, tile_n).kinds != EMPTY).sum())
    return case.pairs / (visits * tile_m * tile_n), round(visits)


@lru_cache(maxsize=4096)
def _simulated(
    case: Case,
    direction: Direction,
    m: int,
    n: int,
    order: Order,
    split: bool,
    slots: int,
    groups: int,
    sections: Sections,
) -> tuple[float, float]:
    """(tile use, balance) of a schedule."""
    schedule = simulate(
        case, direction, m, n, order, split, multiprocessors=slots, row_groups=groups, sections=sections
    )
    return schedule.tile_use, schedule.balance
