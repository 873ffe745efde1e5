"""Functions of masks on the CPU: results and gradients against float64, tracing, schedules, compilation, refusals."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mask_functions import functions, visible
from oracle import Shape, check, draw
from score_oracle import attended, compare, learned, learned_oracle, oracle
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks
from torch.testing import assert_close

import attnforge
from attnforge import masks, scores
from attnforge.codegen.formula_program import ScoreError
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.masks import FunctionMask
from attnforge.runtime.score_trace import MaskFunction

SHAPE = Shape(131, 203, 16, 2, 2, 2)


def mask_of(name: str, shape: Shape = SHAPE) -> FunctionMask:
    return masks.mask_mod(functions(shape)[name], shape.seq_q, shape.seq_k, "cpu")


@pytest.mark.parametrize("name", functions(SHAPE))
def test_the_pairs_are_those_of_the_function(name: str) -> None:
    """What the trace shows, by which `check` judges kernels, is what the function itself shows."""
    seen = mask_of(name).visible(SHAPE.seq_q, SHAPE.seq_k, batch=SHAPE.batch, heads=4)
    assert torch.equal(seen.expand(2, 4, -1, -1), visible(functions(SHAPE)[name], SHAPE))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("documents", torch.float32),
        ("heads", torch.float32),
        ("nothing", torch.float32),
        ("blocks", torch.bfloat16),
    ],
    ids=str,
)
def test_results(name: str, dtype: torch.dtype) -> None:
    check(draw(SHAPE, dtype, "cpu"), mask_of(name))


ONE_OR_NONE = torch.arange(64, dtype=torch.int32) % 2
EQUAL = torch.rand(64, generator=torch.Generator().manual_seed(1)).round(decimals=1)
# What C++ leaves undefined, or may round otherwise than torch; kernels also compute behind the last query.
EXACTLY: dict[str, MaskFunction] = {
    "hash": lambda b, h, i, j: ((j * 1013904223 + 12345) % 7 < 3) & (j <= i),
    "overflow of a sum": lambda b, h, i, j: (j + 2147483600 < 0) | (i == j),
    "0 behind the last query": lambda b, h, i, j: (j // (60 - i)) % 2 == 0,
    "-1 behind the last query": lambda b, h, i, j: (-2147483648 + 0 * j) // (59 - i - (i == 59).int()) < j,
    "truncated": lambda b, h, i, j: (
        torch.div((i - j) * 16777259, 16777258 + j, rounding_mode="trunc") == i - j
    ),
    "shifts": lambda b, h, i, j: ((1 << (j % 40)) > i) & (((i - j) >> 40) == -1),
    "quotients": lambda b, h, i, j: torch.floor(i / 41.0) == torch.floor(j / 41.0),
    "products": lambda b, h, i, j: EQUAL[i] * EQUAL[i] - EQUAL[j] * EQUAL[j] == 0,
    "constants": lambda b, h, i, j: i - j > 2 * torch.full((), 2.5, dtype=torch.int32),
    "powers": lambda b, h, i, j: (((i - j) * 9001) ** 5 % 7 < 3) & ((i - j) ** 1 > 5 * (i + j) ** 0),
    "a power by a float": lambda b, h, i, j: ((i - j) * 3000) ** 2.0 < 6e9,
    "filled": lambda b, h, i, j: i.masked_fill(j % 2 == 0, 7.9) < 7.5,
    "relu of an index": lambda b, h, i, j: EQUAL[torch.relu(i - j)] > 0.5,
}


@pytest.mark.parametrize("name", EXACTLY)
def test_kernels_decide_as_torch(name: str) -> None:
    """Pair by pair: v is the identity."""
    index = torch.arange(60, dtype=torch.int32)
    mask = masks.mask_mod(EXACTLY[name], 60, 60, "cpu")
    scalar = torch.zeros((), dtype=torch.int32)
    exact = EXACTLY[name](scalar, scalar, index[:, None], index).expand(60, 60)
    q, v = torch.zeros(1, 1, 60, 60), torch.eye(60)[None, None]
    assert torch.equal(attnforge.attention(q, q, v, mask)[0, 0] > 0, exact)
    assert torch.equal(mask.visible(60, 60), exact)


def test_integers_divided_by_0() -> None:
    """Functions are traced at index 0, where torch divides by 0 and raises; in kernels such a pair gives 0."""
    index = torch.arange(60, dtype=torch.int32)
    dividing: tuple[MaskFunction, ...] = (
        lambda b, h, i, j: (i % j == 0) & (i // j < 9),
        lambda b, h, i, j: (i % ONE_OR_NONE[j] == 0) & (torch.div(-i, j, rounding_mode="trunc") > -9),
    )
    none = torch.zeros((), dtype=torch.int32)
    for function in dividing:
        mask = masks.mask_mod(function, 60, 60, "cpu")
        seen = mask.visible(60, 60)
        assert seen[:, 0].all()
        assert torch.equal(seen[:, 1::2], function(none, none, index[:, None], index[1::2]))
        q, v = torch.zeros(1, 1, 60, 60), torch.eye(60)[None, None]
        assert torch.equal(attnforge.attention(q, q, v, mask)[0, 0] > 0, seen)


def test_powers_of_2() -> None:
    """int32 that wraps around, as in torch; by `pow` they would be floats, which `%` does not take."""

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j % (2 ** (i % 5)) == 0) & (2 ** (i - 9) <= j)

    i, j = (x.flatten().int() for x in torch.meshgrid(torch.arange(50), torch.arange(50), indexing="ij"))
    seen = torch.vmap(function)(i * 0, i * 0, i, j).view(50, 50)
    assert torch.equal(masks.mask_mod(function, 50, 50, "cpu").visible(50, 50), seen)


def test_strides_of_axes_that_have_one_element() -> None:
    """They are never used, and may be anything; on a CPU others may be, too."""
    table = torch.as_strided(torch.rand(9), (1, 9), (1 << 31, 1))
    mask = FunctionMask("a(t0: float32[2]): t0[b, q_idx] > t0[b, kv_idx]", (table,), 9, 9, "cpu")
    q, v = torch.zeros(1, 1, 9, 9), torch.eye(9)[None, None]
    assert torch.equal(attnforge.attention(q, q, v, mask)[0, 0] > 0, table[0, :, None] > table[0])


def test_with_a_score() -> None:
    """Both read tensors: those of the score come first."""
    slopes = torch.rand(4)
    score = scores.score_mod(lambda s, b, h, i, j: 3 * torch.tanh(s / 3) - slopes[h] * (i - j).abs())
    x = draw(SHAPE, torch.float32, "cpu")
    seen = attnforge.DenseMask(visible(functions(SHAPE)["documents"], SHAPE))
    exact = oracle(
        x.q,
        x.k,
        x.v,
        seen,
        lambda s, b, h, i, j: 3 * torch.tanh(s / 3) - slopes[h] * (i - j).abs(),
        x.dout,
    )
    compare(attended(x.q, x.k, x.v, mask_of("documents"), score, x.dout), exact, 3e-6)


def test_with_a_learned_score() -> None:
    """Gradients of the score's tensors, which come before those of the mask; also of compiled code."""
    x, mask = draw(SHAPE, torch.float32, "cpu"), mask_of("documents")
    make, formula, tensors = learned(SHAPE.batch, 4, SHAPE.seq_q, SHAPE.seq_k)["sharpened"]
    seen = attnforge.DenseMask(visible(functions(SHAPE)["documents"], SHAPE))
    exact = learned_oracle(x.q, x.k, x.v, seen, formula, tensors, x.dout)
    score, inputs = make(*tensors), (x.q, x.k, x.v, *tensors)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnforge.attention(q, k, v, mask, score=score)

    out, lse = attnforge.attention(x.q, x.k, x.v, mask, score=score, return_lse=True)
    ours = torch.autograd.grad(out, inputs, x.dout)
    for got, answer in zip(ours, exact, strict=True):
        assert (got.double() - answer).abs().max() <= 2e-5 * answer.abs().max()
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v)
    for got, answer in zip(torch.autograd.grad(whole, inputs, x.dout), ours, strict=True):
        assert_close(got, answer)
    text = re.sub(r"(t\d: float32\[\d\])", r"\1 grad", score.text)
    captured = tuple(t.detach() for t in (*score.tensors, *mask.tensors))
    q, k, v, out, lse = (t.detach() for t in (x.q, x.k, x.v, out, lse))
    arguments = (x.dout, q, k, v, out, lse, mask.data, 3, None, False, 0, None, 0, text, *captured, mask.text)
    torch.library.opcheck(torch.ops.attnforge.score_backward.default, arguments)


