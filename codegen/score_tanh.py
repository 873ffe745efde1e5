"""Polynomials in the place of tanh, for scores that are small.

On a GPU tanh takes two special operations, of which there are 16 a clock; a polynomial is computed by the FP32 cores.
`with_polynomials` takes the program (formula_program.py) of a formula such as

    x = tanh(score / 50.0); 50.0 * x

and gives one with `tanh_near(score, 1 / 50, 50)` in the place of 50 * tanh(score / 50). The polynomial is right up
to |score| = 50 * `NEAR.limit`; kernels check that for all scores of a tile at once (`ScoreMod.near`).
"""

from __future__ import annotations

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
