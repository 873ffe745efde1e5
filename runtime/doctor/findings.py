"""A finding of `doctor`, and the conversion of an error to one."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError
from attnforge.runtime.build.settings import SettingsError

OK, INFO, WARNING, FAILURE = "ok", "info", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is OK, INFO, WARNING or FAILURE; the last two have a `remedy`."""

    name: str
    status: str
    value: str
    remedy: str = ""


def failed(name: str, error: Exception) -> Finding:
    """The finding of a check that raised `error`. Errors of this package end with "; " and their remedy."""
    if isinstance(error, CompileError):
        return Finding(name, FAILURE, str(error), "repair the compiler, or choose another one")
    if isinstance(error, SettingsError):
        variable = str(error).partition("=")[0]
        return Finding(variable, FAILURE, str(error), f"unset {variable}, or set it to one of these")
    value, _, remedy = str(error).partition("; ")
    if not isinstance(error, (CacheError, NoCompilerError)):
        value, remedy = f"{type(error).__name__}: {error}", ""
    return Finding(name, FAILURE, value, remedy or "please report this with the whole output of `doctor`")
