"""Building the C++ extension: what its key depends on, and what a failed build leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnforge.codegen import params, variant
from attnforge.codegen.spec import Mask
from attnforge.runtime import inputs
from attnforge.runtime.build import cache
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.settings import NO_JIT
from attnforge.runtime.build.toolchain import host_compiler
from attnforge.runtime.native import launcher


def test_key_follows_sources_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = launcher.sources()
    key = launcher.key(texts)
    assert key == launcher.key(dict(reversed(texts.items())))
    for name in texts:
        assert launcher.key(texts | {name: texts[name] + "\n"}) != key
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert launcher.key(texts) != key


def test_params_are_those_of_kernels() -> None:
    assert params.struct() in launcher.sources()["params.h"]


def test_mask_kinds_are_numbered_alike() -> None:
    assert tuple(Mask) == inputs.MASKS
    assert "enum MaskKind : int64_t { kFull, kCausal, kSpans, kDense };" in variant.header()


def test_a_static_libstdcxx_stays_inside(tmp_path: Path) -> None:
    """Two copies in a process that share the symbols of locales crash when a message formats a number."""
    source = tmp_path / "message.cpp"
    source.write_text(
        "#include <sstream>\n"
        "std::string message(long number) { std::ostringstream text; text << number; return text.str(); }\n"
    )
    exported = []
    for flags in ((), launcher.LINK_FLAGS):
        built = tmp_path / "message.so"
        command = ["g++", "-shared", "-fPIC", "-static-libstdc++", str(source), *flags, "-o", str(built)]
        subprocess.run(command, check=True)
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", built], check=True, capture_output=True, text=True
        )
        exported.append("_ZNSt7num_putI" in symbols.stdout)
    assert exported == [True, False]


def test_torch_may_be_in_a_folder_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch passes -L<its folder of libraries> to the shell unquoted."""
    extension = ModuleType("torch.utils.cpp_extension")
    links: list[str] = []
    extension.__dict__["TORCH_LIB_PATH"] = "/my env/torch/lib"
    extension.__dict__["load"] = lambda *_, **__: links.append(extension.__dict__["TORCH_LIB_PATH"])
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", extension)
    monkeypatch.setattr(torch.utils, "cpp_extension", extension, raising=False)
    monkeypatch.setattr(sys, "argv", ["-c", "/build", "g++", "1", "-O2"])
    for name in ("PATH", "CXX", "TORCH_NO_COMPILER_WRAPPER"):
        monkeypatch.setenv(name, "/usr/bin")
    exec(compile(launcher.BUILD, "build", "exec"), {})  # noqa: S102
    assert links == ["'/my env/torch/lib'"]
    assert (os.environ["CXX"], os.environ["TORCH_NO_COMPILER_WRAPPER"]) == ("g++", "1")


