"""Problems, and made-up entries of tuned tables, for tests of tables, of the choice among them and of dispatch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from attnforge.codegen.families import make_tuning
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime import tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.rounds import MANY
from attnforge.runtime.tables import Tuned

H200, OTHER = "NVIDIA H200", "NVIDIA H100 80GB HBM3"

PROBLEM = Problem(Direction.FORWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.SPANS, 16)
CPU = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 4)
HOPPER = replace(PROBLEM, arch=Arch.SM90A, head_dim=80, mask=Mask.FULL)
BACKWARD = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, mask=Mask.CAUSAL)
STRICT = replace(BACKWARD, head_dim=64)  # of calls that ask for deterministic gradients

FIRST, SECOND, *_ = islice(deterministic_candidates(STRICT), 40, 42)  # specs of STRICT
WALKING = Sm90Backward(64, 128, 4, 3, True, 2, False, False, persistent=1)
ORDERED = {"deterministic": 1, "launch_order": 1, "split_heads": 0, "persistent": 0}


def only_tables_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in `directory` alone."""
    monkeypatch.setenv(TABLES, str(directory))
    monkeypatch.setattr(tables, "PACKAGED", directory)


def entries(problem: Problem, count: int) -> list[Tuned]:
    """Distinct variants of `problem`, tuned at 1024, 2048, ... rows."""
    specs = list(candidates(problem))[-count:]
    return [Tuned(spec, 7, 1024 << i, 1.0, 100.0, {"workload": "x"}) for i, spec in enumerate(specs)]


def of_head_dim(head_dim: int, tuning: Tuning, dim_v: int = 0, size: int = 1024, **changes: Any) -> Tuned:
    """An entry of HOPPER with other head dims."""
    problem = replace(HOPPER, head_dim=head_dim, dim_v=dim_v, **changes)
    return Tuned(Spec(problem, tuning), 7, size, 1.0, 100.0)


def ordered(rounds: int = MANY) -> Tuned:
    """A backward whose blocks compute all heads of a group, in a fixed order."""
    spec = next(candidates(BACKWARD))
    spec = Spec(BACKWARD, make_tuning(BACKWARD, spec.tuning.to_json() | ORDERED))
    return Tuned(spec, 7, 1024, 1.0, 300.0, rounds=rounds)
