"""Tensors and masks of the random problems (fuzz_problems.py); what a mask shows is made independently of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_problems import CASES, Problem
from torch import Tensor

import attnforge
from attnforge.bagel.packing import visible_from_definition
from attnforge.runtime.masks import AnyMask


@dataclass(frozen=True)
class Data:
    """The tensors of a problem, its mask, and what the mask shows, made independently of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    mask: AnyMask
    seen: Tensor  # bool, broadcast to (B, Hq, Sq, Sk)
    extra: dict[str, Any]  # arguments of the drop-ins
    scale: float

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        return tuple(x.untyped_storage() for x in (self.q, self.k, self.v, self.dout))


def data(case: Problem) -> Data:
    """Inputs as `case` says. Whatever lies between their rows is NaN."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    f, heads_q = case.family, case.heads_kv * case.group
    sizes = (
        (case.batch, heads_q, case.seq_q, f.head_dim),
        (case.batch, case.heads_kv, case.seq_k, f.head_dim),
        (case.batch, case.heads_kv, case.seq_k, f.dim_v),
        (case.batch, heads_q, case.seq_q, f.dim_v),
    )
    storage = torch.float32 if case.wrap == "autocast" else f.dtype
    placed = []
    for index, size in enumerate(sizes):
        x = _values(case, index, size, generator).to(f.dtype).to(storage)
        layout = (
            "any address" if f.loose and index == 0 and case.layouts[0] != "one head" else case.layouts[index]
        )
        # dout has the dtype that out will have.
        placed.append(place(x.to(f.dtype) if index == 3 else x, layout))
    q, k, v, dout = placed
    here: Any = {"generator": generator, "device": case.device}
    dlse = torch.randn(dout.shape[:3], **here) if case.lse_grad else None
    masks = generator if case.device == "cpu" else torch.Generator().manual_seed(case.seed)
    mask, seen, extra = _mask(case, masks)
    scale = f.head_dim**-0.5 if case.scale is None else case.scale
    return Data(q, k, v, dout, dlse, mask, seen.to(case.device), extra, scale)


def _values(case: Problem, index: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Float64 values of q, k, v or dout (index 0 to 3). fp16 keeps away from its largest number."""
    place_of: Any = {"generator": generator, "device": case.device}
    x = torch.randn(size, dtype=torch.float64, **place_of)
    half = case.family.dtype is torch.float16
    if case.values == "large" and index < 2:
        return x * (4.0 if half else 12.0)
    if case.values == "spiky" and index < 3 and size[2]:
        row = int(torch.randint(0, size[2], (), **place_of))
        x[:, :, row] *= 8.0 if half else 30.0
    if case.values == "equal":
        return torch.ones_like(x) * (1.0, 0.5, -1.25, 0.75)[index]
    if case.values == "zero" and index == case.seed % 4:
        return torch.zeros_like(x)
    if case.values == "small":
        return x * (1e-2 if half else 1e-18)
    if case.values == "mixed":
        powers = torch.empty((*size[:3], 1), dtype=torch.float64, device=case.device).uniform_(
            -3, 0.5, generator=generator
        )
        return x * 10**powers
    if case.values == "one hot" and index < 2:
        rows = torch.eye(size[3], dtype=torch.float64, device=case.device)
        return rows[torch.randint(0, size[3], size[:3], **place_of)] * 4
    if case.values == "huge":
        return torch.full_like(x, 200.0 if half else 133120.0) if index < 3 else x
    return x


def place(x: Tensor, layout: str) -> Tensor:
    """The values of x (B, H, S, D), or where the layout repeats them its first ones, in other memory amid NaN."""
    batch, heads, length, dim = x.shape
    if layout == "bhsd":
        return x.contiguous()
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "hbsd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "fused":  # the middle third of a projection, some rows in
        whole = x.new_full((batch, length + 6, 3, heads, dim), torch.nan)
        whole[:, 3:-3, 1] = x.transpose(1, 2)
        return whole[:, 3:-3, 1].transpose(1, 2)
    if layout == "narrowed":
        whole = x.new_full((batch, heads, length + 37, dim), torch.nan)
        whole[:, :, 5:-32] = x
        return whole[:, :, 5:-32]
    if layout == "padded":
        columns = -dim % 8 + 8
        whole = x.new_full((batch, heads, length, dim + columns), torch.nan)
        whole[..., :-columns] = x
        return whole[..., :-columns]
    if layout == "any address":
        whole = x.new_full((batch, heads, length + 2, dim + 3), torch.nan)
        whole[:, :, 1:-1, 1:-2] = x
        return whole[:, :, 1:-1, 1:-2]
    if layout == "unit axes":  # an axis of size 1 has any stride: nothing is ever multiplied by it
        x = x.contiguous()
        return x.as_strided(
            x.shape,
            [step if n != 1 else 8 * 7 for n, step in zip(x.shape[:3], x.stride(), strict=False)] + [1],
        )
    if layout == "one head":
        return x[:, :1].contiguous().expand(x.shape)
    if layout == "one entry":
        return x[:1].contiguous().expand(x.shape)
    if layout == "one number":
        return x.new_full((1, 1, 1, 1), 0.5).expand(x.shape)
    raise ValueError(layout)


