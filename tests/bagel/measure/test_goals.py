"""Goals and their measurement: contestants in turns, failures kept, errors, tables; fake peers on the CPU."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnforge.bagel.measure import fa4, interleaved, peers
from attnforge.bagel.measure.attentions import Attention
from attnforge.bagel.measure.bench import OURS
from attnforge.bagel.measure.cases import TOKENS, make_case
from attnforge.bagel.measure.goal_report import error_ratios, markdown, missed, rates, ratio
from attnforge.bagel.measure.goals import GOALS, STEP, WORKS, Goal
from attnforge.bagel.measure.interleaved import DETERMINISTIC, LAYER, MATMUL, Entry, Line, run_goal
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.timing import Timing

CPU = torch.device("cpu")
TINY = ("causal/96", "0.5B")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers: SDPA, one that is off by a percent, one that never works."""

    def rough(case: Case) -> Attention:
        exact = peers.attention_of("sdpa-flash", case)
        return lambda q, k, v: exact(q, k, v) * 1.01

    def broken(case: Case) -> Attention:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise RuntimeError("no\n kernel")

        return call

    monkeypatch.setattr(peers, "EXTRA", {"rough": rough, "broken": broken})


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("work", ["fwd", "bwd"])
def test_contestants_are_timed_and_checked(work: str) -> None:
    backward = work == "bwd"
    goal = Goal("tiny", work, (TINY,), ("sdpa-flash", "rough", "broken"), deterministic=backward)
    case = make_case(*TINY, DType.FLOAT32, CPU)
    line = run_goal(goal, case, seconds=0.01, errors=True)
    own = [OURS, DETERMINISTIC] if backward else [OURS]
    assert list(line.entries) == [*own, "sdpa-flash", "rough", "broken", MATMUL]
    assert line.entries["broken"] == Entry(note="RuntimeError: no kernel")
    tensors = ("out",) if work == "fwd" else ("dq", "dk", "dv")
    for name in (*own, "sdpa-flash", "rough"):
        entry = line.entries[name]
        assert entry.ms is not None
        assert entry.repeats >= 3
        assert entry.tflops == pytest.approx(case.flops(Direction(work)) / entry.ms / 1e9)
        assert tuple(entry.errors) == tensors
        for error in entry.errors.values():
            assert (0.009 < error < 0.011) if name == "rough" else error < 1e-5
    assert line.entries[MATMUL].errors == {}
    assert Line.from_json(json.loads(json.dumps(line.to_json()))) == line


@pytest.mark.usefixtures("fakes")
def test_a_step_makes_its_mask_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PackedMask] = []

    def mask(device: torch.device) -> PackedMask:
        made.append(PackedMask([60, 40], [20, 40, 40], ["causal", "noise", "full"], device))
        return made[-1]

    monkeypatch.setattr(interleaved, "workload", lambda name: SimpleNamespace(mask=mask))
    first = mask(CPU)
    case = Case("fake 0.5B", 1, 4, 2, 100, 100, 16, DType.FLOAT32, first, first.pairs, CPU)
    line = run_goal(Goal("fake", STEP, (("fake", "0.5B"),), ("sdpa-flash",)), case, seconds=0.0)
    assert list(line.entries) == [OURS, "sdpa-flash", OURS + LAYER, "sdpa-flash" + LAYER, MATMUL]
    assert not any(entry.note for entry in line.entries.values())
    # Of two contestants: to warm up, 2 calls to find out how many turns, 3 turns.
    assert len(made) == 1 + 2 * (1 + 2 + 3)
    assert all(entry.tflops for entry in line.entries.values())


def test_rounds_fit_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(calls: dict[str, Any], inputs: Any, device: Any, how: Any) -> dict[str, Timing]:
        asked.append(how)
        return {name: Timing.of([10.0]) for name in calls}

    monkeypatch.setattr(interleaved, "measure_interleaved", timed)
    goal, case = Goal("tiny", "fwd", (TINY,), ()), make_case(*TINY, DType.FLOAT32, CPU)
    for seconds, turns in ((0.5, 25), (99.0, 40), (0.0, 3)):
        run_goal(goal, case, seconds)
        assert (asked[-1].repeats, asked[-1].least, asked[-1].warmups) == (turns, turns, 0)


