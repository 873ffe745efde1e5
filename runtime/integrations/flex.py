"""FlexAttention's call on our kernels: `flex_attention`, and `from_block_mask`, which converts a BlockMask.

A mask_mod is a function of one pair; the fastest kernels take the interval of queries that see each key. The BlockMask
lists its full and partial blocks, so all pairs of the partial blocks are evaluated, once per BlockMask. Where more than
four intervals of queries see some key, kernels evaluate the mask_mod itself. The result is exact.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from attnforge.codegen.formula_program import ScoreError
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.spec import MAX_INTERVALS
from attnforge.runtime.inputs import expect_layout
from attnforge.runtime.masks import AnyMask, Causal, DenseMask, FunctionMask, Spans, visible_keys_of
from attnforge.runtime.ops import attention
from attnforge.runtime.score_trace import evaluate, traced_mask
from attnforge.runtime.scores import Score

log = logging.getLogger("attnforge")

CHUNK = 1 << 24  # pairs evaluated at a time
DENSE_BYTES = 1 << 30  # largest dense mask that a BlockMask is converted to


class _Converted(NamedTuple):
    """What is kept of a BlockMask: its mask, and what that was made of."""

    mask: AnyMask
    mask_mod: Callable[[], Any]  # a weak reference, since the function may hold the BlockMask
    seq_lengths: tuple[int, ...]
    sizes: set[tuple[int, int]]  # batch and heads of q that it was checked for


_known: weakref.WeakKeyDictionary[BlockMask, _Converted] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """torch's flex_attention of q (B, Hq, Sq, D) on k, v (B, Hkv, Sk, D), or (1, Hkv, Sk, D) with a BlockMask of B.

    score_mod: traced at every call; attnforge.scores.score_mod(function), made once, saves that and can be passed
        instead. Captured tensors that require grad get a gradient, those of a mask_mod none.
    block_mask: converted by `from_block_mask` at its first use; the result is kept with it.
    kernel_options: ignored; they are for torch's kernels and do not change results.
    return_lse, return_aux: lse is the natural logarithm; differentiable.
    Raises ValueError for a score_mod that cannot be translated, for max_scores, for a BlockMask of other lengths, for
    one made with B=None or H=None whose mask_mod differs in partial blocks between batch entries or heads, and as
    `attention`.
    """
    if score_mod is not None and not isinstance(score_mod, Score) and not callable(score_mod):
        raise TypeError(f"score_mod: got {type(score_mod).__name__}, expected a function or None")
    expect_layout("(batch, heads, seq, head_dim)", query=query, key=key, value=value)
    _check_outputs(return_lse, return_aux)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa: is False, but q has {query.shape[1]} heads and k {key.shape[1]}; pass enable_gqa=True"
        )
    mask = None if block_mask is None else _mask_of(block_mask, query, key)
    # As in torch: paged caches have one batch entry, of which the BlockMask shows each query its own pages.
    if block_mask is not None and key.shape[0] == value.shape[0] == 1 < query.shape[0] == block_mask.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    out, lse = attention(query, key, value, mask, scale=scale, return_lse=True, score=score_mod)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _check_outputs(return_lse: bool, return_aux: AuxRequest | None) -> None:
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux: got {type(return_aux).__name__}, expected torch's AuxRequest or None")
    if return_aux is not None and return_lse:
        raise ValueError(
            "return_lse: cannot be combined with return_aux; pass return_aux=AuxRequest(lse=True) alone"
        )
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux: max_scores is not supported; only lse is")


def _mask_of(block_mask: BlockMask, query: Tensor, key: Tensor) -> AnyMask:
    """The mask of a BlockMask, which is checked against the sizes of a call."""
    known = _known_of(block_mask)
    if known.seq_lengths != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"block_mask: has {block_mask.seq_lengths} queries and keys, but q and k have "
            f"{query.shape[2]} and {key.shape[2]}; create it with Q_LEN and KV_LEN of q and k"
        )
    size = (query.shape[0], query.shape[1])
    if size not in known.sizes:
        with torch.no_grad():
            _expect_alike(block_mask, *size)
        known.sizes.add(size)
    return known.mask


def from_block_mask(block_mask: BlockMask) -> AnyMask:
    """The mask of a BlockMask: None (everything is visible), Causal(), Spans, its function, or a DenseMask.

    Spans if at most four intervals of queries see each key, in each batch entry and head: documents, causal, prefix,
    window, noise and block diffusion masks, and many unions of these. Else `attnforge.masks.mask_mod` of its mask_mod,
    unless that cannot be translated, captures more than a bit for each pair, or says something else than the lists of
    blocks: then a DenseMask of at most DENSE_BYTES. The first call evaluates the partial blocks (twice for several
    intervals), for a function all pairs, and synchronises with the host; later calls are free. Call it outside compiled
    code.
    Raises TypeError for anything but a BlockMask, ValueError if the DenseMask would be too large.
    """
    return _known_of(block_mask).mask


def _known_of(block_mask: BlockMask) -> _Converted:
    """What is kept of it, converted now if it is new or was changed, as for decoding."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, expected torch's BlockMask or None")
    with _lock:
        known, lengths = _known.get(block_mask), tuple(block_mask.seq_lengths)
        if known is None or known.mask_mod() is not block_mask.mask_mod or known.seq_lengths != lengths:
            with torch.no_grad():
                mask = _convert(block_mask)
            known = _Converted(mask, _reference(block_mask.mask_mod), lengths, set())
            _known[block_mask] = known
        return known


