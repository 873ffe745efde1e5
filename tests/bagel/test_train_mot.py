"""examples/train_mot.py: it learns, resumes, and is the same on one, two and four ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from click import UsageError
from click.testing import CliRunner
from ranks import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from train_mot import Losses, Options, main, train  # noqa: E402

BASE = Options(tokens=128, steps=4, precision="fp32", device="cpu")
Rows = list[dict[str, float]]
# Of losses, relative, between orders of summation in float32 over a few steps.
TOLERANCE = 1e-5


# Packs are too small to share, and the order of sums depends on the number of threads.
pytestmark = pytest.mark.usefixtures("one_thread")


def run(**changes: object) -> Rows:
    return train(dataclasses.replace(BASE, **changes), say=lambda _: None)  # type: ignore[arg-type]


def assert_close(ours: Rows, theirs: Rows, tolerance: float = TOLERANCE) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=tolerance)


@pytest.fixture(scope="module")
def expected() -> Rows:
    """The curve of one process without checkpointing."""
    return run(steps=6)


def test_losses_fall() -> None:
    rows = run(steps=30, precision="bf16")
    for name in ("ce", "mse"):
        first, last = (sum(row[name] for row in part) / 5 for part in (rows[:5], rows[-5:]))
        assert last < 0.92 * first, name


def test_bf16_is_near_fp32(expected: Rows) -> None:
    assert_close(run(precision="bf16")[:2], expected[:2], 3e-2)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_changes_no_bit(checkpointing: str, expected: Rows) -> None:
    assert run(checkpointing=checkpointing) == expected[:4]


def test_sdpa_learns_the_same(expected: Rows) -> None:
    assert_close(run(attention="sdpa", checkpointing="full"), expected[:4])


def test_a_resumed_run_is_the_same_bits(tmp_path: Path, expected: Rows) -> None:
    before = run(save=tmp_path, steps=4, save_every=2)
    assert before == expected[:4]
    shutil.rmtree(tmp_path / "step-4")
    (tmp_path / "step-4.part").mkdir()  # what a run that died while saving leaves
    assert run(save=tmp_path, steps=6, save_every=10) == expected[2:]


@pytest.mark.parametrize("change", [{"layers": 1}, {"layers": 3}, {"model": "small"}], ids=str)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Of fewer layers, too, which torch would load without a word."""
    run(save=tmp_path, steps=1, save_every=1)
    with pytest.raises(UsageError, match=r"--save: .*step-1 is of another model, whose .* has shape"):
        run(save=tmp_path, steps=2, **change)


def test_two_ranks_are_one(tmp_path: Path, expected: Rows) -> None:
    """The same losses on two ranks; and one rank goes on from their checkpoint."""
    losses, saved = tmp_path / "losses.jsonl", tmp_path / "saved"
    options = "--tokens 128 --steps 4 --precision fp32 --device cpu --checkpointing selective --save-every 4"
    torchrun(2, EXAMPLES / "train_mot.py", *options.split(), "--losses", str(losses), "--save", str(saved))
    assert_close([json.loads(line) for line in losses.read_text().splitlines()], expected[:4])
    assert_close(run(save=saved, steps=6), expected[4:])


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_ranks_share_a_pack(tmp_path: Path, expected: Rows) -> None:
    """Context parallelism: some packs have an odd number of rows, so that the last one is padding."""
    losses = tmp_path / "losses.jsonl"
    options = (
        "--tokens 128 --steps 4 --packs 2 --precision fp32 --device cpu --cp 2 --checkpointing selective"
    )
    torchrun(2, EXAMPLES / "train_mot.py", *options.split(), "--losses", str(losses))
    assert_close(lines(losses), expected[:4])


def test_two_ranks_share_weights(tmp_path: Path, expected: Rows) -> None:
    """Tensor parallelism, from the checkpoint of one rank."""
    losses, saved = tmp_path / "losses.jsonl", tmp_path / "saved"
    run(save=saved, steps=2, save_every=2)
    options = "--tokens 128 --steps 4 --packs 2 --precision fp32 --device cpu --tp 2 --checkpointing full"
    torchrun(2, EXAMPLES / "train_mot.py", *options.split(), "--losses", str(losses), "--save", str(saved))
    assert_close(lines(losses), expected[2:4])


def test_four_ranks_share_packs_and_weights(tmp_path: Path, expected: Rows) -> None:
    """Both; and one rank goes on from their checkpoint."""
    losses, saved = tmp_path / "losses.jsonl", tmp_path / "saved"
    options = "--tokens 128 --steps 4 --packs 2 --precision fp32 --device cpu --cp 2 --tp 2 --save-every 4"
    torchrun(4, EXAMPLES / "train_mot.py", *options.split(), "--losses", str(losses), "--save", str(saved))
    assert_close(lines(losses), expected[:4])
    assert_close(run(save=saved, steps=6), expected[4:])


