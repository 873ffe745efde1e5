"""`doctor`: checks of the driver and the compilers: can they compile kernels, and can the driver run the result?"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnforge.codegen.modules import Module
from attnforge.codegen.spec import Arch
from attnforge.runtime.build import cache, compilation, nvrtc, toolchain
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.settings import COMPILER, settings
from attnforge.runtime.doctor.findings import FAILURE, INFO, OK, WARNING, Finding, failed

OVERLAP = (12, 3)  # of the driver; kOverlappingDriver in launch_config.h
CUDA_TEXT = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.0f; }\n'
HOST_TEXT = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'


def driver() -> Iterator[Finding]:
    """The installed driver, if there is one."""
    version = driver_cuda()
    if version is None:
        yield Finding("driver", INFO, "libcuda.so.1 cannot be loaded: no NVIDIA driver here")
        return
    text = f"supports CUDA {version[0]}.{version[1]}"
    module = Path("/sys/module/nvidia/version")
    if module.exists():
        text = f"{module.read_text().strip()}, {text}"
    if version < OVERLAP:
        text += "; a driver for CUDA 12.3 or newer overlaps kernel launches and makes Hopper's backward a little faster"
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


def cuda_compiler() -> Iterator[Finding]:
    """The compiler of GPU kernels, checked by compiling a tiny kernel."""
    env = dict(os.environ)
    nvcc, library = toolchain.find_nvcc(env), nvrtc.find(env)
    yield Finding("nvcc", OK if nvcc else INFO, str(nvcc or toolchain.NVCC_PLACES))
    yield Finding("NVRTC", OK if library else INFO, str(library or nvrtc.PLACES))
    arch = _target()
    try:
        tool_arch = arch if arch.is_gpu else Arch.SM80
        tool = toolchain.toolchain(tool_arch)
        with tempfile.TemporaryDirectory() as directory:
            tool.compile(tiny_kernel(tool_arch, CUDA_TEXT), Path(directory))
    except (NoCompilerError, CompileError) as error:
        if arch.is_gpu:
            yield failed("GPU kernels", error)
        else:
            yield Finding(
                "GPU kernels", INFO, f"cannot be compiled, and there is no GPU to run them: {error}"
            )
        return
    made = cuda_release(tool.identity)
    release = ".".join(map(str, made)) if made else "unknown"
    yield Finding("GPU kernels", OK, f"compiled by {tool.name} of CUDA {release} ({_why(tool.name)})")
    if (runs := driver_cuda()) and made and made[0] > runs[0]:
        yield Finding(
            "GPU kernels",
            FAILURE,
            f"the compiler is CUDA {made[0]}.{made[1]}'s, but the driver supports up to {runs[0]}.{runs[1]}",
            f"update the driver, or install nvidia-cuda-nvcc of CUDA {runs[0]}",
        )


def _why(name: str) -> str:
    setting = settings().compiler
    if setting != "auto":
        return f"{COMPILER}={setting}"
    return "nvcc and gcc were found" if name == "nvcc" else "nvcc or gcc was not found"


def cuda_release(identity: str) -> tuple[int, int] | None:
    """CUDA release that a CUDA compiler's identity names."""
    match = compilation.RELEASE.search(identity)
    return (int(match.group(1)), int(match.group(2))) if match else None


def host_compiler() -> Iterator[Finding]:
    """The compiler of CPU kernels, checked by compiling and loading a tiny library."""
    try:
        tool = toolchain.host_toolchain(os.environ)
        with tempfile.TemporaryDirectory() as name:
            built = tool.compile(tiny_kernel(Arch.CPU, HOST_TEXT), Path(name))
            binary = Path(name, built.binary_name).read_bytes()
        entry = cache.Entry(Path("doctor"), binary, Path("doctor"), {})
        with entry.library() as path:
            threads = ctypes.CDLL(path).threads()
    except (NoCompilerError, CompileError) as error:
        yield _without_host_compiler(failed("CPU kernels", error))
        return
    except OSError as error:
        yield Finding(
            "CPU kernels", FAILURE, f"cannot be loaded: {error}", "allow executable memory files (memfd)"
        )
        return
    yield Finding("CPU kernels", OK, f"compiled by {tool.program}: {tool.identity.split(';')[0]}")
    yield Finding("OpenMP", OK, f"{threads} threads")


def _without_host_compiler(found: Finding) -> Finding:
    """With a GPU and a launcher that was installed, only calls on the CPU need the compiler."""
    from attnforge.runtime.native import launcher

    if not _target().is_gpu or launcher.prebuilt() is None:
        return found
    return Finding(found.name, WARNING, f"{found.value}; calls on the GPU do not need it", found.remedy)


def tiny_kernel(arch: Arch, text: str) -> Module:
    """A text for a compiler to try."""
    return Module("tiny", arch, text, (), ".cu" if arch.is_gpu else ".cpp")


def _target() -> Arch:
    """The architecture that kernels are compiled for here: the first GPU's, else the CPU."""
    import torch

    from attnforge.runtime import kernels

    return kernels.target(torch.device("cuda", 0)) if torch.cuda.is_available() else Arch.CPU
