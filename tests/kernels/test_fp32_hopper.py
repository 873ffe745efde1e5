"""The Hopper float32 forward: six bf16 products for one. On the CPU by its source, with nvcc, and on a GPU."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulator import Emulated
from oracle import Shape, dense, distance, draw, efficient, make_mask, peers, unions, visible
from strict_nvcc import SERIALISED, check_resources

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_fp32 import Sm90Fp32Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.reference import reference

# Error allowed on the CPU, as a multiple of the worse of two peers that compute in float32 there.
LIMIT = 1.1
MASKS = ("full", "causal", "spans", "dense")
IN_REGS = Sm90Fp32Forward(128, 64, 2, True, True, True)
IN_SHARED = Sm90Fp32Forward(128, 64, 1, True, True, False)
THREE = Sm90Fp32Forward(192, 32, 3, True, False, False)
ALONE = Sm90Fp32Forward(64, 96, 1, False, True, True)


def spec_of(tuning: Sm90Fp32Forward, dim: int, mask: str, dim_v: int = 0) -> Spec:
    align = next(size for size in (16, 8, 4) if dim * 4 % size == 0 and dim_v * 4 % size == 0)
    return Spec(Problem(Direction.FORWARD, Arch.SM90A, DType.FLOAT32, dim, Mask(mask), align, dim_v), tuning)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize(
    ("tuning", "mask", "shape"),
    [
        (IN_REGS, "full", Shape(130, 200, 64, heads_kv=1, group=2)),
        (THREE, "causal", Shape(250, 170, 41, heads_kv=2)),
        (IN_SHARED, "spans", Shape(200, 150, 128, heads_kv=1)),
        (IN_REGS, "dense", Shape(150, 170, 52, heads_kv=1, group=2)),
        (ALONE, "spans", Shape(100, 200, 9, heads_kv=1, dim_v=70)),
    ],
    ids=["registers", "three", "shared", "dense", "alone"],
)
def test_errors_are_those_of_float32(
    tuning: Sm90Fp32Forward, mask: str, shape: Shape, tmp_path: Path
) -> None:
    """Its own source, with tensor cores that cut sums off as Hopper's do."""
    x = draw(shape, torch.float32, "cpu", "slice")
    hidden = make_mask(mask, shape.seq_q, shape.seq_k, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    exact = reference(q, k, v, hidden)
    out, lse = Emulated(spec_of(tuning, shape.head_dim, mask, shape.dim_v), tmp_path).forward(q, k, v, hidden)
    limit = LIMIT * max(distance(outputs[0], exact.out)[0] for outputs in peers(x, hidden))
    assert distance(out, exact.out)[0] <= limit
    seen = exact.lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert not out[~seen].any()
    assert (lse - exact.lse)[seen].pow(2).mean().sqrt() <= 2.5e-7


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize("size", [1e-18, 1e15])
def test_large_and_small_numbers(size: float, tmp_path: Path) -> None:
    """Far from 1; a tile of K, and one of V, of zeros; a row of Q of zeros; columns of V apart."""
    x = draw(Shape(80, 192, 32, heads_kv=1), torch.float32, "cpu")
    q, k, v = x.q.detach() / size, x.k.detach() * size, x.v.detach() * size
    k[:, :, 64:128], v[:, :, 128:], q[:, :, 7] = 0, 0, 0
    v[..., 5] *= 1e-3
    exact = reference(q, k, v, None).out
    out, _ = Emulated(spec_of(IN_REGS, 32, "full"), tmp_path).forward(q, k, v, None)
    error = (out - exact).pow(2).mean((0, 1, 2)).sqrt() / exact.pow(2).mean((0, 1, 2)).sqrt()
    assert error.max() <= 6e-7, error


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
def test_a_mask_for_each_head(tmp_path: Path) -> None:
    shape = Shape(200, 161, 32, heads_kv=1, group=3, batch=2)
    x = draw(shape, torch.float32, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = dense(200, 161, "cpu", planes=(2, 3))
    out, _ = Emulated(spec_of(THREE, 32, "dense"), tmp_path).forward(q, k, v, mask)
    assert torch.allclose(out, reference(q, k, v, mask).out.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers as on x86-64")
@pytest.mark.parametrize(("count", "planes"), [(2, (1, 1)), (1, (2, 1)), (3, (2, 3))], ids=str)
def test_unions(count: int, planes: tuple[int, int], tmp_path: Path) -> None:
    x = draw(Shape(200, 161, 32, heads_kv=1, group=3, batch=2), torch.float32, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mask = unions(200, 161, count, "cpu", planes)
    spec = spec_of(THREE, 32, "spans")
    problem = replace(spec.problem, intervals=count, planes=int(planes != (1, 1)))
    out, _ = Emulated(replace(spec, problem=problem), tmp_path).forward(q, k, v, mask)
    assert torch.allclose(out, reference(q, k, v, mask).out.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dim", "mask", "tuning", "reason"),
    [
        (64, "full", Sm90Fp32Forward(96, 64, 2, True, True, True), "tile_m 96: must be 64, 128 or 192"),
        (64, "full", Sm90Fp32Forward(128, 40, 2, True, True, True), "tile_n 40: must be a multiple of 16"),
        (64, "full", Sm90Fp32Forward(128, 64, 5, True, True, True), "stages 5: must be 1 to 4"),
        (64, "full", Sm90Fp32Forward(64, 64, 2, True, True, True), "ping_pong: needs at least two"),
        (64, "dense", Sm90Fp32Forward(128, 48, 2, True, True, True), "dense mask: .* multiples of 32"),
        (128, "full", Sm90Fp32Forward(128, 64, 2, True, True, False), "shared memory: 294976 bytes, 62528"),
        (
            128,
            "full",
            Sm90Fp32Forward(128, 64, 1, True, True, True),
            "bf16 splits of P and Q take 272 per consumer",
        ),
        (
            256,
            "full",
            Sm90Fp32Forward(64, 32, 1, False, True, False),
            "head_dim 256: the sm90a fp32 forward takes 1 to 160",
        ),
    ],
)
def test_what_does_not_fit_says_why(dim: int, mask: str, tuning: Sm90Fp32Forward, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(spec_of(tuning, dim, mask))


def test_head_dims() -> None:
    """Any up to 160 with any mask and alignment; the mma.sync family takes the others."""
    for dim in range(1, 161):
        for mask in Mask:
            problem = Problem(Direction.FORWARD, Arch.SM90A, DType.FLOAT32, dim, mask, 4)
            assert next(candidates(problem), None), problem
    for dim, dim_v in ((161, 0), (64, 161)):
        wide = Problem(Direction.FORWARD, Arch.SM90A, DType.FLOAT32, dim, Mask.FULL, 4, dim_v)
        assert next(candidates(wide), None) is None
    backward = Problem(Direction.BACKWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.FULL)
    assert next(candidates(backward), None) is None


def test_the_workspace_holds_three_parts_of_k_and_v() -> None:
    plan = make_plan(spec_of(IN_REGS, 41, "full", 70))
    assert plan.dkv_accum
    assert (plan.columns * 4, plan.columns_v * 4) == (3 * 48 * 2, 3 * 80 * 2)
    assert plan.constants["columns_out"] == 72
    assert [launch.symbol.rpartition("_")[2] == "preprocess" for launch in plan.launches] == [True, False]


@pytest.mark.nvcc
def test_defaults_compile_cleanly(nvcc: None, tmp_path: Path) -> None:
    problems = [
        Problem(Direction.FORWARD, Arch.SM90A, DType.FLOAT32, dim, Mask(mask), 4 if dim == 41 else 16)
        for dim, mask in ((41, "dense"), (64, "spans"), (128, "dense"), (160, "causal"))
    ]
    log = check_resources([render(next(candidates(problem))) for problem in problems], tmp_path)
    assert not SERIALISED.search(log), log


ON_GPU = [
    *((IN_REGS, dim, mask) for dim in (41, 64) for mask in MASKS),
    *((IN_SHARED, 128, mask) for mask in MASKS),
    (THREE, 64, "spans"),
    (THREE, 41, "dense"),
    (ALONE, 64, "causal"),
    (Sm90Fp32Forward(128, 64, 2, False, False, True), 52, "dense"),
    (Sm90Fp32Forward(192, 64, 2, True, True, False), 64, "dense"),
    (Sm90Fp32Forward(128, 96, 2, True, True, True), 56, "full"),
    (Sm90Fp32Forward(128, 32, 1, True, True, False), 160, "causal"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("tuning", "dim", "mask"), ON_GPU, ids=[spec_of(*case).slug for case in ON_GPU])
def test_errors_on_a_gpu(tuning: Sm90Fp32Forward, dim: int, mask: str) -> None:
    """At most those of torch's exact float32 kernel, with rows that see nothing, GQA, and the same bits each time."""
    device = torch.device("cuda", torch.cuda.current_device())
    if Arch.SM90A not in kernels.targets(device):
        pytest.skip("not a Hopper GPU")
    seq_q, seq_k = 1130, 999
    x = draw(Shape(seq_q, seq_k, dim, heads_kv=2, group=2, batch=2), torch.float32, "cuda", "bhsd")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    hidden = make_mask(mask, seq_q, seq_k, "cuda")
    exact = reference(q, k, v, hidden)
    handle = kernels.load(spec_of(tuning, dim, mask), device)
    out, lse = ops.forward(q, k, v, hidden, None, handle)
    theirs = efficient(x, visible(hidden, seq_q, seq_k, "cuda"), None)[0]
    (rms, worst), (rms_limit, worst_limit) = distance(out, exact.out), distance(theirs, exact.out)
    assert rms <= rms_limit
    assert worst <= 1.5 * worst_limit
    seen = exact.lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert not out[~seen].any()
    assert torch.allclose(lse[seen].double(), exact.lse[seen], rtol=1e-6, atol=2e-6)
    for _ in range(3):
        again, _ = ops.forward(q, k, v, hidden, None, handle)
        assert torch.equal(again, out)


@pytest.mark.gpu
def test_dispatch_on_a_gpu() -> None:
    """The forward by itself, under autograd, whose backward is the mma.sync family's."""
    x = draw(Shape(700, 700, 64, heads_kv=2, group=2), torch.float32, "cuda")
    out = attnforge.attention(x.q, x.k, x.v, attnforge.Causal())
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), attnforge.Causal(), None, x.dout)
    for mine, answer in zip(
        (out.detach(), *x.grads(out)), (exact.out, exact.dq, exact.dk, exact.dv), strict=True
    ):
        assert answer is not None
        assert distance(mine, answer)[0] <= 1e-6 * answer.pow(2).mean().sqrt()
