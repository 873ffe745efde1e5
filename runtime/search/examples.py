"""The sources in generated/: one example for each family, pass and mask kind, and an index of them.

The examples are for reading, and the diff of a changed template shows in them. Dispatch does not read them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from attnforge.codegen.families.cpu import CpuBackward, CpuForward, needs_amx
from attnforge.codegen.prologue import PrologueProblem, PrologueSpec
from attnforge.codegen.prologue import candidates as candidates_of_prologue
from attnforge.codegen.prologue import render as render_prologue
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates, splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.prologue_kernels import tuned_specs as tuned_prologues
from attnforge.runtime.search.winners import GENERATED, tuned_entries
from attnforge.runtime.tables import PACKAGED, Tuned

H200 = "NVIDIA H200"
FLAGSHIP, RATIO = 128, 7  # head_dim of BAGEL-7B, and its query heads of a kv head
PACK = "pretrain/"  # begins the names of the cases that are BAGEL's pretraining packs
DTYPES = (DType.BFLOAT16, DType.FLOAT32)
CPU_SHOWN: tuple[CpuForward | CpuBackward, ...] = (
    CpuForward(48, 64, 8, 16, 8, 3, pairs=True),
    CpuForward(32, 128, 8, 16, 32, 2, pairs=True, amx=True),
    CpuBackward(48, 96, 16, 8, 3, pairs=True),
)
SUFFIXES = (".cu", ".cpp")
INDEX = "README.md"


def examples(directory: Path = GENERATED) -> list[Spec]:
    """The chosen specs, sorted by slug; none of a search for deterministic gradients.

    For each (family, pass, mask kind) in the GPU tables, where masks by a function are a kind of their own: the entry
    at head_dim 128, or at the nearest one, in bf16, without a score, of BAGEL-7B's GQA ratio and of its pretraining
    packs if there is one, of the most visible keys where the mask lists them, then of the longest sequence, then of the
    highest speed. A (family, pass) without an entry is shown by its first candidate for `spans`, at head_dim 128 if it
    takes that; the CPU's, whose tables and first candidates belong to one machine, by `CPU_SHOWN`. Last, the kernel for
    short queries.
    """
    chosen: dict[tuple[str, Direction, Mask, bool], Spec] = {}
    plain = (entry for entry in tuned_entries(directory) if not entry.deterministic)
    gpu = (entry for entry in plain if entry.spec.problem.arch.is_gpu)
    for entry in sorted(gpu, key=_preference):
        problem = entry.spec.problem
        kind = problem.mask, bool(problem.mask_mod)
        chosen.setdefault((problem.family, problem.direction, *kind), entry.spec)
    shown = {(family, direction) for family, direction, *_ in chosen} | {("cpu", d) for d in Direction}
    for dim, arch, direction, dtype in product((FLAGSHIP, 256), Arch, Direction, DTYPES):
        problem = Problem(direction, arch, dtype, dim, Mask.SPANS, 16 if arch.is_gpu else 4)
        if (problem.family, direction) not in shown and (spec := _first(problem)) is not None:
            shown.add((problem.family, direction))
            chosen[problem.family, direction, Mask.SPANS, False] = spec
    short = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, FLAGSHIP, Mask.CAUSAL)
    specs = [*chosen.values(), *map(_on_cpu, CPU_SHOWN), next(splitting(short, RATIO * 64))]
    return sorted(specs, key=lambda spec: spec.slug)


def _on_cpu(tuning: CpuForward | CpuBackward) -> Spec:
    direction = Direction.FORWARD if isinstance(tuning, CpuForward) else Direction.BACKWARD
    return Spec(Problem(direction, Arch.CPU, DType.BFLOAT16, FLAGSHIP, Mask.SPANS, 4), tuning)


def prologues() -> list[PrologueSpec]:
    """Kernels of `qk_norm_rope` at head_dim 128, both passes: the package's winners on an H200, and the CPU's first."""
    tuned = {spec.problem: spec for spec in tuned_prologues(H200, PACKAGED)}
    problems = [
        PrologueProblem(direction, arch, DType.BFLOAT16, FLAGSHIP, DType.BFLOAT16)
        for arch in (Arch.SM90A, Arch.CPU)
        for direction in Direction
    ]
    return [tuned.get(problem) or next(candidates_of_prologue(problem)) for problem in problems]


def _preference(entry: Tuned) -> tuple[int, bool, bool, bool, bool, int, int, float]:
    problem = entry.spec.problem
    distance, other = abs(problem.head_dim - FLAGSHIP), problem.dtype is not DType.BFLOAT16
    work = entry.group != RATIO, not str(entry.notes.get("case", "")).startswith(PACK)
    length = -entry.visible_keys, -entry.size
    return distance, other, bool(problem.score), *work, *length, -entry.tflops


def _first(problem: Problem) -> Spec | None:
    """The first candidate; None if no family computes this."""
    return next(candidates(problem), None)


def write(directory: Path = GENERATED) -> list[Path]:
    """Write the examples and the index, and remove other generated sources; returns the files that changed."""
    changed = list(_compare(directory))
    for path, _, text in changed:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    return [path for path, _, _ in changed]


def differences(directory: Path = GENERATED) -> list[str]:
    """What `write` would change, as unified diff lines; empty if nothing."""
    lines: list[str] = []
    for path, old, new in _compare(directory):
        before, after = ((text or "").splitlines(keepends=True) for text in (old, new))
        lines += difflib.unified_diff(before, after, f"{path.name} (on disk)", f"{path.name} (rendered)")
    return lines


def _compare(directory: Path) -> Iterator[tuple[Path, str | None, str | None]]:
    """(path, text on disk, expected text) of each file that differs; None stands for no file."""
    specs = examples(directory)
    wanted = {source.file_name: source.text for source in map(render, specs)}
    wanted |= {source.file_name: source.text for source in map(render_prologue, prologues())}
    wanted |= {INDEX: index(specs)}
    present = {}
    for path in directory.glob("*"):
        if path.name == INDEX or path.suffix in SUFFIXES:
            text = path.read_text(errors="replace")
            # A user may have own files here: only sources that we generated are removed.
            if path.name in wanted or text.startswith("// attnforge_"):
                present[path.name] = text
    for name in sorted(wanted.keys() | present.keys()):
        if wanted.get(name) != present.get(name):
            yield directory / name, present.get(name), wanted.get(name)


# What to read in an example: by template folder and dtype (`family`) and pass.
_SUBJECTS = {
    (
        "cpu",
        "fwd",
    ): "C++ with compiler vectors and OpenMP: `lanes` queries per vector, tiles that fit the caches",
    ("cpu", "bwd"): "the same blocking for dK, dV and dQ; sums in a fixed order, so it is deterministic",
    ("sm80", "fwd"): "mma.sync and cp.async: runs from capability 8.0 on, and on Hopper for unaligned rows",
    ("sm80", "bwd"): "mma.sync with the warps split differently for each of the five products",
    ("sm80_fp32", "fwd"): "float32 from three tf32 products per product; short sums on the tensor cores",
    ("sm80_fp32", "bwd"): "the five products of the backward in split tf32",
    ("sm90a", "fwd"): "a TMA producer thread and wgmma consumer warpgroups; softmax overlaps the next Q K^T",
    ("sm90a", "bwd"): "wgmma for all five products, dQ summed through TMA reductions, overlapped launches",
    (
        "sm90a_wide",
        "fwd",
    ): "head_dim 384 and 512: two blocks have half of the columns each, and exchange parts of S",
    ("sm90a_wide", "bwd"): "up to head_dim 256: one warpgroup sums dV, the other dK, both transposed",
    ("sm90a_fp32", "fwd"): "float32 from six bf16 wgmma products per product",
}
_SPLITS = "for short queries: blocks and clusters share the keys, q heads of a kv head a tile; a second kernel combines"
_AMX = "the same forward with its products in the tile registers of Intel AMX: 16 x 16 sums an instruction"
_MASKS = {
    Mask.FULL: "no mask code at all, apart from the last tile of K",
    Mask.CAUSAL: "tiles above the diagonal are skipped; only tiles on it are masked",
    Mask.SPANS: "BAGEL's masks: tile lists built on the device from two int32 per key",
    Mask.DENSE: "any bool mask: one bit per pair, and tile lists made from it",
}
_FUNCTION = "any function: tiles classified by intervals of its values, pairs of partial tiles by calls of it"


def index(specs: Iterable[Spec]) -> str:
    """generated/README.md: how to read a source, and what each example shows."""
    rows = []
    for spec in specs:
        problem = spec.problem
        what = _SUBJECTS.get((problem.family, problem.direction.value), "")
        what = _AMX if needs_amx(spec) else what
        what = _SPLITS if getattr(spec.tuning, "splits", 0) else what
        cells = (
            f"[{spec.slug}]({render(spec).file_name})",
            problem.direction.value,
            problem.mask.value,
            f"{what}. Mask: {_FUNCTION if problem.mask_mod else _MASKS[problem.mask]}.",
        )
        rows.append(f"| {' | '.join(cells)} |")
    kernels = (
        f"| [{spec.slug}]({render_prologue(spec).file_name}) | {spec.problem.direction.value} |"
        for spec in prologues()
    )
    return _INDEX.format(rows="\n".join(rows), prologues="\n".join(kernels))


_INDEX = """\
# Generated kernels

