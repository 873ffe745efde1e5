"""The attention shapes of the models that BAGEL trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One attention layer's shape; the softmax scale is head_dim ** -0.5."""

    name: str
    heads_q: int
    heads_kv: int
    head_dim: int
    layers: int
    text: str


MODELS = {
    model.name: model
    for model in (
        Model("7B", 28, 4, 128, 28, "BAGEL-7B-MoT (Qwen2.5-7B)"),
        Model("1.5B", 12, 2, 128, 28, "Qwen2.5-1.5B"),
        Model("0.5B", 14, 2, 64, 24, "Qwen2.5-0.5B, the repository's default"),
        Model("vit", 16, 16, 72, 26, "SigLIP so400m/14: every image attends to itself, both ways"),
    )
}
