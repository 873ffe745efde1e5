"""Goals and their measurement: contestants in turns, failures kept, errors, tables; fake peers on the CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnforge.bagel import fa4, peers, rounds
from attnforge.bagel.bench import OURS
from attnforge.bagel.cases import IMAGE_TOKENS, make_case
from attnforge.bagel.fa4 import Attention, Unavailable
from attnforge.bagel.goal_report import error_ratios, markdown, missed, rates, ratio
from attnforge.bagel.goals import GOALS, STEP, WORKS, Goal
from attnforge.bagel.packing import PackedMask
from attnforge.bagel.rounds import LAYER, MATMUL, Entry, Line, play
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.case import Case
from attnforge.runtime.masks import Causal
from attnforge.runtime.reference import reference
from attnforge.runtime.timing import Timing

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
    goal = Goal("tiny", work, (TINY,), ("sdpa-flash", "rough", "broken"))
    case = make_case(*TINY, DType.FLOAT32, CPU)
    line = play(goal, case, seconds=0.01, errors=True)
    assert list(line.entries) == [OURS, "sdpa-flash", "rough", "broken", MATMUL]
    assert line.entries["broken"] == Entry(note="RuntimeError: no kernel")
    tensors = ("out",) if work == "fwd" else ("dq", "dk", "dv")
    for name in (OURS, "sdpa-flash", "rough"):
        entry = line.entries[name]
        assert entry.ms is not None
        assert entry.turns >= 3
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

    monkeypatch.setattr(rounds, "workload", lambda name: SimpleNamespace(mask=mask))
    first = mask(CPU)
    case = Case("fake 0.5B", 1, 4, 2, 100, 100, 16, DType.FLOAT32, first, first.pairs, CPU)
    line = play(Goal("fake", STEP, (("fake", "0.5B"),), ("sdpa-flash",)), case, seconds=0.0)
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

    monkeypatch.setattr(rounds, "measure_interleaved", timed)
    goal, case = Goal("tiny", "fwd", (TINY,), ()), make_case(*TINY, DType.FLOAT32, CPU)
    for seconds, turns in ((0.5, 25), (99.0, 40), (0.0, 3)):
        play(goal, case, seconds)
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
        "pretrain 28/4/128 fwd: 1.33 times flex-fa4, asked 1.35",
        "pretrain 28/4/128 fwd: error of out 2.00 times the best peer's",
    ]


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
    for goals in GOALS.values():
        assert len({(goal.label, goal.work) for goal in goals}) == len(goals)
        for goal in goals:
            assert goal.work in WORKS
            assert {*goal.peers, *dict(goal.ratios)} <= known
            for pack, model in goal.cases:
                assert make_case(pack, model, DType.BFLOAT16, CPU).pairs > 0


def test_images_and_heads_by_number() -> None:
    case = make_case("images/1", "vit", DType.BFLOAT16, CPU)
    lengths, causal = fa4.documents(case.mask)
    assert sum(lengths) == case.seq_q == IMAGE_TOKENS
    assert not causal
    assert case.pairs == sum(length**2 for length in lengths)
    assert max(lengths) <= 4900
    assert (case.heads_q, case.heads_kv, case.head_dim) == (16, 16, 72)
    small = make_case("full/16x1024", "8/4/64", DType.BFLOAT16, CPU)
    assert (small.batch, small.heads_q, small.heads_kv, small.head_dim) == (16, 8, 4, 64)


@pytest.mark.parametrize(
    ("splits", "modes", "used"),
    [
        ([40, 60, 50], ["causal", "full", "full"], 150),  # a document of two splits
        ([100, 50], ["causal", "full"], 150),  # two kinds of documents
        ([100, 50], ["full", "full"], 100),  # padding, which must come out as zeros
    ],
)
def test_varlen_is_for_whole_documents(splits: list[int], modes: list[str], used: int) -> None:
    mask = PackedMask([100, 50], splits, modes, CPU, used=used)
    with pytest.raises(Unavailable, match="takes no mask"):
        fa4.documents(mask)


def test_fa4_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flash_attn.cute: its layouts, and the documents that varlen is called with."""
    seen: dict[str, Any] = {}

    def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, shape=q.shape)
        return q + 1, None

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, shape=q.shape)
        return q + 2, None

    cute = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_func=dense)
    monkeypatch.setattr(fa4, "installed", lambda: True)
    monkeypatch.setattr("attnforge.bagel.fa4.importlib.import_module", lambda name: cute)
    mask = PackedMask([30, 20], [30, 20], ["full", "full"], CPU)
    case = Case("documents", 1, 4, 2, 50, 50, 16, DType.FLOAT32, mask, mask.pairs, CPU)
    x = case.inputs()
    out = peers.attention_of("fa4", case)(x.q, x.k, x.v)
    torch.testing.assert_close(out, x.q + 1)
    assert seen["shape"] == (50, 4, 16)
    assert seen["cu_seqlens_q"].tolist() == [0, 30, 50]
    assert seen["cu_seqlens_k"].dtype == torch.int32
    assert (seen["max_seqlen_q"], seen["causal"], seen["pack_gqa"]) == (30, False, None)
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    torch.testing.assert_close(peers.attention_of("fa4-nopack", case)(x.q, x.k, x.v), x.q + 2)
    assert seen["shape"] == (1, 96, 14, 64)
    assert (seen["causal"], seen["pack_gqa"], seen["softmax_scale"]) == (True, False, 0.125)
    with pytest.raises(Unavailable, match="takes no mask"):
        peers.attention_of("fa4", make_case("blocks/0.5/256", "0.5B", DType.FLOAT32, CPU))