def test_four_ranks_need_no_argument(tmp_path: Path) -> None:
    """Without --packs each rank has one, and the losses are those of one rank with four packs."""
    losses = tmp_path / "losses.jsonl"
    options = "--tokens 64 --steps 2 --precision fp32 --device cpu"
    torchrun(4, EXAMPLES / "train_mot.py", *options.split(), "--losses", str(losses))
    ours = [json.loads(line) for line in losses.read_text().splitlines()]
    assert_close(ours, run(tokens=64, steps=2, packs=4))


@pytest.mark.parametrize(
    ("packs", "ranks", "batch"), [(None, 1, 2), (None, 2, 2), (None, 3, 3), (None, 8, 8), (6, 3, 6)]
)
def test_packs_of_a_step(packs: int | None, ranks: int, batch: int) -> None:
    assert Options(packs=packs).batch(ranks) == batch


def test_packs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="--packs 2 does not divide among 4 ranks; try --packs 4"):
        Options(packs=2).batch(4)


@pytest.mark.parametrize("option", ["--tokens 63", "--steps 0", "--save-every 0"])
def test_numbers_below_the_least_are_refused_before_training(option: str) -> None:
    result = CliRunner().invoke(main, option.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{option.split()[0]}'" in result.output


def test_a_file_that_holds_no_losses_is_named(tmp_path: Path) -> None:
    """A run that goes on keeps earlier lines, so it must read them; one from the start writes the file anew."""
    path = tmp_path / "losses.jsonl"
    for line in ("hello", "{}", "[1]"):
        path.write_text(line + "\n")
        with pytest.raises(UsageError, match=r"losses.jsonl: .* is no line of losses"):
            Losses(path, 2)
    Losses(path, 0)
    assert path.read_text() == ""


def test_the_folder_of_losses_is_made(tmp_path: Path) -> None:
    """Before the first step: after the last one the losses would be lost."""
    losses = tmp_path / "new" / "losses.jsonl"
    run(steps=1, losses=losses)
    assert len(losses.read_text().splitlines()) == 1


def test_losses_of_a_resumed_run_are_those_of_all_steps(tmp_path: Path, expected: Rows) -> None:
    """Steps after the checkpoint are replaced, also a line that a killed run did not end."""
    losses, saved = tmp_path / "losses.jsonl", tmp_path / "run"
    run(save=saved, steps=3, save_every=2, losses=losses)
    lines = losses.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    losses.write_text("\n".join((*lines[:2], lines[2].replace('"ce": ', '"ce": 9'), lines[2][:9])))
    run(save=saved, steps=6, save_every=10, losses=losses)
    assert [json.loads(line) for line in losses.read_text().splitlines()] == expected
    run(steps=1, losses=losses)  # from the beginning
    assert [json.loads(line) for line in losses.read_text().splitlines()] == expected[:1]


def test_a_run_that_is_done_says_so_and_keeps_its_losses(tmp_path: Path) -> None:
    losses, said = tmp_path / "losses.jsonl", list[str]()
    run(steps=1, save=tmp_path / "run", save_every=1, losses=losses)
    options = dataclasses.replace(BASE, steps=1, save=tmp_path / "run", losses=losses)
    assert train(options, say=said.append) == []
    assert said == [f"{tmp_path / 'run'}: a checkpoint of 1 steps; nothing to do for --steps 1"]
    assert len(losses.read_text().splitlines()) == 1


def test_profiler_writes_a_trace(tmp_path: Path) -> None:
    run(profile=tmp_path, checkpointing="full")
    events = json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert "attnforge::forward" in names
    assert "attnforge::backward" in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "flex"}, "no gradients on the CPU"),
        ({"attention": "sdpa", "checkpointing": "selective"}, "--attention attnforge"),
        ({"tokens": 32}, "64 or more"),
        ({"cp": 2}, "--cp x tp: got 2 x 1 = 2, expected a divisor of the number of ranks, 1"),
        ({"cp": 2, "attention": "sdpa"}, "--cp 2 needs --attention attnforge"),
        ({"tp": 4}, "--tp: got 4, expected a divisor of the model's heads_kv, 2"),
    ],
)
def test_what_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises((UsageError, ValueError), match=message):
        run(**changes)


# ---- On GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["attnforge", "sdpa"])
def test_operators_agree_on_a_gpu(attention: str) -> None:
    ours = run(device="cuda", precision="bf16", model="small", tokens=2048)
    rows = run(
        device="cuda", precision="bf16", model="small", tokens=2048, attention=attention, checkpointing="full"
    )
    assert_close(rows[:2], ours[:2], 3e-2)


@pytest.mark.gpu
def test_a_resumed_run_is_the_same_bits_on_a_gpu(tmp_path: Path) -> None:
    options = {"device": "cuda", "precision": "bf16", "model": "small", "tokens": 2048, "deterministic": True}
    straight = run(**options, steps=6)
    run(**options, steps=3, save=tmp_path, save_every=3)
    assert run(**options, steps=6, save=tmp_path) == straight[3:]
