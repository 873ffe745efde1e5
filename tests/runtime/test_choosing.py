"""Choosing among entries of tuned tables: which count for a call, in which order, and which specs they give."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from tuned_entries import (
    BACKWARD,
    CPU,
    H200,
    HOPPER,
    OTHER,
    PROBLEM,
    entries,
    of_head_dim,
    only_tables_of,
    ordered,
)

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.call import Call
from attnforge.runtime.rounds import MANY
from attnforge.runtime.tables import Tuned


def chosen(
    problem: Problem, directory: Path, group: int = 7, size: int = 1024, name: str = H200
) -> list[Spec]:
    return [choice.spec for choice in choosing.choose(Call(problem, group, size), name, (directory,))]


def test_nearest_length_first(tmp_path: Path) -> None:
    a, b, c = entries(PROBLEM, 3)  # 1024, 2048, 4096 rows
    tables.save(H200, [a, b, c], tmp_path)
    assert chosen(PROBLEM, tmp_path, size=1500) == [a.spec, b.spec, c.spec]
    assert chosen(PROBLEM, tmp_path, size=100_000) == [c.spec, b.spec, a.spec]


def test_order_of_what_matters(tmp_path: Path) -> None:
    """Mask before dtype before length before group before device, which may have few entries of its own."""
    specs = [spec.tuning for spec in list(candidates(PROBLEM))[-5:]]
    causal, half = replace(PROBLEM, mask=Mask.CAUSAL), replace(PROBLEM, dtype=DType.FLOAT16)
    own = [
        Tuned(Spec(PROBLEM, specs[0]), 7, 1024, 1.0, 1.0),
        Tuned(Spec(PROBLEM, specs[2]), 1, 2048, 1.0, 1.0),
        Tuned(Spec(half, specs[3]), 7, 1024, 1.0, 1.0),
        Tuned(Spec(causal, specs[4]), 7, 1024, 1.0, 1.0),
    ]
    tables.save(H200, own, tmp_path)
    tables.save(OTHER, [Tuned(Spec(PROBLEM, specs[1]), 7, 1024, 1.0, 900.0)], tmp_path)
    assert [spec.tuning for spec in chosen(PROBLEM, tmp_path)] == specs
    assert all(spec.problem == PROBLEM for spec in chosen(PROBLEM, tmp_path))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVIDIA H800", OTHER),
        ("NVIDIA GH200 480GB", OTHER),
        ("NVIDIA H100 PCIe", OTHER),
        ("NVIDIA H20", H200),
        ("NVIDIA H20-3e", H200),
        ("NVIDIA H100 NVL", H200),
        ("NVIDIA H200 NVL", H200),
        ("NVIDIA GH200 144G HBM3e", H200),
        ("Some card", H200),  # not in the table: the faster entry
    ],
)
def test_other_hopper_gpus_take_the_nearest_chips_entries(name: str, nearest: str, tmp_path: Path) -> None:
    """By bytes of memory a FLOP, although the other one's entry is faster."""
    first, second = (spec.tuning for spec in list(candidates(PROBLEM))[:2])
    speeds = (
        {H200: 500.0, OTHER: 900.0}
        if nearest == H200 and name != "Some card"
        else {H200: 900.0, OTHER: 500.0}
    )
    for device, tuning in ((H200, first), (OTHER, second)):
        tables.save(device, [Tuned(Spec(PROBLEM, tuning), 7, 1024, 1.0, speeds[device])], tmp_path)
    choice, *_ = choosing.choose(Call(PROBLEM, 7, 1024), name, [tmp_path])
    spec, reason = choice.spec, choice.reason
    assert spec.tuning == (first if nearest == H200 else second)
    assert reason.endswith("; of another device, not measured on this one")
    offer, *_ = choosing.offers(Call(PROBLEM, 7, 1024), name, [tmp_path])
    parts = dict(zip(choosing.DISTANCES, offer.distance, strict=True))
    assert (parts["speed"], parts["device"] >= 1, parts["shape"]) == (-speeds[nearest], True, 0)
    choice, *_ = choosing.choose(Call(PROBLEM, 7, 1024), nearest, [tmp_path])
    assert "another device" not in choice.reason


