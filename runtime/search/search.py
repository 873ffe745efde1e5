"""The search: candidates -> parallel compilation -> verification -> timing -> log; yields events."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from os import sched_getaffinity
from pathlib import Path
from statistics import median
from typing import Any

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import RenderError, Source, render
from attnforge.codegen.space import candidates, deterministic_candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, Spec
from attnforge.runtime import choosing, fitting
from attnforge.runtime.build.cache import Entry, obtain
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.dispatch import Target, check_dtype, choose_for
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.conditions import Summary, watch
from attnforge.runtime.search.journal import Journal, Result, environment, source_key
from attnforge.runtime.search.strategies import DEFAULT, STRATEGIES, UNGUIDED
from attnforge.runtime.search.timing import Effort, Timing, effort, final_effort
from attnforge.runtime.search.worker import Worker

NEAR = 4  # kernels of the nearest entries that a search tries first
MOST_WORKERS = 32  # parallel compilations: each needs some hundred MB
LOST = 1.5  # a variant this many times slower than the best is timed once
# The leaders that are timed again, interleaved: how many at most, and how far from the best if noise does not widen
# that. A sole leader is, too.
FINALISTS, FINAL_MARGIN = 4, 1.1
# Of the budget's seconds, and seconds without such a budget: for the last timing of slow leaders.
FINAL_SHARE, FINAL_SECONDS = 0.1, 20.0
NOISE = 1.1  # how far leaders may move against each other when they are timed again; beyond, the machine was not quiet
DRIFT = 1.25  # how far all of them may move together


@dataclass(frozen=True)
class Budget:
    """When to stop: after this many seconds of this run, or this many variants, including resumed ones.

    The time that the measuring process takes to start and to prepare the case does not count, nor, with `alone`, the
    last timing of the leaders.
    """

    seconds: float | None = None
    variants: int | None = None
    alone: bool = False  # the leaders are timed again each alone, not interleaved


@dataclass(frozen=True)
class Scope:
    """Where to look and in which order: the values that knobs may have (of others all), and the strategy's name."""

    values: Mapping[str, frozenset[int]] = field(default_factory=dict)
    strategy: str = DEFAULT

    def allows(self, spec: Spec) -> bool:
        """Whether the values of the spec's knobs are among those."""
        knobs = spec.tuning.to_json()
        return all(knobs[name] in allowed for name, allowed in self.values.items())


@dataclass(frozen=True)
class Started:
    """The search of one (case, direction) begins: `planned` variants of a space of `space`."""

    case: Case
    direction: Direction
    space: int
    planned: int
    varying: tuple[str, ...] = ()  # knobs that are not the same in the whole space


@dataclass(frozen=True)
class Measured:
    """One variant is done; `resumed` if its result is from the log of an earlier run."""

    result: Result
    resumed: bool


@dataclass(frozen=True)
class Finished:
    """The end: verified results, fastest first, and the failures.

    The first `finalists` were timed again, interleaved with each other or each `alone`, and have the times of that
    timing. The others have the times of their trials, multiplied by the median factor by which the finalists' times
    changed.
    """

    case: Case
    direction: Direction
    ranked: tuple[Result, ...]
    failed: tuple[Result, ...]
    seconds: float
    finalists: int = 0
    space: int = 0  # variants that there are
    conditions: Summary = field(default_factory=Summary)
    alone: bool = False

    @property
    def winner(self) -> Result | None:
        return self.ranked[0] if self.ranked else None

    @property
    def tried(self) -> int:
        """Variants that were measured or failed."""
        return len(self.ranked) + len(self.failed)

    @property
    def tied(self) -> int:
        """Finalists after the winner whose intervals overlap its own: their order may be chance."""
        if self.winner is None:
            return 0
        return sum(0 < r.low_ms <= self.winner.high_ms for r in self.ranked[1 : self.finalists])


Event = Started | Measured | Finished


