"""The command line: what it prints, what it writes, and one clear message with status 2 for user errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import attnforge
from attnforge.bagel.commands.report import missing_packages
from attnforge.bagel.measure import modelled
from attnforge.bagel.measure.bench import OURS, Row, best_peer
from attnforge.bagel.measure.case_scores import with_score
from attnforge.bagel.measure.cases import SUITES, make_case
from attnforge.bagel.measure.peers import NAMES
from attnforge.bagel.measure.report import bench_markdown
from attnforge.bagel.pictures.mask import _cells
from attnforge.cli import main
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.search.case import Case
from attnforge.runtime.tables import Tuned, load, save

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = ("--pack", "causal/96", "--model", "0.5B", "--dtype", "fp32", "--device", "cpu")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_a_terminal_without_some_letters_still_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TABLES, str(tmp_path / "café"))
    for charset, shown in (("ascii", "caf?"), ("latin-1", "café"), ("utf-8", "café")):
        result = CliRunner(charset=charset).invoke(main, ["tables", "list"])
        assert result.exit_code == 0, result.exception
        assert f"{shown}  (searches write here)" in result.output


def test_runs_from_the_root_without_importing_torch() -> None:
    script = """
import sys, runpy
sys.argv = ["cli.py", "--help"]
try:
    runpy.run_path("cli.py", run_name="__main__")
