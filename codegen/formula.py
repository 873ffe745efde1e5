"""`Formula`: a function of a pair of a query and a key, as text that names, JSON and command lines carry.

    alibi(t0: float32[1]): score + t0[h] * (kv_idx - q_idx)
    bias(t0: float32[2] grad): score + t0[q_idx, kv_idx]
    documents(t0: int32[1]): t0[q_idx] == t0[kv_idx]

A name, the captured tensors with dtype and number of dimensions, and a formula in Python's syntax and meaning: b, h,
q_idx and kv_idx are the int32 indices of batch entry, query head, query and key. Statements `name = formula` may come
first, separated by semicolons. `grad` marks tensors whose gradients a backward kernel computes.

`ScoreMod` (score.py) is the function of a score, `MaskMod` (mask_function.py) that of a mask. From the text,
`Formula.parsed` gives a program (formula_program.py); from a program, `Formula.of` gives the text.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from attnforge.codegen.formula_code import Printer
from attnforge.codegen.formula_program import INDICES, Program, ScoreError

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

MAX_TENSORS = 4  # members score0 to score3 of Params, of a score and a mask together
MAX_DIMS = 4
DTYPES = ("float32", "int32", "bfloat16")

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


@dataclass(frozen=True)
class _Header:
    """The parts of a text."""

    name: str
    tensors: tuple[tuple[str, int], ...]  # dtype and number of dimensions
    formula: str
    wanted: tuple[int, ...] = ()  # the tensors that are marked `grad`


_HEADER = re.compile(r"\s*(?P<name>[a-z][a-z0-9_]*)\s*(?:\((?P<tensors>[^)]*)\))?\s*:(?P<formula>.*)")
_TENSOR = re.compile(r"t(\d):\s*(\w+)\[(\d)\](\s+grad)?")


class Formula(str):
    """The text of a function of a pair, "" for none; see the module. `parsed` raises ScoreError if it is not one."""

    argument: ClassVar[str]  # what errors call it
    leaves: ClassVar[tuple[str, ...]] = INDICES  # what it may read beside tensors
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
        """The number of the value of `name[at]`."""
        tensor, dims = self.dims[name]
        if len(at) != dims:
            raise ScoreError(f"{self.argument}: {name} has {dims} dimensions, but {len(at)} indices")
        return self.program.load(tensor, tuple(self.value(i) for i in at))
