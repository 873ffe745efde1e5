"""The charts of one problem as Vega-Lite specs, made with Altair. Colours are set by the page, by its theme.

All charts of a problem share one set of rows, `rows_of`, which the page hands to each under the name `variants`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import altair as alt

from attnforge.bagel.report.bounds import Bound, Roof
from attnforge.bagel.report.read import Peer, Run, Subject, Variant
from attnforge.codegen.spec import Tuning

VARIANTS, LIMITS = alt.NamedData(name="variants"), alt.NamedData(name="limits")
SLOWEST = 0.5  # of the fastest: what is slower than that may lie below the axis
HEIGHT = 260  # pixels
LABEL = 13  # pixels between the labels of two peers

Chart = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
    """The speed axis of a problem's charts: a unit, values per TFLOP/s, and the ends in that unit."""

    unit: str
    factor: float
    low: float
    high: float

    @property
    def axis(self) -> alt.Scale:
        """As Vega-Lite has it."""
        return alt.Scale(domain=[self.low, self.high], nice=False, zero=False, clamp=False)


def scale_of(subject: Subject) -> Scale:
    """The axis on which the fastest half of the speeds of a problem fits, and every peer as fast as that."""
    speeds = [v.tflops for run in subject.runs for v in run.ranked]
    top = max((*(max(v.speeds) for run in subject.runs for v in (*run.ranked, *run.variants)), 0.0))
    peers = [p.tflops for run in subject.runs for p in run.peers if p.tflops]
    shown = [x for x in (*speeds, *peers) if x >= SLOWEST * top]
    high = max((top, *peers))
    unit, factor = ("TFLOP/s", 1.0) if high >= 2 else ("GFLOP/s", 1e3)
    low, room = min(shown, default=0.0), 0.06
    return Scale(
        unit, factor, max(0.0, low - room * (high - low)) * factor, (high + room * (high - low)) * factor
    )


def varied(variants: Sequence[Variant]) -> list[str]:
    """The knobs that differ between variants, in the family's order; variants of several families share few."""
    names = list(dict.fromkeys(name for v in variants for name in v.spec.tuning.to_json()))
    values = [v.spec.tuning.to_json() for v in variants]
    return [name for name in names if len({knobs.get(name) for knobs in values}) > 1]


def rows_of(subject: Subject, scale: Scale) -> list[dict[str, Any]]:
    """One row for each trial that worked, in the order of the search.

    `speed`, `low` and `high` are of the variant's last result, `trial` and `best`, the best so far, of the trials.
    """
    rows = []
    for run in subject.runs:
        best, latest = 0.0, run.latest
        for number, trial in enumerate((v for v in run.variants if v.status == "ok"), 1):
            best = max(best, trial.tflops)
            v = latest[trial.spec]
            speeds = dict(zip(("speed", "low", "high"), (v.tflops, *v.speeds), strict=True))
            speeds |= {"trial": trial.tflops, "best": best}
            rows.append(
                {
                    "run": run.label,
                    "s": round(trial.seconds, 2),
                    **{name: _digits(value * scale.factor) for name, value in speeds.items()},
                    "spread": number * 0.618 % 1,  # places points of one value side by side
                    "registers": v.registers,
                    "KiB": round(v.shared_bytes / 1024, 1),
                    "knobs": " ".join(f"{name}={value}" for name, value in v.spec.tuning.to_json().items()),
                    **v.spec.tuning.to_json(),
                }
            )
    return rows


def over_time(subject: Subject, scale: Scale) -> Chart:
    """Best so far over the time of the search, with every variant as a point."""
    base = alt.Chart(VARIANTS).encode(x=alt.X("s:Q", title="seconds of search", scale=alt.Scale(zero=True)))
    points = base.mark_circle(size=22, opacity=0.45, clip=True).encode(
        y=_speed(scale, "trial"), color=_colour(subject), tooltip=_tooltip(subject, scale)
    )
    line = base.mark_line(interpolate="step-after", strokeWidth=2.5, clip=True).encode(
        y=_speed(scale, "best"), color=_colour(subject)
    )
    return _finish(points + line + _peers(subject, scale))


