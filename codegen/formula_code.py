"""From a program (formula_program.py) to its text, in C++ for kernels or in Python's syntax for formulas.

`code_of` takes a program and the number of a value, and gives the body of a C++ function that returns it. For

    x = tanh(score); x * x + t0[h]

that is `Code` with

    locals: const float x0 = score_tanh(score);
    result: x0 * x0 + load_float32_1d(p.score0, h)
    calls: score_tanh, load_float32_1d  (helpers, of templates/common/formula.h.jinja)
    names: score, h, p  (the parameters that the function needs)

`Printer` does the work; mask_function.py has printers of its own for masks.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from attnforge.codegen.formula_program import Node, Program
from attnforge.codegen.int_bounds import HELPERS, INT32, int_bounds
from attnforge.codegen.score_tanh import NEAR, NEAREST, Series

COLUMNS = 112  # of a line of C++
WIDTH = 60  # columns of C++ that one value may take before it gets a name
# Functions of float32 by name, as C++ spells them; those of tanh are helpers of templates/common/formula.h.jinja.
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
    """The text of a program. Values that are used more than once get a name; others stand where they are used."""

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
        """k * tanh(a * x) as x * (c0 + c1 x^2 + ...). If x is s * scale, the constants have the powers of scale."""
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
