"""Commands `tables list | show | diff | merge`: the tuned tables that dispatch reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnforge.bagel.commands.console import console, echo, make_table

if TYPE_CHECKING:  # torch takes a second to import
    from attnforge.runtime.tables import Tuned

DETERMINISTIC = " deterministic"  # behind the kernel of an entry that only calls with deterministic=True take
CLOSE = 1.1  # the same kernel's speeds differ by that much between runs (docs/performance.md)
FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


@click.group(short_help="List, compare and merge tuned tables.")
def tables() -> None:
    """Tuned tables: which kernel is fastest on which device.

    They are read from the folders of ATTNFORGE_TABLES (default: the user's data folder), then from the package.
    """


@tables.command("list")
def list_tables() -> None:
    """List the folders in reading order."""
    from attnforge.runtime.tables import MODELLED, folders, load

    written = folders()[0]
    for place in folders():
        echo(f"{place}{'  (searches write here)' if place == written else ''}")
        for path in sorted((*place.glob("*.json"), *(place / MODELLED).glob("*.json"))):
            words = "modelled, not measured" if path.parent.name == MODELLED else "measured"
            entries = load(path.stem, path.parent)
            strict = sum(entry.deterministic for entry in entries)
            of_them = f"; {strict} for deterministic calls" if strict else ""
            echo(
                f"  {path.stem}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {words}{of_them}"
            )


@tables.command()
@click.argument("device", required=False)
def show(device: str | None) -> None:
    """Show the entries for a device.

    DEVICE is a name as `list` prints it; the default is this machine's device. GQA: query heads of a kv head. rows:
    queries. keys: how many keys a query sees on average. Behind a kernel's name: when and with which versions it was
    measured, as far as the entry says. `N rounds`: of a call with few tiles.
    """
    from attnforge.runtime.tables import MODELLED, folders, known

    name = device or _here()
    modelled = known(name, [place / MODELLED for place in folders()])
    parts = {name: known(name), f"{name}, modelled, not measured": modelled}
    if not any(parts.values()):
        raise ValueError(f"device: no table is for {name!r}; `attnforge tables list` shows what there is")
    for title, entries in parts.items():
        if entries:
            echo(f"{title}\n{'TFLOP/s':>7} {'GQA':>3} {'rows':>6} {'keys':>6}  kernel")
        for entry in sorted(entries, key=lambda entry: (entry.spec.slug, entry.deterministic)):
            echo(_line(entry))


@tables.command()
@click.argument("first", type=FOLDER)
@click.argument("second", type=FOLDER)
def diff(first: Path, second: Path) -> None:
    """Compare two folders.

    Prints the problem classes whose winners differ, with both speeds.
    """
    from attnforge.runtime.tables import load

    table = make_table("different winners", ("device", "class", str(first), str(second)))
    for name in sorted({path.stem for place in (first, second) for path in place.glob("*.json")}):
        one, other = ({str(e.cls): e for e in load(name, place)} for place in (first, second))
        for cls in sorted(one.keys() | other.keys()):
            a, b = one.get(cls), other.get(cls)
            if a is None or b is None or a.spec != b.spec:
                table.add_row(name, _class(next(e for e in (a, b) if e)), _speed(a), _speed(b))
    console.print(table if table.row_count else "no difference")


@tables.command()
@click.argument("sources", type=FOLDER, nargs=-1, required=True)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the merged tables.  [default: where searches write]",
)
def merge(sources: tuple[Path, ...], into: Path | None) -> None:
    """Merge folders into one.

    If several folders have an entry for a problem class, the fastest one is kept. Speeds that were measured in
    different runs, or on different GPUs of one model, differ by up to 10 %. Classes whose entries differ by less are
    listed, so that you can search them again.

    The kernels' sources are written next to the table, as by `search`, except in the package's own folder.
    """
    from attnforge.runtime.tables import folders, load, save, writable

    target = writable(into or folders()[0])
    for source in sources:
        for path in sorted(source.glob("*.json")):
            entries = load(path.stem, source)
            before = {e.key: e for e in load(path.stem, target)}
            save(path.stem, entries, target, beside=())
            taken = [e for e in load(path.stem, target) if before.get(e.key) != e]
            console.print(
                f"{path.stem}: {len(taken)} of {len(entries)} entries taken from {source}", soft_wrap=True
            )
            _list_close([(before[e.key], e) for e in entries if e.key in before])
            _write_sources(taken, target)


def _list_close(pairs: Sequence[tuple[Tuned, Tuned]]) -> None:
    """List pairs of entries of one class whose kernels are too close to tell from two runs which one is faster."""
    close = [
        (a, b)
        for a, b in pairs
        if a.spec != b.spec and max(a.tflops, b.tflops) < CLOSE * min(a.tflops, b.tflops)
    ]
    if close:
        echo(
            f"  {len(close)} chosen by less than 10 %, which one kernel differs by between runs and between GPUs of a "
            "model; search these problems again to compare kernels in one run:"
        )
    for before, new in close:
        kept, other = (before, new) if before.tflops > new.tflops else (new, before)
        echo(f"  {_class(kept)}, {kept.size} rows: kept {_speed(kept)}; other {_speed(other)}")


def _write_sources(entries: Sequence[Tuned], folder: Path) -> None:
    """The kernels' sources, beside the table; names those of older versions, which cannot be rendered any more."""
    from attnforge.codegen.plan import Infeasible
    from attnforge.runtime.search.winners import write_source

    for spec in dict.fromkeys(entry.spec for entry in entries):
        try:
            write_source(spec, folder)
        except Infeasible as error:
            echo(f"  no source of {spec.slug}: {error}")


def _here() -> str:
    import torch

    from attnforge.runtime.tables import device_name

    return device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _line(entry: Tuned) -> str:
    """Numbers first: the kernel's name is as long as it is, and stays whole."""
    seen = entry.visible_keys or ""
    strict = DETERMINISTIC if entry.deterministic else ""
    line = f"{entry.tflops:#7.4g} {entry.group:>3} {entry.size:>6} {seen:>6}  {entry.spec.slug}{strict}{_rounds(entry)}"
    return "; ".join((line, *_provenance(entry)))


def _rounds(entry: Tuned) -> str:
    from attnforge.runtime.rounds import MANY

    return f", {entry.rounds} rounds" if entry.rounds < MANY else ""


def _provenance(entry: Tuned) -> list[str]:
    """Date, versions of attnforge and of the driver, and clocks, as far as the entry has them."""
    words = {"date": "{}", "attnforge": "attnforge {}", "driver": "driver {}", "clocks": "{}"}
    return [text.format(entry.notes[name]) for name, text in words.items() if name in entry.notes]


def _class(entry: Tuned) -> str:
    problem: Any = entry.spec.problem
    dims = f"{problem.head_dim}" + (f"/{problem.dim_v}" if problem.dim_v else "")
    words = (problem.direction.value, problem.arch.value, problem.dtype.value, dims, problem.mask.value)
    return " ".join(words) + (DETERMINISTIC if entry.deterministic else "") + _rounds(entry)


def _speed(entry: Tuned | None) -> str:
    from attnforge.bagel.measure.report import speed

    return f"{speed(entry.tflops)}, {entry.spec.slug}" if entry else "-"
