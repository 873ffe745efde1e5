"""Times ours and the peers on one case, interleaved with a matrix product as the ceiling; errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attnforge.bagel.measure import peers
from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.measure.bench import OURS, ours
from attnforge.bagel.measure.goals import STEP, WORKS, Goal
from attnforge.bagel.measure.peers import as_unavailable, memory_freed
from attnforge.bagel.workloads import workload
from attnforge.codegen.spec import Direction
from attnforge.runtime import ops
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Effort, Timing, measure_interleaved, rotate
from attnforge.runtime.search.verify import distances, make_check

MATMUL = "matmul"
LAYER = "/layer"  # suffix in `step`: the same with an existing mask
DETERMINISTIC = f"{OURS}-det"  # ours with deterministic gradients
Call = Callable[[int], Any]


@dataclass(frozen=True)
class Entry:
    """One attention: milliseconds (median), TFLOP/s, worst over best time, errors relative to the exact RMS."""

    ms: float | None = None
    tflops: float | None = None
    spread: float = 0.0
    repeats: int = 0  # timed calls; `turns` in older logs
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Line:
    """The result of a goal on one of its cases."""

    label: str
    work: str
    case: str
    entries: dict[str, Entry]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Line:
        """Rebuild a line; also one of an older log."""
        entries = {
            name: Entry(**{"repeats" if key == "turns" else key: value for key, value in entry.items()})
            for name, entry in data["entries"].items()
        }
        return Line(data["label"], data["work"], data["case"], entries)


def run_goal(goal: Goal, case: Case, seconds: float = 0.6, most: int = 40, errors: bool = False) -> Line:
    """Time all attentions of `goal` on `case`, interleaved: about `seconds` in all, 3 to `most` calls each.

    One that fails has an entry with a note, also ours. With `errors`, each is compared with float64 on sampled rows
    (not in `step`).
    """
    entries: dict[str, Entry] = {}
    with memory_freed(case.device):
        calls, sets = _ready(goal, case, entries)
        calls[MATMUL], its_flops = matrix_product(case.device)
        timings = interleaved(calls, range(len(sets)), case.device, seconds, most)
        for name, timing in timings.items():
            flops = its_flops if name == MATMUL else _flops(goal, case)
            spread = timing.worst / timing.best
            entries[name] = Entry(timing.median, flops / timing.median / 1e9, spread, timing.repeats)
        calls.clear()
    if errors and goal.work != STEP:
        with memory_freed(case.device):
            _add_errors(Direction(goal.work), case, entries)
    order = [name for name in _names(goal) if name in entries]
    return Line(goal.label, goal.work, case.name, {name: entries[name] for name in order})


def _names(goal: Goal) -> list[str]:
    names = [OURS, *([DETERMINISTIC] if goal.deterministic else []), *goal.peers]
    if goal.work == STEP:
        names += [name + LAYER for name in names]
    return [*names, MATMUL]


def _flops(goal: Goal, case: Case) -> float:
    return case.flops(Direction.FORWARD) * WORKS[goal.work]


def matrix_product(device: torch.device) -> tuple[Call, float]:
    """The ceiling beside which attentions are timed: a bf16 product of square matrices, and its flops."""
    side = 8192 if device.type == "cuda" else 256
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    return lambda index: matrix @ matrix, 2.0 * side**3


def _ready(goal: Goal, case: Case, entries: dict[str, Entry]) -> tuple[dict[str, Call], list[Inputs]]:
    """Calls that have run once; an attention that failed gets an entry with a note instead."""
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    calls: dict[str, Call] = {}
    for name in _names(goal)[:-1]:
        try:
            with as_unavailable():
                call = (
                    _step(name, case, sets)
                    if goal.work == STEP
                    else _half(name, Direction(goal.work), case, sets)
                )
                for index in range(len(sets)):
                    call(index)
                if case.device.type == "cuda":
                    torch.cuda.synchronize(case.device)
                calls[name] = call
        except Unavailable as reason:
            entries[name] = Entry(note=str(reason))
    return calls, sets


def _half(name: str, direction: Direction, case: Case, sets: Sequence[Inputs]) -> Call:
    """Forward alone or backward alone."""
    if name in (OURS, DETERMINISTIC):
        return ours(case, direction, sets, deterministic=name == DETERMINISTIC)
    return peers.contestant(name, case, direction, sets)


def _step(name: str, case: Case, sets: Sequence[Inputs]) -> Call:
    """Forward and backward, each time with a new mask unless the name ends in LAYER."""
    pack = workload(case.name.split()[0])
    peer = name.removesuffix(LAYER)

    def attention(of: Case) -> Attention:
        if peer == OURS:
            return lambda q, k, v: ops.attention(q, k, v, of.mask)
        return peers.attention_of(peer, of, often=not name.endswith(LAYER))

    ready = attention(case) if name.endswith(LAYER) else None

    def call(index: int) -> Any:
        x = sets[index]
        run = ready or attention(replace(case, mask=pack.mask(case.device)))
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v))
        return torch.autograd.grad(run(*leaves), leaves, x.dout)

    return call


def interleaved(
    calls: dict[str, Call], indices: range, device: torch.device, seconds: float, most: int
) -> dict[str, Timing]:
    """Interleaved calls, equally many of each: about `seconds` in all, 3 to `most` of each."""
    inputs = [(index,) for index in indices]
    once = measure_interleaved(calls, inputs, device, Effort(repeats=1, least=1))
    repeats = int(seconds * 1e3 / sum(timing.median for timing in once.values()))
    repeats = max(3, min(most, repeats))
    return measure_interleaved(calls, inputs, device, Effort(repeats=repeats, least=repeats, warmups=0))


def _add_errors(direction: Direction, case: Case, entries: dict[str, Entry]) -> None:
    """One attention at a time, on the check's inputs (backward: dout is zero outside the sampled rows)."""
    check = make_check(case, direction)
    tensors = ("dq", "dk", "dv") if direction is Direction.BACKWARD else ("out",)
    for name, entry in list(entries.items()):
        if entry.ms is None or name == MATMUL:
            continue
        try:
            with as_unavailable():
                result = _half(name, direction, case, [check.inputs])(0)
                results = result[: len(tensors)] if isinstance(result, tuple) else (result,)
                found = distances(check, dict(zip(tensors, results, strict=True)))
                entries[name] = replace(entry, errors=found)
        except Unavailable as reason:
            entries[name] = replace(entry, note=f"no error: {reason}")
