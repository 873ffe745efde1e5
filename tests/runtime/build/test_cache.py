"""The cache: hits, refusals, loading, directories, listing and clearing."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import subprocess
from pathlib import Path

import fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnforge.codegen import params
from attnforge.codegen.spec import Arch
from attnforge.runtime.build import cache, locks, store, toolchain
from attnforge.runtime.build.errors import CacheError, CompileError, NoCompilerError
from attnforge.runtime.build.settings import NO_JIT

# ---- Hit and miss


def test_the_second_call_reads(compiler: fakes.Compiler, cache_dir: Path) -> None:
    first = cache.obtain(fakes.source())
    second = cache.obtain(fakes.source())
    assert first == second
    assert first.binary == b"void f();\n"
    assert first.directory.parent == cache_dir
    assert first.path.read_bytes() == first.binary
    assert compiler.runs == 1


def test_an_entry_explains_itself(compiler: fakes.Compiler) -> None:
    source = fakes.source()
    entry = cache.obtain(source)
    names = {path.name for path in entry.directory.iterdir()}
    assert names == {"kernel.cpp", "kernel.so", "meta.json", "build.log"}
    assert entry.directory.name.startswith(source.spec.slug)
    assert entry.meta["spec"] == source.spec.to_json()
    assert entry.meta["symbols"] == [source.spec.symbol]
    assert entry.meta["command"][0] == str(compiler.path)
    assert entry.meta["flags"] == list(toolchain.CPU_FLAGS)


def test_names_stay_short_however_long_the_slug(compiler: fakes.Compiler) -> None:
    entry = cache.obtain(fakes.source(knob=10**9))
    assert len(entry.directory.name) <= 96 + 1 + 16


def test_everything_that_decides_the_binary_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fakes.source()
    tool = toolchain.Command("a", Path("a"), "identity", ("-O3", "-x"), "kernel.so")
    keys = [
        cache.key(source, tool),
        cache.key(fakes.source("void g();\n"), tool),
        cache.key(source, toolchain.Command("a", Path("a"), "identity2", ("-O3", "-x"), "kernel.so")),
        cache.key(source, toolchain.Command("a", Path("a"), "identity", ("-O3-x",), "kernel.so")),
        cache.key(source, toolchain.Command("a", Path("a"), "identity", ("-x", "-O3"), "kernel.so")),
        cache.key(source, toolchain.Command("a", Path("a"), "identity-O3", ("-x",), "kernel.so")),
    ]
    monkeypatch.setattr(params, "ABI", params.ABI + 1)
    keys.append(cache.key(source, tool))
    assert len(set(keys)) == len(keys)


@given(st.lists(st.text(), min_size=1, max_size=4), st.lists(st.text(), min_size=1, max_size=4))
def test_flags_never_run_together(one: list[str], other: list[str]) -> None:
    source = fakes.source()
    keys = {
        cache.key(source, toolchain.Command("a", Path("a"), "i", tuple(flags), "k")) for flags in (one, other)
    }
    assert len(keys) == (1 if one == other else 2)


def test_another_compiler_is_another_entry(
    compiler: fakes.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.obtain(fakes.source())
    newer = fakes.compiler(tmp_path, version="2.0")
    monkeypatch.setenv("CXX", str(newer.path))
    assert cache.obtain(fakes.source()).directory != first.directory


def test_a_hit_runs_no_program(compiler: fakes.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to ask the compiler for its version."""
    first = cache.obtain(fakes.source())
    forbid_programs(monkeypatch)
    assert cache.obtain(fakes.source()) == first


def forbid_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*command: object, **rest: object) -> None:
        raise AssertionError(f"{command} is run")

    monkeypatch.setattr(subprocess, "Popen", start)


# ---- Refusals


