"""Every kind of Hopper forward that a search may meet: what its text calls, its text defines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from spaces import sample

from attnforge.codegen.families import make_plan
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.plan import Plan
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

# (of q and k, of v or 0)
HEAD_DIMS = ((24, 0), (64, 0), (72, 0), (128, 0), (192, 0), (256, 0), (192, 128), (40, 72))
DEFINED = re.compile(r"__device__ __forceinline__ [\w ]*?\b(\w+)\(")
CALLED = re.compile(r"\b([a-z]\w*)\(")


def kind(plan: Plan) -> tuple[object, ...]:
    """What decides which parts of the templates a kernel is made of."""
    tuning = plan.spec.tuning
    assert isinstance(tuning, Sm90Forward)
    knobs = tuning.ping_pong, tuning.persistent, tuning.dynamic, tuning.q_in_regs
    later = tuning.hand_over, tuning.exact_visits > 0, tuning.heads_together
    orders = (
        plan.row_groups,
        plan.short_last,
        plan.staggered,
        plan.constants["hidden"] if plan.staggered else 0,
    )
    constants = (plan.constants[name] for name in ("consumers", "q_buffers", "broadcast"))
    columns = bool(plan.constants["tail"]), bool(plan.spec.problem.dim_v), plan.constants["copies"] > 1
    return (plan.spec.problem.mask, *columns, *knobs, *later, *orders, *constants)


@cache
def kinds(mask: Mask) -> tuple[str, ...]:
    """A rendered kernel of each kind."""

    def plans() -> Iterator[Plan]:
        for head_dim, dim_v in HEAD_DIMS:
            problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, 16, dim_v)
            every = 97 if head_dim in (64, 128) else 997
            # The later part of the space are combinations of knobs whose texts hardly touch.
            yield from map(make_plan, sample(problem, 1000 if mask is Mask.FULL else 500, every))

    found: dict[tuple[object, ...], Spec] = {}
    for plan in plans():
        found.setdefault(kind(plan), plan.spec)
    return tuple(render(spec).text for spec in found.values())


@pytest.mark.parametrize("mask", list(Mask), ids=lambda mask: mask.value)
def test_what_a_kernel_calls_is_there(mask: Mask) -> None:
    ours = {name for each in Mask for text in kinds(each) for name in DEFINED.findall(text)}
    assert {"barrier_arrive_if", "find_range", "skip_visits", "store_empty"} <= ours
    for text in kinds(mask):
        code = re.sub(r'//[^\n]*|"[^"\n]*"', "", text)
        missing = set(CALLED.findall(code)) & ours - set(DEFINED.findall(text))
        assert not missing, (re.search(r"attnforge_fwd\w+", text), missing)