def test_a_folder_of_any_name_and_a_compiler_with_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ninja reads `:` and `$` in paths as its own: names of runs hold times. CXX may be `ccache g++`."""
    directory = tmp_path / "run 12:30 $USER's"
    directory.mkdir()
    wrapper, log = tmp_path / "wrapper", tmp_path / "log"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} {shlex.join(host_compiler(os.environ))} -DANSWER=42")
    launcher.build(directory, {"launcher.cpp": 'extern "C" int answer() { return ANSWER; }\n'})
    assert ctypes.CDLL(str(directory / launcher.LIBRARY)).answer() == 42
    assert "-DANSWER=42" in log.read_text()
    assert sorted(path.name for path in directory.iterdir()) == [launcher.LIBRARY, "launcher.cpp"]


def test_a_compiler_with_arguments_is_one_word(tmp_path: Path) -> None:
    """A script there: its arguments and those of a call stay apart. One without arguments is itself."""
    word = launcher._one_word(("printf", "<%s>"), tmp_path)
    done = subprocess.run([word, "a b", "$HOME"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "<a b><$HOME>"
    assert launcher._one_word(("/my tools/g++",), tmp_path) == "/my tools/g++"


def test_a_compiler_that_cannot_run_is_no_compile_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false --no")
    with pytest.raises(NoCompilerError, match=r"false --no --version failed with status 1"):
        launcher.build(tmp_path, launcher.sources())


def test_failed_build_says_why_and_publishes_nothing(cache_dir: Path) -> None:
    texts = launcher.sources() | {"launcher.cpp": "#error broken on purpose\n"}
    with pytest.raises(CompileError, match=r"the launcher does not compile: .*broken on purpose"):
        cache.publish_directory("launcher-test", lambda directory: launcher.build(directory, texts))
    assert not (cache_dir / "launcher-test").exists()


def test_a_prebuilt_launcher_needs_the_same_torch_and_no_newer_c_library(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prebuilt"
    monkeypatch.setattr(launcher, "PREBUILT", folder)
    monkeypatch.setattr(launcher, "build", lambda directory, texts: (directory / launcher.LIBRARY).touch())
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert launcher.prebuilt() is None
    path = launcher.save_prebuilt(folder)
    assert path.parent == folder
    assert len(list(cache_dir.glob("launcher-*"))) == 1
    assert path.name.endswith("-glibc-2.36.so")
    for version, found in (("2.36", path), ("2.100", path), ("2.9", None)):
        monkeypatch.setattr(platform, "libc_ver", lambda version=version: ("glibc", version))
        assert launcher.prebuilt() == found
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "2.36"))
    assert launcher.prebuilt() is None
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert launcher.prebuilt() is None


def test_a_prebuilt_launcher_that_does_not_load_is_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "prebuilt", lambda: tmp_path / "no-library.so")
    (tmp_path / "no-library.so").write_text("damaged")
    with caplog.at_level("WARNING", "attnforge"):
        assert not launcher._load_prebuilt()
    assert "cannot be loaded" in caplog.text


USE = """
import torch, attnforge
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
out = attnforge.attention(q, k, v, attnforge.Causal())
out.sum().backward()
print(out.sum().item(), q.grad.sum().item())
"""


def test_a_platform_wheel_needs_no_compiler(tmp_path: Path) -> None:
    """Its launcher and kernels of a warm cache run where no program is found; without it, the launcher is missing."""
    cache_dir = tmp_path / "cache"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ATTNFORGE_CACHE_DIR": str(cache_dir)}
    root = Path(launcher.__file__).parents[2]
    installed = tmp_path / "installed" / "attnforge"
    installed.mkdir(parents=True)
    for part in ("__init__.py", "cli.py", "bagel", "codegen", "generated", "runtime", "templates"):
        copy = shutil.copytree if (root / part).is_dir() else shutil.copy
        copy(root / part, installed / part)
    launcher.save_prebuilt(installed / "runtime" / "native" / "prebuilt")
    env["PYTHONPATH"] = str(installed.parent)

    def use(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(words or ("-c", USE))]
        return subprocess.run(
            command, env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    first = use()
    assert first.returncode == 0, first.stderr
    assert not list(cache_dir.glob("launcher-*"))
    nowhere = {"PATH": str(tmp_path / "empty")}
    again = use(**nowhere)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    doctor = use("-m", "attnforge.cli", "doctor", "--json", **nowhere)
    found = {finding["name"]: finding for finding in json.loads(doctor.stdout)}
    assert "installed with the package" in found["launcher"]["value"]
    shutil.rmtree(installed / "runtime" / "native" / "prebuilt")
    lacking = use(**nowhere)
    assert lacking.returncode != 0
    assert "no C++ compiler" in lacking.stderr


def test_jit_forbidden(cache_dir: Path) -> None:
    """A fresh process without a built launcher says what is forbidden, at the first call."""
    code = "import torch, attnforge\nx = torch.zeros(1, 1, 8, 64)\nattnforge.attention(x, x, x)\n"
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cache_dir.parent),
        NO_JIT: "1",
        "ATTNFORGE_CACHE_DIR": str(cache_dir),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert NoCompilerError.__name__ in done.stderr
    assert NO_JIT in done.stderr
