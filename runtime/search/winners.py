"""Winners of searches on disk: the tuned tables, and the rendered sources beside them that people read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnforge.codegen.render import render
from attnforge.codegen.spec import Spec
from attnforge.runtime import tables
from attnforge.runtime.search.search import Finished
from attnforge.runtime.tables import Tuned

GENERATED = tables.PACKAGED.parent  # <here>/tuned/<device>.json and <here>/<slug>.cu: the package's own
SUFFIXES = (".cu", ".cpp")


@dataclass(frozen=True)
class Kept:
    """What became of a winner: the table and the source that hold it, or the faster entry that stays."""

    table: Path
    source: Path | None
    stays: Tuned | None = None


def keep(finished: Finished, device_name: str, env: dict[str, str], directory: Path) -> Kept:
    """Write the winner into the device's table in `directory`, and its source beside it.

    A faster entry of its class stays, in this folder or in another that is read, unless this search timed its kernel
    too. In the package's own folder the sources of `generated/` are renewed instead.
    Raises ValueError if no variant worked, TablesError if the folder cannot be written.
    """
    entry = _entry(finished, env)
    tried = [result.spec for result in (*finished.ranked, *finished.failed)]
    for place in dict.fromkeys((directory, *tables.folders())):
        for old in tables.load(device_name, place):
            if old.cls == entry.cls and old.tflops > entry.tflops and old.spec not in tried:
                return Kept(tables.table_path(device_name, place), None, old)
    path = tables.save(device_name, [entry], directory, beside=tried)
    now = next(e for e in tables.load(device_name, directory) if e.cls == entry.cls)
    if now.spec != entry.spec:  # another process saved it meanwhile
        return Kept(path, None, now)
    if directory == tables.PACKAGED:
        write(GENERATED)
        return Kept(path, GENERATED / render(entry.spec).file_name)
    source = render(entry.spec)
    target = directory / source.file_name
    target.write_text(source.text)
    return Kept(path, target)


def _entry(finished: Finished, env: dict[str, str]) -> Tuned:
    winner, case = finished.winner, finished.case
    if winner is None:
        raise ValueError(f"{case.name}: no variant worked, there is nothing to keep")
    notes = {
        "case": case.name,
        "variants": len(finished.ranked) + len(finished.failed),
        "registers": winner.registers,
        "spill_bytes": winner.spill_bytes,
        "shared_bytes": winner.shared_bytes,
        **{name: value for name, value in env.items() if name != "device"},
    }
    ms, tflops = round(winner.ms, 4), round(winner.tflops, 3)
    group = case.heads_q // case.heads_kv
    return Tuned(winner.spec, group, case.seq_q, ms, tflops, notes, case.visible_keys)


def tuned_specs(directory: Path = GENERATED) -> list[Spec]:
    """Specs that the tables name, each once, by slug."""
    found = {
        entry.spec.slug: entry.spec
        for path in sorted((directory / "tuned").glob("*.json"))
        for entry in tables.load(path.stem, directory / "tuned")
    }
    return [found[slug] for slug in sorted(found)]


def write(directory: Path = GENERATED) -> list[Path]:
    """Render every tuned spec into `directory`, remove sources that are none; returns what changed."""
    changed = list(_compare(directory))
    for path, _, text in changed:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    return [path for path, _, _ in changed]


def differences(directory: Path = GENERATED) -> list[str]:
    """Unified diff lines between `directory` and what its tables render to now; empty if they agree."""
    lines: list[str] = []
    for path, old, new in _compare(directory):
        before, after = ((text or "").splitlines(keepends=True) for text in (old, new))
        lines += difflib.unified_diff(before, after, f"{path.name} (on disk)", f"{path.name} (rendered)")
    return lines


def _compare(directory: Path) -> Iterator[tuple[Path, str | None, str | None]]:
    """(path, text on disk, text it should have) where they differ; None for a file that is not there."""
    wanted = {source.file_name: source.text for source in map(render, tuned_specs(directory))}
    present = {}
    for path in directory.glob("*"):
        if path.suffix in SUFFIXES:
            text = path.read_text(errors="replace")
            # The directory may be anybody's: only what says that it is a source of ours is ever removed.
            if path.name in wanted or text.startswith("// attnforge_"):
                present[path.name] = text
    for name in sorted(wanted.keys() | present.keys()):
        if wanted.get(name) != present.get(name):
            yield directory / name, present.get(name), wanted.get(name)
