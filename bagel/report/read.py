"""Search logs as values: a `Subject` for each problem, a `Run` for each log and environment that searched it.

Logs are JSONL files of runtime/search/journal.py. A log of an older version may lack notes, and may hold lines that no
longer mean anything, such as specs with knobs that are gone: these are counted, not shown.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from attnforge.codegen.families import spec_from_json
from attnforge.codegen.spec import Spec

PAUSE = 600.0  # seconds without a line after which a search that does not note its start was interrupted


@dataclass(frozen=True)
class Peer:
    """Another attention on the same case; without a time `note` holds the reason."""

    name: str
    ms: float | None
    tflops: float | None
    note: str
    ours_ms: float | None = None  # the winner's median beside it, in turns

    def ratio(self, best: Variant) -> float:
        """How many times as fast the winner is; by the peer's own timing if the log has it."""
        return self.ms / (self.ours_ms or best.ms) if self.ms else math.nan


@dataclass(frozen=True)
class Variant:
    """One line with a result. `interval` are milliseconds around the median `ms`, if there are such."""

    spec: Spec
    status: str
    detail: str
    ms: float
    tflops: float
    interval: tuple[float, float] | None
    registers: int  # a thread; 0 on the CPU
    spill_bytes: int
    shared_bytes: int
    rms: float  # largest error of a tensor against float64
    limit_used: float
    source: str  # identity of the text that was compiled
    seconds: float  # of search until the line was written, pauses between runs left out

    def scaled(self, factor: float) -> Variant:
        """The result with `factor` times its milliseconds; a failure as it is."""
        if self.status != "ok" or factor == 1.0:
            return self
        interval = self.interval and (self.interval[0] * factor, self.interval[1] * factor)
        return replace(self, ms=self.ms * factor, tflops=self.tflops / factor, interval=interval)

    @property
    def speeds(self) -> tuple[float, float]:
        """TFLOP/s at the ends of the interval, lowest first; twice the median's without one."""
        if self.interval is None:
            return self.tflops, self.tflops
        low, high = self.interval
        return self.tflops * self.ms / high, self.tflops * self.ms / low


@dataclass
class Run:
    """What one log says of one problem in one environment, in the order of lines."""

    log: Path
    environment: dict[str, str]
    label: str = ""  # unique among the runs of a page
    variants: list[Variant] = field(default_factory=list)
    final: list[Variant] = field(default_factory=list)  # the leaders, timed again at the end of a search
    warnings: list[str] = field(default_factory=list)  # what spoiled the timing
    peers: list[Peer] = field(default_factory=list)
    space: int = 0  # variants that the problem has; 0: the log does not say
    incumbent: Spec | None = None  # dispatch's choice before the first search
    first: str = ""  # time stamps of the first and the last line
    last: str = ""
    seconds: float = 0.0

    @property
    def device(self) -> str:
        """The device's name as tuned tables have it."""
        return self.environment.get("device", "")

    @property
    def latest(self) -> dict[Spec, Variant]:
        """The last result of each variant: of the leaders that of the end.

        The times of the others are multiplied by the median factor by which those of the leaders changed, as in
        `runtime.search.search.Finished`.
        """
        trials, again = {v.spec: v for v in self.variants}, {v.spec: v for v in self.final}
        changes = [v.ms / trials[v.spec].ms for v in again.values() if v.spec in trials and trials[v.spec].ms]
        change = median(changes) if changes else 1.0
        return {spec: again.get(spec) or v.scaled(change) for spec, v in (trials | again).items()}

    @property
    def ranked(self) -> list[Variant]:
        """Variants that work, by their last results, fastest first; what was timed again comes before the rest."""
        again = {variant.spec for variant in self.final}
        working = (v for v in self.latest.values() if v.status == "ok")
        return sorted(working, key=lambda v: (v.spec not in again, v.ms))

    @property
    def failed(self) -> list[Variant]:
        """Variants whose last result is a failure."""
        return [v for v in self.latest.values() if v.status != "ok"]

    @property
    def best_peer(self) -> Peer | None:
        """The fastest peer: the one that the winner leads by least, where all were timed beside it."""
        timed = [peer for peer in self.peers if peer.ms]
        together = all(peer.ours_ms for peer in timed)
        return min(timed, key=lambda p: (p.ms or 0.0) / (p.ours_ms or 1.0 if together else 1.0), default=None)


@dataclass(frozen=True)
class Subject:
    """One problem: a case, a pass and a dtype, with the runs that searched it."""

    case: str
    direction: str
    dtype: str
    runs: tuple[Run, ...]

    @property
    def best(self) -> tuple[Run, Variant] | None:
        """The fastest variant of all runs, and its run."""
        found = [(run, run.ranked[0]) for run in self.runs if run.ranked]
        return min(found, key=lambda one: one[1].ms, default=None)


