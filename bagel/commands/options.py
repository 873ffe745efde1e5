"""Options that several commands share, and the group that turns a user's error into one message."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, DType, ProblemField
from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError


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


class Seconds(click.FloatRange):
    """A time: a finite number of at least 0."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails for inf and NaN, which a range lets through."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return seconds


class Name(click.types.StringParamType):
    """A name. An empty one, as an unset variable of a shell script gives it, is not the same as no option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name; fails for an empty one."""
        if not value:
            self.fail("got '', expected a name", param, ctx)
        return value


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
deterministic_option = functools.partial(
    click.option,
    "--deterministic",
    is_flag=True,
    help="Only the backward, for calls with deterministic=True.",
)

alone_option = functools.partial(
    click.option,
    "--alone",
    is_flag=True,
    help="Time the leaders again each alone, where its own power limits the clock, not interleaved.",
)


def _values_by_knob(
    context: click.Context, parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, frozenset[int]]:
    """Values by knob."""
    found: dict[str, frozenset[int]] = {}
    for word in words:
        name, _, values = word.partition("=")
        try:
            found[name] = frozenset(map(int, values.split(",")))
        except ValueError:
            raise click.BadParameter(
                f"got {word!r}, expected a name and whole numbers, as tile_m=128,192"
            ) from None
    return found


workers_option = functools.partial(
    click.option, "--workers", **number(), help="Parallel compilations.  [default: one per CPU]"
)
knob_option = functools.partial(
    click.option,
    "--knob",
    "allowed",
    multiple=True,
    metavar="NAME=V,...",
    callback=_values_by_knob,
    help="Only variants in which the knob has one of these values. May be repeated.",
)
model_option = functools.partial(
    click.option,
    "--model",
    type=Name(),
    metavar="NAME",
    help="Heads of 7B, 0.5B, vit, qwen3-32b, ... (`attnforge models`).",
)
score_option = functools.partial(
    click.option, "--score", "scores", type=Name(), multiple=True, metavar="SCORE"
)
device_option = functools.partial(click.option, "--device", type=Name(), metavar="NAME")
gpu_option = functools.partial(click.option, "--gpu", type=Name(), metavar="NAME")
PACK_HELP = "Workload: pretrain/0, full/4x8192, causal/2048, blocks/0.9, ... Repeatable."
DEFAULT_PACKS = "finetune/0 and, on a GPU, pretrain/0"
PACKS_HELP = "File of attnforge.bagel.record. Three of its packs are taken, from few to many visible pairs."
LENGTH_HELP = "Queries and keys of --mask.  [default: 8192 on a GPU, 1024 on a CPU]"
SCORE_HELP = "Score function: softcap:50, alibi, relative_bias:128 or FILE.py:NAME (a function or a Score). Repeatable."
MASK_HELP = "causal, full, window:N (causal, each query sees N keys), or a .npy or .npz file. Repeatable."

# The fields of a problem that neither tensors nor masks decide: each is an option.
OPTION_FIELDS = tuple(f for f in PROBLEM_FIELDS if f.optional and f.match == "same")


def field_type(f: ProblemField) -> dict[str, Any]:
    """Type, metavar and help of an option for a field of `Problem`."""
    if issubclass(f.type, Enum):
        return {
            "type": values(f.type),
            "metavar": "NAME",
            "help": f"{f.text.rstrip('.')}: {choices(f.type)}.",
        }
    return number(least=0 if f.optional else 1, help=f"{f.text.rstrip('.')}.")


def _numbers(count: int) -> Callable[[Any, click.Parameter, str | None], tuple[int, ...] | None]:
    """A callback for an option of one to `count` whole numbers, `32/8`; the last stands for those left out."""

    def parse(_: Any, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        words = value.split("/")
        if len(words) > count or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise click.BadParameter(f"got {value!r}, expected {param.metavar}", param=param)
        found = [int(word) for word in words]
        return (*found, *found[-1:] * (count - len(found)))

    return parse


SHAPE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    file_option("--packs", "recorded", metavar="FILE", help=PACKS_HELP),
    click.option("--mask", "masks", multiple=True, metavar="MASK", help=MASK_HELP),
    click.option("--length", metavar="Q[/K]", callback=_numbers(2), help=LENGTH_HELP),
    click.option("--batch", **number(), help="Batch entries.  [default: 1]"),
    model_option(),
    click.option("--heads", metavar="Q[/KV]", callback=_numbers(2), help="Query and kv heads, e.g. 32/8."),
    click.option("--head-dim", **number(), help="head_dim of q and k."),
    *(click.option(f.option, f.name, **field_type(f)) for f in OPTION_FIELDS),
    score_option(help=SCORE_HELP),
    dtype_option(help=f"{choices(DType)}.  [default: bf16; fp32 on a CPU without bf16 products]"),
    direction_option(),
    device_option(help="cpu, cuda or cuda:N.  [default: the GPU, if any]"),
    arch_option(help="Kernel family, e.g. sm90a.  [default: the device's best]"),
)


def pack_option(default: str) -> Callable[[Any], Any]:
    """The option --pack of a command that takes `default` without it."""
    text = f"{PACK_HELP}  [default: {default}]"
    return click.option("--pack", "packs", multiple=True, metavar="NAME", help=text)


def selecting(
    command: Callable[..., None] | None = None, *, packs: str = DEFAULT_PACKS
) -> Callable[..., Any]:
    """Add the options that choose what to run on; the command gets them as one `Selection`.

    packs: what the command takes without --pack, for the help.
    """
    if command is None:
        return functools.partial(selecting, packs=packs)

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        from attnforge.bagel.commands.selection import Request, select

        taken = {f.name: arguments.pop(f.name) for f in dataclasses.fields(Request) if f.name in arguments}
        extra = {f.attribute: arguments.pop(f.name) for f in OPTION_FIELDS}
        request = Request(**taken, extra={name: value for name, value in extra.items() if value is not None})
        command(select(request), **arguments)

    for option in reversed((pack_option(packs), *SHAPE_OPTIONS)):
        wrapped = option(wrapped)
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
