"""Functions of scores on the CPU: results and gradients against float64, tracing, compilation, refusals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from oracle import Shape, draw, make_mask
from score_oracle import attended, compare, functions, learned, learned_oracle, oracle
from torch import Tensor
from torch.testing import assert_close

import attnforge
from attnforge import scores
from attnforge.codegen.formula_program import ScoreError
from attnforge.codegen.score import ScoreMod
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.scores import Score

LIMIT = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
SHAPE = Shape(67, 101, 16, 2, 2, 2)


def check(name: str, dtype: torch.dtype, mask: str, shape: Shape = SHAPE) -> None:
    x = draw(shape, dtype, "cpu")
    seen = make_mask(mask, shape.seq_q, shape.seq_k, "cpu")
    score, formula = functions(shape.batch, shape.heads_kv * shape.group, shape.seq_q, shape.seq_k)[name]
    dlse = torch.linspace(-1, 1, x.q.shape[0] * x.q.shape[1] * shape.seq_q).reshape(x.q.shape[:3])
    exact = oracle(x.q, x.k, x.v, seen, formula, x.dout, dlse)
    compare(attended(x.q, x.k, x.v, seen, score, x.dout, dlse), exact, LIMIT[dtype])


@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
def test_every_mask(mask: str) -> None:
    check("mixed", torch.bfloat16, mask)


@pytest.mark.parametrize("name", ["alibi", "aligned", "bias", "relative", "softcap", "stepped"])
def test_every_score(name: str) -> None:
    check(name, torch.float32, "spans")


def test_odd_sizes() -> None:
    check("mixed", torch.float32, "causal", Shape(1, 259, 17, 1, 3, 1, 9))


def test_a_function_is_traced_at_every_call() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    slope = torch.tensor(0.5)

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * slope

    first = attnforge.attention(x.q, x.k, x.v, score=function)
    assert_close(first, attnforge.attention(x.q, x.k, x.v, scale=0.5 * 16**-0.5))
    slope.fill_(2.0)  # the tensor is read, not copied
    assert_close(
        attnforge.attention(x.q, x.k, x.v, score=function),
        attnforge.attention(x.q, x.k, x.v, scale=2 * 16**-0.5),
    )


def test_what_a_function_becomes() -> None:
    slopes = torch.rand(4)
    score = scores.score_mod(lambda score, b, h, q, k: score + slopes[h] * (k - q))
    assert score.text == "lambda(t0: float32[1]): score + t0[h] * (kv_idx - q_idx)"
    assert score.tensors[0] is slopes
    table = torch.randn(3, 4, dtype=torch.float16)
    score = scores.score_mod(lambda score, b, h, q, k: torch.relu(score) + table[h][q % 4])
    assert score.text == "lambda(t0: float32[2]): where(score <= 0.0, 0.0, score) + t0[h, q_idx % 4]"


def test_numbers_as_indices() -> None:
    """They are part of the text, and take no place among the captured tensors."""
    table = torch.randn(2, 3, 4, requires_grad=True)
    score = scores.score_mod(
        lambda s, b, h, i, j: s * table[1, h, 2] + table[0][h][-1] + table[:, 1][b, i % 4]
    )
    assert score.text == ("lambda(t0: float32[3]): score * t0[1, h, 2] + t0[0, h, -1] + t0[b, 1, q_idx % 4]")
    x = draw(Shape(5, 7, 16, 3, 1, 2), torch.float32, "cpu")
    (ours,) = torch.autograd.grad(attnforge.attention(x.q, x.k, x.v, score=score), table, x.dout)
    q, k, v, dout = (t.detach().double() for t in (x.q, x.k, x.v, x.dout))
    exact = table.detach().double().requires_grad_()
    s = q @ k.mT * 16**-0.5 * exact[1, :, 2, None, None] + exact[0, :, -1, None, None]
    s = s + exact[:, 1, torch.arange(5) % 4][:, None, :, None]
    (theirs,) = torch.autograd.grad(s.softmax(-1) @ v, exact, dout)
    assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_pickles_are_read() -> None:
    """Also those from before the field `captured` was called so."""
    score = scores.bias(torch.rand(7, dtype=torch.float16))
    old = Score.__new__(Score)
    old.__setstate__({"text": score.text, "tensors": score.tensors})
    for same in (pickle.loads(pickle.dumps(score)), copy.deepcopy(score), old):  # noqa: S301
        assert same.text == score.text
        assert_close(same.tensors, score.tensors, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bias", "score_mod"])
def test_float16_is_read_at_every_call(kind: str) -> None:
    """A score that is made once follows its parameter through the steps of an optimizer."""
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    bias = torch.zeros(7, dtype=torch.float16, requires_grad=True)

    def added(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + bias[j]

    score = scores.bias(bias) if kind == "bias" else scores.score_mod(added)
    for _ in range(2):
        out = attnforge.attention(x.q, x.k, x.v, score=score)
        assert torch.equal(out, attnforge.attention(x.q, x.k, x.v, score=scores.bias(bias.float())))
        (gradient,) = torch.autograd.grad(out.square().sum(), bias)
        assert gradient.dtype == torch.float16
        with torch.no_grad():
            bias -= torch.linspace(-3, 3, 7)
    compiled = torch.compile(
        lambda q: attnforge.attention(q, x.k, x.v, score=score), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x.q), attnforge.attention(x.q, x.k, x.v, score=score))


def test_integers_and_bools_are_read_as_int32() -> None:
    """At every call; constants of a function as long as the score."""
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    ids, shown = torch.arange(7) // 3, torch.arange(7) != 2

    def alike(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(
            (ids[i] == ids[j]) & shown[j], s + torch.zeros_like(s), torch.full_like(s, -math.inf)
        )

    score = scores.score_mod(alike)
    for _ in range(2):
        visible = (ids[:5, None] == ids) & shown
        expected = attnforge.attention(x.q, x.k, x.v, attnforge.DenseMask(visible))
        assert_close(attnforge.attention(x.q, x.k, x.v, score=score), expected)
        ids.copy_(torch.arange(7) % 2)
        shown.logical_not_()
    ids[0] = 2**40
    with pytest.raises(ScoreError, match="do not fit int32"):
        scores.score_mod(alike)


DOUBLES, FIVE = torch.zeros(3, dtype=torch.float64), [torch.randn(3) for _ in range(5)]
LEAF = torch.ones(3, requires_grad=True)
REFUSED = {
    "erfinv": lambda s, b, h, q, k: torch.erfinv(s),
    "bfloat16": lambda s, b, h, q, k: s.to(torch.bfloat16),
    "without an index": lambda s, b, h, q, k: s + torch.ones(3)[None][:, h],
    "float64": lambda s, b, h, q, k: s + DOUBLES[h],
    "at most 4": lambda s, b, h, q, k: s + sum(x[h] for x in FIVE),
    "of float32": lambda s, b, h, q, k: s % 2,
    "one tensor": lambda s, b, h, q, k: (s, s),
    "detach": lambda s, b, h, q, k: s * s.detach(),
    "detach and": lambda s, b, h, q, k: s * s.data,
    "detach_": lambda s, b, h, q, k: s * s.clone().detach_(),
    "no_grad": torch.no_grad()(lambda s, b, h, q, k: s * 2.0),
    "read from a captured tensor": lambda s, b, h, q, k: torch.lgamma(s),
    r"arguments \(score, b, h, q_idx, kv_idx\)": lambda s: s,
    "use torch.where, &": lambda s, b, h, q, k: s if q > k else 2 * s,
    "outside of the function": lambda s, b, h, q, k: s * LEAF.detach()[h],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_translated_is_named(message: str) -> None:
    if message == "without an index":
        message = "slices"
        function = REFUSED["without an index"]
    else:
        function = REFUSED[message]
    with pytest.raises(ScoreError, match=message):
        scores.score_mod(function)  # type: ignore[arg-type]  # one of them takes too few arguments


def test_what_has_no_gradient_may_be_detached() -> None:
    plain = torch.ones(3)

    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            bias = plain.detach()[h] * (q - k).data
        return s + bias + LEAF[h]

    found = scores.score_mod(function)
    assert found.text == "function(t0: float32[1], t1: float32[1]): score + t0[h] * (q_idx - kv_idx) + t1[h]"
    assert [x.requires_grad for x in found.captured] == [False, True]


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e300])
def test_caps_that_float32_cannot_divide_by_are_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=r"cap: got .*, expected a number from 1e-30 to 1e\+30"):
        scores.softcap(cap)


def test_wrong_arguments_are_named() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    with pytest.raises(TypeError, match="score: got int"):
        attnforge.attention(x.q, x.k, x.v, score=3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"h takes 2 values, but axis 0 .* has 1 elements"):
        attnforge.attention(x.q, x.k, x.v, score=Score("a(t0: float32[1]): score + t0[h]", (torch.ones(1),)))
    with pytest.raises(ValueError, match="cap: got 0"):
        scores.softcap(0)
    with pytest.raises(ValueError, match="offset: got 1099511627776, expected -1073741823 to 1073741823"):
        scores.alibi(torch.ones(2), 2**40)
    for make, shape, message in (
        (
            scores.alibi,
            (1, 2, 3),
            r"slopes: got shape \(1, 2, 3\), expected \(heads_q\) or \(batch, heads_q\)",
        ),
        (scores.alibi, (0,), r"slopes: has no elements, its shape is \(0,\)"),
        (scores.bias, (), r"tensor: got shape \(\), expected \(batch, heads_q, seq_q, seq_k\)"),
        (scores.relative_bias, (2, 4), r"table: got shape \(2, 4\), expected \(heads_q, 2 n \+ 1\) or"),
        (scores.relative_bias, (1, 2, 3), r"table: got shape \(1, 2, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make(torch.ones(shape))
    for tensors, message in (((), "got 0 tensors"), ((torch.ones(2, dtype=torch.int32),), "int32")):
        with pytest.raises(ValueError, match=f"score, mask_mod: .*{message}"):
            torch.ops.attnforge.forward(
                x.q, x.k, x.v, None, 0, None, False, 0, 0, "a(t0: float32[1]): score + t0[h]", *tensors
            )


def test_a_bias_of_one_number_moves_every_score() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    out, lse = attnforge.attention(x.q, x.k, x.v, score=scores.bias(torch.full((1, 1), 2.0)), return_lse=True)
    plain, plain_lse = attnforge.attention(x.q, x.k, x.v, return_lse=True)
    assert_close(out, plain)
    assert_close(lse, plain_lse + 2)


def test_more_keys_than_indices_are_for() -> None:
    """Kernels take sums of an index and a small number for int32."""
    k = torch.zeros(1, 1, 1, 8).expand(1, 1, (1 << 29) + 1, 8)
    with pytest.raises(ValueError, match=r"seq_q 1, seq_k 536870913, each may be up to 2\^29"):
        attnforge.attention(torch.zeros(1, 1, 1, 8), k, k, score=scores.softcap(3.0))


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


LEARNED = ["slopes", "plane", "table", "buckets", "keys", "sharpened"]


def check_learned(
    name: str,
    dtype: torch.dtype,
    mask: str,
    device: str,
    limit: float,
    shape: Shape = SHAPE,
    deterministic: bool = False,
) -> None:
    """Against float64; deterministic gradients have the same bits in three runs, on the CPU by 1, 3 and 4 threads."""
    x = draw(shape, dtype, device)
    seen = make_mask(mask, shape.seq_q, shape.seq_k, device)
    score, formula, tensors = learned(shape.batch, x.q.shape[1], shape.seq_q, shape.seq_k, device)[name]
    inputs = (x.q, x.k, x.v, *tensors)
    out = attnforge.attention(x.q, x.k, x.v, seen, score=score(*tensors), deterministic=deterministic)
    exact = learned_oracle(x.q, x.k, x.v, seen, formula, tensors, x.dout, out.detach())
    ours = torch.autograd.grad(out, inputs, x.dout, retain_graph=True)
    for threads in (1, 3, 4) if deterministic else ():
        with using_threads(threads):
            assert all(map(torch.equal, ours, torch.autograd.grad(out, inputs, x.dout, retain_graph=True)))
    for got, answer, like in zip(ours, exact, (x.q, x.k, x.v, *tensors), strict=True):
        assert got.dtype == like.dtype
        size, slack = answer.abs().max().item(), 2**-8 if got.dtype == torch.bfloat16 else 0.0
        assert (got.double() - answer).abs().max().item() <= (limit + slack) * size, name


@pytest.mark.parametrize("mask", ["full", "spans"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captured_tensors(name: str, mask: str) -> None:
    check_learned(name, torch.float32, mask, "cpu", 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LEARNED)
def test_deterministic_gradients_of_captured_tensors(name: str, dtype: torch.dtype) -> None:
    limit = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    check_learned(name, dtype, "spans", "cpu", limit, Shape(150, 260, 16, 2, 2, 2), deterministic=True)


def test_the_deterministic_mode_of_torch_holds_for_captured_tensors() -> None:
    """A table of few elements for many pairs, which float atomics of four threads add up differently."""
    x = draw(Shape(400, 400, 16, 2, 2), torch.float32, "cpu")
    table = torch.randn(3, requires_grad=True)
    out = attnforge.attention(x.q, x.k, x.v, score=scores.relative_bias(table))
    torch.use_deterministic_algorithms(True)
    try:
        with using_threads(4):
            found = [torch.autograd.grad(out, table, x.dout, retain_graph=True)[0] for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize(
    "names", [("b", "h", "q", "k"), ("h", "q", "k"), ("q", "k"), ("b", "k")], ids=lambda names: "".join(names)
)
@pytest.mark.parametrize("batch", [1, 2])
def test_deterministic_gradients_of_a_bias(names: tuple[str, ...], batch: int) -> None:
    """Elements of their own for each pair, or shared by batch entries, heads or queries."""
    shape = Shape(33, 50, 16, 2, 1, batch)
    x = draw(shape, torch.float32, "cpu")
    sizes = dict(zip("bhqk", (batch, 2, 33, 50), strict=True))
    plane = torch.randn([sizes[name] if name in names else 1 for name in "bhqk"], requires_grad=True)
    out = attnforge.attention(x.q, x.k, x.v, score=scores.bias(plane), deterministic=True)
    (found,) = torch.autograd.grad(out, plane, x.dout)
    exact = learned_oracle(x.q, x.k, x.v, None, shared_bias, [plane], x.dout, out.detach())[3]
    assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "of_pair"), [(1, True), (2, False)])
def test_memory_of_deterministic_gradients_of_a_bias(batch: int, of_pair: bool) -> None:
    """Where each pair has an element of its own, there are no sums to keep."""
    x = draw(Shape(33, 50, 16, 2, 1, batch), torch.float32, "cpu")
    plane = torch.randn(2, 33, 50, requires_grad=True)
    out = attnforge.attention(x.q, x.k, x.v, score=scores.bias(plane), deterministic=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(out, plane, x.dout)
    most = max(event.cpu_memory_usage for event in profile.events() if event.name == "aten::zeros")
    assert most == plane.numel() * (4 if of_pair else 80)


def shared_bias(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, plane: Tensor) -> Tensor:
    """As scores.bias, whose axes of size 1 are expanded."""
    return s + plane.expand(s.shape)[b, h, i, j]


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_cancels_leaves_the_rest(deterministic: bool) -> None:
    """Contributions of 1e30 to the same elements as those of 1e-30, which only exact sums keep.

    Rows 0 and 2 differ in the sign of dout; row 1 is small.
    """
    x = draw(Shape(3, 50, 16, 1, 1), torch.float32, "cpu")
    q, dout = x.q.detach().clone(), x.dout.clone()
    q[:, :, 2], dout[:, :, 2] = q[:, :, 0], -dout[:, :, 0]
    sizes = torch.tensor([1e30, 1e-30, 1e30])[:, None]
    of_keys = torch.zeros(50, requires_grad=True)
    score = scores.score_mod(lambda s, b, h, i, j: s + of_keys[j])
    k, v = x.k.detach(), x.v.detach()
    out = attnforge.attention(q, k, v, score=score, deterministic=deterministic)
    (found,) = torch.autograd.grad(out, of_keys, dout * sizes)
    row = attnforge.attention(q[:, :, 1:2], k, v, score=score)
    (small,) = torch.autograd.grad(row, of_keys, dout[:, :, 1:2] * 1e-30)
    assert small.any()
    close = ((found - small).abs() <= 1e-4 * small.abs().max()).all()
    assert close == deterministic


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_captured_tensors_on_a_gpu(dtype: torch.dtype, name: str, mask: str) -> None:
    limit = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    check_learned(name, dtype, mask, "cuda", limit)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_captured_tensors_of_many_tiles_on_a_gpu(head_dim: int, name: str, mask: str) -> None:
    """Blocks whose warps go from one element to another and back."""
    check_learned(name, torch.bfloat16, mask, "cuda", 1e-2, Shape(700, 900, head_dim, 1, 2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "spans", "dense"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_deterministic_gradients_of_captured_tensors_on_a_gpu(
    dtype: torch.dtype, name: str, mask: str
) -> None:
    limit = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    check_learned(name, dtype, mask, "cuda", limit, deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "spans"])
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_deterministic_gradients_of_captured_tensors_of_many_tiles_on_a_gpu(
    head_dim: int, name: str, mask: str
) -> None:
    shape = Shape(700, 900, head_dim, 2, 2, 2)
    check_learned(name, torch.bfloat16, mask, "cuda", 1e-2, shape, deterministic=True)


def test_gradients_of_some_captured_tensors() -> None:
    """Only what requires grad gets one, also if q, k and v need none."""
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    slopes, table = torch.rand(2, requires_grad=True), torch.rand(3)
    score = scores.score_mod(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs() + table[j % 3])
    out, lse = attnforge.attention(q, k, v, score=score, return_lse=True)
    (found,) = torch.autograd.grad(lse.sum(), slopes)
    exact = slopes.detach().double().requires_grad_()
    i, j = torch.arange(5)[:, None], torch.arange(7)
    plain = q.double() @ k.repeat_interleave(2 // k.shape[1], 1).double().mT * 0.25
    logits = plain - exact[:, None, None] * (i - j).abs() + table.double()[j % 3]
    assert_close(
        found.double(), torch.autograd.grad(logits.logsumexp(-1).sum(), exact)[0], rtol=1e-5, atol=1e-5
    )
    assert out.grad_fn is not None
    with torch.no_grad():
        assert not attnforge.attention(q, k, v, score=score).requires_grad
    arguments = (x.dout, q, k, v, out.detach(), lse.detach(), None, 0, None, False, 0, None, 0)
    words = (score.text.replace("t0: float32[1]", "t0: float32[1] grad"), slopes.detach(), table)
    strict = (*arguments[:9], True, *arguments[10:])
    for given in (arguments, strict):
        torch.library.opcheck(torch.ops.attnforge.score_backward.default, given + words)
    with pytest.raises(ValueError, match="results of score_backward"):
        torch.ops.attnforge.backward(*arguments, *words)


@pytest.mark.parametrize("dims", [1, 2])
def test_gradients_of_factors(dims: int) -> None:
    """The score times an element: GCC 12 moved the copy of the score, by which the gradient multiplies, behind it."""
    x = draw(Shape(67, 101, 16, 2, 2, 2), torch.float32, "cpu")
    heads = x.q.shape[1]
    w = torch.linspace(0.5, 2, 2 * heads).reshape(2, heads)[2 - dims :].squeeze(0).requires_grad_()
    score = scores.score_mod(
        (lambda s, b, h, i, j: s * w[h]) if dims == 1 else (lambda s, b, h, i, j: s * w[b, h] + w[b, h])
    )
    exact = w.detach().double().requires_grad_()
    factor = exact[..., None, None]
    plain = x.q.detach().double() @ x.k.detach().repeat_interleave(2, 1).double().mT * 0.25
    logits = plain * factor + (factor if dims == 2 else 0.0)
    values = x.v.detach().repeat_interleave(2, 1).double()
    lse = torch.linspace(-1, 1, 67)
    out = attnforge.attention(x.q, x.k, x.v, score=score, return_lse=True)
    ours = torch.autograd.grad(out, w, [x.dout, lse.expand_as(out[1])])[0]
    answer = [logits.softmax(-1) @ values, logits.logsumexp(-1)]
    theirs = torch.autograd.grad(answer, exact, [x.dout.double(), lse.double().expand_as(answer[1])])[0]
    assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_scores_made_without_grad_have_gradients_later() -> None:
    """As in a first, evaluating call: the captured tensor is a leaf that requires grad, and no view may hide it."""
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    number, plane = torch.tensor(0.5, requires_grad=True), torch.rand(1, 2, 1, 1, requires_grad=True)
    with torch.no_grad():
        made = scores.score_mod(lambda s, b, h, i, j: s * number), scores.bias(plane)
    for score, tensor in zip(made, (number, plane), strict=True):
        _, lse = attnforge.attention(x.q, x.k, x.v, score=score, return_lse=True)
        assert torch.autograd.grad(lse.sum(), tensor)[0].shape == tensor.shape


def test_transforms_refuse_gradients_of_captured_tensors() -> None:
    x, slopes = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu"), torch.rand(2)

    def call(q: Tensor, slopes: Tensor) -> Tensor:
        return attnforge.attention(q, x.k.detach(), x.v.detach(), score=scores.alibi(slopes)).sum()

    assert torch.func.grad(call)(x.q.detach(), slopes).any()
    with pytest.raises(NotImplementedError, match="gradients of captured tensors"):
        torch.func.grad(call, argnums=1)(x.q.detach(), slopes)


def test_learned_scores_are_compiled() -> None:
    x = draw(Shape(20, 33, 16, 1, 2), torch.float32, "cpu")
    table = torch.randn(2, 5, requires_grad=True)

    def call(q: Tensor, table: Tensor) -> Tensor:
        return attnforge.attention(q, x.k.detach(), x.v.detach(), score=scores.relative_bias(table))

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")(x.q, table)
    ours = torch.autograd.grad(whole, (x.q, table), x.dout)
    for a, b in zip(ours, torch.autograd.grad(call(x.q, table), (x.q, table), x.dout), strict=True):
        assert_close(a, b)


def test_extreme_scores_give_no_nan() -> None:
    x = draw(Shape(9, 70, 16, 1, 1), torch.float32, "cpu")
    q = (x.q.detach() * 1e18).requires_grad_()
    out, lse = attnforge.attention(q, x.k, x.v, score=scores.softcap(30.0), return_lse=True)
    assert out.isfinite().all()
    assert (lse.abs() <= 30 + math.log(70) + 1e-3).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, (q, x.k, x.v), x.dout))
    hidden = scores.score_mod(lambda s, b, h, i, j: torch.where(i < 3, -float("inf"), s))
    out, lse = attnforge.attention(x.q, x.k, x.v, score=hidden, return_lse=True)
    assert (lse[:, :, :3] == -torch.inf).all()
    assert not out[:, :, :3].any()
    assert not torch.autograd.grad(out, x.q, x.dout)[0][:, :, :3].any()


def test_compiled_and_checked_by_torch() -> None:
    x = draw(Shape(20, 33, 16, 1, 2, 2), torch.float32, "cpu")
    score = functions(2, 2, 20, 33)["mixed"][0]

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attnforge.attention(q, k, v, attnforge.Causal(), score=score, sinks=sinks)

    sinks = torch.rand(2, requires_grad=True)
    inputs = (x.q, x.k, x.v, sinks)
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    assert_close(whole, call(*inputs))
    for a, b in zip(
        torch.autograd.grad(whole, inputs, x.dout),
        torch.autograd.grad(call(*inputs), inputs, x.dout),
        strict=True,
    ):
        assert_close(a, b)
    arguments = (x.q, x.k, x.v, None, 1, None, True, 0, 0, score.text, *score.tensors)
    torch.library.opcheck(torch.ops.attnforge.forward.default, arguments)


def test_a_function_inside_compiled_code_breaks_the_graph() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")

    def call(q: Tensor) -> Tensor:
        return attnforge.attention(q, x.k, x.v, score=lambda s, b, h, i, j: s)

    assert_close(
        torch.compile(call, backend="eager")(x.q.detach()), attnforge.attention(x.q, x.k, x.v).detach()
    )
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="TypeError"):
        torch.compile(call, backend="eager", fullgraph=True)(x.q.detach())


def test_transforms_keep_batch_entries_apart() -> None:
    x = draw(Shape(5, 7, 16, 1, 2, 3), torch.float32, "cpu")
    score = scores.bias(torch.randn(1, 2, 5, 7))
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))
    sinks = torch.rand(2)
    mapped = torch.func.vmap(
        lambda q, k, v: attnforge.attention(q[None], k[None], v[None], score=score, sinks=sinks)[0]
    )
    assert_close(mapped(q, k, v), attnforge.attention(q, k, v, score=score, sinks=sinks))


def test_functions_are_traced_outside_of_transforms() -> None:
    """Inside, make_fx records a constant in the place of each scalar that a transform wraps."""
    x, slopes = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu"), torch.rand(2)
    q, k, v = (t.detach() for t in (x.q, x.k, x.v))

    def call(q: Tensor, slopes: Tensor = slopes) -> Tensor:
        step = torch.full((1,), 0.5)  # grad's own tensor inside of it
        return attnforge.attention(q, k, v, score=lambda s, b, h, i, j: s * step[0] + slopes[h] * (j - i))

    expected = call(x.q)
    for transformed in (
        torch.func.vjp(call, q)[0],
        torch.func.functionalize(call)(q),
        torch.vmap(call)(q[None])[0],
    ):
        assert torch.equal(transformed, expected)
    (dq,) = torch.autograd.grad(expected.square().sum(), x.q)
    assert torch.equal(torch.func.grad(lambda q: call(q).square().sum())(q), dq)
    several = torch.rand(3, 2)
    each = [call(q, one) for one in several]
    assert torch.equal(torch.vmap(call, in_dims=(None, 0))(q, several), torch.stack(each))
    with pytest.raises(NotImplementedError, match="gradients of captured tensors"):
        torch.func.grad(lambda slopes: call(q, slopes).sum())(slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: torch.dtype) -> None:
    x = draw(SHAPE, dtype, "cpu")
    mask = make_mask("spans", SHAPE.seq_q, SHAPE.seq_k, "cpu")
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf], requires_grad=True)
    out, lse = attnforge.attention(x.q, x.k, x.v, mask, sinks=sinks, return_lse=True)
    dlse = torch.linspace(-1, 1, lse.numel()).reshape(lse.shape).where(lse.isfinite(), 0)
    ours = [out.detach(), lse.detach()]
    ours += torch.autograd.grad([out, lse], (x.q, x.k, x.v, sinks), [x.dout, dlse])
    exact = oracle(x.q, x.k, x.v, mask, lambda s, b, h, i, j: s, x.dout, dlse, sinks)
    compare(ours, exact, LIMIT[dtype])


def test_sinks_of_wrong_form_are_named() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    with pytest.raises(ValueError, match="sinks: got"):
        attnforge.attention(x.q, x.k, x.v, sinks=torch.ones(3))
    with pytest.raises(TypeError, match="sinks: got list"):
        attnforge.attention(x.q, x.k, x.v, sinks=[1.0, 2.0])  # type: ignore[call-overload]


def test_a_formula_that_is_none_is_named() -> None:
    x = draw(Shape(5, 7, 16, 1, 2), torch.float32, "cpu")
    with pytest.raises((ValueError, CompileError), match="is not supported in a formula"):
        attnforge.attention(x.q, x.k, x.v, score=Score("a: score.x"))
    assert ScoreMod("a: score").slope_is_one