except SystemExit:
    print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("bench", "cache", "doctor", "mask", "render", "search", "verify"):
        assert f"\n  {name} " in done.stdout
    assert done.stdout.endswith("False\n")


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command, groups included."""
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield *path, name


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_help_fits_the_terminal(words: tuple[str, ...], width: int) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=width, max_content_width=width)
    assert shown.exit_code == 0, shown.output
    assert "...\n" not in shown.output.partition("Commands:")[2], "a summary is cut off"
    assert max(map(len, shown.output.splitlines())) <= width
    # Every option is described, and its names fit the first column.
    for line in shown.output.partition("Options:")[2].partition("Commands:")[0].splitlines():
        if line.lstrip().startswith("-"):
            assert len(line.split("  ")) > 2 or line.strip().startswith("--"), line


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("bench", "those of --suite"),
        ("search", "finetune/0 and, on a GPU, pretrain/0"),
        ("verify", "finetune/0 and, on a GPU, pretrain/0"),
        ("explain", "finetune/0 and, on a GPU, pretrain/0"),
        ("tune", "by device; --list shows them"),
    ],
)
def test_pack_has_the_default_of_its_command(command: str, default: str) -> None:
    words = " ".join(run(command, "--help").output.split())
    assert f"blocks/0.9, ... Repeatable. [default: {default}]" in words


def test_version_has_one_source() -> None:
    assert run("--version").stdout == f"attnforge, version {attnforge.__version__}\n"
    project = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "attnforge.__version__" }' in project


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
@pytest.mark.parametrize("arch", [Arch.CPU, Arch.SM80], ids=lambda a: a.value)
def test_render_reproduces_every_spec(arch: Arch, direction: Direction, tmp_path: Path) -> None:
    problem = Problem(direction, arch, DType.BFLOAT16, 64, Mask.SPANS, 4 if arch is Arch.CPU else 16)
    for spec in islice(candidates(problem), 3):
        out = tmp_path / "kernel"
        run("render", *shlex.split(spec.to_cli()), "--out", str(out))
        assert out.read_text() == render(spec).text
    assert run("render", *shlex.split(spec.to_cli())).stdout == render(spec).text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mask pretrain/77", "pack: there is no 'pretrain/77'; packs are pretrain/0 to 3, finetune/0"),
        ("mask pretrain/0 --out mask.gif", "--out: mask.gif is neither a .png nor a .svg"),
        ("mask causal/4096 --tile-m 1 --tile-n 1", "1 x 1 gives 4096 x 4096 tiles, at most 4194304"),
        ("mask causal/64 --tile-m 99999999999999999999", "--tile-m: got 99999999999999999999, at most"),
        ("mask t2i_lowres/0 --vit", "pack: t2i_lowres/0 has no image"),
        ("verify --pack full/0 --device cpu", "pack: there is no 'full/0'"),
        ("search --pack causal/64 --model 8B --device cpu", "model: there is no '8B'; models are 7B"),
        ("search --device tpu", "--device: 'tpu' is not a device"),
        ("render --head-dim 300", "head_dim 300"),
        ("render --set tile_m=big", "--set tile_m: expected KNOB=N"),
        ("render --set tile_m=64", "sm80 bf16 fwd: q_in_regs, stages, tile_n, warps missing. Its knobs are"),
        ("render --set tile=64", "tile unknown;"),
        ("render --out /nowhere/kernel.cu", "'--out': /nowhere is not a writable directory"),
        ("search --pack causal/64 --json /nowhere/x.json", "'--json': /nowhere is not a writable directory"),
        (
            "search --pack causal/64 --table-out /proc/nowhere",
            "/proc/nowhere: tuned tables cannot be written here",
        ),
        ("verify --pack causal/64 --variants -1", "Invalid value for '--variants'"),
        ("bench --peers sdpa-flash,fa5 --pack causal/64", "--peers: got 'fa5', accepted are sdpa-flash"),
        ("search --pack causal/64 --seconds -1", "Invalid value for '--seconds'"),
        (
            "search --pack causal/64 --seconds inf",
            "Invalid value for '--seconds': 'inf' is not a finite number",
        ),
        ("tune --list --seconds nan", "Invalid value for '--seconds': 'nan' is not a finite number"),
        ("model --arch sm80 --head-dim 77", "--head-dim: 77 has no model; accepted are 16, "),
        ("render --dtype fp64", "Invalid value for '--dtype'"),
        ("bench --suite huge", "Invalid value for '--suite'"),
        ("search --pack causal/64 --dtype fp16 --device cpu", "--dtype: fp16 runs on GPUs only"),
        ("search --device mps", "--device: kernels run on cpu, cuda and cuda:N, not on mps"),
        ("verify --heads 32/8/2 --head-dim 64", "got '32/8/2', expected Q[/KV]"),
        ("tune --list --pack nope", "pack: there is no 'nope'; packs are pretrain/0 to 3"),
        ("tables show nope", "device: no table is for 'nope'; `attnforge tables list` shows what there is"),
        ("tune --list --model nope", "model: there is no 'nope'; models are 7B"),
        ("tune --list --device cpu --dtype bf16 --dtype fp16", "--dtype: fp16 runs on GPUs only"),
        ("tune --list --score ''", "Invalid value for '--score': got '', expected a name"),
        ("explain --gpu ''", "Invalid value for '--gpu': got '', expected a name"),
        ("explain --pack causal/64 --score ''", "Invalid value for '--score': got '', expected a name"),
        ("explain --pack causal/64 --model ''", "Invalid value for '--model': got '', expected a name"),
        ("explain --pack causal/64 --device ''", "Invalid value for '--device': got '', expected a name"),
        (
            "explain --mask window:64 --heads 8/2 --head-dim 64 --length 3000000000",
            "q: got 3000000000 rows, at most 1073741823 are supported",
        ),
        (
            "explain --mask causal --heads 8/2 --head-dim 64 --length 64 --batch 999999999",
            "q: got batch * heads = 7999999992, at most 2147483647 are supported",
        ),
        (
            "explain --mask causal --heads 8/2 --head-dim 64 --length 64 --batch 999999999999999999",
            "q: torch has no tensor of shape (999999999999999999, 8, 64, 64)",
        ),
        ("warm --gpu ''", "Invalid value for '--gpu': got '', expected a name"),
        ("render --arch cpu --dtype fp16", "dtype fp16: the cpu kernels take fp32 or bf16"),
    ],
)
def test_user_errors_are_one_message(arguments: str, message: str) -> None:
    result = run(*shlex.split(arguments), code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_explain_refuses_what_attention_refuses(tmp_path: Path) -> None:
    """A captured tensor with fewer elements than there are heads."""
    file = tmp_path / "scores.py"
    file.write_text(
        "import torch\nslopes = torch.ones(4)\ndef own(score, b, h, q_idx, kv_idx): return score + slopes[h]\n"
    )
    shape = ("--mask", "causal", "--head-dim", "64", "--length", "64", "--device", "cpu")
    score = ("--score", f"{file}:own", "--dtype", "fp32")
    case = with_score(make_case("causal/64", "8/2/64", DType.FLOAT32, CPU), f"{file}:own")
    q, k, v, _ = case.inputs()
    with pytest.raises(ValueError, match=r"h takes 8 values, but axis 0 .* has 4 elements") as refusal:
        attnforge.attention(q, k, v, case.mask, score=case.score)
    assert str(refusal.value) in run("explain", *shape, *score, "--heads", "8/2", code=2).stderr
    assert "runs" in run("explain", *shape, *score, "--heads", "4/2").output


def test_a_search_appends_to_logs_only(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("not a log\n")
    said = run("search", "--pack", "causal/64", "--device", "cpu", "--log", str(notes), code=2).stderr
    assert f"--log: {notes} is not the log of a search" in said.replace("\n", " ")
    assert notes.read_text() == "not a log\n"


def test_a_width_of_0_is_none() -> None:
    """Some containers set COLUMNS=0."""
    program = (
        "from attnforge.bagel.commands.console import echo, console; echo('words'); print(console.width)"
    )
    words = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"COLUMNS": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[0] == "words"
    assert int(words[1]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said() -> None:
    assert "sees no GPU" in run("verify", "--device", "cuda", code=2).stderr


def test_mask_picture(tmp_path: Path) -> None:
    out = tmp_path / "mask.png"
    assert "23642390 visible pairs" in run("mask", "finetune/0", "--out", str(out)).stdout
    colours = {colour for _, colour in Image.open(out).getcolors(1 << 24)}  # type: ignore[union-attr]
    # Full tiles of text, image and noise, skipped and hidden: all are in the picture.
    assert {(64, 110, 190), (42, 140, 106), (212, 122, 46), (244, 245, 247), (214, 217, 223)} <= colours


@pytest.mark.parametrize(
    "pack", ["causal/300", "window:50/200/400", "full/100", "blocks/0.5/512", "FILE", "finetune/0"]
)
def test_any_mask_as_svg_and_png(pack: str, tmp_path: Path) -> None:
    seen = np.random.default_rng(0).random((2, 3, 90, 140)) < 0.5
    np.save(tmp_path / "mask.npy", seen)
    name = str(tmp_path / "mask.npy") if pack == "FILE" else pack
    for kind in ("svg", "png"):
        said = run(
            "mask", name, "--out", str(tmp_path / f"x.{kind}"), "--tile-m", "64", "--tile-n", "32"
        ).stdout
        assert "visible pairs" in said
    text = (tmp_path / "x.svg").read_text()
    inner = ET.fromstring(text).find(".//{*}g/{*}svg")
    assert inner is not None
    _, _, seq_k, seq_q = map(int, inner.attrib["viewBox"].split())
    width, height = int(inner.attrib["width"]), int(inner.attrib["height"])
    assert width / height == pytest.approx(seq_k / seq_q, rel=0.01)
    assert Image.open(tmp_path / "x.png").width > 400


@pytest.mark.parametrize("tiles", [(128, 256), (192, 80), (127, 128)])
def test_pictures_of_packs_have_true_aspect(tiles: tuple[int, int]) -> None:
    down, right = _cells(*tiles, 1152 / 11520)
    assert down / right == pytest.approx(tiles[0] / tiles[1], rel=0.02)


def test_search_end_to_end(tmp_path: Path) -> None:
    out, log, data = tmp_path / "generated", tmp_path / "log.jsonl", tmp_path / "search.json"
    options = (
        "--variants",
        "1",
        "--table-out",
        str(out),
        "--log",
        str(log),
        "--json",
        str(data),
        "--no-peers",
    )
    shown = run("search", *TINY, *options).stdout
    assert "causal/96 0.5B, fwd, fp32" in shown
    assert "causal/96 0.5B, bwd, fp32" in shown
    assert "GFLOP/s" in shown
    searches = json.loads(data.read_text())["searches"]
    assert [one["direction"] for one in searches] == ["fwd", "bwd"]
    assert all(one["ranked"][0]["status"] == "ok" for one in searches)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [kind for row in rows for kind in ("search", "result", "final") if kind in row]
    assert kinds == 2 * ["search", "result", "final"]
    assert [rows[n]["result"]["spec"] for n in (1, 4)] == [
        rows[n]["final"]["results"][0]["spec"] for n in (2, 5)
    ]
    assert says_page(shown, log)
    assert len(list(out.glob("*.cpp"))) == 2
    (table,) = out.glob("*.json")
    assert len(json.loads(table.read_text())) == 2
    assert "(from the log)" in run("search", *TINY, *options).stdout


def says_page(shown: str, log: Path) -> bool:
    """Is there a page of both passes, or is it said how to make one?"""
    page = log.with_suffix(".html")
    if missing := missing_packages():
        return not page.exists() and missing[0] in shown and f"attnforge report {log} -o report.html" in shown
    return page.name in shown and all(
        f"causal/96 0.5B, {name}" in page.read_text() for name in ("forward", "backward")
    )


def test_bench_and_its_files(tmp_path: Path) -> None:
    data, text = tmp_path / "bench.json", tmp_path / "bench.md"
    options = ("--peers", "sdpa-flash,sdpa-samples", "--json", str(data), "--markdown", str(text))
    assert OURS in run("bench", *TINY, "--direction", "fwd", *options).stdout
    ours, sdpa, samples = json.loads(data.read_text())["rows"]
    assert (ours["name"], sdpa["name"], samples["name"]) == (OURS, "sdpa-flash", "sdpa-samples")
    pairs = 96 * 97 // 2
    assert ours["tflops"] == pytest.approx(4 * 14 * 64 * pairs / ours["ms"] / 1e9)
    assert samples["ms"] is None
    assert samples["note"] == "only for packs"
    assert "| causal/96 0.5B fp32 | fwd |" in text.read_text()


def test_verify_says_what_it_found() -> None:
    shown = run("verify", *TINY).stdout
    for tensor in ("out", "lse", "dq", "dk", "dv"):
        assert f"\n {tensor} " in shown


def test_cache_and_doctor(cache_dir: Path) -> None:
    assert "0 compiled kernels" in run("cache", "list").stdout
    assert str(cache_dir) in run("cache", "list").stdout
    assert "0 entries removed" in run("cache", "clear").stdout
    assert "torch" in run("doctor").stdout


def test_doctor_as_json(cache_dir: Path) -> None:
    findings = json.loads(run("doctor", "--json").stdout)
    assert {"name", "status", "value", "remedy"} == set(findings[0])
    assert {"python", "torch", "cache"} <= {finding["name"] for finding in findings}


def test_recorded_packs_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "packs.jsonl"
    path.write_bytes(b"\x93\xff\x00")
    assert (
        f"packs: {path} is not text; expected the JSON lines"
        in run("verify", "--packs", str(path), code=2).stderr
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_that_of_click(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/environment.md says how to switch it on."""
    monkeypatch.setenv("_ATTNFORGE_COMPLETE", f"{shell}_source")
    result = CliRunner().invoke(main, prog_name="attnforge")
    assert "_ATTNFORGE_COMPLETE" in result.output
    assert (
        f"_ATTNFORGE_COMPLETE={shell}_source" in (ROOT / "docs" / "reference" / "environment.md").read_text()
    )


