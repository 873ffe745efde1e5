"""`cudnn.flex_attention` (package nvidia-cudnn-frontend) as a peer: masks as intervals of keys for each query."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.reference import visible_rows

CHUNK = 1 << 26  # pairs that are held at a time
INSTALL = "pip install 'nvidia-cudnn-frontend[cutedsl]==1.32.0'"
MOST = 33  # endpoints of a row: masks of more intervals are not what it is for


def installed() -> bool:
    """Whether a cuDNN frontend with flex_attention is installed; does not import it."""
    return find_spec("cudnn") is not None and find_spec("cudnn.flex_attention") is not None


def attention(case: Case) -> Attention:
    """cudnn.flex_attention on a case, its mask planned before. Raises Unavailable without it or with other masks."""
    return planner(case)()


def planner(case: Case) -> Callable[[], Attention]:
    """A function that plans the case's mask anew and returns the attention. Raises as `attention`."""
    require()
    ends = endpoints(case)
    x = case.inputs()

    def planned() -> Attention:
        attend = plan(ends, _bshd(x.q), _bshd(x.k), _bshd(x.v), case.scale)
        return lambda q, k, v: attend(_bshd(q), _bshd(k), _bshd(v)).transpose(1, 2)

    return planned


def require() -> None:
    """Imports it. Raises Unavailable without a cuDNN frontend with flex_attention."""
    if not installed():
        raise Unavailable(f"nvidia-cudnn-frontend with flex_attention is not installed: {INSTALL}")
    cudnn = importlib.import_module("cudnn")
    try:
        cudnn.create_mask_plan  # noqa: B018 (loaded at first use, with packages that may be missing)
    except ImportError as error:
        raise Unavailable(f"cudnn.flex_attention cannot be loaded: {error}; {INSTALL}") from error


def plan(ends: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Attention:
    """The attention of a mask as `endpoints` has it, on tensors (batch, seq, heads, head_dim) of these sizes."""
    cudnn = importlib.import_module("cudnn")
    made = cudnn.create_mask_plan(ends, q, k, v, build_backward=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = cudnn.flex_attn_func(q, k, v, mask_plan=made, softmax_scale=scale)
        return out

    return call


def _bshd(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def endpoints(case: Case) -> Tensor:
    """int32 (1, n, batch * seq_q), n odd: query i sees keys [0, F0), [F1, F2), ...; rows of fewer end in seq_k.

    Raises Unavailable for masks that differ between batch entries or heads, or have more than MOST endpoints.
    """
    step = max(1, CHUNK // case.seq_k)
    chunks = [
        _rows(case, torch.arange(begin, min(begin + step, case.seq_q), device=case.device))
        for begin in range(0, case.seq_q, step)
    ]
    width = max(chunk.shape[1] for chunk in chunks)
    if width > MOST:
        raise Unavailable(f"a row of the mask has {width} endpoints, more than cudnn-flex supports here")
    padded = [
        torch.nn.functional.pad(chunk, (0, width - chunk.shape[1]), value=case.seq_k) for chunk in chunks
    ]
    return torch.cat(padded).T.repeat(1, case.batch)[None].contiguous()


def _rows(case: Case, rows: Tensor) -> Tensor:
    """Endpoints of some query rows, int32 (R, n)."""
    planes = visible_rows(case.mask, rows, case.seq_q, case.seq_k, case.batch, case.heads_q)
    if planes.shape[:2] != (1, 1):
        raise Unavailable(
            "masks that differ between batch entries or heads are not supported for cudnn-flex here"
        )
    seen = planes[0, 0]
    ones, zeros = seen.new_ones(len(rows), 1), seen.new_zeros(len(rows), 1)
    # With a visible key before the first and a hidden one after the last, each change is an endpoint.
    changes = torch.cat((ones, seen), 1) != torch.cat((seen, zeros), 1)
    counts = changes.sum(1)
    found = torch.full((len(rows), int(counts.max())), case.seq_k, dtype=torch.int32, device=rows.device)
    row, position = changes.nonzero(as_tuple=True)
    first = counts.cumsum(0) - counts
    found[row, torch.arange(len(row), device=rows.device) - first[row]] = position.int()
    return found
