"""The cost of scores: plain attention, softcap, ALiBi, biases and sinks, forward and backward, in one interleaved run.

    python benchmarks/scores.py [--pack pretrain/0 causal/4x8192] [--peers flex fa3 fa4 mma] [--markdown FILE]

"softcap 50" has all scores of standard normal inputs within the cap, where tanh is a polynomial; "softcap 0.5" has
tiles beyond it, which take the general tanh; "approximate" takes the hardware's. "bias" is a tensor (Sq, Sk), the same
for all heads and batch entries. "learned" also computes the gradient of the table, the bias or the sinks,
"deterministic" all gradients in a fixed order, without peers. "share" is the time of plain attention over the line's.
`--peers` adds

    flex    FlexAttention with the same score, compiled for each; sinks by its lse, gradients by captured tensors
    fa3     FlashAttention-3 with its softcap
    fa4     FlashAttention-4 with its softcap and sinks, and with functions of benchmarks/fa4_scores.py
    mma     our own mma.sync kernels, which Hopper takes where `sm90a` has none

A peer whose results differ from ours by more than the dtype's roundings is named and not timed. The error is that of
out, or the largest of dq, dk and dv, relative to their RMS, against the same formula in float64 on 64 queries in the
middle and all keys of one head; of the backward with a dout of zeros elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attnforge
from attnforge import scores
from attnforge.bagel.measure import fa3, fa4, peers
from attnforge.bagel.measure.agreement import TOLERANCE, relative
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime import dispatch, kernels, ops, tables
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.reference import visible_rows
from attnforge.runtime.search.timing import Effort, measure_interleaved, rotate

REACH = 128  # distances of the relative bias
ROWS = 64  # queries of the check
Function = Callable[..., Tensor]
HEAD = (
    "case, pass", "score", "ms", "TFLOP/s", "share of plain", "of FlexAttention", "of FA3", "of FA4", "of mma.sync",
    "error",
)  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """One score: as ours takes it, and as FlexAttention and the check do."""

    score: scores.Score | None
    function: Function | None
    sinks: Tensor | None = None
    learned: tuple[Tensor, ...] = ()  # that get a gradient, too
    softcap: float | None = 0.0  # of the same score in FlashAttention, 0 for none; None: it has no such score
    cute: str = ""  # the function of benchmarks/fa4_scores.py that is the same score
    reads: tuple[Tensor, ...] = ()  # by that function
    deterministic: bool = False


def contestants(case: Case) -> dict[str, Contestant]:
    """By name; "plain" is the first."""
    device, heads = case.device, case.heads_q
    slopes = 2.0 ** -torch.linspace(1, 8, heads, device=device)
    sinks = torch.zeros(heads, device=device)
    learned = sinks.clone().requires_grad_()

    def cap(limit: float) -> Function:
        return lambda s, b, h, i, j: limit * torch.tanh(s / limit)

    def capped(limit: float, approximate: bool = False) -> Contestant:
        return Contestant(scores.softcap(limit, approximate=approximate), cap(limit), softcap=limit)

    found = {
        "plain": Contestant(None, None),
        "softcap 50": capped(50.0),
        "softcap 50, approximate": capped(50.0, approximate=True),
        "softcap 0.5": capped(0.5),
        "ALiBi": Contestant(
            scores.alibi(slopes),
            lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
            softcap=None,
            cute="alibi",
            reads=(slopes[:, None],),
        ),
        **biases(case),
        "sinks": Contestant(None, None, sinks),
        "sinks, learned": Contestant(None, None, learned, learned=(learned,)),
    }
    return found | {
        f"{name}, deterministic": replace(one, deterministic=True)
        for name, one in found.items()
        if name == "plain" or one.learned
    }


def biases(case: Case) -> dict[str, Contestant]:
    """What is added from a tensor, which gets a gradient if it is learned."""
    device = case.device
    table = torch.randn(case.heads_q, 2 * REACH + 1, device=device)
    dtype = torch.bfloat16 if case.dtype is DType.BFLOAT16 else torch.float32
    values = torch.randn(case.seq_q, case.seq_k, device=device, dtype=dtype)

    def relative_bias(t: Tensor) -> Function:
        return lambda s, b, h, i, j: s + t[h, (j - i).clamp(-REACH, REACH) + REACH]

    def bias(t: Tensor) -> Function:
        return lambda s, b, h, i, j: s + t[i, j]

    found = {}
    for name, tensor, score, function, cute in (
        ("relative bias", table, scores.relative_bias, relative_bias, "relative_bias"),
        ("bias", values, scores.bias, bias, "bias"),
    ):
        leaf = tensor.clone().requires_grad_()
        found[name] = Contestant(score(tensor), function(tensor), softcap=None, cute=cute, reads=(tensor,))
        found[f"{name}, learned"] = Contestant(score(leaf), function(leaf), learned=(leaf,), softcap=None)
    return found


def ours(case: Case, one: Contestant, direction: Direction, sets: list[Inputs]) -> Callable[[int], Any]:
    """A call on the inputs of an index."""

    def forward(index: int) -> Tensor:
        x = sets[index]
        return attnforge.attention(
            x.q, x.k, x.v, case.mask, score=one.score, sinks=one.sinks, deterministic=one.deterministic
        )

    return _timed(forward, direction, sets, one.learned)


def flex(case: Case, one: Contestant, direction: Direction, sets: list[Inputs]) -> Callable[[int], Any]:
    """FlexAttention with the same score; sinks scale what it returns, by its lse."""
    mod = peers._mask_mod(case)
    block_mask = mod and peers._block_mask(mod, case, "once")
    call = peers._compiled_flex() if one.sinks is None else compiled_with_sinks()
    options: dict[str, Any] = {"score_mod": one.function, "block_mask": block_mask, "enable_gqa": True}
    options |= {} if one.sinks is None else {"sinks": one.sinks}

    def forward(index: int) -> Tensor:
        x = sets[index]
        out: Tensor = call(x.q, x.k, x.v, **options)
        return out

    return _timed(forward, direction, sets, one.learned)


@cache
def compiled_with_sinks() -> Callable[..., Tensor]:
    """FlexAttention with one more logit a head in the denominator, compiled as a whole."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    peers._compiled_flex()  # sets what its compilation needs

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **options: Any) -> Tensor:
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        scaled: Tensor = out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]
        return scaled.to(out.dtype)

    return torch.compile(attend, dynamic=False)


