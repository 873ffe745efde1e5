"""Choosing: which entries of tuned tables count for a call, in which order, and which specs they give.

`choose` takes a `Call` and the name of a device, and gives feasible specs, the best guess first, each with the reason
and its entry. `offers` gives the entries alone, and `measured` the speed of the entry of the very class.

An entry counts if its problem has the call's element size and agrees with it in all fields but mask, dtype, score and
alignment. Files count as runtime/tables.py says (`files_for`). Entries of searches for deterministic calls count for
such calls only. If no entry counts, measured ones of other head dims and the same mask stand in (`_stand_ins`), the
nearest head dims first. Each criterion decides among the entries that are equal by those before it:

1. measured before modelled;
2. the same mask: its function, planes, number of intervals and kind, in this order;
3. the same dtype;
4. the nearest score: the same, the same formula with other numbers, none, another one;
5. if a few keys may be seen by many queries (a mask whose visible keys are unknown or negative, in a call that is not
   deterministic): kernels that can divide long lists of query tiles. Not for heads without a group if it is known:
   then any kernel of a backward is changed to divide them (`fitting.dividing`);
6. the nearest length and number of visible keys, in octaves of both together, then the nearest length. The length
   determines how many blocks there are, the visible keys how long each works. For a deterministic call, an entry is
   CONVERTED octaves farther away if its kernel would have to be converted (`dispatch.choose_for`), or if it has another
   GQA ratio;
7. the nearest GQA ratio;
8. the nearest rounds (runtime/rounds.py);
9. this device, then the one of its architecture whose ratio of memory bandwidth to arithmetic is nearest by the data
   sheets (`cost_model.DATA_SHEETS`). Kernels for two shapes differ more than those for two devices;
10. the highest speed;
11. the slug, so that the order of a table does not matter.

The entry's tuning is then fitted to the call (runtime/fitting.py). An entry for which that fails is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter, ne
from pathlib import Path
from typing import Any, NamedTuple

from attnforge.codegen.cost_model import bytes_per_flop
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import PROBLEM_FIELDS, Direction, Mask, Problem, Spec
from attnforge.runtime.call import Call
from attnforge.runtime.fitting import DISPENSABLE, dividing, replanned, spread_out, without_sums
from attnforge.runtime.rounds import MANY
from attnforge.runtime.tables import (
    SAME,
    File,
    MatchKey,
    Tuned,
    class_fields,
    entries_for,
    files_for,
    match_key,
    match_keys,
)

_NEAR = tuple(f.attribute for f in reversed(PROBLEM_FIELDS) if f.match == "near" and f.attribute != "score")
_near = attrgetter(*_NEAR)
# Parts of the distance of an entry from a call, in the order of the criteria. Lengths, keys and ratios are in octaves.
# "head_dim" is `head_dim_distance`, which is 0 unless entries stand in. "shape" is the sum of the distances of the
# length and of the visible keys, and of CONVERTED where that counts. "device" is `_device_distance`.
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
# Octaves by which an entry is farther from a deterministic call if its kernel has to be converted: the deterministic
# variant may lose 40 %, more than an entry of a length nearby. 6 octaves are a factor of 8 in the length of a full or
# causal call, whose visible keys change with it.
CONVERTED = 6
FEW_TILES = "changed for fewer rounds of work tiles, not measured"  # ends the reason of a choice
DIVIDED = "changed to divide long lists, not measured"  # likewise
NO_SUMS, SUMS = "heads without a group store dK and dV", "heads in groups sum dK and dV"  # likewise
DEPTH = 16  # columns of a step of a product; rows are padded to a multiple of it
WIDER = 2  # times as wide may the rows of an entry be that stands in for a head_dim without entries


# ---- Specs


@dataclass(frozen=True)
class Choice:
    """A chosen spec, and the reason for it."""

    spec: Spec
    reason: str
    offer: Offer | None = None  # the entry that it is from; None: it is from no table
    converted: bool = False  # to deterministic sums, with which no search has found it


def choose(call: Call, name: str, places: Iterable[Path] | None = None) -> Iterator[Choice]:
    """Feasible specs for a call from tuned entries, nearest first, each with the reason and its entry.

    name: the device's, as its table has it (`device_name`). places: folders of tables, `folders()` if not given.
    """
    for offer in offers(call, name, places):
        try:
            spec = replanned(call, offer.entry)
        except Infeasible:
            continue
        few = not call.deterministic and call.rounds < offer.entry.rounds
        spread = spread_out(spec, call) if few else spec
        divided = dividing(spread) if _is_uneven(call) else spread
        fitted = without_sums(divided, call.group)
        reason = _reason(offer, spec, spread)
        if divided is not spread:
            reason += f"; {DIVIDED}"
        if fitted is not divided:
            reason += f"; {NO_SUMS if call.group == 1 else SUMS}"
        yield Choice(fitted, reason, offer)


def different(specs: Iterable[Spec], count: int) -> list[Spec]:
    """The first `count` of the specs that differ."""
    found: dict[Spec, None] = {}
    for spec in specs:
        found.setdefault(spec)
        if len(found) == count:
            break
    return list(found)


def _reason(offer: Offer, spec: Spec, spread: Spec) -> str:
    """Why the kernel of an entry was chosen, and what of it was changed: to `spec`, then to `spread`."""
    knobs = DISPENSABLE | {"deterministic": "deterministic sums"}
    dropped = [what for name, what in knobs.items() if _lacks(spec, offer.entry, name)]
    reason = f"{offer.reason}; without {' and '.join(dropped)}" if dropped else offer.reason
    return reason if spread is spec else f"{reason}; {FEW_TILES}"


def _lacks(spec: Spec, entry: Tuned, name: str) -> bool:
    return getattr(spec.tuning, name, 0) != getattr(entry.spec.tuning, name, 0)


# ---- Entries in order


@dataclass(frozen=True)
class Offer:
    """An entry that counts for a call. `rank`: that of its `File`."""

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


def _seen(entry: Tuned) -> str:
    return f", {entry.visible_keys} visible keys" if entry.visible_keys else ""


def offers(call: Call, name: str, places: Iterable[Path] | None = None) -> Iterator[Offer]:
    """The entries that count for a call, nearest first; arguments as of `choose`. Their tuning may be infeasible.

    Entries are compared tier by tier: criteria 1 to 4 sort the tiers, the others a tier when it is reached.
    """
    for tier in _counting(call.problem, name, places):
        for *apart, _, row in _by_distance(list(_distances(call, tier.rows))):
            distance = (*tier.distance, *apart, row.device, -row.entry.tflops)
            yield Offer(row.entry, row.path, row.rank, distance)


def _by_distance(found: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """What was found, in order. The first one is mostly enough: the others are sorted only if the second is needed."""
    if found:
        yield min(found)
        yield from sorted(found)[1:]


def measured(call: Call, name: str, places: Iterable[Path] | None = None) -> float | None:
    """TFLOP/s of the fastest entry of the device's own tables for the class of a call, of any `rounds`; or None."""
    same = (
        row
        for tier in _counting(call.problem, name, places)
        if not any(tier.distance)
        for row in tier.rows
        if row.group == call.group and row.rank == 0 and row.deterministic == call.deterministic
    )
    speeds = (row.entry.tflops for *apart, _, _, row in _distances(call, same) if not any(apart))
    return max(speeds, default=None)


