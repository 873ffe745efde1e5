"""Packages exported for Hugging Face's `kernels`: the layout, and that `kernels` itself loads one for the CPU."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import COMMAND, built, make_tree, run

import attnforge
from attnforge.codegen.package import Contract, Revision, Tree
from attnforge.codegen.spec import Arch, DType, Mask
from attnforge.runtime import export
from attnforge.runtime.search.reference import reference

TORCH = "".join(torch.__version__.split(".")[:2])
VARIANT = f"torch{TORCH}-cxx11-cpu-{platform.machine()}-linux"


@pytest.fixture(scope="session")
def tree() -> Tree:
    made = make_tree(Arch.CPU, [export.Shape(1, 2, 96, 32)], (DType.FLOAT32,), (Mask.SPANS,))
    return dataclasses.replace(
        made, contract=Contract.HF_KERNELS, revision=Revision("c0ffee" * 6 + "c0ff", True)
    )


@pytest.fixture(scope="session")
def directory(tree: Tree) -> Path:
    return built(tree)


@pytest.fixture(scope="session")
def metadata(directory: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((directory / "build" / VARIANT / "metadata.json").read_text())
    return read


def test_one_variant_is_built_and_nothing_else(directory: Path) -> None:
    files = [path for path in (directory / "build").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(directory / "build" / VARIANT)) for path in files} == {
        "__init__.py",
        "_C.abi3.so",
        "custom_attention/__init__.py",
        "metadata.json",
    }


def test_metadata_has_digests_and_provenance(directory: Path, metadata: dict[str, Any]) -> None:
    assert metadata["name"] == "custom-attention"
    assert metadata["backend"] == {"type": "cpu"}
    assert metadata["provenance"]["kernel-builder"] == {
        "version": f"attnforge {attnforge.__version__}",
        "sha": "c0ffee" * 6 + "c0ff",
        "dirty": True,
    }
    assert metadata["digest"]["algorithm"] == "sha256"
    assert len(metadata["digest"]["files"]) == 3
    for name, digest in metadata["digest"]["files"].items():
        data = (directory / "build" / VARIANT / name).read_bytes()
        assert base64.b64decode(digest) == hashlib.sha256(data).digest(), name


def test_its_own_checks_pass(directory: Path) -> None:
    """They import the directory that older versions of `kernels` import."""
    assert run(directory, "verify.py").endswith("all right\n")


def test_kernels_loads_it(directory: Path, metadata: dict[str, Any]) -> None:
    kernels = pytest.importorskip("kernels", reason="needs Hugging Face's kernels")
    from kernels import _rust as parts

    module = kernels.get_local_kernel(directory, backend="cpu")
    q, k, v = (torch.randn(2, heads, 96, 32, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.arange(96, dtype=torch.int32) // 20 * 20
    spans = (starts, (starts + 20).clamp(max=96))
    out = module.attention(q, k, v, spans)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    mask = attnforge.Spans(*spans)
    ours = attnforge.attention(q, k, v, mask)
    exact = reference(q.detach(), k.detach(), v.detach(), mask, dout=torch.ones_like(out))
    torch.testing.assert_close(out, ours, atol=2e-5, rtol=2e-5)
    for x, y in zip((out, *gradients), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    (loaded,) = (x for x in kernels.get_loaded_kernels() if x.module is module)
    assert loaded.metadata.id == metadata["id"] == module.__name__
    assert loaded.metadata.provenance.dirty
    place = directory / "build" / VARIANT
    loaded.metadata.digest.validate(parts.Digest.hash_variant(parts.DigestAlgorithm.SHA256, place))


def test_versions_have_operators_of_their_own(tree: Tree) -> None:
    """Two of them may be loaded in one process."""
    fewer = dataclasses.replace(tree, items=tree.items[:1])
    texts = [x.files(COMMAND)["custom_attention/__init__.py"] for x in (tree, fewer)]
    names = [text.partition("registers torch.ops.")[2].partition(")")[0] for text in texts]
    assert names[0] != names[1]
    assert all(name.startswith("_custom_attention_cpu_") for name in names)


def test_gpu_variants_name_their_architecture() -> None:
    made = make_tree(Arch.SM90, [export.Shape(1, 2, 4096, 64)], (DType.BFLOAT16,), (Mask.FULL,))
    tree = dataclasses.replace(made, contract=Contract.HF_KERNELS, arch=export.target(Arch.SM90))
    assert tree.metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert "torch.version.cuda" in tree.files(COMMAND)["build_variant.py"]


def test_names_that_kernels_does_not_take(tree: Tree) -> None:
    with pytest.raises(ValueError, match="name: got 'attention_'"):
        dataclasses.replace(tree, name="attention_")
