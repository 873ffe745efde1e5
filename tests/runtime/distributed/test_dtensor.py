"""Attention on DTensors that are sharded over the batch or the heads, and what is said about others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import torchrun
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import attnforge
from attnforge.runtime.distributed.dtensor import attention_on_dtensors

WORKER = Path(__file__).with_name("dtensor_worker.py")


def test_shards_are_parts_of_the_whole() -> None:
    """Four ranks: every mask, both directions, uneven batches, under torch.compile and in a tensor-parallel layer."""
    assert "4 ranks agree on 45 cases" in torchrun(4, WORKER)


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def part(mesh: DeviceMesh, placement: Placement, heads: int = 4) -> DTensor:
    return DTensor.from_local(torch.randn(2, heads, 8, 16), mesh, [placement])


@pytest.mark.parametrize("placement", [Shard(2), Shard(3), Partial(), _StridedShard(1, split_factor=2)])
def test_placements_that_are_refused(placement: Placement, mesh: DeviceMesh) -> None:
    """Of any of the three, also where the others are accepted."""
    good, bad = part(mesh, Shard(1)), part(mesh, placement)
    for inputs, name in (((bad, bad, bad), "q"), ((good, bad, good), "k"), ((good, good, bad), "v")):
        with pytest.raises(
            ValueError, match=rf"{name}: got placements .* accepted are Replicate\(\), Shard\(0\)"
        ):
            attention_on_dtensors(attnforge.attention, *inputs)


def test_mixtures_that_are_refused(mesh: DeviceMesh) -> None:
    x = part(mesh, Shard(1))
    with pytest.raises(
        ValueError, match=r"v: got placements \(Replicate\(\),\), but q has \(Shard\(dim=1\),\)"
    ):
        attention_on_dtensors(attnforge.attention, x, x, part(mesh, Replicate()))
    with pytest.raises(TypeError, match="q: got Tensor, but k is a DTensor"):
        attention_on_dtensors(attnforge.attention, x.to_local(), x, x)
    with pytest.raises(TypeError, match="v: got Tensor, but q is a DTensor"):
        attention_on_dtensors(attnforge.attention, x, x, x.to_local())
    other = init_device_mesh("cpu", (1, 1))
    with pytest.raises(ValueError, match="k: is on DeviceMesh"):
        attention_on_dtensors(
            attnforge.attention, x, DTensor.from_local(x.to_local(), other, [Shard(1), Shard(1)]), x
        )


def test_key_heads_must_divide() -> None:
    """Three key heads over two ranks. A mesh of ranks that are not there says it: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        q, k = part(mesh, Shard(1), heads=3), part(mesh, Shard(1), heads=3)
        k = DTensor.from_local(
            k.to_local()[:, :2], mesh, [Shard(1)], shape=torch.Size((2, 3, 8, 16)), stride=(384, 128, 16, 1)
        )
        with pytest.raises(ValueError, match="k: got 3 heads sharded over 2 ranks, expected a multiple of 2"):
            attention_on_dtensors(attnforge.attention, q, k, k)
    finally:
        torch.distributed.destroy_process_group()
