"""Performance goals on one Hopper GPU: the cases of each, their peers, and the rates and ratios to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnforge.codegen.spec import Direction

STEP = "step"  # forward + backward of one layer, the mask built from the pack's lengths within the time
WORKS = {Direction.FORWARD.value: 1.0, Direction.BACKWARD.value: 2.5, STEP: 3.5}  # flops of a forward
SEEDS = 4
FLEX = ("flex", "flex-fa4")


@dataclass(frozen=True)
class Goal:
    """One line of a table: the median over `cases`, (pack, model) of each seed."""

    label: str
    work: str  # of WORKS
    cases: tuple[tuple[str, str], ...]
    peers: tuple[str, ...]
    floor: float | None = None  # TFLOP/s of visible pairs
    ratios: tuple[tuple[str, float], ...] = ()  # at least so many times as fast as that peer
    deterministic: bool = False  # ours is also timed with deterministic gradients


def _packs(work: str, config: str, model: str, heads: str, floor: float, *ratios: float) -> Goal:
    cases = tuple((f"{config}/{seed}", model) for seed in range(SEEDS))
    return Goal(f"{config} {heads}", work, cases, FLEX, floor, tuple(zip(FLEX, ratios, strict=False)))


def _dense(work: str, shape: str, model: str, heads: str, floor: float | None, grouped: bool = True) -> Goal:
    nopack = ("fa4-nopack",) if grouped and work == "fwd" else ()  # backward has no such choice
    peers = ("fa4", *nopack, "sdpa-cudnn")
    return Goal(f"{shape} {heads}", work, ((shape, model),), peers, floor)


def _small(work: str) -> Goal:
    """The size of Triton's tutorials: faster than all SDPA backends, and 1.2 times as fast as a Triton kernel."""
    sdpa = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")
    ratios = (*((name, 1.0) for name in sdpa), ("triton", 1.2)) if work == "fwd" else ()
    return Goal(
        "full/16x1024 8/8/64", work, (("full/16x1024", "8/8/64"),), ("fa4", *sdpa, "triton"), None, ratios
    )


def _images(work: str, floor: float) -> Goal:
    cases = tuple((f"images/{seed}", "vit") for seed in range(SEEDS))
    return Goal("images of 256-4900 tokens 16/16/72", work, cases, ("fa4", "flex"), floor)


# Images, each a separate sequence, should reach 90 % of the rate of as many tokens in dense batches.
FORWARD = (
    _small("fwd"),
    _dense("fwd", "full/4x8192", "7B", "28/4/128", 650),
    _dense("fwd", "causal/4x8192", "7B", "28/4/128", 700),
    _dense("fwd", "full/2x16384", "7B", "28/4/128", None),
    _dense("fwd", "causal/2x16384", "7B", "28/4/128", None),
    _dense("fwd", "full/8x4096", "0.5B", "14/2/64", 540),
    _dense("fwd", "causal/8x4096", "0.5B", "14/2/64", 500),
    _dense("fwd", "full/8x4096", "vit", "16/16/72", 560, grouped=False),
    _images("fwd", 0.9 * 560),
    *(
        _packs("fwd", name, "7B", "28/4/128", 600, 1.7, 1.35)
        for name in ("pretrain", "vlm_only", "edit_only")
    ),
    _packs("fwd", "finetune", "7B", "28/4/128", 540),
    _packs("fwd", "t2i_lowres", "7B", "28/4/128", 430),
    *(_packs("fwd", name, "0.5B", "14/2/64", 0.8 * 600) for name in ("pretrain", "vlm_only", "edit_only")),
    _packs("fwd", "finetune", "0.5B", "14/2/64", 0.8 * 540),
    _packs("fwd", "t2i_lowres", "0.5B", "14/2/64", 0.8 * 430),
)
BACKWARD = (
    _small("bwd"),
    _dense("bwd", "full/4x8192", "7B", "28/4/128", 600),
    _dense("bwd", "causal/4x8192", "7B", "28/4/128", 560),
    _dense("bwd", "full/2x16384", "7B", "28/4/128", 600),
    _dense("bwd", "causal/2x16384", "7B", "28/4/128", 560),
    _dense("bwd", "full/8x4096", "0.5B", "14/2/64", 505),
    _dense("bwd", "causal/8x4096", "0.5B", "14/2/64", 480),
    _dense("bwd", "full/8x4096", "vit", "16/16/72", 450, grouped=False),
    *(
        _packs("bwd", name, "7B", "28/4/128", 520, 1.5, 1.25)
        for name in ("pretrain", "vlm_only", "edit_only")
    ),
    _packs("bwd", "finetune", "7B", "28/4/128", 460),
    _packs("bwd", "t2i_lowres", "7B", "28/4/128", 360),
)
STEPS = (
    Goal(
        "pretrain 28/4/128",
        STEP,
        tuple((f"pretrain/{seed}", "7B") for seed in range(SEEDS)),
        (*FLEX, "flex-bagel"),
        None,
        (("flex", 1.7), ("flex-fa4", 1.35)),
    ),
)

# ---- The grid: every shape beside its fastest peers, without floors

GRID_HEADS = (
    *("28/4/128", "32/8/128", "16/16/128", "14/2/64", "8/8/64"),
    *("16/16/72", "24/24/96", "16/16/192", "128/128/192/128", "8/8/256"),
)
GRID_SHAPES = ("16x1024", "8x2048", "4x8192", "1x32768")
GRID_PACKS = ("pretrain", "vlm_only", "edit_only", "finetune", "t2i_lowres")
GRID_SEQUENCES = ("documents", "images")  # each sees itself alone, causally or not
DENSE_PEERS = ("fa3", "fa4", "sdpa-cudnn")


def grid() -> Iterator[Goal]:
    """A goal for each cell: dense shapes by mask and heads, then packs and sequences with BAGEL's heads."""
    for work in ("bwd", "fwd"):
        for heads in GRID_HEADS:
            for mask in ("full", "causal"):
                for shape in GRID_SHAPES:
                    yield _cell(work, f"{mask}/{shape}", heads, (f"{mask}/{shape}",), DENSE_PEERS)
    for work in ("bwd", "fwd"):
        for heads in ("28/4/128", "14/2/64"):
            for name in (*GRID_PACKS, *GRID_SEQUENCES):
                rivals = ("cudnn-flex",) if name in GRID_PACKS else ("fa3", "fa4", "cudnn-flex")
                yield _cell(work, name, heads, tuple(f"{name}/{seed}" for seed in range(SEEDS)), rivals)


def _cell(work: str, name: str, heads: str, packs: tuple[str, ...], rivals: tuple[str, ...]) -> Goal:
    cases = tuple((pack, heads) for pack in packs)
    return Goal(f"{heads} {name}", work, cases, rivals, deterministic=work == "bwd")


GOALS = {"forward": FORWARD, "backward": BACKWARD, "step": STEPS, "grid": tuple(grid())}
