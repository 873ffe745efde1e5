"""Kernels that split the keys of short queries: their text on the CPU, plans, dispatch, and results on a GPU."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated_forward import EmulatedForward
from emulator import Emulated
from oracle import Shape, draw, make_mask, unions
from strict_nvcc import check_resources
from test_emulated_kernels import LIMIT, aligned
from torch import Tensor

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm80 import SPLITTING, Sm80Forward
from attnforge.codegen.families.sm90 import SPLITS
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import dispatch, kernels, ops
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.native.operators import operators
from attnforge.runtime.search.reference import reference

FORWARD, BFLOAT16, FLOAT16 = Direction.FORWARD, DType.BFLOAT16, DType.FLOAT16
H200 = Target("NVIDIA H200", (Arch.SM90A, Arch.SM90))


def compare(out: Tensor, lse: Tensor, x: tuple[Tensor, Tensor, Tensor], mask: AnyMask, limit: float) -> None:
    exact = reference(*x, mask)
    assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf)
    assert not out[lse == -torch.inf].any()
    error = (out - exact.out).abs().max().item()
    assert error <= limit * exact.out.abs().max().item(), error
    error = (lse.nan_to_num(neginf=0) - exact.lse.nan_to_num(neginf=0)).abs().max().item()
    assert error <= 1e-3, error


# head_dim, of v, alignment, dtype, mask, (seq_q, seq_k, group), knobs: tile_m, tile_n, warps, stages, q_in_regs,
# splits, o_splits
EMULATED = [
    (64, 0, 16, BFLOAT16, Mask.FULL, (1, 300, 7), (16, 64, 4, 3, False, 4)),
    (64, 0, 16, BFLOAT16, Mask.CAUSAL, (5, 333, 7), (16, 64, 4, 2, False, 4)),
    (32, 0, 16, BFLOAT16, Mask.CAUSAL, (70, 20, 3), (32, 32, 4, 2, False, 2)),
    (64, 0, 16, FLOAT16, Mask.SPANS, (70, 201, 3), (64, 32, 4, 2, False, 1)),
    (41, 0, 2, FLOAT16, Mask.SPANS, (9, 100, 2), (16, 32, 2, 2, False, 2)),
    (44, 72, 8, BFLOAT16, Mask.FULL, (3, 150, 1), (16, 64, 2, 1, True, 2)),
    (192, 128, 16, BFLOAT16, Mask.CAUSAL, (4, 99, 4), (16, 64, 4, 2, False, 4)),
    # Warps that share the columns of O.
    (256, 0, 16, BFLOAT16, Mask.CAUSAL, (70, 150, 1), (64, 64, 8, 1, False, 1, 4)),
    (512, 0, 16, FLOAT16, Mask.FULL, (33, 100, 1), (32, 32, 4, 1, False, 1, 2)),
    (320, 128, 2, BFLOAT16, Mask.SPANS, (40, 90, 2), (64, 32, 8, 1, False, 1, 2)),
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")
@pytest.mark.parametrize(("head_dim", "dim_v", "align", "dtype", "mask", "sizes", "knobs"), EMULATED, ids=str)
def test_emulated(
    head_dim: int,
    dim_v: int,
    align: int,
    dtype: DType,
    mask: Mask,
    sizes: tuple[int, int, int],
    knobs: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """The kernels' own text against float64: one range, those of 1, 2 and 4 warps, more than there are key tiles."""
    seq_q, seq_k, group = sizes
    shape = Shape(seq_q, seq_k, head_dim, 2, group, 2, dim_v)
    x = draw(shape, kernels.TORCH_DTYPES[dtype], "cpu")
    q, k, v = (aligned(t.detach(), align) for t in (x.q, x.k, x.v))
    problem = Problem(FORWARD, Arch.SM90, dtype, head_dim, mask, align, dim_v)
    kernel = Emulated(Spec(problem, Sm80Forward(*knobs)), tmp_path)  # type: ignore[arg-type]
    seen = make_mask(mask.value, seq_q, seq_k, "cpu")
    for kernel.ranges in (1, 3, 7, 12, 40):
        compare(*kernel.forward(q, k, v, seen), (q, k, v), seen, LIMIT[dtype])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")
