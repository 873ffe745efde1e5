"""What a search tries next: a `Strategy` suggests specs, given the times of those that have been measured.

Compilers run in parallel, so that many specs are being compiled before the first time is known: a strategy suggests a
batch, and what it has suggested is out of its space, measured or not. docs/search.md compares them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Spec

FIRST = 8  # of the list are tried first by strategies that learn: near entries' kernels and the best guesses
TREES = 100  # of a forest
LEADERS = 3  # of which `greedy` looks for neighbours

Times = Mapping[Spec, float]  # milliseconds of measured specs, infinite for those that failed
Numbers = NDArray[np.float64]


class Strategy(Protocol):
    """Chooses from a space of specs, each at most once."""

    def suggest(self, times: Times, count: int) -> list[Spec]:
        """The next `count` specs, fewer only where the space ends."""
        ...


class _FromList:
    """A space as a list, of which `take` removes; knobs as rows of numbers."""

    def __init__(self, space: Sequence[Spec], seed: int = 0) -> None:
        self.space = tuple(space)
        self.knobs: Numbers = np.array([list(spec.tuning.to_json().values()) for spec in space], dtype=float)
        self.left = np.ones(len(self.space), dtype=bool)
        self.random = random.Random(seed)
        self._index = {spec: number for number, spec in enumerate(self.space)}

    def take(self, number: int) -> Spec:
        """Remove and return a spec by its number in the list."""
        self.left[number] = False
        return self.space[number]

    def first_left(self) -> int:
        """The number of the first spec that is left."""
        return int(np.argmax(self.left))

    def measured(self, times: Times) -> list[tuple[int, float]]:
        """(number, milliseconds) of the specs that have been measured, fastest first."""
        known = ((self._index[spec], ms) for spec, ms in times.items() if spec in self._index)
        return sorted(known, key=lambda one: one[1])

    def suggest(self, times: Times, count: int) -> list[Spec]:
        """As `Strategy.suggest`, spec by spec."""
        count = min(count, int(self.left.sum()))
        return [self.take(number) for number in self.choose(times, count)] if count else []

    def choose(self, times: Times, count: int) -> Sequence[int]:
        """Numbers of `count` different specs that are left; there are as many."""
        raise NotImplementedError

    def distances(self, number: int) -> Numbers:
        """From every spec to one of them: how many knobs differ."""
        return np.asarray((self.knobs != self.knobs[number]).sum(1), dtype=float)

    def near(self, measured: list[tuple[int, float]], count: int) -> list[int]:
        """Numbers of the `count` specs left that are nearest to the fastest ones, or to the first of the list."""
        leaders = [number for number, ms in measured if ms < math.inf][:LEADERS] or [0]
        # A changed knob counts 1; to be near the second or third best instead of the best counts half as much each.
        distances = [self.distances(number) + rank / 2 for rank, number in enumerate(leaders)]
        far: Numbers = np.asarray(np.min(distances, axis=0), dtype=float)
        # A value that nothing tried has may go only with other changes. They count like one to the second best.
        for number in self.nearest_of_new_values(far):
            far[number] = min(far[number], 1.5)
        # At the same distance a random one is taken: the knobs of the list's next one vary slowly.
        noise = np.array([self.random.random() for _ in self.space]) / 4
        chosen = np.argsort(np.where(self.left, far + noise, math.inf), kind="stable")
        return [int(number) for number in chosen[:count]]

    def nearest_of_new_values(self, far: Numbers) -> Iterator[int]:
        """For each value of a knob that no spec taken so far has: the number of that spec with it that is nearest."""
        for column in self.knobs.T:
            for value in np.setdiff1d(column, column[~self.left]):
                yield int(np.argmin(np.where(column == value, far, math.inf)))


class Exhaustive(_FromList):
    """The list in its order."""

    def choose(self, times: Times, count: int) -> Sequence[int]:
        return [int(number) for number in np.flatnonzero(self.left)[:count]]


class Random(_FromList):
    """The list in random order."""

    def choose(self, times: Times, count: int) -> Sequence[int]:
        return self.random.sample(np.flatnonzero(self.left).tolist(), count)


class Alternate(_FromList):
    """By turns the first of the list and the spec that is nearest to the best so far."""

    def __init__(self, space: Sequence[Spec], seed: int = 0) -> None:
        super().__init__(space, seed)
        self.turn = 0

    def choose(self, times: Times, count: int) -> Sequence[int]:
        best = next((number for number, ms in self.measured(times) if ms < math.inf), None)
        chosen: list[int] = []
        for _ in range(count):
            self.turn += 1
            number = self.first_left()
            if best is not None and self.turn % 2 == 0:
                number = int(np.argmin(np.where(self.left, self.distances(best), math.inf)))
            self.left[number] = False
            chosen.append(number)
        return chosen


class _Guided(_FromList):
    """The first guesses of the list, then what `rank` says; while nothing works, the list."""

    def choose(self, times: Times, count: int) -> Sequence[int]:
        head = [int(number) for number in np.flatnonzero(self.left[:FIRST])][:count]
        if len(head) == count:
            return head
        self.left[head] = False
        return [*head, *self.rank(self.measured(times), count - len(head))]

    def rank(self, measured: list[tuple[int, float]], count: int) -> Sequence[int]:
        """Numbers of `count` different specs that are left, given what has been measured, fastest first."""
        raise NotImplementedError


class Greedy(_Guided):
    """Coordinate descent: specs that differ in one knob from one of the leaders, the best one's neighbours first."""

    def rank(self, measured: list[tuple[int, float]], count: int) -> Sequence[int]:
        return self.near(measured, count)