def test_what_a_function_becomes() -> None:
    flag, ids = torch.rand(9) < 0.5, torch.arange(9)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    def text(function: MaskFunction) -> str:
        return masks.mask_mod(function, 9, 9, "cpu").text

    assert text(causal) == "causal: q_idx >= kv_idx"
    both = text(and_masks(causal, lambda b, h, i, j: ids[i] == ids[j]))
    assert both == "and_mask(t0: int32[1]): (q_idx >= kv_idx) & (t0[q_idx] == t0[kv_idx])"
    either = text(or_masks(causal, lambda b, h, i, j: ~flag[j]))
    assert either == "or_mask(t0: int32[1]): (q_idx >= kv_idx) | (~(t0[kv_idx] != 0))"
    assert text(lambda b, h, i, j: (i > j) == (j < h)) == "lambda: (q_idx > kv_idx) == (kv_idx < h)"


class Packs:
    """Functions that are not plain ones of the indices alone."""

    def __init__(self) -> None:
        self.ids = torch.arange(9) // 3

    def method(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.ids[i] == self.ids[j]

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.method(b, h, i, j)


IDS = Packs().ids
CALLABLE: dict[str, Callable[..., Tensor]] = {
    "default": lambda b, h, i, j, ids=IDS: ids[i] == ids[j],
    "keyword": lambda b, h, i, j, *, ids=IDS: ids[i] == ids[j],
    "method": Packs().method,
    "object": Packs(),
    "partial": functools.partial(lambda ids, b, h, i, j: ids[i] == ids[j], IDS),
    "any number": lambda *at: IDS[at[2]] == IDS[at[3]],
    "wrapped": functools.wraps(Packs.method)(lambda *at: IDS[at[2]] == IDS[at[3]]),
}


@pytest.mark.parametrize("name", CALLABLE)
def test_whatever_takes_the_indices_is_traced(name: str) -> None:
    seen = masks.mask_mod(CALLABLE[name], 9, 9, "cpu").visible(9, 9)
    assert torch.equal(seen, IDS[:, None] == IDS)


def test_a_score_may_have_defaults() -> None:
    def scaled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, factor: float = 0.5) -> Tensor:
        return score * factor

    assert scores.score_mod(scaled).text == "scaled: score * 0.5"


