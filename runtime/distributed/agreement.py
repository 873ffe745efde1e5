"""Whether all ranks make the same call of context parallelism. Otherwise they would hang, or compute wrong results.

An all-reduce compares one number, a hash of the arguments. Only if it differs are the arguments themselves
gathered, for a message that every rank raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnforge.runtime.masks import DenseMask, FunctionMask, Spans
from attnforge.runtime.scores import Score

ERROR = "error"  # the name under which a rank reports that its arguments are refused


def describe(**arguments: object) -> dict[str, str]:
    """Arguments in words, with hashes of a mask's contents and of a function's text. Copies to the host."""
    return {name: _describe(x) for name, x in arguments.items()}


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.dtype}"
    if isinstance(x, Spans):
        return (
            f"Spans of {x.seq_k} keys, planes {x.planes}, contents {_hash(x.data.cpu().numpy().tobytes()):x}"
        )
    if isinstance(x, DenseMask):
        # A mask may be larger than what should be copied to the host. Its total alone would not tell rows exchanged.
        sums = (x.data.sum(axis, dtype=torch.int64).cpu().numpy().tobytes() for axis in (-1, -2))
        return f"DenseMask {tuple(x.shape)}, contents {_hash(b''.join(sums)):x}"
    if isinstance(x, FunctionMask):
        read = b"".join(t.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes() for t in x.tensors)
        return f"mask_mod {tuple(x.shape)}, text {_hash(x.text.encode()):x}, contents {_hash(read):x}"
    if isinstance(x, Score):
        return (
            f"a function, text {_hash(x.text.encode()):x}, of tensors {[tuple(t.shape) for t in x.captured]}"
        )
    return str(x)


def can_compare() -> bool:
    """False in a trace and while a CUDA graph is captured, where no values can be read."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def debug_is_detail() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch, too, compares the arguments of collectives."""
    module: Any = dist
    return bool(module.get_debug_level() == module.DebugLevel.DETAIL)


def expect_same(group: Any, device: torch.device, mine: Mapping[str, str]) -> None:
    """Raises ValueError on all ranks of `group` if they pass different `mine`: arguments in words, by name.

    A rank whose arguments are refused passes {ERROR: message} and raises its own error.
    """
    digest = _hash(repr(sorted(mine.items())).encode())
    both = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    most, least = both.tolist()
    if most == -least:
        return
    ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(ranks, dict(mine), group=group)
    if ERROR in mine:
        return
    raise ValueError(_difference(ranks))


def _difference(ranks: list[dict[str, str]]) -> str:
    """The message about the first argument that is not the same on all ranks."""
    for rank, given in enumerate(ranks):
        if ERROR in given:
            return f"context_parallel: rank {rank} of the mesh refused its arguments: {given[ERROR]}"
    name = next(name for name in ranks[0] if len({given[name] for given in ranks}) > 1)
    first = ranks[0][name]
    other = next(rank for rank, given in enumerate(ranks) if given[name] != first)
    return (
        f"{name}: ranks make different calls: rank 0 of the mesh has {first}, rank {other} has {ranks[other][name]}; "
        "expected the same on all ranks"
    )


def _hash(data: bytes) -> int:
    """56 bits, so that its negative is an int64, too."""
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "big")
