"""Names to cases: a pack or a dense shape, with a model's heads, in a dtype, on a device."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import torch

from attnforge.bagel.measure.blocks import LENGTH, random_blocks
from attnforge.bagel.measure.mask_files import is_mask_file, read_mask, visible_pairs
from attnforge.bagel.models import MODELS, Model
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.workloads import names, summary, workload
from attnforge.codegen.spec import DType
from attnforge.runtime import mask_patterns
from attnforge.runtime.inputs import MAX_HEAD_DIM, expect_rows
from attnforge.runtime.masks import Causal, DenseMask, Spans
from attnforge.runtime.search.case import Case

_SEQUENCES = re.compile(r"(images|documents)/(\d+)")
TOKENS = 8 * 4096  # of random images or documents, in all
# Tokens of one image in the vision encoder, and of one document.
IMAGE_SIZES, DOCUMENT_SIZES = (256, 4900), (256, 8192)
_HEADS = re.compile(r"([1-9]\d*)/([1-9]\d*)/([1-9]\d*)(?:/([1-9]\d*))?")
_DENSE = re.compile(r"(full|causal|window:[1-9]\d*)/(?:([1-9]\d*)x)?([1-9]\d*)(?:/([1-9]\d*))?")
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
    """The case called `pack`: a workload ("pretrain/0") or a shape ("full/4x8192", "causal/2048", "window:512/8192").

    A shape is a mask and batch x queries, "causal/2x512/8192" also keys; "window:512" is causal, of 512 keys.
    "packs.jsonl:7" is line 7 of a recorded file, "mask.npy" a file of `mask_files.read_mask`, "images/3" random images,
    8 x 4096 tokens in all, each of which sees itself, "documents/3" causal documents of as many tokens. "blocks/0.9" is
    a dense mask of 8192 x 8192 pairs, of whose blocks of 128 x 128 a random 90 % are hidden, "blocks/0.9/2048" a
    smaller one. With model "vit" a workload stands for its images in the vision encoder; a model may also be given as
    its heads, "8/8/64", and "8/8/192/128" where v has a head_dim of its own. Raises ValueError for unknown names.
    """
    heads = model_of(model)
    shape, mask, pairs = _sizes(pack, model, device)
    batch, seq_q, seq_k = shape
    if isinstance(mask, (Spans, DenseMask)):
        batch = max(batch, _batch_of(mask, pack, heads))
    return Case(
        f"{pack} {model}",
        batch,
        heads.heads_q,
        heads.heads_kv,
        seq_q,
        seq_k,
        heads.head_dim,
        dtype,
        mask,
        pairs,
        device,
        heads.head_dim_v,
    )


def _batch_of(mask: Spans | DenseMask, pack: str, heads: Model) -> int:
    """The batch entries that the mask tells apart. Raises ValueError if its heads are not those of the model."""
    batch, of_mask = mask.planes if isinstance(mask, Spans) else mask.shape[:2]
    accepted = {1, heads.heads_q} | ({heads.heads_kv} if isinstance(mask, Spans) else set())
    if of_mask not in accepted:
        kv = f" and k has {heads.heads_kv}" if heads.heads_kv in accepted else ""
        raise ValueError(
            f"mask: {pack} has {of_mask} heads, but q has {heads.heads_q}{kv}; expected 1 or these"
        )
    return batch


def with_batch(case: Case, batch: int) -> Case:
    """The case with `batch` entries, which share its mask. ValueError if it has several already."""
    if case.batch not in (1, batch) and batch != 1:
        raise ValueError(f"--batch: leave it out, {case.name} has a batch of {case.batch}")
    return case if batch in (1, case.batch) else replace(case, name=f"{batch} x {case.name}", batch=batch)


def _sizes(
    pack: str, model: str, device: torch.device
) -> tuple[tuple[int, int, int], Causal | Spans | DenseMask | None, int]:
    """(batch, seq_q, seq_k), mask and visible pairs of a pack."""
    if match := _DENSE.fullmatch(pack):
        seq_q = int(match[3])
        seq_k = int(match[4] or seq_q)
        expect_rows(seq_q, seq_k)  # before a mask of that length is made
        return (int(match[2] or 1), seq_q, seq_k), *_named_mask(match[1], seq_q, seq_k, device)
    if match := _BLOCKS.fullmatch(pack):
        blocks = random_blocks(float(match[1]), int(match[2] or LENGTH), device)
        return (1, blocks.seq_q, blocks.seq_k), blocks, int(blocks.mask.sum())
    if is_mask_file(pack):
        read, seq_q = read_mask(Path(pack), device)
        return (1, seq_q, read.seq_k), read, pairs_of(read, seq_q)
    mask = _packed(pack, model, device)
    length = mask.starts.numel()
    return (1, length, length), mask, mask.pairs


def _named_mask(name: str, seq_q: int, seq_k: int, device: torch.device) -> tuple[Causal | Spans | None, int]:
    """The mask called full, causal or window:N, and its visible pairs."""
    if name == "full":
        return None, seq_q * seq_k
    if name == "causal":  # the last `rows` queries see some key: 1, 2, ... keys more than the first of them
        rows = min(seq_q, seq_k)
        return Causal(), rows * (seq_k - rows) + rows * (rows + 1) // 2
    made = mask_patterns.window(seq_q, seq_k, int(name.partition(":")[2]) - 1, 0, device)
    return made, pairs_of(made, seq_q)


def pairs_of(mask: Spans | DenseMask, seq_q: int) -> int:
    """Visible pairs of a mask; the average of its planes."""
    if isinstance(mask, DenseMask):
        return int(mask.mask.sum()) // (mask.shape[0] * mask.shape[1])
    return int(visible_pairs(mask, seq_q))


def _packed(pack: str, model: str, device: torch.device) -> PackedMask:
    if match := _SEQUENCES.fullmatch(pack):
        images = match[1] == "images"
        lengths = _random_lengths(int(match[2]), IMAGE_SIZES if images else DOCUMENT_SIZES)
        return PackedMask(lengths, lengths, ["full" if images else "causal"] * len(lengths), device)
    if pack not in names() and ".jsonl:" not in pack:
        raise ValueError(
            f"pack: there is no {pack!r}; packs are {summary()}; others are packs.jsonl:7 (a line of a recorded file), "
            "mask.npy, images/0, documents/0, full/4x8192, causal/2048, window:512/8192, blocks/0.9"
        )
    return workload(pack).vit_mask(device) if model == "vit" else workload(pack).mask(device)


def model_of(model: str) -> Model:
    """The model called so, or with these heads. Raises ValueError."""
    if match := _HEADS.fullmatch(model):
        heads_q, heads_kv, head_dim, head_dim_v = (int(number or 0) for number in match.groups())
        if heads_q % heads_kv:
            raise ValueError(f"heads: got {heads_q}/{heads_kv}, expected query heads a multiple of kv heads")
        if max(head_dim, head_dim_v) > MAX_HEAD_DIM:
            raise ValueError(f"head_dim: got {max(head_dim, head_dim_v)}, accepted are 1 to {MAX_HEAD_DIM}")
        return Model(model, heads_q, heads_kv, head_dim, 1, "heads as given", head_dim_v=head_dim_v)
    if model not in MODELS:
        raise ValueError(
            f"model: there is no {model!r}; models are {', '.join(MODELS)}, or heads and head_dim such as 8/8/64"
        )
    return MODELS[model]


def _random_lengths(seed: int, sizes: tuple[int, int]) -> list[int]:
    """Tokens of each sequence: uniform in `sizes`, the last cut off at TOKENS."""
    draw = random.Random(seed)
    lengths, rest = [], TOKENS
    while rest:
        lengths.append(min(rest, draw.randint(*sizes)))
        rest -= lengths[-1]
    return lengths
