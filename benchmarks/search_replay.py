"""How many evaluations search strategies need, by replaying logs of exhaustive searches. Takes no GPU.

    python benchmarks/search_replay.py LOG... [--strategies greedy,...] [--seeds 50] [--picture docs/search_regret.svg]

LOG is what `attnforge search --strategy exhaustive --log LOG` or benchmarks/search_log.py wrote, or that as .gz. For
each problem of the logs, what was measured there is the space; a strategy is asked for specs as a search on `--workers`
cores asks it, and gets the logged times. A seed changes its random choices and the order of the list behind the first
guesses. In a second replay, "blind", it changes the order of the whole list, so that the guesses are of no help.

The tables show how many evaluations pass until one is within 1 % of the best: median, worst tenth, the median as a
share of the space, and in how many replays a tenth of the space is enough; and of each value of a knob, the best time
that any variant with it has. The picture shows regret, the best so far over the best of all.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.report.read import Subject, read
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Spec
from attnforge.runtime.search.search import varying_knobs
from attnforge.runtime.search.strategies import FIRST, STRATEGIES, Strategy

CLOSE = 1.01  # times the best of all
SHARE = 0.1  # of the space, in which a good strategy is close
DRAWN = {round(10 ** (step / 16)) for step in range(80)}  # evaluations, evenly spaced on the picture's axis


def times_of(subject: Subject) -> dict[Spec, float]:
    """Milliseconds of the trials of a problem, infinite for failures, in the order in which a search lists them.

    The incumbents come first, then the space from its best guesses on. What is no longer in the space comes last.
    """
    variants = [variant for run in subject.runs for variant in run.variants]
    times = {v.spec: v.ms if v.status == "ok" else math.inf for v in variants}
    incumbents = (run.incumbent for run in subject.runs if run.incumbent)
    listed = dict.fromkeys((*incumbents, *candidates(variants[0].spec.problem), *times))
    return {spec: times[spec] for spec in listed if spec in times}


def shuffled(space: Sequence[Spec], seed: int, guesses: int) -> list[Spec]:
    """So many of the first guesses, then the others in an order of the seed's."""
    rest = list(space[guesses:])
    random.Random(seed).shuffle(rest)
    return [*space[:guesses], *rest]


def replay(strategy: Strategy, times: Mapping[Spec, float], workers: int) -> Iterator[float]:
    """The best time so far, evaluation by evaluation. As in a search, up to `workers` specs are on their way."""
    known: dict[Spec, float] = {}
    waiting: list[Spec] = []
    best = math.inf
    while True:
        if len(waiting) <= workers // 2:
            waiting += strategy.suggest(known, workers - len(waiting))
        if not waiting:
            return
        spec = waiting.pop(0)
        known[spec] = times[spec]
        best = min(best, times[spec])
        yield best


def curves(
    name: str, times: Mapping[Spec, float], seeds: int, workers: int, guesses: int
) -> list[list[float]]:
    """Regret by evaluation, from 0 on: a list for each seed."""
    spaces = (shuffled(list(times), seed, guesses) for seed in range(seeds))
    return [_regrets(STRATEGIES[name](space, seed), times, workers) for seed, space in enumerate(spaces)]


def _regrets(strategy: Strategy, times: Mapping[Spec, float], workers: int) -> list[float]:
    """Regret by evaluation. The replay ends at the best of all, from where on it is 0."""
    best = min(times.values())
    found: list[float] = []
    for so_far in replay(strategy, times, workers):
        found.append(so_far / best - 1)
        if so_far == best:
            break
    return found + [0.0] * (len(times) - len(found))


def evaluations(curve: Sequence[float]) -> int:
    """How many evaluations pass until one is close to the best of all."""
    return 1 + next(number for number, regret in enumerate(curve) if regret <= CLOSE - 1)


def table(found: Mapping[str, list[list[float]]], size: int) -> str:
    """As Markdown, a line for each strategy, the best first."""
    lines = [
        f"| strategy | median | worst tenth | of {size} | within {SHARE:.0%} |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    counts = {name: sorted(map(evaluations, curves)) for name, curves in found.items()}
    for name, needed in sorted(counts.items(), key=lambda one: median(one[1])):
        worst = quantiles(needed, n=10)[-1] if len(needed) > 1 else needed[0]
        share = sum(count <= SHARE * size for count in needed) / len(needed)
        numbers = f"{median(needed):.0f}", f"{worst:.0f}", f"{median(needed) / size:.1%}", f"{share:.0%}"
        lines.append(markdown_row((name, *numbers)))
    return "\n".join(lines)


def by_knob(times: Mapping[Spec, float]) -> str:
    """As Markdown: of each knob's values, the best time over the best of all."""
    best = min(times.values())
    knobs = [(spec.tuning.to_json(), ms / best) for spec, ms in times.items()]
    lines = markdown_head(("knob", "best with each value, over the best of all"))
    for name in varying_knobs(list(times)):
        values = sorted({row[name] for row, _ in knobs})
        shares = (min(ms for row, ms in knobs if row[name] == value) for value in values)
        pairs = ", ".join(f"{value}: {share:.3f}" for value, share in zip(values, shares, strict=True))
        lines.append(markdown_row((name, pairs)))
    return "\n".join(lines)


def rows_of(title: str, found: Mapping[str, list[list[float]]]) -> Iterator[dict[str, Any]]:
    """Rows of the picture: the median, and the range from the tenth to the ninetieth percent of the replays."""
    for name, drawn in found.items():
        for number, values in enumerate(zip(*drawn, strict=True), 1):
            if number not in DRAWN:
                continue
            ordered = sorted(min(value, 1.0) for value in values)
            tenth = len(ordered) // 10
            yield {
                "problem": title,
                "strategy": name,
                "evaluations": number,
                "regret": median(ordered) * 100,
                "low": ordered[tenth] * 100,
                "high": ordered[-1 - tenth] * 100,
            }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Regret curves, a panel for each problem, as .svg or .png."""
    import altair as alt

    x = alt.X("evaluations:Q", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("regret:Q", title="regret, %", scale=alt.Scale(type="symlog", constant=1))
    colour = alt.Color("strategy:N", legend=alt.Legend(symbolOpacity=1))
    data: Any = alt.Data  # has no annotations
    base = alt.Chart(data(values=list(rows))).properties(width=420, height=260)
    line = base.mark_line().encode(x, y, colour)
    band = base.mark_area(opacity=0.15).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour)
    close = base.mark_rule(strokeDash=[4, 4]).encode(y=alt.datum((CLOSE - 1) * 100))
    alt.layer(band, line, close).facet(facet=alt.Facet("problem:N", title=None), columns=2).properties(
        padding=12
    ).save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--strategies", default=",".join(name for name in STRATEGIES if name != "exhaustive"))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=16, help="cores of the search that is replayed (16)")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for subject in read(options.logs).subjects:
        times = times_of(subject)
        if min(times.values(), default=math.inf) == math.inf:
            continue
        for kind, guesses in (("", FIRST), (", blind", 0)):
            found = {}
            for name in options.strategies.split(","):
                try:
                    found[name] = curves(name, times, options.seeds, options.workers, guesses)
                except Infeasible as reason:
                    print(reason)
            title = f"{subject.case}, {subject.direction}, {subject.dtype}{kind}"
            print(f"\n{title}: {len(times)} variants, {options.seeds} replays\n\n{table(found, len(times))}")
            rows += rows_of(title, found)
        print(f"\n{by_knob(times)}")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