def test_without_jit_only_the_disk_answers(
    compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = cache.obtain(fakes.source())
    monkeypatch.setenv(NO_JIT, "1")
    assert cache.obtain(fakes.source()) == entry
    with pytest.raises(NoCompilerError, match=rf"not in the cache.*{cache_dir}.*{NO_JIT}=1 forbids"):
        cache.obtain(fakes.source("void g();\n"))
    entry.path.write_bytes(b"changed")
    with pytest.raises(NoCompilerError, match=r"digest differs.*forbids compiling"):
        cache.obtain(fakes.source())
    assert compiler.runs == 1


def test_without_a_compiler_code_of_the_same_processor_is_taken(
    compiler: fakes.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = cache.obtain(fakes.source())
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert cache.obtain(fakes.source()) == entry
    with pytest.raises(NoCompilerError, match="no C\\+\\+ compiler"):
        cache.obtain(fakes.source("void g();\n"))
    monkeypatch.setattr(cache, "machine", lambda: "another")
    with pytest.raises(NoCompilerError, match="no C\\+\\+ compiler"):
        cache.obtain(fakes.source())


def test_a_failed_compile_keeps_its_evidence(compiler: fakes.Compiler, cache_dir: Path) -> None:
    source = fakes.source("one\nFAIL\nthree\n")
    with pytest.raises(CompileError) as caught:
        cache.obtain(source)
    error = caught.value
    assert error.spec == source.spec.slug
    assert error.log == "kernel.cpp:2:1: error: planted\nsecond error\n"
    assert error.source_path.read_text() == source.text
    assert error.source_path.parent.parent == cache_dir / "failed"
    assert (error.source_path.parent / "build.log").read_text() == error.log
    message = str(error)
    assert "kernel.cpp:2:1: error: planted" in message
    assert ">     2 | FAIL" in message
    assert str(error.source_path) in message
    assert f"{compiler.path} -O3" in message
    assert not list((cache_dir / "tmp").iterdir())
    assert cache.entries() == []
    with pytest.raises(CompileError):
        cache.obtain(source)  # not remembered: the compiler may have been repaired
    assert compiler.runs == 2


def test_old_failures_are_dropped(
    compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FAILED_KEPT", 3)
    for number in range(6):
        with pytest.raises(CompileError):
            cache.obtain(fakes.source(f"{number}\nFAIL\n"))
    store._swept.clear()
    cache.obtain(fakes.source())
    kept = sorted(int(path.read_text()[0]) for path in (cache_dir / "failed").glob("*/kernel.cpp"))
    assert kept == [3, 4, 5]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "tmp", "locks", "failed", "a\0", "x" * 201])
def test_names_cannot_leave_the_root(name: str, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="not usable as a cache entry"):
        cache.publish_directory(name, lambda directory: None)


# ---- Loading


def test_the_library_is_the_checked_bytes(cache_dir: Path) -> None:
    for value in range(5):
        entry = cache.obtain(fakes.source(f'extern "C" int f() {{ return {value}; }}\n'))
        entry.path.write_bytes(b"changed after the check")
        with entry.library() as path:
            # Descriptor numbers repeat; the loader must not hand out the first library again.
            assert ctypes.CDLL(path).f() == value


def test_the_memory_file_is_sealed(compiler: fakes.Compiler) -> None:
    with cache.obtain(fakes.source()).library() as path, pytest.raises(OSError, match="not permitted"):
        Path(path).write_bytes(b"other")


# ---- Directories of code


def test_a_directory_is_built_once_and_whole(cache_dir: Path) -> None:
    calls = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / "sub").mkdir()
        (directory / "sub" / "a.so").write_bytes(b"code")
        (directory / "link").symlink_to("sub")

    path = cache.publish_directory("launcher-1", build)
    assert path == cache_dir / "launcher-1"
    assert cache.publish_directory("launcher-1", build) == path
    assert len(calls) == 1
    assert not calls[0].exists()
    (path / "sub" / "a.so").write_bytes(b"evil")
    cache.publish_directory("launcher-1", build)
    assert (path / "sub" / "a.so").read_bytes() == b"code"
    assert len(calls) == 2


