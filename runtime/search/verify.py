"""Check a kernel variant against float64; the limits of its error are multiples of SDPA's.

With a score, which SDPA does not take, they are multiples of what rounding P and dS to the dtype makes.

A `Check` is made once per case and holds the exact answer on a sample: a few query rows of one group of heads
of a large case, everything of a small one. For backward, `dout` is zero outside the sampled rows: then
dk and dv of the group are exact sums over the sample, for every key, and dq elsewhere must be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnforge.codegen.spec import Direction, DType, Mask
from attnforge.runtime.masks import AnyMask, DenseMask, FunctionMask, Spans
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.reference import reference, visible_rows

# Limits as multiples of SDPA's error in the same dtype on the same sample. In 16 bits the rounding of P and of results
# dominates, which all kernels share; in fp32 the order of sums dominates, which differs.
RMS_RATIO = {DType.BFLOAT16: 1.1, DType.FLOAT16: 1.1, DType.FLOAT32: 2.0}
MAX_RATIO = {DType.BFLOAT16: 2.0, DType.FLOAT16: 2.0, DType.FLOAT32: 4.0}
# Half an ulp, at least.
UNIT_ROUNDOFF = {DType.BFLOAT16: 2.0**-9, DType.FLOAT16: 2.0**-12, DType.FLOAT32: 2.0**-25}
LSE_LIMIT = {DType.BFLOAT16: 1e-3, DType.FLOAT16: 1e-3, DType.FLOAT32: 5e-5}  # SDPA does not return it
LARGE_ROWS = 256
WHOLE = 1 << 25  # scores of all heads up to which a case is sampled whole: float64 takes a second

Outputs = dict[str, Tensor]


class WrongResult(ArithmeticError):
    """A kernel ran and its result is wrong; the message names the tensor and its error."""


@dataclass(frozen=True)
class Error:
    """Error of one tensor against float64, and its limits."""

    rms: float
    worst: float
    rms_limit: float
    worst_limit: float

    @property
    def ok(self) -> bool:
        # These comparisons are False for NaN.
        return self.rms <= self.rms_limit and self.worst <= self.worst_limit


@dataclass(frozen=True)
class Check:
    """Inputs, the sample, and the exact result on it (float64; keys out, lse and for backward dq, dk, dv)."""

    case: Case
    direction: Direction
    inputs: Inputs
    rows: Tensor  # (R,) sampled query rows, ascending
    heads_kv: int  # the sample has this many kv heads, the first ones, and their q heads
    exact: Outputs
    peer: dict[str, tuple[float, float]]  # rms and worst error of SDPA, with a score of `_rounded`


def make_check(case: Case, direction: Direction, seed: int = 0) -> Check:
    """Draw inputs, choose the sample, compute the exact result and SDPA's error. Small cases are sampled whole."""
    scores = case.seq_q * case.seq_k
    small = scores <= 1024 * 1024 and scores * case.batch * case.heads_q <= WHOLE
    rows = torch.arange(case.seq_q, device=case.device) if small else _sample_rows(case, seed)
    inputs = case.inputs(seed)
    if not small:
        keep = torch.zeros(case.seq_q, 1, dtype=case.torch_dtype, device=case.device)
        keep[rows] = 1
        inputs = inputs._replace(dout=inputs.dout * keep)
    check = Check(case, direction, inputs, rows, case.heads_kv if small else 1, {}, {})
    exact = _exact(check)
    theirs = _sdpa(check) if case.score is None else _rounded(check)
    pairs = {
        name: _finite_lse(value, exact[name]) if name == "lse" else (value, exact[name])
        for name, value in theirs.items()
    }
    peer = {name: _distance(*pair) for name, pair in pairs.items()}
    return replace(check, exact=exact, peer=peer)


def odd_case(case: Case, seed: int = 1) -> Case:
    """A small case like `case`, with lengths that no tile divides, hidden keys and rows that see nothing.

    A mask by a function shows what it shows of its first queries and keys: it may hold for no others.
    """
    group = case.heads_q // case.heads_kv
    heads_kv = min(2, case.heads_kv)
    mask: AnyMask = case.mask
    seq_q, seq_k, batch = 333, 401, 2
    if case.mask_kind is Mask.CAUSAL:
        seq_q, seq_k = 401, 333  # the first 68 queries see no key
    if case.mask_kind is Mask.SPANS:
        seq_k, mask = seq_q, _random_spans(seq_q, seed, case.device)
        if isinstance(case.mask, Spans) and case.mask.data.dim() == 5:
            batches, heads = case.mask.planes
            heads = 1 if heads == 1 else heads_kv if heads == case.heads_kv else heads_kv * group
            planes = (batch if batches > 1 else 1, heads)
            mask = _random_unions(seq_q, case.mask.intervals, planes, seed, case.device)
    if isinstance(case.mask, FunctionMask):
        seq_q, seq_k, batch = min(seq_q, case.seq_q), min(seq_k, case.seq_k), min(batch, case.batch)
        mask = FunctionMask(case.mask.text, case.mask.tensors, seq_q, seq_k, case.mask.device)
    elif case.mask_kind is Mask.DENSE:
        mask = _random_pairs((batch, heads_kv * group, seq_q, seq_k), seed, case.device)
    shape = replace(case, name=f"odd {case.name}", batch=batch, heads_q=heads_kv * group, heads_kv=heads_kv)
    return replace(shape, seq_q=seq_q, seq_k=seq_k, mask=mask, pairs=0)


