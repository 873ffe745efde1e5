"""Which kernels in Triton there are for a step of a layer."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

from torch import Tensor


@cache
def triton_kernels(name: str) -> ModuleType | None:
    """The module `name` beside this one, whose kernels are in Triton; None where there is no Triton."""
    found = importlib.util.find_spec("triton") is not None
    return importlib.import_module(f"attnforge.bagel.mot.{name}") if found else None


def fit(*tensors: Tensor) -> bool:
    """Whether such kernels take the tensors; others take torch's."""
    return all(x.is_cuda and x.numel() and x.is_contiguous() and x.dtype.itemsize < 8 for x in tensors)
