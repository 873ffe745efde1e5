"""Exported packages: what is written, that it builds and is right on the CPU, and what it says when it cannot run."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from exported import COMMAND, DIRECTIONS, NAME, built, load, make_tree, run
from torch import Tensor

from attnforge.cli import main
from attnforge.codegen.package import Contract, Item, Tree
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.space import candidates, deterministic_candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import export
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.search.reference import reference
from attnforge.runtime.tables import Tuned, save

SHAPES = [export.Shape(1, 2, 96, 41)]  # a multiple of nothing


@pytest.fixture(scope="session")
def tree() -> Tree:
    """Few kernels, for the time that they take to compile."""
    items = export.collect(Arch.CPU, SHAPES, (DType.FLOAT32,), (Mask.SPANS, Mask.DENSE), DIRECTIONS)
    items += export.collect(Arch.CPU, SHAPES, (DType.BFLOAT16,), (Mask.DENSE,), DIRECTIONS)
    return Tree(NAME, Arch.CPU, items)


@pytest.fixture(scope="session")
def directory(tree: Tree) -> Path:
    return built(tree)


@pytest.fixture(scope="session")
def package(directory: Path) -> ModuleType:
    return load(directory)


def draw(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


# ---- The text


def test_every_file_is_readable_text(tree: Tree) -> None:
    for contract in (None, *Contract):
        for path, text in dataclasses.replace(tree, contract=contract).files(COMMAND).items():
            assert "\n\n\n\n" not in text, path
            assert text.endswith("\n"), path
            assert not text.endswith("\n\n"), path
            if path.endswith(".py"):
                ast.parse(text)
            if path.endswith((".cpp", ".h", ".cu")):
                wide = [line for line in text.splitlines() if len(line) > 120]
                assert all(
                    line.lstrip().startswith(('extern "C"', "asm", '"', ":", "params", "schedule_kind"))
                    for line in wide
                ), wide
            assert not re.search(r"[ \t]$", text, re.MULTILINE), path


def test_nothing_of_attnforge_is_imported(tree: Tree) -> None:
    for path, text in tree.files(COMMAND).items():
        if path.endswith(".py"):
            names = [
                n for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for n in node.names
            ]
            assert "attnforge" not in {name.name.partition(".")[0] for name in names}


def test_gpu_package_has_a_slurm_job_and_names_its_architecture() -> None:
    shapes = [export.Shape(1, 2, 4096, 64)]
    tree = make_tree(Arch.SM89, shapes, (DType.BFLOAT16,), (Mask.SPANS,))
    files = dataclasses.replace(tree, contract=Contract.OPENKERNEL).files(COMMAND)
    assert "TORCH_CUDA_ARCH_LIST=8.9" in files["run.sh"]
    assert "-gencode=arch=compute_89,code=sm_89" in files["setup.py"]
    assert subprocess.run(("bash", "-n"), input=files["run.sh"], text=True).returncode == 0
    assert {
        f"{NAME}/{name}" for name in ("__init__.py", "binding.cpp", f"{NAME}.cu", "kernels.h")
    } <= files.keys()
    assert sum(path.startswith(f"{NAME}/kernels/") for path in files) == len(tree.items)


def test_hopper_takes_the_other_family_where_tma_cannot_go() -> None:
    tree = make_tree(
        Arch.SM90A, [export.Shape(1, 2, 4096, 8)], (DType.BFLOAT16,), (Mask.FULL,), (Direction.FORWARD,)
    )
    assert [item.spec.problem.arch for item in tree.items] == [Arch.SM90]


@pytest.mark.parametrize("arch", ["sm90", "sm90a"])
def test_hopper_has_its_fast_float32_kernel_by_either_name(arch: str, tmp_path: Path) -> None:
    words = ("export", "--arch", arch, "--contract", "openkernel", "--dtype", "fp32", str(tmp_path / "out"))
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    written = [path.name for path in (tmp_path / "out/custom_attention/kernels").iterdir()]
    assert {name[:15] for name in written} == {"fwd_sm90a_fp32_", "bwd_sm90_fp32_d"}
    assert "-gencode=arch=compute_90a,code=sm_90a" in (tmp_path / "out/setup.py").read_text()
    assert "TORCH_CUDA_ARCH_LIST=9.0a" in (tmp_path / "out/run.sh").read_text()


@pytest.mark.parametrize("name", ["attnforge", "torch", "numpy", "json", "my-attention", "2nd", ""])
def test_names_that_are_no_module_of_their_own(tree: Tree, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        dataclasses.replace(tree, name=name)


def test_a_name_of_cpp_is_no_namespace(tree: Tree) -> None:
    """`namespace int` and `namespace exp` do not compile."""
    texts = dataclasses.replace(tree, name="int").files("attnforge export")
    assert not any("namespace int {" in text for text in texts.values())
    assert "namespace int_package {" in texts["int/kernels.h"]


def test_the_command_is_recorded_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--traceback", "export", "--arch", "cpu", "--head-dim", "64", str(tmp_path / "my out")]
    monkeypatch.setattr(sys, "argv", ["attnforge", *words])
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert f"attnforge {shlex.join(words[1:])}\n" in (tmp_path / "my out/README.md").read_text()


def test_unions_of_spans_are_refused() -> None:
    problem = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 64, Mask.SPANS, 4, intervals=2)
    item = Item(next(candidates(problem)), 64, "chosen")
    with pytest.raises(ValueError, match=r"export: fwd_cpu.*spansx2.* is for several intervals or planes"):
        Tree("my_attention", Arch.CPU, (item,))


def test_shapes_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    path.write_text("# B H S D\n1 5 2651 56\n(2, 13, 2872, 44)\n1 2 64 192 128  # with D of v\n")
    found = export.read_shapes(path)
    assert found == [
        export.Shape(1, 5, 2651, 56),
        export.Shape(2, 13, 2872, 44),
        export.Shape(1, 2, 64, 192, 128),
    ]
    for bad in (b"1 2 3", b"1 2 3 x", b"1 2 0 4", b"# nothing", b"\xf1\x00"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            export.read_shapes(path)


@pytest.mark.parametrize(
    "bad", [b"\xf1\x00", b"{", b"{}", b"[1]", b'[{"class": 1}]', b'[{"tflops": "x"}]', b'[{"spec": 3}]']
)
def test_what_is_no_list_of_specs_is_named(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    path.write_bytes(bad)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        export.read_specs(path)


def test_a_package_is_not_named_by_a_keyword() -> None:
    with pytest.raises(ValueError, match="name: got 'class', expected a lower-case module name"):
        Tree("class", Arch.CPU, ())


@pytest.mark.parametrize(
    ("columns", "dtype", "bytes_"),
    [
        ((64,), DType.FLOAT32, 16),
        ((41,), DType.FLOAT32, 4),
        ((41,), DType.FLOAT16, 2),
        ((44,), DType.FLOAT16, 8),
    ],
)
def test_alignment_of_compact_rows(columns: tuple[int, ...], dtype: DType, bytes_: int) -> None:
    assert export.alignment(Arch.SM80, dtype, *columns) == bytes_


def test_what_has_no_kernel_is_said() -> None:
    with pytest.raises(Infeasible, match=r"export: no cpu fwd kernel for fp32, head_dim 600"):
        make_tree(Arch.CPU, [export.Shape(1, 1, 64, 600)], (DType.FLOAT32,), (Mask.FULL,))


# ---- The built package


def test_its_own_checks_pass(directory: Path) -> None:
    assert run(directory, "verify.py").endswith("all right\n")


def test_the_contract_of_the_challenge_holds(tree: Tree, directory: Path, tmp_path: Path) -> None:
    """Its interface around the same library, which only differs in kernels that it has besides."""
    dense = tuple(item for item in tree.items if item.spec.problem.mask is Mask.DENSE)
    export.write(
        dataclasses.replace(tree, items=dense, contract=Contract.OPENKERNEL),
        tmp_path / "custom_kernel",
        COMMAND,
    )
    for library in (directory / NAME).glob("_C*.so"):
        shutil.copy(library, tmp_path / "custom_kernel" / NAME)
    assert run(tmp_path / "custom_kernel", "verify.py").endswith("all right\n")


def test_a_dense_mask_may_differ_by_head(package: ModuleType) -> None:
    q, k, v = (draw(2, 4, 37, 41, grad=True) for _ in range(3))
    visible = torch.rand(1, 4, 37, 37) < 0.4
    out = package.attention(q, k, v, visible)
    exact = reference(q.detach(), k.detach(), v.detach(), DenseMask(visible), dout=torch.ones_like(out))
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    for ours, theirs in ((out, exact.out), (dq, exact.dq), (dk, exact.dk), (dv, exact.dv)):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def spans(rows: int) -> tuple[Tensor, Tensor]:
    starts = torch.arange(rows, dtype=torch.int32) // 20 * 20
    return starts, (starts + 20).clamp(max=rows)


def test_any_strides_and_gradients_in_any_layout(package: ModuleType) -> None:
    base = draw(2, 50, 3, 43)  # (batch, rows, heads, columns)
    q, k = (base[..., i : i + 41].transpose(1, 2).requires_grad_() for i in (0, 1))
    v = draw(2, 3, 41, 50).transpose(2, 3).requires_grad_()  # columns apart: copied
    out = package.attention(q, k, v, spans(50))
    assert isinstance(out, Tensor)
    (dq, dk, dv) = torch.autograd.grad(out.sum(), (q, k, v))  # the gradient is one number, expanded
    exact = reference(q.detach(), k.detach(), v.detach(), Spans(*spans(50)), dout=torch.ones_like(out))
    for ours, theirs in ((out, exact.out), (dq, exact.dq), (dk, exact.dk), (dv, exact.dv)):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def test_it_can_be_compiled(package: ModuleType) -> None:
    x = [draw(1, 2, 33, 41, grad=True) for _ in range(3)]
    mask = spans(33)
    compiled = torch.compile(
        lambda q, k, v: package.attention(q, k, v, mask) * 2, fullgraph=True, backend="aot_eager"
    )
    ours, expected = compiled(*x), package.attention(*x, mask) * 2
    torch.testing.assert_close(ours, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_schema_and_fakes_are_right(package: ModuleType) -> None:
    q, k, v = (draw(1, 4, 20, 41, grad=True) for _ in range(3))
    op = getattr(torch.ops, NAME).forward.default
    torch.library.opcheck(op, (q, k, v, list(spans(20)), 2, None))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"q": draw(1, 2, 8, 48)}, r"no forward kernel for Float, head_dim 48.*export again"),
        ({"q": draw(1, 2, 8, 41, dtype=torch.float64)}, r"no forward kernel for Double"),
        ({"q": draw(2, 8, 41)}, r"q: got shape \[2, 8, 41\]"),
        ({"k": draw(1, 2, 8, 24)}, r"k: got head_dim 24, but q has 41"),
        ({"k": draw(1, 3, 8, 41), "v": draw(1, 3, 8, 41)}, r"multiple of the 3 heads"),
        ({"v": draw(1, 2, 9, 41)}, r"v: got shape"),
        ({"v": draw(1, 2, 8, 41, dtype=torch.bfloat16)}, r"v: is BFloat16, but q is Float"),
        ({"mask": None}, r"no forward kernel .* mask full.*\n +fwd_cpu"),
        ({"mask": tuple(x[:7] for x in spans(8))}, r"vectors of length 8"),
        ({"mask": torch.ones(8, 9, dtype=torch.bool)}, r"mask: got shape \[8, 9\]"),
        ({"mask": torch.ones(8, 8)}, r"mask: is Float, expected bool"),
        ({"mask": "banded"}, r"mask: got 'banded'"),
        ({"mask": 5}, r"mask: got 5, expected None"),
        ({"mask": (1, 2)}, r"mask: got \(1, 2\), expected None"),
        ({"scale": -1.0}, r"scale: got -1"),
    ],
)
def test_what_it_cannot_run_is_said(package: ModuleType, call: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"mask": spans(8)} | call
    q = given.pop("q", draw(1, 2, 8, 41))
    k, v = (given.pop(name, torch.randn_like(q)) for name in ("k", "v"))
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
        package.attention(q, k, v, **given)


# ---- The command


def test_command_writes_what_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (
        "export",
        "--arch",
        "cpu",
        "--head-dim",
        "24",
        "--dtype",
        "fp32",
        "--mask",
        "causal",
        "--direction",
        "fwd",
    )
    done = CliRunner().invoke(main, (*words, "--name", "mine", str(out)))
    assert done.exit_code == 0, done.output
    assert [path.name[:28] for path in (out / "mine" / "kernels").iterdir()] == [
        "fwd_cpu_fp32_d24_causal_a4_m"
    ]
    again = CliRunner().invoke(main, (*words, str(out)))
    assert again.exit_code == 2
    assert "is not an empty directory" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "export: give --head-dim, --shapes, --specs or --contract openkernel"),
        (("--contract", "openkernel", "--mask", "causal"), "must be dense with --contract openkernel"),
    ],
)
def test_command_says_what_it_lacks(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ("export", "--arch", "cpu", *words, str(tmp_path / "out")))
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_command_takes_specs(tree: Tree, tmp_path: Path) -> None:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps([tree.items[0].spec.to_json()]))
    done = CliRunner().invoke(main, ("export", "--arch", "cpu", "--specs", str(path), str(tmp_path / "out")))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / NAME / "kernels" / tree.items[0].source.file_name).read_text() == tree.items[
        0
    ].source.text


def test_entries_for_deterministic_calls_are_left_out(tmp_path: Path) -> None:
    """A package chooses by rows alone."""
    problem = Problem(Direction.BACKWARD, Arch.SM90A, DType.BFLOAT16, 128, Mask.FULL)
    loose, strict = next(candidates(problem)), next(deterministic_candidates(problem))
    entries = [Tuned(loose, 7, 64, 1.0, 5.0), Tuned(strict, 7, 64, 1.0, 9.0, deterministic=True)]
    assert [item.spec for item in export.read_specs(save("a device", entries, tmp_path))] == [loose]
