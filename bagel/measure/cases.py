"""Names to cases: a pack or a dense shape, with a model's heads, in a dtype, on a device."""

from __future__ import annotations

import random
import re

import torch

from attnforge.bagel.measure.blocks import LENGTH, random_blocks
from attnforge.bagel.models import MODELS, Model
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.workloads import names, summary, workload
from attnforge.codegen.spec import DType
from attnforge.runtime.search.case import Case, causal_case, full_case

_IMAGES = re.compile(r"images/(\d+)")
IMAGE_TOKENS, IMAGE_SIZES = 8 * 4096, (256, 4900)  # in all, and of one image in the vision encoder
_HEADS = re.compile(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)")
_DENSE = re.compile(r"(full|causal)/(?:([1-9]\d*)x)?([1-9]\d*)")
_BLOCKS = re.compile(r"blocks/(0?\.\d+)(?:/([1-9]\d*))?")

# (pack, model) rows of `bench`, by suite and kind of device: a GPU's milliseconds are a CPU's seconds.
SUITES = {
    ("search", "cuda"): (("pretrain/0", "7B"), ("finetune/0", "7B")),
    ("search", "cpu"): (("finetune/0", "0.5B"),),
    ("dense", "cuda"): (
        ("full/4x8192", "7B"),
        ("causal/4x8192", "7B"),
        ("full/16x2048", "7B"),
        ("causal/16x2048", "7B"),
        ("full/4x8192", "0.5B"),
        ("causal/4x8192", "0.5B"),
    ),
    ("dense", "cpu"): (("full/2048", "0.5B"), ("causal/2048", "0.5B"), ("full/1024", "7B")),
    ("packs", "cuda"): (
        ("pretrain/0", "7B"),
        ("pretrain/1", "7B"),
        ("finetune/0", "7B"),
        ("finetune/0", "0.5B"),
        ("t2i_lowres/0", "7B"),
        ("vlm_only/0", "7B"),
        ("edit_only/0", "7B"),
        ("pretrain/0", "vit"),
    ),
    ("packs", "cpu"): (("finetune/0", "0.5B"),),
}


def make_case(pack: str, model: str, dtype: DType, device: torch.device) -> Case:
    """The case called `pack`: a workload ("pretrain/0") or a dense shape ("full/4x8192", "causal/2048").

    "packs.jsonl:7" is line 7 of a recorded file, "images/3" random images, 8 x 4096 tokens in all, each of which
    sees itself. "blocks/0.9" is a dense mask of 8192 x 8192 pairs, of whose blocks of 128 x 128 a random 90 % are
    hidden, "blocks/0.9/2048" a smaller one. With model "vit" a workload stands for its images in the vision encoder;
    a model may also be given as its heads, "8/8/64". Raises ValueError for names that do not exist.
    """
    heads = _heads(model)
    name = f"{pack} {model}"
    if match := _DENSE.fullmatch(pack):
        make = full_case if match[1] == "full" else causal_case
        shape = (int(match[2] or 1), heads.heads_q, heads.heads_kv, int(match[3]), heads.head_dim)
        return make(name, shape, dtype, device)
    if match := _BLOCKS.fullmatch(pack):
        return _blocks_case(name, float(match[1]), int(match[2] or LENGTH), heads, dtype, device)
    if pack not in names() and ".jsonl:" not in pack and not _IMAGES.fullmatch(pack):
        raise ValueError(
            f"pack: there is no {pack!r}; packs are {summary()}; others are packs.jsonl:7 (a line of a recorded file), "
            "images/0, full/4x8192, causal/2048, blocks/0.9"
        )
    if match := _IMAGES.fullmatch(pack):
        lengths = _image_lengths(int(match[1]))
        mask = PackedMask(lengths, lengths, ["full"] * len(lengths), device)
    else:
        mask = workload(pack).vit_mask(device) if model == "vit" else workload(pack).mask(device)
    length = mask.starts.numel()
    return Case(
        name,
        1,
        heads.heads_q,
        heads.heads_kv,
        length,
        length,
        heads.head_dim,
        dtype,
        mask,
        mask.pairs,
        device,
    )


def _blocks_case(
    name: str, sparsity: float, length: int, heads: Model, dtype: DType, device: torch.device
) -> Case:
    mask = random_blocks(sparsity, length, device)
    pairs = int(mask.mask.sum())
    shape = (1, heads.heads_q, heads.heads_kv, length, length, heads.head_dim)
    return Case(name, *shape, dtype, mask, pairs, device)


def _heads(model: str) -> Model:
    if match := _HEADS.fullmatch(model):
        return Model(model, int(match[1]), int(match[2]), int(match[3]), 1, "heads as given")
    if model not in MODELS:
        raise ValueError(
            f"model: there is no {model!r}; models are {', '.join(MODELS)}, or heads and head_dim such as 8/8/64"
        )
    return MODELS[model]


def _image_lengths(seed: int) -> list[int]:
    """Tokens of each image: uniform in IMAGE_SIZES, the last cut off at IMAGE_TOKENS."""
    draw = random.Random(seed)
    lengths, rest = [], IMAGE_TOKENS
    while rest:
        lengths.append(min(rest, draw.randint(*IMAGE_SIZES)))
        rest -= lengths[-1]
    return lengths
