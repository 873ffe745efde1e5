"""Options that several commands share, and the group that turns a user's error into one message."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Arch, DType
from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError

if TYPE_CHECKING:  # torch takes a second to import: commands that do not need it do without
    from attnforge.bagel.commands.selection import Selection


class OutFile(click.Path):
    """A file to write. Its directory is checked at once, before minutes of search."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; fails, naming the directory, if the file could not be created."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"{path.parent} is not a writable directory", param, ctx)
        return path


DIRECTORY = click.Path(path_type=Path, file_okay=False)
file_option = functools.partial(click.option, type=click.Path(path_type=Path, dir_okay=False))
out_option = functools.partial(click.option, type=OutFile(), metavar="FILE")
USER_ERRORS = (ValueError, TypeError, OSError, Infeasible, CacheError, CompileError, NoCompilerError)


def values(enum: Any) -> click.Choice[str]:
    """The type of an option whose values are those of an enum."""
    return click.Choice([member.value for member in enum])


def choices(enum: Any) -> str:
    """The values of an enum as help text: `fp32, bf16, fp16`."""
    return ", ".join(member.value for member in enum)


def number(default: int | None = None, least: int = 1, **rest: Any) -> dict[str, Any]:
    """Arguments of an option that takes a whole number of at least `least`."""
    shown = {} if default is None else {"default": default, "show_default": True}
    return {"type": click.IntRange(least), "metavar": "N", **shown, **rest}


arch_option = functools.partial(click.option, "--arch", type=values(Arch), metavar="ARCH")
dtype_option = functools.partial(click.option, "--dtype", type=values(DType), metavar="DTYPE")
direction_option = functools.partial(
    click.option,
    "--direction",
    type=click.Choice(["fwd", "bwd", "both"]),
    default="both",
    metavar="PASS",
    help="fwd, bwd or both.  [default: both]",
)
workers_option = functools.partial(
    click.option, "--workers", **number(), help="Parallel compilations.  [default: one per CPU]"
)
model_option = functools.partial(
    click.option, "--model", metavar="NAME", help="Heads of 7B, 1.5B, 0.5B or vit."
)
PACK_HELP = "Workload: pretrain/0, full/4x8192, causal/2048, blocks/0.9, ... Repeatable."
PACKS_HELP = "Packs recorded by attnforge.bagel.record; runs 3 of them, lightest to heaviest."


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose what to run on; the command gets them as one `Selection`."""

    @click.option("--pack", multiple=True, metavar="NAME", help=PACK_HELP)
    @file_option("--packs", help=PACKS_HELP)
    @model_option()
    @dtype_option(help=f"{choices(DType)}.  [default: by device]")
    @direction_option()
    @click.option("--device", metavar="NAME", help="cpu, cuda or cuda:N.  [default: the GPU, if any]")
    @arch_option(help="Kernel family, e.g. sm90a.  [default: the device's best]")
    @functools.wraps(command)
    def wrapped(
        pack: tuple[str, ...],
        packs: Path | None,
        model: str | None,
        dtype: str | None,
        direction: str,
        device: str | None,
        arch: str | None,
        **rest: Any,
    ) -> None:
        from attnforge.bagel.commands.selection import select

        if packs is not None:
            from attnforge.bagel.workloads import recorded

            pack += recorded(packs)
        selection: Selection = select(pack, model, dtype, direction, device, arch)
        command(selection, **rest)

    return wrapped


class UserError(click.ClickException):
    """An error that the user can correct; exit status 2."""

    exit_code = 2


class Commands(click.Group):
    """A group of commands that reports USER_ERRORS as one message; --traceback shows where they come from."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; raises UserError in place of USER_ERRORS."""
        try:
            return super().invoke(ctx)
        except USER_ERRORS as error:
            if ctx.params.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            raise UserError(_message(error)) from error


def _message(error: BaseException) -> str:
    """The error's text; for an OSError the file first, then the reason (str() begins with errno)."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
