"""attnforge.bagel.patch() on a stand-in with the official trainer's symbols and call patterns: what it computes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import Calls
from torch import Tensor
from trainer import PAD, TOKENS, batch, clean, flash_attn, make_model, nemo, same_gradients, train

import attnforge
from attnforge.bagel.trainer import layers, substitutes
from attnforge.bagel.trainer.ports import OFFICIAL, QWEN, Port

__all__ = ["clean", "flash_attn", "nemo"]  # fixtures


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


@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
def test_a_frozen_expert_gets_zeros_as_from_the_trainer_itself(deep: bool, flash_attn: object) -> None:
    model, data = make_model(), batch(True, PAD, False)
    for layer in model.language_model.layers:
        layer.config.freeze_und = True
    _, gradients = train(model, data, torch.float32)
    with attnforge.bagel.patch(deep=deep):
        _, ours = train(model, data, torch.float32)
    same_gradients(ours, gradients, 1e-5)
    for part in ("q_proj.weight", "k_proj.bias", "v_proj.weight", "q_norm.weight"):
        frozen = ours[f"language_model.layers.0.{part}"]
        assert not frozen.any()  # zeros, not None: weight decay and DDP tell the two apart


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


def test_deep_mode_runs_norms_and_rotary_embedding_as_one_kernel(
    flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a layer and pass, with one table of experts for all of them; the trainer's own functions are not called."""
    tables: list[object] = []

    def spy(*args: Any, **rest: Any) -> Any:
        tables.append(rest["experts"])
        return attnforge.qk_norm_rope(*args, **rest)

    def forbidden(*args: object, **rest: object) -> None:
        raise AssertionError("the trainer's rotary embedding is called")

    monkeypatch.setattr(layers, "qk_norm_rope", spy)
    model = make_model()
    with attnforge.bagel.patch(deep=True):
        monkeypatch.setattr(sys.modules[QWEN], "apply_rotary_pos_emb", forbidden)
        train(model, batch(True, PAD, False), torch.float32)
    assert len(tables) == 2 * len(model.language_model.layers)  # the recomputation of checkpoints included
    assert len(set(map(id, tables))) == 1
    assert isinstance(tables[0], attnforge.ExpertRows)


class OtherNorm(torch.nn.Module):
    """Not RMSNorm: a class that deep mode does not know."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(x) * self.weight
        return result


@pytest.mark.parametrize("replace", [OtherNorm, lambda norm: torch.nn.Identity()], ids=["unknown", "none"])
def test_deep_mode_with_other_norms(replace: Any, flash_attn: object) -> None:
    model, data = make_model(), batch(True, PAD, False)
    for layer in model.language_model.layers:
        for name in ("q_norm", "k_norm", "q_norm_moe_gen", "k_norm_moe_gen"):
            setattr(layer, name, replace(getattr(layer, name)))
    loss, gradients = train(model, data, torch.float32)
    with attnforge.bagel.patch(deep=True):
        our_loss, ours = train(model, data, torch.float32)
    assert our_loss == pytest.approx(loss, rel=1e-5)
    same_gradients(ours, gradients, 1e-5)


def test_deep_mode_refuses_another_rotary_embedding(
    flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs_of_neighbours(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        def turned(x: Tensor) -> Tensor:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    monkeypatch.setattr(importlib.import_module(QWEN), "apply_rotary_pos_emb", pairs_of_neighbours)
    with pytest.raises(RuntimeError, match="apply_rotary_pos_emb does not rotate the two halves of a head"):
        attnforge.bagel.patch(deep=True)


def test_tokens_grouped_by_expert(flash_attn: object) -> None:
    """As NeMo Automodel passes them with `mot_perm`: rows in another order, the same results."""
    qwen = importlib.import_module(QWEN)
    layer = make_model().language_model.layers[0]
    forward_train = layers.mixture(type(layer).forward_train, layers.Parts(qwen))
    data = batch(True, PAD, False)
    samples, splits, modes = (data[name] for name in ("sample_lens", "split_lens", "attn_modes"))
    pack = substitutes.create_sparse_mask(samples, splits, modes, "cpu")
    rows = (data["packed_text_indexes"], data["packed_vae_token_indexes"])
    x = data["packed_sequence"]
    angles = torch.rand(TOKENS, layer.head_dim // 2, generator=torch.Generator().manual_seed(3)).repeat(1, 2)
    embeddings = angles.cos(), angles.sin()
    order = torch.cat(rows)
    expected = forward_train(layer, x, samples, pack, embeddings, *rows)
    grouped = (angles[order].cos(), angles[order].sin())
    got = forward_train(layer, x[order], samples, pack, grouped, *rows, order, order.argsort())
    torch.testing.assert_close(got, expected[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_attention_of_the_vae(dtype: torch.dtype, flash_attn: object) -> None:
    """Ours while patched, torch's before and after, and torch's for what our kernels do not take."""
    vae = importlib.import_module(OFFICIAL.vae)
    torch.manual_seed(0)
    small, large = vae.Encoder(64).to(dtype), vae.Encoder(512).to(dtype)
    x = torch.randn(2, 64, 6, 5).to(dtype)
    expected = small.encode(x)
    with attnforge.bagel.patch(), Calls() as calls:
        ours = small.encode(x)
        assert calls.count() == (1, 0)
        large.encode(torch.randn(1, 512, 4, 4).to(dtype))  # a CPU has no kernels of this head_dim
        assert calls.count() == (1, 0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
    with Calls() as calls:
        assert torch.equal(small.encode(x), expected)
    assert calls.count() == (0, 0)


@pytest.mark.parametrize("kind", ["missing", "other"])
def test_an_unknown_vae_is_left_alone(
    kind: str, flash_attn: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is patched."""
    if kind == "missing":
        monkeypatch.setitem(sys.modules, OFFICIAL.vae, None)
    else:
        monkeypatch.setattr(importlib.import_module(OFFICIAL.vae), "AttnBlock", type("AttnBlock", (), {}))
    caplog.set_level("INFO", "attnforge")
    model = make_model()
    with attnforge.bagel.patch():
        assert sys.modules[OFFICIAL.qwen].flex_attention is substitutes.flex_attention
        train(model, batch(True, PAD, False), torch.float32)
    [said] = [record.message for record in caplog.records if "VAE" in record.message]
    assert "stays as it is" in said
    assert {"missing": "cannot import", "other": "AttnBlock.attention is missing"}[kind] in said