def test_models_are_listed_with_their_sources(tmp_path: Path) -> None:
    shown = run("models", "--sources", "--json", str(tmp_path / "models.json")).stdout
    presets = json.loads((tmp_path / "models.json").read_text())
    assert {"qwen3-32b", "llama3-8b", "deepseek-v3", "siglip", "dit-xl", "7B"} <= {
        one["name"] for one in presets
    }
    assert all(one["name"] in shown for one in presets)
    assert "Qwen/Qwen2.5-7B" in shown


def test_generated_is_up_to_date() -> None:
    assert "up to date" in run("render", "--check").stdout


def test_model_writes_only_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own tables, and those that searches write, stay as they are."""
    spec = next(candidates(Problem(Direction.FORWARD, Arch.SM80, DType.FLOAT32, 41, Mask.DENSE, 4)))
    monkeypatch.setattr(modelled, "model", lambda *_: Tuned(spec, 1, 64, 1.0, 5.0))
    monkeypatch.setattr(tables, "PACKAGED", tmp_path / "package")
    monkeypatch.setenv(TABLES, str(tmp_path / "user"))
    words = ("model", "--arch", "sm80", "--head-dim", "41")
    assert f"sm80 fwd fp32 41 dense: {spec.slug}, 1.0 ms" in run(*words).stdout
    assert not list(tmp_path.iterdir())
    written = tmp_path / "out" / "modelled" / "sm80.json"
    assert f"{written}: modelled" in run(*words, "--table-out", str(tmp_path / "out")).stdout
    assert [entry.spec for entry in load("sm80", written.parent)] == [spec]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_tables_of_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is listed, shown, compared and merged; of equal classes the faster stays."""
    problem = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 16)
    one, two, *_ = candidates(problem)
    first, second = tmp_path / "first", tmp_path / "second"
    notes = {"driver": "580.1", "date": "2026-11-27", "torch": "2.11.0", "attnforge": "0.1.0 (1d2e3f4a)"}
    save("cpu avx2", [Tuned(one, 1, 64, 1.0, 5.0, notes)], first)
    save("cpu avx2", [Tuned(two, 1, 64, 1.0, 7.0), Tuned(two, 4, 64, 1.0, 7.0)], second)
    monkeypatch.setenv("ATTNFORGE_TABLES", f"{first}{os.pathsep}{second}")
    shown = CliRunner().invoke(main, ("tables", "list")).output
    assert f"{first}  (searches write here)" in shown
    assert shown.index(str(first)) < shown.index(str(second)) < shown.index("modelled, not measured")
    lines = CliRunner().invoke(main, ("tables", "show", "cpu avx2")).output.splitlines()[2:]
    known = f"{one.slug}; 2026-11-27; attnforge 0.1.0 (1d2e3f4a); driver 580.1"
    assert {line.split(None, 3)[-1] for line in lines} == {two.slug, known}, (
        "nothing is said of an older entry"
    )
    assert CliRunner().invoke(main, ("tables", "show", "no such device")).exit_code == 2
    different = CliRunner().invoke(main, ("tables", "diff", str(first), str(second))).output
    assert "5.0 TFLOP/s" in different
    assert "7.0 TFLOP/s" in different
    for source, count in ((second, 2), (first, 0)):
        merged = CliRunner().invoke(main, ("tables", "merge", str(source), "--into", str(tmp_path / "all")))
        assert f"{count} of" in merged.output, merged.output
    assert {entry.spec for entry in load("cpu avx2", tmp_path / "all")} == {two}


