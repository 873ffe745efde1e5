"""Tuned tables: the fastest variant of each problem class on each device, as JSON under version control.

A folder of tables holds `<device>.json`: a list of entries `{"class": {...}, "spec": {...}, "ms": ..., ...}`. Folders
are read in order (`folders`): the user's own first, which searches write, then the package's, `generated/tuned`, which
is never written unless a maintainer names it. Tables in `modelled/<arch>.json` were computed
(bagel/measure/modelled.py), not measured: they count after all others.

This module takes names of devices and folders, and gives entries (`Tuned`): all of a device (`known`, `load`), or, for
a choice (runtime/choosing.py), the files that count (`files_for`) and a file's entries for a problem (`entries_for`).
`save` merges entries into a file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from filelock import FileLock

from attnforge.codegen import cpu_features
from attnforge.codegen.families import RetiredKnob, make_tuning
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, Problem, Spec
from attnforge.runtime.build.atomic import replace_file
from attnforge.runtime.build.settings import TABLES, table_folders
from attnforge.runtime.rounds import MANY

log = logging.getLogger("attnforge")

PACKAGED = Path(__file__).parent.parent / "generated" / "tuned"  # what the package brings
MODELLED = "modelled"  # folder of the tables that were computed
_UNFINISHED = ".json.tmp"  # ends the name of a table that is being written


# ---- Folders and names


def device_name(device: torch.device) -> str:
    """The name of a device's table: the GPU's name, or the CPU's instructions (`cpu avx512 bf16`, `... bf16 amx`)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    words = ["cpu", torch.backends.cpu.get_cpu_capability().lower()]
    words += ["bf16"] if cpu_features.has_bf16() else []
    words += [] if cpu_features.amx_refusal() else ["amx"]
    return " ".join(words)


class TablesError(OSError):
    """A folder of tables cannot be written; the message names it and what to do."""


def folders() -> tuple[Path, ...]:
    """Where tables are read, first wins: those of ATTNFORGE_TABLES or the user's data folder, then the package's."""
    return tuple(dict.fromkeys((*table_folders(), PACKAGED)))


def writable(directory: Path) -> Path:
    """`directory`, created if it was not there. Raises TablesError if no table can be written into it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise TablesError(
            f"{directory}: tuned tables cannot be written here ({error.strerror or error}); "
            f"name another folder with {TABLES} or --table-out"
        ) from error


def table_path(name: str, directory: Path) -> Path:
    """File of the device called `name` in a folder of tables."""
    return directory / _file_name(name)


@lru_cache(maxsize=256)
def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def longer_names(name: str) -> list[str]:
    """Devices with a table whose names have all words of `name` and more: it may stand for one of them.

    An empty list if `name` has a table itself.
    """
    words = set(table_path(name, PACKAGED).stem.split("-"))
    others = {path.stem for place in folders() for path in place.glob("*.json")}
    return [] if known(name) else sorted(other for other in others if words < set(other.split("-")))


# ---- Entries

# Of a problem, what its class has: not what every value takes the same tuning for, if it is feasible there.
class_fields = attrgetter(*(f.attribute for f in PROBLEM_FIELDS if f.match != "free"))


@dataclass(frozen=True)
class Tuned:
    """One measured winner.

    Its class: the spec's problem, the GQA ratio `group`, the length `size`, `visible_keys`, `deterministic`, `rounds`.
    """

    spec: Spec
    group: int  # heads_q / heads_kv
    size: int  # seq_q it was timed at
    ms: float
    tflops: float
    notes: dict[str, Any] = field(default_factory=dict)  # for readers: workload, registers, versions, date
    visible_keys: int = 0  # average number of keys that a query sees; 0: unknown, or determined by the length
    deterministic: bool = False  # found among kernels that sum in a fixed order, for deterministic calls
    rounds: int = MANY  # of the call that was timed: `rounds_of` it

    @property
    def cls(self) -> dict[str, Any]:
        """The problem class: a later winner of it replaces this one. Octaves are log2, of the size and visible keys."""
        return {
            # Without what every value takes the same tuning for, if it is feasible there.
            **{f.name: value for f, value in self.spec.problem.named_fields() if f.match != "free"},
            "group": self.group,
            "octave": self.size.bit_length() - 1,
            **({"visible_octave": self.visible_keys.bit_length() - 1} if self.visible_keys else {}),
            **({"deterministic": 1} if self.deterministic else {}),
            **({"rounds": self.rounds} if self.rounds < MANY else {}),
        }

    @property
    def fixed_order(self) -> bool:
        """Is its kernel deterministic by a knob? A search among all kernels may find such a one, too."""
        return self.deterministic or bool(getattr(self.spec.tuning, "deterministic", False))

    @cached_property
    def key(self) -> str:
        """`cls` as text."""
        return json.dumps(self.cls)

    @property
    def values_of_class(self) -> tuple[Any, ...]:
        """Equal where `cls` is, but quickly made: to load a table compares the classes of its entries."""
        octaves = self.size.bit_length(), self.visible_keys.bit_length()
        rounds = min(self.rounds, MANY)
        return (*class_fields(self.spec.problem), self.group, *octaves, self.deterministic, rounds)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        seen = {"visible_keys": self.visible_keys} if self.visible_keys else {}
        measured = {"size": self.size, **seen, "ms": self.ms, "tflops": self.tflops}
        return {"class": self.cls, "spec": self.spec.to_json(), **measured, "notes": self.notes}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Tuned:
        """Rebuild an entry; ValueError names what is missing or wrong. Older ones lack what has a default here."""
        try:
            problem, group = _problem_of(data["spec"]), int(data["class"]["group"])
            spec = Spec(problem, make_tuning(problem, data["spec"].get("tuning", {})))
            numbers = int(data["size"]), float(data["ms"]), float(data["tflops"])
            visible_keys = int(data.get("visible_keys", 0))
            deterministic = bool(data["class"].get("deterministic", False))
            rounds = int(data["class"].get("rounds", MANY))
        except KeyError as error:
            raise ValueError(f"tuned entry: field {error} is missing") from error
        return Tuned(spec, group, *numbers, dict(data.get("notes", {})), visible_keys, deterministic, rounds)


def _problem_of(spec: Mapping[str, Any]) -> Problem:
    """The problem of a spec as JSON. Those of a table are equal to a few dozens, each of which is made once."""
    return _problem(tuple(one for one in spec.items() if one[0] != "tuning"))


@lru_cache(maxsize=1024)
def _problem(values: tuple[tuple[str, Any], ...]) -> Problem:
    return Problem.from_json(dict(values))


# ---- Reading a device's tables


def known(name: str, places: Iterable[Path] | None = None) -> tuple[Tuned, ...]:
    """Entries for a device from all folders; where two hold the same class, the first folder's."""
    entries: dict[str, Tuned] = {}
    for place in folders() if places is None else places:
        for entry in load(name, place):
            entries.setdefault(entry.key, entry)
    return tuple(entries.values())


