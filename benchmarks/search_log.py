"""Logs of exhaustive searches, for benchmarks/search_replay.py. Takes a Hopper GPU, and two to four minutes a pass.

    python benchmarks/search_log.py [--folder results] [--direction fwd|bwd] [--seconds 300] [--workers 12]

Writes FOLDER/forward.jsonl and FOLDER/backward.jsonl of pretrain/0 with the heads of BAGEL-7B: every variant in which
the knobs of SCOPES have one of the named values. An interrupted run goes on where it stopped. Winners go to
FOLDER/tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attnforge.bagel.commands.search_screen import Options, run_search
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.tuning_set import archs_of
from attnforge.codegen.families.hopper import SECTION_MB
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.search import Budget, Scope
from attnforge.runtime.tables import device_name

SCOPES = {
    Direction.FORWARD: {
        "dynamic": {1},  # packs have won with the dynamic scheduler alone (docs/experiments.md, 19)
        "tile_m": {192, 128},
        "tile_n": {64, 80, 112, 128},
        "exact_visits": {3, 1},
        "cache_mb": {SECTION_MB},
    },
    Direction.BACKWARD: {"deterministic": {0}, "heads_together": {0, 2, 4}, "cache_mb": {SECTION_MB}},
}
NAMES = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}


def scope_of(direction: Direction) -> Scope:
    """What is measured of a pass: 160 of 1,825 variants forward, 144 of 294 backward."""
    # All of them in random order: what a chip does while it warms up must not look like a knob's effect.
    return Scope({name: frozenset(values) for name, values in SCOPES[direction].items()}, "random")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("results"))
    parser.add_argument("--direction", choices=["fwd", "bwd"], help="only this pass")
    parser.add_argument("--seconds", type=float, help="at most, for each pass; the whole scope without it")
    parser.add_argument("--workers", type=int, help="compilers at a time (one for each core)")
    options = parser.parse_args()
    device = torch.device("cuda")
    case = make_case("pretrain/0", "7B", DType.BFLOAT16, device)
    for direction in [Direction(options.direction)] if options.direction else list(Direction):
        target = (archs_of(device, DType.BFLOAT16, direction)[0], device_name(device))
        log = options.folder / f"{NAMES[direction]}.jsonl"
        budget, out = Budget(options.seconds), options.folder / "tables"
        how = Options(budget, log, out, options.workers, peers=False, scope=scope_of(direction))
        run_search(case, direction, target, how)


if __name__ == "__main__":
    main()
