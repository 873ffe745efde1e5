"""One rank of test_context_parallel.py: attention on shards against one process, all cases in one start."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mask_functions import functions as mask_functions
from oracle import Shape
from score_oracle import functions as score_functions
from score_oracle import learned
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.runtime.distributed import links, row_assignment
from attnforge.runtime.distributed.cost import Partition
from attnforge.runtime.masks import AnyMask
from attnforge.runtime.search.reference import reference

# Imports what the ranks' own compilations take: once, before they fork.
torch.compile(torch.neg, backend="eager")(torch.zeros(1))


@dataclass(frozen=True)
class Case:
    """One call. `heads` is context_parallel's argument."""

    mask: str
    total: int
    heads_q: int
    heads_kv: int
    head_dim: int = 16
    batch: int = 1
    heads: int | None = None
    pieces: int = 2
    layout: str = "packed"
    dim_v: int = 16


CASES = (
    Case("packed", 200, 14, 2),
    Case("packed", 197, 28, 4, pieces=3),  # 4 ranks: one key head each; rows do not divide
    Case("packed", 61, 7, 1, pieces=1),  # keys are gathered only
    Case("packed", 200, 14, 2, pieces=8),  # more than there are heads in a share
    Case("packed", 199, 8, 4, heads=1),
    Case("packed", 198, 8, 4, heads=2, layout="heads"),
    Case("packed", 197, 28, 4, heads=2, pieces=3),
    Case("packed", 200, 14, 2, heads=2, pieces=8),
    Case("packed", 200, 14, 2, heads=1, pieces=1),
    Case("packed", 193, 8, 4, heads=1, pieces=1, batch=2, layout="heads"),
    Case("causal", 131, 8, 4, heads=1, pieces=3),
    Case("causal", 128, 8, 4, heads=4, pieces=1),
    Case("one image", 160, 8, 4),  # all of the work is in the rows of the last rank
    Case("causal", 130, 14, 2, batch=2),
    Case("causal", 128, 8, 4),
    Case("none", 131, 8, 4, batch=2, layout="heads"),
    Case("none", 64, 6, 2),
    Case("window", 150, 14, 2),
    Case("dense", 150, 14, 2, batch=2),
    Case("dense heads", 147, 14, 2, pieces=3, layout="heads"),
)
WIDE = (
    Case("dense heads", 128, 8, 4, dim_v=24),
    Case("packed", 77, 14, 2, dim_v=8),
)  # v has a head_dim of its own


def on_gpu(case: Case) -> Case:
    """A case of several tiles and of a head_dim with tensor-core kernels."""
    return replace(case, total=7 * case.total, head_dim=64, dim_v=64)


