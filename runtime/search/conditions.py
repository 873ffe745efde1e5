"""What may spoil a timing: other processes, and a GPU that slows itself down. Read while variants are timed."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

log = logging.getLogger("attnforge")

SECONDS = 0.1  # between two readings of a GPU
AT_REST = 0.2  # seconds for which a CPU is watched before a search runs anything
GPU_AT_REST = 1.1  # NVML's share of busy time is that of the last second at most
BUSY_CPUS = 0.25  # of other processes, from which a CPU's timing is doubtful
BUSY_GPU = 5  # percent, likewise
OFTEN = 0.05  # of the readings
SLOWDOWNS = {  # NVML's names of the reasons that a sound machine does not have
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "heat",
    "SwThermalSlowdown": "heat",
    "HwPowerBrakeSlowdown": "an external power brake",
}
POWER_CAP = "SwPowerCap"


@dataclass(frozen=True)
class Summary:
    """The conditions of a run: facts in words by name, and what spoils it, one sentence each.

    Entries of tuned tables record `facts` and warnings. `load` is what else ran at the time: it is shown, but says
    nothing about a measurement that it did not spoil.
    """

    facts: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    load: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> dict[str, str]:
        """All facts, for reports."""
        return {**self.facts, **self.load}


class Conditions(Protocol):
    """Watches one device."""

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Watch while the block runs."""

    def summary(self) -> Summary:
        """What all blocks saw."""

    def close(self) -> None:
        """Watch no more."""


def watch(device: torch.device) -> Conditions:
    """The conditions of a device. Call it before the search runs anything: it first reads what other processes use."""
    return GpuConditions(nvml_of(device)) if device.type == "cuda" else CpuConditions()


# ---- A CPU


class CpuConditions:
    """CPU time of other processes, from /proc: that of all less that of this process and its children."""

    def __init__(self, ticks: Callable[[], tuple[float, float]] | None = None) -> None:
        self._ticks = ticks or cpu_seconds
        self._used = self._elapsed = 0.0
        with self._window():
            time.sleep(AT_REST)
        self._before = self._used / max(self._elapsed, 1e-9)
        self._used = self._elapsed = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        with self._window():
            yield

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        (total, own), begin = self._ticks(), time.monotonic()
        try:
            yield
        finally:
            total_after, own_after = self._ticks()
            self._used += max(0.0, (total_after - total) - (own_after - own))
            self._elapsed += time.monotonic() - begin

    def summary(self) -> Summary:
        """CPUs that other processes used on average, before and while variants were timed."""
        during = self._used / self._elapsed if self._elapsed else 0.0
        count = len(os.sched_getaffinity(0))
        load = {"other processes": f"{self._before:.1f} of {count} CPUs before, {during:.1f} while timing"}
        worst = max(self._before, during)
        if worst < BUSY_CPUS:
            return Summary(load=load)
        when = "while variants were timed" if during >= BUSY_CPUS else "before the search"
        return Summary({}, (f"other processes used {worst:.1f} of {count} CPUs {when}",), load)

    def close(self) -> None:
        """Nothing is left open."""


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds so far of all processes of the machine, and of this one with its children."""
    tick = os.sysconf("SC_CLK_TCK")
    words = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]  # guests are in user and nice
    user, nice, system, _, _, irq, softirq, _ = map(int, words)
    children = (child.pid for child in multiprocessing.active_children())
    own = sum(_ticks_of(pid) for pid in (os.getpid(), *children) if pid is not None)
    return (user + nice + system + irq + softirq) / tick, own / tick


def _ticks_of(pid: int) -> int:
    """Clock ticks of a process and of its children that have ended; 0 if it has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))


# ---- A GPU


@dataclass(frozen=True)
class Reading:
    """One look at a GPU. `others`: process ids that are not ours; None if they cannot be told apart."""

    clock: int  # MHz, of the multiprocessors
    reasons: tuple[str, ...] = ()  # NVML's names, for not running at the highest clock
    others: frozenset[int] | None = frozenset()
    busy: int = 0  # percent of the time
    driver: str = ""  # its version


