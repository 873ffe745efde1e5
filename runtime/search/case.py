"""`Case`: one attention call to verify and time (shapes, mask and dtype), and the tensors to do it with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.call import Call
from attnforge.runtime.inputs import check_forward, check_score
from attnforge.runtime.kernels import TORCH_DTYPES
from attnforge.runtime.masks import AnyMask, Causal, FunctionMask, Spans
from attnforge.runtime.ops import unpack_mask
from attnforge.runtime.rounds import rounds_of
from attnforge.runtime.scores import Score

DETERMINISTIC = " deterministic"  # ends the names of cases of `as_deterministic`


class Inputs(NamedTuple):
    """q (B, Hq, Sq, D), dout (B, Hq, Sq, Dv), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); views of (B, S, H, D) memory."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True)
class Case:
    """A named problem instance. `pairs` are the visible (query, key) pairs of one head of one batch entry."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: DType
    mask: AnyMask
    pairs: int
    device: torch.device
    dim_v: int = 0  # head_dim of v if it has its own
    score: Score | None = None
    deterministic: bool = False  # gradients are to sum in a fixed order; see `as_deterministic`

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def head_dim_v(self) -> int:
        return self.dim_v or self.head_dim

    @property
    def mask_kind(self) -> Mask:
        return Mask.FULL if self.mask is None else self.mask.kind

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def visible_keys(self) -> int:
        """As `Spans` has it, else from `pairs`; 0 for full and causal masks, where the length determines it."""
        if self.mask is None or isinstance(self.mask, Causal):
            return 0
        known = self.mask.visible_keys
        return int(self.pairs / self.seq_q if known is None else known)

    def rounds(self, direction: Direction, multiprocessors: int | None = None) -> int:
        """As `rounds_of`, on the device, or on a GPU of so many multiprocessors (0: not known)."""
        if multiprocessors is None:
            multiprocessors = 0
            if self.device.type == "cuda":
                multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        heads, rows = (
            (self.heads_q, self.seq_q) if direction is Direction.FORWARD else (self.heads_kv, self.seq_k)
        )
        return rounds_of(self.batch, heads, rows, multiprocessors)

    def call(self, problem: Problem, multiprocessors: int | None = None) -> Call:
        """What a kernel for a problem of the case is chosen by; `multiprocessors` as of `rounds`."""
        return Call(
            problem,
            self.heads_q // self.heads_kv,
            self.seq_q,
            visible_keys=self.visible_keys,
            deterministic=self.deterministic and problem.direction is Direction.BACKWARD,
            rounds=self.rounds(problem.direction, multiprocessors),
        )

    def flops(self, direction: Direction) -> float:
        """Arithmetic of the visible pairs: two products forward, five backward (2.5 times that at equal head dims)."""
        products = (3, 2) if direction is Direction.BACKWARD else (1, 1)  # as deep or wide as q and k, as v
        columns = products[0] * self.head_dim + products[1] * self.head_dim_v
        return 2.0 * self.batch * self.heads_q * columns * self.pairs

    def problem(self, direction: Direction, arch: Arch) -> Problem:
        """What a kernel for this case must solve, aligned as `inputs` are."""
        row = math.gcd(self.head_dim, self.head_dim_v) * self.dtype.bytes
        sizes = (16, 8, 4, 2) if arch.is_gpu else (4, 2)
        align = next(size for size in sizes if row % size == 0)
        plain = Problem(direction, arch, self.dtype, self.head_dim, self.mask_kind, align, self.dim_v)
        if self.score is not None:
            plain = replace(plain, score=ScoreMod(self.score.text))
        if isinstance(self.mask, FunctionMask):
            return replace(plain, mask_mod=MaskMod(self.mask.text))
        if not isinstance(self.mask, Spans):
            return plain
        return replace(plain, intervals=self.mask.intervals, planes=int(self.mask.planes != (1, 1)))

    def check(self) -> None:
        """Raises the ValueError or TypeError with which `attention` refuses the call. Allocates no tensors."""
        sizes = (
            (self.heads_q, self.seq_q, self.head_dim),
            (self.heads_kv, self.seq_k, self.head_dim),
            (self.heads_kv, self.seq_k, self.head_dim_v),
        )
        try:
            q, k, v = (torch.empty(self.batch, *s, dtype=self.torch_dtype, device="meta") for s in sizes)
        except (RuntimeError, TypeError):  # 64 bits do not count its bytes
            raise ValueError(f"q: torch has no tensor of shape {(self.batch, *sizes[0])}") from None
        given, kind, _ = unpack_mask(self.mask, q, k)
        data = None if given is None else torch.empty_like(given, device="meta")
        function = self.mask if isinstance(self.mask, FunctionMask) else None
        mod, mod_tensors = (function.text, function.tensors) if function else ("", ())
        check_forward(q, k, v, data, kind, self.scale, mask_mod=mod)
        score, tensors = (self.score.text, self.score.tensors) if self.score else ("", ())
        check_score(q, k, score, [torch.empty_like(x, device="meta") for x in (*tensors, *mod_tensors)], mod)

    def inputs(self, seed: int = 0) -> Inputs:
        """Standard normal tensors, the same for the same seed on the same device."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(heads: int, length: int, columns: int) -> torch.Tensor:
            shape = (self.batch, length, heads, columns)
            values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return values.to(self.torch_dtype).transpose(1, 2)

        q = draw(self.heads_q, self.seq_q, self.head_dim)
        k = draw(self.heads_kv, self.seq_k, self.head_dim)
        v = draw(self.heads_kv, self.seq_k, self.head_dim_v)
        return Inputs(q, k, v, draw(self.heads_q, self.seq_q, self.head_dim_v))


def as_deterministic(case: Case) -> Case:
    """The call with gradients that sum in a fixed order. Its name says so, and with it logs, claims and tables."""
    return replace(case, name=case.name + DETERMINISTIC, deterministic=True)


def without_order(name: str) -> str:
    """The name of a case before `as_deterministic`."""
    return name.removesuffix(DETERMINISTIC)


def full_case(name: str, shape: tuple[int, int, int, int, int], dtype: DType, device: torch.device) -> Case:
    """Without a mask; shape is (batch, heads_q, heads_kv, length, head_dim)."""
    batch, heads_q, heads_kv, length, head_dim = shape
    return Case(
        name, batch, heads_q, heads_kv, length, length, head_dim, dtype, None, length * length, device
    )


def causal_case(name: str, shape: tuple[int, int, int, int, int], dtype: DType, device: torch.device) -> Case:
    """Causal; shape as in `full_case`."""
    batch, heads_q, heads_kv, length, head_dim = shape
    pairs = length * (length + 1) // 2
    return Case(name, batch, heads_q, heads_kv, length, length, head_dim, dtype, Causal(), pairs, device)
