"""Inputs in many layouts, the float64 answer, and limits from what other programs get wrong in that dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnforge
from attnforge.runtime.masks import AnyMask, FunctionMask
from attnforge.runtime.search.reference import reference

NAMES = ("out", "dq", "dk", "dv")
# Error allowed as a multiple of the peers' (two of SDPA's backends or a flash attention, see `peers`), the worse of
# which counts: they round at different places, and either may be exact by luck (one key: weights of 1). In fp32
# the order counts.
RMS_RATIO = {torch.float32: 2.0, torch.bfloat16: 1.1, torch.float16: 1.1}
MAX_RATIO = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2.0}
EPSILON = {torch.float32: 1e-7, torch.bfloat16: 2e-4, torch.float16: 3e-5}
LSE_LIMIT = 1e-5  # of the largest; it is float32 in every dtype


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    seq_q: int = 65
    seq_k: int = 65
    head_dim: int = 64
    heads_kv: int = 2
    group: int = 1
    batch: int = 1
    dim_v: int = 0  # head_dim of v if it has its own


@dataclass(frozen=True)
class Inputs:
    """q, k, v of one call, all requiring grad, and dout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def grads(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)


def draw(shape: Shape, dtype: torch.dtype, device: str, layout: str = "bshd", seed: int = 0) -> Inputs:
    """Standard normal inputs whose memory is laid out as `layout` says."""
    generator = torch.Generator().manual_seed(seed)
    heads_q = shape.heads_kv * shape.group

    def one(heads: int, length: int, columns: int = shape.head_dim) -> Tensor:
        values = torch.randn(shape.batch, heads, length, columns, generator=generator, dtype=torch.float64)
        return place(values.to(dtype).to(device), layout).requires_grad_()

    q, k = one(heads_q, shape.seq_q), one(shape.heads_kv, shape.seq_k)
    dim_v = shape.dim_v or shape.head_dim
    return Inputs(q, k, one(shape.heads_kv, shape.seq_k, dim_v), one(heads_q, shape.seq_q, dim_v).detach())


def place(x: Tensor, layout: str) -> Tensor:
    """The values of x (B, H, S, D) in other memory. Whatever surrounds them is NaN."""
    batch, heads, length, dim = x.shape
    if layout == "bhsd":
        return x.contiguous()
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # (T, H, D), only for batch 1
        return x[0].transpose(0, 1).contiguous().transpose(0, 1)[None]
    if layout == "slice":  # the middle third of a fused projection, some rows in
        whole = x.new_full((batch, length + 6, 3, heads, dim), torch.nan)
        whole[:, 3:-3, 1] = x.transpose(1, 2)
        return whole[:, 3:-3, 1].transpose(1, 2)
    if layout == "offset":  # rows aligned to one element only
        whole = x.new_full((batch, heads, length + 2, dim + 3), torch.nan)
        whole[:, :, 1:-1, 1:-2] = x
        return whole[:, :, 1:-1, 1:-2]
    if layout == "loose":  # an axis of size 1 has any stride: nothing is ever multiplied by it
        x = x.contiguous()
        return x.as_strided(
            x.shape, [3 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]
        )
    if layout == "expanded":  # every head reads the first one
        return x[:, :1].contiguous().expand(x.shape)
    raise ValueError(layout)


