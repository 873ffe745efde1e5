"""What a formula adds to the score, if that consists of lines in kv_idx - q_idx, as ALiBi's.

`lines_of` takes the program (formula_program.py) of a formula and the number of its result. For

    alibi(t0: float32[1]): score - t0[h] * abs(kv_idx - q_idx)

it gives `Lines` with the C++ of the slopes t0[h] left of the diagonal and -t0[h] right of it, of the value 0 on it, and
of the difference kv_idx - q_idx = 0 at which the slope changes. A kernel reads them once for a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.codegen.formula_code import Code, code_of
from attnforge.codegen.formula_program import Program
from attnforge.codegen.score_tiles import terms_of, tiled_program


@dataclass(frozen=True)
class Lines:
    """What a score adds, with x = kv_idx - q_idx - kink: below * x + value where x < 0, else above * x + value.

    All pairs of a batch entry and head share the four. Without a kink x is kv_idx - q_idx, and the slopes are equal.
    """

    below: Code
    above: Code
    value: Code
    kink: Code | None


def lines_of(p: Program, result: int) -> Lines | None:
    """`Lines` of a formula of the form score + lines; None for other formulas."""
    terms = added_terms(p, result)
    if terms is None:
        return None
    sums = p.copy()
    total = sums.const(0.0)
    for sign, x in terms:
        total = _sum(sums, "+" if sign == 1 else "-", total, sums.call("float", x))
    tiled, added = tiled_program(sums, total)
    kinks: dict[int, None] = {}
    zero = tiled.const(0.0)
    if _line(tiled, added, zero, 1, kinks) is None or len(kinks) > 1:
        return None
    kink = next(iter(kinks), zero)
    left, right = _line(tiled, added, kink, -1), _line(tiled, added, kink, 1)
    if left is None or right is None:  # an abs of an abs: where that is distance - k on one side only
        return None
    slopes = code_of(tiled, left[0]), code_of(tiled, right[0])
    return Lines(*slopes, code_of(tiled, left[1]), code_of(tiled, kink) if kinks else None)


def added_terms(p: Program, result: int) -> list[tuple[int, int]] | None:
    """Sign and number of the values that a formula adds to the score; None if it is no sum with the score."""
    terms = terms_of(p, result, 1, "float")
    scores = [(sign, x) for sign, x in terms if p.nodes[x].value == "score"]
    if len(scores) != 1 or scores[0][0] != 1:
        return None
    return [term for term in terms if term not in scores]


def _line(
    p: Program, x: int, origin: int, side: int, kinks: dict[int, None] | None = None
) -> tuple[int, int] | None:
    """(a, c) of a value a * (distance - origin) + c of a tiled program, None if pairs of a head differ in a or c.

    An abs(distance - k) is distance - k if `side` is 1, k - distance if it is -1, and 0 at the origin; `kinks` gets k.
    """
    node = p.nodes[x]
    if node.op == "leaf" and node.value in ("s", "q_idx", "kv_idx"):
        return None
    if node.op == "leaf" and node.value == "distance":
        return p.const(1.0), origin
    found = [_line(p, i, origin, side, kinks) for i in node.args]
    lines = [line for line in found if line is not None]
    if len(lines) < len(found):
        return None
    flat = [p.constant(a) == 0.0 for a, _ in lines]
    if all(flat):
        return p.const(0.0), p.node(node.op, tuple(c for _, c in lines), node.kind, node.value)
    if node.op == "abs" and p.constant(lines[0][0]) == 1.0:
        if kinks is not None:  # the origin is 0
            kinks[_negative(p, lines[0][1])] = None
        return p.const(float(side)), p.const(0.0)
    if node.op == "neg":
        return _negative(p, lines[0][0]), _negative(p, lines[0][1])
    if node.op in ("+", "-"):
        (a, c), (b, d) = lines
        return _sum(p, node.op, a, b), _sum(p, node.op, p.call("float", c), p.call("float", d))
    if node.op in ("*", "/") and (flat[1] or (flat[0] and node.op == "*")):
        (a, c), (_, factor) = lines if flat[1] else reversed(lines)
        factor = p.call("float", factor)  # else the product of two would be one of int32
        return _product(p, node.op, a, factor), _product(p, node.op, c, factor)
    return None


def _sum(p: Program, op: str, x: int, y: int) -> int:
    """x + y or x - y, without a zero."""
    if p.constant(y) == 0.0:
        return x
    if p.constant(x) == 0.0:
        return y if op == "+" else _negative(p, y)
    return p.binary(op, x, y)


def _negative(p: Program, x: int) -> int:
    """-x, without a double sign."""
    value = p.constant(x)
    if p.nodes[x].op == "neg":
        return p.nodes[x].args[0]
    return p.neg(x) if value is None else p.const(0.0 - value)


def _product(p: Program, op: str, x: int, y: int) -> int:
    """x * y or x / y, where x may be 0, 1 or -1."""
    value = p.constant(x)
    if value == 0.0:
        return x
    if op == "*" and value in (1.0, -1.0):
        return y if value == 1.0 else _negative(p, y)
    return p.binary(op, x, y)
