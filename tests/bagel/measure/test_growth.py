"""benchmarks/growth.py on the CPU: one density at every length, all sizes are timed and counted; no time is judged."""

from __future__ import annotations

import argparse
from pathlib import Path

import growth
import pytest
import torch

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.timing import Timing

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.mark.parametrize("mask", growth.MASKS)
def test_the_density_is_the_same_at_every_length(mask: str) -> None:
    cases = [growth.of_length(mask, length, "14/2/64", DType.BFLOAT16, CPU) for length in growth.LENGTHS]
    given = make_case("causal/36864" if mask == "causal" else mask, "14/2/64", DType.BFLOAT16, CPU)
    used = given.mask.used if isinstance(given.mask, PackedMask) else given.seq_q
    for case, length in zip(cases, growth.LENGTHS, strict=True):
        assert (case.seq_q, case.seq_k) == (length, length)
        assert case.pairs / length**2 == pytest.approx(given.pairs / used**2, rel=2e-3)
        if isinstance(case.mask, PackedMask):
            assert case.mask.used == length
            assert case.pairs == int((case.mask.ends.long() - case.mask.starts).sum())


def test_a_pack_is_scaled_split_by_split() -> None:
    """Padding and empty splits are left out; samples keep their splits and these their modes."""
    given = PackedMask(
        [30, 0, 50, 20], [10, 0, 20, 50, 20], ["causal", "full", "noise", "full", "causal"], CPU, used=80
    )
    same = PackedMask([75, 125], [25, 50, 125], ["causal", "noise", "full"], CPU)
    found = growth.scaled(given, 200)
    assert torch.equal(found.starts, same.starts)
    assert torch.equal(found.ends, same.ends)
    with pytest.raises(ValueError, match="length: 2 tokens are too few for a pack of 3 splits"):
        growth.scaled(given, 2)


def test_rates_count_all_calls_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten milliseconds a sample: rates are the arithmetic of its calls over that, spreads and flatness theirs."""
    monkeypatch.setattr(growth, "sample_of", lambda case, direction: (lambda index: None, 64 // case.batch))
    monkeypatch.setattr(
        growth, "interleaved", lambda calls, *rest: {name: Timing.of([9.0, 10.0, 12.0]) for name in calls}
    )
    args = argparse.Namespace(dtype="bf16", device="cpu", tokens=128, batches=[1, 64], seconds=0.0, repeats=3)
    cases = growth.by_batch("2/1/16", "full", args)
    series = growth.Series("2/1/16 full fwd", Direction.FORWARD, cases)
    work = 4 * 64 * 2 * 16 * 128**2  # of the whole batch of 64: as much as that of 64 calls of one
    cells = [cell.strip() for cell in growth.row(series, args).strip("| ").split("|")]
    rate = f"{work / 10.0 / 1e9:.4g}"
    assert cells == ["2/1/16 full fwd", "100", f"{rate} (33.3%)", f"{rate} (33.3%)", "0.0%", cells[-2], "3"]


def test_tables(tmp_path: Path) -> None:
    file = tmp_path / "growth.md"
    words = ["--heads=2/1/16", "--dtype=fp32", "--device=cpu", "--seconds=0.01", "--tokens=32"]
    words += ["--lengths", "96", "128", "--batches", "1", "3", "--masks", "documents/0", "causal"]
    assert growth.main([*words, "--markdown", str(file)]) == 0
    lines = [line for line in file.read_text().splitlines() if line[:2] == "| " and "---" not in line]
    rows = [line.strip("| ").split(" | ") for line in lines]
    works = ("fwd", "bwd")
    assert [row[0] for row in rows] == [
        "tokens",
        *(f"2/1/16 {mask} {work}" for mask in ("documents/0", "causal") for work in works),
        "batch of 32 tokens",
        *(f"2/1/16 {mask} {work}" for mask in ("full", "causal") for work in works),
    ]
    assert rows[0][2:4] == ["96", "128"]
    assert rows[5][2:4] == ["1", "3"]
    for row in (*rows[1:5], *rows[6:]):
        speeds = [float(cell.split()[0]) for cell in row[2:4]]
        assert min(speeds) > 0
        assert float(row[4].rstrip("%")) == pytest.approx(
            100 * (max(speeds) / min(speeds) - 1), rel=1e-2, abs=0.1
        )
        assert float(row[5]) > 0
        assert int(row[6]) >= 3


def test_lines_are_picked() -> None:
    args = growth.arguments(["--only", "length 14/2/64 documents/0 bwd", "--device=cpu", "--lengths", "2048"])
    lengths, batches = growth.chosen(args)
    assert [one.name for one in lengths] == ["14/2/64 documents/0 bwd"]
    assert batches == []
