"""The command `explain`: which kernel runs a call, and why not another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import echo
from attnforge.bagel.commands.options import number, selecting

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection
    from attnforge.runtime.explain import Explanation


@click.command(short_help="Which kernel runs a call, and why.")
@selecting
@click.option("--gpu", metavar="NAME", help="As on this GPU, by its name: 'NVIDIA H200'.")
@click.option("--deterministic", is_flag=True, help="As with deterministic=True.")
@click.option("--most", **number(5, least=0), help="Passed-over entries to show.")
def explain(selection: Selection, gpu: str | None, deterministic: bool, most: int) -> None:
    """Say which kernel runs a call, from which table entry, and why not the others.

    Nothing is compiled and nothing runs. --gpu explains for a GPU that is not here.
    """
    from attnforge.codegen.spec import Direction
    from attnforge.runtime import explain as explaining
    from attnforge.runtime import kernels
    from attnforge.runtime.dispatch import Target, target_of

    target = Target(gpu, kernels.targets_of(gpu)) if gpu else target_of(selection.device)
    if selection.arch is not None:
        if selection.arch not in target.archs:
            names = ", ".join(arch.value for arch in target.archs)
            raise ValueError(f"--arch: {target.name} runs {names}, not {selection.arch.value}")
        target = dataclasses.replace(target, archs=(selection.arch,))
    for case in selection.cases():
        for direction in selection.directions:
            problem = case.problem(direction, target.archs[0])
            group = case.heads_q // case.heads_kv
            strict = deterministic and direction is Direction.BACKWARD
            found = explaining.explain(problem, group, case.seq_q, target, strict, case.visible_keys)
            echo(f"{case.name} {direction.value} {case.dtype.value} on {target.name}")
            _say(found, most)


def _say(found: Explanation, most: int) -> None:
    echo(f"  runs  {found.choice.spec.slug}")
    echo(f"  why   {found.choice.reason}")
    if found.fallback:
        echo("        `attnforge search` with the same options finds the fastest")
    for arch in found.archs:
        echo(f"  not   {arch.name}: {arch.why}")
    for entry in found.entries[:most]:
        echo(f"  not   {entry.name}\n        {entry.why}")
    if len(found.entries) > most:
        more = len(found.entries) - most
        echo(f"  and   {more} more {'entries' if more > 1 else 'entry'} (--most)")
