"""Train a small Mixture of Transformers on synthetic packs: attnforge, FSDP2, TP, CP, checkpointing, bf16, resume.

    python examples/train_mot.py                                      # one process, on the GPU if there is one
    torchrun --standalone --nproc-per-node 2 examples/train_mot.py    # two, parameters sharded by FSDP2
    torchrun --standalone --nproc-per-node 8 examples/train_mot.py --cp 2 --tp 2
    python examples/train_mot.py --model small --tokens 8192 --attention flex --checkpointing full --profile traces

Ranks form a mesh (dp, cp, tp), see bagel/mot/parallel.py: `--tp` ranks share the weights of a layer, `--cp` ranks share
the rows of a pack, and the rest, dp, have different packs. Without these options there is dp only.

A step's global batch is `--packs` packs, numbered through all steps; rank r of dp's w computes those whose number is r
modulo w, and losses are divided by the tokens of all of them. So the mesh changes the order of sums and nothing else:
the loss curves of 1, 2 and 4 ranks with as many packs agree to about 1e-5 in fp32 (tests/bagel/test_train_mot.py).
Every rank takes as many packs, because FSDP communicates in each of them; without `--packs` there are two, or the next
multiple of w.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from synthetic import Synthetic
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import attnforge
from attnforge.bagel.mot.attention import OPERATORS, make_operator
from attnforge.bagel.mot.layer import CONFIGS, MotConfig, MotLayer
from attnforge.bagel.mot.model import MotModel, Pack
from attnforge.bagel.mot.parallel import (
    Meshes,
    clip_gradients,
    dealt_order,
    local_rows,
    make_meshes,
    tensor_parallel,
    whole_order,
)

DEFAULT_PACKS = 2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """The command line; see its help."""

    model: str = "tiny"
    layers: int | None = None
    tokens: int = 512
    packs: int | None = None  # None: two, or the next multiple of the number of ranks
    cp: int = 1
    tp: int = 1
    steps: int = 20
    lr: float = 3e-3
    seed: int = 0
    attention: str = "attnforge"
    checkpointing: str = "none"
    precision: str = "bf16"
    deterministic: bool = False
    device: str | None = None
    save: Path | None = None
    save_every: int = 10
    losses: Path | None = None
    profile: Path | None = None

    @property
    def config(self) -> MotConfig:
        config = CONFIGS[self.model]
        return dataclasses.replace(config, layers=self.layers or config.layers)

    def batch(self, ranks: int) -> int:
        """Packs of a step, all `ranks` of dp together. Raises UsageError if `packs` does not divide among them."""
        packs = self.packs or -(-DEFAULT_PACKS // ranks) * ranks
        if packs % ranks:
            near = -(-packs // ranks) * ranks
            raise click.UsageError(f"--packs {packs} does not divide among {ranks} ranks; try --packs {near}")
        return packs


@dataclass(frozen=True)
class Place:
    """Where this process stands."""

    rank: int
    device: torch.device
    meshes: Meshes


@contextlib.contextmanager
def process_group(options: Options) -> Iterator[Place]:
    """torchrun's group, or, without torchrun, a group of this process alone: one code for both."""
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield Place(dist.get_rank(), place, meshes_of(options, kind))
    finally:
        dist.destroy_process_group()


def meshes_of(options: Options, kind: str) -> Meshes:
    """The mesh that --cp and --tp make of all ranks. Raises UsageError for what does not divide."""
    if options.cp > 1 and options.attention != "attnforge":
        raise click.UsageError(
            f"--cp {options.cp} needs --attention attnforge, which shares rows among ranks"
        )
    try:
        return make_meshes(kind, options.config, dist.get_world_size(), options.cp, options.tp)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from None


# ---- Model


def make_model(options: Options, place: Place) -> MotModel:
    """The decoder, checkpointed as asked and sharded: float32 parameters, computing in `precision`."""
    config, dtype = options.config, DTYPES[options.precision]
    operator = make_operator(
        options.attention,
        config.heads_q // options.tp,
        options.tokens,
        dtype=dtype,
        deterministic=options.deterministic,
        cp=place.meshes.cp if options.cp > 1 else None,
    )
    torch.manual_seed(options.seed)  # all ranks draw the same weights, and each keeps its shard
    with place.device:
        model = MotModel(config, operator)
    if options.tp > 1:
        tensor_parallel(model, place.meshes.tp)
    checkpoint_layers(model, options)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.layers, model):
        fully_shard(part, mesh=place.meshes.dp_cp, mp_policy=policy)
    return model


