"""One value, `Spec`, names a kernel variant; slug, symbol, CLI flags and cache key all derive from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from attnforge.codegen.tuning import (
    CpuBackward,
    CpuForward,
    Fp32Backward,
    Fp32Forward,
    Sm80Backward,
    Sm80Forward,
    Sm90Backward,
    Sm90Forward,
    Sm90Fp32Forward,
    Tuning,
)


class Direction(Enum):
    """Which half of the operator the kernel computes."""

    FORWARD = "fwd"
    BACKWARD = "bwd"


class Arch(Enum):
    """Compilation target. SM90A is Hopper with its own instructions, SM90 Hopper running the mma.sync family."""

    CPU = "cpu"
    SM80 = "sm80"
    SM86 = "sm86"
    SM89 = "sm89"
    SM90 = "sm90"
    SM90A = "sm90a"
    SM120 = "sm120"

    @property
    def is_gpu(self) -> bool:
        return self is not Arch.CPU

    @property
    def family(self) -> str:
        """Folder under templates/ that holds this target's algorithms."""
        return {Arch.CPU: "cpu", Arch.SM90A: "sm90a"}.get(self, "sm80")

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

    full: all. causal: j <= i + seq_k - seq_q (bottom-right aligned). spans: starts[j] <= i < ends[j].
    dense: a bool tensor says so, one for all heads or one for each head or batch entry.
    """

    FULL = "full"
    CAUSAL = "causal"
    SPANS = "spans"
    DENSE = "dense"

    @property
    def listed(self) -> bool:
        """Are the tiles to visit listed in device memory? Else sizes are all it takes."""
        return self in (Mask.SPANS, Mask.DENSE)


TUNINGS: dict[tuple[str, Direction], type[Tuning]] = {
    ("cpu", Direction.FORWARD): CpuForward,
    ("cpu", Direction.BACKWARD): CpuBackward,
    ("sm80", Direction.FORWARD): Sm80Forward,
    ("sm80", Direction.BACKWARD): Sm80Backward,
    ("sm90a", Direction.FORWARD): Sm90Forward,
    ("sm90a", Direction.BACKWARD): Sm90Backward,
    ("sm90a_fp32", Direction.FORWARD): Sm90Fp32Forward,
    ("sm80_fp32", Direction.FORWARD): Fp32Forward,
    ("sm80_fp32", Direction.BACKWARD): Fp32Backward,
}


@dataclass(frozen=True)
class Problem:
    """What must be computed; everything else about a kernel is a choice."""

    direction: Direction
    arch: Arch
    dtype: DType
    head_dim: int
    mask: Mask
    align: int = 16  # bytes that every row start of q, k, v, dout is a multiple of: 16, 8, 4 or 2
    dim_v: int = 0  # columns of v, out and dout if they are not head_dim (of q and k), else 0: see head_dim_v

    def __post_init__(self) -> None:
        if self.dim_v == self.head_dim:
            object.__setattr__(self, "dim_v", 0)

    @property
    def head_dim_v(self) -> int:
        """Columns of v, out and dout."""
        return self.dim_v or self.head_dim

    @property
    def largest_dim(self) -> int:
        """The larger of the two head dims: what guesses and limits go by."""
        return max(self.head_dim, self.head_dim_v)

    @property
    def family(self) -> str:
        """Kernels that share templates and knobs: the key of TUNINGS."""
        fp32 = self.dtype is DType.FLOAT32 and self.arch.is_gpu
        return self.arch.family + ("_fp32" if fp32 else "")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value: what a spec's begins with."""
        return {
            "direction": self.direction.value,
            "arch": self.arch.value,
            "dtype": self.dtype.value,
            "head_dim": self.head_dim,
            **({"head_dim_v": self.dim_v} if self.dim_v else {}),
            "mask": self.mask.value,
            "align": self.align,
        }


@dataclass(frozen=True)
class Spec:
    """One kernel variant: a problem and the tuning that solves it."""

    problem: Problem
    tuning: Tuning

    def __post_init__(self) -> None:
        expected = TUNINGS[self.problem.family, self.problem.direction]
        if type(self.tuning) is not expected:
            raise TypeError(
                f"tuning: got {type(self.tuning).__name__}, but {self.problem.arch.value} "
                f"{self.problem.direction.value} takes {expected.__name__}"
            )

    @property
    def slug(self) -> str:
        """File-name-safe identity, e.g. `fwd_sm80_bf16_d128_spans_a16_m128_n64_w4_s1_q0`.

        A head_dim of v of its own follows that of q and k: `d192v128`.
        """
        p = self.problem
        dims = f"d{p.head_dim}" + (f"v{p.dim_v}" if p.dim_v else "")
        head = f"{p.direction.value}_{p.arch.value}_{p.dtype.value}_{dims}_{p.mask.value}_a{p.align}"
        knobs = (
            f"{f.metadata['code']}{int(getattr(self.tuning, f.name))}"
            for f in dataclasses.fields(self.tuning)
        )
        return "_".join((head, *knobs))

    @property
    def symbol(self) -> str:
        """Name of the main `extern "C"` function; what profilers show."""
        return f"attnforge_{self.slug}"

    def to_cli(self) -> str:
        """Arguments of `cli.py render` that reproduce this spec."""
        p = self.problem
        words = [
            f"--direction {p.direction.value}",
            f"--arch {p.arch.value}",
            f"--dtype {p.dtype.value}",
            f"--head-dim {p.head_dim}",
            *([f"--head-dim-v {p.dim_v}"] if p.dim_v else []),
            f"--mask {p.mask.value}",
            f"--align {p.align}",
        ]
        words += [
            f"--set {f.name}={int(getattr(self.tuning, f.name))}" for f in dataclasses.fields(self.tuning)
        ]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON value; `from_json` inverts it."""
        tuning = {f.name: int(getattr(self.tuning, f.name)) for f in dataclasses.fields(self.tuning)}
        return {**self.problem.to_json(), "tuning": tuning}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Spec:
        """Rebuild a spec; a missing or unknown field is a ValueError that names it."""
        try:
            problem = Problem(
                Direction(data["direction"]),
                Arch(data["arch"]),
                DType(data["dtype"]),
                int(data["head_dim"]),
                Mask(data["mask"]),
                int(data["align"]),
                int(data.get("head_dim_v", 0)),
            )
        except KeyError as error:
            raise ValueError(f"spec: field {error} is missing") from error
        return Spec(problem, make_tuning(problem, data.get("tuning", {})))


def make_tuning(problem: Problem, values: dict[str, int]) -> Tuning:
    """Build the tuning of `problem`'s family from integers by field name.

    None may be unknown, and none missing but those that have a default.
    """
    cls = TUNINGS[problem.family, problem.direction]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    unknown, missing = values.keys() - fields.keys(), required - values.keys()
    if unknown or missing:
        wrong = [f"{', '.join(sorted(unknown))} unknown"] if unknown else []
        wrong += [f"{', '.join(sorted(missing))} missing"] if missing else []
        what = f"tuning of {problem.arch.value} {problem.dtype.value} {problem.direction.value}"
        raise ValueError(f"{what}: {'; '.join(wrong)}. Its knobs are {', '.join(fields)}")
    typed = {n: bool(v) if fields[n].type in (bool, "bool") else int(v) for n, v in values.items()}
    return cls(**typed)  # type: ignore[arg-type]
