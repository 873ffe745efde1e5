"""attnforge.bagel.balance: every sample once, no pack over its capacity, ranks of the same predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnforge
from attnforge.bagel import LayerCost, PackedMask, balance
from attnforge.bagel.balancing import Balance, Share
from attnforge.bagel.packing import MODES
from attnforge.bagel.workloads import workload

GOAL = 1.05  # largest over mean


@dataclass(frozen=True)
class Pack:
    sample_lens: tuple[int, ...]
    split_lens: tuple[int, ...]
    attn_modes: tuple[str, ...]


def packs_of(*configs: str) -> list[Pack]:
    """Four of each, without their padding."""
    found = []
    for name in (f"{config}/{seed}" for config in configs for seed in range(4)):
        pack = workload(name)
        assert pack.used < pack.tokens
        found.append(Pack(pack.sample_lens[:-1], pack.split_lens[:-1], pack.attn_modes[:-1]))
    return found


def samples_of(packs: Sequence[Pack]) -> dict[tuple[int, int], tuple[tuple[int, str], ...]]:
    """Splits (length, mode) of each sample by its place, read from the lists."""
    found = {}
    for number, pack in enumerate(packs):
        splits = iter([x for x in zip(pack.split_lens, pack.attn_modes, strict=True) if x[0]])
        for index, length in enumerate(pack.sample_lens):
            own: list[tuple[int, str]] = []
            while sum(n for n, _ in own) < length:
                own.append(next(splits))
            if own:
                found[number, index] = tuple(own)
    return found


def shares_of(dealt: Balance) -> list[Share]:
    return [share for rank in dealt.ranks for share in rank]


def check(packs: Sequence[Pack], dealt: Balance, capacity: int, cost: LayerCost) -> None:
    """Every sample once, with its own splits; all packs within the capacity; times that follow from the masks."""
    given_samples = samples_of(packs)
    places = [place for share in shares_of(dealt) for place in share.samples]
    assert sorted(places) == sorted(given_samples)
    assert len({len(rank) for rank in dealt.ranks}) == 1
    for share in shares_of(dealt):
        assert share.tokens <= capacity
        splits = [split for place in share.samples for split in given_samples[place]]
        assert splits == list(zip(share.split_lens, share.attn_modes, strict=True))
        assert share.sample_lens == tuple(sum(n for n, _ in given_samples[place]) for place in share.samples)
        mask = PackedMask(share.sample_lens, share.split_lens, share.attn_modes, "cpu")
        assert share.seconds == pytest.approx(cost.seconds(share.tokens, mask.pairs))


# ---- BAGEL's packs


@pytest.mark.parametrize(
    ("configs", "cost"),
    [
        pytest.param(("pretrain", "vlm_only"), LayerCost(), id="pretrain+vlm_only"),
        pytest.param(("pretrain", "edit_only"), LayerCost(), id="pretrain+edit_only"),
        pytest.param(("edit_only", "t2i_lowres"), LayerCost(), id="edit_only+t2i_lowres"),
        pytest.param(("pretrain", "finetune"), LayerCost(), id="pretrain+finetune"),
        pytest.param(("pretrain", "edit_only"), LayerCost(token=0.0, fixed=0.0), id="attention alone"),
    ],
)
def test_eight_ranks_take_as_long(configs: tuple[str, ...], cost: LayerCost) -> None:
    packs = packs_of(*configs)
    before = balance(packs, 8, move="packs", cost=cost)
    dealt = balance(packs, 8, cost=cost, capacity=36864)
    check(packs, dealt, 36864, cost)
    assert dealt.ratio < GOAL < before.ratio
    assert dealt.lockstep_ratio < GOAL


def test_a_sample_longer_than_the_mean_is_a_pack_of_its_own() -> None:
    """Nothing can be faster than the slowest sample."""
    small = (1000,) * 16
    packs = [Pack((16000,), (16000,), ("causal",)), *[Pack(small, small, ("causal",) * 16)] * 7]
    dealt = balance(packs, 8, cost=LayerCost(token=0.0, fixed=0.0), capacity=20000)
    slowest = max(shares_of(dealt), key=lambda share: share.seconds)
    assert slowest.samples == ((0, 0),)


def test_few_long_samples() -> None:
    packs = packs_of("finetune")
    assert balance(packs, 4, move="packs").ratio > 1.2
    assert balance(packs, 4, capacity=11520).ratio < GOAL


def test_packs_as_full_as_they_can_be() -> None:
    """No sample can be added to any pack, so only exchanges help."""
    lens = (8000, 8000, 8000, 4000, 4000)
    packs = [Pack(lens, lens, ("causal" if i < 4 else "noise",) * 5) for i in range(8)]
    assert balance(packs, 8, move="packs").ratio > 1.02
    dealt = balance(packs, 8)
    check(packs, dealt, 32000, LayerCost())
    assert {share.tokens for share in shares_of(dealt)} == {32000}
    assert dealt.ratio < 1.01


def test_samples_that_fill_their_packs_find_room() -> None:
    """Dealt by time, an image goes to each pack, and the text of 5 tokens fits neither."""
    lens = (4, 5, 3, 4)
    dealt = balance(
        [Pack(lens, lens, ("full", "causal", "causal", "full"))], 2, cost=LayerCost(0, 1, 0), capacity=8
    )
    assert [share.tokens for share in shares_of(dealt)] == [8, 8]


def test_several_packs_a_rank_are_alike_at_each_place() -> None:
    """As FSDP needs it: ranks wait for each other in every pack."""
    packs = packs_of("pretrain", "vlm_only", "edit_only", "t2i_lowres")
    before, dealt = (balance(packs, ranks, move="packs") for ranks in (16, 8))
    check(packs, dealt, 36864, LayerCost())
    assert sorted(place[0] for share in shares_of(dealt) for place in share.samples[:1]) == list(range(16))
    times = [sorted(share.seconds for share in column) for column in zip(*dealt.ranks, strict=True)]
    assert times[0][0] >= times[1][-1]
    assert dealt.ratio < dealt.lockstep_ratio < before.lockstep_ratio


def test_packs_that_are_balanced_stay_so() -> None:
    """Dealing these samples anew and exchanging two at a time reaches 116 tokens."""
    packs = [Pack(lens, lens, ("full",) * len(lens)) for lens in ((35, 44, 31), (50, 60), (26, 12, 72))]
    dealt = balance(packs, 3, cost=LayerCost(1, 0, 0), capacity=120)
    assert [share.tokens for share in shares_of(dealt)] == [110, 110, 110]


def test_ratios() -> None:
    """Ranks of 4 + 1 and 3 + 2 seconds take as long; if they wait after each pack, 4 + 2 seconds."""
    packs = [Pack((n,), (n,), ("full",)) for n in (1, 2, 3, 4)]
    dealt = balance(packs, 2, move="packs", cost=LayerCost(1, 0, 0))
    assert [[share.tokens for share in rank] for rank in dealt.ranks] == [[4, 1], [3, 2]]
    assert (dealt.seconds, dealt.ratio, dealt.lockstep_ratio) == ((5, 5), 1, 1.2)


def test_padding_is_not_dealt() -> None:
    pack = workload("pretrain/0")
    dealt = balance([pack], 2)
    assert sum(share.tokens for share in shares_of(dealt)) == pack.used < pack.tokens
    assert dealt.ratio < GOAL


# ---- Any packs


@st.composite
def any_packs(draw: st.DrawFn) -> list[Pack]:
    packs = []
    for _ in range(draw(st.integers(1, 6))):
        splits = draw(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=7))
        lens = tuple(n for sample in splits for n in sample)
        modes = tuple(draw(st.sampled_from(MODES)) for _ in lens)
        packs.append(Pack(tuple(map(sum, splits)), lens, modes))
    return packs


@settings(max_examples=60)
@given(any_packs(), st.integers(1, 5), st.integers(0, 60), st.sampled_from([LayerCost(), LayerCost(0, 1, 2)]))
def test_every_sample_is_dealt_once(packs: list[Pack], ranks: int, more: int, cost: LayerCost) -> None:
    capacity = max(sum(pack.sample_lens) for pack in packs) + more
    dealt = balance(packs, ranks, cost=cost, capacity=capacity)
    check(packs, dealt, capacity, cost)
    assert len(shares_of(dealt)) == -(-len(packs) // ranks) * ranks
    assert dealt == balance(packs, ranks, cost=cost, capacity=capacity)
    if len(packs) % ranks == 0:
        before = balance(packs, ranks, move="packs", cost=cost)
        check(packs, before, capacity, cost)
        slowest = [max((x.seconds for x in shares_of(b)), default=0) for b in (dealt, before)]
        assert slowest[0] <= slowest[1] * (1 + 1e-9)  # it never makes the slowest pack slower


# ---- Costs


def test_fitting_finds_the_cost_of_measured_times() -> None:
    packs = packs_of("pretrain", "t2i_lowres", "finetune")
    cost = LayerCost(3e-6, 5e-11, 2e-3)
    times = [x.seconds for pack in packs for x in shares_of(balance([pack], 1, move="packs", cost=cost))]
    found = LayerCost.fit(packs, times)
    assert (found.token, found.pair, found.fixed) == pytest.approx((3e-6, 5e-11, 2e-3), rel=1e-6)


def test_fitting_takes_relative_errors() -> None:
    """The longest of 25 packs took three times as long as it should have: the short ones hardly move."""
    cost = LayerCost(1e-3, 1e-6, 1e-2)
    kinds = [(n, mode) for n in (100, 200, 400) for mode in ("causal", "full")]
    packs = [Pack((n,), (n,), (mode,)) for n, mode in (*kinds * 4, (9000, "full"))]
    times = [balance([pack], 1, cost=cost).seconds[0] for pack in packs]
    found = LayerCost.fit(packs, [*times[:-1], 3 * times[-1]])
    for pack, time in zip(packs[: len(kinds)], times, strict=False):
        assert balance([pack], 1, cost=found).seconds[0] == pytest.approx(time, rel=0.15)


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("pretrain/0", 95.61e-3),
        ("edit_only/1", 92.50e-3),
        ("t2i_lowres/0", 75.79e-3),
        ("finetune/2", 15.70e-3),
    ],
)
def test_the_default_is_the_measured_layer(name: str, measured: float) -> None:
    """Medians of BAGEL-7B's layer on an H200 without checkpointing: long and short packs, few and many pairs."""
    (share,) = shares_of(balance([workload(name)], 1))
    assert share.seconds == pytest.approx(measured, rel=0.01)