class _Modelled(_Guided):
    """Chooses each spec by a model of the times that is drawn anew: specs on which models disagree are tried, too."""

    def rank(self, measured: list[tuple[int, float]], count: int) -> Sequence[int]:
        known = [(number, ms) for number, ms in measured if ms < math.inf]
        if len(known) < FIRST:
            return self.near(measured, count)
        slowest = known[-1][1]  # failures count as slow
        rows = [number for number, _ in measured]
        logs = np.log([min(ms, slowest) for _, ms in measured])
        open_ = np.flatnonzero(self.left)
        chosen: list[int] = []
        for prediction in self.predict(rows, logs, open_, count):
            prediction = prediction.copy()
            prediction[np.isin(open_, chosen)] = math.inf
            chosen.append(int(open_[int(np.argmin(prediction))]))
        return chosen

    def predict(self, rows: list[int], logs: Numbers, wanted: NDArray[Any], count: int) -> Sequence[Numbers]:
        """`count` predictions of the specs numbered `wanted`, from logarithms of the times of the specs `rows`."""
        raise NotImplementedError


class Additive(_Modelled):
    """A factor for each value of each knob (Bayesian linear regression), drawn anew for each choice."""

    def __init__(self, space: Sequence[Spec], seed: int = 0) -> None:
        super().__init__(space, seed)
        columns = [column == value for column in self.knobs.T for value in np.unique(column)]
        self.features: Numbers = np.array([np.ones(len(space)), *columns], dtype=float).T
        self.draw = np.random.default_rng(seed)

    def predict(self, rows: list[int], logs: Numbers, wanted: NDArray[Any], count: int) -> Sequence[Numbers]:
        x, mean = self.features[rows], logs.mean()
        spread = max(float(logs.std()), 1e-3)
        # Factors are as large as the spread of the times a priori, what they leave unexplained a third of it.
        noise, prior = (spread / 3) ** 2, spread**2
        covariance = np.linalg.inv(x.T @ x / noise + np.eye(x.shape[1]) / prior)
        weights = covariance @ x.T @ (logs - mean) / noise
        drawn = self.draw.multivariate_normal(weights, covariance, count, method="cholesky")
        return list(drawn @ self.features[wanted].T)


class Forest(_Modelled):
    """A random forest (scikit-learn, extra `search`), of which each choice uses a tenth of the trees."""

    def __init__(self, space: Sequence[Spec], seed: int = 0) -> None:
        super().__init__(space, seed)
        try:
            from sklearn.ensemble import RandomForestRegressor
        except ImportError:
            raise Infeasible(
                "strategy forest: takes scikit-learn; pip install 'attnforge[search]', or another strategy"
            ) from None
        self.forest: Any = RandomForestRegressor(TREES, random_state=seed, max_features=0.7)

    def predict(self, rows: list[int], logs: Numbers, wanted: NDArray[Any], count: int) -> Sequence[Numbers]:
        self.forest.fit(self.knobs[rows], logs)
        each = np.array([tree.predict(self.knobs[wanted]) for tree in self.forest.estimators_])
        return [each[self.random.sample(range(TREES), TREES // 10)].mean(0) for _ in range(count)]


STRATEGIES: dict[str, Callable[[Sequence[Spec], int], Strategy]] = {
    "additive": Additive,
    "alternate": Alternate,
    "exhaustive": Exhaustive,
    "forest": Forest,
    "greedy": Greedy,
    "random": Random,
}
DEFAULT = "greedy"
UNGUIDED = ("exhaustive", "random")  # do not look at times
