"""`ScoreMod`: a function of a score, a query and a key, as text that names, JSON and command lines carry.

    softcap: 30.0 * tanh(score / 30.0)
    alibi(t0: float32[1]): score + t0[h] * (kv_idx - q_idx)
    bias(t0: float32[2] grad): score + t0[q_idx, kv_idx]
    documents(t0: int32[1]): t0[q_idx] == t0[kv_idx]

A name, the captured tensors with dtype and number of dimensions, and a formula in Python's syntax and meaning: `score`
is the scaled product of a query and a key in float32; b, h, q_idx and kv_idx are the int32 indices of batch entry,
query head, query and key. Statements `name = formula` may come first, separated by semicolons. From it follow its
derivative by the score and the text of both in C++; and by the elements of the tensors that are marked `grad`, whose
gradients a backward kernel then computes. The function of a mask has no score and gives a bool: is the pair visible?
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from attnforge.codegen.int_bounds import HELPERS, INT32, int_bounds

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

MAX_TENSORS = 4  # members score0 to score3 of Params, of a score and a mask together
MAX_DIMS = 4
COLUMNS = 112  # of a line of C++
WIDTH = 60  # columns of C++ that one value may take before it gets a name
DTYPES = ("float32", "int32", "bfloat16")

Kind = Literal["float", "int", "bool"]

# Operators of formulas by the class of Python's syntax tree.
_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_UNARY = {ast.USub: "neg", ast.Invert: "~"}
# Functions of float32 by name, as C++ spells them; those of tanh are helpers of templates/common/score.h.jinja.
FLOAT_CALLS = {
    "tanh": "score_tanh",
    "tanh_approx": "score_tanh_approx",  # in 16 bits on a GPU one instruction
    "exp": "expf",
    "exp2": "exp2f",
    "log": "logf",
    "log2": "log2f",
    "log1p": "log1pf",
    "expm1": "expm1f",
    "sqrt": "sqrtf",
    "sin": "sinf",
    "cos": "cosf",
    "erf": "erff",
    "floor": "floorf",
    "ceil": "ceilf",
    "pow": "powf",
}
_ARITY = {"pow": 2, "maximum": 2, "minimum": 2, "where": 3, "abs": 1, "float": 1, "int": 1} | {
    name: 1 for name in FLOAT_CALLS if name != "pow"
}


@dataclass(frozen=True)
class Series:
    """tanh(x) / x as a polynomial of x^2 where |x| <= limit (minimax fits by weighted least squares).

    On a GPU these are operations of the FP32 cores in place of two special ones, of which there are 16 a clock.
    """

    suffix: str  # of the functions that use it
    limit: float
    terms: tuple[float, ...]


# Relative errors below 3e-5 and 7e-6. With a cap of 50 the first serves scores up to 10: nearly all tiles.
NEAREST = Series("_nearest", 0.2, (0.9999738, -0.32807635))
NEAR = Series("_near", 1.0, (0.99999309, -0.332980655, 0.130368117, -0.0448175552, 0.00903642247))
# Factors of the score in tanh beyond which the polynomial's coefficients would leave float32.
NEAR_FACTORS = (1e-4, 1e4)
# For the exponents of a cap (`Cap`): relative error below 2.3e-5. Unlike the others it rises everywhere.
CAPPED = Series("_capped", 0.5, (0.99997744, -0.33169181, 0.11521136))
EXACT_TO = 32.0  # exponents up to which that error is small beside the rounding of P to 16 bits
CAPS = (28.0, 2800.0)  # between them the window of row maxima is wide, and no exponent is large (large.cuh)
NEAR_NODES = 16  # values of the longest formula that gets a function of its own for small scores


# Operations whose results are finite where their arguments are, but for overflow.
_FINITE = ("const", "leaf", "+", "-", "*", "neg", "tanh", "tanh_approx", "sin", "cos", "where", "abs", "float",
           *_COMPARE.values())  # fmt: skip


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
        """The score, an index, or an argument of `_tiled`."""
        return self.node("leaf", (), "int" if name in Formula.leaves else "float", name)

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
        if op in _COMPARE.values():
            return self.node(op, (x, y), "bool")
        if op in ("&", "|", "^", "<<", ">>", "//", "%") and kinds != ("int", "int"):
            raise ScoreError(f"{op} of float32 is not supported, only of int32")
        if op in ("//", "%") and self.nodes[y] == Node("const", (), "int", 0.0):
            raise ScoreError(f"{op} by 0 is not supported")
        kind: Kind = "float" if "float" in kinds or op == "/" else "int"
        return self.node(op, (x, y), kind)

    def call(self, name: str, *args: int) -> int:
        """A function of values."""
        if name not in _ARITY:
            raise ScoreError(f"{name} is not supported")
        if len(args) != _ARITY[name]:
            raise ScoreError(f"{name} takes {_ARITY[name]} arguments, got {len(args)}")
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


# ---- The text


@dataclass(frozen=True)
class _Header:
    name: str
    tensors: tuple[tuple[str, int], ...]  # dtype and number of dimensions
    formula: str
    wanted: tuple[int, ...] = ()  # the tensors whose gradients are


_HEADER = re.compile(r"\s*(?P<name>[a-z][a-z0-9_]*)\s*(?:\((?P<tensors>[^)]*)\))?\s*:(?P<formula>.*)")
_TENSOR = re.compile(r"t(\d):\s*(\w+)\[(\d)\](\s+grad)?")


class Formula(str):
    """The text of a function of a pair, "" for none; see the module. `parsed` raises ScoreError if it is not one."""

    argument: ClassVar[str]  # what errors call it
    leaves: ClassVar[tuple[str, ...]] = ("b", "h", "q_idx", "kv_idx")  # what it may read beside tensors
    gives_bool: ClassVar[bool] = False  # or a number

    @cached_property
    def header(self) -> _Header:
        """Its parts, unchecked but for their form."""
        if not self:
            return _Header("", (), "")
        match = _HEADER.fullmatch(self)
        if match is None:
            raise ScoreError(f"{self.argument}: expected 'name: formula', got {str(self)!r}")
        declared = [text.strip() for text in (match["tensors"] or "").split(",") if text.strip()]
        found = [_TENSOR.fullmatch(text) for text in declared]
        for number, (text, item) in enumerate(zip(declared, found, strict=True)):
            if (
                item is None
                or int(item[1]) != number
                or item[2] not in DTYPES
                or not 1 <= int(item[3]) <= MAX_DIMS
            ):
                raise ScoreError(f"{self.argument}: expected 't{number}: dtype[dimensions]', got {text!r}")
        if len(found) > MAX_TENSORS:
            raise ScoreError(
                f"{self.argument}: captures {len(found)} tensors, at most {MAX_TENSORS} are supported"
            )
        items = [item for item in found if item is not None]
        wanted = tuple(i for i, item in enumerate(items) if item[4])
        if wanted and self.gives_bool:
            raise ScoreError(f"{self.argument}: the tensors of a mask have no gradient")
        if any(items[i][2] == "int32" for i in wanted):
            raise ScoreError(f"{self.argument}: a tensor of int32 has no gradient")
        tensors = tuple((item[2], int(item[3])) for item in items)
        return _Header(match["name"], tensors, match["formula"].strip(), wanted)

    @property
    def name(self) -> str:
        """What it is called, e.g. `softcap`."""
        return self.header.name

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]:
        """dtype and number of dimensions of each captured tensor."""
        return self.header.tensors

    @property
    def wanted(self) -> tuple[int, ...]:
        """The captured tensors whose gradients a backward computes."""
        return self.header.wanted

    @property
    def formula(self) -> str:
        """What follows the colon."""
        return self.header.formula

    @property
    def label(self) -> str:
        """What slugs have of it: its name, and a digest that tells its formula."""
        digest = hashlib.sha256(self.encode()).hexdigest()[:8]
        return f"{re.sub('[^a-z0-9]', '', self.name)[:16]}{digest}"

    @cached_property
    def parsed(self) -> tuple[Program, int]:
        """The program of the formula, and the number of its result."""
        program = Program(tuple(dtype for dtype, _ in self.tensors))
        result = _Reader(program, self).read(self.formula)
        if (program.kind(result) == "bool") != self.gives_bool:
            got, expected = (
                ("a bool", "a number") if program.kind(result) == "bool" else ("a number", "a bool")
            )
            raise ScoreError(f"{self.argument}: the formula gives {got}, expected {expected}")
        return program, result

    @classmethod
    def of(cls, name: str, tensors: tuple[tuple[str, int], ...], program: Program, result: int) -> Self:
        """The text of a program; the same for programs that compute the same in the same order."""
        printer = Printer(program, (result,), cpp=False)
        (end,) = printer.print()
        declared = ", ".join(f"t{i}: {dtype}[{dims}]" for i, (dtype, dims) in enumerate(tensors))
        return cls(f"{name}{f'({declared})' if declared else ''}: {'; '.join((*printer.lines, end))}")


@dataclass(frozen=True)
class Tier:
    """A polynomial in the place of tanh, and the |score| up to which it is."""

    series: Series
    limit: float


@dataclass(frozen=True)
class Lines:
    """What a score adds, with x = kv_idx - q_idx - kink: below * x + value where x < 0, else above * x + value.

    All pairs of a batch entry and head share the four. Without a kink x is kv_idx - q_idx, and the slopes are equal.
    """

    below: Code
    above: Code
    value: Code
    kink: Code | None


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


class ScoreMod(Formula):
    """The text of a function of a score."""

    argument = "score"
    leaves = ("score", *Formula.leaves)

    @cached_property
    def gradient(self) -> tuple[Program, int]:
        """The program of the derivative by the score, and the number of its result."""
        program, result = self.parsed
        copy = Program(program.tensors, list(program.nodes), dict(program._known))
        return copy, derivative(copy, result)

    @property
    def slope_is_one(self) -> bool:
        """Is the derivative 1 everywhere, as that of every bias? Then the function only adds to a score.

        Not where a step of the score has a part, as in score + floor(score), whose derivative is 1, too: the sm90a
        backward takes f(S) - lse for f(S - lse).
        """
        program, result = self.gradient
        steps = any(node.kind != "float" or node.op in ("floor", "ceil") for node in self.moved)
        return program.constant(result) == 1.0 and not steps

    @cached_property
    def moved(self) -> tuple[Node, ...]:
        """The values that depend on the score."""
        nodes = self.parsed[0].nodes
        moved: list[bool] = []
        for node in nodes:
            moved.append(node.value == "score" if node.op == "leaf" else any(moved[i] for i in node.args))
        return tuple(node for node, moves in zip(nodes, moved, strict=True) if moves)

    @cached_property
    def reads_by_pair(self) -> bool:
        """Does it depend on the query or the key which element of a captured tensor is read?"""
        by_pair: list[bool] = []
        for node in self.parsed[0].nodes if self else ():
            leaf = node.op == "leaf" and node.value in ("q_idx", "kv_idx")
            by_pair.append(leaf or any(by_pair[i] for i in node.args))
            if by_pair[-1] and node.op.startswith("load:"):
                return True
        return False

    @property
    def adds(self) -> bool:
        """Is it the score plus something that does not depend on it?"""
        return self.slope_is_one and not any(read.reads_score for read in self.reads)

    @cached_property
    def lines(self) -> Lines | None:
        """What is added to the score if it consists of lines in kv_idx - q_idx, as ALiBi's; None for other formulas."""
        if not self:
            return None
        program, result = self.parsed  # not its derivative, which a forward does without
        terms = _terms(program, result, 1, "float")
        scores = [(sign, x) for sign, x in terms if program.nodes[x].value == "score"]
        if len(scores) != 1 or scores[0][0] != 1:
            return None
        sums = Program(program.tensors, list(program.nodes), dict(program._known))
        total = sums.const(0.0)
        for sign, x in terms:
            if (sign, x) not in scores:
                total = _sum(sums, "+" if sign == 1 else "-", total, sums.call("float", x))
        tiled, added = _tiled(sums, total)
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

    @cached_property
    def slope_is_finite(self) -> bool:
        """Does the derivative's form show that it is neither infinite nor NaN for any score that is not large?"""
        program, result = self.gradient
        waiting, seen = [result], set[int]()
        while waiting:
            x = waiting.pop()
            node = program.nodes[x]
            if node.op not in _FINITE and not (node.op == "/" and program.constant(node.args[1])):
                return False
            waiting += [a for a in node.args if a not in seen]
            seen.update(node.args)
        return True

    @cached_property
    def unit(self) -> float:
        """The factor c > 0 of a formula c * ..., which a softmax's exponent takes at no cost; 1.0 if there is none."""
        program, result = self.parsed
        return _unit(program, result)[0]

    def code(self, tiled: bool = False) -> Code:
        """The function in C++. `tiled`: divided by `unit`, and from the arguments of `_tiled`."""
        return code_of(*(_tiled(self.parsed[0], self._in_units) if tiled else self.parsed), tiled=tiled)

    def gradient_code(self, tiled: bool = False) -> Code:
        """Its derivative by the score in C++."""
        return code_of(*(_tiled(*self.gradient) if tiled else self.gradient), tiled=tiled)

    @cached_property
    def steps(self) -> tuple[Code, ...]:
        """Indices of captured tensors, such as a clamped kv_idx - q_idx, of which most tiles have one value only.

        Each is a function of kv_idx - q_idx that nowhere turns: it has one value in a tile if it is the same at the
        least and the greatest difference. Empty unless the formula reads q_idx and kv_idx in these indices only.
        """
        program, result = self.parsed
        found = _steps(*_tiled(program, result))
        return tuple(code_of(found[0], x) for x in found[1])

    @property
    def _in_units(self) -> int:
        return _unit(*self.parsed)[1]

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """The elements, of tensors whose gradients are wanted, that the formula reads."""
        if not self.wanted:
            return ()
        program, result = self.parsed
        loads = [x for x, node in enumerate(program.nodes) if node.op.startswith("load:")]
        return tuple(
            _read_of(program, result, x) for x in loads if int(program.nodes[x].op[5:]) in self.wanted
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """`Read.axes` of each tensor; "-" where no gradient is wanted, or the formula reads it in several places."""
        found: dict[int, list[str]] = {}
        for read in self.reads:
            found.setdefault(read.tensor, []).append(read.axes)
        places = (found.get(i, []) for i in range(len(self.tensors)))
        return tuple(axes[0] if len(axes) == 1 else "-" for axes in places)

    @property
    def own_elements(self) -> bool:
        """May no two pairs of a call read the same element of a tensor whose gradient is wanted?"""
        return any({"q", "k"} <= set(axes) for axes in self.axes)

    @cached_property
    def near(self) -> float | None:
        """The |score| up to which every tanh of the formula is within NEAR.limit; None if there is no such number.

        That takes a short formula with tanh, of the score times constants only: kernels hold it twice.
        """
        if not self:
            return None
        program, _ = self.parsed
        factors = [_factor(program, x.args[0]) for x in program.nodes if x.op == "tanh"]
        known = [abs(x) for x in factors if x is not None]
        low, high = NEAR_FACTORS
        if (
            not 0 < len(factors) == len(known)
            or len(program.nodes) > NEAR_NODES
            or not all(low <= x <= high for x in known)
        ):
            return None
        return NEAR.limit / max(known)

    @cached_property
    def cap(self) -> Cap | None:
        """The score as a cap; None if it is none, or one that the polynomial does not serve."""
        if self.near is None:
            return None
        value, x = _unit(*self.parsed)
        node = self.parsed[0].nodes[x]
        if node.op != "tanh" or not CAPS[0] <= value <= CAPS[1]:
            return None
        factor = _factor(self.parsed[0], node.args[0])
        return Cap(value, factor) if factor and factor > 0.0 else None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The polynomials that take the place of tanh, each with the |score| up to which it does; the widest first."""
        if self.near is None:
            return ()
        return tuple(Tier(series, self.near * series.limit / NEAR.limit) for series in (NEAR, NEAREST))

    def near_code(self, merged: bool, series: Series = NEAR, tiled: bool = False) -> Code:
        """`code` where |score| <= near. `merged`: factors of tanh go into its polynomial; else `tanh` stays shared."""
        program, result = self.parsed
        near = _near(program, self._in_units if tiled else result, merged, series)
        return code_of(*(_tiled(*near) if tiled else near), tiled=tiled)

    def near_gradient_code(self, series: Series = NEAR, tiled: bool = False) -> Code:
        """`gradient_code` where |score| <= near."""
        near = _near(*self.gradient, merged=False, series=series)
        return code_of(*(_tiled(*near) if tiled else near), tiled=tiled)


@dataclass(frozen=True)
class Read:
    """An element of a captured tensor that a formula reads, for its gradient."""

    tensor: int
    place: Code  # its offset in the gradient's elements
    slope: Code  # the derivative of the formula by it
    shared: bool  # whether all pairs of a head and batch entry read the same element
    by_distance: bool  # whether all pairs of a head and batch entry with the same kv_idx - q_idx do
    stepped: bool  # whether pairs that agree in `ScoreMod.steps` do
    apart: bool  # whether no two pairs of a head and batch entry do
    axes: str  # of each axis the leaf that indexes it: b, h, q(_idx) or k(v_idx), . for another index

    @property
    def held(self) -> bool:
        """Do most tiles read one element, the same one after the other?"""
        return self.shared or self.stepped

    @property
    def reads_score(self) -> bool:
        """Does the derivative depend on the score?"""
        return "score" in self.slope.names


def _read_of(program: Program, result: int, x: int) -> Read:
    copy = Program(program.tensors, list(program.nodes), dict(program._known))
    slope = derivative(copy, result, by=x)
    node = program.nodes[x]
    tensor = int(node.op[5:])
    place = copy.node(f"place:{tensor}", node.args, "int")
    code = code_of(copy, place)
    if "score" in code.names:  # kernels compute places without it
        raise ScoreError(
            f"score: the gradient of t{tensor}, of which an index depends on the score, is not supported"
        )
    shared = not code.names & {"q_idx", "kv_idx"}
    by_distance = not shared and all(_goes_by_distance(program, a) for a in node.args)
    stepped = not shared and all(_direction(program, a) is not None for a in node.args)
    stepped = stepped and bool(_steps(*_tiled(program, result))[1])
    apart = {"q_idx", "kv_idx"} <= {program.nodes[a].value for a in node.args}
    letters = (str(program.nodes[a].value)[0] if program.nodes[a].op == "leaf" else "." for a in node.args)
    return Read(tensor, code, code_of(copy, slope), shared, by_distance, stepped, apart, "".join(letters))


class _Reader:
    """From the text of a formula to a program."""

    def __init__(self, program: Program, text: Formula) -> None:
        self.program, self.argument, self.leaves = program, text.argument, text.leaves
        self.dims = {f"t{i}": (i, dims) for i, (_, dims) in enumerate(text.tensors)}
        self.names: dict[str, int] = {}

    def read(self, formula: str) -> int:
        """The number of the value of a formula. Raises ScoreError."""
        try:
            return self.lines(formula)
        except (RecursionError, MemoryError):
            raise ScoreError(
                f"{self.argument}: a formula of {len(formula)} characters is nested too deeply; give parts of it names"
            ) from None

    def lines(self, formula: str) -> int:
        """The number of the value of the last line."""
        try:
            lines = ast.parse(formula).body
        except SyntaxError as error:
            raise ScoreError(f"{self.argument}: {formula!r} cannot be parsed: {error.msg}") from None
        for line in lines[:-1]:
            if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
                raise ScoreError(f"{self.argument}: expected 'name = formula', got {ast.unparse(line)!r}")
            self.names[line.targets[0].id] = self.value(line.value)
        if not lines or not isinstance(lines[-1], ast.Expr):
            raise ScoreError(f"{self.argument}: {formula!r} must end in an expression")
        return self.value(lines[-1].value)

    def value(self, x: ast.expr) -> int:
        """The number of the value of an expression."""
        p = self.program
        match x:
            case ast.Constant(value=bool() | int() | float() as value):
                return p.const(value)
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Name(id=name) if name in self.leaves:
                return p.leaf(name)
            case ast.Name(id="inf" | "nan" as name):
                return p.const(float(name))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return p.binary(_BINARY[type(op)], self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return p.binary(_COMPARE[type(op)], self.value(left), self.value(right))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return p.const(-value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                value = self.value(operand)
                return p.neg(value) if isinstance(op, ast.USub) else p.invert(value)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return p.call(name, *(self.value(a) for a in args))
            case ast.Subscript(value=ast.Name(id=name), slice=at) if name in self.dims:
                return self.element(name, list(at.elts) if isinstance(at, ast.Tuple) else [at])
        raise ScoreError(f"{self.argument}: {ast.unparse(x)!r} is not supported in a formula")

    def element(self, name: str, at: list[ast.expr]) -> int:
        tensor, dims = self.dims[name]
        if len(at) != dims:
            raise ScoreError(f"{self.argument}: {name} has {dims} dimensions, but {len(at)} indices")
        return self.program.load(tensor, tuple(self.value(i) for i in at))


# ---- The derivative


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
            return times(p, da, times(p, exponent, power))
    assert da is not None, node.op
    if node.op in ("floor", "ceil", "int"):
        return None
    if node.op not in _RULES:
        raise ScoreError(f"score: the derivative of {node.op} is not supported")
    return times(p, da, _RULES[node.op](p, a, x))


def times(p: Program, x: int, y: int) -> int:
    """x * y with constant factors merged."""
    x, y = (y, x) if p.constant(y) is not None else (x, y)
    factor, inner = p.constant(x), p.nodes[y]
    if factor is not None and inner.op == "*" and (other := p.constant(inner.args[0])) is not None:
        return times(p, p.const(_near_one(factor * other)), inner.args[1])
    if factor is not None and p.constant(y) is not None:
        return p.const(_near_one(factor * float(inner.value)))
    return y if factor == 1.0 else p.binary("*", x, y)


def _near_one(x: float) -> float:
    return 1.0 if abs(x - 1.0) < 1e-12 else x


def _slope_of_product(p: Program, node: Node, slopes: list[int | None]) -> int:
    (a, b), (da, db) = node.args, slopes
    if node.op == "*":
        terms = [times(p, d, x) for d, x in ((da, b), (db, a)) if d is not None]
        return terms[0] if len(terms) == 1 else p.binary("+", *terms)
    if db is None:
        assert da is not None
        divisor = p.constant(b)
        return p.binary("/", da, b) if not divisor else times(p, da, p.const(1.0 / divisor))
    by_divisor = p.neg(p.binary("/", times(p, db, a), p.binary("*", b, b)))
    return by_divisor if da is None else p.binary("+", p.binary("/", da, b), by_divisor)


def _slope_of_extreme(p: Program, node: Node, slopes: list[int | None]) -> int:
    """As torch: both arguments share the derivative where they are equal."""
    a, b = (p.call("float", x) for x in node.args)  # as `node` has them: `_steps` relies on that
    da, db = (p.const(0.0) if s is None else s for s in slopes)
    first = p.binary(">" if node.op == "maximum" else "<", a, b)
    shared = times(p, p.const(0.5), p.binary("+", da, db))
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
    "exp2": lambda p, a, x: times(p, p.const(math.log(2.0)), x),
    "log": lambda p, a, x: _over(p, 1.0, a),
    "log2": lambda p, a, x: _over(p, 1.0 / math.log(2.0), a),
    "log1p": lambda p, a, x: _over(p, 1.0, p.binary("+", p.const(1.0), a)),
    "expm1": lambda p, a, x: p.binary("+", x, p.const(1.0)),
    "sqrt": lambda p, a, x: _over(p, 0.5, x),
    "sin": lambda p, a, x: p.call("cos", a),
    "cos": lambda p, a, x: p.neg(p.call("sin", a)),
    "erf": lambda p, a, x: times(
        p, p.const(2.0 / math.sqrt(math.pi)), p.call("exp", p.neg(p.binary("*", a, a)))
    ),
    "abs": lambda p, a, x: _sign(p, a),
    "float": lambda p, a, x: p.const(1.0),
}


# ---- tanh of small scores


def _factor(p: Program, x: int) -> float | None:
    """The constant c of a value that is c * score, else None."""
    node = p.nodes[x]
    if node.op == "leaf":
        return 1.0 if node.value == "score" else None
    if node.op not in ("*", "/", "neg"):
        return None
    if node.op == "neg":
        inner = _factor(p, node.args[0])
        return None if inner is None else -inner
    a, b = node.args
    constant = p.constant(b)
    if constant is None and node.op == "*":
        a, b, constant = b, a, p.constant(a)
    inner = _factor(p, a)
    if inner is None or constant is None or (node.op == "/" and constant == 0.0):
        return None
    return inner * constant if node.op == "*" else inner / constant


def _near(p: Program, result: int, merged: bool, series: Series = NEAR) -> tuple[Program, int]:
    """A program with each tanh(a * score) as `tanh_near(score, a, k)`: k times the polynomial, 1 unless `merged`."""
    op = f"tanh{series.suffix}"

    near, places = Program(p.tensors), dict[int, int]()
    users = [node for node in p.nodes if any(p.nodes[a].op == "tanh" for a in node.args)]

    def polynomial(x: int, k: float) -> int:
        a = _factor(p, p.nodes[x].args[0])
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


# ---- What the kernels of tiles hoist


def _unit(p: Program, result: int) -> tuple[float, int]:
    """(c, x) of a result c * x with a constant c > 0, else (1.0, result)."""
    node = p.nodes[result]
    if node.op == "*":
        for factor, x in (node.args, node.args[::-1]):
            c = p.constant(factor)
            if c is not None and 0.0 < c < math.inf and p.kind(x) == "float":
                return c, x
    return 1.0, result


def _tiled(p: Program, result: int) -> tuple[Program, int]:
    """The same value from arguments that a kernel has at hand for the elements of a tile.

    s, scale: score is s * scale; products of constants with it are s times a number that no element changes.
    distance: kv_idx - q_idx as float32, where an integer that depends on this difference only becomes a float: it is a
        sum of a tile's number and an element's constant, without conversions. Exact below 2^24.
    """
    tiled = Program(p.tensors)
    places = dict[int, int]()

    def factor(x: int) -> int | None:
        """x of the form c * score."""
        c = _factor(p, x)
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


def _line(
    p: Program, x: int, origin: int, side: int, kinks: dict[int, None] | None = None
) -> tuple[int, int] | None:
    """(a, c) of a value a * (distance - origin) + c of a program of `_tiled`, None if pairs of a head differ in a or c.

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


def _terms(p: Program, x: int, sign: int, kind: Kind = "int") -> list[tuple[int, int]]:
    """The signs and numbers of the values of a kind whose sum x is."""
    node = p.nodes[x]
    if node.kind != kind or node.op not in ("+", "-", "neg"):
        return [(sign, x)]
    if node.op == "neg":
        return _terms(p, node.args[0], -sign, kind)
    a, b = node.args
    return _terms(p, a, sign, kind) + _terms(p, b, sign if node.op == "+" else -sign, kind)


def _index_terms(p: Program, x: int) -> tuple[int, int, list[tuple[int, int]]]:
    """How often q_idx and kv_idx are in an integer as terms of a sum, with signs, and the other `_terms`."""
    terms = _terms(p, x, 1)
    q, kv = (sum(sign for sign, t in terms if p.nodes[t].value == name) for name in ("q_idx", "kv_idx"))
    return q, kv, [(sign, t) for sign, t in terms if p.nodes[t].value not in ("q_idx", "kv_idx")]


def _steps(p: Program, result: int) -> tuple[Program, tuple[int, ...]]:
    """The clamped indices of loads in a program of `_tiled`, none if something else depends on q_idx or kv_idx."""
    waiting, found = [result], dict[int, None]()
    while waiting:
        node = p.nodes[waiting.pop()]
        if node.op == "leaf" and node.value in ("q_idx", "kv_idx"):
            return p, ()
        loads = node.op.startswith("load:")
        clamped = [a for a in node.args if loads and _direction(p, a) and _clamps(p, a)]
        found.update(dict.fromkeys(clamped))
        waiting += [a for a in node.args if a not in clamped]
    return p, tuple(found)


def _direction(p: Program, x: int) -> int | None:
    """1 if an integer never falls as kv_idx - q_idx grows, -1 if it never grows, 0 if it is constant, None: neither."""
    node = p.nodes[x]
    if node.op in ("minimum", "maximum"):
        found = [_direction(p, a) for a in node.args]
    else:
        q, kv, others = _index_terms(p, x)
        if q != -kv:
            return None
        if [t for _, t in others] == [x]:
            return 0 if node.op == "const" or node.value in ("b", "h") else None
        rest = [(sign, _direction(p, t)) for sign, t in others]
        found = [(kv > 0) - (kv < 0), *(None if d is None else sign * d for sign, d in rest)]
    moving = {d for d in found if d != 0}
    return 0 if not moving else moving.pop() if len(moving) == 1 else None


def _goes_by_distance(p: Program, x: int) -> bool:
    """Does a value depend on q_idx and kv_idx by their difference only?"""
    if p.nodes[x].value in ("q_idx", "kv_idx"):
        return False
    q, kv, others = _index_terms(p, x)
    inner = p.nodes[x].args if [t for _, t in others] == [x] else [t for _, t in others]
    return q == -kv and all(_goes_by_distance(p, t) for t in inner)


def _clamps(p: Program, x: int) -> bool:
    return p.nodes[x].op in ("minimum", "maximum") or any(_clamps(p, a) for a in p.nodes[x].args)


# ---- C++ and Python text of a program


def wrapped(statements: Iterable[str]) -> list[str]:
    """Lines of C++ that are not too long."""
    return [line for text in statements for line in textwrap.wrap(text, COLUMNS, subsequent_indent="    ")]


@dataclass(frozen=True)
class Code:
    """The body of a function: local values, and the result."""

    locals: tuple[str, ...]  # `const float t = ...;`
    result: str
    calls: frozenset[str]  # names of helpers that it calls
    names: frozenset[str]  # the score and indices that it reads, and "p" if it reads tensors

    @property
    def lines(self) -> list[str]:
        """The body, without indentation."""
        return wrapped((*self.locals, f"return {self.result};"))


class Printer:
    """Text of a program: values that are used more than once get a name, others are written where they are used."""

    reciprocals = True  # x / c as x * (1 / c), which is cheaper and may differ in the last bit

    def __init__(
        self,
        program: Program,
        results: tuple[int, ...],
        cpp: bool,
        first: int = 0,
        tiled: bool = False,
        given: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """`given`: the text of values that are not computed here."""
        self.p, self.results, self.cpp, self.first, self.tiled = program, results, cpp, first, tiled
        self.given = given
        self.bounds = int_bounds(program.nodes)
        self.uses: dict[int, int] = {}
        self.text: dict[int, tuple[str, bool]] = {}  # and whether it must be put into parentheses
        self.lines: list[str] = []
        self.calls: set[str] = set()
        waiting = list(results)
        while waiting:
            x = waiting.pop()
            self.uses[x] = self.uses.get(x, 0) + 1
            if self.uses[x] == 1:
                waiting += self.children(x)

    def children(self, x: int) -> tuple[int, ...]:
        """The values whose text that of a value needs."""
        return () if x in self.given else self.p.nodes[x].args

    def print(self) -> tuple[str, ...]:
        """The text of the results, which the statements in `lines` precede."""
        for x in sorted(self.uses):
            text, loose = self.spell(x)
            shared = self.uses[x] > 1 or (self.cpp and len(text) > WIDTH and x not in self.results)
            if shared and x not in self.given and self.p.nodes[x].op not in ("const", "leaf"):
                name = f"x{len(self.lines)}"
                self.lines.append(
                    f"const {self.type_of(x)} {name} = {text};" if self.cpp else f"{name} = {text}"
                )
                text, loose = name, False
            self.text[x] = (text, loose)
        return tuple(self.plain(x) for x in self.results)

    @property
    def names(self) -> frozenset[str]:
        """The score and indices that the text reads, and "p" if it reads tensors."""
        used = [self.p.nodes[x] for x in self.uses if x not in self.given]
        names = {str(node.value) for node in used if node.op == "leaf"}
        return frozenset(names | {"p" for node in used if node.op.startswith(("load:", "place:"))})

    def finish(self) -> Code:
        """The body of a function of one result."""
        (text,) = self.print()
        return Code(tuple(self.lines), text, frozenset(self.calls), self.names)

    def type_of(self, x: int) -> str:
        """The type of a local value in C++."""
        return self.p.kind(x)

    def inner(self, x: int) -> str:
        text, loose = self.text[x]
        return f"({text})" if loose else text

    def plain(self, x: int) -> str:
        return self.text[x][0]

    def spell(self, x: int) -> tuple[str, bool]:
        """The text of a value, and whether it must be put into parentheses inside of another."""
        node = self.p.nodes[x]
        if x in self.given:
            return self.given[x], False
        if node.op == "const":
            return self.constant(node), False
        if node.op == "leaf":
            return str(node.value), False
        if node.op.startswith("load:"):
            return self.load(int(node.op[5:]), node.args), False
        if node.op.startswith("place:"):
            indices = ", ".join(self.plain(i) for i in node.args)
            self.calls.add(f"place_{len(node.args)}d")
            return f"place_{len(node.args)}d(p.dscore{node.op[6:]}, {indices})", False
        if self.cpp and (helper := self.helper(x)) is not None:
            self.calls.add(helper)
            return f"{helper}({', '.join(self.plain(a) for a in node.args)})", False
        if node.op in ("neg", "~"):
            sign = "-" if node.op == "neg" else "!" if self.cpp and node.kind == "bool" else "~"
            inner = self.inner(node.args[0])
            return f"{sign}({inner})" if inner[0] == sign == "-" else f"{sign}{inner}", True
        if not node.op.isidentifier():
            return self.infix(node)
        return self.function(node)

    def helper(self, x: int) -> str | None:
        """What C++ calls in place of an operation that it does not have, or not for all operands."""
        op = self.p.nodes[x].op
        if op in ("//", "%"):
            return "floor_div" if op == "//" else "floor_mod"
        return HELPERS[op] if x in self.bounds.undefined else None

    def constant(self, node: Node) -> str:
        value = float(node.value)
        if node.kind != "float":
            name = str(int(value)) if node.kind == "int" else str(bool(value))
            if self.cpp and value == INT32[0]:
                return "(-2147483647 - 1)"  # -2147483648 is a long
            return name.lower() if self.cpp else name
        if not math.isfinite(value):
            text = "nan" if math.isnan(value) else "-inf" if value < 0 else "inf"
            if self.cpp:
                text = {"nan": '__builtin_nanf("")', "inf": "__builtin_inff()", "-inf": "-__builtin_inff()"}[
                    text
                ]
            return text
        return f"{value!r}f" if self.cpp else repr(value)

    def load(self, tensor: int, at: tuple[int, ...]) -> str:
        if not self.cpp:
            return f"t{tensor}[{', '.join(self.plain(i) for i in at)}]"
        indices = ", ".join(self.index(i) for i in at)
        name = f"load_{self.p.tensors[tensor]}_{len(at)}d"
        self.calls.add(name)
        return f"{name}(p.score{self.first + tensor}, {indices})"

    def index(self, x: int) -> str:
        """For tiles one that is never negative is unsigned: what it takes to count from the end is left out."""
        return f"static_cast<unsigned>({self.plain(x)})" if self.tiled and self.natural(x) else self.plain(x)

    def natural(self, x: int, leaves: tuple[str, ...] = ("kv_idx",)) -> bool:
        """Is it an index of these, or computed and never negative?"""
        node = self.p.nodes[x]
        return node.value in leaves if node.op in ("leaf", "const") else self.bounds.ranges[x][0] >= 0

    def infix(self, node: Node) -> tuple[str, bool]:
        x, y = node.args
        if self.cpp and node.op == "/":
            divisor = self.p.constant(y) if self.reciprocals else None
            if divisor is not None and divisor:
                return f"{self.inner(x)} * (1.0f / {self.inner(y)})", True
            if self.p.kind(x) == self.p.kind(y) == "int":
                return f"static_cast<float>({self.plain(x)}) / {self.inner(y)}", True
        sums = node.op in ("+", "-")
        tight = ("*", "/") if sums else ()
        left = (
            self.plain(x) if self.p.nodes[x].op in (*tight, *(("+", "-") if sums else ())) else self.inner(x)
        )
        right = self.plain(y) if self.p.nodes[y].op in tight else self.inner(y)
        if self.cpp and node.kind == "bool" and node.op in ("&", "|"):
            return f"{left} {node.op * 2} {right}", True
        return f"{left} {node.op} {right}", True

    def function(self, node: Node) -> tuple[str, bool]:
        args = [self.plain(a) for a in node.args]
        if not self.cpp:
            return f"{node.op}({', '.join(args)})", False
        if node.op == "where":
            condition, *rest = (self.inner(a) for a in node.args)
            return f"{condition} ? {rest[0]} : {rest[1]}", True
        if node.op in ("float", "int"):
            return f"static_cast<{node.op}>({args[0]})", False
        if node.op in (f"tanh{NEAR.suffix}", f"tanh{NEAREST.suffix}"):
            return self.polynomial(node, NEAR if node.op.endswith(NEAR.suffix) else NEAREST), False
        if node.op in ("maximum", "minimum", "abs"):
            if node.op == "abs":
                return f"{'fabsf' if node.kind == 'float' else 'abs'}({args[0]})", False
            name = f"{node.op}_{node.kind}"
        else:
            name = FLOAT_CALLS[node.op]
        self.calls.add(name)
        return f"{name}({', '.join(args)})", False

    def polynomial(self, node: Node, series: Series) -> str:
        """k * tanh(a * x) as x * (c0 + c1 x^2 + ...); of x = s * scale with the powers of scale in the constants."""
        x, a, k, *scales = node.args
        factor, times_ = (float(self.p.nodes[i].value) for i in (a, k))
        terms = (times_ * c * factor ** (2 * i + 1) for i, c in enumerate(series.terms))
        name = f"score_tanh{series.suffix}"
        self.calls.add(name)
        words = [f"{float(format(c, '.9g'))!r}f" for c in terms]
        if scales:
            words = [f"{word} * {' * '.join(['scale'] * (2 * i + 1))}" for i, word in enumerate(words)]
        return f"{name}({self.plain(x)}, {', '.join(words)})"


def code_of(program: Program, result: int, first: int = 0, tiled: bool = False) -> Code:
    """The body of a function that gives a value of a program."""
    return Printer(program, (result,), cpp=True, first=first, tiled=tiled).finish()
