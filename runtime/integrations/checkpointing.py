"""A policy of selective activation checkpointing: keep what attention returned, recompute the rest.

Plain checkpointing runs every layer's forward again before its backward. What is cheap to keep and dear to compute
again is attention's output with its lse: one hidden state and one float32 a head and row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from attnforge.runtime.native.operators import operators


def save_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts under which `attnforge.attention` runs once, not again when a layer is recomputed.

    It is a `context_fn`:

        checkpoint(layer, x, use_reentrant=False, context_fn=attnforge.save_attention)
        checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=attnforge.save_attention)

    The second composes with FSDP: wrap first, then shard. torch offers no `context_fn` for reentrant checkpoints
    and says so. To keep other operators too, give `create_selective_checkpoint_contexts` a policy of your own that
    asks `save_attention_policy` first.
    """
    operators()  # the operator must exist to be recognised
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(save_attention_policy)
    return contexts


def save_attention_policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of `save_attention`, as `create_selective_checkpoint_contexts` takes it."""
    if op is torch.ops.attnforge.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
