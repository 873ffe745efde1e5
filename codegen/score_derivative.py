"""The derivative of a program (formula_program.py) by the score, or by another of its values.

`derivative` takes a program and the number of its result, adds the values of the derivative to the program, and gives
the number of that. To the program of

    x = tanh(score / 30.0); 30.0 * x

it adds 1.0 - x * x: the constant factors 30 and 1/30 merge to 1, and x is computed once for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attnforge.codegen.formula_program import Node, Program, ScoreError


def derivative(p: Program, result: int, by: int | None = None) -> int:
    """Number of the derivative of a value by another one, by default the score, with torch's choices at corners."""
    by = p.leaf("score") if by is None else by
    known: dict[int, int | None] = {}  # None: zero
    for x in range(result + 1):
        node = p.nodes[x]
        slopes = [known.get(a) for a in node.args]
        changes = node.kind == "float" and any(s is not None for s in slopes)
        known[x] = _slope(p, x, node, slopes) if changes else None
        if x == by:
            known[x] = p.const(1.0)
    slope = known[result]
    return p.const(0.0) if slope is None else slope


def _slope(p: Program, x: int, node: Node, slopes: list[int | None]) -> int | None:
    """Derivative of value `x` from those of its arguments, of which at least one is not zero."""
    a, da = node.args[0], slopes[0]
    match node.op:
        case "+" | "-":
            db = slopes[1] if node.op == "+" or slopes[1] is None else p.neg(slopes[1])
            return db if da is None else da if db is None else p.binary("+", da, db)
        case "*" | "/":
            return _slope_of_product(p, node, slopes)
        case "neg":
            return None if da is None else p.neg(da)
        case "where":
            zero = p.const(0.0)
            return p.call("where", a, *(zero if s is None else s for s in slopes[1:]))
        case "maximum" | "minimum":
            return _slope_of_extreme(p, node, slopes)
        case "pow":
            if slopes[1] is not None:
                raise ScoreError(
                    "score: the backward of pow with an exponent that depends on the score is not supported"
                )
            exponent = node.args[1]
            less = p.binary("-", exponent, p.const(1.0))
            value = p.constant(exponent)
            power = p.call("pow", a, less if value is None else p.const(value - 1.0))
            assert da is not None
            return _times(p, da, _times(p, exponent, power))
    assert da is not None, node.op
    if node.op in ("floor", "ceil", "int"):
        return None
    if node.op not in _RULES:
        raise ScoreError(f"score: the derivative of {node.op} is not supported")
    return _times(p, da, _RULES[node.op](p, a, x))


def _times(p: Program, x: int, y: int) -> int:
    """x * y with constant factors merged."""
    x, y = (y, x) if p.constant(y) is not None else (x, y)
    factor, inner = p.constant(x), p.nodes[y]
    if factor is not None and inner.op == "*" and (other := p.constant(inner.args[0])) is not None:
        return _times(p, p.const(_near_one(factor * other)), inner.args[1])
    if factor is not None and p.constant(y) is not None:
        return p.const(_near_one(factor * float(inner.value)))
    return y if factor == 1.0 else p.binary("*", x, y)


def _near_one(x: float) -> float:
    """1 for what rounding left beside it."""
    return 1.0 if abs(x - 1.0) < 1e-12 else x


def _slope_of_product(p: Program, node: Node, slopes: list[int | None]) -> int:
    (a, b), (da, db) = node.args, slopes
    if node.op == "*":
        terms = [_times(p, d, x) for d, x in ((da, b), (db, a)) if d is not None]
        return terms[0] if len(terms) == 1 else p.binary("+", *terms)
    if db is None:
        assert da is not None
        divisor = p.constant(b)
        return p.binary("/", da, b) if not divisor else _times(p, da, p.const(1.0 / divisor))
    by_divisor = p.neg(p.binary("/", _times(p, db, a), p.binary("*", b, b)))
    return by_divisor if da is None else p.binary("+", p.binary("/", da, b), by_divisor)


def _slope_of_extreme(p: Program, node: Node, slopes: list[int | None]) -> int:
    """As torch: both arguments share the derivative where they are equal."""
    a, b = (p.call("float", x) for x in node.args)  # as `node` has them: `step_indices` relies on that
    da, db = (p.const(0.0) if s is None else s for s in slopes)
    first = p.binary(">" if node.op == "maximum" else "<", a, b)
    shared = _times(p, p.const(0.5), p.binary("+", da, db))
    return p.call("where", p.binary("==", a, b), shared, p.call("where", first, da, db))


def _sign(p: Program, a: int) -> int:
    zero = p.const(0.0)
    negative = p.call("where", p.binary("<", a, zero), p.const(-1.0), zero)
    return p.call("where", p.binary(">", a, zero), p.const(1.0), negative)


def _over(p: Program, factor: float, x: int) -> int:
    return p.binary("/", p.const(factor), x)


# Derivatives of functions of one argument, from the program, the argument and the function's value.
_RULES: dict[str, Callable[[Program, int, int], int]] = {
    "tanh": lambda p, a, x: p.binary("-", p.const(1.0), p.binary("*", x, x)),
    "tanh_approx": lambda p, a, x: p.binary("-", p.const(1.0), p.binary("*", x, x)),
    "exp": lambda p, a, x: x,
    "exp2": lambda p, a, x: _times(p, p.const(math.log(2.0)), x),
    "log": lambda p, a, x: _over(p, 1.0, a),
    "log2": lambda p, a, x: _over(p, 1.0 / math.log(2.0), a),
    "log1p": lambda p, a, x: _over(p, 1.0, p.binary("+", p.const(1.0), a)),
    "expm1": lambda p, a, x: p.binary("+", x, p.const(1.0)),
    "sqrt": lambda p, a, x: _over(p, 0.5, x),
    "sin": lambda p, a, x: p.call("cos", a),
    "cos": lambda p, a, x: p.neg(p.call("sin", a)),
    "erf": lambda p, a, x: _times(
        p, p.const(2.0 / math.sqrt(math.pi)), p.call("exp", p.neg(p.binary("*", a, a)))
    ),
    "abs": lambda p, a, x: _sign(p, a),
    "float": lambda p, a, x: p.const(1.0),
}
