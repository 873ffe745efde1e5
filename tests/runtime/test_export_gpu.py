"""Exported packages for GPUs: that they compile and link needs a compiler alone, that they are right a GPU."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from exported import COMMAND, make_tree, run

from attnforge.codegen.package import Contract
from attnforge.codegen.spec import Arch, DType, Mask
from attnforge.runtime import export, kernels

# Autograd's thread meets the driver before anything else: memory is there already, so nothing gives it a context.
FRESH = """
import torch, custom_attention
torch.empty(1 << 26, device="cuda")
q, k, v, dout = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
out = custom_attention.forward(q, k, v, torch.zeros(512, 512, dtype=torch.bool, device="cuda"))
grads = torch.autograd.grad(out, (q, k, v), dout.detach())
print("finite" if all(grad.isfinite().all() for grad in grads) else "not finite")
"""


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("arch", "dtype", "code"),
    [
        (Arch.SM89, DType.FLOAT16, "arch=compute_89,code=sm_89"),
        (Arch.SM90, DType.FLOAT32, "arch=compute_90a,code=sm_90a"),  # of two families
    ],
)
def test_gpu_package_compiles_and_links(arch: Arch, dtype: DType, code: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on the PATH; this links, which NVRTC cannot")
    shapes = [export.Shape(1, 2, 4096, 41)]
    tree = make_tree(export.target(arch), shapes, (dtype,), (Mask.DENSE,))
    export.write(tree, tmp_path / "out", COMMAND)
    assert f"-gencode={code}" in (tmp_path / "out/setup.py").read_text()
    sources = sorted(map(str, (tmp_path / "out").rglob("*.cu")))
    library = tmp_path / "kernels.so"
    command = (
        nvcc,
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-Werror",
        "all-warnings",
        f"-gencode={code}",
        "-o",
        str(library),
        *sources,
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    undefined = subprocess.run(("nm", "-u", str(library)), capture_output=True, text=True, check=True).stdout
    assert "attnforge_" not in undefined


@pytest.mark.gpu
@pytest.mark.nvcc
def test_gpu_package_builds_and_is_right(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH; setup.py needs it")
    arch = kernels.targets(torch.device("cuda"))[0]  # on Hopper, kernels of both families
    shapes = [export.Shape(1, 2, 512, 41), export.Shape(1, 2, 512, 64)]
    tree = make_tree(arch, shapes, (DType.FLOAT32, DType.BFLOAT16), (Mask.DENSE,))
    export.write(dataclasses.replace(tree, contract=Contract.OPENKERNEL), tmp_path / "out", COMMAND)
    run(tmp_path / "out", "setup.py", "build_ext", "--inplace")
    assert run(tmp_path / "out", "verify.py").endswith("all right\n")
    assert run(tmp_path / "out", "-c", FRESH) == "finite\n"
