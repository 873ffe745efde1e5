"""Plans, whose numbers are counted by hand: threads, shared memory, registers, panels, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.cpu import CpuForward
from attnforge.codegen.families.sm80 import Sm80Forward
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
# Of Hopper's forward: the plainest, without any of its knobs.
PLAIN = Sm90Forward(128, 128, 2, ping_pong=False, persistent=False, dynamic=False, q_in_regs=False)


def plan_of(direction: Direction, arch: Arch, head_dim: int, mask: Mask, tuning: Tuning) -> tuple[int, ...]:
    """(threads, dynamic shared bytes, registers) of the main launch."""
    dtype = DType.FLOAT32 if arch is Arch.CPU else DType.BFLOAT16
    plan = make_plan(Spec(Problem(direction, arch, dtype, head_dim, mask), tuning))
    (main,) = (launch for launch in plan.launches if launch.symbol == plan.spec.symbol)
    return main.threads, main.shared_bytes, plan.registers


def test_mma_forward_by_hand() -> None:
    tuning = Sm80Forward(tile_m=128, tile_n=64, warps=4, stages=2, q_in_regs=False)
    # Rows of 128 columns are 256 bytes: Q 128 of them, K and V 64 each, twice.
    shared = 128 * 256 + 2 * 2 * 64 * 256
    # Two 16-row fragments a warp: O 128/8*4, S 64/8*4, and one of Q in flight; 40 beside them.
    registers = 2 * (64 + 32 + 4) + 40
    assert plan_of(FORWARD, Arch.SM80, 128, Mask.FULL, tuning) == (128, shared, registers)
    # Q in registers: all 128/16 steps of a fragment, 4 registers each, not one in flight.
    kept = replace(tuning, warps=8, q_in_regs=True)
    assert plan_of(FORWARD, Arch.SM80, 128, Mask.FULL, kept)[2] == 64 + 32 + 8 * 4 + 40
    # 72 columns are 9 chunks of 16 bytes, odd already: no swizzle, no padding.
    shared = (128 + 2 * 2 * 64) * 144
    assert plan_of(FORWARD, Arch.SM86, 72, Mask.SPANS, tuning)[1] == shared
    # In registers, Q passes through the buffers of K and V.
    assert plan_of(FORWARD, Arch.SM80, 64, Mask.FULL, replace(tuning, q_in_regs=True))[1] == 2 * 2 * 64 * 128


def test_mma_backward_by_hand() -> None:
    tuning = Sm80Backward(64, 128, 8, 2, 4, 8, 4, False, False)
    # K, V; Q, dO twice; P, dS with rows of 128 keys; (lse, delta) of 64 rows twice; spans of 128 keys.
    shared = 2 * 128 * 128 + 2 * 2 * 64 * 128 + 2 * 64 * 256 + 2 * 64 * 8 + 128 * 8
    # dK and dV, 128 x 64 each over 256 threads; S and dP, 64 x 128 each, outweigh dQ; 40 beside them.
    registers = 2 * 32 + 2 * 32 + 40
    assert plan_of(BACKWARD, Arch.SM80, 64, Mask.SPANS, tuning) == (256, shared, registers)
    assert plan_of(BACKWARD, Arch.SM80, 64, Mask.CAUSAL, tuning)[1] == shared - 128 * 8
    split = make_plan(
        Spec(Problem(BACKWARD, Arch.SM80, DType.BFLOAT16, 64, Mask.SPANS), replace(tuning, split_heads=True))
    )
    assert [launch.symbol.removeprefix(split.spec.symbol) for launch in split.launches] == [
        "_preprocess",
        "",
        "_postprocess",
        "_postprocess_dkv",
    ]
    assert split.launches[1].grid == ("tiles_n", "batch", "heads_q")
    assert split.dkv_accum
    assert not split.deterministic


def test_hopper_forward_by_hand() -> None:
    # Q once, K and V twice, 32 KiB each; barriers: two of each buffer.
    shared = 5 * 32768 + 8 * (2 + 2 * 4)
    # S 128/2, P 128/4, O 128/2 and 28 beside them; a producer and two consumer warpgroups.
    assert plan_of(FORWARD, Arch.SM90A, 128, Mask.FULL, PLAIN) == (384, shared, 64 + 32 + 64 + 28)
    assert plan_of(FORWARD, Arch.SM90A, 128, Mask.SPANS, PLAIN)[1] == shared + 2 * 128 * 8
    # A block that goes on to another tile has its Q come while O of this one leaves. The producer leaves 16 bytes about
    # each of the two pieces of work, and 16 for each of its two parts if the mask has lists.
    more = shared + 32768 + 16
    assert plan_of(FORWARD, Arch.SM90A, 128, Mask.FULL, replace(PLAIN, persistent=True))[1] == more + 2 * 16
    assert plan_of(FORWARD, Arch.SM90A, 128, Mask.DENSE, replace(PLAIN, persistent=True))[1] == more
    counted = replace(PLAIN, persistent=True, dynamic=True)
    assert plan_of(FORWARD, Arch.SM90A, 128, Mask.SPANS, counted)[1] == more + 2 * 128 * 8 + 2 * (16 + 2 * 16)


@pytest.mark.parametrize(
    ("head_dim", "maps"),
    [
        (128, [(64, 2)]),  # two panels of 64 columns in one copy
        (72, [(64, 1), (16, 1)]),  # 64, and the rest with zeros after it
        (96, [(64, 1), (32, 1)]),
        (120, [(64, 1)]),  # the second panel reaches past the row: a copy for each
        (24, [(32, 1)]),
        (48, [(64, 1)]),
    ],
)
def test_hopper_panels_by_hand(head_dim: int, maps: list[tuple[int, int]]) -> None:
    plan = make_plan(Spec(Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.FULL), PLAIN))
    for tensor, rows in (("q", 128), ("k", 128), ("v", 128)):
        assert [(m.columns, m.panels) for m in plan.tensor_maps if m.tensor == tensor] == maps
        assert {m.rows for m in plan.tensor_maps if m.tensor == tensor} == {rows}
    # O leaves from 64 rows of a tile, panel by panel.
    assert {(m.rows, m.panels) for m in plan.tensor_maps if m.tensor == "out"} == {(64, 1)}


@pytest.mark.parametrize(
    ("head_dim", "dim_v", "panels", "panels_v", "together"),
    [(192, 128, 3, 2, True), (128, 64, 2, 1, True), (96, 128, 2, 2, False), (40, 72, 1, 2, False)],
)
def test_hopper_panels_of_v_by_hand(
    head_dim: int, dim_v: int, panels: int, panels_v: int, together: bool
) -> None:
    """With a head_dim of V of its own: whole panels of 64 columns, in one copy where all of them are full."""
    plan = make_plan(
        Spec(Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.FULL, 16, dim_v), PLAIN)
    )
    # Q, or O where it is wider, once; K and V twice; barriers.
    rows = max(panels, panels_v) + 2 * (panels + panels_v)
    assert plan.launches[0].shared_bytes == 128 * 128 * rows + 8 * (2 + 2 * 4)
    assert plan.registers == 64 + 32 + dim_v // 2 + 28
    counts = {"q": panels, "k": panels, "v": panels_v} if together else {"q": 1, "k": 1, "v": 1}
    assert {m.tensor: m.panels for m in plan.tensor_maps} == {**counts, "out": 1}
    assert {(m.tensor, m.columns, m.rows) for m in plan.tensor_maps} == {
        *((tensor, 64, 128) for tensor in "qkv"),
        ("out", 64, 64),
    }


@pytest.mark.parametrize("head_dim", range(16, 129, 8))
def test_both_consumers_share_all_columns_of_dq(head_dim: int) -> None:
    """The first has `dq_columns` of them, a multiple of 8, the second the rest, which are no more."""
    problem = Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.FULL)
    shares = {
        make_plan(spec).constants["dq_columns"] for spec in islice(candidates(problem), 100) if not lags(spec)
    }
    assert shares
    for first in shares:
        assert first % 8 == 0
        assert 0 < head_dim - first <= first


def lags(spec: Spec) -> bool:
    assert isinstance(spec.tuning, Sm90Backward)
    return spec.tuning.lag


def test_cpu_forward_by_hand() -> None:
    tuning = CpuForward(tile_m=48, tile_n=64, heads=2, lanes=16, rows=8, cols=3, pairs=False)
    plan = make_plan(Spec(Problem(FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.SPANS, 4), tuning))
    # A panel of 48 queries: Q and O columns, maximum and sum, three numbers; then K, V and S of 64 keys.
    panel = 48 * (64 + 64 + 2) * 4 + 12
    assert plan.constants["scratch_bytes"] == 2 * -(-panel // 64) * 64 + 64 * (48 + 2 * 64) * 4
    assert [launch.symbol for launch in plan.schedule] == [f"{plan.spec.symbol}_schedule"]


@pytest.mark.parametrize(
    ("arch", "head_dim", "tuning", "message"),
    [
        # (128 + 2 * 3 * 128) rows of 256 bytes; the limit is 99 KiB.
        (Arch.SM86, 128, Sm80Forward(128, 128, 8, 3, False), "229376 bytes, 128000 more than sm86 has"),
        # Two fragments of O 256/8*4, S 128/8*4 and Q 4; the limit is 255 - 40.
        (
            Arch.SM80,
            256,
            Sm80Forward(128, 32, 4, 1, False),
            "take 296 per thread, 81 more than are available",
        ),
        (
            Arch.SM80,
            64,
            Sm80Forward(128, 24, 4, 1, False),
            "tile_n 24: must be a multiple of 16 .k16 steps of splits: 1 x 16.",
        ),
        (Arch.SM80, 264, Sm80Forward(128, 64, 4, 1, False), "head_dim 264: the sm80 kernels take 1 to 256"),
        (
            Arch.CPU,
            64,
            CpuForward(48, 64, 1, 16, 8, 4, False),
            "rows x cols takes 37 vector registers, 5 more than the CPU has",
        ),
        (Arch.CPU, 64, CpuForward(40, 64, 1, 16, 8, 2, False), "tile_m 40 is not a multiple of lanes"),
    ],
)
def test_what_does_not_fit_says_by_how_much(arch: Arch, head_dim: int, tuning: Tuning, message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        plan_of(FORWARD, arch, head_dim, Mask.FULL, tuning)
