"""BAGEL's packed attention mask as two int32 per key, and the dense definition that tests compare it with.

A pack is a sequence of samples (documents), each a sequence of splits with a mode:

- `causal` (text): a row sees its split up to itself, and everything earlier in its sample;
- `full` (clean image, ViT): a row sees its whole split, and everything earlier in its sample;
- `noise` (image being denoised): as `full`, but later splits do not see it.

For every order of modes the rows that see key j form one interval:

    starts[j] = j if its split is causal else first row of its split
    ends[j]   = end of its split if it is noise else end of its sample

Rows after j see it, unless its split is noise and they are after that split. Rows before j see it only if they share a
full or noise split with it, and then all of them do.

Example: one sample of a 2-token text, a 2-token noise image and a 1-token text:

    >>> mask = PackedMask([5], [2, 2, 1], ["causal", "noise", "causal"], torch.device("cpu"))
    >>> mask.starts.tolist(), mask.ends.tolist()
    ([0, 1, 2, 2, 4], [5, 5, 4, 4, 5])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from attnforge.runtime.inputs import expect_integers
from attnforge.runtime.masks import Spans, load_operators

MODES = ("causal", "full", "noise")


class Split(NamedTuple):
    """A run of tokens under one mode: rows [start, end), in a sample that ends at `sample_end`."""

    start: int
    end: int
    sample: int
    sample_end: int
    mode: str

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of this split's keys."""
        length = self.end - self.start
        if self.mode == "noise":
            return length * length
        if self.mode == "full":
            return length * (self.sample_end - self.start)
        return length * (self.sample_end - self.start) - length * (length - 1) // 2


def cut(sample_lens: Sequence[int], split_lens: Sequence[int], attn_modes: Sequence[str]) -> list[Split]:
    """The splits of a pack with their positions. Splits and samples of length zero are allowed and have no effect.

    Raises TypeError or ValueError naming the argument: a negative length, an unknown mode, lists of different
    lengths, or splits whose borders do not include every sample border.
    """
    _check(sample_lens, split_lens, attn_modes)
    # Numbers of Python: pairs of NumPy's int32 would wrap around.
    sample_lens, split_lens = ([operator.index(n) for n in lens] for lens in (sample_lens, split_lens))
    bounds = [0, *accumulate(sample_lens)]
    splits, sample, start = [], 0, 0
    for index, (length, mode) in enumerate(zip(split_lens, attn_modes, strict=True)):
        end = start + length
        # A zero-length split on a border may belong to either sample: it has no tokens.
        while sample + 1 < len(sample_lens) and bounds[sample + 1] <= start:
            sample += 1
        if length and end > bounds[sample + 1]:
            raise ValueError(
                f"split_lens: split {index} covers rows {start} to {end} and crosses the end of "
                f"sample {sample} at row {bounds[sample + 1]}; splits must add up to samples"
            )
        splits.append(Split(start, end, sample, bounds[sample + 1], mode))
        start = end
    return splits


def _check(sample_lens: Sequence[int], split_lens: Sequence[int], attn_modes: Sequence[str]) -> None:
    if not isinstance(attn_modes, Sequence):
        raise TypeError(f"attn_modes: got {type(attn_modes).__name__}, expected a list of modes")
    for name, lengths in (("sample_lens", sample_lens), ("split_lens", split_lens)):
        expect_integers(name, lengths, "a list of lengths")
        for index, length in enumerate(lengths):
            if length < 0:
                raise ValueError(f"{name}: entry {index} is {length}; lengths must be 0 or more")
    if len(split_lens) != len(attn_modes):
        raise ValueError(
            f"attn_modes: {len(attn_modes)} modes for {len(split_lens)} split_lens; give one mode for each split"
        )
    for index, mode in enumerate(attn_modes):
        if mode not in MODES:
            raise ValueError(f"attn_modes: entry {index} is {mode!r}; modes are {', '.join(MODES)}")
    found, expected = (sum(map(operator.index, lengths)) for lengths in (split_lens, sample_lens))
    if found != expected:
        raise ValueError(
            f"split_lens: {found} tokens in all, but sample_lens has {expected}; "
            "the splits must add up to the samples"
        )


