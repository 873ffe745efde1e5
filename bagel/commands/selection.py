"""What a command runs on: packs, heads, dtype, directions and device, with defaults by machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnforge.bagel.measure.cases import SUITES, make_case
from attnforge.codegen.families import FAMILIES
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import kernels
from attnforge.runtime.search.case import Case
from attnforge.runtime.tables import device_name


@dataclass(frozen=True)
class Selection:
    """A resolved choice; see `select`."""

    packs: tuple[str, ...]  # as given; none: a suite's
    model: str | None  # as given
    dtype: DType
    directions: tuple[Direction, ...]
    device: torch.device
    arch: Arch | None = None  # as given; none: the best for the direction

    def cases(self, suite: str = "search") -> list[Case]:
        """A case for each pack; what is not given is the suite's."""
        rows = SUITES[suite, self.device.type]
        heads = SUITES["search", self.device.type][0][1]
        rows = tuple((pack, heads) for pack in self.packs) or rows
        return [make_case(pack, self.model or heads, self.dtype, self.device) for pack, heads in rows]

    def target(self, direction: Direction) -> tuple[Arch, str]:
        """Architecture and device name, as the search wants them."""
        known = self._archs(direction)
        if self.arch is not None and self.arch not in known:
            names = ", ".join(arch.value for arch in known)
            raise ValueError(
                f"--arch: {self.arch.value} has no {direction.value} kernel here; there are {names}"
            )
        return self.arch or known[0], device_name(self.device)

    def targets(self, direction: Direction) -> list[tuple[Arch, str]]:
        """Those to search. In float32 all of them: none is the fastest everywhere, and dispatch takes the faster."""
        if self.arch is not None or self.dtype is not DType.FLOAT32:
            return [self.target(direction)]
        return [(arch, device_name(self.device)) for arch in self._archs(direction)]

    def _archs(self, direction: Direction) -> list[Arch]:
        """Architectures with a kernel family for the dtype, best first."""
        archs = kernels.targets(self.device)
        families = {arch: Problem(direction, arch, self.dtype, 64, Mask.FULL).family for arch in archs}
        return [arch for arch in archs if (families[arch], direction) in FAMILIES]


def select(
    packs: tuple[str, ...],
    model: str | None,
    dtype: str | None,
    direction: str,
    device: str | None,
    arch: str | None = None,
) -> Selection:
    """Fill in what is not given, by machine. Raises ValueError naming the option."""
    where = _device(device)
    # BAGEL's bfloat16, except on CPUs without instructions for it.
    slow = where.type == "cpu" and "bf16" not in device_name(where)
    return Selection(
        packs,
        model,
        DType(dtype or ("fp32" if slow else "bf16")),
        tuple(Direction) if direction == "both" else (Direction(direction),),
        where,
        None if arch is None else Arch(arch),
    )


def _device(text: str | None) -> torch.device:
    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: {text!r} is no device; accepted are cpu, cuda and cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: torch {torch.__version__} sees no GPU; `attnforge doctor` says more")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: there is no {device}, only {torch.cuda.device_count()} GPUs")
    return device
