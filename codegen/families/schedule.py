"""The launches that list the tiles of a mask (templates/common/schedule.cuh.jinja), the same for all GPU families."""

from __future__ import annotations

from attnforge.codegen.plan import Launch
from attnforge.codegen.spec import Mask, Spec

SCHEDULE_THREADS = 128  # kScheduleThreads in templates/common/schedule.cuh.jinja


def schedule_launches(
    spec: Spec, tiles: str, deterministic: bool = False, descending: bool = False, bits: bool = False
) -> tuple[Launch, ...]:
    """Launches that fill the lists of a mask, one block for each owned tile (`tiles`); none for other masks.

    tiles: "tiles_m" for lists of query tiles, "tiles_n" for those of key tiles.
    deterministic: with a launch for the order of sums (dq_order). descending: without the one that sorts owned tiles.
    bits: with one for the bits of partial visits.
    """
    if not spec.problem.mask.listed:
        return ()
    dense = spec.problem.mask is Mask.DENSE
    kernels: list[tuple[str, tuple[str, ...]]] = []
    if dense:
        kernels += [("pack", ("tiles_n", "tiles_m")) if spec.problem.packed else ("classify", ("tiles_m",))]
    kernels += [("kinds", ("tiles_n",))] if not dense and tiles == "tiles_m" else []
    kernels += [("schedule", (tiles,))]
    kernels += [("bits", (tiles,))] if bits else []
    kernels += [] if descending else [("order", (tiles,))]
    kernels += [("dq_order", ("tiles_m",))] if deterministic else []
    planes = ("mask_planes",) if spec.problem.in_planes else ()
    return tuple(
        Launch(f"{spec.symbol}_{name}", (*grid, *planes), SCHEDULE_THREADS) for name, grid in kernels
    )