def test_emulated_unions(tmp_path: Path) -> None:
    x = draw(Shape(21, 150, 32, 1, 3), torch.bfloat16, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    problem = Problem(FORWARD, Arch.SM80, BFLOAT16, 32, Mask.SPANS, intervals=2)
    seen = unions(21, 150, 2, "cpu")
    kernel = Emulated(Spec(problem, Sm80Forward(16, 32, 2, 2, False, 2)), tmp_path)
    compare(*kernel.forward(q, k, v, seen), (q, k, v), seen, LIMIT[BFLOAT16])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")
def test_large_scores(tmp_path: Path) -> None:
    """The weights of ranges add up to 1, though float32 holds no fraction of an lse of 1e11."""
    q = torch.full((1, 2, 3, 64), 133120.0, dtype=torch.bfloat16)
    k = q[:, :1, :1].expand(1, 1, 300, 64).contiguous()
    problem = Problem(FORWARD, Arch.SM90, BFLOAT16, 64, Mask.FULL)
    kernel = Emulated(Spec(problem, Sm80Forward(16, 64, 4, 3, False, 4)), tmp_path)
    for kernel.ranges in (1, 3):
        out, lse = kernel.forward(q, k, torch.ones_like(k), None)
        assert (out == 1).all()
        torch.testing.assert_close(lse, torch.full_like(lse, 133120.0**2 * 8), rtol=1e-6, atol=0)


# head_dim, of v, mask, knobs, (queries, keys, heads of k, group, batch), (kv_splits, cluster_size)
ON_HOPPER = [
    (128, 0, Mask.FULL, {"tile_m": 64, "tile_n": 64, "stages": 4}, Shape(1, 300, 0, 2, 7), (1, 4)),
    (128, 0, Mask.FULL, {"tile_n": 64}, Shape(100, 700, 0, 1, 2), (1, 8)),
    (128, 0, Mask.CAUSAL, {}, Shape(16, 500, 0, 1, 7, 2), (2, 3)),
    (128, 0, Mask.CAUSAL, {"tile_m": 64}, Shape(90, 40, 0, 2, 3), (1, 2)),
    (64, 0, Mask.SPANS, {"tile_m": 64, "tile_n": 64}, Shape(37, 400, 0, 2, 3), (6, 1)),
    (64, 0, Mask.SPANS, {}, Shape(70, 300, 0, 1, 5), (1, 5)),
    (64, 0, Mask.SPANS, {"exact_visits": 0}, Shape(33, 270, 0, 1, 4), (1, 1)),
    (192, 0, Mask.FULL, {"tile_m": 64, "tile_n": 64}, Shape(9, 200, 0, 1, 8), (2, 7)),
    (256, 0, Mask.FULL, {"tile_n": 80}, Shape(70, 300, 0, 1, 2), (1, 2)),  # without room for P of two visits
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize(("head_dim", "dim_v", "mask", "knobs", "shape", "splits"), ON_HOPPER, ids=str)
def test_emulated_on_hopper(
    head_dim: int,
    dim_v: int,
    mask: Mask,
    knobs: dict[str, int],
    shape: Shape,
    splits: tuple[int, int],
    tmp_path: Path,
) -> None:
    """Clusters and splits: fewer key tiles than blocks, and rows that see none."""
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, head_dim, mask, 16, dim_v)
    kernel = EmulatedForward(Spec(problem, replace(SPLITS, **knobs)), tmp_path)  # type: ignore[arg-type]
    kernel.splits = splits
    for seed in range(2):
        assert kernel.failure(shape, seed, sharpness=(1, 8)[seed]) == ""


# Statements that the kernel needs; without any of them it hangs, or its results are wrong.
BREAKS = {
    "Q read before it is there": "cp_async_wait();",
    "the first warpgroup does not begin": "order_arrive();  // the first warpgroup begins",
    "barriers used before they are there": "named_sync(kReady, kThreads);",
    "K read before it is there": "barrier_wait(smem + kFullK + kv_pipe.stage * 8, kv_pipe.phase);",
    "V read before it is there": "barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);",
    "K overwritten before it is read": "barrier_wait(smem + kEmptyK + kv_pipe.stage * 8, kv_pipe.phase ^ 1);",
    "V overwritten before it is read": "barrier_wait(smem + kEmptyV + kv_pipe.stage * 8, kv_pipe.phase ^ 1);",
    "K not released": "release(smem + kEmptyK + kv_pipe.stage * 8);",
    "V not released": "release(smem + kEmptyV + v_pipe.stage * 8);",
    "S read before it is complete": "wgmma_wait_all_but_one();",
    "V released before P V is done": "wgmma_wait_all();  // P V is done",
    "results written over what is read": (
        "named_sync(kAll, kConsumers * 128);  // all warpgroups have read Q, K and V"
    ),
    "results read before they are there": "cluster_sync();  // the results of all ranges are there",
    "weights read before they are there": "named_sync(kAll, threads);  // the weights are there",
    "a block leaves while results are read": "cluster_sync();  // until now",
}
# The same of tiles of one warpgroup; two have their ordering barrier here, too.
BREAKS_OF_ONE = {"Q read before other warps have copied it": "named_sync(kWarpgroup + warpgroup, 128);"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize(("tile_m", "breaks"), [(128, BREAKS), (64, BREAKS_OF_ONE)], ids=["two", "one"])
def test_breaks_are_noticed(tile_m: int, breaks: dict[str, str], tmp_path: Path) -> None:
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, 128, Mask.FULL)
    spec = Spec(problem, replace(SPLITS, tile_m=tile_m, tile_n=64))
    kernel = EmulatedForward(spec, tmp_path, breaks)
    kernel.splits = 1, 3
    shape = Shape(60, 700, 0, 1, 2)
    assert all(kernel.failure(shape, seed) == "" for seed in range(3))
    for number, name in enumerate(breaks, 1):
        assert any(kernel.failure(shape, seed, number) for seed in range(30)), name


def test_plan() -> None:
    plan = make_plan(Spec(Problem(FORWARD, Arch.SM90, BFLOAT16, 128, Mask.CAUSAL), SPLITTING[0][1]))
    main, combine = plan.launches
    assert main.grid == ("tiles_packed", "kv_splits", "heads_kv", "batch")
    assert combine.grid == ("combine_blocks",)
    assert combine.overlaps  # griddepcontrol.wait is there from compute capability 9.0 on
    assert main.shared_bytes == 16 * 256 + 3 * 2 * 64 * 256
    assert plan.split_blocks == 2  # of 228 KiB, with 1 KiB for each block
    assert plan.deterministic
    older = make_plan(Spec(Problem(FORWARD, Arch.SM80, BFLOAT16, 128, Mask.CAUSAL), SPLITTING[1][1]))
    assert not older.launches[1].overlaps


def test_plan_on_hopper() -> None:
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, 128, Mask.SPANS)
    plan = make_plan(Spec(problem, SPLITS))
    main, combine = plan.launches
    assert main.grid == ("cluster_size", "tiles_packed", "kv_splits", "heads_kv", "batch")
    assert main.clustered
    assert combine.grid == ("combine_blocks",)
    assert not main.persistent
    assert combine.overlaps
    assert main.threads == 3 * 128
    assert main.shared_bytes == 128 * 256 + 2 * (2 * 128 * 256 + 128 * 8 + 32)
    assert [m.tensor for m in plan.tensor_maps] == ["k", "v"]
    assert (plan.split_blocks, plan.row_groups, plan.bounds, plan.columns_v) == (1, 1, True, 128)
    assert not plan.from_end