def poison(case: Problem) -> None:
    """Leave NaN in memory that is about to be allocated again: whatever is read there unwritten shows."""
    f, heads = case.family, case.heads_kv * case.group
    sizes = [case.batch * heads * case.seq_q * f.dim_v, case.batch * heads * case.seq_q * f.head_dim]
    sizes += [
        case.batch * case.heads_kv * case.seq_k * f.head_dim,
        case.batch * heads * (case.seq_q + 128) * 2,
    ]
    kept = [
        torch.full((n + 1,), torch.nan, device=case.device, dtype=d)
        for n in sizes
        for d in (f.dtype, torch.float32)
    ]
    del kept


# ---- Masks


def _mask(case: Problem, generator: torch.Generator) -> tuple[AnyMask, Tensor, dict[str, Any]]:
    """The mask, which pairs it shows by its definition, and what a drop-in is told instead of it."""
    seq_q, seq_k = case.seq_q, case.seq_k
    row, key = torch.arange(seq_q)[:, None], torch.arange(seq_k)[None]
    if case.family.mask == "full":
        return None, torch.ones(seq_q, seq_k, dtype=torch.bool), {}
    if case.family.mask == "causal":
        return attnforge.Causal(), key <= row + (seq_k - seq_q), {"causal": True}
    if case.family.mask == "dense":
        return _dense(case, generator)
    if case.style == "packed":
        return _packed(case, generator)
    if case.style == "documents":
        return _documents(case, generator)
    chance = random.Random(f"mask {case.seed}")
    if case.style == "band":
        left, right = (chance.choice((-1, 0, 1, chance.randint(0, seq_k))) for _ in range(2))
        away = row + (seq_k - seq_q) - key
        seen = ((away <= left) | (left < 0)) & ((-away <= right) | (right < 0))
        return None, seen, {"window_size": (left, right)}
    if case.style == "unions":
        return _unions(case, chance, generator)
    starts, ends = _intervals(case, chance, generator)
    seen = (starts.long()[None] <= row) & (row < ends.long()[None])
    hint = chance.choice((None, chance.uniform(0, seq_k)))
    sources = starts.to(case.device), ends.to(case.device)
    mask = attnforge.Spans(*sources, visible_keys=hint)
    if case.overwrite:
        for x in sources:
            x.random_(-5, 500)
    return mask, seen, {}


