"""Tables for GPUs without measurements: the kernels that codegen/cost_model.py predicts to be the fastest.

Each chosen kernel was compiled: it spills nothing, and its prediction uses its actual number of registers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from attnforge.bagel.challenge.operator import FINAL, OTHERS, final_mask
from attnforge.bagel.measure.tiles import EMPTY, tile_map
from attnforge.bagel.models import MODELS
from attnforge.bagel.workloads import workload
from attnforge.codegen.cost_model import GPUS, Prediction, Work, predict
from attnforge.codegen.families import make_plan
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import cache
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.export import alignment
from attnforge.runtime.tables import Tuned

log = logging.getLogger("attnforge")

ARCHS = (Arch.SM80, Arch.SM86, Arch.SM89, Arch.SM100, Arch.SM120)
TRIES = 6  # compiled per problem class, in the order of their first predictions
MOST_TRIES = 24  # as long as all of them spill


@dataclass(frozen=True)
class Target:
    """A problem class and the case that stands for it: batch x query heads, GQA ratio, rows, a mask."""

    name: str
    dtype: DType
    head_dim: int
    mask: Mask
    heads: int
    group: int
    rows: int

    @property
    def visible_keys(self) -> int:
        """Average number of keys that a query sees."""
        if self.mask is not Mask.SPANS:
            return self.pairs // self.rows
        return int(workload(self.name).mask("cpu").visible_keys or 0)

    @cached_property
    def _visible(self) -> torch.Tensor:
        return ~final_mask(self.rows)

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of one head."""
        return workload(self.name).mask("cpu").pairs if self.mask is Mask.SPANS else int(self._visible.sum())

    def visits(self, tile_m: int, tile_n: int) -> int:
        """Tiles of one head that a kernel with such tiles visits."""
        if self.mask is Mask.SPANS:
            kinds = tile_map(workload(self.name).mask("cpu"), self.rows, tile_m, tile_n).kinds
            return int((kinds != EMPTY).sum())
        padded = torch.zeros(
            -(-self.rows // tile_m) * tile_m, -(-self.rows // tile_n) * tile_n, dtype=torch.bool
        )
        padded[: self.rows, : self.rows] = self._visible
        return int(padded.view(padded.shape[0] // tile_m, tile_m, -1, tile_n).any(3).any(1).sum())

    def problem(self, direction: Direction, arch: Arch) -> Problem:
        """Its tensors are compact."""
        return Problem(
            direction, arch, self.dtype, self.head_dim, self.mask, alignment(arch, self.dtype, self.head_dim)
        )


def targets() -> list[Target]:
    """BAGEL's heads on one of its packs in bf16 (fp16 follows it), the challenge's head dims in fp32 and bf16."""
    pack = "finetune/0"
    rows = workload(pack).mask("cpu").starts.numel()
    found = [
        Target(
            pack,
            DType.BFLOAT16,
            heads.head_dim,
            Mask.SPANS,
            heads.heads_q,
            heads.heads_q // heads.heads_kv,
            rows,
        )
        for heads in (MODELS["7B"], MODELS["0.5B"], MODELS["vit"])
    ]
    largest = {
        shape.head_dim: shape for shape in sorted((*FINAL, *OTHERS), key=lambda s: s.batch * s.heads * s.rows)
    }
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        for dim, shape in sorted(largest.items()):
            found.append(
                Target("final round", dtype, dim, Mask.DENSE, shape.batch * shape.heads, 1, shape.rows)
            )
    return found


def model(target: Target, direction: Direction, arch: Arch) -> Tuned | None:
    """The entry for one class; None if the family has no kernel for it that compiles without spills."""
    problem = target.problem(direction, arch)
    counts: dict[tuple[int, int], int] = {}

    def expected(spec: Spec, registers: int) -> Prediction:
        tile = (spec.tuning.tile_m, spec.tuning.tile_n)
        if tile not in counts:
            counts[tile] = target.visits(*tile)
        return predict(
            make_plan(spec), Work(target.heads, target.group, target.rows, counts[tile]), registers
        )

    free = (spec for spec in candidates(problem) if not getattr(spec.tuning, "deterministic", False))
    guesses = [(expected(spec, make_plan(spec).registers).ms, spec) for spec in free]
    guesses.sort(key=lambda guess: guess[0])  # of equals, the space's order decides
    best: tuple[Prediction, Spec, dict[str, int]] | None = None
    for tried, (ms, spec) in enumerate(guesses[:MOST_TRIES]):
        if best is not None and (tried >= TRIES or best[0].ms <= ms):
            break  # the actual number of registers can only make it slower
        used = _compiled(spec)
        if used is None or used["spill_bytes"]:
            continue
        prediction = expected(spec, used["registers"])
        if best is None or prediction.ms < best[0].ms:
            best = prediction, spec, used
    return None if best is None else _entry(target, *best)


def _compiled(spec: Spec) -> dict[str, int] | None:
    """Resources of the main kernel; None if it does not compile."""
    source = render(spec)
    try:
        resources = cache.obtain(source).meta["resources"]
    except CompileError:
        log.warning("%s does not compile", spec.slug)
        return None
    worst = max(used["spill_bytes"] for used in resources.values())
    return {**resources[spec.symbol], "spill_bytes": worst}


def _entry(target: Target, prediction: Prediction, spec: Spec, used: dict[str, int]) -> Tuned:
    flops = 4 * target.head_dim * target.pairs * target.heads
    if spec.problem.direction is Direction.BACKWARD:
        flops = flops * 5 // 2
    notes = {
        "basis": "modelled, not measured",
        "gpu": GPUS[spec.problem.arch].name,
        "case": target.name,
        "bound": prediction.bound,
        "blocks": prediction.blocks,
        "registers": used["registers"],
        "spill_bytes": used["spill_bytes"],
        "shared_bytes": max(launch.shared_bytes for launch in make_plan(spec).launches),
    }
    ms = round(prediction.ms, 4)
    tflops = round(flops / prediction.ms / 1e9, 3)
    return Tuned(spec, target.group, target.rows, ms, tflops, notes, target.visible_keys)


def entries(
    archs: tuple[Arch, ...], report: Callable[[str], None], dims: tuple[int, ...] = ()
) -> Iterator[tuple[Arch, Tuned]]:
    """Model every class, or those of head dims `dims`, on every architecture; `report` gets a line for each."""
    for arch in archs:
        for target in targets():
            if dims and target.head_dim not in dims:
                continue
            for direction in Direction:
                entry = model(target, direction, arch)
                what = f"{arch.value} {direction.value} {target.dtype.value} {target.head_dim} {target.mask.value}"
                if entry is None:
                    report(f"{what}: no kernel without spills")
                    continue
                report(f"{what}: {entry.spec.slug}, {entry.ms} ms, {entry.tflops} TFLOP/s expected")
                yield arch, entry
