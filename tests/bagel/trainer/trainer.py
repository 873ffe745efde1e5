"""A stand-in for BAGEL's trainer, under its own names and NeMo Automodel's: models, a batch, one training step."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attnforge
from attnforge.bagel.packing import visible_from_definition
from attnforge.bagel.trainer.patch import FLASH
from attnforge.bagel.trainer.ports import NEMO, OFFICIAL, Port

STANDIN = Path(__file__).parent / "bagel_standin"
# Text, a ViT image (full), a clean image, text, a noise image; text and a noise image; padding.
SAMPLES = [40, 21]
SPLITS, MODES = [6, 9, 8, 5, 12, 9, 12], ["causal", "full", "full", "causal", "noise", "causal", "noise"]
VIT, NOISE = list(range(6, 15)), [*range(28, 40), *range(49, 61)]
PAD = 11
TOKENS = sum(SAMPLES)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in on sys.path, not imported yet; afterwards everything is as before."""
    monkeypatch.syspath_prepend(str(STANDIN))
    before = set(sys.modules)
    yield
    attnforge.bagel.unpatch()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("modeling", "nemo_automodel", FLASH):
            del sys.modules[name]


def stock_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool = False,
) -> Tensor:  # fmt: skip
    """flash-attn's function from torch's, a document at a time; equal lengths."""
    outs = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        a, b, c = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """flash-attn as if it were installed."""
    module = types.ModuleType(FLASH)
    module.__spec__ = importlib.util.spec_from_loader(FLASH, None)
    vars(module)["flash_attn_varlen_func"] = stock_varlen
    monkeypatch.setitem(sys.modules, FLASH, module)
    return module


def batch(use_flex: bool, pad: int, with_vit: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    und = [i for i in range(TOKENS) if i not in NOISE and not (with_vit and i in VIT)]
    data: dict[str, Any] = {
        "sequence_length": TOKENS,
        "packed_sequence": torch.randn(TOKENS, 64, generator=generator),
        "sample_lens": list(SAMPLES),
        "packed_position_ids": torch.arange(TOKENS),
        "packed_text_indexes": torch.tensor(und),
        "packed_vae_token_indexes": torch.tensor(NOISE),
    }
    if with_vit:
        data["packed_vit_tokens"] = torch.randn(len(VIT), 64, generator=generator)
        data["packed_vit_token_indexes"] = torch.tensor(VIT)
        data["vit_token_seqlens"] = torch.tensor([4, 5])
    if use_flex:
        padding = [pad] if pad >= 0 else []
        data["sample_lens"] = [*SAMPLES, *padding]
        data["split_lens"], data["attn_modes"] = [*SPLITS, *padding], [*MODES, *["causal"] * len(padding)]
    else:
        data["nested_attention_masks"] = nested()
    return data


def nested() -> list[Tensor]:
    visible = visible_from_definition(SAMPLES, SPLITS, MODES)
    dense = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    first = SAMPLES[0]
    return [dense[:first, :first].clone(), dense[first:, first:].clone()]


def place(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [place(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def train(
    model: Any, data: dict[str, Any], dtype: torch.dtype, device: str = "cpu"
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = model(**{name: place(value, device) for name, value in data.items()})
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device)
        loss = (out.float() * weights).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_model(port: Port = OFFICIAL) -> Any:
    torch.manual_seed(0)
    return vars(importlib.import_module(port.bagel))[port.model]().train()


@pytest.fixture
def nemo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Port:
    """NeMo Automodel's port: here the same stand-in, under the names that the port has for things."""
    renamed = (
        ("from modeling.bagel.", f"from {NEMO.bagel.rpartition('.')[0]}."),
        ("qwen2_navit", "modeling_qwen2_packed"),
        ("siglip_navit", "modeling_siglip_navit"),
        ("class Bagel(", f"class {NEMO.model}("),
        ("def flex_attention(", f"def {NEMO.flex}("),
        (" = flex_attention(", f" = {NEMO.flex}("),
        ("pad_sequence(", f"{NEMO.pad}("),
        (" = flash_attn_varlen_func(", f" = {NEMO.varlen}("),
        ("import flash_attn_varlen_func", f"import flash_attn_varlen_func as {NEMO.varlen}"),
    )
    for source, module in zip((OFFICIAL.bagel, OFFICIAL.qwen, OFFICIAL.siglip), NEMO.modules, strict=True):
        text = STANDIN.joinpath(*source.split(".")).with_suffix(".py").read_text()
        for old, new in renamed:
            text = text.replace(old, new)
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return NEMO


def same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        assert (ours[name] - gradient).abs().max().item() < tolerance * scale, name
