"""Search logs as values, and the bounds of their variants."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up_logs
import numpy as np
import pytest
import torch
from PIL import Image

from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.report.bounds import bounds, case_of, memory_ms
from attnforge.bagel.report.masks import hidden_colour, picture_of
from attnforge.bagel.report.read import PAUSE, Peer, Run, Subject, Variant, read
from attnforge.codegen.cost_model import DATA_SHEETS, data_sheet
from attnforge.codegen.families.sm90_backward import Sm90Backward
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

FORWARD = Direction.FORWARD
CPU = torch.device("cpu")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "h200.jsonl"
    made_up_logs.write_log(path, FORWARD, count=20)
    return path


def only(path: Path) -> Subject:
    (subject,) = read([path]).subjects
    return subject


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every line of a log."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_log_is_one_run(log: Path) -> None:
    subject = only(log)
    assert (subject.case, subject.direction, subject.dtype) == ("finetune/0 7B", "fwd", "bf16")
    (run,) = subject.runs
    assert (run.label, run.device, run.space) == ("h200", "NVIDIA H200", 27)
    assert len(run.variants) == 20
    assert [v.status for v in run.failed] == ["compile", "wrong"]
    assert [v.ms for v in run.ranked] == sorted(v.ms for v in run.variants if v.status == "ok")
    assert run.incumbent == run.variants[0].spec
    assert [peer.name for peer in run.peers if peer.tflops is None] == ["fa4"]
    assert run.best_peer is not None
    assert run.best_peer.name == "fa3"
    low, high = run.ranked[0].speeds
    assert low < run.ranked[0].tflops < high


def test_logs_of_one_problem_are_compared(log: Path) -> None:
    """By log, and by environment within a log; another pass is another problem."""
    other = log.with_name("other.jsonl")
    made_up_logs.write_log(other, FORWARD, count=3, gain=1.5)
    made_up_logs.write_log(log, FORWARD, count=3, torch="2.99.0")
    made_up_logs.write_log(log, Direction.BACKWARD, count=3)
    forward, backward = read([log, other]).subjects
    assert [run.label for run in forward.runs] == ["h200, 2.11.0", "h200, 2.99.0", "other"]
    assert [run.label for run in backward.runs] == ["h200"]
    assert forward.best is not None
    assert forward.best[0].label == "other"


def test_damaged_and_unknown_lines_are_counted(log: Path) -> None:
    """A cut line, a line of something else, and a result with a knob that is gone."""

    def gone(row: dict[str, Any]) -> None:
        if "result" in row and row["result"]["status"] == "wrong":
            row["result"]["spec"]["tuning"]["a_knob_of_old"] = 1

    edit(log, gone)
    with log.open("a") as file:
        file.write('{"a": 1}\n[]\n{"case": "finet')
    logs = read([log])
    assert logs.skipped == {log: 4}
    assert len(logs.subjects[0].runs[0].variants) == 19


def test_a_log_without_results_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match=r"no line of .*empty\.jsonl is a result"):
        read([path])


def test_one_sample_has_no_interval(log: Path, tmp_path: Path) -> None:
    row = next(row for row in map(json.loads, log.read_text().splitlines()) if "result" in row)
    found = []
    for repeats in (1, 2):
        row["result"] |= {"status": "ok", "ms": 7.0, "low_ms": 7.0, "high_ms": 7.0, "repeats": repeats}
        path = tmp_path / f"{repeats}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        found.append(read([path]).subjects[0].runs[0].variants[0].interval)
    assert found == [None, (7.0, 7.0)]


def test_an_older_log_has_no_notes_and_no_intervals(log: Path) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    old = [row for row in rows if "result" in row and row["result"]["status"] == "ok"]
    for row in old:
        row["time"] = row["time"][:19]  # whole seconds of local time
        del row["result"]["low_ms"], row["result"]["high_ms"]
    log.write_text("".join(json.dumps(row) + "\n" for row in old))
    run = only(log).runs[0]
    assert (run.space, run.incumbent, run.peers) == (0, None, [])
    best = run.ranked[0]
    assert best.speeds == (best.tflops, best.tflops)


def test_pauses_between_searches_take_no_time(log: Path) -> None:
    """Whether a new search notes its start or the log is silent for long."""
    before = only(log).runs[0]
    lines = log.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["time"] = row["time"].replace("2026-11-20", "2026-11-21")
    again = [json.dumps(row) for row in rows]
    log.write_text("\n".join(lines + again) + "\n")
    after = only(log).runs[0]
    assert after.seconds == pytest.approx(2 * before.seconds)
    log.write_text("\n".join(lines + again[1:]) + "\n")  # without the note
    assert only(log).runs[0].seconds == pytest.approx(2 * before.seconds, abs=0.5)
    assert before.seconds < PAUSE


def test_the_leaders_have_their_last_times(log: Path) -> None:
    """What was timed at the end ranks and shows variants, and says what spoiled the timing."""

    def slower(row: dict[str, Any]) -> None:
        if "final" in row:
            row["final"]["warnings"] = ["the GPU was hot"]
            for result in row["final"]["results"][:1]:
                result["ms"], result["tflops"] = 2 * result["ms"], result["tflops"] / 2

    first, second, *_ = only(log).runs[0].ranked
    edit(log, slower)
    run = only(log).runs[0]
    assert run.ranked[0].spec == second.spec
    assert run.latest[first.spec].tflops == first.tflops / 2
    assert run.latest[first.spec].source == first.source != ""
    assert run.warnings == ["the GPU was hot"]
    assert len(run.variants) == 20


def test_the_others_follow_the_leaders_change(log: Path) -> None:
    """A chip that is hot at the end does not make the winner look slower than what was timed before."""

    def hot(row: dict[str, Any]) -> None:
        for result in row.get("final", {}).get("results", []):
            for name in ("ms", "low_ms", "high_ms"):
                result[name] *= 1.25
            result["tflops"] /= 1.25

    before = only(log).runs[0]
    edit(log, hot)
    after = only(log).runs[0]
    assert 0 < len(after.final) < len(after.ranked)
    assert [v.spec for v in after.ranked] == [v.spec for v in before.ranked]
    for old, new in zip(before.ranked, after.ranked, strict=True):
        assert (new.ms, new.tflops) == pytest.approx((1.25 * old.ms, old.tflops / 1.25))
        assert new.interval == (old.interval and pytest.approx([1.25 * ms for ms in old.interval]))
    assert [v.status for v in after.failed] == [v.status for v in before.failed]


def test_of_a_repeated_variant_the_last_result_counts(log: Path) -> None:
    lines = log.read_text().splitlines()[:-2]  # without the leaders' last timing
    log.write_text("\n".join(lines) + "\n")
    last = json.loads(lines[1])
    last["result"]["ms"] /= 10
    last["result"]["tflops"] *= 10
    with log.open("a") as file:
        file.write(json.dumps(last) + "\n")
    run = only(log).runs[0]
    assert len(run.variants) == 21
    assert len(run.ranked) == 18
    assert run.ranked[0] is run.variants[-1]


def variant(spec: Spec, tflops: float) -> Variant:
    return Variant(spec, "ok", "", 1.0, tflops, None, 168, 0, 0, 0.0, 0.0, "", 0.0)


def run_of(device: str, *variants: Variant) -> Run:
    return Run(Path("log"), {"device": device}, "log", list(variants))


def test_bounds_of_a_full_mask_on_an_h200() -> None:
    """All pairs of all tiles are visible, so that a forward does tile_m FLOP for each byte of K and V."""
    case = make_case("full/2x1536", "16/16/128", DType.BFLOAT16, CPU)
    specs = list(candidates(Problem(FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.FULL)))
    small = next(s for s in specs if (s.tuning.tile_m, s.tuning.tile_n) == (64, 128))
    large = next(s for s in specs if (s.tuning.tile_m, s.tuning.tile_n) == (128, 128))
    roof, limits = bounds(case, run_of("NVIDIA H200", variant(small, 200.0), variant(large, 500.0)))
    assert roof.tflops == pytest.approx(989.4, abs=0.1)
    assert not roof.measured
    by_tile = {v.spec.tuning.tile_m: bound for v, bound in limits}
    for tile_m, bound in by_tile.items():
        assert bound.intensity == pytest.approx(tile_m)
        assert bound.tile_use == 1
        assert 0.5 < bound.balance <= 1
    assert by_tile[128].tflops == pytest.approx(
        min(roof.l2 * by_tile[128].intensity, roof.tflops * by_tile[128].balance)
    )
    bytes_once = 2 * 16 * 1536 * 4 * 128 * 2
    assert memory_ms(case, roof, FORWARD) == pytest.approx(bytes_once / 4.8e12 * 1e3)
    assert memory_ms(case, roof, Direction.BACKWARD) == pytest.approx(2 * bytes_once / 4.8e12 * 1e3)


def test_persistent_blocks_of_a_backward_take_work_tiles_as_they_end() -> None:
    """So their balance is that of a block for each work tile, not that of fixed shares."""
    case = make_case("causal/4x1536", "12/12/64", DType.BFLOAT16, CPU)
    plain = Sm90Backward(64, 128, 4, 3, True, 2, False, False)
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 64, Mask.CAUSAL)
    specs = [Spec(problem, tuning) for tuning in (plain, replace(plain, persistent=1))]
    _, limits = bounds(case, run_of("NVIDIA H200", *(variant(spec, 200.0) for spec in specs)))
    first, second = (bound for _, bound in limits)
    assert first.balance == second.balance


@pytest.mark.parametrize("device", ["cpu avx2", "NVIDIA H100 PCIe"])
def test_the_roof_of_a_device_without_known_multiprocessors_is_measured(device: str) -> None:
    """The fastest variant reaches it in visited tiles, and no variant is above its bound."""
    case = case_of("finetune/0 0.5B", "fp32")
    specs = list(candidates(Problem(FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.SPANS, 4)))
    few = {spec.tuning.tile_m: spec for spec in specs}
    variants = [variant(spec, 0.01 * n) for n, spec in enumerate(few.values(), 1)]
    roof, limits = bounds(case, run_of(device, *variants))
    assert roof.measured
    assert len(limits) > 1
    assert max(v.tflops / bound.tile_use for v, bound in limits) == roof.tflops
    assert all(v.tflops <= bound.tflops * (1 + 1e-9) for v, bound in limits)
    assert all(0.5 < bound.tile_use < 1 for _, bound in limits)


def test_data_sheets_agree_with_their_multiprocessors() -> None:
    """The rate of a roof is of multiprocessors and clock, that of dispatch is the data sheet's."""
    for sheet in DATA_SHEETS:
        if sheet.gpu is not None:
            rate = 2 * sheet.gpu.half_fma * sheet.gpu.multiprocessors * sheet.gpu.ghz / 1e3
            assert rate == pytest.approx(sheet.tflops, rel=3e-3), sheet.pattern