def spans(seq_q: int, seq_k: int, device: str, seed: int = 0) -> attnforge.Spans:
    """Random intervals: a few long, a few empty, a few that begin before row 0 or end after the last."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(-1, seq_q + 2, (seq_k,), generator=generator, dtype=torch.int32)
    starts = ends - torch.randint(0, seq_q + 2, (seq_k,), generator=generator, dtype=torch.int32)
    hidden = seq_q // 3  # a row that no key shows itself to
    straddles = (starts <= hidden) & (hidden < ends)
    starts = torch.where(straddles, hidden + 1, starts).int()
    return attnforge.Spans(starts.to(device), ends.to(device))


def unions(
    seq_q: int, seq_k: int, count: int, device: str, planes: tuple[int, int] = (1, 1), seed: int = 0
) -> attnforge.Spans:
    """Random unions of `count` intervals, for each plane; some long, some empty, unsorted, overlapping, touching."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (*planes, count, seq_k), generator=generator, dtype=torch.int32)

    starts = integers(-2, seq_q + 1)
    long = torch.where(integers(0, 6) == 0, seq_q, seq_q // 8 + 1)
    ends = starts + (integers(0, 1 << 20) % long) - 1
    ends[:, :, -1] = torch.where(integers(0, 3)[:, :, 0] == 0, starts[:, :, 0], ends[:, :, -1])  # they touch
    hidden = seq_q // 3  # a row that sees no key
    starts = torch.where((starts <= hidden) & (hidden < ends), hidden + 1, starts)
    starts[..., seq_k // 2] = ends[..., seq_k // 2] if seq_k > 1 else starts[..., 0]  # a key that nobody sees
    return attnforge.Spans(starts.int().to(device), ends.int().to(device))


def dense(
    seq_q: int, seq_k: int, device: str, seed: int = 0, planes: tuple[int, int] | None = None
) -> attnforge.DenseMask:
    """Blocks that are seen whole, in part or not at all; a row and a key of each plane that see and show nothing.

    `planes` (batch or 1, heads_q or 1): a mask for each; None: one mask without these axes.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*(planes or ()), seq_q, seq_k)
    share = torch.rand((*shape[:-2], seq_q // 48 + 1, seq_k // 80 + 1), generator=generator).mul(3).sub(1)
    share = share.repeat_interleave(48, -2)[..., :seq_q, :].repeat_interleave(80, -1)[..., :seq_k]
    mask = torch.rand(shape, generator=generator) < share
    if seq_q > 1 and seq_k > 1:
        mask[..., seq_q // 3, :] = False
        mask[..., seq_k // 2] = False
    return attnforge.DenseMask(mask.to(device))


def make_mask(kind: str, seq_q: int, seq_k: int, device: str, seed: int = 0) -> AnyMask:
    """A mask by the name of its kind."""
    if kind == "full":
        return None
    if kind == "dense":
        return dense(seq_q, seq_k, device, seed)
    return attnforge.Causal() if kind == "causal" else spans(seq_q, seq_k, device, seed)


def visible(mask: AnyMask, seq_q: int, seq_k: int, device: str, heads_q: int = 1, batch: int = 1) -> Tensor:
    """Dense bool (seq_q, seq_k), with two more axes in front if the mask has them: planes of kv heads as of q heads."""
    if mask is None:
        return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    planes = {"batch": batch, "heads": heads_q} if isinstance(mask, FunctionMask) else {}
    seen = mask.visible(seq_q, seq_k, device, **planes)
    if seen.dim() == 4 and 1 < seen.shape[1] < heads_q:
        seen = seen.repeat_interleave(heads_q // seen.shape[1], 1)
    return seen


def peers(x: Inputs, mask: AnyMask, scale: float | None = None) -> tuple[tuple[Tensor, ...], ...]:
    """out, dq, dk, dv of SDPA's math backend, and of its flash backend where that can do the case.

    It can on a GPU in half precision, without a mask or with a causal one on a square, and with v as wide as q and k;
    elsewhere `flash` rounds as it would. In float32 on a GPU the fused peer is SDPA's memory-efficient backend, and
    math is no peer: it multiplies with fused multiply-adds, which round, where the fused one and ours have tensor
    cores, which cut off.
    """
    square = x.q.shape[2] == x.k.shape[2]
    causal = isinstance(mask, attnforge.Causal)
    single = x.q.dtype == torch.float32
    wide = x.q.shape[3] == x.v.shape[3]
    real = x.q.is_cuda and not single and wide and (mask is None or (causal and square))
    seen = visible(mask, x.q.shape[2], x.k.shape[2], str(x.q.device), x.q.shape[1], x.q.shape[0])
    return (
        efficient(x, seen, scale)
        if x.q.is_cuda and single
        else sdpa(x, SDPBackend.MATH, scale, attn_mask=seen),
        sdpa(x, SDPBackend.FLASH_ATTENTION, scale, is_causal=causal) if real else flash(x, mask, scale),
    )


def efficient(x: Inputs, seen: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of SDPA's memory-efficient backend, on what it cannot take as it is turned into what it can.

    It wants as many kv heads as q heads, rows of a multiple of 16 bytes, and a key for every query.
    """
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    group, unit = q.shape[1] // k.shape[1], 16 // q.element_size()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    blind = ~seen.any(-1, keepdim=True)
    queries, keys, values = (
        F.pad(t, (0, -t.shape[3] % unit)).clone(
            memory_format=torch.contiguous_format
        )  # odd strides of axes of 1, too
        for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen | blind, scale=scale)
    out = out[..., : v.shape[3]].masked_fill(blind, 0)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def sdpa(x: Inputs, backend: SDPBackend, scale: float | None, **masking: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one backend of SDPA in the dtype of x; it raises what the backend cannot do."""
    q, k, v = (t.detach().contiguous().requires_grad_() for t in (x.q, x.k, x.v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, **masking, scale=scale, enable_gqa=True)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), x.dout))


def flash(x: Inputs, mask: AnyMask, scale: float | None = None) -> tuple[Tensor, ...]:
    """out, dq, dk, dv as every flash attention rounds them: float32 but for the operands of matrix products.

    Unlike SDPA's math backend its backward starts from out and lse as forward stored them, rounded.
    """
    group, dtype = x.q.shape[1] // x.k.shape[1], x.q.dtype
    scale = x.q.shape[3] ** -0.5 if scale is None else scale
    q, do = x.q.detach().float(), x.dout.float()
    k, v = (t.detach().float().repeat_interleave(group, 1) for t in (x.k, x.v))
    seen = visible(mask, q.shape[2], k.shape[2], str(q.device), q.shape[1], q.shape[0])
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(-1e30)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights.to(dtype).float() @ v / total.clamp_min(1e-30)).to(dtype)
    weights = (scores - (top + total.clamp_min(1e-30).log())).exp()
    ds = weights * (do @ v.mT - (do * out.float()).sum(-1, keepdim=True))
    ds, weights = ds.to(dtype).float(), weights.to(dtype).float()
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ q * scale, weights.mT @ do))
    return tuple(t.to(dtype) for t in (out, ds @ k * scale, dk, dv))


def check(x: Inputs, mask: AnyMask, scale: float | None = None, slack: float = 1.0) -> None:
    """Run attention forward and backward on x; AssertionError if anything is further off than it may be."""
    out, lse = attnforge.attention(x.q, x.k, x.v, mask, scale=scale, return_lse=True)
    ours = (out.detach(), *x.grads(out))
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, scale, x.dout)
    answers = (exact.out, exact.dq, exact.dk, exact.dv)
    theirs = zip(*peers(x, mask, scale), strict=True)
    for name, mine, pair, answer in zip(NAMES, ours, theirs, answers, strict=True):
        assert answer is not None
        compare(name, mine, pair, answer, slack)
    blind = exact.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    if not blind.all():
        size = exact.lse[~blind].abs().max().clamp_min(1)
        assert ((lse - exact.lse)[~blind].abs() <= LSE_LIMIT * size).all()
    assert not ours[0][blind].any(), "out of a row without keys"
    assert not ours[1][blind].any(), "dq of a row without keys"


def compare(name: str, mine: Tensor, theirs: tuple[Tensor, ...], exact: Tensor, slack: float = 1.0) -> None:
    """Limits of rms and largest error: those of the worst peer, times the ratios above, times `slack`."""
    assert torch.isfinite(mine).all(), f"{name} is not finite"
    atol = EPSILON[mine.dtype] * max(exact.abs().max().item(), 1.0)
    rms, worst = distance(mine, exact)
    rms_peer, worst_peer = (
        max(numbers) for numbers in zip(*(distance(p, exact) for p in theirs), strict=True)
    )
    limit = slack * RMS_RATIO[mine.dtype] * rms_peer + atol
    assert rms <= limit, f"{name}: rms error {rms:.3g}, peers' {rms_peer:.3g}"
    limit = slack * MAX_RATIO[mine.dtype] * worst_peer + 4 * atol
    assert worst <= limit, f"{name}: error {worst:.3g}, peers' {worst_peer:.3g}"


def distance(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and largest absolute difference."""
    error = (x - exact).abs()
    return error.pow(2).mean().sqrt().item(), error.max().item()


def check_deterministic(x: Inputs, mask: attnforge.Spans | attnforge.DenseMask) -> None:
    """Five runs give the same bits, which are right."""
    first, *others = (attnforge.attention(x.q, x.k, x.v, mask, deterministic=True) for _ in range(5))
    grads = x.grads(first)
    for other in others:
        assert torch.equal(first, other)
        assert all(torch.equal(a, b) for a, b in zip(grads, x.grads(other), strict=True))
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, dout=x.dout)
    for grad, answer in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
        assert answer is not None
        assert (grad - answer).abs().max().item() < 2e-2 * answer.abs().max().item()


def check_schedules_of_layers(x: Inputs, mask: attnforge.Spans | attnforge.DenseMask) -> None:
    """Three layers share one schedule for each pass."""
    y = x.q
    for _ in range(3):
        y = attnforge.attention(y, x.k, x.v, mask)
    y.backward(x.dout)
    assert torch.ops.attnforge.schedule_count(mask.data) == 2
