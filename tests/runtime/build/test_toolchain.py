"""Compilers: which is found and chosen, how it is run, and what its log says."""

from __future__ import annotations

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakes
import pytest

from attnforge.codegen.spec import Arch
from attnforge.runtime.build import compilation, nvrtc, toolchain
from attnforge.runtime.build.errors import CompileError, NoCompilerError, first_error
from attnforge.runtime.build.settings import COMPILER


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# ---- Finding


def test_nvcc_is_looked_for_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    monkeypatch.setattr(toolchain, "site_packages", lambda: [site])
    in_home = program(tmp_path / "home" / "bin" / "nvcc")
    in_path = program(tmp_path / "path" / "nvcc")
    new = program(site / "nvidia" / "cu13" / "bin" / "nvcc")
    old = program(site / "nvidia" / "cuda_nvcc" / "bin" / "nvcc")
    env = {"CUDA_PATH": str(tmp_path / "home"), "PATH": str(in_path.parent)}
    for expected in (in_home, in_path, new, old):
        assert toolchain.find_nvcc(env) == expected
        expected.unlink()
    assert toolchain.find_nvcc(env) is None


def test_nvrtc_is_found_in_the_pip_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "site_packages", lambda: [tmp_path])
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert nvrtc.find({}) is None
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13"):
        (lib / name).touch()
    assert nvrtc.find({}) == lib / "libnvrtc.so.13"


def test_without_gcc_nvrtc_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvcc", "echo nvcc 13")
    monkeypatch.setattr(nvrtc, "find", lambda env: Path("libnvrtc.so"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.toolchain(Arch.SM80).name == "nvrtc"
    program(tmp_path / "gcc")
    toolchain._toolchain.cache_clear()
    assert toolchain.toolchain(Arch.SM80).name == "nvcc"


def test_no_cuda_compiler_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda env: None)
    monkeypatch.setattr(nvrtc, "find", lambda env: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompilerError, match=r"(?s)CUDA_HOME.*nvidia-cuda-nvrtc.*attnforge\[nvcc\]"):
        toolchain.toolchain(Arch.SM80)
    monkeypatch.setenv(COMPILER, "nvcc")
    with pytest.raises(NoCompilerError, match="ATTNFORGE_COMPILER=nvcc"):
        toolchain.toolchain(Arch.SM80)


def test_no_cpp_compiler_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompilerError, match=r"g\+\+, clang\+\+ and c\+\+.*apt-get install g\+\+"):
        toolchain.toolchain(Arch.CPU)
    monkeypatch.setenv("CXX", "nothing++")
    with pytest.raises(NoCompilerError, match=r"CXX=nothing\+\+"):
        toolchain.toolchain(Arch.CPU)


def test_a_compiler_that_cannot_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "broken", "echo no licence >&2; exit 3")))
    with pytest.raises(NoCompilerError, match=r"broken.* failed with status 3: no licence"):
        toolchain.toolchain(Arch.CPU)


