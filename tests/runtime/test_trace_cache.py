"""Functions like an earlier one are not traced again; those that differ in anything that a trace can depend on are."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

import attnforge
from attnforge.codegen.formula_program import ScoreError
from attnforge.runtime import score_trace
from attnforge.runtime.score_trace import traced, traced_mask
from attnforge.runtime.trace_cache import MOST, TraceCache, describe

WINDOW = 100


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been traced, with a cache of its own."""
    found: list[Any] = []
    graph = score_trace._graph

    def counted(function: Any, leaves: Any) -> Any:
        found.append(function)
        return graph(function, leaves)

    monkeypatch.setattr(score_trace, "_traces", TraceCache())
    monkeypatch.setattr(score_trace, "_graph", counted)
    return found


def documents(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)


def window(keys: Any) -> Callable[..., Tensor]:
    return lambda b, h, i, j: i - j < keys


def test_a_new_function_around_other_tensors(traces: list[Any]) -> None:
    one, other = torch.arange(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32) // 3
    text, (first,) = traced_mask(documents(one))
    again, (second,) = traced_mask(documents(other))
    assert len(traces) == 1
    assert text == again
    assert torch.equal(first, one)
    assert torch.equal(second, other)
    other += 1  # the mask has a copy
    assert not torch.equal(second, other)


def test_a_score_reads_the_tensors_of_its_own_function(traces: list[Any]) -> None:
    def made(table: Tensor) -> Callable[..., Tensor]:
        return lambda score, b, h, i, j: score + table[h]

    tables = [torch.randn(3, requires_grad=True) for _ in range(2)]
    found = [traced(made(x)) for x in tables]
    assert len(traces) == 1
    assert found[0][0] == found[1][0]
    assert [x is y for (_, (x,)), y in zip(found, tables, strict=True)] == [True, True]
    # A gradient is part of the text.
    traced(made(tables[0].detach()))
    assert len(traces) == 2


def test_attention_traces_a_function_once(traces: list[Any]) -> None:
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    for n in range(3):
        table = torch.full((2,), float(n))
        out = attnforge.attention(q, k, v, score=lambda score, b, h, i, j: score * table[h])  # noqa: B023
        expected = torch.softmax(q @ k.mT / 4 * n, -1) @ v
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "pair",
    [
        (window(10), window(11)),
        (window(1), window(True)),
        (window(1), window(1.0)),
        (window(0.0), window(-0.0)),
        (documents(torch.zeros(4)), documents(torch.zeros(5))),
        (documents(torch.zeros(4)), documents(torch.zeros(4, dtype=torch.int32))),
        (documents(torch.zeros(4, 4)[0]), documents(torch.zeros(4, 4)[:, 0])),
        (lambda b, h, i, j: i < j, lambda b, h, i, j: i <= j),
        (lambda b, h, i, j, n=3: i - j < n, lambda b, h, i, j, n=4: i - j < n),
        (lambda b, h, i, j, *, n=3: i - j < n, lambda b, h, i, j, *, n=4: i - j < n),
        (partial(lambda n, b, h, i, j: i - j < n, 3), partial(lambda n, b, h, i, j: i - j < n, 4)),
        (and_masks(window(3), window(4)), and_masks(window(3), window(5))),
        (and_masks(window(3), window(4)), or_masks(window(3), window(4))),
    ],
)
def test_differs(pair: tuple[Callable[..., Tensor], Callable[..., Tensor]]) -> None:
    first, second = (describe(function) for function in pair)
    assert first is not None
    assert second is not None
    assert first.key != second.key
    same = describe(pair[0])
    assert same is not None
    assert first.key == same.key


def test_modes_and_facts_differ(traces: list[Any]) -> None:
    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j < 0.5 * b

    traced_mask(function)
    traced_mask(function, {"b": 0})
    with torch.inference_mode():
        traced_mask(function)
    with torch.autocast("cpu"):
        traced_mask(function)
    torch.set_default_dtype(torch.float64)
    try:
        traced_mask(function)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(traces) == 5
    traced_mask(function)
    assert len(traces) == 5