def _reference(function: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(function)
    except TypeError:  # some callables have no weak references
        return lambda: function


def _expect_alike(mask: BlockMask, batch: int, heads: int) -> None:
    """Raises ValueError if the mask_mod differs between batch entries or heads for which the BlockMask has one plane.

    In partial blocks torch's kernels evaluate the mask_mod of each of them.
    """
    axes = {"batch entry": ("B", batch), "head": ("H", heads)}
    single = [
        name
        for axis, (name, (_, size)) in enumerate(axes.items())
        if mask.kv_num_blocks.shape[axis] == 1 < size and _depends(mask, axis)
    ]
    if not single or 0 in mask.seq_lengths:
        return
    sizes = " and ".join(f"{axes[name][0]}={axes[name][1]}" for name in single)
    try:
        text, tensors = traced_mask(mask.mask_mod)
    except ScoreError as error:
        raise ValueError(
            f"block_mask: was made for one {' and one '.join(single)}, but its mask_mod reads which, and others "
            f"cannot be compared ({error}); create it with {sizes}"
        ) from None
    counts = [axes[name][1] if name in single else 1 for name in axes]
    differ = [_differs(mask, plane, MaskMod(text), tensors, counts) for plane in _planes(mask)]
    if bool(torch.stack(differ).any()):
        raise ValueError(
            f"block_mask: was made for one {' and one '.join(single)}, but its mask_mod shows other pairs in others; "
            f"create it with {sizes}"
        )


def _depends(mask: BlockMask, axis: int) -> bool:
    """Whether the mask_mod reads b (axis 0) or h (axis 1): if so, under vmap over it the result is batched."""
    zero = torch.zeros((), dtype=torch.int32, device=mask.kv_num_blocks.device)
    found: list[bool] = []

    def probe(*index: Tensor) -> Tensor:
        seen: Tensor = mask.mask_mod(*index)
        found.append(torch._C._functorch.is_batchedtensor(seen))
        return seen

    where: list[int | None] = [None] * 4
    where[axis] = 0
    torch.vmap(probe, tuple(where))(*(zero[None] if i == axis else zero for i in range(4)))
    return found[0]


def _differs(
    mask: BlockMask, plane: _Blocks, text: MaskMod, tensors: tuple[Tensor, ...], counts: list[int]
) -> Tensor:
    """bool (): whether partial blocks differ among `counts` batch entries and heads. Indices past tensors are safe."""
    device, (seq_q, seq_k) = plane.full.device, mask.seq_lengths
    tensors = tuple(x.to(device) for x in tensors)
    differ = torch.zeros((), dtype=torch.bool, device=device)
    for row, column, visible in _evaluate(mask, plane):
        at = {"q_idx": row[:, :, None].int(), "kv_idx": column[:, None, :].int()}
        inside = (at["q_idx"] < seq_q) & (at["kv_idx"] < seq_k)
        for b, h in product(*map(range, counts)):
            more = {"b": torch.tensor(plane.batch + b), "h": torch.tensor(plane.head + h)}
            seen = evaluate(text, at | {name: x.to(device) for name, x in more.items()}, tensors)
            differ |= (inside & (seen != visible)).any()
    return differ


class _Blocks(NamedTuple):
    """The blocks of one batch entry and head."""

    full: Tensor  # bool (blocks of queries, blocks of keys)
    partial: Tensor  # int64 (count, 2): block of queries, block of keys
    batch: int
    head: int


def _convert(mask: BlockMask) -> AnyMask:
    planes = list(_planes(mask))
    seq_q, seq_k = mask.seq_lengths
    spans = [_intervals(mask, plane) for plane in planes]
    good = torch.stack([is_interval for _, _, is_interval in spans]).all()
    alike = torch.stack([((a == spans[0][0]) & (b == spans[0][1])).all() for a, b, _ in spans]).all()
    if not bool(good) and (unions := _unions(mask, planes)) is not None:
        return unions
    if not bool(good):
        function, why_not = _function(mask, planes)
        log.debug("block_mask: %s", why_not or "becomes a function")
        return function or _dense(mask, planes, why_not)
    if not bool(alike):
        batch, heads = mask.kv_num_blocks.shape[:2]
        starts, ends = (
            torch.stack(x).view(batch, heads, 1, seq_k) for x in zip(*(s[:2] for s in spans), strict=True)
        )
        return Spans(starts, ends, visible_keys=visible_keys_of(starts, ends, seq_q))
    starts, ends, _ = spans[0]
    if bool(((starts == 0) & (ends == seq_q)).all()):
        return None
    row = torch.arange(seq_k, dtype=torch.int32, device=starts.device)
    if seq_q == seq_k and bool(((starts == row) & (ends == seq_q)).all()):
        return Causal()
    return Spans(starts, ends, visible_keys=visible_keys_of(starts, ends, seq_q))


def _planes(mask: BlockMask) -> Iterator[_Blocks]:
    """Blocks of each batch entry and head of the BlockMask; a broadcast axis has one plane."""
    batch, heads, rows = mask.kv_num_blocks.shape
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])

    def table(count: Tensor | None, index: Tensor | None, b: int, h: int) -> Tensor:
        if count is None or index is None:
            return torch.zeros(rows, columns, dtype=torch.bool, device=mask.kv_num_blocks.device)
        place = torch.arange(index.shape[-1], device=index.device)
        listed = place[None] < count[b, h, :, None]
        # Entries after the end of a list go to an extra column.
        target = torch.where(listed, index[b, h].long(), columns)
        found = torch.zeros(rows, columns + 1, dtype=torch.bool, device=index.device)
        return found.scatter_(1, target, True)[:, :columns]

    for b in range(batch):
        for h in range(heads):
            partial = table(mask.kv_num_blocks, mask.kv_indices, b, h)
            full = table(mask.full_kv_num_blocks, mask.full_kv_indices, b, h)
            yield _Blocks(full, (partial & ~full).nonzero(), b, h)


