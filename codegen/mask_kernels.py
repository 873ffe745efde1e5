"""The kernels that make the data of masks on a GPU: one small module per architecture, without any tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from attnforge.codegen.render import render_text
from attnforge.codegen.spec import Arch

TEMPLATE = "common/masks.cu.jinja"


@dataclass(frozen=True)
class MaskKernels:
    """Rendered text of the module for one architecture. To the cache it is what `render.Source` is."""

    arch: Arch
    text: str
    suffix: str = ".cu"
    symbols: tuple[str, ...] = ("attnforge_mask_of_documents", "attnforge_mask_of_pairs")

    @property
    def slug(self) -> str:
        return f"masks_{self.arch.value}"

    def describe(self) -> dict[str, Any]:
        """What meta.json of the cache entry says of it."""
        return {"masks": self.arch.value}


@cache
def mask_kernels(arch: Arch) -> MaskKernels:
    """The module for a GPU architecture."""
    return MaskKernels(arch, render_text(TEMPLATE))