def load(name: str, directory: Path) -> tuple[Tuned, ...]:
    """Entries of one folder's table of a device; empty if there is none. ValueError names a file that is no table."""
    path = table_path(name, directory)
    version = file_version(path)
    return _read(path, *version) if version else ()


def file_version(path: Path | os.DirEntry[str]) -> tuple[int, int] | None:
    """(time of the last change in ns, inode) of a file; None if there is none.

    The time alone is too coarse: it does not change if a file is replaced twice within one tick of the clock.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


@lru_cache(maxsize=32)
def _read(path: Path, modified: int, inode: int) -> tuple[Tuned, ...]:
    return _parse(path)


def _parse(path: Path) -> tuple[Tuned, ...]:
    """The entries of a file without those of kernels that are gone, which a search of their class replaces."""
    with _table(path):
        return tuple(_entries(path, json.loads(path.read_text())))


def _entries(path: Path, items: Iterable[dict[str, Any]]) -> Iterator[Tuned]:
    for item in items:
        try:
            yield Tuned.from_json(item)
        except RetiredKnob as reason:
            log.warning("%s: an entry is skipped: %s", path, reason)


@contextmanager
def _table(path: Path) -> Iterator[None]:
    """Errors of what is read inside name the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"{path} is not a tuned table: {error} is missing; delete it or restore it"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tuned table: {error}; delete it or restore it") from error


# ---- Writing


def save(
    name: str, entries: Iterable[Tuned], directory: Path, *, beside: Collection[Spec] | None = None
) -> Path:
    """Merge `entries` into a device's table in `directory`, each replacing the one of its class. Returns the file.

    beside: specs that were timed in the same run. If given, an entry does not replace a faster one of its class that
        is not among them: numbers of different runs differ by more than variants do.
    An older entry without visible keys or rounds is replaced by a new one of the same case that has them.
    Processes that save at the same time do so one after the other; one that is killed leaves the table as it was.
    Raises TablesError if the folder cannot be written.
    """
    path = table_path(name, writable(directory))
    new = list(entries)
    cases = {
        (key, entry.notes["case"]) for entry in new if "case" in entry.notes for key in _older_keys(entry)
    }
    with FileLock(directory / ".lock", mode=0o644):
        for left in directory.glob(f"*{_UNFINISHED}"):  # of a process that was killed: it held the lock
            left.unlink(missing_ok=True)
        present = _parse(path) if path.exists() else ()
        if beside is not None:
            new = [entry for entry in new if not _keeps(present, entry, beside)]
        old = [e for e in present if (e.key, e.notes.get("case")) not in cases]
        merged = {entry.key: entry for entry in (*old, *new)}
        text = json.dumps([merged[key].to_json() for key in sorted(merged)], indent=1) + "\n"
        replace_file(path, text, _UNFINISHED)
    return path