@pytest.mark.parametrize("arguments", ["", " c++ '-DA=1 2'", " 'open"])
def test_cxx_may_have_spaces_and_arguments(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with spaces is one program; `ccache g++` is a program and its arguments, as for make."""
    path = program(tmp_path / ("my tool" if not arguments else "tool"), "echo 1")
    monkeypatch.setenv("CXX", f"{path}{arguments}")
    if "open" in arguments:
        with pytest.raises(NoCompilerError, match=r"CXX=.*tool 'open on the PATH"):
            toolchain.host_compiler(os.environ)
        return
    expected = ["c++", "-DA=1 2"] if arguments else []
    assert toolchain.host_compiler(os.environ) == (str(path), *expected)
    command = toolchain.host_toolchain(os.environ)
    assert (command.program, command.flags) == (path, (*expected, *toolchain.CPU_FLAGS))


def test_the_compiler_is_absolute_and_a_blank_cxx_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers run in the folder of what they compile, where a relative PATH leads elsewhere."""
    path = program(tmp_path / "bin" / "g++")
    monkeypatch.chdir(tmp_path)
    for cxx in ("", " ", "g++"):
        assert toolchain.host_compiler({"PATH": "bin", "CXX": cxx}) == (str(path),)


# ---- Identity


def test_identity_follows_version_and_native_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = set()
    for version, native in (("1.0", "1"), ("1.1", "1"), ("1.0", "2")):
        stub = fakes.compiler(tmp_path, version=version, native=native)
        monkeypatch.setenv("CXX", str(stub.path))
        identities.add(toolchain.toolchain(Arch.CPU).identity)
    assert len(identities) == 3


def test_the_identity_of_a_wrapped_compiler_is_the_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `ccache g++` that of g++: its arguments are in the questions, too."""
    wrapper = program(tmp_path / "wrapper", 'exec "$@"')
    for native in ("1", "2"):
        stub = fakes.compiler(tmp_path, version="1.0", native=native)
        monkeypatch.setenv("CXX", str(stub.path))
        alone = toolchain.host_toolchain(os.environ).identity
        monkeypatch.setenv("CXX", f"{wrapper} {stub.path}")
        assert toolchain.host_toolchain(os.environ).identity == alone


def test_the_real_compiler_has_an_identity_that_stays() -> None:
    first = toolchain.host_toolchain(os.environ)
    assert first == toolchain.host_toolchain(os.environ)
    assert "native" in first.identity


# ---- Running


def test_variables_that_would_change_the_binary_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/hostile")
    code, output = toolchain.run(("/usr/bin/env",), tmp_path)
    names = {line.partition("=")[0] for line in output.splitlines()}
    assert code == 0
    assert not names & {"NVCC_APPEND_FLAGS", "CPLUS_INCLUDE_PATH"}
    assert f"TMPDIR={tmp_path}" in output


def test_no_shell_sees_the_arguments(tmp_path: Path) -> None:
    assert toolchain.run(("/bin/echo", "$(touch pwned); `id`"), tmp_path) == (0, "$(touch pwned); `id`\n")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_hangs_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "COMPILE_SECONDS", 0.3)
    hanging = program(tmp_path / "hang", "(sleep 60; touch outlived) & echo $! > child; wait")
    code, output = toolchain.run((str(hanging),), tmp_path)
    assert code != 0
    assert "without finishing" in output
    assert not (tmp_path / "outlived").exists()
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or ") Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.02)
    pytest.fail("the compiler's child outlived it")


def test_a_program_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match="/nowhere/nvcc cannot be run"):
        toolchain.run(("/nowhere/nvcc",), tmp_path)


# ---- Reading logs

NVCC_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_80'
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for b
    280 bytes stack frame, 356 bytes spill stores, 384 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 280 bytes cumulative stack size, 368 bytes cmem[0]
ptxas info    : Compile time = 15.783 ms
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 1024 bytes smem, 368 bytes cmem[0]
"""


def test_resources_are_read_per_kernel() -> None:
    expected = {
        "b": {"registers": 32, "spill_bytes": 740, "shared_bytes": 0},
        "a": {"registers": 10, "spill_bytes": 0, "shared_bytes": 1024},
    }
    assert compilation.parse_ptxas(NVCC_LOG) == expected
    # NVRTC prefixes the indented lines.
    assert compilation.parse_ptxas(NVCC_LOG.replace("\n    ", "\nptxas         .     ")) == expected
    assert compilation.parse_ptxas("g++ prints no such thing\n") == {}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("note\nkernel.cu(12): error: no y\nkernel.cu(14): error: z", ("kernel.cu(12): error: no y", 12)),
        ("kernel.cpp:7:9: warning: w\nkernel.cpp:9:1: error: e", ("kernel.cpp:9:1: error: e", 9)),
        ("kernel.cpp:3:10: fatal error: x.h: No", ("kernel.cpp:3:10: fatal error: x.h: No", 3)),
        ("a\nptxas /tmp/x.ptx, line 7; error   : bad", ("ptxas /tmp/x.ptx, line 7; error   : bad", None)),
        ("nvcc fatal   : Unsupported gpu", ("nvcc fatal   : Unsupported gpu", None)),
        ("Killed", ("Killed", None)),
        ("", ("the compiler printed nothing", None)),
    ],
)
def test_first_error(log: str, expected: tuple[str, int | None]) -> None:
    assert first_error(log) == expected


