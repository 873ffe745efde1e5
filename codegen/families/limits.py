"""What GPUs have at most, and the checks that several families share."""

from __future__ import annotations

from attnforge.codegen.plan import Infeasible
from attnforge.codegen.spec import Arch, Problem, Spec

# Shared memory one block may use, bytes (CUDA programming guide, table of compute capabilities).
SHARED_LIMIT = {
    Arch.SM80: 163 * 1024,
    Arch.SM86: 99 * 1024,
    Arch.SM89: 99 * 1024,
    Arch.SM90: 227 * 1024,
    Arch.SM100: 227 * 1024,
    Arch.SM120: 99 * 1024,
}
HEAD_DIM_LIMIT = 256
RESERVED = 1024  # bytes of shared memory that a multiprocessor has beyond SHARED_LIMIT, and keeps for itself per block
REGISTER_LIMIT = 255  # of a thread
REGISTER_FILE = 65536  # of a multiprocessor
COMBINE_THREADS = 256  # of a block that combines results of ranges of keys (native/launch.h: kCombineWarps)


def blocks_of_multiprocessor(arch: Arch, threads: int, shared: int, registers: int) -> int:
    """How many blocks run on a multiprocessor at once, at least 1."""
    per_registers = REGISTER_FILE // (threads * registers)
    return max(1, min((SHARED_LIMIT[arch] + RESERVED) // (shared + RESERVED), per_registers))


def up(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def require_fp32(spec: Spec) -> None:
    """Infeasible for a problem that no float32 kernel of a GPU computes."""
    p = spec.problem
    for name, dim in (("head_dim", p.head_dim), ("head_dim of v", p.head_dim_v)):
        if not 1 <= dim <= HEAD_DIM_LIMIT:
            raise Infeasible(f"the {p.arch.value} fp32 kernels take 1 to {HEAD_DIM_LIMIT}", f"{name} {dim}")
    if p.align not in (4, 8, 16):
        raise Infeasible(f"align {p.align}: must be 4, 8 or 16 bytes")
    require_words(spec)


def curved(problem: Problem) -> bool:
    """Does a backward keep derivatives of the scores?"""
    return bool(problem.score) and not problem.score.slope_is_one


def kept_tiles(problem: Problem) -> int:
    """Tiles as large as S that a backward of mma.sync keeps from the score to dS, or whose room its addresses take."""
    return int(curved(problem)) + bool(problem.score.wanted)


def require_words(spec: Spec) -> None:
    """Infeasible unless the tiles of a dense mask are whole words of its bits."""
    t = spec.tuning
    if spec.problem.packed and (t.tile_m % 32 or t.tile_n % 32):
        raise Infeasible(
            f"dense mask: tile_m {t.tile_m} and tile_n {t.tile_n} must be multiples of 32, the bits of a word"
        )


def require_positive(*values: int) -> None:
    """Infeasible unless all values of a tuning are at least 1."""
    if min(values) < 1:
        raise Infeasible(f"tuning values must be at least 1, got {values}")


def require_split(name: str, size: int, parts: int, unit: int, by: str) -> None:
    """Infeasible unless `size`, called `name`, falls into `parts`, called `by`, of whole `unit`s."""
    if size % (parts * unit):
        raise Infeasible(f"{name} {size}: must be a multiple of {parts * unit} ({by}: {parts} x {unit})")
