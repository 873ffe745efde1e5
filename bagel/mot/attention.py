"""Attention on packed rows by three operators: ours, FlexAttention and SDPA as BAGEL calls them.

Each makes a mask once a micro-step, for all layers, and takes q (T, heads_q, head_dim), k and v (T, heads_kv,
head_dim) to (T, heads_q, head_dim). T counts real tokens; operators that need padding add and remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnforge.bagel.packing import PackedMask
from attnforge.runtime.distributed.context_parallel import context_parallel
from attnforge.runtime.ops import attention

OPERATORS = ("attnforge", "flex", "sdpa")


class Operator(Protocol):
    """The interface of an attention operator of MotAttention."""

    fused_prologue: bool  # norms and rotary embedding by `qk_norm_rope`, not by torch's modules

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> Any:
        """The mask of one pack, as `__call__` takes it; see packing.py for the lists."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor: ...


def make_operator(
    name: str,
    heads_q: int,
    max_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    cp: DeviceMesh | None = None,
) -> Operator:
    """One of OPERATORS. Raises ValueError for another name.

    `max_tokens`: the length that FlexAttention pads to; `dtype`: of SDPA's masks, that of q; `deterministic`: of
    our gradients; `cp`: the ranks that share the rows of a pack, for ours only.
    """
    if name == "attnforge":
        return Ours(deterministic, cp)
    if cp is not None:
        raise ValueError(f"cp: attention is {name!r}, but rows are shared among ranks by 'attnforge' only")
    if name == "flex":
        return Flex(heads_q, max_tokens)
    if name == "sdpa":
        return PerSample(dtype)
    raise ValueError(f"attention: got {name!r}, accepted are {', '.join(OPERATORS)}")


class Ours:
    """attnforge.attention: packed rows as views, no padding, a mask of two int32 per key.

    With `cp`, rows are this rank's share of the pack's, and the mask is that of the whole pack.
    """

    fused_prologue = True

    def __init__(self, deterministic: bool = False, cp: DeviceMesh | None = None) -> None:
        self.deterministic = deterministic
        self.attention: Callable[..., Tensor] = attention if cp is None else context_parallel(cp).attention

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> PackedMask:
        return PackedMask(sample_lens, split_lens, attn_modes, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        # Not [0], whose gradient is copied into zeros.
        return self.attention(q, k, v, mask, deterministic=self.deterministic).squeeze(0).transpose(0, 1)


class Flex:
    """FlexAttention as BAGEL calls it: rows padded to a fixed length, head-major copies, a BlockMask of all heads.

    On the CPU torch has no gradients of it.
    """

    fused_prologue = False

    def __init__(self, heads_q: int, max_tokens: int) -> None:
        self.heads_q = heads_q
        self.max_tokens = max_tokens

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        rest = self.max_tokens - sum(sample_lens)
        if rest < 0:
            raise ValueError(
                f"pack: {sum(sample_lens)} tokens, more than the {self.max_tokens} that flex pads to; raise max_tokens"
            )
        # As BAGEL: padding is a sample of one causal split.
        mod = _mask_mod([*sample_lens, rest], [*split_lens, rest], [*attn_modes, "causal"], device)
        size = self.max_tokens
        # Compiled, nothing S x S is stored; on the CPU compiling costs more than it saves.
        compiled = device.type == "cuda"
        return create_block_mask(mod, 1, self.heads_q, size, size, device, BLOCK_SIZE=128, _compile=compiled)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        rows = q.shape[0]
        flex = _flex(q.is_cuda)
        padded = (_pad(x.transpose(0, 1), self.max_tokens - rows)[None] for x in (q, k, v))
        out: Tensor = flex(*padded, block_mask=mask, enable_gqa=True)
        return out[0, :, :rows].transpose(0, 1)


def _pad(x: Tensor, rows: int) -> Tensor:
    """x (H, T, D), padded with rows of zeros."""
    return torch.cat([x, x.new_zeros(x.shape[0], rows, x.shape[2])], dim=1)


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:  # on the CPU, where torch has a forward pass only
        return flex_attention
    # As BAGEL: each pack's mask is a new function, and none may run uncompiled.
    torch._dynamo.config.cache_size_limit = 512
    torch._dynamo.config.accumulated_cache_size_limit = 4096
    return torch.compile(flex_attention, dynamic=False)


def _mask_mod(
    sample_lens: Sequence[int], split_lens: Sequence[int], attn_modes: Sequence[str], device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """BAGEL's predicate, from one number per row and property; -1: the row lacks the property."""
    from torch.nn.attention.flex_attention import and_masks, or_masks

    def rows(values: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(lengths)).to(device)

    count = range(len(split_lens))
    sample = rows(range(len(sample_lens)), sample_lens)
    image = rows([-1 if attn_modes[i] == "causal" else i for i in count], split_lens)
    noise = rows([i if attn_modes[i] == "noise" else -1 for i in count], split_lens)

    def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def same_image(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (image[i] == image[j]) & (image[i] >= 0)

    def not_foreign_noise(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~((noise[j] >= 0) & (noise[i] != noise[j]))

    def same_sample(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sample[i] == sample[j]

    mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = and_masks(
        or_masks(before, same_image), not_foreign_noise, same_sample
    )
    return mod


class PerSample:
    """BAGEL without FlexAttention: one SDPA call per sample with a dense additive mask, k and v repeated."""

    fused_prologue = False

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype

    def mask(
        self,
        sample_lens: Sequence[int],
        split_lens: Sequence[int],
        attn_modes: Sequence[str],
        device: torch.device,
    ) -> list[tuple[int, int, Tensor]]:
        """(first row, end, (n, n) of 0 and -inf) of every sample that has rows."""
        spans = PackedMask(sample_lens, split_lens, attn_modes, device)
        samples = []
        for end, size in zip(accumulate(sample_lens), sample_lens, strict=True):
            if size:
                row = torch.arange(end - size, end, device=device)[:, None]
                starts, ends = spans.starts[end - size : end], spans.ends[end - size : end]
                hidden = (row < starts) | (row >= ends)
                bias = torch.zeros(size, size, dtype=self.dtype, device=device)
                samples.append((end - size, end, bias.masked_fill_(hidden, -torch.inf)))
        return samples

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: list[tuple[int, int, Tensor]]) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        backends = (
            [SDPBackend.EFFICIENT_ATTENTION] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        )
        parts = []
        with sdpa_kernel(backends):
            for start, end, bias in mask:
                one, keys, values = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
                out = F.scaled_dot_product_attention(one, keys, values, attn_mask=bias)
                parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)
