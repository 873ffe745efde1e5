"""What the Hopper kernels share: registers of warpgroups, swizzles, alignment, and checks of what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attnforge.codegen.families.family import is_feasible
from attnforge.codegen.families.limits import SHARED_LIMIT
from attnforge.codegen.plan import Infeasible, Plan
from attnforge.codegen.spec import Arch, DType, Problem, Spec, Tuning

T = TypeVar("T", bound=Tuning)

# Registers of a producer and of a consumer thread by number of consumer warpgroups. The kernel starts with
# 65536 / threads (rounded down to 8) each; setmaxnreg moves what the producer frees to the consumers.
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
# With a tile counter or a cluster, whose producers spill with 24.
REGISTERS_BUSY = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# Registers of a consumer thread beyond its tiles: addresses, loop counters, row_stats, operands in flight. An
# estimate; tests/kernels/test_nvcc.py compiles the first guesses and asserts that none spills.
REGISTERS_BESIDES = 28
# Knob cache_mb: less than half of the L2 cache, since the heads in work share it with what streams through it
# (docs/experiments.md, 89).
SECTION_MB = 16
SECTIONS_MB = (4, 64)  # least and most
HELD = 16  # bytes of a sum of the gradient of a captured tensor, and of its place there
HELPER_THREADS = 256  # of a block of a backward's _preprocess and _postprocess
# Descriptor code of the swizzle by bytes of a panel row (PTX ISA, wgmma matrix descriptor).
SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}
COLUMNS = 64  # of a panel with the widest swizzle, 128 bytes
ALIGNMENT = 1024  # of every tile: the period of the widest swizzle
PAIR = 2  # blocks of a cluster that share a tile
# Why the 16-bit kernels refuse values of fields that they do not honour.
REASONS = {
    "align": "TMA needs rows that start at multiples of 16 bytes; sm90 takes this call",
    "mask_mod": "the sm90a fp32 kernels take none; sm90 takes this call",
    "score": "the sm90a fp32 kernels take none; sm90 takes this call",
}


def consumer_warpgroups(tile_m: int, tile_n: int, stages: int, ping_pong: bool) -> int:
    """Consumer warpgroups of a forward kernel, or `Infeasible` if they do not make these tiles."""
    consumers = tile_m // 64
    if tile_m % 64 or consumers not in REGISTERS:
        raise Infeasible(f"tile_m {tile_m}: must be 64, 128 or 192")
    if tile_n % 16 or not 16 <= tile_n <= 256:
        raise Infeasible(f"tile_n {tile_n}: must be a multiple of 16 up to 256")
    if not 1 <= stages <= 4:
        raise Infeasible(f"stages {stages}: must be 1 to 4")
    if ping_pong and consumers < 2:
        raise Infeasible("ping_pong: needs at least two consumer warpgroups; set tile_m to 128 or 192")
    return consumers


def require_forward_knobs(stages: int, stages_v: int, exact_visits: int) -> None:
    """Infeasible for values of a forward's knobs that mean nothing, or the same as another value."""
    if not 0 <= exact_visits <= 9:
        raise Infeasible(f"exact_visits {exact_visits}: must be 0 to 9")
    if stages_v and not stages < stages_v <= 4:
        raise Infeasible(f"stages_v {stages_v}: must be more than stages, up to 4, or 0 for as many")


def require_hopper(p: Problem, name: str, limit: int) -> None:
    """Infeasible for what the mma.sync family alone computes; the pass called `name` takes head dims up to `limit`."""
    if p.dtype is DType.FLOAT32:
        raise Infeasible("dtype fp32: the sm90a kernels take bf16 or fp16")
    for tensors, dim in (("head_dim", p.head_dim), ("head_dim of v", p.head_dim_v)):
        if dim % 8 or not 16 <= dim <= limit:
            reason = f"the sm90a {name} kernel takes multiples of 8 from 16 to {limit}"
            raise Infeasible(reason, f"{tensors} {dim}")


def require_score_gradients(spec: Spec) -> None:
    """Infeasible if a backward cannot compute the gradients of the tensors that a score captures."""
    if spec.problem.score.wanted and not spec.problem.score.adds:
        raise Infeasible(
            "score: the sm90a backward has gradients of captured tensors only of a score plus what does not depend on "
            "it; sm90 takes this call"
        )


def require_sections(heads_together: int, cache_mb: int) -> None:
    """Infeasible for a number of heads or a size of sections out of range."""
    if not 0 <= heads_together <= 64:
        raise Infeasible(f"heads_together {heads_together}: must be 0 to 64")
    least, most = SECTIONS_MB
    if not least <= cache_mb <= most:
        raise Infeasible(f"cache_mb {cache_mb}: must be {least} to {most}")


def in_sections(
    problem: Problem, core: T, plan: Callable[[Spec], Plan], sections: Sequence[tuple[int, int]]
) -> Iterator[T]:
    """`core` with each (heads_together, cache_mb) of `sections`, if it is feasible; that does not depend on them."""
    if is_feasible(problem, core, plan):
        for heads, cache_mb in sections:
            knobs: dict[str, Any] = {"heads_together": heads, "cache_mb": cache_mb}
            yield replace(core, **knobs)


def require_tiles(*sizes: int) -> None:
    """Infeasible if a tile of one of these sizes, in bytes, leaves what follows it misaligned."""
    if any(size % ALIGNMENT for size in sizes):
        raise Infeasible(
            f"tiles of {' and '.join(map(str, sizes))} bytes: must be multiples of {ALIGNMENT} bytes"
        )


def require_shared(size: int) -> None:
    """Infeasible if a block may not have `size` bytes of shared memory."""
    limit = SHARED_LIMIT[Arch.SM90]
    if size > limit:
        raise Infeasible(f"shared memory: {size} bytes, {size - limit} more than sm90a has ({limit})")


def require_registers(live: int, has: int, tiles: str) -> None:
    """Infeasible if `tiles`, which take `live` registers of a consumer thread, do not fit in the `has` it has."""
    over = live + REGISTERS_BESIDES - has
    if over > 0:
        raise Infeasible(
            f"registers: {tiles} take {live} per consumer thread, {over} more than are available"
        )


def slot_words(problem: Problem, rows: int, columns: int) -> int:
    """Words of the bits of a partial visit: of a tile of `rows`, which a block owns, by `columns`. 0: none are stored.

    A thread holds 2 rows by columns / 4. Its words are 1, 2 or 4, which it loads at once.
    """
    if not problem.mask_mod:
        return 0
    words = -(-columns // 64)
    return rows * 2 * (1 << (words - 1).bit_length())


def wgmma_type(dtype: DType) -> str:
    """What PTX calls the elements of q, k and v."""
    return "bf16" if dtype is DType.BFLOAT16 else "f16"
