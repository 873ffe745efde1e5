"""`doctor`: what this machine has, what attnforge will use, and how to repair what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from attnforge.codegen import cpu_features
from attnforge.runtime.build import cache, store
from attnforge.runtime.build.errors import CacheError
from attnforge.runtime.build.settings import CACHE_DIR, NO_JIT, OURS, settings, unknown_variables
from attnforge.runtime.doctor.compilers import cuda_compiler, driver, host_compiler
from attnforge.runtime.doctor.findings import FAILURE, INFO, OK, WARNING, Finding, failed

LEAST_FREE = 1 << 30  # bytes; a search of a few hundred variants fills some 100 MB
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "fuse.sshfs", "9p")


def report() -> list[Finding]:
    """Run all checks: about a second and two tiny compiles. Writes to the cache only."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _gpus,
        driver,
        cuda_compiler,
        host_compiler,
        _processor,
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
        except Exception as error:  # a failed check must not hide the checks after it
            findings.append(failed(name, error))
    return list(dict.fromkeys(findings))  # a bad setting fails several checks, but is one finding


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
    status = OK if release >= (2, 11) else FAILURE
    yield Finding(
        "torch", status, f"{version}, built {built}", "" if status == OK else "install torch 2.11 or newer"
    )


def _gpus() -> Iterator[Finding]:
    import torch

    from attnforge.runtime import kernels

    if not torch.cuda.is_available():
        remedy = ""
        if Path("/dev/nvidia0").exists() and torch.version.cuda is None:
            remedy = "there is an NVIDIA GPU: install a CUDA build of torch to use it"
        yield Finding("GPU", WARNING if remedy else INFO, "torch sees none: kernels run on the CPU", remedy)
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
            yield Finding(f"GPU {index}", WARNING, f"{what}; not supported", str(error))


def _cache() -> Iterator[Finding]:
    path = settings().cache_dir
    try:
        store.publish_probe()
    except CacheError as error:
        yield failed("cache", error)
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
            "cache", WARNING, value, f"starts are slow from a network disk: set {CACHE_DIR} to a local one"
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


def _processor() -> Iterator[Finding]:
    refusal = cpu_features.amx_refusal()
    amx = f"Intel AMX: no ({refusal})" if refusal else "Intel AMX: yes"
    bf16 = "yes" if cpu_features.has_bf16() else "no"
    yield Finding("CPU", INFO, f"{cpu_features.lanes()} floats per vector; bf16 dot products: {bf16}; {amx}")


def _launcher() -> Iterator[Finding]:
    from attnforge.runtime.native import launcher

    name = launcher.entry_name()
    if shipped := launcher.prebuilt():
        yield Finding("launcher", OK, f"installed with the package ({shipped.name})")
    elif (settings().cache_dir / name).is_dir():
        yield Finding("launcher", OK, f"built ({name})")
    else:
        yield Finding("launcher", INFO, "not built yet: the first call builds it, in about half a minute")


def _tuned() -> Iterator[Finding]:
    import torch

    from attnforge.runtime import tables

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    for name in dict.fromkeys(tables.device_name(device) for device in devices):
        count = len(tables.known(name))
        if count:
            holding = [str(place) for place in tables.folders() if tables.load(name, place)]
            yield Finding(
                "tuned table",
                OK,
                f"{count} {'entry' if count == 1 else 'entries'} for {name} ({', '.join(holding)})",
            )
        else:
            remedy = "run `attnforge search` once to find the fastest kernels for this device"
            yield Finding("tuned table", WARNING, f"none for {name}: kernels are first guesses", remedy)


def _environment() -> Iterator[Finding]:
    for name in (*OURS, "CUDA_HOME", "CUDA_PATH", "CXX"):
        if name in os.environ:
            yield Finding(name, INFO, os.environ[name])
    for name, meant in unknown_variables().items():
        yield Finding(name, WARNING, "not a variable of attnforge", meant)
    if not settings().jit:
        yield Finding("compiling", INFO, f"forbidden by {NO_JIT}: only kernels in the cache run")
