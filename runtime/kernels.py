"""Kernel handles: render a spec, obtain its binary, load it, and pass the handle to the operators; once per device."""

from __future__ import annotations

import re
import threading

import torch

from attnforge.codegen import cpu_features
from attnforge.codegen.families.cpu import needs_amx
from attnforge.codegen.modules import mask_kernels
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, DType, Spec
from attnforge.codegen.variant import describe
from attnforge.runtime.build import cache
from attnforge.runtime.build.settings import settings
from attnforge.runtime.native.launcher import launcher

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}
DTYPES = {value: key for key, value in TORCH_DTYPES.items()}

# Compute capability -> targets, the preferred one first. A cubin runs on later minor versions of its major.
ARCHS = {
    (8, 0): (Arch.SM80,),
    (8, 6): (Arch.SM86,),
    (8, 7): (Arch.SM86,),
    (8, 9): (Arch.SM89,),
    (9, 0): (Arch.SM90A, Arch.SM90),
    (10, 0): (Arch.SM100,),
    (10, 3): (Arch.SM100,),
    (12, 0): (Arch.SM120,),
    (12, 1): (Arch.SM120,),
}

# GPUs by name, for machines that have none.
NAMES = (
    (r"\bA100|\bA30\b|\bA800", (8, 0)),
    (r"\bA10G?\b|\bA40\b|\bA16\b|\bA2\b|RTX A\d|RTX 30\d\d", (8, 6)),
    (r"\bL4\b|\bL40|RTX 40\d\d|\bAda\b", (8, 9)),
    (r"\bG?H100|\bG?H200|\bH800|\bH20\b", (9, 0)),
    (r"\bG?B[123]00\b", (10, 0)),
    (r"RTX 50\d\d|RTX PRO \d+ .*Blackwell", (12, 0)),
)

_handles: dict[tuple[Spec, torch.device, int], int] = {}  # by spec, device and seed of chaos
_lock = threading.Lock()


def target(device: torch.device) -> Arch:
    """The preferred compilation target of a device. Errors as `targets`."""
    return targets(device)[0]


def targets(device: torch.device) -> tuple[Arch, ...]:
    """Compilation targets that a device runs, best first. Raises ValueError for an unsupported device."""
    if device.type == "cpu":
        return (Arch.CPU,)
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"q: is on {device}, accepted are the CPU and CUDA GPUs of compute capability 8.0 or later"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHS:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        raise ValueError(
            f"q: is on {torch.cuda.get_device_name(device)} of compute capability "
            f"{capability[0]}.{capability[1]}, accepted are {known}"
        )
    return ARCHS[capability]


def targets_of(name: str) -> tuple[Arch, ...]:
    """Compilation targets of a GPU by its name, best first. Raises ValueError for an unknown name."""
    found = [capability for pattern, capability in NAMES if re.search(pattern, name, re.IGNORECASE)]
    if not found:
        known = "B200, H100, H200, A100, A10, L4, L40, RTX 3090, RTX 4090, RTX 5090 and their relatives"
        raise ValueError(
            f"--gpu: {name!r} is not a GPU known by name ({known}); give --arch instead if it is Ampere or newer"
        )
    return ARCHS[found[0]]


def refusal(spec: Spec) -> str:
    """Why this machine's CPU cannot run a spec for CPUs; empty if it can, and for GPUs."""
    return cpu_features.amx_refusal() if needs_amx(spec) else ""


def with_index(device: torch.device) -> torch.device:
    """The device, with the current GPU's index if it is `cuda` without one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def load(spec: Spec, device: torch.device) -> int:
    """Handle (> 0) of `spec` on `device`; compiles it if it is not in the cache. The same handle at every call.

    Raises Infeasible, CompileError, NoCompilerError or CacheError; ValueError for a spec that the device does not run.
    """
    device = with_index(device)
    chaos = settings().chaos
    known = _handles.get((spec, device, chaos))
    if known is not None:
        return known
    arch = spec.problem.arch
    if arch not in targets(device):
        runs = " or ".join(item.value for item in targets(device))
        raise ValueError(f"spec: {spec.slug} is for {arch.value}, but {device} runs {runs}")
    if reason := refusal(spec):
        raise ValueError(f"spec: {spec.slug} needs the tile registers of Intel AMX, but {reason}")
    launcher()
    source = render(spec, chaos)
    entry = cache.obtain(source)
    with _lock:
        # Another thread may have been faster; a second copy would only take memory.
        if (spec, device, chaos) not in _handles:
            with entry.library() as path:
                handle = torch.ops.attnforge.add_variant(
                    describe(source), device, binary_of(entry), str(path)
                )
                _handles[spec, device, chaos] = int(handle)
        return _handles[spec, device, chaos]


def spec_of(handle: int) -> Spec:
    """The spec of a handle that `load` returned."""
    return next(spec for (spec, _, _), known in _handles.items() if known == handle)


def binary_of(entry: cache.Entry) -> torch.Tensor:
    """The machine code of a kernel as the operators take it: uint8 (bytes)."""
    return torch.frombuffer(bytearray(entry.binary), dtype=torch.uint8)


def load_mask_kernels(device: torch.device) -> None:
    """Called by mask_makers.h: compile and load the kernels that make mask data on a GPU. Errors as `load`."""
    entry = cache.obtain(mask_kernels(target(device)))
    torch.ops.attnforge.add_mask_kernels(binary_of(entry), device)
