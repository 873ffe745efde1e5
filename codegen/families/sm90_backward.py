"""The Hopper backward in 16 bits: a block of two consumer warpgroups owns a key tile and walks the query tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from attnforge.codegen.families.family import Family
from attnforge.codegen.families.hopper import (
    HELD,
    HELPER_THREADS,
    REASONS,
    REGISTERS,
    REGISTERS_BESIDES,
    SECTION_MB,
    SWIZZLE_CODE,
    in_sections,
    require_hopper,
    require_registers,
    require_score_gradients,
    require_sections,
    require_shared,
    require_tiles,
    slot_words,
    wgmma_type,
)
from attnforge.codegen.families.limits import curved
from attnforge.codegen.families.schedule import schedule_launches
from attnforge.codegen.plan import Infeasible, Launch, Plan, TensorMap
from attnforge.codegen.spec import Mask, Problem, Spec, Tuning, knob

CONSUMERS = 2  # warpgroups, 64 keys each
ROW_STATS = 8  # floats of row_stats: lse and delta, as 8 bf16 each


@dataclass(frozen=True)
class Sm90Backward(Tuning):
    """Tuning of the Hopper backward kernel (one block owns a key tile and walks the query tiles)."""

    retired = {"descending": 0}  # noqa: RUF012

    tile_m: int = knob("m", "query rows per step of the main loop; always 64, the rows of a product for dQ")
    tile_n: int = knob("n", "keys per block; always 128, 64 for each of two consumer warpgroups")
    stages: int = knob("s", "shared-memory buffers for Q")
    stages_dout: int = knob("t", "shared-memory buffers for dO")
    lag: bool = knob(
        "l", "consumers wait for each other every second step: dQ is two steps late, dP one step early"
    )
    in_regs: int = knob("r", "operands that consumers keep in registers: 0 none, 1 K, 2 K and V")
    split_heads: bool = knob("h", "a block per q head (dK, dV summed in fp32 memory), not per kv head")
    deterministic: bool = knob(
        "o", "blocks add to dQ, dK and dV in a fixed order: the same bits on every run", was="ordered"
    )
    # Knobs that earlier tables and names do not have.
    heads_together: int = knob(
        "g",
        "least number of heads in a section; 0: as many as fit L2, more if deterministic in packs",
        0,
        quiet=True,
    )
    loaders: int = knob(
        "w", "warps that load, 1 or 2; 0: 2 with lag or deterministic sums, else 1", 0, quiet=True
    )
    cache_mb: int = knob(
        "b", "MiB of the L2 cache for the operands of a section of heads", SECTION_MB, quiet=True
    )
    persistent: int = knob(
        "p",
        "1: one block per multiprocessor takes work tiles from tile_counter; K and V have two buffers",
        0,
        quiet=True,
    )
    launch_order: int = knob(
        "x",
        "0: last tile first; last section 1: by work, 2: from middle; 3: heads apart; 4: long first",
        0,
        quiet=True,
    )
    stores_dkv: int = knob(
        "k",
        "1: blocks that compute all of dK and dV of a key tile store them; for heads without a group",
        0,
        quiet=True,
    )


# ---- Plan


def panel_columns(head_dim: int) -> int:
    """Columns of a panel: the widest swizzle whose panels tile the row (72 is stored as 80, its tail zero)."""
    padded = -(-head_dim // 16) * 16
    return next(columns for columns in (64, 32, 16) if padded % columns == 0)


def plan(spec: Spec) -> Plan:
    """Plan of a Hopper backward spec, or `Infeasible`."""
    p, t = spec.problem, spec.tuning
    assert isinstance(t, Sm90Backward)
    require_hopper(p, "backward", 128)
    require_score_gradients(spec)
    if p.in_planes and not t.split_heads:
        what = "dense mask" if p.mask is Mask.DENSE else "planes of spans"
        raise Infeasible(f"{what}: needs split_heads, because q heads of a group may visit different tiles")
    if t.tile_m != 64:
        raise Infeasible(f"tile_m {t.tile_m}: must be 64, the rows of one wgmma")
    if t.tile_n != 64 * CONSUMERS:
        raise Infeasible(f"tile_n {t.tile_n}: must be {64 * CONSUMERS}, 64 keys for each consumer warpgroup")
    for name in ("stages", "stages_dout"):
        if not 1 <= getattr(t, name) <= 4:
            raise Infeasible(f"{name} {getattr(t, name)}: must be 1 to 4")
    if t.stages < 2:
        raise Infeasible(
            "stages 1: must be at least 2; the next tile of Q is loaded while this one is in use"
        )
    if not 0 <= t.in_regs <= 2:
        raise Infeasible(f"in_regs {t.in_regs}: must be 0, 1 (K) or 2 (K and V)")
    if t.lag and t.stages_dout < 2:
        raise Infeasible("stages_dout 1: must be at least 2 with lag, which uses two tiles of dO at a time")
    _require_knobs(t)
    if t.stores_dkv and not _cuts_lists(spec):
        raise Infeasible("stores_dkv: needs split_heads, a mask with lists of tiles, and sums in any order")
    if t.launch_order:
        _require_launch_order(p, t)
    if t.persistent:
        _require_persistent(p, t)
    return _plan(spec, t)


def _require_knobs(t: Sm90Backward) -> None:
    """Infeasible for values of a knob that mean nothing here, or the same as another value."""
    if t.loaders not in (0, 1, 2):
        raise Infeasible(f"loaders {t.loaders}: must be 1 or 2, or 0, which chooses")
    if t.loaders == _loaders(replace(t, loaders=0)):
        raise Infeasible(f"loaders {t.loaders}: is what 0 chooses here; set it to 0")
    require_sections(t.heads_together, t.cache_mb)
    for name in ("persistent", "stores_dkv"):
        if getattr(t, name) not in (0, 1):
            raise Infeasible(f"{name} {getattr(t, name)}: must be 0 or 1")


def _require_launch_order(p: Problem, t: Sm90Backward) -> None:
    """Infeasible for an order in which blocks would wait for later ones, or that equals another."""
    order = f"launch_order {t.launch_order}"
    if not 0 <= t.launch_order <= 4:
        raise Infeasible(f"{order}: must be 0 to 4")
    if not t.deterministic:
        raise Infeasible(f"{order}: needs deterministic; other blocks do not wait for each other")
    if t.launch_order in (1, 2) and p.mask is not Mask.CAUSAL:
        raise Infeasible(f"{order}: needs a causal mask, where a block computes its place in the order")
    if t.launch_order in (1, 2) and t.split_heads:
        raise Infeasible(f"{order}: needs a block per kv head; set split_heads to 0")
    if t.launch_order == 3 and not t.split_heads:
        raise Infeasible(f"{order}: needs split_heads; blocks per kv head add to no dK and dV of others")
    if t.launch_order == 4 and (not p.mask.listed or p.in_planes):
        raise Infeasible(f"{order}: needs lists of tiles that all heads share, so that they start alike")


def _require_persistent(p: Problem, t: Sm90Backward) -> None:
    """Infeasible for what blocks that walk several work tiles do not compute."""
    if p.mask is Mask.DENSE or p.planes:
        raise Infeasible("persistent: takes no planes of masks")
    if p.mask.listed and _loaders(t) == 1:
        raise Infeasible("persistent: one warp that loads has no registers for lists; set loaders to 2")
    if p.score:
        raise Infeasible("persistent: takes no score")
    if t.split_heads:
        raise Infeasible("persistent: needs a block per kv head; set split_heads to 0")
    if t.lag and t.deterministic and p.head_dim > 64:
        raise Infeasible(
            f"persistent: spills at head_dim {p.head_dim} with lag and deterministic; set lag to 0"
        )


def _loaders(t: Sm90Backward) -> int:
    """Warps that load tiles."""
    return t.loaders or (2 if t.lag or t.deterministic else 1)


def _uneven(t: Sm90Backward, head_dim: int) -> bool:
    """Do the two consumers compute different numbers of columns of dQ?"""
    return not t.lag and 2 * dq_columns(head_dim) != head_dim


def dq_columns(head_dim: int) -> int:
    """Columns of dQ that one consumer computes, a multiple of 8.

    They are shared where a panel starts (an operand must not run across panels from within one); one panel is halved.
    """
    columns = panel_columns(head_dim)
    panels = -(-head_dim // 16) * 16 // columns
    return -(-panels // 2) * columns if panels > 1 else columns // 2


def live_registers(t: Sm90Backward, head_dim: int, slopes: bool = False) -> int:
    """Registers of a consumer thread that tiles take where most are live: in one of three places of a step.

    `slopes`: P is packed as soon as there is one, since P times the derivative of the score takes its place.
    """
    scores, packed = t.tile_m // 2, t.tile_m // 4
    dq = (head_dim if t.lag else dq_columns(head_dim)) // 2
    throughout = head_dim + -(-head_dim // 16) * 4 * t.in_regs  # dK and dV; K and V as fragments
    gradient = 2 * scores + packed  # P and dP, and P packed, as dV is running
    # The next S, and P and dS packed; with lag also the next dP, or dQ, and what ptxas needs beside these so as not to
    # serialise the products (C7512): more than 8 registers, at most 20, as found by trying.
    issue = scores + 2 * packed + (max(scores, dq) + packed if t.lag else 0)
    last = scores + dq + (packed if slopes else 0)  # the next P and dQ
    return throughout + max(gradient, issue, last)


def _plan(spec: Spec, t: Sm90Backward) -> Plan:
    d, mask = spec.problem.head_dim, spec.problem.mask
    words = slot_words(spec.problem, t.tile_n, t.tile_m)
    visit = 16 if words or t.persistent else 8  # bytes
    shared = _shared_bytes(t, d, sum(read.held for read in spec.problem.score.reads), visit)
    require_shared(shared)
    producer_registers, consumer_registers = REGISTERS[CONSUMERS]
    live = live_registers(t, d, curved(spec.problem))
    require_registers(live, consumer_registers, "the tiles")
    descending = t.deterministic and mask is not Mask.FULL and t.launch_order != 4
    return Plan(
        spec=spec,
        template="sm90a/backward.cu.jinja",
        suffix=".cu",
        launches=_launches(spec, t, shared),
        schedule=schedule_launches(spec, "tiles_n", t.deterministic, descending, words > 0),
        owner="n",
        registers=live + REGISTERS_BESIDES,
        bits="q" if spec.problem.packed else "",
        slot_words=words,
        row_stats=ROW_STATS,
        dq_accum=True,
        dkv_accum=t.split_heads,
        dq_semaphore=t.deterministic,
        tile_counter=bool(t.persistent),
        descending=descending,
        cut_lists=_cuts_lists(spec),
        long_first=t.launch_order == 4,
        deterministic=t.deterministic,
        tensor_maps=_tensor_maps(t, d),
        constants=_constants(t, d)
        | {
            "type": wgmma_type(spec.problem.dtype),
            "shared_bytes": shared,
            "half_matrices": _stores(t),  # of dK and dV that TMA stores
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
        },
    )


def _buffers_ds(t: Sm90Backward) -> int:
    """Buffers of dS; why these do: kBuffersDs in the kernel."""
    return 4 if t.lag else 2


def _cuts_lists(spec: Spec) -> bool:
    """Are long lists of visits cut? Where blocks add to dK and dV in any order."""
    return spec.problem.mask.listed and spec.tuning.adds_in_any_order


def _dq_by_step(t: Sm90Backward) -> bool:
    """Do the two warps that add dQ take every other step, and not a consumer each?"""
    return t.deterministic and not t.lag


def _shared_bytes(t: Sm90Backward, head_dim: int, held: int, visit: int) -> int:
    """Shared memory of a block, in the order in which it lies there.

    `held`: sums of a consumer thread; `visit`: bytes about a visit.
    """
    padded = -(-head_dim // 16) * 16
    q_bytes, kv_bytes = t.tile_m * padded * 2, t.tile_n * padded * 2
    require_tiles(q_bytes, kv_bytes)
    ds_bytes = t.tile_m * t.tile_n * 2
    dq_bytes = t.tile_m * head_dim * 4 * (CONSUMERS if t.lag else 1)
    stat_bytes = t.tile_m * ROW_STATS * 4 + visit  # of each row
    barriers = 3 + 2 * (t.stages + t.stages_dout) + (3 if _dq_by_step(t) else 2) * CONSUMERS
    kv_buffers = 2 if t.persistent else 1
    if t.persistent:  # more of K and V, dK and dV, two indices of work tiles and their barriers
        barriers += 4 + 2 * CONSUMERS + 4 + 1
    tiles = 2 * kv_buffers * kv_bytes + t.stages * q_bytes + t.stages_dout * q_bytes
    held_bytes = CONSUMERS * 128 * HELD * held
    return tiles + _buffers_ds(t) * ds_bytes + dq_bytes + held_bytes + t.stages * stat_bytes + 8 * barriers


def _stores(t: Sm90Backward) -> bool:
    """Do blocks store dK and dV? Else they only add to sums."""
    return not t.split_heads or bool(t.stores_dkv)


def _tensor_maps(t: Sm90Backward, head_dim: int) -> tuple[TensorMap, ...]:
    columns = panel_columns(head_dim)
    whole = 1 if head_dim % 16 else head_dim // columns  # a row that is padded must be copied panel by panel
    rows = {"q": t.tile_m, "dout": t.tile_m, "k": t.tile_n, "v": t.tile_n}
    if _stores(t):
        rows |= {"dk": 64, "dv": 64}
    return tuple(TensorMap(name, columns, count, whole) for name, count in rows.items())


def _constants(t: Sm90Backward, head_dim: int) -> dict[str, int | str]:
    """Constants about the tiles and who computes what."""
    columns = panel_columns(head_dim)
    panels = -(-head_dim // 16) * 16 // columns
    dq_part = head_dim if t.lag else dq_columns(head_dim)
    return {
        "columns": columns,
        "panels": panels,
        "tail": 0,
        "copies": panels if head_dim % 16 else 1,
        "swizzle": SWIZZLE_CODE[columns * 2],
        "dq_columns": dq_part,
        "buffers_ds": _buffers_ds(t),
        "uneven": _uneven(t, head_dim),
        "dq_by_step": _dq_by_step(t),
        "loaders": _loaders(t),  # warps
        "first_dq_columns": "kDqColumns",  # whose sums lie in front
        "parted_dq": not t.lag,  # sums of dQ of one consumer lie before those of the other
        "bulk_dq": True,  # dQ is added by bulk copies from shared memory
        "adds_quads": t.split_heads,  # threads add fragments to sums
        "keys_in_regs": t.in_regs > 0,
        "scores_by_query": False,  # rows of S are keys
        "gradients_from_ds": False,  # of a score's tensors, but from P and dP
        "arrives_named": False,
        "roles_meet": False,
        "columns_of_out": "kHeadDim",
        "columns_of_sums": "kHeadDim",  # of a row of dq_accum
        "row_lanes": 1 << (head_dim // 8 - 1).bit_length(),  # threads per row in _preprocess, one chunk each
        "helper_threads": HELPER_THREADS,
    }


def _launches(spec: Spec, t: Sm90Backward, shared: int) -> tuple[Launch, ...]:
    queries, heads = ("tiles_m", "batch", "heads_q"), "heads_q" if t.split_heads else "heads_kv"
    blocks = "blocks_n" if _cuts_lists(spec) else "tiles_n"
    launches = [
        Launch(f"{spec.symbol}_preprocess", queries, HELPER_THREADS),
        Launch(
            spec.symbol, (blocks, "batch", heads), 128 * (CONSUMERS + 1), shared, bool(t.persistent), True
        ),
        Launch(f"{spec.symbol}_postprocess", queries, HELPER_THREADS, overlaps=True),
    ]
    if t.split_heads:
        keys = ("tiles_n", "batch", "heads_kv")
        launches.append(Launch(f"{spec.symbol}_postprocess_dkv", keys, HELPER_THREADS, overlaps=True))
    return tuple(launches)


# ---- Space


def tunings(problem: Problem) -> Iterator[Sm90Backward]:
    """What a search tries, best guess first; deterministic ones last: such calls take the first."""
    # Narrow heads have registers for lag and for K and V; what does not fit is left out by the plan.
    narrow = problem.head_dim <= 80
    stages = ((4, 4), (4, 3), (3, 3), (2, 2)) if narrow else ((3, 2), (2, 2), (3, 3), (2, 1))
    for deterministic, lag, in_regs, (of_q, of_dout), split in product(
        (False, True),
        (True, False) if narrow else (False,),
        (2, 1, 0) if narrow else (0, 1),
        stages,
        (True, False) if problem.head_dim > 96 else (False, True),
    ):
        yield Sm90Backward(64, 128, of_q, of_dout, lag, in_regs, split, deterministic)
    yield from _walks(problem)
    yield from _wider(problem)
    yield from _deterministic(problem)


def _walks(problem: Problem) -> Iterator[Sm90Backward]:
    """Persistent blocks, for narrow heads: beside two buffers of K and V, long rows leave no room for others."""
    if problem.in_planes or problem.score or problem.head_dim > 96:
        return
    narrow = problem.head_dim <= 80
    for deterministic, lag, in_regs, (of_q, of_dout), loaders in product(
        (False, True),
        (True, False) if narrow else (False,),
        (2, 1) if narrow else (1, 0),
        ((4, 3), (3, 2), (2, 2)),
        (0, 1, 2),
    ):
        core = Sm90Backward(64, 128, of_q, of_dout, lag, in_regs, False, deterministic)
        chosen = replace(core, loaders=loaders, persistent=1)
        yield from in_sections(problem, chosen, plan, _sections(problem))


# heads_together and cache_mb; more heads where all lists of visits are alike
SECTIONS = ((0, SECTION_MB), (2, SECTION_MB), (4, SECTION_MB), (8, SECTION_MB), (0, 8), (0, 40))
MORE_HEADS = ((16, SECTION_MB), (32, SECTION_MB))
WHOLE_GROUPS = ((7, SECTION_MB), (14, SECTION_MB))  # the q heads of one or two kv heads of 28/4 and 14/2


def _sections(problem: Problem) -> tuple[tuple[int, int], ...]:
    return SECTIONS if problem.mask.listed else (*SECTIONS, *MORE_HEADS)


def _wider(problem: Problem) -> Iterator[Sm90Backward]:
    """Those that add in any order: all buffers and all values of the later knobs with each other."""
    narrow = problem.head_dim <= 80
    for lag, in_regs, of_q, of_dout, split, loaders in product(
        (True, False) if narrow else (False,),
        (2, 1) if narrow else (0, 1),
        (4, 3) if narrow else (4, 3, 2),
        (4, 3, 2) if narrow else (4, 3, 2, 1),
        (True, False),
        (0, 1, 2),
    ):
        core = Sm90Backward(64, 128, of_q, of_dout, lag, in_regs, split, False, 0, loaders)
        yield from in_sections(problem, core, plan, _sections(problem))


def _deterministic(problem: Problem) -> Iterator[Sm90Backward]:
    """Deterministic ones: all buffers, operands in registers, lag and values of the later knobs with each other.

    They may be the fastest of all: blocks that add first store their sums, and their launch orders balance the work.
    """
    for lag, in_regs, (of_q, of_dout), split, loaders in product(
        (True, False),
        (2, 1, 0),
        product((4, 3, 2), (4, 3, 2, 1)),
        (True, False),
        (0, 1, 2),
    ):
        core = Sm90Backward(64, 128, of_q, of_dout, lag, in_regs, split, True, 0, loaders)
        for launch_order in (0, *_launch_orders(problem, split)):
            chosen = replace(core, launch_order=launch_order)
            groups = WHOLE_GROUPS if launch_order == 3 else ()  # heads start one tile apart
            yield from in_sections(problem, chosen, plan, (*SECTIONS, *MORE_HEADS, *groups))
    for walk in _walks(problem):
        for launch_order in _launch_orders(problem, False) if walk.deterministic else ():
            yield replace(walk, launch_order=launch_order)


def _launch_orders(problem: Problem, split_heads: bool) -> tuple[int, ...]:
    """Values of launch_order to try besides 0; without a mask all blocks have the same work, and 0 loses little."""
    whole = (1, 2) if problem.mask is Mask.CAUSAL and not split_heads else ()
    apart = (3,) if problem.mask is not Mask.FULL and split_heads else ()
    long_first = (4,) if problem.mask.listed and not problem.in_planes else ()
    return (*whole, *apart, *long_first)


BACKWARD = Family(
    Sm90Backward,
    plan,
    tunings,
    honours=frozenset({"intervals", "planes", "mask_mod", "score"}),
    reasons=REASONS,
)
