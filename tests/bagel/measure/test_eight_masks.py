"""benchmarks/eight_masks.py on the CPU: its masks against definitions, who differs is not timed; no time is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eight_masks import DOCUMENTS, HEAD, MASKS, case_of, contexts, main, node_lengths, shares
from markdown_table import body
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex, fa3
from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.measure.peers import attend
from attnforge.codegen.spec import DType
from attnforge.runtime.masks import FunctionMask, Spans
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.reference import visible_rows

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LENGTH = 1301
SIZES = ["--length=160", "--model=2/1/16", "--dtype=fp32", "--device=cpu", "--seconds=0.01"]


def made(name: str, length: int = LENGTH) -> Case:
    return case_of(name, length, "2/1/16", DType.FLOAT32, CPU)


# ---- Definitions: bool (length, length), row by row


def segments(lengths: list[int]) -> list[int]:
    """The segment of each token."""
    return [n for n, length in enumerate(lengths) for _ in range(length)]


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def documents(length: int) -> Tensor:
    of = torch.tensor(segments(shares(DOCUMENTS, length)))
    return (of[:, None] == of) & causal(length)


def local(length: int) -> Tensor:
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        seen[i, max(i - 512, 0) : i + 1] = True
    return seen


def sinks_local(length: int) -> Tensor:
    seen = local(length)
    for i in range(length):
        seen[i, : min(4, i + 1)] = True
    return seen


def ancestors(node: int) -> list[int]:
    return [node, *ancestors((node - 1) // 2)] if node else [0]


def preorder(node: int = 0) -> list[int]:
    return [node, *preorder(2 * node + 1), *preorder(2 * node + 2)] if node < 127 else []


def tree(length: int, order: list[int]) -> Tensor:
    """Nodes in `order`: all tokens of those above a token's own, and its own up to the token."""
    lengths, begins, end = node_lengths(length), {}, 0
    for node in order:
        begins[node] = end
        end += lengths[node]
    assert end == length
    seen = torch.zeros(length, length, dtype=torch.bool)
    for node in order:
        for i in range(begins[node], begins[node] + lengths[node]):
            for above in ancestors(node)[1:]:
                seen[i, begins[above] : begins[above] + lengths[above]] = True
            seen[i, begins[node] : i + 1] = True
    return seen


def longformer(length: int) -> Tensor:
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        seen[i, max(i - 256, 0) : i + 257] = True
    for n in range(8):
        token = int((n + 0.5) * length / 8)
        seen[token] = True
        seen[:, token] = True
    return seen


def hstu(length: int) -> Tensor:
    seen, begin = torch.zeros(length, length, dtype=torch.bool), 0
    for context in contexts(length):
        for n in range(context):
            seen[begin + n, begin : begin + n + 1] = True
            seen[begin + context + n, begin : begin + context] = True
            seen[begin + context + n, begin + context + n] = True
        begin += 2 * context
    if begin < length:  # one target more, of the last document
        assert begin == length - 1
        seen[begin, begin - 2 * context : begin - context] = True
        seen[begin, begin] = True
    return seen