def verify(check: Check, run: Callable[[Inputs], Outputs]) -> dict[str, Error]:
    """Errors of the tensors that `run` returns (out, lse | dq, dk, dv). Raises WrongResult beyond the limits."""
    results = run(check.inputs)
    errors = {}
    for name, value in results.items():
        if name != "lse" and not bool(torch.isfinite(value).all()):
            raise WrongResult(f"{name}: holds NaN or infinity")
        got = _sampled(check, name, value)
        exact = check.exact[name]
        if name == "lse":
            got, exact = _finite_lse(got, exact)
        rms, worst = _distance(got, exact)
        errors[name] = Error(rms, worst, *_limits(check, name))
        if not errors[name].ok:
            raise WrongResult(_complaint(name, errors[name]))
    if "dq" in results:
        _check_zero_elsewhere(check, results["dq"])
    return errors


def distances(check: Check, results: Outputs) -> dict[str, float]:
    """RMS error of each tensor on the sample, relative to the exact tensor's RMS, inf for NaN; no limits apply."""
    found = {}
    for name, value in results.items():
        error = _distance(_sampled(check, name, value), check.exact[name])[0]
        size = float(check.exact[name].square().mean().sqrt().clamp(min=1e-30))
        found[name] = math.inf if math.isnan(error) else error / size
    return found


