"""Tuned tables: the fastest variant of each problem class on each device, as JSON under version control.

A folder of tables holds `<device>.json`: a list of entries `{"class": {...}, "spec": {...}, "ms": ..., ...}`. Folders
are read in order (`folders`): the user's own first, which searches write, then the package's, `generated/tuned`, which
is never written unless a maintainer names it. Tables in `modelled/<arch>.json` were computed
(bagel/measure/modelled.py), not measured: they count after all others.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, combinations, groupby, product
from operator import attrgetter, ne
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from filelock import FileLock

from attnforge.codegen import cpu_features
from attnforge.codegen.cost_model import bytes_per_flop
from attnforge.codegen.families import RetiredKnob, make_plan, make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, Direction, Mask, Problem, Spec, Tuning
from attnforge.runtime.build.atomic import replace_file
from attnforge.runtime.build.settings import TABLES, table_folders

log = logging.getLogger("attnforge")

PACKAGED = Path(__file__).parent.parent / "generated" / "tuned"  # what the package brings
MODELLED = "modelled"  # folder of the tables that were computed
_UNFINISHED = ".json.tmp"  # ends the name of a table that is being written
_of_class = attrgetter(*(f.attribute for f in PROBLEM_FIELDS if f.match != "free"))
_SAME = tuple(f.attribute for f in PROBLEM_FIELDS if f.match == "same")
_same = attrgetter(*_SAME)
_NEAR = tuple(f.attribute for f in reversed(PROBLEM_FIELDS) if f.match == "near" and f.attribute != "score")
_near = attrgetter(*_NEAR)
# Parts of the distance of an entry from a call; lengths, keys and ratios in octaves, "device" 0, or 1 and more for
# another one. "head_dim" is `head_dim_distance`; only where a head_dim has no entries do others count.
# "shape" is the sum of the lengths' and the visible keys' distances, and of CONVERTED if the call is deterministic and
# the entry's kernel is not, or was found for another GQA ratio.
DISTANCES = (
    "head_dim",
    *_NEAR,
    "score",
    "long lists",
    "shape",
    "length",
    "GQA ratio",
    "rounds",
    "device",
    "speed",
)
_NUMBER = re.compile(r"\b\d+(\.\d*)?(e[+-]?\d+)?")  # in a score's text
UNKNOWN = 1  # distance in octaves between a call's visible keys and an entry without that number
# Octaves that count for an entry whose kernel is not deterministic where a call is: its deterministic variant may lose
# 40 %, more than an entry of a length nearby. 6 is a factor of 8 in the length of a full or causal call, whose visible
# keys change with it.
CONVERTED = 6
FEW_TILES = "changed for fewer rounds of work tiles, not measured"  # ends the reason of a choice
MANY = 8  # rounds of a call (`rounds_of`), beyond which their number no longer matters
ROWS = 128  # of a tile, to count rounds
DEPTH = 16  # columns of a step of a product; rows are padded to a multiple of it
WIDER = 2  # times as wide may the rows of an entry be that stands in for a head_dim without entries
# Knobs of a backward without which it computes more problems (`planned`), and what they stand for.
DISPENSABLE = {
    "persistent": "persistent blocks",
    "launch_order": "its order of blocks",
    "staging": "its places of dQ",
}


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
    deterministic: bool = False  # found among kernels that sum in a fixed order, for calls that ask for it
    rounds: int = MANY  # `rounds_of` the call that was timed

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
        return (*_of_class(self.spec.problem), self.group, *octaves, self.deterministic, rounds)

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

    None if `name` has a table itself.
    """
    words = set(table_path(name, PACKAGED).stem.split("-"))
    others = {path.stem for place in folders() for path in place.glob("*.json")}
    return [] if known(name) else sorted(other for other in others if words < set(other.split("-")))


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
    """The entries of a file but for those of kernels that are gone, which a search of their class replaces."""
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


@lru_cache(maxsize=32)
def _divided(path: str, modified: int, inode: int) -> dict[_Class, list[dict[str, Any]]]:
    """What a file holds, as `_class_of` divides it: of a thousand entries a hundred count for a call."""
    found: dict[_Class, list[dict[str, Any]]] = {}
    with _table(Path(path)):
        for item in json.loads(Path(path).read_text()):
            found.setdefault(_class_of(_problem_of(item["spec"])), []).append(item)
    return found