Read = Callable[[], Reading]


class GpuConditions:
    """Clocks, reasons for low clocks, and other processes, read by NVML in a thread while a block runs."""

    def __init__(self, read: Read | str, rest: float = GPU_AT_REST) -> None:
        """`read`: gives one reading, or says why there is none. `rest`: seconds to wait before the first."""
        self._read = read
        self._readings: list[Reading] = []
        self._on, self._stop = threading.Event(), threading.Event()
        self._before: Reading | None = None
        if isinstance(read, str):
            return
        time.sleep(rest)
        self._before = read()
        self._thread = threading.Thread(target=self._sample, args=(read,), daemon=True)
        self._thread.start()

    def _sample(self, read: Read) -> None:
        while not self._stop.is_set():
            if not self._on.wait(SECONDS):
                continue
            self._look(read)
            self._stop.wait(SECONDS)

    def _look(self, read: Read) -> None:
        try:
            self._readings.append(read())
        except Exception as error:  # the search goes on without this reading
            log.debug("NVML: %s", error)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if not isinstance(self._read, str):
            self._thread.join()

    def summary(self) -> Summary:
        """Clocks and what lowered them, and other processes."""
        if isinstance(self._read, str):
            return Summary({"clocks": f"not read: {self._read}"})
        return judge(self._before, self._readings)


def judge(before: Reading | None, readings: Sequence[Reading]) -> Summary:
    """Facts and warnings of the readings of a GPU, `before` from when the search ran nothing."""
    facts: dict[str, str] = {}
    warnings: list[str] = []
    if before is not None and before.busy >= BUSY_GPU:
        warnings.append(f"the GPU was {before.busy} % busy before the search")
    if not readings:
        return Summary(facts, tuple(warnings))
    if driver := readings[0].driver:
        facts["driver"] = driver
    clocks = [reading.clock for reading in readings]
    facts["clocks"] = f"{median(clocks):.0f} MHz ({min(clocks)} to {max(clocks)})"
    counts = Counter(reason for reading in readings for reason in set(reading.reasons))
    if counts[POWER_CAP]:
        facts["power cap"] = f"{counts[POWER_CAP] / len(readings):.0%} of the readings"
    for reason in SLOWDOWNS.keys() & counts.keys():
        if counts[reason] > OFTEN * len(readings):
            share = f"{counts[reason] / len(readings):.0%} of the readings"
            warnings.append(f"the GPU slowed itself down because of {SLOWDOWNS[reason]} in {share}")
    others = frozenset[int]().union(*(reading.others or () for reading in readings))
    if others:
        names = ", ".join(map(str, sorted(others)))
        warnings.append(f"other processes were on the GPU: {names}")
    return Summary(facts, tuple(dict.fromkeys(warnings)))


def nvml_of(device: torch.device) -> Read | str:
    """A function that reads the GPU, or why there is none (nvidia-ml-py is not installed, NVML refuses)."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid  # CUDA's order of devices is not NVML's
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        read = _reader(pynvml, handle)
        read()
    except (pynvml.NVMLError, AttributeError, RuntimeError) as error:
        return f"NVML: {error}"
    return read


def _reader(nvml: Any, handle: Any) -> Read:
    prefixes = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")  # new and old names of the same bits
    bits = {
        name.removeprefix(prefix): int(getattr(nvml, name))
        for prefix in prefixes
        for name in dir(nvml)
        if name.startswith(prefix) and isinstance(getattr(nvml, name), int)
    }
    wanted = {name: bits[name] for name in (*SLOWDOWNS, POWER_CAP) if name in bits}
    driver = str(nvml.nvmlSystemGetDriverVersion())

    def read() -> Reading:
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        pids = frozenset(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        own = {os.getpid(), *(child.pid for child in multiprocessing.active_children())}
        return Reading(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            tuple(name for name, bit in wanted.items() if mask & bit),
            # In a container NVML may count processes as the host does: then ours are not among them.
            pids - own if pids & own else None,
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            driver,
        )

    return read