def test_compile_error_shows_the_line_and_crosses_processes(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.cpp"
    kernel.write_text("one\ntwo\nthree\nfour\n")
    error = CompileError("slug", ("g++", "a b"), kernel, "kernel.cpp:2:1: error: planted\n")
    lines = str(error).splitlines()
    assert lines[0] == "slug does not compile: kernel.cpp:2:1: error: planted"
    assert lines[1:4] == ["      1 | one", ">     2 | two", "      3 | three"]
    assert lines[4:] == [f"source: {kernel}", "command (run in that directory): g++ 'a b'"]
    again = copy.copy(error)  # by __reduce__, as between processes
    assert (str(again), again.log, again.command) == (str(error), error.log, ("g++", "a b"))


def test_an_error_in_an_included_file_quotes_that_file(tmp_path: Path) -> None:
    (tmp_path / "launcher.cpp").write_text("one\ntwo\n")
    (tmp_path / "stream.h").write_text("first\nsecond\n")
    log = "/elsewhere/stream.h:2:1: error: planted\n"
    text = str(CompileError("the launcher", ("g++",), tmp_path / "launcher.cpp", log))
    assert ">     2 | second" in text
    assert "two" not in text


# ---- Real compilers


@pytest.mark.nvcc
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
@pytest.mark.parametrize("arch", [Arch.SM80, Arch.SM120])
def test_a_cubin_and_its_resources(
    compiler: str, arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = cuda(compiler, arch, monkeypatch)
    built = tool.compile(fakes.source(fakes.CUDA, arch), tmp_path)
    assert (tmp_path / built.binary_name).read_bytes().startswith(b"\x7fELF")
    assert set(built.resources) == {"attnforge_plain", "attnforge_spills"}
    assert built.resources["attnforge_plain"]["shared_bytes"] == 1024
    assert built.resources["attnforge_spills"]["spill_bytes"] > 0
    assert 0 < built.resources["attnforge_plain"]["registers"] < 64
    assert built.seconds < 8


@pytest.mark.nvcc
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_a_cuda_error_names_its_line(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = cuda(compiler, Arch.SM80, monkeypatch)
    text = '// one\nextern "C" __global__ void k() { undefined_name; }\n'
    with pytest.raises(CompileError, match="undefined_name") as caught:
        tool.compile(fakes.source(text, Arch.SM80), tmp_path)
    assert ">     2 | extern" in str(caught.value)


@pytest.mark.nvcc
@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_threads_compile_side_by_side(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = cuda(compiler, Arch.SM80, monkeypatch)

    def compile_one(number: int) -> str:
        directory = tmp_path / str(number)
        directory.mkdir()
        text = fakes.CUDA.replace("plain", f"plain{number}")
        return next(iter(tool.compile(fakes.source(text, Arch.SM80), directory).resources.keys() - SHARED))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(compile_one, range(6))) == [f"attnforge_plain{number}" for number in range(6)]


SHARED = {"attnforge_spills"}


@pytest.mark.nvcc
def test_nvcc_gives_the_same_bytes_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = cuda("nvcc", Arch.SM80, monkeypatch)
    binaries = set()
    for name in ("a", "b"):
        directory = tmp_path / name
        directory.mkdir()
        built = tool.compile(fakes.source(fakes.CUDA, Arch.SM80), directory)
        binaries.add((directory / built.binary_name).read_bytes())
    assert len(binaries) == 1


def cuda(compiler: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> compilation.Toolchain:
    monkeypatch.setenv(COMPILER, compiler)
    try:
        return toolchain.toolchain(arch)
    except NoCompilerError as error:
        pytest.skip(str(error))


def test_the_host_compiler_makes_a_library(tmp_path: Path) -> None:
    built = toolchain.host_toolchain(os.environ).compile(
        fakes.source('#include <omp.h>\nextern "C" int f() { return omp_get_max_threads(); }\n'), tmp_path
    )
    assert (tmp_path / built.binary_name).read_bytes().startswith(b"\x7fELF")
    assert built.resources == {}
