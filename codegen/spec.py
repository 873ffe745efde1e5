"""What a kernel computes (`Problem`), how (`Tuning`), and both as one value (`Spec`).

Each field of `Problem` is declared once, with its code in slugs, its name in JSON and on the command line, and its
meaning; each knob of a tuning likewise. Slug, symbol, JSON, command line and the class of a tuned table derive from
them.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Literal, get_type_hints

from attnforge.codegen.formula import MAX_TENSORS, Formula
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod

MAX_INTERVALS = 4  # of the queries that see a key of spans


class Direction(Enum):
    """Which half of the operator the kernel computes."""

    FORWARD = "fwd"
    BACKWARD = "bwd"


class Arch(Enum):
    """Compilation target. SM90A is Hopper with its own instructions; SM90 and SM100 (B200) run the mma.sync family."""

    CPU = "cpu"
    SM80 = "sm80"
    SM86 = "sm86"
    SM89 = "sm89"
    SM90 = "sm90"
    SM90A = "sm90a"
    SM100 = "sm100"
    SM120 = "sm120"

    @property
    def is_gpu(self) -> bool:
        return self is not Arch.CPU

    @property
    def family(self) -> str:
        """Folder under templates/ that holds this target's algorithms."""
        return {Arch.CPU: "cpu", Arch.SM90A: "sm90a"}.get(self, "sm80")

    @property
    def since_hopper(self) -> bool:
        """Is the compute capability 9.0 or later, with griddepcontrol and vector reductions to memory?"""
        return self in (Arch.SM90, Arch.SM90A, Arch.SM100, Arch.SM120)

    @property
    def nvcc_name(self) -> str:
        """The architecture as nvcc and NVRTC spell it, e.g. `sm_80`."""
        return f"sm_{self.value[2:]}"


