"""One HTML page about search logs that needs no network: text and tables from a template, charts by Vega-Lite.

It needs the packages of the extra `report`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from attnforge import __version__
from attnforge.bagel.measure.report import milliseconds, speed
from attnforge.bagel.report import charts
from attnforge.bagel.report.bounds import Bound, Roof, bounds, case_of, memory_ms
from attnforge.bagel.report.kernels import Comparison, compare
from attnforge.bagel.report.masks import MaskPicture, hidden_colour, picture_of
from attnforge.bagel.report.read import Logs, Run, Subject, Variant
from attnforge.bagel.report.sources import style_sheet
from attnforge.codegen.render import TEMPLATES
from attnforge.codegen.spec import Direction
from attnforge.runtime.search.case import Case

FOLDER = TEMPLATES / "report"
SHOWN = 12  # rows of the table of variants
DETAIL = 4000  # characters of a failure's message
GROUPS = ("time", "knobs", "resources", "roofline")  # of charts
PASSES = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class Figure:
    """A chart: `key` finds its spec on the page, `label` says what it shows to those who do not see it."""

    key: str
    title: str
    label: str


@dataclass(frozen=True)
class Failures:
    """Variants that failed alike: their status, the first line and the whole of one message, and their knobs."""

    status: str
    line: str
    detail: str
    knobs: list[str]


@dataclass
class Section:
    """All that the page says about one problem."""

    key: str
    title: str
    subject: Subject
    scale: charts.Scale
    winner: tuple[Run, Variant] | None
    knobs: list[str]  # those that differ
    fixed: str  # the others of the winner, with their values
    comparison: Comparison | None = None
    figures: dict[str, list[Figure]] = field(default_factory=lambda: {group: [] for group in GROUPS})
    roof: Roof | None = None
    bound: Bound | None = None  # of the winner
    memory: float = 0.0  # milliseconds
    mask: MaskPicture | None = None
    no_case: str = ""  # why the case cannot be made here

    @property
    def facts(self) -> list[tuple[str, str, str]]:
        """(name, value, remark) of the problem's headline numbers."""
        if self.winner is None:
            return []
        run, best = self.winner
        found = [("fastest", speed(best.tflops), f"{milliseconds(best.ms)} ms")]
        if self.comparison is not None and self.comparison.measured is not None:
            ratio = best.tflops / self.comparison.measured.tflops
            found.append(("against the incumbent", f"{ratio:.2f}x", speed(self.comparison.measured.tflops)))
        if (peer := run.best_peer) is not None and peer.tflops:
            remark = f"{peer.name}, {speed(peer.tflops)}"
            found.append(("against the best peer", f"{peer.ratio(best):.2f}x", remark))
        if self.bound is not None and self.roof is not None and not self.roof.measured:
            share = f"{best.tflops / self.bound.tflops:.0%}"
            found.append(("of its schedule's bound", share, speed(self.bound.tflops)))
        return found

    @property
    def values(self) -> dict[str, str]:
        """The headline numbers by name."""
        return {name: value for name, value, _ in self.facts}

    def table(self) -> list[tuple[Run, Variant]]:
        """The fastest variants of all runs; of one run as it ranks them."""
        rows = [(run, v) for run in self.subject.runs for v in run.ranked]
        if len(self.subject.runs) > 1:
            rows.sort(key=lambda row: row[1].ms)
        return rows[:SHOWN]

    def against_first(self, run: Run) -> str:
        """How much faster the variants of `run` are than the same ones of the first run, in words."""
        first = {v.spec: v.ms for v in self.subject.runs[0].ranked}
        ratios = [first[v.spec] / v.ms for v in run.ranked if v.spec in first]
        if run is self.subject.runs[0] or not ratios:
            return ""
        name = self.subject.runs[0].label
        return f"{len(ratios)} variants measured in {name}, too: {median(ratios):.3f}x as fast here (median)"

    def failures(self) -> list[Failures]:
        """Failed variants, those with one status and first line together."""
        groups: dict[tuple[str, str], Failures] = {}
        for run in self.subject.runs:
            for v in run.failed:
                lines = v.detail.strip().splitlines() or ["no message"]
                line = next((one for one in lines if "error" in one), lines[0])[:200]
                group = groups.setdefault((v.status, line), Failures(v.status, line, v.detail[:DETAIL], []))
                group.knobs.append(words(v, self.knobs) or words(v))
        return sorted(groups.values(), key=lambda one: (one.status, -len(one.knobs)))


def make_page(logs: Logs) -> str:
    """The page as text. Raises RuntimeError if the JavaScript bundle cannot be made."""
    specs: dict[str, charts.Chart] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    sections = []
    for number, subject in enumerate(logs.subjects, 1):
        section = _section(f"p{number}", subject)
        _add_charts(section, specs)
        rows[section.key] = charts.rows_of(subject, section.scale)
        sections.append(section)
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            sections=sections,
            skipped={path: count for path, count in logs.skipped.items() if count},
            styles={theme: style_sheet(theme) for theme in ("light", "dark")},
            version=__version__,
            hidden_colour=hidden_colour(),
            hidden=hidden,
            any_interval=lambda section: any(v.interval for r in section.subject.runs for v in r.ranked),
            data=_json({"specs": specs, "rows": rows}),
            bundle=Markup(_bundle()),
            script=Markup((FOLDER / "charts.js").read_text(encoding="utf-8")),
        )
    )