def test_entries_of_other_kinds_do_not_count(tmp_path: Path) -> None:
    tables.save(H200, entries(PROBLEM, 2), tmp_path)
    for other in (
        replace(PROBLEM, head_dim=192),
        replace(PROBLEM, direction=Direction.BACKWARD),
        replace(PROBLEM, arch=Arch.SM80),
        CPU,
    ):
        assert chosen(other, tmp_path) == []


def test_a_head_dim_without_entries_takes_those_of_the_nearest(tmp_path: Path) -> None:
    """First those whose rows are padded alike, then wider ones; not narrower ones, nor more than twice as wide."""
    tunings = [spec.tuning for spec in candidates(HOPPER)][:7]
    for head_dim, tuning in zip((128, 64, 72, 192, 96, 80), tunings[:5], strict=False):
        tables.save(H200, [of_head_dim(head_dim, tuning, size=1 << 20 if head_dim == 72 else 1024)], tmp_path)
    tables.save(OTHER, [of_head_dim(72, tunings[5])], tmp_path)
    assert [spec.tuning for spec in chosen(HOPPER, tmp_path)] == [tunings[i] for i in (5, 2, 4, 0)]
    assert all(spec.problem == HOPPER for spec in chosen(HOPPER, tmp_path))
    tables.save(H200, [of_head_dim(80, tunings[6], mask=Mask.CAUSAL)], tmp_path)
    assert [spec.tuning for spec in chosen(HOPPER, tmp_path)] == [tunings[6]], "it has an entry now"


def test_what_does_not_stand_in_for_a_head_dim(tmp_path: Path) -> None:
    """Entries of other masks, of other kernels, and modelled ones; infeasible ones are passed over."""
    tuning = next(candidates(HOPPER)).tuning
    backward = replace(HOPPER, direction=Direction.BACKWARD, head_dim=112)
    wide = next(candidates(replace(backward, head_dim=192)))
    tall = replace(tuning, tile_n=176)
    kept = [
        of_head_dim(96, tuning, mask=Mask.CAUSAL),
        Tuned(wide, 7, 1024, 1.0, 100.0),
        of_head_dim(96, tall),
    ]
    tables.save(H200, kept, tmp_path)
    tables.save("sm90a", [of_head_dim(96, tuning)], tmp_path / tables.MODELLED)
    assert chosen(HOPPER, tmp_path) == []
    assert chosen(backward, tmp_path) == []
    assert [spec.tuning for spec in chosen(replace(HOPPER, mask=Mask.CAUSAL), tmp_path)] == [tuning]


def test_both_head_dims_of_an_entry_that_stands_in_count(tmp_path: Path) -> None:
    backward = replace(HOPPER, direction=Direction.BACKWARD, head_dim=176, dim_v=96)
    tunings = [spec.tuning for spec in islice(candidates(replace(backward, head_dim=256, dim_v=0)), 5)]
    dims = (256, 128), (192, 128), (192, 0), (192, 64), (176, 192)
    for (head_dim, dim_v), tuning in zip(dims, tunings, strict=True):
        entry = of_head_dim(head_dim, tuning, dim_v, direction=Direction.BACKWARD)
        tables.save(H200, [entry], tmp_path)
    assert [spec.tuning for spec in chosen(backward, tmp_path)] == [tunings[i] for i in (4, 1, 0, 2)]
    _, choice, *_ = choosing.choose(Call(backward, 7, 1024), H200, [tmp_path])
    assert choice.reason.endswith("(nvidia-h200.json); entry of head_dim 192 and 128 of v")


def test_the_first_folder_wins(tmp_path: Path) -> None:
    """Although the entry of the second one is faster."""
    first, second = entries(PROBLEM, 2)
    places = tmp_path / "own", tmp_path / "packaged"
    tables.save(H200, [first], places[0])
    tables.save(H200, [replace(first, spec=second.spec, tflops=900.0)], places[1])
    assert [choice.spec for choice in choosing.choose(Call(PROBLEM, 7, 1024), H200, places)] == [first.spec]
    assert tables.known(H200, places) == (first,)


