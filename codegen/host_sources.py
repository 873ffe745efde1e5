"""C++ host sources, for the launcher and for exported packages: files of runtime/native, and what codegen writes."""

from __future__ import annotations

import re
from pathlib import Path

from attnforge.codegen import params, variant

DIRECTORY = Path(__file__).parent.parent / "runtime" / "native"
_WRITTEN = {"params.h": params.header, "variant_fields.h": variant.header}
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def sources(root: str) -> dict[str, str]:
    """Text of `root` and of all that it includes in quotes, directly or not, by name."""
    texts: dict[str, str] = {}
    names = [root]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = _WRITTEN[name]() if name in _WRITTEN else (DIRECTORY / name).read_text()
            names += _INCLUDE.findall(texts[name])
    return dict(sorted(texts.items()))
