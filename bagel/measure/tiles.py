"""The tiles of a mask that a kernel visits, computed on the host, for pictures, tables and tests of schedules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnforge.runtime.masks import DenseMask, Spans

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class TileMap:
    """`kinds` is int8 (tiles_m, tiles_n): EMPTY tiles are skipped, FULL ones need no mask arithmetic."""

    kinds: torch.Tensor
    tile_m: int
    tile_n: int

    def count(self, kind: int) -> int:
        """Number of tiles of one kind."""
        return int((self.kinds == kind).sum())

    def efficiency(self, pairs: int) -> float:
        """Visible pairs over pairs in visited tiles: the useful fraction of the arithmetic."""
        return pairs / (self.tile_m * self.tile_n * max(1, self.count(FULL) + self.count(PARTIAL)))


def tile_map(mask: Spans | DenseMask, seq_q: int, tile_m: int, tile_n: int) -> TileMap:
    """Classify every tile of `mask` exactly; of spans without anything seq_q x seq_k in memory.

    Raises ValueError for a dense mask with more than one plane, and for spans of several intervals or planes.
    """
    if isinstance(mask, Spans) and mask.starts.dim() > 1:
        raise ValueError(f"mask: got {mask}, expected one interval a key, the same for all heads")
    if isinstance(mask, DenseMask):
        return TileMap(_dense_kinds(mask.mask, tile_m, tile_n), tile_m, tile_n)
    starts = mask.starts.cpu().long().clamp(0, seq_q)
    ends = torch.maximum(mask.ends.cpu().long().clamp(0, seq_q), starts)
    tiles_m, tiles_n = -(-seq_q // tile_m), -(-starts.numel() // tile_n)
    column = torch.arange(starts.numel()) // tile_n
    seen = ends > starts
    # +1 where a key's interval enters a tile row, -1 after the row that it leaves: prefix sums count visits.
    edges = torch.zeros(tiles_m + 1, tiles_n, dtype=torch.int64)
    one = torch.ones(int(seen.sum()), dtype=torch.int64)
    edges.index_put_((starts[seen] // tile_m, column[seen]), one, accumulate=True)
    edges.index_put_(((ends[seen] - 1) // tile_m + 1, column[seen]), -one, accumulate=True)
    touched = edges.cumsum(0)[:tiles_m] > 0
    latest = torch.zeros(tiles_n, dtype=torch.int64).scatter_reduce(0, column, starts, "amax")
    soonest = torch.full((tiles_n,), seq_q).scatter_reduce(0, column, ends, "amin")
    first = torch.arange(tiles_m) * tile_m
    last = (first + tile_m).clamp(max=seq_q)
    covered = (latest[None] <= first[:, None]) & (soonest[None] >= last[:, None])
    kinds = torch.full((tiles_m, tiles_n), EMPTY, dtype=torch.int8)
    kinds[touched] = PARTIAL
    kinds[covered] = FULL
    return TileMap(kinds, tile_m, tile_n)


def _dense_kinds(mask: torch.Tensor, tile_m: int, tile_n: int) -> torch.Tensor:
    if mask.dim() > 2 and mask.shape[:2] != (1, 1):
        raise ValueError(f"mask: has planes {tuple(mask.shape[:2])}, expected one mask for all heads")
    seen = mask.reshape(mask.shape[-2:])
    rest = (0, -seen.shape[1] % tile_n, 0, -seen.shape[0] % tile_m)

    def tiles(outside: bool) -> torch.Tensor:
        padded = F.pad(seen, rest, value=outside)
        tiled: torch.Tensor = padded.unflatten(1, (-1, tile_n)).unflatten(0, (-1, tile_m))
        return tiled

    kinds = tiles(False).any(3).any(1).to(torch.int8) * PARTIAL
    kinds[tiles(True).all(3).all(1)] = FULL
    return kinds.cpu()
