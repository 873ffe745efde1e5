"""Plans of the Hopper family: TMA boxes, wgmma shapes, shared memory, and why a spec does not fit.

The forward, and what it shares with plan_sm90_backward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.plan_sm80 import SHARED_LIMIT, require_words, schedule_launches
from attnforge.codegen.spec import Arch, DType, Mask, Problem, Spec
from attnforge.codegen.tuning import Sm90Forward, Sm90Fp32Forward

# Registers of a producer and of a consumer thread by number of consumer warpgroups. The kernel starts with
# 65536 / threads (rounded down to 8) each; what the producer gives back, the consumers take.
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
# With a counter or a cluster: a producer that finds out what a piece of work is, or whose its rows are, spills with 24.
REGISTERS_BUSY = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# Addresses, loop counters, row statistics, operands in flight: what a consumer uses beyond its tiles. ptxas decides in
# the end; tests/kernels/test_nvcc.py asks it whether what a search tries first spills.
REGISTERS_BESIDES = 28
# Descriptor code of the swizzle by bytes of a panel row (PTX ISA, wgmma matrix descriptor).
SWIZZLE_CODE = {128: 1, 64: 2, 32: 3}
ALIGNMENT = 1024  # of every tile: the period of the widest swizzle


def make_plan(spec: Spec) -> Plan:
    """Plan of a Hopper spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Forward)
    require_hopper(p, "forward", 256)
    require_words(spec)
    consumers = consumers_of(t)
    if t.cluster not in (1, 2):
        raise Infeasible(f"cluster {t.cluster}: must be 1 or 2")
    if t.cluster > 1 and p.mask is not Mask.FULL:
        raise Infeasible(
            f"cluster: its blocks must visit the same key tiles, which a {p.mask.value} mask denies"
        )
    return _forward(spec, t, consumers)


def consumers_of(t: Sm90Forward | Sm90Fp32Forward) -> int:
    """Consumer warpgroups of a forward kernel, or `Infeasible` if they do not make these tiles."""
    consumers = t.tile_m // 64
    if t.tile_m % 64 or consumers not in REGISTERS:
        raise Infeasible(f"tile_m {t.tile_m}: must be 64, 128 or 192")
    if t.tile_n % 16 or not 16 <= t.tile_n <= 256:
        raise Infeasible(f"tile_n {t.tile_n}: must be a multiple of 16 up to 256")
    if not 1 <= t.stages <= 4:
        raise Infeasible(f"stages {t.stages}: must be 1 to 4")
    if t.ping_pong and consumers < 2:
        raise Infeasible("ping_pong: takes at least two consumer warpgroups, tile_m 128 or more")
    return consumers


def require_hopper(p: Problem, name: str, limit: int) -> None:
    """Infeasible for what only the mma.sync family does; the pass called `name` takes head dims up to `limit`."""
    if p.dtype is DType.FLOAT32:
        raise Infeasible("dtype fp32: the sm90a kernels take bf16 or fp16")
    if p.align != 16:
        raise Infeasible(
            f"align {p.align}: TMA needs rows that start at multiples of 16 bytes; sm90 takes this call"
        )
    if p.head_dim % 8 or not 16 <= p.head_dim <= limit:
        raise Infeasible(
            f"head_dim {p.head_dim}: the sm90a {name} kernel takes multiples of 8 from 16 to {limit}"
        )
    if p.dim_v:
        raise Infeasible(f"head_dim {p.head_dim}, {p.dim_v} of v: the sm90a kernels take equal ones")


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
        raise Infeasible(f"registers: {tiles} take {live} of a consumer thread, {over} more than fit")


def wgmma_type(dtype: DType) -> str:
    """What PTX calls the elements of q, k and v."""
    return "bf16" if dtype is DType.BFLOAT16 else "f16"


@dataclass(frozen=True)
class Panels:
    """How a row of `head_dim` columns lies in shared memory: `count` panels of `columns`, then one of `tail` columns.

    The copy engine takes its time by the row of a box, not by the byte, so panels are as wide as a swizzle can be
    (64 columns). 72 is stored as 64 + 16 columns; what is more than 32 gets a whole panel. Tails are zeros.
    """

    columns: int
    count: int
    tail: int

    @property
    def row(self) -> int:
        """Columns of a stored row."""
        return self.columns * self.count + self.tail


def panels_of(head_dim: int) -> Panels:
    """The panels of a tile with rows of `head_dim` columns."""
    whole, rest = divmod(head_dim, 64)
    if rest == 0 or rest > 32:
        return Panels(64, whole + (rest > 0), 0)
    narrow = 16 if rest <= 16 else 32
    return Panels(64, whole, narrow) if whole else Panels(narrow, 1, 0)


def tensor_maps(tensor: str, head_dim: int, rows: int, together: int) -> tuple[TensorMap, ...]:
    """Descriptors that copy `rows` rows of `tensor`: `together` panels at once, and the tail if there is one."""
    panels = panels_of(head_dim)
    maps = (TensorMap(tensor, panels.columns, rows, together),)
    return (*maps, TensorMap(tensor, panels.tail, rows, 1)) if panels.tail else maps


