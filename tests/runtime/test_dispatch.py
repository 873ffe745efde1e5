"""Which variant runs: tuned tables (nearest entry, re-planned for the call), then the space's first."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge
from attnforge.codegen import cpu_features
from attnforge.codegen.families import make_plan, make_tuning
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime import dispatch, kernels, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.tables import Tuned

PROBLEM = Problem(Direction.FORWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.SPANS, 16)
CPU = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 4)
H200, OTHER = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def only_tables_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are read in `directory` alone."""
    monkeypatch.setenv(TABLES, str(directory))
    monkeypatch.setattr(tables, "PACKAGED", directory)


def entries(problem: Problem, count: int) -> list[Tuned]:
    """Distinct variants of `problem`, tuned at 1024, 2048, ... rows."""
    specs = list(candidates(problem))[-count:]
    return [Tuned(spec, 7, 1024 << i, 1.0, 100.0, {"workload": "x"}) for i, spec in enumerate(specs)]


def chosen(
    problem: Problem, directory: Path, group: int = 7, size: int = 1024, name: str = H200
) -> list[Spec]:
    return [spec for spec, _ in tables.choose(problem, group, size, name, (directory,))]


def test_file_round_trip(tmp_path: Path) -> None:
    assert tables.load(H200, tmp_path) == ()
    written = entries(PROBLEM, 3)
    path = tables.save(H200, written, tmp_path)
    assert path == tmp_path / "nvidia-h200.json"
    assert list(tables.load(H200, tmp_path)) == written
    assert json.loads(path.read_text())[0]["class"]["head_dim"] == 128
    assert list(tmp_path.glob("*.json*")) == [path]


def test_a_later_winner_replaces_its_class_only(tmp_path: Path) -> None:
    first, second, third = entries(PROBLEM, 3)
    tables.save(H200, [first, second], tmp_path)
    better = replace(first, spec=third.spec, size=first.size + 5)  # the same octave
    tables.save(H200, [better], tmp_path)
    assert {entry.spec for entry in tables.load(H200, tmp_path)} == {better.spec, second.spec}


@pytest.mark.parametrize(("speed", "replaces"), [(99.0, False), (100.0, True), (101.0, True)])
def test_a_winner_of_another_run_replaces_what_is_not_faster(
    speed: float, replaces: bool, tmp_path: Path
) -> None:
    """One that was timed beside the present one replaces it in any case."""
    first, second = entries(PROBLEM, 2)
    later = replace(first, spec=second.spec, tflops=speed)
    for beside, taken in (((), replaces), ((first.spec,), True)):
        tables.save(H200, [first], tmp_path)
        tables.save(H200, [later], tmp_path, beside=beside)
        assert [entry.spec for entry in tables.load(H200, tmp_path)] == [later.spec if taken else first.spec]


def test_a_table_does_not_depend_on_the_order_of_searches(tmp_path: Path) -> None:
    """So that a table under version control changes in the lines of the new winners alone."""
    a, b, c = entries(PROBLEM, 3)
    orders = (a, b, c), (c, a, b)
    for number, order in enumerate(orders):
        for entry in order:
            path = tables.save(H200, [entry], tmp_path / str(number))
        tables.save(H200, order, tmp_path / "at once")
    texts = {path.read_text() for path in tmp_path.glob(f"*/{path.name}")}
    assert len(texts) == 1


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
    (spec, reason), *_ = tables.choose(PROBLEM, 7, 1024, name, [tmp_path])
    assert spec.tuning == (first if nearest == H200 else second)
    assert reason.endswith("; of another device, not measured on this one")
    offer, *_ = tables.offers(PROBLEM, 7, 1024, name, [tmp_path])
    parts = dict(zip(tables.DISTANCES, offer.distance, strict=True))
    assert (parts["speed"], parts["device"] >= 1, parts["shape"]) == (-speeds[nearest], True, 0)
    (_, reason), *_ = tables.choose(PROBLEM, 7, 1024, nearest, [tmp_path])
    assert "another device" not in reason


def test_entries_of_other_kinds_do_not_count(tmp_path: Path) -> None:
    tables.save(H200, entries(PROBLEM, 2), tmp_path)
    for other in (
        replace(PROBLEM, head_dim=192),
        replace(PROBLEM, direction=Direction.BACKWARD),
        replace(PROBLEM, arch=Arch.SM80),
        CPU,
    ):
        assert chosen(other, tmp_path) == []


HOPPER = replace(PROBLEM, arch=Arch.SM90A, head_dim=80, mask=Mask.FULL)


def of_head_dim(head_dim: int, tuning: Tuning, dim_v: int = 0, size: int = 1024, **changes: Any) -> Tuned:
    """An entry of HOPPER with other head dims."""
    problem = replace(HOPPER, head_dim=head_dim, dim_v=dim_v, **changes)
    return Tuned(Spec(problem, tuning), 7, size, 1.0, 100.0)


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
    _, (_, reason), *_ = tables.choose(backward, 7, 1024, H200, [tmp_path])
    assert reason.endswith("(nvidia-h200.json); entry of head_dim 192 and 128 of v")


def test_a_backward_that_stands_in_is_spread_out_and_made_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    backward = replace(HOPPER, direction=Direction.BACKWARD)
    tuning = Sm90Backward(64, 128, 3, 2, False, 1, False, False)
    tables.save(H200, [of_head_dim(72, tuning, direction=Direction.BACKWARD)], tmp_path)
    (spec, reason), *_ = tables.choose(backward, 7, 1024, H200, rounds=0)
    assert spec == Spec(backward, replace(tuning, split_heads=True))
    assert reason.endswith(f"; entry of head_dim 72; {tables.FEW_TILES}")
    strict = dispatch.choose_for(backward, 7, 1024, dispatch.Target(H200, (Arch.SM90A,)), deterministic=True)
    assert strict.spec == Spec(backward, replace(tuning, deterministic=True))
    assert strict.reason.endswith(f"; entry of head_dim 72; {dispatch.CONVERTED}")


