"""The later knobs of the Hopper kernels: what they refuse, that they compile cleanly, and results on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spaces import part, quickly
from strict_nvcc import SERIALISED, check_resources, compile_strictly

from attnforge.bagel.measure.cases import make_case
from attnforge.codegen.families import RetiredKnob, make_plan, make_tuning, spec_from_json
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import kernels
from attnforge.runtime.search.worker import Bench

FORWARD = {
    "tile_m": 192,
    "tile_n": 80,
    "stages": 3,
    "ping_pong": 1,
    "persistent": 1,
    "dynamic": 0,
    "q_in_regs": 0,
}
BACKWARD = {
    "tile_m": 64,
    "tile_n": 128,
    "stages": 3,
    "stages_dout": 2,
    "lag": 0,
    "in_regs": 0,
    "split_heads": 1,
    "deterministic": 0,
}
VARIANTS = [
    ("fwd", Mask.SPANS, {"dynamic": 1, "hand_over": 2, "exact_visits": 0}),
    ("fwd", Mask.SPANS, {"dynamic": 1, "hand_over": 1}),
    ("fwd", Mask.DENSE, {"dynamic": 1, "tile_n": 64}),
    (
        "fwd",
        Mask.DENSE,
        {"dynamic": 1, "tile_m": 128, "tile_n": 128, "stages": 2, "ping_pong": 0, "q_in_regs": 1},
    ),
    ("fwd", Mask.SPANS, {"heads_together": 2}),
    ("fwd", Mask.FULL, {"tile_m": 128, "tile_n": 176, "stages": 2, "ping_pong": 0, "exact_visits": 1}),
    ("fwd", Mask.FULL, {"hand_over": 2, "heads_together": 2}),
    ("fwd", Mask.CAUSAL, {"hand_over": 1}),
    ("fwd", Mask.FULL, {"multicast": 1}),
    ("fwd", Mask.FULL, {"multicast": 1, "tile_m": 128, "tile_n": 128, "stages": 2, "q_in_regs": 1}),
    ("fwd", Mask.CAUSAL, {"multicast": 1}),
    ("fwd", Mask.CAUSAL, {"multicast": 1, "ping_pong": 0, "stages": 2}),
    ("bwd", Mask.SPANS, {"heads_together": 4, "loaders": 2}),
    ("bwd", Mask.CAUSAL, {"loaders": 2, "heads_together": 2}),
    ("fwd", Mask.CAUSAL, {"cache_mb": 4}),
    ("bwd", Mask.SPANS, {"cache_mb": 40}),
    ("bwd", Mask.FULL, {"cache_mb": 4}),
    ("bwd", Mask.CAUSAL, {"deterministic": 1, "split_heads": 0, "launch_order": 1}),
    ("bwd", Mask.CAUSAL, {"deterministic": 1, "split_heads": 0, "launch_order": 2, "heads_together": 2}),
    ("bwd", Mask.CAUSAL, {"deterministic": 1, "launch_order": 3, "heads_together": 8}),
    ("bwd", Mask.SPANS, {"deterministic": 1, "launch_order": 3, "heads_together": 16}),
    ("bwd", Mask.SPANS, {"deterministic": 1, "split_heads": 0, "launch_order": 4, "heads_together": 4}),
    ("bwd", Mask.SPANS, {"stores_dkv": 1}),
]
# (head_dim, mask, knobs) of persistent blocks
WALKS = [
    (96, Mask.CAUSAL, {"in_regs": 1}),
    (96, Mask.FULL, {"in_regs": 1, "deterministic": 1}),
    (72, Mask.FULL, {"stages": 4, "stages_dout": 3, "in_regs": 1}),
    (72, Mask.CAUSAL, {"stages": 2, "in_regs": 1, "lag": 1}),
    (64, Mask.CAUSAL, {"stages": 4, "stages_dout": 3, "in_regs": 2, "lag": 1}),
    (64, Mask.FULL, {"stages": 4, "stages_dout": 3, "in_regs": 2, "lag": 1, "deterministic": 1}),
    (96, Mask.SPANS, {"in_regs": 1, "loaders": 2}),
    (64, Mask.SPANS, {"stages": 4, "stages_dout": 3, "in_regs": 2, "lag": 1}),
    (64, Mask.SPANS, {"stages": 4, "stages_dout": 3, "in_regs": 2, "lag": 1, "deterministic": 1}),
]
# (head_dim, mask, knobs) of backwards that store dK and dV of some key tiles and add those of others
STORES = [
    (128, Mask.SPANS, {}),
    (96, Mask.DENSE, {"in_regs": 1, "stages": 4}),
    (72, Mask.DENSE, {"in_regs": 1, "stages": 4, "lag": 1}),
    (64, Mask.SPANS, {"in_regs": 2, "stages": 4, "lag": 1}),
]
SCORES = (
    "",
    "softcap: 50.0 * tanh(score / 50.0)",
    "alibi(t0: float32[1] grad): score - t0[h] * abs(q_idx - kv_idx)",
)
# (head_dim, dim_v, mask, knobs) of forwards of wide heads
LONG = [
    (256, 0, Mask.CAUSAL, {"tile_m": 128, "tile_n": 80, "stages": 2, "k_ahead": 1}),
    (256, 0, Mask.FULL, {"tile_m": 128, "tile_n": 80, "stages": 2, "k_ahead": 1, "ping_pong": 0}),
    (256, 0, Mask.FULL, {"tile_m": 128, "tile_n": 64, "stages": 2, "stages_v": 3}),
    (192, 0, Mask.CAUSAL, {"tile_m": 128, "tile_n": 80, "stages": 2, "stages_v": 3}),
    (192, 0, Mask.FULL, {"tile_m": 192, "tile_n": 48, "stages": 2}),
    (256, 0, Mask.FULL, {"multicast": 1, "tile_m": 128, "tile_n": 64, "stages": 2, "ping_pong": 0}),
    (
        256,
        0,
        Mask.FULL,
        {"multicast": 1, "tile_m": 128, "tile_n": 64, "stages": 2, "ping_pong": 0, "k_ahead": 1},
    ),
    (256, 0, Mask.FULL, {"multicast": 1, "tile_m": 128, "tile_n": 80, "stages": 2}),
    (192, 0, Mask.FULL, {"multicast": 1, "tile_m": 128, "tile_n": 96, "stages": 2, "hand_over": 2}),
    (192, 0, Mask.CAUSAL, {"multicast": 1, "tile_m": 128, "tile_n": 80, "stages": 2, "stages_v": 3}),
    (192, 128, Mask.FULL, {"multicast": 1, "tile_n": 64}),
    (192, 128, Mask.CAUSAL, {"multicast": 1, "tile_n": 64}),
    (72, 0, Mask.FULL, {"multicast": 1, "tile_n": 96}),
    (64, 0, Mask.CAUSAL, {"multicast": 1, "tile_n": 128}),
    (192, 128, Mask.FULL, {"tile_m": 128, "tile_n": 112, "stages": 2, "stages_v": 3}),
    (192, 128, Mask.CAUSAL, {"tile_n": 80, "stages": 2, "stages_v": 3}),
    (192, 128, Mask.SPANS, {"tile_m": 128, "tile_n": 96, "stages": 2, "stages_v": 3, "k_ahead": 1}),
]
PACKS = {
    Mask.SPANS: "finetune/0",
    Mask.DENSE: "blocks/0.5/3000",
    Mask.FULL: "full/2x1000",
    Mask.CAUSAL: "causal/2x1000/1100",
}
variants = pytest.mark.parametrize(("direction", "mask", "values"), VARIANTS, ids=str)


def spec_of(direction: str, mask: Mask, values: dict[str, int]) -> Spec:
    problem = Problem(Direction(direction), Arch.SM90A, DType.BFLOAT16, 128, mask)
    tiles = FORWARD if direction == "fwd" else BACKWARD
    return Spec(problem, make_tuning(problem, tiles | values))


def knobs_apart(case: tuple[Any, ...]) -> Iterator[Hashable]:
    """What has to be compiled in each run: each mask, head_dim and knob, not all together."""
    *others, knobs = case
    yield from enumerate(others)
    yield from ((name, name == "tile_m" and value) for name, value in knobs.items() if value)
    yield knobs.get("deterministic", 0), knobs.get("launch_order", 0), knobs.get("hand_over", 0)


@pytest.mark.nvcc
@quickly
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_they_compile_cleanly(direction: str, quick: bool, nvcc: None, tmp_path: Path) -> None:
    variants_of = [variant for variant in VARIANTS if variant[0] == direction]
    specs = [spec_of(*variant) for variant in part(variants_of, quick, knobs_apart)]
    log, resources = compile_strictly([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


def walk_of(head_dim: int, mask: Mask, values: dict[str, int]) -> Spec:
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask)
    return Spec(problem, make_tuning(problem, BACKWARD | {"split_heads": 0, "persistent": 1} | values))


@pytest.mark.nvcc
@quickly
def test_persistent_backwards_compile_cleanly(quick: bool, nvcc: None, tmp_path: Path) -> None:
    log, resources = compile_strictly(
        [render(walk_of(*walk)) for walk in part(WALKS, quick, knobs_apart)], tmp_path
    )
    assert not SERIALISED.search(log), log
    assert not any(used["spill_bytes"] for used in resources.values()), resources


def stores_of(head_dim: int, mask: Mask, values: dict[str, int], score: str = "") -> Spec:
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, score=ScoreMod(score))
    return Spec(problem, make_tuning(problem, BACKWARD | {"stores_dkv": 1} | values))


@pytest.mark.nvcc
@quickly
def test_backwards_that_store_dkv_compile_cleanly(quick: bool, nvcc: None, tmp_path: Path) -> None:
    specs = [
        stores_of(*each, score)
        for each in part(STORES, quick, knobs_apart)
        for score in (SCORES if each[1] is Mask.SPANS else SCORES[:1])
    ]
    log = check_resources([render(spec) for spec in specs], tmp_path)
    assert not SERIALISED.search(log), log


def long_of(head_dim: int, dim_v: int, mask: Mask, values: dict[str, int]) -> Spec:
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, dim_v=dim_v)
    return Spec(problem, make_tuning(problem, FORWARD | values))


@pytest.mark.nvcc
@quickly
def test_forwards_of_wide_heads_compile_cleanly(quick: bool, nvcc: None, tmp_path: Path) -> None:
    log = check_resources([render(long_of(*each)) for each in part(LONG, quick, knobs_apart)], tmp_path)
    assert not SERIALISED.search(log), log


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "dim_v", "mask", "values"), LONG, ids=str)
@pytest.mark.parametrize("size", ["2x1000", "40x300", "1x65", "finetune/0"])
def test_results_of_wide_heads(
    head_dim: int, dim_v: int, mask: Mask, values: dict[str, int], size: str
) -> None:
    device, spec = torch.device("cuda"), long_of(head_dim, dim_v, mask, values)
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    if ("/" in size) != mask.listed:
        pytest.skip("a pack is for spans")
    heads = f"4/2/{head_dim}/{dim_v}" if dim_v else f"4/2/{head_dim}"
    case = make_case(size if mask.listed else f"{mask.value}/{size}", heads, DType.BFLOAT16, device)
    bench = Bench(case, Direction.FORWARD)
    assert len(list(bench.verify(kernels.load(spec, device)))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "mask", "values"), WALKS, ids=str)
@pytest.mark.parametrize("heads", ["4/4", "6/2"])
@pytest.mark.parametrize("pack", ["2x1000", "3x77", "40x300", "1x65", "finetune/0", "documents/3"])
def test_results_of_persistent_backwards(
    head_dim: int, mask: Mask, values: dict[str, int], heads: str, pack: str
) -> None:
    """Work tiles that fill the multiprocessors many times, or not once; lengths that fill no tile."""
    device, spec = torch.device("cuda"), walk_of(head_dim, mask, values)
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    if ("/" in pack) != mask.listed:
        pytest.skip("a pack is for spans")
    name = pack if mask.listed else f"{mask.value}/{pack}"
    case = make_case(name, f"{heads}/{head_dim}", DType.BFLOAT16, device)
    bench = Bench(case, Direction.BACKWARD)
    assert len(list(bench.verify(kernels.load(spec, device)))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "mask", "values"), STORES, ids=str)
@pytest.mark.parametrize("heads", ["4/4", "6/2"])
def test_results_of_backwards_that_store_dkv(
    head_dim: int, mask: Mask, values: dict[str, int], heads: str
) -> None:
    """Heads without a group, for which it is, and with one, whose dK and dV are all sums."""
    device, spec = torch.device("cuda"), stores_of(head_dim, mask, values)
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    pack = "finetune/0" if mask is Mask.SPANS else "blocks/0.5/1000"
    case = make_case(pack, f"{heads}/{head_dim}", DType.BFLOAT16, device)
    assert len(list(Bench(case, Direction.BACKWARD).verify(kernels.load(spec, device)))) == 2


@pytest.mark.gpu
@variants
def test_results(direction: str, mask: Mask, values: dict[str, int]) -> None:
    """Against float64, as a search checks them: raises WrongResult."""
    device, spec = torch.device("cuda"), spec_of(direction, mask, values)
    if kernels.target(device) is not Arch.SM90A:
        pytest.skip("runs on Hopper only")
    bench = Bench(make_case(PACKS[mask], "7B", DType.BFLOAT16, device), Direction(direction))
    assert len(list(bench.verify(kernels.load(spec, device)))) == 2


@pytest.mark.parametrize(
    ("direction", "mask", "values", "reason"),
    [
        ("fwd", Mask.SPANS, {"ping_pong": 0, "hand_over": 1}, "0 without ping_pong"),
        ("bwd", Mask.SPANS, {"loaders": 1}, "is what 0 chooses here"),
        ("fwd", Mask.SPANS, {"cache_mb": 2}, "must be 4 to 64"),
        ("fwd", Mask.SPANS, {"multicast": 1}, "a mask without lists of tiles"),
        ("fwd", Mask.FULL, {"multicast": 1, "tile_m": 64, "ping_pong": 0}, "needs tile_m of 128 or 192"),
        ("fwd", Mask.FULL, {"multicast": 1, "persistent": 0}, "needs persistent"),
        ("fwd", Mask.FULL, {"multicast": 1, "splits": 1, "persistent": 0}, "needs persistent"),
        ("bwd", Mask.SPANS, {"cache_mb": 65}, "must be 4 to 64"),
        ("bwd", Mask.DENSE, {"persistent": 1}, "takes no planes of masks"),
        ("bwd", Mask.SPANS, {"persistent": 1}, "set loaders to 2"),
        ("bwd", Mask.FULL, {"persistent": 1}, "needs a block per kv head; set split_heads to 0"),
        ("bwd", Mask.FULL, {"persistent": 2}, "must be 0 or 1"),
        ("bwd", Mask.FULL, {"persistent": 1, "split_heads": 0}, "shared memory"),
        ("bwd", Mask.CAUSAL, {"deterministic": 1, "launch_order": 5}, "must be 0 to 4"),
        ("bwd", Mask.CAUSAL, {"launch_order": 3}, "needs deterministic"),
        ("bwd", Mask.SPANS, {"deterministic": 1, "launch_order": 1}, "needs a causal mask"),
        ("bwd", Mask.CAUSAL, {"deterministic": 1, "launch_order": 2}, "set split_heads to 0"),
        ("bwd", Mask.FULL, {"deterministic": 1, "split_heads": 0, "launch_order": 3}, "needs split_heads"),
        ("bwd", Mask.CAUSAL, {"deterministic": 1, "launch_order": 4}, "lists of tiles that all heads share"),
        ("bwd", Mask.DENSE, {"deterministic": 1, "launch_order": 4}, "lists of tiles that all heads share"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(
    direction: str, mask: Mask, values: dict[str, int], reason: str
) -> None:
    with pytest.raises(Infeasible, match=reason):
        make_plan(spec_of(direction, mask, values))


@variants
def test_names_say_what_differs_from_the_usual(direction: str, mask: Mask, values: dict[str, int]) -> None:
    """And of a knob at its usual value say nothing."""
    usual, spec = spec_of(direction, mask, {}), spec_of(direction, mask, values)
    assert usual.to_json()["tuning"].keys() == (FORWARD if direction == "fwd" else BACKWARD).keys()
    assert values.items() <= spec.to_json()["tuning"].items()
    header = render(spec).text.split("\n\n")[0]
    assert all(f"//   {name} " in header for name in values)


@pytest.mark.parametrize(
    ("direction", "knob", "left"), [("fwd", "cluster", 1), ("bwd", "descending", 0)], ids=["fwd", "bwd"]
)
def test_knobs_that_are_gone_are_read_with_the_value_that_is_left(
    direction: str, knob: str, left: int
) -> None:
    data = spec_of(direction, Mask.SPANS, {}).to_json()
    older = {**data, "tuning": {**data["tuning"], knob: left}}
    assert spec_from_json(older) == spec_from_json(data)
    older["tuning"][knob] = left + 1
    with pytest.raises(RetiredKnob, match=f"{knob} unknown"):
        spec_from_json(older)
    with pytest.raises(ValueError, match=f"{knob}, wraps unknown") as error:
        spec_from_json({**older, "tuning": {**older["tuning"], "wraps": 4}})
    assert not isinstance(error.value, RetiredKnob), "a name that never was one is a mistake"
