"""On-disk cache of compiled kernels: one directory per (source, compiler, flags, ABI).

    <root>/<slug>-<key>/kernel.cu | kernel.cpp    what was compiled
                        kernel.cubin | kernel.so  what runs
                        meta.json                 spec, symbol, command, resources, digest of the binary
                        build.log                 what the compiler printed

Data only: JSON and machine code, never pickle. How entries are published is in runtime/build/store.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnforge.codegen import params
from attnforge.codegen.render import Compilable
from attnforge.runtime.build import store
from attnforge.runtime.build.compilation import RELEASE, Toolchain
from attnforge.runtime.build.errors import NoCompilerError
from attnforge.runtime.build.locks import LOCKS
from attnforge.runtime.build.notice import announce
from attnforge.runtime.build.private import TAG, BadEntry, folder, read, root
from attnforge.runtime.build.settings import settings
from attnforge.runtime.build.toolchain import toolchain

log = logging.getLogger("attnforge")

SCHEMA = 1  # of meta.json; raised when its meaning changes
META, MANIFEST = "meta.json", "manifest.json"


@dataclass(frozen=True)
class Entry:
    """A compiled kernel whose bytes were checked against the digest of its build.

    `binary` are the checked bytes, `path` the file they were read from, `meta` the content of meta.json.
    """

    directory: Path
    binary: bytes
    path: Path
    meta: dict[str, Any]

    @contextlib.contextmanager
    def library(self) -> Iterator[str]:
        """A path to dlopen (CPU kernels) within the `with` block: exactly the checked bytes.

        They are copied into a sealed memory file, so neither a change of the file after its check nor a
        cache on a noexec mount matters. The loader remembers libraries by path, and descriptor numbers are
        reused, so each call spells its path differently.
        """
        fd = os.memfd_create(self.directory.name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(self.binary)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            unique = f"{next(_spellings):b}".replace("0", "/").replace("1", "./")
            yield f"/proc/self/fd/{unique}{fd}"
        finally:
            os.close(fd)


_spellings = itertools.count(1)


@dataclass(frozen=True)
class Listing:
    """One line of `cache list`: an entry whose binary was not read. `bytes` is its size on disk."""

    directory: Path
    meta: dict[str, Any]
    bytes: int
    modified: float  # seconds since the epoch


def key(source: Compilable, compiler: Toolchain) -> str:
    """Hex digest of everything that decides the binary: text, compiler, flags, launch protocol."""
    return _digest(source.text, compiler.identity, compiler.flags)


def _digest(text: str, identity: str, flags: Iterable[str]) -> str:
    return digest_of((text, identity, *flags, str(params.ABI)))


def digest_of(parts: Iterable[str]) -> str:
    """Hex digest of a sequence of texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        # Length first: ("ab", "c") and ("a", "bc") must differ.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _name(source: Compilable, digest: str) -> str:
    return f"{source.slug[:96]}-{digest[:16]}"


def obtain(source: Compilable) -> Entry:
    """The compiled kernel of `source`: from disk, or compiled now and published.

    If nothing can be compiled (no compiler, or ATTNFORGE_NO_JIT=1), a kernel that another compiler made from the same
    text is accepted, too: see `ready_made`.
    Raises CompileError, NoCompilerError (also when ATTNFORGE_NO_JIT=1 and it is not on disk) or CacheError.
    """
    try:
        compiler = toolchain(source.arch)
    except NoCompilerError:
        if (entry := ready_made(source)) is not None:
            return entry
        raise
    digest = key(source, compiler)
    if not settings().jit:
        with contextlib.suppress(BadEntry):
            return store.look(_name(source, digest), lambda path: _read(path, digest))
        if (entry := ready_made(source)) is not None:
            return entry

    def build(directory: Path) -> None:
        _compile(source, compiler, digest, directory)

    return store.publish(_name(source, digest), build, lambda path: _read(path, digest))


def ready_made(source: Compilable) -> Entry | None:
    """The kernel of exactly this text for exactly this GPU architecture or CPU, of any compiler: of the newest one.

    The key of an entry must follow from our text and launch protocol and from the entry's own compiler and flags. Then
    only the compiler differs, and the code runs on its architecture. Code for a CPU must come from a machine with the
    same processor and C library.
    """
    found = []
    for path in sorted(root().glob(f"{source.slug[:96]}-*")):
        with contextlib.suppress(BadEntry):
            found.append(store.look(path.name, functools.partial(_read_ready_made, source)))
    if not found:
        return None
    entry = max(found, key=lambda entry: _release(entry.meta["identity"]))
    log.debug("%s: taking the one that %s made", source.slug, entry.meta["identity"].splitlines()[-1])
    return entry


def _read_ready_made(source: Compilable, directory: Path) -> Entry:
    meta = _meta(directory)
    identity, flags = meta.get("identity"), meta.get("flags")
    if (
        not isinstance(identity, str)
        or not isinstance(flags, list)
        or not all(isinstance(f, str) for f in flags)
    ):
        raise BadEntry(f"{META}: field identity or flags is wrong")
    digest = _digest(source.text, identity, flags)
    if directory.name != _name(source, digest):
        raise BadEntry(f"{META}: is of another source text or version of the launcher")
    if not source.arch.is_gpu and meta.get("machine") != machine():
        raise BadEntry(f"{META}: is of another processor or C library")
    if source.arch.is_gpu and not any(flag.endswith(f"={source.arch.nvcc_name}") for flag in flags):
        raise BadEntry(f"{META}: is not for {source.arch.nvcc_name}")
    return _read(directory, digest)


