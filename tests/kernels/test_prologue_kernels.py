"""The CUDA text of the prologue without a GPU: run on the CPU by the emulator, and compiled by nvcc."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import platform
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gxx
import pytest
import torch
from emulator import FLAGS, PARTS
from prologue_oracle import Pack, check, draw
from torch import Tensor

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.prologue import (
    SUMS_THREADS,
    CpuTuning,
    CudaTuning,
    PrologueProblem,
    PrologueSource,
    PrologueSpec,
    candidates,
    make_plan,
    render,
    spec_from_slug,
)
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime import kernels
from attnforge.runtime import prologue_kernels as runtime
from attnforge.runtime.build import toolchain
from attnforge.runtime.kernels import TORCH_DTYPES

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
FP32, BF16, FP16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
BLOCKS = 3

BODIES = {
    "unpack": "return make_float2(widen(pair & 0xffffu), widen(pair >> 16));",
    "pack": "return narrow_pair(low, high);",
}


def translate(source: PrologueSource, change: Callable[[str], str] = lambda text: text) -> str:
    """C++ that g++ compiles, with a function `run_<symbol>` for each kernel."""
    text = change(source.text)
    for name, body in BODIES.items():
        function = rf"(__device__ __forceinline__ [^\n;{{]*\b{name}\([^;{{]*\) )\{{.*?\n\}}\n"
        text = re.sub(function, rf"\1{{ {body} }}\n", text, flags=re.DOTALL)
    assert "asm" not in text
    runs = "".join(
        f'extern "C" void run_{symbol}(const Params* p, long long blocks, int threads) '
        f"{{ launch([=] {{ {symbol}(*p); }}, blocks, threads, 0); }}\n"
        for symbol in source.symbols
    )
    return '#include "emulator.h"\n' + text.replace("#pragma unroll", "//") + runs


class Emulated:
    """A variant, compiled for the CPU; called with the operators' own packing of arguments."""

    def __init__(
        self, spec: PrologueSpec, directory: Path, change: Callable[[str], str] = lambda text: text
    ) -> None:
        source = render(spec)
        path = directory / f"{spec.slug[:80]}.cpp"
        path.write_text(translate(source, change))
        half = f"-DEMULATED_FP16={int(spec.problem.dtype is FP16)}"
        self.library = gxx.library(path, *FLAGS, half, parts=PARTS)
        self.kernel = runtime.Kernel(source.plan, 0, 1, BLOCKS)
        self.symbols = source.symbols

    def launch(self, kernel: Any, function: int, blocks: int, threads: int, p: Any) -> None:
        """In place of prologue_kernels._launch."""
        run = getattr(self.library, f"run_{self.symbols[function]}")
        run.argtypes = (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int)
        run(ctypes.byref(p), blocks, threads)


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that has the operators run a variant in the emulator."""

    def use(spec: PrologueSpec, change: Callable[[str], str] = lambda text: text) -> None:
        emulated = Emulated(spec, tmp_path, change)
        monkeypatch.setattr(runtime, "_kernel", lambda *problem: emulated.kernel)
        monkeypatch.setattr(runtime, "_launch", emulated.launch)

    return use


def first(direction: Direction, dtype: DType, head_dim: int, **rest: Any) -> PrologueSpec:
    return next(candidates(PrologueProblem(direction, Arch.SM80, dtype, head_dim, **rest)))


def with_knobs(
    direction: Direction,
    head_dim: int,
    vector: int,
    lanes: int,
    rows: int,
    warps: int,
    blocks: int,
    persistent: int | None = None,
    share: int = 1,
    ahead: int = 0,
    stream: int = 0,
) -> PrologueSpec:
    problem = PrologueProblem(direction, Arch.SM80, BF16, head_dim, BF16)
    persistent = int(direction is BACKWARD) if persistent is None else persistent
    tuning = CudaTuning(vector, lanes, rows, warps, blocks, persistent, share, ahead, stream)
    return PrologueSpec(problem, tuning)


# dtype, head_dim, of weights, of tables, whether there is a norm; all first guesses.
GUESSES = [
    (BF16, 64, BF16, FP32, True),
    (FP16, 72, FP32, FP16, True),
    (FP32, 96, FP32, FP32, True),
    (BF16, 82, FP32, BF16, True),
    (BF16, 256, BF16, FP32, True),
    (BF16, 64, FP32, FP32, False),
    (FP32, 2, FP32, FP32, True),
]
# vector, lanes, heads held, warps, blocks: several vectors a lane, one lane a head, idle lanes, heads left over.
KNOBS: list[tuple[int, ...]] = [(16, 2, 1, 2, 1), (4, 4, 2, 1, 1), (8, 8, 7, 4, 1), (2, 32, 1, 2, 1)]
# Also persistent, share, ahead: warps without heads of k or v, a chunk for each warp, adjacent tokens.
KNOBS += [
    (8, 8, 1, 4, 1, 2, 2, 0),
    (8, 8, 1, 4, 1, 1, 4, 1),
    (8, 8, 1, 3, 1, 2, 3, 1),
    (8, 8, 1, 2, 1, 1, 1, 1, 1),
]
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")


def draw_for(
    spec: PrologueSpec,
    lengths: tuple[int, int] = (11, 8),
    heads: tuple[int, int] = (5, 3),
    device: str = "cpu",
) -> Pack:
    """A pack with two tokens of no expert."""
    p = spec.problem
    dtypes = {"weight": TORCH_DTYPES[p.weight], "table": TORCH_DTYPES[p.table]}
    return draw(lengths, 2, heads, p.head_dim, TORCH_DTYPES[p.dtype], device, **dtypes, norm=p.norm)


def run_forward(spec: PrologueSpec, emulate: Callable[..., None], pack: Pack | None = None) -> None:
    pack = draw_for(spec) if pack is None else pack
    exact, _ = pack.exact()
    emulate(spec)
    rows = pack.experts().rows
    with torch.no_grad():
        outputs = runtime.run_forward(
            pack.fused, pack.cos, pack.sin, pack.weights, rows, 1, *pack.heads, 1e-6, spec
        )
    for name, got, wanted in zip("qkv", outputs, exact, strict=True):
        check(name, got, wanted, got.dtype)


def run_backward(spec: PrologueSpec, emulate: Callable[..., None], pack: Pack | None = None) -> list[Tensor]:
    pack = draw_for(spec) if pack is None else pack
    _, exact = pack.exact()
    emulate(spec)
    rows, lengths = pack.experts().rows, [x.shape[0] for x in pack.fused]
    dq, dk, dv = pack.dout
    with torch.no_grad():
        sources, weights = runtime.run_backward(
            *(dq, dk, dv, pack.fused, lengths, pack.cos, pack.sin),
            *(pack.weights, rows, 1, *pack.heads, 1e-6, spec),
        )
    for i, (got, wanted) in enumerate(zip([*sources, *weights], exact, strict=True)):
        check(f"gradient {i}", got, wanted, got.dtype)
    return [*sources, *weights]


@on_x86
@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize(("dtype", "head_dim", "weight", "table", "norm"), GUESSES)
def test_first_guesses_emulated(
    run: Callable[..., Any],
    dtype: DType,
    head_dim: int,
    weight: DType,
    table: DType,
    norm: bool,
    emulate: Callable[..., None],
) -> None:
    direction = FORWARD if run is run_forward else BACKWARD
    align = 4 if head_dim == 82 else 16
    run(first(direction, dtype, head_dim, weight=weight, table=table, norm=norm, align=align), emulate)


@on_x86
@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_knobs_emulated(
    run: Callable[..., Any], knobs: tuple[int, ...], emulate: Callable[..., None]
) -> None:
    run(with_knobs(FORWARD if run is run_forward else BACKWARD, 64, *knobs), emulate)


@on_x86
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("flush(dw, sums[threadIdx.x / 32][expert]);\n            expert", "expert"),
        ("scaled * mean", "mean"),
        ("dy1 * angles.cos[j][i] - dy0", "dy1 * angles.cos[j][i] + dy0"),
        ("lanes = kLanes; lanes < 32", "lanes = kLanes; lanes < 16"),
        ("index + mine.step, mine.end", "index, mine.end"),
    ],
)
def test_planted_mistakes_are_found(right: str, wrong: str, emulate: Callable[..., None]) -> None:
    def change(text: str) -> str:
        assert text.count(right) == 1
        return text.replace(right, wrong)

    with pytest.raises(AssertionError, match="gradient"):
        run_backward(with_knobs(BACKWARD, 64, 16, 4, 2, 2, 1), lambda spec: emulate(spec, change))


# ---- Specs


def test_slugs_are_read_back() -> None:
    seen = set()
    for direction, arch, norm in product(Direction, (Arch.CPU, Arch.SM90A), (True, False)):
        for spec in candidates(PrologueProblem(direction, arch, BF16, 72, BF16, FP32, norm, 8)):
            assert spec_from_slug(spec.slug) == spec
            assert spec.slug not in seen
            seen.add(spec.slug)
    for wrong in ("", "fwd_sm80_bf16_d128", "qk_norm_rope_fwd_cpu_bf16_d128_tfp32_a16_c64"):
        with pytest.raises(ValueError, match="is not the name of a prologue kernel"):
            spec_from_slug(wrong)
    with pytest.raises(ValueError, match="its knobs are c"):
        spec_from_slug("qk_rope_fwd_cpu_bf16_d128_tfp32_a16_v64")


INFEASIBLE: list[tuple[Direction, int, tuple[int, ...], str]] = [
    (FORWARD, 63, (16, 8, 1, 4, 1), "head_dim 63: rotary embedding takes even ones up to 256"),
    (FORWARD, 72, (16, 8, 1, 4, 1), "vector 16: must be 2 to 16 bytes"),
    (FORWARD, 64, (16, 8, 1, 4, 1), "lanes 8: more than the 4 vectors of half a head"),
    (FORWARD, 64, (16, 3, 1, 4, 1), "lanes 3: must be a power of 2"),
    (FORWARD, 256, (16, 2, 1, 4, 1), "a lane would keep 128 values"),
    (FORWARD, 128, (16, 8, 1, 4, 16), "blocks 16 of 128 threads: at most 1024 a block and 1536 in all"),
    (FORWARD, 64, (8, 8, 1, 4, 1, 0, 3), "share 3, ahead 0, stream 0: a divisor of the 4 warps"),
    (BACKWARD, 256, (16, 16, 1, 16, 1), "warps 16: their sums take 65536 bytes"),
    (BACKWARD, 128, (16, 8, 4, 4, 4), "blocks 4: a thread needs about 190 registers, but 128 are available"),
]


@pytest.mark.parametrize(("direction", "head_dim", "knobs", "message"), INFEASIBLE)
def test_what_is_infeasible_says_why(
    direction: Direction, head_dim: int, knobs: tuple[int, ...], message: str
) -> None:
    with pytest.raises(Infeasible, match=re.escape(message)):
        make_plan(with_knobs(direction, head_dim, *knobs))


def test_sums_need_a_persistent_grid() -> None:
    with pytest.raises(Infeasible, match="persistent 0: must be 0, 1 or 2, and 1 or 2 where each block sums"):
        make_plan(PrologueSpec(PrologueProblem(BACKWARD, Arch.SM80, BF16, 64), CudaTuning(8, 8, 1, 4, 4, 0)))
    forward = PrologueSpec(PrologueProblem(FORWARD, Arch.SM80, BF16, 64), CudaTuning(8, 8, 1, 4, 4, 1))
    assert make_plan(forward).blocks == 4


def test_every_problem_that_calls_can_have_is_feasible() -> None:
    for direction, head_dim, dtype, align in product(
        Direction, range(2, 257, 2), (FP32, BF16), (2, 4, 8, 16)
    ):
        if align < dtype.bytes or head_dim * dtype.bytes % align:
            continue
        for arch in (Arch.SM80, Arch.CPU):
            assert next(candidates(PrologueProblem(direction, arch, dtype, head_dim, align=align)), None)


def test_fp16_is_for_gpus() -> None:
    with pytest.raises(Infeasible, match="fp16: the CPU's kernels take fp32 and bf16"):
        make_plan(PrologueSpec(PrologueProblem(FORWARD, Arch.CPU, FP16, 64), CpuTuning(64)))


# ---- nvcc


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "norm"),
    [
        (Arch.SM90A, BF16, 128, True),
        (Arch.SM80, FP16, 72, True),
        (Arch.SM89, FP32, 256, True),
        (Arch.SM100, BF16, 128, True),
        (Arch.SM120, BF16, 128, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)
def test_first_guesses_compile_without_spills(
    direction: Direction, arch: Arch, dtype: DType, head_dim: int, norm: bool, nvcc: None, tmp_path: Path
) -> None:
    align = math.gcd(16, head_dim * dtype.bytes)
    problem = PrologueProblem(direction, arch, dtype, head_dim, dtype, FP32, norm, align)
    source = render(next(candidates(problem)))
    built = toolchain.toolchain(arch).compile(source, tmp_path)
    assert set(built.resources) == set(source.symbols)
    assert "warning" not in built.log
    for symbol, used in built.resources.items():
        assert used["spill_bytes"] == 0
        threads = SUMS_THREADS if symbol != source.spec.symbol else source.plan.threads
        assert used["registers"] * threads <= 65536


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "heads"), [((11, 8), (5, 3)), ((4000, 1500), (28, 4))], ids=str)
@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_knobs_on_a_gpu(
    run: Callable[..., Any], knobs: tuple[int, ...], lengths: tuple[int, int], heads: tuple[int, int]
) -> None:
    """Grids with fewer and with more tokens than they have warps; gradients have the same bits again."""
    spec = with_knobs(FORWARD if run is run_forward else BACKWARD, 64, *knobs)
    arch = kernels.target(torch.device("cuda"))
    spec = dataclasses.replace(spec, problem=dataclasses.replace(spec.problem, arch=arch))
    pack = draw_for(spec, lengths, heads, "cuda")
    first_run, second = (run(spec, lambda spec: None, pack) for _ in range(2))
    if first_run is not None:
        assert all(torch.equal(a, b) for a, b in zip(first_run, second, strict=True))
