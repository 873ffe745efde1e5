"""Where the time of one decoder layer of BAGEL-7B-MoT goes: kernels of `step_time.py`'s layer by group, and idle time.

    python benchmarks/step_profile.py --json now.json                        # ours, FlexAttention, SDPA per sample
    python benchmarks/step_profile.py --draw step.png before.json now.json   # bars of several runs, on any machine

torch.profiler's trace of some steps after a warm-up (forward + backward, an existing mask): the GPU time of each kernel
by its name, and between the first and the last kernel what no kernel covers. Profiling costs host time, so that "idle"
is an upper bound. Needs the extra `report` to draw.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from step_time import Bench
from torch.profiler import ProfilerActivity, profile

from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.mot.attention import make_operator
from attnforge.bagel.mot.layer import CONFIGS, MotLayer
from attnforge.bagel.workloads import workload

STEPS = 3
# Group, and what the name of its kernels matches; the first that does counts.
GROUPS = (
    ("communication", r"nccl"),
    ("prologue", r"attnforge_qk_(norm_)?rope"),
    (
        "attention backward",
        r"attnforge_bwd|flex_attention_backward|fmha_cutlassB|flash_bwd|dot_do_o|convert_dq",
    ),
    ("attention forward", r"attnforge|flex_attention|fmha_cutlassF|flash_fwd"),
    ("matmul", r"nvjet|gemm|xmma|cublas|splitK"),
    ("norms", r"rms_?norm|layer_?norm|GammaBeta|RowwiseMoments|cuComputeGradInput"),
    ("activation", r"swiglu|silu|sigmoid"),
    ("gather, scatter, copy", r"index|gather|scatter|Cat(Array)?|copy|Memcpy|clone|roll|repeat"),
    ("fill", r"Memset|fill"),
    ("elementwise", r"elementwise|reduce_kernel|triton_"),
)
ORDER = (*(name for name, _ in GROUPS), "other", "idle")


def group_of(name: str) -> str:
    """The group of a kernel's name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def kernels_of(trace: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name, start, microseconds) of what ran on the GPU, in the order of starts."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e.get("cat") in kinds]
    return sorted(found, key=lambda kernel: kernel[1])


def summary(kernels: Sequence[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Milliseconds a step: of groups, in all, and of the longest kernels as (name, group, ms, calls)."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    busy_until, idle = kernels[0][1], 0.0
    for name, start, length in kernels:
        times[name] += length
        calls[name] += 1
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, start + length)
    groups: dict[str, float] = defaultdict(float)
    for name, length in times.items():
        groups[group_of(name)] += length
    groups["idle"] = idle
    longest = sorted(times, key=lambda name: -times[name])[:40]
    scale = 1e-3 / steps
    return {
        "total": (busy_until - kernels[0][1]) * scale,
        "groups": {name: groups[name] * scale for name in ORDER},
        "kernels": [
            (name[:160], group_of(name), times[name] * scale, calls[name] / steps) for name in longest
        ],
    }


def trace_of(call: Callable[[], object]) -> dict[str, Any]:
    """torch.profiler's trace of STEPS calls."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def measure(pack: str, model: str, rows: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """A summary of each (operator, kind of checkpointing)."""
    config, work = CONFIGS[model], workload(pack)
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = MotLayer(config, make_operator("attnforge", config.heads_q, 0)).to(torch.bfloat16)
    for name, kind in rows:
        bench = Bench(layer, work, make_operator(name, config.heads_q, work.tokens), kind, config)
        shared = bench.share()
        for _ in range(2):
            bench.run(shared)
        kernels = kernels_of(trace_of(lambda bench=bench, shared=shared: bench.run(shared)))  # type: ignore[misc]
        bench.forget()
        yield {"pack": pack, "operator": name, "checkpointing": kind, **summary(kernels, STEPS)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Groups by operator, milliseconds a step."""
    head = ("ms a step", *(f"{row['operator']}, {row['checkpointing']}" for row in rows))
    lines = markdown_head(head)
    for name in (*ORDER, "total"):
        values = [row["total"] if name == "total" else row["groups"][name] for row in rows]
        lines.append(markdown_row((name, *(f"{value:.2f}" for value in values))))
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A bar for each row of each run, stacked by group, as .png or .svg."""
    import altair as alt

    values = [
        {
            "row": f"{row['operator']}, checkpointing {row['checkpointing']}",
            "run": run,
            "group": name,
            "ms": row["groups"][name],
            "order": place,
        }
        for run, rows in runs.items()
        for row in rows
        for place, name in enumerate(ORDER)
        if row["groups"][name] > 0
    ]
    data: Any = alt.Data  # has no annotations
    chart = alt.Chart(data(values=values)).mark_bar().encode(
        alt.X("ms:Q", title="milliseconds of one layer, forward and backward", stack="zero"),
        alt.Y("run:N", title=None, sort=list(runs)),
        alt.Color("group:N", title=None, sort=list(ORDER), scale=alt.Scale(scheme="tableau20")),
        alt.Order("order:Q"),
        alt.Row("row:N", title=None, sort=None, header=alt.Header(labelAngle=0, labelAlign="left")),
    )  # fmt: skip
    chart.properties(width=620, height=alt.Step(22)).save(str(path), ppi=160)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("runs", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--pack", default="pretrain/0")
@click.option("--model", type=click.Choice(tuple(CONFIGS)), default="7B")
@click.option(
    "--rows",
    default="attnforge:none,attnforge:full,flex:full,sdpa:full",
    help="operator:checkpointing, with commas.",
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the summaries to this file.")
@click.option("--draw", "picture", type=click.Path(path_type=Path), help="Draw RUNS instead of measuring.")
def main(
    runs: tuple[Path, ...], pack: str, model: str, rows: str, out: Path | None, picture: Path | None
) -> None:
    """Kernel time of one decoder layer by group."""
    if picture is not None:
        draw({path.stem: json.loads(path.read_text()) for path in runs}, picture)
        return
    wanted = [tuple(row.split(":")) for row in rows.split(",")]
    found = []
    for row in measure(pack, model, [(name, kind) for name, kind in wanted]):
        found.append(row)
        click.echo(f"{row['operator']}, {row['checkpointing']}: {row['total']:.2f} ms")
        for name, group, ms, calls in row["kernels"][:24]:
            click.echo(f"  {ms:8.3f} ms {calls:5.1f} x  {group:22s} {name[:90]}")
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(table(found))


if __name__ == "__main__":
    main()
