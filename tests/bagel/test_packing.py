"""BAGEL's packs: spans against the predicate, the packaged workloads against what their generator counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import lists, packs

from attnforge.bagel.measure.blocks import equal_documents, random_blocks
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.tiles import EMPTY, FULL, PARTIAL, tile_map
from attnforge.bagel.models import MODELS
from attnforge.bagel.packing import PackedMask, visible_from_definition
from attnforge.bagel.workloads import names, workload
from attnforge.codegen.spec import DType
from attnforge.runtime.masks import DenseMask
from attnforge.runtime.ops import attention

CPU = torch.device("cpu")


def visible(mask: PackedMask) -> torch.Tensor:
    row = torch.arange(mask.starts.numel())[:, None]
    return (mask.starts[None] <= row) & (row < mask.ends[None])


@settings(max_examples=200, deadline=None)
@given(packs)
def test_spans_equal_the_definition(samples: list[list[tuple[int, str]]]) -> None:
    args = lists(samples)
    mask = PackedMask(*args, CPU)
    assert mask.starts.dtype == mask.ends.dtype == torch.int32
    assert torch.equal(visible(mask), visible_from_definition(*args))
    assert mask.pairs == int(visible(mask).sum())


@settings(max_examples=200, deadline=None)
@given(packs, st.integers(1, 9))
def test_padding_is_skipped_or_computed(samples: list[list[tuple[int, str]]], pad: int) -> None:
    documents, split_lens, modes = lists(samples)
    used = sum(documents)
    args = ([*documents, pad], [*split_lens, pad], [*modes, "causal"])
    skipped = PackedMask(*args, CPU, used=used)
    expected = visible_from_definition(*args)
    assert torch.equal(visible(PackedMask(*args, CPU, used=used, padding="compute")), expected)
    expected[used:] = False
    assert torch.equal(visible(skipped), expected)
    assert skipped.pairs == int(expected.sum())
    assert not skipped.starts[used:].any()
    assert not skipped.ends[used:].any()


@settings(max_examples=200, deadline=None)
@given(packs, st.integers(1, 9), st.integers(1, 9))
def test_tile_kinds_equal_a_dense_count(
    samples: list[list[tuple[int, str]]], tile_m: int, tile_n: int
) -> None:
    mask = PackedMask(*lists(samples), CPU)
    dense = visible(mask)
    kinds = tile_map(mask, dense.shape[0], tile_m, tile_n).kinds
    for m, rows in enumerate(dense.split(tile_m)):
        for n, tile in enumerate(rows.split(tile_n, dim=1)):
            expected = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
            assert kinds[m, n] == expected, (m, n)
    assert torch.equal(tile_map(DenseMask(dense), dense.shape[0], tile_m, tile_n).kinds, kinds)


def test_example_of_the_docstring() -> None:
    mask = PackedMask([5], [2, 2, 1], ["causal", "noise", "causal"], CPU)
    assert mask.starts.tolist() == [0, 1, 2, 2, 4]
    assert mask.ends.tolist() == [5, 5, 4, 4, 5]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([4], [2, 1], ["causal", "full"]), "split_lens: 3 tokens in all, but sample_lens has 4"),
        (([2, 2], [3, 1], ["causal", "full"]), "split_lens: split 0 .* crosses the end of sample 0"),
        (([3], [3], ["casual"]), "attn_modes: entry 0 is 'casual'; modes are causal, full, noise"),
        (([3], [4, -1], ["full", "full"]), "split_lens: entry 1 is -1"),
        (([-3], [3], ["full"]), "sample_lens: entry 0 is -3"),
        (([3], [3], ["full", "full"]), "attn_modes: 2 modes for 1 split_lens"),
    ],
)
def test_bad_packs_name_the_argument(args: tuple[list[int], list[int], list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedMask(*args, CPU)


def test_lengths_of_numpy_do_not_wrap_around() -> None:
    lengths = np.array([60000], np.int32)
    mask = PackedMask(lengths, lengths, ["full"], "cpu")  # type: ignore[arg-type]
    assert (mask.pairs, mask.visible_keys_rounded) == (
        60000**2,
        PackedMask([60000], [60000], ["full"], "cpu").visible_keys_rounded,
    )


def test_a_device_that_is_not_here_is_named() -> None:
    """Torch's builds with and without CUDA raise different errors for it."""
    with pytest.raises(ValueError, match="device: got 'cuda:99', which torch does not have here"):
        PackedMask([2], [2], ["full"], "cuda:99")


