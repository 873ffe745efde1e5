"""The mma.sync kernels against float64 without a GPU: their own source, run on the CPU by emulator.py."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulator import Emulated, translate
from oracle import Shape, dense, draw, make_mask, unions
from torch import Tensor

from attnforge.codegen.families.sm80 import Sm80Forward
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.render import Source
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.reference import reference

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="fibers and half floats as on x86-64")

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
BFLOAT16, FLOAT16 = DType.BFLOAT16, DType.FLOAT16
LIMIT = {BFLOAT16: 1e-2, FLOAT16: 1.5e-3}  # of the largest value
# direction, target, dtype, head_dim, of v, alignment, mask
CASES = [
    (FORWARD, Arch.SM80, BFLOAT16, 64, 0, 16, Mask.SPANS),
    (FORWARD, Arch.SM80, FLOAT16, 41, 0, 2, Mask.DENSE),
    (FORWARD, Arch.SM89, BFLOAT16, 44, 0, 8, Mask.CAUSAL),
    (FORWARD, Arch.SM120, BFLOAT16, 41, 64, 4, Mask.FULL),
    (FORWARD, Arch.SM86, BFLOAT16, 256, 0, 16, Mask.SPANS),
    (BACKWARD, Arch.SM80, BFLOAT16, 64, 0, 16, Mask.SPANS),
    (BACKWARD, Arch.SM80, FLOAT16, 41, 0, 2, Mask.SPANS),
    (BACKWARD, Arch.SM89, BFLOAT16, 44, 0, 8, Mask.DENSE),
    (BACKWARD, Arch.SM90, BFLOAT16, 64, 41, 2, Mask.FULL),
    (BACKWARD, Arch.SM89, BFLOAT16, 256, 0, 16, Mask.CAUSAL),
]


def aligned(x: Tensor, align: int) -> Tensor:
    """The values of x in rows that start at multiples of `align` bytes and of no larger power of two, NaN between."""
    columns = -(-x.shape[3] * 2 // align) * align // 2
    while columns * 2 % (2 * align) == 0:
        columns += align // 2
    whole = x.new_full((*x.shape[:3], columns), torch.nan)
    whole[..., : x.shape[3]] = x
    return whole[..., : x.shape[3]]


def run(
    spec: Spec,
    directory: Path,
    planes: tuple[int, int] | None = None,
    translate: Callable[[Source], str] = translate,
    batch_heads: tuple[int, int, int] = (2, 1, 3),
) -> None:
    """Compare one variant with the reference, on lengths off every tile and rows aligned as its problem says."""
    p = spec.problem
    seq_q, seq_k = (70, 100) if planes is None else (200, 161)
    shape = Shape(seq_q, seq_k, p.head_dim, 1, 2, 1, p.dim_v)
    if planes is not None:
        batch, heads_kv, group = batch_heads
        shape = Shape(seq_q, seq_k, p.head_dim, heads_kv, group, batch, p.dim_v)
    x = draw(shape, torch.bfloat16 if p.dtype is BFLOAT16 else torch.float16, "cpu")
    q, k, v, dout = (aligned(t.detach(), p.align) for t in (x.q, x.k, x.v, x.dout))
    mask = make_mask(p.mask.value, seq_q, seq_k, "cpu")
    if p.unions:
        mask = unions(seq_q, seq_k, p.intervals, "cpu", planes or (1, 1))
    elif planes:
        mask = dense(seq_q, seq_k, "cpu", planes=planes)
    exact = reference(q, k, v, mask, dout=dout)
    kernel = Emulated(spec, directory, translate)
    if p.direction is FORWARD:
        out, lse = kernel.forward(q, k, v, mask)
        pairs = [("out", out, exact.out), ("lse", lse.nan_to_num(neginf=0), exact.lse.nan_to_num(neginf=0))]
        assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf)
        assert not out[lse == -torch.inf].any()
    else:
        saved = aligned(exact.out.to(q.dtype), p.align), exact.lse.float().contiguous()
        grads = kernel.backward(dout, q, k, v, *saved, mask)
        answers = (exact.dq, exact.dk, exact.dv)
        pairs = [
            (n, g, a) for n, g, a in zip(("dq", "dk", "dv"), grads, answers, strict=True) if a is not None
        ]
    for name, got, answer in pairs:
        error = (got - answer).abs().max().item()
        assert error <= LIMIT[p.dtype] * answer.abs().max().item(), f"{name}: {error}"


@pytest.mark.parametrize(
    ("direction", "arch", "dtype", "head_dim", "dim_v", "align", "mask"),
    CASES,
    ids=lambda value: getattr(value, "value", value),
)
def test_first_choices(
    direction: Direction,
    arch: Arch,
    dtype: DType,
    head_dim: int,
    dim_v: int,
    align: int,
    mask: Mask,
    tmp_path: Path,
) -> None:
    run(next(candidates(Problem(direction, arch, dtype, head_dim, mask, align, dim_v))), tmp_path)


@pytest.mark.parametrize(
    ("direction", "wanted"),
    [
        (FORWARD, lambda knobs: True),
        (BACKWARD, lambda knobs: not knobs["split_heads"]),
        (BACKWARD, lambda knobs: knobs["split_heads"]),
        (BACKWARD, lambda knobs: knobs["deterministic"]),
    ],
    ids=["forward", "kv-heads", "split-heads", "deterministic"],
)
def test_a_mask_for_each_head(
    direction: Direction, wanted: Callable[[dict[str, int]], bool], tmp_path: Path
) -> None:
    """q heads of a kv head visit different tiles: a block walks several lists, and turns follow the shared order."""
    problem = Problem(direction, Arch.SM80, BFLOAT16, 32, Mask.DENSE)
    spec = next(spec for spec in candidates(problem) if wanted(spec.to_json()["tuning"]))
    run(spec, tmp_path, planes=(2, 3))


# direction, intervals, planes, knobs. Two kv heads: planes for each kv head, for each q head, for each batch entry.
UNIONS: list[tuple[Direction, int, tuple[int, int], dict[str, bool]]] = [
    (FORWARD, 2, (1, 1), {}),
    (FORWARD, 4, (2, 4), {}),
    (FORWARD, 1, (1, 2), {}),
    (BACKWARD, 3, (1, 1), {"split_heads": False}),
    (BACKWARD, 3, (2, 1), {"split_heads": True}),
    (BACKWARD, 2, (2, 4), {"split_heads": False}),
    (BACKWARD, 2, (1, 2), {"split_heads": False, "deterministic": True}),
    (BACKWARD, 1, (2, 4), {"deterministic": True}),
]


@pytest.mark.parametrize(("direction", "count", "planes", "knobs"), UNIONS, ids=str)
def test_unions(
    direction: Direction, count: int, planes: tuple[int, int], knobs: dict[str, bool], tmp_path: Path
) -> None:
    apart = int(planes != (1, 1))
    problem = Problem(direction, Arch.SM80, BFLOAT16, 32, Mask.SPANS, intervals=count, planes=apart)
    fits = (s for s in candidates(problem) if knobs.items() <= s.to_json()["tuning"].items())
    run(next(fits), tmp_path, planes=planes, batch_heads=(2, 2, 2))


# Several buffers: copies of later tiles are in flight while this one is awaited.
STAGED = [
    Sm80Forward(64, 32, 4, 2, False),
    Sm80Forward(64, 32, 4, 3, False),
    Sm80Backward(32, 32, 4, 2, 2, 2, 2, False, False),
]


def staged(tuning: Sm80Forward | Sm80Backward) -> Spec:
    direction = FORWARD if isinstance(tuning, Sm80Forward) else BACKWARD
    return Spec(Problem(direction, Arch.SM80, BFLOAT16, 32, Mask.FULL), tuning)


@pytest.mark.parametrize("tuning", STAGED, ids=lambda t: f"{type(t).__name__}-{t.stages}")
def test_every_tile_is_waited_for(tuning: Sm80Forward | Sm80Backward, tmp_path: Path) -> None:
    run(staged(tuning), tmp_path)


@pytest.mark.parametrize("tuning", STAGED[::2], ids=lambda t: f"{type(t).__name__}-{t.stages}")
def test_a_wait_for_too_few_copies_is_seen(tuning: Sm80Forward | Sm80Backward, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run(staged(tuning), tmp_path, translate=lambda source: translate(late(source)))


def late(source: Source) -> Source:
    """Its main loop leaves one group more in flight than it may."""
    text, count = re.subn(
        r"(void cp_async_wait\(\).*wait_group )(\d)", lambda m: f"{m[1]}{int(m[2]) + 1}", source.text
    )
    assert count == 1
    return replace(source, text=text)
