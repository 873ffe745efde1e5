"""Functions of scores and masks for a slice of a call: some of its query heads, query rows from some row on.

For the heads and rows of one rank,

    alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)

becomes

    alibi(t0: float32[1], t1: int32[1]): score - t0[h] * abs(q_idx + t1[0] - kv_idx)

where t0 holds the slopes of the rank's heads, and t1[0] is the index of its first row. An axis of a tensor that is read
with nothing but the index of a head or row is narrowed to the slice's elements. Everywhere else the offset is added to
the index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from attnforge.codegen.formula import Formula
from attnforge.codegen.formula_program import Program

Leaf = Literal["q_idx", "h"]
# Where the tensor of offsets, the last one of a slice's function, holds the first row, the first head, and the number
# of rows and keys of the whole call.
OFFSETS: dict[str, int] = {"q_idx": 0, "h": 1}
TOTAL = 2


class FormulaSlice(NamedTuple):
    """The function of a slice. `narrowed`: (tensor, axis, index) of the axes that the slice has its own elements of."""

    text: str
    narrowed: tuple[tuple[int, int, Leaf], ...]
    has_offsets: bool  # whether its last tensor is that of the offsets


def slice_formula(formula: Formula, offset_indices: tuple[Leaf, ...], padded: bool = False) -> FormulaSlice:
    """The function of a slice in which the indices `offset_indices` count from its first row or head.

    padded: of a mask, also hide queries and keys from the number `TOTAL` on.
    """
    program, result = formula.parsed
    narrowed = tuple(
        (tensor, axis, leaf)
        for tensor, (_, dims) in enumerate(formula.tensors)
        for axis in range(dims)
        for leaf in offset_indices
        if _reads_only(program, tensor, axis, program.leaf(leaf))
    )
    copy, offsets = Program((*program.tensors, "int32")), len(formula.tensors)

    def index(leaf: str) -> int:
        """An index as the whole call counts it."""
        own = copy.leaf(leaf)
        if leaf not in offset_indices:
            return own
        return copy.binary("+", own, copy.load(offsets, (copy.const(OFFSETS[leaf]),)))

    whole = _copied(program, copy, narrowed, index)[result]
    if padded:
        total = copy.load(offsets, (copy.const(TOTAL),))
        for leaf in ("kv_idx", "q_idx"):
            whole = copy.binary("&", whole, copy.binary("<", index(leaf), total))
    has_offsets = _reads(copy, whole, offsets)
    tensors = (*formula.tensors, ("int32", 1)) if has_offsets else formula.tensors
    return FormulaSlice(str(type(formula).of(formula.name, tensors, copy, whole)), narrowed, has_offsets)


def _copied(
    program: Program,
    copy: Program,
    narrowed: tuple[tuple[int, int, Leaf], ...],
    index: Callable[[str], int],
) -> list[int]:
    """Add all values of `program` to `copy`; the number there of each. `index` adds that of a leaf."""
    new: list[int] = []
    for node in program.nodes:
        if node.op.startswith("load:"):
            tensor = int(node.op[5:])
            own = {axis: leaf for other, axis, leaf in narrowed if other == tensor}
            at = (copy.leaf(own[axis]) if axis in own else new[x] for axis, x in enumerate(node.args))
            new.append(copy.load(tensor, tuple(at)))
        elif node.op == "leaf" and node.value in OFFSETS:
            new.append(index(str(node.value)))
        else:
            new.append(copy.node(node.op, tuple(new[x] for x in node.args), node.kind, node.value))
    return new


def _reads_only(program: Program, tensor: int, axis: int, leaf: int) -> bool:
    """Whether the tensor is read, and along this axis only with this index."""
    loads = [node for node in program.nodes if node.op == f"load:{tensor}"]
    return bool(loads) and all(node.args[axis] == leaf for node in loads)


def _reads(program: Program, result: int, tensor: int) -> bool:
    """Whether a value depends on the tensor."""
    seen, rest = set[int](), [result]
    while rest:
        x = rest.pop()
        if x not in seen:
            seen.add(x)
            rest += program.nodes[x].args
    return any(program.nodes[x].op == f"load:{tensor}" for x in seen)
