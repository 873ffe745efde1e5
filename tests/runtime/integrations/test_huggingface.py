"""A transformers model on our kernels beside the same model on SDPA; needs `pip install transformers`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime import mask_intervals
from attnforge.runtime.integrations import huggingface
from attnforge.runtime.integrations.spans_tensor import SpansTensor

DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
    pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu),
]
# RMS error allowed, as a multiple of the same model's on SDPA: two roundings of the same numbers, most of which neither
# attention makes, and in float32 sums in another order.
RATIO = {torch.float32: 2.0, torch.bfloat16: 1.5}


@pytest.fixture
def qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    attnforge.register_huggingface()
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip

    def make(implementation: str, device: str, dtype: torch.dtype, **changes: Any) -> Any:
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM._from_config(
            transformers.Qwen2Config(**(sizes | changes)), attn_implementation=implementation
        )
        return model.to(device, dtype)

    return make


@pytest.fixture
def calls(masks_from: Callable[[ModuleType], list[Any]]) -> list[Any]:
    return masks_from(huggingface)


def results_of(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of all rows, and the gradients of the first layer's attention: its weights act through both layers."""
    # SDPA's math backend gives zeros to rows that see no key, as we do. Padding makes such rows, and their loss counts
    # here; cuDNN, torch's own choice on Hopper, lets them see all keys.
    with sdpa_kernel(SDPBackend.MATH):
        output = model(**arguments)
        output.loss.backward()
    layer = model.model.layers[0].self_attn
    gradients = {name: getattr(layer, f"{name}_proj").weight.grad for name in "qkvo"}
    return {"logits": output.logits.detach()} | gradients


def error(x: Tensor, exact: Tensor) -> float:
    """RMS of the difference, as a part of the exact tensor's."""
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("case", ["causal", "padded", "packed", "window"])
def test_a_model_is_the_same(case: str, device: str, dtype: torch.dtype, qwen: Any, calls: list[Any]) -> None:
    """Beside the same weights in float64: no further off than the model is on SDPA, in the same dtype."""
    tokens = torch.randint(1, 64, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)
    arguments: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if case == "padded":
        arguments["attention_mask"] = (torch.arange(30) >= torch.tensor([[0], [7]])).long().to(device)
    if case == "packed":
        arguments["position_ids"] = (
            torch.cat([torch.arange(12), torch.arange(18)])[None].expand(2, 30).to(device)
        )
    changes = (
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 2}
        if case == "window"
        else {}
    )
    exact = results_of(qwen("sdpa", device, dtype, **changes).double(), arguments)
    theirs = results_of(qwen("sdpa", device, dtype, **changes), arguments)
    ours = results_of(qwen("attnforge", device, dtype, **changes), arguments)
    assert len(calls) == 2
    assert {type(mask) for mask in calls} == {attnforge.Causal if case == "causal" else attnforge.Spans}
    assert case == "causal" or calls[0] is calls[1], "layers do not share the mask and its schedules"
    for name, answer in exact.items():
        mine, peer = error(ours[name], answer), error(theirs[name], answer)
        assert mine <= RATIO[dtype] * peer, f"{name}: error {mine:.1e}, SDPA's {peer:.1e}"


DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("case", ["whole", "padded left", "padded right", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_two_masks_are_the_same(name: str, case: str, calls: list[Any]) -> None:
    """Softcap, sinks and sliding windows: logits and all gradients beside eager attention."""
    transformers = pytest.importorskip("transformers", minversion="4.56")
    attnforge.register_huggingface()
    cls, sizes = DECODERS[name]
    tokens = torch.randint(1, 64, (2, 30), generator=torch.Generator().manual_seed(1))
    place, seen = torch.arange(30), torch.ones(2, 30, dtype=torch.bool)
    if case.startswith("padded"):
        seen[1] = place >= 7 if case == "padded left" else place < 23
    arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if case == "packed":
        arguments["position_ids"] = torch.cat([place[:12], place[:18]]).expand(2, 30)
    elif case != "whole":
        arguments["attention_mask"] = seen.long()
    # A label is of the row before it: none of a row that sees no key, where eager attention sees all of them.
    arguments["labels"] = tokens.masked_fill(~(seen & seen.roll(1, 1)), -100)
    results = []
    for implementation in ("attnforge", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, cls).config_class(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=9, pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"], **sizes,
        )  # fmt: skip
        model = getattr(transformers, cls)._from_config(config, attn_implementation=implementation)
        output = model(**arguments)
        output.loss.backward()
        answers = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        results.append(answers | {"logits": output.logits.detach()[seen]})
    # gpt-oss makes its masks without position_ids.
    causal = case == "whole" or (name, case) == ("gpt-oss", "packed")
    assert [type(mask) for mask in calls] == [
        attnforge.Spans,
        attnforge.Causal if causal else attnforge.Spans,
    ]
    for key, answer in results[1].items():
        assert error(results[0][key], answer) < 1e-4, key


@pytest.fixture
def masking(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Tensor]]:
    """transformers' module of masks, and the masks that its sdpa_mask makes."""
    library = pytest.importorskip("transformers.masking_utils")
    attnforge.register_huggingface()
    made: list[Tensor] = []
    theirs = library.sdpa_mask

    def spy(**named: Any) -> Tensor | None:
        mask: Tensor | None = theirs(**named)
        if mask is not None:
            made.append(mask)
        return mask

    monkeypatch.setattr(library, "sdpa_mask", spy)
    return library, made


SIZES: dict[str, Any] = {"batch_size": 2, "q_length": 40, "kv_length": 40, "q_offset": 0, "kv_offset": 0}


MASK_CASES: dict[str, tuple[dict[str, int], bool]] = {  # sizes, and whether an entry is padded
    "padded": ({}, True),
    "window": ({}, True),
    "chunks": ({}, False),
    "packed": ({}, False),
    "both ways": ({}, True),
    "images": ({}, False),
    "by vmap": ({}, True),
    "a prefix in the cache": ({"q_length": 9, "q_offset": 31}, True),
    "a window of the cache": ({"q_length": 6, "kv_length": 15, "q_offset": 34, "kv_offset": 25}, True),
    "room in the cache": ({"q_length": 9, "q_offset": 12}, True),
    "one token": ({"q_length": 1, "q_offset": 39}, True),
}


def function_of(case: str, library: Any) -> Any:
    """A mask function of transformers."""
    place = torch.arange(40).expand(2, 40)
    causal, windowed = library.causal_mask_function, library.sliding_window_causal_mask_function(9)
    image = torch.where((place > 5) & (place < 20), 0, -1)
    if case in ("window", "a window of the cache", "by vmap"):
        return windowed
    if case == "chunks":
        return library.chunked_causal_mask_function(9, torch.tensor([0, 7]))
    if case == "packed":
        return library.and_masks(causal, library.packed_sequence_mask_function(place // 15))
    if case == "images":
        return library.or_masks(windowed, library.blockwise_overlay(image))
    return library.bidirectional_mask_function if case == "both ways" else causal


@pytest.mark.parametrize("case", MASK_CASES)
def test_masks_of_transformers_are_spans(
    case: str, masking: tuple[Any, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pairs as transformers' own mask; and never all of them at a time."""
    pytest.importorskip("transformers", minversion="5")
    library, made = masking
    sizes, padded = MASK_CASES[case]
    arguments = SIZES | sizes
    arguments |= {"mask_function": function_of(case, library), "allow_is_causal_skip": False}
    arguments["attention_mask"] = torch.arange(40) >= torch.tensor([[0], [7]]) if padded else None
    arguments["use_vmap"] = case == "by vmap"
    expected = library.sdpa_mask(**arguments)
    made.clear()
    monkeypatch.setattr(mask_intervals, "CHUNK", 400)
    mask = huggingface.model_mask(**arguments)
    assert isinstance(mask, SpansTensor)
    assert mask.spans is not None
    assert mask.shape == expected.shape
    assert max(x.numel() for x in made) <= 400
    assert torch.equal(mask.spans.visible(*expected.shape[2:]).expand(expected.shape), expected)


def test_masks_of_more_intervals_are_plain(masking: tuple[Any, list[Tensor]]) -> None:
    pytest.importorskip("transformers", minversion="5")
    mask = huggingface.model_mask(
        **SIZES, mask_function=lambda b, h, q, k: (q + k) % 3 == 0, allow_is_causal_skip=False
    )
    assert type(mask) is Tensor
    assert torch.equal(mask[1, 0], (torch.arange(40)[:, None] + torch.arange(40)) % 3 == 0)


def test_no_mask_where_transformers_makes_none(masking: tuple[Any, list[Tensor]]) -> None:
    pytest.importorskip("transformers", minversion="5")
    full = torch.ones(2, 40, dtype=torch.bool)
    assert huggingface.model_mask(**SIZES, attention_mask=full) is None
    assert not masking[1]


def test_generation_is_the_same(qwen: Any) -> None:
    prompt = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    theirs, ours = (
        qwen(name, "cpu", torch.float32).generate(prompt, **options) for name in ("sdpa", "attnforge")
    )
    assert torch.equal(theirs, ours)


def call(**rest: Any) -> Tensor:
    q, k, v = (
        torch.randn(2, heads, 20, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    mask = rest.pop("attention_mask", None)
    module = nn.Module()
    return huggingface.attention_forward(module, q, k, v, mask, **rest)[0]


def test_the_function_itself(calls: list[Any]) -> None:
    """What models call; runs without transformers."""
    assert call().shape == (2, 20, 4, 16)
    call(is_causal=False)
    call(attention_mask=torch.ones(2, 1, 20, 25, dtype=torch.bool).tril())
    assert [type(mask) for mask in calls] == [attnforge.Causal, type(None), attnforge.Spans]
    assert torch.allclose(
        call(), call(attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()), atol=1e-5
    )
    assert not torch.allclose(call(), call(scaling=1.0), atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "dropout: got 0.1"),
        ({"output_attentions": True}, "output_attentions: attnforge computes no attention weights"),
        ({"head_mask": torch.ones(4)}, "head_mask: not supported"),
        ({"block_indices": torch.zeros(2, 1, 20, 4)}, "block_indices: not supported"),
        ({"attention_mask": torch.zeros(1, 1, 20, 20), "softcap": 2.0}, "an additive mask or a bias"),
        ({"indices": torch.zeros(2, 20, 4, dtype=torch.int32)}, "indices: expected an attention_mask"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize("dense", [False, True])
def test_packed_samples_of_flash_attn_are_kept_apart(dense: bool) -> None:
    """VeOmni's collator passes a mask of ones, of which transformers makes none, and the samples as cu_seq_lens."""
    q, k, v = (
        torch.randn(1, heads, 20, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    edges = torch.tensor([0, 7, 20], dtype=torch.int32)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril() if dense else None
    ours, _ = huggingface.attention_forward(
        nn.Module(), q, k, v, mask, cu_seq_lens_q=edges, cu_seq_lens_k=edges
    )
    alone = []
    for rows in (slice(0, 7), slice(7, 20)):
        one, _ = huggingface.attention_forward(nn.Module(), q[:, :, rows], k[:, :, rows], v[:, :, rows], None)
        alone.append(one)
    assert torch.allclose(ours, torch.cat(alone, 1), atol=1e-5)
    with pytest.raises(ValueError, match="cu_seq_lens_q: given with a batch of 2"):
        call(cu_seq_lens_q=edges)


def test_caps_and_sinks_of_models(calls: list[Any]) -> None:
    """Gemma 2's softcap and gpt-oss's s_aux, as their eager attention computes them."""
    q, k, v = (
        torch.randn(2, heads, 20, 16, generator=torch.Generator().manual_seed(heads)).double()
        for heads in (4, 2, 2)
    )
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    score = 3.0 * torch.tanh(q @ k.mT / 4 / 3.0)
    score = score.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    weights = torch.cat((score, sinks.double()[None, :, None, None].expand(2, 4, 20, 1)), -1).softmax(-1)
    expected = (weights[..., :-1] @ v).transpose(1, 2)
    torch.testing.assert_close(call(softcap=3.0, s_aux=sinks).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_an_additive_mask(hidden: float) -> None:
    """Added to the scores; keys hidden by it are never seen, even by a row that sees no other."""
    visible = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    visible[1, :, :, :3] = False
    added = torch.randn(2, 1, 20, 20, generator=torch.Generator().manual_seed(5))
    alone = call(attention_mask=torch.zeros(1, 1, 1, 20).masked_fill(~visible[:, :, -1:], hidden))
    assert torch.allclose(
        alone, call(attention_mask=visible[:, :, -1:]), atol=1e-5
    )  # one row for all queries
    out = call(attention_mask=added.masked_fill(~visible, hidden))
    assert torch.allclose(
        out, call(attention_mask=visible, position_bias=added.expand(2, 4, 20, 20)), atol=1e-5
    )
    assert not torch.allclose(out, call(attention_mask=visible), atol=1e-2)
    assert out[1, :3].eq(0).all()


def test_a_position_bias() -> None:
    """T5's, with a gradient, in a causal call whose cache has room for more keys."""
    bias = torch.randn(1, 4, 20, 26, generator=torch.Generator().manual_seed(6), requires_grad=True)
    q, k, v = (torch.randn(2, 4, n, 16, generator=torch.Generator().manual_seed(n)) for n in (20, 26, 27))
    out = huggingface.attention_forward(nn.Module(), q, k, v[:, :, :26], None, 1.0, position_bias=bias)[0]
    hidden = ~torch.ones(20, 26, dtype=torch.bool).tril()
    scores = (q @ k.mT + bias).double().masked_fill(hidden, -torch.inf)
    expected = (scores.softmax(-1) @ v[:, :, :26].double()).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    (mine,), (answer,) = (torch.autograd.grad(x.square().sum(), bias) for x in (out, expected))
    torch.testing.assert_close(mine, answer, atol=1e-4, rtol=1e-4)


def operands(device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v (2, 4, 130, 64) with gradients; odd lengths of tiles."""
    made = torch.randn(3, 2, 4, 130, 64, generator=torch.Generator().manual_seed(2))
    return [x.to(device, dtype).requires_grad_() for x in made]


def eager(inputs: list[Tensor], visible: Tensor, scale: float, added: Tensor) -> Tensor:
    """Attention as models write it, (B, Sq, H, D); rows that see no key are zeros."""
    q, k, v = inputs
    scores = (q @ k.mT * scale + added).masked_fill(~visible, -1e30)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)) * visible
    return (weights.to(q.dtype) @ v).transpose(1, 2)


def expect_as_exact(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: list[Tensor],
) -> None:
    """The result of `ours` and its gradients: no further off than those of `theirs` in the same dtype."""
    results = []
    for function, dtype in ((theirs, torch.float64), (theirs, inputs[0].dtype), (ours, inputs[0].dtype)):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*given)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        results.append([out.detach(), *torch.autograd.grad(out, given, up)])
    for number, (exact, peer, mine) in enumerate(zip(*results, strict=True)):
        assert mine.isfinite().all(), number
        bound = max(RATIO[inputs[0].dtype] * error(peer, exact), 1e-6)
        assert error(mine, exact) <= bound, (
            f"{number}: {error(mine, exact):.1e}, eager {error(peer, exact):.1e}"
        )


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_a_position_bias_and_padding(device: str, dtype: torch.dtype, calls: list[Any]) -> None:
    """An encoder's of T5: one bias for the batch, with a gradient, and a bool mask for each entry."""
    visible = (torch.arange(130) < torch.tensor([[130], [77]]))[:, None, None].to(device)
    visible = visible.expand(-1, -1, 130, -1)
    table = torch.randn(1, 4, 130, 130, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    expect_as_exact(
        lambda q, k, v, added: huggingface.attention_forward(
            nn.Module(), q, k, v, visible, 0.1, is_causal=False, position_bias=added
        )[0],
        lambda q, k, v, added: eager([q, k, v], visible, 0.1, added),
        [*operands(device, dtype), table],
    )
    assert [type(mask) for mask in calls] == [attnforge.Spans]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("infinite", [False, True])
def test_an_additive_mask_that_hides_rows(infinite: bool, device: str, dtype: torch.dtype) -> None:
    """Left padding: rows that see no key give zeros and finite gradients."""
    visible = torch.ones(2, 1, 130, 130, dtype=torch.bool).tril()
    visible[1, :, :, :70] = False
    visible = visible.to(device)
    hidden = -torch.inf if infinite else torch.finfo(dtype).min
    mask = torch.zeros(2, 1, 130, 130, dtype=dtype, device=device).masked_fill(~visible, hidden)
    zero = torch.zeros((), device=device)
    expect_as_exact(
        lambda q, k, v: huggingface.attention_forward(nn.Module(), q, k, v, mask, 0.1)[0],
        lambda q, k, v: eager([q, k, v], visible, 0.1, zero.to(q)),
        operands(device, dtype),
    )
    q, k, v = operands(device, dtype)
    out = huggingface.attention_forward(nn.Module(), q, k, v, mask, 0.1)[0]
    assert out[1, :70].eq(0).all()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("padded", [False, True])
def test_alibi_of_models(padded: bool, device: str, dtype: torch.dtype, calls: list[Any]) -> None:
    """Slopes of a causal call; with padding, as Bloom has it, a bias for each key and a bool mask."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    visible = torch.ones(2, 1, 130, 130, dtype=torch.bool, device=device).tril()
    place = torch.arange(130, device=device)
    lines = slopes[:, None, None] * place  # (H, 1, Sk)
    if padded:
        visible[1, :, :, :7] = False
        place = torch.stack((place, (place - 7).clamp(min=0)))
        lines = slopes[:, None, None] * place[:, None, None]  # (B, H, 1, Sk)
    given: dict[str, Any] = (
        {"attention_mask": visible, "position_bias": lines.to(dtype)}
        if padded
        else {"attention_mask": None, "alibi_slopes": slopes, "is_causal": True}
    )
    # Eager attention in 16 bits rounds the lines; relative to the row's last key they are small where it matters.
    row = torch.arange(130, device=device)[:, None]
    moved = slopes[:, None, None] * (torch.arange(130, device=device) - row)
    expected = lines.to(dtype) if padded else moved
    expect_as_exact(
        lambda q, k, v: huggingface.attention_forward(nn.Module(), q, k, v, scaling=0.1, **given)[0],
        lambda q, k, v: eager([q, k, v], visible, 0.1, expected.to(q.dtype)),
        operands(device, dtype),
    )
    assert [type(mask) for mask in calls] == [attnforge.Spans if padded else attnforge.Causal]


def test_keys_of_an_indexer() -> None:
    """DeepSeek V3.2's: of the visible keys, those that `indices` names."""
    visible = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    indices = torch.rand(2, 20, 20, generator=torch.Generator().manual_seed(7)).argsort(-1)[..., :6].int()
    chosen = torch.zeros(2, 20, 20, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    expected = call(attention_mask=visible & chosen)
    assert torch.equal(call(attention_mask=visible, indices=indices), expected)
    added = torch.zeros(2, 1, 20, 20).masked_fill(~visible, -torch.inf)
    assert torch.allclose(call(attention_mask=added, indices=indices), expected, atol=1e-5)


def test_one_query_for_a_batch() -> None:
    """Learned queries of batch 1 beside keys of a batch, as SDPA broadcasts them."""
    q, k, v = (
        torch.randn(n, 4, 20, 16, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((1, 3, 3))
    )
    outs = [
        huggingface.attention_forward(nn.Module(), x, k, v, None, is_causal=False)[0]
        for x in (q, q.repeat(3, 1, 1, 1))
    ]
    assert torch.equal(*outs)


@pytest.fixture
def masks_made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that transformers' sdpa_mask gets; a module stands in for transformers'."""
    made: list[dict[str, Any]] = []
    library = ModuleType("transformers.masking_utils")
    library.sdpa_mask = lambda **named: made.append(named)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return made


def config_of(name: str, **fields: Any) -> Any:
    return type("Config", (SimpleNamespace,), {"__module__": f"models.configuration_{name}"})(**fields)


def test_masks_of_models_whose_attention_is_their_own(
    masks_made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would add a bool mask to their scores, as XGLM does."""

    def define(name: str, **members: Any) -> Any:
        model = ModuleType(f"models.modeling_{name}")
        own = type("OwnAttention", (nn.Module,), {"__module__": model.__name__, "forward": print})
        vars(model).update(
            {"OwnAttention": own} if members.pop("own") else {"TheirAttention": nn.Module}, **members
        )
        monkeypatch.setitem(sys.modules, model.__name__, model)
        return config_of(name)

    audio = type("Gemma4AudioConfig", (), {})()
    mixed = define("informer", own=False, InformerProbSparseAttention=nn.Module, ALL_ATTENTION_FUNCTIONS={})
    define("blip_text", own=True)
    refused = [
        ("Own", define("xglm", own=True)),
        ("Own", config_of("blip")),
        ("Gemma4Audio", audio),
        ("InformerProbSparse", mixed),
    ]
    for name, config in refused:
        with pytest.raises(
            ValueError, match=f"attn_implementation: {name}Attention computes attention itself"
        ):
            huggingface.model_mask(config=config)
    interface = define("llama", own=True, ALL_ATTENTION_FUNCTIONS={})
    for config in (interface, define("paligemma", own=False), config_of("unknown"), None):
        huggingface.model_mask(config=config)
    assert len(masks_made) == 4


def test_gemma_4_always_has_a_mask(masks_made: list[dict[str, Any]]) -> None:
    """Its layers that share keys drop queries, of which a causal mask would take the first for the first keys'."""
    for shared in (0, 2):
        huggingface.model_mask(
            config=config_of("gemma4", num_kv_shared_layers=shared), allow_is_causal_skip=True
        )
    assert [named["allow_is_causal_skip"] for named in masks_made] == [True, False]


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    attnforge.register_huggingface()
    config = transformers.XGLMConfig(
        vocab_size=64, d_model=64, ffn_dim=64, num_layers=1, attention_heads=4, max_position_embeddings=32
    )
    model = transformers.XGLMForCausalLM._from_config(config, attn_implementation="attnforge")
    with pytest.raises(ValueError, match="attn_implementation: XGLMAttention computes attention itself"):
        model(torch.ones(1, 8, dtype=torch.long))


ALIBI_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, whose numbers are right, sizes
    "bloom": ("Bloom", "eager", {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "mpt": ("Mpt", "eager", {"d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}),
    "falcon": (
        "Falcon",
        "sdpa",  # eager adds the biases twice
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True},
    ),
    "falcon-rope": (
        "Falcon",
        "sdpa",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    ),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ALIBI_MODELS)
def test_models_with_alibi_are_the_same(name: str, padded: bool, calls: list[Any]) -> None:
    """Six heads, whose slopes are no powers of two. Padding also between tokens, which positions do not count."""
    transformers = pytest.importorskip("transformers", minversion="5")
    attnforge.register_huggingface()
    prefix, peer, sizes = ALIBI_MODELS[name]
    tokens = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(2, 20, dtype=torch.long)
    if padded:
        seen[0, 15:], seen[1, 5:8] = 0, 0
    results = []
    for implementation in ("attnforge", peer):
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(vocab_size=64, **sizes)
        model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(
            config, attn_implementation=implementation
        )
        output = model(
            input_ids=tokens,
            attention_mask=seen if padded else None,
            labels=tokens.masked_fill(seen == 0, -100),
            use_cache=False,
        )
        output.loss.backward()
        answers = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        answers["logits"] = output.logits.detach()[seen.bool()]
        answers["next"] = model.eval().generate(
            tokens[:, :7], attention_mask=seen[:, :7], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        results.append(answers)
    assert calls
    assert type(calls[0]) is (attnforge.Causal if name == "bloom" and not padded else attnforge.Spans)
    assert calls[0] is calls[1] or type(calls[0]) is attnforge.Causal
    for key, mine in results[0].items():
        if key == "next":
            assert torch.equal(mine, results[1][key])
        else:
            assert error(mine, results[1][key]) < 1e-4, key


def test_a_model_with_alibi_changes_its_implementation() -> None:
    """Its attention modules have no config: the model gives it to them, or our mask would reach their own code."""
    transformers = pytest.importorskip("transformers", minversion="5")
    attnforge.register_huggingface()
    config = transformers.MptConfig(vocab_size=64, d_model=64, n_layers=1, n_heads=4, max_seq_len=32)
    model = transformers.MptModel(config).eval()
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    outs = []
    for name in ("eager", "attnforge"):
        model.config._attn_implementation = name
        outs.append(model(tokens).last_hidden_state.detach())
    assert error(outs[1], outs[0]) < 1e-4


def test_models_with_alibi_when_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run their own attention with its own mask: a bool mask would be added to the scores."""
    transformers = pytest.importorskip("transformers", minversion="5")
    masking = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masking, "eager_mask", lambda *_, **named: "eager")
    monkeypatch.setattr(masking, "sdpa_mask", lambda *_, **named: "sdpa")
    from transformers.models.xglm import modeling_xglm

    assert modeling_xglm.XGLMAttention
    assert huggingface.torch_mask(config=transformers.XGLMConfig()) == "eager"
    assert huggingface.torch_mask(config=transformers.LlamaConfig()) == "sdpa"


def test_t5_is_the_same() -> None:
    """Relative biases of encoder and decoder, padding, and cross attention."""
    transformers = pytest.importorskip("transformers", minversion="5")
    attnforge.register_huggingface()
    tokens = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    padding = (torch.arange(20) < torch.tensor([[20], [13]])).long()
    results = []
    for implementation in ("eager", "attnforge"):
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration._from_config(
            config, attn_implementation=implementation
        )
        output = model(input_ids=tokens, attention_mask=padding, labels=tokens[:, :9].contiguous())
        output.loss.backward()
        table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        results.append((output.logits.detach(), table))
    for mine, answer in zip(results[1], results[0], strict=True):
        assert error(mine, answer) < 1e-4
