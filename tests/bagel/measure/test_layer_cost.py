"""benchmarks/layer_cost.py on the CPU: it finds the cost that times were made of, and measures a layer."""

from __future__ import annotations

import json
from pathlib import Path

import layer_cost
import pytest

from attnforge.bagel import LayerCost
from attnforge.bagel.workloads import workload
from attnforge.runtime.search.timing import Timing

pytestmark = pytest.mark.usefixtures("one_thread")
COST = LayerCost(3e-6, 5e-11, 2e-3)


def measured(factor: float = 1.0) -> list[layer_cost.Measured]:
    """Times of the packs of the benchmark by COST, that of the first one times `factor`."""
    packs = [layer_cost.pack_of(name) for name in layer_cost.PACKS]
    seconds = [COST.seconds(pack.used, pack.mask("cpu").pairs) for pack in packs]
    seconds[0] *= factor
    return [
        layer_cost.Measured(pack, Timing.of([1e3 * time])) for pack, time in zip(packs, seconds, strict=True)
    ]


def test_a_part_of_a_pack_has_its_first_samples() -> None:
    whole, part = workload("t2i_lowres/1"), layer_cost.pack_of("t2i_lowres/1:16384")
    assert 15000 < part.used <= 16384 < part.used + whole.sample_lens[len(part.sample_lens) - 1]
    assert part.tokens == part.used
    first = whole.mask("cpu").visible(part.used, whole.tokens)[:, : part.used]
    assert (part.mask("cpu").visible(part.used, part.used) == first).all()
    assert part.split_lens[-1] == part.sample_lens[-1] == 0  # where others have padding
    assert layer_cost.pack_of("pretrain/0") is workload("pretrain/0")
    with pytest.raises(
        ValueError, match="pretrain/0:100 has no sample, the first of pretrain/0 has 3105 tokens"
    ):
        layer_cost.pack_of("pretrain/0:100")


def test_the_packs_tell_the_costs_apart() -> None:
    """Each fit to all but one finds the cost: the packs differ in tokens and in pairs."""
    found = measured()
    cost = layer_cost.fit(found)
    assert (cost.token, cost.pair, cost.fixed) == pytest.approx((COST.token, COST.pair, COST.fixed), rel=1e-6)
    assert layer_cost.left_out(found) == pytest.approx([0.0] * len(found), abs=1e-6)


def test_errors_are_those_of_packs_that_the_fit_has_not_seen() -> None:
    """The first pack takes a tenth longer than the cost of all others says."""
    found = measured(1.1)
    errors = layer_cost.left_out(found)
    assert errors[0] == pytest.approx(1 / 1.1 - 1, rel=1e-6)
    cells = [cell.strip() for cell in layer_cost.rows(found)[2].strip("| ").split("|")]
    tokens, pairs = 36858, 165770149
    assert cells[:3] == ["pretrain/0", str(tokens), "165.8"]
    assert cells[6] == "-9.1%"
    assert abs(float(cells[5].rstrip("%"))) < 9.1
    default = LayerCost().seconds(tokens, pairs) / (1.1 * COST.seconds(tokens, pairs)) - 1
    assert cells[7] == f"{default:+.1%}"
    row = layer_cost.constants({"none": found})[-1].strip("| ").split(" | ")
    assert row[0] == "none"
    assert row[5] == "9.1%"


def test_a_layer_is_measured(tmp_path: Path) -> None:
    packs, table = tmp_path / "packs.jsonl", tmp_path / "cost.md"
    lines = []
    for lengths, modes in (
        ([60, 50], "cn"),
        ([110], "f"),
        ([200], "c"),
        ([300, 30], "fn"),
        ([20] * 5, "ccccc"),
    ):
        names = [{"c": "causal", "f": "full", "n": "noise"}[mode] for mode in modes]
        one = {"sample_lens": [*lengths, 2], "split_lens": [*lengths, 2], "attn_modes": [*names, "causal"]}
        lines.append(json.dumps({**one, "vit_lens": [], "used": sum(lengths)}))
    packs.write_text("\n".join(lines) + "\n")
    names = [f"{packs}:{n}" for n in range(1, 6)]
    words = ["--packs", *names, "--model", "tiny", "--device", "cpu", "--seconds", "0.05"]
    assert layer_cost.main([*words, "--markdown", str(table)]) == 0
    found = [line.strip("| ").split(" | ") for line in table.read_text().splitlines() if line.startswith("|")]
    of_packs = [row for row in found if row[0] in names]
    assert [row[0] for row in of_packs] == names * 2
    assert [int(row[1]) for row in of_packs[:5]] == [110, 110, 200, 330, 100]
    assert all(float(row[3]) > 0 for row in of_packs)
    for kind in ("none", "full"):
        (row,) = (row for row in found if row[0] == kind)
        assert all(float(cell) >= 0 for cell in row[1:4])
        assert max(map(float, row[1:4])) > 0


def test_few_packs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        layer_cost.arguments(["--packs", "pretrain/0", "finetune/0", "finetune/1"])
    assert "--packs: got 3, expected at least 4" in capsys.readouterr().err
