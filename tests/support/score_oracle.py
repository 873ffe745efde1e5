"""Attention with a score function in float64, by FlexAttention's formula in plain torch; and the functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

import attnforge
from attnforge import scores
from attnforge.codegen.score import ScoreMod
from attnforge.runtime.masks import AnyMask

Function = Callable[..., Tensor]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask,
    function: Function,
    dout: Tensor,
    dlse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """[out, lse, dq, dk, dv], with sinks also their gradient, of function(score, b, h, q_idx, kv_idx)."""
    queries, keys, values = (x.detach().double().requires_grad_() for x in (q, k, v))
    _, heads, seq_q, dim = q.shape
    group = heads // k.shape[1]
    score = queries @ keys.repeat_interleave(group, 1).mT * dim**-0.5
    index = torch.meshgrid(*(torch.arange(n) for n in score.shape), indexing="ij")
    score = function(score, *(i.to(q.device) for i in index))
    if mask is not None:
        score = score.masked_fill(~mask.visible(seq_q, k.shape[2], str(q.device)), -torch.inf)
    logits, inputs = score, [queries, keys, values]
    if sinks is not None:
        inputs.append(sinks.detach().double().requires_grad_())
        logits = torch.cat((score, inputs[3][None, :, None, None].expand(*score.shape[:3], 1)), -1)
    row_max = logits.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    weights = (logits - row_max).exp()
    row_sum = weights.sum(-1, keepdim=True)
    out = (weights / row_sum.where(row_sum > 0, 1))[..., : k.shape[2]] @ values.repeat_interleave(group, 1)
    lse = (row_max + row_sum.where(row_sum > 0, 1).log())[..., 0]
    outputs, gradients = [out], [dout.double()]
    if dlse is not None:
        outputs.append(lse)
        gradients.append(dlse.double())
    found = torch.autograd.grad(outputs, inputs, gradients)
    return [out.detach(), lse.detach().where(row_sum[..., 0] > 0, -torch.inf), *found]


class Made(Mapping[str, tuple[scores.Score, Function]]):
    """Scores by name, each traced when it is looked up: most tests take one of many."""

    def __init__(self, makers: Mapping[str, tuple[Callable[[], scores.Score], Function]]) -> None:
        self.makers = makers

    def __getitem__(self, name: str) -> tuple[scores.Score, Function]:
        make, function = self.makers[name]
        return make(), function

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


def functions(
    batch: int, heads: int, seq_q: int, seq_k: int, device: str = "cpu"
) -> Mapping[str, tuple[scores.Score, Function]]:
    """Scores by name, each with its formula in plain torch."""
    draw = torch.Generator().manual_seed(5)
    slopes = torch.rand(heads, generator=draw)
    table = torch.randn(heads, 21, generator=draw)
    walls = table.clone()
    walls[:, 0] = walls[:, -1] = -float("inf")  # hides what is 10 or more away
    plane = torch.randn(1, heads, seq_q, 1, generator=draw)
    documents = torch.randint(0, 2, (batch, max(seq_q, seq_k)), generator=draw, dtype=torch.int32)
    half = torch.randn(heads, generator=draw).bfloat16()
    slopes, table, walls = (x.to(device) for x in (slopes, table, walls))
    plane, documents, half = (x.to(device) for x in (plane, documents, half))

    def mixed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = documents[b, q_idx] == documents[b, kv_idx]
        bent = (
            3 * torch.tanh(score / 3) + half[h] * torch.sigmoid(score) - (q_idx // 8 - kv_idx % 5).abs() * 0.1
        )
        return torch.where(same & (kv_idx < q_idx + 40), bent, -float("inf"))

    def stepped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.where(score > 0.25, slopes[h], 0.0)  # of slope 1, but no bias

    makers: dict[str, tuple[Callable[[], scores.Score], Function]] = {
        "softcap": (lambda: scores.softcap(2.0), lambda s, b, h, i, j: 2 * torch.tanh(s / 2)),
        "wide softcap": (lambda: scores.softcap(50.0), lambda s, b, h, i, j: 50 * torch.tanh(s / 50)),
        "approximate": (
            lambda: scores.softcap(3.0, approximate=True),
            lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
        ),
        "alibi": (lambda: scores.alibi(slopes), lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()),
        "aligned": (
            lambda: scores.alibi(slopes, seq_k - seq_q),
            lambda s, b, h, i, j: s - slopes[h] * (i + seq_k - seq_q - j).abs(),
        ),
        "bias": (lambda: scores.bias(plane), lambda s, b, h, i, j: s + plane[0, h, i, 0]),
        "relative": (
            lambda: scores.relative_bias(table),
            lambda s, b, h, i, j: s + table[h, 10 + (j - i).clamp(-10, 10)],
        ),
        "walled": (
            lambda: scores.relative_bias(walls),
            lambda s, b, h, i, j: s + walls[h, 10 + (j - i).clamp(-10, 10)],
        ),
        "mixed": (lambda: scores.score_mod(mixed), mixed),
        "stepped": (lambda: scores.score_mod(stepped), stepped),
    }
    return Made(makers)


def compare(ours: list[Tensor], exact: list[Tensor], limit: float) -> None:
    """AssertionError unless each is finite but for -inf in the same places, and within `limit` of its largest value."""
    for name, got, answer in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), ours, exact, strict=False):
        finite = answer.isfinite()
        assert torch.equal(got.isfinite(), finite), name
        if finite.any():
            error = (got.double() - answer)[finite].abs().max().item()
            size = answer[finite].abs().max().item()
            assert error <= limit * max(size, 1e-3), f"{name}: error {error:.3g} of {size:.3g}"
    assert len(ours) == len(exact)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask,
    score: scores.Score,
    dout: Tensor,
    dlse: Tensor | None = None,
) -> list[Tensor]:
    """[out, lse, dq, dk, dv] of attnforge."""
    out, lse = attnforge.attention(q, k, v, mask, score=score, return_lse=True)
    outputs, gradients = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    return [out.detach(), lse.detach(), *torch.autograd.grad(outputs, (q, k, v), gradients)]


def learned(
    batch: int, heads: int, seq_q: int, seq_k: int, device: str = "cpu"
) -> dict[str, tuple[Callable[..., scores.Score], Function, list[Tensor]]]:
    """Scores of learned tensors by name: each from its tensors, its formula from them in float64, and the tensors."""
    draw = torch.Generator().manual_seed(6)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * size).to(device, dtype).requires_grad_()

    def sharpened(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *x: Tensor) -> Tensor:
        return 3 * torch.tanh(score * x[0][h]) + torch.where(kv_idx < 50, x[1][b, q_idx], 0.0)

    def buckets(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *x: Tensor) -> Tensor:
        return score + x[0][h, (2 * torch.log(1 + (q_idx - kv_idx).abs().float())).int()]

    def traced(*x: Tensor) -> scores.Score:
        return scores.score_mod(lambda *at: sharpened(*at, *x))

    return {
        "slopes": (
            scores.alibi,
            lambda s, b, h, i, j, x: s - x[h] * (i - j).abs(),
            [tensor(heads, size=0.03)],
        ),
        "plane": (
            scores.bias,
            lambda s, b, h, i, j, x: s + x[0, h, i, j],
            [tensor(1, heads, seq_q, seq_k)],
        ),
        "table": (
            scores.relative_bias,
            lambda s, b, h, i, j, x: s + x[h, 10 + (j - i).clamp(-10, 10)],
            [tensor(heads, 21, dtype=torch.bfloat16)],
        ),
        "buckets": (
            lambda *x: scores.score_mod(lambda *at: buckets(*at, *x)),
            buckets,
            [tensor(heads, 20)],
        ),
        "keys": (
            lambda x: scores.score_mod(lambda s, b, h, i, j: s + x[b, j]),
            lambda s, b, h, i, j, x: s + x[b, j],
            [tensor(batch, seq_k)],
        ),
        "sharpened": (traced, sharpened, [tensor(heads), tensor(batch, seq_q)]),
    }


def wanted(text: str) -> ScoreMod:
    """A formula with gradients of all its tensors."""
    return ScoreMod(re.sub(r"(t\d: \w+\[\d\])", r"\1 grad", text))


def learned_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask,
    function: Function,
    tensors: list[Tensor],
    dout: Tensor,
    rounded: Tensor | None = None,
) -> list[Tensor]:
    """[dq, dk, dv, the gradient of each tensor] in float64.

    Given `rounded`, the output of a kernel, dS = P (dP - sum(dout * rounded)) as in that kernel's backward: where sums
    of dS cancel, the rounding of its output would hide other errors.
    """
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, *tensors)]
    queries, keys, values = exact[:3]
    group = q.shape[1] // k.shape[1]
    score = queries @ keys.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5
    index = torch.meshgrid(*(torch.arange(n, device=q.device) for n in score.shape), indexing="ij")
    score = function(score, *index, *exact[3:])
    if mask is not None:
        seen = mask.visible(q.shape[2], k.shape[2], str(q.device))
        score = score.masked_fill(~seen, -1e30)
        weights = torch.softmax(score, -1) * seen
    else:
        weights = torch.softmax(score, -1)
    out = weights @ values.repeat_interleave(group, 1)
    # d lse / d S = P
    dlse = (
        torch.zeros_like(out[..., 0])
        if rounded is None
        else (dout.double() * (out - rounded)).sum(-1).detach()
    )
    return list(torch.autograd.grad([out, score.logsumexp(-1)], exact, [dout.double(), dlse]))
