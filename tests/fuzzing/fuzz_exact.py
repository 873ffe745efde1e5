"""The float64 answer of an attention call, and how far from it a kernel may be: what rounding alone explains.

For each element a bound follows the arithmetic of a flash attention, to first order. Let F = 2^-24 be the unit roundoff
of float32, u that of the storage type, w the exact weights, s the exact scores, A_ij = scale * sum_d |q_id| |k_jd|:

    scores     e_ij  = F ((D + 16) A_ij + 8 (|s_ij| + |max_i s| + |lse_i|))      sums of D products, exponent, base
    weights    r_ij  = expm1(e_ij), for a row relative to its mean: r_ij + sum_j w_ij r_ij
    out        sum_j w_ij |v_j| (r_ij + mean + P + n F) + u |out|                 n terms, weights rounded to P
    dP, delta  F (Dv + 16) |dout| |v|,  |dout| . bound(out) + F (Dv + 16) |dout| . |out|
    dS         w_ij (r_ij |dP - delta| + error(dP) + error(delta)) + P |dS|
    dq, dk, dv the same sums as those that they are made of, + u of the result

P is the unit roundoff of the operands of matrix products: u in 16 bits, 2^-21 in float32, whose products some targets
make of parts. These bounds hold for the worst case. A mistake may hide below them where many terms average out, so the
root mean square error is held to a multiple of that of `plain`, the same arithmetic in torch. Where few elements, or
the out of one row, carry all of the error, `plain` is no more than one sample and may be right by luck: what is over
its multiple is held to that of `typical`, the average over results whose roundings are drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SINGLE = 2.0**-24  # unit roundoff of float32
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # to nearest: half an ulp
OPERAND = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Below it numbers are flushed to zero or lose digits: the smallest normal of float32, a step of fp16's smallest ones.
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
# Results of that size are not made of such numbers; of smaller ones the root mean square says little.
NORMAL = {torch.float32: 2.0**-90, torch.bfloat16: 2.0**-90, torch.float16: 2.0**-12}
EXPLODES = 0.5  # an error of the exponent beyond which rounding alone may leave nothing of the weights

RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Answer:
    """Exact results in float64 and the largest error of each element; an infinite bound says nothing of it."""

    exact: dict[str, Tensor]
    bound: dict[str, Tensor]
    blind: Tensor  # bool (B, Hq, Sq): rows that see no key
    dtype: torch.dtype  # of the inputs


def answer(
    inputs: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    scale: float,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Answer:
    """Attention of q (B, Hq, Sq, D) on k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) where `seen` (broadcast to B, Hq, Sq, Sk).

    With `dout` (B, Hq, Sq, Dv) also gradients, `dlse` (B, Hq, Sq) being the one of lse.
    Memory: several S x S planes of doubles.
    """
    dtype = inputs[0].dtype
    unit, operand, tiny = UNIT[dtype], OPERAND[dtype], TINY[dtype]
    group = inputs[0].shape[1] // inputs[1].shape[1]
    q = inputs[0].double()
    k, v = (x.double().repeat_interleave(group, 1) for x in inputs[1:])
    seen = seen.expand(*q.shape[:3], k.shape[2])
    blind = ~seen.any(-1)
    s = (q @ k.mT * scale).masked_fill(~seen, 0)
    size = (q.abs() @ k.abs().mT * scale).masked_fill(~seen, 0)
    lse = (
        s.masked_fill(~seen, -torch.inf).logsumexp(-1)
        if k.shape[2]
        else torch.full_like(q[..., 0], -torch.inf)
    )
    base = lse.masked_fill(blind, 0)[..., None]
    w = (s - base).exp().masked_fill(~seen, 0)
    top = (
        s.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).masked_fill(blind[..., None], 0)
        if k.shape[2]
        else base
    )
    many = 2 * terms(k.shape[2])
    e = terms(q.shape[3]) * size + 8 * SINGLE * (s.abs() + top.abs() + base.abs())
    r = e.expm1().masked_fill(~seen, 0)
    lost = e.masked_fill(~seen, 0).amax(-1, keepdim=True) > EXPLODES if k.shape[2] else blind[..., None]
    mean = (w * r).sum(-1, keepdim=True)
    out = w @ v
    floor = seen.double() * 2 * tiny  # what becomes of weights below the normal numbers
    b_out = (w * (r + mean + 2 * operand + many) + floor) @ v.abs() + unit * out.abs()
    b_out = (b_out * 1.01 + tiny * (1 + k.shape[2])).masked_fill(lost, torch.inf)
    b_lse = mean[..., 0] + many + 8 * SINGLE * (1 + base.abs() + top.abs())[..., 0]
    exact, bound = {"out": out, "lse": lse}, {"out": b_out, "lse": b_lse.masked_fill(lost[..., 0], torch.inf)}
    if dout is None:
        return Answer(exact, bound, blind, dtype)
    do = dout.double()
    dp = do @ v.mT
    delta = (do * out).sum(-1, keepdim=True)
    b_delta = (do.abs() * b_out.nan_to_num(posinf=0.0)).sum(-1, keepdim=True)
    b_delta += (
        2 * terms(v.shape[3]) * (do.abs() * out.abs()).sum(-1, keepdim=True)
        + 8 * TINY[torch.float32] * v.shape[3]
    )
    if dlse is not None:
        delta = delta - dlse.double()[..., None]
        b_delta += 4 * SINGLE * dlse.double().abs()[..., None]
    b_dp = 2 * terms(v.shape[3]) * (do.abs() @ v.abs().mT) + 8 * TINY[torch.float32] * v.shape[3]
    r = (e + b_lse[..., None]).expm1().masked_fill(~seen, 0)
    ds = w * (dp - delta)
    b_ds = w * (r * (dp - delta).abs() + (1 + r) * (b_dp + b_delta + 4 * SINGLE * (dp.abs() + delta.abs())))
    b_ds = (
        b_ds * (1 + operand)
        + operand * ds.abs()
        + floor * (1 + TINY[torch.float32] / tiny * (dp.abs() + delta.abs()))
    )
    b_p = w * (r + operand) + floor
    rows = 2 * terms(q.shape[2] * group)

    def fold(x: Tensor) -> Tensor:
        """The sum over the query heads of each kv head."""
        found: Tensor = x.unflatten(1, (-1, group)).sum(2)
        return found

    def finish(name: str, value: Tensor, error: Tensor, count: int, gone: Tensor) -> None:
        exact[name] = value
        bound[name] = (1.01 * (error + unit * (value.abs() + error)) + tiny * (1 + count)).masked_fill(
            gone, torch.inf
        )

    # A row of scores beyond the arithmetic spoils what is summed over it.
    spoilt = fold(lost.any(-2, keepdim=True).to(torch.int8)) > 0
    finish("dq", ds @ k * scale, (b_ds + many * ds.abs()) @ k.abs() * scale, k.shape[2], lost)
    b_dk = (b_ds + rows * ds.abs()).mT @ q.abs() * scale
    finish("dk", fold(ds.mT @ q * scale), fold(b_dk), q.shape[2], spoilt)
    finish("dv", fold(w.mT @ do), fold((b_p + rows * w).mT @ do.abs()), q.shape[2], spoilt)
    return Answer(exact, bound, blind, dtype)


def terms(n: int) -> float:
    """Relative error of a sum of n products in float32."""
    return SINGLE * (n + 16)


def plain(
    inputs: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    scale: float,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    chance: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The same in torch as flash attentions round: float32, but for results and the operands of matrix products.

    With `chance` all that is rounded to the inputs' dtype goes up or down at random, with no error on average, and
    weights are relative to any number instead of the largest score: to what a kernel has them depends on its tiles.
    """
    dtype = inputs[0].dtype

    def to(x: Tensor) -> Tensor:
        return x.to(dtype) if chance is None else _up_or_down(x, dtype, chance)

    group = inputs[0].shape[1] // inputs[1].shape[1]
    q = inputs[0].float()
    k, v = (x.float().repeat_interleave(group, 1) for x in inputs[1:])
    s = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    top = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if k.shape[2] else s.sum(-1, keepdim=True)
    if chance is not None:
        top = top + torch.rand(top.shape, generator=chance, device=top.device)
    w = (s - top).exp()
    total = w.sum(-1, keepdim=True)
    out = to(to(w).float() @ v / total.masked_fill(total == 0, 1))
    found = {"out": out, "lse": (top + total.log())[..., 0]}
    if dout is None:
        return found
    do = dout.float()
    w = (s - (top + total.masked_fill(total == 0, 1).log())).exp()
    delta = (do * out.float()).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.float()[..., None]
    ds = to(w * (do @ v.mT - delta)).float()
    dk, dv = ds.mT @ q * scale, to(w).float().mT @ do
    found["dq"] = to(ds @ k * scale)
    found["dk"], found["dv"] = (to(x.unflatten(1, (-1, group)).sum(2)) for x in (dk, dv))
    return found


