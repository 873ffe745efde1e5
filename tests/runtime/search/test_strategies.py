"""Strategies of a search, on times that are made up."""

from __future__ import annotations

import importlib.util
import math
import random
from itertools import product

import pytest

from attnforge.bagel.commands.search import STRATEGIES as NAMES
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.strategies import DEFAULT, FIRST, STRATEGIES, UNGUIDED, Strategy

PROBLEM = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
# 432 specs, feasible or not: of the four knobs that matter the best values stand in the middle of the list.
SPACE = [
    Spec(
        PROBLEM,
        Sm90Forward(128, tile_n, stages, bool(flag), True, True, False, 0, visits, heads),
    )
    for tile_n, stages, flag, visits, heads in product(
        (64, 80, 96, 112, 128, 144), (2, 3, 4), (0, 1), (0, 1, 2), (0, 2, 4, 8)
    )
]
SKLEARN = importlib.util.find_spec("sklearn") is not None


def time_of(spec: Spec) -> float:
    """Best, with 1.0: 112 keys, 3 stages, flag, 1 visit, 4 heads together. Some fail."""
    knobs = spec.tuning.to_json()
    if knobs["stages"] == 4 and knobs["tile_n"] > 112:
        return math.inf
    slow = (
        abs(knobs["tile_n"] - 112) / 300 + abs(knobs["stages"] - 3) * 0.03 + (1 - knobs["ping_pong"]) * 0.05
    )
    return 1.0 + slow + abs(knobs["exact_visits"] - 1) * 0.02 + abs(knobs["heads_together"] - 4) * 0.01


def strategy(name: str, seed: int = 0) -> Strategy:
    if name == "forest" and not SKLEARN:
        pytest.skip("takes scikit-learn")
    return STRATEGIES[name](SPACE, seed)


def evaluations(name: str, seed: int, batch: int = 8) -> int:
    """How many specs are measured until the best one is."""
    chosen, times = strategy(name, seed), dict[Spec, float]()
    while True:
        for spec in chosen.suggest(times, batch):
            times[spec] = time_of(spec)
            if times[spec] == 1.0:
                return len(times)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_suggested_once(name: str) -> None:
    chosen, times, count = strategy(name), dict[Spec, float](), 0
    while batch := chosen.suggest(times, 50):
        count += len(batch)
        assert len(batch) == min(50, len(SPACE) - len(times))
        assert len(set(batch)) == len(batch)
        assert not times.keys() & batch
        times |= {spec: time_of(spec) for spec in batch}
    assert count == len(SPACE)
    assert chosen.suggest(times, 1) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_failed_is_no_help_and_no_harm(name: str) -> None:
    chosen, times = strategy(name), dict[Spec, float]()
    for _ in range(4):
        times |= dict.fromkeys(chosen.suggest(times, 20), math.inf)
    assert len(times) == 80


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_its_way_is_not_suggested_again(name: str) -> None:
    chosen = strategy(name)
    first = chosen.suggest({}, 20)
    assert not {*first} & {*chosen.suggest({first[0]: 1.5}, 20)}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNGUIDED])
def test_first_guesses_come_first(name: str) -> None:
    assert strategy(name).suggest({}, 3) == SPACE[:3]
    assert name == "alternate" or {*SPACE[:FIRST]} <= {*strategy(name).suggest({}, 32)}


@pytest.mark.parametrize("name", ["greedy", "additive", "forest"])
def test_guided_strategies_need_a_tenth(name: str) -> None:
    """Of the evaluations, in the mean of some seeds; the list and chance need a half."""
    seeds = range(2 if name == "forest" else 10)
    assert sum(evaluations(name, seed) for seed in seeds) / len(seeds) <= len(SPACE) * 0.15
    assert evaluations("exhaustive", 0) > len(SPACE) / 2


def test_a_value_that_takes_other_changes_is_tried_early() -> None:
    """Like persistent blocks, which have room for fewer buffers: none differs from a leader in that knob alone."""
    space = [
        spec
        for spec in SPACE
        if not spec.tuning.to_json()["ping_pong"]
        or (spec.tuning.to_json()["stages"], spec.tuning.to_json()["tile_n"]) == (4, 144)
    ]
    chosen, times = STRATEGIES["greedy"](space, 0), dict[Spec, float]()
    for _ in range(3):
        times |= {spec: 1.0 + spec.tuning.to_json()["tile_n"] / 1000 for spec in chosen.suggest(times, FIRST)}
    assert not any(spec.tuning.to_json()["ping_pong"] for spec in space[:FIRST])
    assert any(spec.tuning.to_json()["ping_pong"] for spec in times)


def test_seeds_change_random_choices() -> None:
    orders = {tuple(STRATEGIES["random"](SPACE, seed).suggest({}, 5)) for seed in range(3)}
    assert len(orders) == 3
    assert STRATEGIES["random"](SPACE, 1).suggest({}, 5) == STRATEGIES["random"](SPACE, 1).suggest({}, 5)


def test_names() -> None:
    """The command line knows all of them, without importing them."""
    assert list(STRATEGIES) == list(NAMES)
    assert DEFAULT in NAMES


@pytest.mark.skipif(SKLEARN, reason="scikit-learn is there")
def test_a_missing_library_is_named() -> None:
    with pytest.raises(Infeasible, match=r"pip install 'attnforge\[search\]'"):
        STRATEGIES["forest"](random.sample(SPACE, 3), 0)


def test_alternate_takes_the_first_of_the_list_and_the_nearest_to_the_best_in_turns() -> None:
    chosen = strategy("alternate")
    assert chosen.suggest({}, 1) == [SPACE[0]]
    best = SPACE[200]
    near, first = chosen.suggest({SPACE[0]: 2.0, best: 1.0}, 2)
    assert sum(near.tuning.to_json()[name] != value for name, value in best.tuning.to_json().items()) <= 1
    assert first == SPACE[1]
