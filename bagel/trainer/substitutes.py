"""The functions with which `attnforge.bagel.patch()` replaces the trainer's (see bagel/trainer/patch.py).

Its names and call patterns are those of ByteDance-Seed/Bagel, modeling/bagel/{bagel,qwen2_navit}.py and
modeling/autoencoder.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnforge.bagel.packing import PackedMask
from attnforge.runtime.integrations.sdpa import sdpa
from attnforge.runtime.mask_intervals import columns
from attnforge.runtime.masks import Spans
from attnforge.runtime.ops import attention
from attnforge.runtime.prologue import ExpertRows

_COLUMNS = 1024  # of a dense mask, processed at a time


class Pack:
    """The mask of one micro-step, where BAGEL passes a BlockMask: from Bagel.forward to every layer.

    `tokens`: S, padding included. Not a list (which selects BAGEL's SDPA branch) and not a dataclass (which
    FSDP would take apart). `dtype`: what q, k and v are cast to, if anything.
    """

    def __init__(self, tokens: int, build: Callable[[int], Spans], dtype: torch.dtype | None = None) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self._build = build
        self._masks: dict[int, Spans] = {}
        self._experts: tuple[tuple[Tensor | None, ...], ExpertRows] | None = None

    def mask(self, rows: int) -> Spans:
        """The mask of the first `rows` tokens: all, or all but the padding. Built at the first layer.

        Raises ValueError if what is left out is not whole samples.
        """
        if rows > self.tokens:
            raise ValueError(f"sample_lens: {rows} tokens in the pack, but the samples have {self.tokens}")
        if rows not in self._masks:
            self._masks[rows] = self._build(rows)
        return self._masks[rows]

    def experts(self, key: tuple[Tensor | None, ...], build: Callable[[], ExpertRows]) -> ExpertRows:
        """The experts of the tokens, from the tensors in `key`. Built at the first layer."""
        known = self._experts
        if known is None or any(a is not b for a, b in zip(known[0], key, strict=True)):
            known = self._experts = (key, build())
        return known[1]


def create_sparse_mask(
    document_lens: Sequence[int],
    split_lens: Sequence[int],
    attn_modes: Sequence[str],
    device: torch.device | str,
) -> Pack:
    """Returned in place of a mask_mod: the pack itself. Errors as PackedMask."""
    lists = (list(document_lens), list(split_lens), list(attn_modes))
    tokens = sum(lists[0])

    def build(rows: int) -> Spans:
        if rows == tokens:
            return PackedMask(*lists, device)
        whole = PackedMask(*lists, device, used=rows)
        return Spans(whole.starts[:rows], whole.ends[:rows], visible_keys=whole.visible_keys)

    return Pack(tokens, build)


def create_block_mask(mask_mod: Pack, *args: object, **kwargs: object) -> Pack:
    """Returned in place of a BlockMask: the pack that the substitute of create_sparse_mask made."""
    return expect_pack("mask_mod", mask_mod)


def pad_sequence(tensor: Tensor, pad_size: int) -> Tensor:
    """The tensor (heads, tokens, head_dim) unchanged, in place of a copy padded with zeros."""
    return tensor


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: Pack | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of the tokens of a pack (1, heads, T, head_dim) -> (1, heads, S, head_dim), padding zero.

    Raises TypeError if `block_mask` was not made while patched, ValueError for a score_mod.
    """
    pack = expect_pack("block_mask", block_mask)
    if score_mod is not None:
        raise ValueError(
            "score_mod: not supported; call torch's flex_attention after attnforge.bagel.unpatch()"
        )
    if pack.dtype is not None:
        query, key, value = (x.to(pack.dtype) for x in (query, key, value))
    rows = query.shape[2]
    out = attention(query, key, value, pack.mask(rows), scale=scale)
    if rows == pack.tokens:
        return out
    # The caller removes the padding and moves tokens outermost, where they are here already.
    return F.pad(out.transpose(1, 2), (0, 0, 0, 0, 0, pack.tokens - rows)).transpose(1, 2)


def model_forward_train(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Qwen2Model.forward_train, with nested dense masks (use_flex off) turned into one pack on the way in.

    The layers then take their flex branch, which repeats neither K nor V; nothing is padded there.
    """

    @functools.wraps(original)
    def forward_train(
        self: Any,
        packed_sequence: Tensor,
        sample_lens: Sequence[int],
        attention_mask: Any,
        *args: Any,
        **rest: Any,
    ) -> Tensor:
        if isinstance(attention_mask, list):
            attention_mask = from_dense(attention_mask, sample_lens)
        return original(self, packed_sequence, sample_lens, attention_mask, *args, **rest)

    return forward_train


def vae_attention(original: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """AttnBlock.attention of the VAE, (N, C, H, W) -> the same, with torch's function on our kernels."""

    @functools.wraps(original)
    def attention_of_block(self: Any, h_: Tensor) -> Tensor:
        with sdpa():
            return original(self, h_)

    return attention_of_block


def from_dense(masks: Sequence[Tensor], sample_lens: Sequence[int]) -> Pack:
    """A pack from additive masks (n, n), one a sample, 0 where visible and -inf where not.

    One host sync. q, k and v are cast to bfloat16, as BAGEL's own branch for these masks does.
    Raises ValueError naming the mask if its keys are not each visible to one run of queries.
    """
    lens = list(sample_lens)
    if [tuple(mask.shape) for mask in masks] != [(n, n) for n in lens]:
        shapes = [tuple(mask.shape) for mask in masks]
        raise ValueError(f"nested_attention_masks: shapes {shapes} do not fit sample_lens {lens}")
    starts, ends, counts, fine, first = [], [], [], [], 0
    for mask in masks:
        for part in mask.split(_COLUMNS, dim=1) if mask.numel() else ():
            visible = part == 0
            start, count, runs = columns(visible)
            starts.append(start + first)
            ends.append(start + count + first)
            counts.append(count)
            fine.append((runs <= 1).all() & (visible | (part == -torch.inf)).all())
        first += mask.shape[0]
    if not fine:
        raise ValueError("sample_lens: the pack has no token")
    good, pairs = torch.stack([torch.stack(fine).all().long(), torch.cat(counts).sum()]).tolist()
    if not good:
        raise ValueError(
            "nested_attention_masks: a mask is not BAGEL's: values other than 0 and -inf, or a key that is "
            "visible to more than one run of queries"
        )
    bounds = (torch.cat(x).to(torch.int32) for x in (starts, ends))
    spans = Spans(*bounds, visible_keys=pairs // first)

    def build(rows: int) -> Spans:
        if rows != first:
            raise ValueError(f"sample_lens: {first} tokens, but the pack has {rows}")
        return spans

    return Pack(first, build, torch.bfloat16)


def expect_pack(name: str, value: Any) -> Pack:
    """`value`, a Pack; TypeError naming the argument if it is anything else."""
    if not isinstance(value, Pack):
        raise TypeError(
            f"{name}: got {type(value).__name__}, which attnforge's patch did not make; patch before the "
            "forward pass that makes the mask, or undo it by attnforge.bagel.unpatch()"
        )
    return value