def _up_or_down(x: Tensor, dtype: torch.dtype, chance: torch.Generator) -> Tensor:
    """x in `dtype`: one of the two numbers around each element, the nearer one the likelier."""
    near = x.to(dtype)
    if dtype is torch.float32:
        return near
    rest = x - near.float()
    bits = near.view(torch.int16)
    away = (rest > 0) == (near > 0)  # from zero
    # Of a number the bits plus or minus one are its neighbours; zero and what is not finite stay as they are.
    other = torch.where(away, bits + 1, bits - 1).view(dtype)
    likely = rest / (other.float() - near.float())
    moves = torch.rand(x.shape, generator=chance, device=x.device) < likely
    return torch.where(moves & (near != 0) & other.isfinite(), other, near)


THROWS = 16


def typical(
    inputs: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    scale: float,
    dout: Tensor | None,
    dlse: Tensor | None,
    right: Answer,
) -> dict[str, float]:
    """The root mean square error to expect of `plain`, over as many results as THROWS."""
    chance = torch.Generator(inputs[0].device).manual_seed(0)
    sums: dict[str, float] = {}
    for _ in range(THROWS):
        for name, x in plain(inputs, seen, scale, dout, dlse, chance).items():
            known = right.bound[name].isfinite()
            sums[name] = sums.get(name, 0.0) + _rms((x.double() - right.exact[name])[known]) ** 2
    # Up or down at random is off by sqrt(2) times as much as to the nearest: ulp^2 / 6 instead of ulp^2 / 12.
    return {name: (total / THROWS / 2) ** 0.5 for name, total in sums.items()}