def _keeps(present: Iterable[Tuned], entry: Tuned, beside: Collection[Spec]) -> bool:
    """Does a faster entry of the class stay? See `beside` of `save`."""
    return any(
        old.key == entry.key and old.tflops > entry.tflops and old.spec not in beside for old in present
    )


def _older_keys(entry: Tuned) -> set[str]:
    """Keys that an entry of the same case had before entries knew their visible keys, or rounds."""
    kinds = product({0, entry.visible_keys}, {MANY, entry.rounds})
    return {replace(entry, visible_keys=seen, rounds=rounds).key for seen, rounds in kinds} - {entry.key}


# ---- What a choice reads: the files that count for a device, and their entries for a problem

MatchKey = tuple[Any, ...]  # see `match_key`
SAME = tuple(f.attribute for f in PROBLEM_FIELDS if f.match == "same")
_same = attrgetter(*SAME)
T = TypeVar("T")

_held: ContextVar[dict[Any, Any] | None] = ContextVar("_held", default=None)  # while `unchanged` is entered


class File(NamedTuple):
    """A file of entries that count for a device, and its version (`file_version`)."""

    rank: int  # 0: the device's own table; 1: one of another device; 2: computed
    path: str
    modified: int
    inode: int


@contextmanager
def unchanged() -> Iterator[None]:
    """Inside, tables are looked for once and not at each choice: for thousands of choices."""
    if _held.get() is not None:
        yield
        return
    token = _held.set({})
    try:
        yield
    finally:
        _held.reset(token)


def _kept(key: Any, look: Callable[[], T]) -> T:
    """What `look` finds; inside `unchanged` it looks once."""
    held = _held.get()
    if held is None:
        return look()
    if key not in held:
        held[key] = look()
    found: T = held[key]
    return found


def files_for(name: str, arch: Arch, places: Iterable[Path] | None = None) -> tuple[File, ...]:
    """The files whose entries count for the device called `name`, folder by folder; `places`: `folders()` if None."""
    if places is not None:
        return _files(name, arch, places)
    return _kept((name, arch), lambda: _files(name, arch, _kept("folders", folders)))


def _files(name: str, arch: Arch, places: Iterable[Path]) -> tuple[File, ...]:
    return tuple(chain.from_iterable(_files_in(place, name, arch) for place in places))


def _files_in(directory: Path, name: str, arch: Arch) -> Iterator[File]:
    """The tables of a folder that count; for a CPU only its own: others are for other instruction sets."""
    own = _file_name(name)
    if arch is Arch.CPU:
        found: list[tuple[int, Path | os.DirEntry[str]]] = [(0, directory / own)]
    else:
        inside = _kept(directory, partial(_inside, directory))
        tables = [one for one in inside if one.name.endswith(".json") and not one.name.startswith("cpu-")]
        found = [(int(one.name != own), one) for one in tables]
        if any(one.name == MODELLED for one in inside):
            found.append((2, directory / MODELLED / f"{arch.value}.json"))
    for rank, path in found:
        if version := file_version(path):
            yield File(rank, os.fspath(path), *version)


def _inside(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as places:
            return sorted(places, key=attrgetter("name"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def match_key(problem: Problem) -> MatchKey:
    """What an entry's problem must share with the call's for the entry to count: element size and fields SAME."""
    return (problem.dtype.bytes, *_same(problem))


def match_keys(file: File) -> Iterable[MatchKey]:
    """Those of a file's entries, each once."""
    _, *version = file
    return _divided(*version)


def entries_for(file: File, key: MatchKey) -> tuple[Tuned, ...]:
    """A file's entries with this `match_key`."""
    _, *version = file
    return _of_file(*version, key)


@lru_cache(maxsize=1024)
def _of_file(path: str, modified: int, inode: int, key: MatchKey) -> tuple[Tuned, ...]:
    """See `entries_for`. Only these are made into entries, which takes longer than to read the file."""
    with _table(Path(path)):
        return tuple(_entries(Path(path), _divided(path, modified, inode).get(key, ())))


@lru_cache(maxsize=32)
def _divided(path: str, modified: int, inode: int) -> dict[MatchKey, list[dict[str, Any]]]:
    """What a file holds, by `match_key`: of a thousand entries a hundred count for a call."""
    found: dict[MatchKey, list[dict[str, Any]]] = {}
    with _table(Path(path)):
        for item in json.loads(Path(path).read_text()):
            found.setdefault(match_key(_problem_of(item["spec"])), []).append(item)
    return found