def flash3(case: Case, one: Contestant, direction: Direction, sets: list[Inputs]) -> Callable[[int], Any]:
    """FlashAttention-3 with the same softcap. Raises Unavailable for other scores, and for what FA3 does not take."""
    if one.softcap is None or one.sinks is not None:
        raise Unavailable("has no such score")
    call = fa3.attention(case, softcap=one.softcap)
    return _timed(lambda index: call(*sets[index][:3]), direction, sets, ())


def flash4(case: Case, one: Contestant, direction: Direction, sets: list[Inputs]) -> Callable[[int], Any]:
    """FlashAttention-4 with the same score. Raises Unavailable for gradients of a score's tensors, and for packs."""
    fa4.require()
    options: dict[str, Any] = {"softcap": one.softcap} if one.softcap else {}
    if one.sinks is not None:
        options["learnable_sink"] = one.sinks
    elif one.learned:
        raise Unavailable("has no gradient of what a score reads")
    if one.cute:
        functions = importlib.import_module("attnforge.benchmarks.fa4_scores")
        options |= {"score_mod": getattr(functions, one.cute), "score_mod_bwd": functions.unchanged}
        options["aux_tensors"] = list(one.reads)
    call = fa4.attention(case, **options)
    return _timed(lambda index: call(*sets[index][:3]), direction, sets, one.learned)


def mma(case: Case, one: Contestant, direction: Direction, sets: list[Inputs]) -> Callable[[int], Any]:
    """Ours by the mma.sync kernels of Hopper. Raises Unavailable for sinks, and for gradients of tensors."""
    if one.sinks is not None or one.learned:
        raise Unavailable("is not compared")
    scored = replace(case, score=one.score)
    target = dispatch.Target(tables.device_name(case.device), (Arch.SM90,))

    def handle(of: Direction) -> int:
        choice = dispatch.choose_for(case.call(scored.problem(of, Arch.SM90)), target)
        return kernels.load(choice.spec, case.device)

    plain = [Inputs(*(t.detach() for t in x)) for x in sets]
    variants = {of: handle(of) for of in (Direction.FORWARD, direction)}

    def forward(x: Inputs) -> tuple[Tensor, Tensor]:
        return ops.forward(
            x.q, x.k, x.v, case.mask, variant=variants[Direction.FORWARD], score=one.score, check=False
        )

    if direction is Direction.FORWARD:
        return lambda index: forward(plain[index])
    saved = [forward(x) for x in plain]

    def backward(index: int) -> Any:
        x = plain[index]
        return ops.backward(
            x.dout,
            x.q,
            x.k,
            x.v,
            *saved[index],
            case.mask,
            variant=variants[direction],
            score=one.score,
            check=False,
        )

    return backward


def _timed(
    forward: Callable[[int], Tensor], direction: Direction, sets: list[Inputs], learned: tuple[Tensor, ...]
) -> Callable[[int], Any]:
    if direction is Direction.FORWARD:

        def alone(index: int) -> Tensor:
            with torch.no_grad():
                return forward(index)

        return alone
    saved = [forward(index) for index in range(len(sets))]

    def backward(index: int) -> Any:
        x = sets[index]
        return torch.autograd.grad(saved[index], (x.q, x.k, x.v, *learned), x.dout, retain_graph=True)

    return backward