def test_modelled_entries_come_last_and_are_those_of_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that was measured under another mask. Each architecture of a device has a table of its own."""
    only_tables_of(tmp_path, monkeypatch)
    hopper = replace(PROBLEM, arch=Arch.SM90A)
    for problem in (hopper, PROBLEM):
        _, spec = islice(candidates(problem), 2)  # not the first, which is taken without entries
        tables.save(problem.arch.value, [Tuned(spec, 7, 1024, 1.0, 100.0)], tmp_path / tables.MODELLED)
    measured = next(candidates(replace(hopper, mask=Mask.CAUSAL)))
    tables.save(H200, [Tuned(measured, 7, 1024, 1.0, 100.0)], tmp_path)
    assert [offer.modelled for offer in tables.offers(hopper, 7, 1024, H200)] == [False, True]
    unaligned = replace(hopper, align=8)  # which no kernel of sm90a takes
    choice = dispatch.choose_for(unaligned, 7, 1024, dispatch.Target(H200, (Arch.SM90A, Arch.SM90)))
    assert choice.spec == Spec(replace(PROBLEM, align=8), spec.tuning)
    assert choice.reason.startswith("modelled, not measured, as")


def test_the_first_folder_wins(tmp_path: Path) -> None:
    """Although the entry of the second one is faster."""
    first, second = entries(PROBLEM, 2)
    places = tmp_path / "own", tmp_path / "packaged"
    tables.save(H200, [first], places[0])
    tables.save(H200, [replace(first, spec=second.spec, tflops=900.0)], places[1])
    assert [spec for spec, _ in tables.choose(PROBLEM, 7, 1024, H200, places)] == [first.spec]
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
    assert tables.rounds_that_matter(HOPPER, 7, H200, [tmp_path]) == (3, tables.MANY)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", [H200, OTHER])
def test_every_head_dim_has_a_kernel_by_the_packages_tables(name: str, direction: Direction) -> None:
    """Its own entries' or others', and never one of rows that are narrower than its own."""
    target = dispatch.Target(name, (Arch.SM90A, Arch.SM90))
    entries = [entry.spec.problem for other in (H200, OTHER) for entry in tables.load(other, tables.PACKAGED)]
    alike = (direction, Arch.SM90A, HOPPER.dtype)
    own = {of.head_dim for of in entries if (of.direction, of.arch, of.dtype) == alike}
    taken, head_dims = set(), range(16, 257, 8)
    for head_dim, mask in product(head_dims, (Mask.FULL, Mask.CAUSAL, Mask.SPANS)):
        problem = replace(HOPPER, direction=direction, head_dim=head_dim, mask=mask)
        choice = dispatch.choose_for(problem, 1, 4096, target, visible_keys=300, rounds=3)
        assert choice.spec.problem == problem
        if match := re.search(r"entry of head_dim (\d+)", choice.reason):
            taken.add(head_dim)
            assert -(-int(match[1]) // 16) >= -(-head_dim // 16)
    assert taken == {*head_dims} - own
    assert {104, 136} <= taken


def by_criteria(entry: Tuned, call: Problem, group: int, size: int, **more: Any) -> tuple[Any, ...]:
    """What `tables.choose` says that entries of one head_dim are sorted by."""
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
        abs(keys[0].bit_length() - keys[1].bit_length()) if all(keys) else bool(keys[1]) * tables.UNKNOWN
    )
    length = abs(entry.size.bit_length() - size.bit_length())
    converted = strict and not (entry.fixed_order and entry.group == group)
    long = call.mask is Mask.SPANS and more["visible_keys"] <= 0 and not strict
    return (
        *(mine != theirs for mine, theirs in zip(kinds, wanted, strict=True)),
        score,
        long and not entry.spec.tuning.adds_in_any_order,
        length + octaves + tables.CONVERTED * converted,
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
        return {"deterministic": strict, "rounds": draw.choice((0, 3, tables.MANY))}

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
        call, group, size = problem(), draw.choice((1, 2, 7)), draw.randint(100, 100_000)
        more = {"visible_keys": draw.choice((-90, 0, 90, 900)) if call.mask is Mask.SPANS else 0} | numbers()

        def key(one: tuple[str, Tuned]) -> tuple[Any, ...]:
            name, entry = one
            speed = name != H200, -entry.tflops, entry.spec.slug
            return (*by_criteria(entry, call, group, size, **more), *speed)  # noqa: B023

        counting = [one for one in kept if more["deterministic"] or not one[1].deterministic]
        expected = [entry for _, entry in sorted(counting, key=key)]
        offers = tables.offers(call, group, size, H200, [tmp_path], **more)
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


def test_a_choice_looks_for_tables_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tables_of(tmp_path, monkeypatch)
    looked, folders = [], tables.folders

    def noting() -> tuple[Path, ...]:
        looked.append(1)
        return folders()

    monkeypatch.setattr(tables, "folders", noting)
    target = dispatch.Target(H200, (Arch.SM90A, Arch.SM90))
    problem = replace(PROBLEM, arch=Arch.SM90A)
    first, second = islice(candidates(problem), 2)

    def chosen_now() -> Spec:
        return dispatch.choose_for(problem, 7, 1024, target).spec

    assert chosen_now() == first
    tables.save(H200, [Tuned(second, 7, 1024, 1.0, 1.0)], tmp_path)
    assert chosen_now() == second
    assert len(looked) == 2
    with tables.unchanged():
        assert chosen_now() == chosen_now() == second
    assert len(looked) == 3


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
    tables._own.cache_clear()
    tables._of_file.cache_clear()
    tables._tiers.cache_clear()
    assert [spec.to_json() for spec in chosen(backward, tmp_path)] == [good["spec"]]
    assert "an entry is skipped" in caplog.text


def test_a_refusal_of_a_plan_is_raised_anew() -> None:
    """Plans are kept; an error that is raised twice would gather tracebacks."""
    spec = Spec(HOPPER, replace(next(candidates(HOPPER)).tuning, tile_n=176))
    raised = []
    for _ in range(2):
        with pytest.raises(Infeasible, match="must be multiples") as caught:
            tables.planned(spec)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert str(raised[0]) == str(raised[1])


def test_the_nearest_ratio_is_the_one_with_the_nearest_quotient(tmp_path: Path) -> None:
    """Ratio 4 is twice as far from 1 as from 8."""
    specs = list(islice(candidates(PROBLEM), 2))
    pairs = zip(specs, (1, 8), strict=True)
    tables.save(H200, [Tuned(spec, group, 1024, 1.0, 1.0) for spec, group in pairs], tmp_path)
    found = [spec for spec, _ in tables.choose(PROBLEM, 4, 1024, H200, (tmp_path,))]
    assert found == [specs[1], specs[0]]


def test_a_table_is_readable_by_all(tmp_path: Path) -> None:
    """It is a file under version control, whatever the umask and the temporary file it was made of."""
    path = tables.save(H200, entries(PROBLEM, 1), tmp_path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_saving_reads_what_is_there_now(tmp_path: Path) -> None:
    """Not what this process read before: another one may have saved within the same tick of the clock."""
    first, second = entries(PROBLEM, 2)
    path = tables.save(H200, [first], tmp_path)
    before = path.stat()
    assert tables.load(H200, tmp_path) == (first,)
    text = json.loads(path.read_text())
    path.write_text(json.dumps([*text, second.to_json()]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    third = replace(first, group=5)
    tables.save(H200, [third], tmp_path)
    found = tables.load(H200, tmp_path)
    assert len(found) == 3
    assert all(entry in found for entry in (first, second, third))


def test_a_table_half_written_by_the_dead_is_swept(tmp_path: Path) -> None:
    (tmp_path / "tmpabc.json.tmp").write_text("[")
    tables.save(H200, entries(PROBLEM, 1), tmp_path)
    assert [path.name for path in tmp_path.glob("*.json*")] == ["nvidia-h200.json"]


@pytest.mark.parametrize(
    ("bf16", "amx_refusal", "name"),
    [(False, "no AMX", "cpu avx512"), (True, "no AMX", "cpu avx512 bf16"), (True, "", "cpu avx512 bf16 amx")],
)
def test_a_cpus_table_is_that_of_its_instructions(
    bf16: bool, amx_refusal: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_features, "has_bf16", lambda: bf16)
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: amx_refusal)
    assert tables.device_name(torch.device("cpu")) == name


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


def test_what_a_call_is_chosen_by(loaded: list[Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, ratio of heads, alignment of rows and of where they begin; calls that agree in these share a choice."""
    asked: list[tuple[int, int, int, int]] = []
    choose = dispatch.choose

    def noting(problem: Problem, group: int, size: int, *rest: Any) -> tables.Choice:
        asked.append((problem.align, group, size, problem.head_dim_v))
        return choose(problem, group, size, *rest)

    monkeypatch.setattr(dispatch, "choose", noting)

    def call(rows: int, keys: int, heads: int, first: int = 0, pad: int = 0) -> None:
        def rows_of(heads: int, length: int) -> torch.Tensor:
            whole = torch.zeros(heads * length * (16 + pad) + first, dtype=torch.bfloat16)
            return whole[first:].view(1, heads, length, 16 + pad)[..., :16]

        attnforge.attention(rows_of(heads, rows), rows_of(2, keys), rows_of(2, keys))

    call(64, 33, 6)
    call(70, 33, 6)  # the same octave
    call(300, 33, 6)
    call(64, 900, 6)  # keys do not count
    call(64, 33, 2)
    call(64, 33, 6, first=1)  # begins at an odd address
    call(300, 33, 6, pad=1)  # odd rows
    assert asked == [(4, 3, 64, 16), (4, 3, 300, 16), (4, 1, 64, 16), (2, 3, 64, 16), (2, 3, 300, 16)]
    assert [spec.problem.align for spec in loaded] == [4, 4, 4, 2, 2]


