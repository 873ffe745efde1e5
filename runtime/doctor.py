"""What this machine has, what will be used, and what to do about what is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attnforge.codegen.spec import Arch
from attnforge.runtime import cache, nvrtc, store, toolchain
from attnforge.runtime.errors import CacheError, CompileError, NoCompilerError
from attnforge.runtime.settings import CACHE_DIR, COMPILER, NO_JIT, SettingsError, settings

OK, INFO, WARNING, FAILURE = "ok", "info", "warning", "failure"

LEAST_FREE = 1 << 30  # bytes; a search of a few hundred variants fills some 100 MB
OVERLAP = (12, 3)  # of the driver; kOverlappingDriver in launch_config.h
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is OK, INFO, WARNING or FAILURE; the last two have a `remedy`."""

    name: str
    status: str
    value: str
    remedy: str = ""


def report() -> list[Finding]:
    """Look at everything; about a second, two tiny compiles, nothing changed outside the cache."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _gpus,
        _driver,
        _cuda_compiler,
        _host_compiler,
        _cache,
        _launcher,
        _tuned,
        _environment,
    )
    findings: list[Finding] = []
    for check in checks:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            findings += check()
        except Exception as error:  # a broken machine must not silence the checks after this one
            findings.append(_failed(name, error))
    return list(dict.fromkeys(findings))  # a bad setting stops several checks, and is one thing to repair


def _failed(name: str, error: Exception) -> Finding:
    """The errors of this package end with their remedy, after a semicolon."""
    if isinstance(error, CompileError):
        return Finding(name, FAILURE, str(error), "repair the compiler, or choose another one")
    if isinstance(error, SettingsError):
        variable = str(error).partition("=")[0]
        return Finding(variable, FAILURE, str(error), f"unset {variable}, or set it to one of these")
    value, _, remedy = str(error).partition("; ")
    if not isinstance(error, (CacheError, NoCompilerError)):
        value, remedy = f"{type(error).__name__}: {error}", ""
    return Finding(name, FAILURE, value, remedy or "please report this with the whole output of `doctor`")


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding("python", OK, f"{version} ({sys.executable})")
    if sys.platform != "linux":
        yield Finding("system", FAILURE, platform.platform(), "attnforge runs on Linux")


def _torch() -> Iterator[Finding]:
    version = importlib.metadata.version("torch")
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    status = OK if release >= (2, 10) else FAILURE
    yield Finding(
        "torch", status, f"{version}, built {built}", "" if status == OK else "install torch 2.10 or newer"
    )


def _gpus() -> Iterator[Finding]:
    import torch

    from attnforge.runtime import kernels

    if not torch.cuda.is_available():
        remedy = ""
        if Path("/dev/nvidia0").exists() and torch.version.cuda is None:
            remedy = "there is an NVIDIA GPU: install a CUDA build of torch to use it"
        yield Finding(
            "GPU", WARNING if remedy else INFO, "none that torch sees: kernels run on the CPU", remedy
        )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(device)
        what = (
            f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"
        )
        try:
            yield Finding(f"GPU {index}", OK, f"{what}; kernels for {kernels.target(device).value}")
        except ValueError as error:
            yield Finding(f"GPU {index}", WARNING, f"{what}; no kernels for it", str(error))


def _driver() -> Iterator[Finding]:
    version = driver_cuda()
    if version is None:
        yield Finding("driver", INFO, "libcuda.so.1 cannot be loaded: no NVIDIA driver here")
        return
    text = f"supports CUDA {version[0]}.{version[1]}"
    module = Path("/sys/module/nvidia/version")
    if module.exists():
        text = f"{module.read_text().strip()}, {text}"
    if version < OVERLAP:
        text += "; its backward on Hopper is a little slower than with one for CUDA 12.3, which lets kernels overlap"
    yield Finding("driver", OK, text)


def driver_cuda() -> tuple[int, int] | None:
    """CUDA version that the installed driver supports; None without a driver."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if lib.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


# ---- Compilers

CUDA_TEXT = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.0f; }\n'
HOST_TEXT = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'


def _cuda_compiler() -> Iterator[Finding]:
    env = dict(os.environ)
    nvcc, library = toolchain.find_nvcc(env), nvrtc.find(env)
    yield Finding("nvcc", OK if nvcc else INFO, str(nvcc or toolchain.NVCC_PLACES))
    yield Finding("NVRTC", OK if library else INFO, str(library or nvrtc.PLACES))
    arch = _target()
    try:
        tool = toolchain.toolchain(arch if arch.is_gpu else Arch.SM80)
        with tempfile.TemporaryDirectory() as directory:
            _try(tool, "kernel.cu", CUDA_TEXT, Path(directory))
    except (NoCompilerError, CompileError) as error:
        if arch.is_gpu:
            yield _failed("GPU kernels", error)
        else:
            yield Finding(
                "GPU kernels", INFO, f"cannot be compiled, and there is no GPU to run them: {error}"
            )
        return
    made = cuda_release(tool.identity)
    release = ".".join(map(str, made)) if made else "unknown"
    yield Finding("GPU kernels", OK, f"compiled by {tool.name} of CUDA {release} ({_why(tool.name)})")
    if (driver := driver_cuda()) and made and made[0] > driver[0]:
        yield Finding(
            "GPU kernels",
            FAILURE,
            f"the compiler is of CUDA {made[0]}.{made[1]}, the driver supports up to {driver[0]}.{driver[1]}",
            f"update the driver, or install nvidia-cuda-nvcc of CUDA {driver[0]}",
        )


