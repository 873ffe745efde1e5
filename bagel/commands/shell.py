"""What all commands share: kinds of options, and how they report what went wrong."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import click

from attnforge.codegen.plan import Infeasible
from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError


class OutFile(click.Path):
    """A file to write: its directory must be there now, not after minutes of search."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; fails, naming the directory, if the file could not be created."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"{path.parent} is not a directory that can be written to", param, ctx)
        return path


file_option = functools.partial(click.option, type=click.Path(path_type=Path, dir_okay=False))
out_option = functools.partial(click.option, type=OutFile())
USER_ERRORS = (ValueError, TypeError, OSError, Infeasible, CacheError, CompileError, NoCompilerError)


class UserError(click.ClickException):
    """The user can do something about it."""

    exit_code = 2


class Commands(click.Group):
    """What a user can cause ends in one message and exit status 2; --traceback shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; raises UserError in place of USER_ERRORS."""
        try:
            return super().invoke(ctx)
        except USER_ERRORS as error:
            if ctx.params.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            raise UserError(_message(error)) from error


def values(enum: Any) -> click.Choice[str]:
    """An option whose values are those of an enum."""
    return click.Choice([member.value for member in enum])


def _message(error: BaseException) -> str:
    """Files before what happened to them: Python begins with a number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
