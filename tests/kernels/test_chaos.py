"""Kernels for race hunting: sleeps at every barrier, and nothing of them in ordinary ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from attnforge.codegen.chaos import ELECTED, TOGETHER, plant
from attnforge.codegen.render import Source, render
from attnforge.codegen.spec import Arch, Spec
from attnforge.runtime import kernels
from attnforge.runtime.build import cache
from attnforge.runtime.build.settings import CHAOS, settings
from attnforge.runtime.build.toolchain import Command, toolchain
from attnforge.runtime.search.winners import tuned_specs

HOPPER = [spec for spec in tuned_specs() if spec.problem.arch is Arch.SM90A]
CALL = "chaos_sleep();"


@pytest.mark.parametrize("spec", HOPPER, ids=lambda spec: spec.slug)
def test_every_barrier_sleeps_and_nothing_else_changes(spec: Spec) -> None:
    ordinary, chaotic = render(spec).text, render(spec, 7).text
    assert "chaos" not in ordinary
    helper = re.search(
        r"(?:^//[^\n]*\n){1}__device__ __forceinline__ void chaos_sleep\(\) \{\n.*?^\}\n\n",
        chaotic,
        re.M | re.S,
    )
    assert helper
    lines = chaotic.replace(helper[0], "").splitlines()
    assert "\n".join(line for line in lines if line.strip() != CALL) + "\n" == ordinary
    for instruction in TOGETHER:
        for place in re.finditer(re.escape(f'"{instruction}'), chaotic):
            start = chaotic.rindex("__device__", 0, place.start())
            assert CALL in chaotic[start : place.start()], f"{instruction} does not sleep"
    arrivals = [
        n
        for n, line in enumerate(lines)
        if line.strip().startswith(("barrier_arrive(", "barrier_arrive_if("))
    ]
    assert arrivals
    for number in arrivals:  # the sleep comes before the conditions that they stand under
        assert any(line.strip() == CALL for line in lines[number - 25 : number]), lines[
            number - 25 : number + 1
        ]


def test_elected_lanes_sleep_with_their_warp() -> None:
    before = """__device__ __forceinline__ void report(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void work(int i) {
    for (;;) {
        if (i > 0) {
            if (threadIdx.x == 0) {
                report(3);
            }
        }
        report(4);
    }
}
"""
    after = before.replace("        if (i > 0)", "        chaos_sleep();\n        if (i > 0)")
    after = after.replace("        report(4)", "        chaos_sleep();\n        report(4)")
    assert plant(before, 1).endswith(after)
    assert ELECTED


def test_the_seed_makes_another_kernel() -> None:
    spec = HOPPER[0]
    compiler = Command("stub", Path("stub"), "identity", (), "kernel.cubin")
    keys = {cache.key(render(spec, seed), compiler) for seed in (0, 1, 2)}
    assert len(keys) == 3
    assert render(spec, 2) == render(spec, 2)


def test_text_without_barriers_stays() -> None:
    text = "__device__ __forceinline__ float twice(float x) {\n    return 2 * x;\n}\n"
    assert plant(text, 1) == text


@pytest.mark.parametrize("seed", [0, -1, 1 << 32])
def test_seeds_are_words(seed: int) -> None:
    with pytest.raises(ValueError, match="chaos"):
        plant("", seed)


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHAOS, raising=False)
    assert settings().chaos == 0
    monkeypatch.setenv(CHAOS, "12")
    assert settings().chaos == 12
    for wrong in ("-1", "yes", str(1 << 32)):
        monkeypatch.setenv(CHAOS, wrong)
        with pytest.raises(ValueError, match=CHAOS):
            settings()


def test_loading_a_kernel_heeds_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the cache is the text with the sleeps; without the setting it is the ordinary one again."""
    seen: list[str] = []

    def obtain(source: Source) -> None:
        seen.append(source.text)
        raise RuntimeError("not compiled here")

    monkeypatch.setattr(cache, "obtain", obtain)
    monkeypatch.setattr(kernels, "targets", lambda device: (Arch.SM90A,))
    spec = HOPPER[0]
    for seed in ("5", "0"):
        monkeypatch.setenv(CHAOS, seed)
        with pytest.raises(RuntimeError, match="not compiled here"):
            kernels.load(spec, torch.device("cuda", 0))
    assert seen == [render(spec, 5).text, render(spec).text]


@pytest.mark.nvcc
def test_a_kernel_with_chaos_compiles(tmp_path: Path) -> None:
    backward = next(s for s in HOPPER if s.slug.startswith("bwd_sm90a_bf16_d64_spans"))
    for spec in (HOPPER[-1], backward):
        sizes = []
        for seed in (0, 3):
            built = toolchain(Arch.SM90A).compile(render(spec, seed), tmp_path)
            sizes.append((tmp_path / built.binary_name).stat().st_size)
        assert sizes[1] > sizes[0]