def _hidden(t: Sm90Forward) -> int:
    """Key tiles that a causal query tile visits, but not its first 64 rows: at most so many."""
    return -(-(t.tile_m - 64) // t.tile_n)


def _order(mask: Mask, t: Sm90Forward) -> dict[str, Any]:
    """Fields of a plan that say which warpgroup computes which tiles when."""
    consumers, causal = t.tile_m // 64, mask is Mask.CAUSAL
    return {
        "parts": consumers if mask.listed else 1,
        "short_last": mask is Mask.FULL and consumers > 1 and t.cluster == 1,
        "from_end": causal,
        # Hidden tiles are handed back while the last P V of the piece before runs, whose buffer is not free until
        # then: there has to be another one for the first tile that is seen.
        "staggered": causal and 0 < _hidden(t) < t.stages,
        "alternating": causal and t.persistent,
    }


def _forward(spec: Spec, t: Sm90Forward, consumers: int) -> Plan:
    d, mask = spec.problem.head_dim, spec.problem.mask
    order = _order(mask, t)
    shared, q_buffers, told = _shared(spec, t, order["parts"])
    busy = told or t.cluster > 1
    producer_registers, consumer_registers = (REGISTERS_BUSY if busy else REGISTERS)[consumers]
    live = t.tile_n // 2 + t.tile_n // 4 + d // 2 + (-(-d // 16) * 4 if t.q_in_regs else 0)
    require_registers(live, consumer_registers, "S, P, O and Q")
    threads = 128 * (consumers + 1)
    grid = ("tiles_m", "batch", "heads_q")
    return Plan(
        spec=spec,
        template="sm90a/forward.cu.jinja",
        suffix=".cu",
        launches=(Launch(spec.symbol, grid, threads, shared, t.persistent, t.cluster),),
        schedule=schedule_launches(spec, "tiles_m"),
        owner="m",
        **order,
        cluster=t.cluster,
        registers=live + REGISTERS_BESIDES,
        deterministic=True,
        bounds=mask is Mask.SPANS,
        bits="k" if mask is Mask.DENSE else "",
        tensor_maps=_forward_maps(t, d),
        constants=_panel_constants(d)
        | {
            "consumers": consumers,
            "type": wgmma_type(spec.problem.dtype),
            "shared_bytes": shared,
            "q_buffers": q_buffers,
            "told": told,
            "hidden": _hidden(t),
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _shared(spec: Spec, t: Sm90Forward, parts: int) -> tuple[int, int, bool]:
    """Bytes of shared memory, buffers of Q, and whether the producer tells consumers what a piece of work is."""
    row, mask = panels_of(spec.problem.head_dim).row * 2, spec.problem.mask
    q_bytes, kv_bytes = t.tile_m * row, t.tile_n * row
    require_tiles(64 * row, kv_bytes)
    bounds = t.stages * t.tile_n * 8 if mask is Mask.SPANS else 0
    shared = 2 * t.stages * kv_bytes + bounds + 8 * 4 * t.stages
    # With two, the next tile is begun before O of this one has left.
    q_buffers = 2 if t.persistent and shared + 2 * (q_bytes + 16) <= SHARED_LIMIT[Arch.SM90] else 1
    shared += q_buffers * (q_bytes + 16)
    if t.counter and (q_buffers < 2 or mask is not Mask.SPANS):
        raise Infeasible(
            "counter: takes spans (the counter is part of their schedule), persistent, room for two Q"
        )
    # A producer works ahead: it tells consumers what a piece of work is, so that they need not find out between two.
    # That takes 16 bytes, and 16 for each part if there are several.
    piece = 16 * (1 + parts if parts > 1 else 1)
    fits = q_buffers > 1 and shared + q_buffers * piece <= SHARED_LIMIT[Arch.SM90]
    told = t.counter or (fits and not mask.listed)
    shared += q_buffers * piece if told else 0
    require_shared(shared)
    return shared, q_buffers, told


def _together(panels: Panels, head_dim: int) -> int:
    """Panels that go in one copy: all, except where the last reaches past head_dim: it takes one that ends in time."""
    return panels.count if panels.columns * panels.count <= head_dim else 1


def _forward_maps(t: Sm90Forward, head_dim: int) -> tuple[TensorMap, ...]:
    together = _together(panels_of(head_dim), head_dim)
    # O leaves from 64 rows of a tile, whose panels are not next to each other.
    # A block of a cluster loads its share of the rows of K and V, whose panels are not next to each other either.
    share = (t.tile_n // t.cluster, together if t.cluster == 1 else 1)
    tiles = (("q", t.tile_m, together), ("k", *share), ("v", *share), ("out", 64, 1))
    return sum((tensor_maps(name, head_dim, *tile) for name, *tile in tiles), ())


def _panel_constants(head_dim: int) -> dict[str, int | str]:
    """What the template is told of a row of a tile."""
    panels = panels_of(head_dim)
    return {
        "columns": panels.columns,
        "panels": panels.count,
        "tail": panels.tail,
        "copies": panels.count // _together(panels, head_dim),
        "swizzle": SWIZZLE_CODE[panels.columns * 2],
        "tail_swizzle": SWIZZLE_CODE[panels.tail * 2] if panels.tail else 0,
    }
