"""A process that verifies and times variants, so that a crash or a hang costs one variant only."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch

from attnforge.codegen.spec import Direction, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.masks import AnyMask, Causal, DenseMask, FunctionMask, Spans
from attnforge.runtime.scores import Score
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import (
    Call,
    Effort,
    Timing,
    effort,
    measure_against,
    measure_alone,
    measure_interleaved,
    rotate,
)
from attnforge.runtime.search.verify import Check, Error, Outputs, WrongResult, make_check, odd_case, verify

# A variant that needs longer counts as hanging. START_SECONDS: for the process to start, and for the exact results.
TRIAL_SECONDS, START_SECONDS = 120.0, 600.0


@dataclass(frozen=True)
class Outcome:
    """The result of one variant: status "ok", "launch", "wrong" or "timeout", and the reason if not ok."""

    status: str
    detail: str = ""
    timing: Timing | None = None
    # tensor -> (rms error, worst error) on the real case, and the largest rms error as a share of its limit
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    limit_used: float = 0.0
    fatal: bool = False  # the process can measure nothing more


class Worker:
    """Handle of the process, for one problem after another. A request starts it if there is none."""

    def __init__(self) -> None:
        self._problem: tuple[Case, Direction] | None = None
        self._process: Any = None
        self._connection: Connection | None = None
        self._preparing = self._asking = False  # a reply to `_prepare`, or to a request, is due
        self._ready_at: float | None = None

    def start(self, device: torch.device) -> None:
        """Start the process unless it runs. It loads torch and wakes the device while the caller goes on."""
        if self._process is not None and not self._process.is_alive():
            self.close()
        if self._connection is None:
            context = multiprocessing.get_context("spawn")  # fork and CUDA do not mix
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, device), daemon=True)
            self._process.start()
            theirs.close()

    def ready_at(self) -> float:
        """When the process could measure the problem (`time.monotonic`); waits for that.

        Raises RuntimeError if it does not start, or if the problem cannot be measured.
        """
        if self._connection is None:
            self._prepare()
        self._await_prepared()
        return self._await_start()

    def _await_start(self) -> float:
        if self._ready_at is None:
            ready_at, problem = self._first_reply()
            if problem:
                self.close()
                raise RuntimeError(f"the measuring process did not start: {problem}")
            self._ready_at = float(ready_at)
        return self._ready_at

    def prepare(self, case: Case, direction: Direction) -> None:
        """Turn to a problem. Its exact results are computed while the caller goes on."""
        self._problem = case, direction
        if self._preparing or self._asking:
            self.close()  # a late reply to an earlier request would be taken for that of a new one
        self._prepare()

    def trial(self, spec: Spec, give_up_ms: float, reference: tuple[Spec, float] | None = None) -> Outcome:
        """Verify and time one variant; see `Effort.give_up_ms`.

        `reference`: a verified variant to take turns with, and its milliseconds; see `measure_against`.
        """
        reply = self._ask(("trial", (spec, give_up_ms, reference)), TRIAL_SECONDS)
        return reply if isinstance(reply, Outcome) else Outcome(*reply)

    def compare(self, specs: list[Spec], how: Effort) -> list[Timing] | None:
        """Time verified variants interleaved; None if the process dies."""
        reply = self._ask(("compare", (specs, how)), TRIAL_SECONDS * len(specs) + how.patience * len(specs))
        return reply if isinstance(reply, list) else None

    def release(self) -> None:
        """Let the process give back the problem's memory, until the next `prepare`."""
        if self._preparing or self._asking:
            self.close()
        elif self._connection is not None:
            with contextlib.suppress(OSError):  # a dead process holds none
                self._connection.send(("release", ()))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = self._ready_at = None
        self._preparing = self._asking = False

    def _ask(self, request: tuple[str, tuple[Any, ...]], seconds: float) -> Any:
        """The reply, or (status, detail) when there is none."""
        if self._connection is None:
            self._prepare()
        self._await_prepared()
        connection = self._connection
        assert connection is not None
        self._asking = True
        try:
            connection.send(request)
            if not connection.poll(seconds):
                self.close()
                return "timeout", f"no result after {seconds:.0f} s"
            reply = connection.recv()
        except (EOFError, OSError):
            return "launch", self._exit_status()
        self._asking = False
        if isinstance(reply, Outcome) and reply.fatal:
            self.close()
        return reply

    def _prepare(self) -> None:
        assert self._problem is not None, "prepare() comes first"
        case, direction = self._problem
        self.start(case.device)
        assert self._connection is not None
        self._preparing = True
        with contextlib.suppress(OSError):  # it died: `_await_prepared` says so
            self._connection.send(("prepare", (_portable(case), direction)))

    def _await_prepared(self) -> None:
        """Raises RuntimeError if the problem cannot be measured."""
        if not self._preparing:
            return
        self._await_start()
        self._ready_at, problem = self._first_reply()
        self._preparing = False
        if problem:
            self.close()
            raise RuntimeError(problem)

    def _first_reply(self) -> Any:
        """A reply of the process before its first trial. Raises RuntimeError if there is none."""
        assert self._connection is not None
        try:
            if not self._connection.poll(START_SECONDS):
                self.close()
                raise RuntimeError(f"the measuring process is not ready after {START_SECONDS:.0f} s")
            return self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the measuring process did not start: {self._exit_status()}") from None

    def _exit_status(self) -> str:
        self._process.join()
        code = self._process.exitcode
        self.close()
        if code is not None and code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with exit status {code}"


