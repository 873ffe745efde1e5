"""Search space of the CPU kernels, best guess first; infeasible ones included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attnforge.codegen.spec import CpuBackward, CpuForward, DType, Problem

# (lanes, rows, cols): AVX-512 with 24 sums in 32 registers, then AVX2 with 8 or 12 in 16.
BLOCKS = ((16, 8, 3), (16, 4, 6), (16, 8, 2), (8, 4, 3), (8, 4, 2))


def forward(problem: Problem) -> Iterator[CpuForward]:
    """Forward tunings of `problem`."""
    for (lanes, rows, cols), pairs in product(BLOCKS, _pairs(problem)):
        panel = lanes * cols
        for heads, panels, tile_n in ((7, 1, 64), (4, 1, 64), (1, 1, 64), (7, 1, 96), (2, 2, 64)):
            yield CpuForward(panels * panel, tile_n, heads, lanes, rows, cols, pairs)


def backward(problem: Problem) -> Iterator[CpuBackward]:
    """Backward tunings of `problem`."""
    for (lanes, rows, cols), pairs in product(BLOCKS, _pairs(problem)):
        panel = lanes * cols
        for panels_m, panels_n in ((1, 1), (2, 2), (2, 1), (1, 2)):
            yield CpuBackward(panels_m * panel, panels_n * panel, lanes, rows, cols, pairs)


def _pairs(problem: Problem) -> tuple[bool, ...]:
    return (True, False) if problem.dtype is DType.BFLOAT16 else (False,)