def test_a_table_that_is_none(tmp_path: Path) -> None:
    path = tables.table_path(H200, tmp_path)
    for text in ("{", '{"a": 1}', '[{"spec": {}}]', '[{"spec": {"direction": "fwd"}}]'):
        path.write_text(text)
        tables._read.cache_clear()
        with pytest.raises(ValueError, match=r"nvidia-h200.json is not a tuned table.*delete it"):
            tables.load(H200, tmp_path)


def test_entries_of_kernels_that_are_gone_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a knob with a value that no kernel has any more; the others of the table count, and saving drops it."""
    first, second, third = entries(replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A), 3)
    older = [first.to_json(), second.to_json(), third.to_json()]
    for entry, descending in zip(older, (0, 1, 0), strict=True):
        entry["spec"]["tuning"]["descending"] = descending
    path = tables.table_path(H200, tmp_path)
    path.write_text(json.dumps(older))
    assert tables.load(H200, tmp_path) == (first, third)
    assert "an entry is skipped" in caplog.text
    assert "descending unknown" in caplog.text
    tables.save(H200, [first], tmp_path)
    assert json.loads(path.read_text()) == [first.to_json(), third.to_json()]


def test_the_space_serves_what_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tables_of(tmp_path, monkeypatch)
    choice = dispatch.choose(CPU, 1, 100, torch.device("cpu"))
    assert choice.spec == next(candidates(CPU))
    assert "no tuned entry fits cpu" in choice.reason


def test_tuned_first_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tables_of(tmp_path, monkeypatch)
    (entry,) = entries(CPU, 1)
    tables.save(tables.device_name(torch.device("cpu")), [entry], tmp_path)
    choice = dispatch.choose(CPU, 1, 100, torch.device("cpu"))
    assert choice.spec == entry.spec
    assert choice.reason.startswith(f"tuned as {entry.spec.slug} for 1024 rows, GQA ratio 7 (cpu-")


def test_new_table_takes_effect_after_forget(
    loaded: list[Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    x = torch.randn(1, 2, 40, 64)
    for _ in range(3):
        attnforge.attention(x, x, x)
    assert len(loaded) == 1
    (entry,) = entries(CPU, 1)
    tables.save(tables.device_name(torch.device("cpu")), [entry], tmp_path)
    dispatch.forget()
    attnforge.attention(x, x, x)
    assert [spec.tuning for spec in loaded[1:]] == [entry.spec.tuning]


@pytest.mark.parametrize(
    ("change", "arch", "said"),
    [
        ({}, Arch.SM90A, ""),
        ({"align": 8}, Arch.SM90, "align 8: TMA needs rows that start at multiples of 16 bytes"),
        ({"align": 2}, Arch.SM90, "align 2: TMA needs"),
        ({"head_dim": 8}, Arch.SM90, "head_dim 8: the sm90a forward kernel takes multiples of 8 from 16"),
        ({"dim_v": 64}, Arch.SM90A, ""),
        ({"dim_v": 20}, Arch.SM90, "head_dim of v 20: the sm90a forward kernel takes multiples of 8 from 16"),
        ({"direction": Direction.BACKWARD}, Arch.SM90A, ""),
        ({"direction": Direction.BACKWARD, "dim_v": 64}, Arch.SM90A, ""),
        ({"direction": Direction.BACKWARD, "dim_v": 96}, Arch.SM90A, ""),
        ({"direction": Direction.BACKWARD, "align": 8}, Arch.SM90, "align 8: TMA needs"),
        ({"direction": Direction.BACKWARD, "head_dim": 8}, Arch.SM90, "head_dim 8: the sm90a backward"),
    ],
)
def test_hopper_passes_on_what_it_cannot(
    change: dict[str, Any],
    arch: Arch,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the mma.sync family, with the reason in the debug log; also if it is Hopper's own kernel that is tuned."""
    only_tables_of(tmp_path, monkeypatch)
    monkeypatch.setattr(tables, "device_name", lambda device: H200)
    monkeypatch.setattr(kernels, "targets", lambda device: (Arch.SM90A, Arch.SM90))
    hopper = replace(PROBLEM, arch=Arch.SM90A)
    change = dict(change)
    hopper = replace(hopper, direction=change.pop("direction", hopper.direction))
    for saved in ([], entries(hopper, 1)):
        tables.save(H200, saved, tmp_path)
        with caplog.at_level(logging.DEBUG, logger="attnforge"):
            spec = dispatch.choose(replace(hopper, **change), 7, 1024, torch.device("cuda")).spec
        assert spec.problem == replace(hopper, arch=arch, **change)
        assert said in caplog.text
        if not change:
            assert not saved or spec == saved[0].spec


