"""Building the C++ extension: what its key depends on, and what a failed build leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnforge.codegen import params, variant
from attnforge.codegen.spec import Mask
from attnforge.runtime import inputs
from attnforge.runtime.build import cache
from attnforge.runtime.build.errors import CompileError, NoCompilerError
from attnforge.runtime.build.settings import NO_JIT
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


def test_failed_build_says_why_and_publishes_nothing(cache_dir: Path) -> None:
    texts = launcher.sources() | {"launcher.cpp": "#error broken on purpose\n"}
    with pytest.raises(CompileError, match=r"the launcher does not compile: .*broken on purpose"):
        cache.publish_directory("launcher-test", lambda directory: launcher.build(directory, texts))
    assert not (cache_dir / "launcher-test").exists()


def test_jit_forbidden(cache_dir: Path) -> None:
    """A fresh process without a built launcher says what is forbidden, at the first call."""
    code = "import torch, attnforge\nx = torch.zeros(1, 1, 8, 64)\nattnforge.attention(x, x, x)\n"
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(cache_dir.parent),
        NO_JIT: "1",
        "ATTNFORGE_CACHE_DIR": str(cache_dir),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert NoCompilerError.__name__ in done.stderr
    assert NO_JIT in done.stderr
