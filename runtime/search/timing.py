"""Timing of calls on their device: events on CUDA, the wall clock on the CPU; medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

Call = Callable[..., Any]

CONFIDENCE = 0.95  # of intervals
# Samples of each leader: of four that are 1 % apart, 86 % of simulations find the fastest, and 60 % with 3 samples.
ENOUGH = 21


@dataclass(frozen=True)
class Timing:
    """Milliseconds of `repeats` timed calls. `low` to `high`: the interval of the median (`ranks`)."""

    median: float
    best: float
    worst: float
    repeats: int
    low: float = 0.0  # both 0: not known
    high: float = 0.0

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """The timing of at least one sample, in milliseconds."""
        ordered = sorted(samples)
        low, high = ranks(len(ordered))
        middle = statistics.median(ordered)
        return Timing(middle, ordered[0], ordered[-1], len(ordered), ordered[low], ordered[high])


@cache
def ranks(count: int) -> tuple[int, int]:
    """Indices of the sorted samples between which the median lies with 95 % confidence, whatever its distribution.

    Fewer than 6 samples cannot give that confidence: then these are the first and the last, with 1 - 2 ** (1 - count).
    """
    from scipy.stats import binom  # a second, which calls of `attention` need not spend

    low = max(int(binom.ppf((1 - CONFIDENCE) / 2, count, 0.5)) - 1, 0)
    return low, count - 1 - low


@dataclass(frozen=True)
class Effort:
    """How long to measure: `seconds` of timed calls, but between `least` and `repeats` of them.

    Of slow calls up to `enough` are timed, as many as `patience` seconds allow. If the first timed call is slower than
    `give_up_ms` (0: no limit), it is the only one. `alone`: leaders are timed by `measure_alone` instead.
    """

    seconds: float = 0.3
    repeats: int = 50
    least: int = 3
    give_up_ms: float = 0.0
    warmups: int = 1
    enough: int = 0
    patience: float = 0.0
    alone: bool = False

    def count(self, first_ms: float) -> int:
        """Number of timed calls, given that the first took `first_ms`."""
        if self.give_up_ms and first_ms > self.give_up_ms:
            return 1
        ms = max(first_ms, 1e-3)
        fitting = max(int(self.seconds * 1e3 / ms), int(min(self.enough, self.patience * 1e3 / ms)))
        return max(self.least, min(self.repeats, fitting))


def effort(device: torch.device) -> Effort:
    """Enough for a stable median; CPUs need seconds where GPUs need milliseconds."""
    return Effort(seconds=2.0, repeats=9) if device.type == "cpu" else Effort()


def final_effort(device: torch.device, patience: float) -> Effort:
    """For leaders, which differ by a few percent: `ENOUGH` of each even if they are slow, in `patience` seconds each.

    Calls that take less than `effort`'s seconds / ENOUGH, 14 ms on a GPU, are timed as often as by `effort`. None is
    timed more often than its `repeats`, which are 9 on a CPU.
    """
    return replace(effort(device), enough=ENOUGH, patience=patience)


def rotations(tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    """Number of copies of the inputs to rotate through, so that the L2 cache does not hold the next one."""
    if device.type != "cuda":
        return 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(8, max(1, -(-2 * cache // max(size, 1))))


def rotate(tensors: tuple[torch.Tensor, ...], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """`tensors` and copies of them with the same strides, `rotations` in all."""
    copies = rotations(tensors, device) - 1
    return [tensors, *(tuple(map(torch.clone, tensors)) for _ in range(copies))]


def measure(
    call: Call, inputs: Sequence[tuple[Any, ...]], device: torch.device, how: Effort | None = None
) -> Timing:
    """Time `call(*inputs[n % len(inputs)])`."""
    return measure_interleaved({"": call}, inputs, device, how)[""]


def measure_interleaved(
    calls: Mapping[str, Call],
    inputs: Sequence[tuple[Any, ...]],
    device: torch.device,
    how: Effort | None = None,
) -> dict[str, Timing]:
    """Time several calls interleaved, so that drifts of clock and load affect all of them.

    Every turn has an order of its own (the same in every run): no call always follows the same other one, whose
    power draw and cache contents it would inherit.
    """
    samples, how = {}, how or effort(device)
    for name, call in calls.items():
        samples[name] = _first(call, inputs, device, how)
    counts = {name: how.count(times[0]) for name, times in samples.items()}
    _more_turns(calls, samples, counts, inputs, device)
    return {name: Timing.of(times) for name, times in samples.items()}


def measure_alone(
    calls: Mapping[str, Call],
    inputs: Sequence[tuple[Any, ...]],
    device: torch.device,
    seconds: float = 0.4,
    turns: int = 4,
) -> dict[str, Timing]:
    """Time each call alone: repeated for `seconds` in each of `turns`, of which the second half counts.

    Then its own power decides the clock of a GPU at its limit of power; calls that take turns one by one share a clock.
    Turns have an order and its reverse, as a call begins with the power and temperature of the one before. A sample is
    the mean of a turn.
    """
    counts = {}
    for name, call in calls.items():
        ms = max(_first(call, inputs, device, Effort())[0], 1e-3)
        counts[name] = min(max(2, int(seconds * 1e3 / ms)), 10_000)
    names, samples = list(calls), dict[str, list[float]]()
    for turn in range(turns):
        for name in reversed(names) if turn % 2 else names:
            count = counts[name]
            times = _run([calls[name]] * count, [inputs[n % len(inputs)] for n in range(count)], device)
            samples.setdefault(name, []).append(statistics.fmean(times[count // 2 :]))
    return {name: Timing.of(samples[name]) for name in names}


def measure_against(
    call: Call,
    reference: Call,
    reference_ms: float,
    inputs: Sequence[tuple[Any, ...]],
    device: torch.device,
    how: Effort | None = None,
) -> Timing:
    """Time `call` in turns with `reference`, in milliseconds of a device on which that takes `reference_ms`.

    Each sample is the ratio of the two times of a turn, times `reference_ms`: calls that were timed at different
    moments against one reference can be compared, although a GPU's clock changes with its temperature and power.
    """
    how = how or effort(device)
    calls = {"call": call, "reference": reference}
    samples = {name: _first(one, inputs, device, how) for name, one in calls.items()}
    turns = how.count(samples["call"][0])
    _more_turns(calls, samples, dict.fromkeys(calls, turns), inputs, device)
    pairs = list(zip(samples["call"], samples["reference"], strict=True))
    # The first turn is not one: between the two calls the device waited for the host.
    return Timing.of([mine / other * reference_ms for mine, other in pairs[1:] or pairs])


def _first(call: Call, inputs: Sequence[tuple[Any, ...]], device: torch.device, how: Effort) -> list[float]:
    """Warm up, then time one call."""
    if how.warmups:
        _run([call] * how.warmups, [inputs[0]] * how.warmups, device)
    return _run([call], [inputs[-1]], device)


def _more_turns(
    calls: Mapping[str, Call],
    samples: Mapping[str, list[float]],
    counts: Mapping[str, int],
    inputs: Sequence[tuple[Any, ...]],
    device: torch.device,
) -> None:
    """Append to `samples`, which hold one each, until there are as many as `counts` says."""
    mixer = random.Random(0)
    order = [
        name
        for turn in range(1, max(counts.values()))
        for name in mixer.sample(list(calls), len(calls))
        if turn < counts[name]
    ]
    turns = dict.fromkeys(calls, 0)
    arguments = []
    for name in order:
        arguments.append(inputs[turns[name] % len(inputs)])
        turns[name] += 1
    for name, ms in zip(order, _run([calls[name] for name in order], arguments, device), strict=True):
        samples[name].append(ms)


def _run(calls: Sequence[Call], arguments: Sequence[tuple[Any, ...]], device: torch.device) -> list[float]:
    """Milliseconds of each call, made one after the other."""
    return (_run_cuda if device.type == "cuda" else _run_cpu)(calls, arguments, device)


def _run_cpu(calls: Sequence[Call], arguments: Sequence[tuple[Any, ...]], _: torch.device) -> list[float]:
    times = []
    for call, args in zip(calls, arguments, strict=True):
        start = time.perf_counter()
        call(*args)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _run_cuda(
    calls: Sequence[Call], arguments: Sequence[tuple[Any, ...]], device: torch.device
) -> list[float]:
    """All calls are queued behind a short sleep, so that the device never waits for the host."""
    pairs = []
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(10_000_000)  # about five milliseconds
        for call, args in zip(calls, arguments, strict=True):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            call(*args)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]