@pytest.mark.parametrize(
    ("names", "rate"), [("H100 PCIe", 756), ("H100 NVL, H200 NVL", 835), ("H20, H20-3e", 148)]
)
def test_rates_of_chips_with_other_clocks(names: str, rate: float) -> None:
    """Which no multiprocessors here check."""
    for name in names.split(", "):
        sheet = data_sheet(f"NVIDIA {name}")
        assert sheet is not None
        assert (sheet.tflops, sheet.gpu) == (rate, None), name


@pytest.mark.parametrize(
    ("name", "memory", "listed"),
    [
        ("NVIDIA H200", 4.8, True),
        ("nvidia-h100-80gb-hbm3", 3.35, True),
        ("NVIDIA GH200 480GB", 4.0, True),
        ("NVIDIA H200 NVL", 4.8, False),
        ("nvidia_h200_nvl", 4.8, False),
        ("NVIDIA A100-SXM4-40GB", 1.555, True),
        ("NVIDIA A100-SXM4-80GB", 2.039, True),
        ("NVIDIA GeForce RTX 3090", 0.936, True),
        ("NVIDIA GeForce RTX 4090", 1.008, True),
        ("NVIDIA GeForce RTX 5090", 1.792, True),
    ],
)
def test_data_sheet_by_name(name: str, memory: float, listed: bool) -> None:
    sheet = data_sheet(name)
    assert sheet is not None
    assert (sheet.memory, sheet.gpu is not None) == (memory, listed)
    assert data_sheet("cpu avx2") is None


