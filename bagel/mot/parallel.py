"""A MotModel on many GPUs: a mesh of ranks with three dimensions, as torchtitan has them.

    dp    ranks with different packs
    cp    ranks with different rows of one pack (context parallelism)
    tp    ranks with different heads and columns of a layer's weights (tensor parallelism)

Rank r is at (dp, cp, tp) = (r // (cp tp), r // tp % cp, r % tp): tp communicates in every layer, so its ranks are
neighbours.

dp x cp: ranks compute different tokens with the same weights. FSDP2 shards parameters over all of them (`dp_cp`, the
two dimensions flattened) and reduces gradients over them.

cp: rank i of W has rows [i n, (i + 1) n) of a pack (`local_rows`), n = ceil(T / W). The mask is that of the whole pack.
Only attention communicates (`attnforge.context_parallel`).

tp: rank i of N has 1 / N of the heads of q, of k and of v, and 1 / N of the columns of gate and of up. Activations
between layers are the same on all ranks. In Megatron's words (arXiv:1909.08053), the linears before attention and
before SwiGLU are column parallel, those after them row parallel:

    x -> enter -> linear, gate_up (rows of the weight) -> local heads, columns -> output, down (its columns) -> leave

`enter` is the identity and sums gradients in the backward; `leave` sums and is the identity in the backward. Each is
one all-reduce. Norms of q and k have the same weights for all heads, so their gradients are summed, too. All other
parameters (embeddings, norms of rows, the heads of the model) compute the same on all ranks of tp.

The linear before attention is fused: its rows are the heads of q, then of k, then of v; gate_up likewise. The first
shard of such a weight would be heads of q only. `dealt_rows` orders rows so that shard i of N has a share of each part:

    q0 q1 q2 q3 k0 k1 v0 v1   ->   q0 q1 k0 v0 | q2 q3 k1 v1       (N = 2)

Split weights are DTensors on tp, on which `fully_shard` makes DTensors on dp_cp x tp. The layers compute with their
local tensors. Checkpoints have the order of the unsplit weight (`whole_order`), so that any mesh can load them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnforge.bagel.mot.layer import Experts, MotConfig, MotLayer, Project
from attnforge.bagel.mot.model import MotModel, Pack

Reorder = Callable[[Tensor], Tensor]


class Meshes(NamedTuple):
    """The dimensions of a mesh, each of one dimension itself; `dp_cp` is two of them flattened."""

    dp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    dp_cp: DeviceMesh


def make_meshes(device_type: str, config: MotConfig, world: int, cp: int = 1, tp: int = 1) -> Meshes:
    """The mesh of all `world` ranks, dp = world / (cp tp). A collective call.

    Raises ValueError if cp x tp does not divide `world`, or tp the heads of q or kv or the columns of the MLP.
    """
    for name, count in (("heads_q", config.heads_q), ("heads_kv", config.heads_kv), ("mlp", config.mlp)):
        if count % tp:
            raise ValueError(f"tp: got {tp}, expected a divisor of the model's {name}, {count}")
    if world % (cp * tp):
        raise ValueError(
            f"cp x tp: got {cp} x {tp} = {cp * tp}, expected a divisor of the number of ranks, {world}"
        )
    mesh = init_device_mesh(device_type, (world // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    if tp > 1:
        mesh._flatten("dp_cp_tp")  # torch finds it, and reduces the norms of split weights in one step
    return Meshes(mesh["dp"], mesh["cp"], mesh["tp"], mesh["dp", "cp"]._flatten("dp_cp"))


# ---- Context parallelism


def local_rows(pack: Pack, rank: int, ranks: int) -> Pack:
    """The rows of `pack` that are this rank's of cp: n = ceil(T / ranks) rows, numbered from 0, and their labels.

    The lists stay those of the whole pack, for its mask. Missing rows at the end are text of id 0: no row sees their
    keys, and they have no labels, so that they add nothing to losses and gradients.
    """
    count = -(-pack.tokens // ranks)
    begin = rank * count

    def mine(rows: Tensor, *values: Tensor) -> list[Tensor]:
        here = (rows >= begin) & (rows < begin + count)
        return [rows[here] - begin, *(x[here] for x in values)]

    text_rows, text_ids = mine(pack.text_rows, pack.text_ids)
    vision_rows, vision, vision_places = mine(pack.vision_rows, pack.vision, pack.vision_places)
    of_latents = (pack.latents, pack.latent_places, pack.noise, pack.times)
    latent_rows, latents, latent_places, noise, times = mine(pack.latent_rows, *of_latents)
    label_rows, labels = mine(pack.label_rows, pack.labels)
    positions = pack.positions[begin : begin + count]
    padding = torch.arange(positions.numel(), count, device=positions.device)
    return dataclasses.replace(
        pack,
        positions=F.pad(positions, (0, padding.numel())),
        text_ids=F.pad(text_ids, (0, padding.numel())),
        text_rows=torch.cat((text_rows, padding)),
        vision=vision,
        vision_rows=vision_rows,
        vision_places=vision_places,
        latents=latents,
        latent_rows=latent_rows,
        latent_places=latent_places,
        noise=noise,
        times=times,
        labels=labels,
        label_rows=label_rows,
    )


# ---- Tensor parallelism


def _sum(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group. x stays as it is: autograd may have given it to others, too."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _Enter(torch.autograd.Function):
    """`enter`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """`leave`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def enter(x: Tensor, tp: DeviceMesh) -> Tensor:
    """x, which is the same on all ranks; each computes a part of its gradient, which is the sum."""
    result: Tensor = _Enter.apply(x, tp.get_group())  # type: ignore[no-untyped-call]
    return result


def leave(x: Tensor, tp: DeviceMesh) -> Tensor:
    """The sum of the ranks' x; its gradient, which is the same on all ranks, is that of each x."""
    result: Tensor = _Leave.apply(x, tp.get_group())  # type: ignore[no-untyped-call]
    return result


