"""Performance goals on one Hopper GPU: the cases of each, their peers, and the rates and ratios to reach."""

from __future__ import annotations

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
GOALS = {"forward": FORWARD, "backward": BACKWARD, "step": STEPS}
