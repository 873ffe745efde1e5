"""Checks of the arguments of an attention call; each error names its argument.

The operators test the same conditions in C++ (runtime/native/checks.h) on every call and call these functions only to
raise. The fake kernels always call them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from attnforge.codegen.formula import Formula
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import MAX_INTERVALS, Mask

MASKS = tuple(Mask)  # numbered in this order in operator schemas, as by `enum MaskKind` of codegen/variant.py
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_INDEX = 2**31 - 1
MAX_ROWS = MAX_INDEX // 2  # of q, and of k
MAX_HEAD_DIM = 512  # beyond 256 there are forwards only
# Scales that are above 0 and finite in float32.
LEAST_SCALE, LARGEST_SCALE = 2.0**-149, (2 - 2.0**-23) * 2.0**127
_LAYOUT = {"q": "(batch, heads_q, seq_q, head_dim)", "k": "(batch, heads_kv, seq_k, head_dim)"}


def expect_tensors(**values: object) -> None:
    """Raises TypeError naming the first argument that is not a tensor, or is a sparse or nested one."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor")
        if value.is_nested:
            raise TypeError(
                f"{name}: got a nested tensor, expected a strided one; pack documents of different lengths end to end, "
                "with attnforge.masks.documents as the mask"
            )
        if value.layout is not torch.strided:
            raise TypeError(
                f"{name}: got layout {value.layout}, expected torch.strided; use {name}.to_dense()"
            )


def have_dtensor(*tensors: object) -> bool:
    """Whether any is a DTensor. Does not import torch.distributed.tensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def expect_local(names: str, *tensors: object) -> None:
    """Raises TypeError naming the arguments if any of them is a DTensor."""
    if have_dtensor(*tensors):
        raise TypeError(f"{names}: got a DTensor, expected a plain tensor; use to_local() or full_tensor()")


def expect_layout(layout: str, **values: Tensor) -> None:
    """As `expect_tensors`; also ValueError if the number of dimensions is not that of `layout`, "(batch, ...)"."""
    expect_tensors(**values)
    for name, value in values.items():
        if value.dim() != layout.count(",") + 1:
            raise ValueError(f"{name}: got shape {_shape(value)}, expected {layout}")


def expect_number(name: str, value: object, optional: bool = True) -> None:
    """Raises TypeError naming the argument unless it is a number, or None if that is allowed; a bool is no number."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if (value is None and optional) or (isinstance(value, numbers) and not isinstance(value, bool)):
        return
    words = "a number or None" if optional else "a number"
    if isinstance(value, Tensor):  # torch would take its value, and its gradient would be lost
        raise TypeError(
            f"{name}: got Tensor, expected {words}; use {name}.item()"
            + (", or multiply q by it if it is learned" if name == "scale" else "")
        )
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real
        raise TypeError(f"{name}: got {type(value).__name__}, expected {words}")


def is_scale(scale: float | None) -> bool:
    """Whether `attention` accepts this scale: not NaN, above 0 and finite in float32."""
    return scale is None or LEAST_SCALE <= scale <= LARGEST_SCALE


def expect_scale(scale: object) -> None:
    """Raises TypeError or ValueError unless `attention` accepts this scale."""
    expect_number("scale", scale)
    if not is_scale(scale):  # type: ignore[arg-type]
        raise ValueError(
            f"scale: got {scale}, expected a number above 0 that float32 holds, {LEAST_SCALE:.2g} to "
            f"{LARGEST_SCALE:.2g}, or None for head_dim ** -0.5"
        )


def expect_flags(**values: object) -> None:
    """Raises TypeError naming the first argument that is neither a bool nor an int."""
    for name, value in values.items():
        if not isinstance(value, (int, torch.SymBool)):
            raise TypeError(f"{name}: got {type(value).__name__}, expected True or False")


def expect_integers(name: str, values: object, words: str) -> None:
    """Raises TypeError naming the argument unless it is a sequence of integers; `words` describes it."""
    if isinstance(values, Tensor):  # its entries would be tensors, too
        raise TypeError(f"{name}: got Tensor, expected {words}; use {name}.tolist()")
    # An iterator would be empty after the check.
    if (
        isinstance(values, (Mapping, Set))
        or not hasattr(values, "__len__")
        or not hasattr(values, "__iter__")
        or getattr(values, "ndim", 1) == 0  # an array of NumPy without axes
    ):
        raise TypeError(f"{name}: got {type(values).__name__}, expected {words}")
    for index, entry in enumerate(values):
        if not _is_integer(entry):
            raise TypeError(f"{name}: entry {index} is {entry!r}, not an integer; expected {words}")


def expect_integer(name: str, value: object) -> None:
    """Raises TypeError naming the argument unless it is an integer; a bool is none."""
    if not _is_integer(value):
        raise TypeError(f"{name}: got {value!r}, expected an integer")


