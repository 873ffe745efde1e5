"""The kernels before and after the main one of the Hopper backward, on the CPU."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_kernel import full_params
from emulator import Emulated, runs
from torch import Tensor

from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.plan import Launch
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

NEEDED = ("Specialisation", "Preprocess")
PRELUDE = """#include "emulator.h"
static void griddepcontrol_wait() {}
static void griddepcontrol_launch_dependents() {}
static unsigned pack(float low, float high) { return narrow_pair(low, high); }
static float2 unpack(unsigned x) { return {widen(x & 0xffff), widen(x >> 16)}; }
"""


# A launch of what the main kernel calls for key tiles that no query sees: a warp each, or a block.
UNSEEN = """
{function}
extern "C" __global__ void {symbol}_unseen(const __grid_constant__ Params p) {{
    const int tile = blockIdx.x % p.tiles_n, plane = blockIdx.x / p.tiles_n;
    store_no_dkv(p, tile * kTileN, plane % p.heads_kv, plane / p.heads_kv{threads});
}}
"""


def unseen(source: Source) -> Launch:
    threads = 32 if source.plan.tile_counter else source.plan.launches[1].threads
    return Launch(f"{source.spec.symbol}_unseen", ("tiles_n", "batch", "heads_kv"), threads)


def zeros(source: Source) -> str:
    """C++ of the kernel `unseen`."""
    found = re.search(r"^__device__ [^;{]* store_no_dkv\(.*?^}$", source.text, re.MULTILINE | re.DOTALL)
    threads = ", threadIdx.x, 32" if source.plan.tile_counter else ""
    return UNSEEN.format(function=found[0], symbol=source.spec.symbol, threads=threads) if found else ""


def translate(source: Source) -> str:
    """C++ of all launches but the main one, and of `unseen`."""
    first, *sections = re.split(r"(?=^// ---- )", full_params(source.text), flags=re.MULTILINE)
    kept = [section for section in sections if section.removeprefix("// ---- ").startswith(NEEDED)]
    found = re.search(r"^__device__ [^;{]* sums_dkv\(.*?^}$", source.text, re.MULTILINE | re.DOTALL)
    text = "".join((first, found[0] if found else "", *kept, zeros(source))).replace("#pragma unroll", "//")
    text = text.replace("__align__(16)", "__attribute__((aligned(16)))")
    assert "asm" not in text
    helpers = [item for item in source.plan.launches if item.symbol != source.spec.symbol]
    return PRELUDE + text + runs([*helpers, *([] if source.plan.dkv_accum else [unseen(source)])])


def make_spec(
    head_dim: int,
    *,
    split: bool = True,
    deterministic: bool = False,
    persistent: int = 0,
    mask: Mask = Mask.CAUSAL,
    stores: int = 0,
) -> Spec:
    tuning = Sm90Backward(64, 128, 3, 2, head_dim < 96, 0, split, deterministic, persistent=persistent)
    tuning = replace(tuning, stores_dkv=stores)
    return Spec(Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask), tuning)


def fragments(x: Tensor) -> Tensor:
    """(..., 64, columns) in the order of fragments, flat: element i of a thread as the kernel's header says."""
    thread, i = torch.arange(128)[None, :, None], torch.arange(4)[None, None]
    chunk = torch.arange(x.shape[-1] // 8)[:, None, None]
    rows = thread // 32 * 16 + thread % 32 // 4 + i // 2 * 8
    return x[..., rows, chunk * 8 + thread % 4 * 2 + i % 2].flatten(-3)


BATCH, HEADS_Q, HEADS_KV, SEQ_Q, SEQ_K = 2, 4, 2, 150, 200


def packed(heads: int, rows: int, head_dim: int) -> Tensor:
    return torch.randn(BATCH, rows, heads, head_dim).bfloat16().transpose(1, 2)


class Ends:
    """A spec's launches but the main one, with tensors to run them on."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        self.emulated = Emulated(spec, directory, translate)
        self.emulated.plan = plan = replace(self.emulated.plan, schedule=())  # no lists are read
        d = spec.problem.head_dim
        launches = (*plan.launches, unseen(render(spec)))
        self.launches = {launch.symbol.removeprefix(spec.symbol): launch for launch in launches}
        self.out, self.dout = packed(HEADS_Q, SEQ_Q, d), packed(HEADS_Q, SEQ_Q, d)
        self.dq = torch.full_like(self.out, math.nan)
        self.rows = [torch.full_like(packed(HEADS_KV, 256, d), math.nan) for _ in range(2)]
        self.dk, self.dv = (rows[:, :, :SEQ_K] for rows in self.rows)
        self.lse = torch.randn(BATCH, HEADS_Q, SEQ_Q)
        self.lse[0, 1, 70:90] = -math.inf
        self.lse[1, 0, 20:23] = torch.tensor([4.2e6, -1e30, math.inf])  # too large for gradients
        self.dlse = torch.randn_like(self.lse)
        self.dlse[self.lse.abs() > 4e6] = math.nan
        kv = packed(HEADS_KV, SEQ_K, d)
        given = {"q": self.out, "k": kv, "v": kv, "out": self.out, "dout": self.dout}
        self.params = self.emulated._params(given | {"dq": self.dq, "dk": self.dk, "dv": self.dv}, None)
        p = self.params
        self.stats = torch.full((BATCH, HEADS_Q, p.tiles_m, 2, spec.tuning.tile_m, 8), math.nan).bfloat16()
        self.sums = torch.full((BATCH, HEADS_Q, p.padded_q * d), math.nan)
        self.sums_kv = torch.full((2, BATCH, HEADS_KV, p.padded_k * d), math.nan)
        self.turns = torch.full(
            (BATCH * (HEADS_Q * p.tiles_m + HEADS_KV * p.tiles_n),), 77, dtype=torch.int32
        )
        p.lse, p.delta, p.dq_accum = self.lse.data_ptr(), self.stats.data_ptr(), self.sums.data_ptr()
        p.dlse = self.dlse.data_ptr()
        self.counter = torch.tensor([77], dtype=torch.int32)
        p.tile_counter = self.counter.data_ptr()
        p.dkv_accum, p.dq_semaphore = self.sums_kv.data_ptr(), self.turns.data_ptr()

    def run(self, name: str) -> None:
        self.emulated._run((self.launches[name],), self.params)


@pytest.fixture(
    scope="module",
    params=[
        make_spec(64),
        make_spec(72, split=False),
        make_spec(128, deterministic=True),
        make_spec(96, split=False, persistent=1),
    ],
    ids=lambda spec: spec.slug,
)
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    torch.manual_seed(0)
    return Ends(request.param, tmp_path_factory.mktemp("ends"))


def test_before(ends: Ends) -> None:
    """Statistics of every row, zeros for what is added to."""
    ends.run("_preprocess")
    columns = (
        ends.stats.double()
    )  # the product has ones for the first three, zeros for the rest, which must be finite
    assert not columns[..., 3:].any()
    rows = (
        -columns[..., :3].sum(-1).transpose(2, 3).flatten(3)
    )  # (batch, heads, lse / scale or delta, padded_q)
    delta = (ends.out.double() * ends.dout.double()).sum(-1) - ends.dlse
    scores = rows[:, :, 0] * ends.params.scale_log2  # what is taken from those of base 2
    seen = ends.lse.abs() < 4e6
    torch.testing.assert_close(
        scores[..., :SEQ_Q][seen], ends.lse[seen].double() / math.log(2), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(rows[:, :, 1, :SEQ_Q], delta.where(seen, 0), rtol=1e-5, atol=1e-5)
    assert (scores[..., :SEQ_Q][~seen] > 1e30).all()
    assert (scores[..., SEQ_Q:] > 1e30).all()
    assert not rows[:, :, 1, SEQ_Q:].any()
    plan = ends.emulated.plan
    if plan.dq_semaphore:
        assert ends.sums.isnan().all()  # the first turn stores
        used = ends.turns if plan.dkv_accum else ends.turns[: BATCH * HEADS_Q * ends.params.tiles_m]
        assert not used.any()
    else:
        assert not ends.sums.any()
    assert (ends.counter.item() == 0) == plan.tile_counter
    assert plan.dkv_accum != bool(ends.sums_kv.isnan().any())
    assert ends.sums_kv.nan_to_num(nan=0.0).eq(0).all()


def test_the_smallest_call_clears_the_counter(ends: Ends) -> None:
    """Of one block."""
    p = ends.params
    sizes = p.batch, p.heads_q, p.tiles_m
    p.batch, p.heads_q, p.tiles_m = 1, 1, 1
    ends.counter.fill_(77)
    ends.run("_preprocess")
    p.batch, p.heads_q, p.tiles_m = sizes
    assert (ends.counter.item() == 0) == ends.emulated.plan.tile_counter


def test_key_tiles_that_no_query_sees(ends: Ends) -> None:
    """Zeros in dK and dV, up to the last key and not past it."""
    if ends.emulated.plan.dkv_accum:
        pytest.skip("zeros are in dkv_accum")
    ends.dk.fill_(math.nan)
    ends.dv.fill_(math.nan)
    ends.run("_unseen")
    for rows in ends.rows:
        assert not rows[:, :, :SEQ_K].any()  # nor NaN
        assert rows[:, :, SEQ_K:].isnan().all()


def test_statistics_at_the_smallest_scale(ends: Ends) -> None:
    """lse / scale stays finite at the least scale_log2 that launchers pass, and rows without keys still get P = 0."""
    usual, least = ends.params.scale_log2, 1e-30
    ends.params.scale_log2 = least
    ends.run("_preprocess")
    ends.params.scale_log2 = usual
    powers = ends.stats[:, :, :, 0, :, :3].double().sum(-1).flatten(2) * least
    seen = ends.lse.abs() < 4e6
    expected = -ends.lse.double() / math.log(2)
    torch.testing.assert_close(powers[..., :SEQ_Q][seen], expected[seen], rtol=1e-6, atol=1e-6)
    without = torch.cat((powers[..., :SEQ_Q][~seen], powers[..., SEQ_Q:].flatten()))
    assert (without.isfinite() & (without < -150)).all()  # 2^-150 is 0 in float32


def test_no_gradient_of_lse(ends: Ends) -> None:
    ends.params.dlse = None
    ends.run("_preprocess")
    ends.params.dlse = ends.dlse.data_ptr()
    delta = -ends.stats[:, :, :, 1, :, :3].double().sum(-1).flatten(2)[..., :SEQ_Q]
    exact = (ends.out.double() * ends.dout.double()).sum(-1)
    torch.testing.assert_close(delta, exact.where(ends.lse.abs() < 4e6, 0), rtol=1e-5, atol=1e-5)


def test_dq(ends: Ends) -> None:
    """scale * sums, rounded once; zeros where a tile has no sums."""
    p, tuning = ends.params, ends.emulated.spec.tuning
    exact = torch.randn(BATCH, HEADS_Q, p.padded_q, ends.out.shape[3])
    ends.sums.copy_(fragments(exact.unflatten(2, (-1, 64))).flatten(2))
    ends.turns[:] = 3
    if ends.emulated.plan.dq_semaphore:
        ends.turns[HEADS_Q * p.tiles_m + 1] = 0  # tile 1 of head 0 of batch entry 1
        exact[1, 0, tuning.tile_m : 2 * tuning.tile_m] = 0
        ends.sums[1, 0, tuning.tile_m * exact.shape[3] : 2 * tuning.tile_m * exact.shape[3]] = math.nan
    ends.run("_postprocess")
    assert torch.equal(ends.dq, (exact * p.scale).bfloat16()[:, :, :SEQ_Q])


def test_dk_and_dv(ends: Ends) -> None:
    if not ends.emulated.plan.dkv_accum:
        assert "_postprocess_dkv" not in ends.launches
        return
    exact = torch.randn(2, BATCH, HEADS_KV, ends.params.padded_k, ends.out.shape[3])
    ends.sums_kv.copy_(fragments(exact.unflatten(3, (-1, 64))).flatten(3))
    ends.run("_postprocess_dkv")
    assert torch.equal(ends.dk, (exact[0] * ends.params.scale).bfloat16()[:, :, :SEQ_K])
    assert torch.equal(ends.dv, exact[1].bfloat16()[:, :, :SEQ_K])


@pytest.mark.parametrize(("head_dim", "cut"), [(64, 3), (128, 2), (64, 0)])  # 0: no visits
def test_key_tiles_without_sums(head_dim: int, cut: int, tmp_path: Path) -> None:
    """Where heads have no group, blocks store dK and dV of tiles whose lists are whole: no zeros, no rounding."""
    ends = Ends(make_spec(head_dim, mask=Mask.SPANS, stores=1), tmp_path)
    p, d = ends.params, ends.out.shape[3]
    pieces = torch.tensor([1, cut], dtype=torch.int32)  # of two key tiles
    p.tile_pieces = pieces.data_ptr()
    exact = torch.randn(2, BATCH, HEADS_KV, p.padded_k, d)
    rounded = (exact * torch.tensor([p.scale, 1.0])[:, None, None, None, None]).bfloat16()[..., :SEQ_K, :]
    for heads_q, first in ((HEADS_KV, 128), (HEADS_Q, 0)):  # `first`: key with sums
        p.heads_q = heads_q
        ends.sums_kv.fill_(math.nan)
        ends.run("_preprocess")
        assert ends.sums_kv[..., : first * d].isnan().all()
        assert not ends.sums_kv[..., first * d :].any()
        ends.sums_kv.copy_(fragments(exact.unflatten(3, (-1, 64))).flatten(3))
        for x in (ends.dk, ends.dv):
            x.fill_(7.0)
        ends.run("_postprocess_dkv")
        for x, answer in zip((ends.dk, ends.dv), rounded, strict=True):
            assert (x[:, :, :first] == 7.0).all()
            assert torch.equal(x[:, :, first:], answer[:, :, first:])