def by_knob(subject: Subject, scale: Scale, knob: str) -> Chart:
    """Variants by the value of one knob: an interval and a point each, and a bar at each value's fastest."""
    several = len(subject.runs) > 1
    within = alt.Scale(domain=[-0.2, 1.2])  # of a value's band
    offset = alt.XOffset("run:N") if several else alt.XOffset("spread:Q", scale=within)
    base = alt.Chart(VARIANTS).encode(x=alt.X(f"{knob}:O", title=knob, axis=alt.Axis(labelAngle=0)))
    spread = base.encode(xOffset=offset, color=_colour(subject))
    intervals = spread.mark_rule(opacity=0.35, clip=True).encode(y=_speed(scale, "low"), y2="high:Q")
    points = spread.mark_circle(size=26, opacity=0.6, clip=True).encode(
        y=_speed(scale), tooltip=_tooltip(subject, scale)
    )
    tops = base.mark_tick(thickness=2.5, size=24, clip=True, orient="horizontal").encode(
        y=_speed(scale, "speed", aggregate="max"),
        color=_colour(subject),
        xOffset=offset if several else alt.XOffsetDatum(0.5, scale=within),
    )
    layers = intervals + points + tops + _peers(subject, scale, named=False)
    return _finish(layers, height=190)


def resources(subject: Subject, scale: Scale, column: str, title: str) -> Chart:
    """Speed against registers or shared memory."""
    points = (
        alt.Chart(VARIANTS)
        .mark_circle(size=36, opacity=0.6, clip=True)
        .encode(
            x=alt.X(
                f"{column}:Q",
                title=title,
                scale=alt.Scale(zero=False, padding=12),
                axis=alt.Axis(tickCount=6),
            ),
            y=_speed(scale),
            color=_colour(subject),
            tooltip=_tooltip(subject, scale),
        )
    )
    return _finish(points + _peers(subject, scale, named=False), height=220)


def roofline(scale: Scale, roof: Roof, limits: Sequence[tuple[Variant, Bound]]) -> Chart:
    """Variants of one run under the device's roof, each with a line up to its own bound."""
    rows: list[dict[str, Any]] = [
        {
            "x": _digits(bound.intensity),
            "speed": _digits(v.tflops * scale.factor),
            "bound": _digits(bound.tflops * scale.factor),
            "use": round(bound.tile_use, 3),
            "balance": round(bound.balance, 3),
            "knobs": " ".join(f"{name}={value}" for name, value in v.spec.tuning.to_json().items()),
        }
        for v, bound in limits
    ]
    widest = 1.15 * max((row["x"] for row in rows), default=1.0)
    x = alt.X("x:Q", title="FLOP per byte that tiles load", scale=alt.Scale(domain=[0, widest], nice=False))
    y = alt.Y("y:Q", title=scale.unit)
    corners = _corners(roof, widest)
    edge = [{"x": _digits(a), "y": _digits(b * scale.factor)} for a, b in corners]
    base = alt.Chart(LIMITS).encode(x=x)
    tips = [alt.Tooltip(name, title=title) for name, title in _BOUND_TIPS]
    points = base.mark_circle(size=36, opacity=0.7).encode(y="speed:Q", tooltip=tips)
    ends = base.mark_tick(thickness=2, width=9, orient="horizontal").encode(y="bound:Q", tooltip=tips)
    line = alt.Chart(alt.InlineData(values=edge)).mark_line(strokeWidth=2).encode(x=x, y=y)
    stems = base.mark_rule(opacity=0.25).encode(y=alt.Y("speed:Q", title=scale.unit), y2="bound:Q")
    layers = stems + _named(line, "roof") + _named(ends, "its bound") + _named(points, "variant")
    spec = _finish(layers, height=300)
    return {**spec, "datasets": {**spec["datasets"], LIMITS.name: rows}}


def _named(layer: alt.Chart, part: str) -> alt.Chart:
    """The layer in the colour of its part of the roofline, with a name in the legend."""
    parts = alt.Scale(domain=["variant", "its bound", "roof"])
    colour = alt.Color("part:N", scale=parts, legend=alt.Legend(orient="top", title=None))
    named: alt.Chart = layer.transform_calculate(part=repr(part)).encode(color=colour)
    return named


_BOUND_TIPS = (
    ("knobs:N", "knobs"),
    ("speed:Q", "speed"),
    ("bound:Q", "bound"),
    ("use:Q", "tile use"),
    ("balance:Q", "balance"),
)


