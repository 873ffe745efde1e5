"""Kernels of the prologue of attention: RMSNorm of each head of q and k, then rotary embedding (`qk_norm_rope`).

A second kind of problem beside attention's (codegen/spec.py): memory-bound, without masks or tiles, one text for all
GPU architectures. Its sources go through the same renderer, compilers and cache.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from attnforge.codegen.families.limits import (
    HEAD_DIM_LIMIT,
    REGISTER_FILE,
    REGISTER_LIMIT,
    require_positive,
)
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render_text
from attnforge.codegen.spec import Arch, Direction, DType, knob

NOBODY = -(2**31)  # of `rows`: the token has no expert; its heads are zeros
# Of a call. Kernels add the tokens of a whole grid, up to 31 more than there are, to the index of one, as an int.
MOST_TOKENS = 2**30 - 32
_SHARED = 48 * 1024  # bytes that a block may use without asking for more
_LANE_VALUES = 32  # of a row that a lane may keep; beyond, registers spill

# The argument of all kernels: (C type, name, sizes, meaning). runtime/prologue_kernels.py mirrors it.
HEADS = (("const void*", "data", "at head 0 of row 0"), ("long long", "row", ""), ("long long", "head", ""))
PARAMS: tuple[tuple[str, str, tuple[int, ...], str], ...] = (
    ("Heads", "source", (2, 3), "q, k, v as the projections of both experts wrote them"),
    ("Heads", "packed", (3,), "q, k, v in the order of tokens; in a backward their gradients"),
    ("Heads", "gradient", (2, 3), "backward: of `source`"),
    ("const void*", "weight", (2, 2), "(head_dim) of both experts, for q and k"),
    ("void*", "weight_gradient", (2, 2), "backward: of `weight`; null: none"),
    ("const void*", "cos", (), "(tokens, head_dim / 2)"),
    ("const void*", "sin", (), "(tokens, head_dim / 2)"),
    ("long long", "cos_row", (), ""),
    ("long long", "sin_row", (), ""),
    ("const int*", "rows", (), "(tokens) r: row of the first expert, ~r: of the second, INT_MIN: none; null: token"),
    ("float*", "sums", (), "backward: (blocks, 2, 2, head_dim), of the weights' gradients"),
    ("int", "heads", (3,), "of q, k, v"),
    ("int", "tokens", (), ""),
    ("int", "blocks", (), "backward: rows of `sums`"),
    ("int", "threads", (), "CPU threads to use"),
    ("float", "eps", (), "added to the mean square of a head"),
)  # fmt: skip


def params_struct() -> str:
    """C text of `Params` and `Heads`."""
    heads = [f"    {ctype} {name};" + (f"  // {text}" if text else "") for ctype, name, text in HEADS]
    lines = [
        "// Rows of heads: strides in elements, columns are adjacent.",
        "struct Heads {",
        *heads,
        "};",
        "",
    ]
    lines.append("struct Params {")
    for ctype, name, sizes, text in PARAMS:
        dims = "".join(f"[{size}]" for size in sizes)
        lines.append(f"    {ctype} {name}{dims};" + (f"  // {text}" if text else ""))
    return "\n".join((*lines, "};"))


# ---- Problem and tuning


@dataclass(frozen=True)
class PrologueProblem:
    """What a kernel computes. Numbers of tokens and heads are arguments of a call."""

    direction: Direction
    arch: Arch
    dtype: DType  # of q, k, v and their gradients
    head_dim: int
    weight: DType = DType.FLOAT32  # of the norms' weights
    table: DType = DType.FLOAT32  # of cos and sin
    norm: bool = True  # False: rotary embedding only
    align: int = 16  # largest power of 2, up to 16, that divides the addresses of all rows

    def __post_init__(self) -> None:
        if not self.norm:
            object.__setattr__(self, "weight", DType.FLOAT32)

    @property
    def folder(self) -> str:
        """The kind of target: one text and one class of knobs each."""
        return "cuda" if self.arch.is_gpu else "cpu"


@dataclass(frozen=True)
class CudaTuning:
    """Knobs on a GPU. `share` warps take a token; `lanes` of their threads take a head and keep it in registers."""

    vector: int = knob("v", "bytes that a lane loads at once")
    lanes: int = knob("l", "lanes that share a head")
    rows: int = knob("r", "heads that a lane holds at once")
    warps: int = knob("w", "warps per block; each takes its own tokens")
    blocks: int = knob("b", "resident blocks per multiprocessor, for which registers are limited")
    persistent: int = knob(
        "p",
        "0: a block for every few tokens; else as many as the device holds, 1: strided, 2: adjacent tokens",
    )
    share: int = knob("s", "warps that take a token's heads together", default=1, quiet=True)
    ahead: int = knob(
        "f", "1: a lane loads its next heads before it computes those it has", default=0, quiet=True
    )
    stream: int = knob(
        "c", "1: heads are loaded and stored as evict-first (ld.cs, st.cs)", default=0, quiet=True
    )


@dataclass(frozen=True)
class CpuTuning:
    """Knobs on a CPU."""

    chunk: int = knob("c", "tokens of a task, and of a partial sum of weight gradients")


TUNINGS: dict[str, type[CudaTuning] | type[CpuTuning]] = {"cuda": CudaTuning, "cpu": CpuTuning}


@dataclass(frozen=True)
class PrologueSpec:
    """One variant: a problem and its tuning."""

    problem: PrologueProblem
    tuning: CudaTuning | CpuTuning

    @property
    def slug(self) -> str:
        """File-name-safe identity; `spec_from_slug` inverts it."""
        p = self.problem
        words = ["qk_norm_rope" if p.norm else "qk_rope", p.direction.value, p.arch.value, p.dtype.value]
        words += [
            f"d{p.head_dim}",
            *([f"w{p.weight.value}"] if p.norm else []),
            f"t{p.table.value}",
            f"a{p.align}",
        ]
        return "_".join((*words, *(f"{code}{value}" for code, value in self._knobs())))

    @property
    def symbol(self) -> str:
        """Name of the main `extern "C"` function; what profilers show."""
        return f"attnforge_{self.slug}"

    @property
    def sums_symbol(self) -> str:
        """Name of the function that adds up the partial sums of the weights' gradients."""
        return f"{self.symbol}_sums"

    def _knobs(self) -> list[tuple[str, int]]:
        return [(f.metadata["code"], getattr(self.tuning, f.name)) for f in self.loud_knobs()]

    def loud_knobs(self) -> list[dataclasses.Field[int]]:
        """The knobs to name: all but quiet ones that have their defaults."""
        fields = dataclasses.fields(self.tuning)
        return [f for f in fields if not f.metadata["quiet"] or getattr(self.tuning, f.name) != f.default]

    def to_cli(self) -> str:
        """Arguments of `cli.py render` that reproduce this spec."""
        return f"--prologue {self.slug}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value: the slug says it all."""
        return {"prologue": self.slug}


