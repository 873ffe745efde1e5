"""Logs of exhaustive searches, for benchmarks/search_replay.py. Takes a Hopper GPU, and minutes a pass.

    python benchmarks/search_log.py [--folder results] [--direction fwd|bwd] [--seconds 300] [--workers 12]

Writes FOLDER/forward.jsonl and FOLDER/backward.jsonl of pretrain/0 with the heads of BAGEL-7B: every variant of the
space. An interrupted run goes on where it stopped. Winners go to FOLDER/tables. On an H200 the forward pass took 501 s
with 36 compilers, the backward pass 255 s with 17.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attnforge.bagel.commands.search_screen import Options, run_search
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.tuning_set import archs_of
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.search import Budget, Scope
from attnforge.runtime.tables import device_name

NAMES = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}


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
        # In random order: what a chip does while it warms up must not look like a knob's effect.
        how = Options(budget, log, out, options.workers, peers=False, scope=Scope({}, "random"))
        run_search(case, direction, target, how)


if __name__ == "__main__":
    main()
