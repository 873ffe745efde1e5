"""CUDA modules of helper kernels, which make masks and add sinks: one for each architecture, without tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from attnforge.codegen.render import render_text
from attnforge.codegen.spec import Arch, DType


@dataclass(frozen=True)
class Module:
    """Rendered text of a module for one architecture. To the cache it is what `render.Source` is."""

    name: str
    arch: Arch
    text: str
    symbols: tuple[str, ...]
    suffix: str = ".cu"

    @property
    def slug(self) -> str:
        return f"{self.name}_{self.arch.value}"

    def describe(self) -> dict[str, Any]:
        """What meta.json of the cache entry says of it."""
        return {self.name: self.arch.value}


@cache
def mask_kernels(arch: Arch) -> Module:
    """The kernels that make the data of masks on a GPU."""
    symbols = ("attnforge_mask_of_documents", "attnforge_mask_of_pairs")
    return Module("masks", arch, render_text("common/masks.cu.jinja"), symbols)


@cache
def sink_kernels(arch: Arch, dtype: DType) -> Module:
    """The kernels that add sinks to the results of attention on a GPU; see runtime/sinks.py."""
    text = render_text("common/sinks.cu.jinja", dtype=dtype.value)
    symbols = ("attnforge_sinks_forward", "attnforge_sinks_backward")
    return Module(f"sinks_{dtype.value}", arch, text, symbols)
