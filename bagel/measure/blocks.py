"""Benchmark masks: dense masks of random blocks, and spans with as many visible pairs."""

from __future__ import annotations

import torch

from attnforge.bagel.packing import PackedMask
from attnforge.runtime.masks import DenseMask

BLOCK = 128  # rows and keys, FlexAttention's default
LENGTH = 8192


def random_blocks(
    sparsity: float, length: int, device: torch.device, block: int = BLOCK, seed: int = 0
) -> DenseMask:
    """Bool (length, length) in blocks of `block` x `block` pairs, of which the part `sparsity` is hidden, whole.

    How many is exact (rounded to blocks), which ones is drawn from `seed`; the last blocks may be cut off. The mask
    gives the number of keys that a query sees to dispatch.
    """
    side = -(-length // block)
    seen = torch.ones(side * side, dtype=torch.bool)
    order = torch.randperm(side * side, generator=torch.Generator().manual_seed(seed))
    seen[order[: round(sparsity * side * side)]] = False
    rows = seen.view(side, side).to(device).repeat_interleave(block, 0)
    mask = rows.repeat_interleave(block, 1)[:length, :length].contiguous()
    return DenseMask(mask, visible_keys=int(mask.sum()) / length)


def equal_documents(share: float, length: int, device: torch.device) -> PackedMask:
    """Documents of whole blocks, as equal as can be, that see all of themselves: about the part `share` of all pairs.

    Blocks have BLOCK rows. As with random blocks, every row sees about as many keys, and no visible block is partly
    hidden.
    """
    side = -(-length // BLOCK)
    count = min(side, max(1, round(1 / share)))
    ends = [min(length, round(side * (i + 1) / count) * BLOCK) for i in range(count)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return PackedMask(lengths, lengths, ["full"] * count, device)
