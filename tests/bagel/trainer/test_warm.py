"""Kernels compiled ahead of time: which ones, for GPUs by name, and a copied cache on a machine without a compiler."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import fakes
import pytest
import torch
from click.testing import CliRunner

from attnforge.bagel.trainer import warm
from attnforge.cli import main
from attnforge.codegen import params
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.prologue import PrologueProblem
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime import dispatch, kernels, prologue_kernels, tables
from attnforge.runtime.build import cache, nvrtc, toolchain
from attnforge.runtime.build.errors import NoCompilerError
from attnforge.runtime.build.settings import CACHE_DIR, COMPILER, NO_JIT
from attnforge.runtime.call import Call
from attnforge.runtime.rounds import MANY, rounds_of

H200 = (Arch.SM90A, Arch.SM90)


@pytest.mark.parametrize(
    ("name", "archs"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H200),
        ("NVIDIA GH200 480GB", H200),
        ("NVIDIA A100-SXM4-80GB", (Arch.SM80,)),
        ("NVIDIA A10G", (Arch.SM86,)),
        ("NVIDIA RTX A6000", (Arch.SM86,)),
        ("NVIDIA RTX 6000 Ada Generation", (Arch.SM89,)),
        ("NVIDIA L40S", (Arch.SM89,)),
        ("NVIDIA B200", (Arch.SM100,)),
        ("NVIDIA GeForce RTX 5090", (Arch.SM120,)),
    ],
)
def test_gpus_by_name(name: str, archs: tuple[Arch, ...]) -> None:
    assert kernels.targets_of(name) == archs
    assert warm.gpu_targets(name, None) == (dispatch.Target(name, archs),)


def test_gpus_that_are_refused() -> None:
    with pytest.raises(ValueError, match="'NVIDIA Tesla T4' is not a GPU known by name"):
        warm.gpu_targets("NVIDIA Tesla T4", None)
    with pytest.raises(ValueError, match="give either"):
        warm.gpu_targets(None, None)
    with pytest.raises(ValueError, match="cpu is not a GPU"):
        warm.gpu_targets(None, "cpu")
    with pytest.raises(ValueError, match="there is no '13B'"):
        warm.request("13B")


def test_an_architecture_stands_for_its_tuned_gpus() -> None:
    assert {"", "nvidia-h200"} <= {target.name for target in warm.gpu_targets(None, "sm90a")}
    assert {target.archs for target in warm.gpu_targets(None, "sm90")} == {H200}


def test_specs_are_what_dispatch_answers_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = warm.request("7B", masks=["full", "causal", "spans"])
    wanted = warm.specs(asked, warm.gpu_targets("NVIDIA H200", None))
    assert {(spec.problem.head_dim, spec.problem.dtype) for spec in wanted} == {
        (128, DType.BFLOAT16),
        (72, DType.BFLOAT16),
    }
    assert {spec.problem.direction for spec in wanted} == set(Direction)
    assert {spec.problem.arch for spec in wanted} <= set(H200)
    # The same question, asked as the operators ask it on such a machine.
    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "targets", lambda device: H200)
    monkeypatch.setattr(tables, "device_name", lambda device: "NVIDIA H200")
    loaded: list[Spec] = []

    def load(spec: Spec, device: torch.device) -> int:
        loaded.append(spec)
        return len(loaded)

    monkeypatch.setattr(kernels, "load", load)
    for backward in (False, True):
        for mask, size, (heads_q, heads_kv, dim), visible in (
            (2, 36864, (28, 4, 128), 4096),
            (2, 36864, (28, 4, 128), 512),
            (2, 36864, (28, 4, 128), 0),
            (2, 11520, (28, 4, 128), 2048),
            (2, 131072, (7, 1, 128), 0),
            (0, 4900, (16, 16, 72), 0),
            (2, 29000, (16, 16, 72), 1024),
            (1, 8192, (28, 4, 128), 0),
            (1, 1024, (28, 4, 128), 0),
            (0, 1024, (28, 4, 128), 0),
        ):
            heads = (heads_q, heads_kv)
            rounds = rounds_of(1, heads_kv, size, 132) if backward else MANY
            dispatch.resolve(
                backward,
                torch.bfloat16,
                dim,
                dim,
                mask,
                *heads,
                size,
                size,
                16,
                device,
                False,
                visible,
                rounds=rounds,
            )
    assert len(loaded) == 20
    assert set(loaded) <= set(wanted)


def test_prologues_are_what_calls_ask_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes, with tables of q's dtype, as BAGEL has them, and float32 ones, as bagel/mot."""
    compiled: list[str] = []
    monkeypatch.setattr(cache, "obtain", lambda source: compiled.append(source.slug))
    assert warm.compile_prologues(warm.request("7B"), warm.gpu_targets("NVIDIA H200", None)) == 4
    for direction, table in product(Direction, (DType.BFLOAT16, DType.FLOAT32)):
        problem = PrologueProblem(direction, Arch.SM90A, DType.BFLOAT16, 128, DType.BFLOAT16, table)
        assert prologue_kernels.choose(problem, "NVIDIA H200").slug in compiled


