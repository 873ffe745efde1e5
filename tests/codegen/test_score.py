"""Formulas of scores: text, derivative, names; nothing of them is in kernels without one."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnforge.codegen.families import spec_from_json
from attnforge.codegen.formula_code import Code, code_of
from attnforge.codegen.formula_program import ARITY, Program, ScoreError
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.score_tanh import NEAR, NEAREST, Series, with_polynomials
from attnforge.codegen.score_tiles import tiled_program
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem

FORMULAS = [
    "30.0 * tanh(score / 30.0)",
    "score * score * score - 2.0 / (1.0 + score * score)",
    "where(score < 0.25, exp(score), exp2(score) * score)",
    "log(1.0 + exp(score)) + log2(2.0 + score * score) + log1p(abs(score)) + expm1(score)",
    "sqrt(1.0 + score * score) + sin(score) * cos(score) + erf(score)",
    "maximum(score, 0.5) + minimum(score, -0.5) + floor(score) * score + ceil(score)",
    "pow(1.5 + score * score, 2.5) + -score",
    "x = tanh(score); x * x + x * (q_idx - kv_idx // 2) + float(h % 3)",
    "score + 1.0 + (q_idx - kv_idx)",
]


def tanh_near(series: Series, x: Tensor, a: Tensor, k: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """What the polynomial of kernels gives for k * tanh(a scale x)."""
    y = a * scale * x
    return k * sum((c * y ** (2 * i + 1) for i, c in enumerate(series.terms)), torch.zeros_like(y))


OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<": operator.lt, ">": operator.gt, "==": operator.eq, "neg": operator.neg,
    "float": lambda x: x * 1.0, "where": torch.where,
    "tanh_near": functools.partial(tanh_near, NEAR), "tanh_nearest": functools.partial(tanh_near, NEAREST),
}  # fmt: skip


def value(program: Program, result: int, score: Tensor) -> Tensor:
    """What a program computes in float64, for h = 4, q_idx = 7, kv_idx = 3, of one for tiles for scale = 0.5."""
    names = {"score": score, "h": torch.tensor(4), "q_idx": torch.tensor(7), "kv_idx": torch.tensor(3)}
    names |= {"s": score * 2, "scale": torch.tensor(0.5).double(), "distance": torch.tensor(-4.0).double()}
    found: list[Tensor] = []
    for node in program.nodes[: result + 1]:
        args = [found[i] for i in node.args]
        if node.op == "leaf":
            found.append(names[str(node.value)])
        elif node.op == "const":
            kind = torch.float64 if node.kind == "float" else torch.int64
            found.append(torch.tensor(node.value, dtype=kind))
        else:
            found.append((OPERATORS.get(node.op) or getattr(torch, node.op))(*args))
    return found[result].expand(score.shape)


@pytest.mark.parametrize("formula", FORMULAS)
def test_derivatives_are_those_of_autograd(formula: str) -> None:
    score = torch.linspace(-2.1, 2.3, 23, dtype=torch.float64, requires_grad=True)
    mod = ScoreMod(f"a: {formula}")
    (slope,) = torch.autograd.grad(value(*mod.parsed, score).sum(), score)
    torch.testing.assert_close(value(*mod.gradient, score.detach()).double(), slope)


@pytest.mark.parametrize("formula", FORMULAS)
def test_the_text_of_a_program_is_that_program(formula: str) -> None:
    mod = ScoreMod(f"a: {formula}")
    again = ScoreMod.of("a", (), *mod.parsed)
    score = torch.linspace(-2.1, 2.3, 23, dtype=torch.float64)
    assert torch.equal(value(*again.parsed, score), value(*mod.parsed, score))
    assert ScoreMod.of("a", (), *again.parsed) == again


@pytest.mark.parametrize("terms", [1500, 20000])
def test_formulas_too_long_to_read_are_refused(terms: int) -> None:
    with pytest.raises(ScoreError, match=r"score: a formula of \d+ characters is nested too deeply"):
        ScoreMod("f: score" + " + 1.0" * terms).parsed  # noqa: B018


def test_a_bias_has_slope_one() -> None:
    assert ScoreMod("a(t0: float32[1]): t0[h] * (q_idx - kv_idx) + score").slope_is_one
    assert not ScoreMod("a: 2.0 * score").slope_is_one


@pytest.mark.parametrize(
    "formula",
    [
        "score + where(score > 0.0, t0[h], 0.0)",
        "score + floor(score)",
        "score - ceil(2.0 * score)",
        "score + t0[minimum(maximum(int(score), 0), 3)]",
    ],
)
def test_steps_of_the_score_are_not_added_to_it(formula: str) -> None:
    """Their derivative is 1, but f(score - lse) is not f(score) - lse, which the sm90a backward computes for a bias."""
    mod = ScoreMod(f"a(t0: float32[1]): {formula}")
    assert mod.gradient[0].constant(mod.gradient[1]) == 1.0
    assert not mod.slope_is_one
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=mod)
    assert "score_mod_grad" in render(next(candidates(problem))).text


@pytest.mark.parametrize("name", ARITY)
def test_every_function_has_a_text_in_cpp(name: str) -> None:
    program = Program()
    score = program.leaf("score")
    args = [score] * ARITY[name]
    if name == "where":
        args[0] = program.binary("<", score, program.const(0.0))
    assert "score" in code_of(program, program.call(name, *args)).names


def test_constant_factors_of_derivatives_merge() -> None:
    code = ScoreMod("a: 30.0 * tanh(score / 30.0)").gradient_code()
    assert code.result == "1.0f - x0 * x0"


def test_places_of_gradients_depend_on_indices_only() -> None:
    text = ScoreMod("a(t0: float32[1] grad): score + t0[int(score) + h]")
    assert text.code().names == {"p", "score", "h"}  # the function itself may read there
    with pytest.raises(ScoreError, match="the gradient of t0, of which an index depends on the score"):
        text.reads  # noqa: B018


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score", "expected 'name: formula'"),
        ("a: score +", "cannot be parsed"),
        ("a: erfinv(score)", "erfinv is not supported"),
        ("a: tanh(score, score)", "takes 1 arguments"),
        ("a: score < 1", "gives a bool"),
        ("a: t0[h]", "not supported in a formula"),
        ("a(t0: float64[1]): t0[h]", "expected 't0: dtype"),
        ("a(t1: float32[1]): t1[h]", "expected 't0: dtype"),
        ("a(t0: float32[2]): t0[h]", "has 2 dimensions, but 1 indices"),
        ("a(t0: float32[1]): t0[score]", "an index of t0 is not int32"),
        ("a: score % 2", "of float32"),
        ("a: where(h, score, 0.0)", "condition is not a bool"),
        ("a: __import__('os')", "not supported in a formula"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ScoreError, match=message.replace("(", r"\(").replace("[", r"\[")):
        ScoreMod(text).parsed  # noqa: B018


def test_specs_tell_scores_apart() -> None:
    texts = ("", "softcap: 30.0 * tanh(score / 30.0)", "softcap: 50.0 * tanh(score / 50.0)")
    problems = [
        Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 4, score=ScoreMod(x))
        for x in texts
    ]
    specs = [next(candidates(p)) for p in problems]
    assert len({s.slug for s in specs}) == 3
    assert all(s.symbol.isidentifier() for s in specs)
    assert [spec_from_json(s.to_json()) for s in specs] == specs
    assert "score" not in specs[0].to_json()
    assert "softcap" in specs[1].slug


@pytest.mark.parametrize(
    ("formula", "finite"),
    [
        ("30.0 * tanh(score / 30.0) + 2.0", True),
        ("score * score", True),
        ("log(score)", False),
        ("exp(score)", False),
        ("1.0 / score", False),
        ("score * t0[h]", False),
    ],
)
def test_whether_a_derivative_can_be_infinite(formula: str, finite: bool) -> None:
    assert ScoreMod(f"a(t0: float32[1]): {formula}").slope_is_finite == finite


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("score - t0[h] * abs(q_idx - kv_idx)", ("{t0}", "-{t0}", "0.0f", "0.0f")),
        ("abs(kv_idx - q_idx - 3) * 0.5 + score", ("-0.5f", "0.5f", "0.0f", "static_cast<float>(3)")),
        ("score - t0[b] + 2.0", ("0.0f", "0.0f", "(-{t0}) + 2.0f", None)),
        ("score + 1.0 + (q_idx - kv_idx)", ("-1.0f", "-1.0f", "1.0f", None)),
        ("score - (q_idx - kv_idx) / t0[0]", ("-(-1.0f / {t0})", "-(-1.0f / {t0})", "0.0f", None)),
        ("score + 1.0 + 0.0 * (q_idx - kv_idx)", ("0.0f", "0.0f", "1.0f + 0.0f", None)),
        ("score - abs(abs(q_idx - kv_idx))", None),  # the outer one is of a line on one side only
        ("score + abs(q_idx - kv_idx) - abs(q_idx - kv_idx - 1)", None),  # two kinks
        ("score + abs(abs(q_idx - kv_idx) - 3)", None),
        ("score + abs(q_idx - kv_idx) * (q_idx - kv_idx)", None),
        ("score + t0[0] / (q_idx - kv_idx)", None),
        ("score + floor((q_idx - kv_idx) * 0.5)", None),
        ("score + (q_idx - kv_idx) // 2", None),
        ("score + minimum(q_idx - kv_idx, 8)", None),
        ("score + t0[kv_idx]", None),
        ("score + kv_idx", None),
        ("2.0 * score - kv_idx + q_idx", None),
        ("score + t0[minimum(maximum(int(score), 0), 3)]", None),
        ("score + score * (q_idx - kv_idx)", None),
        ("-score", None),
    ],
)
def test_what_is_lines_in_the_distance(formula: str, expected: tuple[str | None, ...] | None) -> None:
    """Slopes below and above a kink, the value there, and the kink."""
    lines = ScoreMod(f"a(t0: float32[1]): {formula}").lines
    assert (lines is None) == (expected is None)
    if lines is None or expected is None:
        return
    codes = (lines.below, lines.above, lines.value, lines.kink)
    texts = [
        None if code is None else re.sub(r"load_float32_1d\(p.score0, \w\)", "{t0}", code.result)
        for code in codes
    ]
    assert texts == list(expected)


def random_value(chance: random.Random, depth: int) -> str:
    """A formula of indices, constants and elements of tensors that is often a line in the distance, or two."""
    if depth == 0 or chance.random() < 0.15:
        distances = ("(q_idx - kv_idx)", "(kv_idx - q_idx - t1[0])", "(q_idx - kv_idx + t1[0])")
        others = ("t0[h]", "t0[b]", "t1[1]", "h", "0.5", "1.0", "0.0", "3", "q_idx")
        return chance.choice(chance.choice((distances, others)))
    a, b = (random_value(chance, depth - 1) for _ in range(2))
    forms = (
        "abs(a)",
        "abs(a)",
        "-a",
        "float(a)",
        "a + b",
        "a - b",
        "a * t0[h]",
        "t1[0] * a",
        "a * b",
        "a / t1[0]",
    )
    return re.sub(r"\b[ab]\b(?!\[|s)", lambda m: {"a": a, "b": b}[m[0]], f"({chance.choice(forms)})")


def test_lines_are_the_formula_that_they_stand_for() -> None:
    """Random formulas at random distances in float64, by what Python makes of their text and of the lines' in C++."""
    chance = random.Random(1)
    found = 0
    for _ in range(1500):
        text = f"{random_value(chance, 3)} + score - {random_value(chance, 2)}"
        lines = ScoreMod(f"a(t0: float32[1], t1: int32[1]): {text}").lines
        if lines is None:
            continue
        found += lines.below != lines.above
        names: dict[str, Any] = {"b": 1, "h": 2, "t0": [0.25, -1.5, 0.75], "t1": [8, -3], "score": 0.125}
        below, above, value, kink = (
            python_value(code, names) if code else 0.0
            for code in (lines.below, lines.above, lines.value, lines.kink)
        )
        for distance in (-99, -9, -8, -7, -1, 0, 1, 7, 8, 9, chance.randint(-99, 99)):
            x = distance - kink
            got = (below if x < 0.0 else above) * x + value + names["score"]
            expected = eval(text, {**names, "q_idx": 200, "kv_idx": 200 + distance})  # noqa: S307
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-9), (text, distance)
    assert found > 100


