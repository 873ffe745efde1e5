"""One rank of test_dtensor.py: attention on DTensors against attention of the whole problem, all cases in one start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attnforge

BATCH, HEADS, HEADS_KV, SEQ, DIM = 5, 8, 4, 19, 64  # two ranks get 3 and 2 entries of the batch
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Replicate()),
)


def visible(*planes: int) -> Tensor:
    return torch.rand(*planes, SEQ, SEQ, generator=torch.Generator().manual_seed(1)) < 0.6


def unions(*planes: int) -> attnforge.Spans:
    """Two random intervals a key; each query sees its own key, so that no lse is infinite."""
    edges = torch.randint(0, SEQ + 1, (4, *planes, SEQ), generator=torch.Generator().manual_seed(2)).int()
    random = attnforge.Spans(torch.stack((edges[0], edges[1]), -2), torch.stack((edges[2], edges[3]), -2))
    own = torch.arange(SEQ, dtype=torch.int32)
    return random | attnforge.Spans(own, own + 1)


MASKS: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "causal": attnforge.Causal,
    "spans": lambda: attnforge.Spans(*(torch.arange(SEQ, dtype=torch.int32) + i for i in (0, 4))),
    "unions of kv heads": lambda: unions(1, HEADS_KV),
    "unions of both": lambda: unions(BATCH, HEADS),
    "plane": lambda: attnforge.DenseMask(visible()),
    "batch": lambda: attnforge.DenseMask(visible(BATCH, 1)),
    "heads": lambda: attnforge.DenseMask(visible(1, HEADS)),
    "both": lambda: attnforge.DenseMask(visible(BATCH, HEADS)),
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, SEQ, heads, DIM, generator=generator).transpose(1, 2)
        for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)
    ]


def whole(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def check(mesh: DeviceMesh, placements: tuple[Placement, ...], mask: Any, compiled: bool = False) -> None:
    """Results and gradients of the shards, put together, are those of the whole."""
    *given, dout = inputs()
    leaves = [x.clone().requires_grad_() for x in given]
    run: Any = attnforge.attention
    expected = run(*leaves, mask, scale=0.3, return_lse=True)
    dlse = torch.randn(BATCH, HEADS, SEQ, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(expected, leaves, (dout, dlse))
    parts = [distribute_tensor(x, mesh, placements).requires_grad_() for x in given]
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    out, lse = run(*parts, mask, scale=0.3, return_lse=True)
    assert out.placements == placements
    assert sorted(range(4), key=out.stride) == sorted(range(4), key=out.to_local().stride)
    douts = [distribute_tensor(x, mesh, placements) for x in (dout, dlse)]
    ours = torch.autograd.grad((out, lse), parts, douts)
    for one, other in zip((out, lse, *ours), (*expected, *gradients), strict=True):
        assert (whole(one) - other).abs().max() <= 1e-5 * other.abs().max(), (placements, mask)


class Layer(nn.Module):
    """A layer of attention as tensor parallelism has it: projections that are split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, heads * DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
        self.out = nn.Linear(HEADS * DIM, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for linear in self.qkv)
        y = attnforge.attention(q, k, v, attnforge.Causal())
        assert isinstance(y, Tensor)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def check_tensor_parallel(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, SEQ, 32)
    expected = layer(x)
    expected.square().sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    plan: Any = {f"qkv.{i}": ColwiseParallel(use_local_output=False) for i in range(3)}
    parallelize_module(layer, mesh, plan | {"out": RowwiseParallel()})
    out = layer(x)
    out.square().sum().backward()
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    largest = max(float(x.abs().max()) for x in gradients if x is not None)
    for parameter, gradient in zip(
        layer.parameters(), gradients, strict=True
    ):  # that of k's bias is 0 but for rounding
        assert gradient is not None
        assert parameter.grad is not None
        assert (whole(parameter.grad) - gradient).abs().max() <= 1e-5 * largest


def check_refusal(mesh: DeviceMesh) -> None:
    """Of a function of the mask, whose heads and batch entries would be those of the rank."""
    mask = attnforge.masks.mask_mod(lambda b, h, i, j: i != j + h, SEQ, SEQ, "cpu")
    q, k, v = (distribute_tensor(x, mesh, PLACEMENTS[0]) for x in inputs()[:3])
    with pytest.raises(ValueError, match="mask: got a mask_mod, which is not supported with DTensors"):
        attnforge.attention(q, k, v, mask)
    tokens = distribute_tensor(torch.arange(8), mesh, PLACEMENTS[0][:1] * 2)
    for call, names in (
        (lambda: attnforge.ExpertRows(tokens, tokens, 16), "first, second"),
        (lambda: attnforge.rope_tables(tokens, 16), "positions"),
        (lambda: attnforge.scores.alibi(tokens.float()), "slopes"),
        (lambda: attnforge.DenseMask(tokens[:, None] > 0), "mask"),
        (
            lambda: attnforge.qk_norm_rope(
                tokens.float()[:, None].expand(8, 64),
                heads=(2, 1),
                cos=torch.ones(8, 8),
                sin=torch.ones(8, 8),
            ),
            "q, k, v",
        ),
    ):
        with pytest.raises(TypeError, match=f"{names}: got a DTensor, expected a plain tensor; use to_local"):
            call()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for placements, name in product(PLACEMENTS, MASKS):
        check(mesh, placements, MASKS[name]())
    for name in ("causal", "both"):
        check(mesh, PLACEMENTS[0], MASKS[name](), compiled=True)
    check_refusal(mesh)
    check_tensor_parallel(mesh["tensor"])
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks agree on {len(PLACEMENTS) * len(MASKS)} cases")
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