def line(case: str, **speeds: float | str) -> Line:
    entries = {
        name: Entry(note=value) if isinstance(value, str) else Entry(1.0, value, errors={"out": value / 1e4})
        for name, value in speeds.items()
    }
    return Line("pretrain 28/4/128", "fwd", case, {name.replace("_", "-"): x for name, x in entries.items()})


def test_tables_show_medians_floors_and_failures() -> None:
    lines = [
        line("a", attnforge=700.0, flex=350.0, flex_fa4="boom", matmul=800.0),
        line("b", attnforge=500.0, flex=350.0, flex_fa4=400.0, matmul=780.0),
        line("c", attnforge=590.0, flex=310.0, flex_fa4=420.0, matmul=790.0),
    ]
    assert rates(lines, OURS) == [700, 500, 590]
    assert ratio(lines, ["flex", "flex-fa4"]) == pytest.approx(590 / 420)
    assert error_ratios(lines)["out"] == pytest.approx(2.0)
    lines[0].entries["sdpa-math"] = Entry(errors={"out": 1e-9})
    assert error_ratios(lines)["out"] == pytest.approx(2.0)
    del lines[0].entries["sdpa-math"]
    text = markdown(lines, {"device": "x"})
    assert "| pretrain 28/4/128 | fwd | 3 | **590** | 350 | 410 | 790 | 600 | 0.98 | 1.40 |" in text
    assert "flex 1.90 (1.7), flex-fa4 1.33 (1.35) | out 2.00 |" in text
    assert "- flex-fa4: boom (a fwd)" in text
    assert missed(lines) == [
        "pretrain 28/4/128 fwd: 590 of 600 TFLOP/s",
        "pretrain 28/4/128 fwd: 1.33 times flex-fa4, the goal is 1.35",
        "pretrain 28/4/128 fwd: error of out 2.00 times the best peer's",
    ]


def test_lines_of_older_logs_are_read() -> None:
    found = line("a", attnforge=700.0)
    data = found.to_json()
    entry = data["entries"]["attnforge"]
    entry["turns"] = entry.pop("repeats")
    assert Line.from_json(data) == found


def test_the_better_setting_of_a_peer_counts() -> None:
    both = Line("x", "fwd", "a", {"fa4": Entry(1.0, 600.0), "fa4-nopack": Entry(1.0, 640.0)})
    assert rates([both], "fa4") == [640]


def test_a_step_is_shown_for_one_layer_and_for_all() -> None:
    times = {OURS: 12.0, "flex": 30.0, OURS + LAYER: 11.0, "flex" + LAYER: 22.0}
    entries = {name: Entry(ms, 1.0) for name, ms in times.items()}
    lines = [Line("pretrain 28/4/128", STEP, "a", entries)]
    text = markdown(lines, {})
    assert f"| pretrain 28/4/128 | flex | 30.00 | 22.00 | {30 + 27 * 22:.2f} | 2.50 / 2.02 | 1.7 |" in text
    assert missed(lines) == []


def test_goals_name_real_cases() -> None:
    known = {*peers.NAMES["cuda"], "triton", "flex-bagel"}
    cases: set[tuple[str, str]] = set()
    for goals in GOALS.values():
        assert len({(goal.label, goal.work) for goal in goals}) == len(goals)
        for goal in goals:
            assert goal.work in WORKS
            assert {*goal.peers, *dict(goal.ratios)} <= known
            cases.update(goal.cases)
    for pack, model in cases:
        assert make_case(pack, model, DType.BFLOAT16, CPU).pairs > 0


def test_images_and_heads_by_number() -> None:
    case = make_case("images/1", "vit", DType.BFLOAT16, CPU)
    lengths, causal = fa4.documents(case.mask)
    assert sum(lengths) == case.seq_q == TOKENS
    assert not causal
    assert case.pairs == sum(length**2 for length in lengths)
    assert max(lengths) <= 4900
    lengths, causal = fa4.documents(make_case("documents/1", "vit", DType.BFLOAT16, CPU).mask)
    assert sum(lengths) == TOKENS
    assert causal
    assert (case.heads_q, case.heads_kv, case.head_dim) == (16, 16, 72)
    small = make_case("full/16x1024", "8/4/64", DType.BFLOAT16, CPU)
    assert (small.batch, small.heads_q, small.heads_kv, small.head_dim) == (16, 8, 4, 64)


