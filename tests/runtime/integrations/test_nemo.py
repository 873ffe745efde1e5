"""`register_nemo` through NeMo Automodel's functions: its own where it is installed, else stand-ins of their names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers
from torch import Tensor

import attnforge
from attnforge.runtime.build.settings import DISABLE
from attnforge.runtime.integrations import nemo

UTILS = "nemo_automodel.components.attention.utils"
LAYERS = "nemo_automodel.components.models.qwen3_moe.layers"
KERNELS = "nemo_automodel._transformers.kernel_patches"
HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 40
NAMES = nemo._FUNCTIONS


def installed(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The package's modules, which have their own functions again at the end of the test."""
    pytest.importorskip("transformers")
    pytest.importorskip("nemo_automodel")
    try:
        utils, layers, kernels = (importlib.import_module(name) for name in (UTILS, LAYERS, KERNELS))
    except ImportError as error:  # its own dependencies are many
        pytest.skip(f"nemo_automodel cannot be imported: {error}")
    for module in (utils, layers):
        for name in NAMES:
            patch.setattr(module, name, getattr(module, name))
    patch.setattr(kernels, "FLASH_ATTN_IMPLEMENTATIONS", kernels.FLASH_ATTN_IMPLEMENTATIONS)
    return SimpleNamespace(utils=utils, layers=layers, kernels=kernels)


@pytest.fixture(params=["stand-in", "installed"])
def modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    make: Callable[[pytest.MonkeyPatch], Any] = trainers.nemo if request.param == "stand-in" else installed
    return make(monkeypatch)


def draw(*shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (*shape, heads, DIM), which require gradients, and dout."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(*shape, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def run(functions: Any, x: tuple[Tensor, ...], mask: Tensor | None, **given: Any) -> tuple[Tensor, ...]:
    """The output and gradients through NeMo's three functions, as its layers call them."""
    q, k, v, dout = x
    initialize, preprocess, postprocess = (getattr(functions, name) for name in NAMES)
    _, attention = initialize(
        attn_impl="attnforge", num_attention_heads=HEADS, num_qk_channels=DIM, num_v_channels=DIM,
        softmax_scale=0.3, num_gqa_groups=KV_HEADS,
    )  # fmt: skip
    q_, k_, v_, named = preprocess(q, k, v, mask, "attnforge", **given)
    out = postprocess(attention(q_, k_, v_, **named), "attnforge")
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def eager(
    x: tuple[Tensor, ...], visible: Tensor, cap: float | None = None, added: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The same in float64 with all scores; visible broadcasts to (B, H, Sq, Sk). Rows that see nothing give zeros."""
    q, k, v = (t.detach().double().requires_grad_() for t in x[:3])
    packed = q.dim() == 3
    qh, kh, vh = ((t[None] if packed else t).transpose(1, 2) for t in (q, k, v))
    kh, vh = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (kh, vh))
    score = 0.3 * qh @ kh.mT
    score = score if cap is None else cap * torch.tanh(score / cap)
    score = score if added is None else score + added.double()
    weights = score.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = (weights @ vh).transpose(1, 2)
    out = out[0] if packed else out
    return out.detach(), *torch.autograd.grad(out, (q, k, v), x[3].double())


def expect_equal(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def causal(rows: int = ROWS, keys: int = ROWS) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def distance(rows: int = ROWS, keys: int = ROWS) -> Tensor:
    return torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)


@pytest.mark.parametrize("window", [None, (-1, 0), (7, 0), 7])
@pytest.mark.parametrize("kind", ["none", "right", "left", "numbers", "bool"])
def test_causal_attention_with_padding_documents_and_windows(kind: str, window: Any, modules: Any) -> None:
    attnforge.register_nemo()
    positions = torch.arange(ROWS)
    numbers = {
        "none": None,
        "right": torch.stack([positions < 29, positions < ROWS]).long(),
        "left": torch.stack([positions >= 11, positions >= 0]).long(),
        "numbers": torch.stack([torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), torch.tensor(n))
                                for n in ([9, 1, 25, 5], [20, 8, 12, 0])]),
        "bool": torch.stack([positions < 29, (positions < 5) | (positions > 8)]),
    }[kind]  # fmt: skip
    visible = causal()
    if window in ((7, 0), 7):
        visible = visible & (distance() < 7)
    given = {} if window is None else {"window_size": window}
    x = draw(2, ROWS)
    ours = run(modules.layers, x, numbers, **given)
    if numbers is None:
        return expect_equal(ours, eager(x, visible))
    number = numbers.long()
    same = (number[:, :, None] == number[:, None]) & (number > 0)[:, None]
    if kind == "bool":  # rows of padding between visible keys see these: their output means nothing
        x[3][~numbers] = 0
        ours = run(modules.layers, x, numbers, **given)
        exact = eager(x, visible & same[:, None])
        ours = ours[0].masked_fill(~numbers[:, :, None, None], 0), *ours[1:]
        return expect_equal(ours, exact)
    return expect_equal(ours, eager(x, visible & same[:, None]))


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_any_mask(heads: int, additive: bool, modules: Any) -> None:
    """As indexers of keys and packing's collator make them."""
    attnforge.register_nemo()
    visible = torch.rand(2, heads, ROWS, ROWS, generator=torch.Generator().manual_seed(1)) < 0.6
    x = draw(2, ROWS)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) + 0.5 if additive else visible
    expect_equal(run(modules.layers, x, mask), eager(x, visible))


def test_packed_tokens_and_a_softcap(modules: Any) -> None:
    attnforge.register_nemo()
    edges = torch.tensor([0, 13, 14, ROWS], dtype=torch.int32)
    document = torch.bucketize(torch.arange(ROWS), edges[1:], right=True)
    visible = causal() & (document[:, None] == document)
    x = draw(ROWS)
    given = {"cu_seqlens": edges, "qkv_format": "thd", "max_seqlen": 26, "softcap": 2.0}
    expect_equal(run(modules.layers, x, None, **given), eager(x, visible, cap=2.0))
    batch = tuple(t.detach()[None].requires_grad_(i < 3) for i, t in enumerate(x))
    expect_equal(run(modules.layers, batch, None, cu_seqlens=edges), eager(batch, visible))


def test_padding_between_packed_documents(modules: Any) -> None:
    """Rows after a document's end may be anything: no row of a document sees them."""
    attnforge.register_nemo()
    lengths, places = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 22], [0, 15, ROWS]))
    x = draw(ROWS)
    given = {"cu_seqlens": lengths, "cu_seqlens_padded": places, "qkv_format": "thd"}
    real = torch.tensor([0 <= i < 10 or 15 <= i < 27 for i in range(ROWS)])
    x[3][~real] = 0
    ours = run(modules.layers, x, None, **given)
    document = torch.bucketize(torch.arange(ROWS), places[1:], right=True)
    exact = eager(x, causal() & (document[:, None] == document) & real)
    expect_equal((ours[0][real], *ours[1:]), (exact[0][real], *exact[1:]))