def rounds_that_matter(
    problem: Problem, group: int, name: str, places: Iterable[Path] | None = None
) -> tuple[int, ...]:
    """Values of `rounds` of calls, among which is one for each spec that `choose` makes of the entries that count."""
    known = {row.entry.rounds for tier in _counting(problem, name, places) for row in tier.rows}
    if problem.direction is Direction.FORWARD:
        return tuple(sorted({MANY} | known))
    fewer = {max(0, rounds - 1) for rounds in known} if group == 1 else set()
    return tuple(sorted({0, MANY} | known | fewer))


def _distances(call: Call, rows: Iterable[_Row]) -> Iterator[tuple[Any, ...]]:
    """Of each entry that counts: the parts of its distance from "long lists" to "rounds", its place, and itself."""
    group, deterministic, rounds = call.group, call.deterministic, call.rounds
    mask, octave = call.problem.mask, call.size.bit_length()
    call_seen = _visible(mask, call.size, call.visible_keys).bit_length()
    # Lists of queries that see a key tile, of a call whose kernel is not changed to divide them anyway.
    unknown = mask.listed and call.visible_keys == 0 and not deterministic
    may_be_long = unknown or (_is_uneven(call) and group > 1)
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
            abs(row.rounds - rounds),
            row.place,
            row,
        )


def _is_uneven(call: Call) -> bool:
    """Are few keys seen by far more queries than the others? No deterministic kernel divides their lists."""
    return call.problem.mask.listed and call.visible_keys < 0 and not call.deterministic


