"""The prologue of attention: RMSNorm of each head of q and k, then rotary embedding, in one kernel a direction.

`qk_norm_rope` reads what the projections wrote, of one set of weights or of BAGEL's two experts, and writes q, k and v
as attention reads them. `rope_tables` makes its angles, `ExpertRows` the route of each token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnforge.codegen.families.limits import HEAD_DIM_LIMIT
from attnforge.codegen.prologue import MOST_TOKENS, NOBODY
from attnforge.runtime.inputs import (
    expect_integer,
    expect_integers,
    expect_local,
    expect_number,
    expect_tensors,
)
from attnforge.runtime.prologue_kernels import _forward_op

_ON_CPU = (torch.float32, torch.bfloat16)
_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)
Pair = Tensor | tuple[Tensor, Tensor]  # of one set of weights, or of two experts


class ExpertRows:
    """Which expert a token belongs to, and which row of its projections is the token's. Of a pack, for all layers.

    first, second: integer tensors on one device, the tokens of either expert in the order of its projections' rows;
        no token occurs twice (on a GPU this is not checked). A token of neither gets zeros.
    tokens: of the pack.
    """

    def __init__(self, first: Tensor, second: Tensor, tokens: int) -> None:
        expect_tensors(first=first, second=second)
        expect_local("first, second", first, second)
        expect_integer("tokens", tokens)
        for name, index in (("first", first), ("second", second)):
            if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name}: got {tuple(index.shape)} {index.dtype}, expected (tokens) of int32 or int64"
                )
        if first.device != second.device:
            raise ValueError(f"second: is on {second.device}, but first is on {first.device}")
        if first.shape[0] + second.shape[0] > tokens:
            raise ValueError(
                f"first, second: have {first.shape[0]} and {second.shape[0]} tokens, but the pack has {tokens}; a "
                "token belongs to one expert at most"
            )
        # Not on a GPU, which would have to be waited for; nor a FakeTensor or Dynamo's, which have no values.
        if type(first) is Tensor and first.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_tokens(first, second, tokens)
        rows = torch.full((tokens,), NOBODY, dtype=torch.int32, device=first.device)
        for index, sign in ((first, 0), (second, -1)):
            own = torch.arange(index.shape[0], dtype=torch.int32, device=first.device)
            rows = rows.index_copy(0, index.long(), own ^ sign)
        self.rows = rows
        self.lengths = (first.shape[0], second.shape[0])

    def in_order(self) -> Tensor:
        """The same for projections whose rows are in the order of tokens."""
        if sum(self.lengths) != self.rows.shape[0]:
            raise ValueError(
                f"experts: have {self.lengths[0]} and {self.lengths[1]} of {self.rows.shape[0]} tokens; projections in "
                "the order of tokens need an expert for each"
            )
        own = torch.arange(self.rows.shape[0], dtype=torch.int32, device=self.rows.device)
        return torch.where(self.rows < 0, ~own, own)


def _check_tokens(first: Tensor, second: Tensor, tokens: int) -> None:
    """Raises ValueError for tokens outside of the pack or named twice: no token would read one of their rows."""
    for name, index in (("first", first), ("second", second)):
        outside = index[(index < 0) | (index >= tokens)]
        if outside.numel():
            raise ValueError(f"{name}: has token {int(outside[0])}, expected 0 to {tokens - 1}")
    counts = torch.bincount(torch.cat((first, second)).long(), minlength=tokens)
    if tokens and int(counts.max()) > 1:
        token = int(counts.argmax())
        raise ValueError(
            f"first, second: have token {token} {int(counts[token])} times, expected once at most"
        )


def rope_tables(
    positions: Tensor, head_dim: int, base: float = 10000.0, sections: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin (tokens, head_dim / 2), float32, of rotary embeddings (RoFormer, arXiv:2104.09864).

    positions: (tokens), numbers of any dtype; images may repeat one, as in BAGEL. With `sections` (3, tokens): times,
        heights and widths, as Qwen2-VL's multimodal embedding has them (arXiv:2409.12191).
    sections: how many frequencies take the time, the height and the width, in this order; together head_dim / 2.

    The angle of column d is positions * base^(-2 d / head_dim), computed in float64: long packs have positions whose
    angles float32 rounds by 1e-3.
    """
    expect_tensors(positions=positions)
    expect_local("positions", positions)
    expect_integer("head_dim", head_dim)
    expect_number("base", base, optional=False)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, expected an even number above 0")
    if not 0.0 < base < math.inf:
        raise ValueError(f"base: got {base}, expected a number above 0")
    half = head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    if sections is not None:
        if not torch.compiler.is_compiling():
            expect_integers("sections", sections, "integers")
        fits = sum(sections) == half and min(sections) >= 0
        if not fits or positions.dim() != 2 or positions.shape[0] != len(sections):
            raise ValueError(
                f"sections: got {tuple(sections)} with positions {tuple(positions.shape)}, expected numbers that "
                f"add up to head_dim / 2 = {half}, and positions ({len(sections)}, tokens)"
            )
        kinds = [kind for kind, size in enumerate(sections) for _ in range(size)]
        places = positions[kinds].T  # (tokens, half)
    elif positions.dim() == 1:
        places = positions[:, None]
    else:
        raise ValueError(
            f"positions: got shape {tuple(positions.shape)}, expected (tokens), or (kinds, tokens) with sections"
        )
    angles = places.double() * base**-exponents
    return angles.cos().float(), angles.sin().float()