@dataclass(frozen=True)
class Logs:
    """The content of log files; `skipped` counts lines that could not be read, by file."""

    subjects: tuple[Subject, ...]
    skipped: dict[Path, int]


def read(paths: Sequence[Path]) -> Logs:
    """Read log files. Raises OSError for a file that cannot be read, ValueError if none of them holds a result."""
    runs: dict[tuple[str, str, str], dict[tuple[Path, str], Run]] = {}
    skipped: dict[Path, int] = {}
    for path in paths:
        for row in _rows(path, skipped):
            try:
                dtype = _dtype(row)
                environment = {str(key): str(value) for key, value in row["environment"].items()}
                of_subject = runs.setdefault((row["case"], row["direction"], dtype), {})
                run = of_subject.setdefault((path, json.dumps(environment)), Run(path, environment))
                _add(run, row)
            except (ValueError, TypeError, KeyError, AttributeError):
                skipped[path] += 1
    subjects = tuple(
        Subject(*key, tuple(_labelled(run for run in found.values() if run.variants)))
        for key, found in runs.items()
        if any(run.variants for run in found.values())
    )
    if not subjects:
        raise ValueError(f"no line of {', '.join(map(str, paths))} is a result of `attnforge search`")
    return Logs(subjects, skipped)


def _rows(path: Path, skipped: dict[Path, int]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, which may be gzipped."""
    skipped[path] = 0
    content = path.read_bytes()
    for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a process that was killed while writing leaves one
            skipped[path] += 1
            continue
        if isinstance(row, dict):
            yield row
        else:
            skipped[path] += 1


def _dtype(row: dict[str, Any]) -> str:
    if "search" in row:
        return str(row["search"]["incumbent"]["dtype"])
    if "peers" in row:
        return str(row["peers"][0]["dtype"]) if row["peers"] else ""
    if "final" in row:
        return str(row["final"]["results"][0]["spec"]["dtype"]) if row["final"]["results"] else ""
    return str(row["result"]["spec"]["dtype"])


def _add(run: Run, row: dict[str, Any]) -> None:
    """Add one line to its run."""
    stamp = str(row["time"])
    now = datetime.fromisoformat(stamp).timestamp()
    before = datetime.fromisoformat(run.last).timestamp() if run.last else now
    passed = 0.0 if "search" in row or now - before > PAUSE else max(0.0, now - before)
    if "search" in row:
        incumbent = spec_from_json(row["search"]["incumbent"])
        run.space, run.incumbent = int(row["search"]["space"]), run.incumbent or incumbent
    elif "peers" in row:
        run.peers = [Peer(p["name"], p["ms"], p["tflops"], p["note"], p.get("ours_ms")) for p in row["peers"]]
    elif "final" in row:
        sources = {v.spec: v.source for v in run.variants}
        found = [_variant(data, "", run.seconds) for data in row["final"]["results"]]
        run.final += [replace(v, source=sources.get(v.spec, "")) for v in found]
        run.warnings += row["final"].get("warnings", [])
    else:
        run.seconds += passed
        run.variants.append(_variant(row["result"], str(row["source"]), run.seconds))
    run.first, run.last = run.first or stamp, stamp


def _variant(data: dict[str, Any], source: str, seconds: float) -> Variant:
    low, high = float(data.get("low_ms", 0.0)), float(data.get("high_ms", 0.0))
    return Variant(
        spec_from_json(data["spec"]),
        str(data["status"]),
        str(data["detail"]),
        float(data["ms"]),
        float(data["tflops"]),
        (low, high) if low and high and int(data["repeats"]) > 1 else None,  # one sample gives none
        int(data["registers"]),
        int(data["spill_bytes"]),
        int(data["shared_bytes"]),
        max((float(rms) for name, (rms, _) in data["errors"].items() if name != "lse"), default=0.0),
        float(data["limit_used"]),
        source,
        seconds,
    )


def _labelled(runs: Iterable[Run]) -> Iterator[Run]:
    """The runs, each with a short label of its own: the log's name, and the environment where a log has several."""
    waiting = list(runs)
    for number, run in enumerate(waiting):
        others = [other for other in waiting if other is not run]
        same_name = [other for other in others if other.log.stem == run.log.stem]
        run.label = run.log.stem
        if same_name:
            differs = [
                value
                for key, value in run.environment.items()
                if any(other.environment.get(key) != value for other in same_name)
            ]
            run.label = ", ".join((run.label, *differs)) if differs else f"{run.label} ({number + 1})"
    yield from waiting
