"""Verification: the exact answer passes, one wrong element does not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import unions

import attnforge
from attnforge.bagel.measure.cases import make_case
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime.masks import DenseMask, FunctionMask, Spans
from attnforge.runtime.search.case import Case, Inputs, causal_case
from attnforge.runtime.search.reference import reference
from attnforge.runtime.search.verify import Outputs, WrongResult, distances, make_check, odd_case, verify

CPU = torch.device("cpu")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SMALL = causal_case("causal/64", (1, 4, 2, 64, 64), DType.FLOAT32, CPU)
Damage = Callable[[Outputs], None]


def kernel(
    case: Case, direction: Direction, damage: Callable[[Outputs], None]
) -> Callable[[Inputs], Outputs]:
    """The exact answer in the case's dtype, then damaged."""

    def call(x: Inputs) -> Outputs:
        exact = reference(x.q, x.k, x.v, case.mask, case.scale, x.dout)._asdict()
        names = ("out", "lse") if direction is FORWARD else ("dq", "dk", "dv")
        results = {name: exact[name].to(x.q.dtype if name != "lse" else torch.float32) for name in names}
        damage(results)
        return results

    return call


def dense_case(dtype: DType = DType.BFLOAT16) -> Case:
    """A mask for each query head, and a head_dim of v of its own."""
    mask = DenseMask(torch.rand(1, 4, 90, 64, generator=torch.Generator().manual_seed(0)) < 0.5)
    return Case("dense", 2, 4, 2, 90, 64, 41, dtype, mask, 0, CPU, dim_v=64)


def function_case() -> Case:
    """A mask by a function of all four indices."""
    mask = attnforge.masks.mask_mod(lambda b, h, i, j: (j <= i + b) & (j != h), 90, 64, CPU)
    return replace(dense_case(DType.FLOAT32), mask=mask)