def test_globals_are_read_again(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(i: Tensor, j: Tensor) -> Tensor:
        return (lambda: i - j < WINDOW)()

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return helper(i, j)

    assert "100" in traced_mask(function)[0]
    monkeypatch.setitem(globals(), "WINDOW", 70)
    assert "70" in traced_mask(function)[0]
    assert len(traces) == 2


def test_one_tensor_in_two_places(traces: list[Any]) -> None:
    def made(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
        return lambda b, h, i, j: x[i] == y[j]

    one, other = (torch.arange(4, dtype=torch.int32) for _ in range(2))
    assert len(traced_mask(made(one, one))[1]) == 1
    assert len(traced_mask(made(one, other))[1]) == 2
    assert len(traces) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: int(x[0]),
        lambda x: x.tolist()[0],
        lambda x: x.numpy()[0].item(),
        lambda x: 3 if x[0] > 1 else 4,
        lambda x: x.nonzero().shape[0],
        lambda x: len(torch.unique(x)),
        lambda x: len(x[x > 1]),
        lambda x: x.cumsum(0)[0],
        lambda x: torch.rand(()),
        lambda x: torch.rand(()).item(),
        lambda x: x.add_(1)[0],
    ],
)
def test_what_depends_on_values_is_refused_or_traced_again(
    read: Callable[[Tensor], Any], traces: list[Any]
) -> None:
    def made(x: Tensor) -> Callable[..., Tensor]:
        return lambda b, h, i, j: i - j < read(x)

    texts = []
    for n in (1, 2):
        with suppress(ScoreError):
            texts.append(traced_mask(made(torch.full((2,), n, dtype=torch.int32)))[0])
    assert len(traces) == 2
    assert len(texts) in (0, 2)


def test_functions_with_effects_run_again(traces: list[Any]) -> None:
    calls: list[int] = []

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(1)
        return i < j

    for _ in range(2):
        traced_mask(function)
    assert len(traces) == len(calls) == 2


def test_what_has_no_description() -> None:
    config = SimpleNamespace(window=3)

    class Window:
        keys = 3

        def method(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i - j < self.keys

        def __call__(self, *args: Tensor) -> Tensor:
            return self.method(*args)

    def imports(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        import random

        return i - j < random.randint(1, 9)

    def marked(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i < j

    def assigns(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        global WINDOW
        WINDOW = 100
        return i < j

    last = None

    def remembers(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal last
        last = i
        return i < j

    marked.__dict__["keys"] = 3
    x = torch.zeros(3)
    endless: list[Any] = []
    endless.append(endless)
    functions: dict[str, Callable[..., Any]] = {
        "an object": lambda b, h, i, j: i - j < config.window,
        "a class": lambda b, h, i, j: i - j < Window.keys,
        "a method": Window().method,
        "callable": Window(),
        "imports": imports,
        "assigns a global": assigns,
        "assigns a variable": remembers,
        "globals": lambda b, h, i, j: i - j < globals()["WINDOW"],
        "attributes": marked,
        "a tensor's method": partial(x.add, 1),
        "a long list": partial(window, list(range(MOST))),
    }
    for name, function in functions.items():
        assert describe(function) is None, name
    assert describe(window(endless)) is not None
    assert describe(lambda b, h, i, j: torch.sin(i) < math.pi) is not None


def test_a_variable_without_a_value() -> None:
    def made() -> Callable[..., Tensor]:
        def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i < late

        if WINDOW < 0:
            late = 3
        return function

    assert describe(made()) is None


def test_a_limited_number_is_kept() -> None:
    cache = TraceCache()
    found = [describe(window(n)) for n in range(MOST + 1)]
    for n, description in enumerate(found):
        cache.keep(description, str(n), [])
    assert cache.find(found[0]) is None
    assert cache.find(found[1]) == ("1", [])
    assert cache.find(found[MOST]) == (str(MOST), [])
    assert cache.find(None) is None


def test_tensors_of_transforms_have_none() -> None:
    found = []

    def loss(x: Tensor) -> Tensor:
        found.append(describe(lambda score, b, h, i, j: score + x[j]))
        return x.sum()

    torch.func.grad(loss)(torch.zeros(4))
    assert found == [None]
