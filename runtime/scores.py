"""Functions of attention scores: `attnforge.scores`.

    out = attnforge.attention(q, k, v, mask, score=attnforge.scores.softcap(50.0))

A score is scale * q . k of a pair; its function comes next, then the mask, then the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnforge.runtime.inputs import MAX_ROWS, expect_integer, expect_local, expect_number, expect_tensors
from attnforge.runtime.score_trace import FLOATS, ScoreFunction, as_read, dtype_as_read, traced

LEAST_CAP, LARGEST_CAP = 1e-30, 1e30  # of which float32 holds the reciprocal, too

__all__ = ["Score", "alibi", "bias", "relative_bias", "score_mod", "softcap"]


@dataclass(frozen=True, eq=False)
class Score:
    """A function of a score as text (codegen/formula.py), and the tensors that it captured, on the device of q.

    Kernels are compiled once for each text; the tensors are read at every call. Make one at start and pass it to
    every layer that uses it. Tensors that require grad get gradients. With `deterministic=True` the backward sums these
    in 80 bytes for each element of a tensor, unless each pair of the call has an element of its own.
    """

    text: str
    captured: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors as kernels read them now: float16 as copies in float32, integers as ones in int32."""
        return tuple([as_read(x) for x in self.captured])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle, also an older one, whose field `captured` is called `tensors`."""
        self.__dict__.update(text=state["text"], captured=state.get("captured", state.get("tensors")))


def softcap(cap: float, approximate: bool = False) -> Score:
    """cap * tanh(score / cap), as Gemma 2 has it. Raises TypeError or ValueError unless 1e-30 <= cap <= 1e30.

    approximate: in 16 bits on a GPU take the hardware's tanh (`tanh.approx.f32`), whose relative error is up to 2^-11:
        0.015 of a score of 30. Without it the error is below 3e-5 of a score of up to cap / 5, beyond 7e-6.
    """
    expect_number("cap", cap, optional=False)
    value = float(cap)
    if not LEAST_CAP <= value <= LARGEST_CAP:
        raise ValueError(f"cap: got {cap}, expected a number from {LEAST_CAP:.0e} to {LARGEST_CAP:.0e}")
    tanh = "tanh_approx" if approximate else "tanh"
    return Score(f"softcap: {value!r} * {tanh}(score / {value!r})")


def alibi(slopes: Tensor, offset: int = 0) -> Score:
    """score - slopes[h] * |q_idx + offset - kv_idx|, as ALiBi has it.

    slopes: (Hq) or (B, Hq), float32 or bfloat16. offset: position of query 0 among the keys; Sk - Sq aligns the last
        query with the last key. Raises TypeError or ValueError naming the argument.
    """
    t0 = _captured("slopes", slopes)
    expect_integer("offset", offset)
    if not -MAX_ROWS <= offset <= MAX_ROWS:
        raise ValueError(f"offset: got {offset}, expected {-MAX_ROWS} to {MAX_ROWS}")
    if t0.dim() not in (1, 2):
        raise ValueError(f"slopes: got shape {tuple(slopes.shape)}, expected (heads_q) or (batch, heads_q)")
    slope = "t0[h]" if t0.dim() == 1 else "t0[b, h]"
    dtype = dtype_as_read(t0)
    if offset == 0:
        return Score(f"alibi(t0: {dtype}[{t0.dim()}]): score - {slope} * abs(q_idx - kv_idx)", (t0,))
    # At run time: it changes with the lengths, and each text is a kernel.
    t1 = torch.full((1,), offset, dtype=torch.int32, device=t0.device)
    text = f"alibi(t0: {dtype}[{t0.dim()}], t1: int32[1]): score - {slope} * abs(q_idx + t1[0] - kv_idx)"
    return Score(text, (t0, t1))


def bias(tensor: Tensor) -> Score:
    """score + tensor[b, h, q_idx, kv_idx].

    tensor: (B or 1, Hq or 1, Sq or 1, Sk or 1), or without leading axes; float32 or bfloat16, any strides; it is not
        expanded in memory. Raises TypeError or ValueError naming the argument.
    """
    whole = _captured("tensor", tensor)
    if not 1 <= whole.dim() <= 4:
        raise ValueError(f"tensor: got shape {tuple(tensor.shape)}, expected (batch, heads_q, seq_q, seq_k)")
    names = ("b", "h", "q_idx", "kv_idx")[4 - whole.dim() :]
    axes = [i for i, size in enumerate(whole.shape) if size != 1]
    with torch.enable_grad():  # a view made without it would get no gradient in later calls
        t0 = whole.squeeze() if axes else whole.reshape(1)
    if not axes:
        return Score(f"bias(t0: {dtype_as_read(t0)}[1]): score + t0[0]", (t0,))
    at = ", ".join(names[i] for i in axes)
    return Score(f"bias(t0: {dtype_as_read(t0)}[{t0.dim()}]): score + t0[{at}]", (t0,))


def relative_bias(table: Tensor) -> Score:
    """score + table[h, n + clamp(kv_idx - q_idx, -n, n)], as T5 and its relatives have it.

    table: (Hq, 2 n + 1), or (2 n + 1) for all heads; float32 or bfloat16. Distances beyond n share the last entry of
        their side. T5's buckets are such a table: `weight[bucket(arange(-n, n + 1))].T`. Raises TypeError or
        ValueError naming the argument.
    """
    t0 = _captured("table", table)
    if t0.dim() not in (1, 2) or t0.shape[-1] % 2 == 0:
        raise ValueError(f"table: got shape {tuple(table.shape)}, expected (heads_q, 2 n + 1) or (2 n + 1)")
    n = t0.shape[-1] // 2
    at = f"minimum(maximum(kv_idx - q_idx, {-n}), {n}) + {n}"
    head = "h, " if t0.dim() == 2 else ""
    return Score(f"relative_bias(t0: {dtype_as_read(t0)}[{t0.dim()}]): score + t0[{head}{at}]", (t0,))


def score_mod(function: ScoreFunction) -> Score:
    """Any function (score, b, h, q_idx, kv_idx) -> score with FlexAttention's signature.

    It is traced once, with scalar tensors: float32 for the score, int32 for the indices. Tensors that it reads
    (at most 4; float32, bfloat16, float16, bool, integers) are captured, and read again at every call. Whether values
    of int64 fit int32 is checked while tracing, which waits for the device. All integers are computed as int32: they
    wrap around at 32 bits, also where torch would at 8 or 64.
    Raises ScoreError, a ValueError, that names an operation which cannot be translated.
    """
    text, tensors = traced(function)
    return Score(text, tensors)


def as_score(score: Score | ScoreFunction) -> Score:
    """The argument `score` of attention as a Score. A function is traced, unless one like it has been."""
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise TypeError(
            f"score: got {type(score).__name__}, expected an attnforge.scores.Score or a function "
            "(score, b, h, q_idx, kv_idx)"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "score: a function cannot be traced inside torch.compile; make attnforge.scores.score_mod(function) "
            "outside and pass that"
        )
    return score_mod(score)


def _captured(name: str, x: object) -> Tensor:
    """The tensor, checked."""
    expect_tensors(**{name: x})
    expect_local(name, x)
    assert isinstance(x, Tensor)
    if x.dtype not in (*FLOATS, torch.float16):
        raise ValueError(f"{name}: got dtype {x.dtype}, accepted are float32, bfloat16 and float16")
    if x.numel() == 0:
        raise ValueError(f"{name}: has no elements, its shape is {tuple(x.shape)}")
    return x
