"""A rank of test_mot.py's tensor parallelism: losses, gradients and their norm are those of the unsplit model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from synthetic import Synthetic

from attnforge.bagel.mot.attention import make_operator
from attnforge.bagel.mot.layer import CONFIGS
from attnforge.bagel.mot.model import MotModel, Pack
from attnforge.bagel.mot.parallel import ColumnParallel, clip_gradients, make_meshes, tensor_parallel


def gradients(model: MotModel, pack: Pack) -> dict[str, Tensor]:
    """Of all parameters, whole and in the order of their rows; and the losses."""
    losses = torch.stack(model(pack))
    losses.sum().backward()
    found = {"losses": losses.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallel):
            for kind in ("weight", "bias") if module.bias is not None else ("weight",):
                found[f"{name}.{kind}"] = found[f"{name}.{kind}"][module.order.argsort()]
    return found


def check(attention: str) -> None:
    config = CONFIGS["tiny"]
    torch.manual_seed(0)
    model = MotModel(config, make_operator(attention, config.heads_q, 256, torch.float32))
    for parameter in model.parameters():  # ones and zeros would hide mistakes
        torch.nn.init.normal_(parameter, std=0.2)
    pack = Synthetic(config, 256).pack(3)
    expected = gradients(model, pack)
    model.zero_grad()
    tensor_parallel(model, make_meshes("cpu", config, dist.get_world_size(), tp=2).tp)
    ours = gradients(model, pack)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, (name, error)


def check_clipping() -> None:
    """Of parameters on two meshes, one of them frozen, as torch clips the same unsharded ones."""
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_cp", "tp"))
    torch.manual_seed(1)
    whole, ours = (torch.nn.ParameterDict() for _ in range(2))
    for name, mesh in {"split": meshes, "other": meshes["dp_cp"], "frozen": meshes["dp_cp"]}.items():
        placements = [Shard(0)] * mesh.ndim
        whole[name] = torch.nn.Parameter(torch.randn(4, 3))
        ours[name] = torch.nn.Parameter(distribute_tensor(whole[name].detach(), mesh, placements))
    assert clip_gradients(ours, 1.0) == 0
    for name in ("split", "other"):
        whole[name].grad = torch.randn(4, 3)
        ours[name].grad = distribute_tensor(whole[name].grad, ours[name].device_mesh, ours[name].placements)
    torch.testing.assert_close(
        clip_gradients(ours, 1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    )
    for name in ("split", "other"):
        torch.testing.assert_close(ours[name].grad.full_tensor(), whole[name].grad)
    assert ours["frozen"].grad is None


def main() -> None:
    dist.init_process_group("gloo")
    check_clipping()
    for attention in ("attnforge", "sdpa"):
        check(attention)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
