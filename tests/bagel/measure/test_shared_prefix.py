"""benchmarks/shared_prefix.py on the CPU: all layouts compute the same, who differs is not timed; no time is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from markdown_table import body
from shared_prefix import HEAD, Group, cases_of, flat, main
from torch import Tensor

from attnforge.bagel.measure import cudnn_flex, fa3
from attnforge.bagel.measure.attentions import Attention
from attnforge.bagel.measure.peers import attend
from attnforge.codegen.spec import DType
from attnforge.runtime.search.case import Case

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ["--completions=3", "--tokens=5", "--prefix=9", "--model=2/1/16", "--device=cpu", "--seconds=1"]
CPU = torch.device("cpu")


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "attention", attend)  # our own kernel on FlashAttention's layout
    table = tmp_path / "table.md"
    assert main([*SIZES, "--peers", "sdpa-flash", "fa3", "--markdown", str(table)]) == 0
    found = body(table.read_text())
    assert [tuple(row[:3]) for row in found] == [
        ("attnforge", "pack", "24"),
        ("attnforge", "batch", "42"),
        ("sdpa-flash", "pack", "24"),
        ("fa3", "varlen", "42"),
    ]
    for row in found:
        assert len(row) == len(HEAD)
        assert all(float(cell) > 0 for cell in row[3:10])
        assert row[10] == "-"  # memory, on a CPU
    assert all(0 < float(row[11]) < 2e-2 for row in found[1:])


def test_who_differs_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(case: Case) -> Attention:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(case)(q, k, v) * torch.linspace(1, 1.2, case.seq_q)[:, None]

        return call

    monkeypatch.setattr(cudnn_flex, "attention", wrong)
    assert main([*SIZES, "--peers", "cudnn-flex"]) == 1
    said = capsys.readouterr().out
    assert "cudnn-flex, pack: differs" in said
    assert "| cudnn-flex |" not in said


def test_pairs_and_copies_by_hand() -> None:
    """A causal prefix of 3, and completions of 2 that see it: 6 + 2 x (4 + 5) pairs, or 2 x 15 with copies of it."""
    group = Group(completions=2, tokens=2, prefix=3)
    cases = cases_of(group, "2/1/16", DType.FLOAT32, CPU)
    assert {name: case.batch * case.pairs for name, case in cases.items()} == {
        "pack": 24,
        "batch": 30,
        "varlen": 30,
    }
    x = cases["pack"].inputs()
    copies = group.repeat_inputs(x)
    for whole, copied, sequence in zip(x, copies, flat(copies), strict=True):
        assert torch.equal(sequence[0, :, 5:], copied[1])
        for layout, one in (("batch", copied), ("varlen", sequence)):
            # Copies of dout are summed, as gradients are; all else is averaged.
            prefix, own = group.parts(one, layout, total=whole is x.dout)
            torch.testing.assert_close(prefix, whole[0, :, :3])
            assert torch.equal(own, whole[0, :, 3:])