# ---- benchmarks/goals.py


def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "goals.py"))


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    goals = [Goal(name, "fwd", (TINY, ("full/64", "0.5B")), ("sdpa-flash",)) for name in ("one", "two")]
    rows = [(goal, *goal.cases[seed]) for seed in (0, 1) for goal in goals]
    options = {
        "device": "cpu",
        "out": tmp_path,
        "limit": 60.0,
        "seconds": 0.0,
        "repeats": 3,
        "no_errors": True,
    }
    log = tmp_path / "goals.jsonl"
    begin = json.dumps({"begin": ["one", "fwd", "causal/96 0.5B"]}) + "\n"
    log.write_text(2 * begin + begin.replace("one", "two"))
    lines = module["measure"](rows, argparse.Namespace(**options))
    assert [(x.label, x.case) for x in lines] == [
        ("one", "causal/96 0.5B"),
        ("two", "causal/96 0.5B"),
        ("one", "full/64 0.5B"),
        ("two", "full/64 0.5B"),
    ]
    dead = Entry(note="the process died")
    assert lines[0].entries == {OURS: dead}  # twice: given up
    assert lines[1].entries["sdpa-flash"] == dead  # once: without the peers
    assert lines[1].entries[OURS].ms
    assert lines[2].entries["sdpa-flash"].ms
    before = log.read_text()
    assert "the process died (causal/96 0.5B fwd" in (tmp_path / "goals.md").read_text()
    again = module["measure"](rows, argparse.Namespace(**options))
    assert sorted(again, key=str) == sorted(lines, key=str)
    assert log.read_text() == before
    options |= {"limit": -1.0, "out": tmp_path / "new"}
    (tmp_path / "new").mkdir()
    assert module["measure"](rows, argparse.Namespace(**options)) == []
    assert "time limit reached: causal/96" in capsys.readouterr().out


def test_the_first_seed_of_all_comes_first() -> None:
    args = argparse.Namespace(suite=["forward"], only="28/4/128", seeds=2, part=(0, 1), add_peers=[])
    rows = script()["chosen"](args)
    packs = [pack for _, pack, _ in rows]
    args.only, shares = "", []
    for args.part in ((0, 1), (0, 2), (1, 2)):
        shares.append([(*row[1:], row[0].work) for row in script()["chosen"](args)])
    assert sorted(shares[0]) == sorted(shares[1] + shares[2]), "each row is in one share"
    assert packs.index("pretrain/1") > packs.index("t2i_lowres/0") > packs.index("full/4x8192")
    assert "full/16x1024" not in packs


def test_a_run_of_some_goals_is_picked_by_label_and_direction() -> None:
    for only, works in (("28/4/128 full/4x8192 bwd", {"bwd"}), ("28/4/128 full/4x8192", {"fwd", "bwd"})):
        args = argparse.Namespace(suite=["grid"], only=only, seeds=1, part=(0, 1), add_peers=[])
        goals = [goal for goal, _, _ in script()["chosen"](args)]
        assert {goal.work for goal in goals} == works
        assert {goal.label for goal in goals} == {"28/4/128 full/4x8192"}


def test_peers_are_added_to_every_goal() -> None:
    """Which are timed, compiled and shown; those that a goal has already, once."""
    module = script()
    args = module["arguments"](["--suite", "grid", "--suite", "step", "--add-peers", "flex", "fa4"])
    goals = {goal.label: goal for goal, _, _ in module["chosen"](args)}
    assert goals["28/4/128 full/4x8192"].peers == ("fa3", "fa4", "sdpa-cudnn", "flex")
    assert goals["14/2/64 pretrain"].peers == ("cudnn-flex", "flex", "fa4")
    assert goals["pretrain 28/4/128"].peers == ("flex", "flex-fa4", "flex-bagel", "fa4")
    plain = module["arguments"](["--suite", "grid"])
    assert {goal for goal, _, _ in module["chosen"](plain)} == set(GOALS["grid"])


