"""A small decoder as BAGEL trains it: a pack's text, vision and latent tokens in, two losses out.

    ce      text: cross-entropy of the next token
    mse     noise images: squared error of the predicted flow `noise - clean` (rectified flow)

The image encoders are outside: vision tokens come as SigLIP's features, latents as the VAE's patches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnforge.bagel.mot.attention import Operator
from attnforge.bagel.mot.layer import Experts, MotConfig, MotLayer, Pair, Shared, share, together
from attnforge.bagel.packing import cut

_TIME_DIM = 256


@dataclass(frozen=True)
class Pack:
    """One micro-batch of T tokens. Rows are int64 indices into the pack; each row is text, vision or latent.

    sample_lens, split_lens, attn_modes: see packing.py; no padding. positions (T): for rotary embeddings.
    text_ids, text_rows (Nt). vision (Nv, vision_dim) with vision_rows, vision_places (Nv).
    latents (Nl, latent_dim), clean, with latent_rows, latent_places (Nl); noise like latents; times (Nl): how much
    of it is mixed in, 0 in a clean image and above 0 in one to be denoised. Places are positions inside an image.
    labels (Nc): the text token after each row of label_rows (Nc).
    """

    sample_lens: tuple[int, ...]
    split_lens: tuple[int, ...]
    attn_modes: tuple[str, ...]
    positions: Tensor
    text_ids: Tensor
    text_rows: Tensor
    vision: Tensor
    vision_rows: Tensor
    vision_places: Tensor
    latents: Tensor
    latent_rows: Tensor
    latent_places: Tensor
    noise: Tensor
    times: Tensor
    labels: Tensor
    label_rows: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.sample_lens)

    def to(self, device: torch.device) -> Pack:
        """The pack with its tensors on `device`."""
        tensors: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)


class Losses(NamedTuple):
    """Sums, float32, over this pack's labels and noise tokens; the caller averages over all packs of the batch."""

    ce: Tensor
    mse: Tensor


def rope_positions(
    sample_lens: Sequence[int], split_lens: Sequence[int], attn_modes: Sequence[str]
) -> Tensor:
    """Positions int64 (T): text counts on, an image has one position for all its tokens.

    A noise image does not advance the count: its clean copy, where one follows, has the same place.
    """
    parts: list[Tensor] = []
    sample, position = -1, 0
    for split in cut(sample_lens, split_lens, attn_modes):
        if split.sample != sample:
            sample, position = split.sample, 0
        length = split.end - split.start
        if split.mode == "causal":
            parts.append(torch.arange(position, position + length))
            position += length
        else:
            parts.append(torch.full((length,), position))
            position += split.mode == "full"
    return torch.cat(parts)


class TimeEmbedding(nn.Module):
    """times (N) in [0, 1] to (N, hidden): cosines and sines of 128 frequencies, then an MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(_TIME_DIM, hidden)
        self.outer = nn.Linear(hidden, hidden)

    def forward(self, times: Tensor) -> Tensor:
        half = _TIME_DIM // 2
        frequency = torch.exp(-math.log(1e4) / half * torch.arange(half, device=times.device))
        angle = 1e3 * times.float()[:, None] * frequency
        wave = torch.cat((angle.cos(), angle.sin()), 1).to(self.inner.weight.dtype)
        result: Tensor = self.outer(F.silu(self.inner(wave)))
        return result


class MotModel(nn.Module):
    """Embeddings of the three kinds of token, the layers, and the two heads."""

    def __init__(self, config: MotConfig, operator: Operator) -> None:
        super().__init__()
        self.config = config
        self.operator = operator
        self.text_in = nn.Embedding(config.vocab, config.hidden)
        self.vision_in = nn.Sequential(
            nn.Linear(config.vision_dim, config.hidden),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.hidden, config.hidden),
        )
        self.latent_in = nn.Linear(config.latent_dim, config.hidden)
        self.place = nn.Embedding(config.places, config.hidden)
        self.time = TimeEmbedding(config.hidden)
        self.layers = nn.ModuleList(MotLayer(config, operator) for _ in range(config.layers))
        self.norm = Experts(lambda: nn.RMSNorm(config.hidden, config.eps))
        self.text_out = nn.Linear(config.hidden, config.vocab, bias=False)
        self.latent_out = nn.Linear(config.hidden, config.latent_dim)
        self.apply(_initialise)
        nn.init.zeros_(self.latent_out.weight)  # the first prediction is zero flow

    def forward_train(self, pack: Pack) -> Losses:
        """The losses of one pack, on this module's device."""
        shared = self._share(pack)
        x = self._embed(pack)
        for layer in self.layers:
            x = layer(x, shared)
        x = self.norm(x)
        logits = self.text_out(together(x, shared).index_select(0, pack.label_rows))
        ce = F.cross_entropy(logits.float(), pack.labels, reduction="sum")
        noisy = pack.times > 0
        flow = self.latent_out(x[1]).float()
        error = (flow - (pack.noise - pack.latents)).square().mean(1)
        return Losses(ce, torch.where(noisy, error, 0.0).sum())

    forward = forward_train  # what FSDP wraps

    def _share(self, pack: Pack) -> Shared:
        mask = self.operator.mask(pack.sample_lens, pack.split_lens, pack.attn_modes, pack.positions.device)
        understanding = torch.cat((pack.text_rows, pack.vision_rows))
        return share(understanding, pack.latent_rows, pack.positions, self.config, mask)

    def _embed(self, pack: Pack) -> Pair:
        """The rows of both experts, in the order of `_share`."""
        # FSDP's mixed precision casts weights, but not tensors inside a Pack.
        dtype = self.latent_in.weight.dtype
        times = pack.times[:, None]
        noised = ((1 - times) * pack.latents + times * pack.noise).to(dtype)
        text = self.text_in(pack.text_ids)
        vision = self.vision_in(pack.vision.to(dtype)) + self.place(pack.vision_places)
        latent = self.latent_in(noised) + self.time(pack.times) + self.place(pack.latent_places)
        return torch.cat((text, vision)), latent


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
