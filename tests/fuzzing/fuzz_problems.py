"""Random attention problems, each drawn from one integer; tests/fuzzing/fuzz_data.py makes their tensors and masks.

A seed is `family * CASES + number`. The family (dtype, head dims, kind of mask, alignment) decides which kernels are
compiled, so a run takes few families and many cases of each. The same seed gives the same problem on the same kind of
device for ever; fp16, which the CPU has no kernels for, becomes bf16 there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

CASES = 100_000  # seeds of a family
FAMILIES = 1000  # of a palette: a run draws its families from one of these

STYLES = {
    "full": ("full",),
    "causal": ("causal",),
    "spans": ("random", "window", "prefix", "any int32", "packed", "documents", "band"),
    "dense": ("random", "blocks", "nothing", "planes", "expanded"),
}
LAYOUTS = ("bhsd", "bshd", "hbsd", "fused", "narrowed", "padded", "unit axes", "one head", "one entry")
VALUES = ("normal",) * 8 + ("large", "spiky", "equal", "zero", "small", "mixed", "one hot", "huge")
BORDERS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256)


@dataclass(frozen=True)
class Family:
    """What chooses the kernels of a case, besides its sizes."""

    dtype: torch.dtype
    head_dim: int
    dim_v: int
    mask: str  # kind of mask: a key of STYLES
    loose: bool  # rows of q begin at multiples of one element only


@dataclass(frozen=True)
class Problem:
    """One call. Everything random about its tensors follows from `seed`."""

    seed: int
    device: str
    family: Family
    batch: int
    heads_kv: int
    group: int
    seq_q: int
    seq_k: int
    style: str  # of the mask
    layouts: tuple[str, str, str, str]  # of q, k, v, dout
    values: str
    scale: float | None
    way: str  # attention, flash_attn_func, flash_attn_varlen_func or sdpa
    mode: str  # grad, no_grad or inference
    lse: bool  # return_lse
    lse_grad: bool  # gradient through lse
    deterministic: bool
    wrap: str  # plain, autocast, compile
    overwrite: bool  # what the mask was made of, before it is used

    @property
    def shape(self) -> str:
        f = self.family
        return (
            f"q ({self.batch}, {self.heads_kv * self.group}, {self.seq_q}, {f.head_dim}), k (.., {self.heads_kv}, "
            f"{self.seq_k}, {f.head_dim}), v (.., {f.dim_v})"
        )

    def __str__(self) -> str:
        f = self.family
        said = [
            f"{self.way} {f.dtype} on {self.device}: {self.shape}",
            f"mask {f.mask} ({self.style})" + (", its sources overwritten" if self.overwrite else ""),
            f"layouts of q, k, v, dout: {', '.join(self.layouts)}"
            + (", q at any address" if f.loose else ""),
            f"values {self.values}, scale {self.scale}, {self.mode}, {self.wrap}",
        ]
        said += (
            ["return_lse"] * self.lse
            + ["gradient of lse"] * self.lse_grad
            + ["deterministic"] * self.deterministic
        )
        return "; ".join(said)


def family(number: int, device: str) -> Family:
    """Family `number`. In each palette masks and dtypes come in turns."""
    chance = random.Random(f"family {number}")
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    dtype = dtypes[number // 4 % 3]
    if device == "cpu" and dtype is torch.float16:
        dtype = torch.bfloat16
    head_dim = chance.choice(
        (64, 64, 128, 128, 72, chance.randint(1, 256), 8 * chance.randint(1, 32), chance.choice((1, 256)))
    )
    dim_v = (
        head_dim
        if chance.random() < 0.75
        else chance.choice((chance.randint(1, 256), 8 * chance.randint(1, 32)))
    )
    return Family(dtype, head_dim, dim_v, tuple(STYLES)[number % 4], chance.random() < 0.15)


def problem(seed: int, device: str) -> Problem:
    """The problem of a seed."""
    kin = family(seed // CASES, device)
    chance = random.Random(f"case {seed}")
    most = 22 if device == "cpu" else 26  # log2 of the pairs times head dims
    batch, heads_kv = chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 3))
    group = chance.choice((1, 1, 2, 3, 4, 7, 8))
    longest = 300 if device == "cpu" else 1500
    seq_q = _length(chance, longest)
    seq_k = seq_q if chance.random() < 0.6 else _length(chance, longest)
    while batch * heads_kv * group * seq_q * seq_k * max(kin.head_dim, kin.dim_v) > 1 << most:
        if group > 1:
            group = 1
        elif batch * heads_kv > 1:
            batch, heads_kv = 1, max(1, heads_kv - 1)
        else:
            seq_q, seq_k = (seq_q + 1) // 2, (seq_k + 1) // 2
    empty = chance.random() < 0.02
    if empty:
        batch, seq_q, seq_k = chance.choice(
            ((0, seq_q, seq_k), (batch, 0, seq_k), (batch, seq_q, 0), (batch, 0, 0))
        )
    style = chance.choice(STYLES[kin.mask])
    way = _way(chance, kin, style)
    if way == "attention" and style in ("random", "window", "any int32"):
        # A draw of its own, so that all other problems of the seed stay as they are.
        style = "unions" if random.Random(f"unions {seed}").random() < 0.4 else style
    if way == "flash_attn_varlen_func":  # its tensors have no axis for it
        batch = 1
    if style == "packed":
        seq_k = seq_q = max(seq_q, 1)
    if way == "sdpa" and kin.mask == "causal":
        seq_k = seq_q
    layouts = [chance.choice(LAYOUTS) for _ in range(4)]
    if chance.random() < 0.15:
        layouts[3] = "one number"  # out.sum().backward()
    own = way == "attention"
    lse = own and chance.random() < 0.3
    mode = chance.choice(("grad",) * 8 + ("no_grad", "inference"))
    rare = chance.random()
    wrap = (
        "compile" if rare < 0.01 else "autocast" if rare < 0.04 and kin.dtype is torch.bfloat16 else "plain"
    )
    return Problem(
        seed,
        device,
        kin,
        batch,
        heads_kv,
        group,
        seq_q,
        seq_k,
        style,
        (layouts[0], layouts[1], layouts[2], layouts[3]),
        chance.choice(VALUES),
        None if chance.random() < 0.6 else chance.choice((10 ** chance.uniform(-3, 0.5), 1.0, 1e-30)),
        way,
        mode,
        lse,
        lse and mode == "grad" and chance.random() < 0.5,
        way != "sdpa" and chance.random() < 0.3,
        wrap if own else "plain",
        kin.mask in ("spans", "dense") and own and chance.random() < 0.2,
    )


LATER = ("empties", "lse gradient", "huge values", "overwritten masks")
MISSING: tuple[str, ...] = ()  # what the kernels cannot do yet: left out unless it is asked for


def without(case: Problem, features: tuple[str, ...]) -> Problem:
    """`case` with nothing of `features` (of LATER)."""
    if "empties" in features and 0 in (case.batch, case.seq_q, case.seq_k):
        case = replace(case, batch=max(case.batch, 1), seq_q=max(case.seq_q, 1), seq_k=max(case.seq_k, 1))
    if "lse gradient" in features:
        case = replace(case, lse_grad=False)
    if "huge values" in features and case.values == "huge":
        case = replace(case, values="large")
    if "overwritten masks" in features:
        case = replace(case, overwrite=False)
    return case


def _length(chance: random.Random, longest: int) -> int:
    """1 and a few, around borders of tiles, or anything up to `longest`."""
    near = chance.choice(BORDERS) + chance.choice((-1, 0, 0, 1))
    return chance.choice(
        (chance.randint(1, 5), near, near, chance.randint(1, 100), chance.randint(1, longest))
    )


def _way(chance: random.Random, kin: Family, style: str) -> str:
    if style == "documents":
        return "flash_attn_varlen_func"
    if style == "band":
        return "flash_attn_func"
    also = {"full": ("flash_attn_func", "sdpa"), "causal": ("flash_attn_func", "sdpa"), "dense": ("sdpa",)}
    return chance.choice(("attention",) * 4 + also.get(kin.mask, ()))
