"""Context parallelism on 2, 4 or 8 GPUs of one machine, compared with one GPU: results, time and memory.

    torchrun --standalone --nproc-per-node gpu benchmarks/context_parallel.py [--profile]

The problem is BAGEL-7B's attention (28/4/128, bf16) on the pack pretrain/0 and on a pack of 131072 tokens. There is one
row per length, number of GPUs and arguments of context_parallel:

- milliseconds of the slowest rank, forward and forward + backward, and the speed-ups over one GPU in the same run.
  Calls are queued behind a pause of the GPU, so that it does not wait for the host;
- milliseconds in which the slowest host launches forward + backward;
- peak memory of rank 0 in GiB;
- the largest relative RMS difference of out, dq, dk and dv from one GPU.

--profile also prints each rank's GPU time by group of kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from step_profile import STEPS, kernels_of, summary, trace_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import attnforge
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.measure.peers import with_peak
from attnforge.bagel.workloads import workload

HEADS_Q, HEADS_KV, DIM = 28, 4, 128
ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"pieces": 2}, {"heads": 2})
REPEATS, ROUNDS = 10, 5
PAUSE = 150_000_000  # cycles, longer than hosts take to launch REPEATS calls
HEAD = (
    *("tokens", "GPUs", "arguments", "fwd ms", "fwd+bwd ms", "speed-up fwd", "both", "host ms", "GiB"),
    "difference",
)


def long_pack(tokens: int, device: str = "cuda") -> attnforge.bagel.PackedMask:
    """A pack of `tokens` tokens: as many samples of pretrain/0 to 3 as fit, then padding."""
    samples: list[int] = []
    splits: list[int] = []
    modes: list[str] = []
    for seed in range(4):
        pack = workload(f"pretrain/{seed}")
        first = 0
        for size in pack.sample_lens[:-1]:
            last, covered = first, 0
            while covered < size:
                covered += pack.split_lens[last]
                last += 1
            if sum(samples) + size <= tokens:
                samples.append(size)
                splits += pack.split_lens[first:last]
                modes += pack.attn_modes[first:last]
            first = last
    used = sum(samples)
    rest = [tokens - used] if used < tokens else []
    return attnforge.bagel.PackedMask(
        [*samples, *rest], [*splits, *rest], [*modes, *["causal"] * len(rest)], device, used=used
    )


def draw(tokens: int) -> list[Tensor]:
    """Random q, k, v and dout (1, heads, tokens, DIM), the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    return [
        torch.randn(tokens, h, DIM, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[
            None
        ]
        for h in heads
    ]


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Mean milliseconds of a call on the slowest GPU, where all begin together, and on the slowest host."""
    call()
    together = torch.zeros(1, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE)
    dist.all_reduce(together)
    start.record()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    host = time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    spent = torch.tensor((start.elapsed_time(end), host * 1e3), device="cuda") / REPEATS
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1])


def passes(
    attend: Callable[..., Tensor], tensors: list[Tensor], mask: Any
) -> tuple[Callable[[], None], Callable[[], list[Tensor]]]:
    """Functions that run the forward, and forward + backward; the latter returns [out, dq, dk, dv]."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])

    def both() -> list[Tensor]:
        out = attend(q, k, v, mask)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, mask)

    return forward, both


@dataclass
class Setup:
    """One row of the table: one GPU, or `size` GPUs with `arguments` of context_parallel."""

    size: int
    arguments: dict[str, Any]
    attend: Callable[..., Tensor]
    tensors: list[Tensor]
    results: list[Tensor] = field(default_factory=list)
    peak: float = 0.0  # GiB
    forward: list[float] = field(default_factory=list)  # milliseconds, one per round
    both: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # of both

    def measure(self, mask: Any) -> None:
        forward, both = passes(self.attend, self.tensors, mask)
        self.forward.append(milliseconds(forward)[0])
        times, host = milliseconds(both)
        self.both.append(times)
        self.host.append(host)