def test_deterministic_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "SIZES", (1 << 12, 1 << 15))
    target = warm.gpu_targets("NVIDIA H200", None)
    plain, deterministic = (
        warm.specs(warm.request("7B", masks=["spans"], deterministic=flag), target) for flag in (False, True)
    )
    assert set(plain) < set(deterministic)


# ---- Copied caches


def sources() -> dict[str, str]:
    return {"same": fakes.CUDA, "other": fakes.CUDA.replace("255 - threadIdx.x", "threadIdx.x")}


def fill(directory: Path, monkeypatch: pytest.MonkeyPatch, version: str = "12.9") -> cache.Entry:
    """An entry made by a compiler of that release."""
    stub = fakes.compiler(directory.parent, version=f"release {version}, V{version}")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda env: stub.path)
    monkeypatch.setenv(COMPILER, "nvcc")
    toolchain._toolchain.cache_clear()
    return cache.obtain(fakes.source(fakes.CUDA, Arch.SM90A))


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda env: None)
    monkeypatch.setattr(nvrtc, "find", lambda env: None)
    toolchain._toolchain.cache_clear()


@pytest.fixture
def copied(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that was filled elsewhere, here by two compilers, and copied; current."""
    for version in ("12.9", "13.1", "13.0"):
        fill(cache_dir, monkeypatch, version)
    there = tmp_path / "offline"
    shutil.copytree(cache_dir, there)
    there.chmod(0o700)
    monkeypatch.setenv(CACHE_DIR, str(there))
    return there


@pytest.mark.parametrize("offline", ["no compiler", "no jit", "another compiler and no jit"])
def test_a_copied_cache_serves_a_machine_that_cannot_compile(
    offline: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "another" in offline:
        stub = fakes.compiler(tmp_path, version="release 11.8, V11.8")
        monkeypatch.setattr(toolchain, "find_nvcc", lambda env: stub.path)
        toolchain._toolchain.cache_clear()
    else:
        no_compiler(monkeypatch)
    if "jit" in offline:
        monkeypatch.setenv(NO_JIT, "1")
    entry = cache.obtain(fakes.source(fakes.CUDA, Arch.SM90A))
    assert entry.binary == fakes.CUDA.encode()
    assert entry.directory.parent == copied
    assert "release 13.1" in entry.meta["identity"]  # the newest of three
    with pytest.raises(NoCompilerError):
        cache.obtain(fakes.source(sources()["other"], Arch.SM90A))
    with pytest.raises(NoCompilerError):
        cache.obtain(fakes.source(fakes.CUDA, Arch.SM80))


def test_with_a_compiler_its_own_is_made(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = fill(copied, monkeypatch, "11.8")
    assert "release 11.8" in entry.meta["identity"]


@pytest.mark.parametrize("lie", ["identity", "flags", "abi", "binary", "arch"])
def test_an_entry_that_is_not_what_it_says_is_not_taken(
    lie: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is changed, the key no longer follows from the text, or the binary from its digest."""
    no_compiler(monkeypatch)
    if lie == "abi":
        monkeypatch.setattr(params, "ABI", params.ABI + 1)
    for path in copied.glob("fwd_*"):
        meta = json.loads((path / "meta.json").read_text())
        if lie == "identity":
            meta["identity"] += " "
        elif lie in ("flags", "arch"):
            meta["flags"] = [flag.replace("sm_90a", "sm_80") for flag in meta["flags"]]
            if lie == "arch":  # consistently, under its own name
                meta["key"] = cache._digest(fakes.CUDA, meta["identity"], meta["flags"])
        elif lie == "binary":
            (path / meta["binary"]).write_bytes(b"something else")
        (path / "meta.json").write_text(json.dumps(meta))
        if lie == "arch":
            path.rename(path.with_name(cache._name(fakes.source(arch=Arch.SM90A), meta["key"])))
    with pytest.raises(NoCompilerError):
        cache.obtain(fakes.source(fakes.CUDA, Arch.SM90A))


def test_cpu_kernels_are_never_taken_from_elsewhere(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for native in ("1", "2"):
        monkeypatch.setenv("CXX", str(fakes.compiler(cache_dir.parent, native=native).path))
        monkeypatch.setattr(cache, "machine", lambda native=native: f"a processor like {native}")
        cache.obtain(fakes.source())
    monkeypatch.setenv("CXX", str(fakes.compiler(cache_dir.parent, native="3").path))
    monkeypatch.setattr(cache, "machine", lambda: "a processor like 3")
    monkeypatch.setenv(NO_JIT, "1")
    with pytest.raises(NoCompilerError):
        cache.obtain(fakes.source())


@pytest.mark.nvcc
def test_warm_copy_and_start_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing for the vision encoder's forward kernels: compiled here, copied, found without a compiler."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "unused"))
    monkeypatch.setattr(warm, "SIZES", (4096,))
    arguments = [
        "warm",
        "--model",
        "vit",
        "--gpu",
        "NVIDIA H200",
        "--mask",
        "full",
        "--cache",
        str(tmp_path / "made"),
    ]
    monkeypatch.setattr(
        "attnforge.runtime.native.launcher.launcher", lambda: None
    )  # half a minute, and tested elsewhere
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    shutil.copytree(tmp_path / "made", tmp_path / "offline")
    (tmp_path / "offline").chmod(0o700)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "offline"))
    monkeypatch.setenv(NO_JIT, "1")
    no_compiler(monkeypatch)
    wanted = warm.specs(warm.request("vit", masks=["full"]), warm.gpu_targets("NVIDIA H200", None))
    target = dispatch.Target("NVIDIA H200", H200)
    assert {spec.slug for spec in wanted} == {
        dispatch.choose_for(Call(problem, 1, 4096, rounds=rounds), target).spec.slug
        for problem in {spec.problem for spec in wanted}
        for rounds in range(MANY + 1)
    }
    assert {spec.problem.direction for spec in wanted} == set(Direction)
    for spec in wanted:
        entry = cache.obtain(render(spec))
        assert entry.binary[:4] == b"\x7fELF"
        assert entry.meta["slug"] == spec.slug
    assert cache.obtain(mask_kernels(Arch.SM90A)).meta["slug"] == "masks_sm90a"
    with pytest.raises(NoCompilerError):
        cache.obtain(mask_kernels(Arch.SM80))
    other = Problem(Direction.FORWARD, Arch.SM90A, DType.FLOAT16, 72, Mask.FULL)
    source = render(dispatch.choose_for(Call(other, 1, 4096), dispatch.Target("", H200)).spec)
    with pytest.raises(NoCompilerError):
        cache.obtain(source)
