"""Draws the grid that `goals.py --suite grid` measured, and writes its tables.

    python benchmarks/goals.py --suite grid --seeds 1 --seconds 0.25 --errors 8x2048 --out DIR
    python benchmarks/draw_grid.py DIR/goals.jsonl --picture docs/grid.svg --markdown grid.md

A square is the median over seeds of our rate over that of the fastest peer. Needs the extra `report` (Altair).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import altair as alt

from attnforge.bagel.measure.bench import OURS
from attnforge.bagel.measure.goal_report import error_ratios, rates, ratio
from attnforge.bagel.measure.goals import (
    DENSE_PEERS,
    GOALS,
    GRID_HEADS,
    GRID_PACKS,
    GRID_SEQUENCES,
    GRID_SHAPES,
)
from attnforge.bagel.measure.interleaved import DETERMINISTIC, MATMUL, Line
from attnforge.bagel.measure.markdown import markdown_head, markdown_row

PEERS = (*DENSE_PEERS, "cudnn-flex")  # of every run
ADDED = ("flex", "flex-fa4")  # of runs that took them with --add-peers
PASSES = {"fwd": "forward", "bwd": "backward"}
SQUARE, WIDE_SQUARE = 46, 54  # pixels; the wide ones for longer names


def read(paths: Sequence[Path]) -> dict[tuple[str, str], list[Line]]:
    """The lines of logs by (label, pass) in the order of the grid, one for each seed."""
    cells: dict[tuple[str, str], list[Line]] = {(goal.label, goal.work): [] for goal in GOALS["grid"]}
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for text in file:
                data = json.loads(text)
                if "begin" not in data:
                    line = Line.from_json(data)
                    cells[line.label, line.work].append(line)
    return {key: lines for key, lines in cells.items() if lines}


def peers_of(cells: dict[tuple[str, str], list[Line]]) -> list[str]:
    """The columns of peers."""
    timed = {name for lines in cells.values() for line in lines for name in line.entries}
    return [*PEERS, *(name for name in ADDED if name in timed)]


def squares(cells: dict[tuple[str, str], list[Line]], names: Sequence[str]) -> Iterator[dict[str, object]]:
    """A point for each cell of these columns that was measured."""
    peers = peers_of(cells)
    for (label, work), lines in cells.items():
        heads, name = label.split()
        value = ratio(lines, peers)
        if name in names and value is not None:
            yield {"heads": heads, "name": name, "pass": PASSES[work], "ratio": value}


def panel(
    points: list[dict[str, object]], names: dict[str, str], title: str, rows: Sequence[str]
) -> alt.Chart:
    """Squares of one pass and group of columns; `names` are the columns and how they are called."""
    shown = [{**point, "name": names[str(point["name"])]} for point in points if point["name"] in names]
    x = alt.X(
        "name:N",
        sort=list(names.values()),
        title=None,
        axis=alt.Axis(labelAngle=0, orient="top", labelFontSize=9),
    )
    base = alt.Chart(alt.InlineData(values=shown), title=alt.Title(title, fontSize=12)).encode(
        x, alt.Y("heads:N", sort=list(rows), title=None)
    )
    colours = ["#c2513b", "#f7f5f0", "#3b78b5"]
    scale = alt.Scale(domain=[0.8, 1.0, 1.3], range=colours, clamp=True, interpolate="rgb")
    boxes = base.mark_rect(stroke="white", strokeWidth=1).encode(
        alt.Color("ratio:Q", scale=scale, legend=None)
    )
    strong = "datum.ratio > 1.22 || datum.ratio < 0.84"
    text = base.mark_text(fontSize=11).encode(
        alt.Text("ratio:Q", format=".2f"),
        color=alt.condition(strong, alt.value("white"), alt.value("#20242a")),
    )
    longest = max(map(len, names.values()))
    width = SQUARE if longest < 10 else WIDE_SQUARE
    return (boxes + text).properties(width=width * len(names), height=24 * len(rows))


def picture(cells: dict[tuple[str, str], list[Line]]) -> alt.Chart:
    """Dense shapes by mask, then packs; forward on the left, backward on the right."""
    rows = []
    for mask in ("full", "causal"):
        names = {f"{mask}/{shape}": shape.replace("x", " x ") for shape in GRID_SHAPES}
        rows.append((mask, names, GRID_HEADS))
    names = {name: name.replace("_", " ") for name in (*GRID_PACKS, *GRID_SEQUENCES)}
    rows.append(("packs", names, ("28/4/128", "14/2/64")))
    charts = []
    for title, names, heads in rows:
        points = list(squares(cells, list(names)))
        parts = [
            panel([p for p in points if p["pass"] == name], names, f"{title}, {name}", heads)
            for name in PASSES.values()
        ]
        charts.append(alt.hconcat(*parts, spacing=24))
    dense = alt.hconcat(charts[0], charts[1], spacing=24)
    # Without padding the longest labels are cut: vl-convert measures text as narrower than browsers draw it.
    edges = {"left": 16, "right": 8, "top": 4, "bottom": 4}
    chart = alt.vconcat(dense, charts[2], spacing=16).properties(background="white", padding=edges)
    return chart.configure_view(strokeWidth=0)


def tables(cells: dict[tuple[str, str], list[Line]]) -> Iterator[str]:
    """A table a pass: TFLOP/s, medians over seeds; our ratio to the fastest peer last."""
    peers = peers_of(cells)
    for work, title in PASSES.items():
        own = [OURS, DETERMINISTIC] if work == "bwd" else [OURS]
        head = ["heads", "work", *own, *peers, MATMUL, "of best peer"]
        yield from ("", f"## {title.capitalize()}", "", *markdown_head(head))
        for (label, done), lines in cells.items():
            if done == work:
                values = [rates(lines, name) for name in (*own, *peers, MATMUL)]
                best = ratio(lines, peers)
                numbers = [f"{median(x):.0f}" if x else "-" for x in values]
                share = "-" if best is None else f"{best:.2f}" if best >= 1 else f"**{best:.2f}**"
                yield markdown_row((*label.split(), *numbers, share))


def summary(cells: dict[tuple[str, str], list[Line]]) -> Iterator[str]:
    """How many cells a peer leads, medians, and the largest error ratio of each tensor."""
    peers = peers_of(cells)
    for work, title in PASSES.items():
        found = [
            x for (_, done), lines in cells.items() if done == work and (x := ratio(lines, peers)) is not None
        ]
        behind = sum(x < 1 for x in found)
        yield f"{title}: {len(found)} cells, median {median(found):.2f}, a peer is faster in {behind}"
        errors: dict[str, float] = {}
        for (_, done), lines in cells.items():
            for tensor, error in (error_ratios(lines) if done == work else {}).items():
                errors[tensor] = max(error, errors.get(tensor, 0.0))
        yield f"{title}: largest error over the best peer's: {errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="goals.jsonl, or goals.jsonl.gz")
    parser.add_argument("--picture", type=Path, help="SVG or PNG")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    options = parser.parse_args()
    cells = read(options.logs)
    print("\n".join(summary(cells)))
    if options.picture:
        picture(cells).save(str(options.picture))
    if options.markdown:
        options.markdown.write_text("\n".join(tables(cells)) + "\n")


if __name__ == "__main__":
    main()
