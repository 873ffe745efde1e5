"""Kernel handles: render a spec, obtain its binary, load it, and pass the handle to the operators; once per device."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch

from attnforge.codegen.mask_kernels import mask_kernels
from attnforge.codegen.plan import Plan
from attnforge.codegen.render import render
from attnforge.codegen.spec import Arch, Direction, DType, Spec
from attnforge.runtime.build import cache
from attnforge.runtime.build.settings import settings
from attnforge.runtime.inputs import MASKS
from attnforge.runtime.native.launcher import launcher

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}

# Compute capability -> targets, the preferred one first. A cubin runs on later minor versions of its major.
ARCHS = {
    (8, 0): (Arch.SM80,),
    (8, 6): (Arch.SM86,),
    (8, 7): (Arch.SM86,),
    (8, 9): (Arch.SM89,),
    (9, 0): (Arch.SM90A, Arch.SM90),
    (12, 0): (Arch.SM120,),
    (12, 1): (Arch.SM120,),
}

# GPUs by name, for machines that have none.
NAMES = (
    (r"\bA100|\bA30\b|\bA800", (8, 0)),
    (r"\bA10G?\b|\bA40\b|\bA16\b|\bA2\b|RTX A\d|RTX 30\d\d", (8, 6)),
    (r"\bL4\b|\bL40|RTX 40\d\d|\bAda\b", (8, 9)),
    (r"\bG?H100|\bG?H200|\bH800|\bH20\b", (9, 0)),
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
        known = "H100, H200, A100, A10, L4, L40, RTX 3090, RTX 4090, RTX 5090 and their relatives"
        raise ValueError(f"--gpu: {name!r} is not a GPU known by name ({known}); give --arch instead")
    return ARCHS[found[0]]


def load(spec: Spec, device: torch.device) -> int:
    """Handle (> 0) of `spec` on `device`; compiles it if it is not in the cache. The same handle at every call.

    Raises Infeasible, CompileError, NoCompilerError or CacheError; ValueError for a spec of another target.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chaos = settings().chaos
    known = _handles.get((spec, device, chaos))
    if known is not None:
        return known
    arch = spec.problem.arch
    if arch not in targets(device):
        runs = " or ".join(item.value for item in targets(device))
        raise ValueError(f"spec: {spec.slug} is for {arch.value}, but {device} runs {runs}")
    launcher()
    source = render(spec, chaos)
    entry = cache.obtain(source)
    with _lock:
        # Another thread may have been faster; a second copy would only take memory.
        if (spec, device, chaos) not in _handles:
            with entry.library() as path:
                _handles[spec, device, chaos] = _register(source.plan, device, entry, path)
        return _handles[spec, device, chaos]


def _register(plan: Plan, device: torch.device, entry: cache.Entry, path: str | Path) -> int:
    problem, tuning = plan.spec.problem, plan.spec.tuning
    launches = (*plan.launches, *plan.schedule)
    handle = torch.ops.attnforge.add_variant(
        binary=_bytes(entry),
        path=str(path),
        name=plan.spec.slug,
        device=device,
        backward=problem.direction is Direction.BACKWARD,
        dtype=TORCH_DTYPES[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        mask=MASKS.index(problem.mask),
        align=problem.align,
        tile_m=tuning.tile_m,
        tile_n=tuning.tile_n,
        owner_n=plan.owner == "n",
        parts=plan.parts,
        statistics=plan.statistics,
        dq_accum=plan.dq_accum,
        dkv_accum=plan.dkv_accum,
        ordered=plan.ordered,
        columns=plan.columns or problem.head_dim,
        columns_v=plan.columns_v or problem.head_dim_v,
        bounds=plan.bounds,
        bits=plan.bits,
        schedule_kind=plan.schedule_kind,
        grouped=plan.grouped,
        deterministic=plan.deterministic,
        symbols=[launch.symbol for launch in launches],
        grids=["*".join(launch.grid) for launch in launches],
        threads=[launch.threads for launch in launches],
        shared_bytes=[launch.shared_bytes for launch in launches],
        persistent=[int(launch.persistent) for launch in launches],
        cluster=[launch.cluster for launch in launches],
        overlaps=[int(launch.overlaps) for launch in launches],
        launches=len(plan.launches),
        mapped=[item.tensor for item in plan.tensor_maps],
        boxes=[size for item in plan.tensor_maps for size in (item.columns, item.rows, item.panels)],
    )
    return int(handle)


def _bytes(entry: cache.Entry) -> torch.Tensor:
    return torch.frombuffer(bytearray(entry.binary), dtype=torch.uint8)


def load_mask_kernels(device: torch.device) -> None:
    """Called by mask_makers.h: compile and load the kernels that make mask data on a GPU. Errors as `load`."""
    entry = cache.obtain(mask_kernels(target(device)))
    torch.ops.attnforge.add_mask_kernels(_bytes(entry), device)
