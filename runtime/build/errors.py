"""Errors between a spec and a loaded kernel; each carries what is needed to find the cause."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# `kernel.cu(12): error: ...` (nvcc, NVRTC), `kernel.cpp:12:5: error: ...` (g++, clang++)
_LOCATED = re.compile(r"^[^\s:(]+(?:\((\d+)\)|:(\d+)(?::\d+)?)\s*:\s*(?:catastrophic |fatal )?error\b.*")
# `ptxas /tmp/x.ptx, line 7; error : ...`, `nvcc fatal : ...`, `ld: cannot find ...`
_PLAIN = re.compile(
    r"^.*(?:\berror\b\s*:|\bfatal\b\s*:|cannot find|not found|No space left on device).*", re.I
)
_CONTEXT = 1  # source lines shown on each side of the failing one


class NoCompilerError(RuntimeError):
    """No usable compiler was found; the message names the places searched and the remedy."""


class CacheError(RuntimeError):
    """The cache directory cannot be trusted or written; the message names the path and the remedy."""


class CompileError(RuntimeError):
    """A compiler rejected a generated source.

    `spec` is the slug, `command` the argument list that was run, `source_path` the kept source and
    `log` everything the compiler printed. The message is short: the first error with its source lines.
    """

    def __init__(self, spec: str, command: Sequence[str], source_path: Path, log: str) -> None:
        self.spec = spec
        self.command = tuple(command)
        self.source_path = Path(source_path)
        self.log = log
        super().__init__(self._message())

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process pools, and the default would rebuild them from the message alone.
        return type(self), (self.spec, self.command, self.source_path, self.log)

    def moved_to(self, source_path: Path) -> CompileError:
        """The same error after its source moved."""
        return CompileError(self.spec, self.command, source_path, self.log)

    def _message(self) -> str:
        error, line = first_error(self.log)
        parts = [f"{self.spec} does not compile: {error}"]
        if line is not None:
            # It may be an included file.
            named = self.source_path.with_name(Path(re.split(r"[:(]", error)[0]).name)
            parts += _excerpt(named if named.is_file() else self.source_path, line)
        parts.append(f"source: {self.source_path}")
        parts.append(f"command (run in that directory): {shlex.join(self.command)}")
        return "\n".join(parts)


def first_error(log: str) -> tuple[str, int | None]:
    """First error line of a compiler's log, and the source line it names if it names one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for text in lines:
        if match := _LOCATED.match(text):
            return text, int(match.group(1) or match.group(2))
    for text in lines:
        if _PLAIN.match(text):
            return text, None
    return (lines[-1] if lines else "the compiler printed nothing"), None


def _excerpt(path: Path, line: int) -> list[str]:
    """Numbered source lines around `line`; empty if the source can no longer be read."""
    try:
        text = path.read_text().splitlines()
    except OSError:
        return []  # the caller is already reporting an error: do not hide it behind this one
    first = max(1, line - _CONTEXT)
    rows = text[first - 1 : line + _CONTEXT]
    return [f"{'>' if n == line else ' '} {n:5d} | {row}" for n, row in enumerate(rows, first)]