@pytest.mark.parametrize(
    "function", [lambda b, i, j: i > j, lambda b, h, i, j, k: i > j, lambda b, h, i, j, *, k: i > j]
)
def test_what_takes_other_arguments_is_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(ScoreError, match=r"it has to take the arguments \(b, h, q_idx, kv_idx\)"):
        masks.mask_mod(function, 9, 9, "cpu")


WIDE, DOUBLES = torch.tensor([1 << 40]), torch.zeros(9, dtype=torch.float64)
PLANE = torch.zeros(2, 8, dtype=torch.int32)
REFUSED: dict[str, MaskFunction] = {
    r"mask_mod: aten.erfinv.default is not supported": lambda b, h, i, j: torch.erfinv(i * 0.1) > j,
    "slices": lambda b, h, i, j: DOUBLES[None][:, i] > j,
    "do not fit int32": lambda b, h, i, j: WIDE[i] > j,
    "float64": lambda b, h, i, j: DOUBLES[i] > j,
    r"aten.view.default of a captured tensor, \(2, 8\) to \(8, 2\)": lambda b, h, i, j: (
        PLANE.view(8, 2)[i, j] > 0
    ),
    r"aten.full.default of shape \(2,\)": lambda b, h, i, j: (i > torch.full((2,), 1))[0],
    "an integer is divided by the constant 0": lambda b, h, i, j: i % 0 == j,
    "an integer to the power of an index or tensor is not supported": lambda b, h, i, j: 3**i > j,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_translated_is_named(message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        masks.mask_mod(REFUSED[message], 9, 9, "cpu")


def test_wrong_arguments_are_named() -> None:
    x = draw(Shape(5, 7, 16, 1, 2, 2), torch.float32, "cpu")
    ids = torch.arange(2)
    short = masks.mask_mod(lambda b, h, i, j: ids[i] == j, 5, 7, "cpu")
    with pytest.raises(ValueError, match=r"mask_mod: q_idx takes 5 values, but axis 0 .* has 2 elements"):
        attnforge.attention(x.q, x.k, x.v, short)
    with pytest.raises(ValueError, match=r"mask: is of shape \(None, None, 7, 5\)"):
        attnforge.attention(x.q, x.k, x.v, masks.mask_mod(lambda b, h, i, j: i > j, 7, 5, "cpu"))
    with pytest.raises(ValueError, match="batch: got None, but the function of the mask depends on b"):
        mask_of("documents").visible(SHAPE.seq_q, SHAPE.seq_k)
    with pytest.raises(TypeError, match="function: got Tensor"):
        masks.mask_mod(torch.ones(5, 7), 5, 7, "cpu")  # type: ignore[arg-type]
    four = [torch.ones(5) + n for n in range(4)]
    many = scores.score_mod(lambda s, b, h, i, j: s + four[0][i] + four[1][i] + four[2][i] + four[3][i])
    with pytest.raises(ValueError, match="capture 5 tensors, at most 4 are supported together"):
        attnforge.attention(
            x.q, x.k, x.v, masks.mask_mod(lambda b, h, i, j: ids[h] == 0, 5, 7, "cpu"), score=many
        )
    run, data = torch.ops.attnforge.forward.default, short.data
    with pytest.raises(ValueError, match="mask_mod: a function of a mask is given, but the mask is spans"):
        run(x.q, x.k, x.v, data, 2, None, mask_mod="a: q_idx > kv_idx")
    with pytest.raises(ValueError, match=r"mask: data of a function has shape \(1, 2\), expected \(1\)"):
        run(x.q, x.k, x.v, data.expand(1, 2).contiguous(), 3, None, mask_mod="a: q_idx > kv_idx")


def test_problems() -> None:
    """A function is of a dense mask, a bool, and stands in names."""
    mod = MaskMod("documents(t0: int32[1]): t0[q_idx] == t0[kv_idx]")
    problem = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.DENSE, 4, mask_mod=mod)
    assert Problem.from_json(problem.to_json()) == problem
    with pytest.raises(ValueError, match="mask_mod: needs mask dense, not causal"):
        Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.CAUSAL, mask_mod=mod)
    with pytest.raises(ScoreError, match="mask_mod: the formula gives a number, expected a bool"):
        MaskMod("a: q_idx").parsed  # noqa: B018
    with pytest.raises(ScoreError, match="mask_mod: 'score' is not supported"):
        MaskMod("a: score > 0.0").parsed  # noqa: B018


