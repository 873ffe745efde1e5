"""Commands `export` and `challenge`: parse, call, print (cli.py adds them)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from attnforge.bagel.commands.shell import file_option, out_option, values
from attnforge.codegen.spec import Arch, Direction, DType, Mask

if TYPE_CHECKING:  # imported where it is used: `attnforge --help` does without
    import torch

    from attnforge.runtime.export import Shape

console = Console(width=None if sys.stdout.isatty() else 140)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("out", type=DIRECTORY)
@click.option("--arch", type=values(Arch), required=True, help="Compiled for this; sm90 is sm90a.")
@click.option("--contract", type=click.Choice(["openkernel"]), help="The OpenKernel challenge's interface.")
@file_option("--shapes", help="Lines of B H S D [Dv]. [default: the challenge's, or --head-dim]")
@file_option("--specs", help="JSON list of specs, or a tuned table: exactly these kernels.")
@click.option("--name", help="Of the Python package. [default: custom_attention]")
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help="Repeatable.")
@click.option("--dtype", "dtypes", type=values(DType), multiple=True, help="Repeatable.")
@click.option("--mask", "masks", type=values(Mask), multiple=True, help="Repeatable.")
@click.option("--direction", type=click.Choice(["fwd", "bwd", "both"]), default="both", show_default=True)
def export(
    out: Path,
    arch: str,
    contract: str | None,
    shapes: Path | None,
    specs: Path | None,
    name: str | None,
    head_dims: tuple[int, ...],
    dtypes: tuple[str, ...],
    masks: tuple[str, ...],
    direction: str,
) -> None:
    """Write kernels as a package of their own into OUT. Sources, torch binding, setup.py, checks."""
    from attnforge.bagel.challenge.operator import NAME
    from attnforge.codegen.package import Tree
    from attnforge.runtime import export as exporting

    target = exporting.target(Arch(arch))
    directions = tuple(Direction) if direction == "both" else (Direction(direction),)
    types = tuple(map(DType, dtypes)) or _dtypes(target, contract)
    if specs is not None:
        items = exporting.read_specs(specs)
    else:
        kinds = _masks(masks, contract)
        items = exporting.collect(target, _shapes(shapes, head_dims, contract), types, kinds, directions)
    tree = Tree(name or NAME, target, items, contract is not None)
    paths = exporting.write(tree, out, f"attnforge {' '.join(_arguments())}")
    console.print(f"{out}: {len(items)} kernels for {target.value} in {len(paths)} files", soft_wrap=True)
    console.print(
        "build and check it there: python setup.py build_ext --inplace && python verify.py", soft_wrap=True
    )


def _arguments() -> list[str]:
    """The command line, for the provenance of what is written."""
    return ["export", *(word for word in sys.argv[2:] if sys.argv[1:2] == ["export"])]


def _masks(named: tuple[str, ...], contract: str | None) -> tuple[Mask, ...]:
    """Those of --mask; without it full and causal ones. The challenge has dense ones only."""
    if contract is None:
        return tuple(map(Mask, named)) or (Mask.FULL, Mask.CAUSAL)
    if named not in ((), ("dense",)):
        raise ValueError("--mask: the challenge's mask is dense")
    return (Mask.DENSE,)


def _shapes(file: Path | None, head_dims: tuple[int, ...], contract: str | None) -> list[Shape]:
    """Those of --shapes; else the challenge's. Without the challenge, --head-dim adds one for each."""
    from attnforge.bagel.challenge.operator import FINAL, OTHERS
    from attnforge.runtime import export as exporting

    wanted = exporting.read_shapes(file) if file else []
    if contract is not None:
        return wanted or [*FINAL, *OTHERS]
    wanted += [exporting.Shape(1, 1, exporting.ROWS, dim) for dim in head_dims]
    if not wanted:
        raise ValueError("export: name what to export: --head-dim, --shapes, --specs or --contract")
    return wanted


def _dtypes(target: Arch, contract: str | None) -> tuple[DType, ...]:
    """Without --dtype: what the target has; the contract wants every float dtype that there is."""
    if not target.is_gpu:
        return (DType.FLOAT32, DType.BFLOAT16)
    return tuple(DType) if contract else (DType.BFLOAT16,)