def _is_integer(value: object) -> bool:
    if isinstance(value, (int, torch.SymInt)):
        return not isinstance(value, bool)
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return getattr(value, "ndim", 0) == 0


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kind: int,
    scale: float | None,
    visible: int = 0,
    mask_mod: str = "",
) -> None:
    """Raises ValueError or TypeError for the first argument that `attention` does not support."""
    expect_tensors(q=q, k=k, v=v)
    if q.dtype not in DTYPES:
        raise ValueError(f"q: got dtype {q.dtype}, accepted are float32, bfloat16 and float16 (GPU only)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_input(name, x, q)
    _check_shapes(q, k, v)
    _check_mask(q, k, mask, kind, mask_mod)
    expect_scale(scale)
    if abs(visible) > MAX_INDEX:
        raise ValueError(
            f"visible: got {visible}, expected the average number of keys that a query sees, or 0 if unknown"
        )


def _check_input(name: str, x: Tensor, q: Tensor) -> None:
    layout = _LAYOUT.get(name, _LAYOUT["k"])
    if x.dim() != 4:
        raise ValueError(
            f"{name}: got {x.dim()} dimensions, shape {_shape(x)}, expected {layout}; "
            f"packed (tokens, heads, head_dim) goes in as {name}.transpose(0, 1)[None]"
        )
    if x.device != q.device:
        raise ValueError(
            f"{name}: is on {x.device}, but q is on {q.device}; all inputs must be on one device"
        )
    if x.dtype != q.dtype:
        raise ValueError(f"{name}: got dtype {x.dtype}, but q has {q.dtype}; all inputs must have one dtype")
    for axis, what in enumerate(layout.strip("()").split(", ")):
        if axis in (1, 3) and x.shape[axis] == 0:
            raise ValueError(f"{name}: {what} is 0 in shape {_shape(x)}, expected at least 1")
    # The stride of an axis of size 1, or of an empty tensor, is never used.
    if x.stride(3) != 1 and x.shape[3] != 1 and x.numel() > 0:
        raise ValueError(
            f"{name}: got stride {x.stride(3)} along head_dim, expected 1; use {name}.contiguous() "
            "(any strides are accepted along the other dimensions)"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {_shape(v)}, expected that of k but for head_dim, {_shape(k)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got batch {k.shape[0]}, expected the batch of q, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: got head_dim {k.shape[3]}, expected the head_dim of q, {q.shape[3]}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] > MAX_HEAD_DIM:
            raise ValueError(f"{name}: got head_dim {x.shape[3]}, accepted are 1 to {MAX_HEAD_DIM}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q: got {q.shape[1]} heads, expected a multiple of the {k.shape[1]} heads of k and v"
        )
    expect_rows(q.shape[2], k.shape[2])
    if _exceeds(q.shape[0] * q.shape[1], MAX_INDEX):
        raise ValueError(
            f"q: got batch * heads = {q.shape[0] * q.shape[1]}, at most {MAX_INDEX} are supported"
        )


def expect_rows(seq_q: int, seq_k: int) -> None:
    """Raises ValueError naming q or k if it has more rows than the kernels' indices hold."""
    for name, length in (("q", seq_q), ("k", seq_k)):
        if _exceeds(length, MAX_ROWS):
            raise ValueError(f"{name}: got {length} rows, at most {MAX_ROWS} are supported")


def _exceeds(size: int | torch.SymInt, most: int) -> bool:
    """False for a symbolic size: the call itself checks, and a guard would be a bound that torch.export requires."""
    return isinstance(size, int) and size > most


def _check_mask(q: Tensor, k: Tensor, mask: Tensor | None, kind: int, mask_mod: str) -> None:
    if not 0 <= kind < len(MASKS):
        raise ValueError(
            f"kind: got {kind}, accepted are " + ", ".join(f"{i} {m.value}" for i, m in enumerate(MASKS))
        )
    what = MASKS[kind]
    if mask_mod and what is not Mask.DENSE:
        raise ValueError(f"mask_mod: a function of a mask is given, but the mask is {what.value}")
    if not what.listed:
        if mask is not None:
            raise ValueError(f"mask: data is given, but the mask is {what.value}")
        return
    if mask is None:
        raise ValueError(f"mask: data is missing for a {what.value} mask")
    if mask.dtype != torch.int32:
        raise ValueError(f"mask: data has dtype {mask.dtype}, expected torch.int32")
    if mask.device != q.device:
        raise ValueError(f"mask: is on {mask.device}, but q is on {q.device}; move the mask there")
    if mask_mod:
        if tuple(mask.shape) != (1,):
            raise ValueError(f"mask: data of a function has shape {_shape(mask)}, expected (1)")
    elif what is Mask.SPANS:
        _check_spans(mask, q, k)
    else:
        _check_dense(mask, q, k)
    if not mask.is_contiguous():
        raise ValueError(f"mask: data has strides {mask.stride()}, expected contiguous memory")


def _check_spans(mask: Tensor, q: Tensor, k: Tensor) -> None:
    unions = mask.dim() == 5 and 1 <= mask.shape[2] <= MAX_INTERVALS
    if not (unions or mask.dim() == 2) or mask.shape[-2] != 2:
        raise ValueError(
            f"mask: data of spans has shape {_shape(mask)}, expected (2, seq_k) or (batch or 1, heads or 1, "
            f"1 to {MAX_INTERVALS} intervals, 2, seq_k)"
        )
    if mask.shape[-1] != k.shape[2]:
        raise ValueError(
            f"mask: has {mask.shape[-1]} keys, but k has {k.shape[2]} rows; expected one entry for each key"
        )
    heads = (1, k.shape[1], q.shape[1])
    if unions and (mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] not in heads):
        raise ValueError(
            f"mask: spans are of {mask.shape[0]} batch entries and {mask.shape[1]} heads, expected 1 or {q.shape[0]} "
            f"batch entries and 1, {k.shape[1]} (of k) or {q.shape[1]} (of q) heads"
        )


def _check_dense(mask: Tensor, q: Tensor, k: Tensor) -> None:
    batch, heads, seq_q = q.shape[:3]
    words = (k.shape[2] + 31) // 32
    planes = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not planes or tuple(mask.shape[2:]) != (seq_q, words):
        raise ValueError(
            f"mask: data of a dense mask has shape {_shape(mask)}, expected (1 or {batch}, 1 or {heads}, {seq_q} "
            f"queries, {words} words of 32 keys)"
        )


def check_score(
    q: Tensor,
    k: Tensor,
    score: str,
    given: Sequence[Tensor | None],
    mask_mod: str = "",
    rows: tuple[int, int] | None = None,
) -> None:
    """Raises ValueError if a function of a score or of a mask is none, or if the tensors are not what they read.

    Tensors of the score come first. Nor may they have fewer elements along an axis than the index that reads it has
    values. `rows`: number of queries and keys, if not those of q and k.
    """
    what = "score, mask_mod" if score and mask_mod else "mask_mod" if mask_mod else "score"
    first = len(ScoreMod(score).tensors)
    expected = [f"{dtype}[{dims}]" for dtype, dims in ScoreMod(score).tensors + MaskMod(mask_mod).tensors]
    tensors = [x for x in given if x is not None]
    got = [f"{str(x.dtype).removeprefix('torch.')}[{x.dim()}]" for x in tensors]
    if got != expected:
        raise ValueError(
            f"{what}: got tensors {', '.join(got) or 'none'}, expected {', '.join(expected) or 'none'}"
        )
    for x in tensors:
        if x.device != q.device:
            raise ValueError(f"{what}: a tensor is on {x.device}, but q is on {q.device}; move it there")
        if x.numel() == 0:
            raise ValueError(f"{what}: a tensor has no elements, its shape is {_shape(x)}")
    queries, keys = rows or (q.shape[2], k.shape[2])
    sizes = {"b": q.shape[0], "h": q.shape[1], "q_idx": queries, "kv_idx": keys}
    for text, own in ((ScoreMod(score), tensors[:first]), (MaskMod(mask_mod), tensors[first:])):
        for tensor, axis, name in axes_read(text) if text else ():
            found = own[tensor].shape[axis]
            if found < sizes[name]:
                raise ValueError(
                    f"{text.argument}: {name} takes {sizes[name]} values, but axis {axis} of captured tensor {tensor} "
                    f"has {found} elements; its shape is {tuple(own[tensor].shape)}"
                )


@lru_cache(maxsize=256)
def axes_read(text: Formula) -> tuple[tuple[int, int, str], ...]:
    """(tensor, axis, index) wherever an axis is read at an index itself."""
    program, _ = text.parsed
    found = set()
    for node in program.nodes:
        if node.op.startswith("load:"):
            for axis, i in enumerate(node.args):
                if program.nodes[i].op == "leaf":
                    found.add((int(node.op[5:]), axis, str(program.nodes[i].value)))
    return tuple(sorted(found))


def check_backward(
    q: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> None:
    """Raises ValueError if dout, out, lse or dlse do not match q and v."""
    expected = (*q.shape[:3], v.shape[3])
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != expected or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: got {_shape(x)} {x.dtype} on {x.device}, "
                f"expected {expected} {q.dtype} on {q.device}, as q with the head_dim of v"
            )
    for name, value in (("lse", lse), ("dlse", dlse)):
        if value is not None and (
            value.shape != q.shape[:3] or value.dtype != torch.float32 or value.device != q.device
        ):
            raise ValueError(
                f"{name}: got {_shape(value)} {value.dtype} on {value.device}, "
                f"expected (batch, heads_q, seq_q) = {_shape(q)[:-1]} torch.float32 on {q.device}"
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