def make_mask(case: Case, device: torch.device) -> AnyMask:
    total = case.total
    if case.mask == "packed":
        samples = [total // 2, total - total // 2]
        splits = [part for size in samples for part in (size // 4, size // 3, size - size // 4 - size // 3)]
        return attnforge.bagel.PackedMask(samples, splits, ["causal", "noise", "full"] * 2, device)
    if case.mask == "one image":
        key = torch.arange(total, dtype=torch.int32, device=device)
        first = total - total // 8
        return attnforge.Spans(torch.where(key < first, key, first), torch.where(key < first, key + 1, total))
    if case.mask == "window":
        key = torch.arange(total, dtype=torch.int32, device=device)
        return attnforge.Spans(key, (key + 40).clamp(max=total))
    if case.mask.startswith("dense"):
        heads = case.heads_q if case.mask == "dense heads" else 1
        generator = torch.Generator().manual_seed(4)
        mask = torch.rand(case.batch, heads, total, total, generator=generator) < 0.4
        return attnforge.DenseMask(mask.to(device))
    return attnforge.Causal() if case.mask == "causal" else None


def draw(
    case: Case, heads: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if case.layout == "heads":
        x = torch.randn(case.batch, heads, case.total, dim, generator=generator)
    else:
        x = torch.randn(case.batch, case.total, heads, dim, generator=generator).transpose(1, 2)
    return x.to(device, dtype)


def layout(x: Tensor) -> list[int]:
    """Strides of the axes of more than one entry; others mean nothing."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout."""
    sizes = (
        (case.heads_q, case.head_dim),
        (case.heads_kv, case.head_dim),
        (case.heads_kv, case.dim_v),
        (case.heads_q, case.dim_v),
    )
    q, k, v, dout = (draw(case, *size, dtype, device, seed) for seed, size in enumerate(sizes))
    return q, k, v, dout


@lru_cache(maxsize=1)
def expected(case: Case, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """out, dq, dk, dv in float64, and the errors of one process: the same for all meshes."""
    q, k, v, dout = inputs(case, dtype, device)
    mask = make_mask(case, device)
    exact = reference(q, k, v, mask, 0.2, dout)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    one = attnforge.attention(q, k, v, mask, scale=0.2)
    theirs = (one, *torch.autograd.grad(one, (q, k, v), dout))
    found = []
    for single, truth in zip(theirs, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        assert truth is not None
        noise = (single.detach().double() - truth).square().mean().sqrt() + 1e-7 * truth.abs().max()
        found.append((truth, noise))
    return found


def check(case: Case, dtype: torch.dtype, mesh: DeviceMesh, device: torch.device) -> float:
    """Largest error of out, dq, dk, dv over that of one process, both against float64."""
    cp = attnforge.context_parallel(mesh, heads=case.heads, pieces=case.pieces)
    mask = make_mask(case, device)
    q, k, v, dout = inputs(case, dtype, device)
    a, b, c = (cp.shard(x, dim=2).requires_grad_() for x in (q, k, v))
    out = cp.attention(a, b, c, mask, total=case.total, scale=0.2)
    if case.dim_v == case.head_dim:
        assert layout(out) == layout(torch.empty_like(a)), "the output is not in q's layout"
    gradients = torch.autograd.grad(out, (a, b, c), cp.shard(dout, dim=2))
    ours = [cp.gather(x, dim=2, total=case.total) for x in (out, *gradients)]
    assert not cp.gather(out, dim=2)[:, :, case.total :].any(), "padding has an output"
    worst = 0.0
    for mine, (truth, noise) in zip(ours, expected(case, dtype, device), strict=True):
        worst = max(worst, float((mine.double() - truth).square().mean().sqrt() / noise))
    return worst


def close(mine: Tensor, whole: Tensor) -> None:
    """Equal but for rounding: of float32, or of kernels that compute with bf16 operands."""
    if mine.device.type == "cpu":
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)
        return
    hidden = whole == -torch.inf
    assert torch.equal(mine == -torch.inf, hidden)
    error = (mine - whole).masked_fill(hidden, 0).float().norm()
    assert error <= 1e-2 * whole.masked_fill(hidden, 0).float().norm(), "not what one process gives"


def check_lse(mesh: DeviceMesh, device: torch.device) -> None:
    """The lse of this rank's rows and its gradient, as of attention on one device."""
    cp, dtype = attnforge.context_parallel(mesh), kernels_dtype(device)
    for case in (Case("packed", 96, 4, 2), Case("causal", 90, 4, 1), Case("dense heads", 96, 4, 2)):
        case = case if device.type == "cpu" else on_gpu(case)
        mask = make_mask(case, device)
        heads = (case.heads_q, case.heads_kv, case.heads_kv)
        q, k, v = (
            draw(case, n, case.head_dim, dtype, device, seed).requires_grad_() for seed, n in enumerate(heads)
        )
        a, b, c = (cp.shard(x.detach(), dim=2).requires_grad_() for x in (q, k, v))
        weight = torch.randn(1, case.heads_q, case.total, generator=torch.Generator().manual_seed(3))
        weight = weight.to(device)

        def loss(out: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
            return out.sum() + (lse.masked_fill(lse == -torch.inf, 0) * weight).sum()

        out, lse = cp.attention(a, b, c, mask, total=case.total, return_lse=True)
        gradients = torch.autograd.grad(loss(out, lse, cp.shard(weight, dim=2)), (a, b, c))
        one, one_lse = attnforge.attention(q, k, v, mask, return_lse=True)
        expected = torch.autograd.grad(loss(one, one_lse, weight), (q, k, v))
        for ours, theirs in zip((lse, *gradients), (one_lse, *expected), strict=True):
            close(cp.gather(ours, dim=2, total=case.total), theirs)
        assert (cp.gather(lse, dim=2)[:, :, case.total :] == -torch.inf).all(), "padding has an lse"


def kernels_dtype(device: torch.device) -> torch.dtype:
    """Of the calls that are compared with one process: bf16 on GPUs, the tensor cores' type."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def check_reuse(mesh: DeviceMesh) -> None:
    """Layers share what is made of a mask; checkpointing and autocast change nothing; bad shards are refused."""
    cp = attnforge.context_parallel(mesh, heads=2)  # as without `heads` in compiled code
    mask = make_mask(Case("packed", 96, 4, 2), torch.device("cpu"))
    assert isinstance(mask, attnforge.Spans)
    x = [torch.randn(1, heads, 24, 16, requires_grad=True) for heads in (4, 2, 2)]
    q, k, v = x
    layout = cp._layout(Partition(2, False))
    first = cp._local_mask(mask, layout, 24, 96, mask.device)
    assert first is cp._local_mask(mask, layout, 24, 96, mask.device)
    alone = attnforge.context_parallel(mesh)
    for one in (mask, attnforge.Causal()):
        assignments = [
            alone._assign_rows(one, 24, 96, in_order, mask.device) for in_order in (False, True) * 2
        ]
        assert assignments[0] is assignments[2], "made again for each kind of score"
        assert assignments[1] is assignments[3]
        assert assignments[0] is not assignments[1]
    starts, ends = (
        mask.starts,
        mask.ends,
    )  # the next micro-batch is written to them before this one's backward
    out = cp(q, k, v, attnforge.Spans(starts, ends))
    starts.fill_(50)
    first_grads = torch.autograd.grad(out.square().sum(), x)
    kept = torch.autograd.grad(cp(q, k, v, mask).square().sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(first_grads, kept, strict=True))
    for total in (95, 93):  # what was kept for one total does not serve another
        a, b, c = (cp.gather(y, dim=2, total=total) for y in x)
        whole = attnforge.attention(a, b, c, attnforge.Causal())
        ours = cp.gather(cp(q, k, v, attnforge.Causal(), total=total), dim=2, total=total)
        torch.testing.assert_close(ours, whole)
    plain = torch.autograd.grad(cp(q, k, v, mask).sum(), x)
    again = torch.autograd.grad(checkpoint(cp, q, k, v, mask, use_reentrant=False).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    rows_move = attnforge.context_parallel(mesh, heads=1)
    late = make_mask(Case("one image", 96, 4, 2), torch.device("cpu"))
    plain_late = torch.autograd.grad(rows_move(q, k, v, late).sum(), x)
    options: Any = {"use_reentrant": False, "context_fn": attnforge.save_attention}
    again = torch.autograd.grad(checkpoint(rows_move, q, k, v, late, **options).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(plain_late, again, strict=True))
    compiled = torch.compile(cp, backend="eager", fullgraph=True)
    traced = torch.autograd.grad(compiled(q, k, v, mask).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert cp(q, k, v, mask).dtype == torch.bfloat16
    for bad, message in (
        ([y[:, :, :20] for y in x], "got 20 rows"),
        ([q, k, v[:, :1]], "shapes"),
        ([q[:, :3], k, v], "got 3 heads"),
        ([q, k, v.double()], "v: got torch.float64"),
        ([y[0] for y in x], "expected (batch, heads, rows, head_dim)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            cp(bad[0], bad[1], bad[2], mask)
    three = torch.arange(3, dtype=torch.int32)[:, None, None] + starts.expand(1, 3, 1, 96)
    with pytest.raises(ValueError, match="mask: has spans for 3 heads, expected 1, 2"):
        cp(q, k, v, attnforge.Spans(three, three + 8))
    with pytest.raises(TypeError, match="mask: got Tensor, accepted are None"):
        cp(q, k, v, torch.ones(96, 96, dtype=torch.bool))  # type: ignore[call-overload]
    ids, image = torch.arange(96, dtype=torch.int32) // 40, torch.arange(96) % 3 == 0
    slopes = torch.rand(4, requires_grad=True)
    documents = attnforge.masks.mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) | image[j], 96, 96, "cpu")
    biased = attnforge.scores.score_mod(lambda s, b, h, i, j: s + slopes[h] * ids[i] * ids[j])
    with pytest.raises(ValueError, match="score, mask: capture 6 tensors"):
        cp(q, k, v, documents, score=biased)
    ordered = cp(q, k, v, score=biased, deterministic=True).sum()
    found = [torch.autograd.grad(ordered, slopes, retain_graph=True)[0] for _ in range(3)]
    assert found[0].any()
    assert all(torch.equal(found[0], each) for each in found)
    a, b, c = (y[:, :, :0] for y in x)
    assert cp(a, b, c, attnforge.masks.documents([], "cpu")).shape == (1, 4, 0, 16)
    with pytest.raises(TypeError, match=r"total: got 96\.0, expected an integer"):
        cp(q, k, v, total=96.0)  # type: ignore[call-overload]
    a, b, c = (DTensor.from_local(y, mesh, [Shard(2)]) for y in x)
    with pytest.raises(TypeError, match="q, k, v: got a DTensor, expected a plain tensor"):
        cp(a, b, c)
    _, lse = cp(q, k, v, total=93, sinks=torch.ones(4), return_lse=True)
    assert (cp.gather(lse, dim=2)[:, :, 93:] == -torch.inf).all(), "padding has the lse of a sink"


def check_disagreement(mesh: DeviceMesh) -> None:
    """Arguments that differ on rank 1, or that only it refuses, raise on all ranks at the first call."""
    q, k, v = (torch.randn(1, heads, 24, 16) for heads in (4, 2, 2))
    total, odd = 24 * mesh.size(), dist.get_rank() == 1
    one, other = (attnforge.masks.documents([n, total - n], "cpu") for n in (10, 30))
    for given, more, message in (
        (
            [x.bfloat16() for x in (q, k, v)],
            {},
            "q: ranks make different calls: rank 0 of the mesh has (1, 4, 24, 16)",
        ),
        (
            [q, k, v],
            {"mask": other},
            "mask: ranks make different calls: rank 0 of the mesh has Spans of 96 keys",
        ),
        (
            [q, k, v],
            {"scale": 0.5},
            "scale: ranks make different calls: rank 0 of the mesh has None, rank 1 has 0.5",
        ),
        ([q, k, v], {"scale": -0.5}, "scale: got -0.5, expected a number above 0"),
        (
            [q, k, v],
            {"sinks": torch.zeros(3)},
            "sinks: got (3,) torch.float32 on cpu, expected (heads_q) = (4,)",
        ),
        ([x[:, :, :20] for x in (q, k, v)], {}, "q: got 20 rows on rank 1, expected 24"),
    ):
        cp = attnforge.context_parallel(mesh)
        arguments: dict[str, Any] = {"mask": one} | (more if odd else {})
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            cp(*(given if odd else (q, k, v)), **arguments)
        assert odd or "ranks" in message or "rank 1 of the mesh refused its arguments" in str(error.value)
        assert cp(q, k, v, one).shape == q.shape, "the next call is not compared as a first one"


@dataclass(frozen=True)
class Functions:
    """A call with a function of scores or of a mask, or with planes of spans; names of score_oracle, mask_functions."""

    total: int
    heads_q: int
    heads_kv: int
    score: str = ""
    mask: str = ""
    heads: int | None = None
    pieces: int = 1
    sinks: bool = False
    compiled: bool = False


FUNCTIONS = (
    Functions(96, 4, 2, "softcap", heads=2),  # reads no position
    Functions(96, 4, 2, "softcap", compiled=True),  # another division than that of the eager call before
    Functions(93, 4, 2, "alibi", sinks=True),
    Functions(96, 8, 4, "alibi"),  # all ranks split the heads
    Functions(93, 4, 1, "slopes", pieces=2),
    Functions(93, 4, 2, "plane", heads=2),  # neighbours share them, and keys stay in order
    Functions(96, 4, 2, "table", mask="window"),
    Functions(93, 4, 2, "plane", mask="documents", compiled=True),  # tensors without the rows of the padding
    Functions(93, 4, 2, mask="documents", heads=2),
    Functions(96, 8, 4, mask="heads", pieces=2),
    Functions(96, 4, 2, mask="by head"),
    Functions(93, 4, 2, mask="2 planes", heads=2),
    Functions(93, 8, 4, mask="8 planes", pieces=3),
)


FUNCTIONS_ON_GPUS = (
    Functions(701, 4, 2, "softcap", heads=1),
    Functions(701, 4, 2, "alibi", sinks=True),  # all ranks split the heads
    Functions(701, 4, 1, "slopes", pieces=2),  # keys are gathered only
    Functions(701, 4, 2, mask="documents", heads=1),
    Functions(704, 4, 2, mask="heads", pieces=2),
)


def function_arguments(case: Functions, device: str) -> tuple[Any, Any, list[Tensor]]:
    """Mask, score, and the learned tensors."""
    sizes = (1, case.heads_q, case.total, case.total)
    fixed, made = score_functions(*sizes, device), learned(*sizes, device)
    mask: Any = attnforge.Causal()
    if case.mask.endswith("planes"):
        count = int(case.mask.split()[0])
        key = torch.arange(case.total, dtype=torch.int32, device=device).expand(1, count, 1, -1)
        widths = 7 * torch.arange(1, count + 1, dtype=torch.int32, device=device)
        mask = attnforge.Spans(key, key + widths.view(-1, 1, 1))
    elif case.mask == "by head":
        keep = torch.arange(case.heads_q, device=device) % 3 != 1
        mask = attnforge.masks.mask_mod(lambda b, h, i, j: keep[h], case.total, case.total, device)
    elif case.mask:
        shape = Shape(case.total, case.total, 16, case.heads_kv, case.heads_q // case.heads_kv, 1)
        function = mask_functions(shape, device)[case.mask]
        mask = attnforge.masks.mask_mod(function, case.total, case.total, device)
    if case.score in made:
        make, _, tensors = made[case.score]
        return mask, make(*tensors), tensors
    return mask, fixed[case.score][0] if case.score else None, []


def check_functions(case: Functions, mesh: DeviceMesh, device: torch.device) -> None:
    """Results and all gradients are those of one process; learned tensors and sinks have them summed over the ranks."""
    cp = attnforge.context_parallel(mesh, heads=case.heads, pieces=case.pieces)
    mask, score, tensors = function_arguments(case, device.type)
    heads = (case.heads_q, case.heads_kv, case.heads_kv, case.heads_q)
    shape = Case("", case.total, *heads[:2])
    dim = 16 if device.type == "cpu" else 64
    q, k, v, dout = (draw(shape, n, dim, kernels_dtype(device), device, seed) for seed, n in enumerate(heads))
    sinks = torch.randn(case.heads_q, generator=torch.Generator().manual_seed(9)) if case.sinks else None
    learned_tensors = [*tensors, *([sinks.to(device).requires_grad_()] if sinks is not None else [])]
    sinks = None if sinks is None else learned_tensors[-1]
    for x in (q, k, v):
        x.requires_grad_()
    a, b, c = (cp.shard(x.detach(), dim=2).requires_grad_() for x in (q, k, v))
    alike = mask
    if isinstance(mask, attnforge.Causal):  # as spans: other tests compile kernels for them with these scores
        key = torch.arange(case.total, dtype=torch.int32, device=device)
        alike = attnforge.Spans(key, torch.full_like(key, case.total))
    one = attnforge.attention(q, k, v, alike, score=score, sinks=sinks)
    theirs = (one, *torch.autograd.grad(one, (q, k, v, *learned_tensors), dout))
    compiled = [torch.compile(cp.attention, backend="eager", fullgraph=True)] if case.compiled else []
    for attend in (cp.attention, *compiled):
        out = attend(a, b, c, mask, total=case.total, score=score, sinks=sinks)
        ours = (out, *torch.autograd.grad(out, (a, b, c, *learned_tensors), cp.shard(dout, dim=2)))
        for mine, whole in zip(ours[:4], theirs[:4], strict=True):
            close(cp.gather(mine, dim=2, total=case.total), whole)
        for mine, whole in zip(ours[4:], theirs[4:], strict=True):
            dist.all_reduce(mine, group=mesh.get_group())
            limit = 1e-4 if mine.dtype == torch.float32 and device.type == "cpu" else 2e-2
            torch.testing.assert_close(mine, whole, rtol=limit, atol=limit)
    assert not cp.gather(out, dim=2)[:, :, case.total :].any(), "padding has an output"


def main() -> None:
    """Everything in float32 and bf16 on CPUs, in meshes of two ranks and of all; on GPUs what tensor cores compute."""
    name = sys.argv[1]
    world, cpu = int(os.environ["WORLD_SIZE"]), name == "cpu"
    device = torch.device(name if cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    torch.set_num_threads(1)
    # As if kernels were slow and had small tiles, so that rows of these short sequences move, too.
    links.KERNEL_FLOPS = 1e6
    row_assignment.TILE, row_assignment.KEY_BLOCK, row_assignment.MAX_GAP = 4, 4, 16
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    pairs = init_device_mesh(name, (world // 2, 2), mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(name, (world,), mesh_dim_names=("cp",))
    if cpu:
        check_reuse(everyone)
        check_disagreement(everyone)
    check_lse(everyone, device)
    for functions in FUNCTIONS if cpu else FUNCTIONS_ON_GPUS:
        if functions.heads is None or world % functions.heads == 0:
            check_functions(functions, everyone, device)
    failed = 0
    # Every second case in bf16, too: dtypes differ in kernels and limits, not in what is exchanged.
    cases = [*product((*CASES, *WIDE), (torch.float32,)), *product(CASES[::2], (torch.bfloat16,))]
    if not cpu:
        cases = [(on_gpu(case), torch.bfloat16) for case in CASES]
    for case, dtype in cases:
        for mesh in {pairs["cp"].size(): pairs["cp"], world: everyone}.values():
            if case.heads is not None and mesh.size() % case.heads:
                continue
            error = check(case, dtype, mesh, device)
            # Gradients of keys are summed in the tensors' own dtype: over ranks, and over pieces of a group.
            limit = 2.0 if dtype == torch.bfloat16 else 4.0
            failed += error > limit
            if dist.get_rank() == 0:
                print(f"{mesh.size()} ranks, {dtype}: {error:.2f} times one process's error, {case}")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