def _section(key: str, subject: Subject) -> Section:
    """Everything but the charts."""
    variants = [v for run in subject.runs for v in run.variants]
    knobs = charts.varied(variants)
    title = f"{subject.case}, {PASSES.get(subject.direction, subject.direction)}, {subject.dtype}"
    winner = subject.best
    fixed = words(winner[1], [x for x in winner[1].spec.tuning.to_json() if x not in knobs]) if winner else ""
    section = Section(key, title, subject, charts.scale_of(subject), winner, knobs, fixed)
    if winner is None:
        return section
    try:
        case = case_of(subject.case, subject.dtype)
    except (ValueError, OSError) as reason:
        section.no_case = str(reason)
        section.comparison = compare(*winner, None)
        return section
    section.comparison = compare(*winner, case)
    tuning = winner[1].spec.tuning
    section.mask = picture_of(case, tuning.tile_m, tuning.tile_n)
    return section


def _add_charts(section: Section, specs: dict[str, charts.Chart]) -> None:
    """Make the charts of a section into `specs`."""
    if section.winner is None:
        return
    subject, scale, (run, best) = section.subject, section.scale, section.winner

    def add(group: str, name: str, title: str, label: str, spec: charts.Chart) -> None:
        key = f"{section.key}-{name}"
        specs[key] = spec
        section.figures[group].append(Figure(key, title, label))

    label = f"The best speed so far over the time of the search; it ends at {speed(best.tflops)}."
    add("time", "time", "", label, charts.over_time(subject, scale))
    texts = charts.meanings(best.spec.tuning)
    for knob in section.knobs:
        label = f"Speed of the variants by {knob}; the fastest has {best.spec.tuning.to_json().get(knob, 'none')}."
        add("knobs", f"knob-{knob}", texts.get(knob, ""), label, charts.by_knob(subject, scale, knob))
    for column, title in (("registers", "registers a thread"), ("KiB", "KiB of shared memory a block")):
        if any(v.registers or v.shared_bytes for v in run.ranked):
            chart = charts.resources(subject, scale, column, title)
            add("resources", column, "", f"Speed of the variants by {title}.", chart)
    if not section.no_case:
        case = case_of(subject.case, subject.dtype)
        add("roofline", "roofline", "", *_roofline(section, case, run))


def _roofline(section: Section, case: Case, run: Run) -> tuple[str, charts.Chart]:
    """Label and chart. Sets the section's roof and the winner's bound."""
    assert section.winner is not None
    roof, limits = bounds(case, run)
    section.roof = roof
    section.bound = next(bound for v, bound in limits if v is section.winner[1])
    section.memory = memory_ms(case, roof, Direction(section.subject.direction))
    label = f"Speed of the variants under a roof of {speed(roof.tflops)}; the fastest is bound at "
    return f"{label}{speed(section.bound.tflops)}.", charts.roofline(section.scale, roof, limits)


def words(variant: Variant, names: Iterable[str] | None = None) -> str:
    """Knobs as text: `tile_m=128 stages=2`; those in `names`, or all."""
    knobs = variant.spec.tuning.to_json()
    return " ".join(f"{name}={knobs[name]}" for name in (knobs if names is None else names) if name in knobs)


def span(variant: Variant, scale: charts.Scale) -> str:
    """The interval of a speed in the unit of its charts; empty if there is none."""
    if variant.interval is None:
        return ""
    low, high = (x * scale.factor for x in variant.speeds)
    return f"{low:.1f} to {high:.1f}"


def hidden(section: Section) -> str:
    """What lies below the axis of the charts, in words; empty if nothing does."""
    low = section.scale.low / section.scale.factor
    slow = sum(v.tflops < low for run in section.subject.runs for v in run.ranked)
    found = [f"{slow} variant{'s' if slow > 1 else ''}"] if slow else []
    for run in section.subject.runs:
        place = f", {run.label}" if len(section.subject.runs) > 1 else ""
        slower = (peer for peer in run.peers if peer.tflops and peer.tflops < low)
        found += [f"{peer.name} ({speed(peer.tflops)}{place})" for peer in slower]
    return ", ".join(found)


@cache
def _environment() -> Environment:
    """Strict, and everything is escaped that is not Markup."""
    env = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(speed=speed, milliseconds=milliseconds, words=words, span=span)
    return env


def _json(value: Any) -> Markup:
    """JSON that may stand in a <script>: no tag can end or begin in it."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that loads nothing."""
    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return text.replace("</script", "<\\/script")
