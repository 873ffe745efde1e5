"""A small Qwen3 built by VeOmni, with the attention that a YAML file names, beside the same on eager attention."""

from __future__ import annotations

import dataclasses
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault(
    "USE_HUB_KERNELS", "0"
)  # some versions of `kernels` refuse what VeOmni's models decorate

YAML = """
ops_implementation:
  attn_implementation: {name}
  moe_implementation: eager
  cross_entropy_loss_implementation: eager
  rms_norm_implementation: eager
  swiglu_mlp_implementation: eager
  rotary_pos_emb_implementation: eager
  load_balancing_loss_implementation: eager
"""
EDGES = [0, 9, 30, 48]


def parsed(folder: Path, name: str) -> Any:
    """OpsImplementationConfig, through VeOmni's parser of YAML files and command lines."""
    from veomni.arguments import OpsImplementationConfig, parse_args

    @dataclasses.dataclass
    class Arguments:
        ops_implementation: OpsImplementationConfig = dataclasses.field(
            default_factory=OpsImplementationConfig
        )

    Arguments.__annotations__["ops_implementation"] = (
        OpsImplementationConfig  # the parser cannot see a local name
    )
    file = folder / f"{name}.yaml"
    file.write_text(YAML.format(name=name))
    sys.argv = ["train.py", str(file), "--ops_implementation.attn_implementation", name]
    return parse_args(Arguments).ops_implementation


def built(folder: Path, name: str, window: int | None) -> Any:
    from transformers import Qwen3Config
    from veomni.models.auto import build_foundation_model

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, use_sliding_window=window is not None,
        sliding_window=window, max_window_layers=1, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = build_foundation_model(
        config, torch_dtype="float32", init_device="cpu", ops_implementation=parsed(folder, name)
    )
    return model.train()


def step(model: Any, packed: bool) -> tuple[torch.Tensor, ...]:
    """Logits and gradients, with the arguments that VeOmni's collator passes; eager needs positions for the samples."""
    tokens = torch.randint(1, 64, (1, EDGES[-1]), generator=torch.Generator().manual_seed(1))
    lengths = [b - a for a, b in pairwise(EDGES)] if packed else [EDGES[-1]]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    named: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    if model.config._attn_implementation != "eager":
        edges = torch.tensor(EDGES if packed else [0, EDGES[-1]], dtype=torch.int32)
        named |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 21, "max_length_k": 21}
        named["attention_mask"] = torch.ones_like(tokens)
    hidden = model.model(input_ids=tokens, **named).last_hidden_state
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden * weights).sum().backward()
    return hidden.detach(), *(p.grad for p in model.model.parameters() if p.grad is not None)


def vision(name: str) -> tuple[torch.Tensor, ...]:
    """Output and gradients of Qwen3-VL's vision attention on three images, whose ends it gets as cu_seqlens."""
    from transformers import Qwen3VLVisionConfig
    from veomni.models.transformers.qwen3_vl.generated.patched_modeling_qwen3_vl_gpu import (
        Qwen3VLVisionAttention,
    )

    config = Qwen3VLVisionConfig(hidden_size=64, num_heads=4)
    config._attn_implementation = name
    torch.manual_seed(0)
    attention: Any = Qwen3VLVisionAttention(config)
    x = torch.randn(EDGES[-1], 64)
    angles = torch.randn(EDGES[-1], 8).repeat(1, 2)
    edges = torch.tensor(EDGES, dtype=torch.int32)
    out = attention(x, edges, 21, position_embeddings=(angles.cos(), angles.sin()))
    out.square().sum().backward()
    return out.detach(), *(p.grad for p in attention.parameters())


def expect_close(ours: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> None:
    assert len(ours) == len(exact) > 4
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 * float(b.abs().max()), rtol=1e-4)


def main() -> None:
    import attnforge
    from attnforge.runtime.integrations import huggingface
    from attnforge.runtime.integrations.veomni import FULL_NAME

    folder = Path(sys.argv[1])
    attnforge.register_veomni()
    module: Any = huggingface
    masks: list[Any] = []
    attention = module.attention

    def spy(q: Any, k: Any, v: Any, mask: Any = None, **rest: Any) -> Any:
        masks.append(mask)
        return attention(q, k, v, mask, **rest)

    module.attention = spy
    for window in (None, 7):
        for packed in (False, True):
            ours, theirs = built(folder, "attnforge", window), built(folder, "eager", window)
            assert ours.config._attn_implementation == FULL_NAME
            theirs.load_state_dict(ours.state_dict())
            expect_close(step(ours, packed), step(theirs, packed))
    assert {type(mask) for mask in masks} == {attnforge.Spans}
    assert len(masks) == 8
    expect_close(vision(FULL_NAME), vision("eager"))
    assert len(masks) == 9  # one call for all images
    print("the models agree")


if __name__ == "__main__":
    main()