def _portable(case: Case) -> Case:
    """The case with its mask and score on the host: CUDA tensors do not travel between processes."""
    return _moved_to(case, torch.device("cpu"))


def _moved_to(case: Case, device: torch.device) -> Case:
    """The case with what its mask and score read on `device`."""
    score = case.score
    if score is not None:
        score = Score(score.text, tuple(tensor.detach().to(device) for tensor in score.tensors))
    return replace(case, mask=_moved(case.mask, device), score=score)


def _moved(mask: AnyMask, device: torch.device) -> AnyMask:
    """`mask` on `device`."""
    if mask is None or isinstance(mask, Causal):
        return mask
    moved: Spans | DenseMask | FunctionMask = mask.to(device)
    return moved


class Bench:
    """One case on its device: its checks, and the tensors for timing."""

    def __init__(self, case: Case, direction: Direction) -> None:
        case = _moved_to(case, case.device)
        self.case, self.direction = case, direction
        self._checks = [make_check(odd_case(case), direction), make_check(case, direction)]
        self._saved = [self._forward(check.case, check.inputs, 0) for check in self._checks]

    @cached_property
    def _timed(self) -> list[tuple[Any, ...]]:
        """(inputs, saved) to rotate through."""
        sets = []
        for tensors in rotate(tuple(self.case.inputs()), self.case.device):
            inputs = Inputs(*tensors)
            sets.append((inputs, self._forward(self.case, inputs, 0)))
        return sets

    def verify(self, handle: int) -> Iterator[tuple[Check, dict[str, Error]]]:
        """Errors on the small odd case, then on the real one. Raises WrongResult."""
        for check, saved in zip(self._checks, self._saved, strict=True):
            yield check, verify(check, lambda x, c=check, s=saved: self._run(c, x, s, handle))  # type: ignore[misc]

    def trial(self, spec: Spec, give_up_ms: float, reference: tuple[Spec, float] | None) -> Outcome:
        """Verify, then time, as `Worker.trial`."""
        try:
            handle = kernels.load(spec, self.case.device)
            *_, (_, errors) = self.verify(handle)
            how = replace(effort(self.case.device), give_up_ms=give_up_ms, warmups=0 if self._slow else 1)
            timing = self._time_against(handle, reference, how) if reference else self._time([handle], how)[0]
        except WrongResult as error:
            return Outcome("wrong", str(error))
        except Exception as error:  # any failure of a kernel is a result of the search
            return Outcome("launch", f"{type(error).__name__}: {error}", fatal=self._broken())
        return Outcome(
            "ok",
            timing=timing,
            errors={name: (error.rms, error.worst) for name, error in errors.items()},
            limit_used=max(error.rms / error.rms_limit for error in errors.values()),
        )

    def _broken(self) -> bool:
        """Whether the CUDA context is lost, as after an illegal access."""
        try:
            if self.case.device.type == "cuda":
                torch.cuda.synchronize(self.case.device)
        except RuntimeError:
            return True
        return False

    def compare(self, specs: list[Spec], how: Effort) -> list[Timing]:
        """Time several variants, interleaved or each alone."""
        return self._time([kernels.load(spec, self.case.device) for spec in specs], how)

    @property
    def _slow(self) -> bool:
        return self.case.device.type == "cpu"  # verification has warmed it up

    def _time(self, handles: list[int], how: Effort) -> list[Timing]:
        calls = {str(number): self._timed_call(handle) for number, handle in enumerate(handles)}
        if how.alone:
            return list(measure_alone(calls, self._timed, self.case.device).values())
        return list(measure_interleaved(calls, self._timed, self.case.device, how).values())

    def _time_against(self, handle: int, reference: tuple[Spec, float], how: Effort) -> Timing:
        """Half as many turns as `_time` has, as each is two calls."""
        spec, ms = reference
        calls = self._timed_call(handle), self._timed_call(kernels.load(spec, self.case.device))
        how = replace(how, seconds=how.seconds / 2, repeats=how.repeats // 2 + 1)
        return measure_against(*calls, ms, self._timed, self.case.device, how)

    def _timed_call(self, handle: int) -> Call:
        return lambda inputs, saved: self._call(self.case, inputs, saved, handle)

    def _forward(self, case: Case, x: Inputs, handle: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(out, lse), which backward variants need, by the kernel that dispatch chooses."""
        if self.direction is Direction.FORWARD:
            return None
        return self._run_forward(case, x, handle)

    def _run_forward(self, case: Case, x: Inputs, handle: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The odd case has other sizes than what a score captures: not checked.
        return ops.forward(x.q, x.k, x.v, case.mask, case.scale, handle, score=case.score, check=False)

    def _call(self, case: Case, x: Inputs, saved: Any, handle: int) -> tuple[torch.Tensor, ...]:
        if self.direction is Direction.FORWARD:
            return self._run_forward(case, x, handle)
        out, lse = saved
        inputs = (x.dout, x.q, x.k, x.v, out, lse, case.mask, case.scale, False, handle)
        return ops.backward(*inputs, score=case.score, check=False)

    def _run(self, check: Check, x: Inputs, saved: Any, handle: int) -> Outputs:
        names = ("out", "lse") if self.direction is Direction.FORWARD else ("dq", "dk", "dv")
        # Behind dv come the gradients of what a score captures.
        return dict(zip(names, self._call(check.case, x, saved, handle), strict=False))


def _serve(connection: Connection, device: torch.device) -> None:
    """Body of the process: say when it is ready, then answer requests until the pipe closes.

    What it says then, and the answer to "prepare", is the time and "" or what is wrong.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        matrix = torch.zeros(64, 64, dtype=torch.float64, device=device)
        (matrix @ matrix).sum().item()  # the first product loads libraries
        connection.send((time.monotonic(), ""))
    except Exception as error:
        connection.send((0.0, f"{type(error).__name__}: {error}"))
    with contextlib.suppress(EOFError, OSError):  # the caller is gone
        _answer(connection)


def _answer(connection: Connection) -> None:
    """Answer requests. Raises EOFError or OSError when the pipe closes."""
    bench: Bench | None = None
    while True:
        what, arguments = connection.recv()
        if what in ("prepare", "release"):
            bench = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        if what == "prepare":
            bench, problem = _bench(*arguments)
            connection.send((time.monotonic(), problem))
        elif what == "trial":
            assert bench is not None
            connection.send(bench.trial(*arguments))
        elif what == "compare":
            assert bench is not None
            connection.send(bench.compare(*arguments))


def _bench(case: Case, direction: Direction) -> tuple[Bench | None, str]:
    """The case on its device, or why there is none."""
    try:
        return Bench(case, direction), ""
    except Exception as error:
        return None, f"{case.name}: cannot prepare the measurement: {type(error).__name__}: {error}"