def measure_all(setups: list[Setup], mask: Any) -> None:
    """Measure results and memory, then times: all setups in each round, because clocks drift."""
    for one in setups:
        one.results, peak = with_peak(passes(one.attend, one.tensors, mask)[1], one.tensors[0].device)
        one.peak = peak / 2**30
    for _ in range(ROUNDS):
        for one in setups:
            one.measure(mask)


def show_profile(title: str, attend: Callable[..., Tensor], tensors: list[Tensor], mask: Any) -> None:
    """Print the GPU time of each rank by group of kernels, and its ten slowest kernels."""
    for name, call in zip(("forward", "both"), passes(attend, tensors, mask), strict=True):
        call()
        dist.barrier()
        found = summary(kernels_of(trace_of(call)), STEPS)
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                groups = ", ".join(f"{group} {ms:.2f}" for group, ms in found["groups"].items() if ms > 0.005)
                print(f"{title}, {name}, rank {rank}: {found['total']:.2f} ms: {groups}")
                for kernel, _, ms, calls in found["kernels"][:10]:
                    print(f"    {ms:7.3f} ms {calls:5.1f} x {kernel[:100]}", flush=True)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest RMS(a - b) / RMS(b) of the tensors, over the rows of all ranks; inf if one holds NaN."""
    squares = [
        ((a.float() - b.float()).square().sum(), b.float().square().sum())
        for a, b in zip(ours, theirs, strict=True)
    ]
    sums = torch.stack([torch.stack(pair) for pair in squares])
    dist.all_reduce(sums)
    return float((sums[:, 0] / sums[:, 1]).sqrt().max().nan_to_num(torch.inf, posinf=torch.inf))


def show(tokens: int, setups: list[Setup]) -> float:
    """Print the rows of the table. Returns the largest difference from one GPU."""
    one, worst = setups[0], 0.0
    forward, both = median(one.forward), median(one.both)
    host = f"{median(one.host):.2f}"
    first = (str(tokens), "1", "", f"{forward:.2f}", f"{both:.2f}", "", "", host, f"{one.peak:.2f}", "")
    lines = [markdown_row(first)]
    for cp in setups[1:]:
        wrong = difference(cp.results, [cp.attend.shard(x, dim=2) for x in one.results])  # type: ignore[attr-defined]
        worst = max(worst, wrong)
        text = ", ".join(f"{name}={value}" for name, value in cp.arguments.items())
        times = median(cp.forward), median(cp.both)
        numbers = (*times, forward / times[0], both / times[1], median(cp.host), cp.peak)
        cells = (str(tokens), str(cp.size), text, *(f"{number:.2f}" for number in numbers), f"{wrong:.1e}")
        lines.append(markdown_row(cells))
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help="also profile the default arguments")
    options = parser.parse_args()
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=torch.device("cuda", local))
    if dist.get_rank() == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
        print(*markdown_head(HEAD), sep="\n", flush=True)
    meshes = {
        size: init_device_mesh("cuda", (world // size, size), mesh_dim_names=("dp", "cp"))["cp"]
        for size in (2, 4, 8)
        if world % size == 0
    }
    for tokens, mask in ((36864, workload("pretrain/0").mask("cuda")), (131072, long_pack(131072))):
        whole = draw(tokens)
        setups = [Setup(1, {}, attnforge.attention, whole)]
        for (size, mesh), arguments in product(meshes.items(), ARGUMENTS):
            cp = attnforge.context_parallel(mesh, **arguments)
            shards = [cp.shard(x, dim=2).clone() for x in whole]
            setups.append(Setup(size, arguments, cp, shards))
        measure_all(setups, mask)
        worst = show(tokens, setups)
        for one in setups if options.profile else ():
            if not one.arguments:
                show_profile(f"{tokens} tokens, {one.size} GPUs", one.attend, one.tensors, mask)
        if worst > 1e-2:
            raise SystemExit(f"{tokens} tokens: results differ from one GPU by {worst:.1e}, more than 1e-2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
