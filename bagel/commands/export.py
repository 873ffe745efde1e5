"""The command `export`: writes kernels as a package of their own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import echo
from attnforge.bagel.commands.options import (
    DIRECTORY,
    arch_option,
    choices,
    direction_option,
    dtype_option,
    file_option,
    number,
    values,
)
from attnforge.codegen.package import Contract
from attnforge.codegen.spec import Arch, Direction, DType, Mask

if TYPE_CHECKING:
    from attnforge.runtime.export import Shape


@click.command(short_help="Write kernels as a package of their own.")
@click.argument("out", type=DIRECTORY)
@arch_option(required=True, help=f"{choices(Arch)}; sm90 includes sm90a.")
@click.option(
    "--contract",
    type=values(Contract),
    metavar="NAME",
    help=f"{choices(Contract)} (a repository of Hugging Face's `kernels`).  [default: a package with setup.py]",
)
@file_option("--shapes", help="Lines of B H S D [Dv].  [default: the challenge's, or by --head-dim]")
@file_option("--specs", help="Exactly the kernels of a JSON list of specs, or of a tuned table.")
@click.option("--name", metavar="NAME", help="Name of the package.  [default: custom_attention]")
@click.option("--head-dim", "head_dims", multiple=True, **number(), help="head_dim of q and k. Repeatable.")
@dtype_option("dtypes", multiple=True, help=f"{choices(DType)}. Repeatable.")
@click.option(
    "--mask", "masks", type=values(Mask), multiple=True, metavar="KIND", help=f"{choices(Mask)}. Repeatable."
)
@direction_option()
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
    """Write kernels to OUT as a Python package that does not need attnforge.

    The package holds the sources, a torch binding, setup.py and verify.py.

    With --contract hf-kernels, its build_variant.py builds what get_kernel() and get_local_kernel() of Hugging Face's
    `kernels` load: build/<variant>/ with metadata.json.
    """
    from attnforge.bagel.challenge.operator import NAME
    from attnforge.codegen.package import Tree
    from attnforge.runtime import export as exporting

    target = exporting.target(Arch(arch))
    kind = None if contract is None else Contract(contract)
    challenge = kind is Contract.OPENKERNEL
    directions = tuple(Direction) if direction == "both" else (Direction(direction),)
    types = tuple(map(DType, dtypes)) or _dtypes(target, challenge)
    if specs is not None:
        items = exporting.read_specs(specs)
    else:
        kinds = _masks(masks, challenge)
        items = exporting.collect(target, _shapes(shapes, head_dims, challenge), types, kinds, directions)
    tree = Tree(name or NAME, target, items, kind, exporting.revision())
    paths = exporting.write(tree, out, shlex.join(("attnforge", *_arguments())))
    echo(f"{out}: {len(items)} kernels for {target.value} in {len(paths)} files")
    build = "build_variant.py" if tree.hub else "setup.py build_ext --inplace"
    echo(f"build and check it there: python {build} && python verify.py")


def _arguments() -> list[str]:
    """The command line, which the written files record as their origin."""
    given = [word for word in sys.argv[1:] if word != "--traceback"]
    return given if given[:1] == ["export"] else ["export"]


def _masks(named: tuple[str, ...], challenge: bool) -> tuple[Mask, ...]:
    """The masks of --mask, by default full and causal; the challenge has dense masks only."""
    if not challenge:
        return tuple(map(Mask, named)) or (Mask.FULL, Mask.CAUSAL)
    if named not in ((), ("dense",)):
        raise ValueError("--mask: must be dense with --contract openkernel, or left out")
    return (Mask.DENSE,)


def _shapes(file: Path | None, head_dims: tuple[int, ...], challenge: bool) -> list[Shape]:
    """The shapes of --shapes, else the challenge's; without it, --head-dim adds one shape each."""
    from attnforge.bagel.challenge.operator import FINAL, OTHERS
    from attnforge.runtime import export as exporting

    wanted = exporting.read_shapes(file) if file else []
    if challenge:
        return wanted or [*FINAL, *OTHERS]
    wanted += [exporting.Shape(1, 1, exporting.ROWS, dim) for dim in head_dims]
    if not wanted:
        raise ValueError("export: give --head-dim, --shapes, --specs or --contract openkernel")
    return wanted


def _dtypes(target: Arch, challenge: bool) -> tuple[DType, ...]:
    """The default of --dtype: bf16 on a GPU; the challenge needs every float dtype of the target."""
    if not target.is_gpu:
        return (DType.FLOAT32, DType.BFLOAT16)
    return tuple(DType) if challenge else (DType.BFLOAT16,)
