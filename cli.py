"""Command line of attnforge: parses arguments, calls the library, prints. `python cli.py` or `attnforge`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from attnforge.bagel.commands.challenge import challenge, export, model_command
from attnforge.bagel.commands.render import render
from attnforge.bagel.commands.shell import Commands, file_option, out_option, values
from attnforge.bagel.commands.tables import tables
from attnforge.bagel.commands.warm import warm
from attnforge.codegen.spec import Arch, DType, Spec

if TYPE_CHECKING:  # torch takes a second to import: commands that do not need it do without
    from attnforge.bagel.commands.selection import Selection
    from attnforge.bagel.measure.bench import Row

console = Console(width=None if sys.stdout.isatty() else 140)  # a log has no width of its own


def selecting(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose what to run on; the command gets them as one `Selection`."""

    @click.option(
        "--pack", multiple=True, help="pretrain/0, full/4x8192, causal/2048, blocks/0.9; repeatable."
    )
    @file_option("--packs", help="JSONL of attnforge.bagel.record: 3 of its packs, lightest to heaviest.")
    @click.option("--model", help="Attention heads: 7B, 1.5B, 0.5B or vit.")
    @click.option("--dtype", type=values(DType))
    @click.option("--direction", type=click.Choice(["fwd", "bwd", "both"]), default="both")
    @click.option("--device", help="cpu, cuda or cuda:N; without it the GPU if there is one.")
    @click.option("--arch", type=values(Arch), help="Kernel family; without it the best of the device.")
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
        command(select(pack, model, dtype, direction, device, arch), **rest)

    return wrapped


def write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
def main(traceback: bool) -> None:
    """Generate, search, check and read attention kernels for BAGEL's training packs."""


@main.command()
@selecting
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="Per pack and direction. [default: 50 on a CPU, 180 on a GPU]",
)
@click.option("--variants", type=click.IntRange(1), help="Per pack and direction.")
@file_option("--log", help="JSONL to append to, and to resume from.")
@click.option(
    "--table-out",
    type=click.Path(path_type=Path),
    help="Folder for winners. [default: the first of ATTNFORGE_TABLES, else the user's data folder]",
)
@click.option("--no-peers", is_flag=True, help="Do not time torch's attentions.")
@click.option("--workers", type=click.IntRange(1), help="Compilers at a time. [default: one a CPU]")
@out_option("--json", "json_out", help="Write the results to this file.")
def search(
    selection: Selection,
    seconds: float | None,
    variants: int | None,
    log: Path | None,
    table_out: Path | None,
    no_peers: bool,
    workers: int | None,
    json_out: Path | None,
) -> None:
    """Find the fastest kernels for a pack. They are what `attention` runs from then on."""
    from attnforge.bagel.commands.search_screen import Options, run_search
    from attnforge.bagel.measure.bench import machine
    from attnforge.runtime.search.search import Budget

    if seconds is None and variants is None:
        seconds = 50.0 if selection.device.type == "cpu" else 180.0
    options = Options(Budget(seconds, variants), log, table_out, workers, not no_peers)
    facts = machine(selection.device)
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    found = []
    for case in selection.cases():
        for direction in selection.directions:
            for target in selection.targets(direction):
                found.append(run_search(case, direction, target, options, console))
                write_json(json_out, {"machine": facts, "searches": found})


@main.command()
@selecting
@click.option("--suite", type=click.Choice(["dense", "packs"]), default="packs", help="Cases without --pack.")
@click.option("--peers", help="Names with commas between; without it all, empty for none.")
@out_option("--json", "json_out", help="Write the rows to this file.")
@out_option("--markdown", help="Write a Markdown table to this file.")
def bench(
    selection: Selection, suite: str, peers: str | None, json_out: Path | None, markdown: Path | None
) -> None:
    """Time ours against SDPA's backends and FlexAttention in one run."""
    from attnforge.bagel.measure import bench as bench_module
    from attnforge.bagel.measure.report import bench_markdown, bench_table

    chosen = bench_module.chosen_peers(peers, selection.device)
    facts = bench_module.machine(selection.device)
    rows: list[Row] = []
    with console.status("timing") as status:
        for case in selection.cases(suite):
            for row in bench_module.bench([case], selection.directions, chosen):
                rows.append(row)
                if not console.is_terminal:  # a log shows how far it is
                    line = f"{row.case} {row.direction} {row.name}: {row.note or f'{row.ms:.3g} ms'}"
                    console.print(line, highlight=False, markup=False)
                status.update(f"timed {row.case} {row.direction} {row.name}")
                write_json(json_out, bench_module.to_json(rows, selection.device))  # a run may be cut off
    console.print(bench_table(rows, ", ".join(f"{key} {value}" for key, value in facts.items())))
    if markdown is not None:
        markdown.write_text(bench_markdown(rows, facts))
    if problems := bench_module.failed(rows):
        raise click.ClickException("\n".join(("ours failed:", *problems)))


