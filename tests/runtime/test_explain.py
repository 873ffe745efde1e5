"""Why a kernel was chosen: each reason from tables made for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.explain import Explanation, explain
from attnforge.runtime.tables import Tuned, save

CARD = Target("card", (Arch.SM90A, Arch.SM90))
PROBLEM = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.SPANS)
ONE, TWO, THREE, FOUR, FIVE, *_ = candidates(PROBLEM)


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TABLES, str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path / "none")


def explained(*entries: Tuned, other: tuple[Tuned, ...] = (), **options: bool) -> Explanation:
    save("card", entries, tables.folders()[0])
    save("another card", other, tables.folders()[0])
    found = explain(Call(PROBLEM, 4, 4096, visible_keys=1000, **options), CARD)
    assert found.choice == choose_for(Call(PROBLEM, 4, 4096, visible_keys=1000, **options), CARD)
    return found


def test_the_reasons_against_the_others() -> None:
    causal = replace(TWO, problem=replace(PROBLEM, mask=Mask.CAUSAL))
    found = explained(
        Tuned(ONE, 4, 4096, 1.0, 500.0, visible_keys=1000),
        Tuned(causal, 4, 4096, 1.0, 900.0),
        Tuned(THREE, 4, 16384, 1.0, 900.0, visible_keys=1000),
        Tuned(FOUR, 4, 4096, 1.0, 900.0, visible_keys=100),
        Tuned(FIVE, 1, 4096, 1.0, 900.0, visible_keys=1000),
        other=(Tuned(TWO, 4, 4096, 1.0, 900.0, visible_keys=1000),),
    )
    assert found.choice.spec == ONE
    assert not found.fallback
    assert {entry.name: entry.why for entry in found.entries} == {
        FIVE.slug: "GQA ratio 1; that of the chosen one is nearer: 4",
        FOUR.slug: "for 4096 rows, 100 visible keys; the chosen one is nearer: 4096 rows, 1000 visible keys",
        THREE.slug: "for 16384 rows, 1000 visible keys; the chosen one is nearer: 4096 rows, 1000 visible keys",
        causal.slug: "for another mask: causal",
        TWO.slug: "measured on another device (another-card.json)",
    }
    assert [entry.name for entry in found.entries[:2]] == [TWO.slug, FIVE.slug], "nearest first"
    (sm90,) = found.archs
    assert (sm90.name, "unless both were measured" in sm90.why) == ("sm90", True)


def test_a_slower_entry_and_an_infeasible_one() -> None:
    wide = next(iter(candidates(replace(PROBLEM, head_dim=256))))
    fp16 = replace(PROBLEM, dtype=DType.FLOAT16)
    found = explained(
        Tuned(ONE, 4, 4096, 1.0, 500.0, visible_keys=1000),
        Tuned(replace(TWO, problem=fp16), 4, 4096, 1.0, 400.0, visible_keys=1000),
        Tuned(wide, 4, 4096, 1.0, 900.0, visible_keys=1000),
    )
    assert [entry.why for entry in found.entries] == ["for another dtype: fp16"]


def test_a_fallback_is_called_one() -> None:
    found = explained()
    assert found.fallback
    assert found.entries == ()
    assert "first feasible" in found.choice.reason


def test_an_architecture_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(PROBLEM, head_dim=100, align=8)
    found = explain(Call(odd, 4, 4096), CARD)
    assert found.choice.spec.problem.arch is Arch.SM90
    assert [arch.name for arch in found.archs] == ["sm90a"]
    assert "16 bytes" in found.archs[0].why


def test_the_slower_architecture_is_told_with_both_speeds() -> None:
    fallback = next(iter(candidates(replace(PROBLEM, arch=Arch.SM90))))
    found = explained(
        Tuned(ONE, 4, 4096, 1.0, 700.0, visible_keys=1000),
        Tuned(fallback, 4, 4096, 1.0, 300.0, visible_keys=1000),
    )
    assert [arch.why for arch in found.archs] == ["measured slower: 300.0 TFLOP/s, the chosen one 700.0"]


BACKWARD = replace(PROBLEM, direction=Direction.BACKWARD)


def of_backward(*entries: Tuned) -> Explanation:
    save("card", entries, tables.folders()[0])
    found = explain(Call(BACKWARD, 4, 4096, deterministic=True, visible_keys=1000), CARD)
    assert found.choice == choose_for(Call(BACKWARD, 4, 4096, deterministic=True, visible_keys=1000), CARD)
    return found


def test_what_deterministic_calls_take_and_pass_over() -> None:
    loose, strict, other = next(candidates(BACKWARD)), *islice(deterministic_candidates(BACKWARD), 7, 9)
    fast = Tuned(loose, 4, 4096, 1.0, 900.0, visible_keys=1000)
    near = Tuned(strict, 4, 4096, 1.0, 500.0, visible_keys=1000, deterministic=True)
    found = of_backward(fast, near, replace(near, spec=other, group=1))
    assert found.choice.spec == strict
    assert found.choice.reason.startswith(
        f"tuned as {strict.slug} for 4096 rows, 1000 visible keys, GQA ratio 4, det"
    )
    assert {entry.name: entry.why for entry in found.entries} == {
        loose.slug: "searched for calls that do not ask for deterministic gradients",
        other.slug: "GQA ratio 1; that of the chosen one is nearer: 4",
    }
    plain = explain(Call(BACKWARD, 4, 4096, visible_keys=1000), CARD)
    assert plain.choice.spec == loose
    assert plain.entries == ()


def test_far_deterministic_entries_are_passed_over() -> None:
    loose, strict, other = next(candidates(BACKWARD)), *islice(deterministic_candidates(BACKWARD), 7, 9)
    far = Tuned(strict, 4, 4096 << 7, 1.0, 500.0, visible_keys=1000, deterministic=True)
    found = of_backward(
        Tuned(loose, 4, 4096, 1.0, 900.0, visible_keys=1000),
        far,
        replace(far, spec=other, size=4096, group=1),
    )
    assert found.choice.reason.endswith("; with deterministic sums")
    assert {entry.name: entry.why for entry in found.entries} == {
        strict.slug: f"for {4096 << 7} rows, 1000 visible keys; the chosen one is nearer: 4096 rows, 1000 visible keys",
        other.slug: "GQA ratio 1; that of the chosen one is nearer: 4",
    }


def test_a_short_name_of_a_gpu_stands_for_longer_ones_with_a_table() -> None:
    save("NVIDIA H100 80GB HBM3", [Tuned(ONE, 4, 4096, 1.0, 500.0)], tables.folders()[0])
    assert tables.longer_names("NVIDIA H100") == ["nvidia-h100-80gb-hbm3"]
    for name in ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3", "NVIDIA H100 PCIe", "NVIDIA H200"):
        assert tables.longer_names(name) == []
    save("NVIDIA H100", [Tuned(TWO, 4, 4096, 1.0, 400.0)], tables.folders()[0])
    assert tables.longer_names("NVIDIA H100") == []


def test_a_refusal_names_every_architecture_of_the_device() -> None:
    wide = replace(PROBLEM, direction=Direction.BACKWARD, head_dim=512)
    with pytest.raises(
        ValueError, match="q: no sm90a or sm90 bwd kernel for head_dim 512: the sm90 kernels take 1"
    ):
        choose_for(Call(wide, 1, 1024), CARD)
