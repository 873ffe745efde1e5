"""What kernels compute once for a tile of scores instead of once for each of its pairs.

Each function takes a program (formula_program.py) and the number of its result. For

    2.0 * (score + t0[minimum(maximum(kv_idx - q_idx, -8), 8) + 8])

- `split_unit` gives the factor 2.0, which a softmax applies with its own scale, and the number of what it multiplies.
- `tiled_program` gives the same value from arguments that kernels have at hand: `s * scale` for the score, and the
  float `distance` for an integer kv_idx - q_idx in an operation on floats.
- `step_indices` gives the index of t0, which has one value in each tile that is far from the diagonal.
"""

from __future__ import annotations

import math

from attnforge.codegen.formula_program import Kind, Program
from attnforge.codegen.score_tanh import NEAREST, score_factor


def split_unit(p: Program, result: int) -> tuple[float, int]:
    """(c, x) of a result c * x with a constant c > 0, else (1.0, result)."""
    node = p.nodes[result]
    if node.op == "*":
        for factor, x in (node.args, node.args[::-1]):
            c = p.constant(factor)
            if c is not None and 0.0 < c < math.inf and p.kind(x) == "float":
                return c, x
    return 1.0, result


def tiled_program(p: Program, result: int) -> tuple[Program, int]:
    """The same value from arguments that a kernel has at hand for the elements of a tile.

    s, scale: score is s * scale; products of constants with it are s times a number that no element changes.
    distance: kv_idx - q_idx as float32, where an integer that depends on this difference only becomes a float: it is a
        sum of a tile's number and an element's constant, without conversions. Exact below 2^24.
    """
    tiled = Program(p.tensors)
    places = dict[int, int]()

    def factor(x: int) -> int | None:
        """x of the form c * score."""
        c = score_factor(p, x)
        if c is None:
            return None
        scale = tiled.leaf("scale")
        by = scale if c == 1.0 else tiled.binary("*", scale, tiled.const(c))
        return tiled.binary("*", tiled.leaf("s"), by)

    def as_float(x: int) -> int:
        """An argument of an operation on floats."""
        found = _of_distance(p, tiled, places, x) if p.kind(x) == "int" else None
        return places[x] if found is None else found

    for x in range(result + 1):
        node = p.nodes[x]
        floats = node.kind == "float" and not node.op.startswith("load:")
        args = tuple(as_float(a) if floats else places[a] for a in node.args)
        if (scaled := factor(x)) is not None:
            places[x] = scaled
        elif node.op == "float" and tiled.kind(args[0]) == "float":
            places[x] = args[0]
        elif node.op == f"tanh{NEAREST.suffix}":
            places[x] = tiled.node(node.op, (tiled.leaf("s"), *args[1:], tiled.leaf("scale")), "float")
        else:
            places[x] = tiled.node(node.op, args, node.kind, node.value)
    return tiled, places[result]


def _of_distance(p: Program, tiled: Program, places: dict[int, int], x: int) -> int | None:
    """An integer of `p` as a float of `tiled`, if it depends on the indices of a pair by their difference only."""
    node = p.nodes[x]
    if node.op == "abs":
        inner = _of_distance(p, tiled, places, node.args[0])
        if inner is not None and tiled.nodes[inner].op == "neg":
            inner = tiled.nodes[inner].args[0]
        return None if inner is None else tiled.call("abs", inner)
    if node.op in ("minimum", "maximum"):
        found = [_of_distance(p, tiled, places, a) for a in node.args]
        if all(f is None for f in found):
            return None
        args = (
            tiled.call("float", places[a]) if f is None else f for a, f in zip(node.args, found, strict=True)
        )
        return tiled.call(node.op, *args)
    q, kv, others = _index_terms(p, x)
    if abs(kv) != 1 or q != -kv:
        return None
    total = tiled.leaf("distance")
    for sign, t in others:
        total = tiled.binary("+" if sign == kv else "-", total, tiled.call("float", places[t]))
    return total if kv == 1 else tiled.neg(total)


def terms_of(p: Program, x: int, sign: int, kind: Kind = "int") -> list[tuple[int, int]]:
    """The signs and numbers of the values of a kind whose sum x is."""
    node = p.nodes[x]
    if node.kind != kind or node.op not in ("+", "-", "neg"):
        return [(sign, x)]
    if node.op == "neg":
        return terms_of(p, node.args[0], -sign, kind)
    a, b = node.args
    return terms_of(p, a, sign, kind) + terms_of(p, b, sign if node.op == "+" else -sign, kind)


def _index_terms(p: Program, x: int) -> tuple[int, int, list[tuple[int, int]]]:
    """How often q_idx and kv_idx are in an integer as terms of a sum, with signs, and the other terms."""
    terms = terms_of(p, x, 1)
    q, kv = (sum(sign for sign, t in terms if p.nodes[t].value == name) for name in ("q_idx", "kv_idx"))
    return q, kv, [(sign, t) for sign, t in terms if p.nodes[t].value not in ("q_idx", "kv_idx")]


def step_indices(p: Program, result: int) -> tuple[Program, tuple[int, ...]]:
    """The clamped indices of loads in a tiled program, none if something else depends on q_idx or kv_idx."""
    waiting, found = [result], dict[int, None]()
    while waiting:
        node = p.nodes[waiting.pop()]
        if node.op == "leaf" and node.value in ("q_idx", "kv_idx"):
            return p, ()
        loads = node.op.startswith("load:")
        clamped = [a for a in node.args if loads and direction(p, a) and _clamps(p, a)]
        found.update(dict.fromkeys(clamped))
        waiting += [a for a in node.args if a not in clamped]
    return p, tuple(found)


def direction(p: Program, x: int) -> int | None:
    """As kv_idx - q_idx grows, does an integer never fall (1), never grow (-1), stay (0), or none of these (None)?"""
    node = p.nodes[x]
    if node.op in ("minimum", "maximum"):
        found = [direction(p, a) for a in node.args]
    else:
        q, kv, others = _index_terms(p, x)
        if q != -kv:
            return None
        if [t for _, t in others] == [x]:
            return 0 if node.op == "const" or node.value in ("b", "h") else None
        rest = [(sign, direction(p, t)) for sign, t in others]
        found = [(kv > 0) - (kv < 0), *(None if d is None else sign * d for sign, d in rest)]
    moving = {d for d in found if d != 0}
    return 0 if not moving else moving.pop() if len(moving) == 1 else None


def goes_by_distance(p: Program, x: int) -> bool:
    """Does a value depend on q_idx and kv_idx by their difference only?"""
    if p.nodes[x].value in ("q_idx", "kv_idx"):
        return False
    q, kv, others = _index_terms(p, x)
    inner = p.nodes[x].args if [t for _, t in others] == [x] else [t for _, t in others]
    return q == -kv and all(goes_by_distance(p, t) for t in inner)


def _clamps(p: Program, x: int) -> bool:
    """Is there a minimum or maximum in a value?"""
    return p.nodes[x].op in ("minimum", "maximum") or any(_clamps(p, a) for a in p.nodes[x].args)