def search(
    case: Case,
    direction: Direction,
    target: tuple[Arch, str],
    budget: Budget,
    log_path: Path | None = None,
    workers: int | None = None,
    scope: Scope | None = None,
    worker: Worker | None = None,
) -> Generator[Event, None, None]:
    """Search the kernels of one case; `target` is (architecture, device name).

    worker: a measuring process, for callers that run several searches, since starting one takes seconds. The caller
    closes it.

    For a deterministic case the search tries kernels that sum in a fixed order only.

    A variant that fails is a result. Raises ValueError for a dtype that the target has no kernels for, for the forward
    of a deterministic case (every forward is deterministic), and for a `scope` with an unknown knob or strategy;
    Infeasible if no kernel can compute the problem; NoCompilerError, CacheError, and RuntimeError if the measurement
    cannot be prepared.
    """
    workers = workers or min(MOST_WORKERS, len(sched_getaffinity(0)))
    run = _Run(case, direction, target, budget, log_path, workers, scope or Scope(), worker)
    facts = {"space": run.space, "planned": run.planned, "strategy": run.scope.strategy}
    run.journal.note("search", {**facts, "incumbent": run.incumbent.to_json()})
    yield Started(case, direction, run.space, run.planned, run.varying)
    try:
        yield from run.measure()
        finished = run.finish()
        leaders = [result.to_json() for result in finished.ranked[: finished.finalists]]
        run.journal.note("final", {"results": leaders, "warnings": list(finished.conditions.warnings)})
        yield finished
    finally:
        run.close()


