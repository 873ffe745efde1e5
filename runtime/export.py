"""Which kernels an exported package gets, and writing it (codegen/package.py makes its text)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import torch

from attnforge.codegen.families import spec_from_json
from attnforge.codegen.families.cpu import needs_amx
from attnforge.codegen.package import Item, Revision, Tree, unique
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.call import Call

ALIGN_GPU = 16  # bytes: the widest copy of the kernels
ROWS = 4096  # number of rows that kernels are chosen for if no shape is given
_UNKNOWN = ("visible_octave", "rounds")  # parts of an entry's class that a package does not tell apart


@dataclass(frozen=True)
class Shape:
    """A call to export for: q (batch, heads, rows, head_dim); k and v have heads / group heads, v has head_dim_v."""

    batch: int
    heads: int
    rows: int
    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    group: int = 1  # heads of q / heads of k and v


def read_shapes(path: Path) -> list[Shape]:
    """Shapes of a text file with lines `B H S D` or `B H S D Dv` and # comments. ValueError names a bad line."""
    shapes = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").strip("() \t").split()
        if not words:
            continue
        if len(words) not in (4, 5) or not all(word.isdigit() and int(word) > 0 for word in words):
            raise ValueError(f"{path}, line {number}: expected B H S D, such as 2 14 4096 64, got {line!r}")
        shapes.append(Shape(*map(int, words)))
    if not shapes:
        raise ValueError(f"{path}: holds no shape")
    return shapes


def target(arch: Arch) -> Arch:
    """What a package for `arch` is compiled for: for Hopper with its own instructions, by either of its names.

    The GPUs that run code for sm_90 are those that run code for sm_90a, and sm90a takes sm90's kernels besides.
    """
    return Arch.SM90A if arch is Arch.SM90 else arch


def collect(
    arch: Arch,
    shapes: Iterable[Shape],
    dtypes: Sequence[DType],
    masks: Sequence[Mask],
    directions: Sequence[Direction],
) -> tuple[Item, ...]:
    """A kernel for every combination, each once: what dispatch would take for compact tensors on `arch`.

    Raises Infeasible, saying for which, where there is no kernel.
    """
    chosen = []
    for shape, dtype, mask, direction in product(shapes, dtypes, masks, directions):
        dim_v = shape.head_dim_v or shape.head_dim
        problem = Problem(
            direction, arch, dtype, shape.head_dim, mask, alignment(arch, dtype, shape.head_dim, dim_v), dim_v
        )
        spec, reason = _first(problem, shape)
        chosen.append(Item(spec, shape.rows, reason))
    return unique(chosen)


def alignment(arch: Arch, dtype: DType, *columns: int) -> int:
    """Bytes that rows of so many columns are aligned to in compact tensors, as kernels count them."""
    bits = ALIGN_GPU if arch.is_gpu else 4
    for count in columns:
        bits |= count * dtype.bytes
    return bits & -bits


def _first(problem: Problem, shape: Shape) -> tuple[Spec, str]:
    for offer in _offers(problem, shape):
        return offer
    raise Infeasible(
        f"export: no {problem.arch.value} {problem.direction.value} kernel for {problem.dtype.value}, head_dim "
        f"{problem.head_dim}, mask {problem.mask.value}: {why_infeasible(problem)}"
    )


def _offers(problem: Problem, shape: Shape) -> Iterator[tuple[Spec, str]]:
    """Specs in dispatch's order, but for an architecture instead of a device.

    None for Intel AMX: its registers need a permission of the operating system, which a package does not request.
    """
    here = tables.device_name(torch.device("cpu")) if problem.arch is Arch.CPU else ""
    archs = (Arch.SM90A, Arch.SM90) if problem.arch is Arch.SM90A else (problem.arch,)
    for arch in archs:
        there = dataclasses.replace(problem, arch=arch)
        tuned = choosing.choose(Call(there, shape.group, shape.rows), here)
        first = ((spec, "first of the search space") for spec in candidates(there))
        of_tables = ((choice.spec, choice.reason) for choice in tuned)
        yield from ((spec, reason) for spec, reason in chain(of_tables, first) if not needs_amx(spec))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not a text file") from None


def _is_entry(entry: object) -> bool:
    """A spec, or an entry of a table, as far as it is read here."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class", {}), dict):
        return False
    return isinstance(entry.get("tflops", 0), int | float) and isinstance(entry.get("spec", {}), dict)


def read_specs(path: Path) -> tuple[Item, ...]:
    """Items of a JSON list of specs (`Spec.to_json`), or of a tuned table. ValueError names what is wrong.

    A package chooses by rows alone: of a table's entries that differ in visible keys or rounds only, the fastest one
    counts, and those for deterministic gradients are left out.
    """
    try:
        data = json.loads(_text_of(path))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: is not JSON ({error}), expected a list of specs or a tuned table"
        ) from None
    if not isinstance(data, list) or not all(map(_is_entry, data)):
        raise ValueError(f"{path}: expected a JSON list of specs or a tuned table")
    items = {}
    for number, entry in enumerate(sorted(data, key=lambda entry: float(entry.get("tflops", 0)))):
        if entry.get("class", {}).get("deterministic"):
            continue
        spec = spec_from_json(entry.get("spec", entry))
        if needs_amx(spec):
            raise ValueError(
                f"{path}: {spec.slug} needs the tile registers of Intel AMX, which packages do not use"
            )
        known = {name: value for name, value in entry.get("class", {}).items() if name not in _UNKNOWN}
        key = json.dumps(known) if known else number
        items[key] = Item(spec, int(entry.get("size", ROWS)), f"named in {path.name}")
    return unique(items.values())


def revision() -> Revision | None:
    """State of the git checkout that attnforge runs from; None for an installed package or without git."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ("git", *words), cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return Revision(commit, bool(changes))


def write(tree: Tree, directory: Path, command: str) -> list[Path]:
    """Write the package into `directory`, which must be empty or not exist yet (else ValueError). Returns its files."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory; remove it or name another one")
    paths = []
    for name, text in tree.files(command).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
        paths.append(path)
    return paths