class PackedMask(Spans):
    """BAGEL's mask of one pack of S = sum(sample_lens) tokens: `starts`, `ends` int32 (S,) on `device`.

    `used` is BAGEL's `sequence_length`: the number of real tokens. The rest must be whole samples of padding: flex
    training appends one padding sample, possibly empty, to reach a fixed S, so there `used` is sum(sample_lens[:-1]).
    With padding="skip", padding sees nothing, is hidden, costs nothing, and its output is zero, as in BAGEL, where it
    attends to zeros. With padding="compute" it is treated as ordinary samples. Without `used` there is no padding.
    `visible_keys` is the average over the rows that see a key.

    The mask is expanded on the host and copied to the device asynchronously. An empty pack is allowed.
    Raises TypeError or ValueError naming the argument (see `cut`).
    """

    def __init__(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device | str,
        *,
        used: int | None = None,
        padding: Literal["skip", "compute"] = "skip",
    ) -> None:
        if padding not in ("skip", "compute"):
            raise ValueError(f"padding: got {padding!r}, accepted are 'skip' and 'compute'")
        splits = cut(sample_lens, split_lens, attn_modes)
        total = splits[-1].end if splits else 0
        self.used = _check_used(used, sample_lens, total)
        place = _device(device)
        self.splits = tuple(splits)
        limit = self.used if padding == "skip" else total
        self.pairs = sum(split.pairs for split in splits if split.start < limit)
        visible_keys = self.pairs // limit if limit else None
        self._adopt(_expand(splits, limit, place), visible_keys)


def _device(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)  # a device may have a name, but no driver or no such index
        return place
    except TypeError:
        raise TypeError(f"device: got {type(device).__name__}, expected a torch.device or its name") from None
    except (RuntimeError, AssertionError) as error:  # the latter from builds of torch without CUDA
        raise ValueError(f"device: got {device!r}, which torch does not have here: {error}") from error


def _check_used(used: int | None, sample_lens: Sequence[int], total: int) -> int:
    if used is None:
        return total
    if used not in (0, *accumulate(sample_lens)):
        raise ValueError(
            f"used: {used} real tokens end inside a sample; padding must be whole samples at the end"
        )
    return used


def _expand(splits: Sequence[Split], limit: int, device: torch.device) -> torch.Tensor:
    """The data of the mask on `device`; keys from row `limit` on are hidden."""
    load_operators()
    from_own_row = -1
    data: torch.Tensor = torch.ops.attnforge.mask_of_splits(
        [split.end for split in splits],
        [from_own_row if split.mode == "causal" else split.start for split in splits],
        [split.end if split.mode == "noise" else split.sample_end for split in splits],
        limit,
        device,
    )
    return data


def visible_from_definition(
    sample_lens: Sequence[int],
    split_lens: Sequence[int],
    attn_modes: Sequence[str],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """BAGEL's predicate from its definition, bool (S, S), [query, key]: the independent oracle of `PackedMask`.

    Key j is visible to query i iff they share a sample, and (j <= i or they share a full or noise split), and
    (j is not noise or they share its split). For small sizes and tests: it holds S x S.
    """
    _check(sample_lens, split_lens, attn_modes)
    names = [MODES.index(mode) for mode in attn_modes]
    mode = torch.repeat_interleave(torch.tensor(names), torch.tensor(split_lens)).to(device)
    split = torch.repeat_interleave(torch.arange(len(split_lens)), torch.tensor(split_lens)).to(device)
    sample = torch.repeat_interleave(torch.arange(len(sample_lens)), torch.tensor(sample_lens)).to(device)
    row = torch.arange(mode.numel(), device=device)
    same_sample = sample[:, None] == sample[None, :]
    same_split = split[:, None] == split[None, :]
    before = row[None, :] <= row[:, None]
    whole = same_split & (mode != MODES.index("causal"))[None, :]
    hidden = (mode == MODES.index("noise"))[None, :] & ~same_split
    visible: torch.Tensor = same_sample & (before | whole) & ~hidden
    return visible
