"""What the launcher takes for the same class of calls (runtime/native/router.h), and what it passes on of a new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnforge
from attnforge.codegen.spec import Direction, Spec
from attnforge.runtime import choosing, dispatch, kernels
from attnforge.runtime.call import Call


class Seen(Exception):
    """Raised in place of compiling a kernel."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The call of each choice of a variant. Nothing is known at the start."""
    dispatch.forget()
    calls: list[Call] = []
    choose = dispatch.choose

    def recorded(call: Call, *rest: Any) -> choosing.Choice:
        calls.append(call)
        return choose(call, *rest)

    monkeypatch.setattr(dispatch, "choose", recorded)
    return calls


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(spec: Spec, _device: torch.device) -> int:
        raise Seen(spec.slug)

    monkeypatch.setattr(kernels, "load", load)


def rows(count: int, columns: int = 64, heads: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, heads, count, columns, dtype=dtype)


def test_lengths_of_one_octave_share_a_choice(asked: list[Call]) -> None:
    for count, choices in ((65, 1), (100, 1), (300, 2), (120, 2), (511, 2), (512, 3)):
        q = rows(count)
        attnforge.attention(q, q, q)
        assert len(asked) == choices, count
    assert [call.size for call in asked] == [65, 300, 512]


@pytest.mark.parametrize("backward", [False, True])
def test_each_gqa_ratio_has_a_choice_of_its_own(backward: bool, asked: list[Call]) -> None:
    q = rows(65, heads=4).requires_grad_(backward)
    for heads_kv in (4, 2, 1, 2):
        k = rows(65, heads=heads_kv)
        out = attnforge.attention(q, k, k)
        if backward:
            out.sum().backward()
    found = [call.group for call in asked if (call.problem.direction is Direction.BACKWARD) == backward]
    assert found == [1, 2, 4]


def test_deterministic_backwards_have_a_choice_of_their_own(asked: list[Call]) -> None:
    q = rows(65).requires_grad_()
    for deterministic in (False, True, False, True):
        attnforge.attention(q, q, q, deterministic=deterministic).sum().backward()
    backwards = [call.deterministic for call in asked if call.problem.direction is Direction.BACKWARD]
    assert backwards == [False, True]


@pytest.mark.usefixtures("uncompiled")
def test_a_choice_gets_the_gqa_ratio_and_the_rows_of_q(asked: list[Call]) -> None:
    k = rows(130, heads=2)
    with pytest.raises(Seen):
        attnforge.attention(rows(65, heads=6), k, k)
    (call,) = asked
    assert (call.problem.head_dim, call.group, call.size) == (64, 3, 65)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("backward", [False, True])
def test_a_choice_gets_the_rounds_and_which_backwards_are_deterministic(
    backward: bool, asked: list[Call]
) -> None:
    """A forward always sums in a fixed order, so that nothing has to be converted."""
    cpu = torch.device("cpu")
    with pytest.raises(Seen):
        dispatch.resolve(backward, torch.float32, 64, 64, 0, 1, 1, 65, 65, 4, cpu, True, 0, rounds=3)
    (call,) = asked
    assert (call.deterministic, call.rounds) == (backward, 3)


@pytest.mark.usefixtures("uncompiled")
def test_alignment_is_that_of_rows_and_of_where_they_start(asked: list[Call]) -> None:
    """bf16, 41 columns: rows of 82 bytes, rows of 84 bytes, and those two bytes later."""
    memory = torch.randn(65 * 42 + 2).bfloat16()
    for row, start, align in ((41, 0, 2), (42, 0, 4), (42, 1, 2), (42, 2, 4)):
        x = memory.as_strided((1, 1, 65, 41), (65 * row, 65 * row, row, 1), start)
        with pytest.raises(Seen, match=f"_a{align}_"):
            attnforge.attention(x, x, x)
        assert asked[-1].problem.align == align


def test_rows_beyond_int_arithmetic_are_refused() -> None:
    k = rows(8, 1)
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**30, 1)
    with pytest.raises(ValueError, match=r"^q: got 1073741824 rows"):
        attnforge.attention(q, k, k)
    with pytest.raises(ValueError, match=r"^k: got 1073741824 rows"):
        attnforge.attention(k, q, q)
