"""The winner's source, and how it differs from the kernel that was dispatch's choice before."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.bagel.report.read import Run, Variant
from attnforge.bagel.report.sources import difference_html, source_html
from attnforge.codegen.cost_model import multiprocessors
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import Spec
from attnforge.runtime import choosing, tables
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.journal import source_key


@dataclass(frozen=True)
class Comparison:
    """The winner beside the incumbent."""

    winner: Spec
    incumbent: Spec | None
    origin: str  # who says that it was the incumbent
    measured: Variant | None  # the incumbent's result
    source: str  # HTML of the winner's text; empty if it cannot be rendered
    difference: str  # HTML; empty if there is no other kernel to compare with
    remark: str  # what is wrong with the source


def compare(run: Run, winner: Variant, case: Case | None) -> Comparison:
    """Compare the winner of a run with the incumbent that its log names, or with the choice of the package's tables."""
    incumbent, origin = run.incumbent, "the choice of the tuned tables when the search began"
    if incumbent is None and case is not None:
        incumbent, origin = _of_package(winner.spec, case, run.device), "the choice of the package's tables"
    measured = next((v for v in run.ranked if v.spec == incumbent), None)
    new, old = _rendered(winner.spec), _rendered(incumbent)
    if new is None:
        return Comparison(
            winner.spec, incumbent, origin, measured, "", "", "this version cannot render the variant"
        )
    changed = winner.source not in ("", source_key(new.text))
    remark = (
        "the templates have changed since the search: this text is not what was measured" if changed else ""
    )
    difference = difference_html(old, new) if old is not None else ""
    return Comparison(winner.spec, incumbent, origin, measured, source_html(new), difference, remark)


def _of_package(spec: Spec, case: Case, device: str) -> Spec | None:
    choices = choosing.choose(case.call(spec.problem, multiprocessors(device)), device, (tables.PACKAGED,))
    return next((choice.spec for choice in choices), None)


def _rendered(spec: Spec | None) -> Source | None:
    """The source, if the spec is feasible in this version."""
    try:
        return None if spec is None else render(spec)
    except Infeasible:
        return None