# Made when a test runs: the mask of a pack needs the launcher, which workers should not build while they collect.
CASES: dict[str, Callable[[], Case]] = {
    "small": lambda: SMALL,
    "odd pack": lambda: odd_case(make_case("finetune/0", "0.5B", DType.BFLOAT16, CPU)),
    "dense": dense_case,
    "odd dense": lambda: odd_case(dense_case(DType.FLOAT32)),
    "function": function_case,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_verification_accepts_the_exact_answer(name: str, direction: Direction) -> None:
    case = CASES[name]()
    errors = verify(make_check(case, direction), kernel(case, direction, lambda results: None))
    assert set(errors) == ({"out", "lse"} if direction is FORWARD else {"dq", "dk", "dv"})
    assert all(error.ok for error in errors.values())


def poke(name: str, value: float) -> Damage:
    """Change one element."""

    def damage(results: Outputs) -> None:
        results[name][0, 0, 3, ...] = value

    return damage


def transposed_heads(results: Outputs) -> None:
    results["out"].copy_(results["out"].flip(1))


@pytest.mark.parametrize(
    ("direction", "damage", "message"),
    [
        (FORWARD, poke("out", float("nan")), "out: holds NaN"),
        (FORWARD, poke("out", 9.0), "out: error rms .* worst"),
        (FORWARD, transposed_heads, "out: error rms"),
        (FORWARD, poke("lse", -torch.inf), "lse: rows without a visible key"),
        (FORWARD, poke("lse", 9.0), "lse: error"),
        (FORWARD, poke("lse", torch.nan), "lse: error"),
        (BACKWARD, poke("dq", 9.0), "dq: error"),
        (BACKWARD, poke("dk", 9.0), "dk: error"),
        (BACKWARD, poke("dv", 9.0), "dv: error"),
    ],
)
def test_verification_rejects_one_wrong_element(direction: Direction, damage: Damage, message: str) -> None:
    with pytest.raises(WrongResult, match=message):
        verify(make_check(SMALL, direction), kernel(SMALL, direction, damage))


def test_arithmetic_by_hand() -> None:
    """2 flops for each pair, product and column, of 2 x 4 heads; the products are as deep as q, or as wide as v."""
    case = replace(dense_case(), head_dim=40, pairs=1000)
    assert case.flops(FORWARD) == 2 * 8 * 1000 * (40 + 64)
    assert case.flops(BACKWARD) == 2 * 8 * 1000 * (3 * 40 + 2 * 64)
    assert SMALL.visible_keys == 0, "the length determines it"


def test_operands_are_rounded_as_kernels_round_them() -> None:
    x = causal_case("", (1, 2, 1, 32, 16), DType.FLOAT32, CPU).inputs()
    q, k, v = (tensor.double() for tensor in (x.q, x.k, x.v))
    weights = (q @ k.mT * 0.25).softmax(-1)
    for operands, rounded in ((None, weights), (torch.bfloat16, weights.bfloat16().double())):
        torch.testing.assert_close(reference(x.q, x.k, x.v, None, 0.25, operands=operands).out, rounded @ v)


def test_a_distance_that_is_nan_is_the_largest() -> None:
    check = make_check(SMALL, BACKWARD)
    results = kernel(SMALL, BACKWARD, poke("dk", torch.nan))(check.inputs)
    assert max(distances(check, results).values()) == torch.inf


def test_one_element_is_enough_where_the_mean_is_good() -> None:
    """Elements of float32 are about 1, the error of SDPA 1e-6; the mean hides 3e-5."""

    def damage(results: Outputs) -> None:
        results["out"][0, 0, 3, 5] += 3e-5

    with pytest.raises(WrongResult, match=r"out: error rms .* worst 3\.00e-05") as caught:
        verify(make_check(SMALL, FORWARD), kernel(SMALL, FORWARD, damage))
    rms, limit = map(float, re.findall(r"rms (\S+) \(limit (\S+)\)", str(caught.value))[0])
    assert rms < limit


def test_a_large_case_is_sampled() -> None:
    length = 1100
    edge = torch.tensor([0, 700]).repeat_interleave(torch.tensor([700, 400])).int()
    spans = Spans(edge, torch.where(edge == 0, 700, length).int())
    case = Case("two documents", 1, 6, 2, length, length, 32, DType.FLOAT32, spans, 700**2 + 400**2, CPU)
    check = make_check(case, BACKWARD)
    assert check.heads_kv == 1
    assert check.rows.numel() < 300
    assert {0, length - 1} <= set(check.rows.tolist())
    assert not check.inputs.dout[:, :, 1:-1].any(-1).all()
    verify(check, kernel(case, BACKWARD, lambda results: None))

    def leak(results: Outputs) -> None:
        row = next(i for i in range(length) if i not in set(check.rows.tolist()))
        results["dq"][0, -1, row] = 1e-9  # of a head that is not sampled, too

    with pytest.raises(WrongResult, match="dq: rows whose dout is zero"):
        verify(check, kernel(case, BACKWARD, leak))


@pytest.mark.parametrize(("batch", "whole"), [(2, True), (64, False)])
def test_many_heads_are_sampled(batch: int, whole: bool) -> None:
    """Else a search of 16 x 1024 with 128 heads would begin with seconds of float64."""
    case = causal_case("causal/512", (batch, 4, 2, 512, 8), DType.FLOAT32, CPU)
    check = make_check(case, FORWARD)
    assert check.heads_kv == (2 if whole else 1)
    assert (check.rows.numel() == 512) == whole


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_masks_for_each_head_are_those_of_the_sampled_heads(
    sampled: bool, heads: int, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of each kv head or q head, and bool tensors of each q head. Every right kernel was rejected."""
    if sampled:
        monkeypatch.setattr(sys.modules[verify.__module__], "WHOLE", 0)
    spans = unions(64, 64, 2, "cpu", (1, heads))
    masks: tuple[Any, ...] = (spans,)
    if heads == 4:
        text = attnforge.masks.mask_mod(lambda b, h, i, j: i + h >= j, 64, 64, "cpu").text
        masks = (
            spans,
            DenseMask(spans.visible(64, 64)),
            FunctionMask(text, (), 64, 64, "cpu", batch=2, heads=4),
        )
    for mask in masks:
        case = replace(causal_case("causal/64", (2, 4, 2, 64, 8), DType.FLOAT32, CPU), mask=mask)
        check = make_check(case, direction)
        assert check.heads_kv == (1 if sampled else 2)
        verify(check, kernel(case, direction, lambda results: None))


def test_a_large_element_may_be_rounded_where_that_of_sdpa_was_not_wrong() -> None:
    check = make_check(causal_case("causal/64", (1, 4, 2, 64, 64), DType.BFLOAT16, CPU), BACKWARD)
    check = replace(check, peer=dict.fromkeys(check.peer, (1.0, 0.0)))
    largest = float(check.exact["dk"].abs().max())

    def off_by(share: float) -> Callable[[Inputs], Outputs]:
        def call(x: Inputs) -> Outputs:
            results = {name: check.exact[name].flatten(1, -3) for name in ("dq", "dk", "dv")}
            return {name: value + (name == "dk") * share * largest for name, value in results.items()}

        return call

    verify(check, off_by(2.0**-9))
    with pytest.raises(WrongResult, match="dk: error"):
        verify(check, off_by(2.0**-8))


@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 4), (2, 2)], ids=str)
def test_odd_cases_take_the_same_kernels(planes: tuple[int, int]) -> None:
    """Spans of several intervals and planes keep their form, so that what is verified is what is timed."""
    case = replace(
        dense_case(DType.FLOAT32), batch=2, heads_q=4, heads_kv=2, mask=unions(300, 300, 2, "cpu", planes)
    )
    for direction in Direction:
        problem = case.problem(direction, Arch.CPU)
        assert (problem.intervals, problem.planes) == (2, int(planes != (1, 1)))
        assert odd_case(case).problem(direction, Arch.CPU) == problem
    odd = odd_case(case).mask
    assert isinstance(odd, attnforge.Spans)
    assert not odd.visible(333, 333).any(-1).all()


def test_the_odd_case_of_a_function_is_its_first_pairs() -> None:
    """The kernel is that of its text, and its tensors have no elements for others."""
    case = function_case()
    odd = odd_case(case)
    for direction in Direction:
        assert "kv_idx != h" in case.problem(direction, Arch.CPU).mask_mod
        assert odd.problem(direction, Arch.CPU) == case.problem(direction, Arch.CPU)
    assert isinstance(case.mask, FunctionMask)
    assert isinstance(odd.mask, FunctionMask)
    seen = case.mask.visible(case.seq_q, case.seq_k, "cpu", case.batch, case.heads_q)
    first = odd.mask.visible(odd.seq_q, odd.seq_k, "cpu", odd.batch, odd.heads_q)
    assert (odd.seq_q, odd.seq_k) == (min(333, case.seq_q), min(401, case.seq_k))
    assert torch.equal(first, seen[: odd.batch, : odd.heads_q, : odd.seq_q, : odd.seq_k])


def test_odd_cases_have_hidden_rows_and_keys() -> None:
    spans = odd_case(make_case("finetune/0", "0.5B", DType.FLOAT32, CPU)).mask
    assert isinstance(spans, Spans)
    seen = spans.visible(333, 333)
    assert (~seen.any(0)).any()
    assert (~seen.any(1)).any()
    assert not seen.all(1).any()
    assert 0.2 < seen.float().mean() < 0.6
    causal = odd_case(SMALL)
    assert causal.seq_q - causal.seq_k == 68, "queries that see no key"