def _visible(mask: Mask, size: int, visible_keys: int) -> int:
    """Average number of keys that a query sees, 0 if unknown; full and causal masks determine it."""
    if mask.listed:
        return abs(visible_keys)
    return size if mask is Mask.FULL else -(-size // 2)


class _Row(NamedTuple):
    """An entry, and what its distance from a call is computed from."""

    rank: int
    path: Path
    entry: Tuned
    device: float  # distance
    place: int  # in the order of device, speed and slug: criteria 9 to 11
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


_Ranked = tuple[int, Path, Tuned]  # rank, file, entry
_Alike = dict[tuple[bool, Any], list[_Row]]  # entries by whether they are modelled, and their problem


# ---- The entries that count


def _counting(problem: Problem, name: str, places: Iterable[Path] | None) -> Sequence[_Tier]:
    """The entries that count for a problem, the nearest tier first."""
    return _tiers(files_for(name, problem.arch, places), name, problem)


@lru_cache(maxsize=1024)
def _tiers(files: tuple[File, ...], name: str, problem: Problem) -> tuple[_Tier, ...]:
    """Those of the problem's `match_key`, else what stands in for them; measured ones first."""
    found: dict[tuple[float, ...], list[_Row]] = {}
    near = _near(problem)
    alike = _own(files, name, match_key(problem)) or _stand_ins(files, name, problem)
    for (modelled, _), rows in alike.items():
        tuned = rows[0].entry.spec.problem
        others = map(ne, _near(tuned), near)
        distance = head_dim_distance(tuned, problem), *others, _score_distance(tuned.score, problem.score)
        found.setdefault((modelled, *distance), []).extend(rows)
    return tuple(_Tier(distance[1:], found[distance]) for distance in sorted(found))


def _score_distance(tuned: ScoreMod, score: ScoreMod) -> int:
    """0 for the same score, 1 for the same formula with other numbers, 2 for none, 3 for another one."""
    if tuned == score:
        return 0
    if tuned and _NUMBER.sub("#", tuned) == _NUMBER.sub("#", score):
        return 1
    return 3 if tuned else 2


@lru_cache(maxsize=1024)
def _own(files: tuple[File, ...], name: str, key: MatchKey) -> _Alike:
    """The entries with a `match_key`, for calls on the device called `name`."""
    return _ordered(_ranked(files, key), name)


def _ranked(files: tuple[File, ...], key: MatchKey) -> list[_Ranked]:
    """The entries with a `match_key`; of those of one device and class that of the first folder."""
    found: dict[tuple[Any, ...], _Ranked] = {}
    for file in files:
        path = Path(file.path)
        for entry in entries_for(file, key):
            found.setdefault((file.rank, path.name, *entry.values_of_class), (file.rank, path, entry))
    return list(found.values())


def _ordered(ranked: Iterable[_Ranked], name: str) -> _Alike:
    """Entries with their places, by whether they are modelled, and their problem."""

    def merit(one: _Ranked) -> tuple[float, float]:
        rank, path, entry = one
        return _device_distance(rank, path, name), -entry.tflops

    found: _Alike = {}
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
        found.setdefault((rank == 2, class_fields(tuned)), []).append(row)
    return found


def _by_name(tied: list[_Ranked]) -> list[_Ranked]:
    return sorted(tied, key=lambda one: one[2].spec.slug) if len(tied) > 1 else tied


@lru_cache(maxsize=256)
def _device_distance(rank: int, table: Path, name: str) -> float:
    """0 for the device's own table, 2 for a computed one, else 1 and how many octaves bytes a FLOP are apart."""
    theirs, mine = bytes_per_flop(table.stem), bytes_per_flop(name)
    apart = abs(math.log2(theirs / mine)) if rank == 1 and theirs and mine else 0.0
    return rank + apart


# ---- Entries of other head dims


@lru_cache(maxsize=1024)
def _stand_ins(files: tuple[File, ...], name: str, problem: Problem) -> _Alike:
    """The entries that stand in where a call's head dims have none: measured, of the same family and mask.

    Their rows are padded to as many columns as the call's, or to more, up to WIDER times as many: tiles that were found
    for narrower rows may not fit, or spill.
    """
    keys = dict.fromkeys(chain.from_iterable(map(match_keys, files)))
    others = [key for key in keys if _may_stand_in(key, problem)]
    ranked = chain.from_iterable(_ranked(files, key) for key in others)
    same = [one for one in ranked if one[0] < 2 and one[2].spec.problem.mask is problem.mask]
    return _ordered(same, name)


def _may_stand_in(key: MatchKey, problem: Problem) -> bool:
    """May entries with a `match_key` stand in for those that a problem does not have?"""
    values = dict(zip(SAME, key[1:], strict=True))
    tuned = replace(problem, head_dim=values["head_dim"], dim_v=values["dim_v"])
    alike = key == match_key(tuned) and tuned.family == problem.family
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