def test_a_forward_takes_a_formula_without_a_derivative() -> None:
    mod = ScoreMod("a: score + pow(1.5, score)")
    with pytest.raises(ScoreError, match="backward of pow"):
        _ = mod.gradient
    assert mod.lines is None
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.FULL, score=mod)
    assert "score_mod" in render(next(candidates(problem))).text


def test_slopes_are_products_of_floats() -> None:
    """The formula multiplies floats; a product of its integers could leave int32."""
    lines = ScoreMod("a(t0: int32[1]): score + float(kv_idx - q_idx) * t0[0] * t0[1]").lines
    assert lines is not None
    assert lines.above.result.count("static_cast<float>(load_int32_1d(") == 2


def python_value(code: Code, names: dict[str, Any]) -> float:
    """What C++ text of sums, products and loads computes, in float64; only `names` may occur in it."""
    scope = {
        f"wrapping_{name}": getattr(operator, name) for name in ("add", "sub", "mul", "neg", "abs")
    } | names
    for statement in (*code.locals, f"const float result = {code.result};"):
        declared = re.fullmatch(r"const (?:float|int) (\w+) = (.*);", statement)
        assert declared is not None
        text = re.sub(r"load_\w+_1d\(p\.score(\d), (\w+)\)", r"t\1[\2]", declared[2])
        text = re.sub(r"(?<=\d)f\b", "", text).replace("static_cast<float>", "float").replace("fabsf", "abs")
        scope[declared[1]] = eval(text, dict(scope))  # noqa: S307
    return float(scope["result"])


