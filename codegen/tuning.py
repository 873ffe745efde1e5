"""Knobs: one dataclass for each kernel family and direction, whose fields are what a search may choose."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any


def knob(code: str, text: str, default: Any = MISSING) -> Any:
    """A tuning field: `code` is its short name in slugs, `text` its one-line meaning.

    `default` is what tables and logs that were written before there was such a knob mean.
    """
    return field(default=default, metadata={"code": code, "text": text})


@dataclass(frozen=True)
class CpuForward:
    """Tuning of the CPU forward kernel."""

    tile_m: int = knob("m", "query rows per tile, a multiple of lanes * cols")
    tile_n: int = knob("n", "keys per tile")
    heads: int = knob("h", "query heads of one kv head that share each packed K and V tile")
    lanes: int = knob("l", "float lanes of one vector register")
    rows: int = knob("r", "rows of the register block")
    cols: int = knob("c", "vector registers per row of the register block")
    pairs: bool = knob("p", "multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32")


@dataclass(frozen=True)
class CpuBackward:
    """Tuning of the CPU backward kernel."""

    tile_m: int = knob("m", "query rows per tile")
    tile_n: int = knob("n", "keys per tile, a multiple of lanes * cols")
    lanes: int = knob("l", "float lanes of one vector register")
    rows: int = knob("r", "rows of the register block")
    cols: int = knob("c", "vector registers per row of the register block")
    pairs: bool = knob("p", "multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32")


@dataclass(frozen=True)
class Sm80Forward:
    """Tuning of the mma.sync forward kernel."""

    tile_m: int = knob("m", "query rows per block")
    tile_n: int = knob("n", "keys per step of the main loop")
    warps: int = knob("w", "warps per block; each owns tile_m / warps query rows")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    q_in_regs: bool = knob("q", "keep the Q fragments in registers instead of shared memory")


@dataclass(frozen=True)
class Sm80Backward:
    """Tuning of the mma.sync backward kernel (one block owns a key tile and walks the query tiles)."""

    tile_m: int = knob("m", "query rows per step of the main loop")
    tile_n: int = knob("n", "keys per block")
    warps: int = knob("w", "warps per block")
    stages: int = knob("s", "shared-memory buffers for Q and for dO")
    warps_sdp: int = knob("a", "warps along the queries in S and dP; the rest split the keys")
    warps_dkv: int = knob("b", "warps along the keys in dK and dV; the rest split head_dim")
    warps_dq: int = knob("c", "warps along the queries in dQ; the rest split head_dim")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in fp32 memory), not per kv head")
    ordered: bool = knob("o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run")


@dataclass(frozen=True)
class Sm90Forward:
    """Tuning of the Hopper forward kernel (TMA, wgmma, a producer warpgroup)."""

    tile_m: int = knob("m", "query rows per tile, 64 for each consumer warpgroup")
    tile_n: int = knob("n", "keys per step of the main loop")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    ping_pong: bool = knob("p", "consumer warpgroups take turns with the tensor cores")
    persistent: bool = knob("r", "one block per multiprocessor walks many tiles")
    counter: bool = knob("k", "a block takes its next tile from a counter, not in fixed rounds")
    q_in_regs: bool = knob("q", "keep the fragments of Q in registers")
    cluster: int = knob(
        "c", "blocks, 1 or 2, of neighbouring query tiles that share their loads of K and V", 1
    )


@dataclass(frozen=True)
class Sm90Backward:
    """Tuning of the Hopper backward kernel (one block owns a key tile and walks the query tiles)."""

    tile_m: int = knob("m", "query rows per step of the main loop; always 64, the rows of a product for dQ")
    tile_n: int = knob("n", "keys per block; always 128, 64 for each of two consumer warpgroups")
    stages: int = knob("s", "shared-memory buffers for Q")
    stages_dout: int = knob("t", "shared-memory buffers for dO")
    lag: bool = knob(
        "l", "dQ runs a pair of steps later, dP a step earlier: consumers may be up to a step apart"
    )
    in_regs: int = knob("r", "operands that consumers keep in registers: 0 none, 1 K, 2 K and V")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in fp32 memory), not per kv head")
    ordered: bool = knob("o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run")
    descending: bool = knob(
        "d", "blocks start with the last key tile, not the one with most work (ordered ones always do)"
    )


@dataclass(frozen=True)
class Sm90Fp32Forward:
    """Tuning of the Hopper float32 forward kernel (wgmma on parts of floats, a producer warpgroup)."""

    tile_m: int = knob("m", "query rows per tile, 64 for each consumer warpgroup")
    tile_n: int = knob("n", "keys per step of the main loop")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    ping_pong: bool = knob("p", "consumer warpgroups take turns with the tensor cores")
    persistent: bool = knob("r", "one block per multiprocessor walks many tiles")
    q_in_regs: bool = knob("q", "keep the fragments of Q in registers")


@dataclass(frozen=True)
class Fp32Forward:
    """Tuning of the float32 forward kernels: mma.sync on tf32 parts, or float lanes (parts = 0)."""

    tile_m: int = knob("m", "query rows per block")
    tile_n: int = knob("n", "keys per step of the main loop")
    warps: int = knob("w", "warps per block; each owns tile_m / warps query rows")
    stages: int = knob("s", "shared-memory buffers for K and for V")
    parts: int = knob("p", "parts of the columns of O, computed in turn; 0: float lanes, no tensor cores")
    blocks: int = knob("b", "blocks per multiprocessor that registers are shared among")


@dataclass(frozen=True)
class Fp32Backward:
    """Tuning of the float32 backward kernel (one block owns a key tile and walks the query tiles)."""

    tile_m: int = knob("m", "query rows per step of the main loop")
    tile_n: int = knob("n", "keys per block")
    warps: int = knob("w", "warps per block")
    stages: int = knob("s", "shared-memory buffers for Q and for dO")
    warps_sdp: int = knob("a", "warps along the queries in S and dP; the rest split the keys")
    warps_dkv: int = knob("c", "warps along the keys in dK and dV; the rest split head_dim")
    warps_dq: int = knob("d", "warps along the queries in dQ; the rest split head_dim")
    parts: int = knob("p", "parts of a warp's columns of dK, dV and dQ, which a step computes in turn")
    blocks: int = knob("b", "blocks per multiprocessor that registers are shared among")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in memory), not per kv head")
    ordered: bool = knob("o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run")


Tuning = (
    CpuForward
    | CpuBackward
    | Sm80Forward
    | Sm80Backward
    | Sm90Forward
    | Sm90Backward
    | Sm90Fp32Forward
    | Fp32Forward
    | Fp32Backward
)
