"""The command `show`: a kernel's source, PTX, SASS or registers, or how two kernels differ in them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence

import click
from rich.syntax import Syntax

from attnforge.bagel.commands.console import console, echo, make_table
from attnforge.bagel.commands.options import SCORE_HELP, score_option
from attnforge.codegen.formula import Formula
from attnforge.codegen.spec import Spec

# What can be shown, with its highlighting.
KINDS = {"source": "cuda", "ptx": "ptx", "sass": "nasm", "registers": ""}


@click.command(short_help="Show a kernel's source, PTX, SASS or registers.")
@click.argument("kernel")
@click.argument("other", required=False)
@click.option(
    "--what",
    type=click.Choice(list(KINDS)),
    default="source",
    metavar="KIND",
    help="source, ptx, sass or registers.  [default: source]",
)
@score_option(help=f"For a kernel that is in no tuned table. {SCORE_HELP}")
def show(kernel: str, other: str | None, what: str, scores: tuple[str, ...]) -> None:
    """Show a kernel, or the difference of two.

    KERNEL is a kernel's name, as profilers, `explain` and `tables show` print it. With OTHER, the difference from
    KERNEL to OTHER is printed. For SASS and registers the kernel is compiled, unless it is in the cache.

    A name contains only a digest of a score or mask function. The function is looked up in the tuned tables.
    """
    from attnforge.codegen.slugs import parse

    functions = tuple(_functions(scores))
    specs = [parse(name, functions) for name in (kernel, other) if name is not None]
    if what == "registers":
        _registers(specs)
        return
    text = _text_of(what)
    if len(specs) == 1:
        language = KINDS[what] if specs[0].problem.arch.is_gpu else "cpp"
        _print(text(specs[0]), language)
        return
    (one, two), (before, after) = ([spec.slug for spec in specs], [text(spec).splitlines() for spec in specs])
    changed = difflib.unified_diff(before, after, one, two, lineterm="")
    _print("\n".join(changed) or f"no difference in {what}", "diff")


def _functions(scores: Sequence[str]) -> Iterator[Formula]:
    """The functions of masks and scores in any table, and these scores, as `--score` has them."""
    from attnforge.bagel.measure.case_scores import function_named
    from attnforge.runtime.tables import folders, load

    yield from map(function_named, scores)
    for place in folders():
        for entry in (entry for path in place.glob("*.json") for entry in load(path.stem, place)):
            yield from filter(None, (entry.spec.problem.mask_mod, entry.spec.problem.score))


def _text_of(what: str) -> Callable[[Spec], str]:
    from attnforge.codegen.render import render
    from attnforge.runtime.build import disassembly

    if what == "source":
        return lambda spec: render(spec).text
    make = disassembly.ptx if what == "ptx" else disassembly.sass
    return lambda spec: make(render(spec))


def _print(text: str, language: str) -> None:
    """Highlighted on a terminal, plain into a pipe."""
    if console.is_terminal:
        console.print(Syntax(text, language, background_color="default"))
    else:
        click.echo(text.rstrip("\n"))


def _registers(specs: list[Spec]) -> None:
    """The launches of each kernel: registers and spills of a thread, shared memory of a block."""
    from attnforge.codegen.render import render
    from attnforge.runtime.build.cache import obtain

    numbers = ("registers", "spilled bytes", "shared bytes", "threads")
    for spec in specs:
        source = render(spec)
        entry = obtain(source)
        table = make_table("", ("launch",), numbers)
        for launch in source.plan.launches:
            found = entry.meta["resources"].get(launch.symbol, {})
            shared = launch.shared_bytes + found.get("shared_bytes", 0)
            cells = (found.get("registers"), found.get("spill_bytes"), shared, launch.threads)
            name = launch.symbol.removeprefix(f"attnforge_{spec.slug}").lstrip("_") or "main"
            table.add_row(name, *("-" if cell is None else str(cell) for cell in cells))
        echo(spec.slug)  # whole, however long
        console.print(table)
