"""From visible keys of a mask to the variant that runs: classes in C++, autograd, checkpoints, compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_visible_keys import spans
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import choosing, dispatch, kernels, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.call import Call
from attnforge.runtime.tables import Tuned

CPU = torch.device("cpu")
HOPPER = (Arch.SM90A, Arch.SM90)
ROWS, DIM = 64, 64
Asked = list[tuple[Direction, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """What dispatch is asked, in order: direction and visible keys. It forgets all classes before and after."""
    questions: Asked = []
    choose = dispatch.choose

    def recording(call: Call, *rest: Any) -> choosing.Choice:
        questions.append((call.problem.direction, call.visible_keys))
        return choose(call, *rest)

    monkeypatch.setattr(dispatch, "choose", recording)
    dispatch.forget()
    yield questions
    dispatch.forget()
    torch._dynamo.reset()


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, ROWS, DIM, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v


def both(visible: int) -> Asked:
    return [(Direction.FORWARD, visible), (Direction.BACKWARD, visible)]


def run(attention: Callable[..., Tensor], mask: Any) -> tuple[Tensor, ...]:
    q, k, v = leaves()
    out = attention(q, k, v, mask)
    return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_each_bucket_is_a_class_of_its_own(asked: Asked) -> None:
    first = run(attnforge.attention, spans())
    assert asked == both(0)
    for number, questions in (
        (700, both(512)),
        (1023, []),
        (512, []),
        (-700, both(-512)),
        (1024, both(1024)),
        (None, []),
    ):
        asked.clear()
        others = run(attnforge.attention, spans(number))
        assert asked == questions
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True)), "the same kernels"
    asked.clear()
    run(attnforge.attention, attnforge.DenseMask(spans().visible(ROWS, ROWS), visible_keys=9))
    assert asked == both(8)
    asked.clear()
    run(attnforge.attention, None)
    run(attnforge.attention, attnforge.Causal())
    assert asked == both(0) * 2


def test_results_do_not_depend_on_it(
    loaded: list[Spec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with one variant for sparse masks and another for dense ones: other kernels, the same answer."""
    monkeypatch.setenv(TABLES, str(tmp_path))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path)
    chosen = {}
    for direction in Direction:
        problem = Problem(direction, Arch.CPU, DType.FLOAT32, DIM, Mask.SPANS, 4)
        chosen[direction] = list(candidates(problem))[:2]
        entries = [
            Tuned(spec, 1, ROWS, 1.0, 1.0, {}, keys)
            for spec, keys in zip(chosen[direction], (9, 40), strict=True)
        ]
        tables.save(tables.device_name(CPU), entries, tmp_path)
    results = [run(attnforge.attention, spans(number)) for number in (9, 40)]
    assert loaded == [chosen[direction][i] for i in range(2) for direction in Direction]
    for sparse, dense in zip(*results, strict=True):
        torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_and_saved_tensors_keep_it(asked: Asked, reentrant: bool) -> None:
    def again(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = checkpoint(attnforge.attention, q, k, v, mask, use_reentrant=reentrant)
        return out

    if reentrant:  # which torch.autograd.grad refuses
        q, k, v = leaves()
        again(q, k, v, spans(700)).sum().backward()
    else:
        run(again, spans(700))
    assert asked == both(512), "the second forward is of a known class"

    def offloaded(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return attnforge.attention(q, k, v, mask)

    asked.clear()
    run(offloaded, spans(40))
    assert asked == both(32)


def test_autocast_keeps_it(asked: Asked) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run(attnforge.attention, spans(700))
    assert asked == both(512)


@pytest.mark.parametrize("inside", [False, True], ids=["mask-given", "mask-made"])
@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 2), (True, 1)])
def test_compiled_code_is_good_for_every_density(
    asked: Asked, dynamic: bool | None, graphs: int, inside: bool
) -> None:
    """A number that changes is a symbol at the second change, as lengths are; each call still says its own."""

    def step(q: Tensor, k: Tensor, v: Tensor, mask: attnforge.Spans) -> Tensor:
        if inside:
            mask = attnforge.Spans(mask.starts, mask.ends, visible_keys=mask.visible_keys)
        return attnforge.attention(q * 2, k, v + 1, mask) * 3

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    for number in (2, 4, 8, 16, 32, 64):
        asked.clear()
        got = run(compiled, spans(number))
        assert asked == both(number)
        for ours, expected in zip(got, run(step, spans(number)), strict=True):
            torch.testing.assert_close(ours, expected)
    assert counter.frame_count == graphs


def test_opcheck() -> None:
    x = leaves()
    mask = spans(700)
    arguments = (*x, mask.data, 2, None)
    torch.library.opcheck(torch.ops.attnforge.forward.default, arguments, {"visible": 512})
    q, k, v = (t.detach() for t in x)
    out, lse = attnforge.attention(q, k, v, mask, return_lse=True)
    saved = (torch.ones_like(out), q, k, v, out, lse, mask.data, 2, None)
    torch.library.opcheck(torch.ops.attnforge.backward.default, saved, {"visible": 512})
    with pytest.raises(ValueError, match=r"^visible: got -4294967296, expected the average"):
        torch.ops.attnforge.forward(q, k, v, mask.data, 2, None, visible=-(1 << 32))


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        mask = attnforge.Spans(starts, ends, visible_keys=starts.shape[0] // 2)
        return attnforge.attention(q, k, v, mask)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_may_compute_it(asked: Asked, strict: bool) -> None:
    """Here from the length, which stays free."""
    q, k, v = (x.detach() for x in leaves())
    mask = spans()
    rows = torch.export.Dim("rows", min=8, max=512)
    shapes = (*({2: rows},) * 3, {0: rows}, {0: rows})
    program = torch.export.export(
        Module(), (q, k, v, mask.starts, mask.ends), strict=strict, dynamic_shapes=shapes
    ).module()
    expected = attnforge.attention(q, k, v, mask)
    asked.clear()
    assert torch.equal(program(q, k, v, mask.starts, mask.ends), expected)
    longer, wide = spans(rows=300), torch.randn(1, 2, 300, DIM)
    program(wide, wide, wide, longer.starts, longer.ends)
    assert asked == [(Direction.FORWARD, 32), (Direction.FORWARD, 150)]


# ---- On a GPU


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    """Making a pack's mask and calling with it, forward and backward."""
    x = torch.randn(1, 2, 300, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for turn in range(2):  # the first call loads kernels
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            mask = attnforge.bagel.PackedMask([200, 100], [150, 50, 100], ["full", "noise", "causal"], "cuda")
            attnforge.attention(x, x, x, mask).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_sparse_pack_runs_the_block_per_kv_head_on_hopper(loaded: list[Spec]) -> None:
    """BAGEL-7B's heads; a pack of short documents against the same rows as one document, which differ in it alone."""
    device = torch.device("cuda")
    if kernels.targets(device) != HOPPER:
        pytest.skip("not a Hopper GPU")
    rows, document = 32768, 1024
    q = torch.randn(1, 28, rows, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 4, rows, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    lengths = [document] * (rows // document)
    sparse = attnforge.bagel.PackedMask(lengths, lengths, ["causal"] * len(lengths), device)
    unsaid = attnforge.Spans(sparse.starts, sparse.ends)
    grads = [torch.autograd.grad(attnforge.attention(q, k, k, m).sum(), (q, k)) for m in (sparse, unsaid)]
    owners = [spec.tuning.split_heads for spec in loaded if isinstance(spec.tuning, Sm90Backward)]
    assert owners == [False, True]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()
