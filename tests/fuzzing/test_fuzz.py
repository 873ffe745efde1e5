"""A slice of the random problems, the same at every run, and proof that their checks notice mistakes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from fuzz_data import Data, data
from fuzz_exact import answer, complaints, plain, typical
from fuzz_problems import CASES, LATER, MISSING, Problem, problem, without
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

SLICE = 40  # cases of each of FAMILIES
FAMILIES = 4


@pytest.mark.parametrize("index", range(FAMILIES))
def test_random_problems(index: int) -> None:
    for seed in islice(fuzz.seeds(0, FAMILIES), index, SLICE * FAMILIES, FAMILIES):
        case = without(problem(seed, "cpu"), MISSING)
        said = fuzz.check(case)
        assert not said, f"{case}: {said}; python tests/fuzzing/fuzz.py --device cpu --replay {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_random_problems_on_a_gpu(index: int) -> None:
    for seed in islice(fuzz.seeds(0, 12), index, 20 * 12, 12):
        case = without(problem(seed, "cuda"), MISSING)
        said = fuzz.check(case)
        assert not said, f"{case}: {said}; python tests/fuzzing/fuzz.py --device cuda --replay {seed}"


def test_a_seed_is_a_problem() -> None:
    for seed in (0, 7, 3 * CASES + 5):
        case = problem(seed, "cpu")
        assert case == problem(seed, "cpu")
        first, second = data(case), data(case)
        for name in ("q", "k", "v", "dout", "seen"):
            one, other = getattr(first, name), getattr(second, name)
            assert one.stride() == other.stride()
            assert torch.equal(one, other)


def test_every_feature_is_drawn_and_can_be_left_out() -> None:
    cases = [problem(seed, "cpu") for seed in islice(fuzz.seeds(0, 24), 3000)]
    features: dict[str, Callable[[Problem], bool]] = {
        "empties": lambda case: 0 in (case.batch, case.seq_q, case.seq_k),
        "lse gradient": lambda case: case.lse_grad,
        "huge values": lambda case: case.values == "huge",
        "overwritten masks": lambda case: case.overwrite,
    }
    assert set(features) == set(LATER)
    for name, has in features.items():
        assert any(map(has, cases))
        assert not any(has(without(case, (name,))) for case in cases)
    assert {case.wrap for case in cases} == {"plain", "autocast", "compile"}
    assert {case.way for case in cases} == {"attention", "flash_attn_func", "flash_attn_varlen_func", "sdpa"}
    assert {case.family.mask for case in cases} == {"full", "causal", "spans", "dense"}


# ---- What the checks notice

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V, DOUT = (torch.randn(1, 2, 150, 64, generator=GENERATOR).bfloat16() for _ in range(4))
SEEN = torch.ones(150, 150, dtype=torch.bool).tril()
SEEN[5] = False


def notices(found: dict[str, Tensor]) -> list[str]:
    right = answer((Q, K, V), SEEN, 0.125, DOUT)
    return complaints(found, right, plain((Q, K, V), SEEN, 0.125, DOUT), V.abs().max().item())


def test_rounding_is_no_mistake() -> None:
    assert notices(plain((Q, K, V), SEEN, 0.125, DOUT)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_expected_error_is_that_of_many_results(dtype: torch.dtype) -> None:
    """Where many elements share the error, one result is as good as many."""
    inputs, dout = (Q.to(dtype), K.to(dtype), V.to(dtype)), DOUT.to(dtype)
    right, one = answer(inputs, SEEN, 0.125, dout), plain(inputs, SEEN, 0.125, dout)
    expected = typical(inputs, SEEN, 0.125, dout, None, right)
    for name in ("out", "dq", "dk", "dv"):
        rms = (one[name].double() - right.exact[name]).square().mean().sqrt().item()
        assert 0.9 < expected[name] / rms < 1.3, name


def test_luck_of_one_row_is_no_mistake() -> None:
    """Case 102300139 as a GPU computed it: one row's out, close to the middle of two bf16, makes dk's error.

    Weights relative to the maximum of the first keys round that out down, those relative to the row's maximum up.
    """
    case = torch.load(Path(__file__).with_name("data") / "fuzz_102300139.pt")
    inputs = case["q"], case["k"], case["v"]
    bits = case["seen"][:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    seen, dout, found = bits.view(256, 256).bool(), case["dout"], {"dk": case["dk"]}
    right, theirs = answer(inputs, seen, 1.0, dout), plain(inputs, seen, 1.0, dout)
    limit = inputs[2].abs().max().item()

    def expected() -> dict[str, float]:
        return typical(inputs, seen, 1.0, dout, None, right)

    assert ["dk: rms error 0.00311" in x for x in complaints(found, right, theirs, limit)] == [True]
    assert not complaints(found, right, theirs, limit, expected)
    wrong = {"dk": case["dk"] * (1 + 2**-6)}
    assert complaints(wrong, right, theirs, limit, expected)


def one_element(found: dict[str, Tensor]) -> None:
    found["dk"][0, 1, 70, 3] += 0.05


def not_a_number(found: dict[str, Tensor]) -> None:
    found["dv"][0, 0, 149, 63] = torch.nan


def a_blind_row(found: dict[str, Tensor]) -> None:
    found["dq"][0, 1, 5, 0] = 1e-30


def lse_of_a_blind_row(found: dict[str, Tensor]) -> None:
    found["lse"][0, 1, 5] = -1e30


def biased(found: dict[str, Tensor]) -> None:
    found["out"] *= 1 + 2**-7


@pytest.mark.parametrize("spoil", [one_element, not_a_number, a_blind_row, lse_of_a_blind_row, biased])
def test_a_wrong_result_is_noticed(spoil: Callable[[dict[str, Tensor]], None]) -> None:
    found = {name: x.clone() for name, x in plain((Q, K, V), SEEN, 0.125, DOUT).items()}
    spoil(found)
    assert notices(found)


def shifted() -> Tensor:
    """Every row sees one key more."""
    return torch.ones(150, 150, dtype=torch.bool).tril(1).index_fill(0, torch.tensor(5), False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_mask_or_scale_is_noticed(dtype: torch.dtype) -> None:
    inputs = Q.to(dtype), K.to(dtype), V.to(dtype)
    right = answer(inputs, SEEN, 0.125, DOUT.to(dtype))
    theirs = plain(inputs, SEEN, 0.125, DOUT.to(dtype))
    limit = inputs[2].abs().max().item()
    assert not complaints(theirs, right, theirs, limit)
    assert complaints(plain(inputs, shifted(), 0.125, DOUT.to(dtype)), right, theirs, limit)
    assert complaints(plain(inputs, SEEN, 0.127, DOUT.to(dtype)), right, theirs, limit)


def test_a_write_outside_of_results_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = without(problem(0, "cpu"), LATER)
    compute = fuzz.compute

    def spoil(case: Problem, x: Data) -> dict[str, Tensor]:
        found = compute(case, x)
        x.k.untyped_storage()[0] ^= 1
        return found

    monkeypatch.setattr(fuzz, "compute", spoil)
    assert any("memory around it was written" in sentence for sentence in fuzz.check(case))


def test_a_backward_that_varies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (s for s in fuzz.seeds(0, 4) if (p := problem(s, "cpu")).deterministic and p.mode == "grad")
    case = without(problem(next(seeds), "cpu"), LATER)
    grad, calls = torch.autograd.grad, []

    def varying(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        return tuple(x * (1 + len(calls) * 2**-6) for x in grad(*arguments, **named))

    monkeypatch.setattr(torch.autograd, "grad", varying)
    assert any("deterministic" in sentence for sentence in fuzz.check(case))
