"""`challenge run`: a training step of the layer with our attention and with torch's, checked, timed, profiled."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from attnforge.bagel.challenge.layer import (
    SMALL,
    Attention,
    MoTLayer,
    Pack,
    Sizes,
    draw_pack,
    native,
    stepwise,
)

TOLERANCE = 1e-2  # absolute and relative, after the output projection: the challenge's
STEPS = 5  # profiled; the mean of the middle three wall times counts
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Timed:
    """One attention on one pack. `ms`: wall time of a step (layer forward and backward). `attention_ms`: wall time of
    the attention calls in its forward pass. `error`: how the output is wrong; empty if it is right."""

    name: str
    ms: float
    attention_ms: float
    error: str
    traces: Path


def operator(module: str) -> Attention:
    """`forward` of a module with the challenge's interface. ValueError if there is none."""
    try:
        found: Attention = importlib.import_module(module).forward
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--operator: {module} has no operator: {error}") from error
    return found


def timed(call: Callable[P, R], times: list[float], device: torch.device) -> Callable[P, R]:
    """`call`, which also appends its wall time in milliseconds, including the device's work, to `times`."""

    @functools.wraps(call)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        _wait(device)
        start = time.perf_counter()
        result = call(*args, **kwargs)
        _wait(device)
        times.append((time.perf_counter() - start) * 1e3)
        return result

    return wrapper


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Training:
    """The layer and one random pack on a device; `run` puts an attention into it."""

    def __init__(self, device: torch.device, seed: int = 0, sizes: Sizes | None = None) -> None:
        sizes = sizes or (SMALL if device.type == "cpu" else Sizes())
        torch.manual_seed(seed)
        self.device = device
        self.pack: Pack = draw_pack(sizes, seed)
        self.layer: nn.Module = MoTLayer(sizes).to(device, torch.bfloat16)
        self.x = torch.randn(sum(self.pack.rows), sizes.hidden, device=device, dtype=torch.bfloat16)
        self.masks = self.pack.masks(device)

    def output(self, attention: Attention) -> Tensor:
        """The layer's output, (tokens, hidden), under autocast."""
        with torch.autocast(self.device.type, torch.bfloat16):
            out: Tensor = self.layer(self.x, self.pack, self.masks, attention)
        return out

    def run(self, name: str, attention: Attention, logs: Path) -> Timed:
        """Check against the step-by-step reference, then time and profile STEPS training steps."""
        with torch.no_grad():
            error = _difference(self.output(attention), self.output(stepwise))
        steps: list[float] = []
        calls: list[float] = []
        step = timed(
            lambda: self.output(timed(attention, calls, self.device)).float().mean().backward(),
            steps,
            self.device,
        )
        step()  # compiles, allocates
        first = len(calls)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        handler = tensorboard_trace_handler(str(logs), worker_name=name)
        with profile(
            activities=activities,
            schedule=schedule(wait=1, warmup=1, active=STEPS - 2),
            on_trace_ready=handler,
        ) as profiler:
            for _ in range(STEPS):
                step()
                profiler.step()
        samples = len(self.pack.rows)
        per_step = [sum(calls[i : i + samples]) for i in range(first, len(calls), samples)]
        return Timed(name, _middle(steps[1:]), _middle(per_step), error, logs)


def _middle(times: list[float]) -> float:
    """Mean without the fastest and the slowest."""
    return statistics.mean(sorted(times)[1:-1])


def _difference(out: Tensor, expected: Tensor) -> str:
    if torch.allclose(out.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE):
        return ""
    return f"output is off by {(out.float() - expected.float()).abs().max().item():.1e}"


def train(
    device: torch.device, logs: Path, seed: int, module: str, only_native: bool
) -> tuple[Training, list[Timed]]:
    """A random pack, and the times of native and of `module`'s operator on it (or of native only)."""
    training = Training(device, seed)
    contestants: dict[str, Attention] = {"native": native}
    if not only_native:
        contestants[module] = operator(module)
    return training, [training.run(name, attention, logs) for name, attention in contestants.items()]
