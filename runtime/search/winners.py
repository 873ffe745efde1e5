"""The winner of a search on disk: its entry in a tuned table, and its source beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attnforge import __version__
from attnforge.codegen.render import render
from attnforge.codegen.spec import Spec
from attnforge.runtime import tables
from attnforge.runtime.export import revision
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.search import Finished
from attnforge.runtime.tables import Tuned

# The package's own folder: tuned/<device>.json and the example sources (examples.py).
GENERATED = tables.PACKAGED.parent


@dataclass(frozen=True)
class Saved:
    """Where a winner was written, or the faster entry that stays in its place."""

    table: Path
    source: Path | None
    stays: Tuned | None = None


def keep(finished: Finished, device_name: str, env: dict[str, str], directory: Path) -> Saved:
    """Write the winner into `directory`/<device>.json, and its source beside it.

    An entry of the same class that is faster stays, in this folder or in another one that is read, unless this search
    timed its kernel too. The package's own folder gets no source: generated/ holds examples (examples.py).
    Raises ValueError if no variant worked, TablesError if the folder cannot be written.
    """
    entry = _entry(finished, env)
    tried = [result.spec for result in (*finished.ranked, *finished.failed)]
    for place in dict.fromkeys((directory, *tables.folders())):
        for old in tables.load(device_name, place):
            if old.cls == entry.cls and old.tflops > entry.tflops and old.spec not in tried:
                return Saved(tables.table_path(device_name, place), None, old)
    path = tables.save(device_name, [entry], directory, beside=tried)
    now = next(e for e in tables.load(device_name, directory) if e.cls == entry.cls)
    if now.spec != entry.spec:  # another process saved it meanwhile
        return Saved(path, None, now)
    return Saved(path, write_source(entry.spec, directory))


def write_source(spec: Spec, directory: Path) -> Path | None:
    """Render the source of an entry's kernel into its folder of tables; None, and no file, for the package's own.

    Raises Infeasible if a kernel of an older version cannot be rendered any more.
    """
    if directory.resolve() == tables.PACKAGED.resolve():
        return None
    source = render(spec)
    target = directory / source.file_name
    target.write_text(source.text)
    return target


def _entry(finished: Finished, env: dict[str, str]) -> Tuned:
    winner, case = finished.winner, finished.case
    if winner is None:
        raise ValueError(f"{case.name}: no variant worked, so there is no winner to save")
    notes = {
        "variants": len(finished.ranked) + len(finished.failed),
        "registers": winner.registers,
        "spill_bytes": winner.spill_bytes,
        "shared_bytes": winner.shared_bytes,
        "interval_ms": [round(winner.low_ms, 4), round(winner.high_ms, 4)],
        **({"warnings": list(finished.conditions.warnings)} if finished.conditions.warnings else {}),
    }
    return entry_of(case, winner.spec, winner.ms, winner.tflops, notes, env, finished.conditions.facts)


def entry_of(
    case: Case,
    spec: Spec,
    ms: float,
    tflops: float,
    notes: Mapping[str, Any],
    env: Mapping[str, str],
    facts: Mapping[str, str] | None = None,
) -> Tuned:
    """The entry of a kernel that took `ms` for a case: its class, speed and provenance.

    notes, env and facts are for readers: what was measured, `journal.environment`, and conditions of the run.
    """
    provenance = {
        "case": case.name,
        **notes,
        **{name: value for name, value in env.items() if name != "device"},
        **(facts or {}),
        "attnforge": _version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    direction = spec.problem.direction
    return Tuned(
        spec,
        case.heads_q // case.heads_kv,
        case.seq_q,
        round(ms, 4),
        round(tflops, 3),
        provenance,
        abs(case.visible_keys),
        case.deterministic,
        case.rounds(direction),
    )


def _version() -> str:
    """The version, and the commit of a checkout: `0.1.0 (1d2e3f4a, changed)`."""
    found = revision()
    if found is None:
        return __version__
    return f"{__version__} ({found.commit[:8]}{', changed' if found.dirty else ''})"


def tuned_entries(directory: Path = GENERATED) -> list[Tuned]:
    """The entries of all measured tables of the package, table by table."""
    paths = sorted((directory / "tuned").glob("*.json"))
    return [entry for path in paths for entry in tables.load(path.stem, directory / "tuned")]


def tuned_specs(directory: Path = GENERATED) -> list[Spec]:
    """The specs of all measured tables, each once, sorted by slug."""
    found = {entry.spec.slug: entry.spec for entry in tuned_entries(directory)}
    return [found[slug] for slug in sorted(found)]
