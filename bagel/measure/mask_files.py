"""Masks from files: what `--mask FILE` and `attnforge mask FILE` read."""

from __future__ import annotations

import math
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from attnforge.codegen.spec import MAX_INTERVALS
from attnforge.runtime.inputs import MAX_INDEX
from attnforge.runtime.masks import DenseMask, Spans, seen_by, visible_keys_of

SUFFIXES = (".npy", ".npz")
EXPECTED = (
    "expected a bool array in .npy, (seq_q, seq_k) or (batch or 1, heads_q or 1, seq_q, seq_k), True = visible; or "
    "a .npz with it as `mask`, or with signed integers `starts` and `ends`, both (seq_k), (n, seq_k) or "
    "(batch or 1, heads or 1, n, seq_k) with n of 1 to 4 intervals, and, if it is not seq_k, `seq_q`"
)


def is_mask_file(name: str) -> bool:
    """Whether a pack's name is that of a mask file."""
    return name.endswith(SUFFIXES)


def read_mask(path: Path, device: torch.device | str) -> tuple[Spans | DenseMask, int]:
    """The mask in a file, on `device`, and its number of queries. Raises ValueError naming the file."""
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"mask": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except FileNotFoundError:
        raise ValueError(f"mask: there is no file {path}") from None
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"mask: {path} cannot be read ({error}); {EXPECTED}") from None
    if "mask" in arrays:
        return _dense(path, arrays["mask"], device)
    if {"starts", "ends"} <= arrays.keys():
        return _spans(path, arrays, device)
    raise ValueError(f"mask: {path} holds {', '.join(arrays) or 'nothing'}; {EXPECTED}")


def _dense(path: Path, array: npt.NDArray[np.generic], device: torch.device | str) -> tuple[DenseMask, int]:
    if array.dtype != np.bool_ or array.ndim not in (2, 4):
        raise ValueError(f"mask: {path} is an array of {array.dtype} of shape {array.shape}; {EXPECTED}")
    if array.size == 0:
        raise ValueError(f"mask: {path} has no pairs, its shape is {array.shape}")
    mask = DenseMask(torch.from_numpy(array).to(device))
    return mask, mask.seq_q


def _spans(
    path: Path, arrays: dict[str, npt.NDArray[np.generic]], device: torch.device | str
) -> tuple[Spans, int]:
    starts, ends = arrays["starts"], arrays["ends"]
    intervals = starts.shape[-2] if starts.ndim > 1 else 1
    whole = starts.ndim in (1, 2, 4) and starts.shape == ends.shape and 1 <= intervals <= MAX_INTERVALS
    if not whole or {starts.dtype.kind, ends.dtype.kind} != {"i"}:
        raise ValueError(
            f"mask: {path} has starts of {starts.dtype} {starts.shape} and ends of {ends.dtype} {ends.shape}; "
            + EXPECTED
        )
    keys = starts.shape[-1]
    rows = arrays.get("seq_q", np.array(keys))
    if rows.size != 1 or rows.dtype.kind not in "iu" or not 1 <= rows.item() <= MAX_INDEX or starts.size == 0:
        raise ValueError(
            f"mask: {path} has {keys} keys and seq_q {rows.tolist()}, expected 1 or more of each"
        )
    seq_q = int(rows.item())
    # No query is beyond int32, so clamped bounds show the same pairs.
    first, last = (torch.from_numpy(x.clip(-MAX_INDEX, MAX_INDEX).astype(np.int32)) for x in (starts, ends))
    disjoint = Spans(first, last)
    visible_keys = visible_keys_of(disjoint.starts, disjoint.ends, seq_q)
    return Spans(first.to(device), last.to(device), visible_keys=visible_keys), seq_q


def visible_pairs(mask: Spans, seq_q: int) -> float:
    """Visible pairs of the queries 0 <= i < seq_q; the average of the mask's planes."""
    return int(seen_by(mask.starts, mask.ends, seq_q).sum()) / math.prod(mask.planes)
