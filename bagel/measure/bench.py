"""Times our kernels and their peers on a list of cases, in one run; returns rows and prints nothing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnforge.bagel.measure.fa4 import Unavailable
from attnforge.bagel.measure.peers import known, present, time_peer
from attnforge.codegen.spec import Direction
from attnforge.runtime import ops
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Timing, measure, rotate
from attnforge.runtime.tables import device_name

OURS = "attnforge"


@dataclass(frozen=True)
class Row:
    """One attention on one case. Without a time, `note` holds the reason."""

    case: str
    direction: str
    dtype: str
    name: str
    ms: float | None = None
    tflops: float | None = None
    repeats: int = 0
    note: str = ""


def time_ours(case: Case, direction: Direction) -> Timing:
    """Time the variant that dispatch chooses; the backward alone."""
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    return measure(ours(case, direction, sets), [(index,) for index in range(len(sets))], case.device)


def ours(case: Case, direction: Direction, sets: Sequence[Inputs]) -> Callable[[int], Any]:
    """A call that runs ours on the inputs of an index: (out, lse), or (dq, dk, dv) of the backward alone."""

    def forward(index: int) -> Any:
        x = sets[index]
        return ops.forward(x.q, x.k, x.v, case.mask, case.scale)

    if direction is Direction.FORWARD:
        return forward
    saved = [forward(index) for index in range(len(sets))]

    def backward(index: int) -> Any:
        x = sets[index]
        out, lse = saved[index]
        return ops.backward(x.dout, x.q, x.k, x.v, out, lse, case.mask, case.scale)

    return backward


def chosen_peers(text: str | None, device: torch.device) -> tuple[str, ...]:
    """The peers in `text`, separated by commas; None: all installed ones. Raises ValueError for unknown names."""
    if text is None:
        return present(device)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known():
            raise ValueError(f"--peers: there is no {name!r}; there are {', '.join(known())}")
    return names


def peers_of(case: Case, direction: Direction, names: Iterable[str] | None = None) -> Iterator[Row]:
    """Rows of the peers; a peer that does not support the case has a note."""
    for name in present(case.device) if names is None else names:
        try:
            yield _row(case, direction, name, time_peer(name, case, direction))
        except Unavailable as reason:
            yield Row(case.name, direction.value, case.dtype.value, name, note=str(reason))


def bench(
    cases: Iterable[Case], directions: Iterable[Direction], names: Iterable[str] | None = None
) -> Iterator[Row]:
    """Our row and the peers' rows, case by case. If ours fails, its row has a note, and the run continues."""
    directions, names = tuple(directions), None if names is None else tuple(names)
    for case in cases:
        for direction in directions:
            try:
                yield _row(case, direction, OURS, time_ours(case, direction))
            except Exception as error:  # reported by the caller, see `failed`
                note = f"{type(error).__name__}: {error}"
                yield Row(case.name, direction.value, case.dtype.value, OURS, note=note)
            yield from peers_of(case, direction, names)


def _row(case: Case, direction: Direction, name: str, timing: Timing) -> Row:
    tflops = case.flops(direction) / timing.median / 1e9
    return Row(case.name, direction.value, case.dtype.value, name, timing.median, tflops, timing.repeats)


def failed(rows: Iterable[Row]) -> list[str]:
    """The failures of our kernels, one line each."""
    return [
        f"{row.case} {row.direction} {row.dtype}: {row.note}"
        for row in rows
        if row.name == OURS and not row.ms
    ]


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest row that is not ours."""
    timed = [row for row in rows if row.ms is not None and row.name != OURS]
    return min(timed, key=lambda row: row.ms or 0.0, default=None)


def machine(device: torch.device) -> dict[str, str]:
    """The provenance of a table: device, versions."""
    facts = {"device": device_name(device), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cpu":
        return {**facts, "threads": str(torch.get_num_threads())}
    return {**facts, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


def to_json(rows: Iterable[Row], device: torch.device) -> dict[str, Any]:
    """Plain JSON value of a run."""
    return {"machine": machine(device), "rows": [asdict(row) for row in rows]}
