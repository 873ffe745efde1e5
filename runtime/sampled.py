"""Attention at a few rows and keys in float64, with error bounds for the kernels' results.

The work is O(samples x length). canary.py compares kernels with these values while a program trains.

The bounds are a first-order analysis of flash attention's rounding errors. F = 2^-24 is the unit roundoff of float32, u
that of the dtype, P that of the operands of matrix products (u for 16-bit types, 2^-21 for float32), w the exact
weights, s the exact scores, D head_dim and n the number of keys:

    scores     e_ij = F ((D + 16) scale sum_d |q_id| |k_jd| + 8 (|s_ij| + |max_j s_ij| + |lse_i|)),  r = expm1(e)
    out        sum_j w_ij |v_j| (r_ij + sum_j w_ij r_ij + 2 P + n F) + u |out|
    dS         w_ij (r_ij |dP - delta| + error(dP) + error(delta)) + P |dS|
    dq, dk, dv the errors of dS and w, propagated through the sums that define them, + u times the result

A score function multiplies e by its derivative. Gradients are those that follow from the backward's inputs: out and lse
are taken as given. `Sample.spread` is the standard deviation of the error if the roundings are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Mask
from attnforge.runtime.score_trace import evaluate, program_evaluator

SINGLE = 2.0**-24
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OPERAND = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
EXPLODES = 0.5  # error of the exponent above which results have no bound
LARGEST_LSE = 2.0**22  # rows with a larger |lse| get zero gradients
SCORE_ROUNDINGS = 64  # relative error of a score function, in units of F


@dataclass(frozen=True)
class Call:
    """The tensors of one call, as the operators get them.

    mask: the data of `kind`, or None; unused if there is a mask_mod.
    captured: tensors of the score function, then those of the mask function.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    kind: Mask
    scale: float
    score: ScoreMod
    captured: tuple[Tensor, ...] = ()  # of score, then of mask_mod
    mask_mod: MaskMod = field(default_factory=MaskMod)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def plane(self, b: int, h: int) -> Tensor:
        """The mask data of one batch entry and query head: (n, 2, Sk) for Spans, (Sq, words) for a DenseMask."""
        assert self.mask is not None
        if self.mask.dim() == 2:
            return self.mask[None]
        planes = self.mask.shape[:2]
        return self.mask[b % planes[0], h * planes[1] // self.q.shape[1]]

    def visible(self, b: int, h: int, rows: Tensor, keys: Tensor) -> Tensor:
        """bool (R, C): which of the keys (C,) each of the rows (R,) sees."""
        row, key = rows[:, None], keys[None]
        if self.mask_mod:
            captured = self.captured[len(self.score.tensors) :]
            found = evaluate(self.mask_mod, indices_of(b, h, rows, keys), captured)
            return found.expand(rows.numel(), keys.numel())
        if self.kind is Mask.CAUSAL:
            return key <= row + (self.k.shape[2] - self.q.shape[2])
        if self.kind is Mask.SPANS:
            starts, ends = self.plane(b, h)[..., keys].unbind(1)
            return ((starts[:, None] <= row) & (row < ends[:, None])).any(0)
        if self.kind is Mask.DENSE:
            words = self.plane(b, h)[row, key >> 5]
            return ((words >> (key & 31)) & 1).bool()
        return torch.ones(rows.numel(), keys.numel(), dtype=torch.bool, device=rows.device)


@dataclass(frozen=True)
class Sample:
    """One result at sampled indices, with its exact value and error bounds. R samples of C columns."""

    name: str  # out, lse, dq, dk, dv
    batch: int
    head: int  # of q; of k for dk and dv
    index: Tensor  # (R,): rows of q, or keys for dk and dv
    got: Tensor  # (R, columns); of lse (R, 1)
    exact: Tensor
    bound: Tensor
    spread: Tensor


@dataclass(frozen=True)
class _Scores:
    """Scores of rows and keys, (R, C).

    error: bound on the absolute error of the exponent s - row_max, without the terms of row_max and lse.
    slope: derivative of the score function.
    """

    value: Tensor  # (R, C), 0 where hidden
    seen: Tensor
    error: Tensor
    slope: Tensor


def _scores(call: Call, b: int, h: int, rows: Tensor, keys: Tensor, q: Tensor, k: Tensor) -> _Scores:
    s = q @ k.mT * call.scale
    error = terms(q.shape[1]) * (q.abs() @ k.abs().mT * call.scale)
    seen, slope = call.visible(b, h, rows, keys), torch.ones((), dtype=s.dtype, device=s.device)
    if call.score:
        raw = s
        s, slope = apply_score(call.score, raw, indices_of(b, h, rows, keys), call.captured)
        seen = seen & (s != -torch.inf)
        error = error * slope.abs() + SCORE_ROUNDINGS * SINGLE * (1 + s.abs() + raw.abs())
    s, error, slope = (x.expand(seen.shape).masked_fill(~seen, 0) for x in (s, error, slope))
    return _Scores(s, seen, error + 8 * SINGLE * s.abs(), slope)


def terms(n: int) -> float:
    """Bound on the relative error of a float32 sum of n products."""
    return SINGLE * (n + 16)


def forward_samples(call: Call, b: int, h: int, rows: Tensor, out: Tensor, lse: Tensor) -> list[Sample]:
    """out and lse at query rows `rows` of query head h. out: (B, Hq, Sq, Dv), lse: (B, Hq, Sq)."""
    unit, operand, tiny = (table[call.q.dtype] for table in (UNIT, OPERAND, TINY))
    q, k, v = _plane(call, b, h, rows)
    keys = torch.arange(k.shape[0], device=k.device)
    x = _scores(call, b, h, rows, keys, q, k)
    hidden = x.value.masked_fill(~x.seen, -torch.inf)
    exact_lse = hidden.logsumexp(1, keepdim=True)
    blind = ~x.seen.any(1, keepdim=True)
    base, row_max = (y.masked_fill(blind, 0).nan_to_num() for y in (exact_lse, hidden.amax(1, keepdim=True)))
    w = (x.value - base).exp().masked_fill(~x.seen, 0)
    error = (x.error + 8 * SINGLE * (row_max.abs() + base.abs())).masked_fill(~x.seen, 0)
    lost = error.amax(1, keepdim=True) > EXPLODES
    r = error.expm1()
    mean, many = (w * r).sum(1, keepdim=True), 2 * terms(k.shape[0])
    exact = w @ v
    bound = (w * (r + mean + 2 * operand + many) + x.seen * 2 * tiny) @ v.abs() + unit * exact.abs()
    bound = (bound * 1.01 + tiny * (1 + k.shape[0])).masked_fill(lost, torch.inf)
    variance = (w * (r + operand)).square() @ v.square() + (unit * exact).square() + (mean * exact).square()
    of_lse = (mean + many + 8 * SINGLE * (1 + base.abs() + row_max.abs())).masked_fill(lost, torch.inf)
    got = (out[b, h, rows].double(), lse[b, h, rows].double()[:, None])
    return [
        Sample("out", b, h, rows, got[0], exact, bound, (variance / 3).sqrt()),
        Sample("lse", b, h, rows, got[1], exact_lse, of_lse, of_lse),
    ]


@dataclass(frozen=True)
class Given:
    """Inputs of the backward that are not in `Call`, and its results."""

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class _Pairs:
    """Weights w and score gradients ds of rows and keys (R, C), with bounds on their errors, and dout of the rows."""

    w: Tensor
    w_error: Tensor
    ds: Tensor
    ds_error: Tensor
    do: Tensor  # (R, Dv)


def _pairs(
    call: Call, given: Given, b: int, h: int, rows: Tensor, keys: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> _Pairs:
    operand, tiny = OPERAND[call.q.dtype], TINY[call.q.dtype]
    x = _scores(call, b, h, rows, keys, q, k)
    lse = given.lse[b, h, rows].double()[:, None]
    dead = (lse == -torch.inf) | (lse.abs() > LARGEST_LSE)
    lse = lse.masked_fill(dead, 0)
    seen = x.seen & ~dead
    # A large error of the exponent leaves weights without a bound.
    error = (x.error + 8 * SINGLE * lse.abs()).masked_fill(~seen, 0)
    r = error.expm1().masked_fill(error > EXPLODES, torch.inf)
    w = (x.value - lse).exp().masked_fill(~seen, 0)
    do, out = (y[b, h, rows].double() for y in (given.dout, given.out))
    dlse = torch.zeros_like(lse) if given.dlse is None else given.dlse[b, h, rows].double()[:, None]
    dp, delta = do @ v.mT, (do * out).sum(1, keepdim=True) - dlse
    small = 2 * terms(v.shape[1])
    b_dp = small * (do.abs() @ v.abs().mT) + 8 * TINY[torch.float32] * v.shape[1]
    b_delta = small * (do.abs() * out.abs()).sum(1, keepdim=True) + 4 * SINGLE * dlse.abs()
    inner, floor = (dp - delta).abs(), seen * 2 * tiny
    rounding = b_dp + b_delta + 4 * SINGLE * (dp.abs() + delta.abs())
    ds = w * (dp - delta) * x.slope
    steep = x.slope.abs() + error if call.score else x.slope.abs()
    b_ds = torch.where(w > 0, w * steep * (r * inner + (1 + r) * rounding), 0)
    if call.score:
        b_ds = b_ds + w * inner * error
    b_ds = (b_ds + floor * (1 + dp.abs() + delta.abs())) * (1 + operand) + operand * ds.abs()
    return _Pairs(w, torch.where(w > 0, w * (r + operand), 0) + floor, ds, b_ds, do)


def dq_sample(call: Call, given: Given, b: int, h: int, rows: Tensor) -> Sample:
    """dq at query rows `rows` of query head h."""
    q, k, v = _plane(call, b, h, rows)
    pairs = _pairs(call, given, b, h, rows, torch.arange(k.shape[0], device=k.device), q, k, v)
    return _finish(
        call,
        ("dq", b, h, rows, given.dq[b, h, rows]),
        pairs.ds @ k * call.scale,
        (pairs.ds_error + 2 * terms(k.shape[0]) * pairs.ds.abs()) @ k.abs() * call.scale,
        pairs.ds_error.square() @ k.square() * call.scale**2,
        k.shape[0],
    )


def dk_dv_samples(call: Call, given: Given, b: int, head: int, keys: Tensor) -> list[Sample]:
    """dk and dv at keys `keys` of one kv head: sums over all rows of all its query heads."""
    rows = torch.arange(call.q.shape[2], device=call.q.device)
    k, v = (x[b, head, keys].double() for x in (call.k, call.v))
    many = 2 * terms(rows.numel() * call.group)
    dk, dv = [torch.zeros_like(k) for _ in range(3)], [torch.zeros_like(v) for _ in range(3)]
    for h in range(head * call.group, (head + 1) * call.group):
        q = call.q[b, h].double()
        x = _pairs(call, given, b, h, rows, keys, q, k, v)
        for sums, value, error, by in ((dk, x.ds, x.ds_error, q), (dv, x.w, x.w_error, x.do)):
            sums[0] += value.mT @ by
            sums[1] += (error + many * value.abs()).mT @ by.abs()
            sums[2] += error.square().mT @ by.square()
    for i, factor in enumerate((call.scale, call.scale, call.scale**2)):
        dk[i] *= factor
    count = rows.numel()
    return [
        _finish(call, (name, b, head, keys, got[b, head, keys]), sums[0], sums[1], sums[2], count)
        for name, got, sums in (("dk", given.dk, dk), ("dv", given.dv, dv))
    ]


def _finish(
    call: Call,
    place: tuple[str, int, int, Tensor, Tensor],
    exact: Tensor,
    error: Tensor,
    variance: Tensor,
    count: int,
) -> Sample:
    """A `Sample` of a gradient from the accumulated error and variance, plus the rounding of the result."""
    name, b, h, index, got = place
    unit, tiny = UNIT[call.q.dtype], TINY[call.q.dtype]
    error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
    bound = 1.01 * (error + unit * (exact.abs() + error)) + tiny * (1 + count)
    spread = ((variance.nan_to_num(nan=torch.inf, posinf=torch.inf) + (unit * exact).square()) / 3).sqrt()
    return Sample(name, b, h, index, got.double(), exact, bound, spread)


def _plane(call: Call, b: int, h: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q at `rows`, k, v) of query head h, in float64."""
    of_k = h // call.group
    return call.q[b, h, rows].double(), call.k[b, of_k].double(), call.v[b, of_k].double()


# ---- Score and mask functions

# tanh_approx is here because its error on GPUs is larger than a rounding error.
_JUMPS = ("<", "<=", ">", ">=", "==", "!=", "floor", "ceil", "int", "tanh_approx")


def apply_score(
    score: ScoreMod, raw: Tensor, indices: dict[str, Tensor], captured: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The score function of raw scores (R, C) and its derivative, both (R, C).

    Floats are computed in the dtype of `raw`, float64 or float32, integers as kernels do.
    """
    leaves = {"score": raw} | indices
    value, slope = (
        program_evaluator(*of, captured, raw.dtype)(leaves) for of in (score.parsed, score.gradient)
    )
    return value.to(raw.dtype).expand(raw.shape), slope.to(raw.dtype).expand(raw.shape)


def jumps(score: ScoreMod) -> bool:
    """Whether the score function may be discontinuous or is approximate, so that its results have no error bound."""
    return bool(score) and any(node.op in _JUMPS for node in score.moved)


def rounding_may_decide(mask_mod: MaskMod) -> bool:
    """Whether the mask function computes in float32. Rounding may then change which pairs are visible."""
    exact = ("const", "leaf", "float", "neg", "abs", "maximum", "minimum", "where")
    nodes = mask_mod.parsed[0].nodes if mask_mod else []
    return any(x.kind == "float" and not x.op.startswith("load:") and x.op not in exact for x in nodes)


def indices_of(b: int, h: int, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """The index leaves b, h, q_idx and kv_idx of a function, int32, which broadcast to (R, C)."""
    one = {name: torch.tensor(i, dtype=torch.int32, device=rows.device) for name, i in (("b", b), ("h", h))}
    return one | {"q_idx": rows[:, None].int(), "kv_idx": keys[None].int()}
