"""Polynomials in the place of tanh, for scores that are small.

On a GPU tanh takes two special operations, of which there are 16 a clock; a polynomial is computed by the FP32 cores.
`with_polynomials` takes the program (formula_program.py) of a formula such as

    x = tanh(score / 50.0); 50.0 * x

and gives one with `tanh_near(score, 1 / 50, 50)` in the place of 50 * tanh(score / 50). The polynomial is right up
to |score| = 50 * `NEAR.limit`; kernels check that for all scores of a tile at once (`ScoreMod.near`).
`Cap` is a softcap whose exponents kernels compute by a polynomial (`ScoreMod.cap`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnforge.codegen.formula_program import Program


@dataclass(frozen=True)
class Series:
    """tanh(x) / x as a polynomial of x^2 where |x| <= limit (minimax fits by weighted least squares)."""

    suffix: str  # of the names of functions that use it
    limit: float
    terms: tuple[float, ...]


# Relative errors below 3e-5 and 7e-6. With a cap of 50 the first serves scores up to 10: nearly all tiles.
NEAREST = Series("_nearest", 0.2, (0.9999738, -0.32807635))
NEAR = Series("_near", 1.0, (0.99999309, -0.332980655, 0.130368117, -0.0448175552, 0.00903642247))
# For the exponents of a cap (`Cap`): relative error below 2.3e-5. Unlike the others it rises everywhere.
CAPPED = Series("_capped", 0.5, (0.99997744, -0.33169181, 0.11521136))
EXACT_TO = 32.0  # exponents up to which that error is small beside the rounding of P to 16 bits
CAPS = (28.0, 2800.0)  # between them the window of row maxima is wide, and no exponent is large (large.cuh)


@dataclass(frozen=True)
class Tier:
    """A polynomial in the place of tanh, and the |score| up to which it is right."""

    series: Series
    limit: float


@dataclass(frozen=True)
class Cap:
    """A score of the form value * tanh(factor * score).

    Its exponent, log2(e) times the score, is nearly x (c0 + c1 x^2 + c2 x^4) of x = factor * score, with `terms` for c.
    A softmax may use that while the exponent of each row's maximum is between `lowest` and `highest`. Where x is below
    -CAPPED.limit the polynomial is wrong, but such a pair then hardly counts.
    """

    value: float
    factor: float

    @property
    def limit(self) -> float:
        """The |score| up to which the polynomial is right."""
        return CAPPED.limit / self.factor

    @property
    def terms(self) -> tuple[float, ...]:
        """Coefficients of the polynomial."""
        return tuple(self.value * math.log2(math.e) * c for c in CAPPED.terms)

    @property
    def unit(self) -> float:
        """The polynomial is z ((z^2 + inner)^2 + outer) of z = unit * x."""
        return float(self.terms[2] ** 0.2)

    @property
    def inner(self) -> float:
        """See `unit`."""
        return self.terms[1] / self.unit**3 / 2.0

    @property
    def outer(self) -> float:
        """See `unit`."""
        return self.terms[0] / self.unit - self.inner**2

    def highest(self, weight: float) -> float:
        """See the class. Relative to such a maximum, 2^polynomial is above `weight` where x is above CAPPED.limit."""
        x = CAPPED.limit
        at_limit = sum(c * x ** (2 * i + 1) for i, c in enumerate(self.terms))
        return min(EXACT_TO, at_limit - math.log2(weight) - 0.1)

    @property
    def lowest(self) -> float:
        """See the class. 2^20 keys at x = -0.6, where the error is 1 %, weigh an eighth of the row's largest key."""
        return max(-EXACT_TO, 23.0 - self.value * math.log2(math.e) * math.tanh(0.6))


def score_factor(p: Program, x: int) -> float | None:
    """The constant c of a value that is c * score, else None."""
    node = p.nodes[x]
    if node.op == "leaf":
        return 1.0 if node.value == "score" else None
    if node.op not in ("*", "/", "neg"):
        return None
    if node.op == "neg":
        inner = score_factor(p, node.args[0])
        return None if inner is None else -inner
    a, b = node.args
    constant = p.constant(b)
    if constant is None and node.op == "*":
        a, b, constant = b, a, p.constant(a)
    inner = score_factor(p, a)
    if inner is None or constant is None or (node.op == "/" and constant == 0.0):
        return None
    return inner * constant if node.op == "*" else inner / constant


def with_polynomials(p: Program, result: int, merged: bool, series: Series = NEAR) -> tuple[Program, int]:
    """A program with `tanh_near(score, a, k)`, k times the polynomial, in the place of each tanh(a * score).

    merged: a constant factor of the formula's only tanh becomes k; else k is 1.
    """
    op = f"tanh{series.suffix}"

    near, places = Program(p.tensors), dict[int, int]()
    users = [node for node in p.nodes if any(p.nodes[a].op == "tanh" for a in node.args)]

    def polynomial(x: int, k: float) -> int:
        a = score_factor(p, p.nodes[x].args[0])
        assert a is not None
        return near.node(op, (near.leaf("score"), near.const(a), near.const(k)), "float")

    for x in range(result + 1):
        node = p.nodes[x]
        if node.op == "tanh":
            places[x] = polynomial(x, 1.0)
        elif merged and node.op == "*" and node in users and len(users) == 1:
            a, b = node.args if p.nodes[node.args[1]].op == "tanh" else reversed(node.args)
            k = p.constant(a)
            places[x] = (
                near.node("*", tuple(places[i] for i in node.args), "float")
                if k is None
                else polynomial(b, k)
            )
        else:
            places[x] = near.node(node.op, tuple(places[i] for i in node.args), node.kind, node.value)
    return near, places[result]