def _finite_lse(got: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    empty = torch.isinf(exact)
    if not torch.equal(got == -torch.inf, empty):
        raise WrongResult("lse: rows without a visible key must be -inf, and no others")
    return got.masked_fill(empty, 0.0), exact.masked_fill(empty, 0.0)


def _check_zero_elsewhere(check: Check, dq: Tensor) -> None:
    other = torch.ones(check.case.seq_q, dtype=torch.bool, device=dq.device)
    other[check.rows] = False
    if bool((dq[:, :, other] != 0).any()):
        raise WrongResult("dq: rows whose dout is zero must be zero")


def _limits(check: Check, name: str) -> tuple[float, float]:
    dtype = check.case.dtype
    if name == "lse":
        limit = max(LSE_LIMIT[dtype], MAX_RATIO[dtype] * check.peer.get(name, (0.0, 0.0))[1])
        return limit, limit
    rms, worst = check.peer[name]
    size = float(check.exact[name].square().mean().sqrt())
    slack = size * (1e-6 if dtype is DType.FLOAT32 else 1e-4)  # SDPA may happen to be exact
    # Where a few elements are much larger than the others, SDPA's worst error is a matter of how they were rounded.
    rounding = float(check.exact[name].abs().max()) * UNIT_ROUNDOFF[dtype]
    return RMS_RATIO[dtype] * rms + slack, MAX_RATIO[dtype] * worst + slack + rounding


def _complaint(name: str, error: Error) -> str:
    return (
        f"{name}: error rms {error.rms:.2e} (limit {error.rms_limit:.2e}), "
        f"worst {error.worst:.2e} (limit {error.worst_limit:.2e})"
    )


def _distance(value: Tensor, exact: Tensor) -> tuple[float, float]:
    off = value.double() - exact
    return float(off.square().mean().sqrt()), float(off.abs().max())


def _sample_rows(case: Case, seed: int) -> Tensor:
    """One random row in each of LARGE_ROWS equal parts, and both ends."""
    generator = torch.Generator().manual_seed(seed)
    part = case.seq_q / LARGE_ROWS
    rows = (torch.arange(LARGE_ROWS) + torch.rand(LARGE_ROWS, generator=generator)) * part
    ends = torch.tensor([0, case.seq_q - 1])
    sample: Tensor = torch.cat((rows.long().clamp(max=case.seq_q - 1), ends)).unique()
    return sample.to(case.device)


def _sampled(check: Check, name: str, value: Tensor) -> Tensor:
    """The sample of one tensor: q-side (B, Hkv, group, R[, D]), k-side (B, Hkv, Sk, D)."""
    if name in ("k", "v", "dk", "dv"):
        return value[:, : check.heads_kv]
    group = check.case.heads_q // check.case.heads_kv
    picked = value[:, : check.heads_kv * group].index_select(2, check.rows)
    sample: Tensor = picked.unflatten(1, (check.heads_kv, group))
    return sample


def _mask_of_sample(check: Check) -> AnyMask:
    """Of a mask for each q head or kv head, the planes of the sampled heads."""
    case, mask = check.case, check.case.mask
    if isinstance(mask, FunctionMask) and mask.shape[1] is not None:
        return FunctionMask(
            mask.text,
            mask.tensors,
            mask.seq_q,
            mask.seq_k,
            mask.device,
            batch=mask.shape[0],
            heads=check.heads_kv * case.heads_q // case.heads_kv,
            visible_keys=mask.visible_keys,
        )
    if not isinstance(mask, (Spans, DenseMask)):
        return mask
    planes = mask.planes[1] if isinstance(mask, Spans) else mask.shape[1]
    return mask.narrow(1, 0, max(1, planes * check.heads_kv // case.heads_kv))


def _exact(check: Check) -> Outputs:
    """The float64 reference on the sample."""
    return _by_reference(check, torch.float64)


def _rounded(check: Check) -> Outputs:
    """The formula in float32 on the sample, with operands and results, but lse, in the case's dtype."""
    dtype = check.case.torch_dtype
    results = _by_reference(check, torch.float32, dtype)
    return {name: value if name == "lse" else value.to(dtype) for name, value in results.items()}


def _by_reference(check: Check, dtype: torch.dtype, operands: torch.dtype | None = None) -> Outputs:
    case, x = check.case, check.inputs
    heads_q = check.heads_kv * case.heads_q // case.heads_kv
    backward = check.direction is Direction.BACKWARD
    exact = reference(
        x.q[:, :heads_q],
        x.k[:, : check.heads_kv],
        x.v[:, : check.heads_kv],
        _mask_of_sample(check),
        case.scale,
        x.dout[:, :heads_q] if backward else None,
        dtype,
        check.rows,
        case.score,
        operands,
    )
    values = exact._asdict()
    q_side = ("out", "lse", "dq")
    return {
        name: value.unflatten(1, (check.heads_kv, -1)) if name in q_side else value
        for name, value in values.items()
        if value is not None
    }


def _sdpa(check: Check) -> Outputs:
    """SDPA in the case's dtype; rows without a visible key, undefined in torch, are zero."""
    q, k, v = (
        _sampled(check, name, value).detach().contiguous().requires_grad_()
        for name, value in zip("qkv", check.inputs, strict=False)
    )
    case = check.case
    group = q.shape[2]
    heads = check.heads_kv * group
    planes = visible_rows(_mask_of_sample(check), check.rows, case.seq_q, case.seq_k, case.batch, heads)
    seen = planes.repeat_interleave(group, 1) if 1 < planes.shape[1] < heads else planes
    some = seen.any(-1, keepdim=True)
    keys, values = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    # Zeros after the narrower rows let torch use its kernels for equal head dims.
    width = max(case.head_dim, case.head_dim_v)
    queries, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (q.flatten(1, 2), keys, values))
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=None if case.mask is None else seen | ~some, scale=case.scale
    )[..., : case.head_dim_v]
    return _with_gradients(check, (out * some).unflatten(1, (check.heads_kv, group)), (q, k, v))


def _with_gradients(check: Check, out: Tensor, leaves: tuple[Tensor, Tensor, Tensor]) -> Outputs:
    if check.direction is Direction.FORWARD:
        return {"out": out.detach()}
    dout = _sampled(check, "dout", check.inputs.dout).to(out.dtype)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _random_spans(length: int, seed: int, device: torch.device) -> Spans:
    """Runs of keys that share an interval, single keys with their own, hidden keys, and rows that see nothing."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, length + 1, (2, length), generator=generator).sort(0).values
    run = torch.arange(length) // 37 * 37
    own = torch.rand(length, generator=generator) < 0.2
    picked = torch.where(own, torch.arange(length), run)
    starts, ends = edges[0][picked], edges[1][picked]
    hidden = torch.rand(length, generator=generator) < 0.05
    ends = torch.where(hidden, starts, ends.clamp(max=length - 5))
    starts = torch.minimum(starts, ends)
    return Spans(starts.int().to(device), ends.int().to(device))


def _random_unions(
    length: int, intervals: int, planes: tuple[int, int], seed: int, device: torch.device
) -> Spans:
    """As `_random_spans`, for several intervals and planes."""
    count = intervals * planes[0] * planes[1]
    parts = [_random_spans(length, seed + i, device) for i in range(count)]
    starts, ends = (
        torch.stack([getattr(part, name) for part in parts]).view(*planes, intervals, length)
        for name in ("starts", "ends")
    )
    return Spans(starts, ends)


def _random_pairs(shape: tuple[int, int, int, int], seed: int, device: torch.device) -> DenseMask:
    """Full, partial and empty blocks that no tile divides; one query sees nothing, and one key is hidden."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, seq_q, seq_k = shape
    blocks = torch.rand((batch, heads, seq_q // 50 + 1, seq_k // 70 + 1), generator=generator)
    share = blocks.mul(1.8).sub(0.4).clamp(0, 1)  # of the pairs of a block; often none, often all
    share = share.repeat_interleave(50, 2)[:, :, :seq_q].repeat_interleave(70, 3)[..., :seq_k]
    mask = torch.rand(shape, generator=generator) < share
    mask[:, :, seq_q // 3] = False
    mask[..., seq_k // 2] = False
    return DenseMask(mask.to(device))
