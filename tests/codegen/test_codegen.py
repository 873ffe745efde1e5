"""Specs and the search space: names, texts and knobs derive from each other, and every problem has a kernel."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from itertools import islice, product
from typing import Any

import pytest

from attnforge.bagel.commands.render import render as render_command
from attnforge.codegen.families import FAMILIES, make_plan, make_tuning, spec_from_json
from attnforge.codegen.families.sm80 import Sm80Forward
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, why_infeasible
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, Direction, DType, Mask, Problem, Spec

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
MASKS = (Mask.FULL, Mask.CAUSAL, Mask.SPANS)
LEARNED = ScoreMod("bias(t0: float32[1] grad): score + t0[h]")
PROBLEMS = [
    Problem(FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.SPANS, 4),
    Problem(FORWARD, Arch.CPU, DType.BFLOAT16, 72, Mask.CAUSAL, 2),
    Problem(BACKWARD, Arch.CPU, DType.BFLOAT16, 128, Mask.SPANS, 4),
    Problem(FORWARD, Arch.SM80, DType.BFLOAT16, 64, Mask.FULL),
    Problem(FORWARD, Arch.SM89, DType.FLOAT16, 256, Mask.SPANS),
    Problem(FORWARD, Arch.SM90, DType.BFLOAT16, 8, Mask.CAUSAL, 2),
    Problem(BACKWARD, Arch.SM90, DType.BFLOAT16, 128, Mask.SPANS),
    Problem(BACKWARD, Arch.SM120, DType.FLOAT16, 72, Mask.CAUSAL, 8),
    Problem(FORWARD, Arch.CPU, DType.FLOAT32, 41, Mask.DENSE, 4, 64),
    Problem(BACKWARD, Arch.CPU, DType.BFLOAT16, 64, Mask.DENSE, 2, 41),
    Problem(BACKWARD, Arch.CPU, DType.FLOAT32, 48, Mask.FULL, 4, score=LEARNED),
    Problem(FORWARD, Arch.SM89, DType.BFLOAT16, 64, Mask.DENSE, 2, 41),
    Problem(BACKWARD, Arch.SM80, DType.FLOAT16, 44, Mask.DENSE, 8),
    Problem(BACKWARD, Arch.SM90, DType.BFLOAT16, 192, Mask.DENSE, 16, 128),
    Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS),
    Problem(FORWARD, Arch.SM90A, DType.FLOAT16, 72, Mask.FULL),
    Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 192, Mask.CAUSAL),
    Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.SPANS),
    Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.SPANS),
    Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 41, Mask.DENSE, 4, 100),
    Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.CAUSAL),
    Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 96, Mask.CAUSAL),
    Problem(BACKWARD, Arch.SM90A, DType.FLOAT16, 192, Mask.SPANS, 16, 128),
    Problem(BACKWARD, Arch.SM90A, DType.BFLOAT16, 256, Mask.CAUSAL),
    Problem(FORWARD, Arch.SM80, DType.FLOAT32, 64, Mask.SPANS),
    Problem(FORWARD, Arch.SM89, DType.FLOAT32, 41, Mask.DENSE, 4, 200),
    Problem(BACKWARD, Arch.SM90, DType.FLOAT32, 64, Mask.SPANS),
    Problem(BACKWARD, Arch.SM120, DType.FLOAT32, 52, Mask.CAUSAL, 8, 9),
    Problem(FORWARD, Arch.SM90, DType.BFLOAT16, 512, Mask.FULL),
    Problem(FORWARD, Arch.SM90A, DType.FLOAT16, 512, Mask.SPANS),
    Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 384, Mask.FULL),
]
# Knobs with one feasible value so far, or one for each value of the others.
ONE_VALUE = {("sm90a", Direction.BACKWARD, name) for name in ("tile_m", "tile_n")}
ONE_VALUE |= {("sm90a_wide", Direction.BACKWARD, name) for name in ("tile_m", "pair")}
ONE_VALUE |= {("cpu", direction, "amx") for direction in Direction}
RENDERED = 40  # of a problem's candidates, evenly spread


def name(problem: Problem) -> str:
    return f"{problem.direction.value}-{problem.arch.value}-{problem.head_dim}-{problem.mask.value}"


problems = pytest.mark.parametrize("problem", PROBLEMS, ids=name)


@cache
def specs(problem: Problem) -> list[Spec]:
    if (problem.family, problem.direction) not in FAMILIES:
        pytest.skip(f"{problem.arch.value} has no {problem.direction.value} kernel")
    return list(candidates(problem))


@problems
def test_every_candidate_renders_under_a_name_of_its_own(problem: Problem) -> None:
    space = specs(problem)
    assert len({spec.slug for spec in space}) == len(set(space)) == len(space) > 0
    for spec in space[:: -(-len(space) // RENDERED)]:
        source = render(spec)
        assert source.text == render(spec).text
        assert source.text.count(f"{spec.symbol}(") == 1
        assert all(f"{launch.symbol}(" in source.text for launch in source.plan.schedule)
        assert "#include <torch" not in source.text
        assert not (problem.arch.is_gpu and "#include" in source.text), "NVRTC has no include path"


@problems
def test_specs_survive_json_and_the_command_line(problem: Problem) -> None:
    space = specs(problem)
    for spec in space[:: -(-len(space) // 200)]:
        assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec
        assert spec.to_cli().count("--set ") == len(spec.tuning.named_knobs())


@pytest.mark.parametrize(("family", "direction"), FAMILIES, ids=lambda part: getattr(part, "value", part))
def test_every_knob_changes_name_and_kernel(family: str, direction: Direction) -> None:
    """For each problem with a choice; and each knob is a choice for some problem."""
    mine = [p for p in PROBLEMS if (p.family, p.direction) == (family, direction)]
    for knob in fields(FAMILIES[family, direction].tuning):
        pairs = [pair for pair in (changed(problem, knob.name) for problem in mine) if pair]
        alone = (family, direction, knob.name) in ONE_VALUE
        assert bool(pairs) != alone, f"no two feasible variants differ in {knob.name} alone"
        for one, two in pairs:
            assert one.slug != two.slug
            assert kernel(one) != kernel(two), f"{knob.name} changes only comments"


def changed(problem: Problem, knob: str) -> tuple[Spec, Spec] | None:
    """Two feasible specs that differ in one knob only, both candidates or one step away from one."""
    for spec in specs(problem):
        value = int(getattr(spec.tuning, knob))
        # Booleans turn; numbers go by what lanes, tiles and stages are made of.
        for step in (1 - value,) if value < 2 else (value * 2, value // 2, value + 1, value - 1, value + 48):
            other = retuned(spec, knob, step)
            if other is not None and other != spec:
                return spec, other
    return None


def retuned(spec: Spec, knob: str, value: int) -> Spec | None:
    typed = bool(value) if isinstance(getattr(spec.tuning, knob), bool) else value
    other = Spec(spec.problem, replace(spec.tuning, **{knob: typed}))
    try:
        make_plan(other)
    except Infeasible:
        return None
    return other


def kernel(spec: Spec) -> tuple[str, list[Any]]:
    """What the compiler sees and how it is launched, names apart."""
    source = render(spec)
    lines = (line.partition("//")[0].rstrip() for line in source.text.splitlines())
    launches = [(one.grid, one.threads, one.shared_bytes, one.persistent) for one in source.plan.launches]
    return "\n".join(lines).replace(spec.slug, ""), launches


def test_fields_of_the_problem_change_the_name() -> None:
    problem = PROBLEMS[3]
    tuning = next(candidates(problem)).tuning
    others = [
        replace(problem, **change)
        for change in (
            {"arch": Arch.SM90},
            {"dtype": DType.FLOAT16},
            {"head_dim": 72},
            {"mask": Mask.CAUSAL},
            {"align": 8},
        )
    ]
    assert len({Spec(p, tuning).slug for p in (problem, *others)}) == 6


def test_names_say_what_differs_from_the_default() -> None:
    """They stand in file names, caches and tables: none may change."""
    spec = Spec(
        Problem(FORWARD, Arch.SM89, DType.FLOAT16, 64, Mask.DENSE, 4, 41), Sm80Forward(64, 32, 4, 1, True)
    )
    knobs = {"tile_m": 64, "tile_n": 32, "warps": 4, "stages": 1, "q_in_regs": 1}
    problem = {"direction": "fwd", "arch": "sm89", "dtype": "fp16", "head_dim": 64, "head_dim_v": 41}
    problem |= {"mask": "dense", "align": 4}
    assert spec.slug == "fwd_sm89_fp16_d64v41_dense_a4_m64_n32_w4_s1_q1"
    assert list(spec.to_json().items()) == [*problem.items(), ("tuning", knobs)]
    options = [f"--{name.replace('_', '-')} {value}" for name, value in problem.items()]
    assert spec.to_cli() == " ".join((*options, *(f"--set {name}={value}" for name, value in knobs.items())))
    plain = replace(spec, problem=replace(spec.problem, align=16, dim_v=64))  # 64: v has that of q and k
    assert plain.slug == "fwd_sm89_fp16_d64_dense_a16_m64_n32_w4_s1_q1"
    assert "head_dim_v" not in plain.to_json()
    assert plain.to_json()["align"] == 16


def test_the_command_line_has_an_option_for_each_field() -> None:
    options = {option.name: option for option in render_command.params}
    for f in PROBLEM_FIELDS:
        assert f.option in options[f.name].opts
        assert f.text


# ---- What a family does not honour


@pytest.mark.parametrize(("change", "name"), [({"align": 4}, "align 4"), ({"dim_v": 128}, "head_dim_v 128")])
@pytest.mark.parametrize(("family", "direction"), FAMILIES, ids=lambda part: getattr(part, "value", part))
def test_a_field_is_honoured_or_refused_by_name(
    family: str, direction: Direction, change: dict[str, int], name: str
) -> None:
    """Problems that differ in one optional field: either a kernel of another name, or a sentence about the value."""
    problem = next(p for p in PROBLEMS if (p.family, p.direction) == (family, direction))
    usual = replace(problem, head_dim=192 if family.endswith("_wide") else 64, align=16, dim_v=0)
    other = replace(usual, **change)  # type: ignore[arg-type]
    if other.family != family:
        pytest.skip("the value makes it a problem of another family")
    (field,) = change
    if field in FAMILIES[family, direction].honours:
        assert next(candidates(other)).slug != next(candidates(usual)).slug
        return
    assert not list(candidates(other))
    assert why_infeasible(other).startswith(f"{name}: ")
    with pytest.raises(Infeasible, match=f"^{name}: "):
        make_tuning(other, {})


def test_a_family_refuses_what_it_does_not_name() -> None:
    """As one that was written before the field was, and one that says why."""
    whole = FAMILIES["sm80", FORWARD]
    problem = Problem(FORWARD, Arch.SM80, DType.BFLOAT16, 64, Mask.FULL, 8)
    whole.require_honoured(problem)
    with pytest.raises(Infeasible, match=r"^align 8: the sm80 bf16 fwd kernels take 16 only$"):
        replace(whole, honours=frozenset()).require_honoured(problem)
    with pytest.raises(Infeasible, match=r"^align 8: for a reason$"):
        replace(whole, honours=frozenset({"dim_v"}), reasons={"align": "for a reason"}).require_honoured(
            problem
        )


def test_a_problem_without_a_family() -> None:
    problem = Problem(BACKWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.FULL)
    assert not list(candidates(problem))
    assert why_infeasible(problem) == "sm90a has no fp32 bwd kernel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intervals": 0}, "intervals: got 0, expected 1 to 4"),
        ({"intervals": 5}, "intervals: got 5, expected 1 to 4"),
        ({"planes": 2}, "planes: got 2, expected 0 or 1"),
        ({"mask": Mask.CAUSAL, "intervals": 2}, "intervals, planes: need mask spans, not causal"),
        ({"mask": Mask.DENSE, "planes": 1}, "intervals, planes: need mask spans, not dense"),
    ],
    ids=str,
)
def test_what_is_no_problem(change: dict[str, Any], message: str) -> None:
    """As `cli.py render` and JSON may name it."""
    spans = Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
    with pytest.raises(ValueError, match=message):
        replace(spans, **change)


def test_json_that_is_no_spec() -> None:
    data = next(candidates(PROBLEMS[3])).to_json()
    for field in ("direction", "arch", "dtype", "head_dim", "mask", "align"):
        with pytest.raises(ValueError, match=f"field '{field}' is missing"):
            spec_from_json({key: value for key, value in data.items() if key != field})
    tuning = {("wraps" if key == "warps" else key): value for key, value in data["tuning"].items()}
    with pytest.raises(ValueError, match=r"wraps unknown; warps missing\. Its knobs are tile_m"):
        spec_from_json(data | {"tuning": tuning})
    with pytest.raises(TypeError, match="sm90a bf16 fwd takes Sm90Forward"):
        make_plan(Spec(replace(PROBLEMS[3], arch=Arch.SM90A), Sm80Forward(128, 64, 4, 1, False)))


# What tables and logs say that were saved before these knobs had their names.
OLDER = {
    "bwd_sm80_bf16_d64_full_a16_m64_n64_w4_s2_a2_b2_c2_h1_o1": ("ordered", "deterministic"),
    "bwd_sm90_fp32_d64_full_a16_m32_n64_w8_s1_a2_c4_d2_p2_b1_h0_o1": ("ordered", "deterministic"),
    "bwd_sm90_fp32_d64_full_a16_m32_n64_w8_s1_a2_c4_d2_p2_b1_h0_o0": ("parts", "grad_splits"),
    "fwd_sm80_fp32_d64_full_a16_m64_n32_w4_s1_p2_b1": ("parts", "o_splits"),
    "bwd_sm90a_bf16_d64_full_a16_m64_n128_s3_t2_l0_r0_h1_o1": ("ordered", "deterministic"),
    "fwd_sm90a_bf16_d64_spans_a16_m192_n80_s3_p1_r1_k1_q0": ("counter", "dynamic"),
}


@pytest.mark.parametrize("slug", OLDER)
def test_older_names_of_knobs_are_read(slug: str) -> None:
    direction, arch, dtype, head_dim, mask, align, *codes = slug.split("_")
    problem = Problem(
        Direction(direction), Arch(arch), DType(dtype), int(head_dim[1:]), Mask(mask), int(align[1:])
    )
    old, new = OLDER[slug]
    knobs = [f for f in fields(FAMILIES[problem.family, problem.direction].tuning) if not f.metadata["quiet"]]
    names = [old if f.name == new else f.name for f in knobs]
    tuning = {name: int(code[1:]) for name, code in zip(names, codes, strict=True)}
    spec = spec_from_json({**problem.to_json(), "tuning": tuning})
    assert spec.slug == slug
    saved = spec.to_json()
    assert saved["tuning"] == {new if name == old else name: value for name, value in tuning.items()}
    assert spec_from_json(saved) == spec
    with pytest.raises(ValueError, match=f"{old} unknown"):
        spec_from_json({**problem.to_json(), "tuning": tuning | {new: 1}})


# ---- The space


def test_guesses_go_by_the_larger_head_dim() -> None:
    """Tiles for 64 columns of q and k do not suit 128 of v."""
    usual = Problem(BACKWARD, Arch.SM80, DType.BFLOAT16, 128, Mask.FULL)
    wide_v = replace(usual, head_dim=64, dim_v=128)
    assert next(candidates(wide_v)).tuning == next(candidates(usual)).tuning
    assert next(candidates(replace(usual, head_dim=64))).tuning != next(candidates(usual)).tuning


@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 96), (96, 112), (104, 80), (128, 80)])
def test_hopper_guesses_by_head_dim(head_dim: int, tile_n: int) -> None:
    """Up to 96 columns three consumer warpgroups take long key tiles, beyond that short ones."""
    problem = Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.SPANS)
    tuning = next(candidates(problem)).tuning
    assert (tuning.tile_m, tuning.tile_n) == (192, tile_n)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_tries_whole_blocks_of_dense_masks_first(head_dim: int) -> None:
    """Eight variants are what a short search measures, one of them what the table has."""
    problem = Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, Mask.DENSE, 16)
    tiles = [(s.tuning.tile_m, s.tuning.tile_n) for s in islice(candidates(problem), 7)]
    assert all(128 % m == 0 and 128 % n == 0 for m, n in tiles), tiles
    assert {(128, 128), (128, 64), (64, 64)} <= set(tiles)


def test_every_promised_head_dim_of_hopper_has_a_kernel() -> None:
    """Multiples of 8 up to 256, forward. All others, and all other targets: tests/kernels/test_head_dims.py."""
    for head_dim, dtype, mask in product(range(16, 257, 8), (DType.BFLOAT16, DType.FLOAT16), MASKS):
        for dim_v in (0, 272 - head_dim):
            problem = Problem(FORWARD, Arch.SM90A, dtype, head_dim, mask, 16, dim_v)
            assert next(candidates(problem), None), f"{problem}: {why_infeasible(problem)}"


@pytest.mark.parametrize("dim_v", [8, 132, 264])
def test_head_dims_of_v_that_hopper_refuses(dim_v: int) -> None:
    problem = Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.FULL, 16, dim_v)
    assert not list(candidates(problem))
    assert why_infeasible(problem).startswith(
        f"head_dim of v {dim_v}: the sm90a forward kernel takes multiples of 8"
    )


@pytest.mark.parametrize(
    "arch", [arch for arch in Arch if arch.family == "sm80"], ids=lambda arch: arch.value
)
def test_every_head_dim_has_a_float32_kernel(arch: Arch) -> None:
    for direction, head_dim, mask in product(Direction, range(1, 257), MASKS):
        problem = Problem(direction, arch, DType.FLOAT32, head_dim, mask, 4)
        assert next(candidates(problem), None), f"{problem}: {why_infeasible(problem)}"
    for head_dim in range(1, 129):  # a word of a dense mask covers 32 keys: less shared memory is left
        for direction in Direction:
            assert next(candidates(Problem(direction, arch, DType.FLOAT32, head_dim, Mask.DENSE, 4)), None)
