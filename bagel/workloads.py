"""Named BAGEL packs: `workload("pretrain/0")`. Shapes come from the package file workloads.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

from attnforge.bagel.packing import PackedMask


@dataclass(frozen=True)
class Workload:
    """One training pack. `used` of its `tokens` are real; the last sample of `sample_lens` is padding.

    `vit_lens` are the lengths of its images in the SigLIP encoder, which sees them as one packed sequence.
    """

    name: str
    sample_lens: tuple[int, ...]
    split_lens: tuple[int, ...]
    attn_modes: tuple[str, ...]
    vit_lens: tuple[int, ...]
    used: int
    facts: dict[str, Any]  # what the generator of workloads.json counted: nnz, blocks128, ...

    @property
    def tokens(self) -> int:
        """S, padding included."""
        return sum(self.sample_lens)

    def mask(self, device: torch.device | str, padding: Literal["skip", "compute"] = "skip") -> PackedMask:
        """The mask of the language model's attention."""
        return PackedMask(
            self.sample_lens, self.split_lens, self.attn_modes, device, used=self.used, padding=padding
        )

    def vit_mask(self, device: torch.device | str) -> PackedMask:
        """The mask of SigLIP's attention: each image is a sample of one full split."""
        if not self.vit_lens:
            raise ValueError(f"pack: {self.name} has no image for the vision encoder; take a pretrain/ one")
        return PackedMask(self.vit_lens, self.vit_lens, ["full"] * len(self.vit_lens), device)


def workload(name: str) -> Workload:
    """The pack called `name`, e.g. "pretrain/0"; ValueError lists the names if there is none."""
    try:
        return _table()[name]
    except KeyError:
        raise ValueError(f"pack: there is no {name!r}; packs are {', '.join(names())}") from None


def names() -> tuple[str, ...]:
    """Names of all packs, in the file's order."""
    return tuple(_table())


@cache
def _table() -> dict[str, Workload]:
    data = json.loads(files("attnforge.bagel").joinpath("workloads.json").read_text(encoding="utf-8"))
    packs = (_read(row, data["modes"]) for row in data["workloads"])
    return {pack.name: pack for pack in packs}


def _read(row: dict[str, Any], modes: dict[str, str]) -> Workload:
    lists = ("sample_lens", "split_lens", "attn_modes", "vit_seqlens")
    return Workload(
        name=f"{row['config']}/{row['seed']}",
        sample_lens=tuple(row["sample_lens"]),
        split_lens=tuple(row["split_lens"]),
        attn_modes=tuple(modes[letter] for letter in row["attn_modes"]),
        vit_lens=tuple(row["vit_seqlens"]),
        used=row["used"],
        facts={key: value for key, value in row.items() if key not in lists},
    )
