"""Which variant runs a call: the choice from tuned tables, made deterministic where asked, then the space's first."""

from __future__ import annotations

import copy
import logging
import re
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from tuned_entries import (
    BACKWARD,
    CPU,
    FIRST,
    H200,
    HOPPER,
    OTHER,
    PROBLEM,
    SECOND,
    STRICT,
    WALKING,
    entries,
    of_head_dim,
    only_tables_of,
    ordered,
)

import attnforge
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.families.sm90_backward_wide import Sm90BackwardWide
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, dispatch, kernels, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.tables import Tuned


def test_a_backward_that_stands_in_is_spread_out_and_made_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    backward = replace(HOPPER, direction=Direction.BACKWARD)
    tuning = Sm90Backward(64, 128, 3, 2, False, 1, False, False)
    tables.save(H200, [of_head_dim(72, tuning, direction=Direction.BACKWARD)], tmp_path)
    choice, *_ = choosing.choose(Call(backward, 7, 1024, rounds=0), H200)
    spec, reason = choice.spec, choice.reason
    assert spec == Spec(backward, replace(tuning, split_heads=True))
    assert reason.endswith(f"; entry of head_dim 72; {choosing.FEW_TILES}")
    strict = dispatch.choose_for(
        Call(backward, 7, 1024, deterministic=True), dispatch.Target(H200, (Arch.SM90A,))
    )
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
    assert [offer.modelled for offer in choosing.offers(Call(hopper, 7, 1024), H200)] == [False, True]
    unaligned = replace(hopper, align=8)  # which no kernel of sm90a takes
    choice = dispatch.choose_for(Call(unaligned, 7, 1024), dispatch.Target(H200, (Arch.SM90A, Arch.SM90)))
    assert choice.spec == Spec(replace(PROBLEM, align=8), spec.tuning)
    assert choice.reason.startswith("modelled, not measured, as")


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
        choice = dispatch.choose_for(Call(problem, 1, 4096, visible_keys=300, rounds=3), target)
        assert choice.spec.problem == problem
        if match := re.search(r"entry of head_dim (\d+)", choice.reason):
            taken.add(head_dim)
            assert -(-int(match[1]) // 16) >= -(-head_dim // 16)
    assert taken == {*head_dims} - own
    assert {104, 136} <= taken


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
        return dispatch.choose_for(Call(problem, 7, 1024), target).spec

    assert chosen_now() == first
    tables.save(H200, [Tuned(second, 7, 1024, 1.0, 1.0)], tmp_path)
    assert chosen_now() == second
    assert len(looked) == 2
    with tables.unchanged():
        assert chosen_now() == chosen_now() == second
    assert len(looked) == 3


def test_what_a_call_is_chosen_by(loaded: list[Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Length, ratio of heads, alignment of rows and of where they begin; calls that agree in these share a choice."""
    asked: list[tuple[int, int, int, int]] = []
    choose = dispatch.choose

    def noting(call: Call, *rest: Any) -> choosing.Choice:
        asked.append((call.problem.align, call.group, call.size, call.problem.head_dim_v))
        return choose(call, *rest)

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


def test_the_space_serves_what_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tables_of(tmp_path, monkeypatch)
    choice = dispatch.choose(Call(CPU, 1, 100), torch.device("cpu"))
    assert choice.spec == next(candidates(CPU))
    assert "no tuned entry fits cpu" in choice.reason


def test_tuned_first_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_tables_of(tmp_path, monkeypatch)
    (entry,) = entries(CPU, 1)
    tables.save(tables.device_name(torch.device("cpu")), [entry], tmp_path)
    choice = dispatch.choose(Call(CPU, 1, 100), torch.device("cpu"))
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
            spec = dispatch.choose(Call(replace(hopper, **change), 7, 1024), torch.device("cuda")).spec
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
        return dispatch.choose_for(Call(wide, 7, size, visible_keys=visible_keys), target).spec.problem.arch

    tables.save(H200, [replace(entry, tflops=60.0) for entry in entries(narrow, 2)], tmp_path)
    assert arch(1024) is Arch.SM90A, "only one was measured"
    fast, slow = entries(wide, 2)
    tables.save(H200, [replace(fast, tflops=90.0), replace(slow, tflops=50.0, visible_keys=500)], tmp_path)
    assert (arch(1024), arch(1500)) == (Arch.SM90A, Arch.SM90A)
    assert (arch(2048), arch(3000)) == (Arch.SM90, Arch.SM90)
    assert arch(2048, visible_keys=100) is Arch.SM90A, "of so few visible keys neither was"
    assert arch(8192) is Arch.SM90A


def test_a_small_call_that_was_searched_gets_its_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of other rounds are other classes, and a deterministic call keeps its order."""
    only_tables_of(tmp_path, monkeypatch)
    tables.save(H200, [ordered(), ordered(rounds=0)], tmp_path)
    assert len(tables.load(H200, tmp_path)) == 2
    choice = next(choosing.choose(Call(BACKWARD, 7, 1024, rounds=0), H200, [tmp_path]))
    spec, reason = choice.spec, choice.reason
    assert spec == ordered().spec
    assert "GQA ratio 7, 0 rounds" in reason
    target = dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(Call(BACKWARD, 7, 1024, rounds=0), target).reason == reason
    assert choosing.FEW_TILES not in reason
    strict = choosing.choose(Call(BACKWARD, 7, 1024, rounds=1, deterministic=True), H200, [tmp_path])
    assert next(strict).spec == ordered().spec


def test_nothing_feasible() -> None:
    for direction in Direction:
        problem = replace(CPU, head_dim=257, direction=direction)
        for deterministic in (False, True):
            with pytest.raises(Infeasible, match=f"^q: no cpu {direction.value} kernel for head_dim 257"):
                dispatch.choose(Call(problem, 1, 100, deterministic=deterministic), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"torch.float16, accepted on the CPU are"):
        dispatch.choose(Call(replace(CPU, dtype=DType.FLOAT16), 1, 100), torch.device("cpu"))


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
        dispatch.choose(Call(replace(problem, **dims), 1, 100), torch.device("cpu"))  # type: ignore[arg-type]


def test_infeasible_is_copied_as_for_another_process() -> None:
    error = copy.copy(Infeasible("kernels take 1 to 256", "head_dim 300"))
    assert (str(error), error.subject) == ("head_dim 300: kernels take 1 to 256", "head_dim 300")
    assert str(copy.copy(Infeasible("no kernel"))) == "no kernel"


def test_deterministic_takes_the_nearest_deterministic_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tuned variant that adds in any order, the same one with deterministic sums."""
    problem = replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM80, head_dim=64)
    loose = next(candidates(problem))
    assert not make_plan(loose).deterministic
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([choosing.Choice(loose, "tuned")]))
    target = dispatch.Target("", (Arch.SM80,))
    strict = dispatch.choose_for(Call(problem, 7, 1024, deterministic=True), target)
    assert make_plan(strict.spec).deterministic
    assert strict.spec.to_json()["tuning"] == loose.to_json()["tuning"] | {"deterministic": 1}
    assert strict.reason == "tuned; with deterministic sums"
    assert dispatch.choose_for(Call(problem, 7, 1024), target).spec == loose


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
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([choosing.Choice(loose, "tuned")]))
    strict = dispatch.choose_for(
        Call(problem, group, 1024, deterministic=True), dispatch.Target("", (Arch.SM90A,))
    )
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
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([choosing.Choice(loose, "tuned")]))
    target = dispatch.Target("", (Arch.SM80,))
    strict = dispatch.choose_for(Call(problem, 7, 1024, deterministic=True), target)
    assert make_plan(strict.spec).deterministic
    assert strict.spec.to_json()["tuning"] == loose.to_json()["tuning"] | {
        "deterministic": 1,
        "split_heads": 0,
    }


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
    monkeypatch.setattr(dispatch, "_offers", lambda *_: iter([choosing.Choice(loose, "tuned")]))
    strict = dispatch.choose_for(
        Call(problem, group, 1024, deterministic=True), dispatch.Target("", (Arch.SM90A,))
    )
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
    other, target = replace(problem, **changes), dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(Call(problem, 7, 1024), target).spec == near.spec
    choice = dispatch.choose_for(Call(other, 7, 1024, visible_keys=512), target)
    assert choice.spec == Spec(other, plain)
    assert choice.reason.startswith(f"tuned as {near.spec.slug} for")
    assert choice.reason.endswith("; without persistent blocks")


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
    other = replace(
        problem, score=ScoreMod("alibi(t0: float32[1] grad): score - t0[h] * abs(q_idx - kv_idx)")
    )
    choice = dispatch.choose_for(Call(other, 1, 1024), target)
    assert choice.spec == Spec(other, plain)
    assert choice.reason.endswith(f"; without {without}")
    ordered = dispatch.choose_for(Call(other, 1, 1024, deterministic=True), target).spec
    assert ordered == Spec(other, replace(strict, persistent=0))


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
    other = replace(problem, score=ScoreMod(score))
    choice = dispatch.choose_for(Call(other, 2, 8192), dispatch.Target(H200, (Arch.SM90A,)))
    assert choice.spec == Spec(other, (near if pair else far).spec.tuning)


LOOSE = next(candidates(STRICT))


def strictly(size: int = 1024, group: int = 7, **changes: Any) -> choosing.Choice:
    """What a deterministic call takes; one that is not takes `LOOSE`, the only entry for such calls."""
    problem, target = replace(STRICT, **changes), dispatch.Target(H200, (Arch.SM90A,))
    assert dispatch.choose_for(Call(problem, group, size), target).spec.tuning == LOOSE.tuning
    return dispatch.choose_for(Call(problem, group, size, deterministic=True), target)


def converted(spec: Spec) -> dict[str, int]:
    return {**spec.to_json()["tuning"], "deterministic": 1, "split_heads": 1, "launch_order": 3}


def test_only_deterministic_calls_take_deterministic_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_tables_of(tmp_path, monkeypatch)
    strict = Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=True)
    tables.save(H200, [strict], tmp_path)
    assert (
        "no tuned entry fits"
        in dispatch.choose_for(Call(STRICT, 7, 1024), dispatch.Target(H200, (Arch.SM90A,))).reason
    )
    tables.save(H200, [Tuned(LOOSE, 7, 1024, 1.0, 400.0)], tmp_path)
    choice = strictly()
    assert choice.spec == FIRST
    assert "GQA ratio 7, deterministic (nvidia-h200.json)" in choice.reason
    assert choosing.measured(Call(STRICT, 7, 1024), H200) == 400.0
    assert choosing.measured(Call(STRICT, 7, 1024, deterministic=True), H200) == 90.0


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
    assert choosing.measured(Call(STRICT, 7, 1024, deterministic=True), H200) == 90.0, (
        "by searches for such calls"
    )
    strict = dispatch.choose_for(Call(STRICT, 7, 1024, deterministic=True), target)
    assert strict.spec.tuning == (SECOND if faster > 90 else FIRST).tuning
    assert dispatch.choose_for(Call(STRICT, 7, 1024), target).spec.tuning == SECOND.tuning


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
    assert dispatch.choose_for(Call(spans, 7, 1024), target).spec == loose
    assert dispatch.choose_for(Call(spans, 7, 1024, deterministic=True), target).spec == strict.spec


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
        return dispatch.choose_for(
            Call(STRICT, 7, 1024, deterministic=deterministic), target
        ).spec.problem.arch

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