@lru_cache(maxsize=1024)
def _of_file(path: str, modified: int, inode: int, cls: _Class) -> tuple[Tuned, ...]:
    """A file's entries of a class. Others are not made into entries, which takes longer than to read the file."""
    with _table(Path(path)):
        return tuple(_entries(Path(path), _divided(path, modified, inode).get(cls, ())))


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
    """Whether a faster entry of the class stays."""
    return any(
        old.key == entry.key and old.tflops > entry.tflops and old.spec not in beside for old in present
    )


def _older_keys(entry: Tuned) -> set[str]:
    """Keys that an entry of the same case had before entries knew their visible keys, or rounds."""
    kinds = product({0, entry.visible_keys}, {MANY, entry.rounds})
    return {replace(entry, visible_keys=seen, rounds=rounds).key for seen, rounds in kinds} - {entry.key}


def choose(
    problem: Problem,
    group: int,
    size: int,
    name: str,
    places: Iterable[Path] | None = None,
    *,
    visible_keys: int = 0,
    deterministic: bool = False,
    rounds: int = MANY,
) -> Iterator[tuple[Spec, str]]:
    """Feasible specs for `problem` from tuned entries, nearest first, each with the reason.

    places: folders of tables, `folders()` if not given.

    An entry counts if its problem has the call's element size and agrees with it in all fields but mask, dtype, score
    and alignment. If there is none, those of other head dims stand in (`_stand_ins`), the nearest head_dim first. The
    entry's tuning is then planned for the call (`replanned`). Entries are sorted by these criteria:

    1. measured before modelled; 2. the same mask; 3. the same dtype;
    4. the nearest score: the same, the same formula with other numbers, none, another one;
    5. for a mask whose `visible_keys` is not positive, backwards that can divide long lists;
    6. the nearest length and number of visible keys, in octaves of both together, then the nearest length. The length
       determines how many blocks there are, the visible keys how long each works;
    7. the nearest GQA ratio;
    8. the nearest `rounds`;
    9. this device, then the one of its architecture whose ratio of memory bandwidth to arithmetic is nearest by the
       data sheets (`cost_model.DATA_SHEETS`). Kernels for two shapes differ more than those for two devices;
    10. the highest speed.

    `visible_keys` is that of the call's mask: 0 if it is unknown, and then it does not matter; negative if a few keys
    are seen by far more queries than the others.

    `deterministic`: the call wants gradients that sum in a fixed order. Entries of searches for such calls count only
    then. Of the others, those whose spec would have to be converted (`dispatch.choose_for`), and all with another GQA
    ratio, are CONVERTED octaves farther away in criterion 6.

    `rounds`: `rounds_of` the call. A backward's tuning changes where the entry was measured with more (`spread_out`).
    """
    of = partial(choices, visible_keys=visible_keys, deterministic=deterministic, rounds=rounds)
    yield from ((choice.spec, choice.reason) for choice in of(problem, group, size, name, places))


@dataclass(frozen=True)
class Choice:
    """A chosen spec, and the reason for it."""

    spec: Spec
    reason: str
    offer: Offer | None = None  # the entry that it is from; None: it is from no table
    converted: bool = False  # to deterministic sums, with which no search has found it


def choices(
    problem: Problem,
    group: int,
    size: int,
    name: str,
    places: Iterable[Path] | None = None,
    *,
    visible_keys: int = 0,
    deterministic: bool = False,
    rounds: int = MANY,
) -> Iterator[Choice]:
    """As `choose`, each with its entry."""
    of = partial(offers, visible_keys=visible_keys, deterministic=deterministic, rounds=rounds)
    for offer in of(problem, group, size, name, places):
        try:
            spec = replanned(problem, offer.entry, deterministic)
        except Infeasible:
            continue
        few = not deterministic and rounds < offer.entry.rounds
        spread = spread_out(spec, group, rounds) if few else spec
        yield Choice(spread, _reason(offer, spec, spread), offer)


def different(chosen: Iterable[tuple[Spec, str]], count: int) -> list[Spec]:
    """The first `count` specs of `choose` that differ."""
    found: dict[Spec, None] = {}
    for spec, _ in chosen:
        found.setdefault(spec)
        if len(found) == count:
            break
    return list(found)


