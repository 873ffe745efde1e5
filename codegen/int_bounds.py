"""Which values the integers of a formula may have: kernels write `x + y` where that fits int32 for sure.

Signed overflow is undefined in C++, and compilers use that: one formula could mean two things in two kernels.
Where a result may leave int32, the text calls a helper of templates/common/formula.h.jinja, which wraps around as
torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Range = tuple[int, int]  # the least value and the greatest

INT32: Range = (-(2**31), 2**31 - 1)
# Of an index, also of a query or key behind the last one in its tile; set_score of
# runtime/native/arguments.h has the limits.
INDEX: Range = (0, 2**30 - 1)

# Operations that are undefined for some operands, and the helpers that are not.
HELPERS = {
    "+": "wrapping_add",
    "-": "wrapping_sub",
    "*": "wrapping_mul",
    "neg": "wrapping_neg",
    "abs": "wrapping_abs",
    "<<": "shift_left",
    ">>": "shift_right",
}


class Value(Protocol):
    """A Node of codegen/formula_program.py."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def value(self) -> float | str: ...


@dataclass(frozen=True)
class IntBounds:
    """Of the values of a program by their numbers."""

    ranges: tuple[Range, ...]  # all of int32 where nothing is known, and for what is no integer
    undefined: frozenset[
        int
    ]  # integers whose operation C++ may not define: kernels call the helper of HELPERS


def int_bounds(nodes: Sequence[Value]) -> IntBounds:
    """What the forms of values show."""
    ranges: list[Range] = []
    undefined = set[int]()
    for x, node in enumerate(nodes):
        found = _range(node, [ranges[a] for a in node.args]) if node.kind == "int" else None
        fits = found is not None and INT32[0] <= found[0] and found[1] <= INT32[1]
        ranges.append(found if found is not None and fits else INT32)
        if node.kind == "int" and node.op in HELPERS and not fits:
            undefined.add(x)
    return IntBounds(tuple(ranges), frozenset(undefined))


def _range(node: Value, of: list[Range]) -> Range | None:
    """The range of an integer, beyond int32 if it is before it wraps around; None if nothing is known."""
    if node.op == "const":
        return int(node.value), int(node.value)
    if node.op == "leaf":
        return INDEX
    known = _RANGES.get(node.op)
    return known(*of) if known is not None else None


def _hull(*ranges: Range) -> Range:
    return min(lo for lo, _ in ranges), max(hi for _, hi in ranges)


def _product(x: Range, y: Range) -> Range:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


def _abs(x: Range) -> Range:
    return max(x[0], -x[1], 0), max(-x[0], x[1])


def _quotient(x: Range, y: Range) -> Range | None:
    return (x[0] // y[0], x[1] // y[0]) if y[0] == y[1] > 0 else None


def _rest(x: Range, y: Range) -> Range | None:
    if y[0] <= 0:
        return None
    return x if x[0] >= 0 and x[1] < y[0] else (0, y[1] - 1)


def _left(x: Range, y: Range) -> Range | None:
    """Only of what C++17 defines: a negative number is not shifted."""
    return (x[0] << y[0], x[1] << y[1]) if x[0] >= 0 and y[0] >= 0 and y[1] < 32 else None


def _right(x: Range, y: Range) -> Range | None:
    return _hull(*((a >> b, a >> b) for a in x for b in y)) if y[0] >= 0 and y[1] < 32 else None


def _and(x: Range, y: Range) -> Range | None:
    tops = [hi for lo, hi in (x, y) if lo >= 0]
    return (0, min(tops)) if tops else None


_RANGES: dict[str, Callable[..., Range | None]] = {
    "+": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "-": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "*": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "~": lambda x: (~x[1], ~x[0]),
    "abs": _abs,
    "//": _quotient,
    "%": _rest,
    "<<": _left,
    ">>": _right,
    "&": _and,
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "where": lambda _, x, y: _hull(x, y),
}