@pytest.mark.parametrize(
    ("changes", "knobs", "reason"),
    [
        ({"mask": Mask.DENSE}, {}, "splits: the q heads"),
        ({"mask": Mask.SPANS, "planes": 1}, {}, "splits: the q heads"),
        ({"score": ScoreMod("twice: score * 2.0")}, {}, "splits: the q heads"),
        ({}, {"splits": 2}, "splits 2: must be 0 or 1"),
        ({}, {"ping_pong": True}, "splits: takes tile_m, tile_n, stages and exact_visits"),
        ({}, {"persistent": True}, "splits: takes tile_m"),
        ({}, {"heads_together": 2}, "splits: takes tile_m"),
        ({}, {"stages": 4}, "shared memory: 295"),
        ({}, {"tile_m": 192}, "registers: S, P and O"),
    ],
    ids=str,
)
def test_infeasible_on_hopper(changes: dict[str, object], knobs: dict[str, int], reason: str) -> None:
    values = {"head_dim": 128, "mask": Mask.FULL} | changes
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, **values)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(problem, replace(SPLITS, **knobs)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "knobs", "reason"),
    [
        ({"mask": Mask.DENSE}, (32, 64, 4, 2, False, 2), "splits: the q heads"),
        ({"mask": Mask.SPANS, "planes": 1}, (16, 64, 4, 2, False, 4), "splits: the q heads"),
        ({"score": ScoreMod("twice: score * 2.0")}, (16, 64, 4, 2, False, 4), "splits: the q heads"),
        ({}, (16, 64, 4, 2, False, 3), "warps 4: must be a multiple of 3"),
        ({}, (16, 32, 4, 2, False, 4), "tile_n 32: must be a multiple of 64"),
        ({}, (128, 64, 8, 1, True, 1), "splits: the warps' results take"),
        ({}, (64, 64, 8, 1, False, 0, 4), "o_splits: needs splits 1, stages 1"),
        ({}, (64, 64, 8, 1, False, 1, 4), "head_dim 128: must be a multiple of 256"),
        ({"head_dim": 300}, (64, 64, 8, 1, False, 1, 2), "head_dim 300: must be a multiple of 128"),
        ({"head_dim": 513}, (64, 64, 8, 1, False, 1, 4), "head_dim 513: the sm90 kernels take 1 to 512"),
        ({"head_dim": 264}, (64, 64, 4, 1, False, 1), "head_dim 264: the sm90 kernels take 1 to 256"),
    ],
    ids=str,
)
def test_infeasible(changes: dict[str, object], knobs: tuple[int, ...], reason: str) -> None:
    values = {"head_dim": 128, "mask": Mask.FULL} | changes
    problem = Problem(FORWARD, Arch.SM90, BFLOAT16, **values)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match=reason):
        make_plan(Spec(problem, Sm80Forward(*knobs)))  # type: ignore[arg-type]


