"""Attention on DTensors, for tensor parallelism: each rank computes its batch entries and heads.

`attnforge.attention` calls `attention_on_dtensors` if q, k or v is a DTensor. There is no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from attnforge.runtime.inputs import expect_layout
from attnforge.runtime.masks import AnyMask, DenseMask, FunctionMask, Spans

_BATCH, _HEADS = 0, 1
_ACCEPTED = (
    "accepted are Replicate(), Shard(0) (batch) and Shard(1) (heads) on each dimension of the mesh, the same for q, k "
    "and v; for a sharded sequence use attnforge.context_parallel"
)


def attention_on_dtensors(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attnforge.attention` of DTensors q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv), differentiable.

    attention: the function that computes the local problem, `attnforge.attention`.
    q, k, v: on one mesh with the same placements, each of which is Replicate(), Shard(0) (batch) or Shard(1) (heads).
        If heads are sharded, the number of ranks must divide Hkv, so that each rank has the kv heads of its query
        heads.
    mask: as for `attention`, for the global problem, made of plain tensors on the rank's device. If a DenseMask or
        Spans has one plane per batch entry or head, each rank uses the planes of its shard.

    Returns out, with return_lse also lse, as DTensors with the placements of q. Raises TypeError or ValueError that
    names the argument.
    """
    mesh, placements = _common(q, k, v)
    if isinstance(mask, FunctionMask):
        raise ValueError(
            "mask: got a mask_mod, which is not supported with DTensors; pass local tensors (to_local())"
        )
    if isinstance(mask, (Spans, DenseMask)):
        mask = _local_mask(mask, q, k, mesh, placements)
    local_q, local_k, local_v = (_local(x) for x in (q, k, v))
    shape = (*q.shape[:3], v.shape[3])
    if not return_lse:
        out = attention(local_q, local_k, local_v, mask, scale=scale, deterministic=deterministic)
        return _global(out, shape, mesh, placements)
    out, lse = attention(
        local_q, local_k, local_v, mask, scale=scale, return_lse=True, deterministic=deterministic
    )
    return _global(out, shape, mesh, placements), _global(lse, shape[:3], mesh, placements)


def _common(q: Tensor, k: Tensor, v: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and the placements of q, k and v. Raises TypeError or ValueError if they are not supported."""
    expect_layout("(batch, heads, seq, head_dim)", q=q, k=k, v=v)
    tensors = {"q": q, "k": k, "v": v}
    name, first = next((n, x) for n, x in tensors.items() if isinstance(x, DTensor))
    mesh, placements = first.device_mesh, first.placements
    for other, x in tensors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{other}: got {type(x).__name__}, but {name} is a DTensor; pass DTensors on one mesh "
                "(torch.distributed.tensor.distribute_tensor), or local tensors (to_local()) for all three"
            )
        if x.device_mesh != mesh:
            raise ValueError(f"{other}: is on {x.device_mesh}, but {name} is on {mesh}; use one mesh")
        for placement in x.placements:
            if not (placement.is_replicate() or placement.is_shard(_BATCH) or placement.is_shard(_HEADS)):
                raise ValueError(f"{other}: got placements {x.placements}; {_ACCEPTED}")
        if x.placements != placements:
            raise ValueError(
                f"{other}: got placements {x.placements}, but {name} has {placements}; {_ACCEPTED}"
            )
    ranks = 1
    for i, placement in enumerate(placements):
        ranks *= mesh.size(i) if placement.is_shard(_HEADS) else 1
    if k.shape[_HEADS] % ranks != 0:
        raise ValueError(
            f"k: got {k.shape[_HEADS]} heads sharded over {ranks} ranks, expected a multiple of {ranks}; "
            "use k and v with repeated heads (repeat_interleave), or fewer ranks"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name}: is on {mesh}, which this rank does not belong to")
    return mesh, placements


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.to_local()


def _local_mask(
    mask: Spans | DenseMask, q: Tensor, k: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Spans | DenseMask:
    """The planes of the mask for this rank's batch entries and heads."""
    spans = isinstance(mask, Spans)
    planes = mask.planes if isinstance(mask, Spans) else mask.shape[:2]
    found = f"planes {planes}" if isinstance(mask, Spans) else f"shape {mask.shape}"
    for dim in (_BATCH, _HEADS):
        if planes[dim] == 1:
            continue  # one plane for all entries
        # Spans may have one plane per kv head. kv heads are sharded like query heads.
        if planes[dim] not in ((q.shape[dim], k.shape[dim]) if spans else (q.shape[dim],)):
            raise ValueError(
                f"mask: has {found}, expected 1 or {q.shape[dim]} in dimension {dim}: the mask must be that of the "
                "global q, of which each rank uses its shard"
            )
        mask = mask.narrow(dim, *_shard(planes[dim], dim, mesh, placements))
    return mask


def _shard(size: int, dim: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, int]:
    """Start and length of this rank's shard of `size` entries. DTensor splits like torch.chunk."""
    start, length = 0, size
    for i, placement in enumerate(placements):
        if placement.is_shard(dim):
            chunk = -(-length // mesh.size(i))
            skipped = min(chunk * mesh.get_local_rank(i), length)
            start, length = start + skipped, min(chunk, length - skipped)
    return start, length


def _global(
    x: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """A DTensor of shape `shape` whose local shard is `x`, with axes in the same order in memory as in x."""
    strides, stride = [0] * x.dim(), 1
    for axis in sorted(range(x.dim()), key=lambda axis: (x.stride(axis), -axis)):
        strides[axis] = stride
        stride *= shape[axis]
    return DTensor.from_local(
        x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
