"""Tuned tables: the fastest variant of each problem class on each device, as JSON under version control.

`generated/tuned/<device>.json` is a list of entries `{"class": {...}, "spec": {...}, "ms": ..., ...}`. The tables
`generated/tuned/modelled/<arch>.json` were computed by a cost model (bagel/measure/modelled.py); dispatch uses them
after all measured ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attnforge.codegen.plan import Infeasible, make_plan
from attnforge.codegen.spec import Arch, Mask, Problem, Spec

DIRECTORY = Path(__file__).parent.parent / "generated" / "tuned"
MODELLED = "modelled"  # folder of the computed tables
_UNFINISHED = ".json.tmp"  # suffix of a table while it is written
UNKNOWN = 1  # distance in octaves to an entry without visible keys


@dataclass(frozen=True)
class Tuned:
    """One measured winner. Its class: the spec's problem, the GQA ratio `group`, the length `size`, `visible_keys`."""

    spec: Spec
    group: int  # heads_q / heads_kv
    size: int  # seq_q it was timed at
    ms: float
    tflops: float
    notes: dict[str, Any] = field(default_factory=dict)  # for readers: workload, registers, versions
    visible_keys: int = 0  # average number of keys that a query sees; 0: unknown, or determined by the length

    @property
    def cls(self) -> dict[str, Any]:
        """The problem class: a later winner of it replaces this one. Octaves are log2, of the size and visible keys."""
        problem = self.spec.problem.to_json()
        # A call with another alignment uses the same tuning, if that is feasible.
        del problem["align"]
        return {
            **problem,
            "group": self.group,
            "octave": self.size.bit_length() - 1,
            **({"visible_octave": self.visible_keys.bit_length() - 1} if self.visible_keys else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        seen = {"visible_keys": self.visible_keys} if self.visible_keys else {}
        measured = {"size": self.size, **seen, "ms": self.ms, "tflops": self.tflops}
        return {"class": self.cls, "spec": self.spec.to_json(), **measured, "notes": self.notes}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Tuned:
        """Rebuild an entry; ValueError names what is missing or wrong. Older entries lack visible_keys."""
        try:
            spec, group = Spec.from_json(data["spec"]), int(data["class"]["group"])
            numbers = int(data["size"]), float(data["ms"]), float(data["tflops"])
            visible_keys = int(data.get("visible_keys", 0))
        except KeyError as error:
            raise ValueError(f"tuned entry: field {error} is missing") from error
        return Tuned(spec, group, *numbers, dict(data.get("notes", {})), visible_keys)


def device_name(device: torch.device) -> str:
    """The name of a device's table: the GPU's name, or the CPU's instruction set (`cpu avx512 bf16`)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    words = ["cpu", torch.backends.cpu.get_cpu_capability().lower()]
    flags = Path("/proc/cpuinfo")
    if flags.exists() and re.search(r"^flags\s*:.*\bavx512_bf16\b", flags.read_text(), re.MULTILINE):
        words.append("bf16")
    return " ".join(words)


def table_path(name: str, directory: Path = DIRECTORY) -> Path:
    """The file of the table of device `name`."""
    return directory / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def load(name: str, directory: Path = DIRECTORY) -> tuple[Tuned, ...]:
    """Entries of a device's table; empty if there is none. ValueError names a file that is not a table."""
    path = table_path(name, directory)
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    # The time alone is too coarse: it does not change if a file is replaced twice within one tick of the clock.
    return _read(path, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=32)
def _read(path: Path, modified: int, inode: int) -> tuple[Tuned, ...]:
    return _parse(path)


def _parse(path: Path) -> tuple[Tuned, ...]:
    try:
        return tuple(Tuned.from_json(item) for item in json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tuned table: {error}; delete it or restore it with git") from error


def save(name: str, entries: Iterable[Tuned], directory: Path = DIRECTORY) -> Path:
    """Merge `entries` into a device's table, each replacing the one of its class. Returns the file.

    A new entry with visible keys also replaces an older one of the same case without them. Processes that save at the
    same time take turns on a lock; a process that is killed leaves the table as it was.
    """
    path = table_path(name, directory)
    new = list(entries)
    cases = {(_without_visible(entry), entry.notes.get("case")) for entry in new if entry.visible_keys}
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        known = _parse(path) if path.exists() else ()
        old = [e for e in known if (_key(e), e.notes.get("case")) not in cases]
        merged = {_key(entry): entry for entry in (*old, *new)}
        _replace(path, json.dumps([merged[key].to_json() for key in sorted(merged)], indent=1) + "\n")
    return path


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory, if the file system has locks, from reading a table to writing it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            for left in directory.glob(f"*{_UNFINISHED}"):  # left by a killed process, which held the lock
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically and durably; readable by all, as files under version control are."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=_UNFINISHED, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _key(entry: Tuned) -> str:
    return json.dumps(entry.cls)


def _without_visible(entry: Tuned) -> str:
    return _key(dataclasses.replace(entry, visible_keys=0))


def choose(
    problem: Problem, group: int, size: int, name: str, directory: Path = DIRECTORY, *, visible: int = 0
) -> Iterator[tuple[Spec, str]]:
    """Feasible specs for `problem` from tuned entries, nearest first, each with the reason.

    An entry qualifies if direction, head_dim and element size agree; its tuning is planned again for the call's dtype,
    mask and alignment. The order is: this device, then other devices of the architecture, then modelled entries; within
    each: same mask, same dtype, nearest length (in octaves), nearest number of visible keys (in octaves), nearest GQA
    ratio, highest speed. `visible` is the average number of visible keys, 0 if unknown: then it is ignored. Length
    precedes it because it determines the number of blocks to distribute over the SMs.
    """
    ranked = []
    for path in _tables(name, problem.arch, directory):
        rank = 2 if path.parent.name == MODELLED else int(path != table_path(name, directory))
        for entry in load(path.stem, path.parent):
            if _counts(entry.spec.problem, problem):
                ranked.append((_distance(entry, problem, group, size, visible), rank, entry, path))
    ranked.sort(key=lambda item: (item[1], item[0], item[2].spec.slug))
    for _, rank, entry, path in ranked:
        spec = Spec(problem, entry.spec.tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        verb = "modelled, not measured," if rank == 2 else "tuned"
        yield (
            spec,
            f"{verb} as {entry.spec.slug} for {entry.size} rows{_seen(entry)}, GQA ratio {entry.group} ({path.name})",
        )


def measured(
    problem: Problem, group: int, size: int, name: str, directory: Path = DIRECTORY, *, visible: int = 0
) -> float | None:
    """TFLOP/s of the fastest entry of the device's own table for a call's exact class; None without one."""
    entries = [e for e in load(name, directory) if _counts(e.spec.problem, problem)]
    speeds = [e.tflops for e in entries if not any(_distance(e, problem, group, size, visible)[:-1])]
    return max(speeds, default=None)


def _tables(name: str, arch: Arch, directory: Path) -> list[Path]:
    """Table files to read. For a CPU only its own: other tables are for other instruction sets."""
    own = table_path(name, directory)
    if arch is Arch.CPU:
        return [own] if own.exists() else []
    found = sorted(path for path in directory.glob("*.json") if not path.name.startswith("cpu-"))
    modelled = directory / MODELLED / f"{arch.value}.json"
    return [*found, modelled] if modelled.exists() else found


def _counts(tuned: Problem, problem: Problem) -> bool:
    same = (tuned.direction, tuned.arch, tuned.head_dim, tuned.dim_v, tuned.dtype.bytes)
    return same == (problem.direction, problem.arch, problem.head_dim, problem.dim_v, problem.dtype.bytes)


def _distance(entry: Tuned, problem: Problem, group: int, size: int, visible: int) -> tuple[float, ...]:
    tuned = entry.spec.problem
    return (
        tuned.mask is not problem.mask,
        tuned.dtype is not problem.dtype,
        abs(entry.size.bit_length() - size.bit_length()),
        _octaves(_visible(problem.mask, size, visible), _visible(tuned.mask, entry.size, entry.visible_keys)),
        abs(math.log2(entry.group / group)),
        -entry.tflops,
    )


def _visible(mask: Mask, size: int, said: int) -> int:
    """Average number of keys that a query sees, 0 if unknown."""
    if mask.listed:
        return said
    return size if mask is Mask.FULL else -(-size // 2)


def _octaves(call: int, entry: int) -> int:
    if not call:
        return 0
    return abs(call.bit_length() - entry.bit_length()) if entry else UNKNOWN


def _seen(entry: Tuned) -> str:
    return f", {entry.visible_keys} visible keys" if entry.visible_keys else ""