_SLUG = re.compile(
    r"qk_(?P<norm>norm_)?rope_(?P<direction>fwd|bwd)_(?P<arch>[a-z0-9]+)_(?P<dtype>[a-z0-9]+)_d(?P<dim>\d+)"
    r"(?:_w(?P<weight>[a-z]+\d+))?_t(?P<table>[a-z]+\d+)_a(?P<align>\d+)(?P<knobs>(?:_[a-z]\d+)+)"
)


def spec_from_slug(slug: str) -> PrologueSpec:
    """The spec of that slug. Raises ValueError if it is none."""
    match = _SLUG.fullmatch(slug)
    if match is None or bool(match["norm"]) != bool(match["weight"]):
        raise ValueError(f"{slug!r} is not the name of a prologue kernel")
    problem = PrologueProblem(
        Direction(match["direction"]),
        Arch(match["arch"]),
        DType(match["dtype"]),
        int(match["dim"]),
        DType(match["weight"] or "fp32"),
        DType(match["table"]),
        bool(match["norm"]),
        int(match["align"]),
    )
    cls = TUNINGS[problem.folder]
    names = {f.metadata["code"]: f.name for f in dataclasses.fields(cls)}
    values = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    values |= {names.get(word[0], word[0]): int(word[1:]) for word in match["knobs"].split("_")[1:]}
    if values.keys() != set(names.values()):
        raise ValueError(f"{slug!r}: its knobs are {', '.join(names)}")
    return PrologueSpec(problem, cls(**values))


# ---- Plan