def error(case: Case, one: Contestant, direction: Direction, x: Inputs) -> float:
    """Of queries of head 0 of batch entry 0, see the module."""
    group = case.heads_q // case.heads_kv
    rows = torch.arange(ROWS, device=case.device) + case.seq_q // 2
    seen = visible_rows(case.mask, rows, case.seq_q, case.seq_k)[0, 0]
    q, k, v = (t.detach().double().requires_grad_() for t in (x.q[:1, :1, rows], x.k[:1, :1], x.v[:1, :1]))
    score = q @ k.mT * case.head_dim**-0.5
    if one.function is not None:
        at = torch.meshgrid(*(torch.arange(n, device=case.device) for n in score.shape), indexing="ij")
        score = one.function(score, at[0], at[1], at[2] + rows[0], at[3])
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    if one.sinks is not None:
        lse = torch.logaddexp(lse, one.sinks[0].double())
    exact = (score - lse).exp() @ v
    dout = torch.zeros_like(x.dout[:1, :group])
    dout[:, :1, rows] = x.dout[:1, :1, rows]
    mine = [t[:1, : group if i == 0 else 1].detach().requires_grad_() for i, t in enumerate((x.q, x.k, x.v))]
    sinks = None if one.sinks is None else one.sinks[:group]
    out = attnforge.attention(mine[0], mine[1], mine[2], case.mask, score=one.score, sinks=sinks)
    if direction is Direction.FORWARD:
        return relative(out[:, :1, rows], exact)
    got = torch.autograd.grad(out, mine, dout)
    answers = torch.autograd.grad(exact, (q, k, v), dout[:, :1, rows].double())
    return max(map(relative, (got[0][:, :1, rows], got[1], got[2]), answers))


def agrees(got: Any, expected: Any, learned: int, dtype: DType) -> None:
    """Raises Unavailable if results of a peer, tensors or tuples that begin with the same ones, differ from ours.

    `learned`: how many at the end are gradients of learned tensors. Peers sum these in the tensor's dtype, so they may
    differ by ten times as much.
    """
    got, expected = ((x,) if isinstance(x, Tensor) else x for x in (got, expected))
    exact = len(expected) - learned
    for n, (theirs, mine) in enumerate(zip(got, expected, strict=False)):
        differs, limit = relative(theirs, mine), TOLERANCE[dtype] * (1 if n < exact else 10)
        if not differs <= limit:
            raise Unavailable(f"result {n} differs from ours by {differs:.1e}, so it is not timed")


def calls_of(
    case: Case, known: dict[str, Contestant], direction: Direction, sets: list[Inputs], names: list[str]
) -> dict[str, Callable[[int], Any]]:
    """Calls of ours, by the score, and of peers, by "PEER SCORE". Those that cannot run are reported and left out."""
    calls: dict[str, Callable[[int], Any]] = {}
    for name, one in known.items():
        calls[name] = ours(case, one, direction, sets)
        expected = calls[name](0)
        for peer in () if one.deterministic else names:
            try:
                with peers.memory_freed(case.device), peers.as_unavailable():
                    call = PEERS[peer](case, one, direction, sets)
                    learned = len(one.learned) if direction is Direction.BACKWARD else 0
                    agrees(call(0), expected, learned, case.dtype)
                    calls[f"{peer} {name}"] = call
            except Unavailable as reason:
                print(f"{peer} {name} {direction.value}: {reason}", flush=True)
    return calls


def measure(case: Case, direction: Direction, args: argparse.Namespace) -> list[str]:
    """Rows of the table of one case and direction."""
    device = case.device
    sets = [Inputs(*t) for t in rotate(tuple(case.inputs()), device)]
    for x in sets:
        for t in (x.q, x.k, x.v):
            t.requires_grad_()
    known = contestants(case)
    if args.scores:
        known = {name: known[name] for name in ("plain", *args.scores)}
    if direction is Direction.FORWARD:  # always deterministic
        known = {name: one for name, one in known.items() if not one.deterministic}
    calls = calls_of(case, known, direction, sets, args.peers)
    times = measure_interleaved(
        calls, [(i,) for i in range(len(sets))], device, Effort(seconds=args.seconds, warmups=2)
    )
    found = []
    for name, one in known.items():
        ms = times[name].median
        cells = (
            f"{case.name}, {direction.value}",
            name,
            f"{ms:.3f}",
            f"{case.flops(direction) / ms / 1e9:.4g}",
            f"{times['plain'].median / ms:.2f}",
            *(
                f"{times[key].median / ms:.2f}" if (key := f"{peer} {name}") in times else "-"
                for peer in PEERS
            ),
            f"{error(case, one, direction, sets[0]):.1e}",
        )
        found.append(markdown_row(cells))
        print(found[-1], flush=True)
    return found


PEERS = {"flex": flex, "fa3": flash3, "fa4": flash4, "mma": mma}


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of scores beside plain attention.")
    parser.add_argument("--pack", nargs="+", default=["pretrain/0", "causal/4x8192"])
    parser.add_argument("--scores", nargs="+", metavar="NAME", help='lines beside "plain" [default: all]')
    parser.add_argument("--model", default="28/4/128")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of timed calls of each contestant"
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[], help="who is timed beside")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    device = torch.device(args.device)
    table = markdown_head(HEAD)
    for pack in args.pack:
        case = make_case(pack, args.model, DType(args.dtype), device)
        for direction in Direction:
            table += measure(case, direction, args)
    facts = facts_line(machine(device))
    text = "\n".join((facts, "", *table, ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
