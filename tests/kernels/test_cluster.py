"""The knob `cluster` of the Hopper forward: two blocks that load K and V for each other. test_pipeline.py too."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from exported import COMMAND, NAME
from oracle import Shape, draw

from attnforge.codegen.families import make_plan, spec_from_json
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.package import Item, Tree
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels, ops
from attnforge.runtime.search.reference import reference

# By head_dim; persistent and not, with one, two and three consumers.
VARIANTS = [
    (128, Sm90Forward(192, 64, 3, False, True, False, False, 2)),
    (128, Sm90Forward(192, 80, 2, True, True, False, False, 2)),
    (128, Sm90Forward(128, 128, 2, True, False, False, True, 2)),
    (64, Sm90Forward(192, 128, 3, True, True, False, False, 2)),
    (64, Sm90Forward(64, 96, 3, False, False, False, True, 2)),
    (72, Sm90Forward(192, 128, 3, True, True, False, False, 2)),
    (120, Sm90Forward(128, 112, 2, True, True, False, False, 2)),
]
# What a GPU of up to 148 multiprocessors takes in one round, and in several. Query tiles are odd and even in number.
SHAPES = [
    Shape(seq_q=1, seq_k=1),
    Shape(seq_q=385, seq_k=130, heads_kv=1, group=7),
    Shape(seq_q=384, seq_k=1000, heads_kv=2, group=1),
    Shape(seq_q=901, seq_k=700, heads_kv=2, group=7, batch=3),
    Shape(seq_q=1300, seq_k=257, heads_kv=2, group=7, batch=4),
]

variants = pytest.mark.parametrize(
    ("head_dim", "tuning"), VARIANTS, ids=[f"{d}-{t.tile_m}x{t.tile_n}" for d, t in VARIANTS]
)


def spec_of(head_dim: int, tuning: Sm90Forward, mask: Mask = Mask.FULL) -> Spec:
    return Spec(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask), tuning)


@variants
def test_plan_by_hand(head_dim: int, tuning: Sm90Forward) -> None:
    plan, alone = (make_plan(spec_of(head_dim, t)) for t in (tuning, replace(tuning, cluster=1)))
    (launch,), (launch_alone,) = plan.launches, alone.launches
    assert (plan.cluster, alone.cluster) == (launch.cluster, launch_alone.cluster) == (2, 1)
    assert replace(launch, symbol="", cluster=1) == replace(launch_alone, symbol="")
    # A block loads half of the rows of K and V, panel by panel, and its own rows of Q.
    for box in plan.tensor_maps:
        rows = {"q": tuning.tile_m, "k": tuning.tile_n // 2, "v": tuning.tile_n // 2, "out": 64}[box.tensor]
        assert box.rows == rows
        assert box.panels == 1 or box.tensor == "q"


@pytest.mark.parametrize(
    ("change", "mask", "message"),
    [
        ({"cluster": 0}, Mask.FULL, "cluster 0: must be 1 or 2"),
        ({"cluster": 4}, Mask.FULL, "cluster 4: must be 1 or 2"),
        ({}, Mask.CAUSAL, "cluster 2: must be 1 with a causal mask"),
        ({}, Mask.SPANS, "cluster 2: must be 1 with a spans mask"),
        ({}, Mask.DENSE, "cluster 2: must be 1 with a dense mask"),
    ],
)
def test_what_it_does_not_take(change: dict[str, int], mask: Mask, message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        make_plan(spec_of(128, replace(VARIANTS[0][1], **change), mask))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_a_short_search_tries_two(head_dim: int) -> None:
    """Eight variants, none of them the first, which is taken where nothing was measured; other masks have none."""
    for mask in Mask:
        space = list(islice(candidates(spec_of(head_dim, VARIANTS[0][1], mask).problem), 100))
        clusters = [spec.tuning.cluster for spec in space]  # type: ignore[attr-defined]
        if mask is Mask.FULL:
            assert clusters[0] == 1
            assert clusters[:8].count(2) == 2
            assert {64: (192, 128, 3), 72: (192, 128, 3), 128: (192, 64, 3)}[head_dim] in [
                (s.tuning.tile_m, s.tuning.tile_n, s.tuning.stages)  # type: ignore[attr-defined]
                for s in islice(space, 8)
                if s.tuning.cluster == 2  # type: ignore[attr-defined]
            ]
        else:
            assert set(clusters) == {1}


def test_tables_older_than_the_knob_mean_blocks_by_themselves() -> None:
    spec = spec_of(128, replace(VARIANTS[0][1], cluster=1))
    data = spec.to_json()
    assert data["tuning"].pop("cluster") == 1
    assert spec_from_json(data) == spec
    del data["tuning"]["stages"]
    with pytest.raises(ValueError, match="stages missing"):
        spec_from_json(data)


def test_exported_launches_know_their_clusters() -> None:
    items = tuple(Item(spec_of(*VARIANTS[i]), 1024, "guess") for i in (0, 2))
    table = Tree(NAME, Arch.SM90A, items).files(COMMAND)[f"{NAME}/{NAME}.cu"]
    for item, persistent in zip(items, (1, 0), strict=True):
        (launch,) = item.plan.launches
        _, found, rest = table.partition(f"  symbol {launch.symbol}\n")
        assert found
        sizes = f"  threads {launch.threads}\n  shared_bytes {launch.shared_bytes}\n"
        assert f"{sizes}  persistent {persistent}\n  cluster 2\n" in rest.partition("tensor_maps")[0]


@pytest.mark.gpu
@variants
def test_the_same_bits_as_without(head_dim: int, tuning: Sm90Forward) -> None:
    """Who loads a tile changes no sum. Several times over: blocks of a pair run at speeds of their own."""
    device = torch.device("cuda")
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("clusters are Hopper's")
    pair, alone = (kernels.load(spec_of(head_dim, replace(tuning, cluster=n)), device) for n in (2, 1))
    for shape in SHAPES:
        x = draw(replace(shape, head_dim=head_dim), torch.bfloat16, "cuda")
        q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
        exact = reference(q, k, v)
        expected, expected_lse = ops.forward(q, k, v, None, None, alone)
        for _ in range(5):
            out, lse = ops.forward(q, k, v, None, None, pair)
            assert torch.equal(out, expected), shape
            assert torch.equal(lse, expected_lse), shape
        assert (out - exact.out).abs().max().item() < 2e-2, shape
