"""attnforge.bagel.patch() on the real decoder of NVIDIA NeMo Automodel, where it is installed (`pip install
nemo_automodel einops`); tests/bagel/trainer/trainer.py is a stand-in for everywhere else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from trainer import MODES, NOISE, PAD, SAMPLES, SPLITS, TOKENS, nested, same_gradients

import attnforge
from attnforge.bagel.trainer.ports import NEMO

pytest.importorskip("nemo_automodel")
try:
    importlib.import_module(NEMO.bagel)
except ImportError as error:  # its own dependencies are many
    pytest.skip(f"nemo_automodel cannot be imported: {error}", allow_module_level=True)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def eager_flex(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, block_mask: Any) -> Tensor:
    """What the port calls has no backward pass on a CPU: the same from its mask_mod."""
    mask = create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device=str(q.device))
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys.modules[NEMO.qwen], NEMO.flex, eager_flex)
    # It asks for torch's memory-efficient kernels, which a CPU has not.
    monkeypatch.setattr(sys.modules[NEMO.qwen], "sdpa_kernel", lambda backends: nullcontext())
    yield
    attnforge.bagel.unpatch()


def make(layer: str, device: str) -> Any:
    from transformers import Qwen2Config  # type: ignore[import-not-found, unused-ignore]

    qwen: Any = sys.modules[NEMO.qwen]
    config = Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, qk_norm=True, layer_module=layer, freeze_und=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return qwen.Qwen2Model(config).to(device).train()


def train(
    model: Any, flex: bool, mixture: bool, grouped: bool, device: str
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step, through the functions that the port's own forward calls."""
    bagel: Any = sys.modules[NEMO.bagel]
    padding = [PAD] if flex else []
    samples = [*SAMPLES, *padding]
    attention_mask: Any = [mask.to(device) for mask in nested()]
    if flex:
        mod = bagel.create_sparse_mask(samples, [*SPLITS, *padding], [*MODES, "causal"], torch.device(device))
        # The port compiles it: half a minute for the same mask.
        sizes = {"B": 1, "H": 4, "Q_LEN": sum(samples), "KV_LEN": sum(samples)}
        attention_mask = bagel.create_block_mask(mod, **sizes, device=device, _compile=False)
    und = torch.tensor([i for i in range(TOKENS) if i not in NOISE], device=device)
    gen = torch.tensor(NOISE, device=device)
    x = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.arange(TOKENS, device=device)
    options: dict[str, Tensor] = {}
    if mixture:
        options = {"packed_und_token_indexes": und, "packed_gen_token_indexes": gen}
    if grouped:
        order = torch.cat([und, gen])
        x, positions = x[order], positions[order]
        options |= {"mot_perm": order, "mot_inv": torch.argsort(order)}
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        out = model.forward_train(x, samples, attention_mask, positions, **options)
    loss = (out.float() * torch.linspace(-1, 1, 64, device=device)).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
@pytest.mark.parametrize("flex", [True, False], ids=["flex", "nested"])
@pytest.mark.parametrize(
    ("layer", "grouped"),
    [("Qwen2MoTDecoderLayer", False), ("Qwen2MoTDecoderLayer", True), ("Qwen2DecoderLayer", False)],
)
def test_training_is_the_same(layer: str, grouped: bool, flex: bool, deep: bool, device: str) -> None:
    model = make(layer, device)
    arguments = (model, flex, "MoT" in layer, grouped, device)
    loss, gradients = train(*arguments)
    with attnforge.bagel.patch(deep=deep):
        our_loss, ours = train(*arguments)
    assert our_loss == pytest.approx(loss, rel=2e-2)
    same_gradients(ours, gradients, 3e-2)
