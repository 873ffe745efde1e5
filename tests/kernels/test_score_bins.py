"""Sums of gradients of a score's tensors in integers: the arithmetic of CPU and GPU kernels, compiled for the host."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import gxx
import pytest
import torch
from cpu_kernel import FLAGS as CPU_FLAGS
from cpu_kernel import ScoreRef
from emulator import FLAGS, PARTS
from torch import Tensor

from attnforge.codegen import params
from attnforge.codegen.render import render, render_text
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
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
ON_GPU = """
extern "C" void add_lanes(const Params* p, const long long* places, const float* values) {
    launch([=] { add_to_gradient(p->dscore0, p->score_bins0, places[threadIdx.x], values[threadIdx.x]); }, 1, 32, 0);
}
extern "C" void round_rows(const Params* p) {
    launch([=] { round_score_gradients(*p, 64); }, 2, 64, 0);
}
"""
LARGEST, TINIEST = 3.4028234663852886e38, 2.0**-149
Sum = Callable[[Sequence[float]], float]


@pytest.fixture(scope="module", params=[Arch.CPU, Arch.SM80], ids=lambda arch: arch.value)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of a kernel for an architecture. Its rows may be null, as pairs may have elements of their own."""
    score = ScoreMod("bias(t0: float32[2] grad): score + t0[q_idx, kv_idx]")
    problem = Problem(Direction.BACKWARD, request.param, DType.FLOAT32, 16, Mask.FULL, score=score)
    gpu = problem.arch.is_gpu
    template = "common/score_gradient.cuh.jinja" if gpu else "common/score_bins.h.jinja"
    text = render_text(template, spec=next(deterministic_candidates(problem)))
    text = params.struct(("dscore0", "score_bins0")) + "\n" + text.replace("#pragma unroll", "//")
    path = tmp_path_factory.mktemp("bins") / "bins.cpp"
    if gpu:
        path.write_text('#include "emulator.h"\n' + text + CALLS.replace("#pragma omp", "// ") + ON_GPU)
        library = gxx.library(path, *FLAGS, "-DEMULATED_FP16=0", parts=PARTS)
    else:
        path.write_text(text + CALLS)
        library = gxx.library(path, *CPU_FLAGS, "-Wno-unused-function")
    library.sum.restype = ctypes.c_float
    assert library.words() == params.SCORE_WORDS
    return library


@pytest.fixture
def summed(library: ctypes.CDLL) -> Sum:
    """The sum of float32 values; on the CPU by three threads."""

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


# ---- Floats, where the order of additions may be any

ALL_THREADS = """
extern "C" void add_ones(const Params* p, const volatile long long* place, int times) {
#pragma omp parallel num_threads(4)
    {
#pragma omp barrier  // all of them begin
        for (int i = 0; i < times; ++i) {
            add_to_gradient(p->dscore0, *place, 1.0f);
        }
    }
}
"""


def test_no_addition_of_a_thread_on_the_cpu_is_lost(tmp_path: Path) -> None:
    score = ScoreMod("bias(t0: float32[1] grad): score + t0[h]")
    problem = Problem(Direction.BACKWARD, Arch.CPU, DType.FLOAT32, 16, Mask.FULL, score=score)
    source = next(found for found in map(render, candidates(problem)) if not found.plan.score_bins)
    function = re.search(r"^static inline void add_to_gradient.*?^}\n", source.text, re.MULTILINE | re.DOTALL)
    assert function
    path = tmp_path / "floats.cpp"
    path.write_text(params.struct(("dscore0",)) + "\n" + function.group() + ALL_THREADS)
    library = gxx.library(path, *CPU_FLAGS)
    sums, times = torch.zeros(3), 1 << 21
    place = ctypes.c_longlong(1)
    library.add_ones(ctypes.byref(ScoreRef.of(sums)), ctypes.byref(place), times)
    assert sums.tolist() == [0, 4 * times, 0]


# ---- Warps and grids

on_gpu = pytest.mark.parametrize("library", [Arch.SM80], indirect=True, ids=["sm80"])


class Gradient(ctypes.Structure):
    """`struct Params` of the library: sums of a gradient, and the rows that they are rounded from."""

    _fields_ = (("dscore0", ScoreRef), ("score_bins0", ctypes.c_void_p))

    def __init__(self, sums: Tensor, rows: Tensor | None) -> None:
        super().__init__(ScoreRef.of(sums), None if rows is None else rows.data_ptr())


def add_lanes(library: ctypes.CDLL, gradient: Gradient, places: Tensor, values: Tensor) -> None:
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (places, values))
    library.add_lanes(ctypes.byref(gradient), *pointers)


@on_gpu
def test_all_rows_of_a_gradient_are_rounded(library: ctypes.CDLL) -> None:
    """Of any number of dimensions; two blocks go round more than once."""
    sums, values = torch.full((3, 5, 2, 11), torch.nan), torch.rand(352)
    count, length = sums.numel(), len(values)
    gradient = Gradient(sums, rows := torch.zeros(count, params.SCORE_WORDS, dtype=torch.int64))
    for first in range(0, length, 32):
        places = torch.arange(first, first + 32) % count  # some get two additions
        add_lanes(library, gradient, places, values[first : first + 32])
    assert rows.any(dim=1).all()
    library.round_rows(ctypes.byref(gradient))
    expected = values[:count].clone()
    expected[: length - count] += values[count:]
    assert torch.equal(sums.flatten(), expected)


@on_gpu
def test_floats_of_a_gradient_without_rows_stay(library: ctypes.CDLL) -> None:
    sums, values = torch.zeros(4, 8), torch.rand(32)
    gradient = Gradient(sums, None)
    add_lanes(library, gradient, torch.arange(32).flip(0), values)
    library.round_rows(ctypes.byref(gradient))
    assert torch.equal(sums.flatten().flip(0), values)


@on_gpu
def test_places_beyond_32_bits(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Half of the lanes add to an element whose place has the same lower bits; the file is sparse."""
    sums = torch.from_file(str(tmp_path / "sums"), shared=True, size=2**32 + 1)
    places = (torch.arange(32) // 16) << 32
    add_lanes(library, Gradient(sums[:1], None), places, torch.ones(32))
    assert (sums[0].item(), sums[-1].item()) == (16.0, 16.0)
