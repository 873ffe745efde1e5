"""A transformers model on our kernels beside the same model on SDPA; needs `pip install transformers`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime.integrations import huggingface

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
    assert {type(mask) for mask in calls} == {attnforge.Causal if case == "causal" else attnforge.DenseMask}
    for name, answer in exact.items():
        mine, peer = error(ours[name], answer), error(theirs[name], answer)
        assert mine <= RATIO[dtype] * peer, f"{name}: error {mine:.1e}, SDPA's {peer:.1e}"


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
    assert [type(mask) for mask in calls] == [attnforge.Causal, type(None), attnforge.DenseMask]
    assert torch.allclose(
        call(), call(attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()), atol=1e-5
    )
    assert not torch.allclose(call(), call(scaling=1.0), atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "dropout: got 0.1"),
        ({"position_bias": torch.zeros(4)}, "position_bias: not supported"),
        ({"attention_mask": torch.zeros(1, 1, 20, 20)}, "an additive mask"),
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