def test_tiles_hold_the_rows_of_a_group() -> None:
    problem = Problem(FORWARD, Arch.SM90, BFLOAT16, 128, Mask.CAUSAL)
    assert [next(splitting(problem, rows)).tuning.tile_m for rows in (1, 16, 17, 64, 65, 900)] == [
        *(16, 16, 32, 64),
        *(128, 128),
    ]
    assert not any(spec.tuning in dict.fromkeys(t for _, t in SPLITTING) for spec in candidates(problem))


def test_dispatch_prefers_them_where_asked() -> None:
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, 128, Mask.FULL)
    for tile_m in (64, 128):
        chosen = choose_for(Call(problem, 7, 1), H200, split_rows=tile_m)
        assert chosen.spec == next(splitting(problem, tile_m))
        assert chosen.spec.tuning.tile_m == tile_m
    assert choose_for(Call(problem, 7, 1), H200).spec.problem.arch is Arch.SM90A
    assert not getattr(choose_for(Call(problem, 7, 1), H200).spec.tuning, "splits", 0)
    # Rows of 8 or fewer bytes cannot be copied by TMA.
    unaligned = choose_for(Call(replace(problem, align=8), 7, 1), H200, split_rows=64)
    assert (unaligned.spec.problem.arch, unaligned.spec.tuning) == (Arch.SM90, SPLITTING[0][1])
    older = Target("NVIDIA A100", (Arch.SM80,))
    for group, rows, tiles in ((7, (2, 3), 32), (5, (2, 3), 16), (4, (16, 31), 64)):
        # Of 2 and of 3 queries, one class: tiles for the larger, of 21 or 15 rows. Products are the bound of 16 to 31
        # queries of 4 heads: tiles for the fewest.
        chosen_tiles = {
            choose_for(
                Call(replace(problem, arch=Arch.SM80), group, n), older, split_rows=64
            ).spec.tuning.tile_m
            for n in rows
        }
        assert chosen_tiles == {tiles}
    # No kernel splits these: as without the wish.
    for alone in (Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 128, Mask.FULL), other_mask()):
        assert choose_for(Call(alone, 7, 1), H200, split_rows=64) == choose_for(Call(alone, 7, 1), H200)


def other_mask() -> Problem:
    return Problem(FORWARD, Arch.SM90A, BFLOAT16, 128, Mask.SPANS, planes=1)


CASES = [
    (Arch.SM90A, 128, 0, Mask.CAUSAL, 16),
    (Arch.SM90A, 64, 0, Mask.SPANS, 16),
    (Arch.SM90A, 72, 0, Mask.FULL, 16),
    (Arch.SM90A, 256, 0, Mask.SPANS, 16),
    (Arch.SM90A, 192, 128, Mask.FULL, 16),
    (Arch.SM90, 128, 0, Mask.CAUSAL, 16),
    (Arch.SM80, 64, 0, Mask.SPANS, 16),
    (Arch.SM120, 41, 64, Mask.FULL, 2),
    (Arch.SM89, 256, 0, Mask.CAUSAL, 16),
]