def _unions(
    case: Problem, chance: random.Random, generator: torch.Generator
) -> tuple[AnyMask, Tensor, dict[str, Any]]:
    """Up to 4 intervals a key, with planes for batch entries, and for kv heads or query heads."""
    kin = random.Random(f"unions {case.seed // CASES}")  # kernels are those of the family
    count, apart = kin.randint(1, 4), kin.random() < 0.5
    heads = chance.choice((1, case.heads_kv, case.heads_kv * case.group)) if apart else 1
    planes = (chance.choice((1, max(case.batch, 1))) if apart else 1, heads)
    parts = [
        _intervals(
            replace(case, style=chance.choice(("random", "window", "prefix", "any int32"))), chance, generator
        )
        for _ in range(planes[0] * planes[1] * count)
    ]
    starts, ends = (
        torch.stack(side).view(*planes, count, case.seq_k).to(torch.int32)
        for side in zip(*parts, strict=True)
    )
    row = torch.arange(case.seq_q)[:, None]
    first, last = (x.long()[..., None, :] for x in (starts, ends))
    seen = ((first <= row) & (row < last)).any(2)
    seen = seen.repeat_interleave(case.heads_kv * case.group // heads if heads > 1 else 1, 1)
    sources = starts.to(case.device), ends.to(case.device)
    mask = attnforge.Spans(*sources, visible_keys=chance.choice((None, chance.uniform(0, case.seq_k))))
    if case.overwrite:
        for x in sources:
            x.random_(-5, 500)
    return mask, seen, {}


def _intervals(case: Problem, chance: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    seq_q, seq_k = case.seq_q, case.seq_k
    key = torch.arange(seq_k)
    if case.style == "window":
        starts, ends = key, key + chance.randint(1, max(seq_q, 1))
    elif case.style == "prefix":
        starts = torch.where(key < chance.randint(0, seq_k), 0, key)
        ends = torch.full_like(key, seq_q)
    else:
        ends = torch.randint(-1, seq_q + 2, (seq_k,), generator=generator)
        starts = ends - torch.randint(0, seq_q + 2, (seq_k,), generator=generator)
    if case.style == "any int32":
        lowest, highest = -(2**31), 2**31 - 1
        for x, wild in (
            (starts, (lowest, lowest + 1, highest, -1, 0)),
            (ends, (highest, highest - 1, lowest, 0, seq_q)),
        ):
            chosen = torch.rand(seq_k, generator=generator) < 0.3
            x[chosen] = torch.tensor(wild)[
                torch.randint(0, len(wild), (int(chosen.sum()),), generator=generator)
            ]
    return starts.int(), ends.int()


def _dense(case: Problem, generator: torch.Generator) -> tuple[AnyMask, Tensor, dict[str, Any]]:
    planes: tuple[int, ...] = ()
    heads = case.heads_kv * case.group
    chance = random.Random(f"mask {case.seed}")
    if case.style in ("planes", "expanded"):
        planes = (chance.choice((1, case.batch)), chance.choice((1, heads)))
    shape = (*planes, case.seq_q, case.seq_k)
    if case.style == "nothing":
        seen = torch.zeros(shape, dtype=torch.bool)
        if seen.numel():
            seen[..., chance.randrange(case.seq_q), :] = chance.random() < 0.5
    elif case.style == "blocks":
        coarse = torch.rand((case.seq_q // 48 + 1, case.seq_k // 80 + 1), generator=generator).mul(3).sub(1)
        share = coarse.repeat_interleave(48, 0)[: case.seq_q].repeat_interleave(80, 1)[:, : case.seq_k]
        seen = torch.rand(shape, generator=generator) < share
    else:
        seen = torch.rand(shape, generator=generator) < chance.choice((0.02, 0.3, 0.9))
    given = seen.clone().to(case.device)
    if case.style == "expanded":
        given = given.expand(case.batch, heads, case.seq_q, case.seq_k)
    elif chance.random() < 0.5:  # rows of it far apart
        wide = torch.ones((*shape[:-1], case.seq_k + 13), dtype=torch.bool, device=case.device)
        wide[..., 7:-6] = given
        given = wide[..., 7:-6]
    elif chance.random() < 0.3:
        given = given.mT.contiguous().mT
    mask = attnforge.DenseMask(given, visible_keys=chance.choice((None, chance.uniform(0, case.seq_k))))
    if case.overwrite and case.style != "expanded":
        given.logical_not_()
    return mask, seen, {"attn_mask": given}


def _parts(chance: random.Random, total: int, most: int) -> list[int]:
    """Lengths that add up to `total`, some of them 0."""
    cuts = sorted(chance.randint(0, total) for _ in range(chance.randrange(most)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def _packed(case: Problem, generator: torch.Generator) -> tuple[AnyMask, Tensor, dict[str, Any]]:
    """BAGEL's mask; `used` says which samples at the end are padding."""
    chance = random.Random(f"mask {case.seed}")
    samples = _parts(chance, case.seq_q, 4)
    splits = [part for sample in samples for part in _parts(chance, sample, 5)]
    modes = [chance.choice(("causal", "full", "noise")) for _ in splits]
    used = sum(samples[: chance.randint(1, len(samples))]) if chance.random() < 0.5 else None
    mask = attnforge.bagel.PackedMask(samples, splits, modes, case.device, used=used)
    seen = visible_from_definition(samples, splits, modes)
    if used is not None:
        seen[used:] = False
        seen[:, used:] = False
    return mask, seen, {}


def _documents(case: Problem, generator: torch.Generator) -> tuple[AnyMask, Tensor, dict[str, Any]]:
    """Documents packed end to end for the drop-in, some without queries or keys, with rows behind the last."""
    chance = random.Random(f"mask {case.seed}")
    count = chance.randint(1, 5)
    borders = []
    for total in (case.seq_q, case.seq_k):
        last = chance.choice((total, total, chance.randint(0, total)))
        borders.append([0, *sorted(chance.randint(0, last) for _ in range(count - 1)), last])
    causal, left = chance.random() < 0.5, chance.choice((-1, -1, chance.randint(0, 40)))
    seen = torch.zeros(case.seq_q, case.seq_k, dtype=torch.bool)
    for d in range(count):
        (q0, q1), (k0, k1) = (border[d : d + 2] for border in borders)
        away = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None]
        seen[q0:q1, k0:k1] = ((away >= 0) | (not causal)) & ((away <= left) | (left < 0))
    cu_q, cu_k = (torch.tensor(border, dtype=torch.int32, device=case.device) for border in borders)
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal, "window_size": (left, -1)}
    return None, seen, options