def qk_norm_rope(
    q: Pair,
    k: Pair | None = None,
    v: Pair | None = None,
    *,
    cos: Tensor,
    sin: Tensor,
    q_weight: Pair | None = None,
    k_weight: Pair | None = None,
    heads: tuple[int, int] | None = None,
    experts: ExpertRows | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """RMSNorm of each head of q and k, then rotary embedding; differentiable in q, k, v and the weights.

    n = w x / sqrt(mean(x^2) + eps) of each head x, y0 = n0 cos - n1 sin, y1 = n1 cos + n0 sin, where 0 and 1 are the
    halves of a head (transformers' `rotate_half`). All in float32, rounded once. Formulas: RMSNorm, arXiv:1910.07467;
    QK norm, arXiv:2010.04245; RoFormer, arXiv:2104.09864.

    q: (tokens, heads_q, head_dim), k and v: (tokens, heads_kv, head_dim), v may be left out. Any strides, with a unit
        stride along head_dim, even and at most 256. At most 2^30 - 32 tokens. float32, bfloat16 or, on a GPU, float16.
    heads: (heads_q, heads_kv): q is the output of a fused projection, (tokens, (heads_q + 2 heads_kv) head_dim) with or
        without an axis of heads: the heads of q, then those of k, then those of v. Its gradient is written in place;
        of views of it, autograd would concatenate the gradients, which takes as long as the kernel.
    cos, sin: (tokens, head_dim / 2), of q's dtype or float32. Or (tokens, head_dim) as transformers has them, with
        equal halves; the second half is not read.
    q_weight, k_weight: (head_dim), of q's dtype or float32. None: no norm.
    experts: two experts, as in BAGEL. q, k, v are pairs, of the first and the second expert's rows; or, in the order of
        tokens, single tensors. Weights are pairs.

    Returns q and k, and v if there was one: (tokens, heads, head_dim), contiguous, in the order of tokens. Gradients
    have the same bits on every run. Raises ValueError or TypeError naming an unsupported argument, and
    NotImplementedError in forward mode and in torch.func's transforms.
    """
    _expect_types(eps, experts)
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps: got {eps}, expected a number of at least 0")
    sources, parts, counts = _sources(q, k, v, heads)
    weights = _weights(q_weight, k_weight, experts)
    _expect_local(sources, weights, cos, sin)
    rows = None
    if experts is not None:
        rows = experts.rows if len(sources) > parts else experts.in_order()
    cos, sin = _tables(cos, sin, sources[0])
    _check(sources, parts, weights, cos, sin, experts, rows)
    _refuse_forward_mode(*sources, *weights)
    outputs: tuple[Tensor, Tensor, Tensor] = _forward_op(
        sources, cos, sin, weights, rows, parts, *counts, float(eps)
    )
    return outputs[:2] if parts == 2 else outputs


def _expect_local(sources: Sequence[Tensor], weights: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
    expect_local("q, k, v", *sources)
    expect_local("q_weight, k_weight", *weights)
    expect_local("cos, sin", cos, sin)


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """The operator would drop tangents without a word. Those of torch.func's transforms it refuses itself."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # the latter: no dual level is open
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attnforge: derivatives of qk_norm_rope in forward mode are not implemented; use backward"
        )


def _expect_types(eps: object, experts: object) -> None:
    expect_number("eps", eps, optional=False)
    if experts is not None and not isinstance(experts, ExpertRows):
        raise TypeError(f"experts: got {type(experts).__name__}, expected ExpertRows(first, second, tokens)")


def _beside(dtype: torch.dtype) -> str:
    """The dtypes of tables and weights beside q's."""
    return " or ".join(dict.fromkeys((str(dtype), "torch.float32")))


def _pair(name: str, x: Any) -> list[Tensor]:
    """One tensor, or those of two experts."""
    found = list(x) if isinstance(x, tuple | list) else [x]
    if len(found) not in (1, 2) or not all(isinstance(item, Tensor) for item in found):
        kinds = ", ".join(type(item).__name__ for item in found)
        given = f"{type(x).__name__} of {kinds or 'nothing'}" if isinstance(x, tuple | list) else kinds
        raise TypeError(f"{name}: got {given}, expected a tensor or a pair of tensors")
    return found


def _sources(
    q: Pair, k: Pair | None, v: Pair | None, heads: tuple[int, int] | None
) -> tuple[list[Tensor], int, tuple[int, int]]:
    """The projections, expert by expert, how many tensors an expert has, and the numbers of heads."""
    if heads is not None:
        if k is not None or v is not None:
            raise ValueError("heads: is of a fused projection, which k and v are part of; leave them out")
        if not torch.compiler.is_compiling():  # Dynamo's numbers have no __index__
            expect_integers("heads", heads, "(heads_q, heads_kv)")
        if len(heads) != 2 or min(heads) < 1:
            raise ValueError(f"heads: got {heads}, expected (heads_q, heads_kv), both at least 1")
        heads_q, heads_kv = heads
        fused = [_fused(x, heads_q + 2 * heads_kv) for x in _pair("q", q)]
        return fused, 1, (heads_q, heads_kv)
    if k is None:
        raise ValueError("k: is missing; a fused projection needs heads=(heads_q, heads_kv)")
    named = {"q": q, "k": k} | ({} if v is None else {"v": v})
    lists = {name: _pair(name, x) for name, x in named.items()}
    for name, tensors in lists.items():
        if len(tensors) != len(lists["q"]):
            raise ValueError(
                f"{name}: got {len(tensors)} tensors, expected {len(lists['q'])}, one for each expert, as q has"
            )
        for x in tensors:
            if x.dim() != 3:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (tokens, heads, head_dim)")
    sources = [x for expert in zip(*lists.values(), strict=True) for x in expert]
    return sources, len(lists), (lists["q"][0].shape[1], lists["k"][0].shape[1])


def _fused(x: Tensor, heads: int) -> Tensor:
    if x.dim() == 2 and x.shape[1] % heads == 0:
        x = x.unflatten(1, (heads, x.shape[1] // heads))
    if x.dim() != 3 or x.shape[1] != heads:
        raise ValueError(
            f"q: got shape {tuple(x.shape)}, expected (tokens, {heads} * head_dim) with heads_q + 2 heads_kv = {heads}"
        )
    return x


def _weights(q_weight: Pair | None, k_weight: Pair | None, experts: ExpertRows | None) -> list[Tensor]:
    """For q and k, expert by expert; none without a norm."""
    if (q_weight is None) != (k_weight is None):
        raise ValueError(
            f"q_weight, k_weight: expected both or neither, but {'q' if q_weight is None else 'k'}_weight is None"
        )
    if q_weight is None or k_weight is None:
        return []
    pairs = [_pair("q_weight", q_weight), _pair("k_weight", k_weight)]
    wanted = 1 if experts is None else 2
    for name, found in zip(("q_weight", "k_weight"), pairs, strict=True):
        if len(found) != wanted:
            raise ValueError(
                f"{name}: got {len(found)} tensor{'s'[: len(found) - 1]}, expected "
                f"{'2, one for each expert' if wanted > 1 else '1, since there are no experts'}"
            )
    return [x for expert in zip(*pairs, strict=True) for x in expert]


def _tables(cos: Tensor, sin: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (tokens, head_dim / 2)."""
    expect_tensors(cos=cos, sin=sin)
    head_dim = q.shape[2]
    found = []
    for name, x in (("cos", cos), ("sin", sin)):
        if (
            x.dim() != 2
            or x.shape[1] not in (head_dim // 2, head_dim)
            or x.dtype not in (q.dtype, torch.float32)
        ):
            raise ValueError(
                f"{name}: got {tuple(x.shape)} {x.dtype}, expected (tokens, {head_dim // 2}) or (tokens, {head_dim}) "
                f"of {_beside(q.dtype)}"
            )
        if x.requires_grad:
            raise ValueError(f"{name}: requires grad, but its gradient is not implemented; detach it")
        found.append(x[:, : head_dim // 2])
    if cos.dtype != sin.dtype:
        raise ValueError(f"sin: is {sin.dtype}, but cos is {cos.dtype}; expected one dtype")
    return found[0], found[1]


def _check(
    sources: list[Tensor],
    parts: int,
    weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    experts: ExpertRows | None,
    rows: Tensor | None,
) -> None:
    first = sources[0]
    head_dim = first.shape[2]
    accepted = _ON_CPU if first.device.type == "cpu" else _ON_GPU
    if first.dtype not in accepted:
        names = " and ".join(map(str, accepted))
        raise ValueError(f"q: got dtype {first.dtype}, accepted on {first.device.type} are {names}")
    if head_dim % 2 or not 2 <= head_dim <= HEAD_DIM_LIMIT:
        raise ValueError(f"q: got head_dim {head_dim}, accepted are even ones up to {HEAD_DIM_LIMIT}")
    _check_sources(sources, parts, experts)
    tokens = first.shape[0] if rows is None else rows.shape[0]
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"q: got {tokens} tokens, at most {MOST_TOKENS} are supported; split them into several calls"
        )
    if rows is not None and rows.device != first.device:
        raise ValueError(f"experts: are on {rows.device}, but q is on {first.device}")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape[0] != tokens or x.device != first.device:
            raise ValueError(
                f"{name}: has {x.shape[0]} rows on {x.device}, expected {tokens} on {first.device}"
            )
    for i, x in enumerate(weights):
        name = f"{'qk'[i % 2]}_weight"
        if x.shape != (head_dim,) or x.dtype not in (first.dtype, torch.float32) or x.device != first.device:
            raise ValueError(
                f"{name}: got {tuple(x.shape)} {x.dtype} on {x.device}, expected ({head_dim}) of "
                f"{_beside(first.dtype)} on {first.device}"
            )
        if x.dtype != weights[0].dtype:
            raise ValueError(f"{name}: is {x.dtype}, but q_weight is {weights[0].dtype}; expected one dtype")


def _check_sources(sources: list[Tensor], parts: int, experts: ExpertRows | None) -> None:
    """One dtype, device and head_dim; heads and rows that fit."""
    first = sources[0]
    if len(sources) > parts and experts is None:
        raise ValueError(
            "experts: is missing, but q is a pair of tensors; pass ExpertRows(first, second, tokens)"
        )
    for i, x in enumerate(sources):
        name, expert = "qkv"[i % parts], i // parts
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(f"{name}: is {x.dtype} on {x.device}, but q is {first.dtype} on {first.device}")
        heads = sources[min(i % parts, 1)].shape[1]  # v has as many as k
        if x.shape[1] != heads or x.shape[2] != first.shape[2]:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected (tokens, {heads}, {first.shape[2]})"
            )
        if x.stride(2) != 1 and x.shape[2] > 1 and x.numel():
            raise ValueError(f"{name}: has stride {x.stride(2)} along head_dim, expected 1")
        rows = first.shape[0]
        if experts is not None:
            rows = experts.lengths[expert] if len(sources) > parts else experts.rows.shape[0]
        if x.shape[0] != rows:
            raise ValueError(
                f"{name}: has {x.shape[0]} rows, expected {rows}{' of its expert' if experts else ''}"
            )