def test_absent_peers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "installed", lambda: False)
    assert set(peers.present(torch.device("cuda"))) == {*peers.BACKENDS, "sdpa-samples", "flex"}
    monkeypatch.setattr(peers, "_flex", lambda *arguments: pytest.fail("nothing is to be compiled for it"))
    for name in peers.FA4:
        with pytest.raises(Unavailable, match="not installed"):
            peers.attention_of(name, make_case(*TINY, DType.FLOAT32, CPU))


@pytest.mark.parametrize(
    ("name", "often", "free", "compiled"),
    [
        ("flex", False, 1 << 40, [False]),  # eagerly: compiling the sort takes minutes
        ("flex", False, 1 << 10, [True]),  # there is no memory for S x S
        ("flex-bagel", False, 1 << 40, [False]),
        ("flex-bagel", True, 1 << 40, [True]),  # as BAGEL's trainer does
        ("flex", True, 1 << 40, []),  # a compiled function of its own
    ],
)
def test_how_block_masks_are_made(
    name: str, often: bool, free: int, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    path = "torch.nn.attention.flex_attention.create_block_mask"
    monkeypatch.setattr(path, lambda *size, _compile: made.append(_compile))
    monkeypatch.setattr(peers, "_compiled_block_mask", lambda: lambda *size: None)
    monkeypatch.setattr(peers, "_free_bytes", lambda device: free)
    mask = PackedMask([30, 20], [30, 20], ["full", "full"], CPU)
    case = Case("x", 1, 4, 2, 50, 50, 16, DType.FLOAT32, mask, mask.pairs, torch.device("cuda"))
    peers.attention_of(name, case, often)
    assert made == compiled


# ---- benchmarks/goals.py


def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "goals.py"))


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    goals = [Goal(name, "fwd", (TINY, ("full/64", "0.5B")), ("sdpa-flash",)) for name in ("one", "two")]
    rows = [(goal, *goal.cases[seed]) for seed in (0, 1) for goal in goals]
    options = {"device": "cpu", "out": tmp_path, "limit": 60.0, "seconds": 0.0, "turns": 3, "no_errors": True}
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
    assert "time is up: causal/96" in capsys.readouterr().out


def test_the_first_seed_of_all_comes_first() -> None:
    args = argparse.Namespace(suite=["forward"], only="28/4/128", seeds=2)
    rows = script()["chosen"](args)
    packs = [pack for _, pack, _ in rows]
    assert packs.index("pretrain/1") > packs.index("t2i_lowres/0") > packs.index("full/4x8192")
    assert "full/16x1024" not in packs


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_triton_peer_is_right(causal: bool) -> None:
    pytest.importorskip("triton")
    attention = importlib.import_module("attnforge.benchmarks.triton_attention").attention
    case = make_case(
        f"{'causal' if causal else 'full'}/2x256", "8/2/64", DType.BFLOAT16, torch.device("cuda")
    )
    x = case.inputs()
    leaves = [tensor.detach().requires_grad_() for tensor in x[:3]]
    out = attention(leaves[0], leaves[1], leaves[2], causal)
    got = (out, *torch.autograd.grad(out, leaves, x.dout))
    exact = reference(x.q, x.k, x.v, Causal() if causal else None, dout=x.dout)
    for mine, true in zip(got, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        assert true is not None
        assert float((mine.double() - true).norm() / true.norm()) < 6e-3


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
        found = play(Goal("x", work, (name,), ("flex",)), case, seconds=0.05, errors=True)
        assert found.entries[OURS].ms, found.entries[OURS].note
        assert found.entries["flex"].ms, found.entries["flex"].note
        assert found.entries[MATMUL].tflops


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flex", "flex-bagel"])
def test_masks_made_often_are_the_same_on_a_gpu(name: str) -> None:
    splits, modes = [40, 90, 30, 70, 120], ["causal", "noise", "causal", "full", "causal"]
    mask = PackedMask([160, 190], splits, modes, torch.device("cuda"))
    case = Case("pack", 1, 4, 2, 350, 350, 64, DType.BFLOAT16, mask, mask.pairs, torch.device("cuda"))
    x = case.inputs()
    once, often = (peers.attention_of(name, case, often)(x.q, x.k, x.v) for often in (False, True))
    torch.testing.assert_close(once, often)
