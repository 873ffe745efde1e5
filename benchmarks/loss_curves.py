"""Loss curves of examples/train_mot.py: attnforge beside what FlexAttention's own runs differ by.

    python benchmarks/loss_curves.py run --out losses          # on a GPU: trains, writes a file of JSON lines a run
    python benchmarks/loss_curves.py draw losses --out losses.svg

A run of FlexAttention gives the same bits each time. To see how far rounding alone carries two runs apart, it is
repeated: a repetition starts with each weight (float32) moved by at most two units in the last place. The band of a
seed is what these runs of FlexAttention span; a run of attnforge starts with the weights of the first of them.

Curves are running means of the cross entropy. `draw` needs the extra `report` (Altair), and prints for each seed how
far attnforge is outside the band at most, and how wide the band is, relative to the loss.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_mot import Options, train

from attnforge.bagel.mot.attention import OPERATORS
from attnforge.bagel.mot.model import MotModel

WINDOW = 20  # steps of a running mean
ULP = 2.0**-23  # of float32, relative, at most; of a weight one or two units in the last place
BLUE, ORANGE = "#1f5fa8", "#d98032"

Curve = list[float]


def moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    """`weight`, each element at random as it is, or larger or smaller by a share of ULP."""
    signs = torch.randint(-1, 2, weight.shape, generator=generator).to(weight)
    return weight * (1 + ULP * signs)


def move_weights(model: MotModel, repetition: int) -> None:
    """Start repetition `repetition` of a run; 0 is the run itself."""
    if repetition:
        generator = torch.Generator().manual_seed(repetition)
        with torch.no_grad():
            for weight in model.parameters():
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                local.copy_(moved(local, generator))


def run_one(seed: int, attention: str, repetition: int, options: Options, out: Path) -> str:
    """Train; the losses go to OUT/ATTENTION.REPETITION_SEED.jsonl. Returns what was written."""
    path = out / f"{attention}.{repetition}_{seed}.jsonl"
    changed = Options(**(vars(options) | {"attention": attention, "seed": seed, "losses": path}))
    rows = train(changed, say=lambda _: None, prepare=partial(move_weights, repetition=repetition))
    return f"{path}: {len(rows)} steps, cross entropy {rows[0]['ce']:.3f} to {rows[-1]['ce']:.3f}"


def alone(job: tuple[int, str, int, Options, Path]) -> str:
    """`run_one` in a process of its own: compiled code and allocators of one run do not change another."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run_one, *job).result()


def running_mean(losses: Curve) -> Curve:
    """The mean of each step and up to WINDOW - 1 steps before it."""
    starts = (max(0, end - WINDOW) for end in range(1, len(losses) + 1))
    return [sum(losses[start:end]) / (end - start) for end, start in enumerate(starts, 1)]