def checkpoint_layers(model: MotModel, options: Options) -> None:
    """full: recompute each layer before its backward. selective: all of it but attention's forward."""
    if options.checkpointing == "none":
        return
    keep: dict[str, Any] = {}
    if options.checkpointing == "selective":
        if options.attention != "attnforge":
            raise click.UsageError(
                "--checkpointing selective keeps what attnforge returned: --attention attnforge"
            )
        keep = {"context_fn": attnforge.save_attention}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda layer: checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, **keep),
        check_fn=lambda module: isinstance(module, MotLayer),
    )


# ---- Checkpoints


def state_of(model: MotModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shards of parameters and of optimizer state. The data need none: a step's packs follow from its number."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def save(directory: Path, steps: int, model: MotModel, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """`directory`/step-N; a name without .part is a checkpoint that is complete."""
    part = directory / f"step-{steps}.part"
    save_sharded(whole_order(state_of(model, optimizer), model), checkpoint_id=part)
    dist.barrier()
    if rank == 0:
        part.rename(directory / f"step-{steps}")
    dist.barrier()


def expect_same_model(checkpoint: Path, parameters: dict[str, Tensor]) -> None:
    """UsageError for a checkpoint of other parameters; load_sharded would ignore those that this model lacks."""
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    theirs = {
        name.removeprefix("model."): tuple(x.size)
        for name, x in saved.items()
        if name.startswith("model.") and isinstance(x, TensorStorageMetadata)
    }
    ours = {name: tuple(x.shape) for name, x in parameters.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise click.UsageError(
                f"--save: {checkpoint} is of another model, whose {name} has shape {theirs.get(name, 'none')}, this "
                f"one's {ours.get(name, 'none')}; pass its --model and --layers, or another folder"
            )


def resume(directory: Path, model: MotModel, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint, of any mesh; how many steps it has seen, 0 if there is none."""
    done = [int(path.name[5:]) for path in directory.glob("step-*") if path.name[5:].isdigit()]
    if not done:
        return 0
    state, latest = whole_order(state_of(model, optimizer), model), directory / f"step-{max(done)}"
    expect_same_model(latest, state["model"])
    load_sharded(state, checkpoint_id=latest)
    state = dealt_order(state, model)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return max(done)


# ---- Training


def take_step(model: MotModel, optimizer: torch.optim.Optimizer, packs: list[Pack], place: Place) -> Tensor:
    """One optimizer step on this rank's share of the batch; ce, mse (means over the batch), norm of the gradient."""
    cp = place.meshes.cp
    packs = [local_rows(pack, cp.get_local_rank(), cp.size()) for pack in packs]
    tokens = place.meshes.dp_cp  # its ranks have different tokens; those of tp have the same
    labels = sum(pack.labels.numel() for pack in packs)
    noisy = sum(int((pack.times > 0).sum()) for pack in packs)
    counts = torch.tensor([labels, noisy], dtype=torch.float32, device=place.device)
    dist.all_reduce(counts, group=tokens.get_group())
    counts.clamp_(min=1)
    sums = torch.zeros(2, device=place.device)
    optimizer.zero_grad()
    for pack in packs:
        losses = torch.stack(model(pack.to(place.device)))
        # FSDP averages gradients over ranks, but the sum of all ranks' losses is what we differentiate.
        (tokens.size() * losses / counts).sum().backward()
        sums += losses.detach()
    norm = clip_gradients(model, 1.0)
    optimizer.step()
    dist.all_reduce(sums, group=tokens.get_group())
    return torch.cat([sums / counts, norm[None]])


def profiled(directory: Path | None, rank: int) -> Any:
    """A torch.profiler that traces the third and fourth step into `directory`/rank-R.json, or nothing."""
    if directory is None:
        return contextlib.nullcontext()
    directory.mkdir(parents=True, exist_ok=True)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(directory / f"rank-{rank}.json")),
    )


class Losses:
    """The file of --losses: a JSON line for each step, written at once. Without a path nothing is written."""

    def __init__(self, path: Path | None, first: int) -> None:
        """Keep the lines of steps before `first`; those from it on, which a resumed run repeats, are dropped."""
        self.path = path
        if path is None:
            return
        kept = [line for line in earlier_lines(path) if step_of(line, path) < first] if first else []
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        part.replace(path)

    def add(self, row: dict[str, float]) -> None:
        """Append a step."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def step_of(line: str, path: Path) -> int:
    """The step of a line of losses. Raises UsageError naming the file."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        raise click.UsageError(f"--losses {path}: {line[:60]!r} is no line of losses") from None


def earlier_lines(path: Path) -> list[str]:
    """The lines of an earlier run; a last one without an end, which a killed run leaves, is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.split("\n")[:-1]


def train(
    options: Options,
    say: Callable[[str], None] = click.echo,
    prepare: Callable[[MotModel], None] = lambda model: None,
) -> list[dict[str, float]]:
    """Train until `options.steps`, from the latest checkpoint if there is one. One row for each step done here.

    `prepare` is called once with the new, sharded model.
    """
    torch.use_deterministic_algorithms(options.deterministic)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    with process_group(options) as place:
        if options.attention == "flex" and place.device.type == "cpu":
            raise click.UsageError("--attention flex: torch's FlexAttention has no gradients on the CPU")
        dp = place.meshes.dp
        batch = options.batch(dp.size())
        if options.losses:
            options.losses.parent.mkdir(parents=True, exist_ok=True)
        data = Synthetic(options.config, options.tokens)
        model = make_model(options, place)
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        first = resume(options.save, model, optimizer) if options.save else 0
        if first >= options.steps and place.rank == 0:
            say(f"{options.save}: a checkpoint of {first} steps; nothing to do for --steps {options.steps}")
        rows: list[dict[str, float]] = []
        # A run that does no step leaves the file as it is.
        losses = Losses(options.losses if place.rank == 0 and first < options.steps else None, first)
        with profiled(options.profile, place.rank) as profiler:
            for step in range(first, options.steps):
                begin = time.perf_counter()
                numbers = range(step * batch + dp.get_local_rank(), (step + 1) * batch, dp.size())
                packs = [data.pack(options.seed + number) for number in numbers]
                ce, mse, norm = take_step(model, optimizer, packs, place).tolist()  # waits for the device
                rows.append({"step": step, "ce": ce, "mse": mse, "norm": norm})
                losses.add(rows[-1])
                if profiler is not None:
                    profiler.step()
                if place.rank == 0:
                    say(describe(rows[-1], time.perf_counter() - begin, place))
                if options.save and (step + 1) % options.save_every == 0:
                    save(options.save, step + 1, model, optimizer, place.rank)
        return rows


def describe(row: dict[str, float], seconds: float, place: Place) -> str:
    """One line for the terminal."""
    text = f"step {row['step']:4}  ce {row['ce']:.4f}  mse {row['mse']:.4f}  norm {row['norm']:.3f}"
    text += f"  {seconds * 1e3:.0f} ms"
    if place.device.type == "cuda":
        text += f"  {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    return text


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--model", type=click.Choice(tuple(CONFIGS)), default="tiny", help="Sizes of the decoder.")
@click.option("--layers", type=click.IntRange(1), help="Layers, if not the model's own number.")
@click.option(
    "--tokens", type=click.IntRange(64), default=512, help="Tokens of a pack at most; what flex pads to."
)
@click.option(
    "--packs",
    type=click.IntRange(1),
    help="Packs of a step, all ranks together; a multiple of dp, the number of ranks / (cp tp).  [default: 2, or "
    "the next multiple]",
)
@click.option("--cp", type=click.IntRange(1), default=1, help="Ranks that share the rows of a pack.")
@click.option("--tp", type=click.IntRange(1), default=1, help="Ranks that share heads and MLP of each layer.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=20,
    help="Steps in all, those of a resumed checkpoint included.",
)
@click.option("--lr", default=3e-3, help="Learning rate of AdamW.")
@click.option("--seed", default=0, help="Seed of the weights and the data.")
@click.option("--attention", type=click.Choice(OPERATORS), default="attnforge", help="Attention operator.")
@click.option(
    "--checkpointing",
    type=click.Choice(("none", "full", "selective")),
    default="none",
    help="Activation checkpointing; selective keeps the results of attention.",
)
@click.option(
    "--precision", type=click.Choice(tuple(DTYPES)), default="bf16", help="Data type of the computation."
)
@click.option("--deterministic", is_flag=True, help="The same bits on every run, on a GPU too.")
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), help="Device; by default a GPU if there is one."
)
@click.option(
    "--save", type=click.Path(path_type=Path), help="Directory of checkpoints; resumes from its latest."
)
@click.option("--save-every", type=click.IntRange(1), default=10, help="Steps between checkpoints.")
@click.option(
    "--losses",
    type=click.Path(path_type=Path),
    help="File for the losses, a JSON line a step. A resumed run keeps the steps before its checkpoint and replaces "
    "later ones; any other run begins a new file.",
)
@click.option("--profile", type=click.Path(path_type=Path), help="Directory for torch.profiler's traces.")
def main(**arguments: Any) -> None:
    """Train a small Mixture of Transformers on synthetic packs."""
    train(Options(**arguments))


if __name__ == "__main__":
    main()
