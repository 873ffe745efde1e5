"""Sums of gradients of a score's tensors in integers: the arithmetic of CPU and GPU kernels, compiled for the host."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import gxx
import pytest
import torch
from cpu_kernel import FLAGS as CPU_FLAGS
from emulator import FLAGS, PARTS

from attnforge.codegen import params
from attnforge.codegen.render import render_text
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem

CALLS = """
extern "C" int words() { return kBinWords; }
extern "C" float sum(const float* values, int count, BinWord* row) {
#pragma omp parallel for num_threads(3)
    for (int i = 0; i < count; ++i) {
        add_to_bins(row, values[i]);
    }
    return rounded_sum(row);
}
"""
LARGEST, TINIEST = 3.4028234663852886e38, 2.0**-149
Sum = Callable[[Sequence[float]], float]


@pytest.fixture(scope="module", params=[Arch.CPU, Arch.SM80], ids=lambda arch: arch.value)
def summed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sum:
    """The sum of float32 values by the functions of a kernel for an architecture; on the CPU by three threads."""
    score = ScoreMod("bias(t0: float32[1] grad): score + t0[h]")
    spec = next(
        candidates(Problem(Direction.BACKWARD, request.param, DType.FLOAT32, 16, Mask.FULL, score=score))
    )
    text = render_text("common/score_bins.h.jinja", spec=spec)
    text = params.struct(("dscore0",)) + "\n" + text.replace("#pragma unroll", "//")
    path = tmp_path_factory.mktemp("bins") / "bins.cpp"
    if request.param.is_gpu:
        path.write_text('#include "emulator.h"\n' + text + CALLS.replace("#pragma omp", "// "))
        library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    else:
        path.write_text(text + CALLS)
        library = gxx.library(path, *CPU_FLAGS, "-Wno-unused-function")
    library.sum.restype = ctypes.c_float
    assert library.words() == params.SCORE_WORDS

    def call(values: Sequence[float]) -> float:
        array = (ctypes.c_float * len(values))(*values)
        row = (ctypes.c_ulonglong * params.SCORE_WORDS)()
        return float(library.sum(array, len(values), row))

    return call


def rounded(exact: Fraction) -> float:
    """The nearest float32."""
    try:
        return float(struct.unpack("f", struct.pack("f", float(exact)))[0])
    except OverflowError:
        return math.copysign(math.inf, exact)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0, -0.0],
        [1.0, 2.0**-24, -1.0],
        [1e30, 1e-30, -1e30],
        [1e-30, -1e30, 1e30, 3e-30],
        [LARGEST, TINIEST, -LARGEST],
        [TINIEST] * 3,
        [-TINIEST],
        [2.0**-126, -TINIEST],
        [LARGEST, LARGEST],
        [-LARGEST, -LARGEST],
        [LARGEST, LARGEST, -LARGEST],
        [1.0, 2.0**-40, -(2.0**-80)],
        [-1.0, 2.0**-32],
    ],
    ids=str,
)
def test_sums_are_exact(values: list[float], summed: Sum) -> None:
    exact = sum((Fraction(struct.unpack("f", struct.pack("f", x))[0]) for x in values), Fraction(0))
    assert summed(values) == rounded(exact)
    assert summed(values[::-1]) == rounded(exact)


@pytest.mark.parametrize("size", [1e-44, 1e-20, 1.0, 1e20, 1e34])
def test_sums_of_many_values_in_another_order(size: float, summed: Sum) -> None:
    """Of magnitudes over 30 decades; most of the sum cancels."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2000, generator=random) * 10 ** (torch.rand(2000, generator=random) * 3)
    small = torch.randn(500, generator=random) * 1e-27
    values = (torch.cat((values, -values, small)).double() * size).float()
    shuffled = values[torch.randperm(len(values), generator=random)].tolist()
    exact = sum(map(Fraction, shuffled), Fraction(0))
    assert summed(shuffled) == summed(values.tolist()) == rounded(exact)


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ([1.0, math.inf, -1e30], math.inf),
        ([-math.inf, 5.0, -math.inf], -math.inf),
        ([math.inf, 1.0, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([math.inf, -math.nan], math.nan),
    ],
)
def test_values_that_are_not_finite(values: list[float], answer: float, summed: Sum) -> None:
    for given in (values, values[::-1]):
        assert struct.pack("f", summed(given)) == struct.pack("f", answer)


def test_a_word_takes_many_additions(summed: Sum) -> None:
    """Carries of thousands of parts that fill a word, of both signs."""
    part = (2.0**24 - 1) * 2.0**-21  # its lower bits end where a word does
    assert summed([part] * 9999) == rounded(9999 * Fraction(part))
    assert summed([-part] * 9999) == rounded(-9999 * Fraction(part))
