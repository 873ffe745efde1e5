"""The command `warm`: compiles kernels ahead of time (bagel/trainer/warm.py does the work)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from attnforge.bagel.commands.console import echo, warn_of_short_name
from attnforge.bagel.commands.options import (
    DIRECTORY,
    arch_option,
    choices,
    dtype_option,
    gpu_option,
    model_option,
    values,
    workers_option,
)
from attnforge.codegen.spec import Arch, DType, Mask
from attnforge.runtime.build.settings import CACHE_DIR, settings


@click.command(short_help="Compile kernels ahead of time.")
@model_option(default="7B", show_default=True)
@gpu_option(help="The GPU, as nvidia-smi -L names it: 'NVIDIA H200'.")
@arch_option(
    type=click.Choice([arch.value for arch in Arch if arch.is_gpu]),
    help="An architecture instead of --gpu, e.g. sm90a.",
)
@click.option("--cache", type=DIRECTORY, metavar="DIR", help="Cache directory to fill.")
@dtype_option(multiple=True, help=f"{choices(DType)}. Repeatable.  [default: bf16]")
@click.option(
    "--mask",
    multiple=True,
    type=values(Mask),
    metavar="KIND",
    help=f"{choices(Mask)}. Repeatable.  [default: all]",
)
@click.option("--deterministic", is_flag=True, help="Also compile the kernels for deterministic=True.")
@workers_option()
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
    """Compile the kernels that training a model needs.

    This machine needs no GPU. Copy the cache directory (cp -a) to machines without a compiler or a network.
    """
    from attnforge.bagel.trainer import warm as warming
    from attnforge.runtime.native.launcher import launcher

    if cache is not None:
        os.environ[CACHE_DIR] = str(cache)
    targets = warming.gpu_targets(gpu, arch)
    warn_of_short_name(gpu)
    request = warming.request(model, dtype, mask, deterministic=deterministic)
    wanted = warming.specs(request, targets)
    begin, failed = time.perf_counter(), []
    modules = warming.compile_mask_kernels(targets)
    prologues = warming.compile_prologues(request, targets)
    for count, done in enumerate(warming.compile_all(wanted, workers), 1):
        if done.error is not None:
            failed.append(str(done.error))
        echo(f"{count}/{len(wanted)} {done.spec.slug}{' FAILED' if done.error else ''}")
    echo(
        f"{len(wanted) - len(failed)} attention kernels, {prologues} of qk_norm_rope and {modules} mask "
        f"module{'s' * (modules > 1)} in "
        f"{settings().cache_dir}, {time.perf_counter() - begin:.0f} s"
    )
    launcher()
    import torch

    echo(
        f"The launcher is built for torch {torch.__version__} and this C library. A machine where either differs "
        "builds it again and needs a C++ compiler."
    )
    if failed:
        raise click.ClickException("\n".join(failed))
