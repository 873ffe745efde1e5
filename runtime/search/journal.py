"""The search's log: one JSON object per line, from which an interrupted search resumes.

A line is valid for one (case, direction, environment, source): after a change of the compiler, torch, the device or a
template the variant is measured again. A process that is killed while writing leaves at most one incomplete line, which
readers skip; the next line starts on a new one. Lines without a result are notes for readers (bagel/report/): `search`
when a search starts, `final` with the leaders as they were timed at the end, `peers` when they were timed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from attnforge.codegen.families import spec_from_json
from attnforge.codegen.spec import Arch, Spec
from attnforge.runtime.build.toolchain import toolchain

log = logging.getLogger("attnforge")

# A crash or a hang may have another cause than the variant, so such variants are tried again.
FINAL = ("ok", "wrong", "compile", "infeasible")

# Lines that hold no result: what a search was to do, how its leaders were timed last, and how fast its peers are.
NOTES = ("search", "final", "peers")


@dataclass(frozen=True)
class Result:
    """The result of one variant. `status`: ok, infeasible, render, compile, launch, wrong or timeout."""

    spec: Spec
    status: str
    detail: str = ""
    ms: float = 0.0
    best_ms: float = 0.0
    repeats: int = 0
    tflops: float = 0.0
    registers: int = 0  # a thread, of the main kernel; 0 on the CPU
    spill_bytes: int = 0  # a thread
    shared_bytes: int = 0  # a block
    compile_seconds: float = 0.0
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # tensor -> rms, worst against fp64
    limit_used: float = 0.0  # largest rms error as a share of what verification allows
    low_ms: float = 0.0  # ms is the median, and lies between these two; 0: a log that does not say
    high_ms: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        return {**asdict(self), "spec": self.spec.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        """Rebuild a result; raises ValueError, TypeError or KeyError for anything else."""
        errors = {name: (float(rms), float(worst)) for name, (rms, worst) in data["errors"].items()}
        return Result(**{**data, "spec": spec_from_json(data["spec"]), "errors": errors})


def environment(device_name: str, arch: Arch) -> dict[str, str]:
    """What a measurement depends on, apart from the variant: device, torch, compiler and flags."""
    compiler = toolchain(arch)
    identity = hashlib.sha256("\0".join((compiler.identity, *compiler.flags)).encode()).hexdigest()[:16]
    return {"device": device_name, "torch": torch.__version__, "compiler": f"{compiler.name} {identity}"}


def expect_log(path: Path) -> None:
    """Raises ValueError for a file without a line of a log, to which results would be appended."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    if lines and not any(line.startswith(b'{"case": ') for line in lines):
        raise ValueError(f"--log: {path} is not the log of a search; choose another file")


def source_key(text: str) -> str:
    """Identity of a rendered source."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """The lines of the file `path` for one (case, direction, environment). Without a path nothing is kept."""

    def __init__(self, path: Path | None, case: str, direction: str, env: dict[str, str]) -> None:
        self._path = path
        self._scope = {"case": case, "direction": direction, "environment": env}
        self._known = dict(self._read()) if path is not None and path.exists() else {}

    def find(self, source: str) -> Result | None:
        """The result of an earlier search for a source key, if it is final."""
        return self._known.get(source)

    def add(self, source: str, result: Result) -> None:
        """Append the line of one result."""
        self._append({"source": source, "result": result.to_json()})

    def note(self, kind: str, facts: Any) -> None:
        """Append a line about the search as a whole: `kind` is one of NOTES, `facts` a plain JSON value."""
        assert kind in NOTES
        self._append({kind: facts})

    def _append(self, content: dict[str, Any]) -> None:
        if self._path is None:
            return
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({**self._scope, "time": stamp, **content})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            if file.seek(0, 2) and self._last_byte(file) != b"\n":
                line = f"\n{line}"
            file.write(f"{line}\n".encode())

    @staticmethod
    def _last_byte(file: Any) -> bytes:
        file.seek(-1, 2)
        return bytes(file.read(1))

    def _read(self) -> list[tuple[str, Result]]:
        assert self._path is not None
        found = []
        for number, line in enumerate(self._path.read_bytes().splitlines(), 1):
            try:
                row = json.loads(line)
                if any(kind in row for kind in NOTES):
                    continue
                same = all(row[name] == value for name, value in self._scope.items())
                if same and row["result"]["status"] in FINAL:
                    found.append((row["source"], Result.from_json(row["result"])))
            except (ValueError, TypeError, KeyError):
                log.warning("%s: line %d is not a result; skipped", self._path, number)
        return found
