"""Predicted times of context parallelism on numbers of GPUs that were not measured.

    python benchmarks/context_parallel_model.py [--tokens 131072] [--ranks 2 4 8 16 32 64] [--node 8]

Needs no GPU. For each rank in turn, runtime/distributed/ runs in a process group that sends nothing, with kernels that
compute nothing. The bytes to each peer and the visible pairs of the rank's kernels are recorded, and a model predicts
the time:

- A collective takes a latency plus bytes / bandwidth: NVLink inside a node, one network port per GPU between nodes.
  Both work at the same time, so the slower one counts.
- A kernel takes the time of one GPU times its share of the pairs.
- Nothing overlaps (pieces=1).

context_parallel chooses its Ulysses degree with the same model (runtime/distributed/cost.py).

NVLink's bandwidth and the latency are fitted to `MEASURED`, times of 2 H200s with Ulysses degrees 1 and 2; the rows of
2 GPUs show the error of the fit. The bandwidth of the network is 90 % of its data sheet. Rows of more than 2 GPUs are
predictions.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from context_parallel import DIM, HEADS_KV, HEADS_Q, long_pack
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import attnforge
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.workloads import workload
from attnforge.runtime import ops
from attnforge.runtime.distributed import exchange
from attnforge.runtime.distributed.cost import Partition
from attnforge.runtime.distributed.links import Links
from attnforge.runtime.masks import Spans

HEAD = ("tokens", "GPUs", "U", "fwd ms", "fwd+bwd ms", "speed-up fwd", "both", "measured fwd", "both")
# Milliseconds (forward, forward + backward) by (tokens, GPUs, Ulysses degree), with pieces=1.
MEASURED = {
    (36864, 1, 1): (3.08, 13.48),
    (36864, 2, 1): (1.77, 6.94),
    (36864, 2, 2): (2.54, 8.41),
    (131072, 1, 1): (9.52, 40.42),
    (131072, 2, 1): (5.25, 21.67),
    (131072, 2, 2): (7.64, 25.81),
}


@dataclass
class Load:
    """What one rank does in one pass: bytes sent inside its node and to other nodes, collectives, visible pairs."""

    intra_node: float = 0.0
    inter_node: float = 0.0
    collectives: int = 0
    pairs: float = 0.0

    @property
    def sent(self) -> tuple[float, float, int]:
        return self.intra_node, self.inter_node, self.collectives


@dataclass
class Recorder:
    """Replaces the collectives and kernels of one rank, and records what they would do. node: GPUs per node."""

    rank: int
    node: int
    load: Load = field(default_factory=Load)

    def add(self, peers: Sequence[int], bytes_each: float) -> None:
        """Record a collective that sends `bytes_each` bytes to each of `peers`."""
        self.load.collectives += 1
        for peer in peers:
            if peer == self.rank:
                continue
            if peer // self.node == self.rank // self.node:
                self.load.intra_node += bytes_each
            else:
                self.load.inter_node += bytes_each

    def all_to_all(self, result: Tensor, x: Tensor, group: Any = None, **_: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        self.add(ranks, x.numel() * x.element_size() / len(ranks))
        return mock.Mock()

    def all_gather(self, result: Tensor, x: Tensor, group: Any = None, **_: Any) -> Any:
        """Record a ring all-gather: each GPU of a node receives everything once, and nodes use all their ports."""
        ranks = dist.get_process_group_ranks(group)
        here = sum(rank // self.node == self.rank // self.node for rank in ranks)
        size = x.numel() * x.element_size()
        self.load.collectives += 1
        self.load.intra_node += size * (len(ranks) - len(ranks) / here)
        self.load.inter_node += size * (len(ranks) - here) / here
        return mock.Mock()

    def send(self, transfers: Sequence[Any]) -> Sequence[Any]:
        sizes = Counter[int]()
        for transfer in transfers:
            if transfer.op is dist.isend:
                sizes[transfer.peer] += transfer.tensor.numel() * transfer.tensor.element_size()
        before = self.load.collectives
        for peer, size in sizes.items():
            self.add([peer], size)
        self.load.collectives = before + 1
        return ()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.load.pairs += pairs_of(mask, q.shape[2], k.shape[2]) * q.shape[1]
        return torch.empty_like(q), torch.empty(q.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        self.load.pairs += self.forward_pairs
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    forward_pairs = 0.0


def pairs_of(mask: Any, queries: int, keys: int) -> float:
    """Visible pairs of one head, for a mask with one plane."""
    assert isinstance(mask, Spans)
    starts, ends = (x.clamp(0, queries).double() for x in (mask.starts, mask.ends))
    return float((ends - starts).clamp(min=0).sum())


def torchrun_environment(world: int, node: int) -> dict[str, str]:
    """The environment variables of torchrun from which ranks derive their nodes."""
    sizes = {"LOCAL": min(node, world), "GROUP": -(-world // node)}
    return {f"{name}_WORLD_SIZE": str(size) for name, size in sizes.items()} | {"WORLD_SIZE": str(world)}


@contextmanager
def rank_of(rank: int, world: int, node: int) -> Iterator[Recorder]:
    """Run the body as rank `rank` of `world`, with collectives and kernels that are only recorded."""
    recorder = Recorder(rank, node)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    patches: list[Any] = [
        mock.patch.dict(os.environ, torchrun_environment(world, node)),
        mock.patch.object(dist, "all_to_all_single", recorder.all_to_all),
        mock.patch.object(exchange, "all_gather", recorder.all_gather),
        mock.patch.object(dist, "batch_isend_irecv", recorder.send),
        mock.patch.object(ops, "forward", recorder.forward),
        mock.patch.object(ops, "backward", recorder.backward),
    ]
    try:
        for patch in patches:
            patch.start()
        yield recorder
    finally:
        mock.patch.stopall()
        dist.destroy_process_group()


def simulate(
    mask: attnforge.Spans, tokens: int, world: int, node: int, heads: int | None
) -> tuple[Partition, list[tuple[Load, Load]]]:
    """The partition that context_parallel chooses, and the (forward, backward) load of each rank."""
    loads, partition = [], Partition(1, False)
    for rank in range(world):
        with rank_of(rank, world, node) as recorder:
            cp = attnforge.context_parallel(init_device_mesh("cpu", (world,)), heads=heads)
            rows = -(-tokens // world)
            q, k, v = (
                torch.empty(1, rows, count, DIM, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                for count in (HEADS_Q, HEADS_KV, HEADS_KV)
            )
            out = cp.attention(q, k, v, mask, total=tokens)
            forward, recorder.load = recorder.load, Load()
            recorder.forward_pairs = forward.pairs
            out.backward(torch.empty_like(out))
            loads.append((forward, recorder.load))
            partition = [*cp._layouts][-1]  # the one of compiled code, if it differs, was added before
    return partition, loads


def predict(
    loads: list[tuple[Load, Load]], links: Links, one: tuple[float, float], pairs: float
) -> tuple[float, float]:
    """Milliseconds (forward, forward + backward) of the slowest rank.

    one: the same times on one GPU. pairs: visible pairs of all heads of the whole pack.
    """
    parts = [one[0], one[1] - one[0]]
    times = [
        max(part * load[i].pairs / pairs + links.seconds(*load[i].sent) * 1e3 for load in loads)
        for i, part in enumerate(parts)
    ]
    return times[0], sum(times)


def fit(simulated: dict[tuple[int, int, int], list[tuple[Load, Load]]], pairs: dict[int, float]) -> Links:
    """NVLink's bandwidth and the latency, by least squares of the relative errors of the measured times."""
    rows, rest = [], []
    for (tokens, world, ulysses_degree), loads in simulated.items():
        one, measured = MEASURED[tokens, 1, 1], MEASURED[tokens, world, ulysses_degree]
        for i, (whole, time) in enumerate(
            ((one[0], measured[0]), (one[1] - one[0], measured[1] - measured[0]))
        ):
            load = max((load[i] for load in loads), key=lambda x: x.pairs)
            rows.append(np.array([load.intra_node, load.collectives]) / time)
            rest.append((time - whole * load.pairs / pairs[tokens]) / time)
    (per_byte, latency), *_ = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)
    return Links(intra_node=1e3 / per_byte, latency=max(0.0, latency) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[36864, 131072], help="lengths of the packs: 36864, 131072"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="numbers of GPUs")
    parser.add_argument("--node", type=int, default=8, help="GPUs of a node")
    options = parser.parse_args()
    masks = {36864: workload("pretrain/0").mask("cpu"), 131072: long_pack(131072, "cpu")}
    pairs = {tokens: pairs_of(mask, tokens, tokens) * HEADS_Q for tokens, mask in masks.items()}
    known = {
        (tokens, world, ulysses_degree): simulate(masks[tokens], tokens, world, options.node, ulysses_degree)[
            1
        ]
        for tokens, world, ulysses_degree in MEASURED
        if world > 1
    }
    links = fit(known, pairs)
    print(
        f"fitted to 2 GPUs: NVLink {links.intra_node / 1e9:.0f} GB/s per direction, "
        f"latency {links.latency * 1e6:.0f} us; "
        f"network {links.inter_node / 1e9:.0f} GB/s per GPU, {options.node} GPUs per node"
    )
    print(*markdown_head(HEAD), sep="\n")
    for tokens in options.tokens:
        one = MEASURED[tokens, 1, 1]
        for world in options.ranks:
            for heads in (None, *((world,) if (tokens, world, world) in MEASURED else ())):
                partition, loads = simulate(masks[tokens], tokens, world, options.node, heads)
                forward, both = predict(loads, links, one, pairs[tokens])
                found = MEASURED.get((tokens, world, partition.ulysses_degree))
                measured = [f"{time:.2f}" for time in found] if found else ["", ""]
                division = f"{partition.ulysses_degree}{', contiguous' if partition.contiguous else ''}"
                times = (forward, both, one[0] / forward, one[1] / both)
                cells = (str(tokens), str(world), division, *(f"{time:.2f}" for time in times), *measured)
                print(markdown_row(cells), flush=True)


if __name__ == "__main__":
    main()