def _corners(roof: Roof, widest: float) -> list[tuple[float, float]]:
    """(FLOP per byte, TFLOP/s) of the roof's line from the left to the right end."""
    if not roof.l2:
        return [(0.0, roof.tflops), (widest, roof.tflops)]
    ridge = roof.tflops / roof.l2
    if ridge >= widest:
        return [(0.0, 0.0), (widest, widest * roof.l2)]
    return [(0.0, 0.0), (ridge, roof.tflops), (widest, roof.tflops)]


def _speed(scale: Scale, column: str = "speed", aggregate: str | None = None) -> alt.Y:
    name = f"{aggregate}({column}):Q" if aggregate else f"{column}:Q"
    return alt.Y(name, title=scale.unit, scale=scale.axis)


def _colour(subject: Subject) -> Any:
    """By run, where there are several."""
    labels = [run.label for run in subject.runs]
    if len(labels) == 1:
        return alt.Undefined
    return alt.Color("run:N", scale=alt.Scale(domain=labels), legend=None)  # the page has a legend


def _tooltip(subject: Subject, scale: Scale) -> list[alt.Tooltip]:
    columns = [("speed", scale.unit), ("low", "from"), ("high", "to")]
    tips = [alt.Tooltip("knobs:N", title="knobs")]
    tips += [alt.Tooltip(f"{name}:Q", title=title) for name, title in columns]
    return [*tips, alt.Tooltip("run:N", title="log")] if len(subject.runs) > 1 else tips


def peers_shown(subject: Subject, scale: Scale) -> list[tuple[Run, Peer]]:
    """The peers within the axis, slowest first."""
    timed = [(run, peer) for run in subject.runs for peer in run.peers if peer.tflops]
    found = [(run, peer) for run, peer in timed if (peer.tflops or 0.0) * scale.factor >= scale.low]
    return sorted(found, key=lambda one: one[1].tflops or 0.0)


def _peers(subject: Subject, scale: Scale, named: bool = True) -> alt.Chart | alt.LayerChart:
    """A dashed line for each peer, and its name, once, at the fastest of its runs."""
    shown = [
        (run.label, p.name, _digits((p.tflops or 0.0) * scale.factor))
        for run, p in peers_shown(subject, scale)
    ]
    rows = [{"run": run, "name": name, "y": y} for run, name, y in shown]
    rule = alt.Chart(alt.InlineData(values=rows)).mark_rule(strokeDash=[5, 4])
    tips = [alt.Tooltip("name:N", title="peer"), alt.Tooltip("y:Q", title=scale.unit)]
    lines: alt.Chart = rule.encode(y=alt.Y("y:Q", scale=scale.axis), color=_colour(subject), tooltip=tips)
    if not named:
        return lines
    tops = sorted({name: y for _, name, y in shown}.items(), key=lambda one: one[1])
    places = _apart([y for _, y in tops], LABEL * (scale.high - scale.low) / HEIGHT)
    labels = [{"name": name, "y": at} for (name, _), at in zip(tops, places, strict=True)]
    text = alt.Chart(alt.InlineData(values=labels)).mark_text(
        align="right", baseline="bottom", dy=-1, fontSize=11
    )
    names = text.encode(y=alt.Y("y:Q", scale=scale.axis), x=alt.value("width"), text="name:N")
    return alt.LayerChart(layer=[lines, names])


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Ascending values, moved up until they are `gap` apart."""
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + gap) if places else value)
    return places


def _finish(chart: alt.LayerChart, height: int = HEIGHT) -> Chart:
    """As a plain value that fills the width of its place; without what the page sets for all. Tests validate it."""
    spec: Chart = chart.properties(width="container", height=height).to_dict(validate=False)
    for name in ("$schema", "config"):
        spec.pop(name, None)
    return spec


def _digits(value: float) -> float:
    """Four significant digits keep the page small."""
    return float(f"{value:.4g}")


def meanings(tuning: Tuning) -> dict[str, str]:
    """What each knob means."""
    fields = {f.name: str(f.metadata.get("text", "")) for f in dataclasses.fields(tuning)}
    own = {name: text for name, text in fields.items() if text}
    return {"tile_m": "query rows of a tile", "tile_n": "keys of a tile", **own}
