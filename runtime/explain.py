"""Why dispatch chooses a kernel for a call: the table entry it is from, and why others come after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from attnforge.codegen.families import make_plan
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import Arch, Problem
from attnforge.runtime import choosing, fitting
from attnforge.runtime.call import Call
from attnforge.runtime.choosing import DISTANCES, Choice, Offer
from attnforge.runtime.dispatch import Target, choose_for
from attnforge.runtime.tables import Tuned

RANKS = ("of this device", "measured on another device", "modelled, not measured")


@dataclass(frozen=True)
class Rejected:
    """What was not chosen, a kernel's slug or an architecture, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """The choice, the nearest entries and the architectures that were passed over. `fallback`: no entry fits."""

    choice: Choice
    fallback: bool
    archs: tuple[Rejected, ...]
    entries: tuple[Rejected, ...]


def explain(call: Call, target: Target) -> Explanation:
    """The choice for a call and the reasons; arguments and errors as `dispatch.choose_for`."""
    choice = choose_for(call, target)
    taken = choice.offer
    there = call.on(choice.spec.problem.arch)
    offers = list(choosing.offers(there, target.name))
    others = {
        offer.entry.spec.slug: _why_not(offer, taken, there)
        for offer in reversed(offers)  # of several entries of a kernel the nearest
        if offer != taken and offer.entry.spec.tuning != choice.spec.tuning
    }
    entries = tuple(Rejected(name, others[name]) for name in reversed(others))
    archs = tuple(_other_archs(call, choice.spec.problem.arch, target))
    return Explanation(choice, taken is None, archs, entries)


def _why_not(offer: Offer, taken: Offer | None, call: Call) -> str:
    """The first thing that puts an entry behind the one that was taken, or why it cannot be taken at all."""
    try:
        plan = make_plan(fitting.replanned(call, offer.entry))
    except Infeasible as reason:
        return f"infeasible here: {reason}"
    if call.deterministic and not plan.deterministic and taken is None:
        return "its sums have no fixed order"
    if taken is None:
        return "not reached"
    if offer.modelled != taken.modelled:
        return f"{RANKS[offer.rank]} ({offer.path.name})"
    for name, mine, best in zip(DISTANCES, offer.distance, taken.distance, strict=True):
        if mine != best:
            return _farther(name, offer, taken, call.deterministic)
    return "as near and as fast: the chosen one comes first by name"


def _shape(entry: Tuned) -> str:
    return (
        f"{entry.size} rows, {entry.visible_keys} visible keys"
        if entry.visible_keys
        else f"{entry.size} rows"
    )


def _farther(name: str, offer: Offer, taken: Offer, deterministic: bool) -> str:
    """Why an entry that differs from the taken one in the part `name` of its distance comes after it."""
    mine, best = offer.entry, taken.entry
    if name == "device":
        return f"{RANKS[offer.rank]} ({offer.path.name})"
    if name == "long lists":
        return "does not divide the work of keys that nearly all queries see, and the mask may have such keys"
    if name == "shape" and deterministic and best.fixed_order:
        if not mine.fixed_order:
            return "searched for calls that do not ask for deterministic gradients"
        if mine.group != best.group:
            name = "GQA ratio"
    if name == "shape":
        return f"for {_shape(mine)}; the chosen one is nearer: {_shape(best)}"
    if name == "speed":
        return f"slower: {mine.tflops:#.4g} TFLOP/s, the chosen one {best.tflops:#.4g}"
    if name == "score":
        score = mine.spec.problem.score
        return f"for the score function {score}" if score else "for calls without a score function"
    if name in {f.name for f in dataclasses.fields(Problem)}:
        value = getattr(mine.spec.problem, name)
        return f"for another {name}: {getattr(value, 'value', value)}"
    values = {
        "length": (mine.size, best.size),
        "GQA ratio": (mine.group, best.group),
        "rounds": (mine.rounds, best.rounds),
    }[name]
    return f"{name} {values[0]}; that of the chosen one is nearer: {values[1]}"


def _other_archs(call: Call, chosen: Arch, target: Target) -> Iterator[Rejected]:
    """The other architectures that the device runs."""

    def speed(arch: Arch, strict: bool) -> float | None:
        return choosing.measured(dataclasses.replace(call.on(arch), deterministic=strict), target.name)

    # As dispatch compares them: by searches for deterministic calls only if all were measured in such.
    strict = call.deterministic and all(speed(arch, True) for arch in target.archs)
    mine = speed(chosen, strict)
    for arch in target.archs:
        if arch is chosen:
            continue
        there = dataclasses.replace(call.problem, arch=arch)
        if next(candidates(there), None) is None:
            yield Rejected(arch.value, why_infeasible(there))
        elif mine and (theirs := speed(arch, strict)):
            yield Rejected(arch.value, f"measured slower: {theirs:#.4g} TFLOP/s, the chosen one {mine:#.4g}")
        else:
            yield Rejected(
                arch.value, f"not compared by speed: {chosen.value} comes first unless both were measured"
            )