def test_where_two_families_were_measured_the_faster_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 Hopper has two: which is the faster depends on the class."""
    only_tables_of(tmp_path, monkeypatch)
    target = dispatch.Target(H200, (Arch.SM90A, Arch.SM90))
    wide, narrow = (
        Problem(Direction.FORWARD, arch, DType.FLOAT32, 64, Mask.DENSE, 16) for arch in target.archs
    )

    def arch(size: int, visible_keys: int = 0) -> Arch:
        return dispatch.choose_for(wide, 7, size, target, visible_keys=visible_keys).spec.problem.arch

    tables.save(H200, [replace(entry, tflops=60.0) for entry in entries(narrow, 2)], tmp_path)
    assert arch(1024) is Arch.SM90A, "only one was measured"
    fast, slow = entries(wide, 2)
    tables.save(H200, [replace(fast, tflops=90.0), replace(slow, tflops=50.0, visible_keys=500)], tmp_path)
    assert (arch(1024), arch(1500)) == (Arch.SM90A, Arch.SM90A)
    assert (arch(2048), arch(3000)) == (Arch.SM90, Arch.SM90)
    assert arch(2048, visible_keys=100) is Arch.SM90A, "of so few visible keys neither was"
    assert arch(8192) is Arch.SM90A


def test_what_was_measured_is_of_the_very_class(tmp_path: Path) -> None:
    """By which families are compared: of the mask, dtype, octave of rows, GQA ratio and device of a call."""
    tables.save(H200, entries(PROBLEM, 1), tmp_path)

    def speed(group: int = 7, size: int = 1024, name: str = H200, **changes: Any) -> float | None:
        return tables.measured(replace(PROBLEM, **changes), group, size, name, [tmp_path])

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
    speeds = [tables.measured(PROBLEM, 7, 1024, H200, [tmp_path], visible_keys=n) for n in (700, 90, 0)]
    assert speeds == [100.0, 200.0, 200.0]


BACKWARD = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, mask=Mask.CAUSAL)
ORDERED = {"deterministic": 1, "launch_order": 1, "split_heads": 0, "persistent": 0}


def ordered(rounds: int = tables.MANY) -> Tuned:
    """A backward whose blocks compute all heads of a group, in a fixed order."""
    spec = next(candidates(BACKWARD))
    spec = Spec(BACKWARD, make_tuning(BACKWARD, spec.tuning.to_json() | ORDERED))
    return Tuned(spec, 7, 1024, 1.0, 300.0, rounds=rounds)


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
    spec, reason = next(tables.choose(BACKWARD, group, 1024, H200, [tmp_path], rounds=rounds))
    assert {name: getattr(spec.tuning, name) for name in expected} == expected
    assert (tables.FEW_TILES in reason) != expected["deterministic"]
    make_plan(spec)


def test_a_small_call_that_was_searched_gets_its_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of other rounds are other classes, and a deterministic call keeps its order."""
    only_tables_of(tmp_path, monkeypatch)
    tables.save(H200, [ordered(), ordered(rounds=0)], tmp_path)
    assert len(tables.load(H200, tmp_path)) == 2
    spec, reason = next(tables.choose(BACKWARD, 7, 1024, H200, [tmp_path], rounds=0))
    assert spec == ordered().spec
    assert "GQA ratio 7, 0 rounds" in reason
    target = dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(BACKWARD, 7, 1024, target, rounds=0).reason == reason
    assert tables.FEW_TILES not in reason
    strict = tables.choose(BACKWARD, 7, 1024, H200, [tmp_path], rounds=1, deterministic=True)
    assert next(strict)[0] == ordered().spec


