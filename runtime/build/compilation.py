"""The interface of all compilers, their input and output files, and where the parts of CUDA may be installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from attnforge.codegen.render import Compilable

RELEASE = re.compile(r"(?:release|nvrtc) (\d+)\.(\d+)")  # in the identity of a CUDA compiler
_FUNCTION = re.compile(r"Compiling entry function '([^']+)'|Function properties for '?([\w$]+)'?")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Built:
    """Outcome of one compile: `binary_name` lies in the directory that was passed in."""

    binary_name: str
    log: str
    command: tuple[str, ...]
    seconds: float
    # kernel symbol -> {"registers", "spill_bytes", "shared_bytes" (static)}; empty on the CPU
    resources: dict[str, dict[str, int]] = field(default_factory=dict)


class Toolchain(Protocol):
    """One compiler for one target."""

    @property
    def name(self) -> str:
        """`nvcc`, `nvrtc`, or the C++ compiler's file name."""

    @property
    def identity(self) -> str:
        """Full version text, and for the CPU what `native` means here: part of the cache key."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Arguments that change the binary: part of the cache key."""

    def compile(self, source: Compilable, directory: Path) -> Built:
        """Write the source and its binary into `directory`. Raises CompileError."""


def write_source(source: Compilable, directory: Path) -> Path:
    """Write the text as `kernel.cu` or `kernel.cpp`: one short name, so that logs do not vary."""
    path = directory / f"kernel{source.suffix}"
    path.write_text(source.text)
    return path


def parse_ptxas(log: str) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes (stores + loads), static shared bytes of each kernel in a `ptxas -v` log."""
    found: dict[str, dict[str, int]] = {}
    symbol, entries = "", set()
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            symbol = match.group(1) or match.group(2)
            if match.group(1):
                entries.add(symbol)
            found.setdefault(symbol, {"registers": 0, "spill_bytes": 0, "shared_bytes": 0})
        elif symbol and (match := _SPILL.search(line)):
            found[symbol]["spill_bytes"] = int(match.group(1)) + int(match.group(2))
        elif symbol and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[symbol]["registers"] = int(match.group(1))
            found[symbol]["shared_bytes"] = int(shared.group(1)) if shared else 0
    return {name: numbers for name, numbers in found.items() if name in entries}


def site_packages() -> list[Path]:
    """Where this interpreter finds packages, the user's own and an outer environment's included."""
    return [Path(entry) for entry in dict.fromkeys(sys.path) if (Path(entry) / "nvidia").is_dir()]


def cuda_homes(env: Mapping[str, str]) -> list[Path]:
    """Toolkit roots that the environment names."""
    return [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