def _evaluate(mask: BlockMask, plane: _Blocks) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows (n, Q), columns (n, K), visible (n, Q, K)) of partial blocks; pairs beyond the lengths are hidden."""
    (size_q, size_k), (seq_q, seq_k) = mask.BLOCK_SIZE, mask.seq_lengths
    device = plane.partial.device
    if not plane.partial.shape[0]:
        return  # under vmap, a mask_mod that indexes tensors fails for empty ones
    call = torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0))
    call = torch.vmap(call, in_dims=(None, None, 0, None))
    call = torch.vmap(call, in_dims=(None, None, 0, 0))
    batch, head = (torch.tensor(i, dtype=torch.int32, device=device) for i in (plane.batch, plane.head))
    for part in plane.partial.split(max(1, CHUNK // (size_q * size_k))):
        row = part[:, :1] * size_q + torch.arange(size_q, device=device)
        column = part[:, 1:] * size_k + torch.arange(size_k, device=device)
        inside = (row < seq_q)[:, :, None] & (column < seq_k)[:, None, :]
        # A mask_mod may index vectors of these lengths.
        at = (x.clamp(max=size - 1).to(torch.int32) for x, size in ((row, seq_q), (column, seq_k)))
        yield row, column, call(batch, head, *at) & inside


def _intervals(mask: BlockMask, plane: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, ends int32 (seq_k), bool on the device: whether these intervals are the mask)."""
    (size_q, size_k), (seq_q, seq_k) = mask.BLOCK_SIZE, mask.seq_lengths
    device = plane.full.device
    first_row = torch.arange(plane.full.shape[0], device=device) * size_q
    last_row = (first_row + size_q).clamp(max=seq_q)
    full = plane.full
    # First of the full blocks, per block of keys; then of the partial ones, per key.
    count = (full * (last_row - first_row)[:, None]).sum(0).repeat_interleave(size_k)
    first = torch.where(full, first_row[:, None], seq_q).amin(0).repeat_interleave(size_k)
    last = torch.where(full, last_row[:, None], 0).amax(0).repeat_interleave(size_k)
    for row, column, visible in _evaluate(mask, plane):
        key = column.flatten()
        count.index_add_(0, key, visible.sum(1).flatten())
        least = torch.where(visible, row[:, :, None], seq_q).amin(1).flatten()
        most = torch.where(visible, row[:, :, None] + 1, 0).amax(1).flatten()
        first.scatter_reduce_(0, key, least, "amin")
        last.scatter_reduce_(0, key, most, "amax")
    count, first, last = count[:seq_k], first[:seq_k], last[:seq_k]
    seen = count > 0
    good = (~seen | (last - first == count)).all()
    starts, ends = (torch.where(seen, x, 0).to(torch.int32) for x in (first, last))
    return starts, ends, good


