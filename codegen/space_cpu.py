"""Search space of the CPU kernels, best guess first; infeasible ones included."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from attnforge.codegen.spec import DType, Problem
from attnforge.codegen.tuning import CpuBackward, CpuForward

# (rows, cols) of register blocks by float lanes: as many sums as leave room for one row of operands.
BLOCKS = {
    16: ((8, 3), (8, 2), (4, 6)),  # AVX-512: 32 registers
    8: ((4, 3), (4, 2)),  # AVX2: 16 registers
    4: ((8, 3), (4, 3)),  # NEON: 32 registers, SSE: 16
}


# Forward: (panels per tile, keys per tile, heads). More panels share a packed K and V tile, fewer fit L2.
FORWARD_SHAPES = ((1, 64, 8), (1, 128, 8), (1, 64, 4), (1, 64, 1), (2, 64, 8), (2, 64, 1))
# Backward: (query rows per tile, panels of keys per tile).
BACKWARD_SHAPES = ((48, 2), (64, 2), (96, 2), (48, 1), (64, 3), (128, 1))


def forward(problem: Problem) -> Iterator[CpuForward]:
    """Forward tunings of `problem`."""
    for pairs, lanes, rows, cols, shapes in _blocks(problem):
        for panels, tile_n, heads in FORWARD_SHAPES[:shapes]:
            yield CpuForward(panels * lanes * cols, tile_n, heads, lanes, rows, cols, pairs)


def backward(problem: Problem) -> Iterator[CpuBackward]:
    """Backward tunings of `problem`."""
    for pairs, lanes, rows, cols, shapes in _blocks(problem):
        for tile_m, panels in BACKWARD_SHAPES[:shapes]:
            yield CpuBackward(tile_m, panels * lanes * cols, lanes, rows, cols, pairs)


def _blocks(problem: Problem) -> Iterator[tuple[bool, int, int, int, int]]:
    """(pairs, lanes, rows, cols, tile shapes to try): all shapes for this machine's vectors, else one."""
    width = host_lanes()
    pairs = problem.dtype is DType.BFLOAT16
    for rows, cols in BLOCKS[width]:
        yield pairs, width, rows, cols, len(FORWARD_SHAPES)
    for lanes, blocks in BLOCKS.items():
        if pairs or lanes < width:
            yield False, lanes, *blocks[0], 1


@cache
def host_lanes() -> int:
    """Float lanes of the widest vectors of the machine that runs this, which compiles for itself too."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 4
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return 16 if "avx512f" in flags else 8 if "avx2" in flags or not flags else 4
