"""The patch under FSDP: the pack must pass through wrapped layers and bf16 casts as a BlockMask does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from trainer import PAD, batch, clean, flash_attn, make_model, train

import attnforge

__all__ = ["clean", "flash_attn"]  # fixtures
BF16 = torch.bfloat16


def wrap_fsdp1(model: Any) -> Any:
    """As the official trainer, but for its sharding strategy."""
    options: Any = {
        "mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    layers = model.language_model.layers
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def wrap_fsdp2(model: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for part in (*model.language_model.layers, model):
        fully_shard(part, mp_policy=policy)
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("use_flex", [True, False], ids=["flex", "nested"])
@pytest.mark.parametrize("wrap", [wrap_fsdp1, wrap_fsdp2])
def test_training_is_the_same(wrap: Any, use_flex: bool, group: None, flash_attn: object) -> None:
    model = wrap(make_model())
    data = batch(use_flex, PAD, True)
    loss, gradients = train(model, data, BF16)
    norm = sum(x.float().norm().item() for x in gradients.values())
    for deep in (False, True):
        with attnforge.bagel.patch(deep=deep):
            our_loss, ours = train(model, data, BF16)
        assert our_loss == pytest.approx(loss, rel=5e-3)
        assert sum(x.float().norm().item() for x in ours.values()) == pytest.approx(norm, rel=5e-3)