def read(directory: Path) -> dict[int, dict[str, list[Curve]]]:
    """Running means by seed and kind ("attnforge" or "peer"), in the order of repetitions.

    Raises ClickException for a run that is shorter or longer than others of its seed, and for a seed that lacks runs.
    """
    curves: dict[int, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    lengths: dict[int, int] = {}
    for path in sorted(directory.glob("*.*_*.jsonl")):
        name, seed = path.stem.split("_")
        losses = [json.loads(line)["ce"] for line in path.read_text().splitlines()]
        steps = lengths.setdefault(int(seed), len(losses))
        if len(losses) != steps:
            raise click.ClickException(f"{path}: {len(losses)} steps, others have {steps}; run it to its end")
        kind = "attnforge" if name.startswith("attnforge") else "peer"
        curves[int(seed)][kind].append(running_mean(losses))
    for number, runs in curves.items():
        if not runs["attnforge"] or len(runs["peer"]) < 2:
            raise click.ClickException(
                f"{directory}: seed {number} has {len(runs['attnforge'])} runs of attnforge and {len(runs['peer'])} of "
                "FlexAttention; at least 1 and 2 are needed"
            )
    return curves


def band(runs: list[Curve]) -> list[tuple[float, float]]:
    """The lowest and the highest of `runs` at each step."""
    return [(min(losses), max(losses)) for losses in zip(*runs, strict=True)]


def outside(curve: Curve, limits: list[tuple[float, float]]) -> float:
    """How far `curve` leaves `limits` at most, as a fraction of its value there; 0 if it stays inside."""
    return max(max(low - x, x - high, 0.0) / x for x, (low, high) in zip(curve, limits, strict=True))


def largest(runs: list[Curve], curve: Curve | None = None) -> float:
    """The largest distance of `curve` from a band of all `runs` but one, whichever is left out.

    Without `curve`, that of the run that is left out.
    """
    rests = ((run, runs[:number] + runs[number + 1 :]) for number, run in enumerate(runs))
    return max(outside(run if curve is None else curve, band(rest)) for run, rest in rests)


def summary(curves: dict[int, dict[str, list[Curve]]]) -> list[str]:
    """A line of text for each seed."""
    lines = []
    for seed, runs in sorted(curves.items()):
        peer, ours = runs["peer"], runs["attnforge"][0]
        limits = band(peer)
        width = max((high - low) / low for low, high in limits)
        last = sum(abs(x - y) / x for x, y in zip(ours[-30:], peer[0][-30:], strict=True))
        lines.append(
            f"seed {seed}: outside the band by at most {outside(ours, limits):.2%}, the band is up to {width:.2%} "
            f"wide; outside the band of all runs but one by at most {largest(peer, ours):.2%}, FlexAttention's run "
            f"that is left out by at most {largest(peer):.2%}; the last 30 steps differ by {last / 30:.2%} in the mean"
        )
    return lines


def points(curves: dict[int, dict[str, list[Curve]]]) -> list[dict[str, object]]:
    """Rows of the chart's data: a step of a seed, as losses and as differences from the peer's first run in percent."""
    rows: list[dict[str, object]] = []
    for seed, runs in sorted(curves.items()):
        first = runs["peer"][0]
        steps = zip(first, band(runs["peer"]), runs["attnforge"][0], strict=True)
        for step, (loss, (low, high), ours) in enumerate(steps):
            named = {"low": low, "high": high, "attnforge": ours}
            differences = {f"{name} %": 100 * (value / loss - 1) for name, value in named.items()}
            rows.append({"seed": f"seed {seed}", "step": step} | named | differences)
    return rows


@click.group(help=(__doc__ or "").partition("\n")[0])
def main() -> None:
    pass


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("losses"), help="Directory of the logs.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--repetitions", type=click.IntRange(2), default=4, show_default=True, help="Runs of FlexAttention."
)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--lr", default=3e-4, show_default=True)
@click.option("--model", default="small", show_default=True)
@click.option("--peer", type=click.Choice(OPERATORS), default="flex", show_default=True, help="Of the band.")
@click.option(
    "--workers", type=click.IntRange(1), default=3, show_default=True, help="Runs at the same time."
)
def run(
    out: Path,
    seeds: int,
    repetitions: int,
    steps: int,
    tokens: int,
    lr: float,
    model: str,
    peer: str,
    workers: int,
) -> None:
    """Train all runs."""
    out.mkdir(parents=True, exist_ok=True)
    options = Options(model=model, tokens=tokens, packs=2, steps=steps, lr=lr)
    runs = [("attnforge", 0), *((peer, repetition) for repetition in range(repetitions))]
    jobs = [(seed, name, number, options, out) for seed in range(seeds) for name, number in runs]
    with ThreadPoolExecutor(workers) as threads:
        for line in threads.map(alone, jobs):
            click.echo(line)


@main.command()
@click.argument("logs", type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default=Path("losses.svg"), help="SVG or PNG.")
def draw(logs: Path, out: Path) -> None:
    """Draw the curves of LOGS, a panel a seed, and print how they lie."""
    import altair as alt

    curves = read(logs)
    for line in summary(curves):
        click.echo(line)
    data = alt.InlineData(values=points(curves))
    rows = []
    for unit, title in (("", "cross entropy"), (" %", "difference, %")):
        base = alt.Chart().properties(width=240, height=160).encode(alt.X("step:Q"))
        y = alt.Y(f"low{unit}:Q", title=title, scale=alt.Scale(zero=False))
        span = base.mark_area(color=ORANGE, opacity=0.45).encode(y, alt.Y2(f"high{unit}:Q"))
        line = base.mark_line(color=BLUE, strokeWidth=1.2).encode(alt.Y(f"attnforge{unit}:Q"))
        rows.append(alt.layer(span, line, data=data).facet(column=alt.Column("seed:N", title=None)))
    title = "blue: attnforge; orange: what runs of FlexAttention span; below: from the first of those runs"
    alt.vconcat(*rows, title=title).properties(background="white").save(str(out))


if __name__ == "__main__":
    main()