def test_a_build_that_raises_leaves_nothing(cache_dir: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise RuntimeError("ninja exploded")

    with pytest.raises(RuntimeError, match="ninja exploded"):
        cache.publish_directory("launcher-1", build)
    assert not list((cache_dir / "tmp").iterdir())
    assert not (cache_dir / "launcher-1").exists()


def test_a_manifest_cannot_point_outside(cache_dir: Path) -> None:
    path = cache.publish_directory("a", lambda directory: (directory / "x").touch())
    (path / "manifest.json").write_text(json.dumps({"../../etc/passwd": "0"}))
    cache.publish_directory("a", lambda directory: (directory / "y").touch())
    assert (path / "y").exists()


# ---- Looking after it


def test_entries_and_clear(compiler: fakes.Compiler, cache_dir: Path) -> None:
    assert cache.entries() == []
    for knob in (1, 2, 3):
        os.utime(cache.obtain(fakes.source(f"{knob}\n")).directory, (knob, knob))
    cache.publish_directory("launcher-1", lambda directory: None)
    with pytest.raises(CompileError):
        cache.obtain(fakes.source("a\nFAIL\n"))
    listed = cache.entries()
    assert [listing.modified for listing in listed] == [3, 2, 1]
    assert all(listing.bytes > len("void f();\n") for listing in listed)
    assert cache.clear() == 4
    assert cache.entries() == []
    assert {path.name for path in cache_dir.iterdir()} == {"tmp", "locks", "failed", "CACHEDIR.TAG"}
    assert not list((cache_dir / "failed").iterdir())
    cache.obtain(fakes.source("1\n"))
    assert compiler.runs == 5


def test_a_directory_with_other_files_is_left_alone(cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o700)
    (cache_dir / "thesis.tex").touch()
    for use in (cache.clear, cache.entries, lambda: cache.obtain(fakes.source())):
        with pytest.raises(CacheError, match=r"holds files and no CACHEDIR.TAG.*a directory that is empty"):
            use()
    assert [path.name for path in cache_dir.iterdir()] == ["thesis.tex"]


def test_another_process_publishing_first_wins(
    compiler: fakes.Compiler, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the lock had not worked: the winner publishes while we compile."""
    source = fakes.source()
    real = cache._compile

    def slow(*arguments: object) -> None:
        monkeypatch.setattr(cache, "_compile", real)
        monkeypatch.setattr(locks, "LOCK_SECONDS", 0.05)
        winner.append(cache.obtain(source))
        real(*arguments)  # type: ignore[arg-type]

    winner: list[cache.Entry] = []
    monkeypatch.setattr(cache, "_compile", slow)
    inode_of_ours = cache.obtain(source).path.stat().st_ino
    assert inode_of_ours == winner[0].path.stat().st_ino
    assert compiler.runs == 2
    assert not list((cache_dir / "tmp").iterdir())


def test_a_lock_that_is_held_only_delays(
    compiler: fakes.Compiler,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = cache.obtain(fakes.source()).directory.name
    cache.clear()
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    with caplog.at_level(logging.INFO), (cache_dir / "locks" / f"{name}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache.obtain(fakes.source()).binary == b"void f();\n"
    assert "without its lock" in caplog.text


@pytest.mark.nvcc
def test_a_cubin_is_cached(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fakes.source(fakes.CUDA, Arch.SM80)
    entry = cache.obtain(source)
    forbid_programs(monkeypatch)
    assert cache.obtain(source) == entry
    assert entry.meta["resources"]["attnforge_plain"]["shared_bytes"] == 1024
    assert entry.path.name == "kernel.cubin"


def test_a_root_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNFORGE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"file/cache.*Not a directory.*set ATTNFORGE_CACHE_DIR"):
        cache.obtain(fakes.source())
