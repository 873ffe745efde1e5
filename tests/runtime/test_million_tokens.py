"""Masks of many tokens: results at chosen rows and keys against float64, in memory that no bit for each pair fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import attnforge
from attnforge import Spans, masks

DIM = 64
MOST_BYTES = 8192  # of a token; a bit for each pair takes seq / 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of `Sum.size`
targets = pytest.mark.parametrize(
    ("device", "dtype", "seq"),
    [
        pytest.param("cpu", torch.float32, 131_072, id="cpu"),
        pytest.param("cuda", torch.bfloat16, 1_000_000, id="gpu", marks=pytest.mark.gpu),
    ],
)


# ---- Masks. Rows see few keys, so that one key too many or too few is far off


def document_lengths(seq: int) -> list[int]:
    """From 1 to 255 tokens; the last one has what is left."""
    lengths = np.random.default_rng(0).integers(1, 256, seq // 128)
    ends = lengths.cumsum()
    whole = lengths[ends <= seq].tolist()
    return [*whole, seq - sum(whole)]


def documents(seq: int, device: str) -> Spans:
    return masks.documents(document_lengths(seq), device, causal=True)


def window(seq: int, device: str) -> Spans:
    return masks.window(seq, seq, 40, 7, device)


def window_and_past(seq: int, device: str) -> Spans:
    """Two intervals a key: the rows near it, and some that are half of all tokens further on."""
    key = torch.arange(seq, dtype=torch.int32, device=device)
    starts = torch.stack((key, key + seq // 2))
    return Spans(starts, torch.minimum(starts + 30, torch.tensor(seq, device=device)).int())


MASKS = (documents, window, window_and_past)


def some(seq: int) -> list[int]:
    """Tokens to look at: both ends, the middle, ends of tiles and documents."""
    ends = np.cumsum(document_lengths(seq))
    middle = int(ends[len(ends) // 2])
    return [
        0,
        1,
        middle - 1,
        middle,
        seq // 2 + 64,
        7 * seq // 8 // 128 * 128 - 1,
        int(ends[-2]) - 1,
        seq - 1,
    ]


# ---- float64


def seen_by(mask: Spans, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that any of `rows` sees, and which of them each row sees."""
    found = torch.zeros(mask.seq_k, dtype=torch.bool, device=rows.device)
    for chunk in rows.split(16):
        found |= mask.visible_rows(chunk).any(0)
    keys = found.nonzero()[:, 0]
    return keys, torch.cat([mask.visible_rows(chunk)[:, keys] for chunk in rows.split(16)])


class Sum(NamedTuple):
    """Rows of a matrix product, and how far they would be off if each term was off by itself, independently."""

    value: Tensor
    size: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, size: Tensor | None = None) -> Sum:
        return cls(x @ y, ((x if size is None else size).square() @ y.square()).sqrt())

    def check(self, name: str, row: int, got: Tensor) -> None:
        error = (got.double() - self.value[row]).abs().max().item()
        assert error <= TOLERANCE[got.dtype] * self.size[row].max().item(), f"{name}: off by {error:.3g}"


def exact(x: list[Tensor], mask: Spans, rows: Tensor) -> tuple[Tensor, Sum, Sum, Sum, Sum]:
    """Keys, and of `rows` on them: out, dq, and what these rows contribute to dk and dv."""
    keys, seen = seen_by(mask, rows)
    q, k, v, dout = (t.detach()[0, 0, i].double() for t, i in zip(x, (rows, keys, keys, rows), strict=True))
    weights = (q @ k.T * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(1)
    out = Sum.of(weights, v)
    dp, delta = dout @ v.T, (dout * out.value).sum(1, keepdim=True)
    ds, size = (weights * t * DIM**-0.5 for t in (dp - delta, dp.abs() + delta.abs()))
    return keys, out, Sum.of(ds, k, size), Sum.of(ds.T, q, size.T), Sum.of(weights.T, dout)


def check_query(x: list[Tensor], mask: Spans, query: int, out: Tensor, dq: Tensor) -> None:
    _, of_out, of_q, _, _ = exact(x, mask, torch.tensor([query], device=out.device))
    of_out.check(f"out of query {query}", 0, out[0, 0, query])
    of_q.check(f"dq of query {query}", 0, dq[0, 0, query])


def check_key(x: list[Tensor], mask: Spans, key: int, dk: Tensor, dv: Tensor) -> None:
    starts, ends = (t.reshape(-1, mask.seq_k)[:, key].tolist() for t in (mask.starts, mask.ends))
    rows = [i for start, end in zip(starts, ends, strict=True) for i in range(start, end)]
    keys, _, _, of_k, of_v = exact(x, mask, torch.tensor(rows, device=dk.device))
    (place,) = (keys == key).nonzero()[:, 0].tolist()
    of_k.check(f"dk of key {key}", place, dk[0, 0, key])
    of_v.check(f"dv of key {key}", place, dv[0, 0, key])


# ---- Memory


def resident(field: str) -> int:
    """Bytes of this process: VmRSS, what it holds, or VmHWM, the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@contextmanager
def peak(device: str) -> Iterator[Callable[[], int]]:
    """A function that returns the most bytes of the device that were taken beyond those at the beginning."""
    if device == "cpu":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the most is now what it holds
        except OSError as error:  # as in a sandbox
            pytest.skip(f"the peak of memory cannot be reset: {error}")
        before = resident("VmRSS")
        yield lambda: resident("VmHWM") - before
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before


# ---- Tests


def draw(seq: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v, dout (1, 1, seq, 64)."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, 1, seq, DIM, generator=generator, dtype=dtype, device=device).requires_grad_(i < 3)
        for i in range(4)
    ]


@targets
@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_many_tokens(
    make: Callable[[int, str], Spans], device: str, dtype: torch.dtype, seq: int, one_thread: Any
) -> None:
    """Forward and backward, with the mask's own memory and that of its tile lists."""
    assert seq / 8 > MOST_BYTES
    q, k, v, _ = draw(300, dtype, device)
    attnforge.attention(q, k, v, make(300, device)).sum().backward()  # compiles the kernels
    x = q, k, v, dout = draw(seq, dtype, device)
    with peak(device) as most:
        mask = make(seq, device)
        out = attnforge.attention(q, k, v, mask)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        taken = most() / seq
    assert taken <= MOST_BYTES, f"{taken:.0f} bytes a token"
    for i in some(seq):
        check_query(x, mask, i, out.detach(), dq)
        check_key(x, mask, i, dk, dv)
