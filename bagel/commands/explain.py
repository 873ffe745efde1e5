"""The command `explain`: which kernel runs a call, and why not another."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from attnforge.bagel.commands.console import echo, echo_entry, warn_of_short_name
from attnforge.bagel.commands.options import gpu_option, number, selecting

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection
    from attnforge.runtime.call import Call
    from attnforge.runtime.dispatch import Target
    from attnforge.runtime.explain import Explanation


# `may_split` of runtime/native/split_choice.h.
MOST_QUERIES, LEAST_KEYS, KEYS_OF_A_QUERY = 512, 1024, 4


@click.command(short_help="Which kernel runs a call, and why.")
@selecting
@gpu_option(help="Explain for this GPU, e.g. 'NVIDIA H200', instead of --device.")
@click.option("--deterministic", is_flag=True, help="Explain calls with deterministic=True.")
@click.option("--most", **number(5, least=0), help="Table entries to show that were not chosen.")
def explain(selection: Selection, deterministic: bool, most: int) -> None:
    """Say which kernel runs a call, from which table entry, and why not the others.

    Nothing is compiled and nothing runs. --gpu explains for a GPU that is not here. A call that attention refuses is
    an error with the same message.
    """
    from attnforge.codegen.cost_model import multiprocessors
    from attnforge.codegen.spec import Direction
    from attnforge.runtime import explain as explaining
    from attnforge.runtime import kernels
    from attnforge.runtime.dispatch import Target, target_of

    gpu = selection.gpu
    warn_of_short_name(gpu)
    target = Target(gpu, kernels.targets_of(gpu)) if gpu else target_of(selection.device)
    if selection.arch is not None:
        if selection.arch not in target.archs:
            names = ", ".join(arch.value for arch in target.archs)
            raise ValueError(f"--arch: {target.name} runs {names}, not {selection.arch.value}")
        target = dataclasses.replace(target, archs=(selection.arch,))
    for case in selection.cases():
        case.check()
        case = dataclasses.replace(case, deterministic=deterministic)
        for direction in selection.directions:
            problem = case.problem(direction, target.archs[0])
            call = case.call(problem, multiprocessors(gpu) if gpu else None)
            found = explaining.explain(call, target)
            echo(f"{case.name} {direction.value} {case.dtype.value} on {target.name}")
            splitting = _splitting(call, case.seq_k, target) if direction is Direction.FORWARD else []
            _say(found, most, splitting)


def _splitting(call: Call, keys: int, target: Target) -> list[str]:
    """The kernels whose blocks share the keys, if a call of few queries for many keys may get one instead."""
    from attnforge.runtime.dispatch import choose_for

    if call.size > MOST_QUERIES or keys < max(LEAST_KEYS, KEYS_OF_A_QUERY * call.size):
        return []
    specs = (choose_for(call, target, rows).spec for rows in (64, 128))
    return list(dict.fromkeys(spec.slug for spec in specs if getattr(spec.tuning, "splits", 0)))


def _say(found: Explanation, most: int, splitting: list[str]) -> None:
    echo_entry("runs", found.choice.spec.slug)
    echo_entry("why", found.choice.reason.replace(f" as {found.choice.spec.slug}", "", 1))
    for slug in splitting:
        echo_entry("or", slug)
    if splitting:
        echo_entry(
            "", "where the predicted time is shorter if blocks share the keys (docs/concepts/dispatch.md)"
        )
    if found.fallback:
        echo_entry("", "`attnforge search` with the same options finds the fastest")
    elif found.choice.converted:
        echo_entry("", "`attnforge search --deterministic` with the same options may find a faster one")
    for arch in found.archs:
        echo_entry("not", f"{arch.name}: {arch.why}")
    for entry in found.entries[:most]:
        echo_entry("not", entry.name)
        echo_entry("", entry.why)
    if len(found.entries) > most:
        more = len(found.entries) - most
        echo_entry("and", f"{more} more {'entries' if more > 1 else 'entry'} (--most)")
