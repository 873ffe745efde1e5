"""The C++ extension that holds the operators: built once, published in the cache, loaded once per process.

It uses torch's C++ API but neither Python's nor CUDA's, so it needs no Python.h and no toolkit, and one build
serves every Python version. `torch.utils.cpp_extension.load` builds it in a directory of this process
alone, so that its lock file, which a killed process leaves behind, blocks no other process.

A platform wheel (.ci/prebuilt.py) brings builds along, in prebuilt/: with one for this torch nothing is compiled.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path

import torch

from attnforge.codegen import host_sources
from attnforge.runtime.build import cache
from attnforge.runtime.build.errors import CompileError
from attnforge.runtime.build.notice import announce
from attnforge.runtime.build.toolchain import host_compiler, probe, run

log = logging.getLogger("attnforge")

NAME = "attnforge_launcher"
LIBRARY = f"{NAME}.so"
FLAGS = ("-O2",)
# Some compilers link libstdc++ statically. Its symbols must stay inside this library: two copies that share some of
# them (those of locales are unique in a process) disagree about the facets of a stream, and formatting a number fails.
LINK_FLAGS = ("-Wl,--exclude-libs,libstdc++.a",)
PREBUILT = Path(__file__).parent / "prebuilt"

# It also loads the result: what does not load is not published. ninja comes from its package, not the PATH.
# torch quotes its folders of headers but not that of its libraries, which may have a space. In the path of a source it
# quotes spaces only, not what ninja reads as its own (`:`, `$`); ninja and the compiler run inside the directory.
# $CXX says whether there is a ccache: torch would put another one before it.
BUILD = """
import os, shlex, sys
import ninja
directory, compiler, count, *flags = sys.argv[1:]
count = int(count)
os.environ["PATH"] = ninja.BIN_DIR + os.pathsep + os.environ.get("PATH", "")
os.environ["CXX"], os.environ["TORCH_NO_COMPILER_WRAPPER"] = compiler, "1"
from torch.utils import cpp_extension
cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
cpp_extension.load("attnforge_launcher", ["/proc/self/cwd/launcher.cpp"],
    extra_cflags=flags[:count], extra_ldflags=flags[count:],
    build_directory=directory, is_python_module=False, with_cuda=False)
"""

_lock = threading.Lock()
_loaded = False


def launcher() -> None:
    """Load the extension, building it first if this machine never has. Calls need `operators.operators`, too.

    The first build takes about half a minute. Raises CompileError, NoCompilerError or CacheError.
    """
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        if not _load_prebuilt():
            torch.ops.load_library(str(_cached() / LIBRARY))
        _loaded = True


def _load_prebuilt() -> bool:
    """Load the build that was installed with the package. False, with a warning if there is one, if that is no use."""
    path = prebuilt()
    if path is None:
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # such as a libstdc++ older than where it was built
        log.warning("the launcher that was installed cannot be loaded: %s; another one is built", error)
        return False
    return True


def prebuilt() -> Path | None:
    """The build of a platform wheel for this torch, and for a C library that is not newer than this machine's."""
    name, version = platform.libc_ver()
    for path in PREBUILT.glob(f"{key(sources(), libc=False)[:16]}-{name}-*.so"):
        built = path.stem.rpartition("-")[2]
        if _numbers(built) <= _numbers(version):
            return path
    return None


def save_prebuilt(folder: Path) -> Path:
    """Put the launcher for this process's torch and C library into `folder`, under the name that is looked for.

    It comes from the cache, or is built there. Errors as `launcher`.
    """
    path = folder / f"{key(sources(), libc=False)[:16]}-{'-'.join(platform.libc_ver())}.so"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_cached() / LIBRARY, path)
    return path


def _cached() -> Path:
    """Directory of the cache that holds the launcher for this machine; built if it is missing."""
    texts = sources()
    return cache.publish_directory(entry_name(), lambda directory: build(directory, texts))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def entry_name() -> str:
    """Name of the cache directory that holds, or will hold, the extension for this machine."""
    return f"launcher-{key(sources())[:16]}"


def sources() -> dict[str, str]:
    """Text of each file of the extension by name."""
    return host_sources.sources("launcher.cpp")


def key(texts: dict[str, str], libc: bool = True) -> str:
    """Everything that decides whether a build can be used here, but for the C library if not `libc`.

    The compiler is not in it: any build of this source for this torch and C library does the same, and a warm
    cache must serve a machine without a compiler.
    """
    parts = [
        *(part for item in sorted(texts.items()) for part in item),
        *FLAGS,
        *LINK_FLAGS,
        torch.__version__,
        str(torch.version.git_version),
        str(torch.compiled_with_cxx11_abi()),
        platform.machine(),
        *(platform.libc_ver() if libc else ()),
    ]
    return cache.digest_of(parts)


def build(directory: Path, texts: dict[str, str]) -> None:
    """Compile into `directory`, in a child process. Raises CompileError with the compiler's output."""
    log.info(
        "building the launcher for torch %s, once for this machine; this takes half a minute",
        torch.__version__,
    )
    announce(
        "launcher",
        f"building the launcher for torch {torch.__version__}, once for this machine; half a minute",
    )
    for name, text in texts.items():
        (directory / name).write_text(text)
    found = host_compiler(os.environ)
    probe((*found, "--version"))  # where it cannot run, this says so
    compiler = _one_word(found, directory)
    begin = time.perf_counter()
    flags = (str(len(FLAGS)), *FLAGS, *LINK_FLAGS)
    command = (sys.executable, "-c", BUILD, str(directory), compiler, *flags)
    code, output = run(command, directory)
    library = directory / LIBRARY
    if code != 0 or not library.is_file():
        raise CompileError(
            "the launcher", command, directory / "launcher.cpp", output or f"exit status {code}"
        )
    for path in directory.iterdir():
        if path.name not in texts and path != library:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    log.debug("launcher built in %.1f s", time.perf_counter() - begin)


def _one_word(compiler: tuple[str, ...], directory: Path) -> str:
    """The compiler as torch takes it, without arguments: one with arguments becomes a script in `directory`."""
    if len(compiler) == 1:
        return compiler[0]
    script = directory / "compiler"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    script.chmod(0o755)
    return f"./{script.name}"
