"""Sparse packs and dense ones: what masks say of their visible keys, and how that reaches the choice of kernels."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnforge
from attnforge import masks
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.mask_files import read_mask
from attnforge.bagel.trainer import substitutes
from attnforge.bagel.workloads import workload
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.plan import Plan
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, export, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.distributed.shards import local_dense, local_plain, local_spans
from attnforge.runtime.masks import Spans, average_visible_keys, round_visible_keys, visible_keys_of
from attnforge.runtime.search import search, worker
from attnforge.runtime.search.case import Case, as_deterministic
from attnforge.runtime.tables import Tuned

CPU = torch.device("cpu")
H200, HOPPER = "NVIDIA H200", (Arch.SM90A, Arch.SM90)
BACKWARD = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
ROWS, DIM = 64, 64

# ---- What masks say


def spans(visible_keys: float | None = None, rows: int = ROWS) -> attnforge.Spans:
    key = torch.arange(rows, dtype=torch.int32)
    return attnforge.Spans(key, (key + 9).clamp(max=rows), visible_keys=visible_keys)


def test_buckets_are_powers_of_two() -> None:
    known = {None: 0, 0: 1, 0.4: 1, 1: 1, 2: 2, 3: 2, 511.9: 256, 512: 512, 833: 512, 2**31 - 1: 1 << 30}
    assert {number: round_visible_keys(number) for number in known} == known
    assert all(round_visible_keys(-number) == -octave for number, octave in known.items() if number)
    for wrong in (-(1 << 31), float("nan"), float("inf"), 1 << 31):
        with pytest.raises(ValueError, match=r"^visible_keys: got "):
            spans(wrong)
    others: list[Any] = [True, "700", torch.tensor(700)]
    for other in others:
        with pytest.raises(TypeError, match=r"^visible_keys: got "):
            spans(other)
        with pytest.raises(TypeError, match=r"^visible_keys: got "):
            attnforge.DenseMask(torch.ones(2, 2, dtype=torch.bool), visible_keys=other)


@pytest.mark.parametrize(
    ("pack", "octave"), [("t2i_lowres/0", 512), ("pretrain/0", 4096), ("finetune/0", 2048)]
)
def test_packs_say_what_their_rows_see(pack: str, octave: int) -> None:
    """The mean over rows that see anything, so padding changes nothing."""
    of = workload(pack)
    mask = of.mask("cpu")
    assert mask.visible_keys == int((mask.ends - mask.starts).sum(dtype=torch.int64)) // of.used
    assert mask.visible_keys_rounded == octave
    short = substitutes.create_sparse_mask(of.sample_lens, of.split_lens, of.attn_modes, "cpu").mask(of.used)
    assert (len(short.starts), short.visible_keys) == (of.used, mask.visible_keys)
    assert make_case(pack, "7B", DType.BFLOAT16, CPU).visible_keys == mask.visible_keys


def test_what_is_only_padding_says_nothing() -> None:
    mask = attnforge.bagel.PackedMask([4], [4], ["full"], "cpu", used=0)
    assert (mask.visible_keys, mask.visible_keys_rounded) == (None, 0)


def test_copies_say_the_same() -> None:
    mask = spans(700)
    dense = attnforge.DenseMask(torch.ones(8, 8, dtype=torch.bool), visible_keys=8)
    for same in (copy.deepcopy(mask), worker._moved(mask, CPU)):
        assert (same.visible_keys, same.visible_keys_rounded) == (700, 512)  # type: ignore[union-attr]
    assert worker._moved(dense, CPU).visible_keys_rounded == 8  # type: ignore[union-attr]
    shard = ((0,), (1, 0), 4, 8)
    assert local_spans(spans(3, 8), *shard).visible_keys_rounded == 2
    assert local_dense(dense, *shard).visible_keys_rounded == 8
    assert [local_plain(causal, *shard, CPU).visible_keys_rounded for causal in (True, False)] == [4, 8]


@pytest.mark.parametrize(("length", "sign"), [(440, 1), (444, -1)])
def test_a_key_that_four_times_as_many_queries_see_makes_a_mask_uneven(length: int, sign: int) -> None:
    """The first key is seen by all queries, others by 128 at most: 3.99 and 4.02 times the mean."""
    mask = attnforge.masks.window_with_sinks(length, length, 127, 0, 1, CPU)
    lengths = (mask.ends - mask.starts).double()
    assert (lengths.max() > 4 * lengths.mean()) == (sign < 0)
    assert mask.visible_keys is not None
    assert mask.visible_keys * sign > 0


def test_a_mask_without_queries_has_no_average() -> None:
    assert average_visible_keys(0, 0, 0, 5) is None
    assert average_visible_keys(0, 0, 5, 5) == 0
    assert average_visible_keys(7, 4, 1, 7) == 7, "4 times the mean is not more than that"
    none = torch.zeros(0, dtype=torch.int32)
    assert visible_keys_of(none, none, 5) is None
    assert visible_keys_of(none[None, None, None], none[None, None, None], 0) is None


def test_intervals_are_counted_over_all_planes() -> None:
    """Rows below 0 and beyond the last one are no queries; intervals that end before they start are empty."""
    starts = torch.tensor([[[[-3, 0, 9], [4, 5, 8]]], [[[0, 0, 0], [2, 2, 2]]]], dtype=torch.int32)
    ends = torch.tensor([[[[2, 3, 2], [6, 99, 9]]], [[[1, 1, 1], [2, 2, 2]]]], dtype=torch.int32)
    seen = torch.tensor([2 + 2, 3 + 3, 0, 1, 1, 1])
    assert visible_keys_of(starts, ends, 8) == int(seen.sum()) / 16
    assert visible_keys_of(starts[:, :, 0], ends[:, :, 0], 8) == (2 + 3 + 3) / 16


def test_a_mask_file_may_be_uneven(tmp_path: Path) -> None:
    """Two intervals of a key that overlap count once."""
    row = np.arange(300)
    starts, ends = np.stack((row, row)), np.stack((row + 9, row + 5)).clip(max=300)
    for sinks, expected in ((0, 8.88), (1, -9.85)):
        ends[:, :sinks] = 300
        np.savez(tmp_path / "mask.npz", starts=starts, ends=ends)
        mask, _ = read_mask(tmp_path / "mask.npz", CPU)
        assert mask.visible_keys == pytest.approx(expected, abs=0.01)


def test_sinks_of_a_block_mask_make_it_uneven() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible_keys(sinks: int, heads: int | None) -> float:
        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & ((q < k + 9 + 0 * h) | (k < sinks))

        made = attnforge.from_block_mask(create_block_mask(window, None, heads, 300, 300, "cpu"))
        assert isinstance(made, attnforge.Spans)
        assert made.visible_keys is not None
        return made.visible_keys

    for heads in (None, 2):
        assert visible_keys(0, heads) == pytest.approx(8.88)
        assert visible_keys(1, heads) == pytest.approx(-9.85, abs=0.01)


def test_masks_that_were_counted_anyway() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < k + 9)

    made = attnforge.from_block_mask(create_block_mask(window, None, None, 300, 300, "cpu"))
    assert isinstance(made, attnforge.Spans)
    assert made.visible_keys == int(made.visible(300, 300).sum()) / 300 == pytest.approx(8.88)
    holes = torch.rand(300, 300) < 0.5
    dense = attnforge.from_block_mask(
        create_block_mask(lambda b, h, q, k: holes[q, k], None, None, 300, 300, "cpu")
    )
    assert isinstance(dense, attnforge.DenseMask)
    assert dense.visible_keys == int(holes.sum()) // 300
    bias = torch.zeros(6, 6).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    assert substitutes.from_dense([bias, bias], [6, 6]).mask(12).visible_keys == 42 // 12


# ---- Tables


def tuned(index: int, visible_keys: int, size: int = 36864, tflops: float = 1.0, case: str = "x") -> Tuned:
    return Tuned(list(candidates(BACKWARD))[index], 7, size, 1.0, tflops, {"case": case}, visible_keys)


def best(directory: Path, visible_keys: int, size: int = 36864) -> Spec:
    return next(choosing.choose(Call(BACKWARD, 7, size, visible_keys=visible_keys), H200, (directory,))).spec


def test_entries_carry_it_and_older_ones_are_read(tmp_path: Path) -> None:
    first, same, other = tuned(0, 700), tuned(1, 1023), tuned(2, 4000)
    older = tuned(3, 0, case="y")
    path = tables.save(H200, [first, other, older], tmp_path)
    assert {entry.spec for entry in tables.load(H200, tmp_path)} == {first.spec, other.spec, older.spec}
    tables.save(H200, [same], tmp_path)
    assert set(map(str, tables.load(H200, tmp_path))) == set(map(str, (same, other, older)))
    rows = json.loads(path.read_text())
    said = {(row["class"].get("visible_octave"), row.get("visible_keys")) for row in rows}
    assert said == {(9, 1023), (11, 4000), (None, None)}


def test_an_older_entry_gives_way_to_its_own_case(tmp_path: Path) -> None:
    dense, sparse = tuned(0, 0, case="pretrain"), tuned(1, 700, case="t2i")
    tables.save(H200, [dense], tmp_path)
    tables.save(H200, [sparse], tmp_path)
    assert len(tables.load(H200, tmp_path)) == 2, "one of another case stays"
    tables.save(H200, [tuned(2, 4000, case="pretrain")], tmp_path)
    assert {entry.visible_keys for entry in tables.load(H200, tmp_path)} == {700, 4000}


@pytest.mark.parametrize("visible_keys", [0, 4000])
@pytest.mark.parametrize(("case", "stays"), [("x", False), ("y", True)])
def test_an_older_entry_without_rounds_gives_way_to_its_own_case(
    visible_keys: int, case: str, stays: bool, tmp_path: Path
) -> None:
    older, newer = tuned(0, visible_keys, case=case), replace(tuned(1, 4000), rounds=3)
    for entry in (older, newer):
        tables.save(H200, [entry], tmp_path)
    assert set(map(str, tables.load(H200, tmp_path))) == {str(newer), *([str(older)] if stays else ())}


def test_order_of_what_matters(tmp_path: Path) -> None:
    """Octaves of length and visible keys together before the rest; who says nothing is one octave from everybody."""
    sparse, dense = tuned(0, 700, tflops=1.0), tuned(4, 4500, tflops=2.0)
    short, older = tuned(1, 2000, size=11520, tflops=3.0), tuned(5, 0, tflops=1.5, case="y")
    tables.save(H200, [sparse, dense, short], tmp_path)
    assert best(tmp_path, 512) == best(tmp_path, 1024) == best(tmp_path, 1) == sparse.spec
    assert best(tmp_path, 2048) == best(tmp_path, 4096) == best(tmp_path, 16384) == dense.spec
    assert best(tmp_path, 0) == dense.spec, "the faster of one length, as without the number"
    assert best(tmp_path, 512, size=11520) == short.spec
    assert best(tmp_path, 512, size=20000) == sparse.spec, "short and long are as near"
    for mask in (Mask.FULL, Mask.CAUSAL):
        whole = replace(BACKWARD, mask=mask)
        assert (
            next(choosing.choose(Call(whole, 7, 36864), H200, (tmp_path,))).spec.tuning == dense.spec.tuning
        )
    tables.save(H200, [older], tmp_path)
    assert [best(tmp_path, 1 << octave) for octave in (9, 10, 12)] == [sparse.spec, older.spec, dense.spec]
    long = tuned(6, 511, size=1 << 17)
    tables.save(H200, [long], tmp_path)
    assert best(tmp_path, 511, 1 << 17) == long.spec
    assert best(tmp_path, 4500, 1 << 17) == dense.spec, "two octaves shorter, and long sees three fewer"


def test_the_length_says_what_full_and_causal_calls_see(tmp_path: Path) -> None:
    """Of entries of spans they take the one of as many visible keys: all, or half of them."""
    half, whole = tuned(0, 18432, tflops=1.0), tuned(4, 36864, tflops=1.0)
    for faster in (half, whole):
        entries = (replace(entry, tflops=2.0 if entry is faster else 1.0) for entry in (half, whole))
        tables.save(H200, entries, tmp_path)
        for mask, near in ((Mask.CAUSAL, half), (Mask.FULL, whole)):
            problem = replace(BACKWARD, mask=mask)
            assert (
                next(choosing.choose(Call(problem, 7, 36864), H200, (tmp_path,))).spec.tuning
                == near.spec.tuning
            )


def test_of_two_as_near_the_nearer_length_counts(tmp_path: Path) -> None:
    same, shorter = tuned(0, 1500), tuned(4, 700, size=20000, tflops=9.0)
    tables.save(H200, [same, shorter], tmp_path)
    assert best(tmp_path, 700) == same.spec, "an octave of visible keys, not one of rows"
    assert best(tmp_path, 700, size=20000) == shorter.spec


def test_unknown_keys_may_be_seen_by_all_queries(tmp_path: Path) -> None:
    """Blocks that visit all queries which see their keys are for masks that say how many these are."""
    divided, whole = tuned(0, 4500), tuned(1, 700, size=1 << 17, tflops=9.0)
    assert (
        divided.spec.to_json()["tuning"]["split_heads"],
        whole.spec.to_json()["tuning"]["split_heads"],
    ) == (1, 0)
    tables.save(H200, [divided, whole], tmp_path)
    assert best(tmp_path, 0, 1 << 17) == divided.spec
    assert best(tmp_path, 700, 1 << 17) == whole.spec
    tables.save(H200, [whole], tmp_path / "alone")
    assert best(tmp_path / "alone", 0, 1 << 17) == whole.spec


@pytest.mark.parametrize("name", [H200, "NVIDIA H100 80GB HBM3"])
def test_a_sparse_pack_gets_the_block_per_kv_head(name: str) -> None:
    """With the table of this repository: what was measured (docs/experiments.md, 22)."""
    target = Target(name, HOPPER)

    def split(pack: str) -> bool:
        mask = workload(pack).mask("cpu")
        tuning = choose_for(
            Call(BACKWARD, 7, len(mask.starts), visible_keys=mask.visible_keys_rounded), target
        ).spec.tuning
        assert isinstance(tuning, Sm90Backward)
        return tuning.split_heads

    assert not any(split(f"t2i_lowres/{seed}") for seed in range(4))
    assert all(split(f"{pack}/{seed}") for pack in ("pretrain", "finetune", "edit_only") for seed in range(4))
    unknown = choose_for(Call(BACKWARD, 7, 36864), target).spec.tuning
    assert isinstance(unknown, Sm90Backward)
    assert unknown.split_heads


def test_searches_begin_with_both_owners_of_dk_and_dv() -> None:
    for pack, split in (("t2i_lowres/0", 0), ("pretrain/0", 1)):
        case = make_case(pack, "7B", DType.BFLOAT16, CPU)
        specs = list(candidates(case.problem(Direction.BACKWARD, Arch.SM90A)))
        for name, first in ((H200, split), ("", split)):
            order = search._with_incumbent(specs, case, name)
            assert len(set(order)) == len(order)
            assert set(specs) <= set(order)
            assert set(order[1 + search.NEAR :]) <= set(specs)
            knobs = [spec.to_json()["tuning"] for spec in order[:2]]
            assert knobs[0] == knobs[1] | {"split_heads": first}
            assert knobs[1]["split_heads"] == 1 - first


def test_deterministic_searches_begin_with_both_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which only blocks for q heads can start a tile apart."""
    monkeypatch.setenv(TABLES, str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    case = as_deterministic(make_case("pretrain/0", "7B", DType.BFLOAT16, CPU))
    specs = list(deterministic_candidates(case.problem(Direction.BACKWARD, Arch.SM90A)))
    order = search._with_incumbent(specs, case, H200)
    first, second = (spec.tuning.to_json() for spec in order[:2])
    assert (first["split_heads"], first["launch_order"]) == (1, 3)
    assert second == first | {"split_heads": 0, "launch_order": 0}


def test_a_package_takes_the_faster_of_two_that_only_differ_in_it(tmp_path: Path) -> None:
    """It chooses by rows alone."""
    path = tables.save(
        H200, [tuned(0, 700, tflops=1.0), tuned(1, 4500, tflops=2.0), tuned(2, 0, 11520)], tmp_path
    )
    slow, fast, short = (list(candidates(BACKWARD))[i] for i in range(3))
    assert {item.spec for item in export.read_specs(path)} == {fast, short}
    path.write_text(json.dumps([slow.to_json(), fast.to_json()]))
    assert {item.spec for item in export.read_specs(path)} == {slow, fast}


def test_full_and_causal_cases_say_nothing() -> None:
    case = make_case("causal/4x8192", "7B", DType.BFLOAT16, CPU)
    assert case.visible_keys == 0
    dense = Case("d", 1, 1, 1, 8, 8, 64, DType.BFLOAT16, attnforge.DenseMask(torch.ones(8, 8) > 0), 64, CPU)
    assert dense.visible_keys == 8


def test_few_keys_that_all_queries_see_take_a_kernel_that_divides_their_work() -> None:
    """A window with sinks has few visible keys, but the lists of its first key tile are far above the mean."""
    window = masks.window(131072, 131072, 512, 0, "cpu")
    sinks = masks.window_with_sinks(131072, 131072, 512, 0, 4, "cpu")
    assert window.visible_keys is not None
    assert sinks.visible_keys == pytest.approx(-window.visible_keys - 4, abs=0.1)

    def chosen(mask: Spans) -> Plan:
        target, visible = Target(H200, HOPPER), mask.visible_keys_rounded
        return make_plan(choose_for(Call(BACKWARD, 1, 131072, visible_keys=visible), target).spec)

    assert chosen(sinks).cut_lists
    assert chosen(sinks & masks.documents([131072], "cpu")).cut_lists
    assert not chosen(window).cut_lists
    forwards = [replace(BACKWARD, direction=Direction.FORWARD)] * 2
    of_window, of_sinks = (
        choose_for(
            Call(problem, 1, 131072, visible_keys=mask.visible_keys_rounded), Target(H200, HOPPER)
        ).spec
        for problem, mask in zip(forwards, (window, sinks), strict=True)
    )
    assert of_window == of_sinks, "a forward has no such lists"