@pytest.mark.parametrize(
    ("speed", "listed"), [(7.68, True), (7.0, True), (6.4, True), (7.72, False), (6.35, False)]
)
def test_merge_lists_what_two_runs_cannot_decide(speed: float, listed: bool, tmp_path: Path) -> None:
    """Kernels less than 10 % apart, of which the later one stays if they are as fast as each other."""
    one, two, *_ = candidates(Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 16))
    save("cpu avx2", [Tuned(one, 1, 64, 1.0, 7.0)], tmp_path / "all")
    save("cpu avx2", [Tuned(two, 1, 64, 1.0, speed), Tuned(one, 4, 64, 1.0, 7.0)], tmp_path / "new")
    merged = run("tables", "merge", str(tmp_path / "new"), "--into", str(tmp_path / "all")).stdout
    kept, other = (two, one) if speed >= 7 else (one, two)
    assert kept in [entry.spec for entry in load("cpu avx2", tmp_path / "all") if entry.group == 1]
    assert ("1 chosen by less than 10 %" in merged) == listed
    assert (f"{kept.slug}; other " in merged and other.slug in merged) == listed
    again = run("tables", "merge", str(tmp_path / "new"), "--into", str(tmp_path / "new")).stdout
    assert "chosen by" not in again, "the same kernels"