def test_padding_must_be_whole_samples() -> None:
    with pytest.raises(ValueError, match="used: 3 real tokens end inside a sample"):
        PackedMask([4, 2], [4, 2], ["full", "causal"], CPU, used=3)
    with pytest.raises(ValueError, match="padding: got 'drop'"):
        PackedMask([4], [4], ["full"], CPU, padding="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_workload_counts(name: str) -> None:
    """Pairs and 128-tile counts equal those that the generator of workloads.json took from dense masks."""
    pack = workload(name)
    mask = pack.mask(CPU, padding="compute")
    assert mask.starts.numel() == pack.tokens == pack.facts["S"]
    assert mask.pairs == pack.facts["nnz"] == int((mask.ends.long() - mask.starts).sum())
    skipped = pack.mask(CPU)
    assert skipped.pairs == pack.facts["nnz"] - pack.facts["nnz_pad"]
    tiles = tile_map(mask, pack.tokens, 128, 128)
    counted = {"full": tiles.count(FULL), "partial": tiles.count(PARTIAL), "empty": tiles.count(EMPTY)}
    assert counted == pack.facts["blocks128"]


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu() -> None:
    """The mask goes up asynchronously, equal to the one made on the host."""
    pack = workload("pretrain/1")
    pack.mask("cuda")  # the first call may allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = pack.mask("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = pack.mask(CPU)
    assert torch.equal(mask.starts.cpu(), expected.starts)
    assert torch.equal(mask.ends.cpu(), expected.ends)


def test_a_pack_may_be_empty() -> None:
    """A rank whose batch has no image or no token goes on."""
    for empty in (([], [], []), ([0], [0], ["full"])):
        mask = PackedMask(*empty, CPU)
        assert (mask.seq_k, mask.pairs, mask.used) == (0, 0, 0)
        x = torch.randn(1, 2, 0, 16, requires_grad=True)
        attention(x, x, x, mask).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_vit_images_see_themselves_only() -> None:
    pack = workload("pretrain/0")
    mask = pack.vit_mask(CPU)
    assert mask.pairs == sum(length**2 for length in pack.vit_lens)
    with pytest.raises(ValueError, match="t2i_lowres/0 has no image"):
        workload("t2i_lowres/0").vit_mask(CPU)


def test_unknown_pack_lists_the_names() -> None:
    with pytest.raises(ValueError, match="there is no 'pretrain/9'; packs are pretrain/0 to 3, "):
        workload("pretrain/9")


def test_model_heads() -> None:
    shapes = {n: (m.heads_q, m.heads_kv, m.head_dim) for n, m in MODELS.items() if m.mask == "bagel"}
    assert shapes == {
        "7B": (28, 4, 128),
        "1.5B": (12, 2, 128),
        "0.5B": (14, 2, 64),
        "vit": (16, 16, 72),
    }


# ---- Dense masks of random blocks


@pytest.mark.parametrize(("sparsity", "length", "block"), [(0.5, 1024, 128), (0.9, 1000, 64), (0.0, 90, 128)])
def test_random_blocks_are_whole_and_counted(sparsity: float, length: int, block: int) -> None:
    mask = random_blocks(sparsity, length, CPU, block)
    tiles = tile_map(mask, length, block, block)
    assert tiles.count(PARTIAL) == 0
    assert tiles.count(EMPTY) == round(sparsity * (-(-length // block)) ** 2)
    assert torch.equal(mask.mask, random_blocks(sparsity, length, CPU, block).mask)
    if tiles.count(EMPTY):
        assert not torch.equal(mask.mask, random_blocks(sparsity, length, CPU, block, seed=1).mask)


@pytest.mark.parametrize(("share", "length"), [(0.5, 8192), (0.1, 8192), (1.0, 1000), (0.01, 300)])
def test_documents_of_whole_blocks(share: float, length: int) -> None:
    mask = equal_documents(share, length, CPU)
    tiles = tile_map(mask, length, 128, 128)
    assert tiles.count(PARTIAL) == 0
    assert mask.used == length
    if length == 8192:
        assert mask.pairs / length**2 == pytest.approx(share, rel=0.02)


def test_a_case_of_random_blocks() -> None:
    case = make_case("blocks/0.9/1024", "7B", DType.BFLOAT16, CPU)
    assert isinstance(case.mask, DenseMask)
    assert (case.seq_q, case.heads_q, case.heads_kv, case.head_dim) == (1024, 28, 4, 128)
    assert case.pairs == (64 - round(0.9 * 64)) * 128**2 == int(case.mask.mask.sum())
    assert case.mask.visible_keys == case.pairs / 1024
    assert make_case("blocks/.5", "1/1/8", DType.BFLOAT16, CPU).seq_q == 8192
    for name in ("blocks/1", "blocks/1.5", "blocks/0.5/0", "blocks/"):
        with pytest.raises(ValueError, match=r"others are .*blocks/0\.9"):
            make_case(name, "7B", DType.BFLOAT16, CPU)


def test_a_mask_for_each_head_has_no_tile_map() -> None:
    with pytest.raises(ValueError, match=r"planes \(1, 2\)"):
        tile_map(DenseMask(torch.ones(1, 2, 8, 8, dtype=torch.bool)), 8, 4, 4)
