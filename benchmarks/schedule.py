"""Upper bounds from tile schedules on BAGEL's packs, simulated on the host without a GPU.

    python benchmarks/schedule.py [--tflops 790] [--masked 1.1] [--work-tile 0] [--picture docs/occupancy.png]

Medians over the four seeds of each configuration. A forward tile has row groups of 64 rows, each of which skips key
tiles that are hidden from it. Columns: `full` and `masked` count visits of row groups. `use` is visible pairs over
pairs in visited row groups. `balance` is the work over what all SMs could do until the last one ends, with static and
with dynamic scheduling. `allowed` is the rate of visible pairs in TFLOP/s on a device that runs full tiles at
`--tflops`: no change inside the kernel can exceed it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.measure.occupancy import Costs, Order, Schedule, simulate
from attnforge.bagel.pictures.occupancy import draw_schedules
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.case import Case

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
PACKS = ("pretrain", "vlm_only", "edit_only", "finetune", "t2i_lowres")
DENSE = {"7B": ("full/4x8192", "causal/4x8192"), "0.5B": ("full/8x4096", "causal/8x4096")}
ROW_GROUP = 64  # query rows of a consumer warpgroup
# (heads, direction, (tile_m, tile_n) of which the first is the tuned one, a block per query head)
SHAPES = (
    ("7B", FORWARD, ((192, 80), (192, 64), (128, 128)), (True,)),
    ("7B", BACKWARD, ((64, 128),), (True, False)),
    ("0.5B", FORWARD, ((192, 128), (128, 128)), (True,)),
    ("0.5B", BACKWARD, ((64, 128),), (True, False)),
)


def cases(model: str, config: str) -> list[Case]:
    return [make_case(f"{config}/{seed}", model, DType.BFLOAT16, torch.device("cpu")) for seed in range(4)]


def row(
    group: list[Case], direction: Direction, tiles: tuple[int, int], split: bool, args: argparse.Namespace
) -> str:
    """One line of the table."""
    costs = Costs(args.masked, args.work_tile)
    row_groups = tiles[0] // ROW_GROUP if direction is FORWARD else 1
    found: dict[Order, list[Schedule]] = {
        order: [
            simulate(case, direction, *tiles, order, split, costs, row_groups=row_groups) for case in group
        ]
        for order in (("static", "dynamic") if direction is FORWARD else ("dynamic",))
    }
    dynamic = found["dynamic"]
    balance = [f"{median(x.balance for x in schedules):.3f}" for schedules in found.values()]
    allowed = [f"{args.tflops * median(x.allowed for x in schedules):.0f}" for schedules in found.values()]
    owner = "" if direction is FORWARD else (" q head" if split else " kv head")
    cells = (
        group[0].name.split("/")[0] if len(group) > 1 else group[0].name.split()[0],
        f"{group[0].heads_q}/{group[0].heads_kv}/{group[0].head_dim}",
        direction.value,
        f"{tiles[0]} x {tiles[1]}{owner}",
        f"{median(x.full for x in dynamic):.0f}",
        f"{median(x.masked for x in dynamic):.0f}",
        f"{median(x.tile_use for x in dynamic):.3f}",
        " / ".join(balance),
        " / ".join(allowed),
    )
    return markdown_row(cells)


def table(args: argparse.Namespace) -> str:
    head = (
        "pack",
        "heads",
        "pass",
        "tile m x n",
        "full",
        "masked",
        "use",
        "balance",
        f"allowed of {args.tflops:.0f}",
    )
    lines = markdown_head(head)
    for model, direction, shapes, splits in SHAPES:
        groups = [cases(model, config) for config in PACKS]
        groups += [[make_case(name, model, DType.BFLOAT16, torch.device("cpu"))] for name in DENSE[model]]
        lines += [
            row(g, direction, tiles, split, args) for g in groups for tiles in shapes for split in splits
        ]
    return "\n".join(lines)


def picture(args: argparse.Namespace) -> None:
    """A picture: forward with static and dynamic scheduling, and backward, of one pack of each kind."""
    rows = []
    for config in ("pretrain/1", "finetune/0", "t2i_lowres/0"):
        case = make_case(config, "7B", DType.BFLOAT16, torch.device("cpu"))
        costs = Costs(args.masked, args.work_tile)
        rows += [
            (
                f"{config} fwd, static",
                simulate(case, FORWARD, 192, 80, "static", costs=costs, row_groups=3),
            ),
            (
                f"{config} fwd, dynamic",
                simulate(case, FORWARD, 192, 80, "dynamic", costs=costs, row_groups=3),
            ),
            (f"{config} bwd, per q head", simulate(case, BACKWARD, 64, 128, "dynamic", True, costs)),
            (f"{config} bwd, per kv head", simulate(case, BACKWARD, 64, 128, "dynamic", False, costs)),
        ]
    draw_schedules(
        "Tile schedulers on BAGEL's packs: 28 q heads, 4 kv heads, head_dim 128, 132 SMs", rows
    ).quantize(64).save(args.picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Upper bounds from tile schedules.")
    parser.add_argument("--tflops", type=float, default=790.0, help="rate of full tiles without a pause")
    parser.add_argument("--masked", type=float, default=1.0, help="cost of a masked tile, in full tiles")
    parser.add_argument("--work-tile", type=float, default=0.0, help="overhead of a work tile, in full tiles")
    parser.add_argument("--picture", type=Path, help="write a PNG here")
    args = parser.parse_args()
    print(table(args))
    if args.picture:
        picture(args)


if __name__ == "__main__":
    main()