DEFINITIONS: dict[str, Callable[[int], Tensor]] = {
    "causal": causal,
    "documents": documents,
    "local": local,
    "sinks-local": sinks_local,
    "tree-depth-first": lambda length: tree(length, preorder()),
    "tree-breadth-first": lambda length: tree(length, list(range(127))),
    "longformer": longformer,
    "hstu": hstu,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_their_definitions(name: str) -> None:
    """In the kernels' form, in cuDNN's, and by the number of visible pairs."""
    case, exact = made(name), DEFINITIONS[name](LENGTH)
    assert torch.equal(visible_rows(case.mask, torch.arange(LENGTH), LENGTH, LENGTH)[0, 0], exact)
    assert case.pairs == int(exact.sum())
    ends = cudnn_flex.endpoints(case)
    before = torch.searchsorted(ends[0].T.contiguous(), torch.arange(LENGTH).repeat(LENGTH, 1), right=True)
    assert torch.equal(before % 2 == 0, exact)
    # Of longformer 19 where no window holds two global tokens: in sequences of more than 4104.
    assert ends.shape[1] == {"causal": 1, "longformer": 15, "hstu": 5}.get(name, 13 if "tree" in name else 3)


def test_the_sequence_of_the_benchmark() -> None:
    """Of 131072 tokens: the documents as given, the others' within their bounds, and what a query sees on average."""
    length = 1 << 17
    assert shares(DOCUMENTS, length) == list(DOCUMENTS)
    assert sum(node_lengths(length)) == length
    assert all(0.75 < n * 127 / length < 1.25 for n in node_lengths(length))
    assert all(8192 <= 2 * n <= 16384 for n in contexts(length))
    cases = {name: made(name, length) for name in MASKS}
    assert cases["tree-depth-first"].pairs == cases["tree-breadth-first"].pairs
    assert cases["documents"].pairs == sum(n * (n + 1) // 2 for n in DOCUMENTS)
    assert cases["local"].pairs == 513 * length - 513 * 512 // 2
    assert cases["sinks-local"].pairs == cases["local"].pairs + 4 * (length - 513) - 6
    assert cases["hstu"].pairs == sum(n * (n + 1) // 2 + n * (n + 1) for n in contexts(length))
    for name, case in cases.items():
        if isinstance(case.mask, (Spans, FunctionMask)):
            few = name in ("sinks-local", "tree-depth-first")  # a few keys that nearly all queries see
            assert case.mask.visible_keys == pytest.approx((-1 if few else 1) * case.pairs / length, abs=1)


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def some(case: Case) -> Attention:
        if case.name != "causal":
            raise Unavailable("takes no mask")
        return attend(case)

    monkeypatch.setattr(fa3, "attention", some)
    monkeypatch.setattr(cudnn_flex, "planner", lambda case: lambda: attend(case))
    table = tmp_path / "table.md"
    assert main([*SIZES, "--peers", "sdpa-flash", "fa3", "cudnn-flex", "--markdown", str(table)]) == 0
    found = body(table.read_text())
    by_mask = {
        name: ["attnforge", "sdpa-flash", *(["fa3"] if name == "causal" else []), "cudnn-flex"]
        for name in MASKS
    }
    assert [(row[0], row[2]) for row in found] == [(name, one) for name in MASKS for one in by_mask[name]]
    for row in found:
        assert len(row) == len(HEAD)
        assert float(row[1]) == pytest.approx(100 * made(row[0], 160).pairs / 160**2, rel=1e-2)
        assert all(float(cell) > 0 for cell in row[3:10])
        assert 0 <= float(row[11]) < 1e-4
        listed = row[2] == "cudnn-flex" or (row[2] == "attnforge" and row[0] != "causal")
        assert (row[10] != "-") == listed
    assert "hstu, fa3: takes no mask" in capsys.readouterr().out


def test_who_differs_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In few tokens, too, by less than the tolerance of all."""

    def wrong(case: Case) -> Callable[[], Attention]:
        factor = torch.ones(case.seq_q, 1)
        factor[-20:] = 1.05
        return lambda: lambda q, k, v: attend(case)(q, k, v) * factor

    monkeypatch.setattr(cudnn_flex, "planner", wrong)
    words = ["--length=2100", "--dtype=bf16", "--masks=local", "--peers=cudnn-flex"]
    assert main([*SIZES, *words]) == 1
    said = capsys.readouterr().out
    assert "local, cudnn-flex: differs from ours" in said
    assert "| cudnn-flex |" not in said


def test_nobody_is_timed_beside_wrong_results_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "attnforge.bagel.measure.peers.attend", lambda case: lambda q, k, v: attend(case)(q, k, v) * 1.01
    )
    assert main([*SIZES, "--masks=hstu", "--peers"]) == 1
    said = capsys.readouterr().out
    assert "hstu, attnforge: differs from float64" in said
    assert "| hstu |" not in said
