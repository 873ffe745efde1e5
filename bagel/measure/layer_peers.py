"""Attention operators of a layer by other packages: cudnn.flex_attention and FlashAttention-3.

They have the interface of those in bagel/mot/attention.py: q (T, heads_q, head_dim), k and v (T, heads_kv, head_dim),
and a mask made once for a pack. Neither has BAGEL's mask. What the last row of a split sees is a few ranges of rows
(`ranges_of`): earlier splits of its sample that are not noise, then its own split.

cudnn.flex_attention takes these ranges as the endpoints of each row's intervals. FlashAttention-3 has no masks: each
split is a sequence of a varlen call, whose keys and values are gathered, so that a row is copied once for each split
that sees it. A causal call takes the causal splits (aligned at the bottom right, the gathered rows of earlier splits
are visible to all of its rows), a full one the others. Queries stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex, fa3
from attnforge.bagel.measure.attentions import Attention
from attnforge.bagel.packing import Split, cut

PEERS = ("cudnn-flex", "fa3")
OWN_ROW = -1  # an endpoint that ends after the row itself
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Heads:
    """Sizes and type of q, k and v."""

    q: int
    kv: int
    dim: int
    dtype: torch.dtype


def make_peer(name: str, heads: Heads, fused_prologue: bool = False) -> CudnnFlex | FlashAttention3:
    """One of PEERS as an operator of a layer; `fused_prologue`: after attnforge's qk_norm_rope, not torch's modules.

    Raises Unavailable without its package, whose message says what to install.
    """
    if name == "cudnn-flex":
        return CudnnFlex(heads, fused_prologue)
    if name == "fa3":
        return FlashAttention3(fused_prologue)
    raise ValueError(f"peer: got {name!r}, accepted are {', '.join(PEERS)}")


def ranges_of(splits: Sequence[Split]) -> list[Ranges]:
    """For each split that has rows, the ranges of rows that its last row sees; the last range ends with the split."""
    found: list[Ranges] = []
    before: Ranges = []
    sample = None
    for split in splits:
        if split.sample != sample:
            before, sample = [], split.sample
        joins = bool(before) and before[-1][1] == split.start
        seen = [*before[:-1], (before[-1][0], split.end)] if joins else [*before, (split.start, split.end)]
        found.append(seen)
        if split.mode != "noise":
            before = seen
    return found


def with_rows(
    sample_lens: Sequence[int], split_lens: Sequence[int], attn_modes: Sequence[str]
) -> list[Split]:
    """The splits of a pack that are not empty."""
    return [split for split in cut(sample_lens, split_lens, attn_modes) if split.end > split.start]


# ---- cudnn.flex_attention


def endpoints(splits: Sequence[Split], device: torch.device) -> Tensor:
    """What `cudnn_flex.endpoints` makes of the pack's mask, without its pairs: int32 (1, n, T).

    A row sees keys [0, F0), [F1, F2), ...; n is odd, and rows of fewer intervals end in T.
    """
    rows = splits[-1].end
    columns = []
    for split, ranges in zip(splits, ranges_of(splits), strict=True):
        # The first interval begins at key 0: it is empty where the split sees a later key first.
        ends = [x for pair in ranges for x in pair]
        ends = ends[1:] if ends[0] == 0 else [0, *ends]
        if split.mode == "causal":
            ends[-1] = OWN_ROW
        columns.append(ends)
    width = max(map(len, columns))
    table = [
        [*ends, *[rows] * (width - len(ends)), split.end - split.start]
        for ends, split in zip(columns, splits, strict=True)
    ]
    whole = torch.tensor(table, dtype=torch.int32).T.contiguous().to(device)
    # The number of rows is given, so that nothing waits for the device.
    of_rows = whole[:-1].repeat_interleave(whole[-1], dim=1, output_size=rows)
    after = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return torch.where(of_rows == OWN_ROW, after, of_rows)[None]


class CudnnFlex:
    """cudnn.flex_attention: a plan of the mask as intervals of each row, made once, forward and backward."""

    def __init__(self, heads: Heads, fused_prologue: bool = False) -> None:
        cudnn_flex.require()
        self.heads = heads
        self.fused_prologue = fused_prologue

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> Attention:
        splits = with_rows(sample_lens, split_lens, attn_modes)
        # The plan reads sizes, not values: one row of memory stands for all.
        row = torch.empty(self.heads.dim, dtype=self.heads.dtype, device=device)
        q, kv = (row.expand(1, splits[-1].end, heads, -1) for heads in (self.heads.q, self.heads.kv))
        return cudnn_flex.plan(endpoints(splits, device), q, kv, kv)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Attention) -> Tensor:
        return mask(q[None], k[None], v[None]).squeeze(0)


# ---- FlashAttention-3


class Part(NamedTuple):
    """Splits that are the sequences of one varlen call.

    keys: int64, the rows that each split sees, split by split.
    options: of `fwd` and `bwd`. Split i has the queries from cu_seqlens_q[i] on, seqused_q[i] of them, and the gathered
        keys from cu_seqlens_k[i] on. All are int32.
    """

    keys: Tensor
    options: dict[str, Any]


def part_of(splits: Sequence[Split], seen: Sequence[Ranges], rows: int, device: torch.device) -> Part:
    """The call of these splits of a pack of so many rows; `seen` are their ranges."""
    lengths = [split.end - split.start for split in splits]
    counts = [sum(end - start for start, end in ranges) for ranges in seen]
    pieces = [piece for ranges in seen for piece in ranges]
    starts, shifts, place = [0], [], 0
    for count in counts:
        starts.append(starts[-1] + count)
    for start, end in pieces:
        shifts.append(start - place)
        place += end - start
    # One copy to the device.
    numbers = [
        *(split.start for split in splits),
        rows,
        *starts,
        *lengths,
        *shifts,
        *(end - start for start, end in pieces),
    ]
    n, m = len(splits), len(pieces)
    sizes = (n + 1, n + 1, n, m, m)
    begins, bounds, used, shift, size = torch.tensor(numbers, dtype=torch.int32).to(device).split(sizes)
    keys = torch.arange(place, device=device) + shift.repeat_interleave(size, output_size=place)
    options = {
        # Views of one tensor: a kernel may require the alignment of a separate tensor.
        "cu_seqlens_q": begins.clone(),
        "cu_seqlens_k": bounds.clone(),
        "seqused_q": used.clone(),
        "max_seqlen_q": max(lengths),
        "max_seqlen_k": max(counts),
        "is_causal": splits[0].mode == "causal",
    }
    return Part(keys, options)


class _Attend(torch.autograd.Function):
    """The calls of all parts. Each writes the rows of its own splits into the tensors of all rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], operators: Any) -> Tensor:
        out, kept = q.new_empty(q.shape), []
        for part in parts:
            keys, values = k.index_select(0, part.keys), v.index_select(0, part.keys)
            # Not more splits of the keys than one: there are tiles for all multiprocessors.
            _, lse, *_ = operators.fwd(q, keys, values, out=out, num_splits=1, **part.options)
            kept += [keys, values, lse]
        ctx.save_for_backward(q, out, *kept)
        ctx.parts, ctx.operators, ctx.rows = parts, operators, k.shape[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, out, *kept = ctx.saved_tensors
        dout = gradients[0].contiguous()
        dq = q.new_empty(q.shape)
        dk, dv = (dout.new_zeros(ctx.rows, *x.shape[1:]) for x in kept[:2])
        for i, part in enumerate(ctx.parts):
            keys, values, lse = kept[3 * i : 3 * i + 3]
            of_keys, of_values = torch.empty_like(keys), torch.empty_like(values)
            gathered = {"dq": dq, "dk": of_keys, "dv": of_values}
            ctx.operators.bwd(dout, q, keys, values, out, lse, **gathered, **part.options)
            dk.index_add_(0, part.keys, of_keys)
            dv.index_add_(0, part.keys, of_values)
        return dq, dk, dv, None, None


class FlashAttention3:
    """Two varlen calls of FlashAttention-3: causal splits, and full and noise splits; keys and values gathered."""

    def __init__(self, fused_prologue: bool = False) -> None:
        self.operators = fa3.operators()
        self.fused_prologue = fused_prologue

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> list[Part]:
        splits = with_rows(sample_lens, split_lens, attn_modes)
        pairs = list(zip(splits, ranges_of(splits), strict=True))
        parts = []
        for causal in (True, False):
            chosen = [pair for pair in pairs if (pair[0].mode == "causal") == causal]
            if chosen:
                of_part, seen = zip(*chosen, strict=True)
                parts.append(part_of(of_part, seen, splits[-1].end, device))
        return parts

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: list[Part]) -> Tensor:
        out: Tensor = _Attend.apply(q, k, v, mask, self.operators)  # type: ignore[no-untyped-call]
        return out