def test_a_small_deterministic_call_keeps_its_order(tmp_path: Path) -> None:
    tables.save(H200, [ordered()], tmp_path)
    of = {"rounds": 0, "deterministic": True}
    spec, reason = next(tables.choose(BACKWARD, 7, 1024, H200, [tmp_path], **of))  # type: ignore[arg-type]
    assert spec == ordered().spec
    assert tables.FEW_TILES not in reason


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
    call = few.spec.problem

    def chosen_for(values: Iterable[int]) -> set[Spec]:
        choices = (tables.choose(call, group, 1024, H200, [tmp_path], rounds=rounds) for rounds in values)
        return {next(specs)[0] for specs in choices}

    everything = chosen_for(range(tables.MANY + 1))
    assert {few.spec, many.spec} <= everything
    assert chosen_for(tables.rounds_that_matter(call, group, H200, [tmp_path])) == everything


def test_rounds_count_key_tiles_of_kv_heads() -> None:
    assert tables.rounds_of(2, 7, 896, 132) == 0  # 98 tiles for 132 multiprocessors
    assert tables.rounds_of(1, 9, 1281, 132) == 1  # 99
    assert tables.rounds_of(16, 4, 1024, 132) == 5
    assert tables.rounds_of(1000, 8, 3000, 132) == tables.MANY
    assert tables.rounds_of(1, 1, 1, 0) == tables.MANY  # no GPU


def test_nothing_feasible() -> None:
    for direction in Direction:
        problem = replace(CPU, head_dim=257, direction=direction)
        for deterministic in (False, True):
            with pytest.raises(Infeasible, match=f"^q: no cpu {direction.value} kernel for head_dim 257"):
                dispatch.choose(problem, 1, 100, torch.device("cpu"), deterministic)
    with pytest.raises(ValueError, match=r"torch.float16, accepted on the CPU are"):
        dispatch.choose(replace(CPU, dtype=DType.FLOAT16), 1, 100, torch.device("cpu"))


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({"head_dim": 257}, "head_dim 257: the cpu kernels take 1 to 256"),
        ({"head_dim": 257, "dim_v": 300}, "head_dim 257 and 300 of v: the cpu kernels take 1 to 256"),
        ({"dim_v": 300}, "head_dim 64 and 300 of v: head_dim 300: the cpu kernels take 1 to 256"),
    ],
)
def test_a_head_dim_is_named_once_unless_v_has_its_own(dims: dict[str, int], said: str) -> None:
    problem = replace(CPU, head_dim=64)
    with pytest.raises(Infeasible, match=f"^q: no cpu fwd kernel for {said}$"):
        dispatch.choose(replace(problem, **dims), 1, 100, torch.device("cpu"))  # type: ignore[arg-type]


def test_infeasible_is_copied_as_for_another_process() -> None:
    error = copy.copy(Infeasible("kernels take 1 to 256", "head_dim 300"))
    assert (str(error), error.subject) == ("head_dim 300: kernels take 1 to 256", "head_dim 300")
    assert str(copy.copy(Infeasible("no kernel"))) == "no kernel"


def test_deterministic_takes_the_nearest_deterministic_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tuned variant that adds in any order, the same one with deterministic sums."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM80, head_dim=64)
    loose = next(candidates(problem))
    assert not make_plan(loose).deterministic
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([tables.Choice(loose, "tuned")]))
    target = dispatch.Target("", (Arch.SM80,))
    strict = dispatch.choose_for(problem, 7, 1024, target, deterministic=True)
    assert make_plan(strict.spec).deterministic
    assert strict.spec.to_json()["tuning"] == loose.to_json()["tuning"] | {"deterministic": 1}
    assert strict.reason == "tuned; with deterministic sums"
    assert dispatch.choose_for(problem, 7, 1024, target).spec == loose


@pytest.mark.parametrize("owner", [0, 1], ids=["from kv heads", "from q heads"])
@pytest.mark.parametrize(
    ("group", "mask", "wanted"),
    [
        (1, Mask.CAUSAL, {}),
        (1, Mask.SPANS, {}),
        (7, Mask.FULL, {}),
        (7, Mask.CAUSAL, {"split_heads": 1, "launch_order": 3}),
        (7, Mask.SPANS, {"split_heads": 1, "launch_order": 3}),
    ],
    ids=str,
)
def test_deterministic_heads_of_a_group_have_blocks_that_start_apart_under_a_mask(
    monkeypatch: pytest.MonkeyPatch, group: int, mask: Mask, wanted: dict[str, int], owner: int
) -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=128, mask=mask)
    loose = next(spec for spec in candidates(problem) if spec.to_json()["tuning"]["split_heads"] == owner)
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([tables.Choice(loose, "tuned")]))
    strict = dispatch.choose_for(problem, group, 1024, dispatch.Target("", (Arch.SM90A,)), deterministic=True)
    assert strict.spec.to_json()["tuning"] == loose.to_json()["tuning"] | {"deterministic": 1} | wanted


def test_deterministic_heads_start_apart_in_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, mask=Mask.DENSE)
    loose = next(candidates(problem))
    strict = dispatch._deterministic(loose, 7)
    assert strict is not None
    changed = {"deterministic": 1, "launch_order": 3}
    assert strict.to_json()["tuning"] == loose.to_json()["tuning"] | changed


@pytest.mark.parametrize(
    ("arch", "head_dim", "score"),
    [(Arch.SM80, 64, ""), (Arch.SM90A, 192, ""), (Arch.SM90A, 64, "softcap: 30.0 * tanh(score / 30.0)")],
    ids=str,
)
def test_heads_start_apart_in_families_with_launch_order(arch: Arch, head_dim: int, score: str) -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=arch, head_dim=head_dim, mask=Mask.CAUSAL)
    problem = replace(problem, score=ScoreMod(score))
    strict = dispatch._deterministic(next(candidates(problem)), 7)
    assert strict is not None
    knobs = strict.tuning.to_json()
    assert knobs["deterministic"]
    assert knobs.get("launch_order") == (3 if arch is Arch.SM90A and head_dim == 64 else None)


