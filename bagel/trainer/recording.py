"""`attnforge.bagel.record(path)`: the packs of a running trainer as JSONL, for `search --packs FILE`."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from attnforge.bagel.packing import PackedMask
from attnforge.bagel.trainer.ports import pick
from attnforge.bagel.trainer.substitutes import from_dense

_NEEDED = ("sequence_length", "sample_lens", "nested_attention_masks", "split_lens", "attn_modes")


class Recording:
    """The result of `record`: it ends at `stop()`, or at the end of a `with`. `packs` counts the packs written."""

    def __init__(self, path: Path, owner: Any) -> None:
        self.path = path
        self.packs = 0
        self._lock = threading.Lock()
        self._owner = owner
        self._original: Callable[..., Any] = owner.forward
        self._wrapper = _wrap(self._original, self._write)
        owner.forward = self._wrapper
        self._active = True

    def stop(self) -> None:
        """Stop writing and restore Bagel.forward; a second call does nothing."""
        self._active = False
        # If other code wrapped ours meanwhile, ours stays and only forwards calls.
        if self._owner.forward is self._wrapper:
            self._owner.forward = self._original

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _write(self, arguments: dict[str, Any]) -> None:
        if not self._active:
            return
        line = (json.dumps(describe(arguments)) + "\n").encode()
        with self._lock:
            # Appended with one write: ranks may share the file.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
            self.packs += 1


def record(path: str | Path, *, trainer: Literal["bagel", "nemo"] | None = None) -> Recording:
    """Append every pack that Bagel.forward trains on to `path`, one JSON object a line, until `stop()`.

    A line has sample_lens, split_lens, attn_modes, used (real tokens) and vit_lens (lengths of the images in
    the vision encoder). With use_flex off the splits are read back from the dense masks: splits with the same
    mask, though perhaps not the ones that were packed. Works with and without `patch()`; costs a host sync a
    step. Ranks on one machine may share a file.

    trainer: as for `patch`. Raises RuntimeError if it cannot be imported or its forward is not as known.
    """
    port = pick(trainer)
    try:
        owner: Any = getattr(importlib.import_module(port.bagel), port.model)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"record: cannot import {port.model} from {port.bagel} ({error}); {port.remedy}, and call "
            "attnforge.bagel.patch() first where flash-attn is absent"
        ) from error
    names = inspect.signature(owner.forward).parameters
    if missing := [name for name in _NEEDED if name not in names]:
        raise RuntimeError(f"record: {port.bagel}.{port.model}.forward has no argument {', '.join(missing)}")
    return Recording(Path(path), owner)


def _wrap(original: Callable[..., Any], write: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        write(dict(signature.bind(*args, **kwargs).arguments))
        return original(*args, **kwargs)

    return forward


def describe(arguments: dict[str, Any]) -> dict[str, Any]:
    """The JSON line of a pack, from the arguments of Bagel.forward."""
    sample_lens = [int(n) for n in arguments["sample_lens"]]
    masks = arguments.get("nested_attention_masks")
    if masks is None:
        split_lens = [int(n) for n in arguments["split_lens"]]
        modes = list(arguments["attn_modes"])
    else:
        spans = from_dense(masks, sample_lens).mask(sum(sample_lens))
        split_lens, modes = splits_of(sample_lens, spans.starts, spans.ends)
    images = arguments.get("vit_token_seqlens")
    return {
        "sample_lens": sample_lens,
        "split_lens": split_lens,
        "attn_modes": modes,
        "used": int(arguments["sequence_length"]),
        "vit_lens": [] if images is None else [int(n) for n in images.tolist()],
    }


def splits_of(
    sample_lens: Sequence[int], starts: torch.Tensor, ends: torch.Tensor
) -> tuple[list[int], list[str]]:
    """split_lens and attn_modes whose mask is `starts`, `ends` int32 (tokens). ValueError if there are none."""
    splits = list(_runs(sample_lens, starts.tolist(), ends.tolist()))
    lens, modes = [length for length, _ in splits], [mode for _, mode in splits]
    mask = PackedMask(sample_lens, lens, modes, "cpu")
    if not (torch.equal(mask.starts, starts.cpu()) and torch.equal(mask.ends, ends.cpu())):
        raise ValueError("nested_attention_masks: not made of causal, full and noise splits, as a pack is")
    return lens, modes


def _runs(sample_lens: Sequence[int], starts: list[int], ends: list[int]) -> Iterator[tuple[int, str]]:
    """(length, mode) of splits that give the mask, if any do."""
    row = 0
    for length in sample_lens:
        last, text = row + length, 0  # text: rows of the present causal split so far
        while row < last:
            stop = row + 1
            while stop < last and starts[stop] == starts[row]:
                stop += 1
            if stop == row + 1 and ends[row] == last:
                text, row = text + 1, stop
                continue
            if text:
                yield text, "causal"
            yield stop - row, "noise" if ends[row] < last else "full"
            text, row = 0, stop
        if text:
            yield text, "causal"
