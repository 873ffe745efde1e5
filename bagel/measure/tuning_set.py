"""The problems that `tune` measures on a device: packs and dense shapes, with models' heads, by dtype and pass."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from attnforge.bagel.measure.case_scores import without_score
from attnforge.bagel.models import MODELS
from attnforge.codegen.families import FAMILIES
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import kernels, tables
from attnforge.runtime.search.case import without_order

# Packs of `tune` by kind of device; a pack of "vit" stands for its images.
PACKS = {
    "cuda": (
        *("pretrain/0", "finetune/0", "t2i_lowres/0"),
        *("full/4x8192", "causal/4x8192", "full/16x1024", "causal/16x1024"),
    ),
    "cpu": ("finetune/0", "causal/1024"),
}
IMAGES = {"cuda": ("pretrain/0", "full/8x4096"), "cpu": ("full/1024",)}

BAGELS = tuple(name for name, model in MODELS.items() if model.mask == "bagel")


@dataclass(frozen=True)
class TuningProblem:
    """One search of `tune`: a pack (bagel/measure/cases.py) with a model's heads, in a dtype, a pass, for a target.

    `score`: a name of `with_score`, or empty. `deterministic`: for calls with deterministic gradients.
    """

    pack: str
    model: str
    dtype: DType
    direction: Direction
    arch: Arch
    score: str = ""
    deterministic: bool = False

    def __str__(self) -> str:
        strict = "deterministic" if self.deterministic else ""
        kernel = self.dtype.value, self.direction.value, self.arch.value
        words = (self.pack, self.model, self.score, strict, *kernel)
        return " ".join(word for word in words if word)

    @cached_property
    def slug(self) -> str:
        """The name for files; with a score from a file, also a digest of that file."""
        file = Path(self.score.rpartition(":")[0])
        version = f" {hashlib.sha256(file.read_bytes()).hexdigest()[:8]}" if file.suffix == ".py" else ""
        return re.sub(r"[^\w.-]+", "_", str(self) + version)


def chosen(
    device: torch.device,
    models: Sequence[str],
    packs: Sequence[str],
    dtypes: Sequence[DType],
    directions: Sequence[Direction],
    scores: Sequence[str] = (),
) -> Iterator[TuningProblem]:
    """Models by packs by dtypes by passes by scores; by default BAGEL's models and the packs of the kind of device.

    16-bit problems take the device's best architecture; float32 takes all of them, for none is always the fastest.
    """
    for dtype in dtypes:
        for direction in directions:
            archs = archs_of(device, dtype, direction)
            for model in models or BAGELS:
                for pack in packs or (IMAGES if model == "vit" else PACKS)[device.type]:
                    for arch, score in product(
                        archs if dtype is DType.FLOAT32 else archs[:1], scores or ("",)
                    ):
                        yield TuningProblem(pack, model, dtype, direction, arch, score)


def measured(device: torch.device) -> Iterator[TuningProblem]:
    """The problems behind the entries of all tables, whatever device they are of, that this device can run.

    Those with a score from a file are left out.
    """
    for name in sorted({path.stem for folder in tables.folders() for path in folder.glob("*.json")}):
        for entry in tables.known(name):
            problem = entry.spec.problem
            case, score = without_score(without_order(str(entry.notes.get("case", ""))))
            pack, _, model = case.rpartition(" ")
            if (
                pack
                and ".py:" not in score
                and problem.arch in archs_of(device, problem.dtype, problem.direction)
            ):
                where = problem.dtype, problem.direction, problem.arch
                yield TuningProblem(pack, model, *where, score, entry.deterministic)


def archs_of(device: torch.device, dtype: DType, direction: Direction) -> list[Arch]:
    """Architectures of the device with a kernel family for the dtype and pass, best first."""
    families = {a: Problem(direction, a, dtype, 64, Mask.FULL).family for a in kernels.targets(device)}
    return [arch for arch, family in families.items() if (family, direction) in FAMILIES]


def search_seconds(device: torch.device) -> float:
    """Time of the search of one problem, unless it is given."""
    return 50.0 if device.type == "cpu" else 180.0
