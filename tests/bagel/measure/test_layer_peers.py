"""Operators of a layer by other packages: exact stand-ins of these under BAGEL's mask, against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import peer_standins
import pytest
import torch
from hypothesis import given, settings
from packs import lists, packs
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex, fa3
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.layer_peers import (
    PEERS,
    FlashAttention3,
    Heads,
    endpoints,
    make_peer,
    part_of,
    ranges_of,
    with_rows,
)
from attnforge.bagel.packing import PackedMask, visible_from_definition
from attnforge.bagel.workloads import names, workload
from attnforge.codegen.spec import DType

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 8, torch.float64)
# Texts before, between and after images; images of both kinds first and last; splits and samples without rows.
PACKS = {
    "editing": [
        [(5, "causal"), (4, "full"), (6, "noise"), (3, "causal"), (4, "noise"), (5, "full"), (2, "causal")]
    ],
    "samples": [
        [(3, "causal"), (7, "noise")],
        [],
        [(6, "full"), (0, "causal"), (1, "causal"), (5, "full"), (4, "causal")],
        [(2, "noise"), (2, "noise"), (3, "full"), (1, "causal")],
        [(5, "causal"), (0, "noise"), (4, "causal")],
    ],
    "texts": [[(9, "causal")], [(1, "causal"), (6, "causal")]],
    "images": [[(5, "full"), (3, "noise")], [(4, "noise"), (1, "full"), (3, "noise")]],
}


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the packages; memory that nobody has written holds nan."""
    peer_standins.install(monkeypatch)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(tokens: int) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(tokens, heads, HEADS.dim, dtype=HEADS.dtype, generator=generator)
        for heads in (HEADS.q, HEADS.kv, HEADS.kv, HEADS.q)
    )


def results(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The output and its gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("pack", PACKS)
def test_out_and_gradients_are_those_of_the_mask(peer: str, pack: str) -> None:
    args = lists(PACKS[pack])
    operator = make_peer(peer, HEADS)
    mask: Any = operator.mask(*args, CPU)
    seen = visible_from_definition(*args)
    x = inputs(sum(args[0]))
    found = results(lambda q, k, v: operator(q, k, v, mask), *x)
    exact = results(lambda q, k, v: peer_standins.dense(q, k, v, seen), *x)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(packs)
def test_sequences_of_varlen_calls_are_the_mask(samples: list[list[tuple[int, str]]]) -> None:
    """Each visible pair is in one call once, and no other pair is."""
    args = lists(samples)
    tokens = sum(args[0])
    count = torch.zeros(tokens, tokens, dtype=torch.int64)
    for keys, options in FlashAttention3().mask(*args, CPU):
        k = torch.empty(len(keys), 1)
        for rows, gathered, seen in peer_standins.sequences(torch.empty(tokens, 1), k, **options):
            columns = torch.zeros(seen.shape[0], tokens, dtype=torch.int64)
            count[rows] += columns.index_add(1, keys[gathered], seen.long())
    assert torch.equal(count, visible_from_definition(*args).long())


@settings(max_examples=200, deadline=None)
@given(packs)
def test_endpoints_of_splits_are_the_mask(samples: list[list[tuple[int, str]]]) -> None:
    args = lists(samples)
    seen = visible_from_definition(*args)
    assert torch.equal(peer_standins.covered(endpoints(with_rows(*args), CPU), len(seen)), seen)


def test_endpoints_of_splits_are_those_of_pairs() -> None:
    """The measurement of attention alone finds them in the mask's pairs."""
    case = make_case("finetune/0", "2/1/16", DType.FLOAT32, CPU)
    assert isinstance(case.mask, PackedMask)
    splits = [split for split in case.mask.splits if split.end > split.start and split.end <= case.mask.used]
    ends = endpoints(splits, CPU)
    others = cudnn_flex.endpoints(case)[:, :, : case.mask.used]
    assert torch.equal(ends.clamp(max=case.mask.used), others.clamp(max=case.mask.used)[:, : ends.shape[1]])


@pytest.mark.parametrize("name", [name for name in names() if name.endswith("/0")])
def test_every_row_of_a_pack_is_in_one_sequence(name: str) -> None:
    """And a sequence has as many pairs as its split."""
    pack = workload(name)
    args = pack.sample_lens[:-1], pack.split_lens[:-1], pack.attn_modes[:-1]
    pairs, rows = 0, torch.zeros(sum(args[0]), dtype=torch.int64)
    for _, options in FlashAttention3().mask(*args, CPU):
        starts, used = options["cu_seqlens_q"][:-1].tolist(), options["seqused_q"].tolist()
        for start, length, keys in zip(starts, used, options["cu_seqlens_k"].diff().tolist(), strict=True):
            rows[start : start + length] += 1
            pairs += length * keys - options["is_causal"] * length * (length - 1) // 2
    assert bool((rows == 1).all())
    assert pairs == PackedMask(*args, CPU).pairs


def test_noise_leaves_a_gap() -> None:
    splits = with_rows([20], [3, 4, 5, 6, 2], ["causal", "noise", "full", "noise", "causal"])
    assert ranges_of(splits) == [
        [(0, 3)],
        [(0, 7)],
        [(0, 3), (7, 12)],
        [(0, 3), (7, 18)],
        [(0, 3), (7, 12), (18, 20)],
    ]
    part = part_of([splits[0], splits[4]], [ranges_of(splits)[0], ranges_of(splits)[4]], 20, CPU)
    assert part.keys.tolist() == [0, 1, 2, 0, 1, 2, 7, 8, 9, 10, 11, 18, 19]


def test_rows_without_a_gradient() -> None:
    """A forward alone, as a validation step has it."""
    args = lists(PACKS["samples"])
    q, k, v, _ = inputs(sum(args[0]))
    for name in PEERS:
        operator = make_peer(name, HEADS)
        mask: Any = operator.mask(*args, CPU)
        with torch.no_grad():
            out = operator(q, k, v, mask)
        torch.testing.assert_close(out, peer_standins.dense(q, k, v, visible_from_definition(*args)))


@pytest.mark.parametrize("fused", [False, True])
def test_the_prologue_is_chosen(fused: bool) -> None:
    assert [make_peer(name, HEADS, fused).fused_prologue for name in PEERS] == [fused] * 2


def test_absent_packages_and_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise Unavailable("not there")

    monkeypatch.setattr(fa3, "operators", absent)
    monkeypatch.setattr(cudnn_flex, "installed", lambda: False)
    with pytest.raises(Unavailable, match=r"not installed: pip install 'nvidia-cudnn-frontend\[cutedsl\]=="):
        make_peer("cudnn-flex", HEADS)
    with pytest.raises(Unavailable, match="not there"):
        make_peer("fa3", HEADS)
    with pytest.raises(ValueError, match=r"got 'fa2', accepted are cudnn-flex, fa3"):
        make_peer("fa2", HEADS)
