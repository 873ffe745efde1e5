"""Python's half of the operators in launcher.cpp: fake kernels for tracing, and functions that the C++ calls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnforge.codegen.formula import MAX_TENSORS
from attnforge.codegen.score import ScoreMod
from attnforge.runtime import canary, dispatch, inputs, kernels
from attnforge.runtime.build.settings import settings
from attnforge.runtime.integrations import flop_counter
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.native.layout import like, output


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kind: int,
    scale: float | None,
    deterministic: bool = False,
    visible: int = 0,
    variant: int = 0,
    score: str = "",
    score0: Tensor | None = None,
    score1: Tensor | None = None,
    score2: Tensor | None = None,
    score3: Tensor | None = None,
    mask_mod: str = "",
) -> tuple[Tensor, Tensor]:
    inputs.check_forward(q, k, v, mask, kind, scale, mask_mod=mask_mod)
    inputs.check_score(q, k, score, (score0, score1, score2, score3), mask_mod)
    return output(q, v), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    kind: int,
    scale: float | None,
    deterministic: bool = False,
    visible: int = 0,
    dlse: Tensor | None = None,
    variant: int = 0,
    score: str = "",
    score0: Tensor | None = None,
    score1: Tensor | None = None,
    score2: Tensor | None = None,
    score3: Tensor | None = None,
    mask_mod: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    inputs.check_forward(q, k, v, mask, kind, scale, mask_mod=mask_mod)
    inputs.check_score(q, k, score, (score0, score1, score2, score3), mask_mod)
    inputs.check_backward(q, v, dout, out, lse, dlse)
    return like(q), like(k), like(v)


def _score_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> list[Tensor]:
    results = _backward(dout, q, k, v, *rest, **named)
    # The arguments behind v, with their defaults.
    values = dict(zip(_BEHIND_V, rest, strict=False)) | named
    tensors = [values.get(f"score{i}") for i in range(MAX_TENSORS)]
    wanted = ScoreMod(values.get("score", "")).wanted
    gradients = [x for i, x in enumerate(tensors) if i in wanted and x is not None]
    return [*results, *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in gradients)]


_BEHIND_V = tuple(inspect.signature(_backward).parameters)[4:]


def _complain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kind: int,
    scale: float | None,
    visible: int,
    dout: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    dlse: Tensor | None,
    score: str = "",
    score0: Tensor | None = None,
    score1: Tensor | None = None,
    score2: Tensor | None = None,
    score3: Tensor | None = None,
    mask_mod: str = "",
) -> None:
    inputs.check_forward(q, k, v, mask, kind, scale, visible, mask_mod)
    inputs.check_score(q, k, score, (score0, score1, score2, score3), mask_mod)
    if dout is not None and out is not None and lse is not None:
        inputs.check_backward(q, v, dout, out, lse, dlse)


# ---- The data of masks: see runtime/native/masks.h


def _data(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def _mask_of_spans(starts: Tensor, ends: Tensor) -> Tensor:
    return _data(starts, *starts.shape[:-1], 2, starts.shape[-1])


def _mask_of_pairs(visible: Tensor) -> Tensor:
    planes = (
        [1, 1] if visible.dim() == 2 else [1 if visible.stride(i) == 0 else visible.shape[i] for i in (0, 1)]
    )
    return _data(visible, *planes, visible.shape[-2], (visible.shape[-1] + 31) // 32)


def _mask_of_documents(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seq_q: int, seq_k: int, left: int, right: int
) -> Tensor:
    return _data(cu_seqlens_q, 2, seq_k)


def _mask_of_splits(
    ends: list[int], firsts: list[int], lasts: list[int], limit: int, device: torch.device
) -> Tensor:
    return torch.empty((2, ends[-1] if ends else 0), dtype=torch.int32, device=device)


def _mask_of_function(seq_k: int, device: torch.device) -> Tensor:
    return torch.empty((1,), dtype=torch.int32, device=device)


def _mask_of_data(data: Tensor) -> Tensor:
    return _data(data, *data.shape)


_FAKES: dict[str, Callable[..., object]] = {
    "forward": _forward,
    "backward": _backward,
    "score_backward": _score_backward,
    "mask_of_spans": _mask_of_spans,
    "mask_of_pairs": _mask_of_pairs,
    "mask_of_documents": _mask_of_documents,
    "mask_of_splits": _mask_of_splits,
    "mask_of_function": _mask_of_function,
    "mask_of_data": _mask_of_data,
}
_ANSWERS: dict[str, Callable[..., object]] = {
    "complain": _complain,
    "resolve": dispatch.resolve,
    "load_mask_kernels": kernels.load_mask_kernels,
}
_lock = threading.Lock()
_complete = False
_kept: list[torch.library.Library] = []  # what it registers ends with it


def operators() -> None:
    """Make `torch.ops.attnforge` usable: load the extension, then register what Python adds. Errors as `launcher`."""
    global _complete
    if _complete:
        return
    with _lock:
        if _complete:
            return
        launcher()
        for name, function in _FAKES.items():
            torch.library.register_fake(f"attnforge::{name}", function)
        for name, function in _ANSWERS.items():
            torch.library.impl(f"attnforge::{name}", "CompositeExplicitAutograd", function)
        from attnforge.runtime.integrations import (
            transforms as transforms,  # it needs the operators at import
        )

        flop_counter.register()
        if every := settings().canary:
            _kept.append(canary.install(every))
        _complete = True
