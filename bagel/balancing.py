"""`attnforge.bagel.balance(packs, ranks)`: a step's packs for ranks, so that all of them take as long.

A pack's time is predicted: linear layers take as long for every token, attention for every visible pair. Packs of as
many tokens differ in pairs, so ranks wait for the one with the longest samples. Samples are therefore dealt to packs
anew: the slowest first, each to the fastest pack that has room; then the slowest pack and another one exchange
up to two samples against up to two, while that helps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from numbers import Real
from typing import Literal, Protocol, SupportsFloat

import numpy as np

from attnforge.bagel.packing import cut
from attnforge.runtime.inputs import expect_integer, expect_number

NEAR = 8  # lightest packs, which are tried as partners before all others
FEW = 24  # samples of a pack up to which two at a time are exchanged
LISTS = ("sample_lens", "split_lens", "attn_modes")  # of a pack
ENOUGH = 1.001  # largest over mean at which the search ends


class Packed(Protocol):
    """A pack as `PackedMask` takes it. What has `used`, too, has padding from that token on, which is not dealt."""

    @property
    def sample_lens(self) -> Sequence[int]:
        """Tokens of each sample."""
        ...

    @property
    def split_lens(self) -> Sequence[int]:
        """Tokens of each split, of all samples."""
        ...

    @property
    def attn_modes(self) -> Sequence[str]:
        """causal, full or noise for each split."""
        ...


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one decoder layer, forward and backward: `token` a token, `pair` a visible pair of all heads, `fixed`.

    The defaults are BAGEL-7B's layer (28/4/128, bf16, no checkpointing) on an H200: the fit of benchmarks/layer_cost.py
    to twelve packs, whose times it predicts within 1 % (docs/training.md). How `balance` distributes samples depends
    on `token` / `pair` only, so times of a whole model will do. A subclass may override `seconds`.
    """

    token: float = 2.217e-6
    pair: float = 7.706e-11
    fixed: float = 1.013e-3

    def __post_init__(self) -> None:
        """Raises TypeError for what is no number, and ValueError for a negative or infinite time, with which
        exchanging samples would not end.
        """
        for name in ("token", "pair", "fixed"):
            value = getattr(self, name)
            expect_number(name, value, optional=False)
            if not _is_time(value):
                raise ValueError(f"{name}: got {value} seconds, expected a finite number of at least 0")
            object.__setattr__(self, name, float(value))  # NumPy's float32 would round sums

    def seconds(self, tokens: int, pairs: int) -> float:
        """Predicted time of a pack."""
        return self.fixed + self.token * tokens + self.pair * pairs

    @classmethod
    def from_rates(
        cls, heads_q: int, head_dim: int, *, forward: float, backward: float, token: float
    ) -> LayerCost:
        """From attention's TFLOP/s of visible pairs (4 head_dim a pair and head forward, 2.5 times that backward).

        `fixed` is 0.
        """
        for name, size in (("heads_q", heads_q), ("head_dim", head_dim)):
            expect_integer(name, size)
            if size < 1:
                raise ValueError(f"{name}: got {size}, expected at least 1")
        for name, rate in (("forward", forward), ("backward", backward)):
            expect_number(name, rate, optional=False)
            if not rate > 0.0:
                raise ValueError(f"{name}: got {rate} TFLOP/s, expected a number above 0")
        work = 4e-12 * heads_q * head_dim
        return cls(token, work / forward + 2.5 * work / backward, 0.0)

    @classmethod
    def fit(cls, packs: Iterable[Packed], seconds: Iterable[float]) -> LayerCost:
        """The cost nearest to measured times of packs: least squares of relative errors, none below 0.

        packs: at least 3, that differ in tokens and in pairs. Raises ValueError otherwise, TypeError for other types.
        """
        from scipy.optimize import nnls

        packs = _expect_packs(packs)
        if not isinstance(seconds, Iterable):
            raise TypeError(f"seconds: got {type(seconds).__name__}, expected a list of times")
        seconds = list(seconds)
        for second in seconds:
            expect_number("seconds", second, optional=False)
        work = [_work(_samples(pack, number)) for number, pack in enumerate(packs)]
        if len(packs) != len(seconds) or len(packs) < 3 or not _are_times(seconds):
            raise ValueError(
                f"seconds: {len(seconds)} times of {len(packs)} packs; expected a finite time above 0 for each of 3 "
                "or more"
            )
        table = np.array([(tokens, pairs, 1.0) for tokens, pairs in work], dtype=float)
        size = table.max(0)
        if np.linalg.matrix_rank(table / size) < 3:
            raise ValueError(
                "packs: their tokens and visible pairs do not differ enough to tell their costs apart"
            )
        shortest = float(min(seconds))  # relative to it: dividing by the smallest floats would overflow
        times = np.asarray(seconds, dtype=float) / shortest
        found, _ = nnls(table / size / times[:, None], np.ones(len(times)))
        return cls(*(found * shortest / size).tolist())


