"""The eight masks of cuDNN's benchmark of cudnn.flex_attention, forward and backward, ours against peers.

    python benchmarks/eight_masks.py [--masks NAME ...] [--length 131072] [--peers cudnn-flex fa3] [--markdown FILE]

One sequence, by default of the heads 4/4/128 in bf16; query i sees key j when (S is the length)

- causal: j <= i.
- documents: j <= i, in the same one of 13 documents.
- local: i - 512 <= j <= i.
- sinks-local: as local, or j <= i is one of the first 4 keys.
- tree-depth-first: j <= i, and i's node is j's or below it, in a binary tree of 127 nodes of about S / 127 tokens,
  which lie in the sequence in depth-first order.
- tree-breadth-first: the same with nodes level by level. A key has up to 6 intervals of queries: a mask by a function.
- longformer: |i - j| <= 256, or i or j is one of 8 global tokens. Up to 9 intervals a key: a mask by a function.
- hstu: documents of a context and as many targets. A query of the context sees the context up to itself, a target the
  context and itself, but no other target.

Before any time, ours is compared with float64 on a sample of queries, and peers with ours everywhere: `differs` is the
largest RMS difference in out, dq, dk and dv, relative to their RMS; of peers in any 2048 tokens. Who differs by more
than rounding is not timed, and the exit status is 1.

Times are medians, all of a mask interleaved; "of ours" is the time over ours, "both" that of forward + backward.
"density" is the share of pairs that are visible, and TFLOP/s are those of visible pairs. "new mask" is by how many
milliseconds the first forward and backward with a new mask, from its intervals or its function, exceed others (wall
time, an idle device before and after): ours list their tiles, cudnn.flex_attention makes its plan.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from mask_time import interleaved
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex, peers
from attnforge.bagel.measure.agreement import TOLERANCE, relative, results
from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.measure.bench import machine
from attnforge.bagel.measure.cases import model_of, pairs_of
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.measure.peers import OURS
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime import mask_patterns
from attnforge.runtime.masks import Causal, FunctionMask, Spans
from attnforge.runtime.search.case import Case, Inputs, causal_case
from attnforge.runtime.search.timing import Effort, measure_interleaved, rotate
from attnforge.runtime.search.verify import distances, make_check

PEERS = ("cudnn-flex", "fa3")
DOCUMENTS = (
    11858,
    8270,
    12765,
    11038,
    4578,
    14018,
    11721,
    11988,
    4942,
    8393,
    7541,
    13495,
    10465,
)  # of 131072
WINDOW, SINKS = 512, 4
LEVELS = 7  # of the tree
RADIUS, GLOBALS = 256, 8
HSTU_DOCUMENTS = 11  # of 16th to 8th parts of the sequence
BLOCK = 2048  # tokens that are compared at a time: the results of late queries are small beside those of early ones
Made = tuple[Causal | Spans | FunctionMask, int]  # a mask and its visible pairs
HEAD = (
    "mask", "density %", "attention", "fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s", "of ours: fwd", "bwd", "both",
    "new mask ms", "differs",
)  # fmt: skip


# ---- Masks


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights, that sum to `total`."""
    ends = [round(x * total / sum(weights)) for x in accumulate(weights)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def causal(length: int, device: torch.device) -> Made:
    return Causal(), length * (length + 1) // 2


def documents(length: int, device: torch.device) -> Made:
    lengths = shares(DOCUMENTS, length)
    mask = PackedMask(lengths, lengths, ["causal"] * len(lengths), device)
    return mask, mask.pairs


def local(length: int, device: torch.device) -> Made:
    return _counted(mask_patterns.window(length, length, WINDOW, 0, device))


def sinks_local(length: int, device: torch.device) -> Made:
    return _counted(mask_patterns.window_with_sinks(length, length, WINDOW, 0, SINKS, device))


def _counted(mask: Spans) -> Made:
    return mask, pairs_of(mask, mask.seq_k)


def node_lengths(length: int) -> list[int]:
    """Tokens of the tree's nodes, level by level: those below node n are 2 * n + 1 and 2 * n + 2."""
    draw = random.Random(0)
    return shares([draw.uniform(0.8, 1.2) for _ in range(2**LEVELS - 1)], length)


def depth_first() -> list[int]:
    """The tree's nodes in preorder."""
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if node < 2 ** (LEVELS - 1) - 1:
            waiting += [2 * node + 2, 2 * node + 1]
    return order


def tree_depth_first(length: int, device: torch.device) -> Made:
    lengths, order = node_lengths(length), depth_first()
    parents = [order.index((node - 1) // 2) if node else -1 for node in order]
    return _counted(mask_patterns.tree(parents, [lengths[node] for node in order], device))


def tree_breadth_first(length: int, device: torch.device) -> Made:
    """A node's subtree is `tin` to `tout` in preorder."""
    lengths, order = node_lengths(length), depth_first()
    entered = [order.index(node) for node in range(len(order))]
    left = [tin + 2 ** (LEVELS + 1 - (node + 1).bit_length()) - 1 for node, tin in enumerate(entered)]
    of_token = torch.tensor(lengths)
    tin, tout = (torch.tensor(x, dtype=torch.int32).repeat_interleave(of_token) for x in (entered, left))

    def tree(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (tin[j] <= tin[i]) & (tin[i] < tout[j]) & (j <= i)

    pairs = tree_depth_first(length, torch.device("cpu"))[1]  # the order moves them
    return mask_patterns.mask_mod(tree, length, length, device, visible_keys=pairs / length), pairs


def longformer(length: int, device: torch.device) -> Made:
    is_global = torch.zeros(length, dtype=torch.bool)
    is_global[[(2 * n + 1) * length // (2 * GLOBALS) for n in range(GLOBALS)]] = True

    def longformer(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= RADIUS) | is_global[i] | is_global[j]

    row = torch.arange(length)
    first, end = (row - RADIUS).clamp(min=0), (row + RADIUS + 1).clamp(max=length)
    before = torch.cat(
        (torch.zeros(1, dtype=torch.long), is_global.cumsum(0))
    )  # global tokens before a token
    outside = before[-1] - (before[end] - before[first])
    pairs = int(torch.where(is_global, length, end - first + outside).sum())
    return mask_patterns.mask_mod(longformer, length, length, device, visible_keys=pairs / length), pairs


def contexts(length: int) -> list[int]:
    """Tokens of the context of each document of hstu; it has as many targets."""
    draw = random.Random(0)
    return shares([draw.uniform(1.0, 2.0) for _ in range(HSTU_DOCUMENTS)], length // 2)


def hstu(length: int, device: torch.device) -> Made:
    """Each target is a completion of one token of its document's context. An odd length has a target more."""
    groups = [(context, [1] * context) for context in contexts(length)]
    groups[-1][1].extend([1] * (length % 2))
    return _counted(mask_patterns.shared_prefix(groups, device))


MASKS: dict[str, Callable[[int, torch.device], Made]] = {
    "causal": causal,
    "documents": documents,
    "local": local,
    "sinks-local": sinks_local,
    "tree-depth-first": tree_depth_first,
    "tree-breadth-first": tree_breadth_first,
    "longformer": longformer,
    "hstu": hstu,
}


def case_of(name: str, length: int, model: str, dtype: DType, device: torch.device) -> Case:
    """The case of a mask."""
    heads = model_of(model)
    shape = (1, heads.heads_q, heads.heads_kv, length, heads.head_dim)
    mask, pairs = MASKS[name](length, device)
    return replace(causal_case(name, shape, dtype, device), mask=mask, pairs=pairs, dim_v=heads.head_dim_v)


# ---- Measurement


@dataclass(frozen=True)
class Contestant:
    """An attention, checked, with a mask that is made; `renew` makes it with a new one, None: not measured."""

    name: str
    call: Attention
    renew: Callable[[], Attention] | None
    differs: float


def renewer(name: str, case: Case) -> Callable[[], Attention] | None:
    """See `Contestant`. Raises Unavailable."""
    if name == "cudnn-flex":
        return cudnn_flex.planner(case)
    if name != OURS or isinstance(case.mask, Causal):
        return None
    return lambda: peers.attend(replace(case, mask=copy.deepcopy(case.mask)))  # a copy has no lists yet


def difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of all tensors and BLOCKs, see the module."""
    blocks = (
        zip(x.split(BLOCK, 2), y.split(BLOCK, 2), strict=True) for x, y in zip(got, expected, strict=True)
    )
    return max(relative(x, y) for pairs in blocks for x, y in pairs)


def contestants(case: Case, x: Inputs, names: Sequence[str]) -> tuple[list[Contestant], bool]:
    """Ours if it agrees with float64, and the peers that agree with it; and whether any does not."""
    check = make_check(case, Direction.BACKWARD)
    ours = peers.attend(case)
    errors = distances(check, dict(zip(("out", "dq", "dk", "dv"), results(ours, check.inputs), strict=True)))
    differs = max(errors.values())
    if not differs <= TOLERANCE[case.dtype]:
        print(f"{case.name}, {OURS}: differs from float64 by {differs:.1e}, so nobody is timed", flush=True)
        return [], True
    found, wrong = [Contestant(OURS, ours, renewer(OURS, case), differs)], False
    expected = results(ours, x)
    for name in names:
        try:
            with peers.memory_freed(case.device), peers.as_unavailable():
                renew = renewer(name, case)
                call = renew() if renew else peers.attention_of(name, case)
                differs = difference(results(call, x), expected)
        except Unavailable as reason:
            print(f"{case.name}, {name}: {reason}", flush=True)
            continue
        if differs > TOLERANCE[case.dtype]:
            print(f"{case.name}, {name}: differs from ours by {differs:.1e}, so it is not timed", flush=True)
            wrong = True
        else:
            found.append(Contestant(name, call, renew, differs))
    return found, wrong


def new_mask(one: Contestant, x: Inputs, seconds: float) -> str:
    """Milliseconds that a new mask costs a forward and backward, see the module; "-" where it is not measured."""
    renew = one.renew
    if renew is None:
        return "-"
    steps: dict[str, Callable[[], object]] = {
        "kept": lambda: results(one.call, x),
        "new": lambda: results(renew(), x),
    }
    device = x.q.device
    ms = interleaved(steps, seconds, torch.cuda.synchronize if device.type == "cuda" else lambda: None)
    return f"{ms['new'] - ms['kept']:.2f}"


def rows(case: Case, found: Sequence[Contestant], sets: Sequence[Inputs], seconds: float) -> list[str]:
    """Time everybody interleaved; rows of the table, the first is ours."""
    how = Effort(seconds=seconds, warmups=2)
    inputs = [(index,) for index in range(len(sets))]
    times: dict[Direction, dict[str, float]] = {}
    for direction in Direction:
        with peers.memory_freed(case.device):
            calls = {one.name: peers.call_of(one.call, direction, sets) for one in found}
            timings = measure_interleaved(calls, inputs, case.device, how)
            times[direction] = {name: timing.median for name, timing in timings.items()}
    base = [by_name[OURS] for by_name in times.values()]
    table = []
    for one in found:
        ms = [by_name[one.name] for by_name in times.values()]
        cells = (
            case.name,
            f"{100 * case.pairs / case.seq_q / case.seq_k:.3g}",
            one.name,
            *(f"{t:.3f}" for t in ms),
            *(f"{case.flops(direction) / t / 1e9:.4g}" for direction, t in zip(times, ms, strict=True)),
            *(f"{t / ours:.2f}" for t, ours in zip(ms, base, strict=True)),
            f"{sum(ms) / sum(base):.2f}",
            new_mask(one, sets[0], seconds),
            f"{one.differs:.1e}",
        )
        table.append(markdown_row(cells))
        print(table[-1], flush=True)
    return table


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The masks of cuDNN's benchmark of cudnn.flex_attention.")
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS)
    parser.add_argument("--length", type=int, default=1 << 17)
    parser.add_argument("--model", default="4/4/128")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="seconds of timed calls of each line and pass"
    )
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=peers.known())
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(words)
    if args.length < 2**LEVELS:
        parser.error(f"--length must be at least {2**LEVELS}")
    return args


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    device, any_wrong = torch.device(args.device), False
    table = markdown_head(HEAD)
    for name in args.masks:
        case = case_of(name, args.length, args.model, DType(args.dtype), device)
        sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), device)]
        found, wrong = contestants(case, sets[0], args.peers)
        any_wrong |= wrong
        if found:
            table += rows(case, found, sets, args.seconds)
    facts = facts_line(machine(device))
    text = "\n".join((facts, f"{args.length} tokens, {args.model} {args.dtype}", "", *table, ""))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    return int(any_wrong)


if __name__ == "__main__":
    sys.exit(main())