@click.group()
def challenge() -> None:
    """The OpenKernel challenge: its operator and a harness."""


@challenge.command("install")
@click.option("--into", type=DIRECTORY, help="Directory on the module path. [default: site-packages]")
def challenge_install(into: Path | None) -> None:
    """Make `import custom_attention` find our operator."""
    from attnforge.bagel.challenge.operator import install

    console.print(f"{install(into)}: custom_attention.forward is attnforge's", soft_wrap=True)


@challenge.command("run")
@click.option("--native", is_flag=True, help="Only torch's attention, for a profile of its own.")
@click.option("--final", is_flag=True, help="The ten shapes of the final round instead of training steps.")
@click.option(
    "--operator",
    "module",
    default="attnforge.bagel.challenge.operator",
    show_default=True,
    help="Whose forward.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which random samples.")
@click.option("--cpu", is_flag=True, help="On the CPU with small sizes, even if there is a GPU.")
@click.option(
    "--dtype", "dtypes", type=click.Choice(["fp32", "fp16", "bf16"]), multiple=True, help="With --final."
)
@click.option(
    "--logs", type=DIRECTORY, default=Path("logs/train"), show_default=True, help="Profiler traces."
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
    """Check and time the operator in a training step. Or on the final round's shapes; 1 if a result is wrong."""
    import torch

    device = torch.device("cpu" if cpu or not torch.cuda.is_available() else "cuda")
    problems = (
        _final(device, module, dtypes, json_out) if final else _train(device, logs, seed, module, native)
    )
    if problems:
        raise click.ClickException("\n".join(("wrong:", *problems)))


def _train(device: torch.device, logs: Path, seed: int, module: str, native: bool) -> list[str]:
    from attnforge.bagel.challenge.report import training_table
    from attnforge.bagel.challenge.run import train

    training, rows = train(device, logs, seed, module, native)
    console.print(training_table(training, rows))
    console.print(f"traces: {logs}", soft_wrap=True)
    return [f"{row.name}: {row.error}" for row in rows if row.error]


def _final(device: torch.device, module: str, dtypes: tuple[str, ...], json_out: Path | None) -> list[str]:
    from attnforge.bagel.challenge.final import run_final
    from attnforge.bagel.challenge.report import final_table, ratios, to_json
    from attnforge.bagel.challenge.run import operator
    from attnforge.runtime.kernels import TORCH_DTYPES

    chosen = tuple(TORCH_DTYPES[DType(name)] for name in dtypes) or None
    results = []
    for result in run_final(device, operator(module), chosen):
        results.append(result)
        if json_out is not None:
            json_out.write_text(json.dumps(to_json(results), indent=1) + "\n")
    for dtype in dict.fromkeys(row.dtype for row in results):
        console.print(final_table(results, dtype))
    console.print("\n".join(ratios(results)), soft_wrap=True)
    return [f"{row.shape} {row.dtype} {row.name}: {row.note}" for row in results if row.wrong]


@click.command("model")
@click.option(
    "--arch",
    "archs",
    type=click.Choice(["sm80", "sm86", "sm89", "sm120"]),
    multiple=True,
    help="[default: all]",
)
@click.option("--head-dim", "head_dims", type=int, multiple=True, help="Only these. [default: all]")
@click.option("--table-out", type=DIRECTORY, help="Folder for the tables, not generated/tuned.")
def model_command(archs: tuple[str, ...], head_dims: tuple[int, ...], table_out: Path | None) -> None:
    """Choose kernels by a model, for GPUs nothing was measured on. Compiles what it chooses."""
    from attnforge.bagel.measure.modelled import ARCHS, targets, write_tables
    from attnforge.runtime.tables import PACKAGED as TUNED

    def told(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    known = sorted({target.head_dim for target in targets()})
    for dim in head_dims:
        if dim not in known:
            raise ValueError(f"--head-dim: {dim} is not modelled; {', '.join(map(str, known))} are")
    for path in write_tables(tuple(map(Arch, archs)) or ARCHS, table_out or TUNED, told, head_dims):
        console.print(f"{path}: modelled, not measured", soft_wrap=True)