def test_merge_writes_the_sources_of_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a search does: beside the table, but not in the package's own folder."""
    one, two, *_ = candidates(Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 16))
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    save("cpu avx2", [Tuned(one, 1, 64, 1.0, 5.0)], slow)
    save("cpu avx2", [Tuned(two, 1, 64, 1.0, 7.0)], fast)
    monkeypatch.setattr("attnforge.runtime.tables.PACKAGED", tmp_path / "packaged")
    for name in ("all", "packaged"):
        run("tables", "merge", str(fast), str(slow), "--into", str(tmp_path / name))
        assert {entry.spec for entry in load("cpu avx2", tmp_path / name)} == {two}
    assert [path.name for path in (tmp_path / "all").glob("*.cpp")] == [f"{two.slug}.cpp"]
    assert (tmp_path / "all" / f"{two.slug}.cpp").read_text() == render(two).text
    assert [path.name for path in (tmp_path / "packaged").glob("[!.]*")] == ["cpu-avx2.json"]


def test_merge_says_which_kernel_has_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older version, which cannot be rendered any more: its entry is taken all the same."""

    def refuse(spec: object) -> None:
        raise Infeasible("tile_m: got 7")

    one = next(candidates(Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL, 16)))
    save("cpu avx2", [Tuned(one, 1, 64, 1.0, 5.0)], tmp_path / "old")
    monkeypatch.setattr("attnforge.runtime.search.winners.render", refuse)
    merged = run("tables", "merge", str(tmp_path / "old"), "--into", str(tmp_path / "all"))
    assert f"no source of {one.slug}: tile_m: got 7" in merged.output
    assert len(load("cpu avx2", tmp_path / "all")) == 1


def test_show_takes_every_name_that_list_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNFORGE_TABLES", str(tmp_path))
    listed = CliRunner().invoke(main, ("tables", "list")).output
    found = re.findall(r"^  (\S+): (\d+) entries, ([^;\n]*)", listed, re.MULTILINE)
    assert ("nvidia-h200", "measured") in {(name, words) for name, _, words in found}
    assert {"sm80", "sm120"} <= {name for name, _, words in found if words == "modelled, not measured"}
    for name, count, words in found:
        shown = CliRunner().invoke(main, ("tables", "show", name))
        assert shown.exit_code == 0, shown.output
        title, _, *rows = shown.output.splitlines()
        assert title == (name if words == "measured" else f"{name}, {words}")
        assert len(rows) == int(count)


@pytest.mark.gpu
def test_search_and_bench_on_a_gpu(tmp_path: Path) -> None:
    pack = ("--pack", "finetune/0", "--model", "0.5B", "--device", "cuda")
    data, rows = tmp_path / "search.json", tmp_path / "bench.json"
    run("search", *pack, "--variants", "2", "--no-peers", "--table-out", str(tmp_path), "--json", str(data))
    searches = json.loads(data.read_text())["searches"]
    assert [one["direction"] for one in searches] == ["fwd", "bwd"]
    assert all(one["ranked"][0]["registers"] > 0 and not one["failed"] for one in searches)
    shown = run("bench", *pack, "--peers", "flex", "--json", str(rows)).stdout
    found = json.loads(rows.read_text())["rows"]
    assert [(row["name"], row["direction"]) for row in found] == [
        (OURS, "fwd"),
        ("flex", "fwd"),
        (OURS, "bwd"),
        ("flex", "bwd"),
    ]
    for row in found:
        print(row["name"], row["direction"], row["ms"], row["note"])
        if row["name"] == OURS:
            assert row["ms"] > 0
        else:  # torch's own affair, but never without a reason
            assert bool(row["ms"]) != bool(row["note"]), row
            assert (row["note"] or "flex").split()[0] in shown


def test_suites_name_real_cases() -> None:
    for (_, device), rows in SUITES.items():
        assert device in NAMES
        for name, model in rows:
            case = make_case(name, model, DType.BFLOAT16, CPU)
            assert case.pairs > 0
            assert case.name == f"{name} {model}"


def test_a_failure_of_ours_is_reported_after_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(case: Case, direction: Direction) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("attnforge.bagel.measure.bench.time_ours", boom)
    result = run("bench", *TINY, "--direction", "fwd", "--peers", "sdpa-flash", code=1)
    assert "sdpa-flash" in result.stdout
    assert "kernels of attnforge failed:\ncausal/96 0.5B fwd fp32: RuntimeError: no kernel" in result.stderr


def test_markdown_ratio_is_to_the_best_peer() -> None:
    rows = [
        Row("a", "fwd", "bf16", OURS, 2.0, 100.0),
        Row("a", "fwd", "bf16", "slow", 8.0, 25.0),
        Row("a", "fwd", "bf16", "fast", 3.0, 66.7),
        Row("a", "fwd", "bf16", "none", note="takes no mask"),
    ]
    best = best_peer(rows)
    assert best is not None
    assert best.name == "fast"
    text = bench_markdown(rows, {"device": "x"})
    assert "| a bf16 | fwd | 100 | 25 | 66.7 | - | 1.50 |" in text
    assert "TFLOP/s of visible pairs" in text
    assert "- none: takes no mask (a fwd)" in text


def test_a_failing_peer_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def boom(*arguments: object) -> None:
        raise RuntimeError("lowering failed:\n  no [valid] configs")

    monkeypatch.setattr("attnforge.bagel.measure.peers._flex", boom)
    text = tmp_path / "bench.md"
    shown = run("bench", *TINY, "--direction", "fwd", "--peers", "flex", "--markdown", str(text)).stdout
    assert "RuntimeError: lowering failed: no [valid] configs" in " ".join(shown.replace("│", " ").split())
    assert (
        "- flex: RuntimeError: lowering failed: no [valid] configs (causal/96 0.5B fwd)" in text.read_text()
    )