@pytest.mark.parametrize("arch", [Arch.SM90A, Arch.SM80, Arch.CPU], ids=lambda arch: arch.value)
@pytest.mark.parametrize(
    "score", ["s: score + float(kv_idx // 2)", "s(t0: float32[1]): score - t0[h // 2] * abs(q_idx - kv_idx)"]
)
def test_a_mask_and_a_score_share_helpers(score: str, arch: Arch) -> None:
    """One reads the remainder, the other the quotient: their helpers come together, and once."""
    mask_mod = MaskMod("m: q_idx % 4 == kv_idx % 4")
    problem = Problem(
        Direction.FORWARD, arch, DType.BFLOAT16, 64, Mask.DENSE, score=ScoreMod(score), mask_mod=mask_mod
    )
    text = render(next(candidates(problem))).text
    assert text.count("int floor_div(int x, int y) {") == text.count("int floor_mod(int x, int y) {") == 1


@pytest.mark.parametrize(
    ("formula", "near"),
    [
        ("30.0 * tanh(score / 30.0)", 30.0),
        ("tanh(-(score * 0.5)) - 2.0 * tanh(score * 0.25)", 2.0),
        ("tanh(score * score)", None),  # not of a multiple of the score
        ("exp(score)", None),
        ("tanh(score / 5000000.0)", None),  # its polynomial's coefficients would not fit float32
        ("tanh(score * t0[h])", None),
    ],
)
def test_up_to_which_score_tanh_is_a_polynomial(formula: str, near: float | None) -> None:
    mod = ScoreMod(f"a(t0: float32[1]): {formula}")
    assert mod.near == near
    if near is None:
        return
    score = torch.linspace(-near, near, 101, dtype=torch.float64)
    for program, result in (with_polynomials(*mod.parsed, True), with_polynomials(*mod.parsed, False)):
        exact = value(*mod.parsed, score)
        assert (value(program, result, score) - exact).abs().max() < 7e-6 * near
    slope = value(*with_polynomials(*mod.gradient, False), score)
    torch.testing.assert_close(slope, value(*mod.gradient, score), rtol=0, atol=2e-5)


