"""Completions that share a prompt, as reinforcement learning trains them: one pack, or the prompt repeated for each.

    python benchmarks/shared_prefix.py [--prompt 16384] [--completions 16] [--tokens 1024] [--model 28/4/128]

"pack" holds the prompt once, with the mask of `attnforge.masks.shared_prefix`: ours, FlexAttention and
`cudnn.flex_attention`. "repeated" is a batch of causal sequences, each with a prompt of its own: ours, FlashAttention-3
and torch's SDPA. Both compute the same attention of the completions; a line's error is the difference from ours on the
pack, of out and of the gradient of the completions' q, relative to its RMS.

Forward and backward are timed in turns, in one run. TFLOP/s count the pairs that are visible in the line's own layout,
so that a repeated prompt counts each time. Memory is the peak of a forward and its backward, with the inputs. What is
not installed or cannot run is named and left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import attnforge
from attnforge.bagel.measure import peers
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import model_of, pairs_of
from attnforge.bagel.measure.fa4 import Attention, Unavailable
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.case import Case, Inputs, causal_case
from attnforge.runtime.search.timing import Effort, measure_interleaved

LIMIT = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}  # of a line's error
PACK, REPEATED = "pack", "repeated"
PEERS = {
    PACK: (peers.OURS, "flex", "cudnn-flex"),
    REPEATED: (peers.OURS, "fa3", "sdpa-cudnn", "sdpa-flash"),
}
HEAD = ("layout", "attention", "tokens", "fwd ms", "of ours", "bwd ms", "of ours", "TFLOP/s", "MiB", "error")


@dataclass(frozen=True)
class Layout:
    """A case, its inputs, and of which rows of the flat (batch x sequence) order the completions are."""

    case: Case
    inputs: Inputs
    completions: Tensor


def layouts(args: argparse.Namespace, device: torch.device) -> dict[str, Layout]:
    """The pack, and the batch with the same numbers."""
    model, dtype = model_of(args.model), DType(args.dtype)
    prompt, tokens, count = args.prompt, args.tokens, args.completions
    heads, total = (model.heads_q, model.heads_kv), prompt + count * tokens
    mask = attnforge.masks.shared_prefix([(prompt, [tokens] * count)], device)
    sizes = (1, *heads, total, total, model.head_dim, dtype)
    case = Case(PACK, *sizes, mask, pairs_of(mask, total), device)
    x = case.inputs()
    x.dout[:, :, :prompt] = 0  # the loss is that of the completions
    pack = Layout(case, x, torch.arange(prompt, total, device=device))
    each = torch.arange(count * tokens, device=device).view(count, tokens)
    rows = torch.cat((torch.arange(prompt, device=device).expand(count, -1), prompt + each), 1)
    copies = Inputs(*(_rows(t, rows) for t in x))
    alike = causal_case(REPEATED, (count, *heads, prompt + tokens, model.head_dim), dtype, device)
    places = torch.arange(count, device=device)[:, None] * (prompt + tokens)
    places = places + torch.arange(prompt, prompt + tokens, device=device)
    return {PACK: pack, REPEATED: Layout(alike, copies, places.flatten())}


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """(B, H, S, D) of the given rows of each sequence of x (1, H, S, D)."""
    return x[0].transpose(0, 1)[rows].transpose(1, 2)


def _flat(x: Tensor, places: Tensor) -> Tensor:
    """(n, H, D): the rows at `places` of x (B, H, S, D), counted through the batch."""
    return x.transpose(1, 2).flatten(0, 1)[places]


def _ours(case: Case) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attnforge.attention(q, k, v, case.mask)
        return out

    return call


def answer(name: str, layout: Layout) -> tuple[Tensor, Tensor]:
    """out, and the gradient of q, of the completions."""
    x = layout.inputs
    q = x.q.detach().requires_grad_()
    leaves = (q, x.k.detach().requires_grad_(), x.v.detach().requires_grad_())
    out = peers.attention_of(name, layout.case)(*leaves)
    dq = torch.autograd.grad(out, leaves, x.dout)[0]
    return _flat(out.detach(), layout.completions), _flat(dq, layout.completions)


def memory(name: str, layout: Layout) -> float:
    """MiB, see the module; 0 on a CPU."""
    if layout.case.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answer(name, layout)
    own = sum(t.numel() * t.element_size() for t in layout.inputs)
    return (torch.cuda.max_memory_allocated() - before + own) / 2**20


def contestants(found: dict[str, Layout], dtype: str) -> dict[tuple[str, str], float]:
    """The error of each (layout, name) that runs and is right; ours on the pack is the first. Others are named."""
    expected = answer(peers.OURS, found[PACK])
    errors = {}
    for at, names in PEERS.items():
        for name in names:
            try:
                with peers.as_unavailable():
                    got = answer(name, found[at])
            except Unavailable as reason:
                print(f"{at} {name}: {reason}", flush=True)
                continue
            errors[at, name] = max(map(_difference, got, expected))
            if not errors[at, name] <= LIMIT[dtype]:
                raise SystemExit(f"{at} {name}: an error of {errors[at, name]:.1e}, more than {LIMIT[dtype]}")
    return errors


def _difference(got: Tensor, expected: Tensor) -> float:
    wide = expected.double()
    return float((got.double() - wide).square().mean().sqrt() / wide.square().mean().sqrt())


def milliseconds(
    found: dict[str, Layout], names: list[tuple[str, str]], direction: Direction, seconds: float
) -> dict[tuple[str, str], float]:
    """Medians, in turns."""
    device = found[PACK].case.device
    calls: dict[str, Callable[[int], object]] = {}
    for at, name in names:
        x = found[at].inputs
        calls[f"{at} {name}"] = peers.contestant(name, found[at].case, direction, [x])
    times = measure_interleaved(calls, [(0,)], device, Effort(seconds=seconds, warmups=2))
    return {(at, name): times[f"{at} {name}"].median for at, name in names}


def table(found: dict[str, Layout], args: argparse.Namespace) -> list[str]:
    """A line for each contestant."""
    errors = contestants(found, args.dtype)
    forward, backward = (milliseconds(found, list(errors), way, args.seconds) for way in Direction)
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    first = (PACK, peers.OURS)
    for (at, name), error in errors.items():
        case, key = found[at].case, (at, name)
        speeds = (
            case.flops(way) / ms[key] / 1e9 for way, ms in zip(Direction, (forward, backward), strict=True)
        )
        cells = (
            at,
            name,
            f"{case.batch * case.seq_q:,}",
            *(x for ms in (forward, backward) for x in (f"{ms[key]:.3f}", f"{ms[key] / ms[first]:.2f}")),
            " / ".join(f"{speed:.4g}" for speed in speeds),
            f"{memory(name, found[at]):.0f}",
            f"{error:.1e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of a completion")
    parser.add_argument("--model", default="28/4/128")
    parser.add_argument("--dtype", choices=list(LIMIT), default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed calls of each contestant")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    peers.EXTRA[peers.OURS] = _ours
    device = torch.device(args.device)
    facts = ", ".join(f"{key} {value}" for key, value in machine(device).items())
    text = "\n".join((facts, "", *table(layouts(args, device), args), ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
