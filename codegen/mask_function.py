"""`MaskMod`: a function that says which pairs of a query and a key are visible, as text; and its parts in C++.

What a mask computes depends mostly on the query alone or on the key alone: in

    tree(t0: int32[1], t1: int32[1]): (t0[kv_idx] <= t0[q_idx]) & (t0[q_idx] < t1[kv_idx]) & (kv_idx <= q_idx)

a query has the values q_idx and t0[q_idx], a key has kv_idx, t0[kv_idx] and t1[kv_idx], and a pair takes three
comparisons. Kernels read the values of a query or a key once for all its pairs. They also take their ranges over the
queries and the keys of a tile, and compute with ranges (interval arithmetic) whether all pairs of the tile are visible
or none is, so that few tiles have to be looked at pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from attnforge.codegen.formula import Formula
from attnforge.codegen.formula_code import WIDTH, Code, Printer, wrapped
from attnforge.codegen.formula_program import Kind, Node, Program
from attnforge.codegen.int_bounds import HELPERS

SHORT = 12  # values of a function whose evaluation is unrolled
PRODUCT = "rounded_product"  # of floats, which no sum takes up unrounded: that would move an equality

# Operators and functions of ranges, by the kind of their operands: "+" of two ranges is the range of all sums.
_OF_INTS = {"+", "-", "neg", "*", "abs", "maximum", "minimum", "//", "%", ">>", "where",
            "<", "<=", ">", ">=", "==", "!="}  # fmt: skip
_BY_NUMBER = ("//", "%", ">>")  # of a range by a constant
_OF_BOOLS = {"&", "|", "^", "~", "==", "!=", "where"}


@dataclass(frozen=True)
class Side:
    """What a function needs of a query, or of a key."""

    index: Literal["q_idx", "kv_idx"]
    values: tuple[tuple[str, Kind], ...]  # names and types, as members of a structure
    texts: tuple[str, ...]  # the values in C++
    locals: tuple[str, ...]  # what precedes them, `const int x0 = ...;`
    calls: frozenset[str]  # names of helpers that the text calls
    names: frozenset[str]  # the indices that it reads, and "p" if it reads tensors

    @property
    def lines(self) -> list[str]:
        """The body of the function that gives the values, without indentation."""
        if not any(self.locals) and sum(map(len, self.texts)) < WIDTH:
            return [f"return {{{', '.join(self.texts)}}};"]
        return [
            *wrapped(self.locals),
            "return {",
            *(f"    {x}" for x in wrapped(f"{x}," for x in self.texts)),
            "};",
        ]

    @property
    def ranged(self) -> tuple[str, ...]:
        """The values that have ranges: all but floats."""
        return tuple(name for name, kind in self.values if kind != "float")


@dataclass(frozen=True)
class Sides:
    """A function by its sides. `pair` joins `q` and `k`, structures with the values of a query and a key."""

    query: Side
    key: Side
    pair: Code
    tile: Code  # as `pair`, of ranges
    operators: frozenset[str]  # of ranges that `tile` needs


class MaskMod(Formula):
    """The text of a function that says which pairs are visible."""

    argument = "mask_mod"
    gives_bool: ClassVar[bool] = True

    @cached_property
    def sides(self) -> Sides:
        """Its parts with its own tensors in the first places."""
        return self.sides_from(0)

    def sides_from(self, first: int) -> Sides:
        """Its parts. `first`: the place of its first tensor, behind those of the score."""
        program, result = self.parsed
        places = _places(program, result)
        parts = [
            _side(program, index, {x: name for x, (owner, name) in places.items() if owner == index}, first)
            for index in ("q_idx", "kv_idx")
        ]
        given = {x: f"{owner[0]}.{name}" for x, (owner, name) in places.items()}
        pair = _PairPrinter(program, (result,), first, given)
        tile = _TilePrinter(program, (result,), first, given)
        return Sides(parts[0], parts[1], pair.finish(), tile.finish(), frozenset(tile.operators))

    @cached_property
    def calls(self) -> frozenset[str]:
        """Names of the helpers that its C++ text calls."""
        parts = self.sides
        return parts.query.calls | parts.key.calls | parts.pair.calls

    @property
    def short(self) -> bool:
        """Is it a few comparisons and sums, which kernels unroll for all pairs of a thread? Longer ones would spill."""
        return self.calls <= {*HELPERS.values(), PRODUCT} and len(self.parsed[0].nodes) <= SHORT

    def reads(self, leaf: str) -> bool:
        """Does the function depend on this index, such as `h`?"""
        return leaf in self.sides.query.names | self.sides.key.names


def _sides_of(program: Program) -> list[frozenset[str]]:
    """For each value, which of q_idx and kv_idx it depends on."""
    found: list[frozenset[str]] = []
    for node in program.nodes:
        own = {str(node.value)} & {"q_idx", "kv_idx"} if node.op == "leaf" else set[str]()
        found.append(frozenset(own).union(*(found[a] for a in node.args)))
    return found


def _places(program: Program, result: int) -> dict[int, tuple[str, str]]:
    """The values that a query or a key has: the index of whose it is and its name; b and h belong to queries."""
    sides = _sides_of(program)
    waiting, found = [result], dict[int, None]()
    while waiting:
        x = waiting.pop()
        if len(sides[x]) == 2:
            waiting += program.nodes[x].args
        elif program.nodes[x].op != "const":
            found[x] = None
    places: dict[int, tuple[str, str]] = {}
    for x in sorted(found):
        owner = next(iter(sides[x]), "q_idx")
        index = program.nodes[x].value == owner
        number = sum(other == owner and name != "idx" for other, name in places.values())
        places[x] = (owner, "idx" if index else f"x{number}")
    return places


def _side(program: Program, index: Literal["q_idx", "kv_idx"], members: dict[int, str], first: int) -> Side:
    printer = _PairPrinter(program, tuple(members), first, {})
    texts = tuple(
        f"static_cast<bool>({text})" if printer.gives_int(x) else text
        for x, text in zip(members, printer.print(), strict=True)
    )
    values = tuple((name, program.kind(x)) for x, name in members.items())
    return Side(index, values, texts, tuple(printer.lines), frozenset(printer.calls), printer.names)


class _PairPrinter(Printer):
    """C++ text without branches: where && and || would skip a read, several pairs could not be read at once.

    Floats are rounded as torch rounds them, so that equalities hold.
    """

    reciprocals = False

    def __init__(self, program: Program, results: tuple[int, ...], first: int, given: dict[int, str]) -> None:
        super().__init__(program, results, cpp=True, first=first, tiled=True, given=given)

    def index(self, x: int) -> str:
        """Indices of queries and keys are never negative: counting from the end is left out."""
        natural = self.natural(x, ("q_idx", "kv_idx"))
        return f"static_cast<unsigned>({self.plain(x)})" if natural else self.plain(x)

    def helper(self, x: int) -> str | None:
        node = self.p.nodes[x]
        return PRODUCT if node.op == "*" and node.kind == "float" else super().helper(x)

    def gives_int(self, x: int) -> bool:
        """Is a bool an int for C++, which a member of a structure would not take?"""
        node = self.p.nodes[x]
        if node.kind != "bool" or self.plain(x).isidentifier():
            return False
        return node.op in ("&", "|", "^") or (node.op == "where" and any(map(self.gives_int, node.args[1:])))

    def infix(self, node: Node) -> tuple[str, bool]:
        if node.kind == "bool" and node.op in ("&", "|"):
            x, y = node.args
            return f"{self.inner(x)} {node.op} {self.inner(y)}", True
        return super().infix(node)


class _TilePrinter(_PairPrinter):
    """The same of ranges. What is not known of a range is `any_int()` or `any_bool()`."""

    def __init__(self, program: Program, results: tuple[int, ...], first: int, given: dict[int, str]) -> None:
        self.operators: set[str] = set()
        super().__init__(program, results, first, given)

    def type_of(self, x: int) -> str:
        return "Interval"

    def children(self, x: int) -> tuple[int, ...]:
        if not self.known(x):
            return ()
        return super().children(x)[:1] if self.p.nodes[x].op in _BY_NUMBER else super().children(x)

    def known(self, x: int) -> bool:
        """Can the range of a value be computed from those of its operands?"""
        node = self.p.nodes[x]
        kinds = {self.p.kind(a) for a in node.args}
        if x in self.given or node.op == "const":
            return node.kind != "float"
        if node.kind == "float" or "float" in kinds or node.op.startswith("load:"):
            return False
        if node.op in _BY_NUMBER:
            number = self.p.nodes[node.args[1]]
            return number.op == "const" and (node.op == ">>" or float(number.value) >= 1)
        return node.op in (_OF_INTS if "int" in kinds else _OF_BOOLS)

    def helper(self, x: int) -> None:
        """None: operators of ranges are defined for all of them."""

    def spell(self, x: int) -> tuple[str, bool]:
        node = self.p.nodes[x]
        if not self.known(x):
            name = "any_bool" if node.kind == "bool" else "any_int"
            self.operators.add(name)
            return f"{name}()", False
        if x in self.given:
            return super().spell(x)
        if node.op == "const":
            self.operators.add("exactly")
            return f"exactly({self.constant(node)})", False
        self.operators.add("not" if node.op == "~" else node.op)
        if node.op in _BY_NUMBER:
            name = {"//": "floor_div", "%": "floor_mod", ">>": "shift_right"}[node.op]
            number = int(self.p.nodes[node.args[1]].value)
            if node.op == ">>" and not 0 <= number < 32:
                number = 31  # as torch has it: the sign
            return f"{name}({self.plain(node.args[0])}, {number})", False
        if node.op == "where":
            return f"choose({', '.join(self.plain(a) for a in node.args)})", False
        return super().spell(x)