def _why(name: str) -> str:
    asked = settings().compiler
    if asked != "auto":
        return f"{COMPILER}={asked}"
    return "found it and gcc" if name == "nvcc" else "there is no nvcc with a gcc"


def cuda_release(identity: str) -> tuple[int, int] | None:
    """CUDA release that a CUDA compiler's identity names."""
    match = toolchain.RELEASE.search(identity)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _host_compiler() -> Iterator[Finding]:
    try:
        tool = toolchain.host_toolchain(os.environ)
        with tempfile.TemporaryDirectory() as name:
            binary = _try(tool, "kernel.cpp", HOST_TEXT, Path(name))
        entry = cache.Entry(Path("doctor"), binary, Path("doctor"), {})
        with entry.library() as path:
            threads = ctypes.CDLL(path).threads()
    except (NoCompilerError, CompileError) as error:
        yield _failed("CPU kernels", error)
        return
    except OSError as error:
        yield Finding(
            "CPU kernels", FAILURE, f"cannot be loaded: {error}", "allow executable memory files (memfd)"
        )
        return
    yield Finding("CPU kernels", OK, f"compiled by {tool.program}: {tool.identity.split(';')[0]}")
    yield Finding("OpenMP", OK, f"{threads} threads")


def _try(tool: toolchain.Toolchain, name: str, text: str, directory: Path) -> bytes:
    """Binary of a tiny file. Raises CompileError."""
    (directory / name).write_text(text)
    if isinstance(tool, nvrtc.Nvrtc):
        _, log, cubin = nvrtc.compile_text(nvrtc.load(tool.library), text, name, tool.flags)
        if cubin is None:
            raise CompileError("a tiny kernel", ("nvrtc", *tool.flags), directory / name, log)
        return cubin
    assert isinstance(tool, toolchain.Command)
    command = (str(tool.program), *tool.flags, "-o", tool.binary_name, name)
    code, log = toolchain.run(command, directory)
    if code != 0:
        raise CompileError("a tiny kernel", command, directory / name, log)
    return (directory / tool.binary_name).read_bytes()


def _target() -> Arch:
    """Architecture that kernels will be made for here: the first GPU's, else the CPU."""
    import torch

    from attnforge.runtime import kernels

    return kernels.target(torch.device("cuda", 0)) if torch.cuda.is_available() else Arch.CPU


# ---- Files


def _cache() -> Iterator[Finding]:
    path = settings().cache_dir
    try:
        store.publish_probe()
    except CacheError as error:
        yield _failed("cache", error)
        return
    free = shutil.disk_usage(path).free
    kind = file_system(path)
    listed = cache.entries()
    size = sum(entry.bytes for entry in listed)
    value = f"{path}: {len(listed)} kernels, {size / 2**20:.1f} MiB, {free >> 30} GiB free on {kind}"
    if free < LEAST_FREE:
        yield Finding("cache", WARNING, value, f"free some space, or set {CACHE_DIR} to a larger disk")
    elif kind in NETWORK:
        yield Finding(
            "cache", WARNING, value, f"a network disk is slow to start from: set {CACHE_DIR} to a local one"
        )
    else:
        yield Finding("cache", OK, value)


def file_system(path: Path) -> str:
    """Type of the file system that holds `path`, e.g. `ext4` or `nfs4`."""
    best, kind = "", "an unknown file system"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, this, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if len(mount) >= len(best) and path.resolve().is_relative_to(mount):
            best, kind = mount, this
    return kind


def _launcher() -> Iterator[Finding]:
    from attnforge.runtime import launcher

    name = launcher.entry_name()
    if (settings().cache_dir / name).is_dir():
        yield Finding("launcher", OK, f"built ({name})")
    else:
        yield Finding("launcher", INFO, "not built yet: the first call does it, in about half a minute")


def _tuned() -> Iterator[Finding]:
    import torch

    from attnforge.runtime import tables

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    for name in dict.fromkeys(tables.device_name(device) for device in devices):
        count = len(tables.load(name))
        if count:
            yield Finding("tuned table", OK, f"{count} entries for {name} ({tables.table_path(name).name})")
        else:
            remedy = "run `python cli.py search` once to find this device's fastest kernels"
            yield Finding("tuned table", WARNING, f"none for {name}: kernels are chosen by rule", remedy)


def _environment() -> Iterator[Finding]:
    for name in (CACHE_DIR, COMPILER, NO_JIT, "CUDA_HOME", "CUDA_PATH", "CXX"):
        if name in os.environ:
            yield Finding(name, INFO, os.environ[name])
    if not settings().jit:
        yield Finding("compiling", INFO, f"forbidden by {NO_JIT}: only kernels in the cache run")
