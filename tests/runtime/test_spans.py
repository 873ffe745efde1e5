"""Spans of several intervals and planes: against the union that the user wrote, on every device."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from oracle import Shape, check, check_deterministic, check_schedules_of_layers, draw, unions
from torch import Tensor

import attnforge
from attnforge import masks
from attnforge.runtime import ops
from attnforge.runtime.search.reference import reference

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
targets = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu-fp32"),
        pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
        pytest.param("cuda", torch.float32, id="gpu-fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu),
    ],
)
SEQ_Q, SEQ_K = 300, 261
SHAPE = Shape(seq_q=SEQ_Q, seq_k=SEQ_K, group=2, batch=2)  # 2 kv heads, 4 query heads
LEAST, MOST = -(2**31), 2**31 - 1


def union(starts: Tensor, ends: Tensor, seq_q: int) -> Tensor:
    """The definition, bool (..., seq_q, seq_k), of intervals (..., n, seq_k)."""
    query = torch.arange(seq_q, device=starts.device)[:, None]
    seen = torch.zeros(*starts.shape[:-2], seq_q, starts.shape[-1], dtype=torch.bool, device=starts.device)
    for i in range(starts.shape[-2]):
        seen |= (starts[..., i, None, :] <= query) & (query < ends[..., i, None, :])
    return seen


# ---- Kernels


@targets
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("planes", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 4)], ids=str)
def test_planes(device: str, dtype: torch.dtype, count: int, planes: tuple[int, int]) -> None:
    """One union for all, for each batch entry, each kv head, each query head, or each of both."""
    if device == "cpu" and (dtype is torch.float32) != (count % 2 == 1):
        pytest.skip("each count with one dtype: the CPU kernels loop over intervals whatever the dtype")
    check(draw(SHAPE, dtype, device), unions(SEQ_Q, SEQ_K, count, device, planes))


@targets
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (1, 300), (300, 1), (64, 64), (257, 511)])
def test_lengths(device: str, dtype: torch.dtype, seq_q: int, seq_k: int) -> None:
    check(draw(Shape(seq_q=seq_q, seq_k=seq_k), dtype, device), unions(seq_q, seq_k, 2, device, seed=5))


@targets
def test_full_tiles_and_empty_ones(device: str, dtype: torch.dtype) -> None:
    """Blocks of 192 rows, multiples of most tiles, that are seen whole, through one interval or the other."""
    x = draw(Shape(seq_q=960, seq_k=600, heads_kv=1, group=2), dtype, device)
    key = torch.arange(600, device=device, dtype=torch.int32)
    first = (key // 192 % 2) * 192
    starts = torch.stack([first + 576, first])
    ends = torch.stack([first + 960, first + 192])
    starts[:, 5], ends[:, 5] = torch.tensor([0, 500]), torch.tensor([499, 960])  # all queries but one
    check(x, attnforge.Spans(starts, ends))


@targets
@pytest.mark.parametrize("value", [False, True])
def test_nothing_and_everything(device: str, dtype: torch.dtype, value: bool) -> None:
    bounds = torch.full((2, SEQ_K), LEAST, dtype=torch.int32, device=device)
    ends = torch.full_like(bounds, MOST if value else LEAST)
    check(draw(SHAPE, dtype, device), attnforge.Spans(bounds, ends))


@targets
def test_deterministic(device: str, dtype: torch.dtype) -> None:
    """Also where the q heads of a kv head visit different tiles, whose sums of dq take turns."""
    x = draw(Shape(seq_q=700, seq_k=600, group=3, batch=2), dtype, device)
    mask = unions(700, 600, 3, device, (2, 6))
    check_deterministic(x, mask)


@devices
def test_masks_of_one_length_do_not_mix(device: str) -> None:
    """The same call with one interval, two, and planes takes different kernels, in any order."""
    x = draw(SHAPE, torch.float32, device)
    masks = [
        unions(SEQ_Q, SEQ_K, n, device, p) for n, p in ((1, (1, 1)), (2, (1, 1)), (3, (2, 4)), (1, (2, 1)))
    ]
    for mask in (*masks, *reversed(masks)):
        exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask).out
        assert (attnforge.attention(x.q, x.k, x.v, mask) - exact).abs().max().item() < 1e-4


@devices
def test_one_schedule_for_all_layers(device: str) -> None:
    x = draw(Shape(group=2, batch=2), torch.bfloat16, device)
    mask = unions(65, 65, 2, device, (2, 2))
    check_schedules_of_layers(x, mask)


def test_a_long_sequence_takes_no_square() -> None:
    """Two intervals of 100,000 keys: memory of bounds and tile lists only."""
    length, side = 100_000, 64
    key = torch.arange(length, dtype=torch.int32)
    starts = torch.stack([key, torch.full_like(key, length - 100)])
    ends = torch.stack([key + side, torch.full_like(key, length)])
    mask = attnforge.Spans(starts, ends, visible_keys=side)
    x = draw(Shape(seq_q=length, seq_k=length, heads_kv=1, head_dim=16), torch.float32, "cpu")
    out = attnforge.attention(x.q, x.k, x.v, mask)
    rows = torch.tensor([0, 63, 64, 50_001, length - 101, length - 100, length - 1])
    exact = reference(x.q.detach(), x.k.detach(), x.v.detach(), mask, rows=rows).out
    assert (out[:, :, rows] - exact).abs().max().item() < 1e-5


# ---- The mask as a value


def random_bounds(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Intervals that are unsorted, overlap, touch, are empty, or reach beyond the rows on one side or both."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-3, 18, shape, generator=generator, dtype=torch.int32)
    ends = starts + torch.randint(-2, 9, shape, generator=generator, dtype=torch.int32)
    wide = torch.rand(shape, generator=generator)
    return starts.masked_fill(wide < 0.05, LEAST), ends.masked_fill(wide > 0.95, MOST)


@devices
@pytest.mark.parametrize("count", [2, 3, 4])
def test_compiled_form(device: str, count: int) -> None:
    """Disjoint, ascending, apart, empty ones last: and the union is the one that was given."""
    starts, ends = (x.to(device) for x in random_bounds(3, 2, count, 500))
    mask = attnforge.Spans(starts, ends)
    assert torch.equal(mask.visible(20, 500, device), union(starts, ends, 20))
    first, last = mask.starts, mask.ends
    real = first < last
    assert not (first[~real] | last[~real]).any()
    assert not (real[:, :, 1:] & ~real[:, :, :-1]).any()
    assert (last[:, :, :-1] < first[:, :, 1:])[real[:, :, 1:]].all()
    again = attnforge.Spans(first, last)
    assert torch.equal(again.data, mask.data)


def test_shapes() -> None:
    row = torch.arange(5, dtype=torch.int32)
    one = attnforge.Spans(row, row + 3)
    assert (one.seq_k, one.intervals, one.planes, one.starts.shape) == (5, 1, (1, 1), (5,))
    for shape in ((1, 5), (1, 1, 1, 5)):  # one interval in one plane is plain
        assert torch.equal(attnforge.Spans(row.expand(shape), row.expand(shape) + 3).data, one.data)
    two = attnforge.Spans(torch.stack([row, row + 5]), torch.stack([row + 3, row + 7]))
    assert (two.seq_k, two.intervals, two.planes, two.starts.shape) == (5, 2, (1, 1), (2, 5))
    assert repr(two) == "Spans(seq_k=5, intervals=2, planes=(1, 1), device=cpu)"
    starts = row.expand(3, 2, 1, 5)
    wide = attnforge.Spans(starts, starts)
    assert (wide.planes, wide.data.shape) == ((1, 1), (2, 5)), "an expanded axis is one plane"
    assert attnforge.Spans(starts, starts + 3).planes == (3, 2), "ends differ, as far as strides say"
    assert attnforge.Spans(starts.clone(), starts + 3).visible(9, 5).shape == (3, 2, 9, 5)


@pytest.mark.parametrize("count", [1, 2])
def test_a_mask_is_a_copy_and_travels(count: int) -> None:
    starts, ends = random_bounds(2, 1, count, 40)
    mask = attnforge.Spans(starts, ends, visible_keys=7)
    expected = union(starts, ends, 20)
    starts.zero_()
    loaded = pickle.loads(pickle.dumps(mask))  # noqa: S301
    for other in (mask, copy.deepcopy(mask), loaded, mask.to("cpu")):
        assert torch.equal(other.visible(20, 40), expected)
        assert other.visible_keys_rounded == 4


def test_masks_move_as_tensors_do() -> None:
    starts = torch.zeros(8, dtype=torch.int32)
    captured = torch.arange(8)
    function = attnforge.masks.mask_mod(lambda b, h, i, j: captured[i] >= j, 8, 8, "cpu")
    for mask in (attnforge.Spans(starts, starts + 3), function):
        assert mask.to("cpu", non_blocking=True) is mask
        assert mask.to("meta", non_blocking=True).device.type == "meta"
    assert function.to("meta", non_blocking=True).tensors[0].device.type == "meta"


def test_torch_loads_saved_masks() -> None:
    """With weights_only=True, the default, which refuses what holds text of a kernel."""
    starts, ends = random_bounds(2, 1, 2, 40)
    pairs = union(starts, ends, 20)
    saved: list[Any] = [attnforge.Spans(starts, ends), attnforge.DenseMask(pairs), attnforge.Causal()]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    for mask, other in zip(saved, torch.load(file), strict=True):
        assert type(mask) is type(other)
        assert torch.equal(mask.visible(20, 40), other.visible(20, 40))
    file = io.BytesIO()
    torch.save(attnforge.masks.mask_mod(lambda b, h, i, j: i >= j, 8, 8, "cpu"), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="FunctionMask"):
        torch.load(file)


def test_narrow() -> None:
    mask = unions(20, 30, 2, "cpu", (3, 2))
    whole = mask.visible(20, 30)
    assert torch.equal(mask.narrow(0, 1, 2).visible(20, 30), whole[1:])
    assert torch.equal(mask.narrow(1, 1, 1).visible(20, 30), whole[:, 1:])
    assert mask.narrow(0, 0, 3).narrow(1, 0, 1).narrow(0, 2, 1).planes == (1, 1)
    with pytest.raises(ValueError, match="dim: got 2, expected 0 for batch entries or 1 for heads"):
        mask.narrow(2, 0, 1)
    plain = attnforge.Spans(torch.zeros(3).int(), torch.ones(3).int())
    assert plain.narrow(0, 1, 1) is plain


# ---- Combinations


@devices
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 2), (2, 2), (1, 3), (3, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("planes", [((1, 1), (1, 1)), ((3, 1), (1, 2)), ((3, 2), (1, 1))], ids=str)
def test_and_or_not(device: str, n: int, m: int, planes: tuple[tuple[int, int], ...]) -> None:
    one, two = (
        attnforge.Spans(*(x.to(device) for x in random_bounds(*p, count, 200, seed=count + i)))
        for i, (count, p) in enumerate(zip((n, m), planes, strict=True))
    )
    a, b = (mask.visible(20, 200, device) for mask in (one, two))

    def same(mask: attnforge.Spans, expected: Tensor) -> None:
        got = mask.visible(20, 200, device)
        assert torch.equal(*torch.broadcast_tensors(got, expected))

    same(one & two, a & b)
    assert (one & two).intervals == n + m - 1
    if n + m <= 4:
        same(one | two, a | b)
    if n < 4:
        same(~one, ~a)
    if n < 3:
        same(~~one, a)


def test_too_many_intervals() -> None:
    two, three, four = (unions(20, 30, n, "cpu") for n in (2, 3, 4))
    with pytest.raises(
        ValueError, match=r"the result of & may have 5 intervals a key, at most 4 .*DenseMask"
    ):
        operator.and_(two, four)
    with pytest.raises(ValueError, match=r"the result of \| may have 5 intervals"):
        operator.or_(two, three)
    with pytest.raises(ValueError, match=r"the result of ~ may have 5 intervals"):
        operator.invert(four)
    starts = torch.zeros(5, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"starts: got 5 intervals a key in shape \(5, 9\).*DenseMask"):
        attnforge.Spans(starts, starts)


def test_what_cannot_be_combined() -> None:
    one, other = unions(20, 30, 2, "cpu", (2, 1)), unions(20, 30, 2, "cpu", (3, 1))
    for combine in (operator.and_, operator.or_):
        with pytest.raises(ValueError, match=r"mask: planes \(2, 1\) and \(3, 1\).* cannot be combined"):
            combine(one, other)
    with pytest.raises(ValueError, match="30 keys on cpu and 31 keys on cpu"):
        operator.or_(one, unions(20, 31, 2, "cpu"))
    with pytest.raises(TypeError):
        operator.or_(one, 3)


def test_visible_keys_of_combinations() -> None:
    row = torch.arange(8, dtype=torch.int32)
    a, b, c = (attnforge.Spans(row, row + n, visible_keys=n) for n in (2, 5, 1))
    unknown = attnforge.Spans(row, row + 1)
    assert (a & b).visible_keys == 2
    assert (a | b).visible_keys == 7
    assert (a | b | c).visible_keys == 8
    assert (a | unknown).visible_keys is None
    assert (a & unknown).visible_keys == 2
    sinks = attnforge.Spans(row, row + 4, visible_keys=-4)
    assert ((a & sinks).visible_keys, (b & sinks).visible_keys, (a | sinks).visible_keys) == (2, -4, -6)
    assert (~a).visible_keys is None


# ---- Tracing and refusals


@devices
def test_compile(device: str) -> None:
    """Masks are made and combined inside; `~` is not, as Dynamo does not trace it for objects."""
    x = draw(SHAPE, torch.bfloat16, device)
    starts, ends = (t.to(device) for t in random_bounds(2, 1, 2, SEQ_K))

    def step(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        window = attnforge.Spans(starts[0, 0, 0], starts[0, 0, 0] + 150)
        mask = (attnforge.Spans(starts, ends) | window) & window
        return attnforge.attention(q, k, v, mask)

    expected = step(x.q, x.k, x.v, starts, ends)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v, starts, ends)
    assert torch.equal(got, expected)
    for a, b in zip(x.grads(got), x.grads(expected), strict=True):
        torch.testing.assert_close(a, b)


@devices
@pytest.mark.parametrize("planes", [(1, 1), (2, 2)], ids=str)
def test_opcheck(device: str, planes: tuple[int, int]) -> None:
    x = draw(SHAPE, torch.bfloat16, device)
    mask = unions(SEQ_Q, SEQ_K, 2, device, planes)
    data, kind, visible = ops.unpack_mask(mask, x.q, x.k)
    given = {"visible": visible}
    torch.library.opcheck(torch.ops.attnforge.forward.default, (x.q, x.k, x.v, data, kind, None), given)
    starts, ends = (t.to(device) for t in random_bounds(2, 1, 2, 9))
    torch.library.opcheck(torch.ops.attnforge.mask_of_spans.default, (starts, ends))
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    out, lse = ops.forward(q, k, v, mask)
    args = (x.dout, q, k, v, out, lse, data, kind, None)
    torch.library.opcheck(torch.ops.attnforge.backward.default, args, given)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (
            ints(2, 1, 9),
            ints(2, 1, 9),
            r"starts: got shape \(2, 1, 9\), expected \(seq_k\), \(intervals, seq_k\)",
        ),
        (ints(2, 9), ints(3, 9), r"ends: got shape \(3, 9\), expected that of starts, \(2, 9\)"),
        (ints(2, 9), ints(9), r"ends: got shape \(9,\), expected that of starts"),
        (ints(0, 9), ints(0, 9), "starts: got 0 intervals a key"),
        (ints(2, 9).long(), ints(2, 9), "starts: got dtype torch.int64"),
    ],
)
def test_what_are_no_spans(starts: Tensor, ends: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attnforge.Spans(starts, ends)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("planes", [(3, 1), (1, 3), (1, 8), (2, 8)], ids=str)
def test_planes_of_other_sizes(planes: tuple[int, int], compiled: bool) -> None:
    x = draw(SHAPE, torch.float32, "cpu")
    call: Any = torch.compile(attnforge.attention, backend="aot_eager") if compiled else attnforge.attention
    with pytest.raises(Exception, match=r"mask: spans are of . batch entries and .+ heads, expected 1 or 2"):
        call(x.q, x.k, x.v, unions(SEQ_Q, SEQ_K, 2, "cpu", planes))


def test_arguments_of_the_operator() -> None:
    x = draw(Shape(), torch.float32, "cpu")
    run = torch.ops.attnforge.forward.default
    for shape in ((1, 1, 5, 2, 65), (1, 1, 0, 2, 65), (1, 1, 2, 3, 65), (1, 2, 2, 65)):
        with pytest.raises(ValueError, match="mask: data of spans has shape"):
            run(x.q, x.k, x.v, ints(*shape), 2, None)
    with pytest.raises(ValueError, match="mask: has 66 keys, but k has 65 rows"):
        run(x.q, x.k, x.v, ints(1, 1, 2, 2, 66), 2, None)


def test_dense_mask_of_spans() -> None:
    x = draw(SHAPE, torch.float32, "cpu")
    for planes in product((1, 2), (1, 4)):
        mask = unions(SEQ_Q, SEQ_K, 3, "cpu", planes)
        one = attnforge.attention(x.q, x.k, x.v, mask)
        two = attnforge.attention(x.q, x.k, x.v, attnforge.DenseMask(mask.visible(SEQ_Q, SEQ_K)))
        assert (one - two).abs().max().item() <= 1e-5


@pytest.mark.parametrize("operation", [operator.and_, operator.or_])
def test_what_is_no_spans_says_how_to_combine_it(operation: Callable[[Any, Any], Any]) -> None:
    window = masks.window(8, 8, 2, 0, "cpu")
    others = (attnforge.Causal(), attnforge.DenseMask(torch.ones(8, 8, dtype=torch.bool)))
    for other in (*others, masks.mask_mod(lambda b, h, i, j: i > j, 8, 8, "cpu")):
        for pair in ((window, other), (other, window), (other, other)):
            with pytest.raises(TypeError, match=r"cannot be combined by &, \| or ~, which take Spans"):
                operation(*pair)
        with pytest.raises(TypeError, match="cannot be combined"):
            _ = ~other