def test_deterministic_takes_what_differs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tuned variant itself cannot have deterministic sums: before Hopper a block per q head."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM80, head_dim=64)
    loose = next(spec for spec in candidates(problem) if make_plan(spec).dkv_accum)
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([tables.Choice(loose, "tuned")]))
    target = dispatch.Target("", (Arch.SM80,))
    strict = dispatch.choose_for(problem, 7, 1024, target, deterministic=True)
    assert make_plan(strict.spec).deterministic
    assert strict.spec.to_json()["tuning"] == loose.to_json()["tuning"] | {
        "deterministic": 1,
        "split_heads": 0,
    }


WALKING = Sm90Backward(64, 128, 4, 3, True, 2, False, False, persistent=1)


@pytest.mark.parametrize(
    ("tuning", "group", "changed"),
    [
        (WALKING, 1, {}),
        (WALKING, 7, {"split_heads": 1, "persistent": 0, "launch_order": 3}),  # a block for each q head
        # Two warps load in any deterministic kernel: 0 is the only value for it.
        (replace(WALKING, lag=False, loaders=2), 1, {"loaders": 0}),
        (Sm90Backward(64, 128, 4, 3, False, 2, True, False, loaders=2), 4, {"loaders": 0, "launch_order": 3}),
        # The nearest that remains has a block for each q head, too.
        (
            Sm90Backward(64, 128, 4, 3, False, 2, False, False, loaders=2),
            4,
            {"loaders": 0, "split_heads": 1, "launch_order": 3},
        ),
    ],
    ids=[
        "persistent",
        "persistent of a group",
        "persistent, two loaders",
        "two loaders",
        "two loaders of a group",
    ],
)
def test_quiet_knobs_of_a_deterministic_variant(
    monkeypatch: pytest.MonkeyPatch, tuning: Sm90Backward, group: int, changed: dict[str, int]
) -> None:
    """Entries of tables name no knobs at their defaults, of which variants nearby have others."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    loose = Spec(problem, tuning)
    make_plan(loose)
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([tables.Choice(loose, "tuned")]))
    strict = dispatch.choose_for(problem, group, 1024, dispatch.Target("", (Arch.SM90A,)), deterministic=True)
    assert strict.spec.tuning.to_json() == tuning.to_json() | {"deterministic": 1} | changed


def test_no_packaged_entry_is_without_a_deterministic_variant() -> None:
    """Each entry of a Hopper backward converts to some kernel that sums in a fixed order."""
    for name in (H200, "NVIDIA H100 80GB HBM3"):
        for entry in tables.load(name, tables.PACKAGED):
            problem = entry.spec.problem
            if problem.arch is Arch.SM90A and problem.direction is Direction.BACKWARD:
                strict = dispatch._deterministic(entry.spec, entry.group)
                assert problem.score.wanted or strict is not None, entry.spec.slug


def test_deterministic_persistent_blocks_with_lag_spill() -> None:
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=72, mask=Mask.FULL)
    tuning = replace(WALKING, stages=2, stages_dout=2, in_regs=1)
    loose = Spec(problem, tuning)
    make_plan(loose)
    with pytest.raises(Infeasible, match="persistent: spills at head_dim 72 with lag and determ"):
        make_plan(Spec(problem, replace(tuning, deterministic=True)))
    strict = dispatch._deterministic(loose, 1)
    assert strict is not None
    assert make_plan(strict).deterministic


@pytest.mark.parametrize(
    "changes",
    [{"score": ScoreMod("softcap: 30.0 * tanh(score / 30.0)")}, {"mask": Mask.SPANS}],
    ids=["score", "spans"],
)
def test_an_entry_of_persistent_blocks_counts_where_there_are_none(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same knobs with a block for each work tile, not an entry that is farther away."""
    monkeypatch.setenv(TABLES, str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    plain = Sm90Backward(64, 128, 3, 2, False, 1, False, False)
    near = Tuned(Spec(problem, replace(plain, persistent=1)), 7, 1024, 1.0, 100.0)
    far = Tuned(Spec(problem, replace(plain, stages=4)), 7, 4096, 1.0, 900.0)
    tables.save(H200, [near, far], tmp_path)
    call, target = replace(problem, **changes), dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(problem, 7, 1024, target).spec == near.spec
    choice = dispatch.choose_for(call, 7, 1024, target, visible_keys=512)
    assert choice.spec == Spec(call, plain)
    assert choice.reason.startswith(f"tuned as {near.spec.slug} for")
    assert choice.reason.endswith("; without persistent blocks")


@pytest.mark.parametrize(
    ("mask", "changes", "dropped"),
    [
        (Mask.SPANS, {}, {"launch_order": 0}),
        (Mask.CAUSAL, {"score": ScoreMod("softcap: 50.0 * tanh(score / 50.0)")}, {"persistent": 0}),
        (Mask.DENSE, {}, None),  # needs split_heads
    ],
)
def test_an_order_of_blocks_for_another_mask_is_left_out(
    mask: Mask, changes: dict[str, ScoreMod], dropped: dict[str, int] | None
) -> None:
    """And no more knobs than have to be."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    plain = Sm90Backward(64, 128, 3, 2, False, 1, False, True, False)
    near = Tuned(Spec(problem, replace(plain, launch_order=2, persistent=1)), 7, 1024, 1.0, 100.0)
    call = replace(problem, mask=mask, **changes)  # type: ignore[arg-type]
    if dropped is None:
        with pytest.raises(Infeasible, match="needs split_heads"):
            tables.replanned(call, near)
    else:
        assert tables.replanned(call, near) == Spec(call, replace(near.spec.tuning, **dropped))
    assert tables.replanned(problem, near) == near.spec


@pytest.mark.parametrize(
    ("more", "without"),
    [
        ({}, "deterministic sums"),
        ({"persistent": 1}, "persistent blocks and deterministic sums"),
        ({"launch_order": 2}, "its order of blocks and deterministic sums"),
    ],
)
def test_a_deterministic_entry_counts_for_gradients_of_tensors(
    more: dict[str, int], without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same knobs without `deterministic`, not an entry that is farther away; with it if the call asks for it."""
    only_tables_of(tmp_path, monkeypatch)
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    plain = Sm90Backward(64, 128, 3, 2, False, 1, False, False)
    strict = replace(plain, deterministic=True, **more)  # type: ignore[arg-type]
    near = Tuned(Spec(problem, strict), 1, 1024, 1.0, 100.0)
    far = Tuned(Spec(problem, replace(plain, stages=4)), 1, 4096, 1.0, 900.0)
    tables.save(H200, [near, far], tmp_path)
    target = dispatch.Target(H200, (Arch.SM90A,))
    call = replace(problem, score=ScoreMod("alibi(t0: float32[1] grad): score - t0[h] * abs(q_idx - kv_idx)"))
    choice = dispatch.choose_for(call, 1, 1024, target)
    assert choice.spec == Spec(call, plain)
    assert choice.reason.endswith(f"; without {without}")
    ordered = dispatch.choose_for(call, 1, 1024, target, deterministic=True).spec
    assert ordered == Spec(call, replace(strict, persistent=0))


def test_only_knobs_in_the_way_are_dropped() -> None:
    """A score takes no persistent blocks, but sums in a fixed order. For spans there is no such launch order."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
    tuning = replace(WALKING, deterministic=True, launch_order=2)
    curved = Spec(replace(problem, score=ScoreMod("softcap: 30.0 * tanh(score / 30.0)")), tuning)
    assert tables.planned(Spec(problem, tuning)).tuning == tuning
    assert tables.planned(curved).tuning == replace(tuning, persistent=0)
    spans = Spec(replace(problem, mask=Mask.SPANS), tuning)
    assert tables.planned(spans).tuning == replace(tuning, launch_order=0)


@pytest.mark.parametrize("pair", [False, True])
def test_deterministic_sums_of_wide_blocks_are_left_out(pair: bool) -> None:
    """For gradients of a score's tensors, unless the call asks for them; how dQ is staged stays."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=192, mask=Mask.CAUSAL)
    plain = Sm90BackwardWide(64, 128 if pair else 64, 2, 1, False, pair)
    tuning = replace(plain, deterministic=True, staging=2)
    assert tables.planned(Spec(problem, tuning)).tuning == tuning
    alibi = ScoreMod("alibi(t0: float32[1] grad): score - t0[h] * abs(q_idx - kv_idx)")
    call, entry = replace(problem, score=alibi), Tuned(Spec(problem, tuning), 1, 1024, 1.0, 100.0)
    assert tables.replanned(call, entry).tuning == replace(plain, staging=2)
    assert tables.replanned(call, entry, deterministic=True).tuning == tuning


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
    found = tables.offers(scored[1], 7, 1024, H200)
    assert [offer.entry.spec for offer in found] == [specs[1], specs[0], specs[3], specs[2]]


@pytest.mark.parametrize(
    ("score", "pair"),
    [
        ("softcap: 50.0 * tanh(score / 50.0)", True),
        ("alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)", True),
        ("bias(t0: float32[2]): score + t0[q_idx, kv_idx]", False),  # has no registers for its addresses
    ],
)
def test_an_untuned_score_starts_from_a_pair_of_blocks(
    score: str, pair: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of plain attention, or the nearest one of single blocks where a pair does not take the score."""
    only_tables_of(tmp_path, monkeypatch)
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=256, mask=Mask.CAUSAL)
    near = Tuned(
        Spec(problem, Sm90BackwardWide(64, 128, 2, 1, False, True, s_late=True)), 2, 8192, 1.0, 100.0
    )
    far = Tuned(Spec(problem, Sm90BackwardWide(64, 64, 2, 1, False)), 2, 1024, 1.0, 900.0)
    tables.save(H200, [near, far], tmp_path)
    call = replace(problem, score=ScoreMod(score))
    choice = dispatch.choose_for(call, 2, 8192, dispatch.Target(H200, (Arch.SM90A,)))
    assert choice.spec == Spec(call, (near if pair else far).spec.tuning)


STRICT = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A, head_dim=64, mask=Mask.CAUSAL)
LOOSE = next(candidates(STRICT))
FIRST, SECOND, *_ = islice(deterministic_candidates(STRICT), 40, 42)


def strictly(size: int = 1024, group: int = 7, **changes: Any) -> tables.Choice:
    """What a deterministic call takes; one that is not takes `LOOSE`, the only entry for such calls."""
    problem, target = replace(STRICT, **changes), dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(problem, group, size, target).spec.tuning == LOOSE.tuning
    return dispatch.choose_for(problem, group, size, target, deterministic=True)


def converted(spec: Spec) -> dict[str, int]:
    return {**spec.to_json()["tuning"], "deterministic": 1, "split_heads": 1, "launch_order": 3}


def test_the_class_of_a_deterministic_entry_is_its_own(tmp_path: Path) -> None:
    """It survives a round trip; entries of older tables read as they did and write the same JSON."""
    strict, loose = (Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=found) for found in (True, False))
    assert strict.cls == {**loose.cls, "deterministic": 1}
    assert "deterministic" not in loose.cls
    tables.save(H200, [loose, strict], tmp_path)
    assert set(map(str, tables.load(H200, tmp_path))) == {str(loose), str(strict)}
    old = loose.to_json()
    assert Tuned.from_json(old) == loose
    assert Tuned.from_json(old).to_json() == old


def test_only_deterministic_calls_take_deterministic_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    strict = Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=True)
    tables.save(H200, [strict], tmp_path)
    assert (
        "no tuned entry fits"
        in dispatch.choose_for(STRICT, 7, 1024, dispatch.Target(H200, (Arch.SM90A,))).reason
    )
    tables.save(H200, [Tuned(LOOSE, 7, 1024, 1.0, 400.0)], tmp_path)
    choice = strictly()
    assert choice.spec == FIRST
    assert "GQA ratio 7, deterministic (nvidia-h200.json)" in choice.reason
    assert tables.measured(STRICT, 7, 1024, H200) == 400.0
    assert tables.measured(STRICT, 7, 1024, H200, deterministic=True) == 90.0


@pytest.mark.parametrize(
    ("entry", "call", "wins"),
    [
        ({}, {}, True),
        ({"size": 4096}, {}, True),  # of 4 times the length
        ({"size": 8192}, {}, False),  # of 8 times
        ({"size": 128}, {}, False),
        ({"group": 1}, {}, False),
        ({"spec": replace(FIRST, problem=replace(STRICT, mask=Mask.FULL))}, {}, False),
        ({"spec": replace(FIRST, problem=replace(STRICT, dtype=DType.FLOAT16))}, {}, False),
        # The other entry is not of the call's class either.
        ({"size": 8192}, {"size": 2048}, True),
        ({"group": 1}, {"group": 1}, True),
        ({"spec": replace(FIRST, problem=replace(STRICT, mask=Mask.FULL))}, {"mask": Mask.FULL}, True),
    ],
)
def test_a_deterministic_entry_wins_if_it_is_near(
    entry: dict[str, Any], call: dict[str, Any], wins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other one, of 1024 rows and GQA ratio 7, with deterministic sums."""
    only_tables_of(tmp_path, monkeypatch)
    strict = replace(Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=True), **entry)
    tables.save(H200, [Tuned(LOOSE, 7, 1024, 1.0, 400.0), strict], tmp_path)
    choice = strictly(**call)
    assert (choice.spec.tuning == FIRST.tuning) == wins
    if not wins:
        assert choice.spec.to_json()["tuning"] == converted(LOOSE)
        assert choice.reason.endswith("; with deterministic sums")


@pytest.mark.parametrize("faster", [80.0, 100.0])
def test_of_two_deterministic_kernels_the_faster_one_is_taken(
    faster: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever search found it: the fastest of all kernels of a class may be deterministic."""
    only_tables_of(tmp_path, monkeypatch)
    entries = [
        Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=True),
        Tuned(SECOND, 7, 1024, 1.0, faster),
        Tuned(LOOSE, 7, 2048, 1.0, 400.0),
    ]
    tables.save(H200, entries, tmp_path)
    target = dispatch.Target(H200, (Arch.SM90A,))
    assert tables.measured(STRICT, 7, 1024, H200, deterministic=True) == 90.0, "by searches for such calls"
    strict = dispatch.choose_for(STRICT, 7, 1024, target, deterministic=True)
    assert strict.spec.tuning == (SECOND if faster > 90 else FIRST).tuning
    assert dispatch.choose_for(STRICT, 7, 1024, target).spec.tuning == SECOND.tuning


def test_a_deterministic_entry_counts_where_visible_keys_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls then prefer backwards that divide long lists, which no deterministic one does."""
    only_tables_of(tmp_path, monkeypatch)
    spans = replace(STRICT, mask=Mask.SPANS)
    loose = next(s for s in candidates(spans) if getattr(s.tuning, "split_heads", False))
    strict = Tuned(Spec(spans, FIRST.tuning), 7, 1024, 1.0, 90.0, visible_keys=500, deterministic=True)
    tables.save(H200, [Tuned(loose, 7, 1024, 1.0, 400.0, visible_keys=500), strict], tmp_path)
    target = dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(spans, 7, 1024, target).spec == loose
    assert dispatch.choose_for(spans, 7, 1024, target, deterministic=True).spec == strict.spec


def test_a_deterministic_entry_of_another_device_is_nearer_than_a_converted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    tables.save(H200, [Tuned(LOOSE, 7, 1024, 1.0, 400.0)], tmp_path)
    tables.save(OTHER, [Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=True)], tmp_path)
    assert strictly().spec == FIRST
    tables.save(H200, [Tuned(SECOND, 7, 1024, 1.0, 80.0, deterministic=True)], tmp_path)
    assert strictly().spec == SECOND


def test_families_are_compared_by_searches_of_the_same_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a deterministic call by entries for such calls, if all families have one; else by the others."""
    only_tables_of(tmp_path, monkeypatch)
    archs = (Arch.SM90A, Arch.SM90)
    found = {arch: next(candidates(replace(STRICT, arch=arch))) for arch in archs}
    fixed = {arch: next(deterministic_candidates(replace(STRICT, arch=arch))) for arch in archs}

    def arch(deterministic: bool) -> Arch:
        target = dispatch.Target(H200, archs)
        return dispatch.choose_for(STRICT, 7, 1024, target, deterministic).spec.problem.arch

    speeds = {Arch.SM90A: 200.0, Arch.SM90: 300.0}
    tables.save(H200, [Tuned(spec, 7, 1024, 1.0, speeds[a]) for a, spec in found.items()], tmp_path)
    entry = Tuned(fixed[Arch.SM90A], 7, 1024, 1.0, 150.0, deterministic=True)
    tables.save(H200, [entry], tmp_path)
    assert (arch(False), arch(True)) == (Arch.SM90, Arch.SM90)
    tables.save(H200, [replace(entry, spec=fixed[Arch.SM90], tflops=100.0)], tmp_path)
    assert (arch(False), arch(True)) == (Arch.SM90, Arch.SM90A)


@pytest.mark.gpu
def test_a_gpu_runs_a_deterministic_entry(
    loaded: list[Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a table of the user's; its gradients have the same bits twice."""
    only_tables_of(tmp_path, monkeypatch)
    device = torch.device("cuda")
    problem = replace(STRICT, arch=kernels.target(device))
    *_, spec = islice(deterministic_candidates(problem), 60)
    entry = Tuned(spec, 7, 1024, 1.0, 90.0, deterministic=True)
    tables.save(tables.device_name(device), [entry], tmp_path)
    q, dout = torch.randn(2, 2, 14, 1024, 64, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 1024, 64, device=device, dtype=torch.bfloat16)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    mask = attnforge.Causal()

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        out = attnforge.attention(q, k, v, mask, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout)

    first, second = gradients(True), gradients(True)
    assert spec in loaded
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    for one, other in zip(first, gradients(False), strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
    assert loaded.count(spec) == 1
