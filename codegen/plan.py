"""`Plan`: what a family computes from a spec. Launch geometry, shared memory, registers; or why it is infeasible."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnforge.codegen.spec import Problem, Spec


class Infeasible(ValueError):
    """The spec cannot run on its target; the message says what does not fit and by how much.

    `subject`: the head_dim that the reason is about, `head_dim 300`, which the message begins with; else empty.
    """

    def __init__(self, reason: str, subject: str = "") -> None:
        super().__init__(f"{subject}: {reason}" if subject else reason)
        self.subject = subject
        self.reason = reason


@dataclass(frozen=True)
class Launch:
    """One kernel launch. The grid is one-dimensional: the product of the sizes named in `grid`.

    Names: `batch`, `heads_q`, `heads_kv`, `seq_q`, `tiles_m`, `tiles_n`, `blocks_m`, `blocks_n`, `tiles_packed`,
    `kv_splits`, `cluster_size`, `combine_blocks`, `mask_planes`. Of size 0 there is nothing to launch.
    The block index decodes in the order the kernel documents. On the CPU `threads` and `shared_bytes` are 0 and the
    function is called once.
    """

    symbol: str
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int = 0
    persistent: bool = False  # at most one block per multiprocessor
    # May start before the launch before it has ended (programmatic stream serialisation), where the driver can do so:
    # its blocks wait themselves, with griddepcontrol.wait. Never the first launch of a plan.
    overlaps: bool = False
    clustered: bool = False  # `cluster_size` consecutive blocks are a cluster
    per_tile: int = 1  # blocks that share a tile: the grid is so many times the product
    paired: bool = False  # two consecutive blocks are a cluster, as the kernel says: their number is even


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor: one copy moves `rows` x `panels` x `columns` elements of one head of `tensor`.

    The tensor is seen as (columns of a panel, rows, panels, heads, batch); a panel is `columns` wide, its rows are
    stored swizzled over `columns` * 2 bytes. With `panels` 1, column coordinates address the whole row instead.
    """

    tensor: str
    columns: int
    rows: int
    panels: int


def has_score_bins(problem: Problem, deterministic: bool) -> bool:
    """Does a kernel sum gradients of a score's tensors in integers (templates/common/score_bins.h.jinja)?"""
    return deterministic and bool(problem.score.wanted)


@dataclass(frozen=True)
class Plan:
    """Everything the launcher and the template need to know about one spec.

    `constants` are the numbers the template prints by name in its constexpr block, family by family.
    """

    spec: Spec
    template: str  # path under templates/
    suffix: str  # of the source file: ".cu" or ".cpp"
    launches: tuple[Launch, ...]  # run in this order on one stream
    schedule: tuple[Launch, ...]  # fill tile_count, tile_order, tile_list (and bits) of spans and dense masks
    owner: str  # which tiles own lists: "m" (forward) or "n" (backward)
    registers: int  # 32-bit registers a thread needs at least, by count of live tiles; 0 on the CPU
    row_stats: int = 2  # floats of lse and delta that a backward keeps for each query row and head
    dq_accum: bool = False  # needs the fp32 dq workspace
    # Needs the fp32 dk and dv workspace; a forward keeps the bf16 splits of k and v in it.
    dkv_accum: bool = False
    dq_semaphore: bool = False  # needs this workspace, and dq_order in its schedule
    # A backward's persistent blocks take work tiles from a counter, which _preprocess clears.
    tile_counter: bool = False
    split_blocks: int = 0  # of a multiprocessor, that ranges of keys should fill; 0: keys are not split
    descending: bool = False  # blocks start with the last owned tile, not with those with most work
    row_groups: int = 1  # 64-row groups of a query tile, each with a flag in the lists and a kv_range
    short_last: bool = False  # last query tiles start last of all; warpgroups without rows skip them
    from_end: bool = False  # the last query tile ends with the last query; the first may begin before query 0
    staggered: bool = False  # warpgroups begin with the first key tile, from the end, that their own rows see
    alternating: bool = False  # every other section of the work starts with its smallest tiles (schedule.cuh)
    bounds: bool = False  # its schedule has bounds
    schedule_counter: bool = False  # its schedule has tile_counter, which _schedule clears
    cut_lists: bool = False  # long lists of visits are cut into pieces, each for a block (schedule.cuh)
    # Its schedule starts owned tiles with much work first, the last of them first of all (schedule.cuh).
    long_first: bool = False
    # Its schedule has the dense mask in words of 32 bits: "k" for the keys of a query, "q" for the queries of a key.
    bits: str = ""
    slot_words: int = 0  # of the bits of a partial visit (visit_bits.cuh), where its schedule has them
    columns: int = 0  # of a row of dq_accum and of dk in dkv_accum; 0: head_dim
    columns_v: int = 0  # of a row of dv in dkv_accum; 0: head_dim_v
    capped: bool = False  # P comes from Q K^T and a polynomial (forward_softmax_capped.cuh)
    deterministic: bool = False  # the same bits on every run
    tensor_maps: tuple[TensorMap, ...] = ()  # passed to the launches as their second argument, in this order
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Does a block serve all q heads of a kv head, so that their planes of a mask share an order of tiles?"""
        per_kv_head = self.owner == "n" and not getattr(self.spec.tuning, "split_heads", False)
        return self.spec.problem.in_planes and per_kv_head

    @property
    def score_bins(self) -> bool:
        """Are gradients of a score's tensors summed in integers?"""
        return has_score_bins(self.spec.problem, self.deterministic)

    def score_sums(self, tensor: int) -> str:
        """C++ arguments: where the gradient of a tensor of the score is summed, in floats, integers or both."""
        floats = not self.deterministic or self.spec.problem.score.own_elements
        exact = self.deterministic
        return ", ".join([f"p.dscore{tensor}"] * floats + [f"p.score_bins{tensor}"] * exact)

    @property
    def schedule_kind(self) -> str:
        """What the kernels of the schedule are rendered from: plans with the same text share a mask's schedules."""
        if not self.schedule:
            return ""
        problem, tuning = self.spec.problem, self.spec.tuning
        flags = {
            name: getattr(self, name)
            for name in (
                "dq_semaphore",
                "descending",
                "bounds",
                "schedule_counter",
                "bits",
                "grouped",
                "cut_lists",
            )
        }
        flags |= {"slot_words": self.slot_words} if self.slot_words else {}
        flags |= {"long_first": True} if self.long_first else {}
        target = "gpu" if problem.arch.is_gpu else "cpu"
        form = f" x{problem.intervals} p{problem.planes}" if problem.unions else ""
        form += f" of {problem.mask_mod}" if problem.mask_mod else ""
        tile = f"{tuning.tile_m}x{tuning.tile_n}, {self.row_groups} row groups"
        return f"{target} {problem.mask.value}{form}, {tile}, owner {self.owner}, {flags}"
