"""benchmarks/intervals.py on the CPU: only the number of intervals differs between its masks; no time is judged."""

from __future__ import annotations

from pathlib import Path

import intervals
import pytest
import torch
from markdown_table import body

from attnforge.runtime.masks import Spans
from attnforge.runtime.search.case import Case

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ["--length=1301", "--window=300", "--block=48", "--model=2/1/16", "--dtype=fp32", "--device=cpu"]


def made(name: str, *words: str) -> dict[str, Case]:
    args = intervals.arguments([*SIZES, *words])
    return intervals.cases_of(intervals.plain(name, args), args)


def mask_of(case: Case) -> Spans:
    assert isinstance(case.mask, Spans)
    return case.mask


@pytest.mark.parametrize("name", intervals.NAMES)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_masks_show_the_same_pairs(name: str, parts: int) -> None:
    """Cut ones at the same place, those apart where the queries went; keys in the middle have n intervals."""
    one, cut, apart = (mask_of(case) for case in made(name, "--intervals", str(parts)).values())
    seen = one.visible(1301, 1301)
    window = 1301 if name == "causal" else 300
    assert torch.equal(seen, torch.ones(1301, 1301, dtype=torch.bool).tril().triu(1 - window))
    assert (one.intervals, cut.intervals, apart.intervals) == (1, parts, parts)
    assert torch.equal(cut.visible(1301, 1301), seen)
    to = intervals.moved(1301, parts, 48)
    assert torch.equal(to.sort().values, torch.arange(1301))
    assert torch.equal(apart.visible(1301, 1301)[to], seen)
    used = (apart.ends > apart.starts).sum(0)
    assert (used[parts * 48 : 1301 - 2 * parts * 48] == parts).all()


@pytest.mark.parametrize("name", intervals.NAMES)
def test_tiles_are_as_many_of_each_kind(name: str) -> None:
    """Of tiles whose rows divide a block."""
    for tile in ((48, 80), (16, 128), (24, 16)):
        counts = {intervals.tiles(case, tile) for case in made(name, "--intervals", "2", "4").values()}
        assert len(counts) == 1
        assert min(counts.pop()) > 0
    one, _, apart = made(name).values()
    assert intervals.tiles(one, (32, 80)) != intervals.tiles(apart, (32, 80))


def test_the_blocks_are_multiples_of_all_tiles() -> None:
    args = intervals.arguments(["--device=cpu"])
    assert all(args.block % rows == 0 for rows in (64, 128, 192, 256))
    assert args.length - args.length // (2 * args.block) * 2 * args.block < 2 * args.block


def test_short_sequences_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        intervals.arguments([*SIZES, "--intervals", "4", "--block", "768"])
    assert "--length must be at least 4 blocks of 768" in capsys.readouterr().err


def test_rows(tmp_path: Path) -> None:
    file = tmp_path / "intervals.md"
    words = ["--length=420", "--window=100", "--seconds=0.01", "--markdown", str(file)]
    assert intervals.main([*SIZES, *words]) == 0
    found = body(file.read_text())
    names = (intervals.ONE, "2, cut", "2, apart")
    works = [f"{mask}, {work}" for mask in ("causal", "window of 100") for work in ("fwd", "bwd")]
    assert [row[:2] for row in found] == [[work, name] for work in works for name in names]
    for row in found:
        assert len(row) == len(intervals.HEAD)
        assert all(float(cell) > 0 for cell in row[5:8])
        assert (row[1] != intervals.ONE) or row[7] == "1.000"
        assert float(row[8]) < 1e-5
