"""The CPU of this machine: which instructions its kernels may use."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path

log = logging.getLogger("attnforge")

# A process requests tile registers from Linux: documentation, "Using XSTATE features in user space applications".
SYS_ARCH_PRCTL = 158  # of x86-64
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


@cache
def flags() -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo; none where there is no such file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@cache
def lanes() -> int:
    """Float lanes of the widest vectors."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 4
    return 16 if "avx512f" in flags() else 8 if "avx2" in flags() or not flags() else 4


def has_bf16() -> bool:
    """Whether vectors of pairs of bf16 are multiplied in one instruction."""
    return "avx512_bf16" in flags()


@cache
def amx_refusal() -> str:
    """Why kernels cannot use the tile registers of Intel AMX; empty if they can.

    Requests the permission from Linux. It holds for all threads of this process and for its later children.
    """
    missing = {"amx_tile", "amx_bf16", "avx512_bf16"} - flags()
    if missing:
        return f"this CPU has no {', '.join(sorted(missing))}"
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    if libc.syscall(*map(ctypes.c_long, numbers)) == 0:
        return ""
    reason = f"Linux refuses tile registers ({os.strerror(ctypes.get_errno())})"
    log.debug("no kernels for Intel AMX: %s", reason)
    return reason