class _Run:
    """State of one search."""

    def __init__(
        self,
        case: Case,
        direction: Direction,
        target: tuple[Arch, str],
        budget: Budget,
        log_path: Path | None,
        workers: int,
        scope: Scope,
        worker: Worker | None,
    ) -> None:
        arch, device_name = target
        problem = case.problem(direction, arch)
        check_dtype(problem)
        self.case, self.direction, self.budget, self.scope = case, direction, budget, scope
        if case.deterministic and direction is Direction.FORWARD:
            raise ValueError(f"{case.name}: the forward always is; search the backward")
        found = deterministic_candidates(problem) if case.deterministic else candidates(problem)
        space = _with_incumbent(list(found), case, device_name)
        if not space:
            raise Infeasible(f"{case.name}: no kernel can do it: {why_infeasible(problem)}")
        self.incumbent = space[0]
        space = _allowed(space, scope)
        self.space = len(space)
        self.varying = varying_knobs(space)
        self.planned = min(self.space, budget.variants or self.space)
        if scope.strategy not in STRATEGIES:
            raise ValueError(f"strategy: got {scope.strategy!r}, expected one of {', '.join(STRATEGIES)}")
        self.strategy = STRATEGIES[scope.strategy](space, 0)
        self.journal = Journal(log_path, case.name, direction.value, environment(device_name, arch))
        self.worker, self.lent = worker or Worker(), worker is not None
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self.results: list[Result] = []
        self.conditions = watch(case.device)
        self.worker.prepare(case, direction)
        self.begun = self.started = time.monotonic()  # `started` moves on by waits for a process
        self.waited = False
        self.taken = 0
        # On the CPU the compilers would disturb the timing: a batch is compiled, then measured.
        self.batches = not arch.is_gpu
        # Specs that are being compiled were chosen without the latest times. A strategy that uses times therefore
        # suggests few at once.
        ahead = 2 * workers if scope.strategy in UNGUIDED and not self.batches else workers
        self.lookahead, self.refill = ahead, 0 if self.batches else ahead // 2

    def close(self) -> None:
        self.conditions.close()
        (self.worker.release if self.lent else self.worker.close)()
        self.pool.shutdown(wait=True, cancel_futures=True)

    @property
    def best(self) -> Result | None:
        return min((r for r in self.results if r.status == "ok"), key=lambda r: r.ms, default=None)

    def expired(self) -> bool:
        """Whether the time is up, but for the last timing of slow leaders; never before one variant works."""
        limit, best = self.budget.seconds, self.best
        if limit is None or best is None:
            return False
        return time.monotonic() - self.started > limit - self.reserved(best.ms)

    def final(self, leaders: int) -> Effort:
        """How to time so many leaders at the end."""
        seconds = self.budget.seconds
        whole = FINAL_SECONDS if seconds is None else FINAL_SHARE * seconds
        return replace(final_effort(self.case.device, whole / leaders), alone=self.budget.alone)

    def reserved(self, ms: float) -> float:
        """Seconds that FINALISTS calls of `ms` take at the end beyond those of `effort`; 0 for short calls."""
        more = self.final(FINALISTS).count(ms) - effort(self.case.device).count(ms)
        return FINALISTS * more * ms / 1e3

    def measure(self) -> Iterator[Event]:
        """Keep compilers busy and measure what they have compiled, until the budget or the space ends."""
        compiling: dict[Future[Entry], Source] = {}
        while True:
            taken = self.take(self.lookahead - len(compiling)) if len(compiling) <= self.refill else []
            for spec in taken:
                source = self.render(spec)
                if isinstance(source, Result):
                    yield Measured(source, resumed=False)
                elif (known := self.journal.find(source_key(source.text))) is not None:
                    self.results.append(known)
                    yield Measured(known, resumed=True)
                else:
                    compiling[self.pool.submit(obtain, source)] = source
            if not compiling:
                if taken:
                    continue  # all of them had been measured before, or cannot be rendered
                return
            done, _ = wait(compiling, return_when=ALL_COMPLETED if self.batches else FIRST_COMPLETED)
            self.await_worker()
            for future in done:
                source = compiling.pop(future)
                if self.expired() and source.spec != self.incumbent:
                    continue  # a winner is never kept without a comparison with what runs today
                result = self.trial(source, future)
                self.results.append(result)
                self.journal.add(source_key(source.text), result)
                yield Measured(result, resumed=False)

    def await_worker(self) -> None:
        """Wait for a process that starts or prepares the case. That does not take from the budget."""
        if self.expired():
            return
        begin = time.monotonic()
        ready_at = self.worker.ready_at()
        waited = time.monotonic() - begin
        self.started = self.started + waited if self.waited else max(self.started, ready_at)
        self.waited = True

    def take(self, count: int) -> list[Spec]:
        """The next specs, at most so many, none if the budget is spent."""
        if self.expired():
            return []
        times = {r.spec: r.ms if r.status == "ok" else math.inf for r in self.results}
        taken = self.strategy.suggest(times, min(count, self.planned - self.taken))
        self.taken += len(taken)
        return taken

    def render(self, spec: Spec) -> Source | Result:
        try:
            return render(spec)
        except Infeasible as reason:
            result = Result(spec, "infeasible", str(reason))
        except RenderError as error:
            result = Result(spec, "render", str(error))
        self.results.append(result)
        return result

    def trial(self, source: Source, future: Future[Entry]) -> Result:
        """Outcome of a variant whose compilation has ended."""
        spec = source.spec
        try:
            entry = future.result()
        except CompileError as error:
            return Result(spec, "compile", str(error))
        best = self.best
        reference = next(((r.spec, r.ms) for r in self.results if r.status == "ok"), None)
        with self.conditions.watching():
            outcome = self.worker.trial(spec, LOST * best.ms if best else 0.0, reference)
        timing = outcome.timing
        result = Result(spec, outcome.status, outcome.detail, **_resources(source, entry))
        if timing is None:
            return result
        return self.timed(replace(result, errors=outcome.errors, limit_used=outcome.limit_used), timing)

    def tflops(self, ms: float) -> float:
        return self.case.flops(self.direction) / ms / 1e9

    def timed(self, result: Result, timing: Timing) -> Result:
        """The result with this timing in place of its own, if it has one."""
        return replace(
            result,
            ms=timing.median,
            low_ms=timing.low,
            high_ms=timing.high,
            best_ms=timing.best,
            repeats=timing.repeats,
            tflops=self.tflops(timing.median),
        )

    def scaled(self, result: Result, factor: float) -> Result:
        """The result with `factor` times its milliseconds."""
        ms = {name: getattr(result, name) * factor for name in ("ms", "low_ms", "high_ms", "best_ms")}
        return replace(result, **ms, tflops=self.tflops(ms["ms"]))

    def finish(self) -> Finished:
        """Rank the results; the leaders by a last timing, interleaved (drift affects all of them alike) or alone."""
        ranked = sorted((r for r in self.results if r.status == "ok"), key=lambda r: r.ms)
        leaders = [r for r in ranked[:FINALISTS] if _may_lead(r, ranked[0])]
        timings = None
        if leaders:
            with self.conditions.watching():
                timings = self.worker.compare([r.spec for r in leaders], self.final(len(leaders)))
        summary = self.conditions.summary()
        if timings is not None:
            again = [self.timed(*pair) for pair in zip(leaders, timings, strict=True)]
            changes = [after.ms / before.ms for before, after in zip(leaders, again, strict=True)]
            others = [self.scaled(r, median(changes)) for r in ranked[len(leaders) :]]
            ranked = sorted(again, key=lambda r: r.ms) + others
            noise = () if self.budget.alone else _noise(changes)
            summary = replace(summary, warnings=(*summary.warnings, *noise))
        return Finished(
            self.case,
            self.direction,
            tuple(ranked),
            tuple(r for r in self.results if r.status != "ok"),
            time.monotonic() - self.begun,
            len(leaders) if timings is not None else 0,
            self.space,
            summary,
            self.budget.alone,
        )


