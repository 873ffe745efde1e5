"""One rank of test_parallel.py: gradients under DDP and FSDP2 are the mean of every rank's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from calls import Calls
from oracle import spans
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import attnforge

ROWS, HEADS, DIM = 70, 2, 64


class Block(nn.Module):
    """A projection and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: Tensor, mask: attnforge.Spans) -> Tensor:
        q, k, v = self.linear(x).unflatten(1, (3 * HEADS, DIM)).transpose(0, 1)[None].chunk(3, 1)
        return x + attnforge.attention(q, k, v, mask)[0].transpose(0, 1).flatten(1)


class Net(nn.Module):
    """Three blocks, each under `how`."""

    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.blocks = nn.ModuleList(how(Block()) for _ in range(3))

    def forward(self, x: Tensor, mask: attnforge.Spans) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def plainly(block: nn.Module) -> nn.Module:
    return block


def recomputed(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)


def reentrant(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, CheckpointImpl.REENTRANT)


def selective(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, context_fn=attnforge.save_attention)


def gradients(net: nn.Module, rank: int, device: torch.device) -> list[Tensor]:
    """Of rank `rank`'s data: every rank has data and a mask of its own."""
    x = torch.randn(ROWS, HEADS * DIM, generator=torch.Generator().manual_seed(rank)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        out = net(x, spans(ROWS, ROWS, device.type, seed=rank))
    out.float().square().mean().backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # type: ignore[union-attr, misc]


def wrap_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def wrap_compiled_ddp(net: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(DistributedDataParallel(net), backend="aot_eager")  # type: ignore[assignment]
    return compiled


def wrap_fsdp2(net: nn.Module) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(net)
    return net


def check_context_parallel(device: torch.device) -> None:
    """Selective checkpointing sees the operator through the exchange: its forward runs no second time."""
    cp = attnforge.context_parallel(init_device_mesh(device.type, (dist.get_world_size(),)), pieces=1)
    whole = torch.randn(1, HEADS, ROWS, DIM, generator=torch.Generator().manual_seed(0))
    x = cp.shard(whole.to(device, torch.bfloat16), dim=2).clone().requires_grad_()
    mask = spans(ROWS, ROWS, device.type)

    def run(x: Tensor) -> Tensor:
        return cp.attention(x * 1, x * 2, x * 3, mask)

    (expected,) = torch.autograd.grad(run(x).square().sum(), x)
    with Calls() as calls:
        out = checkpoint(run, x, use_reentrant=False, context_fn=attnforge.save_attention)
        (got,) = torch.autograd.grad(out.square().sum(), x)
    if calls.count() != (1, 1):
        raise AssertionError(f"{calls.count()} calls of forward and backward instead of one each")
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def main() -> None:
    kind = sys.argv[1]
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    each = [gradients(Net(plainly).to(device), other, device) for other in range(world)]
    expected = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    rtol, atol = (1e-4, 1e-6) if kind == "cpu" else (2e-2, 1e-5)
    for wrap in (wrap_ddp, wrap_compiled_ddp, wrap_fsdp2):
        for how in (
            (plainly, selective) if wrap is wrap_compiled_ddp else (plainly, recomputed, reentrant, selective)
        ):
            net = wrap(Net(how).to(device))
            for _ in range(2):  # DDP rebuilds its buckets after the first
                for ours, theirs in zip(gradients(net, rank, device), expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    check_context_parallel(device)
    dist.barrier()
    if rank == 0:
        print(f"{world} ranks agree on {kind}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
