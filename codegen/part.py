"""The function of a score or of a mask for a part of a call: some of its query heads, query rows from some row on.

    alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)

of the heads and rows of one rank is

    alibi(t0: float32[1], t1: int32[1]): score - t0[h] * abs(q_idx + t1[0] - kv_idx)

with the slopes of these heads as t0, and the number of the first row in t1. Where an index is all that an axis of a
tensor is read with, the part has its own elements of that axis; elsewhere the first one's number is added to it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from attnforge.codegen.score import Formula, Program

Leaf = Literal["q_idx", "h"]
# The places of the numbers in the tensor that a part's function has behind its own.
FIRST: dict[str, int] = {"q_idx": 0, "h": 1}
TOTAL = 2


class Part(NamedTuple):
    """A function of a part. `narrowed`: (tensor, axis, index) of which the part has elements of its own."""

    text: str
    narrowed: tuple[tuple[int, int, Leaf], ...]
    placed: bool  # has it a last tensor, int32: first row, first head, number of rows and keys of the whole


def part_of(formula: Formula, moved: tuple[Leaf, ...], padded: bool = False) -> Part:
    """The function whose indices `moved` count from the part's first row or head; `formula` counts from the whole's.

    padded: of a mask, also hide queries and keys from the number `TOTAL` on.
    """
    program, result = formula.parsed
    leaves: dict[Leaf, int] = {leaf: program.leaf(leaf) for leaf in moved}
    narrowed = tuple(
        (tensor, axis, leaf)
        for tensor, (_, dims) in enumerate(formula.tensors)
        for axis in range(dims)
        for leaf, number in leaves.items()
        if _reads_only(program, tensor, axis, number)
    )
    copy, last = Program((*program.tensors, "int32")), len(formula.tensors)

    def index(leaf: str) -> int:
        """An index as the whole counts it."""
        own = copy.leaf(leaf)
        if leaf not in leaves:
            return own
        return copy.binary("+", own, copy.load(last, (copy.const(FIRST[leaf]),)))

    new: list[int] = []
    for node in program.nodes:
        if node.op.startswith("load:"):
            tensor = int(node.op[5:])
            own = {axis: leaf for other, axis, leaf in narrowed if other == tensor}
            at = (copy.leaf(own[axis]) if axis in own else new[x] for axis, x in enumerate(node.args))
            new.append(copy.load(tensor, tuple(at)))
        elif node.op == "leaf" and node.value in leaves:
            new.append(index(str(node.value)))
        else:
            new.append(copy.node(node.op, tuple(new[x] for x in node.args), node.kind, node.value))
    whole = new[result]
    if padded:
        total = copy.load(last, (copy.const(TOTAL),))
        for leaf in ("kv_idx", "q_idx"):
            whole = copy.binary("&", whole, copy.binary("<", index(leaf), total))
    placed = _reads(copy, whole, last)
    tensors = (*formula.tensors, ("int32", 1)) if placed else formula.tensors
    return Part(str(type(formula).of(formula.name, tensors, copy, whole)), narrowed, placed)


def _reads_only(program: Program, tensor: int, axis: int, leaf: int) -> bool:
    """Is the tensor read, and along this axis with nothing but this index?"""
    loads = [node for node in program.nodes if node.op == f"load:{tensor}"]
    return bool(loads) and all(node.args[axis] == leaf for node in loads)


def _reads(program: Program, result: int, tensor: int) -> bool:
    """Does a value depend on the tensor?"""
    seen, rest = set[int](), [result]
    while rest:
        x = rest.pop()
        if x not in seen:
            seen.add(x)
            rest += program.nodes[x].args
    return any(program.nodes[x].op == f"load:{tensor}" for x in seen)
