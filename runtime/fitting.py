"""Fitting a tuning to a call. Takes the tuning of a table's entry and a call, gives a feasible spec, or Infeasible.

An entry was tuned for its own problem and size. For the call, as few of its knobs as possible change:

- `replanned` plans the entry's tuning for the call's problem. Knobs of a backward that are in the way are set to 0
  (`planned`), and sums in a fixed order are left out where they cost more than they did for the entry (`fits_order`);
- `spread_out` then gives a backward of fewer rounds (runtime/rounds.py) than the entry more blocks that do not wait;
- `dividing` gives each q head blocks of its own, among which long lists of queries are divided;
- `without_sums` makes blocks of heads without a group store dK and dV where they can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain, combinations

from attnforge.codegen.families import make_plan, make_tuning
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Direction, Spec, Tuning
from attnforge.runtime.call import Call
from attnforge.runtime.tables import Tuned

# Knobs of a backward without which it computes more problems (`planned`), and what they stand for.
DISPENSABLE = {
    "persistent": "persistent blocks",
    "launch_order": "its order of blocks",
    "staging": "its places of dQ",
    "stores_dkv": "stores of dK and dV",
}


def replanned(call: Call, entry: Tuned) -> Spec:
    """The spec of a call with the tuning of an entry, changed as `fits_order` and `planned` say, or Infeasible."""
    problem, tuning = call.problem, entry.spec.tuning
    if not fits_order(call, tuning):
        tuning = make_tuning(problem, tuning.to_json() | {"deterministic": 0})
    return planned(Spec(problem, tuning))


def fits_order(call: Call, tuning: Tuning) -> bool:
    """False for a kernel that sums gradients of a score's tensors in a fixed order where the call is not deterministic.

    Such a kernel may be the fastest for the other gradients, but for these it takes 80 bytes an element.
    """
    return call.deterministic or not (call.problem.score.wanted and getattr(tuning, "deterministic", False))


def planned(spec: Spec) -> Spec:
    """A spec, or the same with as few knobs as possible set to 0 so that it is feasible (`DISPENSABLE`).

    Persistent blocks take no score, no planes and no `split_heads`; without them each work tile has a block of its
    own. A `launch_order` needs deterministic blocks, one kind of mask, and either `split_heads` or none; `staging`
    needs shared memory. Infeasible if no knob helps.
    """
    found = _feasible(spec)
    if isinstance(found, Infeasible):
        raise Infeasible(found.reason, found.subject)
    return found


@lru_cache(maxsize=4096)
def _feasible(spec: Spec) -> Spec | Infeasible:
    """As `planned`, but an error is returned, so that it is kept, too: calls of other lengths meet the same entries."""
    for dropped in _dispensable(spec):
        knobs = spec.tuning.to_json() | dict.fromkeys(dropped, 0)
        found = Spec(spec.problem, make_tuning(spec.problem, knobs)) if dropped else spec
        try:
            make_plan(found)
        except Infeasible as error:
            reason = error.with_traceback(None)
        else:
            return found
    return reason


def _dispensable(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Knobs that `planned` sets to 0 where they are in the way: none, then one, then more of them."""
    names: list[str] = []
    if spec.problem.direction is Direction.BACKWARD:
        names = [name for name in DISPENSABLE if getattr(spec.tuning, name, 0)]
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


def changed(spec: Spec, changes: Mapping[str, int]) -> Spec:
    """The same with these values of the knobs that its family has, as `planned` makes it feasible; or Infeasible."""
    knobs = spec.tuning.to_json()
    knobs |= {name: value for name, value in changes.items() if name in knobs}
    return planned(Spec(spec.problem, make_tuning(spec.problem, knobs)))


def spread_out(spec: Spec, call: Call) -> Spec:
    """A backward's spec for a call of fewer rounds than it was tuned with; the same where nothing is to change.

    Where key tiles of kv heads leave more than a quarter of the GPU idle, each q head of a group has blocks of its own.
    These, and those of heads without a group, add in any order: in a fixed one they wait for each other, and there are
    no other blocks that compute meanwhile. Blocks that compute all heads of a group keep their order, which is as fast
    from one round on. See docs/experiments.md, 118.
    """
    knobs = spec.tuning.to_json()
    if "split_heads" not in knobs or (call.rounds > 0 and call.group > 1):
        return spec
    changes = {"deterministic": 0, "launch_order": 0}
    if call.group > 1:
        changes |= {"split_heads": 1, "persistent": 0}
    changes = {name: value for name, value in changes.items() if knobs.get(name, value) != value}
    if not changes:
        return spec
    try:
        return changed(spec, changes)
    except Infeasible:
        return spec


def dividing(spec: Spec) -> Spec:
    """A backward's spec with blocks for each q head, which divide long lists of queries; the same where none can.

    A block per kv head walks the list of its key tile alone. Where few keys are seen by nearly all queries, this takes
    up to 2.5 times as long. See docs/experiments.md, 133.
    """
    knobs = spec.tuning.to_json()
    if "split_heads" not in knobs or spec.tuning.adds_in_any_order:
        return spec
    for loaders in dict.fromkeys((knobs.get("loaders", 0), 0)):
        try:
            found = changed(spec, {"split_heads": 1, "deterministic": 0, "loaders": loaders})
        except Infeasible:
            continue
        return found if make_plan(found).cut_lists else spec
    return spec


def without_sums(spec: Spec, group: int) -> Spec:
    """The spec for groups of `group` q heads: for one of 1, blocks store dK and dV (knob `stores_dkv`).

    They share dK and dV of a key tile only where they divide its long list of visits. In larger groups nearly all are
    sums, and the knob would cost 1.5 % of the time. See docs/experiments.md, 130.
    """
    knobs = spec.tuning.to_json()
    if "stores_dkv" not in knobs:
        return spec
    stores = int(group == 1 and spec.problem.mask.listed and spec.tuning.adds_in_any_order)
    if knobs["stores_dkv"] == stores:
        return spec
    return Spec(spec.problem, make_tuning(spec.problem, knobs | {"stores_dkv": stores}))
