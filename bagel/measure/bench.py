"""Times our kernels and their peers on a list of cases, in one run; returns rows and prints nothing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.peers import OURS as OURS
from attnforge.bagel.measure.peers import known, time_peer, usual
from attnforge.codegen.spec import Direction, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Timing, measure, rotate
from attnforge.runtime.tables import device_name


@dataclass(frozen=True)
class Row:
    """One attention on one case. Without a time, `note` holds the reason.

    ms is the median, and lies between low_ms and high_ms (`timing.ranks`). `ours_ms` is our median in the same
    interleaved timing: only these two may be divided.
    """

    case: str
    direction: str
    dtype: str
    name: str
    ms: float | None = None
    tflops: float | None = None
    repeats: int = 0
    note: str = ""
    low_ms: float = 0.0
    high_ms: float = 0.0
    ours_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast ours is."""
        return self.ms / self.ours_ms if self.ms and self.ours_ms else None


def time_ours(case: Case, direction: Direction) -> Timing:
    """Time the variant that dispatch chooses; the backward alone."""
    sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
    return measure(ours(case, direction, sets), [(index,) for index in range(len(sets))], case.device)


def ours(
    case: Case,
    direction: Direction,
    sets: Sequence[Inputs],
    spec: Spec | None = None,
    deterministic: bool = False,
) -> Callable[[int], Any]:
    """A call that runs ours on the inputs of an index: (out, lse), or (dq, dk, dv) of the backward alone.

    `spec`: the variant of that direction; the one that dispatch chooses if not given. `deterministic`: of the
    backward, if dispatch chooses; as the case is.
    """
    deterministic = deterministic or case.deterministic
    handle = kernels.load(spec, case.device) if spec else 0

    def forward(index: int) -> Any:
        x = sets[index]
        chosen = handle if direction is Direction.FORWARD else 0
        return ops.forward(x.q, x.k, x.v, case.mask, case.scale, chosen, score=case.score)

    if direction is Direction.FORWARD:
        return forward
    saved = [forward(index) for index in range(len(sets))]

    def backward(index: int) -> Any:
        x = sets[index]
        out, lse = saved[index]
        return ops.backward(
            x.dout, x.q, x.k, x.v, out, lse, case.mask, case.scale, deterministic, handle, score=case.score
        )

    return backward


def chosen_peers(text: str | None) -> tuple[str, ...] | None:
    """The peers in `text`, separated by commas; None: the usual ones. Raises ValueError for unknown names."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known():
            raise ValueError(f"--peers: got {name!r}, accepted are {', '.join(known())}")
    return names


def peers_of(
    case: Case,
    direction: Direction,
    names: Iterable[str] | None = None,
    spec: Spec | None = None,
    alone: bool = False,
) -> Iterator[Row]:
    """Rows of the peers, each timed interleaved with ours; one that does not support the case has a note.

    `spec`: our variant, the one that dispatch chooses if not given; `alone`: there is none that works.
    """

    def beside(sets: Sequence[Inputs]) -> Callable[[int], Any]:
        return ours(case, direction, sets, spec)

    for name in usual(case) if names is None else names:
        try:
            theirs, mine = time_peer(name, case, direction, None if alone else beside)
            yield _row(case, direction, name, theirs, mine)
        except Unavailable as reason:
            yield Row(case.name, direction.value, case.dtype.value, name, note=str(reason))


def bench(
    cases: Iterable[Case], directions: Iterable[Direction], names: Iterable[str] | None = None
) -> Iterator[Row]:
    """Our row and the peers' rows, case by case. If ours fails, its row has a note, and the run continues."""
    directions, names = tuple(directions), None if names is None else tuple(names)
    for case in cases:
        for direction in directions:
            alone = False
            try:
                yield _row(case, direction, OURS, time_ours(case, direction))
            except Exception as error:  # reported by the caller, see `failed`
                note, alone = f"{type(error).__name__}: {error}", True
                yield Row(case.name, direction.value, case.dtype.value, OURS, note=note)
            yield from peers_of(case, direction, names, alone=alone)


def _row(case: Case, direction: Direction, name: str, timing: Timing, mine: Timing | None = None) -> Row:
    return Row(
        case.name,
        direction.value,
        case.dtype.value,
        name,
        timing.median,
        case.flops(direction) / timing.median / 1e9,
        timing.repeats,
        low_ms=timing.low,
        high_ms=timing.high,
        ours_ms=mine.median if mine else None,
    )


def failed(rows: Iterable[Row]) -> list[str]:
    """The failures of our kernels, one line each."""
    return [
        f"{row.case} {row.direction} {row.dtype}: {row.note}"
        for row in rows
        if row.name == OURS and not row.ms
    ]


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest row that is not ours: the one that ours leads by least, where they were timed with ours."""
    timed = [row for row in rows if row.ms is not None and row.name != OURS]
    together = all(row.ratio for row in timed)
    return min(timed, key=lambda row: (row.ratio if together else row.ms) or 0.0, default=None)


def lead(best: Row | None, ours_ms: float | None) -> float | None:
    """How many times as fast ours is as the best peer; of timings apart if they were not timed together."""
    if best is None or best.ms is None:
        return None
    return best.ratio or (best.ms / ours_ms if ours_ms else None)


def machine(device: torch.device) -> dict[str, str]:
    """The provenance of a table: device, versions."""
    facts = {"device": device_name(device), "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cpu":
        return {**facts, "threads": str(torch.get_num_threads())}
    return {**facts, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


def to_json(rows: Iterable[Row], device: torch.device) -> dict[str, Any]:
    """Plain JSON value of a run."""
    return {"machine": machine(device), "rows": [asdict(row) for row in rows]}
