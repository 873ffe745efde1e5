"""The command `warm`: parses and prints; bagel/trainer/warm.py does the work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from attnforge.bagel.commands.shell import values
from attnforge.codegen.spec import Arch, DType, Mask
from attnforge.runtime.build.settings import CACHE_DIR, settings


@click.command()
@click.option("--model", default="7B", show_default=True, help="7B, 1.5B, 0.5B or vit.")
@click.option("--gpu", help="Its name, as nvidia-smi -L shows it: 'NVIDIA H200'.")
@click.option(
    "--arch", type=click.Choice([arch.value for arch in Arch if arch.is_gpu]), help="Or its architecture."
)
@click.option(
    "--cache", type=click.Path(path_type=Path, file_okay=False), help="Not the usual cache directory."
)
@click.option("--dtype", multiple=True, type=values(DType), help="Repeatable. [default: bf16]")
@click.option("--mask", multiple=True, type=values(Mask), help="Repeatable. [default: all]")
@click.option("--deterministic", is_flag=True, help="Also what deterministic=True asks for.")
@click.option("--workers", type=click.IntRange(1), help="Compilers at a time. [default: one a CPU]")
def warm(
    model: str,
    gpu: str | None,
    arch: str | None,
    cache: Path | None,
    dtype: tuple[str, ...],
    mask: tuple[str, ...],
    deterministic: bool,
    workers: int | None,
) -> None:
    """Compile ahead of time what training a model asks for.

    The GPU need not be here. The cache directory can then be copied (cp -a) to machines without a compiler or a
    network.
    """
    from attnforge.bagel.trainer import warm as warming
    from attnforge.runtime.native.launcher import launcher

    if cache is not None:
        os.environ[CACHE_DIR] = str(cache)
    targets = warming.gpu_targets(gpu, arch)
    wanted = warming.specs(warming.request(model, dtype, mask, deterministic=deterministic), targets)
    begin, failed = time.perf_counter(), []
    modules = warming.compile_mask_kernels(targets)
    for count, done in enumerate(warming.compile_all(wanted, workers), 1):
        if done.error is not None:
            failed.append(str(done.error))
        click.echo(f"{count}/{len(wanted)} {done.spec.slug}{' FAILED' if done.error else ''}")
    click.echo(
        f"{len(wanted) - len(failed)} kernels, and {modules} module{'s' * (modules > 1)} that make masks, in "
        f"{settings().cache_dir}, {time.perf_counter() - begin:.0f} s"
    )
    launcher()
    import torch

    click.echo(
        f"and the launcher for torch {torch.__version__} on this C library: where either differs, it is built once, "
        "by a C++ compiler there"
    )
    if failed:
        raise click.ClickException("\n".join(failed))
