"""A policy of selective activation checkpointing: keep the results of attention, recompute the rest.

Plain checkpointing runs a layer's forward again before its backward. Attention's out and lse are expensive to compute
again and cheap to keep: one hidden state, and one float32 per head and row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from attnforge.runtime.build.settings import disabled
from attnforge.runtime.native.operators import operators


def save_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` under which `attnforge.attention` does not run again when a layer is recomputed.

        checkpoint(layer, x, use_reentrant=False, context_fn=attnforge.save_attention)
        checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=attnforge.save_attention)

    The second composes with FSDP: wrap first, then shard. torch refuses a `context_fn` for reentrant checkpoints. To
    keep other results too, give `create_selective_checkpoint_contexts` a policy that calls `save_attention_policy` for
    the operators that it does not handle. With ATTNFORGE_DISABLE=1 all is recomputed, as without a `context_fn`.
    """
    if disabled("attnforge.save_attention", "checkpointed layers recompute all of their forward"):
        plain: tuple[Any, Any] = create_selective_checkpoint_contexts(_recompute)
        return plain
    operators()  # the operator must exist to be recognised
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(save_attention_policy)
    return contexts


def _recompute(_context: Any, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_attention_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of `save_attention`, as `create_selective_checkpoint_contexts` takes it."""
    if op is torch.ops.attnforge.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
