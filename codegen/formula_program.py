"""`Program`: the values that a formula computes, each once, in the order of their computation.

It takes operations on values by their numbers, checks their types as torch's promotion has them, and gives the number
of the result. A value that is known already keeps its number:

    program = Program()
    score = program.leaf("score")  # 0
    square = program.binary("*", score, score)  # 1
    program.binary("*", score, score)  # 1 again
    program.nodes  # [Node("leaf", (), "float", "score"), Node("*", (0, 0), "float")]

formula.py reads programs from text, the modules score_*.py rewrite them, and formula_code.py prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["float", "int", "bool"]

INDICES = ("b", "h", "q_idx", "kv_idx")  # int32 leaves: batch entry, query head, query and key
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
# Functions by name, with the number of their arguments.
ARITY = {
    "tanh": 1,
    "tanh_approx": 1,
    "exp": 1,
    "exp2": 1,
    "log": 1,
    "log2": 1,
    "log1p": 1,
    "expm1": 1,
    "sqrt": 1,
    "sin": 1,
    "cos": 1,
    "erf": 1,
    "floor": 1,
    "ceil": 1,
    "pow": 2,
    "maximum": 2,
    "minimum": 2,
    "where": 3,
    "abs": 1,
    "float": 1,
    "int": 1,
}


class ScoreError(ValueError):
    """A formula that cannot be translated; the message names what is wrong with it."""


@dataclass(frozen=True)
class Node:
    """One value of a program. `args` are numbers of earlier values; `value` is a constant, or a leaf's name."""

    op: str  # "const", "leaf", "load:N", an operator, or a function
    args: tuple[int, ...]
    kind: Kind
    value: float | str = 0.0


@dataclass
class Program:
    """Values in the order of their computation, each once."""

    tensors: tuple[str, ...] = ()  # dtypes
    nodes: list[Node] = field(default_factory=list)
    _known: dict[Node, int] = field(default_factory=dict)

    def copy(self) -> Program:
        """A program with the same values, to which others can be added."""
        return Program(self.tensors, list(self.nodes), dict(self._known))

    def node(self, op: str, args: tuple[int, ...], kind: Kind, value: float | str = 0.0) -> int:
        """The number of a value, new unless it is known."""
        new = Node(op, args, kind, value)
        if isinstance(value, float):
            new = Node(op, args, kind, repr(value))  # 0.0 and -0.0 are equal, and nan is not
        if new not in self._known:
            self._known[new] = len(self.nodes)
            self.nodes.append(Node(op, args, kind, value))
        return self._known[new]

    def kind(self, x: int) -> Kind:
        """Type of a value."""
        return self.nodes[x].kind

    def const(self, value: float | int | bool) -> int:
        """A constant of the type of `value`."""
        kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        if kind == "int" and not -(2**31) <= value < 2**31:
            raise ScoreError(f"{value} does not fit int32")
        return self.node("const", (), kind, float(value))

    def leaf(self, name: str) -> int:
        """The score, an index, or an argument of kernels for tiles (`tiled_program`)."""
        return self.node("leaf", (), "int" if name in INDICES else "float", name)

    def load(self, tensor: int, at: tuple[int, ...]) -> int:
        """An element of a captured tensor."""
        if any(self.kind(i) != "int" for i in at):
            raise ScoreError(f"an index of t{tensor} is not int32")
        return self.node(f"load:{tensor}", at, "int" if self.tensors[tensor] == "int32" else "float")

    def constant(self, x: int) -> float | None:
        """The value of a float constant, else None."""
        node = self.nodes[x]
        return float(node.value) if node.op == "const" and node.kind == "float" else None

    def binary(self, op: str, x: int, y: int) -> int:
        """An operator of two values, with the type that torch's promotion gives; factors that are constants merge."""
        kinds = (self.kind(x), self.kind(y))
        if op in ("&", "|", "^", "==", "!=") and kinds == ("bool", "bool"):
            return self.node(op, (x, y), "bool")
        if "bool" in kinds:
            raise ScoreError(f"{op} of a bool is not supported; use where")
        if op in COMPARISONS:
            return self.node(op, (x, y), "bool")
        if op in ("&", "|", "^", "<<", ">>", "//", "%") and kinds != ("int", "int"):
            raise ScoreError(f"{op} of float32 is not supported, only of int32")
        if op in ("//", "%") and self.nodes[y] == Node("const", (), "int", 0.0):
            raise ScoreError(f"{op} by 0 is not supported")
        kind: Kind = "float" if "float" in kinds or op == "/" else "int"
        return self.node(op, (x, y), kind)

    def call(self, name: str, *args: int) -> int:
        """A function of values."""
        if name not in ARITY:
            raise ScoreError(f"{name} is not supported")
        if len(args) != ARITY[name]:
            raise ScoreError(f"{name} takes {ARITY[name]} arguments, got {len(args)}")
        kinds = [self.kind(x) for x in args]
        if name == "where":
            if kinds[0] != "bool":
                raise ScoreError("where: the condition is not a bool")
            if kinds[1] == kinds[2] or "bool" not in kinds[1:]:
                return self.node(name, args, kinds[1] if kinds[1] == kinds[2] else "float")
            raise ScoreError(
                "where: expected two numbers or two bools to choose from, got a bool and a number"
            )
        if name in ("float", "int"):
            return (
                args[0] if kinds[0] == name else self.node(name, args, "float" if name == "float" else "int")
            )
        if "bool" in kinds:
            raise ScoreError(f"{name} of a bool is not supported; use where")
        exact = name in ("maximum", "minimum", "abs") and "float" not in kinds
        return self.node(name, args, "int" if exact else "float")

    def neg(self, x: int) -> int:
        """-x."""
        if self.kind(x) == "bool":
            raise ScoreError("- of a bool is not supported; use where")
        return self.node("neg", (x,), self.kind(x))

    def invert(self, x: int) -> int:
        """Not x for a bool, all bits flipped for an int."""
        if self.kind(x) == "float":
            raise ScoreError("~ of float32 is not supported")
        return self.node("~", (x,), self.kind(x))