def test_rates_are_those_of_attention() -> None:
    """About 9.8 ms on the four pretrain packs, and nothing that no rate says."""
    rates = LayerCost.from_rates(28, 128, forward=739, backward=611, token=0)
    assert rates.seconds(36000, 125_560_000) == pytest.approx(9.8e-3, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks: got 0, expected at least 1"),
        ({"ranks": 3, "move": "packs"}, "packs: 4 do not divide among 3 ranks"),
        ({"ranks": 4, "move": "splits"}, "move: got 'splits'"),
        ({"ranks": 4, "capacity": 7000}, "capacity: 7000 tokens, but a sample has 7703"),
        ({"ranks": 4, "capacity": 7800}, "capacity: 11 samples of 32669 tokens do not fit 4 packs of 7800"),
    ],
)
def test_what_cannot_be_dealt(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(packs_of("finetune"), **arguments)  # type: ignore[arg-type]


SMALL = Pack((4,), (4,), ("causal",))


class NoTime(LayerCost):
    def seconds(self, tokens: int, pairs: int) -> float:
        return float("nan")


class OfTensors(LayerCost):
    def seconds(self, tokens: int, pairs: int) -> float:
        return torch.tensor(1.0)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("packs", "more", "message"),
    [
        (None, {}, "packs: got NoneType, expected a list of packs"),
        ("abc", {}, "packs: got str, expected a list of packs"),
        ([], {}, "packs: got none, expected at least one"),
        ([SMALL, "x"], {}, "packs: number 1 is a str without sample_lens; expected an object with"),
        ([([1], [1], ["causal"])], {}, "packs: number 0 is a tuple without sample_lens"),
        ([SMALL, None], {}, "packs: number 1 is a NoneType without sample_lens"),
        ([SMALL, Pack((-4,), (-4,), ("full",))], {}, "packs: number 1: sample_lens: entry 0 is -4"),
        ([SMALL, Pack((4,), (4,), ("text",))], {}, "packs: number 1: attn_modes: entry 0 is 'text'"),
        ([SMALL], {"ranks": None}, "ranks: got None, expected an integer"),
        ([SMALL], {"ranks": "2"}, "ranks: got '2', expected an integer"),
        ([SMALL], {"ranks": 2.0}, "ranks: got 2.0, expected an integer"),
        ([SMALL], {"ranks": -1}, "ranks: got -1, expected at least 1"),
        ([SMALL], {"ranks": 4, "move": "packs"}, "packs: 1 do not divide among 4 ranks; move='samples'"),
        ([SMALL], {"capacity": 2.5}, "capacity: got 2.5, expected an integer"),
        ([SMALL], {"cost": 3.0}, "cost: got float, expected a LayerCost or None"),
        ([SMALL], {"cost": lambda tokens, pairs: 1.0}, "cost: got <lambda>, expected a LayerCost or None"),
        (
            [SimpleNamespace(**vars(SMALL), used=4.0)],
            {},
            "packs: number 0: used: got 4.0, expected an integer",
        ),
        (
            [SMALL] * 2,
            {"cost": LayerCost(fixed=1e308)},
            "cost: the predicted times of all packs add up to more",
        ),
        ([SMALL], {"cost": LayerCost(token=1e308)}, r"cost: seconds\(4, 10\) gave inf, expected a finite"),
        (
            [Pack((2**600,), (2**600,), ("full",))],
            {},
            r"cost: seconds\(\d+, \d+\) gave inf, expected a finite",
        ),
        ([SMALL], {"cost": NoTime()}, r"cost: seconds\(\d+, \d+\) gave nan, expected a finite number"),
        ([SMALL], {"cost": OfTensors()}, r"cost: seconds\(\d+, \d+\) gave tensor\(1.\), expected a finite"),
    ],
)
def test_wrong_arguments_are_named(packs: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        balance(packs, **{"ranks": 1, **more})


def test_more_ranks_than_samples_leave_empty_packs() -> None:
    dealt = balance([SMALL, Pack((), (), ())], 3)
    assert [share.tokens for share in shares_of(dealt)] == [4, 0, 0]


class Quadratic(LayerCost):
    """A time that does not count pairs."""

    def seconds(self, tokens: int, pairs: int) -> float:
        return 1.0 + 1e-9 * tokens**2


def test_a_cost_of_ones_own_decides_how_samples_are_dealt() -> None:
    """By LayerCost's own prediction, which counts pairs, the causal samples are far cheaper."""
    packs = [
        Pack((900, 900), (900, 900), ("causal", "causal")),
        Pack((900, 900), (900, 900), ("full", "full")),
    ]
    dealt = balance(packs, 2, cost=Quadratic())
    assert dealt.ratio == 1.0
    assert {share.tokens for share in shares_of(dealt)} == {1800}
    lengths = Pack((1000, 10, 10, 10), (1000, 10, 10, 10), ("full",) * 4)
    split = balance([lengths], 2, cost=Quadratic(), capacity=2000)
    assert {share.tokens for share in shares_of(split)} == {30, 1000}


def test_times_of_nothing_are_balanced() -> None:
    for cost in (LayerCost(0.0, 0.0, 0.0), LayerCost()):
        dealt = balance([Pack((), (), ())], 2, cost=cost)
        assert dealt.ratio == dealt.lockstep_ratio == 1.0


def test_lengths_and_costs_of_numpy() -> None:
    """Sums of its int32 wrapped around, and times were float32."""
    large: Any = np.array([2**30, 2**30], dtype=np.int32)
    one: Any = np.float32(1.0)
    dealt = balance([Pack(large, large, ("full", "full"))], 2, cost=LayerCost(one, 0.0, 0.0))
    assert dealt.seconds == (2.0**30, 2.0**30)
    assert all(type(second) is float for second in dealt.seconds)


def test_times_that_tell_no_costs_are_refused() -> None:
    packs = packs_of("finetune")
    with pytest.raises(ValueError, match="seconds: 3 times of 4 packs"):
        LayerCost.fit(packs, [1, 2, 3])
    with pytest.raises(ValueError, match="do not differ enough"):
        LayerCost.fit(packs[:1] * 4, [1, 1, 1, 1])


def test_the_public_name_is_the_function() -> None:
    assert attnforge.bagel.balance is balance


@pytest.mark.parametrize("name", ["token", "pair", "fixed"])
@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf"), 10**400])
def test_costs_that_are_no_times_are_refused(name: str, value: float) -> None:
    """With negative ones, `balance` did not return."""
    with pytest.raises(
        ValueError, match=f"{name}: got {value} seconds, expected a finite number of at least 0"
    ):
        LayerCost(**{name: value})


def test_sizes_of_rates_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="heads_q: got -3, expected at least 1"):
        LayerCost.from_rates(-3, 128, forward=700.0, backward=500.0, token=0.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=f"forward: got {rate} TFLOP/s"):
        LayerCost.from_rates(28, 128, forward=rate, backward=500.0, token=0.0)


