"""How the command line reports what went wrong."""

from __future__ import annotations

from typing import Any

import click

from attnforge.codegen.plan import Infeasible
from attnforge.runtime.errors import CacheError, CompileError, NoCompilerError

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
            raise UserError(str(error)) from error