def _reason(offer: Offer, spec: Spec, spread: Spec) -> str:
    """That of an entry, whose `spec` was changed to `spread`."""
    knobs = DISPENSABLE | {"deterministic": "deterministic sums"}
    dropped = [what for name, what in knobs.items() if _lacks(spec, offer.entry, name)]
    reason = f"{offer.reason}; without {' and '.join(dropped)}" if dropped else offer.reason
    return reason if spread is spec else f"{reason}; {FEW_TILES}"


def replanned(problem: Problem, entry: Tuned, deterministic: bool = False) -> Spec:
    """The spec of a call by the tuning of an entry, as `planned` changes it; see `fits_order` for `deterministic`."""
    tuning = entry.spec.tuning
    if not fits_order(problem, deterministic, tuning):
        tuning = make_tuning(problem, tuning.to_json() | {"deterministic": 0})
    return planned(Spec(problem, tuning))


def fits_order(problem: Problem, deterministic: bool, tuning: Tuning) -> bool:
    """Does a kernel sum in a fixed order only where a call asks for it, if it sums gradients of a score's tensors?

    Such a kernel may be the fastest for the other gradients, but sums these in 80 bytes an element.
    """
    return deterministic or not (problem.score.wanted and getattr(tuning, "deterministic", False))


def rounds_of(batch: int, heads: int, rows: int, multiprocessors: int) -> int:
    """How often tiles of ROWS rows of all heads and batch entries fill three quarters of the GPU: 0, 1, ... or MANY.

    A forward's rows are queries of q heads, a backward's keys of kv heads. MANY where the number of multiprocessors is
    not known (0). The same rule as runtime/native/rounds.h.
    """
    tiles = batch * heads * -(-rows // ROWS)
    return min(MANY, 4 * tiles // (3 * multiprocessors)) if multiprocessors else MANY


def rounds_that_matter(
    problem: Problem, group: int, name: str, places: Iterable[Path] | None = None
) -> tuple[int, ...]:
    """Values of `rounds` of calls, among which is one for each spec that `choose` makes of the entries that count."""
    known = {row.entry.rounds for tier in _counting(problem, name, places) for row in tier.rows}
    if problem.direction is Direction.FORWARD:
        return tuple(sorted({MANY} | known))
    fewer = {max(0, rounds - 1) for rounds in known} if group == 1 else set()
    return tuple(sorted({0, MANY} | known | fewer))


def spread_out(spec: Spec, group: int, rounds: int) -> Spec:
    """A backward's spec for a call of fewer rounds than it was tuned with; the same where nothing is to change.

    Where key tiles of kv heads leave more than a quarter of the GPU idle, each q head of a group has blocks of its own.
    These, and those of heads without a group, add in any order: in a fixed one they wait for each other, and there are
    no other blocks that compute meanwhile. Blocks that compute all heads of a group keep their order, which is as fast
    from one round on. See docs/experiments.md, 118.
    """
    knobs = spec.tuning.to_json()
    if "split_heads" not in knobs or (rounds > 0 and group > 1):
        return spec
    changes = {"deterministic": 0, "launch_order": 0}
    if group > 1:
        changes |= {"split_heads": 1, "persistent": 0}
    changes = {name: value for name, value in changes.items() if knobs.get(name, value) != value}
    if not changes:
        return spec
    try:
        return planned(Spec(spec.problem, make_tuning(spec.problem, knobs | changes)))
    except Infeasible:
        return spec


def _lacks(spec: Spec, entry: Tuned, name: str) -> bool:
    return getattr(spec.tuning, name, 0) != getattr(entry.spec.tuning, name, 0)


def planned(spec: Spec) -> Spec:
    """A spec, or the same with as few knobs as possible set to 0 so that it is feasible (`DISPENSABLE`).

    Persistent blocks take no score, no planes and no `split_heads`; without them each work tile has a block of its
    own. A `launch_order` needs deterministic blocks, one kind of mask, and either `split_heads` or none; `staging`
    needs shared memory. Infeasible if no knob helps.
    """
    found = _feasible(spec)
    if isinstance(found, Infeasible):
        raise Infeasible(found.reason, found.subject)
    return found


@lru_cache(maxsize=4096)
def _feasible(spec: Spec) -> Spec | Infeasible:
    """As `planned`, but an error is returned: calls of other lengths meet the same entries."""
    for dropped in _dispensable(spec):
        knobs = spec.tuning.to_json() | dict.fromkeys(dropped, 0)
        found = Spec(spec.problem, make_tuning(spec.problem, knobs)) if dropped else spec
        try:
            make_plan(found)
        except Infeasible as error:
            reason = error.with_traceback(None)
        else:
            return found
    return reason


def _dispensable(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Knobs that `planned` sets to 0 where they are in the way: none, then one, then more of them."""
    names: list[str] = []
    if spec.problem.direction is Direction.BACKWARD:
        names = [name for name in DISPENSABLE if getattr(spec.tuning, name, 0)]
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


@dataclass(frozen=True)
class Offer:
    """An entry that counts for a call. `rank`: 0 of this device, 1 of another one, 2 modelled (see `DISTANCES`)."""

    entry: Tuned
    path: Path
    rank: int
    distance: tuple[float, ...]  # as DISTANCES names its parts

    @property
    def modelled(self) -> bool:
        """Computed by the cost model. Such entries come after all that were measured."""
        return self.rank == 2

    @property
    def stands_in(self) -> bool:
        """Is the entry of another head_dim, which has no entries itself?"""
        return self.distance[0] > 0

    @property
    def reason(self) -> str:
        """Why this entry's kernel was chosen."""
        verb = "modelled, not measured," if self.modelled else "tuned"
        entry = self.entry
        rows = f"{entry.size} rows{_seen(entry)}, GQA ratio {entry.group}"
        rows += f", {entry.rounds} rounds" if entry.rounds < MANY else ""
        strict = ", deterministic" if entry.deterministic else ""
        elsewhere = "; of another device, not measured on this one" if self.rank == 1 else ""
        head_dim = f"; entry of {entry.spec.problem.head_dims}" if self.stands_in else ""
        return f"{verb} as {entry.spec.slug} for {rows}{strict} ({self.path.name}){elsewhere}{head_dim}"


def offers(
    problem: Problem,
    group: int,
    size: int,
    name: str,
    places: Iterable[Path] | None = None,
    *,
    visible_keys: int = 0,
    deterministic: bool = False,
    rounds: int = MANY,
) -> Iterator[Offer]:
    """The entries that count for a call, nearest first; see `choose`. Their tuning may be infeasible there.

    Those that are equally near by what their problems say are compared with the call together, when they are reached.
    """
    call = _Call.of(problem, group, size, visible_keys, deterministic, rounds)
    for tier in _counting(problem, name, places):
        for *apart, _, row in _by_distance(list(call.distances(tier.rows))):
            distance = (*tier.distance, *apart, row.device, -row.entry.tflops)
            yield Offer(row.entry, row.path, row.rank, distance)


def _by_distance(found: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """In order; they are sorted only if the first one is not enough, as it mostly is."""
    if found:
        yield min(found)
        yield from sorted(found)[1:]


def measured(
    problem: Problem,
    group: int,
    size: int,
    name: str,
    places: Iterable[Path] | None = None,
    *,
    visible_keys: int = 0,
    deterministic: bool = False,
) -> float | None:
    """TFLOP/s of the fastest entry of the device's own tables for the class of a call, of any `rounds`; or None."""
    call = _Call.of(problem, group, size, visible_keys, deterministic, MANY)
    same = (
        row
        for tier in _counting(problem, name, places)
        if not any(tier.distance)
        for row in tier.rows
        if row.group == group and row.rank == 0 and row.deterministic == deterministic
    )
    speeds = (row.entry.tflops for *apart, _, _, row in call.distances(same) if not any(apart))
    return max(speeds, default=None)


# ---- The entries that count for a call

_Class = tuple[Any, ...]  # see `_class_of`
_File = tuple[int, str, int, int]  # rank, as `Offer` has it, path, when it was modified, inode
_Ranked = tuple[int, Path, Tuned]  # rank, file, entry
_Kinds = dict[tuple[bool, Any], list["_Row"]]  # entries by whether they are modelled, and their problem


class _Row(NamedTuple):
    """An entry, and what its distance from a call is computed from."""

    rank: int
    path: Path
    entry: Tuned
    device: float  # distance
    place: int  # by device, speed and name: decides between entries that are as near in everything else
    group: int
    octave: int  # of the length
    seen: int  # octave of the visible keys; 0: unknown
    rounds: int
    any_order: bool  # its kernel divides lists
    deterministic: bool
    fixed_order: bool


class _Tier(NamedTuple):
    """Entries whose problems are equally far from a call's."""

    distance: tuple[float, ...]  # from "head_dim" to "score"
    rows: list[_Row]


class _Call(NamedTuple):
    """What the distance of an entry from a call is computed from, beside their problems."""

    group: int
    octave: int
    seen: int
    may_be_long: bool  # lists of queries that see a key tile
    deterministic: bool
    rounds: int

    @staticmethod
    def of(
        problem: Problem, group: int, size: int, visible_keys: int, deterministic: bool, rounds: int
    ) -> _Call:
        seen = _visible(problem.mask, size, visible_keys).bit_length()
        # No deterministic kernel divides lists.
        may_be_long = problem.mask.listed and visible_keys <= 0 and not deterministic
        return _Call(group, size.bit_length(), seen, may_be_long, deterministic, rounds)

    def distances(self, rows: Iterable[_Row]) -> Iterator[tuple[Any, ...]]:
        """The parts of entries' distances from "long lists" to "rounds", then place and entry."""
        group, octave, call_seen, may_be_long, deterministic, call_rounds = self
        ratios: dict[int, float] = {}  # of the few GQA ratios of entries
        for row in rows:
            if row.deterministic and not deterministic:
                continue
            theirs = row.group
            if theirs not in ratios:
                ratios[theirs] = abs(math.log2(theirs / group))
            length, seen = abs(row.octave - octave), 0
            if call_seen:
                seen = abs(call_seen - row.seen) if row.seen else UNKNOWN
            converted = deterministic and not (row.fixed_order and theirs == group)
            yield (
                may_be_long and not row.any_order,
                length + seen + (CONVERTED if converted else 0),
                length,
                ratios[theirs],
                abs(row.rounds - call_rounds),
                row.place,
                row,
            )


_held: ContextVar[dict[Any, Any] | None] = ContextVar("_held", default=None)  # while `unchanged` is entered
T = TypeVar("T")


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


def _counting(problem: Problem, name: str, places: Iterable[Path] | None) -> Sequence[_Tier]:
    """The entries that count for a problem, the nearest tier first."""
    arch = problem.arch

    def look() -> tuple[_File, ...]:
        where = _kept("folders", folders) if places is None else places
        return tuple(chain.from_iterable(_files(name, arch, place) for place in where))

    return _tiers(look() if places is not None else _kept((name, arch), look), name, problem)


@lru_cache(maxsize=1024)
def _tiers(files: tuple[_File, ...], name: str, problem: Problem) -> tuple[_Tier, ...]:
    """Those of the problem's class, else what stands in for it; measured ones first."""
    found: dict[tuple[float, ...], list[_Row]] = {}
    near = _near(problem)
    alike = _own(files, name, _class_of(problem)) or _stand_ins(files, name, problem)
    for (modelled, _), rows in alike.items():
        tuned = rows[0].entry.spec.problem
        others = map(ne, _near(tuned), near)
        distance = head_dim_distance(tuned, problem), *others, _score_distance(tuned.score, problem.score)
        found.setdefault((modelled, *distance), []).extend(rows)
    return tuple(_Tier(distance[1:], found[distance]) for distance in sorted(found))


def _class_of(problem: Problem) -> _Class:
    """What the problem of an entry that counts shares with the call's."""
    return (problem.dtype.bytes, *_same(problem))


@lru_cache(maxsize=1024)
def _own(files: tuple[_File, ...], name: str, cls: _Class) -> _Kinds:
    """The entries of a class, for calls on the device called `name`."""
    return _ordered(_ranked(files, cls), name)


def _ranked(files: tuple[_File, ...], cls: _Class) -> list[_Ranked]:
    """The entries of a class; of equal ones of one device that of the first folder."""
    found: dict[tuple[Any, ...], _Ranked] = {}
    for rank, text, modified, inode in files:
        path = Path(text)
        for entry in _of_file(text, modified, inode, cls):
            found.setdefault((rank, path.name, *entry.values_of_class), (rank, path, entry))
    return list(found.values())


def _ordered(ranked: Iterable[_Ranked], name: str) -> _Kinds:
    """Entries with their places, those of equal problems together."""

    def merit(one: _Ranked) -> tuple[float, float]:
        rank, path, entry = one
        return _device_distance(rank, path, name), -entry.tflops

    found: _Kinds = {}
    in_order = (
        (device, *one)
        for (device, _), tied in groupby(sorted(ranked, key=merit), merit)
        for one in _by_name(list(tied))
    )
    for place, (device, rank, path, entry) in enumerate(in_order):
        tuned, tuning = entry.spec.problem, entry.spec.tuning
        seen = _visible(tuned.mask, entry.size, entry.visible_keys).bit_length()
        of_call = entry.group, entry.size.bit_length(), seen, entry.rounds
        orders = tuning.adds_in_any_order, entry.deterministic, entry.fixed_order
        row = _Row(rank, path, entry, device, place, *of_call, *orders)
        found.setdefault((rank == 2, _of_class(tuned)), []).append(row)
    return found


def _by_name(tied: list[_Ranked]) -> list[_Ranked]:
    return sorted(tied, key=lambda one: one[2].spec.slug) if len(tied) > 1 else tied


@lru_cache(maxsize=1024)
def _stand_ins(files: tuple[_File, ...], name: str, problem: Problem) -> _Kinds:
    """The entries of other head dims that count where that of the call has none: measured, of the same family and mask.

    Their rows are padded to as many columns as the call's, or to more, up to WIDER times as many: tiles that were found
    for narrower rows may not fit, or spill.
    """
    classes = dict.fromkeys(chain.from_iterable(_divided(*file) for _, *file in files))
    others = [cls for cls in classes if _may_stand_in(cls, problem)]
    ranked = chain.from_iterable(_ranked(files, cls) for cls in others)
    same = [one for one in ranked if one[0] < 2 and one[2].spec.problem.mask is problem.mask]
    return _ordered(same, name)


def _may_stand_in(cls: _Class, problem: Problem) -> bool:
    """May entries of a class stand in for those that a problem does not have?"""
    of_class = dict(zip(_SAME, cls[1:], strict=True))
    tuned = replace(problem, head_dim=of_class["head_dim"], dim_v=of_class["dim_v"])
    alike = cls == _class_of(tuned) and tuned.family == problem.family
    return alike and head_dim_distance(tuned, problem) < math.inf


def head_dim_distance(tuned: Problem, problem: Problem) -> float:
    """0 for the same head dims, else how far those of an entry are from the call's; inf if they cannot stand in."""
    return _wider(tuned.head_dim, problem.head_dim) + _wider(tuned.head_dim_v, problem.head_dim_v)


def _wider(tuned: int, dim: int) -> float:
    """Below 1 for rows that are padded to the same width, then 1 and the octaves between them; inf beyond WIDER."""
    width, own = (-(-columns // DEPTH) for columns in (tuned, dim))
    if width == own:
        return abs(tuned - dim) / DEPTH
    return 1 + math.log2(width / own) if own < width <= WIDER * own else math.inf


def _files(name: str, arch: Arch, directory: Path) -> Iterator[_File]:
    """The tables of a folder that are worth reading; for a CPU only its own: others are for other instruction sets."""
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
            yield rank, os.fspath(path), *version


def _inside(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as places:
            return sorted(places, key=attrgetter("name"))
    except (FileNotFoundError, NotADirectoryError):
        return []


@lru_cache(maxsize=256)
def _device_distance(rank: int, table: Path, name: str) -> float:
    """0 for the device's own table, 2 for a computed one, else 1 and how many octaves bytes a FLOP are apart."""
    theirs, mine = bytes_per_flop(table.stem), bytes_per_flop(name)
    apart = abs(math.log2(theirs / mine)) if rank == 1 and theirs and mine else 0.0
    return rank + apart


def _score_distance(tuned: ScoreMod, score: ScoreMod) -> int:
    """0 for the same score, 1 for the same formula with other numbers, 2 for none, 3 for another one."""
    if tuned == score:
        return 0
    if tuned and _NUMBER.sub("#", tuned) == _NUMBER.sub("#", score):
        return 1
    return 3 if tuned else 2


def _visible(mask: Mask, size: int, visible_keys: int) -> int:
    """Average number of keys that a query sees, 0 if unknown; full and causal masks determine it."""
    if mask.listed:
        return abs(visible_keys)
    return size if mask is Mask.FULL else -(-size // 2)


def _seen(entry: Tuned) -> str:
    return f", {entry.visible_keys} visible keys" if entry.visible_keys else ""
