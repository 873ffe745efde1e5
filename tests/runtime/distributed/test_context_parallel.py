"""Context parallelism: who computes what, what becomes of masks, and four processes against one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import gxx
import pytest
import torch
from oracle import unions
from ranks import torchrun

import attnforge
from attnforge.runtime.distributed.agreement import describe
from attnforge.runtime.distributed.exchange import split_heads
from attnforge.runtime.distributed.shards import (
    divide,
    local_dense,
    local_plain,
    local_spans,
    rows_of,
)

WORKER = Path(__file__).parent / "context_parallel_worker.py"
SPLITS = [
    (world, ulysses_degree, contiguous)
    for world, ulysses_degree, contiguous in product((1, 2, 4, 6, 8, 16), (1, 2, 4), (False, True))
    if world % ulysses_degree == 0 and (not contiguous or 1 < ulysses_degree < world)
]


@pytest.mark.parametrize(("world", "ulysses_degree", "contiguous"), SPLITS)
def test_every_head_of_every_row_is_computed_once(world: int, ulysses_degree: int, contiguous: bool) -> None:
    done = set()
    for rank in range(world):
        queries, gather_ranks, keys = divide(world, ulysses_degree, rank, contiguous)
        assert rank in queries
        assert rank in gather_ranks
        assert (len(queries), len(gather_ranks)) == (ulysses_degree, world // ulysses_degree)
        assert sorted(keys) == list(range(world))
        share = queries.index(rank)
        assert {
            divide(world, ulysses_degree, other, contiguous)[0].index(other) for other in gather_ranks
        } == {share}
        done |= {(share, block) for block in queries}
        if contiguous or ulysses_degree in (1, world):
            assert keys == tuple(range(world)), "functions of positions need keys in order"
            assert queries == tuple(range(queries[0], queries[0] + ulysses_degree)), (
                "and rows from a first one on"
            )
    assert len(done) == ulysses_degree * world


@pytest.mark.parametrize(("world", "ulysses_degree"), [(8, 4), (16, 4), (4, 2), (12, 4)])
def test_a_causal_mask_is_the_same_work_for_all(world: int, ulysses_degree: int) -> None:
    work = [sum(2 * block + 1 for block in divide(world, ulysses_degree, rank)[0]) for rank in range(world)]
    assert len(set(work)) == 1


@pytest.mark.parametrize(("world", "ulysses_degree", "contiguous"), SPLITS)
@pytest.mark.parametrize("total", [96, 90])
def test_masks_are_those_of_the_rows_and_keys_that_a_rank_has(
    world: int, ulysses_degree: int, contiguous: bool, total: int
) -> None:
    rows = -(-total // world)
    splits = [total // 3, total // 4, total - total // 3 - total // 4]
    packed = attnforge.bagel.PackedMask([total], splits, ["full", "noise", "causal"], "cpu")
    device = torch.device("cpu")
    holes = attnforge.DenseMask(torch.rand(1, 3, total, total) < 0.5)
    two, many = unions(total, total, 2, "cpu"), unions(total, total, 3, "cpu", (2, 3))
    for rank, mask in product(range(world), (packed, attnforge.Causal(), None, holes, two, many)):
        queries, _, keys = divide(world, ulysses_degree, rank, contiguous)
        seen = torch.ones(total, total, dtype=torch.bool) if mask is None else mask.visible(total, total)
        padded = torch.zeros(*seen.shape[:-2], rows * world, rows * world, dtype=torch.bool)
        padded[..., :total, :total] = seen
        local: attnforge.Spans | attnforge.DenseMask
        if isinstance(mask, attnforge.Spans):
            local = local_spans(mask, queries, keys, rows, total)
        elif isinstance(mask, attnforge.DenseMask):
            local = local_dense(mask, queries, keys, rows, total)
        else:
            local = local_plain(mask is not None, queries, keys, rows, total, device)
        row, column = (rows_of(blocks, rows, device) for blocks in (queries, keys))
        assert torch.equal(local.visible(row.numel(), column.numel()), padded[..., row, :][..., column])


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 20])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(7, 1), (14, 2), (28, 4), (4, 4)])
def test_pieces_cover_the_heads(heads_q: int, heads_kv: int, pieces: int) -> None:
    group = heads_q // heads_kv
    portions = split_heads(heads_q, heads_kv, pieces)
    assert [head for piece in portions for head in range(piece.q0, piece.q1)] == list(range(heads_q))
    for piece in portions:
        ratio, rest = divmod(piece.q1 - piece.q0, piece.k1 - piece.k0)
        assert rest == 0
        for head in range(piece.q0, piece.q1):
            assert piece.k0 + (head - piece.q0) // ratio == head // group
    assert len(portions) >= min(pieces, heads_kv)


def visible(*rows: int) -> torch.Tensor:
    """Two rows, which see the first so many keys of 64."""
    return torch.arange(64) < torch.tensor(rows)[:, None]


def later(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i > j


def much_later(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i > j + 8


def test_ranks_tell_apart_what_they_pass() -> None:
    """All these are different arguments; made anew, the same ones."""

    def arguments() -> list[Any]:
        at = torch.arange(64, dtype=torch.int32)
        return [
            None,
            2.0,
            torch.zeros(4),
            torch.zeros(4, dtype=torch.bfloat16),
            attnforge.Causal(),
            *(attnforge.Spans(at, torch.full_like(at, end)) for end in (63, 64)),
            *(attnforge.DenseMask(visible(*rows)) for rows in ((3, 40), (40, 3), (3, 41))),
            attnforge.DenseMask(visible(3, 40).flip(1)),
            *(attnforge.masks.mask_mod(f, 64, 64, "cpu") for f in (later, much_later)),
            *(attnforge.scores.softcap(cap) for cap in (20.0, 30.0)),
            *(attnforge.scores.bias(torch.zeros(shape)) for shape in ((2, 64), (64, 2))),
        ]

    words = [describe(x=x)["x"] for x in arguments()]
    assert len(set(words)) == len(words)
    assert words == [describe(x=x)["x"] for x in arguments()]


def test_four_processes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes of two and of four ranks, all masks, both dtypes: see the worker.

    What ranks exchange is tested, on small tensors. The kernels are many, and take a third of the time to compile if
    they are not optimised.
    """
    monkeypatch.setenv("CXX", str(gxx.unoptimising_compiler()))
    assert "4 ranks, torch.bfloat16" in torchrun(4, WORKER, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_are_one(ranks: int) -> None:
    """With NCCL and tensor cores: rows that move, gathered keys, split heads, functions."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, {ranks} needed")
    assert f"{ranks} ranks, torch.bfloat16" in torchrun(ranks, WORKER, "cuda")