@pytest.mark.nvcc
@pytest.mark.parametrize(("arch", "head_dim", "dim_v", "mask", "align"), CASES, ids=str)
def test_compile_cleanly(
    arch: Arch, head_dim: int, dim_v: int, mask: Mask, align: int, nvcc: None, tmp_path: Path
) -> None:
    problem = Problem(FORWARD, arch, BFLOAT16, head_dim, mask, align, dim_v)
    check_resources([render(next(splitting(problem, rows))) for rows in (1, 64, 1000)], tmp_path)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90, Arch.SM100, Arch.SM120], ids=lambda arch: arch.value)
def test_wide_heads_compile_cleanly(arch: Arch, nvcc: None, tmp_path: Path) -> None:
    check_resources(render(next(candidates(Problem(FORWARD, arch, BFLOAT16, 512, Mask.FULL)))), tmp_path)


# ---- On a GPU


def route(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask) -> int:
    """The handle of the variant that runs the call."""
    operators()
    data, kind, visible_keys = ops.unpack_mask(mask, q, k)
    return int(torch.ops.attnforge.route(q, k, v, data, kind, False, visible_keys, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "causal", "spans"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (72, torch.float16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
        (20, torch.float16),
    ],
)
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "heads_kv", "group", "batch"),
    [
        *(
            (1, 8001, 4, 7, 1),
            (3, 2047, 2, 4, 3),
            (16, 4096, 4, 7, 2),
            (37, 1500, 1, 1, 2),
            (128, 9000, 1, 7, 1),
        ),
        (300, 5000, 2, 3, 1),
    ],
)
def test_calls(
    seq_q: int,
    seq_k: int,
    heads_kv: int,
    group: int,
    batch: int,
    head_dim: int,
    kind: str,
    dtype: torch.dtype,
) -> None:
    x = draw(Shape(seq_q, seq_k, head_dim, heads_kv, group, batch), dtype, "cuda")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = make_mask(kind, seq_q, seq_k, "cuda")
    out, lse = ops.forward(q, k, v, mask, None, 0)
    assert getattr(kernels.spec_of(route(q, k, v, mask)).tuning, "splits", 0)
    compare(out, lse, (q, k, v), mask, 2e-2)
    assert torch.equal(out, ops.forward(q, k, v, mask, None, 0)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("limit", "tuning"), SPLITTING, ids=str)
def test_every_kernel(limit: int, tuning: Sm80Forward) -> None:
    """With few and many rows, so that tiles are not full, or several."""
    device = torch.device("cuda")
    spec = Spec(Problem(FORWARD, kernels.targets(device)[-1], BFLOAT16, limit, Mask.CAUSAL), tuning)
    try:
        make_plan(spec)
    except Infeasible as reason:
        pytest.skip(str(reason))
    for seq_q in (1, 90):
        x = draw(Shape(seq_q, 3001, limit, 2, 7), torch.bfloat16, "cuda")
        q, k, v = (t.detach() for t in (x.q, x.k, x.v))
        out, lse = ops.forward(q, k, v, attnforge.Causal(), None, kernels.load(spec, device))
        compare(out, lse, (q, k, v), attnforge.Causal(), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "unions"])