Examples to read: one for each kernel family, pass and mask kind. `python cli.py render --tuned` writes them (and this
page) from the templates; do not edit them. [tuned/](tuned) holds the tables that dispatch reads: which variant won
which problem class on which device. Dispatch renders and compiles any variant at run time, so most winners have no file
here. To print the source of any variant, use `python cli.py render` with the flags of its spec.

## How to read one

A file name is a spec: pass, architecture, dtype, head_dim, mask, alignment of rows, then the knobs. Every file is
complete: it includes no header of ours or of CUTLASS. From the top:

| section | holds |
| --- | --- |
| header comment | the command that regenerates the file, each knob in words, the algorithm, the roles of the threads |
| `struct Params` | the kernel's one argument, filled by the launcher |
| Specialisation | every size as a named constant |
| PTX | one instruction per function |
| Mask, Tile schedule | which tiles are visited, in which order, and which pairs are visible |
| the rest, down to Kernel | the algorithm; start at `Kernel`, at the end, and read upwards |

To change a kernel: edit its template (`templates/`), run `python cli.py render --tuned`, and review the diff here.

## Examples

Start with the forward of `sm90a` for `full` masks; `spans` adds tile lists to it.

| source | pass | mask | what to look at |
| --- | --- | --- | --- |
{rows}

Kernels of `qk_norm_rope`, which normalises the heads of q and k and rotates them before attention
([training.md](../docs/training.md#qk-norm-and-rotary-embedding)). Their names end with the knobs of
codegen/prologue.py.

| source | pass |
| --- | --- |
{prologues}
"""