class DType(Enum):
    """Element type of q, k, v, out and their gradients."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"
    FLOAT16 = "fp16"

    @property
    def bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2


class Mask(Enum):
    """Which (query i, key j) pairs are visible.

    full: all. causal: j <= i + seq_k - seq_q (bottom-right aligned). spans: starts[j] <= i < ends[j], or the union of
    `Problem.intervals` of these, the same for all heads and batch entries or, with `Problem.planes`, not.
    dense: a bool tensor says so, one for all heads or one for each head or batch entry, or `Problem.mask_mod` does.
    """

    FULL = "full"
    CAUSAL = "causal"
    SPANS = "spans"
    DENSE = "dense"

    @property
    def listed(self) -> bool:
        """Are the tiles to visit listed in device memory? Else sizes are all it takes."""
        return self in (Mask.SPANS, Mask.DENSE)


# ---- The problem

# What a field means for a tuned table. "same": an entry counts only for its own value; "near": entries of the call's
# value come first, and of two such fields the later one weighs more; "free": an entry counts alike for every value.
Match = Literal["same", "near", "free"]


def about(
    text: str,
    code: str = "",
    *,
    cli: Any = None,
    name: str = "",
    after: str = "",
    always: bool = False,
    match: Match = "same",
) -> dict[str, Any]:
    """Metadata of a field of `Problem`. `text`: its meaning. `code`: what precedes its value in slugs.

    A field without a default is required, and `cli` is what `cli.py render` takes if it is not given. One with a
    default appears in slugs, JSON and command lines only where it differs, so that a new field changes no name that
    exists; `always`: it appears at any value. `name`: in JSON and on the command line, if not the attribute's.
    `after`: the field whose part of the slug it extends. `match`: see `Match`.
    """
    return {
        "text": text,
        "code": code,
        "cli": cli,
        "name": name,
        "after": after,
        "always": always,
        "match": match,
    }


@dataclass(frozen=True)
class Problem:
    """What must be computed; everything else about a kernel is a choice.

    A field with a default is optional for kernel families: one that does not honour a value refuses it.
    """

    direction: Direction = field(metadata=about("Pass", cli=Direction.FORWARD))
    arch: Arch = field(metadata=about("Compilation target", cli=Arch.SM80))
    dtype: DType = field(metadata=about("Element type", cli=DType.BFLOAT16, match="near"))
    head_dim: int = field(metadata=about("Columns of q and k", "d", cli=128))
    mask: Mask = field(metadata=about("Visible pairs", cli=Mask.SPANS, match="near"))
    align: int = field(
        default=16,
        metadata=about(
            "Largest power of 2, up to 16, that divides all row addresses of q, k, v and dout",
            "a",
            always=True,
            match="free",
        ),
    )
    dim_v: int = field(
        default=0,
        metadata=about("Columns of v and out; 0: those of q and k", "v", name="head_dim_v", after="head_dim"),
    )
    intervals: int = field(
        default=1,
        metadata=about("Intervals of queries that see a key, 1 to 4; spans", "x", after="mask", match="near"),
    )
    planes: int = field(
        default=0,
        metadata=about("1: spans differ between batch entries or heads", "p", after="mask", match="near"),
    )
    mask_mod: MaskMod = field(
        default=MaskMod(),
        metadata=about(
            "Function of a dense mask's pairs as text, see codegen/formula.py; empty: a bool tensor",
            match="near",
        ),
    )
    score: ScoreMod = field(
        default=ScoreMod(),
        metadata=about("Function of a score as text, see codegen/score.py; empty: none", match="near"),
    )

    def __post_init__(self) -> None:
        if self.dim_v == self.head_dim:
            object.__setattr__(self, "dim_v", 0)
        if not 1 <= self.intervals <= MAX_INTERVALS:
            raise ValueError(f"intervals: got {self.intervals}, expected 1 to {MAX_INTERVALS}")
        if self.planes not in (0, 1):
            raise ValueError(f"planes: got {self.planes}, expected 0 or 1")
        if self.mask is not Mask.SPANS and (self.intervals > 1 or self.planes):
            raise ValueError(f"intervals, planes: need mask spans, not {self.mask.value}")
        if self.mask_mod and self.mask is not Mask.DENSE:
            raise ValueError(f"mask_mod: needs mask dense, not {self.mask.value}")
        if self.mask_mod and len(self.captured) > MAX_TENSORS:
            raise ValueError(
                f"score, mask_mod: capture {len(self.captured)} tensors, at most {MAX_TENSORS} are supported together"
            )

    @property
    def unions(self) -> bool:
        """Are these spans of several intervals or planes? Kernels then read `Params.spans`."""
        return self.intervals > 1 or bool(self.planes)

    @property
    def packed(self) -> bool:
        """Are visible pairs bits in memory?"""
        return self.mask is Mask.DENSE and not self.mask_mod

    @property
    def captured(self) -> tuple[tuple[str, int], ...]:
        """dtype and number of dimensions of the tensors that the score reads, then of those that the mask reads."""
        return self.score.tensors + self.mask_mod.tensors

    @property
    def in_planes(self) -> bool:
        """Do visible pairs, and so tile lists, differ between batch entries or heads, at least perhaps?"""
        return self.mask is Mask.DENSE or bool(self.planes)

    @property
    def head_dim_v(self) -> int:
        """Columns of v, out and dout."""
        return self.dim_v or self.head_dim

    @property
    def head_dims(self) -> str:
        """In words."""
        return f"head_dim {self.head_dim}" + (f" and {self.dim_v} of v" if self.dim_v else "")

    @property
    def largest_dim(self) -> int:
        """The larger of the two head dims: guesses and limits depend on it."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def family(self) -> str:
        """Kernels that share templates and knobs: with the direction, the key of `families.FAMILIES`."""
        if self.dtype is DType.FLOAT32 and self.arch.is_gpu:
            return f"{self.arch.family}_fp32"
        backward = self.direction is Direction.BACKWARD
        wide = self.head_dim > 128 or self.dim_v != 0 if backward else self.head_dim > 256
        if wide and self.arch is Arch.SM90A:
            return f"{self.arch.family}_wide"
        return self.arch.family

    def named_fields(self) -> list[tuple[ProblemField, str | int]]:
        """Fields that names mention, in the order of names, with their plain values."""
        values = [(f, plain(getattr(self, f.attribute))) for f in PROBLEM_FIELDS]
        return [(f, value) for f, value in values if f.always or value != f.plain_default]

    @cached_property
    def slug(self) -> str:
        """The part of a kernel's name that says what it computes."""
        words = (f"{'' if f.after else '_'}{f.code}{_word(f, value)}" for f, value in self.named_fields())
        return "".join(words).removeprefix("_")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        return {f.name: value for f, value in self.named_fields()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Problem:
        """Rebuild a problem; a missing field is a ValueError that names it."""
        values: dict[str, Any] = {}
        for f in PROBLEM_FIELDS:
            if f.always and f.name not in data:
                raise ValueError(f"spec: field {f.name!r} is missing")
            if f.name in data:
                values[f.attribute] = f.type(data[f.name])
        return Problem(**values)


@dataclass(frozen=True)
class ProblemField:
    """What was declared of a field of `Problem`; see `about`."""

    attribute: str
    type: type[Enum] | type[int] | type[Formula]
    name: str
    code: str
    text: str
    default: Any
    cli: Any
    after: str
    always: bool
    match: Match

    @property
    def optional(self) -> bool:
        """May kernel families refuse other values than the default?"""
        return self.default is not MISSING

    @cached_property
    def plain_default(self) -> str | int:
        """The default, of a field that has one, as JSON has it."""
        return plain(self.default)

    @property
    def option(self) -> str:
        """The command line's name of it."""
        return "--" + self.name.replace("_", "-")


def _problem_fields() -> tuple[ProblemField, ...]:
    """In the order of names: a field that extends another's part follows it."""
    types, found = get_type_hints(Problem), dict[str, ProblemField]()
    for f in dataclasses.fields(Problem):
        known, required = dict(f.metadata), f.default is MISSING
        known |= {
            "name": known["name"] or f.name,
            "cli": known["cli"] if required else f.default,
            "always": known["always"] or required,
        }
        found[f.name] = ProblemField(f.name, types[f.name], default=f.default, **known)
    heads = [f for f in found.values() if not f.after]
    return tuple(
        f for head in heads for f in (head, *(x for x in found.values() if x.after == head.attribute))
    )


def plain(value: Any) -> str | int:
    """A field's or knob's value as JSON has it."""
    if isinstance(value, str):
        return str(value)
    return str(value.value) if isinstance(value, Enum) else int(value)


def _word(f: ProblemField, value: str | int) -> str:
    """The value as slugs have it: that of a formula is its label."""
    return f.type(value).label if issubclass(f.type, Formula) else str(value)


PROBLEM_FIELDS = _problem_fields()


# ---- The tuning


def knob(code: str, text: str, default: Any = MISSING, was: str = "", quiet: bool = False) -> Any:
    """A tuning field: `code` is its short name in slugs, `text` its one-line meaning.

    `default` is what tables and logs that were written before there was such a knob mean; `was` is the knob's name in
    those that were written before it was renamed. `quiet`: slugs, JSON, command lines and headers mention it only
    where it differs from its default, so that a new knob changes no name and no text that exists.
    """
    return field(default=default, metadata={"code": code, "text": text, "was": was, "quiet": quiet})


@dataclass(frozen=True)
class Tuning:
    """Base of the knobs of every family and pass (codegen/families/): what a search may choose."""

    # Knobs that tables and logs may still have, with the only value that is left.
    retired: ClassVar[Mapping[str, int]] = {}

    tile_m: int  # query rows of a tile
    tile_n: int  # keys of a tile

    @property
    def adds_in_any_order(self) -> bool:
        """Of a backward: may several blocks add to dK and dV of a key tile, in any order?

        Only then can the list of query tiles that see it be divided among blocks. True where no knob says otherwise.
        """
        return bool(getattr(self, "split_heads", True)) and not getattr(self, "deterministic", False)

    def to_json(self) -> dict[str, int]:
        """Whole numbers by knob, of all knobs."""
        return {f.name: int(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def named_knobs(self) -> list[tuple[dataclasses.Field[Any], int]]:
        """The knobs that names mention, and their values: all but quiet ones at their defaults."""
        values = [(f, int(getattr(self, f.name))) for f in dataclasses.fields(self)]
        return [(f, x) for f, x in values if not f.metadata.get("quiet") or x != f.default]


@dataclass(frozen=True)
class Spec:
    """One kernel variant: a problem and the tuning that solves it."""

    problem: Problem
    tuning: Tuning

    def __hash__(self) -> int:
        """Kept: searches look up each spec of a space again and again."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.problem, self.tuning))

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept: hashes differ between processes."""
        return {"problem": self.problem, "tuning": self.tuning}

    @cached_property
    def slug(self) -> str:
        """File-name-safe identity, e.g. `fwd_sm80_bf16_d128_spans_a16_m128_n64_w4_s1_q0`.

        A head_dim of v of its own follows that of q and k: `d192v128`.
        """
        knobs = (f"{f.metadata['code']}{value}" for f, value in self.tuning.named_knobs())
        return "_".join((self.problem.slug, *knobs))

    @property
    def symbol(self) -> str:
        """Name of the main `extern "C"` function; what profilers show."""
        return f"attnforge_{self.slug}"

    def to_cli(self) -> str:
        """Arguments of `cli.py render` that reproduce this spec."""
        words = [f"{f.option} {shlex.quote(str(value))}" for f, value in self.problem.named_fields()]
        words += [f"--set {f.name}={value}" for f, value in self.tuning.named_knobs()]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `families.spec_from_json` inverts it."""
        tuning = {f.name: value for f, value in self.tuning.named_knobs()}
        return {**self.problem.to_json(), "tuning": tuning}
