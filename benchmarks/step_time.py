"""Step time and memory of one decoder layer of BAGEL-7B-MoT on a training pack, by attention operator.

    python benchmarks/step_time.py             # ours, SDPA per sample, FlexAttention as BAGEL calls it
    python benchmarks/step_time.py --packs pretrain/0 --operators attnforge,flex --markdown step.md
    python benchmarks/step_time.py --operators attnforge,flex,cudnn-flex,fa3,sdpa [--fused-prologue]

The layer is that of bagel/mot/layer.py, with both experts. Rows differ only in attention and in what is done for it.
Ours: norms of q and k, rotary embedding and the way from experts' rows to the pack's order in one kernel, in the others
torch's modules. FlexAttention: padding to the pack's length, copies to head-major layout and back, a BlockMask of all
heads. SDPA: one dense mask and one call per sample, with k and v repeated. Noise images go to the generation expert,
all other tokens to the understanding expert.

Two operators need packages of their own (bagel/measure/layer_peers.py). `cudnn-flex` is cudnn.flex_attention of
nvidia-cudnn-frontend: a plan of each row's intervals of keys. `fa3` is FlashAttention-3, which has no such mask: a
varlen call of the causal splits and one of the others, whose keys and values are gathered once a call, a row for each
split that sees it. Both take rows as they are, without padding and copies; with `--fused-prologue` they take q, k and v
from the same kernel as ours, so that these rows differ in attention alone.

    layer   forward + backward with an existing mask; includes recomputation where layers are checkpointed
    step    the same with a new mask: the first layer of a micro-step
    model   step + (layers - 1) x layer: attention and linears of a micro-step of the whole model
    memory  peak of a step, above the layer's weights and its input

Times are medians of the wall clock, from an idle device until it is idle again; rows are interleaved. `differs` is the
RMS difference of the input's gradient from that of the first row, relative to its RMS.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.layer_peers import PEERS, Heads, make_peer
from attnforge.bagel.measure.markdown import markdown_head, markdown_row
from attnforge.bagel.measure.peers import with_peak
from attnforge.bagel.mot.attention import OPERATORS, Operator, make_operator
from attnforge.bagel.mot.layer import CONFIGS, MotConfig, MotLayer, Shared, share
from attnforge.bagel.mot.model import rope_positions
from attnforge.bagel.workloads import Workload, workload

KINDS = {
    "attnforge": ("full", "selective", "none"),
    "flex": ("full", "none"),
    "sdpa": ("full",),
    **dict.fromkeys(PEERS, ("full", "none")),
}
HEADER = ("pack", "operator", "checkpointing", "layer ms", "step ms", "model ms", "memory GiB", "differs")


class Bench:
    """One layer, one pack, one operator and kind of checkpointing."""

    def __init__(
        self, layer: MotLayer, pack: Workload, operator: Operator, kind: str, config: MotConfig
    ) -> None:
        self.layer, self.pack, self.operator, self.kind, self.config = layer, pack, operator, kind, config
        weight = next(layer.parameters())
        self.device = weight.device
        generator = torch.Generator(self.device).manual_seed(0)
        # Without the padding at the end of a pack, which FlexAttention's operator adds itself.
        self.lists = (pack.sample_lens[:-1], pack.split_lens[:-1], pack.attn_modes[:-1])
        noise = torch.repeat_interleave(
            torch.tensor([mode == "noise" for mode in self.lists[2]]), torch.tensor(self.lists[1])
        ).to(self.device)
        self.rows = [torch.nonzero(part)[:, 0] for part in (~noise, noise)]
        self.positions = rope_positions(*self.lists).to(self.device)
        self.x, self.dout = (
            tuple(
                torch.randn(
                    len(rows), config.hidden, generator=generator, device=self.device, dtype=weight.dtype
                )
                for rows in self.rows
            )
            for _ in range(2)
        )
        for x in self.x:
            x.requires_grad_()

    def share(self) -> Shared:
        understanding, generation = self.rows
        mask = self.operator.mask(*self.lists, self.device)
        return share(understanding, generation, self.positions, self.config, mask)

    def run(self, shared: Shared | None = None) -> list[Tensor]:
        """A micro-step of this one layer: the input's gradient, of each expert's rows."""
        self.layer.attention.operator = self.operator
        self.forget()
        shared = shared or self.share()
        if self.kind == "none":
            out = self.layer(self.x, shared)
        else:
            keep: dict[str, Any] = (
                {"context_fn": attnforge.save_attention} if self.kind == "selective" else {}
            )
            out = checkpoint(self.layer, self.x, shared, use_reentrant=False, **keep)
        torch.autograd.backward(out, self.dout)
        gradients = [x.grad for x in self.x if x.grad is not None]
        if len(gradients) != len(self.x):
            raise RuntimeError("the layer gave its input no gradient")
        return gradients

    def forget(self) -> None:
        """Drop all gradients."""
        self.layer.zero_grad(set_to_none=True)
        for x in self.x:
            x.grad = None

    def memory(self) -> float:
        """Peak GiB of a step above what is allocated before it; nan on a CPU."""
        self.forget()
        if self.device.type != "cuda":
            return float("nan")
        return with_peak(self.run, self.device)[1] / 2**30

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object]) -> float:
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - begin) * 1e3


@dataclasses.dataclass
class Row:
    """What is known of one Bench."""

    bench: Bench
    memory: float
    differs: float
    layer_ms: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)

    def measure(self, repeats: int) -> None:
        """One warm-up and `repeats` timed steps with an existing mask, and one with a new mask."""
        shared = self.bench.share()
        self.bench.run(shared)
        self.layer_ms += [self.bench.milliseconds(lambda: self.bench.run(shared)) for _ in range(repeats)]
        self.step_ms.append(self.bench.milliseconds(self.bench.run))

    def cells(self, name: str) -> tuple[str, ...]:
        layer, step = statistics.median(self.layer_ms), statistics.median(self.step_ms)
        model = step + (self.bench.config.layers - 1) * layer
        numbers = (f"{layer:.2f}", f"{step:.2f}", f"{model:.0f}", f"{self.memory:.2f}", f"{self.differs:.1e}")
        return self.bench.pack.name, name, self.bench.kind, *numbers


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float(
        (ours.float() - theirs.float()).square().mean().sqrt() / theirs.float().square().mean().sqrt()
    )


def operator_of(
    name: str, config: MotConfig, tokens: int, dtype: torch.dtype, fused_prologue: bool = False
) -> Operator:
    """An operator of the layer or one of PEERS, for packs of so many tokens. Raises Unavailable, ValueError."""
    if name in PEERS:
        return make_peer(name, Heads(config.heads_q, config.heads_kv, config.head_dim, dtype), fused_prologue)
    return make_operator(name, config.heads_q, tokens, dtype)


def checked(operators: str, config: MotConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """The names, if all are known and installed: a long run should not end at its last row."""
    names = tuple(operators.split(","))
    for name in names:
        if name not in KINDS:
            accepted = ", ".join((*OPERATORS, *PEERS))
            raise click.BadParameter(f"got {name!r}, accepted are {accepted}", param_hint="--operators")
        try:
            operator_of(name, config, 0, dtype)
        except Unavailable as error:
            raise click.ClickException(f"{name}: {error}") from error
    return names


def measure_pack(
    layer: MotLayer,
    pack: Workload,
    operators: tuple[str, ...],
    config: MotConfig,
    repeats: int,
    fused_prologue: bool,
) -> list[str]:
    """The lines of the table. Each row is also printed when it first runs, in case a later one takes too long."""
    rows: dict[tuple[str, str], Row] = {}
    wanted: Tensor | None = None
    dtype = next(layer.parameters()).dtype
    for name in operators:
        operator = operator_of(name, config, pack.tokens, dtype, fused_prologue)
        label = f"{name}, qk_norm_rope" if name in PEERS and fused_prologue else name
        for kind in KINDS[name]:
            bench = Bench(layer, pack, operator, kind, config)
            begin = time.perf_counter()
            grad = torch.cat(bench.run())
            bench.wait()
            first = time.perf_counter() - begin
            wanted = grad.clone() if wanted is None else wanted
            differs = difference(grad, wanted)
            del grad
            rows[label, kind] = Row(bench, bench.memory(), differs)
            rows[label, kind].measure(2)
            text = markdown_row(rows[label, kind].cells(label))
            click.echo(f"{text} first call {first:.1f} s, compilation included")
    for _ in range(repeats):
        for row in rows.values():
            row.measure(2)
    return [markdown_row(row.cells(label)) for (label, _), row in rows.items()]


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--packs", default="pretrain/0,finetune/0")
@click.option(
    "--operators",
    default="attnforge,sdpa,flex",
    help=f"Operators in this order, of {', '.join(KINDS)}; the others are compared with the first.",
)
@click.option(
    "--fused-prologue",
    is_flag=True,
    help=f"{' and '.join(PEERS)} after our qk_norm_rope, not torch's modules.",
)
@click.option("--model", type=click.Choice(tuple(CONFIGS)), default="7B")
@click.option("--repeats", default=5, help="Measurements of each row: two layers and one step.")
@click.option("--device", default="cuda")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the table to this file.")
def main(
    packs: str,
    operators: str,
    fused_prologue: bool,
    model: str,
    repeats: int,
    device: str,
    markdown: Path | None,
) -> None:
    """Step time and memory of one decoder layer."""
    config = CONFIGS[model]
    names = checked(operators, config, torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        layer = MotLayer(config, make_operator("attnforge", config.heads_q, 0)).to(torch.bfloat16)
    where = torch.cuda.get_device_name() if device == "cuda" else device
    lines = markdown_head(HEADER)
    for name in packs.split(","):
        lines += measure_pack(layer, workload(name), names, config, repeats, fused_prologue)
    title = f"One layer of {model}, forward + backward, bf16, {where}, torch {torch.__version__}"
    text = "\n".join((title, "", *lines))
    click.echo(text)
    if markdown:
        markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
