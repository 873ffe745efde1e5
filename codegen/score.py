"""`ScoreMod`: a function of a score, a query and a key, as text (formula.py), and what kernels take of it.

    softcap: 30.0 * tanh(score / 30.0)
    alibi(t0: float32[1]): score + t0[h] * (kv_idx - q_idx)
    bias(t0: float32[2] grad): score + t0[q_idx, kv_idx]

`score` is the scaled product of a query and a key in float32. The function in C++ is `ScoreMod(text).code()`, its
derivative by the score `gradient_code()` (score_derivative.py). `reads` has the elements of tensors marked `grad`
(score_reads.py). The other properties let kernels compute less:

- score_lines.py finds formulas that add lines, as ALiBi's, to the score,
- score_tanh.py has polynomials in the place of tanh for small scores,
- score_tiles.py moves what all pairs of a tile share out of the work on each pair.
"""

from __future__ import annotations

from functools import cached_property

from attnforge.codegen.formula import Formula
from attnforge.codegen.formula_code import Code, code_of
from attnforge.codegen.formula_program import COMPARISONS, Node, Program
from attnforge.codegen.score_derivative import derivative
from attnforge.codegen.score_lines import Lines, added_terms, lines_of
from attnforge.codegen.score_reads import Read, read_of
from attnforge.codegen.score_tanh import (
    CAPS,
    NEAR,
    NEAREST,
    Cap,
    Series,
    Tier,
    score_factor,
    with_polynomials,
)
from attnforge.codegen.score_tiles import split_unit, step_indices, tiled_program

# Factors of the score in tanh beyond which the polynomial's coefficients would leave float32.
NEAR_FACTORS = (1e-4, 1e4)
NEAR_NODES = 16  # values of the longest formula that gets a function of its own for small scores

# Operations whose results are finite where their arguments are, but for overflow.
_FINITE = ("const", "leaf", "+", "-", "*", "neg", "tanh", "tanh_approx", "sin", "cos", "where", "abs", "float",
           *COMPARISONS)  # fmt: skip


class ScoreMod(Formula):
    """The text of a function of a score."""

    argument = "score"
    leaves = ("score", *Formula.leaves)

    @cached_property
    def gradient(self) -> tuple[Program, int]:
        """The program of the derivative by the score, and the number of its result."""
        program, result = self.parsed
        copy = program.copy()
        return copy, derivative(copy, result)

    @property
    def slope_is_one(self) -> bool:
        """Is the derivative 1 everywhere, as that of every bias? Then the function only adds to a score.

        False for a formula with a step of the score, such as score + floor(score), although its derivative is 1, too:
        the sm90a backward takes f(S) - lse for f(S - lse).
        """
        program, result = self.gradient
        steps = any(node.kind != "float" or node.op in ("floor", "ceil") for node in self.moved)
        return program.constant(result) == 1.0 and not steps

    @cached_property
    def moved(self) -> tuple[Node, ...]:
        """The values that depend on the score."""
        return tuple(
            node for node, moves in zip(self.parsed[0].nodes, self._depends_on("score"), strict=True) if moves
        )

    def _depends_on(self, *leaves: str) -> list[bool]:
        """Does a value, by its number, depend on one of these arguments?"""
        found: list[bool] = []
        for node in self.parsed[0].nodes:
            found.append(node.value in leaves if node.op == "leaf" else any(found[i] for i in node.args))
        return found

    @cached_property
    def reads_by_pair(self) -> bool:
        """Does it depend on the query or the key which element of a captured tensor is read?"""
        if not self:
            return False
        by_pair = zip(self.parsed[0].nodes, self._depends_on("q_idx", "kv_idx"), strict=True)
        return any(node.op.startswith("load:") and depends for node, depends in by_pair)

    @property
    def adds(self) -> bool:
        """Is it the score plus something that does not depend on it?"""
        return self.slope_is_one and not any(read.reads_score for read in self.reads)

    @cached_property
    def lines(self) -> Lines | None:
        """What is added to the score if it consists of lines in kv_idx - q_idx, as ALiBi's; None for other formulas."""
        return lines_of(*self.parsed) if self else None

    @cached_property
    def row_lines(self) -> bool:
        """Does it add a line to the scores of a row, in all tiles (`lines`) or, of slope 0, in most (`steps`)?

        The sm90a forward then leaves Q K^T as it is, and adds what all keys of a row and a tile share to row maxima.
        """
        if self.lines is not None or not (self and self.steps):
            return self.lines is not None
        added, moves = added_terms(*self.parsed), self._depends_on("score")
        return added is not None and not any(moves[x] for _, x in added)

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
        return split_unit(program, result)[0]

    def code(self, tiled: bool = False) -> Code:
        """The function in C++. `tiled`: divided by `unit`, and from the arguments of `tiled_program`."""
        return code_of(
            *(tiled_program(self.parsed[0], self._in_units) if tiled else self.parsed), tiled=tiled
        )

    def gradient_code(self, tiled: bool = False) -> Code:
        """Its derivative by the score in C++."""
        return code_of(*(tiled_program(*self.gradient) if tiled else self.gradient), tiled=tiled)

    @cached_property
    def steps(self) -> tuple[Code, ...]:
        """Indices of captured tensors, such as a clamped kv_idx - q_idx, of which most tiles have one value only.

        Each is a monotonic function of kv_idx - q_idx: it has one value in a tile if it is the same at the
        least and the greatest difference. Empty unless the formula reads q_idx and kv_idx in these indices only.
        """
        program, result = self.parsed
        found = step_indices(*tiled_program(program, result))
        return tuple(code_of(found[0], x) for x in found[1])

    @property
    def _in_units(self) -> int:
        return split_unit(*self.parsed)[1]

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """The elements, of tensors whose gradients are wanted, that the formula reads."""
        if not self.wanted:
            return ()
        program, result = self.parsed
        loads = [x for x, node in enumerate(program.nodes) if node.op.startswith("load:")]
        return tuple(
            read_of(program, result, x) for x in loads if int(program.nodes[x].op[5:]) in self.wanted
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
        factors = [score_factor(program, x.args[0]) for x in program.nodes if x.op == "tanh"]
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
        value, x = split_unit(*self.parsed)
        node = self.parsed[0].nodes[x]
        if node.op != "tanh" or not CAPS[0] <= value <= CAPS[1]:
            return None
        factor = score_factor(self.parsed[0], node.args[0])
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
        near = with_polynomials(program, self._in_units if tiled else result, merged, series)
        return code_of(*(tiled_program(*near) if tiled else near), tiled=tiled)

    def near_gradient_code(self, series: Series = NEAR, tiled: bool = False) -> Code:
        """`gradient_code` where |score| <= near."""
        near = with_polynomials(*self.gradient, merged=False, series=series)
        return code_of(*(tiled_program(*near) if tiled else near), tiled=tiled)
