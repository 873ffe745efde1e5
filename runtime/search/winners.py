"""The winner of a search becomes an entry of the device's tuned table."""

from __future__ import annotations

from pathlib import Path

from attnforge.codegen.spec import Spec
from attnforge.runtime import tables
from attnforge.runtime.search.search import Finished
from attnforge.runtime.tables import Tuned

GENERATED = tables.DIRECTORY.parent  # holds tuned/<device>.json and the example sources (examples.py)


def keep(finished: Finished, device_name: str, env: dict[str, str], directory: Path = GENERATED) -> Path:
    """Write the winner into `directory`/tuned/<device>.json; returns that file.

    Raises ValueError if no variant worked.
    """
    winner, case = finished.winner, finished.case
    if winner is None:
        raise ValueError(f"{case.name}: no variant worked, so there is no winner to save")
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
    entry = Tuned(winner.spec, group, case.seq_q, ms, tflops, notes, case.visible_keys)
    return tables.save(device_name, [entry], directory / "tuned")


def tuned_entries(directory: Path = GENERATED) -> list[Tuned]:
    """The entries of all measured tables, table by table."""
    paths = sorted((directory / "tuned").glob("*.json"))
    return [entry for path in paths for entry in tables.load(path.stem, directory / "tuned")]


def tuned_specs(directory: Path = GENERATED) -> list[Spec]:
    """The specs of all measured tables, each once, sorted by slug."""
    found = {entry.spec.slug: entry.spec for entry in tuned_entries(directory)}
    return [found[slug] for slug in sorted(found)]
