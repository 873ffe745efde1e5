"""Templates and their parts: each one is used, and what a part says is in the identity of what is rendered from it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader, UndefinedError, meta
from spaces import sample

from attnforge.codegen import cpu_features, prologue
from attnforge.codegen import render as rendering
from attnforge.codegen.families import make_plan
from attnforge.codegen.families.cpu import CpuBackward
from attnforge.codegen.families.sm80_backward import Sm80Backward
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.modules import mask_kernels, sink_kernels
from attnforge.codegen.package import Contract, Item, Tree
from attnforge.codegen.prologue import PrologueProblem
from attnforge.codegen.render import TEMPLATES, RenderError, render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates, splitting
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.build import cache, toolchain
from attnforge.runtime.search.journal import source_key

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
COMPILER = toolchain.Command("a", Path("a"), "identity", ("-O3",), "kernel.cubin")


def first(direction: Direction, arch: Arch, dtype: DType, mask: Mask) -> Spec:
    return next(candidates(Problem(direction, arch, dtype, 64, mask)))


def kinds(problem: Problem) -> list[Spec]:
    """Candidates in which every template and every value of every knob occurs."""
    found, seen = [], set[tuple[str, int | str]]()
    for spec in sample(problem):
        new = {("template", make_plan(spec).template), *spec.to_json()["tuning"].items()} - seen
        if new:
            seen |= new
            found.append(spec)
    return found


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of templates/ that everything is rendered from."""
    copy = tmp_path / "templates"
    shutil.copytree(TEMPLATES, copy)
    monkeypatch.setattr(rendering, "TEMPLATES", copy)
    rendering.environment.cache_clear()
    yield copy
    rendering.environment.cache_clear()


class Recorder(FileSystemLoader):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(TEMPLATES)
        self.names: set[str] = set()

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, object]:  # type: ignore[override]
        self.names.add(template)
        return super().get_source(environment, template)


def test_every_template_is_used(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: "")  # as on a machine with tile registers
    recorder = Recorder()
    rendering.environment().loader = recorder
    targets = [(arch, DType.BFLOAT16) for arch in (Arch.CPU, Arch.SM80, Arch.SM90A)]
    targets += [(arch, DType.FLOAT32) for arch in (Arch.SM80, Arch.SM120, Arch.SM90A)]
    for arch, dtype in targets:
        for mask in Mask:
            problems = [Problem(direction, arch, dtype, 64, mask) for direction in Direction]
            problems.append(Problem(Direction.BACKWARD, arch, dtype, 192, mask))  # Hopper's wide heads
            problems.append(Problem(FORWARD, arch, dtype, 512, mask))  # warps that share the columns of O
            for spec in (spec for problem in problems for spec in (*kinds(problem), *splitting(problem, 1))):
                render(spec)
        score, mod = ScoreMod("softcap: 30.0 * tanh(score / 30.0)"), MaskMod("a: q_idx > kv_idx // 2")
        lines = ScoreMod("alibi(t0: float32[1]): score - t0[h] * abs(q_idx - kv_idx)")
        problems = [
            dataclasses.replace(plain, **fields)
            for plain in (Problem(direction, arch, dtype, 64, Mask.DENSE) for direction in Direction)
            for fields in (
                {},
                {"score": score},
                {"score": lines},
                {"mask_mod": mod},
                {"score": score, "mask_mod": mod},
            )
        ]
        learned = ScoreMod("bias(t0: float32[1] grad): score + t0[h]")
        problems.append(Problem(Direction.BACKWARD, arch, dtype, 64, Mask.DENSE, score=learned))
        firsts = [found for problem in problems for found in islice(candidates(problem), 1)]
        if isinstance(learner := firsts[-1].tuning, CpuBackward | Sm80Backward):
            render(Spec(problems[-1], dataclasses.replace(learner, deterministic=True)))
        items = tuple(Item(spec, 1024, "guess") for spec in firsts)
        for contract in (None, *Contract):
            Tree("my_attention", arch, items, contract).files("export")
        prologue.render(next(prologue.candidates(PrologueProblem(FORWARD, arch, dtype, 64))))
        if arch.is_gpu:
            mask_kernels.__wrapped__(arch)  # not what an earlier test left in its cache
            sink_kernels.__wrapped__(arch, dtype)
    assert recorder.names == set(every_template())


