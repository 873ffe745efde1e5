"""benchmarks/loss_curves.py: the band of repetitions, and what is outside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click import ClickException
from loss_curves import WINDOW, band, largest, move_weights, moved, outside, read, running_mean, summary
from torch import nn


def test_a_moved_weight_differs_by_two_units_in_the_last_place_at_most() -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    steps = (
        moved(weight, torch.Generator().manual_seed(1)).view(torch.int32) - weight.view(torch.int32)
    ).abs()
    assert steps.max() == 2  # where a mantissa is above 1.5
    assert 0.2 < (steps == 0).float().mean() < 0.5


def test_repetition_0_keeps_the_weights_and_others_differ() -> None:
    models = [nn.Linear(8, 8) for _ in range(3)]
    for number, model in enumerate(models):
        model.load_state_dict(models[0].state_dict())
        move_weights(model, number)  # type: ignore[arg-type]
    first, second, third = (model.weight for model in models)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    kept = first.clone()
    move_weights(models[0], 0)  # type: ignore[arg-type]
    assert torch.equal(first, kept)


def test_running_mean() -> None:
    means = running_mean([float(x) for x in range(WINDOW + 2)])
    assert means[:2] == [0.0, 0.5]
    assert means[-1] == pytest.approx(sum(range(2, WINDOW + 2)) / WINDOW)


def test_band_and_outside() -> None:
    limits = band([[1.0, 4.0], [2.0, 3.0]])
    assert limits == [(1.0, 2.0), (3.0, 4.0)]
    assert outside([1.5, 3.5], limits) == 0
    assert outside([1.5, 5.0], limits) == pytest.approx(0.2)
    assert outside([0.5, 3.5], limits) == pytest.approx(1.0)


def test_largest_distance_from_the_band_of_all_runs_but_one() -> None:
    runs = [[1.0], [2.0], [4.0]]
    assert largest(runs) == pytest.approx(1.0)  # 1 is half of the nearest other one, 4 is twice as much
    assert largest(runs, [3.0]) == pytest.approx(1 / 3)  # without 4, 2 is the nearest
    assert largest(runs, [2.0]) == pytest.approx(0.0)


def test_read_and_summary(tmp_path: Path) -> None:
    for name, loss in (("attnforge.0_7", 3.0), ("flex.0_7", 2.0), ("flex.1_7", 2.5)):
        lines = [json.dumps({"ce": loss})] * 2
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    curves = read(tmp_path)
    assert curves == {7: {"attnforge": [[3.0, 3.0]], "peer": [[2.0, 2.0], [2.5, 2.5]]}}
    (line,) = summary(curves)
    assert "seed 7: outside the band by at most 16.67%, the band is up to 25.00% wide" in line
    assert (
        "all runs but one by at most 33.33%, FlexAttention's run that is left out by at most 25.00%" in line
    )


@pytest.mark.parametrize("names", [("attnforge.0_0", "flex.0_0"), ("flex.0_0", "flex.1_0")])
def test_a_seed_that_lacks_runs_is_named(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"ce": 1.0}))
    with pytest.raises(ClickException, match=r"seed 0 has \d runs of attnforge and \d of FlexAttention"):
        read(tmp_path)


def test_a_run_that_has_not_ended_is_named(tmp_path: Path) -> None:
    for name, steps in (("attnforge.0_0", 3), ("flex.0_0", 2)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps({"ce": 1.0})] * steps))
    with pytest.raises(ClickException, match=r"flex.0_0.jsonl: 2 steps, others have 3"):
        read(tmp_path)