@main.command()
@selecting
@click.option(
    "--variants",
    type=click.IntRange(0),
    default=0,
    help="Check the first N candidates, not dispatch's choice.",
)
def verify(selection: Selection, variants: int) -> None:
    """Check kernels against float64 and SDPA's error. On packs, and on a small odd relative of each."""
    from attnforge.bagel.measure.report import verify_table
    from attnforge.codegen.space import candidates
    from attnforge.runtime import kernels
    from attnforge.runtime.search.verify import WrongResult
    from attnforge.runtime.search.worker import Bench

    wrong = 0
    for case in selection.cases():
        for direction in selection.directions:
            bench = Bench(case, direction)
            problem = case.problem(direction, selection.target(direction)[0])
            specs: list[Spec | None] = list(islice(candidates(problem), variants))
            for spec in specs or [None]:
                name = f"{direction.value} {case.dtype.value}, {spec.slug if spec else 'as dispatched'}"
                try:
                    for check, errors in bench.verify(kernels.load(spec, case.device) if spec else 0):
                        console.print(verify_table(f"{check.case.name} {name}", check.peer, errors))
                except WrongResult as error:
                    wrong += 1
                    console.print(f"[bold red]wrong[/bold red] {case.name} {name}: {error}", soft_wrap=True)
    if wrong:
        raise click.ClickException(f"{wrong} kernels are wrong")


@main.command()
@click.argument("pack", default="pretrain/0")
@out_option("--out", default=Path("mask.png"), show_default=True)
@click.option("--tile-m", type=click.IntRange(1), default=128, show_default=True, help="Queries per tile.")
@click.option("--tile-n", type=click.IntRange(1), default=128, show_default=True, help="Keys per tile.")
@click.option("--vit", is_flag=True, help="The vision encoder's mask instead of the language model's.")
def mask(pack: str, out: Path, tile_m: int, tile_n: int, vit: bool) -> None:
    """Draw a pack's mask and how a kernel's tiles cover it, as a PNG."""
    from attnforge.bagel.pictures.mask import draw_mask
    from attnforge.bagel.workloads import workload

    chosen = workload(pack)
    packed = chosen.vit_mask("cpu") if vit else chosen.mask("cpu")
    draw_mask(packed, f"BAGEL pack {pack}{', vision encoder' if vit else ''}", tile_m, tile_n).save(out)
    console.print(f"{out}: {packed.starts.numel()} tokens, {packed.pairs} visible pairs", soft_wrap=True)


@main.group()
def cache() -> None:
    """The compiled kernels on disk."""


@cache.command("ls")
def cache_ls() -> None:
    """List them, newest first."""
    from attnforge.bagel.measure.report import cache_table
    from attnforge.runtime.build.cache import entries
    from attnforge.runtime.build.settings import settings

    console.print(cache_table(entries()))
    console.print(str(settings().cache_dir), style="dim", soft_wrap=True)


@cache.command("clear")
def cache_clear() -> None:
    """Remove them; they are compiled again when needed."""
    from attnforge.runtime.build.cache import clear

    console.print(f"{clear()} entries removed")


@main.command()
def doctor() -> None:
    """Say what this machine has and lacks, and what to do about it."""
    from attnforge.bagel.measure.report import doctor_table
    from attnforge.runtime.doctor.checks import report
    from attnforge.runtime.doctor.findings import FAILURE

    findings = report()
    console.print(doctor_table(findings))
    if any(finding.status == FAILURE for finding in findings):
        raise click.ClickException("something is missing: see the remedies above")


for command in (challenge, export, model_command, render, tables, warm):
    main.add_command(command)

if __name__ == "__main__":
    main()