@pytest.mark.parametrize("formula", FORMULAS)
def test_the_form_for_tiles_is_the_same_function(formula: str) -> None:
    mod = ScoreMod(f"a: {formula}")
    score = torch.linspace(-2.1, 2.3, 23, dtype=torch.float64)
    for program, result in (mod.parsed, mod.gradient):
        found = value(*tiled_program(program, result), score).double()
        torch.testing.assert_close(found, value(program, result, score).double())


@pytest.mark.parametrize(
    ("formula", "result"),
    [
        ("30.0 * tanh_approx(score / 15.0)", "score_tanh_approx(s * (scale * 0.06666666666666667f))"),
        ("score - t0[h] * abs(q_idx - kv_idx)", "s * scale - load_float32_1d(p.score0, h) * fabsf(distance)"),
        ("score + (q_idx + h - kv_idx)", "s * scale + (-(distance - static_cast<float>(h)))"),
        (
            "score + float(minimum(kv_idx - q_idx, 9))",
            "s * scale + minimum_float(distance, static_cast<float>(9))",
        ),
        ("score + (q_idx + kv_idx)", "s * scale + (q_idx + kv_idx)"),
        ("score + t0[kv_idx - q_idx]", "s * scale + load_float32_1d(p.score0, kv_idx - q_idx)"),
        ("score + t0[kv_idx]", "s * scale + load_float32_1d(p.score0, static_cast<unsigned>(kv_idx))"),
    ],
)
def test_what_the_form_for_tiles_hoists(formula: str, result: str) -> None:
    assert ScoreMod(f"a(t0: float32[1]): {formula}").code(tiled=True).result == result