@pytest.mark.parametrize("head_dim", [24, 64, 128, 192])
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM90A])
@pytest.mark.parametrize("direction", Direction)
def test_kernels_multiply_and_divide_by_no_one(direction: Direction, arch: Arch, head_dim: int) -> None:
    """A constant of a template that is 1 is left out of what is rendered."""
    for spec in kinds(Problem(direction, arch, DType.BFLOAT16, head_dim, Mask.SPANS)):
        for line in render(spec).text.splitlines():
            assert not re.search(r"[\w)\]] [*/%] 1\b(?!\.)", line.partition("//")[0]), line


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("// A space at the end. \n", "trailing space or a tab"),
        ("//\tA tab.\n", "trailing space or a tab"),
        ("\n\n// Two empty lines before.\n", "two blank lines in a row"),
        ("// No newline.", "exactly one newline"),
        ("\n", "exactly one newline"),
        (f"// {'wide ' * 30}.\n", "columns wide"),
    ],
)
def test_the_form_of_what_is_rendered(templates: Path, end: str, message: str) -> None:
    spec = first(FORWARD, Arch.SM80, DType.BFLOAT16, Mask.FULL)
    template = templates / make_plan(spec).template
    template.write_text(template.read_text() + end)
    with pytest.raises(RenderError, match=message):
        render(spec)


@pytest.mark.parametrize("expression", ["nothing", "spec.nothing", "c.nothing", "plan.nothing"])
def test_an_unknown_name_is_an_error(templates: Path, expression: str) -> None:
    spec = first(FORWARD, Arch.SM80, DType.BFLOAT16, Mask.FULL)
    template = templates / make_plan(spec).template
    template.write_text(template.read_text() + f"// {{{{ {expression} }}}}.\n")
    with pytest.raises(UndefinedError, match="nothing"):
        render(spec)


# A part, one spec that it is a part of, one that it is not.
BF16, SPANS = DType.BFLOAT16, Mask.SPANS
CASES = [
    ("sm80/forward_loop.cuh.jinja", (FORWARD, Arch.SM80, BF16, SPANS), (BACKWARD, Arch.SM80, BF16, SPANS)),
    (
        "sm80/apply_mask.cuh.jinja",
        (BACKWARD, Arch.SM89, DType.FLOAT32, SPANS),
        (FORWARD, Arch.CPU, BF16, SPANS),
    ),
    (
        "common/schedule.cuh.jinja",
        (FORWARD, Arch.SM90, BF16, Mask.DENSE),
        (FORWARD, Arch.CPU, BF16, Mask.DENSE),
    ),
    ("common/mask.cuh.jinja", (FORWARD, Arch.SM90A, BF16, SPANS), (FORWARD, Arch.CPU, BF16, SPANS)),
    ("cpu/pack.h.jinja", (BACKWARD, Arch.CPU, BF16, SPANS), (BACKWARD, Arch.SM90A, BF16, SPANS)),
]


@pytest.mark.parametrize(("part", "inside", "outside"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_changed_part_is_a_new_kernel_to_cache_and_journal(
    templates: Path,
    part: str,
    inside: tuple[Direction, Arch, DType, Mask],
    outside: tuple[Direction, Arch, DType, Mask],
) -> None:
    def keys() -> list[tuple[str, str]]:
        rendering.environment.cache_clear()  # as in a new process
        sources = [render(first(*problem)) for problem in (inside, outside)]
        return [(cache.key(source, COMPILER), source_key(source.text)) for source in sources]

    before = keys()
    with (templates / part).open("a") as file:
        file.write("// One more line.\n")
    after = keys()
    assert all(one != other for one, other in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]


# What the renderer gives every template: `render` and `environment` of codegen/render.py.
CONTEXT = {"spec", "plan", "c", "knobs", "params_struct"}
# What package.py gives those of a package.
PACKAGE = {"tree", "command", "namespace", "numbers", "codes", "masks"}
# Folders whose files all say in their first comment what they take.
DECLARING = ("common", "cpu", "prologue", "sm80")


def every_template() -> list[str]:
    """All of them, but for the HTML page of bagel/report/."""
    names = (path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.jinja"))
    return sorted(name for name in names if not name.startswith("report/"))


def undeclared(text: str) -> set[str]:
    """Names that a template takes from outside and that are neither the renderer's nor in its first comment."""
    environment = rendering.environment()
    names = meta.find_undeclared_variables(environment.parse(text)) - CONTEXT - environment.globals.keys()
    comment = text.partition("#}")[0] if text.startswith("{#") else ""
    declared = set(re.findall(r"\w+", comment.partition("Inputs:")[2]))
    return names - declared


@pytest.mark.parametrize("name", every_template())
def test_templates_take_no_name_that_only_an_includer_sets(name: str) -> None:
    names = undeclared((TEMPLATES / name).read_text())
    assert names <= (PACKAGE if name.startswith("export/") else set())


def test_undeclared_names_are_found() -> None:
    assert undeclared("{# A part. Inputs: spec, width. #}\n{{ width }} {{ spec.symbol }}") == set()
    assert undeclared("{# A part. Inputs: spec. #}\n{{ width }} {{ spec.symbol }}") == {"width"}
    assert undeclared("{{ mask }}{% set mask = spec.problem.mask %}") == {"mask"}


@pytest.mark.parametrize("name", [name for name in every_template() if name.startswith(DECLARING)])
def test_templates_say_what_they_take(name: str) -> None:
    text = (TEMPLATES / name).read_text()
    assert text.startswith("{#")
    assert "Inputs:" in text.partition("#}")[0]