def dealt_rows(parts: Sequence[int], ranks: int) -> Tensor:
    """The rows of a fused weight, whose parts have so many rows, in the order in which shards have a share of each."""
    rows = torch.arange(sum(parts)).split(list(parts))
    return torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in rows])


def _split(x: Tensor, tp: DeviceMesh, dim: int) -> nn.Parameter:
    """A parameter sharded along `dim`, of a tensor that all ranks have."""
    return nn.Parameter(distribute_tensor(x.detach(), tp, [Shard(dim)], src_data_rank=None))


def _local(x: Any) -> Any:
    """The shard of a parameter, or None."""
    return x.to_local() if isinstance(x, DTensor) else x


class ColumnParallel(nn.Linear):
    """This rank's columns of the result of a fused linear, whose parts have so many columns each."""

    def __init__(self, whole: nn.Linear, parts: Sequence[int], tp: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features // tp.size()
        self.tp = tp
        self.order = dealt_rows(parts, tp.size())
        self.weight = _split(whole.weight[self.order], tp, 0)
        bias = None if whole.bias is None else _split(whole.bias[self.order], tp, 0)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(enter(x, self.tp), _local(self.weight), _local(self.bias))


class RowParallel(nn.Linear):
    """A linear of this rank's columns of x, without bias: the sum over the ranks."""

    def __init__(self, whole: nn.Linear, tp: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features // tp.size(), whole.out_features
        self.register_parameter("bias", None)
        self.tp = tp
        self.weight = _split(whole.weight, tp, 1)
        assert whole.bias is None  # each rank would add it

    def forward(self, x: Tensor) -> Tensor:
        return leave(F.linear(x, _local(self.weight)), self.tp)


class LocalProject(Project):
    """`Project` to this rank's heads."""

    def __init__(self, whole: Project, tp: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.tp = tp
        q, k, v = (count // tp.size() for count in whole.heads)
        self.heads = (q, k, v)
        self.eps, self.norm, self.q_norm, self.k_norm = whole.eps, whole.norm, whole.q_norm, whole.k_norm
        head_dim = whole.q_norm.weight.numel()
        self.linear = ColumnParallel(whole.linear, [count * head_dim for count in whole.heads], tp)

    def norm_weights(self) -> tuple[Tensor, Tensor]:
        q, k = super().norm_weights()
        return enter(q, self.tp), enter(k, self.tp)


def tensor_parallel(model: MotModel, tp: DeviceMesh) -> None:
    """Split the layers of `model`, which has the same weights on all ranks. Before checkpoints and `fully_shard`."""
    for layer in model.layers:
        assert isinstance(layer, MotLayer)
        project, output, mlps = layer.attention.project, layer.attention.output, layer.mlp
        for expert in ("understanding", "generation"):
            _split_expert(expert, project, output, mlps, tp)


def _split_expert(name: str, project: Experts, output: Experts, mlps: nn.Module, tp: DeviceMesh) -> None:
    setattr(project, name, LocalProject(getattr(project, name), tp))
    setattr(output, name, RowParallel(getattr(output, name), tp))
    mlp: Any = getattr(mlps, name)
    mlp.gate_up = ColumnParallel(mlp.gate_up, [mlp.down.in_features] * 2, tp)
    mlp.down = RowParallel(mlp.down, tp)


# ---- Gradients and checkpoints


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of sharded parameters: split ones are on dp_cp x tp, others on dp_cp.

    Returns the norm, 0 if no parameter has a gradient. torch does not combine DTensors of two meshes.
    """
    by_mesh: defaultdict[DeviceMesh, list[Any]] = defaultdict(list)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        if parameter.grad is not None:  # a frozen one has none
            by_mesh[parameter.device_mesh].append(parameter)
    if not by_mesh:
        return torch.zeros(())
    norms: list[Any] = [torch.nn.utils.get_total_norm([x.grad for x in group]) for group in by_mesh.values()]
    norm: Tensor = torch.stack([x.full_tensor() for x in norms]).norm()
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, most, norm)
    return norm


def whole_order(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state of `get_state_dict` as {"model", "optimizer"}, with the rows of fused weights as before the split."""
    return _reordered(state, {name: order.argsort() for name, order in _orders(model).items()})


def dealt_order(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inverse of `whole_order`."""
    return _reordered(state, _orders(model))


def _orders(model: nn.Module) -> dict[str, Tensor]:
    """`dealt_rows` of each parameter that has it, by its name in a checkpoint."""
    return {
        f"{name}.{kind}".replace("_checkpoint_wrapped_module.", ""): module.order
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallel)
        for kind in ("weight", "bias")
    }


def _reordered(state: dict[str, Any], orders: dict[str, Tensor]) -> dict[str, Any]:
    """`state` with the rows of parameters, and of their moments, in another order; others are the same tensors."""

    def change(name: str, x: Any) -> Any:
        if name not in orders or x.dim() == 0:  # an optimizer's count of steps
            return x
        # First the shards over dp_cp, which lie inside those over tp; torch warns of both in one call.
        rows = x.redistribute(placements=[Replicate(), Shard(0)]).full_tensor()
        rows = rows[orders[name].to(rows.device)]
        return distribute_tensor(rows, x.device_mesh, x.placements, src_data_rank=None)

    parameters = {name: change(name, x) for name, x in state["model"].items()}
    moments = {
        name: {kind: change(name, x) for kind, x in values.items()}
        for name, values in state["optimizer"]["state"].items()
    }
    return state | {"model": parameters, "optimizer": state["optimizer"] | {"state": moments}}