@pytest.mark.parametrize(
    ("formula", "unit"),
    [("30.0 * tanh(score)", 30.0), ("tanh(score) * 2.0", 2.0), ("-2.0 * score", 1.0), ("score + 2.0", 1.0)],
)
def test_factors_that_the_softmax_takes(formula: str, unit: float) -> None:
    mod = ScoreMod(f"a: {formula}")
    score = torch.linspace(-2.1, 2.3, 23, dtype=torch.float64)
    assert mod.unit == unit
    rest = value(*tiled_program(mod.parsed[0], mod._in_units), score)
    torch.testing.assert_close(unit * rest, value(*mod.parsed, score))


@pytest.mark.parametrize(
    ("formula", "steps"),
    [
        ("score + t0[minimum(maximum(kv_idx - q_idx, -8), 8) + 8]", 1),
        ("score + t0[8 - maximum(minimum(q_idx - kv_idx, 8), -8)] - t0[minimum(q_idx - kv_idx + h, 3)]", 2),
        ("score + t0[minimum(kv_idx - q_idx, 8)] * (q_idx - kv_idx)", 1),  # the difference is an argument
        ("score + t0[minimum(kv_idx - q_idx, 8)] * q_idx", 0),
        ("score + t0[kv_idx - q_idx]", 0),  # one value a diagonal
        ("score + t0[minimum(kv_idx, 8)]", 0),
        ("score + t0[minimum(kv_idx - q_idx, q_idx - kv_idx)]", 0),  # turns
        ("score + t0[kv_idx - q_idx - minimum(q_idx - kv_idx, 8)]", 1),  # both rise with the distance
        ("score + t0[minimum(kv_idx - q_idx, kv_idx // 2)]", 0),
        ("score + t0[h]", 0),
    ],
)
def test_indices_that_most_tiles_have_one_value_of(formula: str, steps: int) -> None:
    assert len(ScoreMod(f"a(t0: float32[1]): {formula}").steps) == steps


@pytest.mark.parametrize(
    ("index", "by_distance"),
    [
        ("kv_idx - q_idx + 8", True),
        ("abs(q_idx - kv_idx - h)", True),
        ("minimum(kv_idx - q_idx, 8) // 2", True),
        ("kv_idx", False),
        ("kv_idx + q_idx", False),
        ("2 * kv_idx - q_idx", False),
        ("kv_idx - q_idx + minimum(kv_idx, 3)", False),
        ("h", False),  # the same for all pairs
    ],
)
def test_elements_that_a_diagonal_shares(index: str, by_distance: bool) -> None:
    """Gradients of such elements are summed along diagonals first."""
    (read,) = ScoreMod(f"a(t0: float32[1] grad): score + t0[{index}]").reads
    assert read.by_distance == by_distance


def test_derivatives_read_no_index_where_steps_stand_for_all_pairs() -> None:
    """A tile whose steps have one value passes the indices of its first pair to the function and to its derivative."""
    for name in ("maximum", "minimum"):
        formula = f"{name}(score, kv_idx - q_idx) + t0[minimum(maximum(kv_idx - q_idx, -2), 2) + 2]"
        mod = ScoreMod(f"a(t0: float32[1]): {formula}")
        assert mod.steps
        assert not mod.gradient_code(tiled=True).names & {"q_idx", "kv_idx"}


def test_the_nearest_polynomial_is_as_exact_as_it_says() -> None:
    x = torch.linspace(-NEAREST.limit, NEAREST.limit, 1001, dtype=torch.float64)
    one = torch.tensor(1.0).double()
    assert ((tanh_near(NEAREST, x, one, one) - x.tanh()).abs() <= 3e-5 * x.abs()).all()


INDEX = "minimum(maximum(kv_idx - q_idx, -8), 8) + 8"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)", True),
        (f"table(t0: float32[2]): score + t0[h, {INDEX}]", True),
        (f"minus(t0: float32[2]): t0[h, 0] + score - 2.0 * t0[h, {INDEX}]", True),
        (f"unlike(t0: float32[2]): score + pow(t0[h, {INDEX}], t0[h, 0])", True),
        (f"factor(t0: float32[2]): score * t0[h, {INDEX}]", False),
        (f"both(t0: float32[2]): score + score * t0[h, {INDEX}]", False),
        (f"negative(t0: float32[2]): t0[h, {INDEX}] - score", False),
        ("plane(t0: float32[2]): score + t0[q_idx, kv_idx]", False),
        ("softcap: 30.0 * tanh(score / 30.0)", False),
    ],
)
def test_what_is_added_to_rows(text: str, expected: bool) -> None:
    assert ScoreMod(text).row_lines == expected
    assert not ScoreMod("").row_lines