def _unions(mask: BlockMask, planes: list[_Blocks]) -> Spans | None:
    """The mask as Spans of several intervals; None if some key would have more than MAX_INTERVALS."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    seq_q, seq_k = mask.seq_lengths
    bounds = []
    for plane in planes:
        runs = _runs(mask, plane)
        if runs is None:
            return None
        bounds.append(runs)
    most = max(starts.shape[0] for starts, _ in bounds)
    starts, ends = (
        torch.stack([torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[0])) for x in of_planes])
        for of_planes in zip(*bounds, strict=True)
    )
    visible_keys = visible_keys_of(starts, ends, seq_q)
    if len(planes) > 1:
        starts, ends = (x.view(batch, heads, most, seq_k) for x in (starts, ends))
    else:
        starts, ends = starts[0], ends[0]
    return Spans(starts, ends, visible_keys=visible_keys)


def _runs(mask: BlockMask, plane: _Blocks) -> tuple[Tensor, Tensor] | None:
    """(starts, ends int32 (n, seq_k)): all runs of queries that see a key; None if one has more than MAX_INTERVALS.

    A few columns of blocks at a time: a run begins where a row is visible and the row before it is not, be that in the
    same block or the last one of the block before.
    """
    (size_q, size_k), (seq_q, seq_k) = mask.BLOCK_SIZE, mask.seq_lengths
    rows, columns = plane.full.shape
    step = max(1, CHUNK // (rows * size_k))
    starts, ends = [], []  # of a chunk: key * (seq_q + 1) + row, in order
    for first in range(0, columns, step):
        full = plane.full[:, first : first + step].repeat_interleave(size_k, 1)
        here = (plane.partial[:, 1] >= first) & (plane.partial[:, 1] < first + step)
        # At each border of blocks: is the row behind it visible, and the row before it?
        behind, before = (torch.nn.functional.pad(full, (0, 0, *sides)) for sides in ((0, 1), (1, 0)))
        begins, stops = [], []
        for row, column, visible in _evaluate(mask, plane._replace(partial=plane.partial[here])):
            block, key = row[:, :1] // size_q, column - first * size_k
            behind[block, key], before[block + 1, key] = visible[:, 0], visible[:, -1]
            begins.append(_places(visible[:, 1:] > visible[:, :-1], row[:, 1:], column, seq_q))
            stops.append(_places(visible[:, 1:] < visible[:, :-1], row[:, 1:], column, seq_q))
            if sum(map(len, begins)) > MAX_INTERVALS * full.shape[1]:
                return None
        border = (torch.arange(rows + 1, device=full.device) * size_q).clamp(max=seq_q)[None]
        column = torch.arange(full.shape[1], device=full.device)[None] + first * size_k
        begins.append(_places((behind > before)[None], border, column, seq_q))
        stops.append(_places((behind < before)[None], border, column, seq_q))
        starts.append(torch.cat(begins).sort().values)
        ends.append(torch.cat(stops).sort().values)
    # The n-th run of a key begins at its n-th start. Full blocks may reach past the last key.
    begin, end = (x[x < seq_k * (seq_q + 1)] for x in (torch.cat(starts), torch.cat(ends)))
    key = begin // (seq_q + 1)
    number = torch.arange(key.numel(), device=key.device) - torch.searchsorted(key, key)
    count = int(number.max()) + 1 if number.numel() else 1
    if count > MAX_INTERVALS:
        return None
    bounds = torch.zeros(2, count, seq_k, dtype=torch.int32, device=key.device)
    for bound, place in zip(bounds, (begin, end), strict=True):
        bound[number, key] = (place % (seq_q + 1)).to(torch.int32)
    return bounds[0], bounds[1]


def _places(found: Tensor, row: Tensor, column: Tensor, seq_q: int) -> Tensor:
    """column * (seq_q + 1) + row where `found` (n, Q, K) is true; row (n, Q), column (n, K)."""
    n, i, j = found.nonzero().unbind(1)
    return column[n, j] * (seq_q + 1) + row[n, i]


def _function(mask: BlockMask, planes: list[_Blocks]) -> tuple[FunctionMask | None, str]:
    """The mask by its mask_mod; or None, and why not."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    seq_q, seq_k = mask.seq_lengths
    # What is evaluated for one batch entry or head holds for all.
    fixed = {leaf: 0 for leaf, size in (("b", batch), ("h", heads)) if size == 1}
    try:
        text, tensors = traced_mask(mask.mask_mod, fixed)
    except ScoreError as error:
        return None, str(error)
    if 8 * sum(x.nbytes for x in tensors) > len(planes) * seq_q * seq_k:
        return None, "mask_mod: captures more than a bit for each pair"
    pairs = 0
    for plane in planes:
        seen = _agreeing(mask, plane, MaskMod(text), tensors)
        if seen is None:
            return None, "mask_mod: shows other pairs than the lists of blocks"
        pairs += seen
    depends = [size if MaskMod(text).reads(leaf) else None for leaf, size in (("b", batch), ("h", heads))]
    visible_keys = pairs // (seq_q * len(planes))
    device = planes[0].full.device
    tensors = tuple(x.to(device) for x in tensors)
    made = FunctionMask(
        text, tensors, seq_q, seq_k, device, batch=depends[0], heads=depends[1], visible_keys=visible_keys
    )
    return made, ""


