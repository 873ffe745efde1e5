"""The attention shapes of models that people train, BAGEL's first. `--model NAME` takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One attention layer's shape; the softmax scale is head_dim ** -0.5.

    `source`: where the numbers are from, "repository: fields" for a config.json on huggingface.co. `mask`: what the
    layer is trained with, as --mask takes it, or "bagel" for BAGEL's packs.
    """

    name: str
    heads_q: int
    heads_kv: int
    head_dim: int
    layers: int
    text: str
    source: str = ""
    mask: str = "bagel"
    head_dim_v: int = 0  # 0: head_dim

    @property
    def heads(self) -> str:
        """`28/4/128`, or `128/128/192/128` where v has a head_dim of its own."""
        dims = f"{self.heads_q}/{self.heads_kv}/{self.head_dim}"
        return f"{dims}/{self.head_dim_v}" if self.head_dim_v else dims


_GQA = "num_attention_heads, num_key_value_heads, head_dim, num_hidden_layers"
_HIDDEN = "num_attention_heads, num_key_value_heads, hidden_size / num_attention_heads, num_hidden_layers"
_MLA = "num_attention_heads, qk_nope_head_dim + qk_rope_head_dim, v_head_dim, num_hidden_layers"
_VISION = "vision_config: num_attention_heads, hidden_size / num_attention_heads, num_hidden_layers"
_DIFFUSERS = "transformer: num_attention_heads, attention_head_dim, layers"

MODELS = {
    model.name: model
    for model in (
        Model("7B", 28, 4, 128, 28, "BAGEL-7B-MoT (Qwen2.5-7B)", f"Qwen/Qwen2.5-7B: {_HIDDEN}"),
        Model("1.5B", 12, 2, 128, 28, "Qwen2.5-1.5B", f"Qwen/Qwen2.5-1.5B: {_HIDDEN}"),
        Model(
            "0.5B", 14, 2, 64, 24, "Qwen2.5-0.5B (the repository's default)", f"Qwen/Qwen2.5-0.5B: {_HIDDEN}"
        ),
        Model(
            "vit",
            16,
            16,
            72,
            26,
            "SigLIP so400m/14: every image attends to itself, both ways",
            f"google/siglip-so400m-patch14-384: {_VISION}; BAGEL leaves out the last of 27 layers",
        ),
        # Language models
        Model("qwen3-0.6b", 16, 8, 128, 28, "Qwen3-0.6B", f"Qwen/Qwen3-0.6B: {_GQA}", "causal"),
        Model("qwen3-4b", 32, 8, 128, 36, "Qwen3-4B, Qwen3-8B", f"Qwen/Qwen3-8B: {_GQA}", "causal"),
        Model("qwen3-14b", 40, 8, 128, 40, "Qwen3-14B", f"Qwen/Qwen3-14B: {_GQA}", "causal"),
        Model("qwen3-32b", 64, 8, 128, 64, "Qwen3-32B", f"Qwen/Qwen3-32B: {_GQA}", "causal"),
        Model("qwen3-30b-a3b", 32, 4, 128, 48, "Qwen3-30B-A3B", f"Qwen/Qwen3-30B-A3B: {_GQA}", "causal"),
        Model("llama3-1b", 32, 8, 64, 16, "Llama 3.2 1B", f"meta-llama/Llama-3.2-1B: {_GQA}", "causal"),
        Model("llama3-8b", 32, 8, 128, 32, "Llama 3.1 8B", f"meta-llama/Llama-3.1-8B: {_HIDDEN}", "causal"),
        Model(
            "llama3-70b", 64, 8, 128, 80, "Llama 3.1 70B", f"meta-llama/Llama-3.1-70B: {_HIDDEN}", "causal"
        ),
        Model(
            "gpt-oss-20b",
            64,
            8,
            64,
            24,
            "gpt-oss-20b: every second layer is causal; sinks run the same kernels",
            f"openai/gpt-oss-20b: {_GQA}, sliding_window",
            "window:128",
        ),
        Model(
            "gpt-oss-120b",
            64,
            8,
            64,
            36,
            "gpt-oss-120b, likewise",
            f"openai/gpt-oss-120b: {_GQA}, sliding_window",
            "window:128",
        ),
        Model(
            "deepseek-v3",
            128,
            128,
            192,
            61,
            "DeepSeek-V3: multi-head latent attention as it is trained",
            f"deepseek-ai/DeepSeek-V3: {_MLA}",
            "causal",
            128,
        ),
        Model(
            "deepseek-v2-lite",
            16,
            16,
            192,
            27,
            "DeepSeek-V2-Lite, likewise",
            f"deepseek-ai/DeepSeek-V2-Lite: {_MLA}",
            "causal",
            128,
        ),
        # Vision encoders and diffusion transformers
        Model(
            "siglip",
            16,
            16,
            72,
            27,
            "SigLIP so400m/14",
            f"google/siglip-so400m-patch14-384: {_VISION}",
            "full",
        ),
        Model(
            "siglip-base",
            12,
            12,
            64,
            12,
            "SigLIP base/16",
            f"google/siglip-base-patch16-224: {_VISION}",
            "full",
        ),
        Model(
            "qwen2.5-vl",
            16,
            16,
            80,
            32,
            "Qwen2.5-VL's vision encoder: full attention in 4 layers, in windows of 112 x 112 pixels in the others",
            "Qwen/Qwen2.5-VL-7B-Instruct: vision_config: num_heads, hidden_size / num_heads, depth",
            "full",
        ),
        Model(
            "dit-xl", 16, 16, 72, 28, "DiT-XL/2", f"facebook/DiT-XL-2-256: {_DIFFUSERS} (num_layers)", "full"
        ),
        Model(
            "sd3",
            24,
            24,
            64,
            24,
            "Stable Diffusion 3 medium",
            f"stabilityai/stable-diffusion-3-medium-diffusers: {_DIFFUSERS} (num_layers)",
            "full",
        ),
        Model(
            "flux",
            24,
            24,
            128,
            57,
            "FLUX.1",
            f"black-forest-labs/FLUX.1-dev: {_DIFFUSERS} (num_layers 19 + num_single_layers 38)",
            "full",
        ),
        Model(
            "wan-14b",
            40,
            40,
            128,
            40,
            "Wan2.1 14B (self-attention)",
            f"Wan-AI/Wan2.1-T2V-14B-Diffusers: {_DIFFUSERS} (num_layers)",
            "full",
        ),
    )
}