def test_schedules_and_copies() -> None:
    """Layers share schedules, calls of other sizes have their own, and so do copies."""
    x = draw(SHAPE, torch.float32, "cpu")
    mask = mask_of("heads")
    y = x.q
    for _ in range(2):
        y = attnforge.attention(y, x.k, x.v, mask)
    y.backward(x.dout)
    assert int(torch.ops.attnforge.schedule_count(mask.data)) == 2
    expected = attnforge.attention(x.q, x.k, x.v, mask)
    for other in (copy.deepcopy(mask), mask.to("cpu")):
        assert torch.equal(attnforge.attention(x.q, x.k, x.v, other), expected)
    for batch, group in ((1, 2), (2, 1)):
        check(draw(Shape(131, 203, 16, 2, group, batch), torch.float32, "cpu"), mask)
    assert int(torch.ops.attnforge.schedule_count(mask.data)) == 6


def test_the_limit_of_bits() -> None:
    """Of kernels on a GPU; those of a CPU have none."""
    before = torch.ops.attnforge.limit_bits(1 << 20)
    try:
        assert before == 40 << 20
        assert torch.ops.attnforge.limit_bits(0) == 1 << 20
        with pytest.raises(ValueError, match="bytes: got 41943041, expected 0 to 41943040"):
            torch.ops.attnforge.limit_bits((40 << 20) + 1)
        check(draw(SHAPE, torch.float32, "cpu"), mask_of("heads"))
    finally:
        torch.ops.attnforge.limit_bits(before)