def test_a_table_that_is_replaced_within_a_tick_of_the_clock_counts(tmp_path: Path) -> None:
    first, second = entries(PROBLEM, 2)
    path = tables.save(H200, [first], tmp_path)
    before = path.stat()
    assert chosen(PROBLEM, tmp_path) == [first.spec]
    tables.save(H200, [replace(first, spec=second.spec)], tmp_path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert chosen(PROBLEM, tmp_path) == [second.spec]


def test_rounds_of_entries_that_stand_in_matter(tmp_path: Path) -> None:
    tuning = next(candidates(HOPPER)).tuning
    tables.save(H200, [replace(of_head_dim(96, tuning), rounds=3)], tmp_path)
    assert choosing.rounds_that_matter(HOPPER, 7, H200, [tmp_path]) == (3, MANY)


def by_criteria(entry: Tuned, call: Problem, group: int, size: int, **more: Any) -> tuple[Any, ...]:
    """What `choosing.choose` says that entries of one head_dim are sorted by."""
    tuned, strict = entry.spec.problem, more["deterministic"]
    kinds = (tuned.mask_mod, tuned.planes, tuned.intervals, tuned.mask, tuned.dtype)
    wanted = (call.mask_mod, call.planes, call.intervals, call.mask, call.dtype)
    score = 0 if tuned.score == call.score else 3 if tuned.score else 2
    keys = [
        abs(seen) if mask is Mask.SPANS else length if mask is Mask.FULL else -(-length // 2)
        for mask, length, seen in (
            (tuned.mask, entry.size, entry.visible_keys),
            (call.mask, size, more["visible_keys"]),
        )
    ]
    octaves = (
        abs(keys[0].bit_length() - keys[1].bit_length()) if all(keys) else bool(keys[1]) * choosing.UNKNOWN
    )
    length = abs(entry.size.bit_length() - size.bit_length())
    converted = strict and not (entry.fixed_order and entry.group == group)
    unknown, uneven = more["visible_keys"] == 0, more["visible_keys"] < 0
    long = call.mask is Mask.SPANS and (unknown or (uneven and group > 1)) and not strict
    return (
        *(mine != theirs for mine, theirs in zip(kinds, wanted, strict=True)),
        score,
        long and not entry.spec.tuning.adds_in_any_order,
        length + octaves + choosing.CONVERTED * converted,
        length,
        abs(math.log2(entry.group / group)),
        abs(entry.rounds - more["rounds"]),
    )


@pytest.mark.parametrize("direction", Direction)
def test_the_order_of_many_entries_is_that_of_the_criteria(direction: Direction, tmp_path: Path) -> None:
    """Of random entries of two devices and random calls."""
    draw = random.Random(direction.value)
    base = replace(PROBLEM, arch=Arch.SM90A, head_dim=64, direction=direction)
    scores = (ScoreMod(), ScoreMod("softcap: 20.0 * tanh(score / 20.0)"))

    def problem() -> Problem:
        mask, dtype = draw.choice((Mask.FULL, Mask.CAUSAL, Mask.SPANS)), draw.choice((*DType,)[1:])
        unions: dict[str, Any] = {"intervals": draw.choice((1, 1, 2))} if mask is Mask.SPANS else {}
        return replace(base, mask=mask, dtype=dtype, score=draw.choice(scores), **unions)

    def numbers() -> dict[str, Any]:
        strict = direction is Direction.BACKWARD and draw.random() < 0.3
        return {"deterministic": strict, "rounds": draw.choice((0, 3, MANY))}

    tunings = [spec.tuning for spec in islice(candidates(base), 0, 300, 20)]
    tunings += [spec.tuning for spec in islice(deterministic_candidates(base), 6)]
    found = []
    for name, _ in product((H200, OTHER), range(150)):
        one, tuning = problem(), draw.choice(tunings)
        seen = draw.choice((0, 90, 700)) if one.mask is Mask.SPANS else 0
        size, speed = 1 << draw.randint(7, 16), draw.choice((1.0, 2.0))
        found.append(
            (name, Tuned(Spec(one, tuning), draw.choice((1, 4, 7)), size, 1.0, speed, {}, seen, **numbers()))
        )
    for device in (H200, OTHER):
        tables.save(device, [entry for name, entry in found if name == device], tmp_path)
    kept = [(device, entry) for device in (H200, OTHER) for entry in tables.load(device, tmp_path)]
    for _ in range(60):
        other, group, size = problem(), draw.choice((1, 2, 7)), draw.randint(100, 100_000)
        more = {"visible_keys": draw.choice((-90, 0, 90, 900)) if other.mask is Mask.SPANS else 0} | numbers()

        def key(one: tuple[str, Tuned]) -> tuple[Any, ...]:
            name, entry = one
            speed = name != H200, -entry.tflops, entry.spec.slug
            return (*by_criteria(entry, other, group, size, **more), *speed)  # noqa: B023

        counting = [one for one in kept if more["deterministic"] or not one[1].deterministic]
        expected = [entry for _, entry in sorted(counting, key=key)]
        offers = choosing.offers(Call(other, group, size, **more), H200, [tmp_path])
        assert [offer.entry for offer in offers] == expected


def test_entries_of_other_classes_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a table of a thousand would take longer than all else of a choice."""
    built, from_json = [], Tuned.from_json

    def noting(data: dict[str, Any]) -> Tuned:
        built.append(data["spec"]["head_dim"])
        return from_json(data)

    tables.save(H200, [*entries(PROBLEM, 2), *entries(replace(PROBLEM, head_dim=64), 3)], tmp_path)
    monkeypatch.setattr(Tuned, "from_json", staticmethod(noting))
    assert len(chosen(PROBLEM, tmp_path)) == len(chosen(PROBLEM, tmp_path, size=9000)) == 2
    assert built == [128, 128]
    assert len(chosen(replace(PROBLEM, head_dim=64), tmp_path)) == 3
    assert built == [128, 128, 64, 64, 64]


def test_what_is_wrong_with_a_table_is_said_by_choices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is none, an entry of the call's class that is none, and one of a kernel that is gone."""
    path = tables.table_path(H200, tmp_path)
    backward = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A)
    good, bad = (entry.to_json() for entry in entries(backward, 2))
    without = {name: value for name, value in bad.items() if name != "ms"}
    for text in ("{", '{"a": 1}', "[1]", '[{"class": {}}]', json.dumps([good, without])):
        path.write_text(text)
        tables._divided.cache_clear()
        tables._of_file.cache_clear()
        with pytest.raises(ValueError, match=r"nvidia-h200.json is not a tuned table.*delete it"):
            chosen(backward, tmp_path)
    bad["spec"]["tuning"]["descending"] = 1
    path.write_text(json.dumps([good, bad]))
    tables._divided.cache_clear()
    choosing._own.cache_clear()
    tables._of_file.cache_clear()
    choosing._tiers.cache_clear()
    assert [spec.to_json() for spec in chosen(backward, tmp_path)] == [good["spec"]]
    assert "an entry is skipped" in caplog.text


def test_the_nearest_ratio_is_the_one_with_the_nearest_quotient(tmp_path: Path) -> None:
    """Ratio 4 is twice as far from 1 as from 8."""
    specs = list(islice(candidates(PROBLEM), 2))
    pairs = zip(specs, (1, 8), strict=True)
    tables.save(H200, [Tuned(spec, group, 1024, 1.0, 1.0) for spec, group in pairs], tmp_path)
    found = [choice.spec for choice in choosing.choose(Call(PROBLEM, 4, 1024), H200, (tmp_path,))]
    assert found == [specs[1], specs[0]]


def test_no_other_cpu(tmp_path: Path) -> None:
    """Another instruction set's winner may not even compile."""
    tables.save("cpu avx512", entries(CPU, 1), tmp_path)
    assert chosen(CPU, tmp_path, name="cpu avx2") == []
    assert len(chosen(CPU, tmp_path, name="cpu avx512")) == 1


def test_alignment_is_the_calls_own(tmp_path: Path) -> None:
    """Rows aligned to less than the tuned ones: the same tuning, which is feasible for all of them here."""
    tables.save(H200, entries(PROBLEM, 1), tmp_path)
    offered = {align: chosen(replace(PROBLEM, align=align), tmp_path) for align in (16, 8, 4, 2)}
    assert all(spec.problem.align == align for align, specs in offered.items() for spec in specs)
    assert all(offered.values())


def test_what_was_measured_is_of_the_very_class(tmp_path: Path) -> None:
    """By which families are compared: of the mask, dtype, octave of rows, GQA ratio and device of a call."""
    tables.save(H200, entries(PROBLEM, 1), tmp_path)

    def speed(group: int = 7, size: int = 1024, name: str = H200, **changes: Any) -> float | None:
        return choosing.measured(Call(replace(PROBLEM, **changes), group, size), name, [tmp_path])

    assert speed() == speed(size=2047) == 100.0
    others: tuple[dict[str, Any], ...] = (
        {"group": 8},
        {"size": 2048},
        {"name": OTHER},
        {"mask": Mask.CAUSAL},
        {"dtype": DType.FLOAT16},
        {"score": ScoreMod("softcap: 30.0 * tanh(score / 30.0)")},
    )
    assert [speed(**other) for other in others] == [None] * len(others)
    (entry,) = entries(PROBLEM, 1)
    tables.save(H200, [replace(entry, rounds=2, tflops=120.0)], tmp_path)
    assert speed() == 120.0, "of any rounds"


def test_where_visible_keys_are_unknown_the_fastest_pack_was_measured(tmp_path: Path) -> None:
    (entry,) = entries(PROBLEM, 1)
    packs = [replace(entry, visible_keys=keys, tflops=speed) for keys, speed in ((700, 100.0), (90, 200.0))]
    tables.save(H200, packs, tmp_path)
    speeds = [
        choosing.measured(Call(PROBLEM, 7, 1024, visible_keys=n), H200, [tmp_path]) for n in (700, 90, 0)
    ]
    assert speeds == [100.0, 200.0, 200.0]


@pytest.mark.parametrize(
    ("rounds", "group", "expected"),
    [
        (0, 7, {"split_heads": True, "deterministic": False, "launch_order": 0}),
        (0, 1, {"split_heads": False, "deterministic": False, "launch_order": 0}),
        (7, 1, {"split_heads": False, "deterministic": False, "launch_order": 0}),
        (1, 7, {"split_heads": False, "deterministic": True, "launch_order": 1}),
        (8, 1, {"split_heads": False, "deterministic": True, "launch_order": 1}),
    ],
)
def test_small_backwards_have_more_blocks_that_do_not_wait(
    rounds: int, group: int, expected: dict[str, int], tmp_path: Path
) -> None:
    tables.save(H200, [ordered()], tmp_path)
    choice = next(choosing.choose(Call(BACKWARD, group, 1024, rounds=rounds), H200, [tmp_path]))
    spec, reason = choice.spec, choice.reason
    assert {name: getattr(spec.tuning, name) for name in expected} == expected
    assert (choosing.FEW_TILES in reason) != expected["deterministic"]
    make_plan(spec)


@pytest.mark.parametrize(
    ("entry_group", "entry_stores", "group", "stores", "said"),
    [
        (7, 0, 7, 0, None),
        (7, 0, 1, 1, choosing.NO_SUMS),
        (1, 1, 1, 1, None),
        (1, 1, 7, 0, choosing.SUMS),
    ],
)
def test_heads_without_a_group_store_dk_and_dv(
    entry_group: int, entry_stores: int, group: int, stores: int, said: str | None, tmp_path: Path
) -> None:
    """Whatever the heads of the entry; the reason says so where the knob changes."""
    problem = replace(BACKWARD, head_dim=64, mask=Mask.SPANS)
    tuning = Sm90Backward(64, 128, 3, 2, False, 1, True, False, stores_dkv=entry_stores)
    tables.save(
        H200, [Tuned(Spec(problem, tuning), entry_group, 4096, 1.0, 100.0, visible_keys=500)], tmp_path
    )
    choice = next(choosing.choose(Call(problem, group, 4096, visible_keys=500), H200, [tmp_path]))
    assert choice.spec == Spec(problem, replace(tuning, stores_dkv=stores))
    assert [text for text in (choosing.NO_SUMS, choosing.SUMS) if text in choice.reason] == (
        [said] if said else []
    )


@pytest.mark.parametrize(
    ("visible_keys", "group", "entries", "changed"),
    [
        (-500, 1, "whole", True),  # nearer than one that divides
        (-500, 1, "apart", False),
        (-500, 1, "both", True),
        (-500, 7, "whole", True),
        (-500, 7, "both", False),
        (500, 1, "whole", False),
        (0, 1, "whole", False),
        (0, 1, "both", False),
    ],
)
def test_a_call_whose_lists_are_uneven_gets_a_kernel_that_divides_them(
    visible_keys: int, group: int, entries: str, changed: bool, tmp_path: Path
) -> None:
    """Entries have blocks per kv head (whole) or per q head (apart), of a length farther away if there are both."""
    problem = replace(BACKWARD, head_dim=64, mask=Mask.SPANS)
    whole = Sm90Backward(64, 128, 3, 2, False, 1, False, False, loaders=2, persistent=1)
    apart = replace(whole, split_heads=True, persistent=0, loaders=0)
    of_whole, of_apart = (
        Tuned(Spec(problem, tuning), group, size, 1.0, 100.0, visible_keys=500)
        for tuning, size in ((whole, 4096), (apart, 32768))
    )
    found = {"whole": [of_whole], "apart": [of_apart], "both": [of_whole, of_apart]}[entries]
    tables.save(H200, found, tmp_path)
    call = Call(problem, group, 4096, visible_keys=visible_keys)
    choice = next(choosing.choose(call, H200, [tmp_path]))
    assert make_plan(choice.spec).cut_lists == (visible_keys < 0 or entries == "both")
    assert (choosing.DIVIDED in choice.reason) == changed
    assert (choosing.NO_SUMS in choice.reason) == (group == 1 and make_plan(choice.spec).cut_lists)


def test_a_small_deterministic_call_keeps_its_order(tmp_path: Path) -> None:
    tables.save(H200, [ordered()], tmp_path)
    call = Call(BACKWARD, 7, 1024, rounds=0, deterministic=True)
    choice = next(choosing.choose(call, H200, [tmp_path]))
    assert choice.spec == ordered().spec
    assert choosing.FEW_TILES not in choice.reason


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("direction", Direction)
def test_rounds_that_matter_have_all_choices(direction: Direction, group: int, tmp_path: Path) -> None:
    """Of calls of any rounds: `attnforge warm` compiles for these alone."""
    if direction is Direction.BACKWARD:
        few, many = ordered(3), ordered()
        many = replace(many, spec=replace(many.spec, tuning=replace(many.spec.tuning, stages=2)))  # type: ignore[call-arg]
    else:
        few, many = entries(PROBLEM, 2)
        few, many = replace(few, size=1024, rounds=3), replace(many, size=1024)
    tables.save(H200, [few, many], tmp_path)
    other = few.spec.problem

    def chosen_for(values: Iterable[int]) -> set[Spec]:
        choices = (
            choosing.choose(Call(other, group, 1024, rounds=rounds), H200, [tmp_path]) for rounds in values
        )
        return {next(found).spec for found in choices}

    everything = chosen_for(range(MANY + 1))
    assert {few.spec, many.spec} <= everything
    assert chosen_for(choosing.rounds_that_matter(other, group, H200, [tmp_path])) == everything


def test_of_scores_the_formula_counts_then_none_then_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    problem = replace(PROBLEM, arch=Arch.SM90A, mask=Mask.CAUSAL)
    alibi = "alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)"
    texts = {name: f"softcap: {name} * tanh(score / {name})" for name in ("20.0", "50.0")}
    scored = [replace(problem, score=ScoreMod(text)) for text in (*texts.values(), alibi, "")]
    specs = [next(candidates(one)) for one in scored]
    speeds = (2.0, 1.0, 4.0, 3.0)  # the nearer, the slower
    tables.save(H200, [Tuned(x, 7, 1024, 1.0, y) for x, y in zip(specs, speeds, strict=True)], tmp_path)
    found = choosing.offers(Call(scored[1], 7, 1024), H200)
    assert [offer.entry.spec for offer in found] == [specs[1], specs[0], specs[3], specs[2]]