def _are_times(seconds: Sequence[float]) -> bool:
    return all(second > 0.0 and _is_time(second) for second in seconds)


def _is_time(seconds: SupportsFloat) -> bool:
    """Whether it is at least 0 and finite as a float; Python's integers may be larger than any."""
    try:
        return 0.0 <= float(seconds) < math.inf
    except OverflowError:
        return False


@dataclass(frozen=True)
class Share:
    """One pack of a rank: its samples as (number of the given pack, number of the sample in it), and their lists."""

    samples: tuple[tuple[int, int], ...]
    sample_lens: tuple[int, ...]
    split_lens: tuple[int, ...]
    attn_modes: tuple[str, ...]
    seconds: float  # predicted, of one layer

    @property
    def tokens(self) -> int:
        """Tokens, all of them real."""
        return sum(self.sample_lens)


@dataclass(frozen=True)
class Balance:
    """The packs of each rank, as many for each. Those of one place in the order take about as long on all ranks."""

    ranks: tuple[tuple[Share, ...], ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted time of each rank, of one layer."""
        return tuple(sum(share.seconds for share in shares) for shares in self.ranks)

    @property
    def ratio(self) -> float:
        """Largest over mean of the ranks' times, where ranks wait for each other once a step (DDP). 1 if all are 0."""
        return self._over_mean(max(self.seconds))

    @property
    def lockstep_ratio(self) -> float:
        """The same where ranks wait for each other in every pack (FSDP)."""
        columns = zip(*self.ranks, strict=True)
        return self._over_mean(sum(max(share.seconds for share in column) for column in columns))

    def _over_mean(self, slowest: float) -> float:
        total = sum(self.seconds)
        return slowest / total * len(self.ranks) if total else 1.0


def balance(
    packs: Iterable[Packed],
    ranks: int,
    *,
    move: Literal["samples", "packs"] = "samples",
    cost: LayerCost | None = None,
    capacity: int | None = None,
) -> Balance:
    """Deal a step's packs among ranks by predicted time. All ranks get as many packs, as FSDP needs them.

    packs: of all ranks together; objects with sample_lens, split_lens and attn_modes. Where there is `used`, samples
        from that token on are padding; padding and samples without tokens are left out.
    move: "samples" makes new packs of all samples, as many as were given or the next multiple of `ranks`; "packs"
        leaves each pack as it is, and their number must be a multiple of `ranks`. With fewer samples than new packs,
        some packs are empty.
    cost: None is LayerCost(). Samples are dealt as if a pack took as long as the sum of what each of its samples adds
        to an empty pack, which is so unless a subclass overrides `seconds`; `Share.seconds` is that of the whole pack.
    capacity: tokens of a new pack at most; None: those of the longest given one, padding included.

    The result depends on the arguments alone: ranks that know all packs agree without communication. Raises TypeError
    or ValueError naming the argument, of a pack also its number; also if samples do not fit the capacity.
    """
    packs = _expect_packs(packs)
    _check_arguments(packs, ranks, move, cost, capacity)
    cost = LayerCost() if cost is None else cost
    given = [_samples(pack, number) for number, pack in enumerate(packs)]
    if move == "packs":
        if len(packs) % ranks:
            raise ValueError(
                f"packs: {len(packs)} do not divide among {ranks} ranks; move='samples' makes new ones"
            )
        return _to_ranks([_share(part, cost) for part in given], ranks)
    room = max(sum(_lengths(pack)) for pack in packs) if capacity is None else capacity
    count = -(-len(packs) // ranks) * ranks
    return _to_ranks([_share(part, cost) for part in _deal(given, count, room, cost)], ranks)


def _expect_packs(packs: Iterable[Packed]) -> list[Packed]:
    """The packs as a list; `_samples` checks what they are. Raises TypeError for what cannot be one."""
    if not isinstance(packs, Iterable) or isinstance(packs, str):
        raise TypeError(f"packs: got {type(packs).__name__}, expected a list of packs")
    return list(packs)


def _check_arguments(packs: list[Packed], ranks: int, move: str, cost: object, capacity: int | None) -> None:
    """Raises TypeError or ValueError for all but what is inside a pack."""
    if not packs:
        raise ValueError("packs: got none, expected at least one")
    for name, value, least in (("ranks", ranks, 1), ("capacity", 0 if capacity is None else capacity, 0)):
        expect_integer(name, value)
        if value < least:
            raise ValueError(f"{name}: got {value}, expected at least {least}")
    if move not in ("samples", "packs"):
        raise ValueError(f"move: got {move!r}, accepted are 'samples' and 'packs'")
    if cost is not None and not isinstance(cost, LayerCost):
        raise TypeError(
            f"cost: got {getattr(cost, '__name__', type(cost).__name__)}, expected a LayerCost or None; "
            "LayerCost.fit makes one of measured times"
        )


# ---- Samples


@dataclass(frozen=True)
class _Sample:
    place: tuple[int, int]  # pack, sample
    tokens: int
    pairs: int
    split_lens: tuple[int, ...]
    attn_modes: tuple[str, ...]


def _samples(pack: Packed, number: int = 0) -> list[_Sample]:
    """The samples of a pack without its padding. Errors as `packing.cut`, with the pack's number in front."""
    if lacking := [name for name in LISTS if not hasattr(pack, name)]:
        raise TypeError(
            f"packs: number {number} is a {type(pack).__name__} without {lacking[0]}; expected an object with "
            "sample_lens, split_lens and attn_modes"
        )
    try:
        splits = cut(pack.sample_lens, pack.split_lens, pack.attn_modes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"packs: number {number}: {error}") from None
    used, lengths = getattr(pack, "used", None), _lengths(pack)
    if used is not None:
        expect_integer(f"packs: number {number}: used", used)
    limit = sum(lengths) if used is None else operator.index(used)
    if limit not in (0, *accumulate(lengths)):
        raise ValueError(f"packs: number {number} has {limit!r} used tokens, which end inside a sample")
    found, end = [], 0
    for index, length in enumerate(lengths):
        end += length
        own = [split for split in splits if split.sample == index and split.end > split.start]
        if end <= limit and length:
            lens, modes = tuple(s.end - s.start for s in own), tuple(s.mode for s in own)
            found.append(_Sample((number, index), length, sum(s.pairs for s in own), lens, modes))
    return found


def _lengths(pack: Packed) -> list[int]:
    """Tokens of each sample, padding included, as numbers of Python: sums of NumPy's int32 would wrap around."""
    return [operator.index(length) for length in pack.sample_lens]


def _work(samples: Iterable[_Sample]) -> tuple[int, int]:
    """(tokens, visible pairs)"""
    tokens, pairs = 0, 0
    for sample in samples:
        tokens, pairs = tokens + sample.tokens, pairs + sample.pairs
    return tokens, pairs


def _share(samples: Sequence[_Sample], cost: LayerCost) -> Share:
    ordered = sorted(samples, key=lambda sample: sample.place)
    return Share(
        tuple(sample.place for sample in ordered),
        tuple(sample.tokens for sample in ordered),
        tuple(n for sample in ordered for n in sample.split_lens),
        tuple(mode for sample in ordered for mode in sample.attn_modes),
        _seconds(cost, *_work(ordered)),
    )


def _seconds(cost: LayerCost, tokens: int, pairs: int) -> float:
    """The predicted time of a pack. Raises ValueError for what is none."""
    try:
        found: object = cost.seconds(tokens, pairs)
    except OverflowError:  # Python's integers may be larger than any float
        found = math.inf
    # Huge costs overflow, and a subclass may return anything.
    if not isinstance(found, Real) or not _is_time(found):
        raise ValueError(
            f"cost: seconds({tokens}, {pairs}) gave {found!r}, expected a finite number of at least 0"
        )
    return float(found)


def _times(samples: Iterable[_Sample], cost: LayerCost) -> Times:
    """What each sample adds to the time of an empty pack, which every pack has."""
    none = _seconds(cost, 0, 0)
    return {x.place: max(0.0, _seconds(cost, x.tokens, x.pairs) - none) for x in samples}


# ---- Samples to packs

Times = Mapping[tuple[int, int], float]  # of samples, by their places


def _deal(given: list[list[_Sample]], count: int, room: int, cost: LayerCost) -> list[list[_Sample]]:
    """`count` packs of all samples, none with more than `room` tokens."""
    every = [sample for part in given for sample in part]
    if (longest := max((sample.tokens for sample in every), default=0)) > room:
        raise ValueError(f"capacity: {room} tokens, but a sample has {longest}; pass at least that many")
    as_given = [list(part) for part in given] + [[] for _ in range(count - len(given))]
    times = _times(every, cost)
    starts = [_slowest_first(every, count, room, times), _largest_first(every, count, room)]
    if all(_work(part)[0] <= room for part in as_given):
        starts.append(as_given)
    tried = [_improve(start, room, times) for start in starts if start is not None]
    if not tried:
        raise ValueError(
            f"capacity: {len(every)} samples of {_work(every)[0]} tokens do not fit {count} packs of {room}; "
            "raise capacity, or pass packs with fewer tokens"
        )
    return min(tried, key=lambda packs: max(_seconds(cost, *_work(part)) for part in packs))


def _slowest_first(every: list[_Sample], count: int, room: int, times: Times) -> list[list[_Sample]] | None:
    """Each sample, the slowest first, to the pack that is fastest so far and has room; None if none has."""
    packs: list[list[_Sample]] = [[] for _ in range(count)]
    tokens, loads = [0] * count, [0.0] * count
    for sample in sorted(every, key=lambda x: (-times[x.place], x.place)):
        fitting = [i for i in range(count) if tokens[i] + sample.tokens <= room]
        if not fitting:
            return None
        best = min(fitting, key=lambda i: (loads[i], i))
        packs[best].append(sample)
        tokens[best] += sample.tokens
        loads[best] += times[sample.place]
    return packs


def _largest_first(every: list[_Sample], count: int, room: int) -> list[list[_Sample]] | None:
    """The same by tokens alone, which leaves room for longer."""
    return _slowest_first(every, count, room, {x.place: float(x.tokens) for x in every})


class _Exchange:
    """Subsets of up to two samples of a pack, of up to one of many: their times and tokens. The empty one is first."""

    def __init__(self, samples: Sequence[_Sample], times: Times) -> None:
        most = 2 if len(samples) <= FEW else 1
        self.subsets = [s for size in range(most + 1) for s in combinations(range(len(samples)), size)]
        own = [times[x.place] for x in samples]
        self.times = np.array([sum(own[i] for i in s) for s in self.subsets])
        self.tokens = np.array([sum(samples[i].tokens for i in s) for s in self.subsets])
        self.load, self.size = sum(own), sum(x.tokens for x in samples)


def _improve(packs: list[list[_Sample]], room: int, times: Times) -> list[list[_Sample]]:
    """Exchange samples of the slowest pack while its and its partner's larger time falls."""
    packs = [list(part) for part in packs]
    sides = [_Exchange(part, times) for part in packs]
    mean = sum(side.load for side in sides) / len(sides)
    while True:
        order = sorted(range(len(packs)), key=lambda i: (sides[i].load, i))
        slow = order.pop()
        if sides[slow].load <= ENOUGH * mean:
            return packs
        found = _best(sides, slow, order[:NEAR], room) or _best(sides, slow, order[NEAR:], room)
        if found is None:
            return packs
        other, out, back = found
        leaving, coming = ([packs[i][j] for j in s] for i, s in ((slow, out), (other, back)))
        packs[slow] = [x for x in packs[slow] if x not in leaving] + coming
        packs[other] = [x for x in packs[other] if x not in coming] + leaving
        for i in (slow, other):
            sides[i] = _Exchange(packs[i], times)


def _best(
    sides: list[_Exchange], slow: int, others: Sequence[int], room: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """(partner, subset that leaves, subset that comes) with the least larger time of both; None if none is less."""
    a = sides[slow]
    best, least = None, a.load * (1 - 1e-9)
    for i in others:
        b = sides[i]
        time = a.times[:, None] - b.times[None]
        tokens = a.tokens[:, None] - b.tokens[None]
        larger = np.maximum(a.load - time, b.load + time)
        larger[(a.size - tokens > room) | (b.size + tokens > room)] = np.inf
        at = int(larger.argmin())
        if larger.flat[at] < least:
            row, column = divmod(at, len(b.subsets))
            best, least = (i, a.subsets[row], b.subsets[column]), float(larger.flat[at])
    return best


# ---- Packs to ranks


def _to_ranks(shares: list[Share], ranks: int) -> Balance:
    """Packs of about the same time at the same place of all ranks; of these the slowest to the fastest rank so far."""
    if sum(share.seconds for share in shares) == math.inf:
        raise ValueError("cost: the predicted times of all packs add up to more than a float holds")
    order = sorted(shares, key=lambda share: (-share.seconds, share.samples))
    dealt: list[list[Share]] = [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        loads = [sum(share.seconds for share in rank) for rank in dealt]
        waiting = sorted(range(ranks), key=lambda i: (loads[i], i))
        for rank, share in zip(waiting, order[first : first + ranks], strict=True):
            dealt[rank].append(share)
    return Balance(tuple(tuple(rank) for rank in dealt))