def test_sinks_that_a_model_passes(modules: Any) -> None:
    """A sink of -inf is none, and one as high as the sum of all keys halves the output."""
    attnforge.register_nemo()
    x = draw(1, ROWS)
    without = run(modules.layers, x, None)[0]
    sinks = torch.full((HEADS,), -1e9)
    torch.testing.assert_close(run(modules.layers, x, None, learnable_sink=sinks)[0], without)
    q, k = (t.detach().transpose(1, 2).double() for t in x[:2])
    score = (0.3 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~causal(), -torch.inf)
    lse = score.logsumexp(-1)[0, :, -1]
    out = run(modules.layers, x, None, learnable_sink=lse.float())[0]
    torch.testing.assert_close(out[0, -1], without[0, -1] / 2, atol=1e-5, rtol=1e-5)


def test_fewer_queries_than_keys(modules: Any) -> None:
    attnforge.register_nemo()
    q, k, v, dout = draw(2, ROWS)
    x = (q[:, -9:].detach().requires_grad_(), k, v, dout[:, -9:])
    padding = torch.stack([torch.arange(ROWS) >= 4, torch.arange(ROWS) >= 0]).long()
    visible = causal(9, ROWS) & (padding > 0)[:, None, None]
    expect_equal(run(modules.layers, x, padding), eager(x, visible))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softmax_type": "learnable"}, "softmax_type: learned sinks"),
        ({"attention_dropout": 0.1}, "attention_dropout: only 0"),
        ({"attn_mask_type": "no_mask"}, "attn_mask_type: got 'no_mask'"),
        ({"tp_group": 1}, "tp_group: not supported"),
    ],
)
def test_models_that_are_refused(arguments: dict[str, Any], message: str, modules: Any) -> None:
    attnforge.register_nemo()
    sizes = {"num_attention_heads": 4, "num_qk_channels": 16, "num_v_channels": 16, "softmax_scale": 1.0}
    with pytest.raises(ValueError, match=message):
        modules.utils.initialize_attn_module_and_func("attnforge", **sizes, **arguments)