RMS_RATIO = 3.0  # of ours to that of `plain`: both are samples, small ones for small tensors
RMS_SHARE = 1 / 8  # of the worst case's root mean square: what rounding costs where `plain` is exact by luck


def complaints(
    found: dict[str, Tensor],
    right: Answer,
    theirs: dict[str, Tensor],
    limit: float,
    expected: Callable[[], dict[str, float]] = dict,
) -> list[str]:
    """What is wrong with the results `found`, a sentence each. No output is larger than `limit`, v's largest number.

    `theirs`: what `plain` gives; `expected`: asked for what `typical` gives where that is not enough.
    """
    wrong = []
    for name, x in found.items():
        exact, bound = right.exact[name], right.bound[name]
        if x.shape != exact.shape:
            wrong.append(f"{name} has shape {tuple(x.shape)}, expected {tuple(exact.shape)}")
            continue
        if not x.numel():
            continue
        x = x.double()
        if name == "lse":
            if not torch.equal(x == -torch.inf, right.blind):
                wrong.append("lse is -inf in other rows than those that see no key")
                continue
            x, exact, bound = (t[~right.blind] for t in (x, exact, bound))
            if not x.numel():
                continue
        if exact.abs().max() > 0.99 * torch.finfo(right.dtype).max:
            continue  # beyond what the type holds
        if not x.isfinite().all():
            wrong.append(
                f"{name} is not finite at {_where(~x.isfinite())}, exactly {exact.abs().max().item():.3g} at most"
            )
            continue
        error = (x - exact).abs()
        over = error > bound
        if over.any():
            at = tuple(over.nonzero()[0].tolist())
            wrong.append(
                f"{name} is off in {int(over.sum())} of {over.numel()} elements, first at {at}: {x[at].item():.9g}, "
                f"exactly {exact[at].item():.9g}, rounding explains {bound[at].item():.3g}"
            )
            continue
        known = bound.isfinite()
        if name != "lse" and known.any() and _rms(exact[known]) > NORMAL[right.dtype]:
            ours, peers, worst = (_rms(t[known]) for t in (error, (theirs[name].double() - exact), bound))
            if peers != peers:  # torch's is no number
                continue
            if ours > RMS_RATIO * peers + RMS_SHARE * worst:
                usual = expected().get(name, 0.0)
                if ours > RMS_RATIO * usual + RMS_SHARE * worst:
                    wrong.append(
                        f"{name}: rms error {ours:.3g}, plain torch's {peers:.3g}, expected of it {usual:.3g}, "
                        f"worst case {worst:.3g}"
                    )
    if "out" in found and not wrong and found["out"].numel():
        largest = found["out"].double().abs().max().item()
        if largest > limit * 1.01 + TINY[torch.float16]:
            wrong.append(f"out reaches {largest:.6g}, but v only {limit:.6g}")
    wrong += _rows(found, right.blind)
    return wrong


def _rows(found: dict[str, Tensor], blind: Tensor) -> list[str]:
    """Rows that see no key are zero to the bit."""
    names = [name for name in ("out", "dq") if name in found and found[name].shape[:3] == blind.shape]
    return [f"{name} of a row without keys is not zero" for name in names if found[name][blind].any()]


def _rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


def _where(x: Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in x.nonzero()[0])