def test_captured_tensors_are_copies() -> None:
    limit = torch.tensor(30.0, requires_grad=True)
    mask = masks.mask_mod(lambda b, h, i, j: i - j < limit, 9, 9, "cpu")
    limit.detach().zero_()
    assert mask.tensors[0].item() == 30
    assert not mask.tensors[0].requires_grad


def test_a_mask_of_inference_mode_trains() -> None:
    """As one that an evaluation made and keeps."""
    limit = torch.tensor(3)
    with torch.inference_mode():
        mask = masks.mask_mod(lambda b, h, i, j: i - j < limit, SHAPE.seq_q, SHAPE.seq_k, "cpu")
    check(draw(SHAPE, torch.float32, "cpu"), mask)


def test_meta_tensors() -> None:
    q = torch.empty(1, 2, 9, 16, device="meta", requires_grad=True)
    for device in ("cpu", "meta"):
        mask = masks.mask_mod(lambda b, h, i, j: IDS[i] == IDS[j], 9, 9, device).to("meta")
        out = attnforge.attention(q, q, q, mask)
        assert (out.shape, out.device.type) == (q.shape, "meta")
        out.sum().backward()
    here = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match="mask_mod: a tensor is on meta, but q is on cpu"):
        attnforge.attention(here, here, here, mask)


def test_compiled_and_checked_by_torch() -> None:
    x = draw(SHAPE, torch.float32, "cpu")
    mask = mask_of("heads")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnforge.attention(q, k, v, mask)

    inputs = (x.q, x.k, x.v)
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    assert_close(whole, call(*inputs))
    for a, b in zip(x.grads(whole), x.grads(call(*inputs)), strict=True):
        assert_close(a, b)
    arguments = (
        x.q,
        x.k,
        x.v,
        mask.data,
        3,
        None,
        True,
        0,
        0,
        "",
        *mask.tensors,
        None,
        None,
        None,
        mask.text,
    )
    torch.library.opcheck(torch.ops.attnforge.forward.default, arguments)
    torch.library.opcheck(torch.ops.attnforge.mask_of_function.default, (9, torch.device("cpu")))


def test_transforms_keep_batch_entries_apart() -> None:
    x, mask = draw(SHAPE, torch.float32, "cpu"), mask_of("heads")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    mapped = torch.func.vmap(lambda q, k, v: attnforge.attention(q[None], k[None], v[None], mask)[0])
    each = [attnforge.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask) for i in range(2)]
    assert_close(mapped(q, k, v), torch.cat(each))


def test_functions_are_traced_outside_of_transforms() -> None:
    """Inside, make_fx records constants: the mask was another one, without a word."""
    x = draw(Shape(40, 40, 16, 1, 2), torch.float32, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))

    def call(q: Tensor) -> Tensor:
        block = torch.arange(40, dtype=torch.int32) // 7  # grad's own tensor inside of it
        mask = masks.mask_mod(lambda b, h, i, j: (block[i] == block[j]) | ((i + j) % 3 == 0), 40, 40, "cpu")
        return attnforge.attention(q, k, v, mask)

    assert torch.equal(torch.func.vjp(call, q)[0], call(q))
    assert torch.equal(torch.func.functionalize(call)(q), call(q))


@pytest.mark.parametrize("transform", [torch.func.functionalize, torch.func.grad, torch.vmap])
def test_tensors_of_transforms_as_keywords(transform: Callable[..., Any]) -> None:
    """They are captured like positional ones."""
    texts = []

    def call(x: Tensor) -> Tensor:
        texts.append(scores.score_mod(lambda s, b, h, i, j: torch.add(s, other=x)).text)
        return x.sum()

    transform(call)(torch.ones(3) if transform is torch.vmap else torch.tensor(2.0))
    assert texts == ["lambda(t0: float32[1]): score + t0[0]"]


def test_tensors_of_vmap_are_refused() -> None:
    """The samples would share the tile lists of the first one."""
    blocks = torch.stack([torch.arange(9) // 2, torch.arange(9) // 4])
    with pytest.raises(ScoreError, match="differs between the samples of"):
        torch.vmap(lambda x: masks.mask_mod(lambda b, h, i, j: x[i] == x[j], 9, 9, "cpu").data)(blocks)
