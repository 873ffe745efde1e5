"""Bad arguments: each gives one error that names the argument, says what was given and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attnforge
from attnforge.runtime import ops

S, D = 12, 64


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def vector(length: int = S, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(length, dtype=dtype)


@dataclass(frozen=True)
class Bad:
    """One call: what differs from a good one, and what the error must say."""

    message: str
    change: Callable[[], dict[str, Any]] = field(repr=False)
    error: type[Exception] = ValueError
    eager_only: bool = False


BAD = [
    Bad("q: got dtype torch.float64", lambda: {"q": tensor(1, 4, S, D, dtype=torch.float64)}),
    Bad("q: got dtype torch.int32", lambda: {n: tensor(1, 2, S, D, dtype=torch.int32) for n in "qkv"}),
    Bad("k: got dtype torch.bfloat16, but q has torch.float32", lambda: {"k": tensor(1, 2, S, D).bfloat16()}),
    Bad("v: got dtype torch.bfloat16, but q has torch.float32", lambda: {"v": tensor(1, 2, S, D).bfloat16()}),
    Bad(
        "got dtype torch.float16, accepted on the CPU are torch.float32 and torch.bfloat16",
        lambda: {n: tensor(1, 2, S, D, dtype=torch.float16) for n in "qkv"},
        eager_only=True,
    ),
    Bad(r"q: got 3 dimensions, .*x?.transpose\(0, 1\)\[None\]", lambda: {"q": tensor(4, S, D)}),
    Bad("k: got 5 dimensions", lambda: {"k": tensor(1, 1, 2, S, D)}),
    Bad("q: heads_q is 0", lambda: {"q": tensor(1, 0, S, D)}),
    Bad("k: heads_kv is 0", lambda: {"k": tensor(1, 0, S, D), "v": tensor(1, 0, S, D)}),
    Bad("q: got stride 12 along head_dim", lambda: {"q": tensor(1, 4, D, S).mT}),
    Bad("k: got stride 2 along head_dim", lambda: {"k": tensor(1, 2, S, 2 * D)[..., ::2]}),
    Bad("v: got stride 0 along head_dim", lambda: {"v": tensor(1, 2, S, 1).expand(1, 2, S, D)}),
    Bad("q: got 5 heads, expected a multiple of the 2 heads", lambda: {"q": tensor(1, 5, S, D)}),
    Bad("k: got batch 3, expected the batch of q, 1", lambda: {n: tensor(3, 2, S, D) for n in "kv"}),
    Bad("k: got head_dim 32, expected the head_dim of q, 64", lambda: {n: tensor(1, 2, S, 32) for n in "kv"}),
    Bad("v: got shape .*, expected that of k but for head_dim", lambda: {"v": tensor(1, 2, S + 1, D)}),
    Bad("v: got shape .*, expected that of k but for head_dim", lambda: {"v": tensor(1, 4, S, D)}),
    Bad("q: got head_dim 513, accepted are 1 to 512", lambda: {n: tensor(1, 2, S, 513) for n in "qkv"}),
    Bad("v: got head_dim 520, accepted are 1 to 512", lambda: {"v": tensor(1, 2, S, 520)}),
    Bad("scale: got nan", lambda: {"scale": float("nan")}),
    Bad("scale: got inf", lambda: {"scale": float("inf")}),
    Bad("scale: got 0.0", lambda: {"scale": 0.0}),
    Bad("scale: got 1e[+]300, expected a number above 0 that float32 holds", lambda: {"scale": 1e300}),
    Bad("scale: got 1e-50, expected a number above 0 that float32 holds", lambda: {"scale": 1e-50}),
    Bad("scale: got bool, expected a number", lambda: {"scale": True}, TypeError),
    Bad("scale: got -0.5", lambda: {"scale": -0.5}),
    Bad(
        "mask: has 13 keys, but k has 12 rows",
        lambda: {"mask": attnforge.Spans(vector(13), vector(13))},
    ),
    Bad(
        "mask: has shape .1, 1, 12, 13., expected",
        lambda: {"mask": attnforge.DenseMask(tensor(S, 13, dtype=torch.bool))},
    ),
    Bad(
        "mask: has shape .1, 1, 13, 12., expected",
        lambda: {"mask": attnforge.DenseMask(tensor(13, S, dtype=torch.bool))},
    ),
    Bad("mask: got str, accepted are", lambda: {"mask": "causal"}, TypeError),
    Bad("mask: got (Fake)?Tensor, accepted are", lambda: {"mask": tensor(S, S)}, TypeError),
    Bad("mask: got type, accepted are", lambda: {"mask": attnforge.Causal}, TypeError),
]


def call(changes: dict[str, Any]) -> Any:
    good: dict[str, Any] = {
        "q": tensor(1, 4, S, D),
        "k": tensor(1, 2, S, D),
        "v": tensor(1, 2, S, D),
        "mask": None,
    }
    return attnforge.attention(**(good | changes))


def test_the_good_call() -> None:
    assert call({}).shape == (1, 4, S, D)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.message)
def test_eager(bad: Bad) -> None:
    with pytest.raises(bad.error, match=bad.message):
        call(bad.change())


@pytest.mark.parametrize("bad", [b for b in BAD if not b.eager_only], ids=lambda bad: bad.message)
def test_under_fake_tensors(bad: Bad) -> None:
    with FakeTensorMode(), pytest.raises(bad.error, match=bad.message):
        call(bad.change())


def test_no_argument_that_there_is_not() -> None:
    x = tensor(1, 2, S, D)
    with pytest.raises(TypeError, match="dropout_p"):
        attnforge.attention(x, x, x, dropout_p=0.1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("starts", "ends", "error", "message"),
    [
        ([0, 1], vector(2), TypeError, "starts: got list"),
        (vector(2), None, TypeError, "ends: got NoneType"),
        (
            vector(2, torch.int64),
            vector(2),
            ValueError,
            r"starts: got dtype torch.int64, .*\.to\(torch.int32\)",
        ),
        (vector(2), vector(2).float(), ValueError, "ends: got dtype torch.float32"),
        (vector(4).view(2, 1, 2), vector(4), ValueError, r"starts: got shape \(2, 1, 2\)"),
        (vector(4), vector(5), ValueError, "ends: got length 5, expected the length of starts, 4"),
        (vector(4), vector(4).to("meta"), ValueError, "ends: is on meta, but starts is on cpu"),
    ],
)
def test_spans(starts: Any, ends: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attnforge.Spans(starts, ends)


def test_visible_of_a_wrong_length() -> None:
    with pytest.raises(ValueError, match="has 3 keys, but there are 4"):
        attnforge.Spans(vector(3), vector(3)).visible(4, 4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dout", tensor(1, 4, S, 32), "dout: got"),
        ("dout", tensor(1, 4, S, D).bfloat16(), "dout: got"),
        ("out", tensor(1, 4, S + 1, D), "out: got"),
        ("lse", tensor(1, 4, S, 1), "lse: got"),
        ("lse", tensor(1, 4, S).double(), "lse: got"),
        ("q", tensor(1, 3, S, D), "q: got 3 heads"),
    ],
)
def test_backward(name: str, value: Tensor, message: str) -> None:
    good: dict[str, Any] = {n: tensor(1, 4, S, D) for n in ("dout", "q", "out")}
    good |= {"k": tensor(1, 2, S, D), "v": tensor(1, 2, S, D), "lse": tensor(1, 4, S), "mask": None}
    ops.backward(**good)
    with pytest.raises(ValueError, match=message):
        ops.backward(**(good | {name: value}))


def test_handles() -> None:
    from attnforge.codegen.space import candidates
    from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
    from attnforge.runtime import kernels

    x = tensor(1, 2, S, D)
    for handle in (-1, 10**6):
        with pytest.raises(ValueError, match="variant: got handle"):
            ops.forward(x, x, x, None, None, handle)
    problem = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, D, Mask.FULL, 4)
    handle = kernels.load(next(candidates(problem)), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"variant: fwd_cpu_fp32_d64_full.* does not fit this call"):
        ops.forward(x, x, x, attnforge.Causal(), None, handle)
    aligned = kernels.load(next(candidates(replace(problem, dtype=DType.BFLOAT16))), torch.device("cpu"))
    memory = torch.zeros(x.numel() + 1, dtype=torch.bfloat16)
    even, odd = memory[:-1].view(x.shape), memory[1:].view(x.shape)
    ops.forward(even, even, even, None, None, aligned)
    with pytest.raises(ValueError, match=r"does not fit this call \(.*, rows aligned to 2 bytes"):
        ops.forward(odd, odd, odd, None, None, aligned)
    gpu = Problem(Direction.FORWARD, Arch.SM80, DType.BFLOAT16, D, Mask.FULL, 16)
    with pytest.raises(ValueError, match="is for sm80, but cpu runs cpu"):
        kernels.load(next(candidates(gpu)), torch.device("cpu"))


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its kernels are not loaded twice."""
    from attnforge.codegen.space import candidates
    from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
    from attnforge.runtime import kernels
    from attnforge.runtime.build.settings import settings

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    found = [str(kernels.with_index(torch.device(name))) for name in ("cuda", "cuda:1", "cpu")]
    assert found == ["cuda:3", "cuda:1", "cpu"]
    spec = next(candidates(Problem(Direction.FORWARD, Arch.SM80, DType.BFLOAT16, D, Mask.FULL, 16)))
    monkeypatch.setattr(kernels, "_handles", {(spec, torch.device("cuda:3"), settings().chaos): 77})
    assert kernels.load(spec, torch.device("cuda")) == 77


@pytest.mark.gpu
def test_mixed_devices() -> None:
    good: dict[str, Any] = {n: tensor(1, 2, S, D).bfloat16().cuda() for n in "qkv"}
    for name, message in (
        ("q", "k: is on cuda:0, but q is on cpu"),
        ("k", "k: is on cpu"),
        ("v", "v: is on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            call(good | {name: good[name].cpu()})
    with pytest.raises(ValueError, match="mask: is on cpu, but q is on cuda:0"):
        call(good | {"mask": attnforge.Spans(vector(), vector())})
