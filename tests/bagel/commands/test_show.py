"""`show` and `explain` in a terminal."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice

import pytest
from click.testing import CliRunner
from rich.console import Console

from attnforge.bagel.commands import show as show_module
from attnforge.bagel.measure.case_scores import function_named
from attnforge.cli import main
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.build import disassembly
from attnforge.runtime.build.toolchain import find_program
from attnforge.runtime.search.winners import tuned_specs

GPU = list(islice(candidates(Problem(Direction.FORWARD, Arch.SM80, DType.BFLOAT16, 64, Mask.CAUSAL)), 2))
CPU = next(iter(candidates(Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.FULL))))


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output


def test_source_and_difference() -> None:
    assert run("show", GPU[0].slug) == render(GPU[0]).text
    changed = run("show", GPU[0].slug, f"generated/{GPU[1].slug}.cu")
    assert changed.startswith(f"--- {GPU[0].slug}\n+++ {GPU[1].slug}\n")
    assert "\n-" in changed
    assert run("show", GPU[0].slug, GPU[0].symbol) == "no difference in source\n"


def test_the_function_of_a_score_is_found() -> None:
    """In a table, or by --score."""
    tuned = next(spec for spec in tuned_specs() if spec.problem.score)
    assert run("show", tuned.slug) == render(tuned).text
    other = replace(GPU[0], problem=replace(GPU[0].problem, score=function_named("softcap:31")))
    refused = run("show", other.slug, code=2)
    assert f"{other.problem.score.label} is a function of a mask or a score" in refused
    assert "--score" in refused
    assert run("show", other.slug, "--score", "alibi", "--score", "softcap:31") == render(other).text


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=120)
    monkeypatch.setattr(show_module, "console", console)
    with console.capture() as capture:
        CliRunner().invoke(main, ("show", GPU[0].slug), catch_exceptions=False)
    assert "\x1b[" in capture.get()


def test_registers_of_a_cpu_kernel_are_not_invented() -> None:
    shown = run("show", CPU.slug, "--what", "registers")
    assert CPU.slug in shown
    (line,) = (line for line in shown.splitlines() if line.strip().startswith("main"))
    assert line.split()[1:3] == ["-", "-"]


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a CPU kernel has neither PTX nor SASS" in run("show", CPU.slug, "--what", "sass", code=2)
    assert "is not the name of a kernel" in run("show", "nonsense", code=2)
    monkeypatch.setattr(disassembly, "find_nvcc", lambda env: None)
    assert "nvcc is not in" in run("show", GPU[0].slug, "--what", "ptx", code=2)


@pytest.mark.nvcc
def test_ptx_and_registers() -> None:
    text = run("show", GPU[0].slug, "--what", "ptx")
    assert f".entry {GPU[0].symbol}" in text
    shown = run("show", GPU[0].slug, "--what", "registers")
    (line,) = (line for line in shown.splitlines() if line.strip().startswith("main"))
    assert 32 <= int(line.split()[1]) <= 255


@pytest.mark.nvcc
def test_sass_or_what_to_install() -> None:
    if any(find_program(name, os.environ) for name in ("nvdisasm", "cuobjdump")):
        assert "HMMA" in run("show", GPU[0].slug, "--what", "sass")
    else:
        assert "pip install nvidia-cuda-nvdisasm" in run("show", GPU[0].slug, "--what", "sass", code=2)


def test_explain_prints_choice_and_reason() -> None:
    words = ("--gpu", "NVIDIA H200", "--dtype", "bf16", "--direction", "fwd", "--most", "1")
    shown = run("explain", "--pack", "pretrain/0", "--model", "7B", *words)
    assert "  runs  fwd_sm90a_bf16_d128_spans" in shown
    assert "nvidia-h200.json" in shown
    assert "  and   " in shown
    plain = run("explain", "--mask", "full", "--heads", "8", "--head-dim", "100", *words)
    assert "`attnforge search` with the same options" in plain
    assert "--arch: NVIDIA H200 runs sm90a, sm90, not sm80" in run(
        "explain", "--mask", "full", "--arch", "sm80", *words, code=2
    )