@pytest.mark.parametrize(("head_dim", "dim_v"), [(32, 0), (64, 0), (128, 0), (192, 128), (256, 0)])
@pytest.mark.parametrize("tile_m", [64, 128])
def test_every_hopper_kernel(tile_m: int, head_dim: int, dim_v: int, mask: str) -> None:
    """Few and many rows: tiles that are not full, or several; rows and ranges that see no key."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("needs capability 9.0")
    intervals = 2 if mask == "unions" else 1
    kind = Mask.SPANS if mask == "unions" else Mask(mask)
    problem = Problem(FORWARD, Arch.SM90A, BFLOAT16, head_dim, kind, 16, dim_v, intervals=intervals)
    spec = next(splitting(problem, 1 if tile_m == 64 else 1000))
    assert spec.tuning.tile_m == tile_m
    handle = kernels.load(spec, device)
    for seq_q, seq_k in ((1, 3001), (90, 3001), (300, 77)):
        x = draw(Shape(seq_q, seq_k, head_dim, 2, 7, 2, dim_v), torch.bfloat16, "cuda")
        q, k, v = (t.detach() for t in (x.q, x.k, x.v))
        seen = unions(seq_q, seq_k, 2, "cuda") if mask == "unions" else make_mask(mask, seq_q, seq_k, "cuda")
        out, lse = ops.forward(q, k, v, seen, None, handle)
        compare(out, lse, (q, k, v), seen, 2e-2)
        assert torch.equal(out, ops.forward(q, k, v, seen, None, handle)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "batch", "queries", "keys", "splits"),
    [
        ((28, 4), 1, 64, 8192, True),
        ((28, 4), 16, 64, 8192, True),
        ((32, 8), 1, 256, 32768, True),
        ((16, 16), 1, 1, 2048, True),
        ((16, 16), 4, 16, 8192, None),
        ((32, 8), 16, 128, 2048, False),
        ((28, 4), 1, 512, 1024, False),
        ((28, 4), 1, 1, 1000, False),
    ],
)
def test_choice(heads: tuple[int, int], batch: int, queries: int, keys: int, splits: bool | None) -> None:
    """Cases in which one of the two kernels was at least 7 % faster, or that are out of bounds.

    None: not on an H100, but on an H200, whose memory is faster.
    """
    heads_q, heads_kv = heads
    q = torch.empty(batch, heads_q, queries, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(batch, heads_kv, keys, 128, dtype=torch.bfloat16, device="cuda")
    handle = route(q, k, k, None)
    expected = "H200" in torch.cuda.get_device_name() if splits is None else splits
    assert bool(getattr(kernels.spec_of(handle).tuning, "splits", 0)) == expected


@pytest.mark.gpu
def test_gradients_and_graphs() -> None:
    """The backward takes lse of a split forward; a CUDA graph repeats both launches."""
    x = draw(Shape(4, 3000, 64, 2, 4), torch.bfloat16, "cuda")
    mask = attnforge.Causal()
    grads = x.grads(attnforge.attention(x.q, x.k, x.v, mask))
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    exact = reference(q, k, v, mask, dout=x.dout)
    for got, answer in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
        assert answer is not None
        assert (got - answer).abs().max().item() < 2e-2 * answer.abs().max().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnforge.attention(q, k, v, mask)
    q.copy_(q.roll(1, 2))
    graph.replay()
    assert torch.equal(out, attnforge.attention(q, k, v, mask))


@pytest.mark.gpu
def test_few_blocks_only() -> None:
    """Many queries of many heads leave the choice to the tables."""
    many = draw(Shape(128, 2048, 128, 32, 4, 4), torch.bfloat16, "cuda")
    handle = route(many.q.detach(), many.k.detach(), many.v.detach(), None)
    assert not getattr(kernels.spec_of(handle).tuning, "splits", 0)
    assert "share the keys" not in dispatch.reason_of(handle)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "spans"])
@pytest.mark.parametrize(
    ("head_dim", "seq_q", "seq_k", "heads_kv", "group"),
    [(512, 4096, 4096, 1, 1), (512, 1001, 999, 2, 3), (512, 1, 3000, 1, 8), (384, 65, 129, 1, 1)],
)
def test_wide_heads(
    head_dim: int, seq_q: int, seq_k: int, heads_kv: int, group: int, kind: str, dtype: torch.dtype
) -> None:
    x = draw(Shape(seq_q, seq_k, head_dim, heads_kv, group), dtype, "cuda")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = make_mask(kind, seq_q, seq_k, "cuda")
    compare(*ops.forward(q, k, v, mask, None, 0), (q, k, v), mask, 2e-2)


@pytest.mark.gpu
def test_the_attention_of_a_vae() -> None:
    """As BAGEL's VAE calls it: one head of 512 columns, no gradient."""
    q = torch.randn(1, 1, 2048, 512, device="cuda", dtype=torch.bfloat16)
    exact = reference(q, q, q, None).out
    assert (attnforge.attention(q, q, q) - exact).abs().max().item() < 2e-2
    with pytest.raises(ValueError, match=r"no [\w ]+ bwd kernel"):
        attnforge.attention(q.clone().requires_grad_(), q, q).sum().backward()
