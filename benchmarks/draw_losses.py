"""Draws loss curves of examples/train_mot.py: one panel a seed, a line for each attention.

    for seed in 0 1 2; do
        for attention in attnforge flex; do
            python examples/train_mot.py --model small --tokens 1024 --packs 2 --steps 300 --seed $seed \\
                --attention $attention --losses losses/${attention}_$seed.jsonl
        done
    done
    python benchmarks/draw_losses.py losses/*.jsonl --out losses.svg

Lines are running means of 20 steps of the cross entropy. Needs the extra `report` (Altair).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import altair as alt

WINDOW = 20  # steps of a running mean
COLOURS = {"attnforge": "#1f5fa8", "flex": "#d98032"}


def curve(path: Path) -> list[dict[str, object]]:
    """Points of one run; the file is named ATTENTION_SEED.jsonl."""
    attention, seed = path.stem.split("_")[-2:]
    losses = [json.loads(line)["ce"] for line in path.read_text().splitlines()]
    means = [sum(losses[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(losses))]
    return [
        {"attention": attention, "seed": f"seed {seed}", "step": i, "cross entropy": loss}
        for i, loss in enumerate(means)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, help="ATTENTION_SEED.jsonl")
    parser.add_argument("--out", type=Path, default=Path("losses.svg"), help="SVG or PNG")
    options = parser.parse_args()
    points = [point for path in options.logs for point in curve(path)]
    colour = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    chart = (
        alt.Chart(alt.InlineData(values=points))
        .mark_line(strokeWidth=1.5)
        .encode(
            alt.X("step:Q"),
            alt.Y("cross entropy:Q", scale=alt.Scale(zero=False)),
            alt.Color("attention:N", scale=colour),
            alt.Column("seed:N", title=None),
        )
        .properties(width=240, height=220, background="white")
    )
    chart.save(str(options.out))


if __name__ == "__main__":
    main()