@pytest.mark.parametrize("second", [float("nan"), float("inf")])
def test_measured_times_are_finite(second: float) -> None:
    packs = [workload(name) for name in ("pretrain/0", "pretrain/1", "edit_only/0")]
    with pytest.raises(ValueError, match="expected a finite time above 0"):
        LayerCost.fit(packs, [1.0, second, 2.0])


def test_times_that_are_no_numbers_are_named() -> None:
    with pytest.raises(TypeError, match="token: got str, expected a number"):
        LayerCost("fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"token: got Tensor, expected a number; use token\.item\(\)"):
        LayerCost(token=torch.tensor(1e-6))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seconds: got str, expected a number"):
        LayerCost.fit([], ["1"])  # type: ignore[list-item]


def test_packs_may_be_an_iterator() -> None:
    packs = packs_of("finetune")
    assert balance(iter(packs), 2) == balance(packs, 2)
    measured = [workload(name) for name in ("pretrain/0", "finetune/1", "t2i_lowres/0", "edit_only/0")]
    times = [1.0, 0.4, 0.5, 1.1]
    assert LayerCost.fit(iter(measured), iter(times)) == LayerCost.fit(measured, times)
    with pytest.raises(TypeError, match="seconds: got float, expected a list of times"):
        LayerCost.fit(measured, 1.0)  # type: ignore[arg-type]
