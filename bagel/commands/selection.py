"""The selection of a command: packs, masks, heads, dtype, passes and device, with defaults for this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from attnforge.bagel.measure.case_scores import with_score
from attnforge.bagel.measure.cases import SUITES, make_case, model_of, with_batch
from attnforge.bagel.measure.mask_files import is_mask_file
from attnforge.bagel.measure.tuning_set import archs_of
from attnforge.bagel.models import MODELS
from attnforge.bagel.workloads import recorded
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, Direction, DType, plain
from attnforge.runtime.inputs import MAX_HEAD_DIM
from attnforge.runtime.search.case import Case, as_deterministic
from attnforge.runtime.tables import device_name

NAMED_MASK = re.compile(r"full|causal|window:[1-9]\d*")
LENGTHS = {"cuda": 8192, "cpu": 1024}  # of --mask: a GPU's milliseconds are a CPU's seconds


@dataclass(frozen=True)
class Request:
    """The options of `options.selecting` as given; None or empty: not given."""

    packs: tuple[str, ...] = ()
    recorded: Path | None = None
    masks: tuple[str, ...] = ()
    length: tuple[int, int] | None = None  # queries, keys
    batch: int | None = None
    model: str | None = None
    heads: tuple[int, int] | None = None  # of q, of k and v
    head_dim: int | None = None
    dtype: str | None = None
    direction: str = "both"
    device: str | None = None
    arch: str | None = None
    scores: tuple[str, ...] = ()
    gpu: str | None = None  # of another machine, by its name: defaults are a GPU's
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of `Problem` by attribute


@dataclass(frozen=True)
class Selection:
    """A resolved choice; see `select`."""

    packs: tuple[str, ...]  # as given; empty: those of a suite
    model: str | None  # a name or heads of `make_case`, if given
    dtype: DType
    directions: tuple[Direction, ...]
    device: torch.device
    arch: Arch | None = None  # as given; none: the best for the direction
    batch: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    scores: tuple[str, ...] = ()  # names of `with_score`
    gpu: str | None = None
    deterministic: bool = False  # cases of `as_deterministic`

    def with_deterministic(self) -> Selection:
        """The same for deterministic gradients: the backward alone. ValueError where there is nothing to choose."""
        if self.directions == (Direction.FORWARD,):
            raise ValueError(
                "--deterministic: the forward always is deterministic; leave --direction fwd out"
            )
        if self.device.type == "cpu":
            raise ValueError("--deterministic: every CPU kernel is deterministic already; leave it out")
        return replace(self, directions=(Direction.BACKWARD,), deterministic=True)

    def cases(self, suite: str = "search") -> list[Case]:
        """A case for each pack and score; the suite supplies what is not given."""
        kind = "cuda" if self.gpu else self.device.type
        rows = SUITES[suite, kind]
        heads = SUITES["search", kind][0][1]
        rows = tuple((pack, heads) for pack in self.packs) or rows
        scores = self.scores or ("",)
        found = [self._case(pack, self.model or heads, score) for pack, heads in rows for score in scores]
        return [as_deterministic(case) for case in found] if self.deterministic else found

    def _case(self, pack: str, heads: str, score: str) -> Case:
        case = with_batch(make_case(pack, heads, self.dtype, self.device), self.batch)
        if not self.extra:
            return with_score(case, score)
        named = ((f.name, self.extra[f.attribute]) for f in PROBLEM_FIELDS if f.attribute in self.extra)
        words = " ".join(f"{name}={plain(value)}" for name, value in named)
        return with_score(replace(case, name=f"{case.name} {words}", **self.extra), score)

    def target(self, direction: Direction) -> tuple[Arch, str]:
        """Architecture and device name, as `search` takes them."""
        known = archs_of(self.device, self.dtype, direction)
        if self.arch is not None and self.arch not in known:
            names = ", ".join(arch.value for arch in known)
            raise ValueError(
                f"--arch: {self.arch.value} has no {direction.value} kernel here; there are {names}"
            )
        return self.arch or known[0], device_name(self.device)

    def targets(self, direction: Direction) -> list[tuple[Arch, str]]:
        """The targets to search. In float32 all of them: none is always the fastest, and dispatch compares them."""
        if self.arch is not None or self.dtype is not DType.FLOAT32:
            return [self.target(direction)]
        return [(arch, device_name(self.device)) for arch in archs_of(self.device, self.dtype, direction)]


def select(request: Request) -> Selection:
    """Complete the options with defaults for this machine. Raises ValueError naming the option."""
    where = _device(request.device)
    # BAGEL's bfloat16, except on CPUs without instructions for it.
    slow = where.type == "cpu" and not request.gpu and "bf16" not in device_name(where)
    dtype = DType(request.dtype or ("fp32" if slow else "bf16"))
    if not request.gpu:
        expect_dtype(dtype, where)
    packs = request.packs + (recorded(request.recorded) if request.recorded is not None else ())
    return Selection(
        packs + _masks(request, where),
        _model(request),
        dtype,
        tuple(Direction) if request.direction == "both" else (Direction(request.direction),),
        where,
        None if request.arch is None else Arch(request.arch),
        request.batch or 1,
        _extra(request.extra),
        request.scores,
        request.gpu,
    )


def expect_dtype(dtype: DType, device: torch.device) -> None:
    """Raises ValueError for a dtype without kernels on the device."""
    if device.type == "cpu" and dtype is DType.FLOAT16:
        raise ValueError("--dtype: fp16 runs on GPUs only; on the CPU there are fp32 and bf16")


def _masks(request: Request, device: torch.device) -> tuple[str, ...]:
    """Packs of --mask and --length, or of what the model is trained with."""
    names = request.masks
    if not (names or request.packs or request.recorded):
        trained = MODELS[request.model].mask if request.model in MODELS else "bagel"
        names = () if trained == "bagel" and request.length is None else (trained,)
    if request.length is not None and (not names or "bagel" in names):
        raise ValueError("--length: needs --mask causal, full or window:N; packs have their own length")
    return tuple(_mask(name, request, device) for name in names)


def _mask(name: str, request: Request, device: torch.device) -> str:
    """The pack of one --mask."""
    if is_mask_file(name):
        if request.length is not None:
            raise ValueError(f"--length: {name} has a length of its own; leave --length out")
        return name
    if not NAMED_MASK.fullmatch(name):
        raise ValueError(f"--mask: {name!r} is neither causal, full, window:N nor a .npy or .npz file")
    seq_q, seq_k = request.length or (LENGTHS["cuda" if request.gpu else device.type],) * 2
    batch = f"{request.batch}x" if request.batch else ""
    return f"{name}/{batch}{seq_q}" if seq_q == seq_k else f"{name}/{batch}{seq_q}/{seq_k}"


def _model(request: Request) -> str | None:
    """A model's name, or the heads that --heads and --head-dim make of it. None if nothing is given."""
    if request.heads is None and request.head_dim is None:
        return request.model
    known = None if request.model is None else model_of(request.model)
    if known is None and (request.heads is None or request.head_dim is None):
        given, lacks = ("--heads", "--head-dim") if request.heads else ("--head-dim", "--heads")
        raise ValueError(f"{given}: {lacks} is missing; give it, or a --model that has the rest")
    heads = request.heads or (known.heads_q, known.heads_kv) if known else request.heads
    assert heads is not None
    head_dim = request.head_dim or (known.head_dim if known else 0)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"--head-dim: got {head_dim}, accepted are 1 to {MAX_HEAD_DIM}")
    return f"{heads[0]}/{heads[1]}/{head_dim}"


def _extra(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of cases. Raises ValueError for a field that only kernels have yet."""
    for f in PROBLEM_FIELDS:
        if f.attribute in given and f.attribute not in Case.__dataclass_fields__:
            raise ValueError(f"{f.option}: measured cases do not support it yet; `attnforge render` does")
    return {f.attribute: f.type(given[f.attribute]) for f in PROBLEM_FIELDS if f.attribute in given}


def _device(text: str | None) -> torch.device:
    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: {text!r} is not a device; accepted are cpu, cuda and cuda:N") from None
    if device.type not in LENGTHS:
        raise ValueError(f"--device: kernels run on cpu, cuda and cuda:N, not on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: torch {torch.__version__} sees no GPU; `attnforge doctor` says more")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: there is no {device}, only {torch.cuda.device_count()} GPUs")
    return device
