"""Choosing a compiler: nvcc or NVRTC for cubins, the host's C++ compiler for CPU kernels."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attnforge.codegen.render import Compilable
from attnforge.codegen.spec import Arch
from attnforge.runtime.build import nvrtc
from attnforge.runtime.build.compilation import (
    Built,
    Toolchain,
    cuda_homes,
    parse_ptxas,
    site_packages,
    write_source,
)
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.settings import settings

# A kernel takes seconds; a compiler that runs for this long hangs.
COMPILE_SECONDS = 900

NVCC_FLAGS = ("-cubin", "-O3", "-std=c++17", "--ptxas-options=-v", "-allow-unsupported-compiler")
# -fno-math-errno lets exp() and sqrt() vectorise; no other relaxation of arithmetic.
CPU_FLAGS = ("-O3", "-march=native", "-std=c++14", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")

# Variables that would change the binary without changing the cache key.
_DROPPED = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")


@dataclass(frozen=True)
class Command:
    """A toolchain that is a program: nvcc or a C++ compiler."""

    name: str
    program: Path
    identity: str
    flags: tuple[str, ...]
    binary_name: str

    def compile(self, source: Compilable, directory: Path) -> Built:
        """Run the program on the source inside `directory`. Raises CompileError with the program's output."""
        path = write_source(source, directory)
        command = (str(self.program), *self.flags, "-o", self.binary_name, path.name)
        begin = time.perf_counter()
        code, log = run(command, directory)
        if code != 0 or not (directory / self.binary_name).is_file():
            raise CompileError(source.slug, command, path, log or f"exit status {code}, no output")
        seconds = time.perf_counter() - begin
        return Built(self.binary_name, log, command, seconds, parse_ptxas(log))


def run(command: Iterable[str], directory: Path) -> tuple[int, str]:
    """Exit status and output of a compiler run in `directory`; its whole process group dies with the call."""
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    # Temporary files go into a directory that the cache sweeps; messages are in English, to be parsed.
    env |= {"TMPDIR": str(directory), "LC_ALL": "C"}
    arguments = list(command)
    try:
        process = subprocess.Popen(
            arguments,
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise NoCompilerError(f"{arguments[0]} cannot be run: {error}") from error
    try:
        output, _ = process.communicate(timeout=COMPILE_SECONDS)
    except BaseException as error:
        # nvcc is a driver: killing only it would leave cicc or ptxas behind.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return -1, f"{_text(output)}\nerror: stopped after {COMPILE_SECONDS} s without finishing"
        raise
    return process.returncode, _text(output)


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


# ---- Choosing


def toolchain(arch: Arch) -> Toolchain:
    """The compiler for `arch` under the current settings. Raises NoCompilerError with the places searched."""
    return _toolchain(arch, settings().compiler, _environment())


def _environment() -> tuple[tuple[str, str], ...]:
    """The variables that the choice depends on, as the key under which it is kept."""
    names = ("PATH", "CUDA_HOME", "CUDA_PATH", "CXX")
    return tuple((name, os.environ[name]) for name in names if name in os.environ)


@lru_cache(maxsize=64)
def _toolchain(arch: Arch, compiler: str, environment: tuple[tuple[str, str], ...]) -> Toolchain:
    env = dict(environment)
    if not arch.is_gpu:
        return host_toolchain(env)
    nvcc = find_nvcc(env)
    # nvcc runs gcc even for a file that includes nothing; NVRTC needs no host compiler.
    if compiler == "nvcc" or (compiler == "auto" and nvcc and shutil.which("gcc", path=env.get("PATH", ""))):
        if not nvcc:
            raise NoCompilerError(f"ATTNFORGE_COMPILER=nvcc, but {NVCC_PLACES}; {NVCC_REMEDY}")
        return nvcc_toolchain(nvcc, arch)
    library = nvrtc.find(env)
    if library is None:
        raise NoCompilerError(f"no CUDA compiler: {NVCC_PLACES}, and {nvrtc.PLACES}; {NVCC_REMEDY}")
    return nvrtc.Nvrtc(library, arch)


NVCC_PLACES = "nvcc is not in $CUDA_HOME/bin, $CUDA_PATH/bin, PATH or the pip package nvidia-cuda-nvcc"
NVCC_REMEDY = "install the CUDA toolkit or `pip install attnforge[nvcc]`"


def find_nvcc(env: Mapping[str, str]) -> Path | None:
    """nvcc, as `find_program` finds it."""
    return find_program("nvcc", env)


def find_program(name: str, env: Mapping[str, str]) -> Path | None:
    """A program of the CUDA toolkit: of CUDA_HOME or CUDA_PATH, of the PATH, or of the pip packages; absolute."""
    places = [home / "bin" for home in cuda_homes(env)]
    places += [Path(p) for p in env.get("PATH", "").split(os.pathsep) if p]
    for site in site_packages():
        places += sorted((site / "nvidia").glob("cu[0-9]*/bin"), reverse=True)
        places += [site / "nvidia" / "cuda_nvcc" / "bin"]
    for place in places:
        if found := shutil.which(name, path=str(place)):
            return Path(found).absolute()
    return None


def host_compiler(env: Mapping[str, str]) -> tuple[str, ...]:
    """$CXX if set, else the first of g++, clang++, c++ on the PATH: the program, absolute, and its first arguments.

    CXX may be a program with arguments, as for make: `ccache g++`. Raises NoCompilerError.
    """
    given = env.get("CXX", "").strip()
    for name, *arguments in ((given,), _words(given)) if given else (("g++",), ("clang++",), ("c++",)):
        if found := shutil.which(name, path=env.get("PATH", "")):
            return (str(Path(found).absolute()), *arguments)
    raise NoCompilerError(
        f"no C++ compiler: looked for {f'CXX={given}' if given else 'g++, clang++ and c++'} on the PATH; install one "
        "(Debian: apt-get install g++) or set CXX to one"
    )


def _words(command: str) -> tuple[str, ...]:
    """The words of a command line; the whole of it if a quote is not closed."""
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return (command,)


def nvcc_toolchain(program: Path, arch: Arch) -> Command:
    """nvcc for one architecture."""
    flags = (*NVCC_FLAGS, f"-arch={arch.nvcc_name}")
    return Command("nvcc", program, probe((str(program), "--version")), flags, "kernel.cubin")


def host_toolchain(env: Mapping[str, str]) -> Command:
    """The C++ compiler. Its identity includes the instruction set that `native` means here: machines of different
    kinds may share a home directory, and code for the wrong one dies of an illegal instruction."""
    compiler = host_compiler(env)
    macros = probe((*compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull))
    native = hashlib.sha256("\n".join(sorted(macros.splitlines())).encode()).hexdigest()
    version = probe((*compiler, "--version")).splitlines()[0]
    # A library built against a newer C library does not load with an older one.
    identity = f"{version}; {os.confstr('CS_GNU_LIBC_VERSION')}; native {native}"
    program, *arguments = compiler
    return Command(Path(program).name, Path(program), identity, (*arguments, *CPU_FLAGS), "kernel.so")


def probe(command: tuple[str, ...]) -> str:
    """Output of a compiler's version or macro query. Raises NoCompilerError if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in _DROPPED} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise NoCompilerError(
            f"{' '.join(command)} failed with status {done.returncode}: {_text(done.stderr).strip()}"
        )
    return _text(done.stdout).strip()