def test_float32_pays_six_products() -> None:
    case = make_case("full/512", "8/8/64", DType.FLOAT32, CPU)
    spec = next(candidates(Problem(FORWARD, Arch.SM90A, DType.FLOAT32, 64, Mask.FULL)))
    roof, _ = bounds(case, run_of("NVIDIA H200", variant(spec, 50.0)))
    assert roof.tflops == pytest.approx(989.4 / 6, abs=0.1)


def test_a_batch_is_part_of_a_cases_name() -> None:
    one, three = case_of("causal/512 8/8/64", "bf16"), case_of("3 x causal/512 8/8/64", "bf16")
    assert three == replace(one, name=three.name, batch=3, mask=three.mask)
    with pytest.raises(ValueError, match="there is no 'nothing'"):
        case_of("nothing 7B", "bf16")


@pytest.mark.parametrize("score", ["softcap:50", "relative_bias:128", "mods.py:near"])
def test_a_score_is_part_of_a_cases_name(score: str) -> None:
    """It changes no pairs."""
    plain = case_of("causal/512 8/8/64", "bf16")
    assert case_of(f"causal/512 8/8/64 {score}", "bf16").pairs == plain.pairs


@pytest.mark.parametrize("pack", ["finetune/0", "causal/700", "blocks/0.9/512"])
def test_the_picture_of_a_mask(pack: str) -> None:
    """Skipped tiles are transparent; all other pixels have the legend's colours, exactly."""
    case = make_case(pack, "8/8/64", DType.BFLOAT16, CPU)
    picture = picture_of(case, 64, 128)
    assert picture is not None
    data = base64.b64decode(picture.url.removeprefix("data:image/png;base64,"))
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    colours = set(map(tuple, np.asarray(image).reshape(-1, 4).tolist()))
    seen = {"#{:02x}{:02x}{:02x}".format(*colour[:3]) for colour in colours if colour[3]}
    assert seen <= {shade for _, *shades in picture.legend for shade in shades} | {hidden_colour()}
    assert picture.legend[0][1] in seen
    assert picture.skipped > 0
    assert any(colour[3] == 0 for colour in colours)
    assert picture.full + picture.partial + picture.skipped == -(-case.seq_q // 64) * -(-case.seq_k // 128)


def test_the_best_peer_is_the_one_that_the_winner_leads_by_least(log: Path) -> None:
    """Where all were timed beside the winner; a machine that became slower must not hide a faster peer."""
    (run,) = only(log).runs
    flex = Peer("flex", 8.05, 40.0, "", ours_ms=23.9)
    math = Peer("sdpa-math", 1.34, 250.0, "", ours_ms=0.36)
    assert replace(run, peers=[math, flex]).best_peer == flex
    assert replace(run, peers=[math, replace(flex, ours_ms=None)]).best_peer == math
