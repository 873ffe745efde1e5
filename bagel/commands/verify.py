"""The command `verify`: checks kernels against float64."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click
from rich.table import Table

from attnforge.bagel.commands.console import console, echo, make_table
from attnforge.bagel.commands.options import number, selecting
from attnforge.codegen.spec import Spec

if TYPE_CHECKING:
    from attnforge.bagel.commands.selection import Selection
    from attnforge.runtime.search.verify import Error


@click.command(short_help="Check kernels against float64.")
@selecting
@click.option("--variants", **number(0, least=0), help="Check the first N candidates; 0: dispatch's choice.")
def verify(selection: Selection, variants: int) -> None:
    """Check kernels against float64. The error limits are multiples of SDPA's errors.

    With --score, which SDPA cannot compute, they are multiples of the errors of the formula in float32, with the
    operands of its products and its results rounded to --dtype.

    Each pack is checked, and a smaller problem with odd lengths and the same kind of mask.
    """
    from attnforge.codegen.space import candidates
    from attnforge.runtime import kernels
    from attnforge.runtime.search.verify import WrongResult
    from attnforge.runtime.search.worker import Bench

    wrong = right = 0
    for case in selection.cases():
        for direction in selection.directions:
            bench = Bench(case, direction)
            problem = case.problem(direction, selection.target(direction)[0])
            specs: list[Spec | None] = list(islice(candidates(problem), variants))
            for spec in specs or [None]:
                name = f"{direction.value} {case.dtype.value}, {spec.slug if spec else 'as dispatched'}"
                try:
                    for check, errors in bench.verify(kernels.load(spec, case.device) if spec else 0):
                        peer = "SDPA" if case.score is None else "formula"
                        console.print(verify_table(f"{check.case.name} {name}", check.peer, errors, peer))
                    right += 1
                except WrongResult as error:
                    wrong += 1
                    console.print(f"[bold red]wrong[/bold red] {case.name} {name}: {error}", soft_wrap=True)
    if wrong:
        raise click.ClickException(f"{wrong} of {wrong + right} kernels are wrong")
    echo("the kernel is within all limits" if right == 1 else f"{right} kernels are within all limits")


def verify_table(
    title: str, peer: dict[str, tuple[float, float]], errors: dict[str, Error], peer_name: str = "SDPA"
) -> Table:
    """Errors against float64 beside those of the peer of that name, and the limits."""
    of_peer = (f"{peer_name}'s", "limit")
    table = make_table(title, ("tensor",), ("rms", *of_peer, "worst", *of_peer))
    for name, error in errors.items():
        theirs = [f"{value:.2e}" for value in peer.get(name, ())] or ["-", "-"]
        mine = (f"{error.rms:.2e}", theirs[0], f"{error.rms_limit:.2e}")
        worst = (f"{error.worst:.2e}", theirs[1], f"{error.worst_limit:.2e}")
        table.add_row(name, *mine, *worst)
    return table