def test_added_peers_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    module, commands = script(), list[list[str]]()

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    words = ["--suite", "grid", "--only", "8/8/64 full/8x2048 bwd", "--jobs", "1", "--device", "cpu"]
    args = module["arguments"]([*words, "--add-peers", "sdpa-flash"])
    module["warm"](module["chosen"](args), args)
    ((_, _, *given),) = commands
    again = module["arguments"](given)
    assert (again.one, again.add_peers) == ([["8/8/64 full/8x2048", "bwd", "full/8x2048"]], ["sdpa-flash"])
    ran = list[Goal]()
    monkeypatch.setitem(
        module["compile_one"].__globals__, "run_goal", lambda goal, *rest, **more: ran.append(goal)
    )
    module["compile_one"](*again.one[0], again.add_peers, CPU)
    assert ran[0].peers == ("fa3", "fa4", "sdpa-cudnn", "sdpa-flash")


def test_tables_have_columns_of_added_peers() -> None:
    """And the best peer may be one."""
    label = "8/8/64 full/8x2048"
    entries = {name: Entry(1.0, rate) for name, rate in ((OURS, 300.0), ("fa3", 200.0), ("flex", 250.0))}
    lines = [Line(label, "fwd", "full/8x2048 8/8/64", {**entries, MATMUL: Entry(1.0, 800.0)})]
    head, _, row = (x for x in markdown(lines, {"device": "x"}).splitlines() if x.startswith("|"))
    shown = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert (shown["flex"], shown["fa3"], shown["fa4"], shown["ours / best peer"]) == (
        "250",
        "200",
        "-",
        "1.20",
    )


@pytest.mark.gpu
def test_goals_on_a_gpu(tmp_path: Path) -> None:
    """A pack of 7 blocks of 128: of large ones, Triton compiles the sort in create_block_mask for minutes."""
    path = tmp_path / "packs.jsonl"
    splits, modes = [100, 250, 150, 300, 100], ["causal", "noise", "causal", "full", "causal"]
    pack = {"sample_lens": [500, 400], "split_lens": splits, "attn_modes": modes, "vit_lens": [], "used": 900}
    path.write_text(json.dumps(pack) + "\n")
    name = (f"{path}:1", "0.5B")
    case = make_case(*name, DType.BFLOAT16, torch.device("cuda"))
    for work in WORKS:
        found = run_goal(Goal("x", work, (name,), ("flex",)), case, seconds=0.05, errors=True)
        assert found.entries[OURS].ms, found.entries[OURS].note
        assert found.entries["flex"].ms, found.entries["flex"].note
        assert found.entries[MATMUL].tflops


@pytest.mark.parametrize(("log", "page"), [("h200_grid", "grid"), ("h100_grid", "grid_h100")])
def test_the_page_of_the_grid_has_the_tables_of_its_log(log: str, page: str) -> None:
    pytest.importorskip("altair", reason="the extra `report`")
    root = Path(__file__).parents[3]
    draw = runpy.run_path(str(root / "benchmarks" / "draw_grid.py"))
    cells = draw["read"]([root / "benchmarks" / "logs" / f"{log}.jsonl.gz"])
    assert {(goal.label, goal.work) for goal in GOALS["grid"]} == cells.keys()
    text = (root / "docs" / f"{page}.md").read_text()
    assert text.endswith("\n".join(draw["tables"](cells)) + "\n")
    assert len(list(draw["squares"](cells, ["full/8x2048"]))) == 2 * 10


def test_the_grid_shows_added_peers() -> None:
    """As a column, and as the best peer where it is."""
    pytest.importorskip("altair", reason="the extra `report`")
    draw = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "draw_grid.py"))
    label = "8/8/64 full/8x2048"
    rates_of = {OURS: 300.0, "fa3": 200.0, "flex": 250.0, MATMUL: 800.0}
    entries = {name: Entry(1.0, rate) for name, rate in rates_of.items()}
    for names, best in ((rates_of, "1.20"), ({OURS, "fa3", MATMUL}, "1.50")):
        line = Line(label, "fwd", "x", {name: entries[name] for name in names})
        table = [x for x in draw["tables"]({(label, "fwd"): [line]}) if x.startswith("| ")]
        head, row = (x.strip("| ").split(" | ") for x in (table[0], table[2]))
        shown = dict(zip(head, row, strict=True))
        assert shown.get("flex", "") == ("250" if "flex" in names else "")
        assert shown["of best peer"] == best