def _agreeing(mask: BlockMask, plane: _Blocks, text: MaskMod, tensors: tuple[Tensor, ...]) -> int | None:
    """How many pairs the function shows; None if it hides pairs of full blocks or shows some of blocks not listed."""
    (size_q, size_k), (seq_q, seq_k) = mask.BLOCK_SIZE, mask.seq_lengths
    device = plane.full.device
    partial = torch.zeros_like(plane.full)
    partial[plane.partial[:, 0], plane.partial[:, 1]] = True
    key = torch.arange(seq_k, device=device, dtype=torch.int32)
    index = {"b": torch.tensor(plane.batch, device=device), "h": torch.tensor(plane.head, device=device)}
    pairs, wrong = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device) > 0
    for first in range(0, seq_q, max(1, CHUNK // seq_k)):
        row = torch.arange(
            first, min(seq_q, first + max(1, CHUNK // seq_k)), device=device, dtype=torch.int32
        )
        seen = evaluate(text, index | {"q_idx": row[:, None], "kv_idx": key}, tensors)
        seen = seen.expand(row.numel(), seq_k)
        full, some = (x[row // size_q].repeat_interleave(size_k, 1)[:, :seq_k] for x in (plane.full, partial))
        wrong |= torch.where(some, False, seen != full).any()
        pairs += seen.sum()
    return None if bool(wrong) else int(pairs)


def _dense(mask: BlockMask, planes: list[_Blocks], why: str) -> DenseMask:
    (size_q, size_k), (seq_q, seq_k) = mask.BLOCK_SIZE, mask.seq_lengths
    batch, heads = mask.kv_num_blocks.shape[:2]
    if (size := batch * heads * seq_q * seq_k) > DENSE_BYTES:
        raise ValueError(
            f"block_mask: some key is visible to more than {MAX_INTERVALS} intervals of queries ({why}), and a dense "
            f"mask of {batch} x {heads} x {seq_q} x {seq_k} would take {size >> 20} MiB, more than "
            f"{DENSE_BYTES >> 20}. Make attnforge.Spans of intervals, attnforge.DenseMask where that is worth it, "
            "or call torch's flex_attention"
        )
    visible = torch.empty(batch, heads, seq_q, seq_k, dtype=torch.bool, device=planes[0].full.device)
    for plane in planes:
        whole = plane.full.repeat_interleave(size_q, 0).repeat_interleave(size_k, 1)
        for row, column, seen in _evaluate(mask, plane):
            whole[row[:, :, None], column[:, None, :]] = seen
        visible[plane.batch, plane.head] = whole[:seq_q, :seq_k]
    return DenseMask(visible, visible_keys=int(visible.sum()) // (batch * heads * seq_q))
