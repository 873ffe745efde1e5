"""The elements of captured tensors that a formula reads, for the gradients of the tensors.

`read_of` takes the program (formula_program.py) of a formula, the number of its result and that of a value that reads a
tensor. For

    bias(t0: float32[3] grad): 2.0 * score + 0.5 * t0[h, q_idx, kv_idx]

it gives `Read`: in C++ the place of the element in t0's gradient, and the derivative 0.5 of the formula by it; and what
a backward kernel has to know to sum the gradients of an element: here no two pairs of a head read the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.codegen.formula_code import Code, code_of
from attnforge.codegen.formula_program import Program, ScoreError
from attnforge.codegen.score_derivative import derivative
from attnforge.codegen.score_tiles import direction, goes_by_distance, step_indices, tiled_program


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


def read_of(program: Program, result: int, x: int) -> Read:
    """The read that value `x` is. Raises ScoreError if an index depends on the score."""
    copy = program.copy()
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
    by_distance = not shared and all(goes_by_distance(program, a) for a in node.args)
    stepped = not shared and all(direction(program, a) is not None for a in node.args)
    stepped = stepped and bool(step_indices(*tiled_program(program, result))[1])
    apart = {"q_idx", "kv_idx"} <= {program.nodes[a].value for a in node.args}
    letters = (str(program.nodes[a].value)[0] if program.nodes[a].op == "leaf" else "." for a in node.args)
    return Read(tensor, code, code_of(copy, slope), shared, by_distance, stepped, apart, "".join(letters))
