"""The commands `challenge run` and `challenge install`: the OpenKernel challenge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from attnforge.bagel.commands.console import console, echo, make_table, write_json
from attnforge.bagel.commands.options import DIRECTORY, dtype_option, out_option
from attnforge.codegen.spec import DType

if TYPE_CHECKING:
    import torch

    from attnforge.bagel.challenge.final import Result
    from attnforge.bagel.challenge.run import Timed, Training

ERRORS = ("out", "dq", "dk", "dv")


@click.group(short_help="Run the OpenKernel challenge.")
def challenge() -> None:
    """The OpenKernel challenge: install our operator, check it and time it."""


@challenge.command("install", short_help="Install our operator as custom_attention.")
@click.option("--into", type=DIRECTORY, metavar="DIR", help="Install into DIR.  [default: site-packages]")
def challenge_install(into: Path | None) -> None:
    """Install a module custom_attention whose `forward` is attnforge's."""
    from attnforge.bagel.challenge.operator import install

    echo(f"{install(into)}: custom_attention.forward is attnforge's")


@challenge.command("run", short_help="Check and time the operator.")
@click.option("--native", is_flag=True, help="Profile torch's attention alone.")
@click.option("--final", is_flag=True, help="Run the final round's shapes, not training steps.")
@click.option(
    "--operator",
    "module",
    default="attnforge.bagel.challenge.operator",
    metavar="MODULE",
    help="Module whose `forward` is run.  [default: ours]",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the random samples."
)
@click.option("--cpu", is_flag=True, help="Run small sizes on the CPU.")
@dtype_option("dtypes", multiple=True, help="With --final. Repeatable.  [default: all]")
@click.option(
    "--logs",
    type=DIRECTORY,
    default=Path("logs/train"),
    show_default=True,
    metavar="DIR",
    help="Folder for profiler traces.",
)
@out_option("--json", "json_out", help="With --final: write the results to this file.")
def challenge_run(
    native: bool,
    final: bool,
    module: str,
    seed: int,
    cpu: bool,
    dtypes: tuple[str, ...],
    logs: Path,
    json_out: Path | None,
) -> None:
    """Check and time the operator in a training step, or on the final round's shapes.

    The exit status is 1 if a result is wrong.
    """
    import torch

    device = torch.device("cpu" if cpu or not torch.cuda.is_available() else "cuda")
    problems = (
        _final(device, module, dtypes, json_out) if final else _train(device, logs, seed, module, native)
    )
    if problems:
        raise click.ClickException("\n".join(("wrong results:", *problems)))


def _train(device: torch.device, logs: Path, seed: int, module: str, native: bool) -> list[str]:
    from attnforge.bagel.challenge.run import train

    training, rows = train(device, logs, seed, module, native)
    console.print(training_table(training, rows))
    echo(f"traces: {logs}")
    return [f"{row.name}: {row.error}" for row in rows if row.error]


def _final(device: torch.device, module: str, dtypes: tuple[str, ...], json_out: Path | None) -> list[str]:
    from attnforge.bagel.challenge.final import run_final
    from attnforge.bagel.challenge.report import ratios, to_json
    from attnforge.bagel.challenge.run import operator
    from attnforge.runtime.kernels import TORCH_DTYPES

    chosen = tuple(TORCH_DTYPES[DType(name)] for name in dtypes) or None
    results = []
    for result in run_final(device, operator(module), chosen):
        results.append(result)
        write_json(json_out, to_json(results))
    for dtype in dict.fromkeys(row.dtype for row in results):
        console.print(final_table(results, dtype))
    echo("\n".join(ratios(results)))
    return [f"{row.shape} {row.dtype} {row.name}: {row.note}" for row in results if row.wrong]


def training_table(training: Training, rows: Sequence[Timed]) -> Table:
    """One line per attention; the speedup is over native."""
    samples = zip(training.pack.kinds, training.pack.rows, strict=True)
    title = ", ".join(f"{kind} {count}" for kind, count in samples)
    table = make_table(title, ("attention",), ("step ms", "attention forward ms", "speedup"), ("output",))
    native = next((row for row in rows if row.name == "native"), None)
    for row in rows:
        ratio = f"{native.attention_ms / row.attention_ms:.2f}x" if native else ""
        verdict = f"[bold red]{escape(row.error)}[/bold red]" if row.error else "correct"
        table.add_row(row.name, f"{row.ms:.3g}", f"{row.attention_ms:.3g}", ratio, verdict)
    return table


def final_table(results: Sequence[Result], dtype: torch.dtype) -> Table:
    """One line per attention, grouped by shape."""
    title = f"final round, {str(dtype).removeprefix('torch.')}"
    from attnforge.bagel.measure.report import milliseconds

    numbers = ("forward ms", "forward + backward ms", *(f"error of {name}" for name in ERRORS))
    table = make_table(title, ("B, H, S, D", "attention"), numbers, ("note",))
    last = None
    for row in results:
        if row.dtype is not dtype:
            continue
        shape = f"{row.shape.batch}, {row.shape.heads}, {row.shape.rows}, {row.shape.head_dim}"
        if last not in (None, shape):
            table.add_section()
        errors = (f"{row.errors[name]:.0e}" if name in row.errors else "" for name in ERRORS)
        note = f"[bold red]{escape(row.note)}[/bold red]" if row.wrong else escape(row.note)
        times = (milliseconds(row.forward_ms), milliseconds(row.both_ms))
        table.add_row("" if last == shape else shape, row.name, *times, *errors, note)
        last = shape
    return table
