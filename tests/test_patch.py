"""attnforge.bagel.patch() on a stand-in with the official trainer's symbols and call patterns."""

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
from attnforge.bagel import layers, substitutes
from attnforge.bagel.official import FLASH
from attnforge.bagel.packing import visible_from_definition
from attnforge.bagel.ports import BAGEL, NEMO, OFFICIAL, QWEN, SIGLIP, Port

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


@pytest.mark.parametrize(
    ("use_flex", "pad", "with_vit", "dtype", "tolerance", "device"),
    [
        pytest.param(True, PAD, False, torch.float32, 1e-5, "cpu", id="flex-fp32"),
        pytest.param(True, 0, False, torch.float32, 1e-5, "cpu", id="flex-fp32-empty-padding"),
        pytest.param(True, -1, False, torch.float32, 1e-5, "cpu", id="flex-fp32-no-padding"),
        pytest.param(True, PAD, True, torch.bfloat16, 2e-2, "cpu", id="flex-bf16"),
        pytest.param(False, 0, True, torch.bfloat16, 2e-2, "cpu", id="nested-bf16"),
        pytest.param(True, PAD, True, torch.bfloat16, 4e-2, "cuda", id="flex-gpu", marks=pytest.mark.gpu),
        pytest.param(False, 0, True, torch.bfloat16, 4e-2, "cuda", id="nested-gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
def test_training_is_the_same(
    deep: bool,
    use_flex: bool,
    pad: int,
    with_vit: bool,
    dtype: torch.dtype,
    tolerance: float,
    device: str,
    flash_attn: object,
) -> None:
    model = make_model().to(device)
    data = batch(use_flex, pad, with_vit)
    loss, gradients = train(model, data, dtype, device)
    with attnforge.bagel.patch(deep=deep):
        our_loss, ours = train(model, data, dtype, device)
    again, _ = train(model, data, dtype, device)
    assert again == pytest.approx(loss, rel=0 if device == "cpu" else 1e-5)
    assert our_loss == pytest.approx(loss, rel=tolerance)
    assert any("vit_model" in name for name in ours) == with_vit
    same_gradients(ours, gradients, tolerance)


def same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    for name, gradient in theirs.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        assert (ours[name] - gradient).abs().max().item() < tolerance * scale, name


@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
@pytest.mark.parametrize("use_flex", [True, False], ids=["flex", "nested"])
def test_nemo_automodel_is_the_same(deep: bool, use_flex: bool, nemo: Port, flash_attn: object) -> None:
    model, data = make_model(nemo), batch(use_flex, PAD, True)
    loss, gradients = train(model, data, torch.bfloat16)
    with attnforge.bagel.patch(trainer="nemo", deep=deep):
        our_loss, ours = train(model, data, torch.bfloat16)
        assert vars(sys.modules[nemo.qwen])[nemo.flex] is substitutes.flex_attention
    assert vars(sys.modules[nemo.qwen])[nemo.flex] is not substitutes.flex_attention
    assert our_loss == pytest.approx(loss, rel=2e-2)
    same_gradients(ours, gradients, 2e-2)


def test_which_trainer(nemo: Port, flash_attn: object) -> None:
    importlib.import_module(nemo.bagel)
    with attnforge.bagel.patch():  # the one that is imported, not the other that could be
        assert vars(sys.modules[nemo.qwen])[nemo.flex] is substitutes.flex_attention
        assert QWEN not in sys.modules
    with pytest.raises(ValueError, match="trainer: got 'megatron', accepted are 'bagel', 'nemo' and None"):
        attnforge.bagel.patch(trainer="megatron")  # type: ignore[arg-type]


def test_a_frozen_expert_gets_no_gradients_from_deep_mode_either(flash_attn: object) -> None:
    model, data = make_model(), batch(True, PAD, False)
    for layer in model.language_model.layers:
        layer.config.freeze_und = True
    _, gradients = train(model, data, torch.float32)
    with attnforge.bagel.patch(deep=True):
        _, ours = train(model, data, torch.float32)
    name = "language_model.layers.1.v_proj.weight"
    assert name not in ours or not ours[name].any()
    for unused in [name for name in gradients if not gradients[name].any()]:
        gradients.pop(unused)
        ours.pop(unused, None)
    same_gradients(ours, gradients, 1e-5)


def test_deep_mode_passes_packed_views_and_pads_nothing(
    flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides: list[tuple[int, ...]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        strides.extend((q.stride(), k.stride(), v.stride()))
        return attnforge.attention(q, k, v, mask)

    def forbidden(*args: object) -> None:
        raise AssertionError("something is padded")

    monkeypatch.setattr(layers, "attention", spy)
    monkeypatch.setattr(F, "pad", forbidden)
    with attnforge.bagel.patch(deep=True):
        train(make_model(), batch(True, PAD, False), torch.float32)
    assert {stride[1:] for stride in strides} == {(16, 64, 1), (16, 32, 1)}


def test_deep_mode_refuses_layers_that_do_more(flash_attn: object, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = vars(importlib.import_module(QWEN))["PackedAttentionMoT"]

    def forward_train(
        self: Any,
        packed_sequence: Tensor,
        sample_lens: Any,
        attention_mask: Any,
        packed_position_embeddings: Any,
    ) -> None:
        pad_sequence, flex_attention = layer.pad_sequence, layer.flex_attention
        self.output_gate(flex_attention(pad_sequence(packed_sequence)))

    monkeypatch.setattr(layer, "forward_train", forward_train)
    with pytest.raises(RuntimeError, match="uses output_gate, which attnforge's deep mode does not know"):
        attnforge.bagel.patch(deep=True)
    with attnforge.bagel.patch():
        pass


def test_ours_is_called_once_a_layer_without_padding_or_repeats(
    flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[Any, ...]] = []
    built: list[int] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Any:
        shapes.append((tuple(q.shape), tuple(k.shape), id(mask)))
        return attnforge.attention(q, k, v, mask, **rest)

    def packed(*args: Any, **rest: Any) -> attnforge.bagel.PackedMask:
        built.append(1)
        return attnforge.bagel.PackedMask(*args, **rest)

    monkeypatch.setattr(substitutes, "attention", spy)
    monkeypatch.setattr(substitutes, "PackedMask", packed)
    model = make_model()
    for use_flex in (True, False):
        shapes.clear()
        with attnforge.bagel.patch():
            train(model, batch(use_flex, PAD, False), torch.bfloat16)
        # Two layers, each computed again for its gradients, all with one mask.
        assert len(shapes) == 4
        assert len(set(shapes)) == 1
        assert shapes[0][:2] == ((1, 4, TOKENS, 16), (1, 2, TOKENS, 16))
    assert len(built) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_inference(causal: bool, flash_attn: object) -> None:
    model = make_model().eval().language_model
    x, lens = torch.randn(30, 64), torch.tensor([12, 18])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x, lens, causal)
        with attnforge.bagel.patch():
            ours = model(x, lens, causal)
    assert not torch.equal(ours, x)
    assert (ours - expected).abs().max() < 2e-2


def snapshot() -> dict[tuple[str, str], Any]:
    modules = [sys.modules[name] for name in (BAGEL, QWEN, SIGLIP)]
    values = {(m.__name__, name): value for m in modules for name, value in vars(m).items()}
    return values | {("Qwen2Model", k): v for k, v in vars(sys.modules[QWEN].Qwen2Model).items()}


def changed(before: dict[tuple[str, str], Any]) -> set[str]:
    return {name for (owner, name), value in snapshot().items() if before.get((owner, name)) is not value}


def test_patching_twice_and_unpatching_twice_change_nothing(flash_attn: types.ModuleType) -> None:
    make_model()
    before = snapshot()
    attnforge.bagel.unpatch()
    outer = attnforge.bagel.patch()
    patched = snapshot()
    assert changed(before) == {
        "create_sparse_mask",
        "create_block_mask",
        "pad_sequence",
        "flex_attention",
        "flash_attn_varlen_func",
        "forward_train",
    }
    with attnforge.bagel.patch():
        assert not changed(patched)
    assert not changed(patched)  # the inner block did not patch, so it does not unpatch
    assert sys.modules[FLASH] is flash_attn
    assert flash_attn.flash_attn_varlen_func is stock_varlen
    with outer:
        pass
    assert not changed(before)
    attnforge.bagel.unpatch()
    assert not changed(before)


@pytest.mark.skipif(importlib.util.find_spec(FLASH) is not None, reason="flash-attn is installed")
def test_flash_attn_is_satisfied_where_it_is_absent() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(QWEN)
    with attnforge.bagel.patch():
        assert importlib.util.find_spec(FLASH) is not None  # transformers asks
        module: Any = importlib.import_module(FLASH)
        assert module.flash_attn_varlen_func is attnforge.flash_attn_varlen_func
        loss, _ = train(make_model(), batch(True, PAD, True), torch.bfloat16)
        assert loss > 0
    assert FLASH not in sys.modules


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (QWEN, "pad_sequence", None, "qwen2_navit.pad_sequence is missing"),
        (QWEN, "pad_sequence", lambda tensor, size, side: tensor, "pad_sequence takes (tensor, size, side)"),
        (BAGEL, "create_sparse_mask", lambda lens: lens, "create_sparse_mask takes (lens)"),
        (
            SIGLIP,
            "SiglipFlashAttention2",
            type("Other", (), {"forward": lambda self, x: x}),
            "SiglipFlashAttention2.forward does not call flash_attn_varlen_func",
        ),
    ],
)
def test_an_unknown_version_is_left_alone(
    module: str, name: str, value: Any, message: str, flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model()
    monkeypatch.setattr(sys.modules[module], name, value)
    before = snapshot()
    with pytest.raises(RuntimeError) as caught:
        attnforge.bagel.patch()
    assert message in str(caught.value)
    assert "nothing is patched" in str(caught.value)
    assert not changed(before)


def test_without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(STANDIN)])
    with pytest.raises(RuntimeError, match=r"cannot import modeling\.bagel\.bagel"):
        attnforge.bagel.patch()
    assert not isinstance(sys.modules.get(FLASH), types.ModuleType)