def watch_events(
    events: Iterable[Event], case: Case, direction: Direction, show: Callable[[Event], object] | None = None
) -> tuple[Finished, bool]:
    """Pass each event of a search to `show`. Returns the end of the search, and whether it was interrupted.

    After a KeyboardInterrupt the end is what was measured until then, ranked by the trials alone.
    """
    begin, space = time.monotonic(), 0
    results: list[Result] = []
    try:
        for event in events:
            if isinstance(event, Started):
                space = event.space
            elif isinstance(event, Measured):
                results.append(event.result)
            if show is not None:
                show(event)
            if isinstance(event, Finished):
                return event, False
    except KeyboardInterrupt:
        ranked = sorted((r for r in results if r.status == "ok"), key=lambda r: r.ms)
        failed = tuple(r for r in results if r.status != "ok")
        seconds = time.monotonic() - begin
        return Finished(case, direction, tuple(ranked), failed, seconds, space=space), True
    raise RuntimeError("the search ended without a result")


def _may_lead(result: Result, best: Result) -> bool:
    """Whether a variant is near the best of the trials, or noise leaves open which of the two is faster."""
    return result.ms <= FINAL_MARGIN * best.ms or 0 < result.low_ms <= best.high_ms


def _noise(changes: Sequence[float]) -> Iterator[str]:
    """A warning if the leaders' times, timed again, have not all changed alike, or all by much."""
    if max(changes) / min(changes) > NOISE:
        yield (
            f"timed again, leaders took from {min(changes):.2f} to {max(changes):.2f} times as long as at first: "
            "the machine was not quiet, and the ranking of the others may be wrong"
        )
    elif not 1 / DRIFT <= median(changes) <= DRIFT:
        yield (
            f"timed again, all leaders took {median(changes):.2f} times as long as at first: "
            "the machine's speed changed during the search"
        )


def varying_knobs(specs: Sequence[Spec]) -> tuple[str, ...]:
    """The knobs that are not the same in all specs, in their order."""
    if not specs:
        return ()
    rows = [spec.tuning.to_json() for spec in specs]
    return tuple(name for name in rows[0] if any(row[name] != rows[0][name] for row in rows))


def _with_incumbent(specs: list[Spec], case: Case, device_name: str) -> list[Spec]:
    """The present choice of the tuned tables goes first, so that a short search never replaces it by a slower one.

    For a deterministic case that is what dispatch makes of it.

    Next comes its twin with the other `split_heads`: which of the two is faster depends mostly on the mask. Then,
    unless the case is deterministic, the kernels of the next NEAR - 1 entries: one of them is often faster where the
    case has no entry of its own (docs/experiments.md, 119). All of these may be outside of `specs`: entries may be of
    another problem or another version's space.
    """
    if not specs:
        return specs
    call = case.call(specs[0].problem)
    specs = [fitting.without_sums(spec, call.group) for spec in specs]
    if call.deterministic:
        first = [choose_for(call, Target(device_name, (call.problem.arch,))).spec]
    else:
        choices = choosing.choose(call, device_name)
        first = choosing.different((choice.spec for choice in choices), NEAR) or specs[:1]
    knobs = first[0].tuning.to_json()
    if "split_heads" in knobs:
        with contextlib.suppress(Infeasible):
            twin = fitting.changed(first[0], {"split_heads": 1 - knobs["split_heads"]})
            first.insert(1, fitting.without_sums(twin, call.group))
    first = list(dict.fromkeys(first))
    return first + [spec for spec in specs if spec not in first]


def _allowed(specs: Sequence[Spec], scope: Scope) -> list[Spec]:
    """The specs that the scope allows. Raises ValueError for an unknown knob, Infeasible if no spec is left."""
    unknown = scope.values.keys() - specs[0].tuning.to_json().keys()
    if unknown:
        knobs = ", ".join(specs[0].tuning.to_json())
        raise ValueError(f"knob: there is no {', '.join(sorted(unknown))}; the knobs are {knobs}")
    allowed = [spec for spec in specs if scope.allows(spec)]
    if not allowed:
        given = ", ".join(f"{name}={','.join(map(str, sorted(v)))}" for name, v in scope.values.items())
        raise Infeasible(f"knob: no feasible variant has all of these values: {given}; allow more of them")
    return allowed


def _resources(source: Source, entry: Entry) -> dict[str, Any]:
    """Registers, spills and shared memory of the main kernel, and how long it took to compile."""
    main = entry.meta["resources"].get(source.spec.symbol, {})
    launch = next((one for one in source.plan.launches if one.symbol == source.spec.symbol), None)
    return {
        "registers": main.get("registers", 0),
        "spill_bytes": main.get("spill_bytes", 0),
        "shared_bytes": main.get("shared_bytes", 0) + (launch.shared_bytes if launch else 0),
        "compile_seconds": entry.meta["seconds"],
    }
