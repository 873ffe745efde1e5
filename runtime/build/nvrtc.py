"""NVRTC through ctypes: cubins without a toolkit, from the library that torch's CUDA build depends on."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from attnforge.codegen.render import Compilable
from attnforge.codegen.spec import Arch
from attnforge.runtime.build.compilation import Built, cuda_homes, parse_ptxas, site_packages, write_source
from attnforge.runtime.build.errors import CompileError, NoCompilerError

PLACES = (
    "libnvrtc.so is not in site-packages/nvidia (pip package nvidia-cuda-nvrtc, a dependency of torch's CUDA "
    "build), $CUDA_HOME/lib64, $CUDA_PATH/lib64 or the system's library path"
)
FLAGS = ("--std=c++17", "--ptxas-options=-v")
BINARY_NAME = "kernel.cubin"

_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*")


def find(env: Mapping[str, str]) -> Path | None:
    """libnvrtc.so of the pip packages, of CUDA_HOME or CUDA_PATH, or of the system; newest first."""
    places: list[Path] = []
    for site in site_packages():
        places += sorted((site / "nvidia").glob("cu[0-9]*/lib"), reverse=True)
        places += [site / "nvidia" / "cuda_nvrtc" / "lib"]
    places += [home / lib for home in cuda_homes(env) for lib in ("lib64", "lib", "targets/x86_64-linux/lib")]
    for place in places:
        found = [path for path in place.glob("libnvrtc.so*") if _LIBRARY.fullmatch(path.name)]
        if found:
            return max(found)
    name = ctypes.util.find_library("nvrtc")
    return Path(name) if name else None


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC for one architecture. Compiles in this process, outside the interpreter lock."""

    library: Path
    arch: Arch

    @property
    def name(self) -> str:
        return "nvrtc"

    @cached_property
    def identity(self) -> str:
        """Version, and the size of the library: releases share a version number that has no patch level."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(load(self.library), "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        size = self.library.stat().st_size if self.library.is_absolute() else 0
        return f"nvrtc {major.value}.{minor.value}, {self.library.name}, {size} bytes"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, f"--gpu-architecture={self.arch.nvcc_name}")

    def compile(self, source: Compilable, directory: Path) -> Built:
        """Compile to a cubin in `directory`. Raises CompileError with NVRTC's log."""
        path = write_source(source, directory)
        begin = time.perf_counter()
        command = ("nvrtc", *self.flags, path.name)
        status, log, cubin = compile_text(load(self.library), source.text, path.name, self.flags)
        if cubin is None:
            raise CompileError(source.slug, command, path, log or status)
        (directory / BINARY_NAME).write_bytes(cubin)
        return Built(BINARY_NAME, log, command, time.perf_counter() - begin, parse_ptxas(log))


@lru_cache(maxsize=8)
def load(library: Path) -> ctypes.CDLL:
    """The library with the prototypes that are used; NoCompilerError if it cannot be loaded."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompilerError(f"{library} cannot be loaded: {error}") from error
    text, handle, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
    texts = ctypes.POINTER(ctypes.c_char_p)
    prototypes = {
        "nvrtcVersion": (ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)),
        "nvrtcCreateProgram": (ctypes.POINTER(handle), text, text, ctypes.c_int, texts, texts),
        "nvrtcCompileProgram": (handle, ctypes.c_int, texts),
        "nvrtcGetProgramLogSize": (handle, size),
        "nvrtcGetProgramLog": (handle, text),
        "nvrtcGetCUBINSize": (handle, size),
        "nvrtcGetCUBIN": (handle, text),
        "nvrtcDestroyProgram": (ctypes.POINTER(handle),),
    }
    for name, arguments in prototypes.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    lib.nvrtcGetErrorString.argtypes = (ctypes.c_int,)
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    return lib


def _check(lib: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(lib, function)(*arguments)
    if status != 0:
        raise NoCompilerError(f"{function} failed: {lib.nvrtcGetErrorString(status).decode()}")


def compile_text(
    lib: ctypes.CDLL, text: str, name: str, flags: tuple[str, ...]
) -> tuple[str, str, bytes | None]:
    """(status, log, cubin or None) of one program; `name` is what the log calls it."""
    program = ctypes.c_void_p()
    _check(lib, "nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = lib.nvrtcCompileProgram(program, len(flags), options)
        log = _bytes(lib, "nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
        cubin = _bytes(lib, "nvrtcGetCUBIN", program) if status == 0 else None
        return lib.nvrtcGetErrorString(status).decode(), log, cubin
    finally:
        _check(lib, "nvrtcDestroyProgram", ctypes.byref(program))


def _bytes(lib: ctypes.CDLL, function: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(lib, f"{function}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, function, program, buffer)
    return buffer.raw