@dataclass(frozen=True)
class ProloguePlan:
    """What the template and the launching code need to know beyond the spec."""

    spec: PrologueSpec
    template: str
    suffix: str
    threads: int = 0  # of a block
    tokens: int = 0  # that a block takes in a turn; on the CPU, of a task
    blocks: int = 0  # of the grid per multiprocessor; 0: as many as there are turns
    constants: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def sums(self) -> bool:
        """Are there gradients of weights, and so a second launch?"""
        return self.spec.problem.norm and self.spec.problem.direction is Direction.BACKWARD


SUMS_THREADS = 1024  # of a block that adds up partial sums: 32 columns


def make_plan(spec: PrologueSpec) -> ProloguePlan:
    """Plan of `spec`, or `Infeasible` with the reason."""
    p = spec.problem
    if p.head_dim % 2 or not 2 <= p.head_dim <= HEAD_DIM_LIMIT:
        raise Infeasible(f"head_dim {p.head_dim}: rotary embedding takes even ones up to {HEAD_DIM_LIMIT}")
    for name, dtype in (("weights", p.weight), ("cos and sin", p.table)):
        if dtype not in (p.dtype, DType.FLOAT32):
            raise Infeasible(f"{name} are {dtype.value}: they must be {p.dtype.value}, as q, or fp32")
    if isinstance(spec.tuning, CpuTuning):
        return _cpu_plan(spec, spec.tuning)
    return _cuda_plan(spec, spec.tuning)


def _cpu_plan(spec: PrologueSpec, t: CpuTuning) -> ProloguePlan:
    if spec.problem.dtype is DType.FLOAT16:
        raise Infeasible("fp16: the CPU's kernels take fp32 and bf16")
    require_positive(t.chunk)
    return ProloguePlan(spec, "prologue/prologue.cpp.jinja", ".cpp", tokens=t.chunk)


