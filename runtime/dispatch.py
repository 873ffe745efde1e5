"""Dispatch: which kernel variant runs a call. Tuned tables come first, then the search space's first candidate.

The operators call `resolve` once per problem class and keep the result; `forget` drops what they kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter

import torch

from attnforge.codegen.families import make_plan
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import (
    candidates,
    deterministic_candidates,
    first_refusal,
    splitting,
    why_infeasible,
)
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec, Tuning
from attnforge.runtime import choosing, fitting, kernels, tables
from attnforge.runtime.call import Call
from attnforge.runtime.choosing import Choice
from attnforge.runtime.inputs import MASKS
from attnforge.runtime.native.launcher import launcher
from attnforge.runtime.rounds import MANY

log = logging.getLogger("attnforge")

CONVERTED = "with deterministic sums"  # ends the reason for a kernel that no search has found

_reasons: dict[int, str] = {}  # of the latest choice of each handle
_ON_CPU = (DType.FLOAT32, DType.BFLOAT16)


@dataclass(frozen=True)
class Target:
    """A device: the name of its tuned table, and the architectures that it runs, best first."""

    name: str
    archs: tuple[Arch, ...]


def target_of(device: torch.device) -> Target:
    """The target of a device of this machine. Errors as `kernels.targets`."""
    return Target(tables.device_name(device), kernels.targets(device))


def choose(call: Call, device: torch.device, split_rows: int = 0) -> Choice:
    """As `choose_for`, for a device of this machine."""
    return choose_for(call, target_of(device), split_rows)


def choose_for(call: Call, target: Target, split_rows: int = 0) -> Choice:
    """The spec that computes `call` on `target`; the arch of the call's problem does not matter.

    For a deterministic call: an entry that was searched for such calls if one is near (`choosing.choose`), else the
    variant of another one that sums in a fixed order (`_deterministic`).
    `split_rows`: unless 0, prefer a kernel whose blocks share the keys of a query, if there is one for the problem;
    there are too few queries otherwise. On Hopper, with tiles of 64 or 128 rows, as it says.
    Raises Infeasible with the reason if there is no kernel, ValueError for a dtype without kernels on the device.
    """
    with tables.unchanged():
        return _choose(call, target, split_rows)


def _choose(call: Call, target: Target, split_rows: int) -> Choice:
    problem = call.problem
    check_dtype(problem)
    if split_rows and (split := _splitting(call, target, split_rows)):
        return Choice(split, "few queries for many keys: blocks share the keys, not tuned")
    for choice in _offers(call, target):
        if not call.deterministic or make_plan(choice.spec).deterministic:
            return choice
        if strict := _deterministic(choice.spec, call.group):
            return Choice(strict, f"{choice.reason}; {CONVERTED}", choice.offer, converted=True)
    archs = " or ".join(arch.value for arch in target.archs)
    what = f"{archs} {problem.direction.value} kernel for {problem.head_dims}"
    if call.deterministic and next(_offers(replace(call, deterministic=False), target), None):
        raise Infeasible(f"deterministic: no {what} sums dq in a fixed order; pass deterministic=False")
    refused = first_refusal(replace(problem, arch=target.archs[-1]))
    named = refused.subject == f"head_dim {problem.head_dim}"  # by `what`
    raise Infeasible(f"q: no {what}: {refused.reason if named else refused}")


def _in_words(problem: Problem) -> str:
    """What an entry has to agree with."""
    return f"{problem.arch.value} {problem.dtype.value} {problem.direction.value}, {problem.head_dims}"


def _offers(call: Call, target: Target) -> Iterator[Choice]:
    """What the entries of tables offer, then what the search space does, architecture by architecture."""
    for arch in _by_speed(call, target):
        there = call.on(arch)
        for choice in choosing.choose(there, target.name):
            if refused := kernels.refusal(choice.spec):
                log.debug("%s of %s cannot run here: %s", choice.spec.slug, target.name, refused)
            else:
                yield choice
        count = 0
        for spec in candidates(there.problem, partial(fitting.fits_order, there)):
            count += 1
            reason = f"first feasible of the search space, as no tuned entry fits {_in_words(there.problem)}"
            yield Choice(fitting.without_sums(spec, call.group), reason)
        if not count:
            log.debug("no %s kernel for %s: %s", arch.value, there.problem, why_infeasible(there.problem))


def _splitting(call: Call, target: Target, split_rows: int) -> Spec | None:
    """The kernel of the first target that has one.

    On Hopper with tiles for `split_rows`, elsewhere for the query rows of a kv head in calls of this octave.
    """
    shortest = 1 << (call.size.bit_length() - 1)
    octave = call.group * shortest, call.group * (2 * shortest - 1)
    specs = (
        splitting(replace(call.problem, arch=arch), *((split_rows,) if arch is Arch.SM90A else octave))
        for arch in target.archs
    )
    return next(chain.from_iterable(specs), None)


def _by_speed(call: Call, target: Target) -> tuple[Arch, ...]:
    """The architectures of a target, best first: by speed if all were measured on this problem class.

    For a deterministic call by searches for such calls, else by the others.
    """
    for strict in (True, False) if call.deterministic else (False,):
        speeds: list[tuple[float, Arch]] = []
        for arch in target.archs:
            if not (speed := choosing.measured(replace(call.on(arch), deterministic=strict), target.name)):
                break
            speeds.append((-speed, arch))
        else:
            return tuple(arch for _, arch in sorted(speeds, key=itemgetter(0)))
    return target.archs


def _deterministic(spec: Spec, group: int) -> Spec | None:
    """The deterministic variant nearest to `spec`: the same knobs with sums in a fixed order, if that is feasible.

    Under a mask a block for all q heads of a kv head would wait too often, so there is one for each q head, and those
    of a group start a tile apart (`launch_order` 3), so that they wait less for each other's dK and dV.
    """
    knobs = spec.tuning.to_json()
    if "deterministic" not in knobs:
        return None
    grouped = group > 1 and spec.problem.mask is not Mask.FULL
    by_head, apart = ({"split_heads": 1}, {"launch_order": 3}) if grouped else ({}, {})
    try:
        strict = fitting.changed(spec, {"deterministic": 1, **by_head, **apart})
        return strict if make_plan(strict).deterministic else None
    except Infeasible:
        fixed = deterministic_candidates(spec.problem, partial(_differing, knobs=knobs | by_head))
        nearest = next(fixed, None)
        return nearest and fitting.changed(nearest, apart)


def _differing(tuning: Tuning, knobs: dict[str, int]) -> int:
    return sum(value != knobs[name] for name, value in tuning.to_json().items())


def check_dtype(problem: Problem) -> None:
    """Raises ValueError for a dtype without kernels on the CPU; GPUs have kernels for all."""
    if problem.arch.is_gpu or problem.dtype in _ON_CPU:
        return
    names = " and ".join(str(kernels.TORCH_DTYPES[dtype]) for dtype in _ON_CPU)
    raise ValueError(f"q: got dtype {kernels.TORCH_DTYPES[problem.dtype]}, accepted on the CPU are {names}")


def resolve(
    backward: bool,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    mask: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    align: int,
    device: torch.device,
    deterministic: bool,
    visible_keys: int,
    intervals: int = 1,
    planes: bool = False,
    score: str = "",
    mask_mod: str = "",
    split_rows: int = 0,
    rounds: int = MANY,
) -> int:
    """Called by launcher.cpp for a new problem class: the handle of the chosen variant, compiled and loaded."""
    direction = Direction.BACKWARD if backward else Direction.FORWARD
    arch, kind = kernels.target(device), MASKS[mask]
    problem = Problem(
        direction,
        arch,
        kernels.DTYPES[dtype],
        head_dim,
        kind,
        align,
        head_dim_v,
        intervals=intervals,
        planes=int(planes),
        mask_mod=MaskMod(mask_mod),
        score=ScoreMod(score),
    )
    call = Call(
        problem,
        heads_q // heads_kv,
        seq_q,
        visible_keys=visible_keys,
        deterministic=deterministic and backward,
        rounds=rounds,
    )
    choice = choose(call, device, split_rows)
    log.debug("%s: %s", choice.spec.slug, choice.reason)
    handle = kernels.load(choice.spec, device)
    _reasons[handle] = choice.reason
    return handle


def reason_of(handle: int) -> str:
    """Why `resolve` chose the variant of this handle: the table's entry, or that there is none."""
    return _reasons[handle]


def forget() -> None:
    """Drop all choices, so that the next calls choose again. Needed after a tuned table has changed."""
    launcher()
    torch.ops.attnforge.forget_routes()
