"""One cache for all tests, and the reasons for which a marked test is skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fakes
import hypothesis
import kept
import pytest

from attnforge.codegen.spec import Arch, Spec
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.settings import CACHE_DIR, COMPILER, NO_JIT, TABLES
from attnforge.runtime.build.toolchain import NVCC_PLACES, find_nvcc, toolchain

if TYPE_CHECKING:  # a run that is all skipped does without
    import torch
    from torch import Tensor

# Set to 1 where a GPU must be present: a gpu test that cannot run then fails instead of being skipped.
REQUIRE_GPU = "ATTNFORGE_REQUIRE_GPU"

# OpenMP's threads sleep while they wait: spinning ones take the cores from the other workers. libgomp reads this once,
# when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

hypothesis.settings.register_profile("attnforge", deadline=None)
hypothesis.settings.load_profile("attnforge")


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Two more than there are cores: at any time some worker waits for a disk, a lock or a child that sleeps."""
    return (yield) + 2


def pytest_configure(config: pytest.Config) -> None:
    """Put the cache into .pytest_cache: never the user's own, kept for the next run, and shared by all workers."""
    directory: Path = config.cache.mkdir("attnforge")
    kept.directory = directory
    os.environ[CACHE_DIR] = str(directory / "cache")
    os.environ[TABLES] = str(directory / "tables")  # never filled: winners of tests go elsewhere
    for name in (COMPILER, NO_JIT):
        os.environ.pop(name, None)
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Collecting builds nothing: all workers would wait for it, on one core.

    What was imported and collected stays to the end: the garbage collector need not look at it again and again.
    """
    gc.freeze()
    gc.set_threshold(50_000)  # little of what torch traces and compiles is garbage in cycles
    gc.enable()
    launcher = sys.modules.get("attnforge.runtime.native.launcher")
    if launcher is not None and launcher._loaded:
        raise pytest.UsageError("a test module builds or loads the launcher where it is imported")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, saying what is missing."""
    if item.get_closest_marker("nvcc") and (missing := no_cuda_compiler()):
        pytest.skip(missing)
    if item.get_closest_marker("gpu") and (missing := no_gpu()):
        if os.environ.get(REQUIRE_GPU) == "1":
            pytest.fail(f"{REQUIRE_GPU}=1, but {missing}")
        pytest.skip(missing)


def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[object]) -> None:
    """Without a launcher hardly a test passes, and each would build it again for half a minute, one after another."""
    error = call.excinfo and call.excinfo.value
    if isinstance(error, CompileError) and str(error).startswith("the launcher does not compile"):
        node.session.shouldfail = str(error).splitlines()[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests share a GPU, as many at a time as have 16 GiB of its memory each."""
    if item.get_closest_marker("gpu") is None or no_gpu():
        return (yield)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(",", "-")
    with kept.place(f"gpu{device}_", gpu_places()):
        return (yield)


@cache
def gpu_places() -> int:
    import torch

    return max(1, torch.cuda.get_device_properties(0).total_memory >> 34)


@cache
def no_cuda_compiler() -> str:
    """Why no cubin can be made here; empty if one can."""
    try:
        toolchain(Arch.SM80)
    except NoCompilerError as error:
        return str(error)
    return ""


@cache
def no_gpu() -> str:
    """Why no kernel can run on a GPU here; empty if one can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


@pytest.fixture(scope="session", autouse=True)
def sys_path_without_the_folder_above() -> None:
    """The root is a package, so pytest puts the folder that it lies in first on sys.path when the first test is set up.

    Processes that tests start inherit sys.path: a `copy.py` beside the clone would take the place of Python's module.
    """
    above = str(Path(__file__).parents[2])
    sys.path[:] = [place for place in sys.path if place != above]


@pytest.fixture(autouse=True)
def deterministic_mode() -> Iterator[None]:
    """What a test, or a program that it runs, makes of torch's deterministic mode ends with the test."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled by nvcc, also where NVRTC would be taken; the test is skipped where there is none."""
    if find_nvcc(dict(os.environ)) is None:
        pytest.skip(NVCC_PLACES)
    monkeypatch.setenv(COMPILER, "nvcc")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone; not created yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv(CACHE_DIR, str(path))
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Spec]]:
    """The specs that dispatch loads, in order. It has forgotten all choices, and forgets them again in the end."""
    from attnforge.runtime import dispatch, kernels

    specs: list[Spec] = []
    load = kernels.load

    def recording(spec: Spec, device: torch.device) -> int:
        specs.append(spec)
        return load(spec, device)

    monkeypatch.setattr(kernels, "load", recording)
    dispatch.forget()
    yield specs
    dispatch.forget()


@pytest.fixture
def masks_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], list[Any]]:
    """A function that has the masks noted which a module calls our operator with."""

    def watch(module: ModuleType) -> list[Any]:
        seen: list[Any] = []
        attention = module.attention

        def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **rest: Any) -> Any:
            seen.append(mask)
            return attention(q, k, v, mask, **rest)

        monkeypatch.setattr(module, "attention", spy)
        return seen

    return watch


@pytest.fixture
def compiler(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> fakes.Compiler:
    """A stub compiler and a cache of its own."""
    stub = fakes.compiler(tmp_path)
    monkeypatch.setenv("CXX", str(stub.path))
    return stub
