"""Dense masks: planes, views, rows that see nothing, schedules that follow them, torch.compile, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Shape, check, check_deterministic, check_schedules_of_layers, dense, draw
from torch import Tensor

import attnforge
from attnforge.runtime import ops
from attnforge.runtime.search.reference import reference

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
targets = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu-fp32"),
        pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
        pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu),
    ],
)
SEQ_Q, SEQ_K = 300, 261
SHAPE = Shape(seq_q=SEQ_Q, seq_k=SEQ_K, group=2, batch=2)


@targets
@pytest.mark.parametrize("planes", [None, (1, 1), (2, 1), (1, 4), (2, 4)])
def test_planes(device: str, dtype: torch.dtype, planes: tuple[int, int] | None) -> None:
    """One mask, one for each batch entry, for each query head, or for each of both."""
    check(draw(SHAPE, dtype, device), dense(SEQ_Q, SEQ_K, device, planes=planes))


@targets
def test_views(device: str, dtype: torch.dtype) -> None:
    """Transposed, sliced, and expanded masks are read where they are."""
    x = draw(SHAPE, dtype, device)
    check(x, attnforge.DenseMask(dense(SEQ_K, SEQ_Q, device).mask.T))
    check(x, attnforge.DenseMask(dense(2 * SEQ_Q, SEQ_K + 9, device).mask[::2, 5:-4]))
    wide = attnforge.DenseMask(dense(SEQ_Q, SEQ_K, device, planes=(2, 1)).mask.expand(2, 4, SEQ_Q, SEQ_K))
    assert wide.mask.shape[1] == 1, "an expanded axis is one plane"
    check(x, wide)
    # A row that is every row: stride 0 along the queries.
    check(x, attnforge.DenseMask((torch.arange(SEQ_K, device=device) % 3 == 0).expand(SEQ_Q, SEQ_K)))


def test_narrow() -> None:
    """The planes of some batch entries or heads, as ranks that share heads take them."""
    pairs = torch.rand(3, 4, 9, 37) < 0.5
    mask = attnforge.DenseMask(pairs, visible_keys=18)
    for dim, start, length in ((0, 1, 2), (1, 2, 1)):
        part = mask.narrow(dim, start, length)
        assert torch.equal(part.mask, pairs.narrow(dim, start, length))
        assert part.visible_keys == 18
    with pytest.raises(ValueError, match="dim: got 2, expected 0 for batch entries or 1 for heads"):
        mask.narrow(2, 0, 1)
    plain = attnforge.DenseMask(pairs[0, 0])
    assert plain.narrow(1, 2, 1) is plain


@targets
@pytest.mark.parametrize("value", [False, True])
def test_nothing_and_everything(device: str, dtype: torch.dtype, value: bool) -> None:
    x = draw(SHAPE, dtype, device)
    check(x, attnforge.DenseMask(torch.full((SEQ_Q, SEQ_K), value, device=device)))


@targets
def test_full_tiles_and_empty_ones(device: str, dtype: torch.dtype) -> None:
    """Blocks of 192 x 192: multiples of most tiles, some heads without any, one row and one column of single pairs."""
    x = draw(Shape(seq_q=576, seq_k=576, heads_kv=1, group=3), dtype, device)
    blocks = torch.tensor(
        [[[1, 0, 1], [0, 1, 1], [0, 0, 0]], [[0, 0, 0]] * 3, [[1, 1, 1], [0, 0, 0], [1, 0, 0]]]
    )
    mask = blocks.bool().repeat_interleave(192, 1).repeat_interleave(192, 2)[None]
    mask[0, 2, 200] = False
    mask[0, 0, :, 10] = True
    check(x, attnforge.DenseMask(mask.to(device)))


@targets
def test_bits_are_those_of_causal_and_spans(device: str, dtype: torch.dtype) -> None:
    """The same pairs said in another way give the same numbers to rounding."""
    x = draw(Shape(seq_q=200, seq_k=200), dtype, device)
    causal = attnforge.Causal()
    one = attnforge.attention(x.q, x.k, x.v, causal)
    two = attnforge.attention(x.q, x.k, x.v, attnforge.DenseMask(causal.visible(200, 200, device)))
    assert (one - two).abs().max().item() <= (1e-6 if dtype is torch.float32 else 2e-2)


@targets
def test_deterministic(device: str, dtype: torch.dtype) -> None:
    """Also where the q heads of a kv head visit different tiles, whose sums of dq take turns."""
    x = draw(Shape(seq_q=700, seq_k=600, group=3, batch=2), dtype, device)
    visible = dense(700, 600, device, planes=(2, 6)).mask
    visible[:, 1, :, :256] = False  # tiles of keys that one head of a group does not see at all
    visible[:, 2, 128:300] = False  # and tiles of queries that see nothing
    mask = attnforge.DenseMask(visible)
    check_deterministic(x, mask)


@devices
def test_one_schedule_for_all_layers(device: str) -> None:
    x = draw(Shape(), torch.bfloat16, device)
    mask = dense(65, 65, device)
    check_schedules_of_layers(x, mask)


@devices
def test_the_bytes_may_go(device: str) -> None:
    """A mask is packed when it is made, an eighth of its bytes: the tensor it was made of may change or go."""
    x = draw(Shape(), torch.bfloat16, device)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    visible = torch.empty(65, 65, dtype=torch.bool, device=device)
    for seed in range(10):
        visible.copy_(dense(65, 65, device, seed).mask)
        exact = reference(q, k, v, attnforge.DenseMask(visible)).out
        mask = attnforge.DenseMask(visible)
        visible.logical_not_()
        assert float((attnforge.attention(q, k, v, mask) - exact).abs().max()) < 0.02
    assert mask.data.nbytes == 65 * 3 * 4


@devices
def test_compile(device: str) -> None:
    """The mask is made inside; what is expanded is not written out."""
    x = draw(SHAPE, torch.bfloat16, device)
    wide = dense(SEQ_Q, SEQ_K, device, planes=(2, 1)).mask.expand(2, 4, SEQ_Q, SEQ_K)

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attnforge.attention(q, k, v, attnforge.DenseMask(mask))

    expected = step(x.q, x.k, x.v, wide)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v, wide)
    assert torch.equal(got, expected)
    for a, b in zip(x.grads(got), x.grads(expected), strict=True):
        torch.testing.assert_close(a, b)


@devices
def test_opcheck(device: str) -> None:
    x = draw(SHAPE, torch.bfloat16, device)
    mask = dense(SEQ_Q, SEQ_K, device, planes=(1, 4))
    bits, kind, visible = ops.unpack_mask(mask, x.q, x.k)
    given = {"visible": visible}
    torch.library.opcheck(torch.ops.attnforge.forward.default, (x.q, x.k, x.v, bits, kind, None), given)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    out, lse = ops.forward(q, k, v, mask)
    args = (x.dout, q, k, v, out, lse, bits, kind, None)
    torch.library.opcheck(torch.ops.attnforge.backward.default, args, given)


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True]], TypeError, "mask: got list, expected a bool tensor"),
        (
            torch.ones(4, 4),
            ValueError,
            r"mask: got dtype torch.float32, expected torch.bool.*mask.to\(torch.bool\)",
        ),
        (bools(4), ValueError, r"mask: got shape \(4,\), expected \(seq_q, seq_k\)"),
        (bools(1, 4, 4), ValueError, r"mask: got shape \(1, 4, 4\)"),
    ],
)
def test_what_is_no_mask(mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attnforge.DenseMask(mask)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "shape", [(65, 66), (66, 65), (65, 1), (1, 1, 1, 65), (3, 1, 65, 65), (1, 2, 65, 65), (2, 3, 65, 65)]
)
def test_masks_of_other_sizes(shape: tuple[int, ...], compiled: bool) -> None:
    x = draw(Shape(group=2, batch=2), torch.float32, "cpu")
    call = torch.compile(attnforge.attention, backend="aot_eager") if compiled else attnforge.attention
    with pytest.raises(Exception, match=r"mask: .*has shape .*, expected "):
        call(x.q, x.k, x.v, attnforge.DenseMask(bools(*shape)))


def test_arguments_of_the_operator() -> None:
    x = draw(Shape(), torch.float32, "cpu")
    run, data = torch.ops.attnforge.forward.default, dense(65, 65, "cpu").data
    with pytest.raises(ValueError, match="mask: data is given, but the mask is causal"):
        run(x.q, x.k, x.v, data, 1, None)
    with pytest.raises(ValueError, match="mask: data is missing for a dense mask"):
        run(x.q, x.k, x.v, None, 3, None)
    with pytest.raises(ValueError, match=r"mask: data has dtype torch\.bool, expected torch\.int32"):
        run(x.q, x.k, x.v, bools(65, 65), 3, None)
    with pytest.raises(ValueError, match=r"mask: data has strides .*, expected contiguous memory"):
        run(x.q, x.k, x.v, data.expand(1, 2, 65, 3), 3, None)
    with pytest.raises(ValueError, match=r"mask: data of a dense mask has shape \(1, 1, 65, 2\), expected"):
        run(x.q, x.k, x.v, data[..., :2].contiguous(), 3, None)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A mask that is made during capture is packed anew, with its schedule, at each replay."""
    x = draw(Shape(seq_q=300, seq_k=300), torch.bfloat16, "cuda")
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    visible = dense(300, 300, "cuda").mask
    attnforge.attention(q, k, v, attnforge.DenseMask(visible))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnforge.attention(q, k, v, attnforge.DenseMask(visible))
    for seed in (1, 2):
        visible.copy_(dense(300, 300, "cuda", seed).mask)
        graph.replay()
        exact = reference(q, k, v, attnforge.DenseMask(visible)).out
        assert (out - exact).abs().max().item() < 2e-2


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    x = draw(Shape(seq_q=300, seq_k=300), torch.bfloat16, "cuda")
    for round in range(2):  # the first call loads kernels
        mask = dense(300, 300, "cuda")
        torch.cuda.set_sync_debug_mode("error" if round else "default")
        try:
            x.grads(attnforge.attention(x.q, x.k, x.v, mask))
        finally:
            torch.cuda.set_sync_debug_mode("default")