@pytest.mark.parametrize(
    ("shape", "mask", "arguments", "message"),
    [
        ((2, ROWS), None, {"cp_size": 2}, "cp_size: got 2"),
        ((2, ROWS), None, {"magi_attn_spec": object()}, "magi_attn_spec"),
        ((2, ROWS), None, {"window_size": (0, 0)}, "window_size: got 0"),
        ((2, ROWS), None, {"cu_seqlens": torch.tensor([0, ROWS])}, "cu_seqlens: given with a batch of 2"),
        (
            (2, ROWS),
            None,
            {"packed_token_indices": torch.arange(ROWS)},
            "packed_token_indices: not supported",
        ),
        ((2, ROWS), torch.zeros(2, 1, ROWS, ROWS), {"softcap": 2.0}, "an additive mask is not supported"),
        ((2, ROWS), torch.zeros(2, ROWS, ROWS), {}, "attention_mask: got shape"),
        ((ROWS,), None, {}, "cu_seqlens: expected"),
        ((ROWS,), torch.ones(1, ROWS), {"cu_seqlens": torch.tensor([0, ROWS])}, "attention_mask: got shape"),
    ],
)
def test_calls_that_are_refused(
    shape: tuple[int, ...], mask: Tensor | None, arguments: dict[str, Any], message: str, modules: Any
) -> None:
    attnforge.register_nemo()
    q, k, v, _ = draw(*shape)
    with pytest.raises(ValueError, match=message):
        modules.layers.preprocess_args_and_kwargs_for_attn(q, k, v, mask, "attnforge", **arguments)


def test_other_names_stay_and_packing_keeps_ours(modules: Any) -> None:
    theirs = {name: getattr(modules.layers, name) for name in NAMES}
    attnforge.register_nemo()
    ours = {name: getattr(modules.layers, name) for name in NAMES}
    attnforge.register_nemo()
    assert {name: getattr(modules.layers, name) for name in NAMES} == ours
    assert {name: function.__wrapped__ for name, function in ours.items()} == theirs
    assert modules.kernels.FLASH_ATTN_IMPLEMENTATIONS.count("attnforge") == 1
    x = torch.ones(1, 2, 3, 4)
    assert ours[NAMES[2]](x, "sdpa").shape == (1, 3, 2, 4)
    with pytest.raises(ValueError, match="Unsupported attention implementation: unheard"):
        ours[NAMES[0]]("unheard", 4, 16, 16, 1.0)


def test_disabled_is_sdpa(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "1")
    monkeypatch.setattr(nemo, "attention", None)  # it must not run
    attnforge.register_nemo()
    x = draw(2, ROWS)
    expect_equal(run(modules.layers, x, None), eager(x, causal()))


def test_an_unknown_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = trainers.nemo(monkeypatch)
    del modules.utils.postprocess_output_for_attn
    monkeypatch.setattr("attnforge.runtime.integrations.trainers.metadata.version", lambda package: "9.9")
    with pytest.raises(RuntimeError, match=r"nemo-automodel 9\.9; nothing(.|\n)*postprocess_output_for_attn"):
        attnforge.register_nemo()
    assert "attnforge" not in modules.known
    assert modules.layers.preprocess_args_and_kwargs_for_attn.__name__ == NAMES[1]


def test_a_layer_of_the_package_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Qwen3-MoE attention, projections and rotary embedding included, with backend.attn from a config."""
    layers = installed(monkeypatch).layers
    config_of = importlib.import_module("transformers").Qwen3MoeConfig
    attnforge.register_nemo()
    config = config_of(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, torch_dtype="float32"
    )
    results = []
    for name in ("sdpa", "attnforge"):
        torch.manual_seed(0)
        backend = layers.BackendConfig(attn=name, linear="torch", rms_norm="torch", rope_fusion=False)
        layer = layers.Qwen3MoeAttention(config, backend).float()
        layer.init_weights(torch.device("cpu"), init_std=0.3)
        x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1))
        angles = torch.outer(torch.arange(24.0), 1e4 ** -torch.arange(0, 1, 1 / 8))
        freqs = torch.cat([angles.cos(), angles.sin()], -1)[None].expand(2, -1, -1)
        out = layer(x, freqs_cis=freqs, attention_mask=torch.ones(2, 24))
        out.square().sum().backward()
        results.append((out.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)))
    assert len(results[0]) > 5
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4)