def _cuda_plan(spec: PrologueSpec, t: CudaTuning) -> ProloguePlan:
    p, half = spec.problem, spec.problem.head_dim // 2
    require_positive(t.vector, t.lanes, t.rows, t.warps, t.blocks, t.share)
    values = t.vector // p.dtype.bytes
    if t.vector not in (2, 4, 8, 16) or not values or t.vector > p.align or half % values:
        raise Infeasible(
            f"vector {t.vector}: must be 2 to 16 bytes, at most align {p.align}, and divide head_dim / 2 = {half}"
        )
    if t.lanes not in (1, 2, 4, 8, 16, 32):
        raise Infeasible(f"lanes {t.lanes}: must be a power of 2 up to 32")
    if t.lanes >= 2 * -(-half // values):
        raise Infeasible(f"lanes {t.lanes}: more than the {half // values} vectors of half a head can use")
    vectors = -(-half // (values * t.lanes))  # of half a head that a lane has
    held = 2 * values * vectors
    if held > _LANE_VALUES:
        raise Infeasible(
            f"lanes {t.lanes}: a lane would keep {held} values of a head, at most {_LANE_VALUES} fit; raise lanes"
        )
    threads = 32 * t.warps
    if threads > 1024 or threads * t.blocks > 1536:
        raise Infeasible(
            f"blocks {t.blocks} of {threads} threads: at most 1024 a block and 1536 in all; lower warps or blocks"
        )
    sums = p.direction is Direction.BACKWARD and p.norm
    if t.persistent not in (0, 1, 2) or (sums and not t.persistent):
        raise Infeasible(
            f"persistent {t.persistent}: must be 0, 1 or 2, and 1 or 2 where each block sums gradients of weights"
        )
    if t.warps % t.share or t.ahead not in (0, 1) or t.stream not in (0, 1):
        raise Infeasible(
            f"share {t.share}, ahead {t.ahead}, stream {t.stream}: a divisor of the {t.warps} warps, 0 or 1, 0 or 1"
        )
    shared = t.warps * 4 * p.head_dim * 4 if sums else 0
    if shared > _SHARED:
        raise Infeasible(
            f"warps {t.warps}: their sums take {shared} bytes of shared memory, at most {_SHARED} are used; lower warps"
        )
    need = _registers(p, t, held)
    there = min(REGISTER_LIMIT, REGISTER_FILE // (threads * t.blocks) // 8 * 8)  # they come in eights
    if need > there:
        raise Infeasible(
            f"blocks {t.blocks}: a thread needs about {need} registers, but {there} are available; lower blocks"
        )
    constants = {"values": values, "vectors": vectors, "ragged": int(vectors * values * t.lanes != half)}
    blocks = t.blocks if t.persistent else 0
    return ProloguePlan(
        spec, "prologue/prologue.cu.jinja", ".cu", threads, t.warps // t.share, blocks, constants
    )


def _registers(p: PrologueProblem, t: CudaTuning, held: int) -> int:
    """About how many a thread needs; fitted to ptxas 13.0, which spills where this is more than there are."""
    backward, weights = p.direction is Direction.BACKWARD, p.norm
    tensors = 2 if backward and weights else 1  # that heads are loaded of
    loaded = (1 + t.ahead) * tensors * t.rows * held * p.dtype.bytes // 4
    floats = tensors * held
    factors = 2 * held if weights else held  # weights and angles, or products of the two
    others = 54 if p.arch in (Arch.SM100, Arch.SM120) else 30  # addresses above all
    return others + loaded + floats + factors + (2 * held if backward and weights else 0)


# ---- Space


def candidates(problem: PrologueProblem) -> Iterator[PrologueSpec]:
    """Feasible variants, the best guess first."""
    seen = set()
    for tuning in _space(problem):
        spec = PrologueSpec(problem, tuning)
        try:
            make_plan(spec)
        except Infeasible:
            continue
        if spec not in seen:
            seen.add(spec)
            yield spec


def why_infeasible(problem: PrologueProblem) -> str:
    """Why there is no candidate."""
    reasons = []
    for tuning in _space(problem):
        try:
            make_plan(PrologueSpec(problem, tuning))
        except Infeasible as reason:
            reasons.append(str(reason))
    return reasons[0] if reasons else "its space is empty"


def _space(problem: PrologueProblem) -> Iterator[CudaTuning | CpuTuning]:
    if not problem.arch.is_gpu:
        yield from map(CpuTuning, (64, 16, 256))
        return
    size, backward = problem.dtype.bytes, problem.direction is Direction.BACKWARD
    half = problem.head_dim // 2 * size
    widths = [n * size for n in (4, 8, 2, 1) if n * size <= problem.align and half % (n * size) == 0]
    resident = (4, 3, 5, 6, 2, 1) if backward else (6, 8, 5, 4, 3)  # blocks of four warps
    grids = (1, 2) if backward else (0, 1)
    # The guess where nothing was measured is first: a warp for a token.
    for share, ahead, stream in ((1, 0, 0), (1, 0, 1), (4, 0, 0), (2, 0, 0), (1, 1, 0), (4, 1, 0)):
        some = None if (share, ahead, stream) == (1, 0, 0) else 3
        for vector in widths[:2]:
            widest = min(32, 1 << (half // vector - 1).bit_length())
            choices = product(
                (widest, max(1, widest // 2)), resident[:some], (4, 2, 1, 7, 8)[:some], (4, 8, 2), grids
            )
            for lanes, blocks, rows, warps, grid in choices:
                resident_blocks = max(1, blocks * 4 // warps)
                yield CudaTuning(vector, lanes, rows, warps, resident_blocks, grid, share, ahead, stream)


# ---- Rendering


@dataclass(frozen=True)
class PrologueSource:
    """Rendered text of one variant. To the cache it is what `render.Source` is."""

    plan: ProloguePlan
    text: str

    @property
    def spec(self) -> PrologueSpec:
        return self.plan.spec

    @property
    def slug(self) -> str:
        return self.spec.slug

    @property
    def file_name(self) -> str:
        return self.slug + self.suffix

    @property
    def arch(self) -> Arch:
        return self.spec.problem.arch

    @property
    def suffix(self) -> str:
        return self.plan.suffix

    @property
    def symbols(self) -> tuple[str, ...]:
        """The main function, and in a backward with weights the one that adds up their gradients."""
        return (self.spec.symbol, self.spec.sums_symbol) if self.plan.sums else (self.spec.symbol,)

    def describe(self) -> dict[str, Any]:
        """What meta.json of the cache entry says of it."""
        return self.spec.to_json()


def render(spec: PrologueSpec) -> PrologueSource:
    """Source of `spec`; raises `Infeasible` if it cannot run."""
    plan = make_plan(spec)
    knobs = [(f.name, getattr(spec.tuning, f.name), f.metadata["text"]) for f in spec.loud_knobs()]
    names = {"spec": spec, "plan": plan, "c": plan.constants, "knobs": knobs}
    return PrologueSource(plan, render_text(plan.template, **names, params_struct=params_struct()))
