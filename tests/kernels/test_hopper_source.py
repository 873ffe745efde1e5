"""The form of the Hopper forward: a main loop that can be read, few includes; and what ptxas makes of that loop."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader
from strict_nvcc import compile_strictly, strict_cubin

from attnforge.codegen import render as rendering
from attnforge.codegen.families.sm90 import Sm90Forward
from attnforge.codegen.render import Source, render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import toolchain

MAIN_LOOP = 80  # lines
# With the kernel's own file, and PipelineState, which both forwards share.
CLOSURE = 17
FLAGSHIP = Sm90Forward(192, 80, 3, True, True, True, False)
PLAIN = Sm90Forward(192, 80, 3, True, True, False, False)


def hopper(mask: Mask, head_dim: int, tuning: Sm90Forward, dim_v: int = 0) -> Source:
    return render(
        Spec(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, head_dim, mask, 16, dim_v), tuning)
    )


def main_loop(text: str) -> str:
    """The consumer's `run`."""
    found = re.search(
        r"^struct Consumer \{.*?(^    __device__[^\n]* run\(\) \{\n.*?^    \}\n)", text, re.M | re.S
    )
    assert found
    return found[1]


@pytest.mark.parametrize("mask", list(Mask), ids=lambda mask: mask.value)
def test_the_main_loop_fits_on_a_page(mask: Mask) -> None:
    """And says each step once."""
    space = list(candidates(Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, mask)))
    for spec in space[:: len(space) // 12]:
        loop = main_loop(render(spec).text)
        assert len(loop.splitlines()) <= MAIN_LOOP
        for step in ("issue_qk()", "issue_pv(", "leave_tile()"):
            assert loop.count(step) == 1, step


@pytest.mark.parametrize(
    ("score", "most"), [("", CLOSURE), ("softcap: 50.0 * tanh(score / 50.0)", CLOSURE + 3)]
)
def test_few_files_make_a_kernel(score: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as they are read: an include under a condition that is false is none."""
    loader = FileSystemLoader(rendering.TEMPLATES)
    read: list[str] = []

    def recorded(environment: Environment, name: str) -> tuple[str, str, Callable[[], bool]]:
        read.append(name)
        return FileSystemLoader.get_source(loader, environment, name)

    monkeypatch.setattr(loader, "get_source", recorded)
    environment = rendering.environment().overlay(loader=loader, cache_size=0)
    monkeypatch.setattr(rendering, "environment", lambda: environment)
    problem = Problem(Direction.FORWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS, score=ScoreMod(score))
    render(Spec(problem, FLAGSHIP if not score else PLAIN))
    assert "sm90a/forward.cu.jinja" in read
    assert 10 < len(set(read)) <= most, sorted(set(read))


def disassembler() -> str:
    """Path of nvdisasm, or skip."""
    nvcc = toolchain.find_nvcc(dict(toolchain._environment()))
    beside = shutil.which("nvdisasm", path=str(Path(nvcc).parent)) if nvcc else None
    found = shutil.which("nvdisasm") or beside
    if not found:
        pytest.skip("nvdisasm is not there (it comes with the CUDA toolkit and as nvidia-cuda-nvdisasm)")
    return found


def instructions(listing: str, symbol: str) -> list[str]:
    """Labels (`.L_x_1:`) and instructions of a kernel, from what nvdisasm -c prints."""
    kernel = listing.split(f".text.{symbol}:", 1)[1].split("//-----", 1)[0]
    label_or_code = re.compile(r"^(\.L\w+:)|^\s+/\*[0-9a-f]+\*/\s+(.*?) ;", re.MULTILINE)
    return [match[1] or match[2] for match in label_or_code.finditer(kernel)]


def hot_loop(code: list[str]) -> list[str]:
    """The smallest loop with products of two shapes: S of one visit and O of the one before it."""
    labels = {line[:-1]: number for number, line in enumerate(code) if line.startswith(".L")}
    loops = []
    for number, line in enumerate(code):
        target = re.search(r"BRA.*`\((\.L\w+)\)", line)
        if target and labels.get(target[1], number) < number:
            body = code[labels[target[1]] : number + 1]
            shapes = {word for each in body for word in re.findall(r"HGMMA\.\w+|tnspB", each)}
            loops += [body] if "tnspB" in shapes and len(shapes) > 1 else []
    return min(loops, key=len)


LOOPS = {
    "spans": (Mask.SPANS, 128, FLAGSHIP, 0),
    "spans-64": (Mask.SPANS, 64, Sm90Forward(192, 128, 2, True, True, True, False), 0),
    "spans-72": (Mask.SPANS, 72, Sm90Forward(192, 128, 3, True, True, True, False), 0),
    "causal": (Mask.CAUSAL, 128, PLAIN, 0),
    "causal-192-128": (Mask.CAUSAL, 192, Sm90Forward(128, 128, 2, False, True, False, True), 128),
    "full": (Mask.FULL, 128, Sm90Forward(192, 80, 3, False, True, False, False), 0),
    "full-64": (Mask.FULL, 64, Sm90Forward(192, 128, 3, True, True, False, False), 0),
    "dense": (Mask.DENSE, 128, Sm90Forward(128, 128, 2, True, True, False, True), 0),
}


COMPILED = {"spans", "causal-192-128", "dense"}  # three consumers with lists, wide heads, and bits of a mask


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "names",
    [COMPILED, pytest.param(LOOPS.keys() - COMPILED, marks=pytest.mark.slow)],
    ids=["covering", "others"],
)
def test_no_warning_about_wgmma_and_no_spill(names: set[str], nvcc: None, tmp_path: Path) -> None:
    log, resources = compile_strictly([hopper(*LOOPS[name]) for name in sorted(names)], tmp_path)
    assert not re.search(r"C75\d\d", log), log
    assert not any(used["spill_bytes"] for used in resources.values()), log


@pytest.mark.nvcc
@pytest.mark.parametrize("name", LOOPS)
def test_what_ptxas_makes_of_the_main_loop(name: str, nvcc: None, tmp_path: Path) -> None:
    """In the hot loop no divergence, and addresses stay in uniform registers."""
    program, source = disassembler(), hopper(*LOOPS[name])
    cubin = strict_cubin(source, tmp_path)
    listing = subprocess.run([program, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    loop = hot_loop(instructions(listing, source.spec.symbol))
    assert sum("R2UR" in line for line in loop) <= 1
    for word in ("BSSY", "WARPSYNC", "BRA.DIV", "LDL", "STL", "S2UR"):
        assert not any(word in line for line in loop), word
    # Both products of a visit begin with an arrival and end with a wait.
    arrivals, waits = (
        sum(word in line for line in loop) for word in ("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR")
    )
    assert arrivals == waits == 2
