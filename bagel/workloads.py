"""Named BAGEL packs: `workload("pretrain/0")`. Shapes come from the package file workloads.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from attnforge.bagel.packing import PackedMask

_RECORDED = re.compile(r"(.+\.jsonl):([1-9]\d*)")


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
    facts: dict[str, Any]  # counts from the generator of workloads.json: nnz, blocks128, ...

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
    """The pack called `name`: "pretrain/0", or "FILE.jsonl:7" for line 7 of what attnforge.bagel.record wrote.

    Raises ValueError if there is none, listing the names, or if the line is no pack.
    """
    if match := _RECORDED.fullmatch(name):
        return _read_line(Path(match[1]), int(match[2]))
    try:
        return _table()[name]
    except KeyError:
        raise ValueError(f"pack: there is no {name!r}; packs are {summary()}") from None


def names() -> tuple[str, ...]:
    """Names of all packs, in the file's order."""
    return tuple(_table())


def summary() -> str:
    """The same in words: pretrain/0 to 3, ..."""
    seeds: dict[str, list[str]] = {}
    for name in names():
        config, _, seed = name.partition("/")
        seeds.setdefault(config, []).append(seed)
    return ", ".join(f"{config}/{found[0]} to {found[-1]}" for config, found in seeds.items())


def recorded(path: Path, count: int = 3) -> tuple[str, ...]:
    """Names of up to `count` packs of a recorded file, evenly from the lightest to the heaviest by visible pairs.

    Raises ValueError naming the line that is no pack, or the file if it has none.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"packs: got {path}, expected a .jsonl file that attnforge.bagel.record wrote")
    try:
        with path.open(encoding="utf-8") as lines:
            size = sum(1 for _ in lines)
    except UnicodeDecodeError:
        raise ValueError(
            f"packs: {path} is not text; expected the JSON lines that attnforge.bagel.record wrote"
        ) from None
    weights = [(_read_line(path, line).mask("cpu").pairs, line) for line in range(1, size + 1)]
    if not weights:
        raise ValueError(f"packs: {path} has no pack")
    weights.sort()
    chosen = (
        {round(i * (size - 1) / max(count - 1, 1)) for i in range(count)} if count < size else range(size)
    )
    return tuple(f"{path}:{weights[i][1]}" for i in sorted(chosen))


def _read_line(path: Path, line: int) -> Workload:
    where = f"{path}:{line}"
    try:
        with path.open(encoding="utf-8") as lines:
            text = next(islice(lines, line - 1, None))
    except FileNotFoundError:
        raise ValueError(f"pack: there is no file {path}, so no line {where}") from None
    except OSError as error:
        raise ValueError(f"pack: {path} cannot be read: {error.strerror or error}") from None
    except StopIteration:
        raise ValueError(f"pack: there is no line {where}") from None
    try:
        row = json.loads(text)
        samples, splits, modes, images = (
            tuple(row[name]) for name in ("sample_lens", "split_lens", "attn_modes", "vit_lens")
        )
        pack = Workload(where, samples, splits, modes, images, int(row["used"]), facts={})
        pack.mask("cpu")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"pack: {where} is not a pack that attnforge.bagel.record wrote: {error!r}"
        ) from None
    return pack


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