def _release(identity: str) -> tuple[int, ...]:
    match = RELEASE.search(identity)
    return tuple(map(int, match.groups())) if match else ()


@functools.cache
def machine() -> str:
    """Digest of what `-march=native` depends on, found without a compiler: the processor; and of the C library."""
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    parts = [line for line in lines if line.partition(":")[0].strip() in fields]
    return hashlib.sha256("\n".join([*parts, os.confstr("CS_GNU_LIBC_VERSION") or ""]).encode()).hexdigest()


def _compile(source: Compilable, compiler: Toolchain, digest: str, directory: Path) -> None:
    log.debug("compiling %s with %s", source.slug, compiler.name)
    announce(
        "compiling",
        f"compiling kernels with {compiler.name}, seconds each; they are kept in {settings().cache_dir}",
    )
    built = compiler.compile(source, directory)
    binary = (directory / built.binary_name).read_bytes()
    meta = {
        "schema": SCHEMA,
        "key": digest,
        "slug": source.slug,
        "spec": source.describe(),
        "symbols": list(source.symbols),
        "compiler": compiler.name,
        "identity": compiler.identity,
        "flags": list(compiler.flags),
        "abi": params.ABI,
        "command": list(built.command),
        "seconds": round(built.seconds, 3),
        "resources": built.resources,
        "binary": built.binary_name,
        "sha256": hashlib.sha256(binary).hexdigest(),
    }
    if not source.arch.is_gpu:
        meta["machine"] = machine()
    (directory / "build.log").write_text(built.log)
    (directory / META).write_text(json.dumps(meta, indent=1) + "\n")


def _meta(directory: Path) -> dict[str, Any]:
    """Content of meta.json with the fields that reading an entry needs; BadEntry if it lacks them."""
    meta = _json(directory / META)
    if meta.get("schema") != SCHEMA:
        raise BadEntry(f"{META}: schema {meta.get('schema')!r}, expected {SCHEMA}")
    for name in ("key", "slug", "binary", "sha256", "compiler"):
        if not isinstance(meta.get(name), str):
            raise BadEntry(f"{META}: field {name} is missing")
    if not isinstance(meta.get("resources"), dict) or "/" in meta["binary"]:
        raise BadEntry(f"{META}: field resources or binary is wrong")
    return meta


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise BadEntry(f"{path.name}: {error}") from error
    if not isinstance(data, dict):
        raise BadEntry(f"{path.name}: not an object")
    return data


def _read(directory: Path, digest: str) -> Entry:
    meta = _meta(directory)
    if meta["key"] != digest:
        raise BadEntry(f"{META}: is of another kernel")
    path = directory / meta["binary"]
    binary = read(path)
    if hashlib.sha256(binary).hexdigest() != meta["sha256"]:
        raise BadEntry(f"{path.name}: digest differs from the one of its build")
    return Entry(directory, binary, path, meta)


# ---- Other directories of code


def publish_directory(key: str, build: Callable[[Path], None]) -> Path:
    """The directory `key` of the cache, filled by `build` if it is missing or any file of it has changed.

    For code that is loaded by path, such as the launcher extension. `key` must name everything that decides
    the content. The same guarantees and errors as `obtain`. `build` may also be killed at any time.
    """

    def build_with_manifest(directory: Path) -> None:
        build(directory)
        (directory / MANIFEST).write_text(json.dumps(_digests(directory), indent=1) + "\n")

    return store.publish(key, build_with_manifest, _check_manifest)


def _digests(directory: Path) -> dict[str, str]:
    """Digest of each regular file below `directory` except the manifest, by relative path."""
    files = sorted(path for path in directory.rglob("*") if stat.S_ISREG(path.lstat().st_mode))
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != MANIFEST
    }


def _check_manifest(directory: Path) -> Path:
    expected = _json(directory / MANIFEST)
    for name, digest in expected.items():
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise BadEntry(f"{MANIFEST}: {name!r} leaves the directory")
        if hashlib.sha256(read(directory / name)).hexdigest() != digest:
            raise BadEntry(f"{name}: digest differs from the one of its build")
    return directory


# ---- Listing and clearing


def entries() -> list[Listing]:
    """Compiled kernels on disk, newest first. Unreadable entries are left out; `obtain` rebuilds them."""
    found = []
    for directory in _published():
        with contextlib.suppress(BadEntry, FileNotFoundError):
            meta = _meta(directory)
            size = sum(path.lstat().st_size for path in directory.iterdir())
            found.append(Listing(directory, meta, size, directory.lstat().st_mtime))
    return sorted(found, key=lambda listing: listing.modified, reverse=True)


def clear() -> int:
    """Remove everything that was compiled; returns the number of directories. Kernels in use keep running."""
    removed = 0
    for directory in _published():
        store.discard(directory)
        removed += 1
    for path in folder(store.FAILED).iterdir():
        store.remove(path)
    return removed


def _published() -> list[Path]:
    reserved = (store.TMP, LOCKS, store.FAILED, TAG)
    return [path for path in root().iterdir() if path.name not in reserved]
